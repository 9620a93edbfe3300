// Elementary functions of the op table, on scalars (libm) and on vectors. Polynomials are minimax fits with float
// coefficients on the reduced range; results are within 2 units in the last place over the whole range unless said
// otherwise. Infinities, NaN and denormals behave as in libm.

// -- selection, comparison --------------------------------------------------------------------------------------------
FP_INLINE vm fp_mask(vm m) { return m; }
FP_INLINE vm fp_mask(vl m) { return convert<vi>(m); }
FP_INLINE bool fp_mask(bool m) { return m; }
template <class T> FP_INLINE T fp_where(bool m, T a, T b) { return m ? a : b; }
FP_INLINE vf fp_where(vm m, vf a, vf b) { return m ? a : b; }
FP_INLINE vi fp_where(vm m, vi a, vi b) { return m ? a : b; }
FP_INLINE vd fp_where(vm m, vd a, vd b) { return convert<vl>(m) ? a : b; }
FP_INLINE vl fp_where(vm m, vl a, vl b) { return convert<vl>(m) ? a : b; }
// A NaN operand wins, as in ATen.
template <class T> FP_INLINE T fp_maximum(T a, T b) { return (a > b) | (a != a) ? a : b; }
template <class T> FP_INLINE T fp_minimum(T a, T b) { return (a < b) | (a != a) ? a : b; }
// larger(a, b) and smaller(a, b) give b where an operand is NaN.
#if FP_VECTOR_BYTES > 16
FP_INLINE vf larger(vf a, vf b) { vf y; __asm__("vmaxps %2, %1, %0" : "=v"(y) : "v"(a), "v"(b)); return y; }
FP_INLINE vf smaller(vf a, vf b) { vf y; __asm__("vminps %2, %1, %0" : "=v"(y) : "v"(a), "v"(b)); return y; }
#else
FP_INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
FP_INLINE vf smaller(vf a, vf b) { return a < b ? a : b; }
#endif
FP_INLINE vf fp_maximum(vf a, vf b) { return a == a ? larger(a, b) : a; }
FP_INLINE vf fp_minimum(vf a, vf b) { return a == a ? smaller(a, b) : a; }
FP_INLINE vf clamp(vf x, float low, float high) {  // NaN stays NaN
  return larger(splat<vf>(low), smaller(splat<vf>(high), x));
}

// -- lane by lane, for what is rare or has no vector form -------------------------------------------------------------
template <class V, class F> FP_INLINE V each(V x, F f) {
  for (int i = 0; i < L; ++i) x[i] = f(x[i]);
  return x;
}
template <class V, class F> FP_INLINE V each(V x, V y, F f) {
  for (int i = 0; i < L; ++i) x[i] = f(x[i], y[i]);
  return x;
}
FP_INLINE int fp_abs(int x) { return x < 0 ? -x : x; }
FP_INLINE i64 fp_abs(i64 x) { return x < 0 ? -x : x; }
FP_INLINE float fp_abs(float x) { return __builtin_fabsf(x); }
FP_INLINE double fp_abs(double x) { return __builtin_fabs(x); }
FP_INLINE vi fp_abs(vi x) { return x < 0 ? -x : x; }
FP_INLINE vl fp_abs(vl x) { return x < 0 ? -x : x; }
FP_INLINE vf fp_abs(vf x) { return bit_cast<vf>(bit_cast<vu>(x) & 0x7fffffffu); }
FP_INLINE vd fp_abs(vd x) { return bit_cast<vd>(bit_cast<vul>(x) & 0x7fffffffffffffffull); }
FP_INLINE vf with_sign(vf x, vf sign) {
  return bit_cast<vf>((bit_cast<vu>(x) & 0x7fffffffu) | (bit_cast<vu>(sign) & 0x80000000u));
}

