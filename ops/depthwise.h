// Depthwise convolution of one plane, stride 1, on the padded plane: by vectors of 16 columns, several at a time.
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

// A plane in rows of `step` floats, with room for vectors that begin in it.
INLINE int64_t row_step(int64_t width, int64_t side) { return (width + kLanes - 1) / kLanes * kLanes + side; }

// out[y][x] = sum of w[i][j] padded[y + i][x + j], or `flipped`: w[side - 1 - i][side - 1 - j]
CLONED void depthwise_plane(int64_t height, int64_t width, int64_t side_y, int64_t side_x, const float* padded,
                            int64_t step, const float* w, bool flipped, float bias, float* out) {
  int64_t taps = side_y * side_x;
  for (int64_t row = 0, column = 0; row < height;) {
    const float* from[kAtOnce];
    float* to[kAtOnce];
    int64_t size[kAtOnce];
    Lanes sums[kAtOnce];
    for (int64_t i = 0; i < kAtOnce; ++i) {
      sums[i] = Lanes{} + bias;
      from[i] = row < height ? padded + row * step + column : from[0];
      to[i] = out + row * width + column;
      size[i] = row >= height ? 0 : width - column < kLanes ? width - column : kLanes;
      column += kLanes;
      if (column >= width) column = 0, ++row;
    }
    for (int64_t y = 0; y < side_y; ++y)
      for (int64_t x = 0; x < side_x; ++x) {
        int64_t tap = y * side_x + x;
        float weight = w[flipped ? taps - 1 - tap : tap];
#pragma GCC unroll 9
        for (int64_t i = 0; i < kAtOnce; ++i) sums[i] += weight * lanes(from[i] + y * step + x);
      }
    for (int64_t i = 0; i < kAtOnce; ++i) {
      if (size[i] == kLanes)
        std::memcpy(to[i], &sums[i], sizeof sums[i]);
      else
        for (int64_t lane = 0; lane < size[i]; ++lane) to[i][lane] = sums[i][lane];
    }
  }
}

// w_grad[i][j] += sum of grad[y][x] padded[y + i][x + j]; rows of grad have `grad_step` floats, zero beyond the width
CLONED void depthwise_weight_grad(int64_t height, int64_t width, int64_t side_y, int64_t side_x, const float* padded,
                                  int64_t step, const float* grad, int64_t grad_step, float* w_grad) {
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
        Lanes g = lanes(grad + y * grad_step + x);
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
