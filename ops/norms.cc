// Batch norm and group norm of [B, C, ...], global response norm and lengths of rows, in float32 on a CPU, as Paddle custom
// operators: see ops/__init__.py.
//
// The first two take sets of planes (a channel of an image), normalise each set by its mean and variance, and scale and shift
// each channel. Sums of planes are added up in double precision and in order, whatever threads compute them.
#include <cmath>

#include "activation.h"

namespace {

CLONED void plane_moments(int64_t n, const float* x, float* mean, float* squares) {
  float m = sum_of(n, x) / n, sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += (x[i] - m) * (x[i] - m);
  *mean = m;
  *squares = sum;
}

// sum = sum(dy), dot = sum(dy * (x - mean))
CLONED void plane_grad_sums(int64_t n, const float* x, const float* dy, float mean, float* sum, float* dot) {
  float s = 0, d = 0;
#pragma omp simd reduction(+ : s, d)
  for (int64_t i = 0; i < n; ++i) {
    s += dy[i];
    d += dy[i] * (x[i] - mean);
  }
  *sum = s;
  *dot = d;
}

// y = (x - mean) * scale + shift
CLONED void plane_scale(int64_t n, const float* x, float mean, float scale, float shift, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale + shift;
}

// dx = dy * scale + (x - mean) * slope + shift
CLONED void plane_grad(int64_t n, const float* x, const float* dy, float mean, float scale, float slope, float shift,
                       float* dx) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dx[i] = dy[i] * scale + (x[i] - mean) * slope + shift;
}

// The same four of a row, a value of each channel.
CLONED void add_squares(int64_t n, const float* x, const float* mean, float* sums) {
#pragma omp simd
  for (int64_t c = 0; c < n; ++c) sums[c] += (x[c] - mean[c]) * (x[c] - mean[c]);
}

CLONED void add_grad_sums(int64_t n, const float* x, const float* dy, const float* mean, float* sums, float* dots) {
#pragma omp simd
  for (int64_t c = 0; c < n; ++c) {
    sums[c] += dy[c];
    dots[c] += dy[c] * (x[c] - mean[c]);
  }
}

CLONED void row_scale(int64_t n, const float* x, const float* mean, const float* scale, const float* shift, float* y) {
#pragma omp simd
  for (int64_t c = 0; c < n; ++c) y[c] = (x[c] - mean[c]) * scale[c] + shift[c];
}

CLONED void row_grad(int64_t n, const float* x, const float* dy, const float* mean, const float* scale,
                     const float* slope, const float* shift, float* dx) {
#pragma omp simd
  for (int64_t c = 0; c < n; ++c) dx[c] = dy[c] * scale[c] + (x[c] - mean[c]) * slope[c] + shift[c];
}

// The planes of x, and which set each belongs to: its channel (groups == 0), or its image's group of channels.
struct Planes {
  int64_t images, channels, places, groups;

  Planes(const Tensor& x, const Tensor& weight, const Tensor& bias, int groups) : groups(groups) {
    auto shape = x.shape();
    expect(shape.size() >= 2 && weight.numel() == shape[1] && bias.numel() == shape[1] && x.numel() > 0 &&
               (groups == 0 || (groups > 0 && shape[1] % groups == 0)),
           "a norm");
    images = shape[0], channels = shape[1], places = x.numel() / images / channels;
  }
  int64_t count() const { return images * channels; }
  int64_t sets() const { return groups ? images * groups : channels; }
  int64_t set(int64_t plane) const { return groups ? plane / (channels / groups) : plane % channels; }
  bool rows() const { return places == 1 && !groups; }  // [B, C]: planes of one place would be slow
  double set_size() const { return static_cast<double>(count()) / sets() * places; }
};

