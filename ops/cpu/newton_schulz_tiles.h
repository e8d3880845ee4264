// The Newton-Schulz iteration on one matrix, whose rows are padded. No
// include guard: see each_instruction_set.h. ops/README.md has the formulas.

#include "cpu/tiles.h"

// The largest absolute value, or NaN where there is one.
template <typename T>
T largest_absolute(const T* matrix, int64_t size) {
  using S = Simd<T>;
  typename S::Vector largest{};
  T result = 0;
  const auto raise = [&result](T value) {
    result = value > result || value != value ? value : result;
  };
  for (int64_t i = 0; i < size; ++i) {
    const T* row = matrix + i * padded(size);
    int64_t j = 0;
    for (; j + S::kLanes <= size; j += S::kLanes) {
      const auto value = S::abs(S::load(row + j));
      largest = (value > largest) | (value != value) ? value : largest;
    }
    for (; j < size; ++j) {
      raise(std::abs(row[j]));
    }
  }
  for (int lane = 0; lane < S::kLanes; ++lane) {
    raise(largest[lane]);
  }
  return result;
}

// The larger of two numbers; NaN stays.
template <typename T>
T at_least(T value, T floor) {
  return value < floor ? floor : value;
}

// sum_ij left_ij * right_ij
template <typename T>
T inner_product(const T* left, const T* right, int64_t size) {
  using S = Simd<T>;
  typename S::Vector sums{};
  T result = 0;
  for (int64_t i = 0; i < size; ++i) {
    const T* a = left + i * padded(size);
    const T* b = right + i * padded(size);
    int64_t j = 0;
    for (; j + S::kLanes <= size; j += S::kLanes) {
      sums += S::load(a + j) * S::load(b + j);
    }
    for (; j < size; ++j) {
      result += a[j] * b[j];
    }
  }
  return result + S::sum(sums);
}

// out = (matrix + its transpose) * factor
template <typename T>
void add_transpose(const T* matrix, T* out, int64_t size, T factor) {
  const int64_t stride = padded(size);
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      const T value =
          (matrix[i * stride + j] + matrix[j * stride + i]) * factor;
      out[i * stride + j] = out[j * stride + i] = value;
    }
  }
}

// out = base + factor * left @ right, of square matrices.
template <typename T>
void square_matmul(
    const T* left, const T* right, T* out, int64_t size, T factor = 1,
    const T* base = nullptr) {
  const int64_t stride = padded(size);
  matmul(left, stride, 1, right, stride, out, stride, size, size, size,
         factor, base, stride);
}

// What one matrix goes through, forward and, where all steps were kept, back.
template <typename T>
struct NewtonSchulz {
  int64_t size;
  bool symmetric;  // the matrix, and so all that follows from it
  T* identity;
  T* matrix;       // A / (largest * norm), of Frobenius norm 1
  T largest;
  T norm;
  T* inverses;     // X_k, the last `slots` of them
  T* errors;       // I - A X_k, the last `slots` - 1 of them
  int64_t slots;

  int64_t elements() const {
    return size * padded(size);
  }
  T* inverse(int64_t step) const {
    return inverses + step % slots * elements();
  }
  T* error(int64_t step) const {
    return errors + step % (slots - 1) * elements();
  }

  void load(const T* source, int64_t stride, T eps) {
    pad_rows(source, stride, matrix, padded(size), size, size);
    for (int64_t i = 0; i < size; ++i) {
      matrix[i * padded(size) + i] += eps;
    }
    constexpr T kTiny = std::numeric_limits<T>::min();
    largest = at_least(largest_absolute(matrix, size), kTiny);
    for (int64_t i = 0; i < elements(); ++i) {
      matrix[i] /= largest;
    }
    if (symmetric) {
      add_transpose(matrix, matrix, size, T(0.5));
    }
    norm = at_least(std::sqrt(inner_product(matrix, matrix, size)), kTiny);
    for (int64_t i = 0; i < elements(); ++i) {
      matrix[i] /= norm;
    }
  }

  // Returns how many iterations were done before the matrix came to rest.
  int64_t iterate(int64_t num_iters) {
    const T kPrecise = std::sqrt(std::numeric_limits<T>::epsilon());
    if (symmetric) {
      std::copy_n(identity, elements(), inverse(0));
    } else {
      transpose(matrix, padded(size), inverse(0), padded(size), size, size);
    }
    T last_residual = std::numeric_limits<T>::infinity();
    for (int64_t step = 0; step < num_iters; ++step) {
      T* const x = inverse(step);
      T* const e = error(step);
      // The short start is the identity: nothing is to be multiplied.
      const bool trivial = symmetric && step == 0;
      if (trivial) {
        for (int64_t i = 0; i < elements(); ++i) {
          e[i] = identity[i] - matrix[i];
        }
      } else {
        square_matmul(matrix, x, e, size, T(-1), identity);
      }
      const T residual = largest_absolute(e, size);
      if (!(residual <= T(1.1) * last_residual)) {
        return step;
      }
      last_residual = residual;
      if (trivial) {
        for (int64_t i = 0; i < elements(); ++i) {
          inverse(1)[i] = identity[i] + e[i];
        }
      } else {
        square_matmul(x, e, inverse(step + 1), size, T(1), x);
      }
      if (size * residual <= kPrecise) {
        return step + 1;
      }
    }
    return num_iters;
  }

