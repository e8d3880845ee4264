// Whitened Nystroem attention, in passes over tiles of tokens: the kernel of a
// tile and a block of landmarks is computed where it is needed and never
// stored. ops/README.md derives the formulas; the names here are those of the
// text. Products that no token takes part in are left to torch, in float64.
#include "attention.h"
#include "checks.h"
#include "cuda/common.cuh"
#include "cuda/laplacian_attention_tiles.cuh"
#include "cuda/operators.cuh"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <tuple>
#include <vector>

namespace mmlaplace {

namespace {

__host__ __device__ constexpr int64_t moment_elements(
    int64_t left, int64_t right) {
  return left + right + left * right;
}

// Of each chunk: the means of the columns of the kernel and of another matrix,
// and the sum of their centred products. The other matrix is factors * rights
// or, where there are no rights, factors * the kernel. Columns are shifted by
// their means over the first tile, so that nothing cancels in T.
template <typename scalar_t, typename T = compute_t<scalar_t>>
__global__ void __launch_bounds__(kThreads<T>, kBlocks<T>)
chunk_moments_kernel(
    Pass<scalar_t> pass, Matrices<const scalar_t> rights, int right_count,
    const T* factors, double* moments) {
  Tiles<T>& tiles = shared_tiles<T>();
  const int count = pass.count;
  const int left_blocks = block_count<T>(count);
  const int right_blocks = block_count<T>(right_count);
  const int64_t items =
      pass.batches * pass.chunks * left_blocks * right_blocks;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int right_block = item % right_blocks * kSide<T>;
    const int left_block = item / right_blocks % left_blocks * kSide<T>;
    const int64_t chunk = item / right_blocks / left_blocks;
    const int64_t batch = chunk / pass.chunks;
    const int64_t first = chunk % pass.chunks * pass.chunk_tokens;
    const int tokens = pass.size_of_chunk(first);
    const scalar_t* const points = pass.points.row(batch, first);
    const scalar_t* const landmarks = pass.landmarks[batch];
    const int64_t index = batch * pass.tokens + first;
    Sums<T> products;
    T left_sum = 0, right_sum = 0;
    for (int token = 0; token < tokens; token += kSide<T>) {
      const int rows = at_most(tokens - token, kSide<T>);
      const scalar_t* const tile_points =
          points + token * pass.points.row_stride;
      kernel_tile(
          pass, tile_points, landmarks, rows, left_block, tiles.kernel);
      if (rights.data != nullptr) {
        load_tile<kSide<T>>(
            tiles.right, rights.row(batch, first + token) + right_block,
            rights.row_stride, rows, right_count - right_block);
      } else if (left_block == right_block) {
        __syncthreads();
        load_tile<kSide<T>>(
            tiles.right, tiles.kernel, kStride<T>, kSide<T>, kSide<T>);
      } else {
        kernel_tile(
            pass, tile_points, landmarks, rows, right_block, tiles.right);
        __syncthreads();
      }
      if (factors != nullptr) {
        scale_tile<kSide<T>>(
            tiles.right, rows, kSide<T>, factors + index + token,
            static_cast<const T*>(nullptr));
      }
      __syncthreads();
      if (token == 0) {
        store_row(
            tiles.left_row, sum_of_column(centre(tiles.kernel, rows)) / rows);
        store_row(
            tiles.right_row, sum_of_column(centre(tiles.right, rows)) / rows);
        __syncthreads();
      }
      left_sum += centre(tiles.kernel, rows, tiles.left_row);
      right_sum += centre(tiles.right, rows, tiles.right_row);
      __syncthreads();
      products.add_transposed(
          tiles.kernel, tiles.right, rows,
          at_most(right_count - right_block, kSide<T>));
    }
    left_sum = sum_of_column(left_sum);
    right_sum = sum_of_column(right_sum);
    double* const left_means =
        moments + chunk * moment_elements(count, right_count);
    double* const right_means = left_means + count;
    double* const product = right_means + right_count;
    const double share = 1. / tokens;
    if (threadIdx.x < kSide<T>) {
      const int i = left_block + threadIdx.x, j = right_block + threadIdx.x;
      if (right_block == 0 && i < count) {
        left_means[i] = tiles.left_row[threadIdx.x] + left_sum * share;
      }
      if (left_block == 0 && j < right_count) {
        right_means[j] = tiles.right_row[threadIdx.x] + right_sum * share;
      }
    }
    store_row(tiles.left_row, left_sum);
    store_row(tiles.right_row, right_sum);
    __syncthreads();
    products.each([&](int row, int column, T sum) {
      const int i = left_block + row, j = right_block + column;
      if (i < count && j < right_count) {
        product[int64_t{i} * right_count + j] = sum -
            tiles.left_row[row] * (tiles.right_row[column] * share);
      }
    });
  }
}

// Merges what was found in the chunks of each matrix, an element for each
// thread (Chan, Golub and LeVeque, 1979).
__global__ void merge_moments_kernel(
    const double* partial, int64_t batches, int64_t tokens,
    int64_t chunk_tokens, int64_t chunks, int64_t left, int64_t right,
    double* moments) {
  const int64_t elements = moment_elements(left, right);
  const int64_t items = ceil_div<int64_t>(batches * elements, blockDim.x);
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t index = item * blockDim.x + threadIdx.x;
    if (index >= batches * elements) {
      return;
    }
    const int64_t element = index % elements;
    const int64_t product = element - left - right;
    const int64_t i = product < 0 ? element : product / right;
    const int64_t j = product < 0 ? element : left + product % right;
    const double* const found =
        partial + index / elements * chunks * elements;
    double left_mean = 0, right_mean = 0, sum = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const double* const other = found + chunk * elements;
      const int64_t before = chunk * chunk_tokens;
      const int64_t after =
          before + chunk_tokens < tokens ? before + chunk_tokens : tokens;
      const double share = static_cast<double>(after - before) / after;
      const double left_step = (other[i] - left_mean) * share;
      const double right_step = other[j] - right_mean;
      sum += other[element] + left_step * right_step * before;
      left_mean += left_step;
      right_mean += right_step * share;
    }
    moments[index] = product < 0 ? left_mean : sum;
  }
}

