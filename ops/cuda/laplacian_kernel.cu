// The Laplacian kernel matrix and its gradient.
#include "cuda/common.cuh"
#include "cuda/operators.cuh"

#include "checks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

namespace mmlaplace {

namespace {

// Forward, a thread computes this block of the result, of rows and columns as
// far apart as there are threads: so neighbours write side by side, and read
// rows of shared memory that lie in different banks.
template <typename T>
constexpr int kRows = 32 / sizeof(T);
constexpr int kColumns = 4;
constexpr int kMaxColumnThreads = 16;
constexpr int kMaxRowThreads = 32;
constexpr int kMaxThreads = 256;
// So many channels are in shared memory at a time.
constexpr int kMaxDepth = 64;

// The part of queries and keys that a block works on. A row has an odd number
// of vectors, hence those of neighbours are in different banks.
template <typename T>
struct PointTiles {
  int depth;
  int stride;
  T* queries;
  T* keys;

  __host__ __device__ PointTiles(
      Arena& arena, int num_queries, int num_keys, int64_t dims)
      : depth(dims < kMaxDepth ? static_cast<int>(dims) : kMaxDepth) {
    constexpr int kLanes = Vector<T>::kLanes;
    stride = (ceil_div(depth, kLanes) | 1) * kLanes;
    queries = arena.take<T>(num_queries * stride);
    keys = arena.take<T>(num_keys * stride);
  }
};

// Stores numbers in the dtype that is computed in, by whole vectors.
template <typename S, typename T>
__device__ __forceinline__ void store_wide(
    const Vector<S>& values, T* target, int columns) {
  constexpr int kLanes = Vector<T>::kLanes;
#pragma unroll
  for (int first = 0; first < Vector<S>::kLanes; first += kLanes) {
    Vector<T> wide;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      wide.lanes[lane] = static_cast<T>(values.lanes[first + lane]);
    }
    if (first < columns) {
      store_vector(target + first, wide);
    }
  }
}

// Copies up to `rows` x `columns` of a matrix into shared memory, where zeros
// fill up to `tile_rows` x `tile_columns` and whole vectors.
template <typename S, typename T>
__device__ void load_tile(
    const S* source, int64_t source_stride, int64_t rows, int64_t columns,
    T* tile, int tile_stride, int tile_rows, int tile_columns) {
  constexpr int kLanes = Vector<S>::kLanes;
  const bool aligned = is_aligned(source, source_stride);
  const int pieces = ceil_div(tile_columns, kLanes);
  const int threads = blockDim.x * blockDim.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int row_threads = std::min(pieces, threads);
  const int row_step = threads / row_threads;
  if (thread >= row_step * row_threads) {
    return;
  }
  for (int row = thread / row_threads; row < tile_rows; row += row_step) {
    for (int piece = thread % row_threads; piece < pieces;
         piece += row_threads) {
      const int first = piece * kLanes;
      const S* const from = source + row * source_stride + first;
      Vector<S> values{};
      if (row < rows && aligned && first + kLanes <= columns) {
        values = load_vector(from);
      } else if (row < rows) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          if (first + lane < columns) {
            values.lanes[lane] = from[lane];
          }
        }
      }
      store_wide(values, tile + row * tile_stride + first,
                 tile_columns - first);
    }
  }
}

// Adds the L1 distances over the channels in shared memory.
template <typename T>
__device__ __forceinline__ void add_distances(
    const PointTiles<T>& tiles, T (&sums)[kRows<T>][kColumns]) {
  constexpr int kLanes = Vector<T>::kLanes;
  const T* const queries = tiles.queries + threadIdx.y * tiles.stride;
  const T* const keys = tiles.keys + threadIdx.x * tiles.stride;
  const int query_step = blockDim.y * tiles.stride;
  const int key_step = blockDim.x * tiles.stride;
  for (int channel = 0; channel < tiles.depth; channel += kLanes) {
    Vector<T> key[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      key[j] = load_vector(keys + j * key_step + channel);
    }
#pragma unroll
    for (int i = 0; i < kRows<T>; ++i) {
      const Vector<T> query =
          load_vector(queries + i * query_step + channel);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          sums[i][j] += std::abs(query.lanes[lane] - key[j].lanes[lane]);
        }
      }
    }
  }
}

