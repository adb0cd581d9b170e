// Convolution of [B, C, H, W] in float32 on a CPU, as a Paddle custom operator: see ops/__init__.py.
//
// 1 x 1 convolutions are products; the others are oneDNN's primitives, kept by their shapes.
#include <map>
#include <mutex>

#include "depthwise.h"
#include "onednn.h"

namespace {

using onednn::Dims;

enum { kForward, kInputGrad, kWeightGrad };

// What a convolution is, apart from its data.
struct Shape {
  int64_t batch, channels, height, width, filters, rows, columns, groups;
  std::vector<int> strides, paddings, dilations;

  Shape(const std::vector<int64_t>& x, const std::vector<int64_t>& w, const std::vector<int>& strides,
        const std::vector<int>& paddings, const std::vector<int>& dilations, int64_t groups)
      : groups(groups), strides(strides), paddings(paddings), dilations(dilations) {
    expect(x.size() == 4 && w.size() == 4 && x[1] == w[1] * groups && w[0] % groups == 0 && strides.size() == 2 &&
               paddings.size() == 2 && dilations.size() == 2,
           "a convolution");
    batch = x[0], channels = x[1], height = x[2], width = x[3], filters = w[0], rows = w[2], columns = w[3];
    expect(out(0) > 0 && out(1) > 0, "a convolution");
  }