// Python's rounding. A zero divisor (ATen raises) gives 0 instead of a trap.
template <class T> FP_INLINE T floordiv_scalar(T a, T b) {
  if (b == 0) return 0;
  if (b == -1) return (T)(0 - (u64)a);
  T q = a / b;
  return q - ((a % b != 0) & ((a < 0) != (b < 0)));
}
FP_INLINE int fp_floordiv(int a, int b) { return floordiv_scalar(a, b); }
FP_INLINE i64 fp_floordiv(i64 a, i64 b) { return floordiv_scalar(a, b); }
FP_INLINE vi fp_floordiv(vi a, vi b) { return each(a, b, floordiv_scalar<int>); }
FP_INLINE vl fp_floordiv(vl a, vl b) { return each(a, b, floordiv_scalar<i64>); }
template <class T> FP_INLINE T fp_remainder(T a, T b) { return a - b * fp_floordiv(a, b); }

// -- libm ------------------------------------------------------------------------------------------------------------
#define FP_LIBM(name)                                                                       \
  FP_INLINE float fp_##name(float x) { return __builtin_##name##f(x); }                     \
  FP_INLINE double fp_##name(double x) { return __builtin_##name(x); }                      \
  FP_INLINE vd fp_##name(vd x) { return each(x, [](double t) { return __builtin_##name(t); }); }
FP_LIBM(floor) FP_LIBM(ceil) FP_LIBM(exp) FP_LIBM(exp2) FP_LIBM(log) FP_LIBM(log1p) FP_LIBM(sin) FP_LIBM(cos) FP_LIBM(tanh) FP_LIBM(erf)
FP_INLINE float fp_pow(float x, float y) { return __builtin_powf(x, y); }
FP_INLINE double fp_pow(double x, double y) { return __builtin_pow(x, y); }
FP_INLINE vd fp_pow(vd x, vd y) { return each(x, y, [](double a, double b) { return __builtin_pow(a, b); }); }

FP_INLINE float fp_sqrt(float x) { return __builtin_sqrtf(x); }
FP_INLINE double fp_sqrt(double x) { return __builtin_sqrt(x); }
#if FP_VECTOR_BYTES > 16
FP_INLINE vf fp_sqrt(vf x) { vf y; __asm__("vsqrtps %1, %0" : "=v"(y) : "v"(x)); return y; }
FP_INLINE vd fp_sqrt(vd x) { return each(x, [](double t) { return __builtin_sqrt(t); }); }
#else
FP_INLINE vf fp_sqrt(vf x) { return each(x, [](float t) { return __builtin_sqrtf(t); }); }
FP_INLINE vd fp_sqrt(vd x) { return each(x, [](double t) { return __builtin_sqrt(t); }); }
#endif
// log(exp(a) + exp(b)); of equal numbers, infinite ones too, the difference is 0.
FP_INLINE double fp_logaddexp(double a, double b) {
  double top = fp_maximum(a, b), gap = a == b ? 0.0 : fp_minimum(a, b) - top;
  return top + __builtin_log1p(__builtin_exp(gap));
}
FP_INLINE vd fp_logaddexp(vd a, vd b) { return each(a, b, [](double x, double y) { return fp_logaddexp(x, y); }); }
template <class T> FP_INLINE T fp_rsqrt(T x) { return 1.0f / fp_sqrt(x); }

