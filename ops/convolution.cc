// Convolution of [B, C, H, W] in float32 on a CPU, as a Paddle custom operator: see ops/__init__.py.
//
// 1 x 1 convolutions are products; the others are oneDNN's primitives, kept by their shapes.
#include <algorithm>
#include <map>
#include <mutex>

#include "depthwise.h"
#include "onednn.h"

namespace {

using onednn::Dims;

enum { kForward, kInputGrad, kWeightGrad };

// What a convolution is, apart from its data. `last`: channels are the last axis of maps, not the one before theirs.
struct Shape {
  int64_t batch, channels, height, width, filters, rows, columns, groups;
  std::vector<int> strides, paddings, dilations;
  bool last;

  Shape(const std::vector<int64_t>& x, const std::vector<int64_t>& w, const std::vector<int>& strides,
        const std::vector<int>& paddings, const std::vector<int>& dilations, int64_t groups, bool last)
      : groups(groups), strides(strides), paddings(paddings), dilations(dilations), last(last) {
    expect(x.size() == 4 && w.size() == 4 && x[last ? 3 : 1] == w[1] * groups && w[0] % groups == 0 &&
               strides.size() == 2 && paddings.size() == 2 && dilations.size() == 2,
           "a convolution");
    batch = x[0], channels = x[last ? 3 : 1], height = x[last ? 1 : 2], width = x[last ? 2 : 3];
    filters = w[0], rows = w[2], columns = w[3];
    expect(out(0) > 0 && out(1) > 0, "a convolution");
  }

