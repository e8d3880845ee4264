// The inverse by the Newton-Schulz iteration and its gradient.
#define MMLAPLACE_KERNELS "cpu/newton_schulz_tiles.h"
#include <cmath>

#include "cpu/each_instruction_set.h"

#include "checks.h"
#include "cpu/common.h"
#include "cpu/operators.h"
#include "large_newton_schulz.h"

namespace mmlaplace {

namespace {

// Larger matrices leave the cache; there torch's own product is as fast, and
// shares one matrix among the threads.
constexpr int64_t kLargest = 256;

template <typename T>
void invert_each(
    const Tensor& matrices, int64_t num_iters, double eps, bool symmetric,
    const Tensor& result) {
  const Matrices<T> a(matrices), out(result);
  const int64_t size = a.rows();
  const auto invert = MMLAPLACE_SELECT(invert<T>);
  at::parallel_for(
      0, batch_size(matrices), 1, [&](int64_t begin, int64_t end) {
        Scratch<T> scratch;
        T* const memory = scratch.allocate(5 * size, padded(size));
        for (int64_t batch = begin; batch < end; ++batch) {
          invert(a[batch], a.stride(), size, symmetric, num_iters, eps,
                 memory, out[batch]);
        }
      });
}

template <typename T>
void invert_each_backward(
    const Tensor& grad, const Tensor& matrices, int64_t num_iters, double eps,
    bool symmetric, const Tensor& result) {
  const Matrices<T> g(grad), a(matrices), out(result);
  const int64_t size = a.rows();
  const auto invert_backward = MMLAPLACE_SELECT(invert_backward<T>);
  at::parallel_for(
      0, batch_size(matrices), 1, [&](int64_t begin, int64_t end) {
        Scratch<T> scratch;
        T* const memory =
            scratch.allocate((2 * num_iters + 8) * size, padded(size));
        for (int64_t batch = begin; batch < end; ++batch) {
          invert_backward(g[batch], g.stride(), a[batch], a.stride(), size,
                          symmetric, num_iters, eps, memory, out[batch]);
        }
      });
}

}  // namespace

Tensor newton_schulz_inverse(
    const Tensor& matrix, int64_t num_iters, double eps,
    bool positive_definite) {
  check_newton_schulz_inverse(matrix);
  const BelowDispatch guard;
  const auto type = compute_type(matrix);
  if (matrix.size(-1) > kLargest) {
    return invert_large(matrix, num_iters, eps, positive_definite);
  }
  const Tensor result =
      at::empty(matrix.sizes(), matrix.options().dtype(type));
  if (result.numel() > 0) {
    AT_DISPATCH_FLOATING_TYPES(type, "newton_schulz_inverse", [&] {
      invert_each<scalar_t>(
          matrix, num_iters, eps, positive_definite, result);
    });
  }
  return result.to(matrix.scalar_type());
}

Tensor newton_schulz_inverse_backward(
    const Tensor& grad, const Tensor& matrix, int64_t num_iters, double eps,
    bool positive_definite) {
  check_newton_schulz_inverse_backward(grad, matrix);
  const BelowDispatch guard;
  const auto type = compute_type(matrix);
  if (matrix.size(-1) > kLargest) {
    return invert_large_backward(
        grad, matrix, num_iters, eps, positive_definite);
  }
  const Tensor result =
      at::empty(matrix.sizes(), matrix.options().dtype(type));
  if (result.numel() > 0) {
    AT_DISPATCH_FLOATING_TYPES(type, "newton_schulz_inverse_backward", [&] {
      invert_each_backward<scalar_t>(
          grad, matrix, num_iters, eps, positive_definite, result);
    });
  }
  return result.to(matrix.scalar_type());
}

TORCH_LIBRARY_IMPL(mmlaplace, CPU, m) {
  m.impl("newton_schulz_inverse", newton_schulz_inverse);
  m.impl("newton_schulz_inverse_backward", newton_schulz_inverse_backward);
}

}  // namespace mmlaplace
