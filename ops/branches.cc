// What stands beside attention in blocks, in float32 on a CPU, as Paddle custom operators: see ops/__init__.py.
#include "tensors.h"

// ---------------------------------------------------------------- a factor of each channel, and a shift or none

std::vector<Tensor> scaled(const Tensor& x, const Tensor& factors, const Tensor& shift) {
  int64_t n = factors.numel(), rows = x.numel() / n;
  bool shifted = shift.shape().size() == 1;
  expect(x.shape().back() == n && (!shifted || shift.numel() == n), "factors of channels");
  Tensor y = like(x);
  const float *xp = x.data<float>(), *fp = factors.data<float>(), *sp = shift.data<float>();
  float* yp = y.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    multiply_row(n, fp, xp + row * n, yp + row * n);
    if (shifted) add_bias(n, sp, yp + row * n);
  }
  return {y};
}

std::vector<Tensor> scaled_grad(const Tensor& x, const Tensor& factors, const Tensor& shift, const Tensor& dy) {
  int64_t n = factors.numel();
  bool shifted = shift.shape().size() == 1;
  Tensor dx = like(x);
  const float *xp = x.data<float>(), *fp = factors.data<float>(), *gp = dy.data<float>();
  float* dp = dx.data<float>();
  auto sums = summed(x.numel() / n, 2 * n, [=](int64_t row, float* own) {
    multiply_row(n, fp, gp + row * n, dp + row * n);
    add_products(n, gp + row * n, xp + row * n, own);
    if (shifted) add_bias(n, gp + row * n, own + n);
  });
  return {dx, filled(sums.data(), n), shifted ? filled(sums.data() + n, n) : like(shift)};
}

// ---------------------------------------------------------------- a factor of each plane

// Planes [h, w] of x [.., h, w]; number i has factor i mod their count: one of each channel, or of each image's.
std::vector<Tensor> scaled_planes(const Tensor& x, const Tensor& factors) {
  expect(x.shape().size() > 2, "factors of planes");
  int64_t count = factors.numel(), n = x.shape().back() * x.shape()[x.shape().size() - 2], planes = x.numel() / n;
  expect(planes % count == 0, "factors of planes");
  Tensor y = like(x);
  const float *xp = x.data<float>(), *fp = factors.data<float>();
  float* yp = y.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < planes; ++i) {
    std::copy(xp + i * n, xp + i * n + n, yp + i * n);
    scale_row(n, fp[i % count], yp + i * n);
  }
  return {y};
}

std::vector<Tensor> scaled_planes_grad(const Tensor& x, const Tensor& factors, const Tensor& dy) {
  int64_t count = factors.numel(), n = x.shape().back() * x.shape()[x.shape().size() - 2], planes = x.numel() / n;
  Tensor dx = scaled_planes(dy, factors)[0], dots = sized({planes}), dfactors = like(factors);
  const float *xp = x.data<float>(), *gp = dy.data<float>();
  float* dp = dots.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < planes; ++i) dp[i] = dot(n, xp + i * n, gp + i * n);
  add_up(planes / count, count, dp, dfactors.data<float>());
  return {dx, dfactors};
}

// ---------------------------------------------------------------- dynamic ReLU: the larger of two lines of each plane

namespace {

// y = max(a1 x + b1, a2 x + b2); line: a1, a2, b1, b2. NaN stays.
CLONED void larger_row(int64_t n, const float* line, const float* x, float* y) {
  const float a1 = line[0], a2 = line[1], b1 = line[2], b2 = line[3];
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    float y1 = a1 * x[i] + b1, y2 = a2 * x[i] + b2;
    y[i] = y1 > y2 || y1 != y1 ? y1 : y2;
  }
}

// Two equal lines get half of the gradient each, as paddle.maximum's and torch.maximum's.
CLONED void larger_grad_row(int64_t n, const float* line, const float* x, const float* dy, float* dx, float* dline) {
  const float a1 = line[0], a2 = line[1], b1 = line[2], b2 = line[3];
  float da1 = 0, da2 = 0, db1 = 0, db2 = 0;
#pragma omp simd reduction(+ : da1, da2, db1, db2)
  for (int64_t i = 0; i < n; ++i) {
    float y1 = a1 * x[i] + b1, y2 = a2 * x[i] + b2;
    float half = 0.5f * dy[i], first = half + (y1 < y2 ? -half : y1 > y2 ? half : 0.0f), second = dy[i] - first;
    dx[i] = a1 * first + a2 * second;
    da1 += first * x[i];
    da2 += second * x[i];
    db1 += first;
    db2 += second;
  }
  dline[0] = da1, dline[1] = da2, dline[2] = db1, dline[3] = db2;
}