// The mean and variance of each set.
void moments(const Planes& p, const float* x, float* mean, float* variance) {
  if (p.rows()) {
    int64_t n = p.channels;
    auto sums = summed(p.images, n, [=](int64_t row, float* own) { add_bias(n, x + row * n, own); });
    for (int64_t c = 0; c < n; ++c) mean[c] = sums[c] / p.images;
    auto squares = summed(p.images, n, [=](int64_t row, float* own) { add_squares(n, x + row * n, mean, own); });
    for (int64_t c = 0; c < n; ++c) variance[c] = squares[c] / p.images;
    return;
  }
  std::vector<float> means(p.count()), squares(p.count());
  float *own_means = means.data(), *own_squares = squares.data();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < p.count(); ++i)
    plane_moments(p.places, x + i * p.places, own_means + i, own_squares + i);
  std::vector<double> sums(p.sets()), totals(p.sets());
  for (int64_t i = 0; i < p.count(); ++i) sums[p.set(i)] += static_cast<double>(means[i]) * p.places;
  for (int64_t i = 0; i < p.count(); ++i) {
    double off = means[i] - sums[p.set(i)] / p.set_size();
    totals[p.set(i)] += squares[i] + off * off * p.places;
  }
  for (int64_t s = 0; s < p.sets(); ++s) mean[s] = sums[s] / p.set_size(), variance[s] = totals[s] / p.set_size();
}

// then(first, count, y + first) follows on each piece of the output while it is in the cache.
template <typename F>
Tensor normalised(const Planes& p, const Tensor& x, const Tensor& weight, const Tensor& bias, const float* mean,
                  const float* rstd, F then) {
  Tensor y = like(x);
  const float *xp = x.data<float>(), *wp = weight.data<float>(), *bp = bias.data<float>();
  float* yp = y.data<float>();
  if (p.rows()) {
    int64_t n = p.channels;
    std::vector<float> scales(n);
    for (int64_t c = 0; c < n; ++c) scales[c] = wp[c] * rstd[c];
    const float* scale = scales.data();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < p.images; ++row) {
      row_scale(n, xp + row * n, mean, scale, bp, yp + row * n);
      then(row * n, n, yp + row * n);
    }
    return y;
  }
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < p.count(); ++i) {
    int64_t s = p.set(i), c = i % p.channels, at = i * p.places;
    plane_scale(p.places, xp + at, mean[s], wp[c] * rstd[s], bp[c], yp + at);
    then(at, p.places, yp + at);
  }
  return y;
}

Tensor reciprocal_deviation(const Tensor& variance, float eps) {
  Tensor rstd = like(variance);
  for (int64_t s = 0; s < variance.numel(); ++s)
    rstd.data<float>()[s] = 1 / std::sqrt(variance.data<float>()[s] + eps);
  return rstd;
}

// ``norm_grad`` of rows.
std::vector<Tensor> row_norm_grad(const Planes& p, const Tensor& x, const Tensor& weight, const float* mean,
                                  const float* rstd, const Tensor& dy, bool own) {
  int64_t n = p.channels;
  const float *xp = x.data<float>(), *wp = weight.data<float>(), *gp = dy.data<float>();
  auto sums = summed(p.images, 2 * n, [=](int64_t row, float* sum) {
    add_grad_sums(n, xp + row * n, gp + row * n, mean, sum, sum + n);
  });
  Tensor dx = like(x), weight_grad = like(weight), bias_grad = filled(sums.data(), n);
  std::vector<float> factors(3 * n);
  float *scale = factors.data(), *slope = scale + n, *shift = slope + n, *dp = dx.data<float>();
  for (int64_t c = 0; c < n; ++c) {
    float r = rstd[c];
    weight_grad.data<float>()[c] = sums[n + c] * r;
    scale[c] = wp[c] * r;
    slope[c] = own ? -sums[n + c] * wp[c] * r * r * r / p.images : 0;
    shift[c] = own ? -sums[c] * wp[c] * r / p.images : 0;
  }
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < p.images; ++row)
    row_grad(n, xp + row * n, gp + row * n, mean, scale, slope, shift, dp + row * n);
  return {dx, weight_grad, bias_grad};
}

