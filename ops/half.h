// small.h's product by bfloat16: what is multiplied is rounded, sums are float32. For CPUs with avx512_bf16 alone.
#pragma once

#include <immintrin.h>

#include "small.h"

#define HALF __attribute__((target("avx512bf16,avx512bw,avx512dq,avx512vl,fma")))

// Numbers of 32 bits that `half_product` needs for its factors.
inline int64_t pairs(int64_t m, int64_t n, int64_t k) { return padded(k) / 2 * (padded(m) + n); }

HALF inline __m512i rounded_(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

// to [k / 2, n] = rows 2 x and 2 x + 1 of from [k, n], element by element; n is a multiple of LANES.
HALF inline void pair_rows(int64_t k, int64_t n, const float* from, int64_t ld, uint32_t* to) {
  for (int64_t x = 0; x < k; x += 2, from += 2 * ld, to += n)
    for (int64_t j = 0; j < n; j += LANES) {
      __m512i low = rounded_(_mm512_loadu_ps(from + j));
      __m512i high = x + 1 < k ? rounded_(_mm512_loadu_ps(from + ld + j)) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + j, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

// to [m, padded(k) / 2] = neighbours in the rows of from [m, k].
HALF inline void pair_columns(int64_t m, int64_t k, const float* from, int64_t ld, uint32_t* to) {
  for (int64_t i = 0; i < m; ++i, from += ld, to += padded(k) / 2)
    for (int64_t x = 0; x < k; x += LANES) {
      __mmask16 there = k - x < LANES ? (1 << (k - x)) - 1 : 0xFFFF;
      _mm256_storeu_si256((__m256i*)(to + x / 2), (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(there, from + x)));
    }
}

// ``tile`` of small.h for k pairs.
template <int R, int C>
HALF INLINE void half_tile(int64_t k, const uint32_t* a, int64_t ai, int64_t ak, const uint32_t* b, int64_t ldb,
                           bool add, float* c, int64_t ldc) {
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
      __m512bh left = (__m512bh)_mm512_set1_epi32(a[r * ai + x * ak]);
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
HALF INLINE void half_tiles(int64_t m, int64_t k, const uint32_t* a, int64_t ai, int64_t ak, const uint32_t* b,
                            int64_t ldb, bool add, float* c, int64_t ldc) {
  for (; m >= R; m -= R, a += R * ai, c += R * ldc) half_tile<R, C>(k, a, ai, ak, b, ldb, add, c, ldc);
  if constexpr (R > 1) half_tiles<R / 2, C>(m, k, a, ai, ak, b, ldb, add, c, ldc);
}

// ``small_product``, where ai or ak is 1. If ai is, a's columns are padded. room: for ``pairs``.
HALF __attribute__((noinline, unused)) static void half_product(int64_t m, int64_t n, int64_t k, const float* a,
                                                                int64_t ai, int64_t ak, const float* b, int64_t ldb,
                                                                bool add, float* c, int64_t ldc, uint32_t* room) {
  int64_t rows = padded(m), columns = padded(k) / 2, halved = (k + 1) / 2, width = n;
  uint32_t *right = room, *left = room + halved * n;
  pair_rows(k, n, b, ldb, right);
  bool along = ak == 1;
  along ? pair_columns(m, k, a, ai, left) : pair_rows(k, rows, a, ak, left);
  ai = along ? columns : 1, ak = along ? 1 : rows;
  for (; n >= 2 * LANES; n -= 2 * LANES, right += 2 * LANES, c += 2 * LANES)
    half_tiles<8, 2>(m, halved, left, ai, ak, right, width, add, c, ldc);
  if (n) half_tiles<8, 1>(m, halved, left, ai, ak, right, width, add, c, ldc);
}
