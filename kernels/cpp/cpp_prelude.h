// Prelude of every generated CPU kernel: vector types, storage conversions, memory access and elementary functions.
//
// A kernel is compiled for one lane count L: FP_VECTOR_BYTES of the machine over FP_WIDEST, the bytes of the widest
// register type the kernel uses. FP_STREAM (0, 1): write results past the caches. FP_ROUGH (0, 1): every float result is
// stored in 16 bits, so that a few units in the last place of float32 do not show. FP_NAME: the function that computes.
// Vectors are GCC vector extensions (g++ and clang++, any architecture); no header is included, since a header costs
// more to compile than the kernel.
typedef long long i64;
typedef unsigned long long u64;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define FP_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define FP_VECTOR_BYTES 32
#else
#define FP_VECTOR_BYTES 16
#endif
#if defined(__FMA__) || defined(__aarch64__)
#define FP_FMA 1  // a * b + c rounds once
#else
#define FP_FMA 0
#endif
enum { L = FP_VECTOR_BYTES / FP_WIDEST };

#define FP_INLINE static inline __attribute__((always_inline))
#define FP_VECTOR(T) __attribute__((vector_size(L * sizeof(T))))
typedef float vf FP_VECTOR(float);
typedef double vd FP_VECTOR(double);
typedef int vi FP_VECTOR(int);
typedef unsigned vu FP_VECTOR(unsigned);
typedef i64 vl FP_VECTOR(i64);
typedef u64 vul FP_VECTOR(u64);
typedef unsigned short vh FP_VECTOR(short);
typedef short vs FP_VECTOR(short);
typedef signed char vc FP_VECTOR(char);
typedef unsigned char vb FP_VECTOR(char);
typedef vi vm;  // a mask: all bits of a lane set, or none

// -- storage types ----------------------------------------------------------------------------------------------------
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
struct f8 { unsigned char bits; };  // e4m3fn: no infinities, NaN is 0x7f, the largest number 448
struct bool8 { unsigned char bits; };

