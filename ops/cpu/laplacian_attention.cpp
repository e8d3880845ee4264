// Whitened Nystroem attention, in passes over tiles of tokens: the kernel of a
// tile and the landmarks is computed where it is needed and never stored.
// ops/README.md derives the formulas; the names here are those of the text.
#define MMLAPLACE_KERNELS "cpu/laplacian_attention_tiles.h"
#include "cpu/each_instruction_set.h"

#include "checks.h"
#include "cpu/attention_passes.h"
#include "cpu/operators.h"

#include <cmath>
#include <numeric>

namespace mmlaplace {

namespace {

// Means of two sets of columns and the sum of their centred products, which
// grow by a set of rows at a time (Chan, Golub and LeVeque, 1979).
struct Moments {
  int64_t left_columns;
  int64_t right_columns;
  double* left_mean;
  double* right_mean;
  double* product;

  Moments(double* memory, int64_t left, int64_t right)
      : left_columns(left),
        right_columns(right),
        left_mean(memory),
        right_mean(memory + left),
        product(memory + left + right) {}

  static int64_t elements(int64_t left, int64_t right) {
    return left + right + left * right;
  }

  // Of a symmetric product only the lower triangle is looked at.
  template <typename T>
  void merge(
      int64_t count, int64_t other_count, const T* other_left,
      const T* other_right, const T* other_product, int64_t stride,
      bool symmetric = false) const {
    const double share = double(other_count) / (count + other_count);
    MMLAPLACE_SELECT(merge_products<T>)(
        other_product, stride, other_left, other_right, left_mean, right_mean,
        share * count, product, left_columns, right_columns, symmetric);
    for (int64_t i = 0; i < left_columns; ++i) {
      left_mean[i] += (other_left[i] - left_mean[i]) * share;
    }
    for (int64_t j = 0; j < right_columns; ++j) {
      right_mean[j] += (other_right[j] - right_mean[j]) * share;
    }
  }

  // Fills the upper triangle of a symmetric product.
  void mirror() const {
    for (int64_t i = 0; i < left_columns; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        product[j * right_columns + i] = product[i * right_columns + j];
      }
    }
  }
};

// Merges what the chunks of each matrix found, one row of `partial` each.
Tensor merge_chunks(
    const Tensor& partial, const Chunks& chunks, int64_t left,
    int64_t right) {
  if (chunks.count() == chunks.batches()) {
    return partial;
  }
  const Tensor result =
      at::zeros({chunks.batches(), partial.size(-1)}, partial.options());
  for (int64_t index = 0; index < chunks.count(); ++index) {
    const Chunk chunk = chunks[index];
    const Moments other(row_of(partial, index), left, right);
    Moments(row_of(result, chunk.batch), left, right)
        .merge(chunk.first, chunk.last - chunk.first, other.left_mean,
               other.right_mean, other.product, right);
  }
  return result;
}

// A float64 matrix in padded rows, for what is done once for each batch index.
class Wide {
 public:
  Wide(Scratch<double>& scratch, int64_t rows, int64_t columns)
      : rows_(rows),
        columns_(columns),
        stride_(padded(columns)),
        data_(scratch.allocate(rows, stride_)) {}

  double* row(int64_t index) const {
    return data_ + index * stride_;
  }