// An item is a run of tiles of queries with one tile of keys, which stays in
// shared memory if all channels fit.
template <typename S, typename T = compute_t<S>>
__global__ void __launch_bounds__(kMaxThreads) kernel_forward(
    int64_t items, int64_t runs, int64_t tiles_per_run,
    Matrices<const S> queries, Matrices<const S> keys, Matrices<S> result,
    T factor) {
  Arena arena(shared_memory());
  const int tile_rows = kRows<T> * blockDim.y;
  const int tile_columns = kColumns * blockDim.x;
  const int64_t dims = keys.columns;
  const PointTiles<T> tiles(arena, tile_rows, tile_columns, dims);
  const int64_t key_tiles = ceil_div<int64_t>(keys.rows, tile_columns);

  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t batch = item / runs / key_tiles;
    const int64_t first_key = item / runs % key_tiles * tile_columns;
    const int64_t first_tile = item % runs * tiles_per_run;
    const S* const query = queries[batch];
    const S* const key = keys.row(batch, first_key);
    S* const results = result[batch] + first_key;
    for (int64_t tile = 0; tile < tiles_per_run; ++tile) {
      const int64_t first_query = (first_tile + tile) * tile_rows;
      if (first_query >= queries.rows) {
        break;
      }
      T sums[kRows<T>][kColumns] = {};
      for (int64_t channel = 0; channel < dims; channel += tiles.depth) {
        __syncthreads();  // all have read the tiles before these
        load_tile(
            query + first_query * queries.row_stride + channel,
            queries.row_stride, queries.rows - first_query, dims - channel,
            tiles.queries, tiles.stride, tile_rows, tiles.depth);
        if (tile == 0 || tiles.depth < dims) {
          load_tile(
              key + channel, keys.row_stride, keys.rows - first_key,
              dims - channel, tiles.keys, tiles.stride, tile_columns,
              tiles.depth);
        }
        __syncthreads();
        add_distances(tiles, sums);
      }
      const int rows =
          std::min<int64_t>(queries.rows - first_query, tile_rows);
      const int columns =
          std::min<int64_t>(keys.rows - first_key, tile_columns);
#pragma unroll
      for (int i = 0; i < kRows<T>; ++i) {
        const int row = threadIdx.y + i * blockDim.y;
        S* const target = results + (first_query + row) * result.row_stride;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const int column = threadIdx.x + j * blockDim.x;
          if (row < rows && column < columns) {
            target[column] = static_cast<S>(std::exp(sums[i][j] * factor));
          }
        }
      }
    }
  }
}

template <typename S>
void forward(const Tensor& queries, const Tensor& keys, double scale,
             const Tensor& result) {
  using T = compute_t<S>;
  const auto q = matrices<const S>(queries), k = matrices<const S>(keys);
  const int column_threads = std::min<int64_t>(
      ceil_div<int64_t>(k.rows, kColumns), kMaxColumnThreads);
  const int row_threads = std::min<int64_t>(
      ceil_div<int64_t>(q.rows, kRows<T>),
      std::min(kMaxRowThreads, kMaxThreads / column_threads));
  const int tile_rows = kRows<T> * row_threads;
  const int tile_columns = kColumns * column_threads;
  Arena arena;
  const PointTiles<T> tiles(arena, tile_rows, tile_columns, k.columns);

  // Runs as long as leave each multiprocessor enough blocks to balance them.
  constexpr int64_t kBlocks = 16, kMaxTiles = 8;
  const int64_t query_tiles = ceil_div<int64_t>(q.rows, tile_rows);
  const int64_t pairs =
      batch_size(queries) * ceil_div<int64_t>(k.rows, tile_columns);
  const int64_t tiles_per_run = std::clamp<int64_t>(
      pairs * query_tiles / (kBlocks * multiprocessors()), 1, kMaxTiles);
  const int64_t runs = ceil_div(query_tiles, tiles_per_run);
  launch(
      kernel_forward<S>, pairs * runs, dim3(column_threads, row_threads),
      arena.bytes(), pairs * runs, runs, tiles_per_run, q, k,
      matrices<S>(result), static_cast<T>(-1 / scale));
}

// Backward, the points of the longer side (the many) pass by. A lane has a
// channel of up to kFew points of the shorter side and of their gradient in
// registers, for all points of the many that its warp meets.
template <typename T>
constexpr int kFew = 256 / sizeof(T);
constexpr int kWarps = 4;
// Points that a warp takes the weights of at a time.
constexpr int kMany = 4;
// Points that a block takes, which makes one gradient of the few.
constexpr int64_t kChunk = 512;

template <typename T>
struct BackwardTiles {
  T* weights;  // kWarps x kMany x kFew
  T* sums;     // kWarps x kFew x kWarpSize

  __host__ __device__ explicit BackwardTiles(Arena& arena)
      : weights(arena.take<T>(kWarps * kMany * kFew<T>)),
        sums(arena.take<T>(kWarps * kFew<T> * kWarpSize)) {}
};

