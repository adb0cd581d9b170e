// Parts of tensors along an axis, and windows of maps, in float32 on a CPU, as Paddle custom operators: see
// ops/__init__.py. Paddle's own take one thread.
#include <cstring>
#include <numeric>

#include "tensors.h"

namespace {

const size_t MOST = 3;  // parts: Paddle has no operator of any number of outputs

// Copies rows [count, n] from where they begin every `from_step` elements to where they begin every `to_step`.
void copy_rows(int64_t count, int64_t n, const float* from, int64_t from_step, float* to, int64_t to_step) {
  in_pieces(n, count, [=](int64_t row, int64_t first, int64_t length) {
    std::memcpy(to + row * to_step + first, from + row * from_step + first, length * sizeof(float));
  });
}

// The elements of an axis step, and how many rows of the axis there are.
struct Rows {
  int64_t count = 1, inner = 1;
  Rows(const std::vector<int64_t>& shape, int64_t axis) {
    expect(axis >= 0 && axis < (int64_t)shape.size(), "parts");
    for (int64_t i = 0; i < axis; ++i) count *= shape[i];
    for (int64_t i = axis + 1; i < (int64_t)shape.size(); ++i) inner *= shape[i];
  }
};

// Tensors of these sizes along an axis, side by side; of a gradient that nobody asked for, zeros.
Tensor join(const std::vector<Tensor>& some, int64_t axis, const std::vector<int64_t>& sizes) {
  auto known = std::find_if(some.begin(), some.end(), [](const Tensor& one) { return one.defined(); });
  auto shape = known->shape();
  const Rows rows(shape, axis);
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
  shape[axis] = total;
  Tensor y = sized(shape);
  float* to = y.data<float>();
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t n = sizes[i] * rows.inner;
    shape[axis] = sizes[i];
    expect(!some[i].defined() || some[i].shape() == shape, "parts");
    if (some[i].defined())
      copy_rows(rows.count, n, some[i].data<float>(), n, to, total * rows.inner);
    else
      for (int64_t row = 0; row < rows.count; ++row) std::fill_n(to + row * total * rows.inner, n, 0.0f);
    to += n;
  }
  return y;
}

}  // namespace

// Outputs that there are no sizes for have one element: Paddle 2.6 takes none for an error.
std::vector<Tensor> parts(const Tensor& x, int64_t axis, const std::vector<int64_t>& sizes) {
  auto shape = x.shape();
  const Rows rows(shape, axis);
  const int64_t total = shape[axis];
  int64_t before = 0;
  std::vector<Tensor> found;
  for (int64_t size : sizes) {
    expect(size > 0 && before + size <= total, "parts");
    shape[axis] = size;
    found.push_back(sized(shape));
    copy_rows(rows.count, size * rows.inner, x.data<float>() + before * rows.inner, total * rows.inner,
              found.back().data<float>(), size * rows.inner);
    before += size;
  }
  expect(before == total && found.size() <= MOST, "parts");
  while (found.size() < MOST) found.push_back(sized({1}));
  return found;
}

std::vector<Tensor> parts_grad(const Tensor& a, const Tensor& b, const Tensor& c, int64_t axis,
                               const std::vector<int64_t>& sizes) {
  return {join({a, b, c}, axis, sizes)};
}

namespace {

// Along the axis; a third of one axis stands for none.
std::vector<int64_t> sizes_of(const Tensor& a, const Tensor& b, const Tensor& c, int64_t axis) {
  std::vector<int64_t> sizes;
  for (const Tensor* one : {&a, &b, &c}) {
    if (one == &c && c.shape().size() == 1) break;
    expect(axis >= 0 && axis < (int64_t)one->shape().size(), "parts");
    sizes.push_back(one->shape()[axis]);
  }
  return sizes;
}

}  // namespace

std::vector<Tensor> joined(const Tensor& a, const Tensor& b, const Tensor& c, int64_t axis) {
  return {join({a, b, c}, axis, sizes_of(a, b, c, axis))};
}

std::vector<Tensor> joined_grad(const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& dy, int64_t axis) {
  std::vector<int64_t> sizes = sizes_of(a, b, c, axis);
  std::vector<Tensor> found = parts(dy, axis, sizes);
  if (sizes.size() < MOST) found[2] = like(c);
  return found;
}

namespace {

CLONED void raise_row(int64_t n, const float* x, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] >= y[i] || x[i] != x[i] ? x[i] : y[i];  // NaN stays
}

CLONED void count_equal(int64_t n, const float* x, const float* y, float* counts) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) counts[i] += x[i] == y[i] ? 1.0f : 0.0f;
}

CLONED void largest_grad_row(int64_t n, const float* x, const float* y, const float* dy, const float* counts, float* dx) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) dx[i] = x[i] == y[i] ? dy[i] / counts[i] : 0.0f;
}

}  // namespace

// x [G, n, ..] -> the largest of each n [G, ..]
std::vector<Tensor> largest(const Tensor& x) {
  auto shape = x.shape();
  expect(shape.size() > 2 && shape[1] > 0, "maxima");
  const int64_t groups = shape[0], n = shape[1];
  shape.erase(shape.begin() + 1);
  Tensor y = sized(shape);
  const int64_t m = y.numel() / groups;
  const float* xp = x.data<float>();
  float* yp = y.data<float>();
  in_pieces(m, groups, [=](int64_t group, int64_t first, int64_t length) {
    const float* from = xp + group * n * m + first;
    float* to = yp + group * m + first;
    std::copy(from, from + length, to);
    for (int64_t i = 1; i < n; ++i) raise_row(length, from + i * m, to);
  });
  return {y};
}

