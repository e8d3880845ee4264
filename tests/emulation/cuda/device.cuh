// What ops/cuda/device.cuh offers, for the host. Found first on the include
// path, it takes that file's place.
#pragma once

#include "../emulator.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#define __device__
#define __forceinline__ inline
#define __global__
#define __host__
#define __launch_bounds__(...)

// There are no CUDA tensors: the operators serve those of the CPU.
#define MMLAPLACE_DISPATCH_KEY CPU

inline void __syncthreads(
    const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulator::meet_block({file, line});
}

inline void __syncwarp(
    const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulator::Values<int>(0, {file, line});
}

template <typename T>
T __shfl_sync(
    unsigned mask, T value, int lane, const char* file = __builtin_FILE(),
    int line = __builtin_LINE()) {
  emulator::check_full(mask);
  return emulator::Values<T>(value, {file, line})[lane % emulator::kWarpSize];
}

template <typename T>
T __shfl_xor_sync(
    unsigned mask, T value, int lanes, const char* file = __builtin_FILE(),
    int line = __builtin_LINE()) {
  emulator::check_full(mask);
  return emulator::Values<T>(value, {file, line})[emulator::lane() ^ lanes];
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

namespace mmlaplace {

struct DeviceGuard {
  explicit DeviceGuard(const at::Tensor&) {}
};

// A small card with few multiprocessors and a small grid, so that loops over
// more work than there are blocks are tried.
inline int multiprocessors() {
  return 3;
}
constexpr int64_t kMaxBlocks = 50;

// MMLAPLACE_EMULATED_SHARED_MEMORY is in bytes; by default it is an H200's.
inline size_t max_shared_memory() {
  const char* variable = std::getenv("MMLAPLACE_EMULATED_SHARED_MEMORY");
  return variable ? std::stoull(variable) : 227 * 1024;
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t items, dim3 threads,
            size_t shared_bytes, const Arguments&... arguments) {
  if (items == 0) {
    return;
  }
  const size_t count = size_t(1) * threads.x * threads.y * threads.z;
  TORCH_CHECK(items > 0 && count > 0 && count <= 1024 && threads.z <= 64 &&
                  shared_bytes <= max_shared_memory(),
              "no card takes ", items, " blocks of ", threads.x, " x ",
              threads.y, " x ", threads.z, " threads with ", shared_bytes,
              " bytes of shared memory");
  emulator::run(std::min(items, kMaxBlocks), threads, shared_bytes,
                [&] { kernel(arguments...); });
}

inline char* shared_memory() {
  return emulator::shared_memory();
}

inline void copy_async(void* shared, const void* global) {
  emulator::copy_async(shared, global, 16);
}
inline void commit_copies() {
  emulator::commit_copies();
}
template <int kGroupsLeft>
void wait_for_copies() {
  emulator::wait_for_copies(kGroupsLeft);
}

// The product's factors as far as tensor cores read them.
inline double read_by_mma(double value) {
  return value;
}
inline float read_by_mma(float value) {
  return __uint_as_float(__float_as_uint(value) & ~0x1fffu);
}

template <typename T>
void mma(T (&sum)[4], const T (&left)[4], const T (&right)[2],
         const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  struct Fragments {
    T left[4];
    T right[2];
  } mine;
  std::transform(left, left + 4, mine.left,
                 [](T value) { return read_by_mma(value); });
  std::transform(right, right + 2, mine.right,
                 [](T value) { return read_by_mma(value); });
  const emulator::Values<Fragments> all(mine, {file, line});
  const int row = emulator::lane() / 4, column = emulator::lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 8; ++k) {
      sum[i] += all[row * 4 + k % 4].left[i / 2 + k / 4 * 2] *
          all[(column + i % 2) * 4 + k % 4].right[k / 4];
    }
  }
}

}  // namespace mmlaplace
