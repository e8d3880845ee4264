// What the kernels need of CUDA beyond its own language. The emulation in
// tests/emulation offers the same, and all else compiles for both as it is.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_pipeline.h>

#include <algorithm>
#include <limits>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "mmlaplace needs compute capability 8.0: name none below in TORCH_CUDA_ARCH_LIST"
#endif

#define MMLAPLACE_DISPATCH_KEY CUDA

namespace mmlaplace {

// While it lives, the device of a tensor is the current one.
class DeviceGuard {
 public:
  explicit DeviceGuard(const at::Tensor& tensor) : guard_(tensor.device()) {}

 private:
  c10::cuda::CUDAGuard guard_;
};

inline int device_attribute(cudaDeviceAttr attribute) {
  int value;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(
      &value, attribute, c10::cuda::current_device()));
  return value;
}

inline int multiprocessors() {
  return device_attribute(cudaDevAttrMultiProcessorCount);
}

// The bytes that one block can have.
inline size_t max_shared_memory() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

inline void check_launch(cudaError_t error) {
  // What code for other cards, or for newer drivers, leads to.
  if (error == cudaErrorNoKernelImageForDevice ||
      error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorUnsupportedPtxVersion) {
    cudaGetLastError();
    const int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
    const int minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
    TORCH_CHECK(
        false, "the CUDA operators of mmlaplace hold no code for this card, "
        "of compute capability ", major, ".", minor, ", and driver (",
        cudaGetErrorString(error), "); build them again with ",
        "TORCH_CUDA_ARCH_LIST=", major, ".", minor);
  }
  C10_CUDA_CHECK(error);
}

// Launches a kernel, which has to loop:
//   for (int64_t item = blockIdx.x; item < items; item += gridDim.x)
// Every launch goes through here.
template <typename... Parameters, typename... Arguments>
void launch(
    void (*kernel)(Parameters...), int64_t items, dim3 threads,
    size_t shared_bytes, const Arguments&... arguments) {
  if (items == 0) {
    return;
  }
  constexpr int64_t kMaxBlocks = std::numeric_limits<int>::max();
  constexpr size_t kUsualSharedMemory = 48 * 1024;
  if (shared_bytes > kUsualSharedMemory) {
    check_launch(cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel),
        cudaFuncAttributeMaxDynamicSharedMemorySize,
        static_cast<int>(shared_bytes)));
  }
  kernel<<<static_cast<unsigned>(std::min(items, kMaxBlocks)), threads,
           shared_bytes, c10::cuda::getCurrentCUDAStream()>>>(arguments...);
  check_launch(cudaGetLastError());
}

// The shared memory of the block, as much as the launch asked for.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

// Copies 16 bytes, aligned to as many. They are there, for the thread that
// copied them, after wait_for_copies.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  __pipeline_memcpy_async(shared, global, 16);
}

// Makes a group of the copies since the last one.
__device__ __forceinline__ void commit_copies() {
  __pipeline_commit();
}

// Waits for all groups but the last few.
template <int kGroupsLeft>
__device__ __forceinline__ void wait_for_copies() {
  __pipeline_wait_prior(kGroupsLeft);
}

// sum += left * right, of matrices of 16 x 8 and 8 x 8, by a warp. Of lane l,
// with g = l / 4 and t = l % 4, the fragments hold the elements
//   left (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
//   right (t, g), (t + 4, g)
//   sum (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)
// Left and right count as TF32 only: their last 13 bits are ignored.
__device__ __forceinline__ void mma(
    float (&sum)[4], const float (&left)[4], const float (&right)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(__float_as_uint(left[0])), "r"(__float_as_uint(left[1])),
        "r"(__float_as_uint(left[2])), "r"(__float_as_uint(left[3])),
        "r"(__float_as_uint(right[0])), "r"(__float_as_uint(right[1])));
}

// The same in float64, from products of 8 x 4 and 4 x 8.
__device__ __forceinline__ void mma(
    double (&sum)[4], const double (&left)[4], const double (&right)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i % 2;
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 "
        "{%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(sum[2 * row]), "+d"(sum[2 * row + 1])
        : "d"(left[i]), "d"(right[i / 2]));
  }
}

}  // namespace mmlaplace
