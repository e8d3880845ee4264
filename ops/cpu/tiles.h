// The inner loops of all operators, on tiles that fit into the cache. No
// include guard: this belongs into every namespace of
// each_instruction_set.h.
//
// A tile is a row-major matrix whose rows are `padded` apart. Whole vectors
// are read and written: what lies in the padding is of no meaning, as long as
// the columns before it do not depend on it.

#include "cpu/simd.h"

// Vectors of columns that are computed at once, in registers.
constexpr int kVectors = MMLAPLACE_VECTOR_BYTES == 64 ? 4 : 2;

// Computes kR rows of a block in as many vectors as asked for, at most
// kVectors.
template <class S, int kR, class Block>
MMLAPLACE_INLINE void compute_vectors(
    const Block& block, int64_t row, int64_t column, int64_t vectors) {
#if MMLAPLACE_VECTOR_BYTES == 64
  if (vectors == 4) {
    block.template compute<S, kR, 4>(row, column);
  } else if (vectors == 3) {
    block.template compute<S, kR, 3>(row, column);
  } else
#endif
  if (vectors == 2) {
    block.template compute<S, kR, 2>(row, column);
  } else if (vectors == 1) {
    block.template compute<S, kR, 1>(row, column);
  }
}

template <class S, int kCount, class Block>
MMLAPLACE_INLINE void compute_columns(
    const Block& block, int64_t rows, int64_t column) {
  // Enough sums at once to hide the latency of an addition.
  constexpr int kRows = kCount == 1 ? 8 : 4;
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) {
    block.template compute<S, kRows, kCount>(row, column);
  }
  for (; row < rows; ++row) {
    block.template compute<S, 1, kCount>(row, column);
  }
}

// Computes all blocks of a matrix. The last columns take as few lanes as the
// instruction set allows: the usual 49 landmarks are three vectors and a half
// of AVX-512.
template <typename T, class Block>
MMLAPLACE_INLINE void compute_blocks(
    const Block& block, int64_t rows, int64_t columns) {
  using S = Simd<T>;
  int64_t column = 0;
  for (; column + kVectors * S::kLanes <= columns;
       column += kVectors * S::kLanes) {
    compute_columns<S, kVectors>(block, rows, column);
  }
  int64_t rest = columns - column;
#if MMLAPLACE_VECTOR_BYTES == 64
  using Half = Simd<T, 32>;
  const int64_t lanes = rest % S::kLanes;
  const bool half = lanes > 0 && lanes <= Half::kLanes;
  if (half) {
    compute_columns<Half, 1>(block, rows, columns - lanes);
    rest -= lanes;
  }
  if (rest > 3 * S::kLanes) {
    compute_columns<S, 4>(block, rows, column);
  } else if (rest > 2 * S::kLanes) {
    compute_columns<S, 3>(block, rows, column);
  } else
#endif
  if (rest > S::kLanes) {
    compute_columns<S, 2>(block, rows, column);
  } else if (rest > 0) {
    compute_columns<S, 1>(block, rows, column);
  }
}

template <typename T>
struct MatmulBlock {
  const T* left;
  int64_t row_step;
  int64_t inner_step;
  const T* right;
  int64_t right_stride;
  T* out;
  int64_t out_stride;
  int64_t inner;
  T factor;
  const T* base;
  int64_t base_stride;

  template <class S, int kR, int kV>
  MMLAPLACE_INLINE void compute(int64_t row, int64_t column) const {
    using V = typename S::Vector;
    V sums[kR][kV];
    for (int r = 0; r < kR; ++r) {
      for (int v = 0; v < kV; ++v) {
        sums[r][v] = V{};
      }
    }
    const T* a = left + row * row_step;
    const T* b = right + column;
    for (int64_t k = 0; k < inner; ++k) {
      V loaded[kV];
      for (int v = 0; v < kV; ++v) {
        loaded[v] = S::load(b + v * S::kLanes);
      }
      for (int r = 0; r < kR; ++r) {
        const V x = S::broadcast(a[r * row_step]);
        for (int v = 0; v < kV; ++v) {
          sums[r][v] += x * loaded[v];
        }
      }
      a += inner_step;
      b += right_stride;
    }
    for (int r = 0; r < kR; ++r) {
      for (int v = 0; v < kV; ++v) {
        const int64_t first = column + v * S::kLanes;
        const V before =
            base ? S::load(base + (row + r) * base_stride + first) : V{};
        S::store(out + (row + r) * out_stride + first,
                 before + factor * sums[r][v]);
      }
    }
  }
};