// Equal ones share the gradient.
std::vector<Tensor> largest_grad(const Tensor& x, const Tensor& y, const Tensor& dy) {
  const int64_t groups = x.shape()[0], n = x.shape()[1], m = y.numel() / groups;
  Tensor dx = like(x);
  const float *xp = x.data<float>(), *yp = y.data<float>(), *gp = dy.data<float>();
  float* dp = dx.data<float>();
  in_pieces(m, groups, [=](int64_t group, int64_t first, int64_t length) {
    int64_t at = group * m + first, from = group * n * m + first;
    std::vector<float> counts(length, 0.0f);
    for (int64_t i = 0; i < n; ++i) count_equal(length, xp + from + i * m, yp + at, counts.data());
    for (int64_t i = 0; i < n; ++i)
      largest_grad_row(length, xp + from + i * m, yp + at, gp + at, counts.data(), dp + from + i * m);
  });
  return {dx};
}

namespace {

// Maps [items, height, width, channels], moved up and to the left in a circle, and their windows.
struct Blocks {
  int64_t items, height, width, channels, rows, columns, up, left;
  Blocks(const std::vector<int64_t>& shape, const std::vector<int64_t>& window, const std::vector<int64_t>& shift) {
    expect(shape.size() == 4 && window.size() == 2 && shift.size() == 2, "windows");
    items = shape[0], height = shape[1], width = shape[2], channels = shape[3];
    rows = window[0], columns = window[1], up = shift[0], left = shift[1];
    expect(rows > 0 && columns > 0 && height % rows == 0 && width % columns == 0, "windows");
    expect(up >= 0 && up < height && left >= 0 && left < width, "windows");
  }
  // Calls f(where it begins in the map, where in the windows, elements) for each run of a row.
  template <typename F>
  void each_run(F f) const {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < items * height; ++i) {
      int64_t y = i % height, item = i / height, map = (item * height + (y + up) % height) * width;
      for (int64_t x = 0; x < width; x += columns) {
        int64_t window = (item * (height / rows) + y / rows) * (width / columns) + x / columns;
        int64_t at = (window * rows + y % rows) * columns, from = (x + left) % width;
        int64_t n = std::min(columns, width - from);
        f((map + from) * channels, at * channels, n * channels);
        if (n < columns) f(map * channels, (at + n) * channels, (columns - n) * channels);
      }
    }
  }
};

}  // namespace

// Maps of `shape` -> windows [items * windows, rows * columns, channels]; `back`: the other way.
std::vector<Tensor> blocks(const Tensor& x, const std::vector<int64_t>& shape, const std::vector<int64_t>& window,
                           const std::vector<int64_t>& shift, bool back) {
  const Blocks b(shape, window, shift);
  const int64_t places = b.rows * b.columns;
  expect(x.numel() == b.items * b.height * b.width * b.channels, "windows");
  Tensor y = sized(back ? shape : std::vector<int64_t>{b.items * b.height * b.width / places, places, b.channels});
  const float* from = x.data<float>();
  float* to = y.data<float>();
  if (back)
    b.each_run([=](int64_t map, int64_t at, int64_t n) { std::copy(from + at, from + at + n, to + map); });
  else
    b.each_run([=](int64_t map, int64_t at, int64_t n) { std::copy(from + map, from + map + n, to + at); });
  return {y};
}

std::vector<Tensor> blocks_grad(const Tensor& dy, const std::vector<int64_t>& shape, const std::vector<int64_t>& window,
                                const std::vector<int64_t>& shift, bool back) {
  return blocks(dy, shape, window, shift, !back);
}

#define ALONG {"axis: int64_t", "sizes: std::vector<int64_t>"}
PD_BUILD_OP(vit_parts).Inputs({"X"}).Outputs({"A", "B", "C"}).Attrs(ALONG).SetKernelFn(PD_KERNEL(parts));
PD_BUILD_GRAD_OP(vit_parts)
    .Inputs({paddle::Grad("A"), paddle::Grad("B"), paddle::Grad("C")})
    .Outputs({paddle::Grad("X")})
    .Attrs(ALONG)
    .SetKernelFn(PD_KERNEL(parts_grad));

PD_BUILD_OP(vit_joined).Inputs({"A", "B", "C"}).Outputs({"Y"}).Attrs({"axis: int64_t"}).SetKernelFn(PD_KERNEL(joined));
PD_BUILD_GRAD_OP(vit_joined)
    .Inputs({"A", "B", "C", paddle::Grad("Y")})
    .Outputs({paddle::Grad("A"), paddle::Grad("B"), paddle::Grad("C")})
    .Attrs({"axis: int64_t"})
    .SetKernelFn(PD_KERNEL(joined_grad));

PD_BUILD_OP(vit_largest).Inputs({"X"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(largest));
PD_BUILD_GRAD_OP(vit_largest)
    .Inputs({"X", "Y", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X")})
    .SetKernelFn(PD_KERNEL(largest_grad));

#define WINDOWS \
  {"shape: std::vector<int64_t>", "window: std::vector<int64_t>", "shift: std::vector<int64_t>", "back: bool"}
PD_BUILD_OP(vit_blocks).Inputs({"X"}).Outputs({"Y"}).Attrs(WINDOWS).SetKernelFn(PD_KERNEL(blocks));
PD_BUILD_GRAD_OP(vit_blocks)
    .Inputs({paddle::Grad("Y")})
    .Outputs({paddle::Grad("X")})
    .Attrs(WINDOWS)
    .SetKernelFn(PD_KERNEL(blocks_grad));
