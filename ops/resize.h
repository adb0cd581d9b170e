// Bilinear resizing: where places of an axis lie between two others.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "small.h"
#include "tensors.h"

// What lies between a and b. In this form it is rounded alike wherever it is compiled into.
INLINE float between(float a, float b, float share) { return a + share * (b - a); }

// y = what lies between the rows a and b
CLONED void blend_row(int64_t n, const float* a, const float* b, float share, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = between(a[i], b[i], share);
}

// Of each of `to` places of an axis: the two of `from` places that it lies between, and how far it is from the first. A
// place beyond the last one is the last one itself: both are the same, and the share is 0.
struct Axis {
  std::vector<int32_t> first, second;
  std::vector<float> share;
  bool close = true;  // for spread_row

  Axis(int64_t from, int64_t to, bool align_corners) : first(to), second(to), share(to) {
    expect(from > 0 && to > 0, "a resizing");
    const double corner_step = to > 1 ? double(from - 1) / (to - 1) : 0;
    for (int64_t i = 0; i < to; ++i) {
      double at = align_corners ? i * corner_step : std::max((i + 0.5) * from / to - 0.5, 0.0);
      int64_t before = std::min<int64_t>(at, from - 1);
      first[i] = before;
      second[i] = std::min(before + 1, from - 1);
      share[i] = second[i] > before ? at - before : 0;
    }
    for (int64_t i = 0; i + LANES <= to; ++i) close &= second[i + LANES - 1] - first[i] < 2 * LANES;
  }

  // The first of all places that lie at or behind a place of the other axis.
  int64_t begin_of(int64_t place) const { return std::lower_bound(first.begin(), first.end(), place) - first.begin(); }
};

const int64_t SPREAD = 32;  // elements of x behind the last one that spread_row may read

// y [n] = what lies between x[first] and x[second]. ``close``: any LANES of the places lie within SPREAD of x.
__attribute__((noinline, unused, target("default"))) static void spread_row(
    int64_t n, bool close, const float* x, const int32_t* first, const int32_t* second, const float* share, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = between(x[first[i]], x[second[i]], share[i]);
}

__attribute__((noinline, unused, target("arch=x86-64-v4"))) static void spread_row(
    int64_t n, bool close, const float* x, const int32_t* first, const int32_t* second, const float* share, float* y) {
  using V = Vector<LANES>::type;
  typedef int32_t Places __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
  int64_t i = 0;
  // Two vectors hold what LANES places read.
  for (; close && i + LANES <= n; i += LANES) {
    const V low = *(const V*)(x + first[i]), high = *(const V*)(x + first[i] + LANES);
    const V a = __builtin_shuffle(low, high, *(const Places*)(first + i) - first[i]);
    const V b = __builtin_shuffle(low, high, *(const Places*)(second + i) - first[i]);
    *(V*)(y + i) = a + *(const V*)(share + i) * (b - a);
  }
  for (; i < n; ++i) y[i] = between(x[first[i]], x[second[i]], share[i]);
}

// The n places from `start` on of row `row` of a resized plane [h, w]. `scratch` has w + SPREAD elements.
inline void resize_row(const float* plane, int64_t w, const Axis& rows, int64_t row, const Axis& columns, int64_t start,
                       int64_t n, float* scratch, float* y) {
  const int64_t from = columns.first[start], length = columns.second[start + n - 1] + 1 - from;
  const float* here = plane + rows.first[row] * w + from;
  const float* below = plane + rows.second[row] * w + from;
  blend_row(length, here, below, rows.share[row], scratch + from);
  spread_row(n, columns.close, scratch, &columns.first[start], &columns.second[start], &columns.share[start], y);
}