// `own`: the statistics are those of x itself, and carry gradients.
std::vector<Tensor> norm_grad(const Planes& p, const Tensor& x, const Tensor& weight, const Tensor& mean,
                              const Tensor& rstd, const Tensor& dy, bool own) {
  if (p.rows()) return row_norm_grad(p, x, weight, mean.data<float>(), rstd.data<float>(), dy, own);
  const float *xp = x.data<float>(), *wp = weight.data<float>(), *gp = dy.data<float>();
  const float *mp = mean.data<float>(), *rp = rstd.data<float>();
  std::vector<float> sums(p.count()), dots(p.count());
  float *own_sums = sums.data(), *own_dots = dots.data();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < p.count(); ++i)
    plane_grad_sums(p.places, xp + i * p.places, gp + i * p.places, mp[p.set(i)], own_sums + i, own_dots + i);
  std::vector<double> set_sums(p.sets()), set_dots(p.sets()), dw(p.channels), db(p.channels);
  for (int64_t i = 0; i < p.count(); ++i) {
    int64_t s = p.set(i), c = i % p.channels;
    dw[c] += static_cast<double>(dots[i]) * rp[s];
    db[c] += sums[i];
    set_sums[s] += static_cast<double>(sums[i]) * wp[c];
    set_dots[s] += static_cast<double>(dots[i]) * wp[c];
  }
  Tensor dx = like(x), weight_grad = like(weight), bias_grad = like(weight);
  std::copy(dw.begin(), dw.end(), weight_grad.data<float>());
  std::copy(db.begin(), db.end(), bias_grad.data<float>());
  const double *sum = set_sums.data(), *dot = set_dots.data();
  float* dp = dx.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < p.count(); ++i) {
    int64_t s = p.set(i);
    float r = rp[s], slope = own ? -dot[s] * r * r * r / p.set_size() : 0, shift = own ? -sum[s] * r / p.set_size() : 0;
    plane_grad(p.places, xp + i * p.places, gp + i * p.places, mp[s], wp[i % p.channels] * r, slope, shift,
               dp + i * p.places);
  }
  return {dx, weight_grad, bias_grad};
}

}  // namespace

// ---------------------------------------------------------------- batch norm

// Returns, besides y, the statistics it was normalised by and, in training, the running ones: share * old + (1 - share)
// * new, of which the variance is that of n - 1. `act` is the activation's name that follows, or "".
std::vector<Tensor> batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean,
                               const Tensor& variance, bool training, float share, float eps, const std::string& act) {
  Planes p(x, weight, bias, 0);
  const Activation last = act.empty() ? Activation() : named(act);
  auto then = [=](int64_t, int64_t count, float* y) {
    if (last.value) last.value(count, y, y);
  };
  expect(mean.numel() == p.channels && variance.numel() == p.channels, "a norm");
  if (!training) {
    Tensor rstd = reciprocal_deviation(variance, eps);
    return {normalised(p, x, weight, bias, mean.data<float>(), rstd.data<float>(), then), mean, rstd, mean, variance};
  }
  Tensor own_mean = like(mean), own_variance = like(mean), next_mean = like(mean), next_variance = like(mean);
  moments(p, x.data<float>(), own_mean.data<float>(), own_variance.data<float>());
  double n = p.set_size(), rest = 1 - static_cast<double>(share);
  for (int64_t c = 0; c < p.channels; ++c) {
    next_mean.data<float>()[c] = share * mean.data<float>()[c] + rest * own_mean.data<float>()[c];
    next_variance.data<float>()[c] =
        share * variance.data<float>()[c] + rest * own_variance.data<float>()[c] * (n / (n - 1));
  }
  Tensor rstd = reciprocal_deviation(own_variance, eps);
  Tensor y = normalised(p, x, weight, bias, own_mean.data<float>(), rstd.data<float>(), then);
  return {y, own_mean, rstd, next_mean, next_variance};
}