  int64_t out(int axis) const {
    int64_t size = axis ? width : height, reach = dilations[axis] * ((axis ? columns : rows) - 1) + 1;
    return (size + 2 * paddings[axis] - reach) / strides[axis] + 1;
  }
  Dims src() const { return {batch, channels, height, width}; }
  Dims dst() const { return {batch, filters, out(0), out(1)}; }
  Dims weights() const {
    if (groups == 1) return {filters, channels, rows, columns};
    return {groups, filters / groups, channels / groups, rows, columns};
  }
  bool pointwise() const {
    return rows == 1 && columns == 1 && groups == 1 && strides == std::vector<int>{1, 1} &&
           paddings == std::vector<int>{0, 0};
  }
  // One plane by itself, all of which the kernel meets: depthwise_plane's. The output isn't larger than the input.
  bool depthwise() const {
    return groups == channels && filters == channels && dilations == std::vector<int>{1, 1} && 2 * paddings[0] < rows &&
           2 * paddings[1] < columns;
  }
  std::vector<int64_t> key(int pass, bool bias) const {
    std::vector<int64_t> key = {pass, bias, batch, channels, height, width, filters, rows, columns, groups};
    for (auto* more : {&strides, &paddings, &dilations}) key.insert(key.end(), more->begin(), more->end());
    return key;
  }
};

onednn::PrimitiveDesc forward_desc(const Shape& s, bool bias, const dnnl_primitive_attr* attr) {
  using namespace onednn;
  Dims strides(s.strides.begin(), s.strides.end()), pads(s.paddings.begin(), s.paddings.end());
  Dims gaps = {s.dilations[0] - 1, s.dilations[1] - 1};
  dnnl_primitive_desc* pd = nullptr;
  check(dnnl_convolution_forward_primitive_desc_create(
            &pd, engine(), kForwardTraining, kDirect, any(s.src()).get(), any(s.weights()).get(),
            bias ? any({s.filters}).get() : nullptr, any(s.dst()).get(), strides.data(), gaps.data(), pads.data(),
            pads.data(), attr),
        "a convolution");
  return PrimitiveDesc(pd, dnnl_primitive_desc_destroy);
}

onednn::Pass made(const Shape& s, int pass, bool bias) {
  using namespace onednn;
  dnnl_primitive_attr* made = nullptr;
  check(dnnl_primitive_attr_create(&made), "attributes");
  std::unique_ptr<dnnl_primitive_attr, int (*)(dnnl_primitive_attr*)> attr(made, dnnl_primitive_attr_destroy);
  check(dnnl_primitive_attr_set_scratchpad_mode(made, kUserScratchpad), "attributes");
  PrimitiveDesc forward = forward_desc(s, bias, made);
  if (pass == kForward) {
    if (bias) return Pass(forward, {kSrc, kWeights, kBias, kDst}, {s.src(), s.weights(), {s.filters}, s.dst()}, 1);
    return Pass(forward, {kSrc, kWeights, kDst}, {s.src(), s.weights(), s.dst()}, 1);
  }
  Dims strides(s.strides.begin(), s.strides.end()), pads(s.paddings.begin(), s.paddings.end());
  Dims gaps = {s.dilations[0] - 1, s.dilations[1] - 1};
  dnnl_primitive_desc* raw = nullptr;
  if (pass == kInputGrad) {
    check(dnnl_convolution_backward_data_primitive_desc_create(
              &raw, engine(), kDirect, any(s.src()).get(), any(s.weights()).get(), any(s.dst()).get(), strides.data(),
              gaps.data(), pads.data(), pads.data(), forward.get(), made),
          "a convolution's gradient");
    PrimitiveDesc pd(raw, dnnl_primitive_desc_destroy);
    return Pass(pd, {kDiffDst, kWeights, kDiffSrc}, {s.dst(), s.weights(), s.src()}, 1);
  }
  check(dnnl_convolution_backward_weights_primitive_desc_create(
            &raw, engine(), kDirect, any(s.src()).get(), any(s.weights()).get(),
            bias ? any({s.filters}).get() : nullptr, any(s.dst()).get(), strides.data(), gaps.data(), pads.data(),
            pads.data(), forward.get(), made),
        "a convolution's gradient");
  PrimitiveDesc pd(raw, dnnl_primitive_desc_destroy);
  if (bias)
    return Pass(pd, {kSrc, kDiffDst, kDiffWeights, kDiffBias}, {s.src(), s.dst(), s.weights(), {s.filters}}, 2);
  return Pass(pd, {kSrc, kDiffDst, kDiffWeights}, {s.src(), s.dst(), s.weights()}, 1);
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

// A depthwise convolution of stride 1.
void depthwise(const Shape& s, const float* x, const float* w, const float* bias, float* y) {
  int64_t rows = s.height + s.rows - 1, step = row_step(s.width, s.columns), plane = s.height * s.width,
          out = s.out(0) * s.out(1);
  Tensor scratch = sized({omp_get_max_threads(), rows, step});
  float* taken = scratch.data<float>();
#pragma omp parallel
  {
    float* padded = taken + omp_get_thread_num() * rows * step;
#pragma omp for schedule(static)
    for (int64_t at = 0; at < s.batch * s.channels; ++at) {
      int64_t c = at % s.channels;
      spread(s.height, s.width, x + at * plane, 1, 1, s.paddings[0], s.paddings[1], rows, step, padded);
      depthwise_plane(s.out(0), s.out(1), s.rows, s.columns, padded, step, w + c * s.rows * s.columns, false,
                      bias ? bias[c] : 0, y + at * out);
    }
  }
}

// The gradients of x, if dx isn't null, and of w, if dw isn't, of a depthwise convolution. The gradient of y is spread to
// its stride: what is left is of stride 1.
void depthwise_grad(const Shape& s, const float* x, const float* w, const float* dy, float* dx, float* dw) {
  int64_t side_y = s.rows, side_x = s.columns, height = s.height + 2 * s.paddings[0] - side_y + 1,
          width = s.width + 2 * s.paddings[1] - side_x + 1, rows = s.height + side_y - 1, step = row_step(s.width, side_x),
          plane = s.height * s.width, out = s.out(0) * s.out(1);
  Tensor scratch = sized({omp_get_max_threads(), 2, rows, step});
  float* taken = scratch.data<float>();
#pragma omp parallel
  {
    float *spread_dy = taken + omp_get_thread_num() * 2 * rows * step, *padded = spread_dy + rows * step;
#pragma omp for schedule(static)
    for (int64_t c = 0; c < s.channels; ++c) {
      float* sums = dw ? dw + c * side_y * side_x : nullptr;
      if (dw) std::memset(sums, 0, side_y * side_x * sizeof(float));
      for (int64_t image = 0; image < s.batch; ++image) {
        int64_t at = image * s.channels + c, top = side_y - 1 - s.paddings[0], left = side_x - 1 - s.paddings[1];
        spread(s.out(0), s.out(1), dy + at * out, s.strides[0], s.strides[1], top, left, rows, step, spread_dy);
        if (dx)
          depthwise_plane(s.height, s.width, side_y, side_x, spread_dy, step, w + c * side_y * side_x, true, 0,
                          dx + at * plane);
        if (!dw) continue;
        spread(s.height, s.width, x + at * plane, 1, 1, s.paddings[0], s.paddings[1], rows, step, padded);
        depthwise_weight_grad(height, width, side_y, side_x, padded, step, spread_dy + top * step + left, step, sums);
      }
    }
  }
}

}  // namespace

std::vector<Tensor> convolution(const Tensor& x, const Tensor& w, const Tensor& bias, const std::vector<int>& strides,
                                const std::vector<int>& paddings, const std::vector<int>& dilations, int groups,
                                bool has_bias, bool x_grad, bool w_grad) {
  Shape s(x.shape(), w.shape(), strides, paddings, dilations, groups);
  expect(!has_bias || bias.numel() == s.filters, "a bias");
  Tensor y = sized(s.dst());
  if (!s.pointwise() ) {
    auto pass = pass_of(s, kForward, has_bias);
    if (has_bias)
      (*pass)({x.data<float>(), w.data<float>(), bias.data<float>(), y.data<float>()});
    else
      (*pass)({x.data<float>(), w.data<float>(), y.data<float>()});
    return {y};
  }
  int64_t places = s.height * s.width;
  const float *xp = x.data<float>(), *wp = w.data<float>(), *bp = bias.data<float>();
  float* yp = y.data<float>();
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
                                     const std::vector<int>& dilations, int groups, bool has_bias, bool x_grad,
                                     bool w_grad) {
  Shape s(x.shape(), w.shape(), strides, paddings, dilations, groups);
  Tensor dx = like(x), dw = like(w), db = like(bias);
  const float *xp = x.data<float>(), *wp = w.data<float>(), *gp = dy.data<float>();
  if (s.depthwise()) {
    depthwise_grad(s, xp, wp, gp, x_grad ? dx.data<float>() : nullptr, w_grad ? dw.data<float>() : nullptr);
    return {dx, dw, db};
  }
  if (!s.pointwise()) {
    if (x_grad) (*pass_of(s, kInputGrad, has_bias))({gp, wp, dx.data<float>()});
    if (w_grad && has_bias)
      (*pass_of(s, kWeightGrad, true))({xp, gp, dw.data<float>(), db.data<float>()});
    else if (w_grad)
      (*pass_of(s, kWeightGrad, false))({xp, gp, dw.data<float>()});
    return {dx, dw, db};
  }
  int64_t places = s.height * s.width, in = s.channels * places, out = s.filters * places;
  if (x_grad) {
    float* to = dx.data<float>();
    each_image(s.batch, [=](int64_t image) {
      product('t', 'n', s.channels, places, s.filters, 1, wp, s.channels, gp + image * out, places, to + image * in,
              places);
    });
  }
  if (w_grad) {
    for (int64_t image = 0; image < s.batch; ++image)
      product('n', 't', s.filters, s.channels, places, 1, gp + image * out, places, xp + image * in, places,
              dw.data<float>(), s.channels, image > 0);
    if (has_bias) {
      float* to = db.data<float>();
#pragma omp parallel for schedule(static)
      for (int64_t filter = 0; filter < s.filters; ++filter) {
        to[filter] = 0;
        for (int64_t image = 0; image < s.batch; ++image)
          to[filter] += sum_of(places, gp + image * out + filter * places);
      }
    }
  }
  return {dx, dw, db};
}

PD_BUILD_OP(vit_convolution)
    .Inputs({"X", "W", "B"})
    .Outputs({"Y"})
    .Attrs({"strides: std::vector<int>", "paddings: std::vector<int>", "dilations: std::vector<int>", "groups: int",
            "has_bias: bool", "x_grad: bool", "w_grad: bool"})
    .SetKernelFn(PD_KERNEL(convolution));
PD_BUILD_GRAD_OP(vit_convolution)
    .Inputs({"X", "W", "B", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X"), paddle::Grad("W"), paddle::Grad("B")})
    .Attrs({"strides: std::vector<int>", "paddings: std::vector<int>", "dilations: std::vector<int>", "groups: int",
            "has_bias: bool", "x_grad: bool", "w_grad: bool"})
    .SetKernelFn(PD_KERNEL(convolution_grad));