// The whitening scales of the keys: 1 / sqrt(k^T form k + eps).
template <typename scalar_t, typename T = compute_t<scalar_t>>
__global__ void __launch_bounds__(kThreads<T>, kBlocks<T>)
key_scales_kernel(Pass<scalar_t> pass, const T* forms, T eps, T* scales) {
  Tiles<T>& tiles = shared_tiles<T>();
  const int count = pass.count, blocks = block_count<T>(count);
  const int64_t token_tiles = ceil_div<int64_t>(pass.tokens, kSide<T>);
  for (int64_t item = blockIdx.x; item < pass.batches * token_tiles;
       item += gridDim.x) {
    const int64_t batch = item / token_tiles;
    const int64_t token = item % token_tiles * kSide<T>;
    const int rows = at_most(pass.tokens - token, kSide<T>);
    const scalar_t* const points = pass.points.row(batch, token);
    const scalar_t* const landmarks = pass.landmarks[batch];
    T variance = 0;
    for (int right = 0; right < count; right += kSide<T>) {
      Sums<T> products;
      // The last of the kernels is that of the block itself.
      for (int step = 1; step <= blocks; ++step) {
        const int left = (right / kSide<T> + step) % blocks * kSide<T>;
        kernel_tile(pass, points, landmarks, rows, left, tiles.kernel);
        load_tile<kSide<T>>(
            tiles.right, forms + (batch * count + left) * count + right,
            count, count - left, count - right);
        __syncthreads();
        products.template add<kStride<T>>(
            tiles.kernel, tiles.right, at_most(count - left, kSide<T>),
            at_most(count - right, kSide<T>));
      }
      __syncthreads();
      products.each([&](int row, int column, T sum) {
        tiles.kernel[row * kStride<T> + column] *= sum;
      });
      __syncthreads();
      variance += sum_of_row(tiles.kernel);
    }
    if (threadIdx.x % kParts<T> == 0 && own_row<T>() < rows) {
      // Below zero only by rounding; NaN stays.
      variance = variance < 0 ? T(0) : variance;
      scales[batch * pass.tokens + token + own_row<T>()] =
          1 / std::sqrt(variance + eps);
    }
  }
}

// Leaves (kernel - kernel_mean) @ matrix, from a column on, in tiles.right.
template <typename scalar_t, typename T>
__device__ __forceinline__ void project_tile(
    const Pass<scalar_t>& pass, const scalar_t* points,
    const scalar_t* landmarks, int rows, const T* kernel_mean,
    const T* matrix, int columns, int first) {
  Tiles<T>& tiles = shared_tiles<T>();
  Sums<T> products;
  for (int block = 0; block < pass.count; block += kSide<T>) {
    kernel_tile(pass, points, landmarks, rows, block, tiles.kernel);
    load_tile<kSide<T>>(
        tiles.right, matrix + int64_t{block} * columns + first, columns,
        pass.count - block, columns - first);
    load_row(
        tiles.left_row, advance(kernel_mean, block), pass.count - block);
    __syncthreads();
    products.template add<kStride<T>>(
        tiles.kernel, tiles.right, at_most(pass.count - block, kSide<T>),
        at_most(columns - first, kSide<T>), tiles.left_row);
  }
  __syncthreads();
  products.each([&](int row, int column, T sum) {
    tiles.right[row * kStride<T> + column] = sum;
  });
  __syncthreads();
}