// The places of a plane of x [B, C, H, W]; lines are [B, C, 4].
int64_t places(const Tensor& x, const Tensor& lines) {
  auto shape = x.shape();
  expect(shape.size() == 4 && lines.shape() == std::vector<int64_t>{shape[0], shape[1], 4}, "a dynamic ReLU");
  return shape[2] * shape[3];
}

}  // namespace

std::vector<Tensor> dynamic_relu(const Tensor& x, const Tensor& lines) {
  int64_t n = places(x, lines), planes = lines.numel() / 4;
  Tensor y = like(x);
  const float *xp = x.data<float>(), *lp = lines.data<float>();
  float* yp = y.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < planes; ++i) larger_row(n, lp + 4 * i, xp + i * n, yp + i * n);
  return {y};
}

std::vector<Tensor> dynamic_relu_grad(const Tensor& x, const Tensor& lines, const Tensor& dy) {
  int64_t n = places(x, lines), planes = lines.numel() / 4;
  Tensor dx = like(x), dlines = like(lines);
  const float *xp = x.data<float>(), *lp = lines.data<float>(), *gp = dy.data<float>();
  float *dxp = dx.data<float>(), *dlp = dlines.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < planes; ++i)
    larger_grad_row(n, lp + 4 * i, xp + i * n, gp + i * n, dxp + i * n, dlp + 4 * i);
  return {dx, dlines};
}

// ---------------------------------------------------------------- three tensors, weighted by sample and channel

namespace {

// a, b and c are [B, .., N], weights [3, B, N].
struct Weighted {
  int64_t batch, rows, n;  // rows of a sample

  Weighted(const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& weights) {
    batch = a.shape()[0], n = a.shape().back(), rows = a.numel() / (batch * n);
    expect(a.shape() == b.shape() && a.shape() == c.shape(), "a weighted sum");
    expect(weights.shape() == std::vector<int64_t>{3, batch, n}, "a weighted sum");
  }
};

}  // namespace

// a w[0] + b w[1] + c w[2]
std::vector<Tensor> weighted(const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& weights) {
  const Weighted in(a, b, c, weights);
  const int64_t n = in.n, all = in.batch * n;
  Tensor y = like(a);
  const float *ap = a.data<float>(), *bp = b.data<float>(), *cp = c.data<float>(), *wp = weights.data<float>();
  float* yp = y.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < in.batch * in.rows; ++row) {
    const float* w = wp + row / in.rows * n;
    multiply_row(n, w, ap + row * n, yp + row * n);
    add_products(n, w + all, bp + row * n, yp + row * n);
    add_products(n, w + 2 * all, cp + row * n, yp + row * n);
  }
  return {y};
}

std::vector<Tensor> weighted_grad(const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& weights,
                                  const Tensor& dy) {
  const Weighted in(a, b, c, weights);
  const int64_t n = in.n, all = in.batch * n;
  Tensor da = like(a), db = like(b), dc = like(c), dweights = like(weights);
  const float *from[] = {a.data<float>(), b.data<float>(), c.data<float>()};
  float *to[] = {da.data<float>(), db.data<float>(), dc.data<float>()};
  const float *gp = dy.data<float>(), *wp = weights.data<float>();
  float* sums = dweights.data<float>();
  std::fill(sums, sums + 3 * all, 0.0f);
#pragma omp parallel for schedule(static)
  for (int64_t sample = 0; sample < in.batch; ++sample)
    for (int64_t row = sample * in.rows; row < (sample + 1) * in.rows; ++row)
      for (int64_t i = 0; i < 3; ++i) {
        int64_t at = i * all + sample * n;
        multiply_row(n, wp + at, gp + row * n, to[i] + row * n);
        add_products(n, gp + row * n, from[i] + row * n, sums + at);
      }
  return {da, db, dc, dweights};
}

// ---------------------------------------------------------------- a residual connection

