// What attention does to tiles beside products and kernels. No include guard:
// see each_instruction_set.h.

#include "cpu/tiles.h"

// The sum of a vector of columns.
template <typename T>
MMLAPLACE_INLINE typename Simd<T>::Vector sum_columns(
    const T* columns, int64_t stride, int64_t rows) {
  using S = Simd<T>;
  // Enough sums at once to hide the latency of an addition.
  typename S::Vector sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) {
    for (int r = 0; r < 4; ++r) {
      sums[r] += S::load(columns + (i + r) * stride);
    }
  }
  for (; i < rows; ++i) {
    sums[0] += S::load(columns + i * stride);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// sums = the sum of the rows of a tile, whose rows need no padding
template <typename T>
void sum_rows(
    const T* tile, int64_t stride, int64_t rows, int64_t columns, T* sums) {
  using S = Simd<T>;
  int64_t j = 0;
  for (; j + S::kLanes <= columns; j += S::kLanes) {
    S::store(sums + j, sum_columns(tile + j, stride, rows));
  }
  for (; j < columns; ++j) {
    sums[j] = 0;
    for (int64_t i = 0; i < rows; ++i) {
      sums[j] += tile[i * stride + j];
    }
  }
}

// out_j = sum_i tile_ij^2
template <typename T>
void sum_squares(
    const T* tile, int64_t stride, int64_t rows, int64_t columns, T* out) {
  using S = Simd<T>;
  for (int64_t j = 0; j < columns; j += S::kLanes) {
    typename S::Vector sums[4] = {};
    for (int64_t i = 0; i < rows; ++i) {
      const auto value = S::load(tile + i * stride + j);
      sums[i % 4] += value * value;
    }
    S::store(out + j, (sums[0] + sums[1]) + (sums[2] + sums[3]));
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

// tile = factor * (tile - row)
template <typename T>
void shift_and_scale(
    T* tile, const T* row, T factor, int64_t stride, int64_t rows,
    int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      T& element = tile[i * stride + j];
      element = factor * (element - row[j]);
    }
  }
}

// out_ij += factors_j * (tile_ij - row_j)
template <typename T>
void add_weighted_columns(
    const T* tile, const T* row, const T* factors, T* out, int64_t stride,
    int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      out[i * stride + j] += factors[j] * (tile[i * stride + j] - row[j]);
    }
  }
}

// mean = the mean row of a tile, which is subtracted from every row.
template <typename T>
void centre(T* tile, int64_t stride, int64_t rows, int64_t columns, T* mean) {
  using S = Simd<T>;
  for (int64_t j = 0; j < columns; j += S::kLanes) {
    const auto row = sum_columns(tile + j, stride, rows) / T(rows);
    S::store(mean + j, row);
    for (int64_t i = 0; i < rows; ++i) {
      T* const place = tile + i * stride + j;
      S::store(place, S::load(place) - row);
    }
  }
}

// product_ij += other_ij + weight * (other_left_i - left_mean_i)
//     * (other_right_j - right_mean_j), of a symmetric one the lower triangle
template <typename T>
void merge_products(
    const T* other, int64_t other_stride, const T* other_left,
    const T* other_right, const double* left_mean, const double* right_mean,
    double weight, double* product, int64_t rows, int64_t columns,
    bool symmetric) {
  for (int64_t i = 0; i < rows; ++i) {
    const double shift = (other_left[i] - left_mean[i]) * weight;
    const int64_t end = symmetric ? i + 1 : columns;
    for (int64_t j = 0; j < end; ++j) {
      product[i * columns + j] += other[i * other_stride + j] +
          shift * (other_right[j] - right_mean[j]);
    }
  }
}

// From the variances of keys, which are overwritten, to their scales.
template <typename T>
void whitening_scales(T* variances, int64_t count, T eps) {
  for (int64_t i = 0; i < count; ++i) {
    // Below zero only by rounding; NaN stays.
    const T variance = variances[i] < 0 ? T(0) : variances[i];
    variances[i] = 1 / std::sqrt(variance + eps);
  }
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

// out_ij = row_j + factors_i * in_ij
template <typename T>
void scale_rows_onto(
    const T* row, const T* in, int64_t in_stride, const T* factors, T* out,
    int64_t out_stride, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    const T factor = factors[i];
    const T* source = in + i * in_stride;
    T* target = out + i * out_stride;
    for (int64_t j = 0; j < columns; ++j) {
      target[j] = row[j] + factor * source[j];
    }
  }
}
