// Compiles the header named by MMLAPLACE_KERNELS once for every instruction
// set, each in a namespace of its own, so that one binary serves all
// processors. The header must not include anything but simd.h and tiles.h.
//
// MMLAPLACE_SELECT(f) is the f of the best namespace for this processor.
#pragma once

#include <ATen/Version.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#ifndef __GNUC__
#error "The CPU operators need GCC or Clang, for their vector extension."
#endif

namespace mmlaplace {

// Elements from one row of a scratch matrix to the next: whole vectors of any
// instruction set, and an odd number of cache lines, so that the rows of a
// column do not compete for the same places of the cache.
inline int64_t padded(int64_t columns) {
  const int64_t blocks = (columns + 15) / 16;
  return 16 * (blocks | 1);
}

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

// What torch has found out, or was told by ATEN_CPU_CAPABILITY.
inline InstructionSet instruction_set() {
  static const InstructionSet found = [] {
    const std::string name = at::get_cpu_capability();
    return name == "AVX512" ? InstructionSet::kAvx512
        : name == "AVX2"    ? InstructionSet::kAvx2
                            : InstructionSet::kBaseline;
  }();
  return found;
}

}  // namespace mmlaplace

// Vectors are passed to inlined functions only, so no ABI is at stake.
#pragma GCC diagnostic ignored "-Wpsabi"

#define MMLAPLACE_INLINE inline __attribute__((always_inline))

#define MMLAPLACE_VECTOR_BYTES 16
namespace mmlaplace::baseline {
#include MMLAPLACE_KERNELS
}  // namespace mmlaplace::baseline
#undef MMLAPLACE_VECTOR_BYTES

#ifdef __x86_64__

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define MMLAPLACE_VECTOR_BYTES 32
namespace mmlaplace::avx2 {
#include MMLAPLACE_KERNELS
}  // namespace mmlaplace::avx2
#undef MMLAPLACE_VECTOR_BYTES
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(                                           \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), \
    apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif
#define MMLAPLACE_VECTOR_BYTES 64
namespace mmlaplace::avx512 {
#include MMLAPLACE_KERNELS
}  // namespace mmlaplace::avx512
#undef MMLAPLACE_VECTOR_BYTES
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#define MMLAPLACE_SELECT(function)                                         \
  (mmlaplace::instruction_set() == mmlaplace::InstructionSet::kAvx512      \
       ? mmlaplace::avx512::function                                       \
       : mmlaplace::instruction_set() == mmlaplace::InstructionSet::kAvx2  \
       ? mmlaplace::avx2::function                                         \
       : mmlaplace::baseline::function)

#else

#define MMLAPLACE_SELECT(function) mmlaplace::baseline::function

#endif
