// The CUDA operators as functions, for those that build on one another. The
// schemas in library.cpp say what they take.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace mmlaplace {

at::Tensor laplacian_kernel_cuda(
    const at::Tensor& queries, const at::Tensor& keys, double scale);

std::tuple<at::Tensor, at::Tensor> laplacian_kernel_backward_cuda(
    const at::Tensor& grad, const at::Tensor& queries, const at::Tensor& keys,
    const at::Tensor& result, double scale);

at::Tensor newton_schulz_inverse_cuda(
    const at::Tensor& matrix, int64_t num_iters, double eps,
    bool positive_definite);

at::Tensor newton_schulz_inverse_backward_cuda(
    const at::Tensor& grad, const at::Tensor& matrix, int64_t num_iters,
    double eps, bool positive_definite);

}  // namespace mmlaplace
