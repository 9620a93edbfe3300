// Sums of a contraction: rows of weights, each of whose words holds P numbers, times M rows in float32. What is stored
// of a row of weights is read once, and becomes numbers in registers.
#define FP_UNROLL _Pragma("GCC unroll 16")  // sums stay in registers only where no loop picks them

template <int P> struct Numbers { vf of[P]; };
// `at(m, k)`: the numbers of the words from k on; `fetch(k, rows)` asks memory for those of a row so many further. They
// wait in the second-level cache: more lines can be on their way there than to the first.
template <class At, class Fetch> struct WeightRow {
  At at;
  Fetch fetch;
  WeightRow(At a, Fetch f) : at(a), fetch(f) {}
};
template <int... I> struct Counted {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { typedef Counted<I...> all; };
enum { SUMS = FP_AVX512 ? 16 : 8 };  // that fit the registers

// C rows of weights, each `side(pick(column))`, times G of the M rows of x. Blocks of BLOCK words of all rows of x follow
// one another: whole rows, a power of two apart, would share few places in a cache. Sums of one row of x are neighbours.
enum { BLOCK = 16 };
template <int M, int G, int P, class Side, class Pick, int... I>
FP_INLINE void multiply(Counted<I...>, Side side, Pick pick, const float* x, i64 from, i64 to, float* out, i64 apart,
                        i64 col) {
  enum { C = sizeof...(I), CHAINS = SUMS / (C * G) < 1 ? 1 : SUMS / (C * G) < 4 ? SUMS / (C * G) : 4, STEP = 4 };
  const decltype(side(0)) rows[] = {side(pick(col + I))...};
  vf total[C][CHAINS][G] = {};
  auto step = [&](auto m, i64 k, int chain) __attribute__((always_inline)) {
    const float* const given = x + k / BLOCK * (BLOCK * P * M) + k % BLOCK;
    FP_UNROLL
    for (int c = 0; c < C; ++c) {
      const Numbers<P> own = rows[c].at(m, k);
      FP_UNROLL
      for (int part = 0; part < P; ++part)
        FP_UNROLL
        for (int row = 0; row < G; ++row)
          total[c][chain][row] += own.of[part] * load(given + (part * M + row) * BLOCK, m);
    }
  };
  i64 k = from;
  for (; k + STEP * L <= to; k += STEP * L) {
    for (int c = 0; c < C; ++c) rows[c].fetch(k, 2 * C);
    FP_UNROLL
    for (int at = 0; at < STEP; ++at) step(Full{}, k + at * L, at % CHAINS);
  }
  for (; k + L <= to; k += L) step(Full{}, k, 0);
  if (k < to) step(Part{(int)(to - k)}, k, 0);
  FP_UNROLL
  for (int c = 0; c < C; ++c)
    FP_UNROLL
    for (int row = 0; row < G; ++row) {
      vf sum = total[c][0][row];
      for (int chain = 1; chain < CHAINS; ++chain) sum += total[c][chain][row];
      float& whole = out[row * apart + col + c];
      whole = (from ? whole : 0.0f) + fold(sum, [](auto a, auto b) { return a + b; });
    }
}
// Columns [low, high) of the sums: as much of x as stays in a first-level cache beside the weights, times all of them.
template <int M, int P, i64 WORDS, class Side, class Pick>
FP_INLINE void sums(Side side, Pick pick, const float* x, float* out, i64 apart, i64 low, i64 high) {
  enum { G = M > 8 ? (M + 1) / 2 : M, R = SUMS / G < 1 ? 1 : SUMS / G < 8 ? SUMS / G : 8 };  // rows at once, of both
  enum { FITS = 24576 / (int)sizeof(float) / (M * P) };
  const i64 chunk = ceil_div(ceil_div(WORDS, ceil_div(WORDS, FITS)), 64) * 64;
  for (i64 from = 0; from < WORDS; from += chunk) {
    const i64 to = least(WORDS, from + chunk);
    auto columns = [&](auto counted, i64 col) __attribute__((always_inline)) {
      multiply<M, G, P>(counted, side, pick, x, from, to, out, apart, col);
      if constexpr (G < M)
        multiply<M, M - G, P>(counted, side, pick, x + G * BLOCK, from, to, out + G * apart, apart, col);
    };
    i64 col = low;
    for (; col + R <= high; col += R) columns(typename Count<R>::all{}, col);
    for (; col < high; ++col) columns(typename Count<1>::all{}, col);
  }
}
