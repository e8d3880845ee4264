// What the CUDA operators share.
#pragma once

#include "cuda/device.cuh"
#include "tensors.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <type_traits>

// Runs a lambda with scalar_t, the dtype of the inputs.
#define MMLAPLACE_DISPATCH(TENSOR, NAME, ...)                            \
  AT_DISPATCH_FLOATING_TYPES_AND2(                                       \
      at::kHalf, at::kBFloat16, (TENSOR).scalar_type(), NAME, __VA_ARGS__)

namespace mmlaplace {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffff;

// What is computed in: float32 for half precision.
template <typename T>
using compute_t = at::opmath_type<T>;

template <typename T>
__host__ __device__ constexpr T ceil_div(T value, T divisor) {
  return (value + divisor - 1) / divisor;
}

template <typename T>
__host__ __device__ constexpr T round_up(T value, T divisor) {
  return ceil_div(value, divisor) * divisor;
}

// A batch of matrices with dense rows, as kernels see it.
template <typename T>
struct Matrices {
  T* data;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  // The batch index runs over two dimensions.
  int64_t inner_size;
  int64_t inner_stride;
  int64_t outer_stride;

  __host__ __device__ T* operator[](int64_t batch) const {
    return data + batch / inner_size * outer_stride +
        batch % inner_size * inner_stride;
  }
  __host__ __device__ T* row(int64_t batch, int64_t index) const {
    return (*this)[batch] + index * row_stride;
  }
};

// Views a tensor so that `matrices` can describe it: (outer, inner, rows,
// columns) with dense rows. It is copied where that takes more strides.
inline Tensor arrange(const Tensor& tensor) {
  Tensor result = tensor;
  if (tensor.stride(-1) != 1 && tensor.size(-1) > 1) {
    result = result.contiguous();
  }
  while (result.dim() < 4) {
    result = result.unsqueeze(0);
  }
  return result.flatten(0, -4);
}

// Of an arranged tensor, which has to outlive the launch.
template <typename T>
Matrices<T> matrices(const Tensor& tensor) {
  return {
      tensor.data_ptr<std::remove_const_t<T>>(),
      tensor.size(2),
      tensor.size(3),
      tensor.stride(2),
      tensor.size(1),
      tensor.stride(1),
      tensor.stride(0)};
}

// Hands out the block's shared memory. On the host, without memory, it counts
// how much a launch has to ask for.
class Arena {
 public:
  __host__ __device__ explicit Arena(char* memory = nullptr)
      : memory_(memory) {}

  template <typename T>
  __host__ __device__ T* take(int64_t count) {
    T* result = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += round_up<size_t>(count * sizeof(T), 16);
    return result;
  }
  __host__ __device__ size_t bytes() const {
    return bytes_;
  }

 private:
  char* memory_;
  size_t bytes_ = 0;
};

// 16 bytes that are read or written at once.
template <typename T>
struct alignas(16) Vector {
  static constexpr int kLanes = 16 / sizeof(T);
  T lanes[kLanes];
};

template <typename T>
__device__ __forceinline__ Vector<T> load_vector(const T* source) {
  return *reinterpret_cast<const Vector<T>*>(source);
}

template <typename T>
__device__ __forceinline__ void store_vector(
    T* target, const Vector<T>& value) {
  *reinterpret_cast<Vector<T>*>(target) = value;
}

// Where rows may be read by vectors: if all of them start aligned.
template <typename T>
__device__ __forceinline__ bool is_aligned(const T* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
      stride * sizeof(T) % 16 == 0;
}

// The sum over a warp, in all of its threads and to the same bits.
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, lanes);
  }
  return value;
}

// The larger number; NaN stays.
template <typename T>
__device__ __forceinline__ T larger(T left, T right) {
  return left > right || left != left ? left : right;
}

template <typename T>
__device__ __forceinline__ T warp_max(T value) {
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    value = larger(value, __shfl_xor_sync(kFullWarp, value, lanes));
  }
  return value;
}

// A part of a matrix for the tensor cores: in float32 as the sum of two TF32
// numbers, which has nearly all of its bits. The large one is rounded to 10
// bits behind the leading one, halves away from zero; what is left has 12 at
// most, of which tensor cores ignore the last. Some NaN become a large zero,
// but the small number is NaN then.
template <typename T, int kSize>
struct Fragment;

template <int kSize>
struct Fragment<float, kSize> {
  float large[kSize];
  float small[kSize];

  __device__ __forceinline__ void set(int index, float value) {
    large[index] =
        __uint_as_float((__float_as_uint(value) + 0x1000) & ~0x1fffu);
    small[index] = value - large[index];
  }
};

template <int kSize>
struct Fragment<double, kSize> {
  double values[kSize];

  __device__ __forceinline__ void set(int index, double value) {
    values[index] = value;
  }
};

// A warp multiplies 16 x 8 by 8 x 8 at a time. The order of the inner index
// does not matter, and is that which reads from shared memory without bank
// conflicts if its rows of `right` are 4 * an odd number of elements apart.

__device__ __forceinline__ int lane_index() {
  const int thread = threadIdx.x +
      blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  return thread % kWarpSize;
}

// The place of element i < 4 of a thread's sum within 16 x 8.
__device__ __forceinline__ int sum_row(int i) {
  return lane_index() / 4 + i / 2 * 8;
}
__device__ __forceinline__ int sum_column(int i) {
  return lane_index() % 4 * 2 + i % 2;
}

// Reads 16 x 8 elements (row, inner) of which `matrix` is the first.
template <typename T>
__device__ __forceinline__ Fragment<T, 4> load_left(
    const T* matrix, int row_stride, int inner_stride) {
  const int lane = lane_index();
  Fragment<T, 4> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i % 2 * 8, inner = lane % 4 * 2 + i / 2;
    result.set(i, matrix[row * row_stride + inner * inner_stride]);
  }
  return result;
}

// Reads 8 x 8 elements (inner, column).
template <typename T>
__device__ __forceinline__ Fragment<T, 2> load_right(
    const T* matrix, int inner_stride, int column_stride) {
  const int lane = lane_index();
  Fragment<T, 2> result;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int inner = lane % 4 * 2 + i, column = lane / 4;
    result.set(i, matrix[inner * inner_stride + column * column_stride]);
  }
  return result;
}

// sum += left * right. What tensor cores add up is truncated, not rounded, so
// each product has a sum of its own, and is added to the others by rounding.
__device__ __forceinline__ void multiply_add(
    float (&sum)[4], const Fragment<float, 4>& left,
    const Fragment<float, 2>& right) {
  float product[4] = {};
  mma(product, left.small, right.large);
  mma(product, left.large, right.small);
  mma(product, left.large, right.large);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i] += product[i];
  }
}

__device__ __forceinline__ void multiply_add(
    double (&sum)[4], const Fragment<double, 4>& left,
    const Fragment<double, 2>& right) {
  mma(sum, left.values, right.values);
}

}  // namespace mmlaplace
