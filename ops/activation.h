// Activations of rows of float32, and their gradients: for the operators of activation.cc, and for norms that one follows.
#pragma once

#include <string>

#include "tensors.h"

namespace {

// d/dx of x * sigmoid(u(x)), of which s is the sigmoid
INLINE float swish_slope(float x, float s, float u_slope) { return s + x * s * (1 - s) * u_slope; }

// The u of gelu(x) = x * sigmoid(u), by its approximation with tanh.
INLINE float tanh_gelu_u(float x) { return 1.59576912f * (x + 0.044715f * x * x * x); }

// Rows of an activation: y = `value` of x, and dx = dy times `slope` of x. What is written may be what is read.
#define ACTIVATION(name, value, slope)                                             \
  CLONED void name(int64_t n, const float* from, float* y) {                       \
    _Pragma("omp simd") for (int64_t i = 0; i < n; ++i) {                          \
      float x = from[i];                                                           \
      y[i] = value;                                                                \
    }                                                                              \
  }                                                                                \
  CLONED void name##_grad(int64_t n, const float* from, const float* dy, float* dx) { \
    _Pragma("omp simd") for (int64_t i = 0; i < n; ++i) {                          \
      float x = from[i];                                                           \
      dx[i] = dy[i] * (slope);                                                     \
    }                                                                              \
  }

INLINE float gelu_value(float x) {
  float density;
  return x * normal_cdf(x, &density);
}

INLINE float gelu_slope(float x) {
  float density, cdf = normal_cdf(x, &density);
  return cdf + x * density * 0.39894228f;
}

INLINE float hardswish_slope(float x) { return x <= -3 ? 0 : x >= 3 ? 1 : x / 3 + 0.5f; }

// The comparisons leave NaN as it is.
ACTIVATION(relu, x < 0 ? 0 : x, x > 0 ? 1.0f : 0.0f)
ACTIVATION(gelu, gelu_value(x), gelu_slope(x))
ACTIVATION(gelu_tanh, x* sigmoid(tanh_gelu_u(x)),
           swish_slope(x, sigmoid(tanh_gelu_u(x)), 1.59576912f * (1 + 0.134145f * x * x)))
ACTIVATION(quick_gelu, x* sigmoid(1.702f * x), swish_slope(x, sigmoid(1.702f * x), 1.702f))
ACTIVATION(silu, x* sigmoid(x), swish_slope(x, sigmoid(x), 1))
ACTIVATION(hardswish, x*(x < -3 ? 0 : x > 3 ? 1 : x / 6 + 0.5f), hardswish_slope(x))

struct Activation {
  const char* name;
  void (*value)(int64_t, const float*, float*);
  void (*grad)(int64_t, const float*, const float*, float*);
};

const Activation kActivations[] = {{"relu", relu, relu_grad},
                             {"gelu", gelu, gelu_grad},
                             {"gelu_tanh", gelu_tanh, gelu_tanh_grad},
                             {"quick_gelu", quick_gelu, quick_gelu_grad},
                             {"silu", silu, silu_grad},
                             {"hardswish", hardswish, hardswish_grad}};

inline Activation named(const std::string& name) {
  for (const Activation& one : kActivations)
    if (name == one.name) return one;
  PD_THROW("compiled operators: there is no activation ", name);
}

}  // namespace