  void store(int64_t steps, T* target) const {
    constexpr T kLimit = std::numeric_limits<T>::max();
    const T* x = inverse(steps);
    for (int64_t i = 0; i < size; ++i) {
      for (int64_t j = 0; j < size; ++j) {
        const T value = x[i * padded(size) + j] / norm / largest;
        target[i * size + j] =
            value > kLimit ? kLimit : value < -kLimit ? -kLimit : value;
      }
    }
  }

  // Adds to `matrix_grad` what the gradient of X_`steps` means for the
  // matrix. `grad` is overwritten; `work` holds three matrices.
  void iterate_back(
      int64_t steps, T* grad, T* matrix_grad, T* work) const {
    const int64_t stride = padded(size);
    T* const product = work;
    T* const error_grad = work + elements();
    T* const flipped = work + 2 * elements();
    for (int64_t step = steps - 1; step >= 0; --step) {
      const T* x = inverse(step);
      const T* e = error(step);
      if (symmetric && step == 0) {
        // X_0 is the identity.
        for (int64_t i = 0; i < elements(); ++i) {
          matrix_grad[i] -= grad[i];
        }
      } else if (symmetric) {
        // matrix_grad -= X G X;  G <- E G + G E^T, since A X = I - E.
        square_matmul(grad, x, product, size);
        square_matmul(x, product, matrix_grad, size, T(-1),
                      matrix_grad);
        square_matmul(e, grad, product, size);
        add_transpose(product, grad, size, T(1));
      } else {
        // error_grad = X^T G;  matrix_grad -= error_grad X^T;
        // G <- G + G E^T - A^T error_grad
        matmul(x, 1, stride, grad, stride, error_grad, stride, size, size,
               size);
        transpose(x, stride, flipped, stride, size, size);
        square_matmul(error_grad, flipped, matrix_grad, size, T(-1),
                      matrix_grad);
        transpose(e, stride, flipped, stride, size, size);
        square_matmul(grad, flipped, product, size, T(1), grad);
        matmul(matrix, 1, stride, error_grad, stride, grad, stride, size,
               size, size, T(-1), product, stride);
      }
    }
    if (!symmetric) {
      // X_0 is the transpose of the matrix.
      for (int64_t i = 0; i < size; ++i) {
        for (int64_t j = 0; j < size; ++j) {
          matrix_grad[i * stride + j] += grad[j * stride + i];
        }
      }
    }
  }
};

// Carves the state out of `memory`, which holds 2 * slots + 1 matrices.
// `memory` is moved on to what is left of it.
template <typename T>
NewtonSchulz<T> make_state(
    int64_t size, bool symmetric, int64_t slots, T*& memory) {
  const int64_t elements = size * padded(size);
  NewtonSchulz<T> state{};
  state.size = size;
  state.symmetric = symmetric;
  state.slots = slots;
  state.identity = memory;
  state.matrix = memory + elements;
  state.inverses = memory + 2 * elements;
  state.errors = memory + (2 + slots) * elements;
  memory += (2 * slots + 1) * elements;
  std::fill_n(state.identity, elements, T(0));
  for (int64_t i = 0; i < size; ++i) {
    state.identity[i * padded(size) + i] = 1;
  }
  return state;
}

// Inverts a matrix into dense rows. `memory` holds 5 padded matrices.
template <typename T>
void invert(
    const T* matrix, int64_t matrix_stride, int64_t size, bool symmetric,
    int64_t num_iters, double eps, T* memory, T* result) {
  NewtonSchulz<T> state = make_state(size, symmetric, 2, memory);
  state.load(matrix, matrix_stride, eps);
  state.store(state.iterate(num_iters), result);
}

// The gradient of that. `memory` holds 2 * num_iters + 8 padded matrices.
template <typename T>
void invert_backward(
    const T* grad, int64_t grad_stride, const T* matrix,
    int64_t matrix_stride, int64_t size, bool symmetric, int64_t num_iters,
    double eps, T* memory, T* result) {
  constexpr T kLimit = std::numeric_limits<T>::max();
  const int64_t stride = padded(size);
  NewtonSchulz<T> state = make_state(size, symmetric, num_iters + 1, memory);
  T* const x_grad = memory;
  T* const matrix_grad = memory + state.elements();
  T* const work = memory + 2 * state.elements();

  state.load(matrix, matrix_stride, eps);
  const int64_t steps = state.iterate(num_iters);

  // The result is X / norm / largest, within the limits of the dtype.
  const T* x = state.inverse(steps);
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t j = 0; j < size; ++j) {
      const T value = x[i * stride + j] / state.norm / state.largest;
      const bool inside = value >= -kLimit && value <= kLimit;
      x_grad[i * stride + j] = inside
          ? grad[i * grad_stride + j] / state.norm / state.largest
          : T(0);
    }
    std::fill(x_grad + i * stride + size, x_grad + (i + 1) * stride, T(0));
  }
  T norm_grad = -inner_product(x_grad, x, size) / state.norm;

  if (symmetric) {
    add_transpose(x_grad, x_grad, size, T(0.5));
  }
  std::fill_n(matrix_grad, state.elements(), T(0));
  state.iterate_back(steps, x_grad, matrix_grad, work);
  if (symmetric) {
    add_transpose(matrix_grad, matrix_grad, size, T(0.5));
  }

  // A = matrix / norm. The norm of a zero matrix is held at its floor.
  norm_grad -= inner_product(matrix_grad, state.matrix, size) / state.norm;
  if (state.norm < 1) {
    norm_grad = 0;
  }
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t j = 0; j < size; ++j) {
      const int64_t place = i * stride + j;
      result[i * size + j] = (matrix_grad[place] / state.norm +
                              norm_grad * state.matrix[place]) /
          state.largest;
    }
  }
}
