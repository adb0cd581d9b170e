// Row kernels in float32, some to and from bfloat16, compiled for several instruction sets; the loader picks one by the CPU.
#pragma once

#include <cmath>
#include <cstdint>

// Each of these must stay a function of its own: a body that OpenMP outlines isn't cloned with its function.
#define CLONED static __attribute__((noinline, unused, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define INLINE static inline __attribute__((always_inline))

using bf16 = uint16_t;  // a bfloat16: the upper half of a float

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) { return __builtin_bit_cast(float, (uint32_t)x << 16); }

// x as a T: bfloat16 rounds to the nearest, ties to even; NaN stays NaN.
template <typename T>
INLINE T narrow(float x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  uint32_t bits = __builtin_bit_cast(uint32_t, x);
  uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return x == x ? rounded : 0x7FC0;
}

// e^x to 2 ulp for x <= 88, without branches, so that loops over it vectorise. Below -87 it stays at e^-87; NaN stays.
INLINE float exp_(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, in the low bits
  float shifted = x * 1.44269504f + magic;
  float n = shifted - magic;
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t exponent = (__builtin_bit_cast(int32_t, shifted) - 0x4B400000 + 127) << 23;
  return p * __builtin_bit_cast(float, exponent);
}

// The normal distribution's Phi(x), and e^(-x^2/2); erf by Abramowitz and Stegun 7.1.26, to 1.5e-7.
INLINE float normal_cdf(float x, float* density) {
  float z = std::fabs(x) * 0.70710678f;
  float t = 1.0f / (1.0f + 0.3275911f * z);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  *density = exp_(-z * z);
  float tail = 0.5f * p * t * *density;
  return x < 0 ? tail : 1.0f - tail;
}

// y += bias
CLONED void add_bias(int64_t n, const float* bias, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] += bias[i];
}

// y += value
CLONED void add_value(int64_t n, float value, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] += value;
}

CLONED float sum_of(int64_t n, const float* x) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  return sum;
}

// y = x as bfloat16
CLONED void round_row(int64_t n, const float* x, bf16* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = narrow<bf16>(x[i]);
}

template <typename T>
INLINE void gelu_(int64_t n, const float* h, const float* bias, T* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    float density, x = h[i] + bias[i];
    y[i] = narrow<T>(x * normal_cdf(x, &density));
  }
}

// y = gelu(h + bias)
CLONED void gelu_row(int64_t n, const float* h, const float* bias, float* y) { gelu_(n, h, bias, y); }
CLONED void gelu_row(int64_t n, const float* h, const float* bias, bf16* y) { gelu_(n, h, bias, y); }

template <typename T>
INLINE void gelu_grad_(int64_t n, const T* h, const float* bias, const float* dy, T* y, T* dh, float* bias_grad) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    float density, x = widen(h[i]) + bias[i];
    float cdf = normal_cdf(x, &density), grad = dy[i] * (cdf + x * density * 0.39894228f);
    y[i] = narrow<T>(x * cdf);
    dh[i] = narrow<T>(grad);
    bias_grad[i] += grad;
  }
}

// y = gelu(h + bias); dh = dy gelu'(h + bias), where dy may lie, too; bias_grad += dh
CLONED void gelu_grad_row(int64_t n, const float* h, const float* bias, const float* dy, float* y, float* dh,
                          float* bias_grad) {
  gelu_grad_(n, h, bias, dy, y, dh, bias_grad);
}
CLONED void gelu_grad_row(int64_t n, const bf16* h, const float* bias, const float* dy, bf16* y, bf16* dh,
                          float* bias_grad) {
  gelu_grad_(n, h, bias, dy, y, dh, bias_grad);
}

// y *= scale
CLONED void scale_row(int64_t n, float scale, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] *= scale;
}

// y = x * factors
CLONED void multiply_row(int64_t n, const float* factors, const float* x, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * factors[i];
}

// y += x * z
CLONED void add_products(int64_t n, const float* x, const float* z, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] += x[i] * z[i];
}

// y += scale * x
CLONED void add_scaled(int64_t n, float scale, const float* x, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] += scale * x[i];
}

// 1 / (1 + e^-x)
INLINE float sigmoid(float x) {
  float e = exp_(-std::fabs(x)), s = 1 / (1 + e);
  return x < 0 ? e * s : s;
}

