// The sparse products of an FFN on a CPU, in fp32 and bf16 with fp32 sums.
//
// A pattern is CSR: entry k of row t (crow[t] <= k < crow[t + 1]) stands for neuron idx[k], ascending in a row.
// Every row of a result is summed by one thread in the order of its entries, so that results depend neither on
// the number of threads nor on how the rows are shared out.
//
// What bounds the products is the way from the caches to the registers: each active entry reads a row of the dense
// operand and uses it once. So spmm packs the dense operand in runs of columns, and of a run passes tiles of so many
// rows as stay in L1 or L2 while a block of rows of the pattern uses them, with the sums in registers.
//
// Vectors are the compiler's own (GCC, Clang): AVX-512, AVX2, NEON or none come of -march=native.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
constexpr int BYTES = 64, SUMS = 8;
#elif defined(__AVX__)
constexpr int BYTES = 32, SUMS = 4;
#else
constexpr int BYTES = 16, SUMS = 8;
#endif
constexpr int64_t L1_TILE = 32768;
constexpr int LANES = BYTES / 4;  // and SUMS registers hold sums: more gain nothing, fewer wait for each other
typedef float vf __attribute__((vector_size(BYTES), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(BYTES), aligned(2)));
typedef uint16_t bf16;

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
template <class S> static inline S narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {  // to nearest, ties to even, as PyTorch rounds
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#ifdef __AVX512F__
// narrow() of 16 floats, in the lower half of each place.
static inline __m512i rounded16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), nan, _mm512_set1_epi32(0x7fc0));
}
#endif

// How STEP neighbouring elements lie in PARTS vectors: in one for fp32; for bf16 those of even and of odd place,
// which costs a shift and a mask where the natural order would cost a shuffle more, or as the pairs of two rows come
// out of a shuffle, where the machine has a product of pairs. add() takes ENTRIES rows of N steps at once.
template <class S> struct Wide;
template <> struct Wide<float> {
  static constexpr int PARTS = 1, STEP = LANES, ENTRIES = 1;
  static constexpr int place(int, int j) { return j; }
  static inline vf part(const float* p, int) { return *reinterpret_cast<const vf*>(p); }
};
template <> struct Wide<bf16> {
  static constexpr int PARTS = 2, STEP = 2 * LANES;
#ifdef __AVX512BF16__
  static constexpr int ENTRIES = 2;
  static constexpr int place(int odd, int j) { return j / 4 * 8 + odd * 4 + j % 4; }
  static inline vf part(const bf16* p, int odd) {
    const __m512i x = _mm512_loadu_si512(p), zero = _mm512_setzero_si512();
    return (vf)(odd ? _mm512_unpackhi_epi16(zero, x) : _mm512_unpacklo_epi16(zero, x));
  }
#else
  static constexpr int ENTRIES = 1;
  static constexpr int place(int odd, int j) { return j * 2 + odd; }
  static inline vf part(const bf16* p, int odd) {
    vu pair = *reinterpret_cast<const vu*>(p);
    pair = odd ? pair & 0xffff0000u : pair << 16;
    vf out;
    memcpy(&out, &pair, BYTES);
    return out;
  }
#endif
};

// acc += v * row for one row of N steps.
template <class S, int N> static inline void add_one(vf* acc, float v, const S* row) {
  using E = Wide<S>;
#pragma GCC unroll 32
  for (int i = 0; i < N; i++)
#pragma GCC unroll 2
    for (int p = 0; p < E::PARTS; p++) acc[i * E::PARTS + p] += v * E::part(row + i * E::STEP, p);
}

// The same for the ENTRIES rows that idx names.
template <class S, int N>
static inline void add_entries(vf* acc, const int32_t* idx, const S* val, const S* w, int64_t ld) {
#ifdef __AVX512BF16__
  if constexpr (sizeof(S) == 2) {
    int32_t both;
    memcpy(&both, val, 4);
    const __m512bh v = (__m512bh)_mm512_set1_epi32(both);
    const bf16 *one = w + idx[0] * ld, *two = w + idx[1] * ld;
#pragma GCC unroll 32
    for (int i = 0; i < N; i++) {
      const __m512i a = _mm512_loadu_si512(one + i * 32), b = _mm512_loadu_si512(two + i * 32);
      acc[2 * i] = (vf)_mm512_dpbf16_ps((__m512)acc[2 * i], (__m512bh)_mm512_unpacklo_epi16(a, b), v);
      acc[2 * i + 1] = (vf)_mm512_dpbf16_ps((__m512)acc[2 * i + 1], (__m512bh)_mm512_unpackhi_epi16(a, b), v);
    }
    return;
  }
#endif
  add_one<S, N>(acc, widen(val[0]), w + idx[0] * ld);
}

