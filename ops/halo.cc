// Windows of blocks with a halo, and the relative positions in them, in float32 on a CPU, as Paddle custom operators:
// see ops/__init__.py.
#include "tensors.h"

namespace {

struct Windows {
  int64_t items, channels, height, width, size, halo, side;  // side of a window: size + 2 halo

  Windows(const std::vector<int64_t>& shape, int64_t size_, int64_t halo_)
      : items(shape[0]), channels(shape[1]), height(shape[2]), width(shape[3]), size(size_), halo(halo_),
        side(size_ + 2 * halo_) {}

  // Calls f(index in the map's plane, index in the windows) for each run of an item's places, and how many it has.
  template <typename F>
  void each_run(F f) const {
    for (int64_t i = 0; i < height / size; ++i)
      for (int64_t j = 0; j < width / size; ++j)
        for (int64_t row = 0; row < side; ++row) {
          int64_t y = i * size - halo + row, left = j * size - halo;
          int64_t first = std::max<int64_t>(left, 0), last = std::min(left + side, width);
          if (y < 0 || y >= height) continue;
          f(y * width + first, (((i * (width / size) + j) * side + row) * side + first - left) * channels, last - first);
        }
  }
};

// Where the products of a block's queries with the vectors of all distances of rows, then of columns, lie.
struct Distances {
  int64_t side, window, count;  // queries along a block's side, keys along a window's; distances 2 window - 1

  // Calls f(query, where its rows' products begin, where its columns' do): those of key 0.
  template <typename F>
  void each_query(F f) const {
    for (int64_t i = 0; i < side; ++i)
      for (int64_t j = 0; j < side; ++j) {
        int64_t query = i * side + j, at = query * 2 * count + window - 1;
        f(query, at - i, at + count - j);
      }
  }
};

}  // namespace

std::vector<Tensor> windows(const Tensor& x, int64_t size, int64_t halo, const std::vector<int64_t>& given) {
  auto shape = x.shape();
  expect(shape.size() == 4 && size > 0 && halo >= 0 && shape[2] % size == 0 && shape[3] % size == 0, "windows");
  const Windows w(shape, size, halo);
  int64_t plane = w.height * w.width, blocks = plane / (size * size), places = w.side * w.side;
  Tensor y = sized({w.items, blocks, places, w.channels});
  const float* from = x.data<float>();
  float* to = y.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t item = 0; item < w.items; ++item) {
    const float* xp = from + item * w.channels * plane;
    float* yp = to + item * blocks * places * w.channels;
    std::fill(yp, yp + blocks * places * w.channels, 0.0f);
    w.each_run([=](int64_t at, int64_t place, int64_t n) {
      for (int64_t c = 0; c < w.channels; ++c)
        for (int64_t i = 0; i < n; ++i) yp[place + i * w.channels + c] = xp[c * plane + at + i];
    });
  }
  return {y};
}

std::vector<Tensor> windows_grad(const Tensor& dy, int64_t size, int64_t halo, const std::vector<int64_t>& given) {
  const Windows w(given, size, halo);
  int64_t plane = w.height * w.width, all = dy.numel() / w.items;
  Tensor dx = sized(given);
  const float* from = dy.data<float>();
  float* to = dx.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t item = 0; item < w.items; ++item) {
    const float* yp = from + item * all;
    float* xp = to + item * w.channels * plane;
    std::fill(xp, xp + w.channels * plane, 0.0f);
    w.each_run([=](int64_t at, int64_t place, int64_t n) {
      for (int64_t c = 0; c < w.channels; ++c)
        for (int64_t i = 0; i < n; ++i) xp[c * plane + at + i] += yp[place + i * w.channels + c];
    });
  }
  return {dx};
}

std::vector<Tensor> distances(const Tensor& products, int64_t side, int64_t window) {
  const Distances d{side, window, 2 * window - 1};
  int64_t queries = side * side, keys = window * window, items = products.numel() / (queries * 2 * d.count);
  expect(side <= window && items * queries * 2 * d.count == products.numel(), "relative positions");
  Tensor y = sized({items, queries, keys});
  const float* from = products.data<float>();
  float* to = y.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t item = 0; item < items; ++item) {
    const float* p = from + item * queries * 2 * d.count;
    float* own = to + item * queries * keys;
    d.each_query([=](int64_t query, int64_t rows, int64_t columns) {
      for (int64_t r = 0; r < window; ++r) {
        std::copy(p + columns, p + columns + window, own + query * keys + r * window);
        add_value(window, p[rows + r], own + query * keys + r * window);
      }
    });
  }
  return {y};
}

std::vector<Tensor> distances_grad(const Tensor& dy, int64_t side, int64_t window) {
  const Distances d{side, window, 2 * window - 1};
  int64_t queries = side * side, keys = window * window, items = dy.numel() / (queries * keys), width = 2 * d.count;
  Tensor dproducts = sized({items, queries, width});
  const float* from = dy.data<float>();
  float* to = dproducts.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t item = 0; item < items; ++item) {
    const float* grad = from + item * queries * keys;
    float* p = to + item * queries * width;
    std::fill(p, p + queries * width, 0.0f);
    d.each_query([=](int64_t query, int64_t rows, int64_t columns) {
      for (int64_t r = 0; r < window; ++r) {
        p[rows + r] = sum_of(window, grad + query * keys + r * window);
        add_bias(window, grad + query * keys + r * window, p + columns);
      }
    });
  }
  return {dproducts};
}

PD_BUILD_OP(vit_windows)
    .Inputs({"X"})
    .Outputs({"Y"})
    .Attrs({"size: int64_t", "halo: int64_t", "given: std::vector<int64_t>"})
    .SetKernelFn(PD_KERNEL(windows));
PD_BUILD_GRAD_OP(vit_windows)
    .Inputs({paddle::Grad("Y")})
    .Outputs({paddle::Grad("X")})
    .Attrs({"size: int64_t", "halo: int64_t", "given: std::vector<int64_t>"})
    .SetKernelFn(PD_KERNEL(windows_grad));

PD_BUILD_OP(vit_distances)
    .Inputs({"Products"})
    .Outputs({"Y"})
    .Attrs({"side: int64_t", "window: int64_t"})
    .SetKernelFn(PD_KERNEL(distances));
PD_BUILD_GRAD_OP(vit_distances)
    .Inputs({paddle::Grad("Y")})
    .Outputs({paddle::Grad("Products")})
    .Attrs({"side: int64_t", "window: int64_t"})
    .SetKernelFn(PD_KERNEL(distances_grad));
