// What attention does to tiles beside products and kernels. No include guard:
// see each_instruction_set.h.

#include "cpu/tiles.h"

// sums = the sum of the rows of a tile
template <typename T>
void sum_rows(
    const T* tile, int64_t stride, int64_t rows, int64_t columns, T* sums) {
  std::fill_n(sums, columns, T(0));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      sums[j] += tile[i * stride + j];
    }
  }
}

// out = every row of a tile less one row
template <typename T>
void subtract_row(
    const T* tile, const T* row, T* out, int64_t stride, int64_t rows,
    int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      out[i * stride + j] = tile[i * stride + j] - row[j];
    }
  }
}

// mean = the mean row of a tile, which is subtracted from every row.
template <typename T>
void centre(T* tile, int64_t stride, int64_t rows, int64_t columns, T* mean) {
  sum_rows(tile, stride, rows, columns, mean);
  for (int64_t j = 0; j < columns; ++j) {
    mean[j] /= rows;
  }
  subtract_row(tile, mean, tile, stride, rows, columns);
}

// out_i = sum_j left_ij * right_ij
template <typename T>
void row_products(
    const T* left, const T* right, int64_t stride, int64_t rows,
    int64_t columns, T* out) {
  using S = Simd<T>;
  for (int64_t i = 0; i < rows; ++i) {
    const T* a = left + i * stride;
    const T* b = right + i * stride;
    typename S::Vector sums{};
    T rest = 0;
    int64_t j = 0;
    for (; j + S::kLanes <= columns; j += S::kLanes) {
      sums += S::load(a + j) * S::load(b + j);
    }
    for (; j < columns; ++j) {
      rest += a[j] * b[j];
    }
    out[i] = rest + S::sum(sums);
  }
}

// out_ij = factors_i * in_ij, or that added to out.
template <typename T>
void scale_rows(
    const T* in, int64_t in_stride, const T* factors, T* out,
    int64_t out_stride, int64_t rows, int64_t columns, bool add) {
  for (int64_t i = 0; i < rows; ++i) {
    const T factor = factors[i];
    const T* source = in + i * in_stride;
    T* target = out + i * out_stride;
    if (add) {
      for (int64_t j = 0; j < columns; ++j) {
        target[j] += factor * source[j];
      }
    } else {
      for (int64_t j = 0; j < columns; ++j) {
        target[j] = factor * source[j];
      }
    }
  }
}

// Fills every row of a tile with one.
template <typename T>
void repeat_row(
    const T* row, T* tile, int64_t stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(row, columns, tile + i * stride);
  }
}
