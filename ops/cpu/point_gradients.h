// From the gradient of distances to that of the points, tile by tile.
// Included after each_instruction_set.h.
#pragma once

#include "cpu/common.h"

namespace mmlaplace {

template <typename T>
class PointGradients {
 public:
  PointGradients(int64_t max_rows, int64_t dims)
      : dims_(dims),
        points_(scratch_.allocate(max_rows, padded(dims))),
        grads_(scratch_.allocate(max_rows, padded(dims))) {}

  // See kernel_backward_tile. The rows of the keys and their gradient are
  // padded with zeros, those of point_grad are dense.
  void operator()(
      const T* weights, int64_t weight_stride, const T* points,
      int64_t point_stride, const T* keys, T* point_grad, T* key_grad,
      int64_t rows, int64_t columns) const {
    const int64_t stride = padded(dims_);
    // Whole vectors may be read and written where they end with the row.
    if (dims_ % 16 == 0) {
      MMLAPLACE_SELECT(kernel_backward_tile<T>)(
          weights, weight_stride, points, point_stride, keys, stride,
          point_grad, dims_, key_grad, rows, columns, dims_);
      return;
    }
    MMLAPLACE_SELECT(pad_rows<T>)(
        points, point_stride, points_, stride, rows, dims_);
    MMLAPLACE_SELECT(kernel_backward_tile<T>)(
        weights, weight_stride, points_, stride, keys, stride, grads_, stride,
        key_grad, rows, columns, dims_);
    MMLAPLACE_SELECT(copy_rows<T>)(
        grads_, stride, point_grad, dims_, rows, dims_);
  }

 private:
  int64_t dims_;
  Scratch<T> scratch_;
  T* points_;
  T* grads_;
};

}  // namespace mmlaplace
