// Memory access of a column loop, whole vectors and ends of rows, and the entry point that shares rows among threads.

// -- how much of a vector counts --------------------------------------------------------------------------------------
struct Full {};              // all lanes
struct Last { int skip; };   // ends at the last column; the first `skip` lanes have been folded before
struct Part { int count; };  // a row shorter than a vector: only the first `count` lanes exist
FP_INLINE vm counts(Last m) { return lanes() >= m.skip; }
FP_INLINE vm counts(Part m) { return lanes() < m.count; }
template <class M> FP_INLINE int first_lanes(M) { return L; }
FP_INLINE int first_lanes(Part m) { return m.count; }
template <class M> FP_INLINE vm present(M, vm mask) { return mask; }
FP_INLINE vm present(Part m, vm mask) { return mask & counts(m); }

template <class T, class M> FP_INLINE auto load(const T* p, M) { return load(p); }
template <class T, class V, class M> FP_INLINE void store(T* p, V v, M) { store(p, v); }
template <class T> FP_INLINE auto load(const T* p, Part m) {
  T row[L] = {};
  for (int i = 0; i < m.count; ++i) row[i] = p[i];
  return load(row);
}
template <class T, class V> FP_INLINE void store(T* p, V v, Part m) {
  T row[L];
  store(row, v);
  for (int i = 0; i < m.count; ++i) p[i] = row[i];
}
#if FP_AVX512
// Masked moves touch no byte of the lanes left out.
#define FP_MASKED(T, V, move)                                                                            \
  FP_INLINE V read(const T* p, Part m) {                                                                 \
    V v;                                                                                                 \
    __asm__("kmovd %2, %%k1\n\t" move " %1, %0%{%%k1%}%{z%}"                                             \
            : "=v"(v) : "m"(*(const T(*)[L])p), "r"((1u << m.count) - 1) : "k1");                        \
    return v;                                                                                            \
  }                                                                                                      \
  FP_INLINE void write(T* p, V v, Part m) {                                                              \
    __asm__("kmovd %2, %%k1\n\t" move " %1, %0%{%%k1%}"                                                  \
            : "+m"(*(T(*)[L])p) : "v"(v), "r"((1u << m.count) - 1) : "k1");                              \
  }
FP_MASKED(float, vf, "vmovups")
FP_MASKED(unsigned short, vh, "vmovdqu16")
FP_INLINE vf load(const float* p, Part m) { return read(p, m); }
FP_INLINE vf load(const bf16* p, Part m) { return float_of_bf16(read(&p->bits, m)); }
FP_INLINE vf load(const f16* p, Part m) { return float_of_f16(read(&p->bits, m)); }
FP_INLINE void store(float* p, vf v, Part m) { write(p, v, m); }
FP_INLINE void store(bf16* p, vf v, Part m) { write(&p->bits, narrow_bf16(v), m); }
FP_INLINE void store(f16* p, vf v, Part m) { write(&p->bits, narrow_f16(v), m); }
#endif
template <class T, class At, class M> FP_INLINE auto gather(const T* p, At at, M m) {
  T row[L] = {};
  for (int i = 0; i < first_lanes(m); ++i) row[i] = p[at(i)];
  return load(row);
}
// Narrow items are gathered into whole lanes: inserting 16-bit items into a vector one by one is slow.
template <class At, class M> FP_INLINE vu gather_bits(const unsigned short* p, At at, M m) {
  vu v = {};
  for (int i = 0; i < first_lanes(m); ++i) v[i] = p[at(i)];
  return v;
}
template <class At, class M> FP_INLINE vf gather(const bf16* p, At at, M m) {
  return bit_cast<vf>(gather_bits(&p->bits, at, m) << 16);
}
template <class At, class M> FP_INLINE vf gather(const f16* p, At at, M m) {
  return float_of_f16<vf>(gather_bits(&p->bits, at, m));
}
// The elements at p and before it.
template <class V> FP_INLINE V reversed(V v) {
  decltype(v < v) from;
  for (int i = 0; i < L; ++i) from[i] = L - 1 - i;
#if defined(__clang__)
  V to;
  for (int i = 0; i < L; ++i) to[i] = v[from[i]];
  return to;
#else
  return __builtin_shuffle(v, from);
#endif
}
template <class T, class M> FP_INLINE auto load_back(const T* p, M) { return reversed(load(p - (L - 1))); }
template <class T> FP_INLINE auto load_back(const T* p, Part m) {
  return gather(p, [](int i) { return -(i64)i; }, m);
}
template <class T, class At, class V, class M> FP_INLINE void scatter(T* p, At at, V v, M m) {
  T row[L];
  store(row, v);
  for (int i = 0; i < first_lanes(m); ++i) p[at(i)] = row[i];
}
template <class T, class At, class V, class M> FP_INLINE V gather_masked(const T* p, At at, vm mask, V other, M m) {
  mask = present(m, mask);
  if (!any(mask)) return other;
  T row[L] = {};
  for (int i = 0; i < L; ++i)
    if (mask[i]) row[i] = p[at(i)];
  return fp_where(mask, load(row), other);
}
template <class T, class V, class M> FP_INLINE V load_masked(const T* p, vm mask, V other, M m) {
  if (!any(~mask)) return load(p, m);
  return gather_masked(p, [](int i) { return (i64)i; }, mask, other, m);
}

