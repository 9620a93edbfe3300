// A matmul of few rows: out[m][n] = sum over k of x[m][k] * w[n][k], plus bias[n]. A thread has whole rows of weights
// to itself and reads each once from memory. FP_TYPE is what is stored; sums are float32.
//
// FP_ROWS: rows of x. FP_COLS, FP_INNER, FP_STRIDE: rows of weights, their length, and how far apart they begin.
// FP_BIAS (0, 1). FP_BF16 (0, 1): FP_TYPE is bf16.
#if FP_BF16 && FP_AVX512 && defined(__AVX512BF16__)  // two products an instruction; subnormal numbers count as 0
typedef bf16 X;
typedef int vx __attribute__((vector_size(64)));
enum { S = 32, SUMS = 24, MOST = 4 };  // elements of a step; sums that fit the registers; rows of weights side by side
FP_INLINE void multiply_add(vf& sum, vx w, vx x) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x)); }
FP_INLINE vx weights(const bf16* w, Full) { return read<vx>(w); }
FP_INLINE vx weights(const bf16* w, Part m) {
  vx found = {};
  __builtin_memcpy(&found, w, m.count * sizeof *w);
  return found;
}
#else
typedef float X;
typedef vf vx;
enum { S = L, SUMS = !FP_AVX512 ? 8 : FP_ROWS > 4 ? 24 : 16, MOST = 8 };
FP_INLINE void multiply_add(vf& sum, vf w, vf x) { sum += w * x; }
template <class Lanes> FP_INLINE vf weights(const FP_TYPE* w, Lanes m) { return load(w, m); }
#endif
enum { M = FP_ROWS, SIDE = M < 8 ? M : 8 };  // rows of x that are multiplied side by side
enum { R = SUMS / SIDE < MOST ? SUMS / SIDE : MOST };  // and rows of weights
enum { CHAINS = SUMS / (R * SIDE) < 4 ? SUMS / (R * SIDE) : 4 };  // sums of one result
static const i64 N = FP_COLS, K = FP_INNER, STRIDE = FP_STRIDE, WHOLE = K / S * S, PADDED = (K + S - 1) / S * S;
// As much of x as half of a first-level cache holds is multiplied with several blocks of R rows of weights in turn.
static const i64 FITS = 16384 / (M * sizeof(X)) / (S * CHAINS) * (S * CHAINS), CHUNK = FITS < PADDED ? FITS : PADDED;
enum { BLOCKS = 16, TILE = BLOCKS * R, KEPT = (R * M + L - 1) / L * L };  // KEPT: sums of a block, in whole vectors

// f(0), f(1) and so on as code of their own: sums stay in registers only where no loop picks them.
template <int I> struct Number { constexpr operator int() const { return I; } };
template <int COUNT, int I = 0, class F> FP_INLINE void each(F f) {
  if constexpr (I < COUNT) {
    f(Number<I>{});
    each<COUNT, I + 1>(f);
  }
}
#define FP_EACH [&](auto i) __attribute__((always_inline))
template <class A, class B> struct same { enum { value = 0 }; };
template <class A> struct same<A, A> { enum { value = 1 }; };
// x needs no copy. In a copy the steps of all rows follow one another: whole rows, a power of two apart, would share
// few places in a cache.
enum { AS_GIVEN = M == 1 && same<X, FP_TYPE>::value && PADDED == K };

// Lane i: what lanes i and i ^ AT of `a` add to, of `b` where i has the bit AT.
template <int AT> FP_INLINE vf joined(vf a, vf b) {
#if defined(__clang__)
  vf sum;
  for (int i = 0; i < L; ++i) sum[i] = i & AT ? b[i] + b[i ^ AT] : a[i] + a[i ^ AT];
  return sum;
#else
  vi own, other;
  for (int i = 0; i < L; ++i) own[i] = i & AT ? L + i : i, other[i] = own[i] ^ AT;
  return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);
#endif
}
// Lane i: what all lanes of v[i] add to, each i in the same order; 0 from COUNT on.
template <int COUNT, int AT = L / 2> FP_INLINE vf lane_sums(const vf* v) {
  if constexpr (AT == 0) {
    return *v;
  } else {
    vf more = {};
    if constexpr (COUNT > AT) more = lane_sums<COUNT - AT, AT / 2>(v + AT);
    return joined<AT>(lane_sums<(COUNT < AT ? COUNT : AT), AT / 2>(v), more);
  }
}
template <int COUNT> FP_INLINE void add_sums(const vf* v, float* sums) {
  write(sums, read<vf>(sums) + lane_sums<(COUNT < L ? COUNT : L)>(v));
  if constexpr (COUNT > L) add_sums<COUNT - L>(v + L, sums + L);
}