  // this = factor * source, or that added to this
  template <typename S>
  void load(const S* source, int64_t stride, double factor = 1,
            bool add = false) {
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < columns_; ++j) {
        row(i)[j] = (add ? row(i)[j] : 0) + factor * source[i * stride + j];
      }
    }
  }

  template <typename S>
  void store(S* target, int64_t stride) const {
    for (int64_t i = 0; i < rows_; ++i) {
      std::copy_n(row(i), columns_, target + i * stride);
    }
  }

  // this = factor * left @ right, or that added to this
  void multiply(const Wide& left, const Wide& right, double factor = 1,
                bool add = false) {
    MMLAPLACE_SELECT(matmul<double>)(
        left.data_, left.stride_, 1, right.data_, right.stride_, data_,
        stride_, rows_, left.columns_, columns_, factor,
        add ? data_ : nullptr, stride_);
  }

  // The same with the transpose of left.
  void multiply_transposed(const Wide& left, const Wide& right,
                           double factor = 1) {
    MMLAPLACE_SELECT(matmul<double>)(
        left.data_, 1, left.stride_, right.data_, right.stride_, data_,
        stride_, rows_, left.rows_, columns_, factor, nullptr, 0);
  }

  // The lower triangle of that where it is symmetric; all are square.
  void multiply_symmetric(const Wide& left, const Wide& right) {
    MMLAPLACE_SELECT(symmetric_product<double>)(
        left.data_, right.data_, stride_, data_, rows_, columns_, nullptr);
  }

  // Adds the upper triangle of a symmetric matrix, of which the lower is
  // given, to the lower one: x^T A x is the same then.
  void fold() {
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        row(i)[j] *= 2;
        row(j)[i] = 0;
      }
    }
  }

  // Fills the upper triangle of a symmetric matrix.
  void mirror() {
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        row(j)[i] = row(i)[j];
      }
    }
  }

  void add_row(int64_t index, const double* source, double factor) {
    for (int64_t j = 0; j < columns_; ++j) {
      row(index)[j] += factor * source[j];
    }
  }

  void fill(double value) {
    std::fill_n(data_, rows_ * stride_, value);
  }

  void scale(double factor) {
    for (int64_t i = 0; i < rows_ * stride_; ++i) {
      data_[i] *= factor;
    }
  }

  double inner_product(const Wide& other) const {
    double sum = 0;
    for (int64_t i = 0; i < rows_; ++i) {
      sum = std::inner_product(row(i), row(i) + columns_, other.row(i), sum);
    }
    return sum;
  }

  void transpose(const Wide& other) {
    MMLAPLACE_SELECT(transpose<double>)(
        other.data_, other.stride_, data_, stride_, other.rows_,
        other.columns_);
  }

 private:
  int64_t rows_;
  int64_t columns_;
  int64_t stride_;
  double* data_;
};

// First pass over the queries: mean and scatter of the rows of C_q.
template <typename T>
Tensor query_moments(const Inputs& inputs) {
  const Matrices<T> queries(inputs.queries);
  const Chunks chunks = inputs.chunks(inputs.queries);
  const int64_t count = inputs.landmark_count(), stride = padded(count);
  const Tensor partial = at::zeros(
      {chunks.count(), Moments::elements(count, count)},
      inputs.double_options());
  at::parallel_for(0, chunks.count(), 1, [&](int64_t begin, int64_t end) {
    LandmarkTiles<T> landmarks(inputs.landmarks, inputs.scale);
    Scratch<T> scratch;
    T* const mean = scratch.allocate(1, stride);
    T* const scatter = scratch.allocate(count, stride);
    for (int64_t index = begin; index < end; ++index) {
      const Chunk chunk = chunks[index];
      const Moments moments(row_of(partial, index), count, count);
      landmarks.load(chunk.batch);
      for (int64_t row = chunk.first; row < chunk.last; row += kTileRows) {
        const int64_t rows = std::min(kTileRows, chunk.last - row);
        T* const kernel = landmarks.kernel(
            queries.row(chunk.batch, row), queries.stride(), rows);
        MMLAPLACE_SELECT(centre<T>)(kernel, stride, rows, count, mean);
        MMLAPLACE_SELECT(symmetric_product<T>)(
            kernel, kernel, stride, scatter, rows, count, nullptr);
        moments.merge(
            row - chunk.first, rows, mean, mean, scatter, stride, true);
      }
      moments.mirror();
    }
  });
  return merge_chunks(partial, chunks, count, count);
}

