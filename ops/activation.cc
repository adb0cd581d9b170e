// Activations in float32 on a CPU, as a Paddle custom operator: see ops/__init__.py. Paddle's own take one thread.
#include <string>

#include "tensors.h"

namespace {

// d/dx of x * sigmoid(u(x)), of which s is the sigmoid
INLINE float swish_slope(float x, float s, float u_slope) { return s + x * s * (1 - s) * u_slope; }

// The u of gelu(x) = x * sigmoid(u), by its approximation with tanh.
INLINE float tanh_gelu_u(float x) { return 1.59576912f * (x + 0.044715f * x * x * x); }

// Rows of an activation: y = `value` of x, and dx = dy times `slope` of x.
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

struct Rows {
  const char* name;
  void (*value)(int64_t, const float*, float*);
  void (*grad)(int64_t, const float*, const float*, float*);
};

const Rows kActivations[] = {{"relu", relu, relu_grad},
                             {"gelu", gelu, gelu_grad},
                             {"gelu_tanh", gelu_tanh, gelu_tanh_grad},
                             {"quick_gelu", quick_gelu, quick_gelu_grad},
                             {"silu", silu, silu_grad},
                             {"hardswish", hardswish, hardswish_grad}};

Rows named(const std::string& name) {
  for (const Rows& rows : kActivations)
    if (name == rows.name) return rows;
  PD_THROW("compiled operators: there is no activation ", name);
}

// y = scale * relu(x)^2 + bias
CLONED void star_relu_row(int64_t n, const float* x, float scale, float bias, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] < 0 ? bias : scale * (x[i] * x[i]) + bias;
}

// Its gradients: dx, and added to `sums` those of scale and bias.
CLONED void star_relu_grad_row(int64_t n, const float* x, float scale, const float* dy, float* dx, float* sums) {
  float of_scale = 0, of_bias = 0;
#pragma omp simd reduction(+ : of_scale, of_bias)
  for (int64_t i = 0; i < n; ++i) {
    float positive = x[i] < 0 ? 0 : x[i];
    dx[i] = dy[i] * (2 * scale * positive);
    of_scale += dy[i] * (positive * positive);
    of_bias += dy[i];
  }
  sums[0] += of_scale;
  sums[1] += of_bias;
}

}  // namespace

std::vector<Tensor> activation(const Tensor& x, const std::string& name) {
  Rows rows = named(name);
  Tensor y = like(x);
  const float* xp = x.data<float>();
  float* yp = y.data<float>();
  in_pieces(x.numel(), 1, [=](int64_t, int64_t first, int64_t count) { rows.value(count, xp + first, yp + first); });
  return {y};
}

std::vector<Tensor> activation_grad(const Tensor& x, const Tensor& dy, const std::string& name) {
  Rows rows = named(name);
  Tensor dx = like(x);
  const float *xp = x.data<float>(), *gp = dy.data<float>();
  float* dp = dx.data<float>();
  in_pieces(x.numel(), 1, [=](int64_t, int64_t first, int64_t count) { rows.grad(count, xp + first, gp + first, dp + first); });
  return {dx};
}

std::vector<Tensor> star_relu(const Tensor& x, const Tensor& scale, const Tensor& bias) {
  expect(scale.numel() == 1 && bias.numel() == 1, "StarReLU");
  Tensor y = like(x);
  const float *xp = x.data<float>(), factor = *scale.data<float>(), shift = *bias.data<float>();
  float* yp = y.data<float>();
  in_pieces(x.numel(), 1,
            [=](int64_t, int64_t at, int64_t count) { star_relu_row(count, xp + at, factor, shift, yp + at); });
  return {y};
}

std::vector<Tensor> star_relu_grad(const Tensor& x, const Tensor& scale, const Tensor& dy) {
  const int64_t piece = 1024, n = x.numel();
  Tensor dx = like(x);
  const float *xp = x.data<float>(), *gp = dy.data<float>(), factor = *scale.data<float>();
  float* dp = dx.data<float>();
  auto sums = summed((n + piece - 1) / piece, 2, [=](int64_t i, float* own) {
    int64_t at = i * piece;
    star_relu_grad_row(std::min(piece, n - at), xp + at, factor, gp + at, dp + at, own);
  });
  return {dx, filled(sums.data(), 1), filled(sums.data() + 1, 1)};
}

PD_BUILD_OP(vit_star_relu).Inputs({"X", "Scale", "Bias"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(star_relu));
PD_BUILD_GRAD_OP(vit_star_relu)
    .Inputs({"X", "Scale", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("Scale"), paddle::Grad("Bias")})
    .SetKernelFn(PD_KERNEL(star_relu_grad));

PD_BUILD_OP(vit_activation)
    .Inputs({"X"})
    .Outputs({"Y"})
    .Attrs({"name: std::string"})
    .SetKernelFn(PD_KERNEL(activation));
PD_BUILD_GRAD_OP(vit_activation)
    .Inputs({"X", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X")})
    .Attrs({"name: std::string"})
    .SetKernelFn(PD_KERNEL(activation_grad));