// -- vectors of float -------------------------------------------------------------------------------------------------
FP_INLINE vf round_toward(vf x, vf rounded) {  // beyond 2^23 every float is an integer; NaN stays
  return fp_abs(x) < 0x1p23f ? with_sign(rounded, x) : x;
}
FP_INLINE float fp_round(float x) { return __builtin_rintf(x); }
FP_INLINE double fp_round(double x) { return __builtin_rint(x); }
FP_INLINE vd fp_round(vd x) { return each(x, [](double t) { return __builtin_rint(t); }); }
#if FP_VECTOR_BYTES > 16
#if FP_AVX512
#define FP_ROUNDING "vrndscaleps "
#else
#define FP_ROUNDING "vroundps "
#endif
FP_INLINE vf fp_round(vf x) { vf y; __asm__(FP_ROUNDING "$8, %1, %0" : "=v"(y) : "v"(x)); return y; }  // ties to even
FP_INLINE vf fp_floor(vf x) { vf y; __asm__(FP_ROUNDING "$9, %1, %0" : "=v"(y) : "v"(x)); return y; }
FP_INLINE vf fp_ceil(vf x) { vf y; __asm__(FP_ROUNDING "$10, %1, %0" : "=v"(y) : "v"(x)); return y; }
#else
FP_INLINE vf fp_floor(vf x) {
  vf whole = convert<vf>(convert<vi>(x));
  return round_toward(x, whole - (whole > x ? splat<vf>(1.0f) : splat<vf>(0.0f)));
}
FP_INLINE vf fp_ceil(vf x) {
  vf whole = convert<vf>(convert<vi>(x));
  return round_toward(x, whole + (whole < x ? splat<vf>(1.0f) : splat<vf>(0.0f)));
}
FP_INLINE vf fp_round(vf x) {  // ties to even
  vf magic = with_sign(splat<vf>(0x1p23f), x);
  return round_toward(x, (x + magic) - magic);
}
#endif

// A polynomial in x: its coefficients from the highest power down.
FP_INLINE vf polynomial(vf, vf p) { return p; }
template <class... C> FP_INLINE vf polynomial(vf x, vf p, float c, C... rest) { return polynomial(x, p * x + c, rest...); }
template <class... C> FP_INLINE vf horner(vf x, float a, C... rest) { return polynomial(x, splat<vf>(a), rest...); }

// x * 2^n for integral n, -252 <= n <= 252; overflow and denormals come out right. n = shifted - FP_MAGIC.
#define FP_MAGIC 0x1.8p23f  // adding it rounds to the nearest integer, which is then in the low bits
FP_INLINE vf scale(vf x, vf shifted) {
#if FP_AVX512
  vf y, n = shifted - FP_MAGIC;
  __asm__("vscalefps %2, %1, %0" : "=v"(y) : "v"(x), "v"(n));
  return y;
#else
  vi n = bit_cast<vi>(shifted) - bit_cast<int>(FP_MAGIC), half = n >> 1;
  return x * bit_cast<vf>((half + 127) << 23) * bit_cast<vf>((n - half + 127) << 23);
#endif
}
FP_INLINE vf fp_exp(vf x) {
  x = clamp(x, -104.0f, 89.0f);
  vf shifted = x * 0x1.715476p0f + FP_MAGIC, n = shifted - FP_MAGIC;
  vf r = x - n * 0x1.63p-1f + n * 0x1.bd0106p-13f;
  vf p = horner(r, 0x1.6a4d6ep-10f, 0x1.123e58p-7f, 0x1.5558b8p-5f, 0x1.55548cp-3f, 0x1.fffffcp-2f);
  return scale(p * (r * r) + r + 1.0f, shifted);
}
// 2^x from `shifted`, x + FP_MAGIC, and r, x less its nearest integer.
FP_INLINE vf exp2_parts(vf shifted, vf r) {
  vf p = horner(r, 0x1.417a34p-13f, 0x1.5f0f74p-10f, 0x1.3b2ddap-7f, 0x1.c6af72p-5f, 0x1.ebfbdcp-3f, 0x1.62e430p-1f);
  return scale(p * r + 1.0f, shifted);
}
FP_INLINE vf fp_exp2(vf x) {
  x = clamp(x, -151.0f, 129.0f);
  vf shifted = x + FP_MAGIC;
  return exp2_parts(shifted, x - (shifted - FP_MAGIC));
}
FP_INLINE float fp_sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }
FP_INLINE double fp_sigmoid(double x) { return 1.0 / (1.0 + __builtin_exp(-x)); }
FP_INLINE vf fp_sigmoid(vf x) { return 1.0f / (1.0f + fp_exp(-x)); }
FP_INLINE vd fp_sigmoid(vd x) { return each(x, [](double t) { return fp_sigmoid(t); }); }