namespace {

// y = x + factor * branch
CLONED void residual_row(int64_t n, const float* x, float factor, const float* branch, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] + factor * branch[i];
}

// dx = dy; dbranch = factor * dy
CLONED void residual_grad_row(int64_t n, float factor, const float* dy, float* dx, float* dbranch) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    dx[i] = dy[i];
    dbranch[i] = factor * dy[i];
  }
}

// f(first, count, factor of the sample) over all of x; factors of two axes: there are none.
template <typename F>
void in_samples(const Tensor& x, const Tensor& factors, F f) {
  bool some = factors.shape().size() == 1;
  int64_t samples = some ? factors.numel() : 1, n = x.numel() / samples;
  expect(!some || samples == x.shape()[0], "a residual connection");
  const float* factor = factors.data<float>();
  in_pieces(n, samples, [=](int64_t sample, int64_t first, int64_t count) {
    f(sample * n + first, count, some ? factor[sample] : 1.0f);
  });
}

}  // namespace

std::vector<Tensor> residual(const Tensor& x, const Tensor& branch, const Tensor& factors) {
  expect(x.shape() == branch.shape(), "a residual connection");
  Tensor y = like(x);
  const float *xp = x.data<float>(), *bp = branch.data<float>();
  float* yp = y.data<float>();
  in_samples(x, factors, [=](int64_t at, int64_t n, float factor) { residual_row(n, xp + at, factor, bp + at, yp + at); });
  return {y};
}

std::vector<Tensor> residual_grad(const Tensor& factors, const Tensor& dy) {
  Tensor dx = like(dy), dbranch = like(dy);
  const float* gp = dy.data<float>();
  float *xp = dx.data<float>(), *bp = dbranch.data<float>();
  in_samples(dy, factors,
             [=](int64_t at, int64_t n, float factor) { residual_grad_row(n, factor, gp + at, xp + at, bp + at); });
  return {dx, dbranch};
}

// ---------------------------------------------------------------- a tensor that all samples share

// x [B, ..] + one [1, ..]
std::vector<Tensor> shared(const Tensor& x, const Tensor& one) {
  const int64_t n = one.numel();
  expect(n > 0 && x.numel() == x.shape()[0] * n, "what all samples share");
  Tensor y = like(x);
  const float *xp = x.data<float>(), *op = one.data<float>();
  float* yp = y.data<float>();
  in_pieces(n, x.shape()[0], [=](int64_t sample, int64_t first, int64_t count) {
    residual_row(count, xp + sample * n + first, 1, op + first, yp + sample * n + first);
  });
  return {y};
}

std::vector<Tensor> shared_grad(const Tensor& one, const Tensor& dy) {
  Tensor dx = like(dy), done = like(one);
  const float* gp = dy.data<float>();
  float* xp = dx.data<float>();
  in_pieces(dy.numel(), 1, [=](int64_t, int64_t at, int64_t n) { std::copy(gp + at, gp + at + n, xp + at); });
  add_up(dy.shape()[0], one.numel(), gp, done.data<float>());
  return {dx, done};
}

// ---------------------------------------------------------------- a product, element by element

std::vector<Tensor> times_elements(const Tensor& x, const Tensor& z) {
  expect(x.shape() == z.shape(), "a product of elements");
  Tensor y = like(x);
  const float *xp = x.data<float>(), *zp = z.data<float>();
  float* yp = y.data<float>();
  in_pieces(x.numel(), 1, [=](int64_t, int64_t at, int64_t n) { multiply_row(n, xp + at, zp + at, yp + at); });
  return {y};
}

std::vector<Tensor> times_elements_grad(const Tensor& x, const Tensor& z, const Tensor& dy) {
  return {times_elements(dy, z)[0], times_elements(dy, x)[0]};
}

// ---------------------------------------------------------------- silu(gate) * x, side by side in one tensor or in two

namespace {

struct Halves {
  int64_t n, rows, step;
  const float *gate, *x;
  Halves(const Tensor& g, const Tensor& other) {
    bool two = other.shape().size() > 1;
    step = g.shape().back(), rows = g.numel() / step, n = two ? step : step / 2;
    expect(two ? other.shape() == g.shape() : step % 2 == 0, "a gate");
    gate = g.data<float>(), x = two ? other.data<float>() : gate + n;
  }
};

}  // namespace

