// The gradient of a depthwise convolution's weights, 16 channels at a time. oneDNN's is ten times as slow.
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

// Where the values of 16 channels lie: `place` floats from one place to the next, `channel` from one channel to the next.
struct Spacing {
  int64_t place, channel;
};

// Writes 16 channels (or the `channels` that are left) of a map [height, width] into zeros [rows, columns, 16], from
// (top, left) on.
CLONED void gather(int64_t channels, int64_t height, int64_t width, const float* map, Spacing spacing, int64_t top,
                   int64_t left, int64_t rows, int64_t columns, float* to) {
  std::memset(to, 0, rows * columns * kLanes * sizeof(float));
  for (int64_t y = 0; y < height; ++y) {
    float* row = to + ((top + y) * columns + left) * kLanes;
    const float* from = map + y * width * spacing.place;
    if (spacing.channel == 1 && channels == kLanes)
      for (int64_t x = 0; x < width; ++x)
        std::memcpy(row + x * kLanes, from + x * spacing.place, kLanes * sizeof(float));
    else
      for (int64_t c = 0; c < channels; ++c)
        for (int64_t x = 0; x < width; ++x)
          row[x * kLanes + c] = from[x * spacing.place + c * spacing.channel];
  }
}

// w_grad[i][j] += sum of grad[y][x] padded[y * stride_y + i][x * stride_x + j], of 16 channels each; grad is [height,
// width], rows of padded have `columns` places.
CLONED void depthwise_weight_grad(int64_t height, int64_t width, int64_t side_y, int64_t side_x, int64_t stride_y,
                                  int64_t stride_x, const float* padded, int64_t columns, const float* grad,
                                  float* w_grad) {
  int64_t taps = side_y * side_x;
  for (int64_t first = 0; first < taps; first += kAtOnce) {
    int64_t shift[kAtOnce];
    Lanes sums[kAtOnce];
    for (int64_t i = 0; i < kAtOnce; ++i) {
      int64_t tap = first + i < taps ? first + i : taps - 1;
      shift[i] = (tap / side_x * columns + tap % side_x) * kLanes;
      sums[i] = Lanes{};
    }
    for (int64_t y = 0; y < height; ++y)
      for (int64_t x = 0; x < width; ++x) {
        Lanes g = lanes(grad + (y * width + x) * kLanes);
        const float* from = padded + (y * stride_y * columns + x * stride_x) * kLanes;
#pragma GCC unroll 9
        for (int64_t i = 0; i < kAtOnce; ++i) sums[i] += g * lanes(from + shift[i]);
      }
    for (int64_t i = 0; i < kAtOnce && first + i < taps; ++i) {
      Lanes sum = lanes(w_grad + (first + i) * kLanes) + sums[i];
      std::memcpy(w_grad + (first + i) * kLanes, &sum, sizeof sum);
    }
  }
}