// The output, C_q projection + value_mean.
template <typename scalar_t, typename T = compute_t<scalar_t>>
__global__ void __launch_bounds__(kThreads<T>, kBlocks<T>) output_kernel(
    Pass<scalar_t> pass, const T* projections, const T* value_means,
    int columns, Matrices<scalar_t> outputs) {
  const Tiles<T>& tiles = shared_tiles<T>();
  const int column_blocks = ceil_div(columns, kSide<T>);
  const int64_t token_tiles = ceil_div<int64_t>(pass.tokens, kSide<T>);
  for (int64_t item = blockIdx.x;
       item < pass.batches * token_tiles * column_blocks;
       item += gridDim.x) {
    const int first = item % column_blocks * kSide<T>;
    const int64_t token = item / column_blocks % token_tiles * kSide<T>;
    const int64_t batch = item / column_blocks / token_tiles;
    const int rows = at_most(pass.tokens - token, kSide<T>);
    project_tile<scalar_t, T>(
        pass, pass.points.row(batch, token), pass.landmarks[batch], rows,
        nullptr, projections + batch * pass.count * columns, columns, first);
    scalar_t* const output = outputs.row(batch, token) + first;
    const T* const value_mean = value_means + batch * columns + first;
    each_element<T>([&](int row, int column) {
      if (row < rows && first + column < columns) {
        output[row * outputs.row_stride + column] = static_cast<scalar_t>(
            tiles.right[row * kStride<T> + column] + value_mean[column]);
      }
    });
  }
}

// The gradient of the values and that of the variances.
template <typename scalar_t, typename T = compute_t<scalar_t>>
__global__ void __launch_bounds__(kThreads<T>, kGradientBlocks<T>)
value_gradient_kernel(
    Pass<scalar_t> pass, Matrices<const scalar_t> values, int columns,
    const T* scales, const T* kernel_means, const T* cross_grads,
    const T* mean_grads, scalar_t* value_grads, T* variance_grads) {
  Tiles<T>& tiles = shared_tiles<T>();
  const int64_t token_tiles = ceil_div<int64_t>(pass.tokens, kSide<T>);
  for (int64_t item = blockIdx.x; item < pass.batches * token_tiles;
       item += gridDim.x) {
    const int64_t batch = item / token_tiles;
    const int64_t token = item % token_tiles * kSide<T>;
    const int rows = at_most(pass.tokens - token, kSide<T>);
    const scalar_t* const points = pass.points.row(batch, token);
    const scalar_t* const landmarks = pass.landmarks[batch];
    const int64_t index = batch * pass.tokens + token;
    T product = 0;
    for (int first = 0; first < columns; first += kSide<T>) {
      project_tile(
          pass, points, landmarks, rows,
          advance(kernel_means, batch * pass.count),
          cross_grads + batch * pass.count * columns, columns, first);
      const scalar_t* const value_rows = values.row(batch, token);
      each_element<T>([&](int row, int column) {
        T& sum = tiles.right[row * kStride<T> + column];
        const int c = first + column;
        if (row < rows && c < columns) {
          const T weighted_grad = scales[index + row] * sum;
          value_grads[(index + row) * columns + c] = static_cast<scalar_t>(
              mean_grads[batch * columns + c] + weighted_grad);
          sum = weighted_grad *
              static_cast<T>(value_rows[row * values.row_stride + c]);
        }
      });
      __syncthreads();
      product += sum_of_row(tiles.right);
    }
    if (threadIdx.x % kParts<T> == 0 && own_row<T>() < rows) {
      // With D = (sigma^2 + eps)^(-1/2) and <v, d Dv> = <Dv, d Dv> / D, the
      // gradient of sigma^2 is -<Dv, d Dv> D^2 / 2.
      const T scale = scales[index + own_row<T>()];
      variance_grads[index + own_row<T>()] = -product * scale * scale / 2;
    }
  }
}

// What the gradient of the kernel is computed from:
//   (left_factors * left - left_shift) @ right
//   + form_factors * (kernel - kernel_mean) @ form
// Factors are those of each token; all but left and right may be missing.
template <typename scalar_t>
struct KernelGradient {
  using T = compute_t<scalar_t>;

