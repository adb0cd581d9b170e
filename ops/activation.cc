// Activations and softmax in float32 on a CPU, as Paddle custom operators: see ops/__init__.py. Paddle's own take one thread.
#include "activation.h"

namespace {

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

CLONED void softmax_row(int64_t n, const float* x, float* y) {
  float top = x[0], sum = 0;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) top = x[i] > top ? x[i] : top;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += y[i] = exp_(x[i] - top);
  scale_row(n, 1 / sum, y);
}

// dx = y * (dy - sum(y * dy))
CLONED void softmax_grad_row(int64_t n, const float* y, const float* dy, float* dx) {
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < n; ++i) dot += y[i] * dy[i];
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dx[i] = y[i] * (dy[i] - dot);
}

// y = x - log(sum(e^x)), however far below the largest x is
CLONED void log_softmax_row(int64_t n, const float* x, float* y) {
  float top = x[0], sum = 0;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) top = x[i] > top ? x[i] : top;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += exp_(x[i] - top);
  float shift = std::log(sum);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] - top - shift;
}

// dx = dy - e^y sum(dy)
CLONED void log_softmax_grad_row(int64_t n, const float* y, const float* dy, float* dx) {
  float sum = sum_of(n, dy);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dx[i] = dy[i] - exp_(y[i]) * sum;
}

std::vector<Tensor> by_rows(const Tensor& x, void (*row)(int64_t, const float*, float*)) {
  Tensor y = like(x);
  int64_t n = x.shape().back(), rows = x.numel() / n;
  const float* xp = x.data<float>();
  float* yp = y.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; ++i) row(n, xp + i * n, yp + i * n);
  return {y};
}

std::vector<Tensor> by_rows(const Tensor& y, const Tensor& dy, void (*row)(int64_t, const float*, const float*, float*)) {
  Tensor dx = like(y);
  int64_t n = y.shape().back(), rows = y.numel() / n;
  const float *yp = y.data<float>(), *gp = dy.data<float>();
  float* dp = dx.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; ++i) row(n, yp + i * n, gp + i * n, dp + i * n);
  return {dx};
}

}  // namespace

std::vector<Tensor> activation(const Tensor& x, const std::string& name) {
  const Activation rows = named(name);
  Tensor y = like(x);
  const float* xp = x.data<float>();
  float* yp = y.data<float>();
  in_pieces(x.numel(), 1, [=](int64_t, int64_t first, int64_t count) { rows.value(count, xp + first, yp + first); });
  return {y};
}

std::vector<Tensor> activation_grad(const Tensor& x, const Tensor& dy, const std::string& name) {
  const Activation rows = named(name);
  Tensor dx = like(x);
  const float *xp = x.data<float>(), *gp = dy.data<float>();
  float* dp = dx.data<float>();
  in_pieces(x.numel(), 1, [=](int64_t, int64_t first, int64_t count) { rows.grad(count, xp + first, gp + first, dp + first); });
  return {dx};
}

// relu's gradient goes by its output, which the next layer keeps, too: its input is nobody's then.
std::vector<Tensor> relu_of(const Tensor& x) { return activation(x, "relu"); }
std::vector<Tensor> relu_of_grad(const Tensor& y, const Tensor& dy) { return activation_grad(y, dy, "relu"); }

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

std::vector<Tensor> softmax(const Tensor& x) { return by_rows(x, softmax_row); }
std::vector<Tensor> softmax_grad(const Tensor& y, const Tensor& dy) { return by_rows(y, dy, softmax_grad_row); }
std::vector<Tensor> log_softmax(const Tensor& x) { return by_rows(x, log_softmax_row); }
std::vector<Tensor> log_softmax_grad(const Tensor& y, const Tensor& dy) { return by_rows(y, dy, log_softmax_grad_row); }

PD_BUILD_OP(vit_softmax).Inputs({"X"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(softmax));
PD_BUILD_GRAD_OP(vit_softmax)
    .Inputs({"Y", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X")})
    .SetKernelFn(PD_KERNEL(softmax_grad));

PD_BUILD_OP(vit_log_softmax).Inputs({"X"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(log_softmax));
PD_BUILD_GRAD_OP(vit_log_softmax)
    .Inputs({"Y", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X")})
    .SetKernelFn(PD_KERNEL(log_softmax_grad));

PD_BUILD_OP(vit_star_relu).Inputs({"X", "Scale", "Bias"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(star_relu));
PD_BUILD_GRAD_OP(vit_star_relu)
    .Inputs({"X", "Scale", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("Scale"), paddle::Grad("Bias")})
    .SetKernelFn(PD_KERNEL(star_relu_grad));

PD_BUILD_OP(vit_relu).Inputs({"X"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(relu_of));
PD_BUILD_GRAD_OP(vit_relu)
    .Inputs({"Y", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X")})
    .SetKernelFn(PD_KERNEL(relu_of_grad));

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
