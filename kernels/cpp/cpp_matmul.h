// A matmul of few rows: out[m][n] = sum over k of x[m][k] * w[n][k], plus bias[n]. A thread has whole rows of weights
// to itself and reads each once. FP_TYPE is what is stored; sums are float32.
//
// FP_ROWS: rows of x. FP_COLS, FP_INNER, FP_STRIDE: rows of weights, their length, and how far apart they begin.
// FP_BIAS (0, 1).
enum { M = FP_ROWS, SUMS = FP_AVX512 ? 16 : 8 };  // sums that fit the registers
enum { R = M > SUMS / 2 ? 1 : M > 2 ? SUMS / M : 8 };  // rows of weights that are read side by side
static const i64 N = FP_COLS, K = FP_INNER, STRIDE = FP_STRIDE, WHOLE = K / L * L, PADDED = (K + L - 1) / L * L;
static const i64 AHEAD = STRIDE * R;  // while a block is read, the next one is fetched

FP_INLINE float sum_of(vf v) { return fold(v, [](auto a, auto b) { return a + b; }); }

template <int C> FP_INLINE void block(const FP_TYPE* w, const float* x, float* sums) {
  vf total[C][M] = {};
  auto step = [&](auto m, i64 k) __attribute__((always_inline)) {
    vf given[M];
    for (int row = 0; row < M; ++row) given[row] = read<vf>(x + row * PADDED + k);
    for (int c = 0; c < C; ++c) {
      const vf weights = load(w + c * STRIDE + k, m);
      for (int row = 0; row < M; ++row) total[c][row] += weights * given[row];
    }
  };
  for (i64 k = 0; k < WHOLE; k += L) {
    for (int c = 0; c < C; ++c) __builtin_prefetch(w + c * STRIDE + k + AHEAD);
    step(Full{}, k);
  }
  if (WHOLE < K) step(Part{(int)(K - WHOLE)}, WHOLE);
  for (int c = 0; c < C; ++c)
    for (int row = 0; row < M; ++row) sums[row * C + c] = sum_of(total[c][row]);
}

static i64 elements(const i64*) { return N * K; }
static i64 tasks(const i64*, const Launch*) { return ceil_div(N, R); }
static void FP_NAME(void* const* buffers, const i64*, const Launch*, i64 begin, i64 end) {
  const FP_TYPE *x = (const FP_TYPE*)buffers[0], *w = (const FP_TYPE*)buffers[1];
  const FP_TYPE* bias = FP_BIAS ? (const FP_TYPE*)buffers[2] : nullptr;
  FP_TYPE* out = (FP_TYPE*)buffers[2 + FP_BIAS];
  Scratch<float> wide(M * PADDED);
  for (int row = 0; row < M; ++row)
    for (i64 k = 0; k < PADDED; ++k) wide.data[row * PADDED + k] = k < K ? get(x + row * K + k) : 0.0f;
  float sums[M * R];
  auto finish = [&](i64 n, int count) {
    for (int row = 0; row < M; ++row)
      for (int c = 0; c < count; ++c)
        put(out + row * N + n + c, sums[row * count + c] + (bias ? get(bias + n + c) : 0.0f));
  };
  i64 n = begin * R;
  for (const i64 last = least(N, end * R); n < last;) {
    const int count = n + R <= last ? R : 1;
    if (count == R) block<R>(w + n * STRIDE, wide.data, sums);
    else block<1>(w + n * STRIDE, wide.data, sums);
    finish(n, count);
    n += count;
  }
}
extern "C" void fuseplan_shapes(const i64*, i64*) {}
