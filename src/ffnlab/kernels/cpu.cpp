// The sparse products of an FFN on a CPU, in fp32 and bf16 with fp32 sums.
//
// A pattern is CSR: entry k of row t (crow[t] <= k < crow[t + 1]) stands for neuron idx[k], ascending in a row.
// Every row of a result is summed by one thread in the order of its entries, so that results depend neither on
// the number of threads nor on how the rows are shared out.
//
// What bounds the products is the way from L2 to the registers: each active entry reads a row of the dense
// operand and uses it once. So the dense operand is cut in tiles (columns x rows) that stay in L2 while all
// rows of the pattern pass, and the sums of a tile's columns stay in registers.
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
constexpr int BYTES = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int BYTES = 32, REGISTERS = 16;
#else
constexpr int BYTES = 16, REGISTERS = 32;
#endif
constexpr int LANES = BYTES / 4;
constexpr int SUMS = REGISTERS / 4;  // registers that hold sums: more gain nothing, fewer wait for each other
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

// How a run of STEP neighbouring elements lies in PARTS vectors: one for fp32; for bf16, the elements of even
// and of odd place, which costs a shift and a mask where the natural order would cost a shuffle more.
template <class S> struct Wide;
template <> struct Wide<float> {
  static constexpr int PARTS = 1, STEP = LANES;
  static inline vf part(const float* p, int) { return *reinterpret_cast<const vf*>(p); }
};
template <> struct Wide<bf16> {
  static constexpr int PARTS = 2, STEP = 2 * LANES;
  static inline vf part(const bf16* p, int odd) {
    vu pair = *reinterpret_cast<const vu*>(p);
    pair = odd ? pair & 0xffff0000u : pair << 16;
    vf out;
    memcpy(&out, &pair, BYTES);
    return out;
  }
};

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
static thread_local Scratch tile_scratch, sums_scratch;