// The pass over the keys: their whitening scales D, the moments of C_k^T and
// D v, and behind these the sum of the values.
template <typename T>
Tensor key_moments(
    const Inputs& inputs, const Tensor& quadratic_forms,
    const Tensor& key_scales) {
  const Matrices<T> keys(inputs.keys), values(inputs.values);
  const Matrices<T> forms(quadratic_forms);
  const Chunks chunks = inputs.chunks(inputs.keys);
  const int64_t count = inputs.landmark_count(), stride = padded(count);
  const int64_t value_dims = values.columns();
  const int64_t value_stride = padded(value_dims);
  const int64_t elements = Moments::elements(count, value_dims);
  const Tensor partial = at::zeros(
      {chunks.count(), elements + value_dims}, inputs.double_options());
  const T eps = static_cast<T>(inputs.eps);
  at::parallel_for(0, chunks.count(), 1, [&](int64_t begin, int64_t end) {
    LandmarkTiles<T> landmarks(inputs.landmarks, inputs.scale);
    Scratch<T> scratch;
    T* const product = scratch.allocate(kTileRows, stride);
    T* const weighted = scratch.allocate(kTileRows, value_stride);
    T* const key_mean = scratch.allocate(1, stride);
    T* const value_mean = scratch.allocate(1, value_stride);
    T* const cross = scratch.allocate(count, value_stride);
    for (int64_t index = begin; index < end; ++index) {
      const Chunk chunk = chunks[index];
      const Moments moments(row_of(partial, index), count, value_dims);
      double* const value_sum = row_of(partial, index) + elements;
      T* const scales =
          key_scales.data_ptr<T>() + chunk.batch * keys.rows();
      landmarks.load(chunk.batch);
      for (int64_t row = chunk.first; row < chunk.last; row += kTileRows) {
        const int64_t rows = std::min(kTileRows, chunk.last - row);
        T* const kernel = landmarks.kernel(
            keys.row(chunk.batch, row), keys.stride(), rows);
        const T* const tile_values = values.row(chunk.batch, row);
        if (inputs.whiten) {
          MMLAPLACE_SELECT(triangular_product<T>)(
              kernel, forms[chunk.batch], stride, product, rows, count);
          MMLAPLACE_SELECT(row_products<T>)(
              kernel, product, stride, rows, count, scales + row);
          MMLAPLACE_SELECT(whitening_scales<T>)(scales + row, rows, eps);
        }
        MMLAPLACE_SELECT(sum_rows<T>)(
            tile_values, values.stride(), rows, value_dims, value_mean);
        for (int64_t c = 0; c < value_dims; ++c) {
          value_sum[c] += value_mean[c];
        }
        MMLAPLACE_SELECT(scale_rows<T>)(
            tile_values, values.stride(), scales + row, weighted,
            value_stride, rows, value_dims, false);
        MMLAPLACE_SELECT(centre<T>)(kernel, stride, rows, count, key_mean);
        MMLAPLACE_SELECT(centre<T>)(
            weighted, value_stride, rows, value_dims, value_mean);
        MMLAPLACE_SELECT(matmul<T>)(
            kernel, 1, stride, weighted, value_stride, cross, value_stride,
            count, rows, value_dims, T(1), nullptr, 0);
        moments.merge(
            row - chunk.first, rows, key_mean, value_mean, cross,
            value_stride);
      }
    }
  });
  const Tensor moments = merge_chunks(partial, chunks, count, value_dims);
  moments.slice(-1, elements).copy_(chunks.sum(partial.slice(-1, elements)));
  return moments;
}

// X^T S X, from the moments of the queries, or that folded into its lower
// triangle.
template <typename T>
Tensor quadratic_forms(
    const Inputs& inputs, const Tensor& query_moments, const Tensor& inverse,
    bool fold) {
  const int64_t count = inputs.landmark_count();
  const Tensor result = padded_matrices<T>(inputs, count, count);
  const Matrices<T> out(result), inverses(inverse);
  at::parallel_for(
      0, batch_size(inputs.queries), 1, [&](int64_t begin, int64_t end) {
        Scratch<double> scratch;
        Wide x(scratch, count, count), covariance(scratch, count, count),
            product(scratch, count, count), form(scratch, count, count);
        for (int64_t batch = begin; batch < end; ++batch) {
          const Moments moments(row_of(query_moments, batch), count, count);
          x.load(inverses[batch], count);
          covariance.load(moments.product, count, inputs.query_share());
          product.multiply(covariance, x);
          form.multiply_symmetric(x, product);
          if (fold) {
            form.fold();
          } else {
            form.mirror();
          }
          form.store(out[batch], out.stride());
        }
      });
  return result;
}

