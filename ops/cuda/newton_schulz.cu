// The inverse by the Newton-Schulz iteration and its gradient. A block takes a
// matrix at a time and keeps what it multiplies in shared memory.
#include "cuda/common.cuh"
#include "cuda/operators.cuh"

#include "checks.h"
#include "large_newton_schulz.h"

#include <ATen/ops/empty.h>

namespace mmlaplace {

namespace {

constexpr int kStripRows = 16;  // of a warp
constexpr int kTileColumns = 8;

// A warp holds its strip of a product in registers, as that many tiles at
// most. There are kernels for small matrices and for all that shared memory
// holds.
constexpr int kSmall = 8;
template <typename T>
constexpr int kLarge = std::is_same_v<T, double> ? 11 : 16;

template <int kTiles>
constexpr int max_threads =
    ceil_div(kTiles * kTileColumns, kStripRows) * kWarpSize;

// Square matrices in shared memory are padded with zeros. The stride keeps
// the loads of load_right free of bank conflicts.
struct Shape {
  int size;
  int rows;
  int columns;
  int stride;

  __host__ __device__ explicit Shape(int size)
      : size(size),
        rows(round_up(size, kStripRows)),
        columns(round_up(size, kTileColumns)),
        stride(columns + 4) {}

  __host__ __device__ int elements() const {
    return rows * stride;
  }
  __host__ __device__ int warps() const {
    return rows / kStripRows;
  }
};

template <typename T>
struct Buffers {
  T* matrices[3];
  T* warps;  // one number of each warp

  __host__ __device__ Buffers(Arena& arena, const Shape& shape) {
    for (T*& matrix : matrices) {
      matrix = arena.take<T>(shape.elements());
    }
    warps = arena.take<T>(shape.warps());
  }
};

template <typename T>
size_t shared_bytes(const Shape& shape) {
  Arena arena;
  const Buffers<T> buffers(arena, shape);
  return arena.bytes();
}

template <typename T>
bool fits(int64_t size) {
  return size <= kLarge<T> * kTileColumns &&
      shared_bytes<T>(Shape(size)) <= max_shared_memory();
}

// The larger of two numbers; NaN stays.
template <typename T>
__device__ __forceinline__ T at_least(T value, T floor) {
  return value < floor ? floor : value;
}

// What a block needs for its matrix.
template <typename T, int kTiles>
struct Block {
  using Strip = T[kTiles][4];

  Shape shape;
  T* warps;

  __device__ int first_row() const {
    return threadIdx.x / kWarpSize * kStripRows;
  }

  // Calls function(row, column) for each element of the padded matrix.
  template <typename Function>
  __device__ void for_each(Function function) const {
    for (int i = threadIdx.x; i < shape.rows * shape.columns;
         i += blockDim.x) {
      function(i / shape.columns, i % shape.columns);
    }
  }

  // Calls function(row, column, number) for the thread's part of a strip.
  template <typename Function>
  __device__ void for_each(Strip& strip, Function function) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile * kTileColumns < shape.columns) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          function(first_row() + sum_row(i),
                   tile * kTileColumns + sum_column(i), strip[tile][i]);
        }
      }
    }
  }

  __device__ bool inside(int row, int column) const {
    return row < shape.size && column < shape.size;
  }
  __device__ T identity(int row, int column) const {
    return row == column && row < shape.size ? T(1) : T(0);
  }
  __device__ int place(int row, int column) const {
    return row * shape.stride + column;
  }

  __device__ void clear(Strip& strip) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        strip[tile][i] = 0;
      }
    }
  }

  // strip += left * right, where either may be transposed.
  template <bool kLeftTransposed = false, bool kRightTransposed = false>
  __device__ void multiply(const T* left, const T* right, Strip& strip) const {
    const int row_stride = kLeftTransposed ? 1 : shape.stride;
    const int left_stride = kLeftTransposed ? shape.stride : 1;
    const int right_stride = kRightTransposed ? 1 : shape.stride;
    const int column_stride = kRightTransposed ? shape.stride : 1;
    left += first_row() * row_stride;
    for (int inner = 0; inner < shape.columns; inner += kTileColumns) {
      const auto left_part =
          load_left(left + inner * left_stride, row_stride, left_stride);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int column = tile * kTileColumns;
        if (column < shape.columns) {
          multiply_add(
              strip[tile], left_part,
              load_right(right + inner * right_stride + column * column_stride,
                         right_stride, column_stride));
        }
      }
    }
  }

  // Reductions over the block, which meets twice.
  template <typename Combine>
  __device__ T reduce(T value, Combine combine) const {
    if (threadIdx.x % kWarpSize == 0) {
      warps[threadIdx.x / kWarpSize] = value;
    }
    __syncthreads();
    value = warps[0];
    for (int warp = 1; warp < shape.warps(); ++warp) {
      value = combine(value, warps[warp]);
    }
    __syncthreads();
    return value;
  }
  __device__ T max(T value) const {
    return reduce(warp_max(value), larger<T>);
  }
  __device__ T sum(T value) const {
    return reduce(warp_sum(value), [](T x, T y) { return x + y; });
  }
};

