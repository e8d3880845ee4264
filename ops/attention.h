// What the attention operators of all devices do to tensors before and after
// their kernels.
#pragma once

#include "tensors.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <c10/util/string_view.h>

namespace mmlaplace {

// The results of attention, (..., N, e), in memory that holds the last of the
// leading dimensions, the heads, within each token: they are then concatenated
// without a copy.
inline Tensor empty_outputs(const Tensor& queries, int64_t value_dims) {
  std::vector<int64_t> sizes =
      matrix_sizes(queries, queries.size(-2), value_dims);
  if (sizes.size() == 2) {
    return at::empty(sizes, queries.options());
  }
  std::swap(sizes[sizes.size() - 3], sizes[sizes.size() - 2]);
  return at::empty(sizes, queries.options()).transpose(-3, -2);
}

// The factor of the kernel sum, g / M, for each batch index, in float64.
inline Tensor sum_factors(
    const Tensor& gain, c10::string_view whitening, int64_t num_keys) {
  const Tensor flat = gain.to(at::kDouble).reshape({gain.numel()});
  return whitening == "literal" ? at::ones_like(flat) : flat / num_keys;
}

// A tensor that has one dimension in place of the leading ones of another.
inline Tensor unflatten(const Tensor& tensor, const Tensor& like) {
  std::vector<int64_t> sizes =
      like.sizes().slice(0, like.dim() - 2).vec();
  sizes.insert(
      sizes.end(), tensor.sizes().begin() + 1, tensor.sizes().end());
  return tensor.view(sizes);
}

// What a backward operator was handed by its forward, in the latter's form.
inline Tensor as_returned(
    const Tensor& tensor, at::ScalarType type, at::IntArrayRef sizes) {
  TORCH_CHECK(
      tensor.scalar_type() == type,
      "a backward operator needs what the forward operator returned, in ",
      type, ", got ", tensor.scalar_type());
  return tensor.reshape(sizes).contiguous();
}

}  // namespace mmlaplace
