// Runs CUDA kernels on the host: blocks in turn, and the threads of a block as
// fibers that meet at barriers and in the exchanges of a warp. What the
// threads of a block may do in any order is done in one that can be chosen,
// so that a missing barrier changes the result; see emulator.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

extern dim3 gridDim, blockDim;
extern uint3 blockIdx, threadIdx;

namespace emulator {

constexpr int kWarpSize = 32;
constexpr size_t kMaxValueBytes = 64;

// The line of a barrier or exchange, at which all threads have to meet.
struct Site {
  const char* file;
  int line;
};

// Raises if a thread raises, or if threads do not meet where they should.
void run(int64_t blocks, dim3 threads, size_t shared_bytes,
         const std::function<void()>& kernel);

// The rest is for the threads of a kernel.

int lane();

// Only exchanges of whole warps are known here.
inline void check_full(unsigned mask) {
  if (mask != 0xffffffff) {
    throw std::invalid_argument("an exchange of a part of a warp");
  }
}

// As large as the launch asked for, and filled with NaN at its start.
char* shared_memory();

void meet_block(Site site);

// Shows a value to the warp and returns the values of all its lanes, each in
// kMaxValueBytes. They hold until the thread's next exchange but one; a lane
// without a thread has NaN.
const void* exchange(const void* value, size_t bytes, Site site);

template <typename T>
class Values {
 public:
  Values(const T& value, Site site)
      : values_(static_cast<const char*>(
            exchange(&value, sizeof(T), site))) {
    static_assert(sizeof(T) <= kMaxValueBytes);
  }
  const T& operator[](int lane) const {
    return *reinterpret_cast<const T*>(values_ + lane * kMaxValueBytes);
  }

 private:
  const char* values_;
};


// Asynchronous copies of a thread. They happen when they are asked for, or at
// the last moment that is allowed, which depends on the order of threads.
void copy_async(void* target, const void* source, size_t bytes);
void commit_copies();
void wait_for_copies(size_t groups_left);

}  // namespace emulator