// A matrix in the course of the iteration.
template <typename T, int kTiles>
struct Iteration {
  using Strip = typename Block<T, kTiles>::Strip;

  Block<T, kTiles> block;
  bool symmetric;  // the matrix, and so all that follows from it
  T* matrix;       // A / (largest * norm), of Frobenius norm 1
  T* inverse;
  T* error;  // I - A X
  T largest;
  T norm;

  // What it overwrites before its first barrier, no other thread has read
  // since the last one: so a loop over matrices needs none between them.
  __device__ void load(const T* source, int64_t stride, T eps) {
    constexpr T kTiny = std::numeric_limits<T>::min();
    T* const loaded = symmetric ? error : matrix;
    T value = 0;
    block.for_each([&](int row, int column) {
      T& element = loaded[block.place(row, column)];
      element = block.inside(row, column)
          ? source[row * stride + column] +
              eps * block.identity(row, column)
          : T(0);
      value = larger(value, std::abs(element));
    });
    largest = at_least(block.max(value), kTiny);

    value = 0;
    block.for_each([&](int row, int column) {
      T& element = matrix[block.place(row, column)];
      const T self = loaded[block.place(row, column)] / largest;
      // Rows beyond the columns are padding.
      element = symmetric && row < block.shape.columns
          ? (self + loaded[block.place(column, row)] / largest) / 2
          : self;
      value += element * element;
    });
    norm = at_least(std::sqrt(block.sum(value)), kTiny);
    block.for_each([&](int row, int column) {
      matrix[block.place(row, column)] /= norm;
    });
    __syncthreads();
    block.for_each([&](int row, int column) {
      inverse[block.place(row, column)] =
          symmetric ? block.identity(row, column)
          : row < block.shape.columns ? matrix[block.place(column, row)]
                                      : T(0);
    });
    __syncthreads();
  }

  // Returns how many iterations were done before the matrix came to rest.
  // `record(step)` may keep inverse and error before they are overwritten.
  template <typename Record>
  __device__ int iterate(int num_iters, Record record) {
    const T precise = std::sqrt(std::numeric_limits<T>::epsilon());
    T last_residual = std::numeric_limits<T>::infinity();
    for (int step = 0; step < num_iters; ++step) {
      // The short start is the identity: nothing is to be multiplied.
      const bool trivial = symmetric && step == 0;
      Strip strip;
      block.clear(strip);
      if (!trivial) {
        block.multiply(matrix, inverse, strip);
      }
      T residual = 0;
      block.for_each(strip, [&](int row, int column, T& product) {
        const int place = block.place(row, column);
        error[place] =
            block.identity(row, column) - (trivial ? matrix[place] : product);
        residual = larger(residual, std::abs(error[place]));
        product = 0;
      });
      residual = block.max(residual);
      if (!(residual <= T(1.1) * last_residual)) {
        return step;
      }
      last_residual = residual;
      record(step);
      if (!trivial) {
        block.multiply(inverse, error, strip);
      }
      __syncthreads();  // all have read the inverse
      block.for_each(strip, [&](int row, int column, T& product) {
        const int place = block.place(row, column);
        inverse[place] += trivial ? error[place] : product;
      });
      __syncthreads();
      if (block.shape.size * residual <= precise) {
        return step + 1;
      }
    }
    return num_iters;
  }
};