std::vector<Tensor> gated(const Tensor& gate, const Tensor& x) {
  const Halves in(gate, x);
  auto shape = gate.shape();
  shape.back() = in.n;
  Tensor y = sized(shape);
  float* yp = y.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < in.rows; ++row)
    gated_row(in.n, in.gate + row * in.step, in.x + row * in.step, yp + row * in.n);
  return {y};
}

std::vector<Tensor> gated_grad(const Tensor& gate, const Tensor& x, const Tensor& dy) {
  const Halves in(gate, x);
  Tensor dgate = like(gate), dx = like(x);
  const float* from = dy.data<float>();
  float *gp = dgate.data<float>(), *xp = in.n == in.step ? dx.data<float>() : gp + in.n;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < in.rows; ++row)
    gated_grad_row(in.n, in.gate + row * in.step, in.x + row * in.step, from + row * in.n, gp + row * in.step,
                   xp + row * in.step);
  return {dgate, dx};
}

// ---------------------------------------------------------------- outlook attention: 3 x 3 places around each 2 x 2

namespace {

const int64_t SIDE = 3, PLACES = SIDE * SIDE, PAIRS = PLACES * PLACES;
const float NOTHING[PLACES] = {};

struct Outlook {
  int64_t batch, rows, columns, channels, heads, d;  // windows by row and by column; channels of a head

  Outlook(const Tensor& values, const Tensor& scores, int64_t heads_) : heads(heads_) {
    auto v = values.shape(), s = scores.shape();
    expect(v.size() == 4 && v[1] % 2 == 0 && v[2] % 2 == 0 && v[3] % heads == 0, "an outlook");
    batch = v[0], rows = v[1] / 2, columns = v[2] / 2, channels = v[3], d = channels / heads;
    expect(scores.numel() == batch * rows * columns * heads * PAIRS && s.back() == heads * PAIRS, "an outlook");
  }

  // Calls f(where the 9 places begin, -1: beyond the map; where the 81 scores begin) for each window of an item's head.
  template <typename F>
  void each(int64_t b, int64_t h, F f) const {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        int64_t places[PLACES];
        for (int64_t p = 0; p < PLACES; ++p) {
          int64_t y = 2 * i - 1 + p / SIDE, x = 2 * j - 1 + p % SIDE;
          places[p] = y < 0 || x < 0 ? -1 : ((b * 2 * rows + y) * 2 * columns + x) * channels + h * d;
        }
        f(places, (((b * rows + i) * columns + j) * heads + h) * PAIRS);
      }
  }
};

}  // namespace

std::vector<Tensor> outlook(const Tensor& values, const Tensor& scores, int64_t heads, float scale) {
  const Outlook o(values, scores, heads);
  Tensor out = like(values);
  const float *v = values.data<float>(), *s = scores.data<float>();
  float* to = out.data<float>();
  std::fill(to, to + out.numel(), 0.0f);
#pragma omp parallel for schedule(static)
  for (int64_t item = 0; item < o.batch * heads; ++item)
    o.each(item / heads, item % heads, [&](const int64_t* places, int64_t at) {
      for (int64_t p = 0; p < PLACES; ++p) {
        if (places[p] < 0) continue;
        float weights[PLACES], kept[2];
        std::copy(s + at + p * PLACES, s + at + (p + 1) * PLACES, weights);
        exponentials_row(PLACES, scale, NOTHING, NOTHING, weights, kept);
        for (int64_t q = 0; q < PLACES; ++q)
          if (places[q] >= 0) add_scaled(o.d, weights[q] * kept[1], v + places[q], to + places[p]);
      }
    });
  return {out};
}

