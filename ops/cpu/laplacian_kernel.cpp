// The Laplacian kernel matrix and its gradient.
#define MMLAPLACE_KERNELS "cpu/tiles.h"
#include "cpu/each_instruction_set.h"

#include "checks.h"
#include "cpu/common.h"
#include "cpu/operators.h"
#include "cpu/point_gradients.h"

namespace mmlaplace {

namespace {

// A tile of this many rows leaves room in the first-level cache.
int64_t tile_rows(int64_t columns) {
  return std::clamp<int64_t>(4096 / padded(columns), 4, 64);
}

template <typename T>
void forward(const Tensor& queries, const Tensor& keys, double scale,
             const Tensor& result) {
  const Matrices<T> q(queries), k(keys), out(result);
  const int64_t columns = k.rows(), dims = k.columns();
  const int64_t stride = padded(columns);
  const int64_t chunk = 256;
  const int64_t chunks = at::divup(q.rows(), chunk);
  at::parallel_for(
      0, batch_size(queries) * chunks, 1, [&](int64_t begin, int64_t end) {
        Scratch<T> scratch;
        T* const transposed = scratch.allocate(dims, stride);
        int64_t last_batch = -1;
        for (int64_t item = begin; item < end; ++item) {
          const int64_t batch = item / chunks;
          if (batch != last_batch) {
            MMLAPLACE_SELECT(transpose<T>)(
                k[batch], k.stride(), transposed, stride, columns, dims);
            last_batch = batch;
          }
          const int64_t row = item % chunks * chunk;
          MMLAPLACE_SELECT(kernel_tile<T>)(
              q.row(batch, row), q.stride(), transposed, stride,
              k.row(batch, columns - 1), out.row(batch, row), columns,
              columns,
              std::min(chunk, q.rows() - row), columns, dims, scale);
        }
      });
}

// The gradient of a kernel matrix, seen with the many points as its rows and
// the few as its columns: `transposed` tells that grad and kernel are stored
// the other way round. Returns the gradients of the many and of the few.
template <typename T>
std::tuple<Tensor, Tensor> backward(
    const Tensor& grad, const Tensor& kernel, bool transposed,
    const Tensor& many, const Tensor& few, double scale) {
  const Matrices<T> g(grad), values(kernel), q(many), k(few);
  const int64_t columns = k.rows(), dims = k.columns();
  const int64_t stride = padded(columns), point_stride = padded(dims);
  const auto options = many.options().dtype(compute_type(many));
  const Tensor many_grad = at::empty(many.sizes(), options);
  const Matrices<T> out(many_grad);
  // Each chunk of rows adds up a gradient of the columns. Chunks depend on
  // the sizes alone, so their sum is the same on any number of threads.
  const int64_t chunk = std::max<int64_t>(1024, 4 * columns);
  const int64_t chunks = at::divup(q.rows(), chunk);
  const Tensor partial = at::zeros(
      {batch_size(many), chunks, columns, point_stride}, options);
  T* const few_grad = partial.data_ptr<T>();
  const T factor = static_cast<T>(-1 / scale);
  const auto multiply = MMLAPLACE_SELECT(multiply<T>);
  const auto pad_rows = MMLAPLACE_SELECT(pad_rows<T>);

  at::parallel_for(
      0, batch_size(many) * chunks, 1, [&](int64_t begin, int64_t end) {
        Scratch<T> scratch;
        T* const keys = scratch.allocate(columns, point_stride);
        T* const weights = scratch.allocate(tile_rows(columns), stride);
        const PointGradients<T> gradients(tile_rows(columns), dims);
        for (int64_t item = begin; item < end; ++item) {
          const int64_t batch = item / chunks;
          const int64_t first = item % chunks * chunk;
          const int64_t last = std::min(first + chunk, q.rows());
          pad_rows(k[batch], k.stride(), keys, point_stride, columns, dims);
          for (int64_t row = first; row < last; row += tile_rows(columns)) {
            const int64_t rows = std::min(tile_rows(columns), last - row);
            if (transposed) {
              multiply(g[batch] + row, 1, g.stride(), values[batch] + row, 1,
                       values.stride(), weights, stride, rows, columns,
                       factor);
            } else {
              multiply(g.row(batch, row), g.stride(), 1,
                       values.row(batch, row), values.stride(), 1, weights,
                       stride, rows, columns, factor);
            }
            gradients(weights, stride, q.row(batch, row), q.stride(), keys,
                      out.row(batch, row),
                      few_grad + item * columns * point_stride, rows,
                      columns);
          }
        }
      });
  const Tensor few_sum =
      partial.sum(1).slice(-1, 0, dims).contiguous().view(few.sizes());
  return {many_grad.to(many.scalar_type()), few_sum.to(few.scalar_type())};
}

}  // namespace

Tensor laplacian_kernel(
    const Tensor& queries, const Tensor& keys, double scale) {
  check_laplacian_kernel(queries, keys);
  const Tensor result = at::empty(
      matrix_sizes(queries, queries.size(-2), keys.size(-2)),
      queries.options().dtype(compute_type(queries)));
  if (result.numel() > 0) {
    AT_DISPATCH_FLOATING_TYPES(
        result.scalar_type(), "laplacian_kernel",
        [&] { forward<scalar_t>(queries, keys, scale, result); });
  }
  return result.to(queries.scalar_type());
}

std::tuple<Tensor, Tensor> laplacian_kernel_backward(
    const Tensor& grad, const Tensor& queries, const Tensor& keys,
    const Tensor& result, double scale) {
  check_laplacian_kernel_backward(grad, queries, keys, result);
  if (result.numel() == 0) {
    return {at::zeros_like(queries, at::MemoryFormat::Contiguous),
            at::zeros_like(keys, at::MemoryFormat::Contiguous)};
  }
  Tensor query_grad, key_grad;
  AT_DISPATCH_FLOATING_TYPES(
      compute_type(queries), "laplacian_kernel_backward", [&] {
        if (queries.size(-2) >= keys.size(-2)) {
          std::tie(query_grad, key_grad) =
              backward<scalar_t>(grad, result, false, queries, keys, scale);
        } else {
          std::tie(key_grad, query_grad) =
              backward<scalar_t>(grad, result, true, keys, queries, scale);
        }
      });
  return {query_grad, key_grad};
}

TORCH_LIBRARY_IMPL(mmlaplace, CPU, m) {
  m.impl("laplacian_kernel", laplacian_kernel);
  m.impl("laplacian_kernel_backward", laplacian_kernel_backward);
}

}  // namespace mmlaplace