template <typename T, int kTiles>
__device__ Iteration<T, kTiles> make_iteration(
    const Buffers<T>& buffers, const Shape& shape, bool symmetric) {
  return {{shape, buffers.warps},
          symmetric,
          buffers.matrices[0],
          buffers.matrices[1],
          buffers.matrices[2],
          T(0),
          T(0)};
}

template <typename T, int kTiles>
__global__ void __launch_bounds__(max_threads<kTiles>, 1)
    inverse_forward(
        int64_t items, Matrices<const T> sources, Matrices<T> results,
        int num_iters, T eps, bool symmetric) {
  constexpr T kLimit = std::numeric_limits<T>::max();
  const Shape shape(sources.rows);
  Arena arena(shared_memory());
  const Buffers<T> buffers(arena, shape);
  auto state = make_iteration<T, kTiles>(buffers, shape, symmetric);
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    state.load(sources[item], sources.row_stride, eps);
    state.iterate(num_iters, [](int) {});
    T* const result = results[item];
    state.block.for_each([&](int row, int column) {
      if (state.block.inside(row, column)) {
        const T value = state.inverse[state.block.place(row, column)] /
            state.norm / state.largest;
        result[row * results.row_stride + column] =
            value > kLimit ? kLimit : value < -kLimit ? -kLimit : value;
      }
    });
  }
}

// What the backward pass keeps of a matrix in global memory: the matrix, its
// gradient, and the inverse and the error of each step.
template <typename T>
struct History {
  T* matrix;
  T* grad;
  T* steps;
  int elements;

  __device__ History(T* memory, int elements)
      : matrix(memory),
        grad(memory + elements),
        steps(memory + 2 * elements),
        elements(elements) {}

  __device__ T* inverse(int step) const {
    return steps + int64_t(2 * step) * elements;
  }
  __device__ T* error(int step) const {
    return steps + int64_t(2 * step + 1) * elements;
  }
  __host__ __device__ static int64_t matrices(int64_t num_iters) {
    return 2 * num_iters + 2;
  }
};

template <typename T, int kTiles>
struct BackwardIteration {
  using Strip = typename Block<T, kTiles>::Strip;

  Block<T, kTiles> block;
  History<T> history;
  T* grad;  // of X_k
  T* product;
  T* operand;

  __device__ void copy(const T* source, T* target) const {
    for (int i = threadIdx.x; i < block.shape.elements(); i += blockDim.x) {
      target[i] = source[i];
    }
  }

  __device__ void load_operand(const T* source) const {
    __syncthreads();  // all have read the last one
    copy(source, operand);
    __syncthreads();
  }

  // Stores a product, which is left cleared.
  __device__ void store(Strip& strip, T* target) const {
    block.for_each(strip, [&](int row, int column, T& value) {
      target[block.place(row, column)] = value;
      value = 0;
    });
  }

  // Subtracts a product from the gradient of the matrix, likewise.
  __device__ void subtract(Strip& strip) const {
    block.for_each(strip, [&](int row, int column, T& value) {
      history.grad[block.place(row, column)] -= value;
      value = 0;
    });
  }

  // matrix_grad -= X G X;  G <- E G + G E^T, since A X = I - E.
  __device__ void step_symmetric(int step) const {
    Strip strip;
    block.clear(strip);
    load_operand(history.inverse(step));
    block.multiply(grad, operand, strip);
    store(strip, product);
    __syncthreads();
    block.multiply(operand, product, strip);
    subtract(strip);
    load_operand(history.error(step));
    block.multiply(operand, grad, strip);
    store(strip, product);
    __syncthreads();
    block.for_each([&](int row, int column) {
      if (row < block.shape.columns) {
        grad[block.place(row, column)] =
            product[block.place(row, column)] +
            product[block.place(column, row)];
      }
    });
  }

  // error_grad = X^T G;  matrix_grad -= error_grad X^T;
  // G <- G + G E^T - A^T error_grad
  __device__ void step(int step) const {
    Strip strip;
    block.clear(strip);
    load_operand(history.inverse(step));
    block.template multiply<true>(operand, grad, strip);
    store(strip, product);
    // A thread reads of the left what it has stored itself.
    block.template multiply<false, true>(product, operand, strip);
    subtract(strip);
    load_operand(history.error(step));
    block.template multiply<false, true>(grad, operand, strip);
    block.for_each(strip, [&](int row, int column, T& value) {
      value = -value - grad[block.place(row, column)];
    });
    load_operand(history.matrix);
    block.template multiply<true>(operand, product, strip);
    block.for_each(strip, [&](int row, int column, T& value) {
      grad[block.place(row, column)] = -value;
    });
  }
};