FP_INLINE vf fp_log(vf x) {
  vm tiny = x < 0x1p-126f;
  vi bits = bit_cast<vi>(tiny ? x * 0x1p23f : x);
  vi exponent = (bits - 0x3f3504f3) >> 23;  // the mantissa is in [sqrt(1/2), sqrt(2))
  vf e = convert<vf>(exponent - (tiny & 23));
  vf f = bit_cast<vf>(bits - (exponent << 23)) - 1.0f;
  vf p = horner(f, -0x1.38c9d4p-4f, 0x1.055ec4p-3f, -0x1.0d8242p-3f, 0x1.22d92ep-3f, -0x1.54728ap-3f, 0x1.99a01cp-3f,
                   -0x1.000226p-2f, 0x1.555554p-2f);
  vf square = f * f;
  vf y = p * f * square - e * 0x1.bd0106p-13f - 0.5f * square + f + e * 0x1.63p-1f;
  y = x == 0.0f ? splat<vf>(-__builtin_inff()) : y;
  y = x < 0.0f ? splat<vf>(__builtin_nanf("")) : y;
  return (x == __builtin_inff()) | (x != x) ? x : y;
}

FP_INLINE vf fp_log1p(vf x) {  // what rounding 1 + x loses, over 1 + x, is what the logarithm lacks
  vf u = 1.0f + x, lost = (x - (u - 1.0f)) / u;
  return with_sign(fp_log(u) + ((u > 0.0f) & (u < __builtin_inff()) ? lost : splat<vf>(0.0f)), x);
}

FP_INLINE vf fp_tanh(vf x) {
  vf s = x * x, t = smaller(splat<vf>(10.0f), fp_abs(x));
  vf p = horner(s, -0x1.828776p-8f, 0x1.54c3c2p-6f, -0x1.b89abap-5f, 0x1.1109bep-3f, -0x1.55553ep-2f);
  vf small = p * s * t + t;
  vf shifted = t * 0x1.715476p1f + FP_MAGIC;  // exp(2t) = 2^(t * 2 / log(2))
  vf large = 1.0f - 2.0f / (exp2_parts(shifted, t * 0x1.715476p1f - (shifted - FP_MAGIC)) + 1.0f);
  return with_sign(t < 0.55f ? small : large, x);
}

#if FP_ROUGH && FP_FMA
FP_INLINE vf fp_erf(vf x) {  // one rational function, within 6 units in the last place
  vf t = clamp(x, -3.925f, 3.925f), s = t * t;
  vf p = horner(s, 0x1.129cf6p-19f, 0x1.2aadd8p-12f, 0x1.ee78d2p-9f, 0x1.b0490cp-5f, 0x1.8655b2p-3f, 0x1.20dd74p0f);
  vf q = horner(s, 0x1.3f2adep-15f, 0x1.3118aep-10f, 0x1.eaf7b0p-7f, 0x1.d3b0fcp-4f, 0x1.0125ccp-1f);
  // Exactly 1 where erfc is below half a unit in the last place: gelu multiplies what is left by as much as 1e38.
  return fp_abs(x) > 3.9f ? with_sign(splat<vf>(1.0f), x) : p * t / (q * s + 1.0f);
}
#else
FP_INLINE vf fp_erf(vf x) {
  vf s = x * x, t = smaller(splat<vf>(3.95f), fp_abs(x));
  vf p = horner(s, 0x1.177d02p-8f, -0x1.b18318p-6f, 0x1.cde3aep-4f, -0x1.812618p-2f, 0x1.06eba2p-3f);
  vf small = p * t + t;
  // -log2(erfc(t)) / t
  vf q = horner(t, -0x1.45a2cep-12f, 0x1.311672p-8f, -0x1.0f0426p-5f, 0x1.3736f2p-3f, 0x1.d58a00p-1f, 0x1.a0cce2p0f);
  vf shifted = FP_MAGIC - q * t, r = (FP_MAGIC - shifted) - q * t;
  vf e = horner(r, 0x1.5b8926p-10f, 0x1.3cf23cp-7f, 0x1.c6b814p-5f, 0x1.ebf9aap-3f, 0x1.62e428p-1f);
  vf large = 1.0f - scale(e * r + 1.0f, shifted);
  return with_sign(t < 0.7f ? small : large, x);
}
#endif

