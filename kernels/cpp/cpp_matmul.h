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
FP_INLINE X operand(const bf16* x) { return *x; }
FP_INLINE vx weights(const bf16* w, Full) { return read<vx>(w); }
FP_INLINE vx weights(const bf16* w, Part m) {
  vx found = {};
  __builtin_memcpy(&found, w, m.count * sizeof *w);
  return found;
}
#else
typedef float X;
typedef vf vx;
enum { S = L, SUMS = FP_AVX512 ? 16 : 8, MOST = 8 };
FP_INLINE void multiply_add(vf& sum, vf w, vf x) { sum += w * x; }
FP_INLINE X operand(const FP_TYPE* x) { return get(x); }
template <class Lanes> FP_INLINE vf weights(const FP_TYPE* w, Lanes m) { return load(w, m); }
#endif
enum { M = FP_ROWS, SIDE = M < 8 ? M : 8 };  // rows of x that are multiplied side by side
enum { R = SUMS / SIDE < MOST ? SUMS / SIDE : MOST };  // and rows of weights
enum { CHAINS = SUMS / (R * SIDE) < 4 ? SUMS / (R * SIDE) : 4 };  // sums of one result
static const i64 N = FP_COLS, K = FP_INNER, STRIDE = FP_STRIDE, WHOLE = K / S * S, PADDED = (K + S - 1) / S * S;
static const i64 AHEAD = STRIDE * R;  // while some rows are read, the next ones are fetched
// As much of x as a first-level cache holds beside the weights is multiplied with several rows of them in turn.
static const i64 FITS = 32768 / (M * sizeof(X)) / (S * CHAINS) * (S * CHAINS), CHUNK = FITS < PADDED ? FITS : PADDED;
enum { TILE = CHUNK < PADDED ? 8 * R : R };

template <class A, class B> struct same { enum { value = 0 }; };
template <class A> struct same<A, A> { enum { value = 1 }; };
enum { AS_GIVEN = same<X, FP_TYPE>::value && PADDED == K };  // x needs no copy

FP_INLINE float sum_of(vf v) { return fold(v, [](auto a, auto b) { return a + b; }); }

// Columns `from` to `to` of C rows of weights times G rows of x, added to sums that lie M apart.
template <int C, int G> FP_INLINE void block(const FP_TYPE* w, const X* x, i64 from, i64 to, vf* sums) {
  vf total[C][CHAINS][G] = {};
  auto step = [&](auto m, i64 k, int chain) __attribute__((always_inline)) {
    if constexpr (G <= C) {  // the fewer of both wait in registers
      vx given[G];
      for (int row = 0; row < G; ++row) given[row] = read<vx>(x + row * PADDED + k);
      for (int c = 0; c < C; ++c) {
        const vx own = weights(w + c * STRIDE + k, m);
        for (int row = 0; row < G; ++row) multiply_add(total[c][chain][row], own, given[row]);
      }
    } else {
      vx own[C];
      for (int c = 0; c < C; ++c) own[c] = weights(w + c * STRIDE + k, m);
      for (int row = 0; row < G; ++row) {
        const vx given = read<vx>(x + row * PADDED + k);
        for (int c = 0; c < C; ++c) multiply_add(total[c][chain][row], own[c], given);
      }
    }
  };
  i64 k = from;
  for (const i64 last = least(to, WHOLE); k + S * CHAINS <= last; k += S * CHAINS) {
    for (int c = 0; c < C; ++c)
      for (int at = 0; at < S * CHAINS; at += 64 / (int)sizeof(FP_TYPE))
        __builtin_prefetch(w + c * STRIDE + k + at + AHEAD, 0, 2);  // into the second-level cache
    for (int chain = 0; chain < CHAINS; ++chain) step(Full{}, k + chain * S, chain);
  }
  for (; k + S <= least(to, WHOLE); k += S) step(Full{}, k, 0);
  if (k < to) step(Part{(int)(K - WHOLE)}, WHOLE, 0);
  for (int c = 0; c < C; ++c)
    for (int row = 0; row < G; ++row)
      for (int chain = 0; chain < CHAINS; ++chain) sums[c * M + row] += total[c][chain][row];
}

template <int C> FP_INLINE void rows(const FP_TYPE* w, const X* x, i64 from, i64 to, vf* sums) {
  int row = 0;
  for (; row + SIDE <= M; row += SIDE) block<C, SIDE>(w, x + row * PADDED, from, to, sums + row);
  if (M % SIDE) block<C, M % SIDE ? M % SIDE : 1>(w, x + row * PADDED, from, to, sums + row);
}

static i64 elements(const i64*) { return N * K; }
static void FP_NAME(void* const* buffers, const i64*, const Launch*, i64 begin, i64 end) {
  const FP_TYPE *x = (const FP_TYPE*)buffers[0], *w = (const FP_TYPE*)buffers[1];
  const FP_TYPE* bias = FP_BIAS ? (const FP_TYPE*)buffers[2] : nullptr;
  FP_TYPE* out = (FP_TYPE*)buffers[2 + FP_BIAS];
  Scratch<X> copy(AS_GIVEN ? 0 : M * PADDED);
  for (int row = 0; row < M && !AS_GIVEN; ++row)
    for (i64 k = 0; k < PADDED; ++k) copy.data[row * PADDED + k] = k < K ? operand(x + row * K + k) : X{};
  const X* wide = AS_GIVEN ? (const X*)buffers[0] : copy.data;
  for (i64 tile = begin; tile < end; ++tile) {
    const i64 n = tile * TILE, count = least(TILE, N - n);
    vf sums[TILE * M] = {};
    for (i64 from = 0; from < PADDED; from += CHUNK) {
      const i64 to = least(from + CHUNK, PADDED);
      i64 c = 0;
      for (; c + R <= count; c += R) rows<R>(w + (n + c) * STRIDE, wide, from, to, sums + c * M);
      for (; c < count; ++c) rows<1>(w + (n + c) * STRIDE, wide, from, to, sums + c * M);
    }
    for (int row = 0; row < M; ++row)
      for (i64 c = 0; c < count; ++c)
        put(out + row * N + n + c, sum_of(sums[c * M + row]) + (bias ? get(bias + n + c) : 0.0f));
  }
}
extern "C" void fuseplan_launch(void* const* buffers, const i64* sizes, const Launch* how) {
  run_tasks(buffers, sizes, how, 0, ceil_div(N, TILE));
}
extern "C" void fuseplan_shapes(const i64*, i64*) {}