template <typename T, int kTiles>
__global__ void __launch_bounds__(max_threads<kTiles>, 1)
    inverse_backward(
        int64_t items, Matrices<const T> grads, Matrices<const T> sources,
        Matrices<T> results, int num_iters, T eps, bool symmetric,
        T* histories) {
  constexpr T kLimit = std::numeric_limits<T>::max();
  const Shape shape(sources.rows);
  Arena arena(shared_memory());
  const Buffers<T> buffers(arena, shape);
  auto state = make_iteration<T, kTiles>(buffers, shape, symmetric);
  const auto& block = state.block;
  const int elements = shape.elements();
  const History<T> history(
      histories + blockIdx.x * History<T>::matrices(num_iters) * elements,
      elements);
  const BackwardIteration<T, kTiles> back{
      block, history, state.error, state.matrix, state.inverse};

  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    state.load(sources[item], sources.row_stride, eps);
    back.copy(state.matrix, history.matrix);
    const int steps = state.iterate(num_iters, [&](int step) {
      back.copy(state.inverse, history.inverse(step));
      back.copy(state.error, history.error(step));
    });
    __syncthreads();  // all have copied the matrix

    // The result is X / norm / largest, within the limits of the dtype.
    const T* const result_grad = grads[item];
    const T* const inverse = state.inverse;
    T* const loaded = symmetric ? back.product : back.grad;
    T value = 0;
    block.for_each([&](int row, int column) {
      const int place = block.place(row, column);
      const T result = inverse[place] / state.norm / state.largest;
      loaded[place] = block.inside(row, column) && result >= -kLimit &&
              result <= kLimit
          ? result_grad[row * grads.row_stride + column] /
              state.norm / state.largest
          : T(0);
      value += loaded[place] * inverse[place];
    });
    T norm_grad = -block.sum(value) / state.norm;
    if (symmetric) {
      block.for_each([&](int row, int column) {
        back.grad[block.place(row, column)] = row < shape.columns
            ? (loaded[block.place(row, column)] +
               loaded[block.place(column, row)]) / 2
            : T(0);
      });
    }

    block.for_each([&](int row, int column) {
      history.grad[block.place(row, column)] = 0;
    });
    // With symmetric, X_0 is the identity, else the transpose of the matrix.
    const int last = symmetric ? 1 : 0;
    for (int step = steps - 1; step >= last; --step) {
      if (symmetric) {
        back.step_symmetric(step);
      } else {
        back.step(step);
      }
    }
    __syncthreads();
    block.for_each([&](int row, int column) {
      const int place = block.place(row, column);
      if (block.inside(row, column)) {
        back.product[place] = history.grad[place] +
            (!symmetric      ? back.grad[block.place(column, row)]
                 : steps > 0 ? -back.grad[place]
                             : T(0));
      }
    });
    back.load_operand(history.matrix);

    // A = matrix / norm. The norm of a zero matrix is held at its floor.
    const auto matrix_grad = [&](int row, int column) {
      const T self = back.product[block.place(row, column)];
      return symmetric
          ? (self + back.product[block.place(column, row)]) / 2
          : self;
    };
    value = 0;
    block.for_each([&](int row, int column) {
      if (block.inside(row, column)) {
        value += matrix_grad(row, column) *
            back.operand[block.place(row, column)];
      }
    });
    norm_grad -= block.sum(value) / state.norm;
    norm_grad = state.norm < 1 ? T(0) : norm_grad;
    T* const result = results[item];
    block.for_each([&](int row, int column) {
      if (block.inside(row, column)) {
        result[row * results.row_stride + column] =
            (matrix_grad(row, column) / state.norm +
             norm_grad * back.operand[block.place(row, column)]) /
            state.largest;
      }
    });
  }
}