// Memory of one thread that lies on one huge page where the system has them: a tile is read in random order, and
// with small pages each row would also miss the first level of the page table's cache.
struct Scratch {
  void* memory = nullptr;
  size_t size = 0;
  template <class T> T* room(size_t n) {
    constexpr size_t page = size_t(1) << 21;
    const size_t bytes = (n * sizeof(T) + page - 1) / page * page;
    if (bytes > size) {
      free(memory);
      memory = aligned_alloc(page, bytes), size = bytes;
#ifdef __linux__
      madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    }
    return static_cast<T*>(memory);
  }
  ~Scratch() { free(memory); }
};
static thread_local Scratch packed_scratch, sums_scratch;

static int64_t half_l2() {
#if defined(__linux__) && defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t half = sysconf(_SC_LEVEL2_CACHE_SIZE) / 2;
  return half >= 131072 ? half : 262144;
#else
  return 262144;
#endif
}

// Rows [first, last) that thread i of n takes: equal shares of the entries.
static void share(const int64_t* crow, int64_t rows, int i, int n, int64_t& first, int64_t& last) {
  auto bound = [&](int j) {
    if (j >= n) return rows;
    const int64_t entry = crow[rows] * j / n;
    return j == 0 ? int64_t(0) : int64_t(std::lower_bound(crow, crow + rows, entry) - crow);
  };
  first = bound(i), last = std::max(first, bound(i + 1));
}

// The first entry in [k, end) of a row that lies at or behind dense row `to`.
static inline int64_t reach(const int32_t* idx, int64_t k, int64_t end, int64_t to, int64_t n_dense) {
  return to >= n_dense ? end : std::lower_bound(idx + k, idx + end, int32_t(to)) - idx;
}

// sums[0 .. N * STEP) += sum over entries k in [k, end) of val[k] * w[idx[k]][0 .. N * STEP), in CHAINS sums that do
// not wait for each other.
template <class S, int N, int CHAINS>
static inline void add_rows(const int32_t* idx, const S* val, int64_t k, int64_t end, const S* w, int64_t ld,
                            float* sums) {
  using E = Wide<S>;
  constexpr int V = N * E::PARTS, M = E::ENTRIES;
  vf acc[CHAINS][V] = {};
#pragma GCC unroll 32
  for (int i = 0; i < V; i++) acc[0][i] = *reinterpret_cast<vf*>(sums + i * LANES);
  for (; k + CHAINS * M <= end; k += CHAINS * M)
#pragma GCC unroll 8
    for (int j = 0; j < CHAINS; j++) add_entries<S, N>(acc[j], idx + k + j * M, val + k + j * M, w, ld);
  for (; k + M <= end; k += M) add_entries<S, N>(acc[0], idx + k, val + k, w, ld);
  for (; k < end; k++) add_one<S, N>(acc[0], widen(val[k]), w + idx[k] * ld);
#pragma GCC unroll 8
  for (int j = 1; j < CHAINS; j++)
#pragma GCC unroll 32
    for (int i = 0; i < V; i++) acc[0][i] += acc[j][i];
#pragma GCC unroll 32
  for (int i = 0; i < V; i++) *reinterpret_cast<vf*>(sums + i * LANES) = acc[0][i];
}

// One product, with runs of N steps. `packed` holds whole runs of w, each with all its rows one after the other; null
// where so few entries use w that packing would cost more. A tile has `tile` rows. N, packing and tile follow from the
// product as a whole, not from a thread's share of it, for the order of the sums depends on them.
template <class S, int N> struct Product {
  const int64_t* crow;
  const int32_t* idx;
  const S* val;
  const S* w;
  S* y;
  int64_t rows, n_dense, cols, tile;
  S* packed;
  static constexpr int64_t STEP = Wide<S>::STEP, WIDTH = N * STEP;
  static constexpr int CHAINS = SUMS > N * Wide<S>::PARTS ? SUMS / (N * Wide<S>::PARTS) : 1;
};