// What the activation reads isn't kept: it is computed again.
std::vector<Tensor> batch_norm_grad(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean,
                                    const Tensor& rstd, const Tensor& dy, bool training, float, float,
                                    const std::string& act) {
  const Planes p(x, weight, bias, 0);
  if (act.empty()) return norm_grad(p, x, weight, mean, rstd, dy, training);
  const Activation last = named(act);
  const float* from = dy.data<float>();
  Tensor grad = normalised(p, x, weight, bias, mean.data<float>(), rstd.data<float>(),
                           [=](int64_t at, int64_t count, float* z) { last.grad(count, z, from + at, z); });
  return norm_grad(p, x, weight, mean, rstd, grad, training);
}

// ---------------------------------------------------------------- group norm

std::vector<Tensor> group_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, int groups, float eps) {
  Planes p(x, weight, bias, groups);
  expect(groups > 0, "a norm");
  Tensor mean = sized({p.sets()}), variance = sized({p.sets()});
  moments(p, x.data<float>(), mean.data<float>(), variance.data<float>());
  Tensor rstd = reciprocal_deviation(variance, eps);
  auto then = [](int64_t, int64_t, float*) {};
  return {normalised(p, x, weight, bias, mean.data<float>(), rstd.data<float>(), then), mean, rstd};
}

std::vector<Tensor> group_norm_grad(const Tensor& x, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                                    const Tensor& dy, int groups, float) {
  return norm_grad(Planes(x, weight, weight, groups), x, weight, mean, rstd, dy, true);
}

// ---------------------------------------------------------------- global response norm of [B, ..., C]

namespace {

const float LEAST = 1e-15f;  // length of a channel: below, it has no gradient

// dx = dy * factors + x * slopes
CLONED void response_grad_row(int64_t n, const float* x, const float* dy, const float* factors, const float* slopes,
                              float* dx) {
#pragma omp simd
  for (int64_t c = 0; c < n; ++c) dx[c] = dy[c] * factors[c] + x[c] * slopes[c];
}

// What the channels of an item are multiplied by: 1 + weight * length / mean of the lengths, which is returned.
float response_factors(int64_t n, const float* lengths, const float* weight, float* factors) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += lengths[c];
  float mean = sum / n + 1e-6;
  for (int64_t c = 0; c < n; ++c) factors[c] = 1 + weight[c] * lengths[c] / mean;
  return mean;
}

}  // namespace

std::vector<Tensor> response_norm(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  int64_t n = weight.numel(), batch = x.shape()[0], rows = x.numel() / batch / n;
  expect(x.shape().back() == n && bias.numel() == n, "a norm");
  Tensor y = like(x), lengths = sized({batch, n}), row_of_factors = sized({n});
  const float *w = weight.data<float>(), *shift = bias.data<float>();
  float* factors = row_of_factors.data<float>();
  for (int64_t b = 0; b < batch; ++b) {
    const float* from = x.data<float>() + b * rows * n;
    float *to = y.data<float>() + b * rows * n, *own = lengths.data<float>() + b * n;
    auto squares = summed(rows, n, [=](int64_t row, float* sums) { add_products(n, from + row * n, from + row * n, sums); });
    for (int64_t c = 0; c < n; ++c) own[c] = std::max(std::sqrt(squares[c]), LEAST);
    response_factors(n, own, w, factors);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      multiply_row(n, factors, from + row * n, to + row * n);
      add_bias(n, shift, to + row * n);
    }
  }
  return {y, lengths};
}

std::vector<Tensor> response_norm_grad(const Tensor& x, const Tensor& weight, const Tensor& lengths, const Tensor& dy) {
  int64_t n = weight.numel(), batch = x.shape()[0], rows = x.numel() / batch / n;
  Tensor dx = like(x), two_rows = sized({2, n});
  std::vector<float> dw(n, 0.0f), db(n, 0.0f);
  const float* w = weight.data<float>();
  float *factors = two_rows.data<float>(), *slopes = factors + n;
  for (int64_t b = 0; b < batch; ++b) {
    const float *from = x.data<float>() + b * rows * n, *grad = dy.data<float>() + b * rows * n;
    const float* own = lengths.data<float>() + b * n;
    float *to = dx.data<float>() + b * rows * n, mean = response_factors(n, own, w, factors);
    auto sums = summed(rows, 2 * n, [=](int64_t row, float* both) {
      add_products(n, grad + row * n, from + row * n, both);
      add_bias(n, grad + row * n, both + n);
    });
    double along = 0;
    for (int64_t c = 0; c < n; ++c) {
      dw[c] += sums[c] * own[c] / mean;
      db[c] += sums[n + c];
      along += w[c] * sums[c] * own[c];
    }
    float through_mean = along / n / mean / mean;
    for (int64_t c = 0; c < n; ++c) slopes[c] = own[c] > LEAST ? (w[c] * sums[c] / mean - through_mean) / own[c] : 0;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row)
      response_grad_row(n, from + row * n, grad + row * n, factors, slopes, to + row * n);
  }
  return {dx, filled(dw.data(), n), filled(db.data(), n)};
}