template <typename T, int kTiles>
void forward(const Tensor& matrix, int64_t num_iters, double eps,
             bool symmetric, const Tensor& result) {
  const Shape shape(matrix.size(-1));
  const int64_t batches = batch_size(matrix);
  launch(
      inverse_forward<T, kTiles>, batches, shape.warps() * kWarpSize,
      shared_bytes<T>(shape), batches, matrices<const T>(matrix),
      matrices<T>(result), static_cast<int>(num_iters), static_cast<T>(eps),
      symmetric);
}

template <typename T, int kTiles>
void backward(const Tensor& grad, const Tensor& matrix, int64_t num_iters,
              double eps, bool symmetric, const Tensor& result) {
  const Shape shape(matrix.size(-1));
  const int64_t batches = batch_size(matrix);
  // A block has one history after the other.
  constexpr int64_t kBlocks = 4, kMaxBytes = 256 << 20;
  const int64_t history =
      History<T>::matrices(num_iters) * shape.elements();
  const int64_t blocks = std::min(
      batches,
      std::clamp<int64_t>(kMaxBytes / (history * sizeof(T)), 1,
                          kBlocks * multiprocessors()));
  const Tensor histories = at::empty({blocks, history}, matrix.options());
  launch(
      inverse_backward<T, kTiles>, blocks, shape.warps() * kWarpSize,
      shared_bytes<T>(shape), batches, matrices<const T>(grad),
      matrices<const T>(matrix), matrices<T>(result),
      static_cast<int>(num_iters), static_cast<T>(eps), symmetric,
      histories.data_ptr<T>());
}

bool in_one_launch(const Tensor& matrix) {
  const int64_t size = matrix.size(-1);
  return compute_type(matrix) == at::kDouble ? fits<double>(size)
                                             : fits<float>(size);
}

bool is_small(const Tensor& matrix) {
  return matrix.size(-1) <= kSmall * kTileColumns;
}

}  // namespace

Tensor newton_schulz_inverse_cuda(
    const Tensor& matrix, int64_t num_iters, double eps,
    bool positive_definite) {
  check_newton_schulz_inverse(matrix);
  const DeviceGuard device(matrix);
  const BelowDispatch guard;
  if (!in_one_launch(matrix)) {
    return invert_large(matrix, num_iters, eps, positive_definite);
  }
  const Tensor wide = arrange(matrix.to(compute_type(matrix)));
  const Tensor result = at::empty(matrix.sizes(), wide.options());
  if (result.numel() > 0) {
    AT_DISPATCH_FLOATING_TYPES(
        wide.scalar_type(), "newton_schulz_inverse", [&] {
          const auto run = is_small(matrix)
              ? forward<scalar_t, kSmall>
              : forward<scalar_t, kLarge<scalar_t>>;
          run(wide, num_iters, eps, positive_definite, arrange(result));
        });
  }
  return result.to(matrix.scalar_type());
}

Tensor newton_schulz_inverse_backward_cuda(
    const Tensor& grad, const Tensor& matrix, int64_t num_iters, double eps,
    bool positive_definite) {
  check_newton_schulz_inverse_backward(grad, matrix);
  const DeviceGuard device(matrix);
  const BelowDispatch guard;
  if (!in_one_launch(matrix)) {
    return invert_large_backward(
        grad, matrix, num_iters, eps, positive_definite);
  }
  const auto type = compute_type(matrix);
  const Tensor wide = arrange(matrix.to(type));
  const Tensor wide_grad = arrange(grad.to(type));
  const Tensor result = at::empty(matrix.sizes(), wide.options());
  if (result.numel() > 0) {
    AT_DISPATCH_FLOATING_TYPES(
        type, "newton_schulz_inverse_backward", [&] {
          const auto run = is_small(matrix)
              ? backward<scalar_t, kSmall>
              : backward<scalar_t, kLarge<scalar_t>>;
          run(wide_grad, wide, num_iters, eps, positive_definite,
              arrange(result));
        });
  }
  return result.to(matrix.scalar_type());
}

TORCH_LIBRARY_IMPL(mmlaplace, MMLAPLACE_DISPATCH_KEY, m) {
  m.impl("newton_schulz_inverse", newton_schulz_inverse_cuda);
  m.impl("newton_schulz_inverse_backward",
         newton_schulz_inverse_backward_cuda);
}

}  // namespace mmlaplace
