// Products of matrices that lie in a cache, and the copies that bring them there. For the few rows and columns of a head
// a call of oneDNN's takes longer than the product. float32; rows are padded to whole vectors.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels.h"

const int64_t LANES = 16;  // of the widest vector: rows of B and C begin at multiples of it

inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

template <int N>
struct Vector {  // at any address
  typedef float type __attribute__((vector_size(4 * N), aligned(4), may_alias));
};

// c [R, C vectors] (+)= a [R, k] b [k, C vectors]; a's elements are ai and ak apart.
template <int N, int R, int C>
INLINE void tile(int64_t k, const float* a, int64_t ai, int64_t ak, const float* b, int64_t ldb, bool add, float* c,
                 int64_t ldc) {
  using V = typename Vector<N>::type;
  V sums[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) sums[r][j] = add ? *(const V*)(c + r * ldc + j * N) : V{};
  for (int64_t x = 0; x < k; ++x) {
    V right[C];
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) right[j] = *(const V*)(b + x * ldb + j * N);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) sums[r][j] += a[r * ai + x * ak] * right[j];
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) *(V*)(c + r * ldc + j * N) = sums[r][j];
}

// ``tile`` for m rows, R at a time, then R / 2, and so on.
template <int N, int R, int C>
INLINE void tiles(int64_t m, int64_t k, const float* a, int64_t ai, int64_t ak, const float* b, int64_t ldb, bool add,
                  float* c, int64_t ldc) {
  for (; m >= R; m -= R, a += R * ai, c += R * ldc) tile<N, R, C>(k, a, ai, ak, b, ldb, add, c, ldc);
  if constexpr (R > 1) tiles<N, R / 2, C>(m, k, a, ai, ak, b, ldb, add, c, ldc);
}

template <int N, int R, int C>
INLINE void panels(int64_t m, int64_t n, int64_t k, const float* a, int64_t ai, int64_t ak, const float* b,
                   int64_t ldb, bool add, float* c, int64_t ldc) {
  for (; n >= C * N; n -= C * N, b += C * N, c += C * N) tiles<N, R, C>(m, k, a, ai, ak, b, ldb, add, c, ldc);
  if constexpr (C > 1)
    panels<N, R, C / 2>(m, n, k, a, ai, ak, b, ldb, add, c, ldc);
}

// c [m, n] = a [m, k] b [k, n], or with ``add`` its sum with what is there. a's elements are ai apart in a column, ak in
// a row. n is a multiple of LANES.
#define SMALL_PRODUCT(CPU, N, R, C)                                                                                  \
  __attribute__((noinline, unused, target(CPU))) static void small_product(                                          \
      int64_t m, int64_t n, int64_t k, const float* a, int64_t ai, int64_t ak, const float* b, int64_t ldb, bool add, \
      float* c, int64_t ldc) {                                                                                        \
    panels<N, R, C>(m, n, k, a, ai, ak, b, ldb, add, c, ldc);                                                         \
  }
SMALL_PRODUCT("default", 4, 4, 2)
SMALL_PRODUCT("arch=x86-64-v3", 8, 4, 2)
SMALL_PRODUCT("arch=x86-64-v4", 16, 8, 2)

// to [16, 16] = the transpose of from [16, 16]. Each of four steps deals rows i and i + 8 into two.
INLINE void transpose(const float* from, int64_t ld, float* to, int64_t ldt) {
  using V = Vector<16>::type;
  typedef int32_t Places __attribute__((vector_size(64)));
  const Places low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, high = low + 8;
  V rows[16], dealt[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) rows[i] = *(const V*)(from + i * ld);
#pragma GCC unroll 4
  for (int step = 0; step < 4; ++step) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      dealt[2 * i] = __builtin_shuffle(rows[i], rows[i + 8], low);
      dealt[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + 8], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = dealt[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) *(V*)(to + i * ldt) = rows[i];
}

// to [rows, columns] = from, whose elements are ``row`` and ``column`` apart. One of them is 1.
CLONED void pack(int64_t rows, int64_t columns, const float* from, int64_t row, int64_t column, float* to, int64_t ld) {
  if (column == 1) {
    for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * ld, from + i * row, columns * sizeof(float));
    return;
  }
  int64_t whole_rows = rows / 16 * 16, whole_columns = columns / 16 * 16;
  for (int64_t i = 0; i < whole_rows; i += 16)
    for (int64_t j = 0; j < whole_columns; j += 16) transpose(from + i + j * column, column, to + i * ld + j, ld);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j) to[i * ld + j] = from[i + j * column];
}