// sums = columns [c, c + M * STEP) of the rows [first, first + count) of y; bounds[r * count + t] is where row
// first + t reaches tile r.
template <int M, class S, int N>
static void add_tiles(const Product<S, N>& p, const int32_t* bounds, int64_t first, int64_t count, int64_t c,
                      float* sums) {
  constexpr int64_t width = M * Wide<S>::STEP;
  const bool packed = M == N && p.packed;
  const S* w = packed ? p.packed + c * p.n_dense : p.w + c;
  const int64_t start = p.crow[first];
  std::fill(sums, sums + count * width, 0.f);
  for (int64_t from = 0; from < p.n_dense; from += p.tile, bounds += count) {
    if (packed) {
      const char* line = reinterpret_cast<const char*>(w + from * width);
      const int64_t bytes = std::min(p.tile, p.n_dense - from) * width * int64_t(sizeof(S));
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(line + i);
    }
    for (int64_t t = 0; t < count; t++) {
      const int64_t k = bounds[t], end = bounds[count + t];
      if (k < end)
        add_rows<S, M, p.CHAINS>(p.idx + start, p.val + start, k, end, w, packed ? width : p.cols, sums + t * width);
    }
  }
}

// The sums of M steps of each row into y.
template <int M, class S, int N>
static void store_sums(const Product<S, N>& p, int64_t first, int64_t count, int64_t c, const float* sums) {
  using E = Wide<S>;
  for (int64_t t = 0; t < count; t++) {
    S* to = p.y + (first + t) * p.cols + c;
    for (int i = 0; i < M; i++, to += E::STEP, sums += E::STEP) {
#ifdef __AVX512BF16__
      if constexpr (sizeof(S) == 2) {  // packing brings the pairs of part 0 and part 1 into their natural order
        const __m512i low = rounded16(_mm512_loadu_ps(sums)), high = rounded16(_mm512_loadu_ps(sums + LANES));
        _mm512_storeu_si512(to, _mm512_packus_epi32(low, high));
        continue;
      }
#endif
      for (int part = 0; part < E::PARTS; part++)
        for (int j = 0; j < LANES; j++) to[E::place(part, j)] = narrow<S>(sums[part * LANES + j]);
    }
  }
}

// Columns from c on of the rows [first, first + count) of y, in runs of M steps as long as these end before c_end;
// returns the first column that is left.
template <int M, class S, int N>
static int64_t columns(const Product<S, N>& p, const int32_t* bounds, int64_t first, int64_t count, int64_t c,
                       int64_t c_end, float* sums) {
  for (; c + M * p.STEP <= c_end; c += M * p.STEP) {
    add_tiles<M>(p, bounds, first, count, c, sums);
    store_sums<M>(p, first, count, c, sums);
  }
  return c;
}

// Columns [c, c_end) of the rows [first, first + count) of y: in runs, then in steps, then one by one.
template <class S, int N>
static void spmm_block(const Product<S, N>& p, int64_t first, int64_t count, int64_t c, int64_t c_end) {
  const int64_t tiles = (p.n_dense + p.tile - 1) / p.tile, start = p.crow[first];
  std::vector<int32_t> bounds((tiles + 1) * count);
  for (int64_t t = 0; t < count; t++) {
    int64_t k = p.crow[first + t];
    const int64_t end = p.crow[first + t + 1];
    for (int64_t r = 0; r <= tiles; r++) {
      bounds[r * count + t] = int32_t(k - start);
      k = reach(p.idx, k, end, (r + 1) * p.tile, p.n_dense);
    }
  }
  float* sums = sums_scratch.room<float>(count * p.WIDTH);
  c = columns<N>(p, bounds.data(), first, count, c, c_end, sums);
  if constexpr (N > 4) c = columns<4>(p, bounds.data(), first, count, c, c_end, sums);
  c = columns<1>(p, bounds.data(), first, count, c, c_end, sums);
  for (; c < c_end; c++)
    for (int64_t t = first; t < first + count; t++) {
      float sum = 0;
      for (int64_t k = p.crow[t]; k < p.crow[t + 1]; k++) sum += widen(p.val[k]) * widen(p.w[p.idx[k] * p.cols + c]);
      p.y[t * p.cols + c] = narrow<S>(sum);
    }
}

