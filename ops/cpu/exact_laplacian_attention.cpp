// Whitened attention whose landmarks are the keys themselves: the kernel
// matrix is exact and nothing is inverted. Like that with landmarks it is
// computed in passes over tiles, and never stored.
#define MMLAPLACE_KERNELS "cpu/laplacian_attention_tiles.h"
#include "cpu/each_instruction_set.h"

#include "checks.h"
#include "cpu/attention_passes.h"

#include <cmath>

namespace mmlaplace {

namespace {

Inputs make_inputs(
    const Tensor& queries, const Tensor& keys, const Tensor& values,
    const Tensor& gain, double scale, c10::string_view whitening,
    double eps) {
  check_laplacian_attention(queries, keys, values, keys, gain);
  const auto type = compute_type(queries);
  const Tensor points = keys.to(type);
  // At most about four chunks where there are as many queries as keys: each
  // has a gradient of all keys.
  return {queries.to(type), points, values.to(type), points, scale,
          whitening != "none", eps,
          std::max<int64_t>(1024, keys.size(-2) / 4)};
}

// The mean of each column and the sum of its squared deviations, which grow by
// a set of rows at a time (Chan, Golub and LeVeque, 1979).
template <typename T>
void merge_columns(
    int64_t count, int64_t other_count, const T* other_mean,
    const T* other_scatter, int64_t columns, double* mean, double* scatter) {
  const double share = double(other_count) / (count + other_count);
  for (int64_t j = 0; j < columns; ++j) {
    const double shift = other_mean[j] - mean[j];
    mean[j] += shift * share;
    scatter[j] += other_scatter[j] + shift * shift * share * count;
  }
}

// First pass over the queries: for each batch index the means of the columns
// of the kernel and, behind them, their scatter.
template <typename T>
Tensor column_moments(const Inputs& inputs) {
  const Matrices<T> queries(inputs.queries);
  const Chunks chunks = inputs.chunks(inputs.queries);
  const int64_t count = inputs.landmark_count(), stride = padded(count);
  const Tensor partial =
      at::zeros({chunks.count(), 2 * count}, inputs.double_options());
  at::parallel_for(0, chunks.count(), 1, [&](int64_t begin, int64_t end) {
    LandmarkTiles<T> keys(inputs.landmarks, inputs.scale);
    Scratch<T> scratch;
    T* const mean = scratch.allocate(1, stride);
    T* const scatter = scratch.allocate(1, stride);
    for (int64_t index = begin; index < end; ++index) {
      const Chunk chunk = chunks[index];
      double* const moments = row_of(partial, index);
      keys.load(chunk.batch);
      for (int64_t row = chunk.first; row < chunk.last; row += kTileRows) {
        const int64_t rows = std::min(kTileRows, chunk.last - row);
        T* const kernel = keys.kernel(
            queries.row(chunk.batch, row), queries.stride(), rows);
        MMLAPLACE_SELECT(centre<T>)(kernel, stride, rows, count, mean);
        MMLAPLACE_SELECT(sum_squares<T>)(kernel, stride, rows, count, scatter);
        merge_columns(
            row - chunk.first, rows, mean, scatter, count, moments,
            moments + count);
      }
    }
  });
  if (chunks.count() == chunks.batches()) {
    return partial;
  }
  const Tensor result =
      at::zeros({chunks.batches(), 2 * count}, partial.options());
  for (int64_t index = 0; index < chunks.count(); ++index) {
    const Chunk chunk = chunks[index];
    const double* const other = row_of(partial, index);
    double* const moments = row_of(result, chunk.batch);
    merge_columns(
        chunk.first, chunk.last - chunk.first, other, other + count, count,
        moments, moments + count);
  }
  return result;
}

template <typename T>
void add_to(std::vector<double>& sums, const T* terms) {
  for (size_t c = 0; c < sums.size(); ++c) {
    sums[c] += terms[c];
  }
}

// Y = (g / M) u and mean(v), u being D v less its mean over the keys.
template <typename T>
std::tuple<Tensor, Tensor> project(
    const Inputs& inputs, const Tensor& key_scales, const Tensor& factors) {
  const Matrices<T> values(inputs.values);
  const int64_t num_keys = values.rows(), value_dims = values.columns();
  const Tensor projection = padded_matrices<T>(inputs, num_keys, value_dims);
  const Tensor value_mean = padded_matrices<T>(inputs, 1, value_dims);
  const Matrices<T> out(projection), means(value_mean);
  const int64_t stride = out.stride();
  at::parallel_for(
      0, batch_size(inputs.keys), 1, [&](int64_t begin, int64_t end) {
        Scratch<T> scratch;
        T* const sums = scratch.allocate(1, stride);
        T* const shift = scratch.allocate(1, stride);
        std::vector<double> weighted_sum(value_dims), sum(value_dims);
        for (int64_t batch = begin; batch < end; ++batch) {
          const T factor = factors.data_ptr<double>()[batch];
          const T* const scales =
              key_scales.data_ptr<T>() + batch * num_keys;
          std::fill(weighted_sum.begin(), weighted_sum.end(), 0);
          std::fill(sum.begin(), sum.end(), 0);
          for (int64_t row = 0; row < num_keys; row += kTileRows) {
            const int64_t rows = std::min(kTileRows, num_keys - row);
            T* const weighted = out.row(batch, row);
            MMLAPLACE_SELECT(scale_rows<T>)(
                values.row(batch, row), values.stride(), scales + row,
                weighted, stride, rows, value_dims, false);
            MMLAPLACE_SELECT(sum_rows<T>)(
                weighted, stride, rows, value_dims, sums);
            add_to(weighted_sum, sums);
            MMLAPLACE_SELECT(sum_rows<T>)(
                values.row(batch, row), values.stride(), rows, value_dims,
                sums);
            add_to(sum, sums);
          }
          for (int64_t c = 0; c < value_dims; ++c) {
            shift[c] = inputs.whiten ? weighted_sum[c] / num_keys : 0;
            means[batch][c] = sum[c] / num_keys;
          }
          MMLAPLACE_SELECT(shift_and_scale<T>)(
              out[batch], shift, factor, stride, num_keys, value_dims);
        }
      });
  return {projection, value_mean};
}

struct KeyGradients {
  Tensor values;
  Tensor variance;  // 2 / N times the gradient of sigma^2, of each key
  Tensor gain;      // in float64
  Tensor projection_transposed;  // Y^T
};

// Second backward pass, over the keys, from what the first has found.
template <typename T>
KeyGradients key_gradients(
    const Inputs& inputs, const Tensor& key_scales, const Tensor& factors,
    const Tensor& projection_grad) {
  const Matrices<T> values(inputs.values), grads(projection_grad);
  const int64_t batches = batch_size(inputs.keys);
  const int64_t num_keys = values.rows(), value_dims = values.columns();
  const int64_t stride = padded(value_dims);
  const T share = inputs.query_share();
  const KeyGradients result{
      at::empty(inputs.values.sizes(), inputs.values.options()),
      at::empty({batches, 1, num_keys}, inputs.values.options()),
      at::empty({batches}, inputs.double_options()),
      padded_matrices<T>(inputs, value_dims, num_keys)};
  const Matrices<T> value_out(result.values), variance_out(result.variance),
      projection_out(result.projection_transposed);
  at::parallel_for(0, batches, 1, [&](int64_t begin, int64_t end) {
    Scratch<T> scratch;
    T* const weighted = scratch.allocate(num_keys, stride);
    T* const centred = scratch.allocate(kTileRows, stride);
    T* const products = scratch.allocate(1, kTileRows);
    T* const sums = scratch.allocate(1, stride);
    T* const weighted_mean = scratch.allocate(1, stride);
    T* const grad_mean = scratch.allocate(1, stride);
    T* const mean_grad = scratch.allocate(1, stride);
    std::vector<double> weighted_sum(value_dims), grad_sum(value_dims);
    for (int64_t batch = begin; batch < end; ++batch) {
      const T factor = factors.data_ptr<double>()[batch];
      const T* const scales = key_scales.data_ptr<T>() + batch * num_keys;
      std::fill(weighted_sum.begin(), weighted_sum.end(), 0);
      std::fill(grad_sum.begin(), grad_sum.end(), 0);
      MMLAPLACE_SELECT(scale_rows<T>)(
          values[batch], values.stride(), scales, weighted, stride, num_keys,
          value_dims, false);
      // Without whitening nothing is centred.
      for (int64_t row = 0; inputs.whiten && row < num_keys;
           row += kTileRows) {
        const int64_t rows = std::min(kTileRows, num_keys - row);
        MMLAPLACE_SELECT(sum_rows<T>)(
            weighted + row * stride, stride, rows, value_dims, sums);
        add_to(weighted_sum, sums);
        MMLAPLACE_SELECT(sum_rows<T>)(
            grads.row(batch, row), grads.stride(), rows, value_dims, sums);
        add_to(grad_sum, sums);
      }
      for (int64_t c = 0; c < value_dims; ++c) {
        weighted_mean[c] = weighted_sum[c] / num_keys;
        grad_mean[c] = grad_sum[c] / num_keys;
        mean_grad[c] = grads.row(batch, num_keys)[c] / num_keys;
      }
      double gain_grad = 0;
      for (int64_t row = 0; row < num_keys; row += kTileRows) {
        const int64_t rows = std::min(kTileRows, num_keys - row);
        MMLAPLACE_SELECT(copy_rows<T>)(
            grads.row(batch, row), grads.stride(), centred, stride, rows,
            value_dims);
        MMLAPLACE_SELECT(shift_and_scale<T>)(
            centred, grad_mean, T(1), stride, rows, value_dims);
        MMLAPLACE_SELECT(row_products<T>)(
            weighted + row * stride, centred, stride, rows, value_dims,
            products);
        for (int64_t i = 0; i < rows; ++i) {
          const T scale = scales[row + i];
          gain_grad += products[i];
          // As of attention with landmarks: -<Dv, d Dv> D^2 / 2.
          variance_out[batch][row + i] =
              -share * factor * scale * scale * products[i];
          products[i] = factor * scale;
        }
        MMLAPLACE_SELECT(scale_rows_onto<T>)(
            mean_grad, centred, stride, products,
            value_out.row(batch, row), value_dims, rows, value_dims);
      }
      result.gain.data_ptr<double>()[batch] = gain_grad / num_keys;
      MMLAPLACE_SELECT(shift_and_scale<T>)(
          weighted, weighted_mean, factor, stride, num_keys, value_dims);
      MMLAPLACE_SELECT(transpose<T>)(
          weighted, stride, projection_out[batch], projection_out.stride(),
          num_keys, value_dims);
    }
  });
  return result;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> exact_laplacian_attention(
    const Tensor& queries, const Tensor& keys, const Tensor& values,
    const Tensor& gain, double scale, c10::string_view whitening,
    double eps) {
  const BelowDispatch guard;
  const Inputs inputs =
      make_inputs(queries, keys, values, gain, scale, whitening, eps);
  const auto type = inputs.queries.scalar_type();
  const auto options = inputs.keys.options();
  const int64_t batches = batch_size(queries), num_keys = keys.size(-2);
  const Tensor factors = sum_factors(gain, whitening, num_keys);
  Tensor output;
  Tensor key_scales = at::ones({batches, num_keys}, options);
  Tensor kernel_mean = at::zeros({batches, num_keys}, options);
  AT_DISPATCH_FLOATING_TYPES(type, "exact_laplacian_attention", [&] {
    if (inputs.whiten) {
      const Tensor moments = column_moments<scalar_t>(inputs);
      kernel_mean = moments.slice(-1, 0, num_keys).to(type);
      key_scales =
          (moments.slice(-1, num_keys) * inputs.query_share() + eps)
              .rsqrt()
              .to(type);
    }
    const auto [projection, value_mean] =
        project<scalar_t>(inputs, key_scales, factors);
    output = outputs<scalar_t>(inputs, projection, value_mean);
  });
  return {output.to(queries.scalar_type()), unflatten(key_scales, queries),
          unflatten(kernel_mean.contiguous(), queries)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor>
exact_laplacian_attention_backward(
    const Tensor& grad, const Tensor& queries, const Tensor& keys,
    const Tensor& values, const Tensor& gain, const Tensor& key_scales,
    const Tensor& kernel_mean, double scale, c10::string_view whitening,
    double eps) {
  const BelowDispatch guard;
  const Inputs inputs =
      make_inputs(queries, keys, values, gain, scale, whitening, eps);
  check_laplacian_attention_grad(grad, queries, values);
  const auto type = inputs.queries.scalar_type();
  const int64_t batches = batch_size(queries), num_keys = keys.size(-2);
  const Tensor output_grad = grad.to(type);
  const Tensor scales = as_returned(key_scales, type, {batches, num_keys});
  const Tensor mean = as_returned(kernel_mean, type, {batches, 1, num_keys});
  const Tensor factors = sum_factors(gain, whitening, num_keys);
  KeyGradients key_side;
  Tensor query_grad, key_grad;
  AT_DISPATCH_FLOATING_TYPES(type, "exact_laplacian_attention_backward", [&] {
    key_side = key_gradients<scalar_t>(
        inputs, scales, factors,
        inputs.chunks(inputs.queries)
            .sum(projection_gradient<scalar_t>(inputs, output_grad)));
    const Matrices<scalar_t> means(mean), weights(key_side.variance);
    std::tie(query_grad, key_grad) = query_gradients<scalar_t>(
        inputs, output_grad, key_side.projection_transposed,
        [&](int64_t batch, const scalar_t* kernel, int64_t rows,
            scalar_t* kernel_grad, scalar_t*) {
          MMLAPLACE_SELECT(add_weighted_columns<scalar_t>)(
              kernel, means[batch], weights[batch], kernel_grad,
              padded(num_keys), rows, num_keys);
        });
  });
  if (whitening == "literal") {
    key_side.gain.zero_();
  }
  return {query_grad.to(queries.scalar_type()),
          key_grad.to(keys.scalar_type()).contiguous().view(keys.sizes()),
          key_side.values.to(values.scalar_type()),
          key_side.gain.to(gain.scalar_type()).reshape(gain.sizes())};
}

TORCH_LIBRARY_IMPL(mmlaplace, CPU, m) {
  m.impl("exact_laplacian_attention", exact_laplacian_attention);
  m.impl(
      "exact_laplacian_attention_backward",
      exact_laplacian_attention_backward);
}

}  // namespace mmlaplace
