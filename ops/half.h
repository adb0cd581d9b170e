// small.h's product by bfloat16: what is multiplied is rounded, sums are float32. For CPUs with avx512_bf16 alone; those
// with AMX multiply tiles of 16 x 16.
#pragma once

#include <immintrin.h>

#include "small.h"

extern "C" int dnnl_get_effective_cpu_isa();

#define HALF __attribute__((target("avx512bf16,avx512bw,avx512dq,avx512vl,fma")))
#define TILES __attribute__((target("amx-tile,amx-bf16,avx512bf16,avx512bw,avx512dq,avx512vl,fma")))

// Pairs of k values, in whole rows of a tile.
inline int64_t halved(int64_t k) { return padded((k + 1) / 2); }

// Numbers of 32 bits that `half_product` needs for its factors.
inline int64_t pairs(int64_t m, int64_t n, int64_t k) { return halved(k) * (padded(m) + n); }

HALF inline __m512i rounded_(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

// to [width, n] = rows 2 x and 2 x + 1 of from [k, n], element by element, and zeros; n is a multiple of LANES.
HALF inline void pair_rows(int64_t k, int64_t n, const float* from, int64_t ld, uint32_t* to, int64_t width) {
  for (int64_t x = 0; x < 2 * width; x += 2, from += 2 * ld, to += n)
    for (int64_t j = 0; j < n; j += LANES) {
      __m512i low = x < k ? rounded_(_mm512_loadu_ps(from + j)) : _mm512_setzero_si512();
      __m512i high = x + 1 < k ? rounded_(_mm512_loadu_ps(from + ld + j)) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + j, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

// to [m, width] = neighbours in the rows of from [m, k], and zeros.
HALF inline void pair_columns(int64_t m, int64_t k, const float* from, int64_t ld, uint32_t* to, int64_t width) {
  for (int64_t i = 0; i < m; ++i, from += ld, to += width)
    for (int64_t x = 0; x < 2 * width; x += LANES) {
      __mmask16 there = k - x >= LANES ? 0xFFFF : k > x ? (1 << (k - x)) - 1 : 0;
      _mm256_storeu_si256((__m256i*)(to + x / 2), (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(there, from + x)));
    }
}

// to [m, width] = the same of the transpose of from [k, m].
HALF inline void pair_transposed(int64_t m, int64_t k, const float* from, int64_t ld, uint32_t* to, int64_t width) {
  uint32_t block[LANES * LANES];
  for (int64_t i = 0; i < m; i += LANES)
    for (int64_t x = 0; x < width; x += LANES) {
      pair_rows(k - 2 * x, LANES, from + 2 * x * ld + i, ld, block, LANES);
      transpose((const float*)block, LANES, (float*)(to + i * width + x), width);
    }
}

// ``tile`` of small.h for k pairs.
template <int R, int C>
HALF INLINE void half_tile(int64_t k, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, bool add,
                           float* c, int64_t ldc) {
  __m512 sums[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) sums[r][j] = add ? _mm512_loadu_ps(c + r * ldc + j * LANES) : _mm512_setzero_ps();
  for (int64_t x = 0; x < k; ++x) {
    __m512i right[C];
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) right[j] = _mm512_loadu_si512(b + x * ldb + j * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      __m512bh left = (__m512bh)_mm512_set1_epi32(a[r * lda + x]);
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], left, (__m512bh)right[j]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) _mm512_storeu_ps(c + r * ldc + j * LANES, sums[r][j]);
}

template <int R, int C>
HALF INLINE void half_tiles(int64_t m, int64_t k, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb,
                            bool add, float* c, int64_t ldc) {
  for (; m >= R; m -= R, a += R * lda, c += R * ldc) half_tile<R, C>(k, a, lda, b, ldb, add, c, ldc);
  if constexpr (R > 1) half_tiles<R / 2, C>(m, k, a, lda, b, ldb, add, c, ldc);
}

// Whether oneDNN uses AMX here: the CPU has it, Linux lets the process use its tiles, and ONEDNN_MAX_CPU_ISA doesn't say no.
inline bool has_tiles() {
  const int kAmx = 0xfef;  // dnnl_cpu_isa_avx512_core_amx
  static const bool has = (dnnl_get_effective_cpu_isa() & kAmx) == kAmx;
  return has;
}

// Sets `rows` rows of the tiles of c (0 to 3) and a (4); b's (5) has 16.
TILES inline void set_tiles(int64_t rows) {
  struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } form;
  for (int i = 0; i < 6; ++i) form.rows[i] = i < 5 ? rows : LANES;
  __asm__ volatile("" ::: "memory");  // GCC 12 doesn't know that tiles are read from memory
  _tile_loadconfig(&form);
}

// C tiles side by side of c (+)= a b, of k pairs, a multiple of LANES.
template <int C>
TILES INLINE void tiled(int64_t k, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, bool add, float* c,
                        int64_t ldc) {
#define OF_EACH(DO) DO(0) if constexpr (C > 1) { DO(1) } if constexpr (C > 2) { DO(2) DO(3) }
#define LOAD(j) _tile_loadd(j, c + j * LANES, 4 * ldc);
#define ZERO(j) _tile_zero(j);
#define MULTIPLY(j) _tile_loadd(5, b + x * ldb + j * LANES, 4 * ldb); _tile_dpbf16ps(j, 4, 5);
#define STORE(j) _tile_stored(j, c + j * LANES, 4 * ldc);
  if (add) { OF_EACH(LOAD) } else { OF_EACH(ZERO) }
  for (int64_t x = 0; x < k; x += LANES) {
    _tile_loadd(4, a + x, 4 * lda);
    OF_EACH(MULTIPLY)
  }
  OF_EACH(STORE)
}

// c [m, n] (+)= the product of a [m, k] and b [k, n], in pairs.
TILES __attribute__((noinline, unused)) static void tiled_product(int64_t m, int64_t n, int64_t k, const uint32_t* a,
                                                                  const uint32_t* b, bool add, float* c, int64_t ldc) {
  for (int64_t i = 0; i < m; i += LANES) {
    if (i == 0 || m - i < LANES) set_tiles(std::min(m - i, LANES));
    int64_t j = 0;
    for (; j + 4 * LANES <= n; j += 4 * LANES) tiled<4>(k, a + i * k, k, b + j, n, add, c + i * ldc + j, ldc);
    for (; j + 2 * LANES <= n; j += 2 * LANES) tiled<2>(k, a + i * k, k, b + j, n, add, c + i * ldc + j, ldc);
    if (j < n) tiled<1>(k, a + i * k, k, b + j, n, add, c + i * ldc + j, ldc);
  }
  _tile_release();
}

// ``small_product``, where ai or ak is 1. If ai is, a's columns are padded. room: for ``pairs``.
HALF __attribute__((noinline, unused)) static void half_product(int64_t m, int64_t n, int64_t k, const float* a,
                                                                int64_t ai, int64_t ak, const float* b, int64_t ldb,
                                                                bool add, float* c, int64_t ldc, uint32_t* room) {
  int64_t width = halved(k), step = n;
  uint32_t *right = room, *left = room + width * n;
  pair_rows(k, n, b, ldb, right, width);
  ak == 1 ? pair_columns(m, k, a, ai, left, width) : pair_transposed(m, k, a, ak, left, width);
  if (has_tiles()) return tiled_product(m, n, width, left, right, add, c, ldc);
  for (k = (k + 1) / 2; n >= 2 * LANES; n -= 2 * LANES, right += 2 * LANES, c += 2 * LANES)
    half_tiles<8, 2>(m, k, left, width, right, step, add, c, ldc);
  if (n) half_tiles<8, 1>(m, k, left, width, right, step, add, c, ldc);
}