// Rows [first, last) in blocks whose part of the pattern stays in L2 while the runs pass.
template <class S, int N>
static void spmm_rows(const Product<S, N>& p, int64_t first, int64_t last, int64_t c, int64_t c_end) {
  const int64_t entries = half_l2() / int64_t(sizeof(int32_t) + sizeof(S));
  while (first < last) {
    const int64_t end = std::min(last, first + 1024);
    const int64_t fit = std::upper_bound(p.crow + first, p.crow + end + 1, p.crow[first] + entries) - p.crow - 1;
    const int64_t count = std::max<int64_t>(1, std::min(fit, end) - first);
    spmm_block(p, first, count, c, c_end);
    first += count;
  }
}

template <class S, int N> static void spmm_as(Product<S, N> p, bool few, bool pack, int threads) {
  const int64_t runs = p.cols / p.WIDTH, part = (p.cols / threads + 63) / 64 * 64;
  if (pack) p.packed = packed_scratch.room<S>(p.n_dense * runs * p.WIDTH);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t f = 0; f < (pack ? p.n_dense : 0); f++)
      for (int64_t r = 0; r < runs; r++)
        memcpy(p.packed + (r * p.n_dense + f) * p.WIDTH, p.w + f * p.cols + r * p.WIDTH, p.WIDTH * sizeof(S));
#pragma omp for schedule(static, 1)
    for (int i = 0; i < threads; i++) {
      int64_t first = 0, last = p.rows, c = 0, c_end = p.cols;
      if (few) c = std::min(p.cols, part * i), c_end = i + 1 == threads ? p.cols : std::min(p.cols, part * (i + 1));
      else share(p.crow, p.rows, i, threads, first, last);
      if (first < last && c < c_end) spmm_rows(p, first, last, c, c_end);
    }
  }
}

// y[t] = sum over entries k of row t of val[k] * w[idx[k]], for y (rows, cols) and w (n_dense, cols).
//
// Of few entries the rows of w pass as they are, as much of them at once as the registers hold. Else w is packed: in
// narrow runs, of which a tile fits L1, where a row of the pattern has so many entries in such a tile that coming and
// going is cheap; in wide ones and tiles that fit L2 where it has not.
template <class S>
static void spmm(const int64_t* crow, const int32_t* idx, const S* val, const S* w, S* y, int64_t rows,
                 int64_t n_dense, int64_t cols, int threads) {
  constexpr int PARTS = Wide<S>::PARTS, WIDE = SUMS / PARTS, NARROW = PARTS == 2 ? WIDE / 2 : WIDE / 4;
  const bool few = rows < 64;  // too few to share out: share out the columns
  auto fitting = [](int64_t bytes, int n) { return bytes / int64_t(n * Wide<S>::STEP * sizeof(S)); };
  const int64_t in_l1 = fitting(L1_TILE, NARROW), in_l2 = fitting(half_l2(), WIDE);
  if (few || crow[rows] < 4 * n_dense)
    spmm_as(Product<S, 3 * WIDE>{crow, idx, val, w, y, rows, n_dense, cols, n_dense + 1, nullptr}, few, false, threads);
  else if (crow[rows] * in_l1 < 40 * rows * n_dense)
    spmm_as(Product<S, WIDE>{crow, idx, val, w, y, rows, n_dense, cols, in_l2, nullptr}, few, true, threads);
  else
    spmm_as(Product<S, NARROW>{crow, idx, val, w, y, rows, n_dense, cols, in_l1, nullptr}, few, true, threads);
}

static inline float total(vf x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps(x);
#else
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += x[i];
  return sum;
#endif
}

// A row of a: as it is, in vectors as Wide gives them, and its tail; and the w with whose rows it is multiplied.
template <class S> struct Dots {
  const S* raw;
  const float* a;
  const float* a_tail;
  const S* w;
  int64_t cols;

  // out[j] = a . w[idx[j]] for j = 0 .. N.
  template <int N, class T> inline void of(const int32_t* idx, T* out) const {
    using E = Wide<S>;
    vf acc[N] = {};
    const S* row[N];
    for (int j = 0; j < N; j++) row[j] = w + idx[j] * cols;
    const int64_t whole = cols / E::STEP * E::STEP;
    for (int64_t c = 0; c < whole; c += E::STEP) {
#ifdef __AVX512BF16__
      if constexpr (sizeof(S) == 2) {
        const __m512bh x = (__m512bh)_mm512_loadu_si512(raw + c);
#pragma GCC unroll 8
        for (int j = 0; j < N; j++)
          acc[j] = (vf)_mm512_dpbf16_ps((__m512)acc[j], (__m512bh)_mm512_loadu_si512(row[j] + c), x);
        continue;
      }
#endif
#pragma GCC unroll 2
      for (int p = 0; p < E::PARTS; p++) {
        const vf x = *reinterpret_cast<const vf*>(a + c + p * LANES);
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) acc[j] += x * E::part(row[j] + c, p);
      }
    }
    for (int j = 0; j < N; j++) {
      float sum = total(acc[j]);
      for (int64_t c = whole; c < cols; c++) sum += a_tail[c - whole] * widen(row[j][c]);
      out[j] = narrow<T>(sum);
    }
  }
};

