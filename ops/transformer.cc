// Linear, MLP and layer norm in float32 on a CPU, as Paddle custom operators: see ops/__init__.py.
//
// Those named _bf16 round what they multiply to bfloat16, and keep that for the gradient, whose products are alike.
// Memory-bound work is fused into as few passes as its neighbours allow.
#include "tensors.h"

// ---------------------------------------------------------------- linear: x w + bias

// A bias of two axes stands for none.
std::vector<Tensor> linear(const Tensor& x, const Tensor& w, const Tensor& bias) {
  Tensor y = times(x, w);
  if (bias.shape().size() == 1) add_bias_rows(bias, &y);
  return {y};
}

std::vector<Tensor> linear_bf16(const Tensor& x, const Tensor& w, const Tensor& bias) {
  Tensor kept = rounded(x);
  return {linear(kept, w, bias)[0], kept};
}

std::vector<Tensor> linear_grad(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& dy) {
  Tensor grad = as(x, dy);
  return {times(grad, w, 't'), weight_grad(x, grad), bias.shape().size() == 1 ? column_sums(dy) : like(bias)};
}

// ---------------------------------------------------------------- products of many matrices, or of one with many

namespace {

struct Product {
  int64_t batch, m, n, k, x_step, y_step;  // x_step 0: one x for all
  char tx, ty;
  std::vector<int64_t> shape;

  Product(const Tensor& x, const Tensor& y, bool tx_, bool ty_) : tx(tx_ ? 't' : 'n'), ty(ty_ ? 't' : 'n') {
    auto xs = x.shape();
    shape = y.shape();
    int64_t axes = shape.size(), last = xs.size();
    expect(axes >= 2 && (last == 2 || last == axes) && std::equal(xs.begin(), xs.end() - 2, shape.begin()), "a product");
    m = xs[last - 2 + tx_], k = xs[last - 1 - tx_], n = shape[axes - 1 - ty_];
    expect(k == shape[axes - 2 + ty_], "a product");
    batch = y.numel() / (k * n), x_step = last == axes ? m * k : 0, y_step = k * n;
    shape[axes - 2] = m, shape[axes - 1] = n;
  }
  int64_t ldx() const { return tx == 't' ? m : k; }
  int64_t ldy() const { return ty == 't' ? k : n; }

  template <typename F>
  void each(F f) const {
    if (batch == 1) return f(0);  // oneDNN's own threads share it
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < batch; ++i) f(i);
  }
};

}  // namespace

// scale * x y, plus a bias of each row; one of two axes stands for none.
std::vector<Tensor> matmul(const Tensor& x, const Tensor& y, const Tensor& bias, bool transpose_x, bool transpose_y,
                           float scale) {
  const Product p(x, y, transpose_x, transpose_y);
  bool biased = bias.shape().size() == 1;
  expect(!biased || bias.numel() == p.m, "a product's bias");
  Tensor out = sized(p.shape);
  const float *xp = x.data<float>(), *yp = y.data<float>(), *bp = bias.data<float>();
  float* op = out.data<float>();
  p.each([&](int64_t i) {
    float* to = op + i * p.m * p.n;
    product(p.tx, p.ty, p.m, p.n, p.k, scale, xp + i * p.x_step, p.ldx(), yp + i * p.y_step, p.ldy(), to, p.n);
    if (biased)
      for (int64_t row = 0; row < p.m; ++row) add_value(p.n, bp[row], to + row * p.n);
  });
  return {out};
}

std::vector<Tensor> matmul_grad(const Tensor& x, const Tensor& y, const Tensor& bias, const Tensor& dout,
                                bool transpose_x, bool transpose_y, float scale) {
  const Product p(x, y, transpose_x, transpose_y);
  const char other_x = transpose_x ? 'n' : 't', other_y = transpose_y ? 'n' : 't';
  bool biased = bias.shape().size() == 1;
  Tensor dx = like(x), dy = like(y), dbias = like(bias), parts = p.x_step ? dx : sized({p.batch, p.m * p.k});
  Tensor sums = sized({p.batch, p.m});
  const float *xp = x.data<float>(), *yp = y.data<float>(), *gp = dout.data<float>();
  float *dxp = parts.data<float>(), *dyp = dy.data<float>(), *sp = sums.data<float>();
  p.each([&](int64_t i) {
    const float *a = xp + i * p.x_step, *b = yp + i * p.y_step, *g = gp + i * p.m * p.n;
    float *da = dxp + i * p.m * p.k, *db = dyp + i * p.y_step;
    if (transpose_x)
      product(p.ty, 't', p.k, p.m, p.n, scale, b, p.ldy(), g, p.n, da, p.m);
    else
      product('n', other_y, p.m, p.k, p.n, scale, g, p.n, b, p.ldy(), da, p.k);
    if (transpose_y)
      product('t', p.tx, p.n, p.k, p.m, scale, g, p.n, a, p.ldx(), db, p.k);
    else
      product(other_x, 'n', p.k, p.n, p.m, scale, a, p.ldx(), g, p.n, db, p.n);
    if (biased)
      for (int64_t row = 0; row < p.m; ++row) sp[i * p.m + row] = sum_of(p.n, g + row * p.n);
  });
  if (!p.x_step) add_up(p.batch, p.m * p.k, dxp, dx.data<float>());
  if (biased) add_up(p.batch, p.m, sp, dbias.data<float>());
  return {dx, dy, dbias};
}

