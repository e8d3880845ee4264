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

}  // namespace mmlaplace
