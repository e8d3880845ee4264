// What attention with landmarks and exact attention share: passes over tiles of
// tokens. Included after each_instruction_set.h.
#pragma once

#include "attention.h"
#include "cpu/common.h"
#include "cpu/point_gradients.h"

namespace mmlaplace {

constexpr int64_t kTileRows = 64;

// A run of tokens of one matrix, which one thread works through. Chunks depend
// on sizes alone, so their sums are the same on any number of threads.
struct Chunk {
  int64_t batch;
  int64_t index;  // among all chunks of all matrices
  int64_t first;
  int64_t last;
};

class Chunks {
 public:
  Chunks(const Tensor& tokens, int64_t size)
      : batches_(batch_size(tokens)),
        tokens_(tokens.size(-2)),
        size_(size) {}

  int64_t batches() const {
    return batches_;
  }
  int64_t per_batch() const {
    return at::divup(tokens_, size_);
  }
  int64_t count() const {
    return batches_ * per_batch();
  }
  // Adds up what was found for each chunk of a matrix.
  Tensor sum(const Tensor& partial) const {
    if (count() == batches_) {
      return partial;
    }
    std::vector<int64_t> sizes = partial.sizes().vec();
    sizes[0] = batches_;
    sizes.insert(sizes.begin() + 1, per_batch());
    return partial.reshape(sizes).sum(1, false, at::kDouble);
  }
  Chunk operator[](int64_t index) const {
    const int64_t first = index % per_batch() * size_;
    return {index / per_batch(), index, first,
            std::min(first + size_, tokens_)};
  }

 private:
  int64_t batches_;
  int64_t tokens_;
  int64_t size_;
};

inline double* row_of(const Tensor& rows, int64_t index) {
  return rows.data_ptr<double>() + index * rows.size(-1);
}

// The landmarks of one matrix at a time, and tiles of the kernel with them.
template <typename T>
class LandmarkTiles {
 public:
  LandmarkTiles(const Tensor& landmarks, double scale)
      : landmarks_(landmarks),
        scale_(scale),
        stride_(padded(landmarks.size(-2))),
        transposed_(scratch_.allocate(landmarks_.columns(), stride_)),
        kernel_(scratch_.allocate(kTileRows, stride_)) {}

  void load(int64_t batch) {
    MMLAPLACE_SELECT(transpose<T>)(
        landmarks_[batch], landmarks_.stride(), transposed_, stride_,
        landmarks_.rows(), landmarks_.columns());
    last_ = landmarks_.row(batch, landmarks_.rows() - 1);
  }

  // Rows of the kernel, in a tile that the next call overwrites.
  T* kernel(const T* points, int64_t point_stride, int64_t rows) const {
    MMLAPLACE_SELECT(kernel_tile<T>)(
        points, point_stride, transposed_, stride_, last_, kernel_, stride_,
        stride_, rows, landmarks_.rows(), landmarks_.columns(), scale_);
    return kernel_;
  }

 private:
  Matrices<T> landmarks_;
  double scale_;
  int64_t stride_;
  Scratch<T> scratch_;
  T* transposed_;
  T* kernel_;
  const T* last_ = nullptr;
};

// A small matrix of each batch index, in padded rows.
template <typename T>
class PaddedMatrices {
 public:
  explicit PaddedMatrices(const Tensor& tensor)
      : matrices_(tensor),
        memory_(scratch_.allocate(rows(), stride())) {}

  int64_t rows() const {
    return matrices_.rows();
  }
  int64_t columns() const {
    return matrices_.columns();
  }
  int64_t stride() const {
    return padded(columns());
  }

  const T* load(int64_t batch) const {
    MMLAPLACE_SELECT(pad_rows<T>)(
        matrices_[batch], matrices_.stride(), memory_, stride(), rows(),
        columns());
    return memory_;
  }

 private:
  Matrices<T> matrices_;
  Scratch<T> scratch_;
  T* memory_;
};

struct Inputs {
  Tensor queries;
  Tensor keys;
  Tensor values;
  Tensor landmarks;
  double scale;
  bool whiten;
  double eps;
  int64_t chunk_size;