template <class To, class From> FP_INLINE To bit_cast(From from) {
  To to;
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
template <class V, class From> FP_INLINE V read(const From* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class To> FP_INLINE void write(To* p, V v) { __builtin_memcpy(p, &v, sizeof v); }
template <class To, class From> FP_INLINE To convert(From from) { return __builtin_convertvector(from, To); }

template <class V> struct lane;
template <> struct lane<vf> { typedef float type; };
template <> struct lane<vd> { typedef double type; };
template <> struct lane<vi> { typedef int type; };
template <> struct lane<vl> { typedef i64 type; };
template <class V> FP_INLINE V splat(typename lane<V>::type x) { return x - V{}; }  // keeps -0; becomes a broadcast
FP_INLINE vm splat_mask(bool x) { return splat<vi>(x ? -1 : 0); }
FP_INLINE vi lanes() {
  vi v;
  for (int i = 0; i < L; ++i) v[i] = i;
  return v;
}

// Round to nearest even, NaN stays NaN. F and U are float and unsigned, or vectors of them.
template <class U, class F> FP_INLINE U bf16_bits(F x) {
  U bits = bit_cast<U>(x), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  U quiet = (bits >> 16) | 0x40u;
  return x == x ? rounded : quiet;
}
template <class F, class U> FP_INLINE F float_of_bf16(U half) { return bit_cast<F>(half << 16); }
template <class F, class U> FP_INLINE F float_of_f16(U half) {
  U magnitude = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
  U finite = bit_cast<U>(bit_cast<F>(magnitude) * 0x1p112f);
  U special = magnitude | 0x7f800000u;
  return bit_cast<F>((magnitude < 0x0f800000u ? finite : special) | sign);
}
template <class U, class F> FP_INLINE U f16_bits(F x) {
  U bits = bit_cast<U>(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
  U shifted = magnitude - (112u << 23);
  U normal = (shifted + 0xfffu + ((shifted >> 13) & 1u)) >> 13;
  U tiny = bit_cast<U>(bit_cast<F>(magnitude) + 0.5f) - 0x3f000000u;
  U half = magnitude < 0x38800000u ? tiny : normal;
  U infinite = (half & 0u) + 0x7c00u, quiet = infinite | 0x200u;
  half = magnitude < 0x47800000u ? half : infinite;
  return (magnitude <= 0x7f800000u ? half : quiet) | sign;
}

template <class F, class U> FP_INLINE F float_of_f8(U byte) {
  U magnitude = (byte & 0x7fu) << 20, sign = (byte & 0x80u) << 24;
  U finite = bit_cast<U>(bit_cast<F>(magnitude) * 0x1p120f), nan = (byte & 0u) + 0x7fc00000u;
  return bit_cast<F>((magnitude == 0x07f00000u ? nan : finite) | sign);
}
template <class U, class F> FP_INLINE U f8_bits(F x) {  // saturates
  U bits = bit_cast<U>(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 24) & 0x80u;
  U shifted = magnitude - (120u << 23);
  U normal = (shifted + 0x7ffffu + ((shifted >> 20) & 1u)) >> 20;
  U tiny = bit_cast<U>(bit_cast<F>(magnitude) + 0x1p14f) - 0x46800000u;
  U byte = magnitude < 0x3c800000u ? tiny : normal;
  U largest = (byte & 0u) + 0x7eu, nan = (byte & 0u) + 0x7fu;
  byte = magnitude < 0x43e00000u ? byte : largest;
  return (magnitude <= 0x7f800000u ? byte : nan) | sign;
}

// Where the compilers' generic code is far from one instruction, it is spelled out. FP_WIDE: a vector of 16-bit lanes
// fills a register of its own.
#define FP_WIDE (FP_VECTOR_BYTES >= 32 && FP_VECTOR_BYTES >= 8 * FP_WIDEST)
#define FP_AVX512 (FP_VECTOR_BYTES == 64)
#if FP_WIDE
#define FP_WIDEN(From, To, instruction)                                                                    \
  FP_INLINE To widen(From v) {                                                                             \
    To wide;                                                                                               \
    __asm__(instruction " %1, %0" : "=v"(wide) : "vm"(v));                                                 \
    return wide;                                                                                           \
  }
#else
#define FP_WIDEN(From, To, instruction) FP_INLINE To widen(From v) { return convert<To>(v); }
#endif
FP_WIDEN(vh, vu, "vpmovzxwd") FP_WIDEN(vs, vi, "vpmovsxwd")
FP_WIDEN(vc, vi, "vpmovsxbd") FP_WIDEN(vb, vi, "vpmovzxbd")

FP_INLINE vh narrow(vu v) {
#if FP_WIDE && FP_AVX512
  vh half;
  __asm__("vpmovdw %1, %0" : "=v"(half) : "v"(v));
  return half;
#else
  return convert<vh>(v);
#endif
}
FP_INLINE vh narrow_bf16(vf v) {
#if FP_WIDE && FP_AVX512 && defined(__AVX512BF16__)
  // The instruction rounds as it should, except that it flushes denormals.
  u64 denormal;
  __asm__("vfpclassps $0x20, %1, %%k1; kmovq %%k1, %0" : "=r"(denormal) : "v"(v) : "k1");
  if (__builtin_expect(denormal == 0, 1)) {
    vh half;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(half) : "v"(v));
    return half;
  }
#endif
  return narrow(bf16_bits<vu>(v));
}
FP_INLINE vf float_of_bf16(vh half) { return float_of_bf16<vf>(widen(half)); }
#if FP_WIDE && (FP_AVX512 || defined(__F16C__))
FP_INLINE vh narrow_f16(vf v) {
  vh half;
  __asm__("vcvtps2ph $0, %1, %0" : "=v"(half) : "v"(v));
  return half;
}
FP_INLINE vf float_of_f16(vh half) {
  vf v;
  __asm__("vcvtph2ps %1, %0" : "=v"(v) : "vm"(half));
  return v;
}
#else
FP_INLINE vh narrow_f16(vf v) { return narrow(f16_bits<vu>(v)); }
FP_INLINE vf float_of_f16(vh half) { return float_of_f16<vf>(widen(half)); }
#endif
FP_INLINE vb narrow_f8(vf v) { return convert<vb>(f8_bits<vu>(v)); }
FP_INLINE vf float_of_f8(vb byte) { return float_of_f8<vf>(convert<vu>(byte)); }

template <class T> FP_INLINE T get(const T* p) { return *p; }
template <class T, class V> FP_INLINE void put(T* p, V v) { *p = (T)v; }
FP_INLINE bool get(const bool8* p) { return p->bits != 0; }
FP_INLINE void put(bool8* p, bool v) { p->bits = v; }
#define FP_FLOAT(T)                                                                                        \
  FP_INLINE float get(const T* p) { return float_of_##T<float>((unsigned)p->bits); }                       \
  FP_INLINE void put(T* p, float v) { p->bits = (decltype(p->bits))T##_bits<unsigned>(v); }                \
  FP_INLINE float round_##T(float x) { return float_of_##T<float>(T##_bits<unsigned>(x)); }                \
  FP_INLINE vf round_##T(vf x) { return float_of_##T(narrow_##T(x)); }                                     \
  FP_INLINE double round_##T(double x) { return round_##T((float)x); }                                     \
  FP_INLINE vd round_##T(vd x) { return convert<vd>(round_##T(convert<vf>(x))); }
FP_FLOAT(bf16) FP_FLOAT(f16) FP_FLOAT(f8)
// Integers below 32 bits wrap around.
#define FP_INTEGER(T, V, round, wrapped)                                                                   \
  FP_INLINE int get(const T* p) { return *p; }                                                             \
  FP_INLINE vi load(const T* p) { return widen(read<V>(p)); }                                              \
  FP_INLINE void store(T* p, vi v) { write(p, convert<V>(v)); }                                            \
  FP_INLINE int round(int x) { return (T)x; }                                                              \
  FP_INLINE vi round(vi x) { return wrapped; }
FP_INTEGER(short, vs, round_i16, x << 16 >> 16)
FP_INTEGER(signed char, vc, round_i8, x << 24 >> 24)
FP_INTEGER(unsigned char, vb, round_u8, x & 0xff)

// With FP_STREAM, results go past the caches: right for outputs that would only push out what is still needed.
template <class V, class To> FP_INLINE void write_result(To* p, V v) {
#if FP_STREAM && FP_VECTOR_BYTES >= 32
  if (((u64)p & (sizeof v - 1)) == 0 && sizeof v >= 16) {
    __asm__("vmovntdq %1, %0" : "=m"(*(V*)p) : "v"(v));
    return;
  }
#endif
  write(p, v);
}
FP_INLINE void results_done() {
#if FP_STREAM && FP_VECTOR_BYTES >= 32
  __asm__ volatile("sfence" ::: "memory");
#endif
}

FP_INLINE vf load(const float* p) { return read<vf>(p); }
FP_INLINE vd load(const double* p) { return read<vd>(p); }
FP_INLINE vf load(const bf16* p) { return float_of_bf16(read<vh>(p)); }
FP_INLINE vf load(const f16* p) { return float_of_f16(read<vh>(p)); }
FP_INLINE vf load(const f8* p) {  // as float_of_f8, where sign and magnitude are moved as one
  const vi bits = widen(read<vc>(p));
  const vf number = bit_cast<vf>((bits << 20) & (int)0x87f00000) * 0x1p120f;
  return (bits & 0x7f) == 0x7f ? splat<vf>(__builtin_nanf("")) : number;
}
FP_INLINE vl load(const i64* p) { return read<vl>(p); }
FP_INLINE vi load(const int* p) { return read<vi>(p); }
FP_INLINE vm load(const bool8* p) { return widen(read<vb>(p)) != 0; }

FP_INLINE void store(float* p, vf v) { write_result(p, v); }
FP_INLINE void store(double* p, vd v) { write(p, v); }
FP_INLINE void store(bf16* p, vf v) { write_result(p, narrow_bf16(v)); }
FP_INLINE void store(f16* p, vf v) { write_result(p, narrow_f16(v)); }
FP_INLINE void store(f8* p, vf v) { write_result(p, narrow_f8(v)); }
FP_INLINE void store(i64* p, vl v) { write(p, v); }
FP_INLINE void store(i64* p, vi v) { for (int i = 0; i < L; ++i) p[i] = v[i]; }
FP_INLINE void store(int* p, vi v) { write(p, v); }
FP_INLINE void store(bool8* p, vm v) { write(p, convert<vb>(v & 1)); }

FP_INLINE bool any(vm mask) {
  vb bytes = convert<vb>(mask);
  unsigned char text[16] = {};
  write(text, bytes);
  return (read<u64>(text) | read<u64>(text + 8)) != 0;
}