static int64_t tile_bytes() {  // half of L2; the rest is for the pattern and the sums that stream past
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

// sums[0 .. N * STEP) += sum over entries k in [k, end) of val[k] * w[idx[k]][0 .. N * STEP).
template <class S, int N>
static inline void add_rows(const int32_t* idx, const S* val, int64_t k, int64_t end, const S* w, int64_t ld,
                            float* sums) {
  using E = Wide<S>;
  vf acc[N * E::PARTS];
#pragma GCC unroll 32
  for (int i = 0; i < N * E::PARTS; i++) acc[i] = *reinterpret_cast<vf*>(sums + i * LANES);
  for (; k < end; k++) {
    const S* row = w + idx[k] * ld;
    const float v = widen(val[k]);
#pragma GCC unroll 32
    for (int i = 0; i < N; i++)
#pragma GCC unroll 2
      for (int p = 0; p < E::PARTS; p++) acc[i * E::PARTS + p] += v * E::part(row + i * E::STEP, p);
  }
#pragma GCC unroll 32
  for (int i = 0; i < N * E::PARTS; i++) *reinterpret_cast<vf*>(sums + i * LANES) = acc[i];
}

// The rows [first, last) of a pattern, its values and the dense rows that it names, all `ld` wide.
template <class S> struct Sparse {
  const int64_t* crow;
  const int32_t* idx;
  const S* val;
  const S* w;
  int64_t n_dense, ld, first, last;
};

// sums[t] += the columns [c, c + N * STEP) of row t of the product. The dense rows pass in tiles that fit L2, copied
// there first, unless so few entries use them that the copy would cost more.
template <class S, int N> static void add_tiles(const Sparse<S>& s, int64_t c, float* sums, int64_t ld_sums) {
  constexpr int64_t width = N * Wide<S>::STEP;
  const int64_t rows = std::min(s.n_dense, std::max<int64_t>(64, tile_bytes() / (width * int64_t(sizeof(S)))));
  if (s.crow[s.last] - s.crow[s.first] < 4 * s.n_dense) {
    for (int64_t t = s.first; t < s.last; t++)
      add_rows<S, N>(s.idx, s.val, s.crow[t], s.crow[t + 1], s.w + c, s.ld, sums + (t - s.first) * ld_sums);
    return;
  }
  S* tile = tile_scratch.room<S>(rows * width);
  std::vector<int64_t> place(s.crow + s.first, s.crow + s.last);
  for (int64_t from = 0; from < s.n_dense; from += rows) {
    const int64_t to = std::min(from + rows, s.n_dense);
    for (int64_t f = from; f < to; f++) memcpy(tile + (f - from) * width, s.w + f * s.ld + c, width * sizeof(S));
    for (int64_t t = s.first; t < s.last; t++) {
      int64_t& k = place[t - s.first];
      const int64_t end = reach(s.idx, k, s.crow[t + 1], to, s.n_dense);
      if (k < end) add_rows<S, N>(s.idx, s.val, k, end, tile - from * width, width, sums + (t - s.first) * ld_sums);
      k = end;
    }
  }
}

// The same for the columns that are left over, one at a time.
template <class S> static void add_column(const Sparse<S>& s, int64_t c, float* sums, int64_t ld_sums) {
  for (int64_t t = s.first; t < s.last; t++) {
    float sum = 0;
    for (int64_t k = s.crow[t]; k < s.crow[t + 1]; k++) sum += widen(s.val[k]) * widen(s.w[s.idx[k] * s.ld + c]);
    sums[(t - s.first) * ld_sums] = sum;
  }
}

// Columns [c, c_end) of y, in runs as wide as the registers hold, then narrower ones, then one by one. The sums of
// bf16 lie in even and odd places until the end.
template <class S> static void spmm_columns(const Sparse<S>& s, S* y, int64_t c, int64_t c_end) {
  using E = Wide<S>;
  constexpr int N = SUMS / E::PARTS;
  while (c < c_end) {
    const int64_t left = (c_end - c) / E::STEP;
    const int64_t n = left >= N ? N : left >= 1 ? 1 : 0;
    const int64_t width = n ? n * E::STEP : 1, count = s.last - s.first;
    float* sums = sums_scratch.room<float>(count * width);
    std::fill(sums, sums + count * width, 0.f);
    if (n == N) add_tiles<S, N>(s, c, sums, width);
    else if (n) add_tiles<S, 1>(s, c, sums, width);
    else add_column<S>(s, c, sums, width);
    for (int64_t t = 0; t < count; t++) {
      const float* from = sums + t * width;
      S* to = y + (s.first + t) * s.ld + c;
      if (!n) *to = narrow<S>(*from);
      for (int64_t i = 0; i < n * E::STEP; i += E::STEP)
        for (int j = 0; j < LANES; j++)
          for (int p = 0; p < E::PARTS; p++) to[i + j * E::PARTS + p] = narrow<S>(from[i + p * LANES + j]);
    }
    c += width;
  }
}

// y[t] = sum over entries k of row t of val[k] * w[idx[k]], for y (rows, cols) and w (n_dense, cols).
template <class S>
static void spmm(const int64_t* crow, const int32_t* idx, const S* val, const S* w, S* y, int64_t rows,
                 int64_t n_dense, int64_t cols, int threads) {
  const bool few = rows < 4 * threads;  // too few rows to share out: share out the columns
  const int64_t part = (cols / threads + 63) / 64 * 64;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; i++) {
    int64_t first = 0, last = rows, c = 0, c_end = cols;
    if (few) c = std::min(cols, part * i), c_end = i + 1 == threads ? cols : std::min(cols, part * (i + 1));
    else share(crow, rows, i, threads, first, last);
    if (first < last && c < c_end) spmm_columns<S>({crow, idx, val, w, n_dense, cols, first, last}, y, c, c_end);
  }
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

// out[j] = a . w[idx[j]] for j = 0 .. N; a lies in vectors as Wide gives them, its tail as it is.
template <class S, int N>
static inline void dots(const float* a, const float* a_tail, const int32_t* idx, const S* w, int64_t cols, S* out) {
  using E = Wide<S>;
  vf acc[N] = {};
  const S* row[N];
  for (int j = 0; j < N; j++) row[j] = w + idx[j] * cols;
  const int64_t whole = cols / E::STEP * E::STEP;
  for (int64_t c = 0; c < whole; c += E::STEP)
#pragma GCC unroll 2
    for (int p = 0; p < E::PARTS; p++) {
      const vf x = *reinterpret_cast<const vf*>(a + c + p * LANES);
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) acc[j] += x * E::part(row[j] + c, p);
    }
  for (int j = 0; j < N; j++) {
    float sum = total(acc[j]);
    for (int64_t c = whole; c < cols; c++) sum += a_tail[c - whole] * widen(row[j][c]);
    out[j] = narrow<S>(sum);
  }
}

