// What a block of threads does with tiles in shared memory, for the passes of
// laplacian_attention.cu.
#pragma once

#include "cuda/common.cuh"

namespace mmlaplace {

// Tokens of a tile, landmarks of a block and columns of a product.
template <typename T>
constexpr int kSide = sizeof(T) == 8 ? 32 : 64;

// Channels of points that are held at a time.
template <typename T>
constexpr int kChannels = kSide<T> / 2;

// Each thread has 16 elements of the product of two tiles.
template <typename T>
constexpr int kThreads = kSide<T> * kSide<T> / 16;

// Blocks of threads that are to fit on a multiprocessor.
template <typename T>
constexpr int kBlocks = sizeof(T) == 8 ? 6 : 3;
template <typename T>
constexpr int kGradientBlocks = sizeof(T) == 8 ? 6 : 2;

// The threads that share a row or a column of a tile.
template <typename T>
constexpr int kParts = kThreads<T> / kSide<T>;

// Elements from one row to the next: 4 times an odd number, for few conflicts
// of banks.
template <typename T>
constexpr int kStride = kSide<T> + 4;
template <typename T>
constexpr int kPointStride = kChannels<T> + 4;

template <typename T>
struct alignas(16) Tiles {
  T points[kSide<T> * kPointStride<T>];
  T landmarks[kSide<T> * kPointStride<T>];
  T kernel[kSide<T> * kStride<T>];
  T right[kSide<T> * kStride<T>];
  T left_row[kSide<T>];
  T right_row[kSide<T>];
  T partial[kThreads<T>];
};

template <typename T>
__device__ __forceinline__ Tiles<T>& shared_tiles() {
  return *reinterpret_cast<Tiles<T>*>(shared_memory());
}

__device__ __forceinline__ int at_most(int64_t value, int limit) {
  return value < limit ? static_cast<int>(value) : limit;
}

// Tokens and landmarks of a pass, and how it divides the former: into chunks,
// each of which a block of threads works through.
template <typename scalar_t>
struct Pass {
  Matrices<const scalar_t> points;
  Matrices<const scalar_t> landmarks;
  int64_t batches;
  int64_t tokens;
  int64_t chunks;  // of a matrix
  int chunk_tokens;
  int count;  // of landmarks
  int dims;
  compute_t<scalar_t> factor;  // -1 / scale

  // The tokens of a chunk from the first on.
  __device__ __forceinline__ int size_of_chunk(int64_t first) const {
    return at_most(tokens - first, chunk_tokens);
  }
};

// Blocks of columns: one at least, which has other things to compute as well.
template <typename T>
__host__ __device__ constexpr int block_count(int columns) {
  return columns == 0 ? 1 : ceil_div(columns, kSide<T>);
}

// A pointer moved on, if it is one at all.
template <typename T>
__device__ __forceinline__ T* advance(T* data, int64_t elements) {
  return data == nullptr ? data : data + elements;
}

// Elements next to each other, which are read or written at once.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? 8 : 16) Several {
  T values[kCount];
};

template <int kCount, typename T>
__device__ __forceinline__ Several<T, kCount> load_several(const T* source) {
  return *reinterpret_cast<const Several<T, kCount>*>(source);
}

// Calls function(row, column) for each element of a tile, neighbours in a row
// for neighbouring threads.
template <typename T, typename Function>
__device__ __forceinline__ void each_element(const Function& function) {
#pragma unroll 1
  for (int row = threadIdx.x / kSide<T>; row < kSide<T>; row += kParts<T>) {
    function(row, static_cast<int>(threadIdx.x) % kSide<T>);
  }
}

// target[i][j] = source[i][j], and zeros around it.
template <int kColumns, typename T, typename scalar_t>
__device__ __forceinline__ void load_tile(
    T* target, const scalar_t* source, int64_t stride, int rows,
    int columns) {
  constexpr int kRowsAtATime = kThreads<T> / kColumns;
  const int first_row = threadIdx.x / kColumns;
  const int column = threadIdx.x % kColumns;
  source += first_row * stride + column;
  target += first_row * (kColumns + 4) + column;
  rows = column < columns ? rows - first_row : 0;
#pragma unroll 4
  for (int row = 0; row < kSide<T>; row += kRowsAtATime) {
    target[row * (kColumns + 4)] =
        row < rows ? static_cast<T>(*source) : T(0);
    source += kRowsAtATime * stride;
  }
}

// tile[i][j] = factors[i] * tile[i][j] - shift[j], where either may be
// missing. Each thread has the elements that it loaded.
template <int kColumns, typename T>
__device__ __forceinline__ void scale_tile(
    T* tile, int rows, int columns, const T* factors, const T* shift) {
  constexpr int kRowsAtATime = kThreads<T> / kColumns;
  const int column = threadIdx.x % kColumns;
  if (column < columns) {
    const T own_shift = shift == nullptr ? T(0) : shift[column];
#pragma unroll 1
    for (int row = threadIdx.x / kColumns; row < rows; row += kRowsAtATime) {
      T& value = tile[row * (kColumns + 4) + column];
      value = (factors == nullptr ? value : factors[row] * value) - own_shift;
    }
  }
}

