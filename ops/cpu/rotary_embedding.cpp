// Rotary embedding, which is its own gradient with the angles reversed.
#define MMLAPLACE_KERNELS "cpu/rotary_embedding_tiles.h"
#include "cpu/each_instruction_set.h"

#include "checks.h"
#include "cpu/common.h"

namespace mmlaplace {

namespace {

template <typename T>
Tensor rotate(const Tensor& tokens, const Tensor& table, bool inverse) {
  const Tensor result = at::empty(tokens.sizes(), table.options());
  const Tensor dense_table = table.contiguous();
  // Of every token a matrix, whose rows are heads.
  const Matrices<T> in(tokens), out(result);
  const int64_t num_tokens = table.size(1), half = table.size(2);
  const T* const cosine = dense_table.data_ptr<T>();
  const T* const sine = cosine + num_tokens * half;
  const T sign = inverse ? T(-1) : T(1);
  const auto turn_rows = MMLAPLACE_SELECT(turn_rows<T>);
  // A token takes little time; threads should have some to do.
  at::parallel_for(
      0, batch_size(tokens), 64, [&](int64_t begin, int64_t end) {
        for (int64_t index = begin; index < end; ++index) {
          const int64_t place = index % num_tokens * half;
          turn_rows(in[index], in.stride(), cosine + place, sine + place,
                    out[index], in.rows(), half, sign);
        }
      });
  return result;
}

}  // namespace

Tensor rotary_embedding(
    const Tensor& tokens, const Tensor& table, bool inverse) {
  check_rotary_embedding(tokens, table);
  Tensor result;
  AT_DISPATCH_FLOATING_TYPES(
      table.scalar_type(), "rotary_embedding",
      [&] { result = rotate<scalar_t>(tokens, table, inverse); });
  return result;
}

TORCH_LIBRARY_IMPL(mmlaplace, CPU, m) {
  m.impl("rotary_embedding", rotary_embedding);
}

}  // namespace mmlaplace