// N vectors of N lanes, transposed: each step exchanges what is Step lanes from the diagonal of smaller squares.
template <int Size> struct raw;
template <> struct raw<1> { typedef unsigned char type; };
template <> struct raw<2> { typedef unsigned short type; };
template <> struct raw<4> { typedef unsigned type; };
template <> struct raw<8> { typedef u64 type; };
template <class V, int N> FP_INLINE V mixed(V a, V b, int step, bool upper) {
#if defined(__clang__)
  V to;
  for (int i = 0; i < N; ++i) to[i] = upper ? (i & step ? b[i] : a[i + step]) : (i & step ? b[i - step] : a[i]);
  return to;
#else
  V from;
  for (int i = 0; i < N; ++i) from[i] = upper ? (i & step ? N + i : i + step) : (i & step ? N + i - step : i);
  return __builtin_shuffle(a, b, from);
#endif
}
template <int Step, int N, class V> FP_INLINE void exchange(V (&a)[N]) {
  if constexpr (Step < N) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i)
      if (!(i & Step)) {
        const V one = a[i], other = a[i + Step];
        a[i] = mixed<V, N>(one, other, Step, false);
        a[i + Step] = mixed<V, N>(one, other, Step, true);
      }
    exchange<Step * 2>(a);
  }
}
// to[row * W + column] = from[column * step + row]
template <int W, class T> static void transpose(const T* from, i64 step, i64 rows, i64 cols, T* to) {
  constexpr int N = FP_VECTOR_BYTES / sizeof(T) < 16 ? FP_VECTOR_BYTES / sizeof(T) : 16;
  typedef typename raw<sizeof(T)>::type number;
  typedef number V __attribute__((vector_size(N * sizeof(T))));
  if (rows < N || cols < N) {
    for (i64 row = 0; row < rows; ++row)
      for (i64 col = 0; col < cols; ++col) to[row * W + col] = from[col * step + row];
    return;
  }
  for (i64 top = 0; top < rows; top += N) {
    if (top > rows - N) top = rows - N;  // the last square may lie over the one before
    for (i64 left = 0; left < cols; left += N) {
      if (left > cols - N) left = cols - N;
      V a[N];
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) a[i] = read<V>(from + (left + i) * step + top);
      exchange<1>(a);
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) write(to + (top + i) * W + left, a[i]);
    }
  }
}