template <class S> static void spread(const S* row, int64_t cols, float* a, float* a_tail) {
  using E = Wide<S>;
  const int64_t whole = cols / E::STEP * E::STEP;
  for (int64_t c = 0; c < whole; c += E::STEP)
    for (int p = 0; p < E::PARTS; p++) *reinterpret_cast<vf*>(a + c + p * LANES) = E::part(row + c, p);
  for (int64_t c = whole; c < cols; c++) a_tail[c - whole] = widen(row[c]);
}

// out[k] = a[t] . w[idx[k]] for every entry k of every row t, for a (rows, cols) and w (n_dense, cols).
template <class S>
static void sddmm(const int64_t* crow, const int32_t* idx, const S* a, const S* w, S* out, int64_t rows,
                  int64_t n_dense, int64_t cols, int threads) {
  constexpr int N = SUMS;
  const int64_t tile = std::max<int64_t>(16, tile_bytes() / std::max<int64_t>(1, cols * int64_t(sizeof(S))));
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
        if (k < end) spread(a + t * cols, cols, wide.data(), tail.data());
        for (; k + N <= end; k += N) dots<S, N>(wide.data(), tail.data(), idx + k, w, cols, out + k);
        for (; k < end; k++) dots<S, 1>(wide.data(), tail.data(), idx + k, w, cols, out + k);
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

#ifdef __AVX512F__
static inline __m256i narrow16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  rounded = _mm512_srli_epi32(rounded, 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}
#endif

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
    if (!active) continue;
    _mm512_storeu_si512(idx + m, _mm512_maskz_compress_epi32(active, _mm512_add_epi32(iota, _mm512_set1_epi32(base + int32_t(j)))));
    const __m512 kept = _mm512_maskz_compress_ps(active, v);
    if constexpr (sizeof(S) == 4) {
      _mm512_storeu_ps(val + m, kept);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(val + m), narrow16(kept));
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
#pragma omp parallel for num_threads(threads) schedule(static)
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

// Rows that stand `room` apart, one after the other: row t goes to offsets[t].
template <class S>
static void pack(const int32_t* idx, const S* val, const int64_t* offsets, int64_t rows, int64_t room, int32_t* idx_to,
                 S* val_to, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < rows; t++) {
    const int64_t n = offsets[t + 1] - offsets[t];
    memcpy(idx_to + offsets[t], idx + t * room, n * sizeof(int32_t));
    memcpy(val_to + offsets[t], val + t * room, n * sizeof(S));
  }
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
  int64_t compact_##NAME(const S* pre, const S* c, int64_t c_step, int64_t rows, int64_t n, int64_t d_ff,               \
                      int64_t room, int32_t* idx, S* val, int64_t* starts, int threads) {                            \
    return compact(pre, c, c_step, rows, n, d_ff, room, idx, val, starts, threads);                                 \
  }                                                                                                                  \
  void pack_##NAME(const int32_t* idx, const S* val, const int64_t* offsets, int64_t rows, int64_t room,             \
                   int32_t* idx_to, S* val_to, int threads) {                                                        \
    pack(idx, val, offsets, rows, room, idx_to, val_to, threads);                                                    \
  }

extern "C" {
EXPORT(float, f32)
EXPORT(bf16, bf16)
void transpose_pattern(const int64_t* crow, const int32_t* idx, int64_t rows, int64_t cols, int64_t* ccol,
                       int32_t* row_of, int32_t* order, int threads) {
  transpose(crow, idx, rows, cols, ccol, row_of, order, threads);
}
}
