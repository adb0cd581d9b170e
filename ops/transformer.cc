// Linear, MLP and layer norm in float32 on a CPU, as Paddle custom operators: see ops/__init__.py.
//
// Memory-bound work is fused into as few passes as its neighbours allow.
#include "tensors.h"

// ---------------------------------------------------------------- linear: x w + bias

std::vector<Tensor> linear(const Tensor& x, const Tensor& w, const Tensor& bias) {
  Tensor y = times(x, w);
  add_bias_rows(bias, &y);
  return {y};
}

std::vector<Tensor> linear_grad(const Tensor& x, const Tensor& w, const Tensor& dy) {
  return {times(dy, w, 't'), weight_grad(x, dy), column_sums(dy)};
}

// ---------------------------------------------------------------- mlp: gelu(x w1 + b1) w2 + b2

std::vector<Tensor> mlp(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2) {
  Tensor h = times(x, w1), g = like(h);
  int64_t n = w1.shape()[1], rows = h.numel() / n;
  expect(b1.numel() == n, "a bias");
  const float *hp = h.data<float>(), *bp = b1.data<float>();
  float* gp = g.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) gelu_row(n, hp + row * n, bp, gp + row * n);
  Tensor y = times(g, w2);
  add_bias_rows(b2, &y);
  return {y, h};  // without g: computing it again costs less than keeping it
}

std::vector<Tensor> mlp_grad(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& h,
                             const Tensor& dy) {
  Tensor dh = times(dy, w2, 't'), g = like(h);
  int64_t n = w1.shape()[1];
  const float *hp = h.data<float>(), *bp = b1.data<float>();
  float *gp = g.data<float>(), *dp = dh.data<float>();
  auto sums = summed(h.numel() / n, n, [=](int64_t row, float* own) {
    gelu_grad_row(n, hp + row * n, bp, gp + row * n, dp + row * n, own);
  });
  return {times(dh, w1, 't'), weight_grad(x, dh), filled(sums.data(), n), weight_grad(g, dy), column_sums(dy)};
}

// ---------------------------------------------------------------- layer norm over the last axis

std::vector<Tensor> layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, float eps) {
  int64_t n = x.shape().back(), rows = x.numel() / n;
  expect(weight.numel() == n && bias.numel() == n, "a layer norm");
  Tensor y = like(x), mean = sized({rows}), rstd = sized({rows});
  const float *xp = x.data<float>(), *wp = weight.data<float>(), *bp = bias.data<float>();
  float *yp = y.data<float>(), *mp = mean.data<float>(), *rp = rstd.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    norm_row(n, eps, xp + row * n, wp, bp, yp + row * n, mp + row, rp + row);
  return {y, mean, rstd};
}

std::vector<Tensor> layer_norm_grad(const Tensor& x, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                                    const Tensor& dy) {
  int64_t n = x.shape().back();
  Tensor dx = like(x);
  const float *xp = x.data<float>(), *wp = weight.data<float>(), *gp = dy.data<float>();
  const float *mp = mean.data<float>(), *rp = rstd.data<float>();
  float* dp = dx.data<float>();
  auto sums = summed(x.numel() / n, 2 * n, [=](int64_t row, float* own) {
    norm_grad_row(n, xp + row * n, wp, gp + row * n, mp[row], rp[row], dp + row * n, own, own + n);
  });
  return {dx, filled(sums.data(), n), filled(sums.data() + n, n)};
}

PD_BUILD_OP(vit_linear).Inputs({"X", "W", "B"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(linear));
PD_BUILD_GRAD_OP(vit_linear)
    .Inputs({"X", "W", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("W"), paddle::Grad("B")})
    .SetKernelFn(PD_KERNEL(linear_grad));

PD_BUILD_OP(vit_mlp).Inputs({"X", "W1", "B1", "W2", "B2"}).Outputs({"Y", "H"}).SetKernelFn(PD_KERNEL(mlp));
PD_BUILD_GRAD_OP(vit_mlp)
    .Inputs({"X", "W1", "B1", "W2", "H", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("W1"), paddle::Grad("B1"), paddle::Grad("W2"), paddle::Grad("B2")})
    .SetKernelFn(PD_KERNEL(mlp_grad));

PD_BUILD_OP(vit_layer_norm)
    .Inputs({"X", "W", "B"})
    .Outputs({"Y", "Mean", "Rstd"})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(layer_norm));
PD_BUILD_GRAD_OP(vit_layer_norm)
    .Inputs({"X", "W", "Mean", "Rstd", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("W"), paddle::Grad("B")})
    .SetKernelFn(PD_KERNEL(layer_norm_grad));