  Matrices<const scalar_t> left;
  int left_columns;
  const T* left_factors = nullptr;
  const T* left_shift = nullptr;
  const T* right = nullptr;
  const T* form_factors = nullptr;
  const T* kernel_mean = nullptr;
  const T* form = nullptr;
};

// Leaves the gradient of the distances between a tile of tokens and a block
// of landmarks in tiles.kernel.
template <typename scalar_t, typename T = compute_t<scalar_t>>
__device__ __forceinline__ void distance_gradient_tile(
    const Pass<scalar_t>& pass, const KernelGradient<scalar_t>& gradient,
    int64_t batch, int64_t token, int rows, int block) {
  Tiles<T>& tiles = shared_tiles<T>();
  const int count = pass.count;
  const int columns = at_most(count - block, kSide<T>);
  const scalar_t* const points = pass.points.row(batch, token);
  const scalar_t* const landmarks = pass.landmarks[batch];
  Sums<T> sums;
  if (gradient.form == nullptr) {
    kernel_tile(pass, points, landmarks, rows, block, tiles.kernel);
  } else {
    const int blocks = block_count<T>(count);
    // The last of the kernels is that of the block itself.
    for (int step = 1; step <= blocks; ++step) {
      const int other = (block / kSide<T> + step) % blocks * kSide<T>;
      kernel_tile(pass, points, landmarks, rows, other, tiles.kernel);
      load_tile<kSide<T>>(
          tiles.right, gradient.form + (batch * count + other) * count + block,
          count, count - other, count - block);
      load_row(
          tiles.left_row,
          advance(gradient.kernel_mean, batch * count + other),
          count - other);
      __syncthreads();
      sums.template add<kStride<T>>(
          tiles.kernel, tiles.right, at_most(count - other, kSide<T>),
          columns, tiles.left_row);
    }
    if (gradient.form_factors != nullptr) {
      const T* const factors =
          gradient.form_factors + batch * pass.tokens + token;
      sums.each([&](int row, int, T& sum) {
        sum *= row < rows ? factors[row] : T(0);
      });
    }
  }
  for (int first = 0; first < gradient.left_columns;
       first += kChannels<T>) {
    const int depth = at_most(gradient.left_columns - first, kChannels<T>);
    const int64_t index = batch * gradient.left_columns + first;
    __syncthreads();
    load_tile<kChannels<T>>(
        tiles.points, gradient.left.row(batch, token) + first,
        gradient.left.row_stride, rows, depth);
    scale_tile<kChannels<T>>(
        tiles.points, rows, depth,
        advance(gradient.left_factors, batch * pass.tokens + token),
        advance(gradient.left_shift, index));
    load_tile<kSide<T>>(
        tiles.right, gradient.right + index * count + block, count, depth,
        columns);
    __syncthreads();
    sums.template add<kPointStride<T>>(
        tiles.points, tiles.right, depth, columns);
  }
  __syncthreads();
  sums.each([&](int row, int column, T sum) {
    tiles.kernel[row * kStride<T> + column] *= pass.factor * sum;
  });
}

// The gradient of the points and, for each chunk, that of the landmarks.
template <typename scalar_t, typename T = compute_t<scalar_t>>
__global__ void __launch_bounds__(kThreads<T>, kGradientBlocks<T>)
point_gradient_kernel(
    Pass<scalar_t> pass, KernelGradient<scalar_t> gradient, T* point_grads,
    T* landmark_grads) {
  constexpr int kAcross = kChannels<T> / 4;
  Tiles<T>& tiles = shared_tiles<T>();
  const int64_t dims = pass.dims;
  // This thread has 4 channels of 2 points and of 2 landmarks.
  const int row = threadIdx.x / kAcross * 2;
  const int column = threadIdx.x % kAcross * 4;
  for (int64_t chunk = blockIdx.x; chunk < pass.batches * pass.chunks;
       chunk += gridDim.x) {
    const int64_t batch = chunk / pass.chunks;
    const int64_t first = chunk % pass.chunks * pass.chunk_tokens;
    const int tokens = pass.size_of_chunk(first);
    for (int token = 0; token < tokens; token += kSide<T>) {
      const int rows = at_most(tokens - token, kSide<T>);
      for (int block = 0; block < pass.count; block += kSide<T>) {
        const int columns = at_most(pass.count - block, kSide<T>);
        distance_gradient_tile(
            pass, gradient, batch, first + token, rows, block);
        for (int channel = 0; channel < dims; channel += kChannels<T>) {
          const int channels = at_most(dims - channel, kChannels<T>);
          __syncthreads();
          load_tile<kChannels<T>>(
              tiles.points, pass.points.row(batch, first + token) + channel,
              pass.points.row_stride, rows, channels);
          load_tile<kChannels<T>>(
              tiles.landmarks, pass.landmarks.row(batch, block) + channel,
              pass.landmarks.row_stride, columns, channels);
          __syncthreads();
          if (row < rows) {
            T sums[2][4] = {};
            add_signed<false>(
                tiles.kernel, tiles.points, tiles.landmarks, row, column,
                columns, sums);
            store_sums(
                sums, block > 0, row, rows, column, channels,
                point_grads + (batch * pass.tokens + first + token) * dims +
                    channel,
                dims);
          }
          if (row < columns) {
            T sums[2][4] = {};
            add_signed<true>(
                tiles.kernel, tiles.landmarks, tiles.points, row, column,
                rows, sums);
            store_sums(
                sums, token > 0, row, columns, column, channels,
                landmark_grads + (chunk * pass.count + block) * dims +
                    channel,
                dims);
          }
        }
      }
    }
  }
}