// target[j] = source[j], zeros behind them or where there is no source.
template <typename T>
__device__ __forceinline__ void load_row(
    T* target, const T* source, int count) {
  const int column = threadIdx.x;
  if (column < kSide<T>) {
    target[column] =
        source != nullptr && column < count ? source[column] : T(0);
  }
}

// The kernel of a tile of tokens with a block of landmarks, and zeros around
// it. `points` is the first token, `landmarks` the first of all landmarks. A
// barrier lets the last readers of shared memory finish first; the caller puts
// one behind.
template <typename scalar_t, typename T>
__device__ __forceinline__ void kernel_tile(
    const Pass<scalar_t>& pass, const scalar_t* points,
    const scalar_t* landmarks, int rows, int block, T* target) {
  constexpr int kRows = 8, kColumns = 2;
  constexpr int kAcross = kSide<T> / kColumns;
  Tiles<T>& tiles = shared_tiles<T>();
  const int columns = pass.count - block;
  // This thread has rows next to each other, and columns apart.
  const int first_row = threadIdx.x / kAcross * kRows;
  const int first_column = threadIdx.x % kAcross;
  const T* const own_points = tiles.points + first_row * kPointStride<T>;
  const T* const own_landmarks =
      tiles.landmarks + first_column * kPointStride<T>;
  landmarks += block * pass.landmarks.row_stride;
  T distances[kRows][kColumns] = {};
  __syncthreads();
  for (int channel = 0; channel < pass.dims; channel += kChannels<T>) {
    const int channels = pass.dims - channel;
    if (channel > 0) {
      __syncthreads();
    }
    load_tile<kChannels<T>>(
        tiles.points, points + channel, pass.points.row_stride, rows,
        channels);
    load_tile<kChannels<T>>(
        tiles.landmarks, landmarks + channel, pass.landmarks.row_stride,
        columns, channels);
    __syncthreads();
    const int end = at_most(channels, kChannels<T>);
#pragma unroll 1
    for (int c = 0; c < end; c += 4) {
      Several<T, 4> y[kColumns];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        y[j] = load_several<4>(
            own_landmarks + j * kAcross * kPointStride<T> + c);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const auto x = load_several<4>(own_points + i * kPointStride<T> + c);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            distances[i][j] += std::abs(x.values[k] - y[j].values[k]);
          }
        }
      }
    }
  }
  target += first_row * kStride<T> + first_column;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const T kernel = std::exp(pass.factor * distances[i][j]);
      target[i * kStride<T> + j * kAcross] =
          first_row + i < rows && first_column + j * kAcross < columns
          ? kernel
          : T(0);
    }
  }
}

// Sums of products of two tiles, in the registers of all threads: each warp
// has 16 x 32 of them, as the sums of 4 tensor core products. With g and t as
// device.cuh has them, rows g and g + 8 of these are here 2 g and 2 g + 1,
// columns t and t + 4 of the left are 2 t and 2 t + 1, and column g of product
// i on the right is 4 g + i: so what a thread needs lies side by side, and what
// a warp needs in different banks.
template <typename T>
class Sums {
 public:
  // Adds (left - shift) @ right over `depth` columns of left, for `columns` of
  // right. Tiles hold zeros up to the next multiple of 8 of these.
  template <int kLeftStride>
  __device__ __forceinline__ void add(
      const T* left, const T* right, int depth, int columns,
      const T* shift = nullptr) {
    if (first_column() >= columns) {
      return;
    }
    left += (first_row() + group() * 2) * kLeftStride + pair() * 2;
#pragma unroll 1
    for (int k = 0; k < depth; k += 8) {
      Several<T, 2> shifts{};
      if (shift != nullptr) {
        shifts = load_several<2>(shift + k + pair() * 2);
      }
      Fragment<T, 4> fragment;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const auto values = load_several<2>(left + row * kLeftStride + k);
        fragment.set(row, values.values[0] - shifts.values[0]);
        fragment.set(row + 2, values.values[1] - shifts.values[1]);
      }
      multiply(fragment, right + k * kStride<T>);
    }
  }

  // Adds left^T @ right over `depth` rows of both.
  __device__ __forceinline__ void add_transposed(
      const T* left, const T* right, int depth, int columns) {
    if (first_column() >= columns) {
      return;
    }
    left += pair() * 2 * kStride<T> + first_row() + group() * 2;
#pragma unroll 1
    for (int k = 0; k < depth; k += 8) {
      Fragment<T, 4> fragment;
#pragma unroll
      for (int inner = 0; inner < 2; ++inner) {
        const auto values = load_several<2>(left + (k + inner) * kStride<T>);
        fragment.set(inner * 2, values.values[0]);
        fragment.set(inner * 2 + 1, values.values[1]);
      }
      multiply(fragment, right + k * kStride<T>);
    }
  }

  // Calls function(row, column, sum) for each sum of this thread.
  template <typename Function>
  __device__ __forceinline__ void each(const Function& function) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int product = 0; product < 4; ++product) {
        function(
            first_row() + group() * 2 + i / 2,
            first_column() + pair() * 8 + i % 2 * 4 + product,
            sums_[product][i]);
      }
    }
  }

 private:
  static constexpr int kWarpsAcross = kSide<T> / 32;

  __device__ __forceinline__ static int first_row() {
    return threadIdx.x / kWarpSize / kWarpsAcross * 16;
  }
  __device__ __forceinline__ static int first_column() {
    return threadIdx.x / kWarpSize % kWarpsAcross * 32;
  }
  __device__ __forceinline__ static int group() {
    return threadIdx.x % kWarpSize / 4;
  }
  __device__ __forceinline__ static int pair() {
    return threadIdx.x % 4;
  }

  __device__ __forceinline__ void multiply(
      const Fragment<T, 4>& left, const T* right) {
    right += pair() * 2 * kStride<T> + first_column() + group() * 4;
    const auto first = load_several<4>(right);
    const auto second = load_several<4>(right + kStride<T>);
#pragma unroll
    for (int product = 0; product < 4; ++product) {
      Fragment<T, 2> fragment;
      fragment.set(0, first.values[product]);
      fragment.set(1, second.values[product]);
      multiply_add(sums_[product], left, fragment);
    }
  }

  T sums_[4][4] = {};
};