template <class S> static void spread(const S* row, int64_t cols, float* a, float* a_tail) {
  using E = Wide<S>;
  const int64_t whole = cols / E::STEP * E::STEP;
  for (int64_t c = 0; E::ENTRIES == 1 && c < whole; c += E::STEP)
    for (int p = 0; p < E::PARTS; p++) *reinterpret_cast<vf*>(a + c + p * LANES) = E::part(row + c, p);
  for (int64_t c = whole; c < cols; c++) a_tail[c - whole] = widen(row[c]);
}

// out[k] = a[t] . w[idx[k]] for every entry k of every row t, for a (rows, cols) and w (n_dense, cols).
//
// Tiles of w stay in L2 while all rows pass. The last entries of a row are taken together too: one alone would wait for
// each of its sums.
template <class S>
static void sddmm(const int64_t* crow, const int32_t* idx, const S* a, const S* w, S* out, int64_t rows,
                  int64_t n_dense, int64_t cols, int threads) {
  const int64_t tile = std::max<int64_t>(16, half_l2() / std::max<int64_t>(1, cols * int64_t(sizeof(S))));
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; i++) {
    int64_t first, last;
    share(crow, rows, i, threads, first, last);
    std::vector<float> wide(cols + LANES), tail(2 * LANES);
    std::vector<int64_t> place(crow + first, crow + last);
    for (int64_t from = 0; first < last && from < n_dense; from += tile)
      for (int64_t t = first; t < last; t++) {
        int64_t k = place[t - first];
        const int64_t end = place[t - first] = reach(idx, k, crow[t + 1], from + tile, n_dense);
        if (k == end) continue;
        const Dots<S> dots{a + t * cols, wide.data(), tail.data(), w, cols};
        spread(a + t * cols, cols, wide.data(), tail.data());
        for (; k + 8 <= end; k += 8) dots.template of<8>(idx + k, out + k);
        switch (end - k) {
          case 7: dots.template of<7>(idx + k, out + k); break;
          case 6: dots.template of<6>(idx + k, out + k); break;
          case 5: dots.template of<5>(idx + k, out + k); break;
          case 4: dots.template of<4>(idx + k, out + k); break;
          case 3: dots.template of<3>(idx + k, out + k); break;
          case 2: dots.template of<2>(idx + k, out + k); break;
          case 1: dots.template of<1>(idx + k, out + k); break;
        }
      }
  }
}

// The pattern by columns: entries ccol[f] .. ccol[f + 1) of `row_of` and `order` are those of column f, rows ascending.
// Columns pass in chunks, so that the places where a thread writes lie on few pages.
static void transpose(const int64_t* crow, const int32_t* idx, int64_t rows, int64_t cols, int64_t* ccol,
                      int32_t* row_of, int32_t* order, int threads) {
  constexpr int64_t CHUNK = 256;
  std::vector<int64_t> next(int64_t(threads) * cols, 0);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; i++) {
    int64_t first, last;
    share(crow, rows, i, threads, first, last);
    for (int64_t k = crow[first]; k < crow[last]; k++) next[i * cols + idx[k]]++;
  }
  int64_t sum = 0;
  for (int64_t f = 0; f < cols; f++) {
    ccol[f] = sum;
    for (int i = 0; i < threads; i++) {
      const int64_t n = next[i * cols + f];
      next[i * cols + f] = sum;
      sum += n;
    }
  }
  ccol[cols] = sum;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; i++) {
    int64_t first, last;
    share(crow, rows, i, threads, first, last);
    std::vector<int64_t> place(crow + first, crow + last);
    for (int64_t from = 0; from < cols; from += CHUNK)
      for (int64_t t = first; t < last; t++) {
        int64_t k = place[t - first];
        for (; k < crow[t + 1] && idx[k] < from + CHUNK; k++) {
          const int64_t to = next[i * cols + idx[k]]++;
          row_of[to] = int32_t(t), order[to] = int32_t(k);
        }
        place[t - first] = k;
      }
  }
}

