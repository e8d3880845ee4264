// What the operators of all devices ask of tensors.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <vector>

namespace mmlaplace {

using at::Tensor;

// Torch's operators, called from within ours, are neither recorded for
// autograd nor cast by autocast.
struct BelowDispatch {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

// The dtype that is computed in: float32 for half precision.
inline at::ScalarType compute_type(const Tensor& tensor) {
  return at::toOpMathType(tensor.scalar_type());
}

// The number of matrices in a tensor.
inline int64_t batch_size(const Tensor& tensor) {
  return c10::multiply_integers(
      tensor.sizes().slice(0, tensor.dim() - 2));
}

// Sizes of a tensor with others in place of the last two.
inline std::vector<int64_t> matrix_sizes(
    const Tensor& like, int64_t rows, int64_t columns) {
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes[sizes.size() - 2] = rows;
  sizes[sizes.size() - 1] = columns;
  return sizes;
}

}  // namespace mmlaplace
