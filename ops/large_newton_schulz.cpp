#include "large_newton_schulz.h"

#include "tensors.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <cmath>
#include <limits>
#include <vector>

namespace mmlaplace {

namespace {

Tensor where(const Tensor& condition, const Tensor& tensor) {
  return at::where(condition, tensor, at::zeros({}, tensor.options()));
}

class LargeNewtonSchulz {
 public:
  LargeNewtonSchulz(
      const Tensor& matrices, int64_t num_iters, double eps, bool symmetric,
      bool keep)
      : symmetric_(symmetric) {
    const bool single = matrices.scalar_type() == at::kFloat;
    const double tiny = single ? std::numeric_limits<float>::min()
                               : std::numeric_limits<double>::min();
    limit_ = single ? std::numeric_limits<float>::max()
                    : std::numeric_limits<double>::max();
    const double precise =
        std::sqrt(single ? std::numeric_limits<float>::epsilon()
                         : std::numeric_limits<double>::epsilon());
    const int64_t size = matrices.size(-1);
    const Tensor identity = at::eye(size, matrices.options());

    matrix_ = matrices + eps * identity;
    largest_ = matrix_.abs().amax({-2, -1}, true).clamp_min(tiny);
    matrix_ = matrix_ / largest_;
    if (symmetric) {
      matrix_ = (matrix_ + matrix_.mT()) / 2;
    }
    norm_ = at::linalg_vector_norm(
        matrix_, 2, at::IntArrayRef({-2, -1}), true).clamp_min(tiny);
    matrix_ = matrix_ / norm_;

    inverse_ = symmetric ? identity.expand_as(matrix_) : matrix_.mT();
    Tensor active = at::ones_like(largest_, at::kBool);
    Tensor last_residual =
        at::full_like(largest_, std::numeric_limits<double>::infinity());
    for (int64_t step = 0; step < num_iters; ++step) {
      const Tensor error = identity - at::matmul(matrix_, inverse_);
      const Tensor residual = error.abs().amax({-2, -1}, true);
      active = active & (residual <= 1.1 * last_residual);
      if (keep) {
        steps_.push_back({inverse_, error, active});
      }
      inverse_ = inverse_ + where(active, at::matmul(inverse_, error));
      last_residual = residual;
      active = active & (size * residual > precise);
    }
  }

  Tensor result() const {
    return (inverse_ / norm_ / largest_).clamp(-limit_, limit_);
  }

  Tensor backward(const Tensor& result_grad) const {
    const Tensor inside = (inverse_ / norm_ / largest_).abs() <= limit_;
    Tensor grad = where(inside, result_grad) / norm_ / largest_;
    Tensor norm_grad =
        -(grad * inverse_).sum({-2, -1}, true) / norm_;
    Tensor matrix_grad = at::zeros_like(matrix_);
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
      const Tensor active_grad = where(step->active, grad);
      const Tensor error_grad =
          at::matmul(step->inverse.mT(), active_grad);
      matrix_grad =
          matrix_grad - at::matmul(error_grad, step->inverse.mT());
      grad = grad + at::matmul(active_grad, step->error.mT()) -
          at::matmul(matrix_.mT(), error_grad);
    }
    if (!symmetric_) {
      matrix_grad = matrix_grad + grad.mT();
    }
    norm_grad = norm_grad -
        (matrix_grad * matrix_).sum({-2, -1}, true) / norm_;
    norm_grad = where(norm_ >= 1, norm_grad);
    const Tensor total =
        (matrix_grad / norm_ + norm_grad * matrix_) / largest_;
    return symmetric_ ? (total + total.mT()) / 2 : total;
  }

 private:
  struct Step {
    Tensor inverse, error, active;
  };

  bool symmetric_;
  double limit_;
  Tensor matrix_, largest_, norm_, inverse_;
  std::vector<Step> steps_;
};

}  // namespace

Tensor invert_large(
    const Tensor& matrix, int64_t num_iters, double eps,
    bool positive_definite) {
  const at::NoTF32Guard full_precision;
  return LargeNewtonSchulz(
             matrix.to(compute_type(matrix)), num_iters, eps,
             positive_definite, false)
      .result()
      .to(matrix.scalar_type());
}

Tensor invert_large_backward(
    const Tensor& grad, const Tensor& matrix, int64_t num_iters, double eps,
    bool positive_definite) {
  const at::NoTF32Guard full_precision;
  const auto type = compute_type(matrix);
  return LargeNewtonSchulz(
             matrix.to(type), num_iters, eps, positive_definite, true)
      .backward(grad.to(type))
      .to(matrix.scalar_type());
}

}  // namespace mmlaplace