template <class S> static void gather(const S* val, const int32_t* order, S* out, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t k = 0; k < n; k++) out[k] = val[order[k]];
}

// sums[f] = sum of the values of column f, in the order of the rows.
template <class S>
static void column_sums(const int64_t* ccol, const int32_t* order, const S* val, float* sums, int64_t cols,
                        int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t f = 0; f < cols; f++) {
    float sum = 0;
    for (int64_t k = ccol[f]; k < ccol[f + 1]; k++) sum += widen(val[order[k]]);
    sums[f] = sum;
  }
}

// Appends (base + j, v) for every j in [0, n) with v = sign * pre[j] - c[j * c_step], rounded to S, not <= 0: a NaN
// is active, as it is in max(0, NaN).
template <class S>
static inline int64_t compact_row(const S* pre, int64_t n, float sign, const S* c, int64_t c_step, int32_t base,
                                  int32_t* idx, S* val) {
  int64_t m = 0, j = 0;
#ifdef __AVX512F__
  const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512 signs = _mm512_set1_ps(sign);
  for (; j + 16 <= n; j += 16) {
    __m512 x, shift;
    if constexpr (sizeof(S) == 4) {
      x = _mm512_loadu_ps(pre + j);
      shift = c_step ? _mm512_loadu_ps(c + j) : _mm512_set1_ps(c[0]);
    } else {
      auto up = [](const void* p) {
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
      };
      x = up(pre + j);
      shift = c_step ? up(c + j) : _mm512_set1_ps(widen(c[0]));
    }
    const __m512 v = _mm512_sub_ps(_mm512_mul_ps(signs, x), shift);
    __mmask16 active = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NLE_UQ);
    const __m512i neurons = _mm512_add_epi32(iota, _mm512_set1_epi32(base + int32_t(j)));
    _mm512_storeu_si512(idx + m, _mm512_maskz_compress_epi32(active, neurons));
    const __m512 kept = _mm512_maskz_compress_ps(active, v);
    if constexpr (sizeof(S) == 4) {
      _mm512_storeu_ps(val + m, kept);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(val + m), _mm512_cvtepi32_epi16(rounded16(kept)));
    }
    m += __builtin_popcount(active);
  }
#endif
  for (; j < n; j++) {
    const float v = sign * widen(pre[j]) - widen(c[j * c_step]);
    idx[m] = base + int32_t(j);
    val[m] = narrow<S>(v);
    m += !(v <= 0);
  }
  return m;
}

// Row t of a block: its entries stand at idx + t * room and val + t * room; packed, they will start at starts[t].
// Returns how many there are in all. Room for 16 more than there can be is needed. Of more neurons than
// pre-activations, neuron n + j sees -pre[j].
template <class S>
static int64_t compact(const S* pre, const S* c, int64_t c_step, int64_t rows, int64_t n, int64_t d_ff,
                    int64_t room, int32_t* idx, S* val, int64_t* starts, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
  for (int64_t t = 0; t < rows; t++) {
    int32_t* to = idx + t * room;
    S* v = val + t * room;
    int64_t m = compact_row(pre + t * n, n, 1.f, c, c_step, 0, to, v);
    if (d_ff > n) m += compact_row(pre + t * n, d_ff - n, -1.f, c + n * c_step, c_step, int32_t(n), to + m, v + m);
    starts[t + 1] = m;
  }
  starts[0] = 0;
  for (int64_t t = 0; t < rows; t++) starts[t + 1] += starts[t];
  return starts[rows];
}

// The active neurons of one token x (cols) whose pre-activations are w x + bias, for w (n, cols): `compact` of one row,
// with the dense product before it. One call for both, as in sampling the way to a second one takes longer than the
// threshold. `bias` may be null; `pre` has room for n.
template <class S>
static int64_t compact_token(const S* x, const S* w, const S* bias, const S* c, int64_t c_step, int64_t n, int64_t cols,
                             int64_t d_ff, S* pre, int32_t* idx, S* val, int threads) {
  constexpr int64_t ROWS = 8;
  const int64_t blocks = (n + ROWS - 1) / ROWS;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; i++) {
    std::vector<float> wide(cols + LANES), tail(2 * LANES);
    spread(x, cols, wide.data(), tail.data());
    for (int64_t b = blocks * i / threads; b < blocks * (i + 1) / threads; b++) {
      const int64_t first = b * ROWS, count = std::min(ROWS, n - first);
      const Dots<S> dots{x, wide.data(), tail.data(), w + first * cols, cols};
      const int32_t each[ROWS] = {0, 1, 2, 3, 4, 5, 6, 7};
      float sums[ROWS];
      if (count == ROWS) dots.template of<ROWS>(each, sums);
      else for (int64_t j = 0; j < count; j++) dots.template of<1>(each + j, sums + j);
      for (int64_t j = 0; j < count; j++)
        pre[first + j] = narrow<S>(bias ? sums[j] + widen(bias[first + j]) : sums[j]);
    }
  }
  int64_t starts[2];
  return compact(pre, c, c_step, 1, n, d_ff, 0, idx, val, starts, threads);
}