// ---------------------------------------------------------------- mlp: gelu(x w1 + b1) w2 + b2

// h -> gelu(h + bias), and h, both in the precision of T
template <typename T>
void gelu(const Tensor& h, const Tensor& bias, Tensor g, Tensor kept) {
  int64_t n = bias.numel(), rows = h.numel() / n;
  expect(h.shape().back() == n, "a bias");
  const float *hp = h.data<float>(), *bp = bias.data<float>();
  T *gp = data<T>(g), *kp = data<T>(kept);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    gelu_row(n, hp + row * n, bp, gp + row * n);
    operand(n, hp + row * n, kp + row * n);
  }
}

std::vector<Tensor> mlp(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2) {
  bool half = is_bf16(x);
  Tensor h = times(x, w1), g = half ? like_bf16(h) : like(h), kept = half ? like_bf16(h) : h;
  half ? gelu<bf16>(h, b1, g, kept) : gelu<float>(h, b1, g, kept);
  Tensor y = times(g, w2);
  add_bias_rows(b2, &y);
  return {y, kept};  // without g: computing it again costs less than keeping it
}

std::vector<Tensor> mlp_bf16(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& b2) {
  Tensor kept = rounded(x);
  auto made = mlp(kept, w1, b1, w2, b2);
  return {made[0], made[1], kept};
}

// h, dg -> g, dh in the precision of h, and the sums of dh over rows
template <typename T>
std::vector<float> gelu_grad(const Tensor& h, const Tensor& bias, const Tensor& dg, Tensor g, Tensor dh) {
  int64_t n = bias.numel();
  const float *bp = bias.data<float>(), *from = dg.data<float>();
  T *hp = data<T>(h), *gp = data<T>(g), *to = data<T>(dh);
  return summed(h.numel() / n, n, [=](int64_t row, float* own) {
    int64_t at = row * n;
    gelu_grad_row(n, hp + at, bp, from + at, gp + at, to + at, own);
  });
}

std::vector<Tensor> mlp_grad(const Tensor& x, const Tensor& w1, const Tensor& b1, const Tensor& w2, const Tensor& h,
                             const Tensor& dy) {
  bool half = is_bf16(x);
  Tensor grad = as(x, dy), dg = times(grad, w2, 't');
  Tensor g = half ? like_bf16(h) : like(h), dh = half ? like_bf16(h) : dg;
  auto sums = half ? gelu_grad<bf16>(h, b1, dg, g, dh) : gelu_grad<float>(h, b1, dg, g, dh);
  return {times(dh, w1, 't'), weight_grad(x, dh), filled(sums.data(), b1.numel()), weight_grad(g, grad),
          column_sums(dy)};
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
    .Inputs({"X", "W", "B", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("W"), paddle::Grad("B")})
    .SetKernelFn(PD_KERNEL(linear_grad));

#define FORM {"transpose_x: bool", "transpose_y: bool", "scale: float"}
PD_BUILD_OP(vit_matmul).Inputs({"X", "Y", "B"}).Outputs({"Out"}).Attrs(FORM).SetKernelFn(PD_KERNEL(matmul));
PD_BUILD_GRAD_OP(vit_matmul)
    .Inputs({"X", "Y", "B", paddle::Grad("Out")})
    .Outputs({paddle::Grad("X"), paddle::Grad("Y"), paddle::Grad("B")})
    .Attrs(FORM)
    .SetKernelFn(PD_KERNEL(matmul_grad));

PD_BUILD_OP(vit_linear_bf16).Inputs({"X", "W", "B"}).Outputs({"Y", "Kept"}).SetKernelFn(PD_KERNEL(linear_bf16));
PD_BUILD_GRAD_OP(vit_linear_bf16)
    .Inputs({"Kept", "W", "B", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("W"), paddle::Grad("B")})
    .SetKernelFn(PD_KERNEL(linear_grad));

PD_BUILD_OP(vit_mlp).Inputs({"X", "W1", "B1", "W2", "B2"}).Outputs({"Y", "H"}).SetKernelFn(PD_KERNEL(mlp));
PD_BUILD_GRAD_OP(vit_mlp)
    .Inputs({"X", "W1", "B1", "W2", "H", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("W1"), paddle::Grad("B1"), paddle::Grad("W2"), paddle::Grad("B2")})
    .SetKernelFn(PD_KERNEL(mlp_grad));

PD_BUILD_OP(vit_mlp_bf16)
    .Inputs({"X", "W1", "B1", "W2", "B2"})
    .Outputs({"Y", "H", "Kept"})
    .SetKernelFn(PD_KERNEL(mlp_bf16));
PD_BUILD_GRAD_OP(vit_mlp_bf16)
    .Inputs({"Kept", "W1", "B1", "W2", "H", paddle::Grad("Y")})
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
