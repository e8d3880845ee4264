// Vectors of the instruction set at hand. No include guard: this belongs into
// every namespace of each_instruction_set.h.

template <typename T>
struct IntegerLike;
template <>
struct IntegerLike<float> {
  using type = int32_t;
};
template <>
struct IntegerLike<double> {
  using type = int64_t;
};

// Functions on vectors of kBytes that hold elements of type T.
template <typename T, int kBytes = MMLAPLACE_VECTOR_BYTES>
struct Simd {
  using Element = T;
  using Integer = typename IntegerLike<T>::type;
  typedef T Vector __attribute__((vector_size(kBytes)));
  typedef Integer Bits __attribute__((vector_size(kBytes)));

  static constexpr int kLanes = kBytes / sizeof(T);
  static constexpr Integer kSignBit = std::numeric_limits<Integer>::min();

  static MMLAPLACE_INLINE Vector load(const T* source) {
    Vector value;
    std::memcpy(&value, source, kBytes);
    return value;
  }

  static MMLAPLACE_INLINE void store(T* target, Vector value) {
    std::memcpy(target, &value, kBytes);
  }

  static MMLAPLACE_INLINE Vector broadcast(T value) {
    return value - Vector{};
  }

  static MMLAPLACE_INLINE Vector abs(Vector value) {
    return (Vector)((Bits)value & ~kSignBit);
  }

  // value * sign(direction), where sign(0) = 0.
  static MMLAPLACE_INLINE Vector times_sign(Vector value, Vector direction) {
    const Bits product = (Bits)value ^ ((Bits)direction & kSignBit);
    return (Vector)((direction != Vector{}) & product);
  }

  static MMLAPLACE_INLINE T sum(Vector value) {
    if constexpr (kBytes > 16) {
      using Half = Simd<T, kBytes / 2>;
      T lanes[kLanes];
      store(lanes, value);
      return Half::sum(Half::load(lanes) + Half::load(lanes + Half::kLanes));
    } else {
      T total = value[0];
      for (int lane = 1; lane < kLanes; ++lane) {
        total += value[lane];
      }
      return total;
    }
  }

  // e^x for x <= 0, right to about one unit in the last place; 0 where the
  // result would not be a normal number; NaN for NaN.
  static MMLAPLACE_INLINE Vector exp(Vector x) {
    constexpr bool kSingle = sizeof(T) == 4;
    // Adding it rounds to an integer, which then fills the lowest bits.
    constexpr T kRound = kSingle ? T(0x1.8p23) : T(0x1.8p52);
    constexpr int kMantissaBits = kSingle ? 23 : 52;
    constexpr Integer kBias = kSingle ? 127 : 1023;
    constexpr T kSmallest = kSingle ? T(-87.33) : T(-708.39);
    // ln 2 in two parts (Cody and Waite, 1980): n times the first is exact.
    constexpr T kLn2High = kSingle ? T(0x1.62ep-1) : T(0x1.62e42fee00000p-1);
    constexpr T kLn2Low =
        kSingle ? T(0x1.0bfbe8p-15) : T(0x1.a39ef35793c76p-33);
    constexpr int kDegree = kSingle ? 7 : 13;

    const Vector shifted = x * T(1.4426950408889634) + kRound;
    const Vector n = shifted - kRound;
    const Vector rest = (x - n * kLn2High) - n * kLn2Low;
    // The Taylor series suffices for |rest| <= ln(2) / 2.
    Vector result = broadcast(kSeries[kDegree]);
#pragma GCC unroll 16
    for (int k = kDegree - 1; k >= 0; --k) {
      result = result * rest + kSeries[k];
    }
    const Bits integer = (Bits)shifted - (Bits)broadcast(kRound);
    const Vector power = (Vector)((integer + kBias) << kMantissaBits);
    return x < kSmallest ? Vector{} : result * power;
  }

 private:
  // 1 / k!
  static constexpr T kSeries[] = {
      T(1.),           T(1.),            T(1. / 2),         T(1. / 6),
      T(1. / 24),      T(1. / 120),      T(1. / 720),       T(1. / 5040),
      T(1. / 40320),   T(1. / 362880),   T(1. / 3628800),   T(1. / 39916800),
      T(1. / 479001600.), T(1. / 6227020800.)};
};