// Columns `from` to `to` of C rows of weights times G rows of x. Meanwhile those at `next` are fetched.
template <int C, int G>
FP_INLINE void block(const FP_TYPE* w, const FP_TYPE* next, const X* x, i64 from, i64 to, float* sums) {
  vf total[CHAINS][C * G] = {};
  auto step = [&](auto m, i64 k, auto chain) __attribute__((always_inline)) {
    vx own[C], given[G];
    each<G>(FP_EACH { given[i] = read<vx>(x + k * M + i * S); });
    each<C>(FP_EACH {
      own[i] = weights(w + i * STRIDE + k, m);
      if (G == 1) multiply_add(total[chain][i], own[i], given[0]);
    });
    if (G > 1) each<C * G>(FP_EACH { multiply_add(total[chain][i], own[i % C], given[i / C]); });
  };
  i64 k = from;
  for (const i64 last = least(to, WHOLE); k + S * CHAINS <= last; k += S * CHAINS) {
    for (int c = 0; c < C; ++c)
      for (int at = 0; at < S * CHAINS; at += 64 / (int)sizeof(FP_TYPE))
        __builtin_prefetch(next + c * STRIDE + k - from + at, 0, 2);  // into the second-level cache
    each<CHAINS>(FP_EACH { step(Full{}, k + i * S, i); });
  }
  for (; k + S <= least(to, WHOLE); k += S) step(Full{}, k, Number<0>{});
  if (k < to) step(Part{(int)(K - WHOLE)}, WHOLE, Number<0>{});
  each<C * G * (CHAINS - 1)>(FP_EACH { total[0][i % (C * G)] += total[1 + i / (C * G)][i % (C * G)]; });
  add_sums<C * G>(total[0], sums);
}

// The same for all rows of x. Row by row, `sums` has those of C rows of weights.
template <int C>
FP_INLINE void rows(const FP_TYPE* w, const FP_TYPE* next, const X* x, i64 from, i64 to, float* sums) {
  enum { LEFT = M % SIDE ? M % SIDE : SIDE };
  block<C, SIDE>(w, next, x, from, to, sums);
  if constexpr (M > SIDE) block<C, LEFT>(w, next, x + SIDE * S, from, to, sums + SIDE * C);
}

static i64 elements(const i64*) { return N * K; }
static void FP_NAME(void* const* buffers, const i64*, const Launch*, i64 begin, i64 end) {
  const FP_TYPE *x = (const FP_TYPE*)buffers[0], *w = (const FP_TYPE*)buffers[1];
  const FP_TYPE* bias = FP_BIAS ? (const FP_TYPE*)buffers[2] : nullptr;
  FP_TYPE* out = (FP_TYPE*)buffers[2 + FP_BIAS];
  Scratch<X> copy(AS_GIVEN ? 0 : M * PADDED + 64 / sizeof(X));
  X* const lines = (X*)(((u64)copy.data + 63) & ~(u64)63);
  for (i64 k = 0; k < PADDED && !AS_GIVEN; k += S)
    for (int row = 0; row < M; ++row)
      write(lines + k * M + row * S, k < WHOLE ? weights(x + row * K + k, Full{})
                                               : weights(x + row * K + k, Part{(int)(K - WHOLE)}));
  const X* given = AS_GIVEN ? (const X*)buffers[0] : lines;
  const i64 high = least(N, end * R);
  for (i64 n = begin * R; n < high; n += TILE) {
    const i64 count = least(TILE, high - n);
    float sums[BLOCKS * KEPT + L] = {};
    for (i64 from = 0; from < PADDED; from += CHUNK) {
      const i64 to = least(from + CHUNK, PADDED);
      const FP_TYPE *own = w + n * STRIDE, *after = to < PADDED ? own + to : own + TILE * STRIDE;
      i64 c = 0;
      for (; c + R <= count; c += R, own += R * STRIDE)
        rows<R>(own, c + R < count ? own + R * STRIDE + from : after, given, from, to, sums + c / R * KEPT);
      for (; c < count; ++c, own += STRIDE) {
        float one[M + L] = {};
        rows<1>(own, own + STRIDE + from, given, from, to, one);
        for (int row = 0; row < M; ++row) sums[c / R * KEPT + row * R + c % R] += one[row];
      }
    }
    for (int row = 0; row < M; ++row) {
      float line[TILE + L];
      for (i64 c = 0; c < count; ++c) line[c] = sums[c / R * KEPT + row * R + c % R];
      auto put_line = [&](auto m, i64 c) {
        const vf sum = read<vf>(line + c);
        store(out + row * N + n + c, bias ? sum + load(bias + n + c, m) : sum, m);
      };
      i64 c = 0;
      for (; c + L <= count; c += L) put_line(Full{}, c);
      if (c < count) put_line(Part{(int)(count - c)}, c);
    }
  }
}
extern "C" void fuseplan_launch(void* const* buffers, const i64* sizes, const Launch* how) {
  run_tasks(buffers, sizes, how, 0, ceil_div(N, R));
}
extern "C" void fuseplan_shapes(const i64*, i64*) {}