  int64_t out(int axis) const {
    int64_t size = axis ? width : height, reach = dilations[axis] * ((axis ? columns : rows) - 1) + 1;
    return (size + 2 * paddings[axis] - reach) / strides[axis] + 1;
  }
  Dims src() const { return {batch, channels, height, width}; }
  Dims dst() const { return {batch, filters, out(0), out(1)}; }
  Dims output() const { return last ? Dims{batch, out(0), out(1), filters} : dst(); }
  Dims weights() const {
    if (groups == 1) return {filters, channels, rows, columns};
    return {groups, filters / groups, channels / groups, rows, columns};
  }
  onednn::Desc map(const Dims& d) const {
    return last ? onednn::strided(d, {d[1] * d[2] * d[3], 1, d[1] * d[3], d[1]}) : onednn::dense(d);
  }
  bool pointwise() const {
    return rows == 1 && columns == 1 && groups == 1 && strides == std::vector<int>{1, 1} &&
           paddings == std::vector<int>{0, 0};
  }
  bool depthwise() const {
    return groups == channels && filters == channels && dilations == std::vector<int>{1, 1};
  }
  std::vector<int64_t> key(int pass, bool bias) const {
    std::vector<int64_t> key = {pass, bias, last, batch, channels, height, width, filters, rows, columns, groups};
    for (auto* more : {&strides, &paddings, &dilations}) key.insert(key.end(), more->begin(), more->end());
    return key;
  }
};

onednn::Pass made(const Shape& s, int pass, bool bias) {
  using namespace onednn;
  Attributes attr;
  Dims strides(s.strides.begin(), s.strides.end()), pads(s.paddings.begin(), s.paddings.end());
  Dims gaps = {s.dilations[0] - 1, s.dilations[1] - 1};
  Desc src = s.map(s.src()), dst = s.map(s.dst()), weights = dense(s.weights());
  dnnl_primitive_desc* raw = nullptr;
  check(dnnl_convolution_forward_primitive_desc_create(
            &raw, engine(), kForwardTraining, kDirect, any(s.src()).get(), any(s.weights()).get(),
            bias ? any({s.filters}).get() : nullptr, any(s.dst()).get(), strides.data(), gaps.data(), pads.data(),
            pads.data(), attr.get()),
        "a convolution");
  PrimitiveDesc forward(raw, dnnl_primitive_desc_destroy);
  if (pass == kForward && bias)
    return Pass(forward, {kSrc, kWeights, kBias, kDst}, {src, weights, dense({s.filters}), dst});
  if (pass == kForward) return Pass(forward, {kSrc, kWeights, kDst}, {src, weights, dst});
  if (pass == kInputGrad) {
    check(dnnl_convolution_backward_data_primitive_desc_create(
              &raw, engine(), kDirect, any(s.src()).get(), any(s.weights()).get(), any(s.dst()).get(), strides.data(),
              gaps.data(), pads.data(), pads.data(), forward.get(), attr.get()),
          "a convolution's gradient");
    PrimitiveDesc pd(raw, dnnl_primitive_desc_destroy);
    return Pass(pd, {kDiffDst, kWeights, kDiffSrc}, {dst, weights, src});
  }
  check(dnnl_convolution_backward_weights_primitive_desc_create(
            &raw, engine(), kDirect, any(s.src()).get(), any(s.weights()).get(), nullptr, any(s.dst()).get(),
            strides.data(), gaps.data(), pads.data(), pads.data(), forward.get(), attr.get()),
        "a convolution's gradient");
  PrimitiveDesc pd(raw, dnnl_primitive_desc_destroy);
  return Pass(pd, {kSrc, kDiffDst, kDiffWeights}, {src, dst, weights});
}

// Images of many sizes would keep many: beyond a bound all are made anew.
std::shared_ptr<onednn::Pass> pass_of(const Shape& shape, int pass, bool bias) {
  static std::map<std::vector<int64_t>, std::shared_ptr<onednn::Pass>> kept;
  static std::mutex guard;
  std::lock_guard<std::mutex> lock(guard);
  if (kept.size() > 2048) kept.clear();
  auto& found = kept[shape.key(pass, bias)];
  if (!found) found = std::make_shared<onednn::Pass>(made(shape, pass, bias));
  return found;
}

// f(image) for each, and products within: by threads that share the images out, or share each product.
template <typename F>
void each_image(int64_t batch, F f) {
#pragma omp parallel for schedule(static) if (batch % omp_get_max_threads() == 0 || batch > 4 * omp_get_max_threads())
  for (int64_t image = 0; image < batch; ++image) f(image);
}

// The bias's gradient, of channels that come first.
void channel_sums(const Shape& s, const float* dy, float* db) {
  int64_t places = s.out(0) * s.out(1);
#pragma omp parallel for schedule(static)
  for (int64_t filter = 0; filter < s.filters; ++filter) {
    db[filter] = 0;
    for (int64_t image = 0; image < s.batch; ++image)
      db[filter] += sum_of(places, dy + (image * s.filters + filter) * places);
  }
}

// The gradient of a depthwise convolution's weights.
void depthwise_grad(const Shape& s, const float* x, const float* dy, float* dw) {
  int64_t taps = s.rows * s.columns, rows = s.height + 2 * s.paddings[0], columns = s.width + 2 * s.paddings[1],
          height = s.out(0), width = s.out(1), in = s.height * s.width, out = height * width, map = rows * columns * kLanes, blocks = (s.channels + kLanes - 1) / kLanes;
  Tensor scratch = sized({omp_get_max_threads(), 2 * map + taps * kLanes});
  float* taken = scratch.data<float>();
  auto spacing = [&](int64_t places) { return s.last ? Spacing{s.channels, 1} : Spacing{1, places}; };
#pragma omp parallel
  {
    float *grad = taken + omp_get_thread_num() * (2 * map + taps * kLanes), *padded = grad + map, *sums = padded + map;
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      int64_t c = block * kLanes, channels = std::min(kLanes, s.channels - c);
      std::memset(sums, 0, taps * kLanes * sizeof(float));
      for (int64_t image = 0; image < s.batch; ++image) {
        const float *from = x + image * s.channels * in + (s.last ? c : c * in),
                    *top = dy + image * s.channels * out + (s.last ? c : c * out);
        gather(channels, height, width, top, spacing(out), 0, 0, height, width, grad);
        gather(channels, s.height, s.width, from, spacing(in), s.paddings[0], s.paddings[1], rows, columns, padded);
        depthwise_weight_grad(height, width, s.rows, s.columns, s.strides[0], s.strides[1], padded, columns, grad, sums);
      }
      for (int64_t i = 0; i < channels; ++i)
        for (int64_t tap = 0; tap < taps; ++tap) dw[(c + i) * taps + tap] = sums[tap * kLanes + i];
    }
  }
}

}  // namespace