// sin(x + quadrant * pi/2). Beyond the range where the reduction is exact, libm takes over.
FP_INLINE vf sine(vf x, int quadrant) {
  vf shifted = x * 0x1.45f306p-1f + FP_MAGIC, n = shifted - FP_MAGIC;
  vi q = bit_cast<vi>(shifted) + quadrant;
#if FP_FMA
  vf r = x - n * 0x1.921fb6p0f;
  r = r + n * 0x1.777a5cp-25f;
  r = r + n * 0x1.ee59dap-50f;
#else
  typedef double wide FP_VECTOR(double);
  wide m = convert<wide>(n);
  vf r = convert<vf>(convert<wide>(x) - m * 0x1.921fb54p0 - m * 0x1.10b4611a62633p-30);
#endif
  vf s = r * r;
  vf odd = (-0x1.991c28p-13f * s + 0x1.1106c6p-7f) * s - 0x1.555544p-3f;
  odd = odd * (s * r) + r;
  vf even = (0x1.99de6ep-16f * s - 0x1.6c0c14p-10f) * s + 0x1.55554ap-5f;
  even = even * (s * s) - 0.5f * s + 1.0f;
  vf y = (q & 1) != 0 ? even : odd;
  return bit_cast<vf>(bit_cast<vi>(y) ^ ((q & 2) << 30));
}
FP_INLINE vf fp_sin(vf x) {
  vf y = sine(x, 0);
  vm far = fp_abs(x) > 1e5f;
  if (any(far)) y = far ? each(x, [](float t) { return __builtin_sinf(t); }) : y;
  return x == 0.0f ? x : y;
}
FP_INLINE vf fp_cos(vf x) {
  vf y = sine(x, 1);
  vm far = fp_abs(x) > 1e5f;
  return any(far) ? (far ? each(x, [](float t) { return __builtin_cosf(t); }) : y) : y;
}

