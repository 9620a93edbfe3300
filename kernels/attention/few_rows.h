// Attention of few query rows for each head of keys: softmax(scale * q k^T + mask) v. A task has a range of keys of one
// head to itself, and reads each key and value once from memory. Sums are float32; the maximum is kept as in "Online
// normalizer calculation for softmax" (Milakov and Gimelshein, 2018), and the ranges of a head are combined in order.
//
// FP_TYPE: what is stored. FP_KEYS, FP_RANGE: keys of a head and of a task. FP_HEADS, FP_PAIRS: heads of keys, and these
// times the batch. FP_GROUP, FP_POSITIONS: query heads that read one head of keys, and positions of each: together the
// query rows. FP_WIDTH, FP_DEPTH: elements of a key and of a value. FP_STRIDES: of query, key, value and result by
// batch, head and row. FP_MASK: 0 without one, 1 where it says which keys count, 2 where it is added to the scores, with
// FP_MASK_TYPE and FP_MASK_STRIDES by batch, query head, position and key. FP_SCALE.
static const i64 ACROSS[4][3] = FP_STRIDES;
enum { QUERY, KEY, VALUE, RESULT };
enum { M = FP_GROUP * FP_POSITIONS, R = M < 3 ? M : 4, ROWS = (M + R - 1) / R * R };  // R rows side by side
enum { W = (FP_WIDTH + L - 1) / L, D = (FP_DEPTH + L - 1) / L, BLOCK = 64, SIDE = BLOCK * R / L, KEYS = 4 / R };
enum { RANGES = (FP_KEYS + FP_RANGE - 1) / FP_RANGE, STATE = ROWS * (D * L + 2) };
static const float NONE = -__builtin_inff();

// Vector `at` of a row of `count` elements.
template <int count, class T> FP_INLINE vf part(const T* row, int at) {
  return count % L && at == count / L ? load(row + at * L, Part{count % L}) : load(row + at * L);
}
template <int count, class T> FP_INLINE void fetch(const T* row) {
  for (int at = 0; at < count; at += 64 / (int)sizeof(T)) __builtin_prefetch(row + at, 0, 2);
}
// The sums of four vectors' lanes.
FP_INLINE void four_sums(const vf (&v)[4], float* sums) {
#if defined(__clang__)
  for (int i = 0; i < 4; ++i) sums[i] = fold(v[i], [](auto a, auto b) { return a + b; });
#else
  vi even, odd, low, high;
  for (int i = 0; i < L; ++i) {
    even[i] = i / 2 * 2 + i % 2 * L, odd[i] = even[i] + 1;
    low[i] = i / 4 * 4 + i % 2 + (i % 4 > 1) * L, high[i] = low[i] + 2;
  }
  const vf ab = __builtin_shuffle(v[0], v[1], even) + __builtin_shuffle(v[0], v[1], odd);
  const vf cd = __builtin_shuffle(v[2], v[3], even) + __builtin_shuffle(v[2], v[3], odd);
  const vf quads = __builtin_shuffle(ab, cd, low) + __builtin_shuffle(ab, cd, high);
  typedef float quad __attribute__((vector_size(16)));
  quad all[L / 4], total = {};
  __builtin_memcpy(all, &quads, sizeof quads);
  for (int i = 0; i < L / 4; ++i) total += all[i];
  __builtin_memcpy(sums, &total, sizeof total);
#endif
}

// What one range found of all query rows: largest scores, sums of exponentials, and these times the values.
struct Found {
  float *most, *sum, *values;
  explicit Found(float* state) : most(state), sum(state + ROWS), values(state + 2 * ROWS) {}
};

struct Mask {
  const FP_MASK_TYPE* rows[M];  // of the first key
  bool hides, changes;          // all keys of a block from all rows; anything
  float added[BLOCK * R];
  float of(int row, i64 key) const {
    const FP_MASK_TYPE* p = rows[row] + key * FP_MASK_KEY;
    return FP_MASK == 1 ? (get(p) ? 0.0f : NONE) : (float)get(p);
  }
  void look(i64 key, int count) {
    hides = true, changes = false;
    for (int row = 0; row < M; ++row) {
      if (row && rows[row] == rows[row - 1]) continue;
      for (int j = 0; j < count; ++j) {
        const float number = of(row, key + j);
        hides &= number == NONE, changes |= number != 0.0f;
      }
    }
  }
};

