// Maps resized bilinearly, in float32 on a CPU, as a Paddle custom operator: see ops/__init__.py. Paddle's own takes one
// thread.
#include "resize.h"

namespace {

// The gradient of spread_row, added to dx.
void gather_row(int64_t n, const float* dy, const int32_t* first, const int32_t* second, const float* share, float* dx) {
  for (int64_t i = 0; i < n; ++i) {
    float right = share[i] * dy[i];
    dx[first[i]] += dy[i] - right;
    dx[second[i]] += right;
  }
}

std::vector<int64_t> resized_shape(std::vector<int64_t> shape, int64_t height, int64_t width) {
  expect(shape.size() == 4, "a resizing");
  shape[2] = height;
  shape[3] = width;
  return shape;
}

}  // namespace

// x [B, D, h, w] -> [B, D, height, width]; `given` are h and w.
std::vector<Tensor> resize(const Tensor& x, const std::vector<int64_t>& given, int64_t height, int64_t width,
                           bool align_corners) {
  Tensor y = sized(resized_shape(x.shape(), height, width));
  const int64_t h = x.shape()[2], w = x.shape()[3], planes = x.shape()[0] * x.shape()[1];
  const Axis rows(h, height, align_corners), columns(w, width, align_corners);
  const float* from = x.data<float>();
  float* to = y.data<float>();
#pragma omp parallel
  {
    std::vector<float> scratch(w + SPREAD);
#pragma omp for schedule(static)
    for (int64_t plane = 0; plane < planes; ++plane)
      for (int64_t row = 0; row < height; ++row)
        resize_row(from + plane * h * w, w, rows, row, columns, 0, width, scratch.data(),
                   to + (plane * height + row) * width);
  }
  return {y};
}

std::vector<Tensor> resize_grad(const Tensor& dy, const std::vector<int64_t>& given, int64_t height, int64_t width,
                                bool align_corners) {
  const int64_t h = given[0], w = given[1], planes = dy.shape()[0] * dy.shape()[1];
  const Axis rows(h, height, align_corners), columns(w, width, align_corners);
  Tensor dx = sized(resized_shape(dy.shape(), h, w));
  const float* from = dy.data<float>();
  float* to = dx.data<float>();
#pragma omp parallel
  {
    std::vector<float> sums(2 * width);
    float *here = sums.data(), *below = here + width;
#pragma omp for schedule(static)
    for (int64_t plane = 0; plane < planes; ++plane) {
      std::fill(to + plane * h * w, to + (plane + 1) * h * w, 0.0f);
      std::fill(sums.begin(), sums.end(), 0.0f);
      // First the rows are added up, then each sum's columns.
      for (int64_t i = 0; i < height; ++i) {
        const float* row = from + (plane * height + i) * width;
        add_scaled(width, 1 - rows.share[i], row, here);
        if (rows.share[i] != 0) add_scaled(width, rows.share[i], row, below);
        if (i + 1 < height && rows.first[i + 1] == rows.first[i]) continue;
        float* out = to + (plane * h + rows.first[i]) * w;
        gather_row(width, here, columns.first.data(), columns.second.data(), columns.share.data(), out);
        std::fill(here, here + width, 0.0f);
        std::swap(here, below);
        if (i + 1 < height && rows.first[i + 1] == rows.first[i] + 1) continue;
        if (rows.second[i] == rows.first[i]) continue;
        out += w;
        gather_row(width, here, columns.first.data(), columns.second.data(), columns.share.data(), out);
        std::fill(here, here + width, 0.0f);
      }
    }
  }
  return {dx};
}

#define SIZES \
  {"given: std::vector<int64_t>", "height: int64_t", "width: int64_t", "align_corners: bool"}
PD_BUILD_OP(vit_resize).Inputs({"X"}).Outputs({"Y"}).Attrs(SIZES).SetKernelFn(PD_KERNEL(resize));
PD_BUILD_GRAD_OP(vit_resize)
    .Inputs({paddle::Grad("Y")})
    .Outputs({paddle::Grad("X")})
    .Attrs(SIZES)
    .SetKernelFn(PD_KERNEL(resize_grad));