// out[k] = x . w[idx[k]] + bias[idx[k]] for k < m: sddmm of one token, whose entries the threads share.
template <class S>
static void dots_of_token(const S* x, const S* w, const S* bias, const int32_t* idx, int64_t m, int64_t cols, S* out,
                          int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; i++) {
    std::vector<float> wide(cols + LANES), tail(2 * LANES);
    spread(x, cols, wide.data(), tail.data());
    const Dots<S> dots{x, wide.data(), tail.data(), w, cols};
    int64_t k = m * i / threads;
    const int64_t end = m * (i + 1) / threads;
    for (; k + 8 <= end; k += 8) dots.template of<8>(idx + k, out + k);
    for (; k < end; k++) dots.template of<1>(idx + k, out + k);
    for (k = m * i / threads; bias && k < end; k++) out[k] = narrow<S>(widen(out[k]) + widen(bias[idx[k]]));
  }
}

// What an FFN makes of tokens, one at a time; null where it has no such matrix or bias.
template <class S> struct Unit {
  const S *way_in, *bias_in, *c;           // (n, cols), (n), (1) or (d_ff)
  int64_t c_step, n, cols, d_ff;
  const S *up, *up_bias;                   // gated: (d_ff, cols), (d_ff)
  int64_t tied, power;                     // tied: times the pre-activation; max(0, x)^power
  const S *rows, *bias;                    // way down: (d_ff, cols), (cols)
};

// y (cols) of x (cols), rounded where the products one by one would round.
template <class S> static void token(const Unit<S>& u, const S* x, S* y, int threads) {
  static thread_local Scratch pre_scratch, idx_scratch, val_scratch;
  S *pre = pre_scratch.room<S>(std::max(u.n, u.d_ff)), *val = val_scratch.room<S>(u.d_ff + 16);
  int32_t* idx = idx_scratch.room<int32_t>(u.d_ff + 16);
  const int64_t m = compact_token(x, u.way_in, u.bias_in, u.c, u.c_step, u.n, u.cols, u.d_ff, pre, idx, val, threads);
  if (u.up) dots_of_token(x, u.up, u.up_bias, idx, m, u.cols, pre, threads);
  for (int64_t k = 0; k < m; k++) {
    const float v = widen(val[k]);
    S factor = pre[k];
    if (u.tied) factor = narrow<S>(v + widen(u.c[idx[k] * u.c_step]));
    if (u.power == 2) val[k] = narrow<S>(v * v);
    if (u.up || u.tied) val[k] = narrow<S>(widen(val[k]) * widen(factor));
  }
  const int64_t crow[2] = {0, m};
  spmm(crow, idx, val, u.rows, y, 1, u.d_ff, u.cols, threads);
  for (int64_t c = 0; u.bias && c < u.cols; c++) y[c] = narrow<S>(widen(y[c]) + widen(u.bias[c]));
}

// Rows that stand `room` apart, one after the other: row t goes to offsets[t].
template <class S>
static void pack(const int32_t* idx, const S* val, const int64_t* offsets, int64_t rows, int64_t room, int32_t* idx_to,
                 S* val_to, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
  for (int64_t t = 0; t < rows; t++) {
    const int64_t n = offsets[t + 1] - offsets[t];
    memcpy(idx_to + offsets[t], idx + t * room, n * sizeof(int32_t));
    memcpy(val_to + offsets[t], val + t * room, n * sizeof(S));
  }
}