// A block of keys and their values, `count` of them, for the query rows from `first` on.
FP_INLINE void attend(const FP_TYPE* keys, const FP_TYPE* values, int count, const float* query, int first,
                      const float* added, Found found) {
  alignas(64) float scores[BLOCK * R];
  const float* rows = query + first * W * L;
  for (int j = 0; j < count; j += KEYS) {
    vf total[4] = {};
    for (int at = 0; at < W; ++at)
      for (int key = 0; key < KEYS; ++key) {
        const i64 own = least(j + key, count - 1);
        const vf given = part<FP_WIDTH>(keys + own * ACROSS[KEY][2], at);
        for (int row = 0; row < R; ++row) total[key * R + row] += given * read<vf>(rows + (row * W + at) * L);
      }
    four_sums(total, scores + j * R);
    for (int key = 0; key < KEYS; ++key) fetch<FP_WIDTH>(keys + (j + key + BLOCK) * ACROSS[KEY][2]);
  }
  for (int i = count * R; i < BLOCK * R; ++i) scores[i] = NONE;
  vf each[SIDE], most = splat<vf>(NONE);
  for (int at = 0; at < SIDE; ++at) {
    each[at] = read<vf>(scores + at * L);
    if (added) each[at] += read<vf>(added + at * L);
    most = larger(each[at], most);
  }
  float lanes[L], before[L], now[L];
  write(lanes, most);
  for (int row = 0; row < R; ++row) {
    float own = found.most[first + row];
    for (int i = row; i < L; i += R) own = lanes[i] > own ? lanes[i] : own;
    for (int i = row; i < L; i += R) before[i] = found.most[first + row], now[i] = own;
    found.most[first + row] = own;
  }
  const vf largest = read<vf>(now), from = largest == NONE ? vf{} : largest;  // of a row that sees no key all are 0
  vf sum = {};
  for (int at = 0; at < SIDE; ++at) sum += each[at] = fp_exp(each[at] - from);
  __builtin_memcpy(scores, each, sizeof each);
  float less[L];
  write(less, fp_exp(read<vf>(before) - from));
  write(lanes, sum);
  for (int row = 0; row < R; ++row) {
    float own = found.sum[first + row] * less[row];
    for (int i = row; i < L; i += R) own += lanes[i];
    found.sum[first + row] = own;
  }
  enum { SOME = D < 4 ? D : 4 };  // vectors of values whose sums wait in registers
  for (int from = 0; from < D; from += SOME) {
    vf total[R][SOME];
    float* sums = found.values + (first * D + from) * L;
    for (int row = 0; row < R; ++row)
      for (int at = 0; at < SOME; ++at)
        total[row][at] = from + at < D ? read<vf>(sums + (row * D + at) * L) * splat<vf>(less[row]) : vf{};
    for (int j = 0; j < count; ++j) {
      const FP_TYPE* value = values + j * ACROSS[VALUE][2];
      if (!first && !from) fetch<FP_DEPTH>(value + BLOCK * ACROSS[VALUE][2]);
      for (int at = 0; at < SOME; ++at) {
        if (from + at >= D) continue;
        const vf given = part<FP_DEPTH>(value, from + at);
        for (int row = 0; row < R; ++row) total[row][at] += splat<vf>(scores[j * R + row]) * given;
      }
    }
    for (int row = 0; row < R; ++row)
      for (int at = 0; at < SOME && from + at < D; ++at) write(sums + (row * D + at) * L, total[row][at]);
  }
}

static void attend_range(void* const* buffers, i64 pair, i64 range, const float* query, Found found) {
  const i64 batch = pair / FP_HEADS, head = pair % FP_HEADS, begin = range * FP_RANGE;
  const FP_TYPE* keys = (const FP_TYPE*)buffers[1] + batch * ACROSS[KEY][0] + head * ACROSS[KEY][1];
  const FP_TYPE* values = (const FP_TYPE*)buffers[2] + batch * ACROSS[VALUE][0] + head * ACROSS[VALUE][1];
  Mask mask;
  for (int row = 0; FP_MASK && row < M; ++row) {
    const i64 at = head * FP_GROUP + row / FP_POSITIONS, position = row % FP_POSITIONS;
    const i64 strides[] = FP_MASK_STRIDES;
    mask.rows[row] = (const FP_MASK_TYPE*)buffers[3] + batch * strides[0] + at * strides[1] + position * strides[2];
  }
  for (int row = 0; row < ROWS; ++row) found.most[row] = NONE, found.sum[row] = 0.0f;
  for (int i = 0; i < ROWS * D * L; ++i) found.values[i] = 0.0f;
  for (i64 key = begin; key < least(begin + FP_RANGE, FP_KEYS); key += BLOCK) {
    const int count = (int)least(BLOCK, least(begin + FP_RANGE, FP_KEYS) - key);
    if (FP_MASK) {
      mask.look(key, count);
      if (mask.hides) continue;  // its keys and values are not read
    }
    for (int first = 0; first < ROWS; first += R) {
      const bool adds = FP_MASK && mask.changes;
      for (int i = 0; adds && i < BLOCK * R; ++i)
        mask.added[i] = i < count * R && first + i % R < M ? mask.of(first + i % R, key + i / R) : 0.0f;
      attend(keys + key * ACROSS[KEY][2], values + key * ACROSS[VALUE][2], count, query, first,
             adds ? mask.added : nullptr, found);
    }
  }
}

