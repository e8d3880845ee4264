// Rotary embedding of the heads of one token. No include guard: see
// each_instruction_set.h.

#include "cpu/simd.h"

// Turns the channels i and i + half of every row by the angle whose cosine and
// sine stand at i.
template <typename T>
void turn_rows(
    const T* in, int64_t in_stride, const T* cosine, const T* sine, T* out,
    int64_t rows, int64_t half, T sign) {
  using S = Simd<T>;
  for (int64_t row = 0; row < rows; ++row) {
    const T* const first = in + row * in_stride;
    const T* const second = first + half;
    T* const first_out = out + row * 2 * half;
    T* const second_out = first_out + half;
    int64_t i = 0;
    for (; i + S::kLanes <= half; i += S::kLanes) {
      const auto x = S::load(first + i), y = S::load(second + i);
      const auto c = S::load(cosine + i), s = S::load(sine + i) * sign;
      S::store(first_out + i, x * c - y * s);
      S::store(second_out + i, x * s + y * c);
    }
    for (; i < half; ++i) {
      const T s = sine[i] * sign;
      first_out[i] = first[i] * cosine[i] - second[i] * s;
      second_out[i] = first[i] * s + second[i] * cosine[i];
    }
  }
}
