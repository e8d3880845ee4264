// What every operator requires of its tensors. The entry points in Python
// check more and say it better; these hold for who calls an operator itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <initializer_list>

namespace mmlaplace {

// One floating dtype and device, and equal leading dimensions.
inline void check_alike(
    const char* op, std::initializer_list<at::Tensor> tensors) {
  const at::Tensor& first = *tensors.begin();
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(
        tensor.is_floating_point() && tensor.dim() >= 2, op,
        " takes floating tensors of 2 or more dimensions, got ",
        tensor.scalar_type(), " of shape ", tensor.sizes());
    TORCH_CHECK(
        tensor.scalar_type() == first.scalar_type() &&
            tensor.device() == first.device(),
        op, " takes tensors of one dtype and device, got ",
        first.scalar_type(), " on ", first.device(), " and ",
        tensor.scalar_type(), " on ", tensor.device());
    TORCH_CHECK(
        tensor.sizes().slice(0, tensor.dim() - 2) ==
            first.sizes().slice(0, first.dim() - 2),
        op, " takes tensors of equal leading dimensions, got shapes ",
        first.sizes(), " and ", tensor.sizes());
  }
}

inline void check_size(
    const char* op, const at::Tensor& tensor, int64_t dim, int64_t size) {
  TORCH_CHECK(
      tensor.size(dim) == size, op, " needs size ", size, " in dimension ",
      dim, ", got shape ", tensor.sizes());
}

inline void check_rotary_embedding(
    const at::Tensor& tokens, const at::Tensor& table) {
  TORCH_CHECK(
      tokens.is_floating_point() && tokens.dim() >= 3, "rotary_embedding ",
      "takes floating tokens of 3 or more dimensions, got ",
      tokens.scalar_type(), " of shape ", tokens.sizes());
  TORCH_CHECK(
      table.dim() == 3 && table.size(0) == 2 &&
          table.size(1) == tokens.size(-3) &&
          2 * table.size(2) == tokens.size(-1),
      "rotary_embedding needs a table (2, tokens, channels / 2), got shape ",
      table.sizes(), " for tokens of shape ", tokens.sizes());
}

inline void check_laplacian_kernel(
    const at::Tensor& queries, const at::Tensor& keys) {
  check_alike("laplacian_kernel", {queries, keys});
  check_size("laplacian_kernel", keys, -1, queries.size(-1));
}

inline void check_laplacian_kernel_backward(
    const at::Tensor& grad, const at::Tensor& queries, const at::Tensor& keys,
    const at::Tensor& result) {
  check_alike("laplacian_kernel_backward", {queries, keys, grad, result});
  check_size("laplacian_kernel_backward", keys, -1, queries.size(-1));
  for (const at::Tensor& matrix : {grad, result}) {
    check_size("laplacian_kernel_backward", matrix, -2, queries.size(-2));
    check_size("laplacian_kernel_backward", matrix, -1, keys.size(-2));
  }
}

inline void check_newton_schulz_inverse(const at::Tensor& matrix) {
  check_alike("newton_schulz_inverse", {matrix});
  check_size("newton_schulz_inverse", matrix, -1, matrix.size(-2));
}

inline void check_newton_schulz_inverse_backward(
    const at::Tensor& grad, const at::Tensor& matrix) {
  check_alike("newton_schulz_inverse_backward", {matrix, grad});
  for (const at::Tensor& tensor : {matrix, grad}) {
    check_size("newton_schulz_inverse_backward", tensor, -2, matrix.size(-2));
    check_size("newton_schulz_inverse_backward", tensor, -1, matrix.size(-2));
  }
}

inline void check_laplacian_attention(
    const at::Tensor& queries, const at::Tensor& keys,
    const at::Tensor& values, const at::Tensor& landmarks,
    const at::Tensor& gain) {
  const char* const op = "laplacian_attention";
  check_alike(op, {queries, keys, values, landmarks});
  check_size(op, keys, -1, queries.size(-1));
  check_size(op, landmarks, -1, queries.size(-1));
  check_size(op, values, -2, keys.size(-2));
  TORCH_CHECK(
      keys.size(-2) > 0 && landmarks.size(-2) > 0, op,
      " needs a key and a landmark, got shapes ", keys.sizes(), " and ",
      landmarks.sizes());
  TORCH_CHECK(
      gain.sizes() == queries.sizes().slice(0, queries.dim() - 2), op,
      " needs a gain for each matrix, got shapes ", gain.sizes(), " and ",
      queries.sizes());
}

// What the backward operators take beside that.
inline void check_laplacian_attention_grad(
    const at::Tensor& grad, const at::Tensor& queries,
    const at::Tensor& values) {
  check_alike("laplacian_attention_backward", {queries, grad});
  check_size("laplacian_attention_backward", grad, -2, queries.size(-2));
  check_size("laplacian_attention_backward", grad, -1, values.size(-1));
}

}  // namespace mmlaplace