// Combine the ranges of a head. A row that sees no key is 0, as ATen has it.
static void combine(float* state, i64 pair, FP_TYPE* out) {
  const i64 batch = pair / FP_HEADS, head = pair % FP_HEADS;
  for (int row = 0; row < M; ++row) {
    float most = NONE, sum = 0.0f, total[D * L] = {};
    for (i64 range = 0; range < RANGES; ++range) {
      const float own = Found(state + (pair * RANGES + range) * STATE).most[row];
      most = own > most ? own : most;
    }
    for (i64 range = 0; range < RANGES; ++range) {
      const Found own(state + (pair * RANGES + range) * STATE);
      const float share = most == NONE ? 0.0f : fp_exp(splat<vf>(own.most[row] - most))[0];
      sum += own.sum[row] * share;
      for (int i = 0; i < FP_DEPTH; ++i) total[i] += own.values[row * D * L + i] * share;
    }
    FP_TYPE* result = out + batch * ACROSS[RESULT][0] + (head * FP_GROUP + row / FP_POSITIONS) * ACROSS[RESULT][1] +
                      row % FP_POSITIONS * ACROSS[RESULT][2];
    for (int i = 0; i < FP_DEPTH; ++i) put(result + i, sum == 0.0f ? 0.0f : total[i] / sum);
  }
}

static i64 elements(const i64*) { return (i64)FP_PAIRS * FP_KEYS * (FP_WIDTH + FP_DEPTH); }
static void FP_NAME(void* const* buffers, const i64*, const Launch*, i64 begin, i64 end) {
  const i64 tasks = (i64)FP_PAIRS * RANGES;
  float* state = (float*)buffers[4];
  Scratch<float> query(ROWS * W * L);
  i64 scaled = -1;  // whose query rows these are
  for (i64 task = begin; task < end; ++task) {
    const i64 pair = task < tasks ? task / RANGES : task - tasks;
    if (task >= tasks) {
      combine(state, pair, (FP_TYPE*)buffers[5]);
      continue;
    }
    if (pair != scaled) {
      const i64 batch = pair / FP_HEADS, head = pair % FP_HEADS;
      for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < W * L; ++i) {
          const i64 at = batch * ACROSS[QUERY][0] + (head * FP_GROUP + row / FP_POSITIONS) * ACROSS[QUERY][1] +
                         row % FP_POSITIONS * ACROSS[QUERY][2] + i;
          query.data[row * W * L + i] =
              row < M && i < FP_WIDTH ? get((const FP_TYPE*)buffers[0] + at) * (float)(FP_SCALE) : 0.0f;
        }
      scaled = pair;
    }
    attend_range(buffers, pair, task % RANGES, query.data, Found(state + task * STATE));
    if (RANGES == 1) combine(state, pair, (FP_TYPE*)buffers[5]);
  }
}
extern "C" void fuseplan_launch(void* const* given, const i64* sizes, const Launch* how) {
  const i64 tasks = (i64)FP_PAIRS * RANGES;
  Scratch<float> state(tasks * STATE);
  void* const buffers[] = {given[0], given[1], given[2], FP_MASK ? given[3] : nullptr, state.data,
                           given[3 + (FP_MASK != 0)]};
  run_tasks(buffers, sizes, how, 0, tasks);
  if (RANGES > 1) FP_NAME(buffers, sizes, how, tasks, tasks + FP_PAIRS);  // less work than it takes to wake a thread
}
extern "C" void fuseplan_shapes(const i64*, i64*) {}