  Chunks chunks(const Tensor& tokens) const {
    return {tokens, chunk_size};
  }
  int64_t landmark_count() const {
    return landmarks.size(-2);
  }
  // 1 / N, or 1 where there are no queries.
  double query_share() const {
    return 1.0 / std::max<int64_t>(queries.size(-2), 1);
  }
  at::TensorOptions double_options() const {
    return queries.options().dtype(at::kDouble);
  }
};

// One matrix of size rows x columns for each batch index, in padded rows.
template <typename T>
Tensor padded_matrices(const Inputs& inputs, int64_t rows, int64_t columns) {
  return at::empty(
      {batch_size(inputs.queries), rows, padded(columns)},
      inputs.queries.options().dtype(c10::CppTypeToScalarType<T>::value));
}

// Second pass over the queries: C_q Y + mean(v).
template <typename T>
Tensor outputs(
    const Inputs& inputs, const Tensor& projection,
    const Tensor& value_mean) {
  const Matrices<T> queries(inputs.queries);
  const Matrices<T> projections(projection), means(value_mean);
  const Chunks chunks = inputs.chunks(inputs.queries);
  const int64_t count = inputs.landmark_count(), stride = padded(count);
  const int64_t value_dims = inputs.values.size(-1);
  const int64_t value_stride = padded(value_dims);
  const bool whole_vectors = value_dims % 16 == 0;
  const Tensor result = empty_outputs(inputs.queries, value_dims);
  const Matrices<T> out(result);
  at::parallel_for(0, chunks.count(), 1, [&](int64_t begin, int64_t end) {
    LandmarkTiles<T> landmarks(inputs.landmarks, inputs.scale);
    Scratch<T> scratch;
    T* const tile = scratch.allocate(kTileRows, value_stride);
    for (int64_t index = begin; index < end; ++index) {
      const Chunk chunk = chunks[index];
      landmarks.load(chunk.batch);
      for (int64_t row = chunk.first; row < chunk.last; row += kTileRows) {
        const int64_t rows = std::min(kTileRows, chunk.last - row);
        const T* const kernel = landmarks.kernel(
            queries.row(chunk.batch, row), queries.stride(), rows);
        T* const out_rows = out.row(chunk.batch, row);
        MMLAPLACE_SELECT(matmul<T>)(
            kernel, stride, 1, projections[chunk.batch], value_stride,
            whole_vectors ? out_rows : tile,
            whole_vectors ? out.stride() : value_stride, rows, count,
            value_dims, T(1), means[chunk.batch], 0);
        if (!whole_vectors) {
          MMLAPLACE_SELECT(copy_rows<T>)(
              tile, value_stride, out_rows, out.stride(), rows, value_dims);
        }
      }
    }
  });
  return result;
}

// First backward pass, over the queries: C_q^T grad of each chunk and, behind
// it, the sum of the rows of grad.
template <typename T>
Tensor projection_gradient(const Inputs& inputs, const Tensor& output_grad) {
  const Matrices<T> queries(inputs.queries), grads(output_grad);
  const Chunks chunks = inputs.chunks(inputs.queries);
  const int64_t count = inputs.landmark_count(), stride = padded(count);
  const int64_t value_dims = grads.columns();
  const int64_t value_stride = padded(value_dims);
  const bool whole_vectors = value_dims % 16 == 0;
  const Tensor partial = at::zeros(
      {chunks.count(), count + 1, value_dims},
      output_grad.options().dtype(c10::CppTypeToScalarType<T>::value));
  const Matrices<T> result(partial);
  at::parallel_for(0, chunks.count(), 1, [&](int64_t begin, int64_t end) {
    LandmarkTiles<T> landmarks(inputs.landmarks, inputs.scale);
    Scratch<T> scratch;
    T* const tile = scratch.allocate(kTileRows, value_stride);
    T* const product = scratch.allocate(count, value_stride);
    T* const sums = scratch.allocate(1, value_stride);
    for (int64_t index = begin; index < end; ++index) {
      const Chunk chunk = chunks[index];
      landmarks.load(chunk.batch);
      std::fill_n(product, count * value_stride, T(0));
      T* const total = result.row(index, count);
      for (int64_t row = chunk.first; row < chunk.last; row += kTileRows) {
        const int64_t rows = std::min(kTileRows, chunk.last - row);
        const T* const kernel = landmarks.kernel(
            queries.row(chunk.batch, row), queries.stride(), rows);
        const T* const grad = grads.row(chunk.batch, row);
        MMLAPLACE_SELECT(sum_rows<T>)(
            grad, grads.stride(), rows, value_dims, sums);
        if (!whole_vectors) {
          MMLAPLACE_SELECT(copy_rows<T>)(
              grad, grads.stride(), tile, value_stride, rows, value_dims);
        }
        MMLAPLACE_SELECT(matmul<T>)(
            kernel, 1, stride, whole_vectors ? grad : tile,
            whole_vectors ? grads.stride() : value_stride, product,
            value_stride, count, rows, value_dims, T(1), product,
            value_stride);
        for (int64_t c = 0; c < value_dims; ++c) {
          total[c] += sums[c];
        }
      }
      MMLAPLACE_SELECT(copy_rows<T>)(
          product, value_stride, result[index], value_dims, count,
          value_dims);
    }
  });
  return partial;
}

// From the gradient of tiles of the kernel to that of points and landmarks.
template <typename T>
class KernelGradient {
 public:
  KernelGradient(const Tensor& landmarks, double scale)
      : landmarks_(landmarks),
        factor_(static_cast<T>(-1 / scale)),
        weights_(scratch_.allocate(kTileRows, padded(landmarks_.rows()))),
        gradients_(kTileRows, landmarks_.columns()) {}

