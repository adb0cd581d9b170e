// Means of neighbours, and the order of axes, in float32 on a CPU, as Paddle custom operators: see ops/__init__.py.
#include <algorithm>
#include <map>
#include <mutex>

#include "onednn.h"

namespace {

// sums[x] = padded[x] + .. + padded[x + side - 1]
CLONED void window_sums(int64_t n, int64_t side, const float* padded, float* sums) {
  for (int64_t x = 0; x < n; ++x) sums[x] = padded[x];
  for (int64_t i = 1; i < side; ++i)
#pragma omp simd
    for (int64_t x = 0; x < n; ++x) sums[x] += padded[x + i];
}

// y = x * factors * factor
CLONED void times_row(int64_t n, const float* x, const float* factors, float factor, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * factors[i] * factor;
}

// One over how many of the 2 reach + 1 places around each are inside.
std::vector<float> shares(int64_t size, int64_t reach) {
  std::vector<float> found(size);
  for (int64_t i = 0; i < size; ++i)
    found[i] = 1.0f / (std::min(i, reach) + std::min(size - 1 - i, reach) + 1);
  return found;
}

// Of each plane [height, width]: the sums over the neighbours of each place, divided by how many those are. The gradient
// divides first, then sums.
Tensor means(const Tensor& x, int64_t reach, bool gradient) {
  auto shape = x.shape();
  expect(shape.size() == 4 && reach > 0, "means of neighbours");
  int64_t height = shape[2], width = shape[3], plane = height * width, wide = width + 2 * reach;
  std::vector<float> by_row = shares(height, reach), by_column = shares(width, reach);
  Tensor y = like(x), scratch = sized({omp_get_max_threads(), wide + plane});
  const float *xp = x.data<float>(), *columns = by_column.data(), *rows = by_row.data();
  float *yp = y.data<float>(), *taken = scratch.data<float>();
#pragma omp parallel
  {
    float *padded = taken + omp_get_thread_num() * (wide + plane), *sums = padded + wide;
    std::fill(padded, padded + wide, 0.0f);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < shape[0] * shape[1]; ++i) {
      const float* from = xp + i * plane;
      for (int64_t row = 0; row < height; ++row) {
        if (gradient)
          times_row(width, from + row * width, columns, rows[row], padded + reach);
        else
          std::copy(from + row * width, from + row * width + width, padded + reach);
        window_sums(width, 2 * reach + 1, padded, sums + row * width);
      }
      for (int64_t row = 0; row < height; ++row) {
        float* to = yp + i * plane + row * width;
        std::fill(to, to + width, 0.0f);
        for (int64_t near = std::max<int64_t>(row - reach, 0); near <= std::min(row + reach, height - 1); ++near)
          add_bias(width, sums + near * width, to);
        if (!gradient) times_row(width, to, columns, rows[row], to);
      }
    }
  }
  return y;
}

// x as [batch, m, n] -> [batch, n, m], in `shape`
Tensor swapped(const Tensor& x, int64_t m, int64_t n, const std::vector<int64_t>& shape) {
  using namespace onednn;
  static std::map<std::vector<int64_t>, std::pair<Primitive, std::pair<Desc, Desc>>> kept;
  static std::mutex guard;
  expect(m > 0 && n > 0 && x.numel() % (m * n) == 0, "a swap of axes");
  int64_t batch = x.numel() / (m * n);
  Tensor y = sized(shape);
  expect(y.numel() == x.numel(), "a swap of axes");
  std::pair<Primitive, std::pair<Desc, Desc>> found;
  {
    std::lock_guard<std::mutex> lock(guard);
    if (kept.size() > 1024) kept.clear();
    auto& entry = kept[{batch, m, n}];
    if (!entry.first) {
      Desc from = dense({batch, m, n}), to = strided({batch, m, n}, {m * n, 1, m});
      entry = {reorder(from, to), {from, to}};
    }
    found = entry;
  }
  execute(found.first, {kSrc, kDst}, {found.second.first, found.second.second},
          {const_cast<float*>(x.data<float>()), y.data<float>()});
  return y;
}

}  // namespace

std::vector<Tensor> neighbour_means(const Tensor& x, int reach) { return {means(x, reach, false)}; }
std::vector<Tensor> neighbour_means_grad(const Tensor& dy, int reach) { return {means(dy, reach, true)}; }

std::vector<Tensor> swap(const Tensor& x, int64_t m, int64_t n, const std::vector<int64_t>& given,
                         const std::vector<int64_t>& shape) {
  return {swapped(x, m, n, shape)};
}
std::vector<Tensor> swap_grad(const Tensor& dy, int64_t m, int64_t n, const std::vector<int64_t>& given,
                              const std::vector<int64_t>& shape) {
  return {swapped(dy, n, m, given)};
}

// x [items, height, width, channels] of bytes -> [items, channels, height, width]: what table [channels or 1, 256] has of
// each.
std::vector<Tensor> looked_up(const Tensor& x, const Tensor& table) {
  auto shape = x.shape(), sides = table.shape();
  expect(shape.size() == 4 && x.dtype() == paddle::DataType::UINT8, "a look-up");
  expect(sides.size() == 2 && (sides[0] == shape[3] || sides[0] == 1) && sides[1] == 256, "a look-up");
  const int64_t height = shape[1], width = shape[2], channels = shape[3], step = sides[0] == 1 ? 0 : 256;
  Tensor y = sized({shape[0], channels, height, width});
  const uint8_t* from = x.data<uint8_t>();
  const float* values = table.data<float>();
  float* to = y.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < shape[0] * height; ++row)
    for (int64_t c = 0; c < channels; ++c) {
      const uint8_t* pixels = from + row * width * channels + c;
      float* line = to + ((row / height * channels + c) * height + row % height) * width;
      for (int64_t i = 0; i < width; ++i) line[i] = values[c * step + pixels[i * channels]];
    }
  return {y};
}

PD_BUILD_OP(vit_looked_up).Inputs({"X", "Table"}).Outputs({"Y"}).SetKernelFn(PD_KERNEL(looked_up));

PD_BUILD_OP(vit_neighbour_means)
    .Inputs({"X"})
    .Outputs({"Y"})
    .Attrs({"reach: int"})
    .SetKernelFn(PD_KERNEL(neighbour_means));
PD_BUILD_GRAD_OP(vit_neighbour_means)
    .Inputs({paddle::Grad("Y")})
    .Outputs({paddle::Grad("X")})
    .Attrs({"reach: int"})
    .SetKernelFn(PD_KERNEL(neighbour_means_grad));

PD_BUILD_OP(vit_swap)
    .Inputs({"X"})
    .Outputs({"Y"})
    .Attrs({"m: int64_t", "n: int64_t", "given: std::vector<int64_t>", "shape: std::vector<int64_t>"})
    .SetKernelFn(PD_KERNEL(swap));
PD_BUILD_GRAD_OP(vit_swap)
    .Inputs({paddle::Grad("Y")})
    .Outputs({paddle::Grad("X")})
    .Attrs({"m: int64_t", "n: int64_t", "given: std::vector<int64_t>", "shape: std::vector<int64_t>"})
    .SetKernelFn(PD_KERNEL(swap_grad));
