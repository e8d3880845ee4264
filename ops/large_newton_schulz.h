// The Newton-Schulz iteration on matrices that leave the fast memory of a
// device, by torch's operators. The schemas in library.cpp say what it takes.
#pragma once

#include <ATen/core/Tensor.h>

namespace mmlaplace {

at::Tensor invert_large(
    const at::Tensor& matrix, int64_t num_iters, double eps,
    bool positive_definite);

at::Tensor invert_large_backward(
    const at::Tensor& grad, const at::Tensor& matrix, int64_t num_iters,
    double eps, bool positive_definite);

}  // namespace mmlaplace