// Fold the lanes, halving; `combine` works on scalars and on vectors of any width.
template <class T, int W> struct Folder {
  typedef T whole __attribute__((vector_size(W * sizeof(T))));
  typedef T half __attribute__((vector_size(W * sizeof(T) / 2)));
  template <class C> FP_INLINE T fold(whole v, C combine) {
    half parts[2];
    __builtin_memcpy(parts, &v, sizeof v);
    return Folder<T, W / 2>::fold(combine(parts[0], parts[1]), combine);
  }
};
template <int Bytes> struct lane_number { typedef int type; };
template <> struct lane_number<8> { typedef i64 type; };
template <class T> struct Folder<T, 4> {  // stays in vectors: a scalar maximum would branch
  typedef T quad __attribute__((vector_size(4 * sizeof(T))));
  typedef typename lane_number<sizeof(T)>::type number;
  typedef number order __attribute__((vector_size(4 * sizeof(T))));
#if defined(__clang__)
#define FP_SHUFFLE(v, a, b, c, d) __builtin_shufflevector(v, v, a, b, c, d)
#else
#define FP_SHUFFLE(v, a, b, c, d) __builtin_shuffle(v, order{a, b, c, d})
#endif
  template <class C> FP_INLINE T fold(quad v, C combine) {
    v = combine(v, FP_SHUFFLE(v, 2, 3, 0, 1));
    return combine(v, FP_SHUFFLE(v, 1, 0, 3, 2))[0];
  }
};
template <class T> struct Folder<T, 2> {
  template <class V, class C> FP_INLINE T fold(V v, C combine) { return combine(v[0], v[1]); }
};
template <class V, class C> FP_INLINE typename lane<V>::type fold(V v, C combine) {
  return Folder<typename lane<V>::type, L>::fold(v, combine);
}
// A scan along the lanes, from what the columns before left in `carried`, in elements of that type.
template <class C> struct Carrier {
  enum { W = L * sizeof(C) < FP_VECTOR_BYTES ? L : FP_VECTOR_BYTES / sizeof(C) };
  typedef C wide __attribute__((vector_size(W * sizeof(C))));
  typedef decltype(wide{} < wide{}) order;
  template <int Step> FP_INLINE wide moved(wide v, C identity) {  // lane i has what lane i - Step had
    wide none = identity - wide{};
#if defined(__clang__)
    wide to;
    for (int i = 0; i < W; ++i) to[i] = i < Step ? none[i] : v[i - Step];
    return to;
#else
    order from;
    for (int i = 0; i < W; ++i) from[i] = i < Step ? W + i : i - Step;
    return __builtin_shuffle(v, none, from);
#endif
  }
  template <class N, class F> FP_INLINE N scanned(N part, C& carried, C identity, F combine) {
    wide total = convert<wide>(part);
    total = combine(total, moved<1>(total, identity));
    if (W > 2) total = combine(total, moved<2 % W>(total, identity));
    if (W > 4) total = combine(total, moved<4 % W>(total, identity));
    if (W > 8) total = combine(total, moved<8 % W>(total, identity));
    const C last = total[W - 1];
    total = combine(total, carried - wide{});
    carried = combine(carried, last);
    return convert<N>(total);
  }
};
template <class V, class C, class F> FP_INLINE V scanned(V v, C& carried, C identity, F combine) {
  typedef Carrier<C> Lanes;
  if constexpr ((int)Lanes::W == (int)L) {
    return Lanes::scanned(v, carried, identity, combine);
  } else {
    typedef Halves<typename lane<V>::type, Lanes::W> Two;
    auto low = Lanes::scanned(Two::part(v, 0), carried, identity, combine);
    return Two::joined(low, Lanes::scanned(Two::part(v, 1), carried, identity, combine));
  }
}
// The same of what has no vector form.
template <class V, class C, class F> FP_INLINE V scanned_in_turn(V v, C& carried, C, F combine) {
  for (int i = 0; i < L; ++i) v[i] = carried = combine(carried, (C)v[i]);
  return v;
}
template <class V> FP_INLINE V iota(i64 first, i64 step) {
  V v;
  for (int i = 0; i < L; ++i) v[i] = i;
  return v * splat<V>(step) + splat<V>(first);
}
template <class V, class At> FP_INLINE V positions(At at) {
  V v;
  for (int i = 0; i < L; ++i) v[i] = at(i);
  return v;
}
FP_INLINE int clamp_int(i64 x) { return (int)(x < -0x7fffffff ? -0x7fffffff : x > 0x7fffffff ? 0x7fffffff : x); }
template <class V> FP_INLINE V keep(Full, V next, V) { return next; }
template <class V, class M> FP_INLINE V keep(M m, V next, V old) { return fp_where(counts(m), next, old); }

// Where a vector is staged: the last one has a place of its own, since reading back across two writes is slow.
template <class M> FP_INLINE i64 slot(M, i64 j) { return j; }
FP_INLINE i64 slot(Last m, i64 j) { return j + m.skip; }
// Staging space of one thread, for rows too long for the stack.
template <class T> struct Scratch {
  T* data;
  explicit Scratch(i64 count) : data((T*)__builtin_malloc(count * sizeof(T))) {}
  ~Scratch() { __builtin_free(data); }
};

// -- entry ------------------------------------------------------------------------------------------------------------
// How to run: settings that need no other binary. `parallel` is GOMP_parallel of the OpenMP runtime already loaded in
// the process (null: one thread); a kernel links no runtime of its own.
struct Launch {
  i64 threads;
  i64 grain;  // elements that are worth a thread; 0: use all of `threads`
  i64 rows_per_task;
  i64 col_tile;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*thread_num)();
  int (*num_threads)();
  int (*max_threads)();
};

FP_INLINE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
FP_INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }

static i64 elements(const i64* sizes);
// Runs tasks [begin, end). Never inlined, so that profilers of machine code see it by its name.
__attribute__((noinline))
static void FP_NAME(void* const* buffers, const i64* sizes, const Launch* how, i64 begin, i64 end);

struct Call {
  void* const* buffers;
  const i64* sizes;
  const Launch* how;
  i64 begin, count;
};
static void run_share(void* data) {
  const Call* call = (const Call*)data;
  const i64 team = call->how->num_threads(), me = call->how->thread_num();
  const i64 first = call->begin + call->count * me / team, last = call->begin + call->count * (me + 1) / team;
  FP_NAME(call->buffers, call->sizes, call->how, first, last);
}

// Runs tasks [begin, end) on several threads, and returns when all of these have ended.
static void run_tasks(void* const* buffers, const i64* sizes, const Launch* how, i64 begin, i64 end) {
  i64 threads = least(how->threads, end - begin);
  if (threads > 1 && how->grain) threads = least(threads, elements(sizes) / how->grain);
  if (threads > 1 && how->parallel) threads = least(threads, how->max_threads());
  if (threads <= 1 || !how->parallel) return FP_NAME(buffers, sizes, how, begin, end);
  Call call = {buffers, sizes, how, begin, end - begin};
  how->parallel(run_share, &call, (unsigned)threads, 0);
}