// The gradient of the distances, grad * kernel * factor. The matrices have the
// many as their rows, unless they are transposed.
template <typename S>
struct Weights {
  Matrices<const S> grad;
  Matrices<const S> kernel;
  bool transposed;
  compute_t<S> factor;
};

// Lets a warp compute a tile of weights, with zeros for what is not there.
// `grad` and `kernel` are the matrices of one batch index.
template <typename S, typename T>
__device__ __forceinline__ void load_weights(
    const Weights<S>& weights, const S* grad, const S* kernel,
    int64_t first_many, int many, int64_t first_few, int few, T* tile) {
  constexpr int kStep = kWarpSize / kMany;
  const int lane = threadIdx.x;
  const bool transposed = weights.transposed;
  // Neighbours read side by side.
  const int m = transposed ? lane % kMany : lane / kStep;
  int f = transposed ? lane / kMany : lane % kStep;
  const int64_t row = transposed ? first_few + f : first_many + m;
  const int64_t column = transposed ? first_many + m : first_few + f;
  grad += row * weights.grad.row_stride + column;
  kernel += row * weights.kernel.row_stride + column;
  const int64_t grad_step = transposed ? weights.grad.row_stride : 1;
  const int64_t kernel_step = transposed ? weights.kernel.row_stride : 1;
#pragma unroll 4
  for (int i = 0; f < round_up(few, Vector<T>::kLanes); ++i, f += kStep) {
    tile[m * kFew<T> + f] = m < many && f < few
        ? static_cast<T>(grad[i * kStep * grad_step]) *
            static_cast<T>(kernel[i * kStep * kernel_step]) * weights.factor
        : T(0);
  }
}

// The gradient of one channel of a point, and its share in those of the few.
template <typename T>
__device__ __forceinline__ T add_gradients(
    const T* weights, T point, const T (&few)[kFew<T>], int num_few,
    T (&few_grad)[kFew<T>]) {
  constexpr int kLanes = Vector<T>::kLanes;
  T grad = 0;
#pragma unroll
  for (int j = 0; j < kFew<T>; j += kLanes) {
    if (j < num_few) {
      const Vector<T> weight = load_vector(weights + j);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const T sign = static_cast<T>(point > few[j + lane]) -
            static_cast<T>(point < few[j + lane]);
        grad += weight.lanes[lane] * sign;
        few_grad[j + lane] -= weight.lanes[lane] * sign;
      }
    }
  }
  return grad;
}

// An item is a chunk of the many and up to 32 channels. What it adds to the
// gradient of the few is summed over the chunks later, in order.
template <typename S, typename T = compute_t<S>>
__global__ void __launch_bounds__(kWarps * kWarpSize) kernel_backward(
    int64_t items, int64_t chunks, Weights<S> weights, Matrices<const S> many,
    Matrices<const S> few, Matrices<T> many_grad, T* few_grads) {
  Arena arena(shared_memory());
  const BackwardTiles<T> tiles(arena);
  const int lane = threadIdx.x, warp = threadIdx.y;
  T* const tile = tiles.weights + warp * kMany * kFew<T>;
  const int64_t dims = many.columns;
  const int64_t channel_groups = ceil_div<int64_t>(dims, kWarpSize);

  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t chunk = item / channel_groups;  // of all batch indices
    const int64_t batch = chunk / chunks;
    const int64_t channel = item % channel_groups * kWarpSize + lane;
    const bool inside = channel < dims;
    const S* const grad = weights.grad[batch];
    const S* const kernel = weights.kernel[batch];
    const S* const many_points = many[batch] + channel;
    const S* const few_points = few[batch] + channel;
    T* const many_target = many_grad[batch] + channel;
    const int64_t first_row =
        chunk % chunks * kChunk + warp * (kChunk / kWarps);
    const int64_t last_row =
        std::min(first_row + kChunk / kWarps, many.rows);

    for (int64_t first = 0; first < few.rows; first += kFew<T>) {
      const int num_few = std::min<int64_t>(few.rows - first, kFew<T>);
      T points[kFew<T>], grads[kFew<T>];
#pragma unroll
      for (int j = 0; j < kFew<T>; ++j) {
        points[j] = inside && j < num_few
            ? static_cast<T>(few_points[(first + j) * few.row_stride])
            : T(0);
        grads[j] = 0;
      }

      for (int64_t row = first_row; row < last_row; row += kMany) {
        const int rows = std::min<int64_t>(last_row - row, kMany);
        load_weights(
            weights, grad, kernel, row, rows, first, num_few, tile);
        __syncwarp();
        for (int i = 0; i < rows; ++i) {
          const T point = inside
              ? static_cast<T>(many_points[(row + i) * many.row_stride])
              : T(0);
          const T sum = add_gradients(
              tile + i * kFew<T>, point, points, num_few, grads);
          if (inside) {
            T& target = many_target[(row + i) * many_grad.row_stride];
            target = first == 0 ? sum : target + sum;
          }
        }
        __syncwarp();  // all have read the weights
      }

#pragma unroll
      for (int j = 0; j < kFew<T>; ++j) {
        tiles.sums[(warp * kFew<T> + j) * kWarpSize + lane] = grads[j];
      }
      __syncthreads();
      for (int j = warp; j < num_few; j += kWarps) {
        T sum = 0;
        for (int other = 0; other < kWarps; ++other) {
          sum += tiles.sums[(other * kFew<T> + j) * kWarpSize + lane];
        }
        if (inside) {
          few_grads[(chunk * few.rows + first + j) * dims + channel] = sum;
        }
      }
      __syncthreads();  // all have read the sums
    }
  }
}

