// What the CPU operators share outside of their inner loops.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <memory>

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