// out = base + factor * left @ right. Element (i, k) of left is
// left[i * row_step + k * inner_step], which serves a transposed one too. The
// rows of right, out and base are padded; base may be out itself, one row with
// a stride of 0, or null for 0.
template <typename T>
void matmul(
    const T* left, int64_t row_step, int64_t inner_step,
    const T* right, int64_t right_stride,
    T* out, int64_t out_stride,
    int64_t rows, int64_t inner, int64_t columns,
    T factor = 1, const T* base = nullptr, int64_t base_stride = 0) {
  compute_blocks<T>(
      MatmulBlock<T>{left, row_step, inner_step, right, right_stride, out,
                     out_stride, inner, factor, base, base_stride},
      rows, columns);
}

// The lower triangle of out = base + left^T @ right, for a product that is
// symmetric. Rows of all are `stride` apart, base may be out itself or null
// for 0; what is above the diagonal is of no meaning.
template <typename T>
void symmetric_product(
    const T* left, const T* right, int64_t stride, T* out, int64_t rows,
    int64_t columns, const T* base = nullptr) {
  using S = Simd<T>;
  constexpr int kRows = 4;
  const MatmulBlock<T> block{left, 1, stride, right, stride, out,
                             stride, rows, T(1), base, stride};
  for (int64_t row = 0; row < columns; row += kRows) {
    const int64_t end = std::min(row + kRows, columns);
    for (int64_t column = 0; column < end;
         column += kVectors * S::kLanes) {
      const int64_t vectors = std::min<int64_t>(
          (end - column + S::kLanes - 1) / S::kLanes, kVectors);
      if (end - row == kRows) {
        compute_vectors<S, kRows>(block, row, column, vectors);
      } else {
        for (int64_t last = row; last < end; ++last) {
          compute_vectors<S, 1>(block, last, column, vectors);
        }
      }
    }
  }
}

// out = left @ right, for right a lower triangle: only those of its rows are
// read that are in or below the block of columns.
template <typename T>
void triangular_product(
    const T* left, const T* right, int64_t stride, T* out, int64_t rows,
    int64_t columns) {
  using S = Simd<T>;
  for (int64_t column = 0; column < columns; column += S::kLanes) {
    compute_columns<S, 1>(
        MatmulBlock<T>{left + column, stride, 1, right + column * stride,
                       stride, out, stride, columns - column, T(1), nullptr,
                       0},
        rows, column);
  }
}

template <typename T>
struct KernelBlock {
  const T* queries;
  int64_t query_stride;
  const T* keys;
  int64_t key_stride;
  T* out;
  int64_t out_stride;
  int64_t out_columns;
  int64_t dims;
  T factor;
  T one;

  template <class S, int kR, int kV>
  MMLAPLACE_INLINE void compute(int64_t row, int64_t column) const {
    using V = typename S::Vector;
    V sums[kR][kV];
    for (int r = 0; r < kR; ++r) {
      for (int v = 0; v < kV; ++v) {
        sums[r][v] = V{};
      }
    }
    const T* q = queries + row * query_stride;
    const T* k = keys + column;
    // The rows of the next block: far apart, they escape the processor's own
    // prediction.
    for (int r = 0; r < kR; ++r) {
      for (int64_t c = 0; c < dims; c += 64 / sizeof(T)) {
        __builtin_prefetch(q + (kR + r) * query_stride + c);
      }
    }
    for (int64_t c = 0; c < dims; ++c) {
      V loaded[kV];
      for (int v = 0; v < kV; ++v) {
        loaded[v] = S::load(k + v * S::kLanes);
      }
      for (int r = 0; r < kR; ++r) {
        const V x = S::broadcast(q[r * query_stride + c]);
        for (int v = 0; v < kV; ++v) {
          // A fused multiply-add by one: many processors have units for it
          // beside those that subtract.
          sums[r][v] += S::abs(x - loaded[v]) * one;
        }
      }
      k += key_stride;
    }
    for (int r = 0; r < kR; ++r) {
      T* const target = out + (row + r) * out_stride + column;
      for (int v = 0; v < kV; ++v) {
        sums[r][v] = S::exp(sums[r][v] * factor);
      }
      // Apart, for a store of some lanes keeps a vector from its register.
      if (column + kV * S::kLanes <= out_columns) {
        for (int v = 0; v < kV; ++v) {
          S::store(target + v * S::kLanes, sums[r][v]);
        }
      } else {
        T lanes[kV * S::kLanes];
        for (int v = 0; v < kV; ++v) {
          S::store(lanes + v * S::kLanes, sums[r][v]);
        }
        std::copy_n(lanes, out_columns - column, target);
      }
    }
  }
};