// C_k u, or C_k v without whitening.
void load_cross(const Inputs& inputs, const Moments& moments, Wide& cross) {
  cross.load(moments.product, moments.right_columns);
  if (!inputs.whiten) {
    for (int64_t i = 0; i < moments.left_columns; ++i) {
      cross.add_row(
          i, moments.right_mean,
          moments.left_mean[i] * inputs.keys.size(-2));
    }
  }
}

// Y = (g / M) X C_k u and mean(v), from the moments of the keys.
template <typename T>
std::tuple<Tensor, Tensor> project(
    const Inputs& inputs, const Tensor& key_moments, const Tensor& inverse,
    const Tensor& factors) {
  const int64_t count = inputs.landmark_count();
  const int64_t value_dims = inputs.values.size(-1);
  const int64_t num_keys = inputs.keys.size(-2);
  const Tensor projection = padded_matrices<T>(inputs, count, value_dims);
  const Tensor value_mean = padded_matrices<T>(inputs, 1, value_dims);
  const Matrices<T> out(projection), means(value_mean), inverses(inverse);
  at::parallel_for(
      0, batch_size(inputs.queries), 1, [&](int64_t begin, int64_t end) {
        Scratch<double> scratch;
        Wide x(scratch, count, count), cross(scratch, count, value_dims),
            product(scratch, count, value_dims);
        for (int64_t batch = begin; batch < end; ++batch) {
          double* const row = row_of(key_moments, batch);
          const Moments moments(row, count, value_dims);
          x.load(inverses[batch], count);
          load_cross(inputs, moments, cross);
          product.multiply(x, cross, factors.data_ptr<double>()[batch]);
          product.store(out[batch], out.stride());
          const double* const sum =
              row + Moments::elements(count, value_dims);
          for (int64_t c = 0; c < value_dims; ++c) {
            means[batch][c] = sum[c] / num_keys;
          }
        }
      });
  return {projection, value_mean};
}

// What the later backward passes need, for each batch index.
struct Gradients {
  Tensor quadratic_form;         // X^T S X
  Tensor cross_grad;             // of C_k u
  Tensor cross_grad_transposed;
  Tensor kernel_mean;            // the row that C_k^T is centred by
  Tensor value_mean;             // the row that D v is centred by
  Tensor mean_grad;              // of each value, by way of mean(v)
  Tensor projection_transposed;  // Y^T
  Tensor query_mean;             // the mean row of C_q
  Tensor covariance_grad;        // 2 / N times the gradient of S
  Tensor inverse_grad;           // of X
  Tensor gain;                   // of the gain, in float64
};