struct Inputs {
  Tensor queries;  // these four arranged
  Tensor keys;
  Tensor values;
  Tensor landmarks;
  double scale;
  bool whiten;
  double eps;

  int64_t batches() const {
    return queries.size(0) * queries.size(1);
  }
  int64_t landmark_count() const {
    return landmarks.size(-2);
  }
  // 1 / N, or 1 where there are no queries.
  double query_share() const {
    return 1.0 / std::max<int64_t>(queries.size(-2), 1);
  }
  // For what is computed, in float32 or float64.
  at::TensorOptions options() const {
    return queries.options().dtype(compute_type());
  }
  at::ScalarType compute_type() const {
    return at::toOpMathType(queries.scalar_type());
  }
  at::TensorOptions double_options() const {
    return queries.options().dtype(at::kDouble);
  }
  // A product of torch's, for the kernels.
  Tensor narrow(const Tensor& product) const {
    return product.to(compute_type()).contiguous();
  }
};

Inputs make_inputs(
    const Tensor& queries, const Tensor& keys, const Tensor& values,
    const Tensor& landmarks, const Tensor& gain, double scale,
    c10::string_view whitening, double eps) {
  check_laplacian_attention(queries, keys, values, landmarks, gain);
  return {arrange(queries), arrange(keys), arrange(values),
          arrange(landmarks), scale, whitening != "none", eps};
}

// Tokens go in chunks of about 512 or of 32 for each landmark, if that is
// more: then what is kept of each chunk takes less memory than its kernel.
template <typename scalar_t>
Pass<scalar_t> make_pass(const Inputs& inputs, const Tensor& points) {
  const int64_t side = kSide<compute_t<scalar_t>>;
  const int64_t tokens = points.size(-2);
  const int64_t count = inputs.landmarks.size(-2);
  const int64_t chunks =
      ceil_div(tokens, std::max<int64_t>(512, 32 * count));
  const int64_t chunk_tokens =
      round_up(ceil_div(tokens, std::max<int64_t>(chunks, 1)), side);
  return {
      matrices<const scalar_t>(points),
      matrices<const scalar_t>(inputs.landmarks),
      inputs.batches(),
      tokens,
      tokens == 0 ? 0 : ceil_div(tokens, chunk_tokens),
      static_cast<int>(chunk_tokens),
      static_cast<int>(count),
      static_cast<int>(points.size(-1)),
      static_cast<compute_t<scalar_t>>(-1 / inputs.scale)};
}

template <typename T>
T* pointer(const Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr<T>() : nullptr;
}

template <typename T, typename... Parameters, typename... Arguments>
void launch_on_tiles(
    void (*kernel)(Parameters...), int64_t items,
    const Arguments&... arguments) {
  if (items > 0) {
    launch(kernel, items, kThreads<T>, sizeof(Tiles<T>), arguments...);
  }
}

template <typename scalar_t>
int64_t tile_count(const Pass<scalar_t>& pass) {
  return pass.batches *
      ceil_div<int64_t>(pass.tokens, kSide<compute_t<scalar_t>>);
}

// Means of two sets of columns and the sum of their centred products, for
// each matrix. In memory they follow one another in a row.
struct Moments {
  Tensor left_mean;
  Tensor right_mean;
  Tensor product;

  Moments(const Tensor& rows, int64_t left, int64_t right)
      : left_mean(rows.narrow(-1, 0, left)),
        right_mean(rows.narrow(-1, left, right)),
        product(rows.narrow(-1, left + right, left * right)
                    .reshape({rows.size(0), left, right})) {}