// One column of kernel_tile: vectors run over channels, not keys.
template <typename T>
MMLAPLACE_INLINE void kernel_column(
    const T* queries, int64_t query_stride, const T* key, T* out,
    int64_t out_stride, int64_t rows, int64_t dims, T factor) {
  using S = Simd<T>;
  for (int64_t first = 0; first < rows; first += S::kLanes) {
    const int64_t count = std::min<int64_t>(S::kLanes, rows - first);
    T distances[S::kLanes] = {};
    for (int64_t i = 0; i < count; ++i) {
      const T* q = queries + (first + i) * query_stride;
      typename S::Vector sums{};
      int64_t c = 0;
      for (; c + S::kLanes <= dims; c += S::kLanes) {
        sums += S::abs(S::load(q + c) - S::load(key + c));
      }
      distances[i] = S::sum(sums);
      for (; c < dims; ++c) {
        distances[i] += std::abs(q[c] - key[c]);
      }
    }
    S::store(distances, S::exp(S::load(distances) * factor));
    for (int64_t i = 0; i < count; ++i) {
      out[(first + i) * out_stride] = distances[i];
    }
  }
}

// out = exp(-|queries - keys|_1 / scale), rows of queries against the columns
// that transpose() made of the keys, of which the last is given as a row, too.
// Only out_columns of out are written, all columns or more.
template <typename T>
void kernel_tile(
    const T* queries, int64_t query_stride,
    const T* keys, int64_t key_stride, const T* last_key,
    T* out, int64_t out_stride, int64_t out_columns,
    int64_t rows, int64_t columns, int64_t dims, double scale) {
  // Unknown to the compiler, which would leave the multiplication out.
  volatile T one = 1;
  const T factor = static_cast<T>(-1 / scale);
  // One key beyond whole vectors, as of the usual 49 landmarks.
  const bool single = columns % Simd<T>::kLanes == 1;
  compute_blocks<T>(
      KernelBlock<T>{queries, query_stride, keys, key_stride, out, out_stride,
                     out_columns, dims, factor, one},
      rows, columns - single);
  if (single) {
    kernel_column(queries, query_stride, last_key, out + columns - 1,
                  out_stride, rows, dims, factor);
  }
}

// One block of kernel_backward_tile, kR queries and kV vectors of channels.
template <class S, int kR, int kV, typename T>
MMLAPLACE_INLINE void kernel_backward_block(
    const T* weights, int64_t weight_stride,
    const T* queries, int64_t query_stride,
    const T* keys, int64_t key_stride,
    T* query_grad, int64_t query_grad_stride, T* key_grad,
    int64_t columns) {
  using V = typename S::Vector;
  V q[kR][kV], grad[kR][kV];
  for (int r = 0; r < kR; ++r) {
    for (int v = 0; v < kV; ++v) {
      q[r][v] = S::load(queries + r * query_stride + v * S::kLanes);
      grad[r][v] = V{};
    }
  }
  for (int64_t j = 0; j < columns; ++j) {
    V k[kV], sums[kV];
    for (int v = 0; v < kV; ++v) {
      k[v] = S::load(keys + j * key_stride + v * S::kLanes);
      sums[v] = S::load(key_grad + j * key_stride + v * S::kLanes);
    }
    for (int r = 0; r < kR; ++r) {
      const V weight = S::broadcast(weights[r * weight_stride + j]);
      for (int v = 0; v < kV; ++v) {
        const V term = S::times_sign(weight, q[r][v] - k[v]);
        grad[r][v] += term;
        sums[v] -= term;
      }
    }
    for (int v = 0; v < kV; ++v) {
      S::store(key_grad + j * key_stride + v * S::kLanes, sums[v]);
    }
  }
  for (int r = 0; r < kR; ++r) {
    for (int v = 0; v < kV; ++v) {
      S::store(query_grad + r * query_grad_stride + v * S::kLanes,
               grad[r][v]);
    }
  }
}