// After the first backward pass: all but covariance_grad.
template <typename T>
Gradients start_gradients(
    const Inputs& inputs, const Tensor& query_moments,
    const Tensor& key_moments, const Tensor& inverse, const Tensor& factors,
    const Tensor& partial) {
  const int64_t batches = batch_size(inputs.queries);
  const int64_t count = inputs.landmark_count();
  const int64_t value_dims = inputs.values.size(-1);
  const int64_t num_keys = inputs.keys.size(-2);
  const int64_t per_batch = inputs.chunks(inputs.queries).per_batch();
  const Gradients result{
      quadratic_forms<T>(inputs, query_moments, inverse, false),
      padded_matrices<T>(inputs, count, value_dims),
      padded_matrices<T>(inputs, value_dims, count),
      padded_matrices<T>(inputs, 1, count),
      padded_matrices<T>(inputs, 1, value_dims),
      padded_matrices<T>(inputs, 1, value_dims),
      padded_matrices<T>(inputs, value_dims, count),
      padded_matrices<T>(inputs, 1, count),
      padded_matrices<T>(inputs, count, count),
      at::empty({batches, count, count}, inputs.double_options()),
      at::empty({batches}, inputs.double_options())};
  const Matrices<T> inverses(inverse), partials(partial),
      cross_out(result.cross_grad),
      cross_transposed_out(result.cross_grad_transposed),
      kernel_mean_out(result.kernel_mean), value_mean_out(result.value_mean),
      mean_grad_out(result.mean_grad),
      projection_out(result.projection_transposed),
      query_mean_out(result.query_mean);
  const Matrices<double> inverse_grad_out(result.inverse_grad);
  double* const gain_out = result.gain.data_ptr<double>();
  at::parallel_for(0, batches, 1, [&](int64_t begin, int64_t end) {
    Scratch<double> scratch;
    Wide x(scratch, count, count), inverse_grad(scratch, count, count);
    Wide cross(scratch, count, value_dims),
        projected(scratch, count, value_dims),
        projection_grad(scratch, count, value_dims),
        cross_grad(scratch, count, value_dims);
    Wide transposed(scratch, value_dims, count);
    Wide value_sum(scratch, 1, value_dims);
    for (int64_t batch = begin; batch < end; ++batch) {
      const double factor = factors.data_ptr<double>()[batch];
      const Moments query_stats(row_of(query_moments, batch), count, count);
      const Moments key_stats(row_of(key_moments, batch), count, value_dims);
      x.load(inverses[batch], count);
      load_cross(inputs, key_stats, cross);
      projection_grad.fill(0);
      value_sum.fill(0);
      for (int64_t i = batch * per_batch; i < (batch + 1) * per_batch; ++i) {
        projection_grad.load(partials[i], value_dims, 1, true);
        value_sum.load(partials.row(i, count), value_dims, 1, true);
      }
      projected.multiply(x, cross);
      gain_out[batch] = projected.inner_product(projection_grad) / num_keys;

      cross_grad.multiply_transposed(x, projection_grad, factor);
      cross_grad.store(cross_out[batch], cross_out.stride());
      transposed.transpose(cross_grad);
      transposed.store(
          cross_transposed_out[batch], cross_transposed_out.stride());
      transposed.transpose(cross);
      inverse_grad.multiply(projection_grad, transposed, factor);
      inverse_grad.store(inverse_grad_out[batch], count);
      transposed.transpose(projected);
      transposed.scale(factor);
      transposed.store(projection_out[batch], projection_out.stride());

      // Without whitening nothing is centred.
      const double whiten = inputs.whiten ? 1 : 0;
      for (int64_t i = 0; i < count; ++i) {
        query_mean_out[batch][i] = query_stats.left_mean[i];
        kernel_mean_out[batch][i] = whiten * key_stats.left_mean[i];
      }
      for (int64_t c = 0; c < value_dims; ++c) {
        value_mean_out[batch][c] = whiten * key_stats.right_mean[c];
        mean_grad_out[batch][c] = value_sum.row(0)[c] / num_keys;
      }
    }
  });
  return result;
}

// After the second: sigma_j^2 = k_j^T X^T S X k_j, by way of S and of X.
template <typename T>
void finish_gradients(
    const Inputs& inputs, const Tensor& query_moments, const Tensor& inverse,
    const Tensor& form_grad, const Gradients& gradients) {
  const int64_t count = inputs.landmark_count();
  const int64_t per_batch = inputs.chunks(inputs.keys).per_batch();
  const Matrices<T> inverses(inverse), form_grads(form_grad),
      covariance_out(gradients.covariance_grad);
  const Matrices<double> inverse_grad_out(gradients.inverse_grad);
  at::parallel_for(
      0, batch_size(inputs.queries), 1, [&](int64_t begin, int64_t end) {
        Scratch<double> scratch;
        Wide x(scratch, count, count), covariance(scratch, count, count),
            form(scratch, count, count), product(scratch, count, count),
            transposed(scratch, count, count),
            result(scratch, count, count);
        for (int64_t batch = begin; batch < end; ++batch) {
          const Moments moments(row_of(query_moments, batch), count, count);
          x.load(inverses[batch], count);
          covariance.load(moments.product, count, inputs.query_share());
          form.fill(0);
          for (int64_t i = batch * per_batch; i < (batch + 1) * per_batch;
               ++i) {
            form.load(form_grads[i], form_grads.stride(), 1, true);
          }
          form.mirror();
          product.multiply(covariance, x);
          result.load(inverse_grad_out[batch], count);
          result.multiply(product, form, 2, true);
          result.store(inverse_grad_out[batch], count);
          transposed.transpose(x);
          product.multiply(x, form);
          result.multiply(product, transposed, 2 * inputs.query_share());
          result.store(covariance_out[batch], covariance_out.stride());
        }
      });
}