  // The same sum, over `count` rows, of products that are not centred.
  Tensor plain_product(int64_t count) const {
    return product +
        count * left_mean.unsqueeze(-1) * right_mean.unsqueeze(-2);
  }
};

// The moments of the kernel of all points and another matrix, as
// chunk_moments_kernel has it.
template <typename scalar_t>
Tensor kernel_moments(
    const Inputs& inputs, const Tensor& points, const Tensor& rights,
    const Tensor& factors) {
  using T = compute_t<scalar_t>;
  const Pass<scalar_t> pass = make_pass<scalar_t>(inputs, points);
  const int count = pass.count;
  const int right_count =
      rights.defined() ? static_cast<int>(rights.size(-1)) : count;
  const int64_t elements = moment_elements(count, right_count);
  const Tensor partial = at::empty(
      {pass.batches * pass.chunks, elements}, inputs.double_options());
  launch_on_tiles<T>(
      chunk_moments_kernel<scalar_t, T>,
      partial.size(0) * block_count<T>(count) * block_count<T>(right_count),
      pass,
      rights.defined() ? matrices<const scalar_t>(rights)
                       : Matrices<const scalar_t>{},
      right_count, pointer<T>(factors), partial.data_ptr<double>());
  if (pass.chunks == 1) {
    return partial;
  }
  constexpr int kMergeThreads = 256;
  const Tensor result =
      at::empty({pass.batches, elements}, inputs.double_options());
  if (pass.batches > 0) {
    launch(
        merge_moments_kernel,
        ceil_div<int64_t>(result.numel(), kMergeThreads), kMergeThreads, 0,
        partial.data_ptr<double>(), pass.batches, pass.tokens,
        pass.chunk_tokens, pass.chunks, count, right_count,
        result.data_ptr<double>());
  }
  return result;
}

// X^T S X
Tensor quadratic_form(
    const Inputs& inputs, const Moments& query_stats, const Tensor& x) {
  return x.mT()
      .matmul(query_stats.product * inputs.query_share())
      .matmul(x);
}

// C_k u, or C_k v without whitening.
Tensor cross_product(const Inputs& inputs, const Moments& key_stats) {
  return inputs.whiten ? key_stats.product
                       : key_stats.plain_product(inputs.keys.size(-2));
}

template <typename scalar_t>
Tensor key_scales(const Inputs& inputs, const Tensor& form) {
  using T = compute_t<scalar_t>;
  const Pass<scalar_t> pass = make_pass<scalar_t>(inputs, inputs.keys);
  const Tensor result =
      at::empty({pass.batches, pass.tokens}, inputs.options());
  launch_on_tiles<T>(
      key_scales_kernel<scalar_t, T>, tile_count(pass), pass,
      pointer<T>(form), static_cast<T>(inputs.eps), pointer<T>(result));
  return result;
}

template <typename scalar_t>
void compute_outputs(
    const Inputs& inputs, const Tensor& projection, const Tensor& value_mean,
    const Tensor& result) {
  using T = compute_t<scalar_t>;
  const Pass<scalar_t> pass = make_pass<scalar_t>(inputs, inputs.queries);
  const int columns = static_cast<int>(result.size(-1));
  launch_on_tiles<T>(
      output_kernel<scalar_t, T>,
      tile_count(pass) * ceil_div(columns, kSide<T>), pass,
      pointer<T>(projection), pointer<T>(value_mean), columns,
      matrices<scalar_t>(result));
}

// The gradients of the points, and of the landmarks in float64.
template <typename scalar_t>
std::tuple<Tensor, Tensor> point_gradients(
    const Inputs& inputs, const Tensor& points,
    const KernelGradient<scalar_t>& gradient) {
  using T = compute_t<scalar_t>;
  const Pass<scalar_t> pass = make_pass<scalar_t>(inputs, points);
  const Tensor point_grad = at::empty(points.sizes(), inputs.options());
  const Tensor landmark_grad = at::empty(
      {pass.batches, pass.chunks, pass.count, pass.dims},
      inputs.options());
  launch_on_tiles<T>(
      point_gradient_kernel<scalar_t, T>, pass.batches * pass.chunks, pass,
      gradient, pointer<T>(point_grad), pointer<T>(landmark_grad));
  return {point_grad, landmark_grad.sum(1, false, at::kDouble)};
}

struct Gradients {
  Tensor queries;
  Tensor keys;
  Tensor values;
  Tensor landmarks;  // but for what goes through the inverse, in float64
  Tensor gain;
  Tensor inverse;
};

