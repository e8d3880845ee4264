// Every operator of the library `mmlaplace` is declared here, once. Kernels
// are registered by the files in cpu/ and cuda/; shape inference, autograd and
// the checks of arguments are in Python, in mmlaplace/ops.
//
// Tensors of one call share their dtype (float16, bfloat16, float32 or
// float64) and device, and have equal leading dimensions.
#include <Python.h>
#include <torch/library.h>

#include <ATen/Version.h>

// mmlaplace/ops/build.py reads this from the file before it loads it.
extern "C" {
extern const char mmlaplace_build_tag[] =
    "mmlaplace build tag: " MMLAPLACE_BUILD_TAG;
}

TORCH_LIBRARY(mmlaplace, m) {
  // The instruction set that the CPU kernels use: that of torch itself, so
  // ATEN_CPU_CAPABILITY holds for both.
  m.def("cpu_capability() -> str", [] { return at::get_cpu_capability(); });

  // The table is in the dtype that is computed in, which the result has.
  m.def(
      "rotary_embedding(Tensor tokens, Tensor table, bool inverse) -> Tensor");

  m.def(
      "laplacian_kernel(Tensor queries, Tensor keys, float scale) -> Tensor");
  m.def(
      "laplacian_kernel_backward(Tensor grad, Tensor queries, Tensor keys, "
      "Tensor result, float scale) -> (Tensor query_grad, Tensor key_grad)");

  m.def(
      "newton_schulz_inverse(Tensor matrix, int num_iters, float eps, "
      "bool positive_definite) -> Tensor");
  m.def(
      "newton_schulz_inverse_backward(Tensor grad, Tensor matrix, "
      "int num_iters, float eps, bool positive_definite) -> Tensor");

  // Beside its result it returns what the backward operator needs: the
  // whitening scales of the keys, the inverse, and the moments, in float64,
  // of the kernel over the queries and of the weighted values over the keys.
  m.def(
      "laplacian_attention(Tensor queries, Tensor keys, Tensor values, "
      "Tensor landmarks, Tensor gain, float scale, str whitening, "
      "int num_iters, float eps) -> (Tensor output, Tensor key_scales, "
      "Tensor inverse, Tensor query_moments, Tensor key_moments)");
  m.def(
      "laplacian_attention_backward(Tensor grad, Tensor queries, "
      "Tensor keys, Tensor values, Tensor landmarks, Tensor gain, "
      "Tensor key_scales, Tensor inverse, Tensor query_moments, "
      "Tensor key_moments, float scale, str whitening, int num_iters, "
      "float eps) -> (Tensor query_grad, Tensor key_grad, "
      "Tensor value_grad, Tensor landmark_grad, Tensor gain_grad)");

  // That whose landmarks are the keys, for which the kernel is exact. The mean
  // is that of each key's kernel over the queries.
  m.def(
      "exact_laplacian_attention(Tensor queries, Tensor keys, Tensor values, "
      "Tensor gain, float scale, str whitening, float eps) -> "
      "(Tensor output, Tensor key_scales, Tensor kernel_mean)");
  m.def(
      "exact_laplacian_attention_backward(Tensor grad, Tensor queries, "
      "Tensor keys, Tensor values, Tensor gain, Tensor key_scales, "
      "Tensor kernel_mean, float scale, str whitening, float eps) -> "
      "(Tensor query_grad, Tensor key_grad, Tensor value_grad, "
      "Tensor gain_grad)");
}

// Only so that Python's import finds a module in this file.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C"};
  return PyModule_Create(&module);
}