struct KeyGradients {
  Tensor keys;
  Tensor values;
  Tensor landmarks;
  Tensor form;  // of each chunk, sum_j (gradient of sigma_j^2) k_j k_j^T
};

// Second backward pass, over the keys.
template <typename T>
KeyGradients key_gradients(
    const Inputs& inputs, const Tensor& key_scales,
    const Gradients& context) {
  const Matrices<T> keys(inputs.keys), values(inputs.values);
  const Matrices<T> forms(context.quadratic_form),
      cross_grads(context.cross_grad),
      cross_grads_transposed(context.cross_grad_transposed),
      kernel_means(context.kernel_mean), value_means(context.value_mean),
      mean_grads(context.mean_grad);
  const Chunks chunks = inputs.chunks(inputs.keys);
  const int64_t count = inputs.landmark_count(), stride = padded(count);
  const int64_t dims = keys.columns(), value_dims = values.columns();
  const int64_t value_stride = padded(value_dims);
  const auto options =
      inputs.keys.options().dtype(c10::CppTypeToScalarType<T>::value);
  const Tensor key_grad = at::empty(inputs.keys.sizes(), options);
  const Tensor value_grad = at::empty(inputs.values.sizes(), options);
  const Tensor landmark_grad =
      at::zeros({chunks.count(), count, padded(dims)}, options);
  const Tensor form_grad = at::zeros({chunks.count(), count, stride}, options);
  const Matrices<T> key_out(key_grad), value_out(value_grad),
      landmark_out(landmark_grad), form_out(form_grad);
  at::parallel_for(0, chunks.count(), 1, [&](int64_t begin, int64_t end) {
    LandmarkTiles<T> landmarks(inputs.landmarks, inputs.scale);
    KernelGradient<T> kernel_gradient(inputs.landmarks, inputs.scale);
    Scratch<T> scratch;
    T* const weighted = scratch.allocate(kTileRows, value_stride);
    T* const centred = scratch.allocate(kTileRows, value_stride);
    T* const weighted_grad = scratch.allocate(kTileRows, value_stride);
    T* const kernel_grad = scratch.allocate(kTileRows, stride);
    T* const product = scratch.allocate(kTileRows, stride);
    T* const variance_grad = scratch.allocate(1, kTileRows);
    for (int64_t index = begin; index < end; ++index) {
      const Chunk chunk = chunks[index];
      landmarks.load(chunk.batch);
      kernel_gradient.load(chunk.batch);
      const T* const form = forms[chunk.batch];
      const T* const cross = cross_grads[chunk.batch];
      const T* const cross_transposed = cross_grads_transposed[chunk.batch];
      const T* const mean_grad = mean_grads[chunk.batch];
      const T* const scales =
          key_scales.data_ptr<T>() + chunk.batch * keys.rows();
      for (int64_t row = chunk.first; row < chunk.last; row += kTileRows) {
        const int64_t rows = std::min(kTileRows, chunk.last - row);
        const T* const points = keys.row(chunk.batch, row);
        const T* const kernel =
            landmarks.kernel(points, keys.stride(), rows);

        MMLAPLACE_SELECT(scale_rows<T>)(
            values.row(chunk.batch, row), values.stride(), scales + row,
            weighted, value_stride, rows, value_dims, false);
        MMLAPLACE_SELECT(subtract_row<T>)(
            weighted, value_means[chunk.batch], centred, value_stride, rows,
            value_dims);
        MMLAPLACE_SELECT(matmul<T>)(
            centred, value_stride, 1, cross_transposed, stride, kernel_grad,
            stride, rows, value_dims, count, T(1), nullptr, 0);
        MMLAPLACE_SELECT(subtract_row<T>)(
            kernel, kernel_means[chunk.batch], product, stride, rows, count);
        MMLAPLACE_SELECT(matmul<T>)(
            product, stride, 1, cross, value_stride, weighted_grad,
            value_stride, rows, count, value_dims, T(1), nullptr, 0);

        if (inputs.whiten) {
          // With D = (sigma^2 + eps)^(-1/2) and <v, d Dv> = <Dv, d Dv> / D,
          // the gradient of sigma^2 is -<Dv, d Dv> D^2 / 2.
          MMLAPLACE_SELECT(row_products<T>)(
              weighted, weighted_grad, value_stride, rows, value_dims,
              variance_grad);
          for (int64_t i = 0; i < rows; ++i) {
            variance_grad[i] *= -scales[row + i] * scales[row + i] / 2;
          }
          MMLAPLACE_SELECT(matmul<T>)(
              kernel, stride, 1, form, stride, product, stride, rows, count,
              count, T(2), nullptr, 0);
          MMLAPLACE_SELECT(scale_rows<T>)(
              product, stride, variance_grad, kernel_grad, stride, rows,
              count, true);
          MMLAPLACE_SELECT(scale_rows<T>)(
              kernel, stride, variance_grad, product, stride, rows, count,
              false);
          MMLAPLACE_SELECT(symmetric_product<T>)(
              product, kernel, stride, form_out[index], rows, count,
              form_out[index]);
        }

        MMLAPLACE_SELECT(scale_rows_onto<T>)(
            mean_grad, weighted_grad, value_stride, scales + row,
            value_out.row(chunk.batch, row), value_dims, rows, value_dims);
        kernel_gradient(
            kernel, kernel_grad, points, keys.stride(),
            key_out.row(chunk.batch, row), landmark_out[index], rows);
      }
    }
  });
  return {key_grad, value_grad, chunks.sum(landmark_grad).slice(-1, 0, dims),
          form_grad};
}