template <typename scalar_t>
Gradients all_gradients(
    const Inputs& inputs, const Tensor& grad, const Tensor& scales,
    const Tensor& inverse, const Tensor& query_rows, const Tensor& key_rows,
    const Tensor& factors) {
  using T = compute_t<scalar_t>;
  const int64_t count = inputs.landmark_count();
  const int64_t value_dims = inputs.values.size(-1);
  const int columns = static_cast<int>(value_dims);
  const int64_t num_queries = inputs.queries.size(-2);
  const int64_t num_keys = inputs.keys.size(-2);
  const Moments query_stats(query_rows, count, count);
  const Moments key_stats(key_rows, count, value_dims);
  const Tensor x = inverse.to(at::kDouble);
  const Tensor cross = cross_product(inputs, key_stats);
  const Tensor projected = x.matmul(cross);
  Gradients result;

  // First pass, over the queries.
  const Moments grad_stats(
      kernel_moments<scalar_t>(inputs, inputs.queries, grad, Tensor()), count,
      value_dims);
  const Tensor projection_grad = grad_stats.plain_product(num_queries);
  result.gain = (projected * projection_grad).sum({-2, -1}) / num_keys;
  result.inverse = factors * projection_grad.matmul(cross.mT());

  // Second pass, over the keys. Without whitening nothing is centred, and
  // variances do not count.
  const Pass<scalar_t> key_pass = make_pass<scalar_t>(inputs, inputs.keys);
  const Tensor cross_grad = factors * x.mT().matmul(projection_grad);
  const Tensor narrow_cross_grad = inputs.narrow(cross_grad);
  const Tensor right = inputs.narrow(cross_grad.mT());
  const Tensor mean_grad = inputs.narrow(
      grad_stats.right_mean * (static_cast<double>(num_queries) / num_keys));
  const Tensor variance_grad = at::empty_like(scales);
  Tensor kernel_mean, value_mean;
  if (inputs.whiten) {
    kernel_mean = inputs.narrow(key_stats.left_mean);
    value_mean = inputs.narrow(key_stats.right_mean);
  }
  result.values = at::empty(inputs.values.sizes(), inputs.values.options());
  launch_on_tiles<T>(
      value_gradient_kernel<scalar_t, T>, tile_count(key_pass), key_pass,
      matrices<const scalar_t>(inputs.values), columns, pointer<T>(scales),
      pointer<T>(kernel_mean), pointer<T>(narrow_cross_grad),
      pointer<T>(mean_grad), pointer<scalar_t>(result.values),
      pointer<T>(variance_grad));
  KernelGradient<scalar_t> key_gradient{
      matrices<const scalar_t>(inputs.values), columns, pointer<T>(scales),
      pointer<T>(value_mean), pointer<T>(right)};
  Tensor form, covariance_grad;
  if (inputs.whiten) {
    form = inputs.narrow(2 * quadratic_form(inputs, query_stats, x));
    key_gradient.form_factors = pointer<T>(variance_grad);
    key_gradient.form = pointer<T>(form);
    const Tensor form_grad =
        Moments(
            kernel_moments<scalar_t>(
                inputs, inputs.keys, Tensor(), variance_grad),
            count, count)
            .plain_product(num_keys);
    const double share = 2 * inputs.query_share();
    result.inverse = result.inverse +
        share * query_stats.product.matmul(x).matmul(form_grad);
    covariance_grad =
        inputs.narrow(share * x.matmul(form_grad).matmul(x.mT()));
  }
  Tensor query_side;
  std::tie(result.keys, result.landmarks) =
      point_gradients<scalar_t>(inputs, inputs.keys, key_gradient);

  // Third pass, over the queries.
  const Tensor projection = inputs.narrow(factors * projected.mT());
  const Tensor query_mean = inputs.narrow(query_stats.left_mean);
  const KernelGradient<scalar_t> query_gradient{
      matrices<const scalar_t>(grad), columns, nullptr, nullptr,
      pointer<T>(projection), nullptr, pointer<T>(query_mean),
      pointer<T>(covariance_grad)};
  std::tie(result.queries, query_side) =
      point_gradients<scalar_t>(inputs, inputs.queries, query_gradient);
  result.landmarks = result.landmarks + query_side;
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> laplacian_attention(
    const Tensor& queries, const Tensor& keys, const Tensor& values,
    const Tensor& landmarks, const Tensor& gain, double scale,
    c10::string_view whitening, int64_t num_iters, double eps) {
  const BelowDispatch below;
  const Inputs inputs = make_inputs(
      queries, keys, values, landmarks, gain, scale, whitening, eps);
  const DeviceGuard guard(queries);
  const int64_t batches = inputs.batches();
  const int64_t count = inputs.landmark_count();
  const int64_t value_dims = values.size(-1);

  const Tensor points = inputs.landmarks.to(inputs.compute_type())
                            .reshape({batches, count, queries.size(-1)});
  const Tensor inverse = newton_schulz_inverse_cuda(
      laplacian_kernel_cuda(points, points, scale), num_iters, eps, true);
  const Tensor x = inverse.to(at::kDouble);
  const Tensor value_sum = inputs.values.sum(-2, false, at::kDouble)
                               .reshape({batches, value_dims});
  const Tensor output = empty_outputs(queries, value_dims);
  Tensor scales, query_rows, key_rows;
  MMLAPLACE_DISPATCH(queries, "laplacian_attention", [&] {
    Tensor factors;
    if (inputs.whiten) {
      query_rows = kernel_moments<scalar_t>(
          inputs, inputs.queries, Tensor(), Tensor());
      const Moments query_stats(query_rows, count, count);
      factors = scales = key_scales<scalar_t>(
          inputs, inputs.narrow(quadratic_form(inputs, query_stats, x)));
    } else {
      query_rows = at::zeros({batches, moment_elements(count, count)},
                             inputs.double_options());
      scales = at::ones({batches, keys.size(-2)}, inputs.options());
    }
    key_rows = kernel_moments<scalar_t>(
        inputs, inputs.keys, inputs.values, factors);
    const Moments key_stats(key_rows, count, value_dims);
    const Tensor projection =
        sum_factors(gain, whitening, keys.size(-2)).view({batches, 1, 1}) *
        x.matmul(cross_product(inputs, key_stats));
    compute_outputs<scalar_t>(
        inputs, inputs.narrow(projection),
        inputs.narrow(value_sum / keys.size(-2)), arrange(output));
  });

  return {output, unflatten(scales, queries), unflatten(inverse, queries),
          unflatten(query_rows, queries),
          unflatten(at::cat({key_rows, value_sum}, 1), queries)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
laplacian_attention_backward(
    const Tensor& grad, const Tensor& queries, const Tensor& keys,
    const Tensor& values, const Tensor& landmarks, const Tensor& gain,
    const Tensor& key_scales, const Tensor& inverse,
    const Tensor& query_moments, const Tensor& key_moments, double scale,
    c10::string_view whitening, int64_t num_iters, double eps) {
  const BelowDispatch below;
  const Inputs inputs = make_inputs(
      queries, keys, values, landmarks, gain, scale, whitening, eps);
  check_laplacian_attention_grad(grad, queries, values);
  const DeviceGuard guard(queries);
  const auto type = inputs.compute_type();
  const int64_t batches = inputs.batches();
  const int64_t count = inputs.landmark_count();
  const int64_t value_dims = values.size(-1);
  const Tensor x = as_returned(inverse, type, {batches, count, count});
  const Tensor scales =
      as_returned(key_scales, type, {batches, keys.size(-2)});
  const Tensor query_rows = as_returned(
      query_moments, at::kDouble, {batches, moment_elements(count, count)});
  const Tensor key_rows = as_returned(
      key_moments, at::kDouble,
      {batches, moment_elements(count, value_dims) + value_dims});

  const Tensor output_grad = arrange(grad);
  Gradients gradients;
  MMLAPLACE_DISPATCH(queries, "laplacian_attention_backward", [&] {
    gradients = all_gradients<scalar_t>(
        inputs, output_grad, scales, x, query_rows, key_rows,
        sum_factors(gain, whitening, keys.size(-2)).view({batches, 1, 1}));
  });
  const Tensor points = inputs.landmarks.to(type).reshape(
      {batches, count, queries.size(-1)});
  const Tensor kernel = laplacian_kernel_cuda(points, points, scale);
  const auto [left, right] = laplacian_kernel_backward_cuda(
      newton_schulz_inverse_backward_cuda(
          gradients.inverse.to(type), kernel, num_iters, eps, true),
      points, points, kernel, scale);
  if (whitening == "literal") {
    gradients.gain.zero_();
  }
  const auto as = [](const Tensor& result, const Tensor& like) {
    return result.to(like.scalar_type()).reshape(like.sizes());
  };
  return {as(gradients.queries, queries), as(gradients.keys, keys),
          as(gradients.values, values),
          as(gradients.landmarks + left + right, landmarks),
          as(gradients.gain, gain)};
}

}  // namespace

TORCH_LIBRARY_IMPL(mmlaplace, MMLAPLACE_DISPATCH_KEY, m) {
  m.impl("laplacian_attention", laplacian_attention);
  m.impl("laplacian_attention_backward", laplacian_attention_backward);
}

}  // namespace mmlaplace