// Adds up what threads have of a column each, thread i of column i % kSide.
// Every thread gets the sum of its column.
template <typename T>
__device__ T sum_of_column(T value) {
  T* const partial = shared_tiles<T>().partial;
  __syncthreads();
  partial[threadIdx.x] = value;
  __syncthreads();
  T sum = 0;
#pragma unroll
  for (int part = 0; part < kParts<T>; ++part) {
    sum += partial[part * kSide<T> + threadIdx.x % kSide<T>];
  }
  return sum;
}

// Stores what threads have of a column each, those of the first row.
template <typename T>
__device__ __forceinline__ void store_row(T* target, T value) {
  if (threadIdx.x < kSide<T>) {
    target[threadIdx.x] = value;
  }
}

// Subtracts a row, if there is one, from the first rows of this thread's
// column and returns the sum of what is left in its part of them.
template <typename T>
__device__ __forceinline__ T centre(
    T* tile, int rows, const T* shift = nullptr) {
  const int column = threadIdx.x % kSide<T>;
  const T own_shift = shift == nullptr ? T(0) : shift[column];
  T sum = 0;
  for (int row = threadIdx.x / kSide<T>; row < rows; row += kParts<T>) {
    T& value = tile[row * kStride<T> + column];
    value -= own_shift;
    sum += value;
  }
  return sum;
}

// The row whose sum sum_of_row gives to this thread.
template <typename T>
__device__ __forceinline__ int own_row() {
  return threadIdx.x / kParts<T>;
}

template <typename T>
__device__ __forceinline__ T sum_of_row(const T* tile) {
  T sum = 0;
  for (int column = threadIdx.x % kParts<T>; column < kSide<T>;
       column += kParts<T>) {
    sum += tile[own_row<T>() * kStride<T> + column];
  }
#pragma unroll
  for (int lanes = 1; lanes < kParts<T>; lanes *= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, lanes);
  }
  return sum;
}

// For 4 channels of 2 points of a tile or, transposed, of 2 landmarks: the
// sums of weights with the signs of own - other.
template <bool kTransposed, typename T>
__device__ __forceinline__ void add_signed(
    const T* weights, const T* own, const T* others, int row, int channel,
    int depth, T (&sums)[2][4]) {
  Several<T, 4> x[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[i] = load_several<4>(own + (row + i) * kPointStride<T> + channel);
  }
#pragma unroll 4
  for (int k = 0; k < depth; ++k) {
    const auto y = load_several<4>(others + k * kPointStride<T> + channel);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const T weight = kTransposed ? weights[k * kStride<T> + row + i]
                                   : weights[(row + i) * kStride<T> + k];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const T difference = x[i].values[c] - y.values[c];
        const T signed_weight = difference < 0 ? -weight : weight;
        sums[i][c] += difference == 0 ? T(0) : signed_weight;
      }
    }
  }
}

// Stores 4 channels of 2 rows, or adds them to what is there.
template <typename T>
__device__ __forceinline__ void store_sums(
    const T (&sums)[2][4], bool add, int row, int rows, int channel,
    int channels, T* target, int64_t stride) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (row + i < rows && channel + c < channels) {
        T& value = target[(row + i) * stride + channel + c];
        value = sums[i][c] + (add ? value : T(0));
      }
    }
  }
}

}  // namespace mmlaplace