// Returns the gradients of the many and of the few.
template <typename S>
std::tuple<Tensor, Tensor> backward(
    const Tensor& grad, const Tensor& kernel, bool transposed,
    const Tensor& many, const Tensor& few, double scale) {
  using T = compute_t<S>;
  const auto options = many.options().dtype(compute_type(many));
  const Tensor many_grad = at::empty(many.sizes(), options);
  const int64_t batches = batch_size(many), dims = many.size(-1);
  const int64_t chunks = ceil_div(many.size(-2), kChunk);
  const Tensor few_grads =
      at::empty({batches, chunks, few.size(-2), dims}, options);
  const int64_t items =
      batches * chunks * ceil_div<int64_t>(dims, kWarpSize);
  Arena arena;
  const BackwardTiles<T> tiles(arena);
  launch(
      kernel_backward<S>, items, dim3(kWarpSize, kWarps), arena.bytes(),
      items, chunks,
      Weights<S>{matrices<const S>(grad), matrices<const S>(kernel),
                 transposed, static_cast<T>(-1 / scale)},
      matrices<const S>(many), matrices<const S>(few),
      matrices<T>(many_grad), few_grads.data_ptr<T>());
  return {many_grad.to(many.scalar_type()),
          few_grads.sum(1).to(few.scalar_type())};
}

}  // namespace

Tensor laplacian_kernel_cuda(
    const Tensor& queries, const Tensor& keys, double scale) {
  check_laplacian_kernel(queries, keys);
  const DeviceGuard device(queries);
  const BelowDispatch guard;
  const Tensor result = at::empty(
      matrix_sizes(queries, queries.size(-2), keys.size(-2)),
      queries.options());
  if (result.numel() > 0) {
    MMLAPLACE_DISPATCH(queries, "laplacian_kernel", [&] {
      forward<scalar_t>(
          arrange(queries), arrange(keys), scale, arrange(result));
    });
  }
  return result;
}

std::tuple<Tensor, Tensor> laplacian_kernel_backward_cuda(
    const Tensor& grad, const Tensor& queries, const Tensor& keys,
    const Tensor& result, double scale) {
  check_laplacian_kernel_backward(grad, queries, keys, result);
  const DeviceGuard device(queries);
  const BelowDispatch guard;
  if (result.numel() == 0) {
    return {at::zeros_like(queries, at::MemoryFormat::Contiguous),
            at::zeros_like(keys, at::MemoryFormat::Contiguous)};
  }
  const Tensor g = arrange(grad), kernel = arrange(result);
  const Tensor q = arrange(queries), k = arrange(keys);
  Tensor query_grad, key_grad;
  MMLAPLACE_DISPATCH(queries, "laplacian_kernel_backward", [&] {
    if (q.size(-2) >= k.size(-2)) {
      std::tie(query_grad, key_grad) =
          backward<scalar_t>(g, kernel, false, q, k, scale);
    } else {
      std::tie(key_grad, query_grad) =
          backward<scalar_t>(g, kernel, true, k, q, scale);
    }
  });
  return {query_grad.view(queries.sizes()), key_grad.view(keys.sizes())};
}

TORCH_LIBRARY_IMPL(mmlaplace, MMLAPLACE_DISPATCH_KEY, m) {
  m.impl("laplacian_kernel", laplacian_kernel_cuda);
  m.impl("laplacian_kernel_backward", laplacian_kernel_backward_cuda);
}

}  // namespace mmlaplace