std::vector<Tensor> outlook_grad(const Tensor& values, const Tensor& scores, const Tensor& dout, int64_t heads,
                                 float scale) {
  const Outlook o(values, scores, heads);
  Tensor dvalues = like(values), dscores = like(scores);
  const float *v = values.data<float>(), *s = scores.data<float>(), *from = dout.data<float>();
  float *dv = dvalues.data<float>(), *ds = dscores.data<float>();
  std::fill(dv, dv + dvalues.numel(), 0.0f);
#pragma omp parallel for schedule(static)
  for (int64_t item = 0; item < o.batch * heads; ++item)
    o.each(item / heads, item % heads, [&](const int64_t* places, int64_t at) {
      for (int64_t p = 0; p < PLACES; ++p) {
        float weights[PLACES], kept[2], *grad = ds + at + p * PLACES;
        std::fill(grad, grad + PLACES, 0.0f);
        if (places[p] < 0) continue;
        std::copy(s + at + p * PLACES, s + at + (p + 1) * PLACES, weights);
        exponentials_row(PLACES, scale, NOTHING, NOTHING, weights, kept);
        std::copy(s + at + p * PLACES, s + at + (p + 1) * PLACES, weights);
        for (int64_t q = 0; q < PLACES; ++q)
          if (places[q] >= 0) grad[q] = dot(o.d, from + places[p], v + places[q]);
        weights_grad_row(PLACES, scale, NOTHING, NOTHING, kept, weights, grad);
        scale_row(PLACES, scale, grad);
        for (int64_t q = 0; q < PLACES; ++q)
          if (places[q] >= 0) add_scaled(o.d, weights[q], from + places[p], dv + places[q]);
      }
    });
  return {dvalues, dscores};
}

PD_BUILD_OP(vit_scaled).Inputs({"X", "F", "Shift"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(scaled));
PD_BUILD_GRAD_OP(vit_scaled)
    .Inputs({"X", "F", "Shift", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("F"), paddle::Grad("Shift")})
    .SetKernelFn(PD_KERNEL(scaled_grad));

PD_BUILD_OP(vit_scaled_planes).Inputs({"X", "F"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(scaled_planes));
PD_BUILD_GRAD_OP(vit_scaled_planes)
    .Inputs({"X", "F", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("F")})
    .SetKernelFn(PD_KERNEL(scaled_planes_grad));

PD_BUILD_OP(vit_dynamic_relu).Inputs({"X", "Lines"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(dynamic_relu));
PD_BUILD_GRAD_OP(vit_dynamic_relu)
    .Inputs({"X", "Lines", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("Lines")})
    .SetKernelFn(PD_KERNEL(dynamic_relu_grad));

PD_BUILD_OP(vit_weighted).Inputs({"A", "B", "C", "W"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(weighted));
PD_BUILD_GRAD_OP(vit_weighted)
    .Inputs({"A", "B", "C", "W", paddle::Grad("Y")})
    .Outputs({paddle::Grad("A"), paddle::Grad("B"), paddle::Grad("C"), paddle::Grad("W")})
    .SetKernelFn(PD_KERNEL(weighted_grad));

PD_BUILD_OP(vit_residual).Inputs({"X", "Branch", "Factors"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(residual));
PD_BUILD_GRAD_OP(vit_residual)
    .Inputs({"Factors", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("Branch")})
    .SetKernelFn(PD_KERNEL(residual_grad));

PD_BUILD_OP(vit_shared).Inputs({"X", "One"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(shared));
PD_BUILD_GRAD_OP(vit_shared)
    .Inputs({"One", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("One")})
    .SetKernelFn(PD_KERNEL(shared_grad));

PD_BUILD_OP(vit_times).Inputs({"X", "Z"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(times_elements));
PD_BUILD_GRAD_OP(vit_times)
    .Inputs({"X", "Z", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("Z")})
    .SetKernelFn(PD_KERNEL(times_elements_grad));

PD_BUILD_OP(vit_gated).Inputs({"G", "X"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(gated));
PD_BUILD_GRAD_OP(vit_gated)
    .Inputs({"G", "X", paddle::Grad("Y")})
    .Outputs({paddle::Grad("G"), paddle::Grad("X")})
    .SetKernelFn(PD_KERNEL(gated_grad));

PD_BUILD_OP(vit_outlook)
    .Inputs({"V", "S"})
    .Outputs({"Out"})
    .Attrs({"heads: int64_t", "scale: float"})
    .SetKernelFn(PD_KERNEL(outlook));
PD_BUILD_GRAD_OP(vit_outlook)
    .Inputs({"V", "S", paddle::Grad("Out")})
    .Outputs({paddle::Grad("V"), paddle::Grad("S")})
    .Attrs({"heads: int64_t", "scale: float"})
    .SetKernelFn(PD_KERNEL(outlook_grad));
