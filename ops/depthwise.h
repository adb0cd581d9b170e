// The gradient of a depthwise convolution's weights, of one plane, by vectors of 16 columns. oneDNN's is ten times as slow.
#pragma once

#include <cstring>

#include "kernels.h"

constexpr int64_t kLanes = 16, kAtOnce = 9;  // 9 sums keep both multipliers busy, and divide 3 x 3 and 9 x 9 taps
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

INLINE Lanes lanes(const float* x) {
  Lanes v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

// The floats of a padded row, with room for vectors that begin in it.
INLINE int64_t row_step(int64_t width, int64_t side) { return (width + kLanes - 1) / kLanes * kLanes + side; }

// w_grad[i][j] += sum of grad[y][x] padded[y + i][x + j]; rows of both have `step` floats, grad's zeros beyond the width
CLONED void depthwise_weight_grad(int64_t height, int64_t width, int64_t side_y, int64_t side_x, const float* padded,
                                  const float* grad, int64_t step, float* w_grad) {
  int64_t taps = side_y * side_x;
  for (int64_t first = 0; first < taps; first += kAtOnce) {
    int64_t shift[kAtOnce];
    Lanes sums[kAtOnce];
    for (int64_t i = 0; i < kAtOnce; ++i) {
      int32_t tap = first + i < taps ? first + i : taps - 1, side = side_x;
      shift[i] = tap / side * step + tap % side;
      sums[i] = Lanes{};
    }
    for (int64_t y = 0; y < height; ++y)
      for (int64_t x = 0; x < width; x += kLanes) {
        Lanes g = lanes(grad + y * step + x);
        const float* from = padded + y * step + x;
#pragma GCC unroll 9
        for (int64_t i = 0; i < kAtOnce; ++i) sums[i] += g * lanes(from + shift[i]);
      }
    for (int64_t i = 0; i < kAtOnce && first + i < taps; ++i) {
      float sum = 0;
      for (int64_t lane = 0; lane < kLanes; ++lane) sum += sums[i][lane];
      w_grad[first + i] += sum;
    }
  }
}

// Writes a plane [height, width] into zeros [rows, step], from (top, left), `stride` places apart.
CLONED void spread(int64_t height, int64_t width, const float* plane, int64_t stride_y, int64_t stride_x, int64_t top,
                   int64_t left, int64_t rows, int64_t step, float* to) {
  std::memset(to, 0, rows * step * sizeof(float));
  for (int64_t y = 0; y < height; ++y) {
    float* row = to + (top + y * stride_y) * step + left;
    if (stride_x == 1)
      std::memcpy(row, plane + y * width, width * sizeof(float));
    else
      for (int64_t x = 0; x < width; ++x) row[x * stride_x] = plane[y * width + x];
  }
}
