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
  bool depthwise() const {
    return groups == channels && filters == channels && dilations == std::vector<int>{1, 1};
  }
  std::vector<int64_t> key(int pass, bool bias) const {
    std::vector<int64_t> key = {pass, bias, batch, channels, height, width, filters, rows, columns, groups};
    for (auto* more : {&strides, &paddings, &dilations}) key.insert(key.end(), more->begin(), more->end());
    return key;
  }
};

onednn::Pass made(const Shape& s, int pass, bool bias) {
  using namespace onednn;
  Attributes attr;
  Dims strides(s.strides.begin(), s.strides.end()), pads(s.paddings.begin(), s.paddings.end());
  Dims gaps = {s.dilations[0] - 1, s.dilations[1] - 1};
  dnnl_primitive_desc* raw = nullptr;
  check(dnnl_convolution_forward_primitive_desc_create(
            &raw, engine(), kForwardTraining, kDirect, any(s.src()).get(), any(s.weights()).get(),
            bias ? any({s.filters}).get() : nullptr, any(s.dst()).get(), strides.data(), gaps.data(), pads.data(),
            pads.data(), attr.get()),
        "a convolution");
  PrimitiveDesc forward(raw, dnnl_primitive_desc_destroy);
  if (pass == kForward && bias)
    return Pass(forward, {kSrc, kWeights, kBias, kDst}, {s.src(), s.weights(), {s.filters}, s.dst()});
  if (pass == kForward) return Pass(forward, {kSrc, kWeights, kDst}, {s.src(), s.weights(), s.dst()});
  if (pass == kInputGrad) {
    check(dnnl_convolution_backward_data_primitive_desc_create(
              &raw, engine(), kDirect, any(s.src()).get(), any(s.weights()).get(), any(s.dst()).get(), strides.data(),
              gaps.data(), pads.data(), pads.data(), forward.get(), attr.get()),
          "a convolution's gradient");
    PrimitiveDesc pd(raw, dnnl_primitive_desc_destroy);
    return Pass(pd, {kDiffDst, kWeights, kDiffSrc}, {s.dst(), s.weights(), s.src()});
  }
  check(dnnl_convolution_backward_weights_primitive_desc_create(
            &raw, engine(), kDirect, any(s.src()).get(), any(s.weights()).get(), nullptr, any(s.dst()).get(),
            strides.data(), gaps.data(), pads.data(), pads.data(), forward.get(), attr.get()),
        "a convolution's gradient");
  PrimitiveDesc pd(raw, dnnl_primitive_desc_destroy);
  return Pass(pd, {kSrc, kDiffDst, kDiffWeights}, {s.src(), s.dst(), s.weights()});
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

// The bias's gradient.
void channel_sums(const Shape& s, const float* dy, float* db) {
  int64_t places = s.out(0) * s.out(1);
#pragma omp parallel for schedule(static)
  for (int64_t filter = 0; filter < s.filters; ++filter) {
    db[filter] = 0;
    for (int64_t image = 0; image < s.batch; ++image)
      db[filter] += sum_of(places, dy + (image * s.filters + filter) * places);
  }
}

// The gradient of a depthwise convolution's weights. The gradient of y is spread to the stride: what is left has none.
void depthwise_grad(const Shape& s, const float* x, const float* dy, float* dw) {
  int64_t side_y = s.rows, side_x = s.columns, height = s.height + 2 * s.paddings[0] - side_y + 1,
          width = s.width + 2 * s.paddings[1] - side_x + 1, rows = s.height + 2 * s.paddings[0],
          step = row_step(s.width + 2 * s.paddings[1], side_x), plane = s.height * s.width, out = s.out(0) * s.out(1);
  Tensor scratch = sized({omp_get_max_threads(), 2, rows, step});
  float* taken = scratch.data<float>();
#pragma omp parallel
  {
    float *grad = taken + omp_get_thread_num() * 2 * rows * step, *padded = grad + rows * step;
#pragma omp for schedule(static)
    for (int64_t c = 0; c < s.channels; ++c) {
      float* sums = dw + c * side_y * side_x;
      std::memset(sums, 0, side_y * side_x * sizeof(float));
      for (int64_t at = c; at < s.batch * s.channels; at += s.channels) {
        spread(s.out(0), s.out(1), dy + at * out, s.strides[0], s.strides[1], 0, 0, height, step, grad);
        spread(s.height, s.width, x + at * plane, 1, 1, s.paddings[0], s.paddings[1], rows, step, padded);
        depthwise_weight_grad(height, width, side_y, side_x, padded, grad, step, sums);
      }
    }
  }
}

}  // namespace

std::vector<Tensor> convolution(const Tensor& x, const Tensor& w, const Tensor& bias, const std::vector<int>& strides,
                                const std::vector<int>& paddings, const std::vector<int>& dilations, int groups,
                                bool has_bias, bool, bool) {
  Shape s(x.shape(), w.shape(), strides, paddings, dilations, groups);
  expect(!has_bias || bias.numel() == s.filters, "a bias");
  Tensor y = sized(s.dst());
  if (!s.pointwise()) {
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
  if (w_grad && has_bias) channel_sums(s, gp, db.data<float>());
  if (!s.pointwise()) {
    if (x_grad) (*pass_of(s, kInputGrad, false))({gp, wp, dx.data<float>()});
    if (w_grad && s.depthwise())
      depthwise_grad(s, xp, gp, dw.data<float>());
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
  if (w_grad)
    for (int64_t image = 0; image < s.batch; ++image)
      product('n', 't', s.filters, s.channels, places, 1, gp + image * out, places, xp + image * in, places,
              dw.data<float>(), s.channels, image > 0);
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