template <int kV, typename T>
MMLAPLACE_INLINE void kernel_backward_channels(
    const T* weights, int64_t weight_stride,
    const T* queries, int64_t query_stride,
    const T* keys, int64_t key_stride,
    T* query_grad, int64_t query_grad_stride, T* key_grad,
    int64_t rows, int64_t columns) {
  constexpr int kR = MMLAPLACE_VECTOR_BYTES == 64 ? 4 : 2;
  int64_t row = 0;
  for (; row + kR <= rows; row += kR) {
    kernel_backward_block<Simd<T>, kR, kV>(
        weights + row * weight_stride, weight_stride,
        queries + row * query_stride, query_stride, keys, key_stride,
        query_grad + row * query_grad_stride, query_grad_stride, key_grad,
        columns);
  }
  for (; row < rows; ++row) {
    kernel_backward_block<Simd<T>, 1, kV>(
        weights + row * weight_stride, weight_stride,
        queries + row * query_stride, query_stride, keys, key_stride,
        query_grad + row * query_grad_stride, query_grad_stride, key_grad,
        columns);
  }
}

// With the weights w = d loss / d |q_i - k_j|_1 of every pair:
//   query_grad_i  = sum_j w_ij sign(q_i - k_j)
//   key_grad_j   -= sum_i w_ij sign(q_i - k_j)
// Rows of points and gradients are padded with zeros; keys and key_grad have
// the same stride.
template <typename T>
void kernel_backward_tile(
    const T* weights, int64_t weight_stride,
    const T* queries, int64_t query_stride,
    const T* keys, int64_t key_stride,
    T* query_grad, int64_t query_grad_stride, T* key_grad,
    int64_t rows, int64_t columns, int64_t dims) {
  constexpr int kLanes = Simd<T>::kLanes;
  int64_t channel = 0;
  for (; channel + kLanes < dims; channel += 2 * kLanes) {
    kernel_backward_channels<2>(
        weights, weight_stride, queries + channel, query_stride,
        keys + channel, key_stride, query_grad + channel, query_grad_stride,
        key_grad + channel, rows, columns);
  }
  if (channel < dims) {
    kernel_backward_channels<1>(
        weights, weight_stride, queries + channel, query_stride,
        keys + channel, key_stride, query_grad + channel, query_grad_stride,
        key_grad + channel, rows, columns);
  }
}

template <typename T>
void copy_rows(
    const T* source, int64_t source_stride, T* target, int64_t target_stride,
    int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(source + i * source_stride, columns,
                target + i * target_stride);
  }
}

// Copies rows and fills those of the target up to their stride with zeros.
template <typename T>
void pad_rows(
    const T* source, int64_t source_stride, T* target, int64_t target_stride,
    int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    T* end = std::copy_n(source + i * source_stride, columns,
                         target + i * target_stride);
    std::fill(end, target + (i + 1) * target_stride, T(0));
  }
}

// Copies the transpose of a matrix into padded rows.
template <typename T>
void transpose(
    const T* source, int64_t source_stride, T* target, int64_t target_stride,
    int64_t rows, int64_t columns) {
  // A cache line of the source at a time: its rows, often a power of two apart,
  // compete for the same places of the cache.
  constexpr int64_t kBlock = 64 / sizeof(T);
  for (int64_t first = 0; first < columns; first += kBlock) {
    const int64_t last = std::min(first + kBlock, columns);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = first; j < last; ++j) {
        target[j * target_stride + i] = source[i * source_stride + j];
      }
    }
    for (int64_t j = first; j < last; ++j) {
      T* const row = target + j * target_stride;
      std::fill(row + rows, row + target_stride, T(0));
    }
  }
}

// out = factor * left * right, element by element, in padded rows. Left and
// right may be transposed.
template <typename T>
void multiply(
    const T* left, int64_t left_row_step, int64_t left_column_step,
    const T* right, int64_t right_row_step, int64_t right_column_step,
    T* out, int64_t out_stride, int64_t rows, int64_t columns, T factor) {
  if (left_column_step == 1 && right_column_step == 1) {
    for (int64_t i = 0; i < rows; ++i) {
      const T* a = left + i * left_row_step;
      const T* b = right + i * right_row_step;
      for (int64_t j = 0; j < columns; ++j) {
        out[i * out_stride + j] = factor * a[j] * b[j];
      }
    }
  } else {
    for (int64_t j = 0; j < columns; ++j) {
      const T* a = left + j * left_column_step;
      const T* b = right + j * right_column_step;
      for (int64_t i = 0; i < rows; ++i) {
        out[i * out_stride + j] =
            factor * a[i * left_row_step] * b[i * right_row_step];
      }
    }
  }
}