  void load(int64_t batch) {
    loaded_ = landmarks_.load(batch);
  }

  // Writes the gradient of the points and adds that of the landmarks, whose
  // rows are padded.
  void operator()(
      const T* kernel, const T* kernel_grad, const T* points,
      int64_t point_stride, T* point_grad, T* landmark_grad,
      int64_t rows) const {
    const int64_t count = landmarks_.rows(), stride = padded(count);
    MMLAPLACE_SELECT(multiply<T>)(
        kernel, stride, 1, kernel_grad, stride, 1, weights_, stride, rows,
        count, factor_);
    gradients_(weights_, stride, points, point_stride, loaded_, point_grad,
               landmark_grad, rows, count);
  }

 private:
  PaddedMatrices<T> landmarks_;
  T factor_;
  Scratch<T> scratch_;
  T* weights_;
  PointGradients<T> gradients_;
  const T* loaded_ = nullptr;
};

// Last backward pass, over the queries, with the transpose of Y. What reaches
// the kernel by way of variances is added, to a tile of its gradient, by
// add_variance_gradient(batch, kernel, rows, kernel_grad, scratch), with a tile
// to compute in. Returns the gradients of queries and landmarks.
template <typename T, class AddVarianceGradient>
std::tuple<Tensor, Tensor> query_gradients(
    const Inputs& inputs, const Tensor& output_grad,
    const Tensor& projection_transposed,
    const AddVarianceGradient& add_variance_gradient) {
  const Matrices<T> queries(inputs.queries), grads(output_grad);
  const Matrices<T> projections(projection_transposed);
  const Chunks chunks = inputs.chunks(inputs.queries);
  const int64_t count = inputs.landmark_count(), stride = padded(count);
  const int64_t dims = queries.columns(), value_dims = grads.columns();
  const auto options =
      inputs.queries.options().dtype(c10::CppTypeToScalarType<T>::value);
  const Tensor query_grad = at::empty(inputs.queries.sizes(), options);
  const Tensor landmark_grad =
      at::zeros({chunks.count(), count, padded(dims)}, options);
  const Matrices<T> query_out(query_grad), landmark_out(landmark_grad);
  at::parallel_for(0, chunks.count(), 1, [&](int64_t begin, int64_t end) {
    LandmarkTiles<T> landmarks(inputs.landmarks, inputs.scale);
    KernelGradient<T> kernel_gradient(inputs.landmarks, inputs.scale);
    Scratch<T> scratch;
    T* const kernel_grad = scratch.allocate(kTileRows, stride);
    T* const tile = scratch.allocate(kTileRows, stride);
    for (int64_t index = begin; index < end; ++index) {
      const Chunk chunk = chunks[index];
      landmarks.load(chunk.batch);
      kernel_gradient.load(chunk.batch);
      const T* const projection = projections[chunk.batch];
      for (int64_t row = chunk.first; row < chunk.last; row += kTileRows) {
        const int64_t rows = std::min(kTileRows, chunk.last - row);
        const T* const points = queries.row(chunk.batch, row);
        const T* const kernel =
            landmarks.kernel(points, queries.stride(), rows);
        MMLAPLACE_SELECT(matmul<T>)(
            grads.row(chunk.batch, row), grads.stride(), 1, projection,
            stride, kernel_grad, stride, rows, value_dims, count, T(1),
            nullptr, 0);
        if (inputs.whiten) {
          add_variance_gradient(
              chunk.batch, kernel, rows, kernel_grad, tile);
        }
        kernel_gradient(
            kernel, kernel_grad, points, queries.stride(),
            query_out.row(chunk.batch, row), landmark_out[index], rows);
      }
    }
  });
  return {query_grad, chunks.sum(landmark_grad).slice(-1, 0, dims)};
}

}  // namespace mmlaplace
