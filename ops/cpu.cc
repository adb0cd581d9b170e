// The transformer's operators in float32 on a CPU, as Paddle custom operators: see ops/__init__.py.
//
// Products are oneDNN's, which Paddle ships: its own go to an MKL of 2019, which takes a slow path on CPUs that aren't
// Intel's. Memory-bound work is fused into as few passes as its neighbours allow.
#include <omp.h>

#include <vector>

#include "kernels.h"
#include "paddle/extension.h"

using paddle::Tensor;

extern "C" int dnnl_sgemm(char transa, char transb, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                          int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc);

namespace {

// c [m, n] = alpha * a b, row-major; 't': the matrix is stored transposed.
void product(char ta, char tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
             const float* b, int64_t ldb, float* c, int64_t ldc) {
  if (dnnl_sgemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, 0.0f, c, ldc)) PD_THROW("dnnl_sgemm failed");
}

Tensor like(const Tensor& x) { return paddle::empty(x.shape(), paddle::DataType::FLOAT32, paddle::CPUPlace()); }

Tensor sized(const std::vector<int64_t>& shape) {
  return paddle::empty(shape, paddle::DataType::FLOAT32, paddle::CPUPlace());
}

// Paddle's own operators check shapes; beyond them lies other memory.
void expect(bool fits, const char* what) { PD_CHECK(fits, "compiled operators: shapes don't fit in ", what); }

// x [.., k] times w [k, n], or 't': times the transpose of w [n, k]: [.., n]. The gradient of x is the latter.
Tensor times(const Tensor& x, const Tensor& w, char form = 'n') {
  auto shape = x.shape();
  expect(w.shape().size() == 2 && shape.back() == w.shape()[form == 't'], "a product");
  int64_t k = shape.back(), n = w.shape()[form != 't'];
  shape.back() = n;
  Tensor y = sized(shape);
  product('n', form, x.numel() / k, n, k, 1, x.data<float>(), k, w.data<float>(), w.shape()[1], y.data<float>(), n);
  return y;
}

// x [.., k], grad [.., n] -> the gradient of w [k, n]
Tensor weight_grad(const Tensor& x, const Tensor& grad) {
  int64_t k = x.shape().back(), n = grad.shape().back(), rows = grad.numel() / n;
  Tensor dw = sized({k, n});
  product('t', 'n', k, n, rows, 1, x.data<float>(), k, grad.data<float>(), n, dw.data<float>(), n);
  return dw;
}

// Calls f(row, sums) for every row; returns what was added up in the `width` sums. Each block of rows has its own, added
// up in order: the result doesn't depend on the number of threads.
template <typename F>
std::vector<float> summed(int64_t rows, int64_t width, F f) {
  const int64_t blocks = 32;
  std::vector<float> sums(blocks * width, 0.0f);
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t row = rows * block / blocks; row < rows * (block + 1) / blocks; ++row)
      f(row, sums.data() + block * width);
  for (int64_t block = 1; block < blocks; ++block) add_bias(width, sums.data() + block * width, sums.data());
  return sums;
}

Tensor filled(const float* values, int64_t n) {
  Tensor t = sized({n});
  std::copy(values, values + n, t.data<float>());
  return t;
}

Tensor column_sums(const Tensor& grad) {
  int64_t n = grad.shape().back();
  const float* g = grad.data<float>();
  auto sums = summed(grad.numel() / n, n, [=](int64_t row, float* own) { add_bias(n, g + row * n, own); });
  return filled(sums.data(), n);
}

void add_bias_rows(const Tensor& bias, Tensor* y) {
  int64_t n = y->shape().back(), rows = y->numel() / n;
  const float* b = bias.data<float>();
  float* p = y->data<float>();
  expect(bias.numel() == n, "a bias");
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) add_bias(n, b, p + row * n);
}

}  // namespace

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

// ---------------------------------------------------------------- attention: softmax(q k^T scale) v
// qkv [B, N, 3, H, d] -> [B, N, H * d]. Heads are read and written where they lie; their weights [N, N] are computed
// again in the gradient.

std::vector<Tensor> attention(const Tensor& qkv, float scale) {
  auto shape = qkv.shape();
  expect(shape.size() == 5 && shape[2] == 3, "attention");
  int64_t batch = shape[0], length = shape[1], heads = shape[3], d = shape[4], width = heads * d, step = 3 * width;
  Tensor out = sized({batch, length, width});
  const float* in = qkv.data<float>();
  float* to = out.data<float>();
  // Paddle's memory, and taken here: its end is Paddle's error, and not a crash, as of C++'s own or within the threads.
  Tensor scratch = sized({omp_get_max_threads(), length, length});
  float* weights = scratch.data<float>();
#pragma omp parallel
  {
    float* p = weights + omp_get_thread_num() * length * length;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < batch * heads; ++item) {
      int64_t b = item / heads, head = item % heads;
      const float* q = in + b * length * step + head * d;
      product('n', 't', length, length, d, scale, q, step, q + width, step, p, length);
      for (int64_t row = 0; row < length; ++row) softmax_row(length, p + row * length);
      float* o = to + b * length * width + head * d;
      product('n', 'n', length, d, length, 1, p, length, q + 2 * width, step, o, width);
    }
  }
  return {out};
}

std::vector<Tensor> attention_grad(const Tensor& qkv, const Tensor& dout, float scale) {
  auto shape = qkv.shape();
  int64_t batch = shape[0], length = shape[1], heads = shape[3], d = shape[4], width = heads * d, step = 3 * width;
  Tensor grad = like(qkv);
  const float *in = qkv.data<float>(), *from = dout.data<float>();
  float* to = grad.data<float>();
  Tensor scratch = sized({omp_get_max_threads(), 2, length, length});
  float* weights = scratch.data<float>();
#pragma omp parallel
  {
    float *p = weights + omp_get_thread_num() * 2 * length * length, *dp = p + length * length;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < batch * heads; ++item) {
      int64_t b = item / heads, head = item % heads;
      const float *q = in + b * length * step + head * d, *k = q + width, *v = k + width;
      const float* o = from + b * length * width + head * d;
      float* dq = to + b * length * step + head * d;
      product('n', 't', length, length, d, scale, q, step, k, step, p, length);
      product('n', 't', length, length, d, 1, o, width, v, step, dp, length);
      for (int64_t row = 0; row < length; ++row) softmax_row(length, p + row * length);
      product('t', 'n', length, d, length, 1, p, length, o, width, dq + 2 * width, step);
      for (int64_t row = 0; row < length; ++row)
        softmax_grad_row(length, p + row * length, dp + row * length);
      product('n', 'n', length, d, length, scale, dp, length, k, step, dq, step);
      product('t', 'n', length, d, length, scale, dp, length, q, step, dq + width, step);
    }
  }
  return {grad};
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

PD_BUILD_OP(vit_attention)
    .Inputs({"Qkv"})
    .Outputs({"Out"})
    .Attrs({"scale: float"})
    .SetKernelFn(PD_KERNEL(attention));
PD_BUILD_GRAD_OP(vit_attention)
    .Inputs({"Qkv", paddle::Grad("Out")})
    .Outputs({paddle::Grad("Qkv")})
    .Attrs({"scale: float"})
    .SetKernelFn(PD_KERNEL(attention_grad));