// What the machine gives at most, for `limits`. Each thread reads n floats of its own `times` over.
static float read_over(int64_t n, int64_t times, int threads) {
  float out = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : out)
  for (int i = 0; i < threads; i++) {
    float* x = sums_scratch.room<float>(n);
    std::fill(x, x + n, 1.f);
    vf acc[8] = {};
    for (int64_t again = 0; again < times; again++)
      for (int64_t j = 0; j + 8 * LANES <= n; j += 8 * LANES)
#pragma GCC unroll 8
        for (int a = 0; a < 8; a++) acc[a] += *reinterpret_cast<const vf*>(x + j + a * LANES);
    for (int a = 1; a < 8; a++) acc[0] += acc[a];
    out += total(acc[0]);
  }
  return out;
}

// Each thread multiplies and adds 12 * LANES numbers in registers, `times` over.
static float multiply_add(int64_t times, int threads) {
  float out = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : out)
  for (int i = 0; i < threads; i++) {
    vf acc[12] = {};
    vf x = {};
    x += 0.999f;
    for (int64_t again = 0; again < times; again++)
#pragma GCC unroll 12
      for (int a = 0; a < 12; a++) acc[a] = acc[a] * x + x;
    for (int a = 1; a < 12; a++) acc[0] += acc[a];
    out += total(acc[0]);
  }
  return out;
}

#define EXPORT(S, NAME)                                                                                              \
  void spmm_##NAME(const int64_t* crow, const int32_t* idx, const S* val, const S* w, S* y, int64_t rows,            \
                   int64_t n_dense, int64_t cols, int threads) {                                                     \
    spmm(crow, idx, val, w, y, rows, n_dense, cols, threads);                                                        \
  }                                                                                                                  \
  void sddmm_##NAME(const int64_t* crow, const int32_t* idx, const S* a, const S* w, S* out, int64_t rows,           \
                    int64_t n_dense, int64_t cols, int threads) {                                                    \
    sddmm(crow, idx, a, w, out, rows, n_dense, cols, threads);                                                       \
  }                                                                                                                  \
  void gather_##NAME(const S* val, const int32_t* order, S* out, int64_t n, int threads) {                           \
    gather(val, order, out, n, threads);                                                                             \
  }                                                                                                                  \
  void column_sums_##NAME(const int64_t* ccol, const int32_t* order, const S* val, float* sums, int64_t cols,        \
                          int threads) {                                                                             \
    column_sums(ccol, order, val, sums, cols, threads);                                                              \
  }                                                                                                                  \
  int64_t compact_##NAME(const S* pre, const S* c, int64_t c_step, int64_t rows, int64_t n, int64_t d_ff,            \
                      int64_t room, int32_t* idx, S* val, int64_t* starts, int threads) {                            \
    return compact(pre, c, c_step, rows, n, d_ff, room, idx, val, starts, threads);                                 \
  }                                                                                                                  \
  int64_t compact_token_##NAME(const S* x, const S* w, const S* bias, const S* c, int64_t c_step, int64_t n,         \
                               int64_t cols, int64_t d_ff, S* pre, int32_t* idx, S* val, int threads) {              \
    return compact_token(x, w, bias, c, c_step, n, cols, d_ff, pre, idx, val, threads);                              \
  }                                                                                                                  \
  void token_##NAME(const S* way_in, const S* bias_in, const S* c, int64_t c_step, int64_t n, int64_t cols,            \
                    int64_t d_ff, const S* up, const S* up_bias, int64_t tied, int64_t power, const S* rows,         \
                    const S* bias, const S* x, S* y, int threads) {                                                  \
    token(Unit<S>{way_in, bias_in, c, c_step, n, cols, d_ff, up, up_bias, tied, power, rows, bias}, x, y, threads);  \
  }                                                                                                                  \
  void pack_##NAME(const int32_t* idx, const S* val, const int64_t* offsets, int64_t rows, int64_t room,             \
                   int32_t* idx_to, S* val_to, int threads) {                                                        \
    pack(idx, val, offsets, rows, room, idx_to, val_to, threads);                                                    \
  }

extern "C" {
float limit_read(int64_t n, int64_t times, int threads) { return read_over(n, times, threads); }
float limit_multiply_add(int64_t times, int threads) { return multiply_add(times, threads); }
int64_t lanes() { return LANES; }
EXPORT(float, f32)
EXPORT(bf16, bf16)
void transpose_pattern(const int64_t* crow, const int32_t* idx, int64_t rows, int64_t cols, int64_t* ccol,
                       int32_t* row_of, int32_t* order, int threads) {
  transpose(crow, idx, rows, cols, ccol, row_of, order, threads);
}
}