// Checks the inputs and takes everything into the dtype of the computation.
Inputs make_inputs(
    const Tensor& queries, const Tensor& keys, const Tensor& values,
    const Tensor& landmarks, const Tensor& gain, double scale,
    c10::string_view whitening, double eps) {
  check_laplacian_attention(queries, keys, values, landmarks, gain);
  const auto type = compute_type(queries);
  const Tensor flat = landmarks.to(type).reshape(
      {batch_size(landmarks), landmarks.size(-2), landmarks.size(-1)});
  // The moments of a chunk are worth as much work as 32 tokens per landmark.
  return {queries.to(type), keys.to(type), values.to(type), flat, scale,
          whitening != "none", eps,
          std::max<int64_t>(1024, 32 * landmarks.size(-2))};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> laplacian_attention(
    const Tensor& queries, const Tensor& keys, const Tensor& values,
    const Tensor& landmarks, const Tensor& gain, double scale,
    c10::string_view whitening, int64_t num_iters, double eps) {
  const BelowDispatch guard;
  const Inputs inputs = make_inputs(
      queries, keys, values, landmarks, gain, scale, whitening, eps);
  const auto type = inputs.queries.scalar_type();
  const int64_t batches = batch_size(queries);
  const int64_t count = inputs.landmark_count();

  const Tensor inverse = newton_schulz_inverse(
      laplacian_kernel(inputs.landmarks, inputs.landmarks, scale), num_iters,
      eps, true);
  const Tensor key_scales =
      at::ones({batches, keys.size(-2)}, inputs.keys.options());
  const Tensor factors = sum_factors(gain, whitening, keys.size(-2));
  Tensor output, query_stats, key_stats;
  AT_DISPATCH_FLOATING_TYPES(type, "laplacian_attention", [&] {
    query_stats = inputs.whiten
        ? query_moments<scalar_t>(inputs)
        : at::zeros({batches, Moments::elements(count, count)},
                    inputs.double_options());
    key_stats = key_moments<scalar_t>(
        inputs, quadratic_forms<scalar_t>(inputs, query_stats, inverse, true),
        key_scales);
    const auto [projection, value_mean] =
        project<scalar_t>(inputs, key_stats, inverse, factors);
    output = outputs<scalar_t>(inputs, projection, value_mean);
  });

  return {output.to(queries.scalar_type()), unflatten(key_scales, queries),
          unflatten(inverse, queries), unflatten(query_stats, queries),
          unflatten(key_stats, queries)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
laplacian_attention_backward(
    const Tensor& grad, const Tensor& queries, const Tensor& keys,
    const Tensor& values, const Tensor& landmarks, const Tensor& gain,
    const Tensor& key_scales, const Tensor& inverse,
    const Tensor& query_moments, const Tensor& key_moments, double scale,
    c10::string_view whitening, int64_t num_iters, double eps) {
  const BelowDispatch guard;
  const Inputs inputs = make_inputs(
      queries, keys, values, landmarks, gain, scale, whitening, eps);
  check_laplacian_attention_grad(grad, queries, values);
  const auto type = inputs.queries.scalar_type();
  const int64_t batches = batch_size(queries);
  const int64_t count = inputs.landmark_count();
  const int64_t value_dims = values.size(-1);
  const Tensor output_grad = grad.to(type);
  const Tensor x = as_returned(inverse, type, {batches, count, count});
  const Tensor scales =
      as_returned(key_scales, type, {batches, keys.size(-2)});
  const Tensor query_stats = as_returned(
      query_moments, at::kDouble, {batches, Moments::elements(count, count)});
  const Tensor key_stats = as_returned(
      key_moments, at::kDouble,
      {batches, Moments::elements(count, value_dims) + value_dims});

  Gradients gradients;
  KeyGradients key_side;
  Tensor query_grad, landmark_grad;
  AT_DISPATCH_FLOATING_TYPES(type, "laplacian_attention_backward", [&] {
    gradients = start_gradients<scalar_t>(
        inputs, query_stats, key_stats, x,
        sum_factors(gain, whitening, keys.size(-2)),
        projection_gradient<scalar_t>(inputs, output_grad));
    key_side = key_gradients<scalar_t>(inputs, scales, gradients);
    finish_gradients<scalar_t>(
        inputs, query_stats, x, key_side.form, gradients);
    const Matrices<scalar_t> means(gradients.query_mean),
        covariance_grads(gradients.covariance_grad);
    std::tie(query_grad, landmark_grad) = query_gradients<scalar_t>(
        inputs, output_grad, gradients.projection_transposed,
        [&](int64_t batch, const scalar_t* kernel, int64_t rows,
            scalar_t* kernel_grad, scalar_t* centred) {
          const int64_t stride = padded(count);
          MMLAPLACE_SELECT(subtract_row<scalar_t>)(
              kernel, means[batch], centred, stride, rows, count);
          MMLAPLACE_SELECT(matmul<scalar_t>)(
              centred, stride, 1, covariance_grads[batch], stride,
              kernel_grad, stride, rows, count, count, scalar_t(1),
              kernel_grad, stride);
        });
  });
  const Tensor& points = inputs.landmarks;
  const Tensor kernel = laplacian_kernel(points, points, scale);
  const auto [left, right] = laplacian_kernel_backward(
      newton_schulz_inverse_backward(
          gradients.inverse_grad.to(type), kernel, num_iters, eps, true),
      points, points, kernel, scale);
  landmark_grad = landmark_grad + key_side.landmarks + left + right;
  if (whitening == "literal") {
    gradients.gain.zero_();
  }
  return {query_grad.to(queries.scalar_type()),
          key_side.keys.to(keys.scalar_type()),
          key_side.values.to(values.scalar_type()),
          landmark_grad.to(landmarks.scalar_type())
              .reshape(landmarks.sizes()),
          gradients.gain.to(gain.scalar_type()).reshape(gain.sizes())};
}

TORCH_LIBRARY_IMPL(mmlaplace, CPU, m) {
  m.impl("laplacian_attention", laplacian_attention);
  m.impl("laplacian_attention_backward", laplacian_attention_backward);
}

}  // namespace mmlaplace
