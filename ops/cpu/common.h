// What the CPU operators share outside of their inner loops.
#pragma once

#include "tensors.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <memory>

namespace mmlaplace {

// A tensor (..., rows, columns) as a batch of matrices whose rows are dense.
// Any layout is taken as it is but one with strided rows, which is copied.
template <typename T>
class Matrices {
 public:
  explicit Matrices(const Tensor& tensor)
      : tensor_(tensor.to(c10::CppTypeToScalarType<T>::value)) {
    if (tensor_.stride(-1) != 1 && tensor_.size(-1) > 1) {
      tensor_ = tensor_.contiguous();
    }
    data_ = tensor_.template data_ptr<T>();
  }

  int64_t rows() const {
    return tensor_.size(-2);
  }
  int64_t columns() const {
    return tensor_.size(-1);
  }
  // Elements from one row to the next.
  int64_t stride() const {
    return tensor_.stride(-2);
  }

  T* row(int64_t batch, int64_t index) const {
    return (*this)[batch] + index * stride();
  }

  T* operator[](int64_t batch) const {
    T* matrix = data_;
    for (int64_t dim = tensor_.dim() - 3; dim >= 0; --dim) {
      matrix += batch % tensor_.size(dim) * tensor_.stride(dim);
      batch /= tensor_.size(dim);
    }
    return matrix;
  }

 private:
  Tensor tensor_;
  T* data_;
};

// Uninitialized memory for tiles, of one thread, aligned to cache lines.
template <typename T>
class Scratch {
 public:
  T* allocate(int64_t rows, int64_t stride) {
    blocks_.push_back(at::getCPUAllocator()->allocate(
        std::max<int64_t>(rows * stride, 1) * sizeof(T)));
    return static_cast<T*>(blocks_.back().get());
  }

 private:
  std::vector<c10::DataPtr> blocks_;
};

}  // namespace mmlaplace