// ---------------------------------------------------------------- lengths of the rows of [K, n]

namespace {

// y = x * scale
CLONED void scaled_row(int64_t n, float scale, const float* x, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * scale;
}

}  // namespace

std::vector<Tensor> row_lengths(const Tensor& x) {
  expect(x.shape().size() == 2, "lengths of rows");
  int64_t rows = x.shape()[0], n = x.shape()[1];
  Tensor lengths = sized({rows});
  const float* from = x.data<float>();
  float* to = lengths.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) to[row] = std::sqrt(dot(n, from + row * n, from + row * n));
  return {lengths};
}

std::vector<Tensor> row_lengths_grad(const Tensor& x, const Tensor& lengths, const Tensor& grad) {
  int64_t rows = x.shape()[0], n = x.shape()[1];
  Tensor dx = like(x);
  const float *from = x.data<float>(), *own = lengths.data<float>(), *dy = grad.data<float>();
  float* to = dx.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) scaled_row(n, dy[row] / own[row], from + row * n, to + row * n);
  return {dx};
}

PD_BUILD_OP(vit_row_lengths).Inputs({"X"}).Outputs({"Lengths"}).SetKernelFn(PD_KERNEL(row_lengths));
PD_BUILD_GRAD_OP(vit_row_lengths)
    .Inputs({"X", "Lengths", paddle::Grad("Lengths")})
    .Outputs({paddle::Grad("X")})
    .SetKernelFn(PD_KERNEL(row_lengths_grad));

PD_BUILD_OP(vit_response_norm).Inputs({"X", "W", "B"}).Outputs({"Y", "Lengths"}).SetKernelFn(PD_KERNEL(response_norm));
PD_BUILD_GRAD_OP(vit_response_norm)
    .Inputs({"X", "W", "Lengths", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("W"), paddle::Grad("B")})
    .SetKernelFn(PD_KERNEL(response_norm_grad));

#define BATCH_NORM_ATTRIBUTES {"training: bool", "share: float", "eps: float", "act: std::string"}
PD_BUILD_OP(vit_batch_norm)
    .Inputs({"X", "W", "B", "Mean", "Variance"})
    .Outputs({"Y", "OwnMean", "Rstd", "NextMean", "NextVariance"})
    .Attrs(BATCH_NORM_ATTRIBUTES)
    .SetKernelFn(PD_KERNEL(batch_norm));
PD_BUILD_GRAD_OP(vit_batch_norm)
    .Inputs({"X", "W", "B", "OwnMean", "Rstd", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("W"), paddle::Grad("B")})
    .Attrs(BATCH_NORM_ATTRIBUTES)
    .SetKernelFn(PD_KERNEL(batch_norm_grad));

PD_BUILD_OP(vit_group_norm)
    .Inputs({"X", "W", "B"})
    .Outputs({"Y", "Mean", "Rstd"})
    .Attrs({"groups: int", "eps: float"})
    .SetKernelFn(PD_KERNEL(group_norm));
PD_BUILD_GRAD_OP(vit_group_norm)
    .Inputs({"X", "W", "Mean", "Rstd", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("W"), paddle::Grad("B")})
    .Attrs({"groups: int", "eps: float"})
    .SetKernelFn(PD_KERNEL(group_norm_grad));