std::vector<Tensor> convolution(const Tensor& x, const Tensor& w, const Tensor& bias, const std::vector<int>& strides,
                                const std::vector<int>& paddings, const std::vector<int>& dilations, int groups,
                                bool channels_last, bool has_bias, bool, bool) {
  Shape s(x.shape(), w.shape(), strides, paddings, dilations, groups, channels_last);
  expect(!has_bias || bias.numel() == s.filters, "a bias");
  Tensor y = sized(s.output());
  const float *xp = x.data<float>(), *wp = w.data<float>(), *bp = bias.data<float>();
  float* yp = y.data<float>();
  if (!s.pointwise()) {
    auto pass = pass_of(s, kForward, has_bias);
    if (has_bias)
      (*pass)({xp, wp, bp, yp});
    else
      (*pass)({xp, wp, yp});
    return {y};
  }
  int64_t places = s.height * s.width;
  if (s.last) {
    product('n', 't', s.batch * places, s.filters, s.channels, 1, xp, s.channels, wp, s.channels, yp, s.filters);
    if (has_bias) add_bias_rows(bias, &y);
    return {y};
  }
  each_image(s.batch, [=](int64_t image) {
    float* to = yp + image * s.filters * places;
    product('n', 'n', s.filters, places, s.channels, 1, wp, s.channels, xp + image * s.channels * places, places, to,
            places);
    if (has_bias)
      for (int64_t filter = 0; filter < s.filters; ++filter) add_value(places, bp[filter], to + filter * places);
  });
  return {y};
}

std::vector<Tensor> convolution_grad(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& dy,
                                     const std::vector<int>& strides, const std::vector<int>& paddings,
                                     const std::vector<int>& dilations, int groups, bool channels_last, bool has_bias,
                                     bool x_grad, bool w_grad) {
  Shape s(x.shape(), w.shape(), strides, paddings, dilations, groups, channels_last);
  Tensor dx = like(x), dw = like(w), db = like(bias);
  const float *xp = x.data<float>(), *wp = w.data<float>(), *gp = dy.data<float>();
  float *dxp = dx.data<float>(), *dwp = dw.data<float>();
  if (w_grad && has_bias && s.last) db = column_sums(dy);
  if (w_grad && has_bias && !s.last) channel_sums(s, gp, db.data<float>());
  if (!s.pointwise()) {
    if (x_grad) (*pass_of(s, kInputGrad, false))({gp, wp, dxp});
    if (w_grad && s.depthwise())
      depthwise_grad(s, xp, gp, dwp);
    else if (w_grad)
      (*pass_of(s, kWeightGrad, false))({xp, gp, dwp});
    return {dx, dw, db};
  }
  int64_t places = s.height * s.width, in = s.channels * places, out = s.filters * places, all = s.batch * places;
  if (x_grad && s.last) product('n', 'n', all, s.channels, s.filters, 1, gp, s.filters, wp, s.channels, dxp, s.channels);
  if (w_grad && s.last) product('t', 'n', s.filters, s.channels, all, 1, gp, s.filters, xp, s.channels, dwp, s.channels);
  if (s.last) return {dx, dw, db};
  if (x_grad)
    each_image(s.batch, [=](int64_t image) {
      product('t', 'n', s.channels, places, s.filters, 1, wp, s.channels, gp + image * out, places, dxp + image * in,
              places);
    });
  if (w_grad)
    for (int64_t image = 0; image < s.batch; ++image)
      product('n', 't', s.filters, s.channels, places, 1, gp + image * out, places, xp + image * in, places, dwp,
              s.channels, image > 0);
  return {dx, dw, db};
}

#define CONVOLUTION_ATTRIBUTES                                                                                    \
  {"strides: std::vector<int>", "paddings: std::vector<int>", "dilations: std::vector<int>", "groups: int",       \
   "channels_last: bool", "has_bias: bool", "x_grad: bool", "w_grad: bool"}

PD_BUILD_OP(vit_convolution)
    .Inputs({"X", "W", "B"})
    .Outputs({"Y"})
    .Attrs(CONVOLUTION_ATTRIBUTES)
    .SetKernelFn(PD_KERNEL(convolution));
PD_BUILD_GRAD_OP(vit_convolution)
    .Inputs({"X", "W", "B", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("W"), paddle::Grad("B")})
    .Attrs(CONVOLUTION_ATTRIBUTES)
    .SetKernelFn(PD_KERNEL(convolution_grad));