// -- vectors of float, in double precision ------------------------------------------------------------------------------
// Two vectors of W lanes as one, and back. By way of memory, joining would wait until both have left the store buffer.
template <class T, int W> struct Halves {
  typedef T half __attribute__((vector_size(W * sizeof(T))));
  typedef T whole __attribute__((vector_size(2 * W * sizeof(T))));
  static half part(whole v, int number) { return ((const half*)&v)[number]; }
  static whole joined(half a, half b) {
    half parts[] = {a, b};
    return read<whole>(parts);
  }
};
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define FP_FIRST_2(at) at, at + 1
#define FP_FIRST_4(at) FP_FIRST_2(at), FP_FIRST_2(at + 2)
#define FP_FIRST_8(at) FP_FIRST_4(at), FP_FIRST_4(at + 4)
#define FP_HALVES(W)                                                                                       \
  template <class T> struct Halves<T, W> {                                                                 \
    typedef T half __attribute__((vector_size(W * sizeof(T))));                                            \
    typedef T whole __attribute__((vector_size(2 * W * sizeof(T))));                                       \
    FP_INLINE half part(whole v, int number) {                                                             \
      return number ? __builtin_shufflevector(v, v, FP_FIRST_##W(W)) : __builtin_shufflevector(v, v, FP_FIRST_##W(0)); \
    }                                                                                                      \
    FP_INLINE whole joined(half a, half b) { return __builtin_shufflevector(a, b, FP_FIRST_##W(0), FP_FIRST_##W(W)); } \
  };
FP_HALVES(2) FP_HALVES(4) FP_HALVES(8)
#endif
#endif

// f of floats as doubles, as many at a time as a register holds.
template <class F, class... V> FP_INLINE vf doubly(F f, V... x) {
  if constexpr (sizeof(vd) <= FP_VECTOR_BYTES) {
    return convert<vf>(f(convert<vd>(x)...));
  } else {
    typedef Halves<float, L / 2> Two;
    typedef double part __attribute__((vector_size(L / 2 * sizeof(double))));
    auto half = [&](int number) __attribute__((always_inline)) {
      return convert<typename Two::half>(f(convert<part>(Two::part(x, number))...));
    };
    return Two::joined(half(0), half(1));
  }
}
// The coefficients of the double versions are fits in double precision; their errors are below 2^-29.
template <class D> FP_INLINE D double_polynomial(D, D p) { return p; }
template <class D, class... C> FP_INLINE D double_polynomial(D x, D p, double c, C... rest) {
  return double_polynomial(x, p * x + c, rest...);
}
// 2^(y * (e + log2(m))); r is about 1 / (m + 1). Beyond 2^200 and its inverse floats are infinite, or zero.
template <class D> FP_INLINE D double_power(D m, D r, D e, D y) {
  typedef i64 bits __attribute__((vector_size(sizeof(D))));
  const D s = (m - 1.0) * (r * (2.0 - (m + 1.0) * r)), square = s * s;
  const D p = double_polynomial(square, square * 0x1.5ced4de6f345dp-2 + 0x1.a58d47268c259p-2, 0x1.2777806d113adp-1,
                                0x1.ec709d1228f6cp-1, 0x1.71547652bee70p+1);
  D t = (p * s + e) * y;
  t = t < -200.0 ? D{} - 200.0 : t;
  t = t > 200.0 ? D{} + 200.0 : t;
  const D shifted = t + 0x1.8p52, f = t - (shifted - 0x1.8p52);
  const D q = double_polynomial(f, f * 0x1.41d313f435a3bp-13 + 0x1.5f4597d772546p-10, 0x1.3b2dbc5e8c442p-7,
                                0x1.c6aed45ff2284p-5, 0x1.ebfbdadb210d5p-3, 0x1.62e430c82aad7p-1, 0x1.0000000262482p+0);
  return bit_cast<D>(bit_cast<bits>(q) + (bit_cast<bits>(shifted) << 52));
}
FP_INLINE vf fp_pow(vf x, vf y) {
  const vf a = fp_abs(x), infinity = splat<vf>(__builtin_inff()), one = splat<vf>(1.0f);
  const vm tiny = a < 0x1p-126f;
  const vi bits = bit_cast<vi>(tiny ? a * 0x1p23f : a), exponent = (bits - 0x3f3504f3) >> 23;
  const vf m = bit_cast<vf>(bits - (exponent << 23));  // in [sqrt(1/2), sqrt(2))
  vf e = convert<vf>(exponent - (tiny & 23));
  e = a == 0.0f ? -infinity : e;
  e = a == infinity ? infinity : e;
  auto power = [](auto... of) __attribute__((always_inline)) { return double_power(of...); };
  vf z = doubly(power, m, 1.0f / (m + 1.0f), e, y);
  // Large floats are even integers.
  const vi whole = convert<vi>(y);
  const vm large = fp_abs(y) >= 0x1p24f, integral = large | (convert<vf>(whole) == y), odd = integral & ~large & -(whole & 1);
  z = bit_cast<vf>(bit_cast<vi>(z) ^ (bit_cast<vi>(x) & odd & (int)0x80000000));
  z = (x < 0.0f) & ~integral & (a < infinity) ? splat<vf>(__builtin_nanf("")) : z;
  z = (x != x) | (y != y) ? x + y : z;
  return (x == 1.0f) | (y == 0.0f) | ((a == 1.0f) & (fp_abs(y) == infinity)) ? one : z;
}
// x^0.5: other than the square root, it is infinite for -infinity, and 0 for -0.
FP_INLINE vf fp_root(vf x) {
  return x == -__builtin_inff() ? splat<vf>(__builtin_inff()) : fp_sqrt(x + 0.0f);
}
// x^N for an integer N other than 0.
template <int N, class D> FP_INLINE D product(D x) {
  if constexpr (N == 1) return x;
  else if constexpr (N % 2) return product<N - 1>(x) * x;
  else return product<N / 2>(x * x);
}
template <int N> FP_INLINE vf fp_power(vf x) {
#if FP_ROUGH
  if constexpr (N > 0) return product<N>(x);
#endif
  return doubly([](auto t) __attribute__((always_inline)) {
    if constexpr (N > 0) return product<N>(t);
    else return 1.0 / product<-N>(t);
  }, x);
}
// What is left of x after whole multiples of y, with the sign of x. A quotient below 2^23 is rounded by less than one.
FP_INLINE float fp_fmod(float x, float y) { return __builtin_fmodf(x, y); }
FP_INLINE double fp_fmod(double x, double y) { return __builtin_fmod(x, y); }
FP_INLINE vd fp_fmod(vd x, vd y) { return each(x, y, [](double a, double b) { return __builtin_fmod(a, b); }); }
// x - whole * y as if it was rounded once; where y is larger, x.
FP_INLINE vf left_of(vf x, vf whole, vf y) {
#if FP_FMA
  const vf left = x - whole * y;
#else
  const vf left = doubly([](auto p, auto q, auto r) __attribute__((always_inline)) { return p - q * r; }, x, whole, y);
#endif
  return fp_abs(x) < fp_abs(y) ? x : left;
}
FP_INLINE vm is_far(vf quotient, vf x, vf y) {
  return (fp_abs(quotient) >= 0x1p23f) & (fp_abs(x) < __builtin_inff()) & (y != 0.0f);
}
FP_INLINE vf fp_fmod(vf x, vf y) {
  const vf a = fp_abs(x), b = fp_abs(y), quotient = a / b;
  vf left = left_of(a, fp_floor(quotient), b);
  left = with_sign(left < 0.0f ? left + b : left, x);
  const vm far = is_far(quotient, x, y);
  if (any(far)) left = far ? each(x, y, [](float p, float q) { return __builtin_fmodf(p, q); }) : left;
  return left;
}
template <class T> FP_INLINE T trunc_quotient(T x, T y) {
  const T quotient = x / y;
  return quotient < 0 ? fp_ceil(quotient) : fp_floor(quotient);
}
FP_INLINE float fp_truncdiv(float x, float y) { return trunc_quotient(x, y); }
FP_INLINE double fp_truncdiv(double x, double y) { return trunc_quotient(x, y); }
FP_INLINE vf fp_truncdiv(vf x, vf y) { return trunc_quotient(x, y); }
FP_INLINE vd fp_truncdiv(vd x, vd y) { return each(x, y, trunc_quotient<double>); }
// The quotient rounded down, as ATen computes it.
template <class T> FP_INLINE T floor_quotient(T x, T y) {
  if (y == 0) return x / y;
  const T left = fp_fmod(x, y);
  const T quotient = (x - left) / y - ((left != 0) & ((left < 0) != (y < 0)) ? 1 : 0), whole = fp_floor(quotient);
  return quotient == 0 ? x / y * 0 : quotient - whole > (T)0.5 ? whole + 1 : whole;
}
FP_INLINE float fp_floordiv(float x, float y) { return floor_quotient(x, y); }
FP_INLINE double fp_floordiv(double x, double y) { return floor_quotient(x, y); }
FP_INLINE vd fp_floordiv(vd x, vd y) { return each(x, y, floor_quotient<double>); }
FP_INLINE vf fp_floordiv(vf x, vf y) {
  const vf quotient = x / y;
  const vf whole = fp_abs(x) < fp_abs(y) ? with_sign(vf{}, quotient) : fp_floor(quotient), left = left_of(x, whole, y);
  vf down = (left != 0.0f) & ((left < 0.0f) != (y < 0.0f)) ? whole - 1.0f : whole;
  down = y == 0.0f ? quotient : left != left ? left : down;
  const vm far = is_far(quotient, x, y);
  if (any(far)) down = far ? each(x, y, floor_quotient<float>) : down;
  return down;
}