// y = silu(gate) * x
CLONED void gated_row(int64_t n, const float* gate, const float* x, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = gate[i] * sigmoid(gate[i]) * x[i];
}

CLONED void gated_grad_row(int64_t n, const float* gate, const float* x, const float* dy, float* dgate, float* dx) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    float s = sigmoid(gate[i]);
    dgate[i] = dy[i] * x[i] * s * (1 + gate[i] * (1 - s));
    dx[i] = dy[i] * gate[i] * s;
  }
}

CLONED float dot(int64_t n, const float* x, const float* y) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

// s = e^(t - the largest t) of a row t = scale * s + bias + mask. Kept: the largest t, and the inverse of s's sum.
CLONED void exponentials_row(int64_t n, float scale, const float* bias, const float* mask, float* s, float* kept) {
  float top = scale * s[0] + bias[0] + mask[0], sum = 0;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) {
    s[i] = scale * s[i] + bias[i] + mask[i];
    top = s[i] > top ? s[i] : top;
  }
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += s[i] = exp_(s[i] - top);
  kept[0] = top;
  kept[1] = 1 / sum;
}

// s = p, the softmax of scale * s + bias + mask, by what was kept of it; dp = p * (dp - sum(p * dp)), the gradient of
// what the softmax reads.
CLONED void weights_grad_row(int64_t n, float scale, const float* bias, const float* mask, const float* kept, float* s,
                             float* dp) {
  float top = kept[0], inverse = kept[1];
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < n; ++i) {
    s[i] = exp_(scale * s[i] + bias[i] + mask[i] - top) * inverse;
    dot += s[i] * dp[i];
  }
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dp[i] = s[i] * (dp[i] - dot);
}

// Turns pairs of channels by angles, sign -1: back; a pair is of both halves of x, or two neighbours.
CLONED void turn_row(int64_t pairs, bool halves, const float* cosines, const float* sines, float sign, float* x) {
  if (halves) {
#pragma omp simd
    for (int64_t i = 0; i < pairs; ++i) {
      float one = x[i], other = x[pairs + i], sine = sign * sines[i];
      x[i] = one * cosines[i] - other * sine;
      x[pairs + i] = other * cosines[i] + one * sine;
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < pairs; ++i) {
      float one = x[2 * i], other = x[2 * i + 1], sine = sign * sines[i];
      x[2 * i] = one * cosines[i] - other * sine;
      x[2 * i + 1] = other * cosines[i] + one * sine;
    }
  }
}

// x *= 1 / its length, which is returned; zeros stay zeros, and their inverse is 0.
CLONED float unit_row(int64_t n, float* x) {
  float square = 0;
#pragma omp simd reduction(+ : square)
  for (int64_t i = 0; i < n; ++i) square += x[i] * x[i];
  float inverse = square <= 1e-24f ? 0 : 1 / std::sqrt(square);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] *= inverse;
  return inverse;
}

// Makes the gradient of a vector of length 1 that of the vector, whose length's inverse is known.
CLONED void unit_grad_row(int64_t n, const float* unit, float inverse, float* grad) {
  float along = 0;
#pragma omp simd reduction(+ : along)
  for (int64_t i = 0; i < n; ++i) along += unit[i] * grad[i];
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) grad[i] = inverse * (grad[i] - unit[i] * along);
}

// y = (x - mean) * rstd * weight + bias
CLONED void norm_row(int64_t n, float eps, const float* x, const float* weight, const float* bias, float* y,
                     float* mean, float* rstd) {
  float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  float m = sum / n;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; ++i) squares += (x[i] - m) * (x[i] - m);
  float r = 1 / std::sqrt(squares / n + eps);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - m) * r * weight[i] + bias[i];
  *mean = m;
  *rstd = r;
}

CLONED void norm_grad_row(int64_t n, const float* x, const float* weight, const float* dy, float mean, float rstd,
                          float* dx, float* weight_grad, float* bias_grad) {
  float sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
  for (int64_t i = 0; i < n; ++i) {
    float g = dy[i] * weight[i], normed = (x[i] - mean) * rstd;
    sum += g;
    dot += g * normed;
    weight_grad[i] += dy[i] * normed;
    bias_grad[i] += dy[i];
  }
  sum /= n;
  dot /= n;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dx[i] = rstd * (dy[i] * weight[i] - sum - (x[i] - mean) * rstd * dot);
}
