// The cross-entropy of a class for each pixel, and the answers, from logits that are resized row by row, in float32 on a
// CPU, as Paddle custom operators: see ops/__init__.py. The resized logits of all pixels are never stored.
#include "resize.h"
#include "small.h"

namespace {

const float LOWEST = -1e30f;  // the logit of a class that there isn't

// A pixel's row of logits, between two columns of `logits` [w, n], whose n is a multiple of 16: vectors without a rest.
struct PixelRow {
  int64_t width, n;
  const float* logits;
  const int32_t *first, *second;  // columns [width]
  const float* share;             // [width]
  const int32_t* labels;          // [width]; below 0: none
  const float* factors;           // [classes]
};

// Adds up the losses of a row's pixels times their classes' factors, and in `factor_sum` these factors. Adds the
// gradients of `logits` to `grad` [w, n], unless it is null. `pixel` [n] is scratch.
CLONED double loss_row(const PixelRow& row, float* pixel, float* grad, double* factor_sum) {
  const int64_t n = row.n;
  double loss = 0;
  for (int64_t i = 0; i < row.width; ++i) {
    const int32_t label = row.labels[i];
    if (label < 0) continue;
    const float* left = row.logits + row.first[i] * n;
    const float* right = row.logits + row.second[i] * n;
    const float share = row.share[i];
    float top = LOWEST;
#pragma omp simd reduction(max : top)
    for (int64_t k = 0; k < n; ++k) {
      pixel[k] = between(left[k], right[k], share);
      top = pixel[k] > top ? pixel[k] : top;
    }
    const float own = pixel[label], factor = row.factors[label];
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < n; ++k) sum += pixel[k] = exp_(pixel[k] - top);
    loss += factor * (std::log(sum) + (top - own));
    *factor_sum += factor;
    if (!grad) continue;
    float* left_grad = grad + row.first[i] * n;
    float* right_grad = grad + row.second[i] * n;
    const float right_factor = factor * share, left_factor = factor - right_factor;
    const float left_scale = left_factor / sum, right_scale = right_factor / sum;
    left_grad[label] -= left_factor;
    right_grad[label] -= right_factor;
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) left_grad[k] += left_scale * pixel[k];
    if (share != 0)
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) right_grad[k] += right_scale * pixel[k];
  }
  return loss;
}

// The classes of a row's pixels as loss_row reads them; false if there is one that no logits are of.
template <typename T>
bool read_labels(int64_t width, const T* mask, int64_t ignored, int64_t classes, int32_t* labels) {
  bool known = true;
  for (int64_t i = 0; i < width; ++i) {
    const bool ignore = mask[i] == ignored;
    labels[i] = ignore ? -1 : (int32_t)mask[i];
    known &= ignore || (mask[i] >= 0 && (int64_t)mask[i] < classes);
  }
  return known;
}

// ``read_labels`` of row `row` of masks [B, H, width] of any type that check_operands takes.
bool labels_of(const Tensor& mask, int64_t row, int64_t ignored, int64_t classes, int32_t* labels) {
  const int64_t width = mask.shape()[2];
  if (mask.dtype() == paddle::DataType::UINT8)
    return read_labels(width, mask.data<uint8_t>() + row * width, ignored, classes, labels);
  if (mask.dtype() == paddle::DataType::INT64)
    return read_labels(width, mask.data<int64_t>() + row * width, ignored, classes, labels);
  return read_labels(width, mask.data<int32_t>() + row * width, ignored, classes, labels);
}

// What is computed of a batch. Each image's rows are computed in strips; the places of two neighbouring strips overlap by
// one row, whose gradients are kept apart and added at the end: sums don't depend on the number of threads.
struct PixelLoss {
  const float* logits;
  const Tensor& mask;
  const float* factors;  // [classes]
  int64_t ignored, images, classes, h, w, height, width, n;
  Axis rows, columns;
  float* gradient;  // [images, classes, h, w], or null
  int64_t strip, strips;
  std::vector<double> losses, factor_sums;  // [images, strips]
  // For each thread, three rows of logits [w, n], three of gradients, and one pixel. Then for each strip, the gradients
  // of the row behind its last one. Vectors would end the process where there is no memory.
  int64_t length, scratch_size;
  Tensor scratch, borders;

  PixelLoss(const Tensor& x, const Tensor& mask, const float* factors, int64_t ignored, bool align_corners,
            float* gradient)
      : logits(x.data<float>()), mask(mask), factors(factors), ignored(ignored), images(x.shape()[0]),
        classes(x.shape()[1]), h(x.shape()[2]), w(x.shape()[3]), height(mask.shape()[1]), width(mask.shape()[2]),
        n((classes + 15) / 16 * 16), rows(h, height, align_corners), columns(w, width, align_corners),
        gradient(gradient), strip((h + 15) / 16), strips((h + strip - 1) / strip),
        losses(images * strips), factor_sums(images * strips), length(w * n),
        scratch_size((gradient ? 6 : 3) * length + n), scratch(sized({omp_get_max_threads(), scratch_size})),
        borders(sized({gradient ? images * strips : 1, length})) {}

  // One row of an image's logits [classes, h, w] -> [w, n]
  void read_row(int64_t image, int64_t row, float* to) const {
    pack(w, classes, logits + (image * classes * h + row) * w, 1, h * w, to, n);
    for (int64_t i = 0; i < w; ++i) std::fill(to + i * n + classes, to + i * n + n, LOWEST);
  }

  // Returns whether all labels are classes.
  bool compute_strip(int64_t item) {
    const int64_t image = item / strips, begin = item % strips * strip, end = std::min(begin + strip, h);
    const int64_t plane = h * w;
    std::vector<int32_t> labels(width);
    float* here = scratch.data<float>() + omp_get_thread_num() * scratch_size;
    float *below = here + length, *blended = below + length, *pixel = blended + length;
    float *grad_here = pixel + n, *grad_below = grad_here + length, *grad_blended = grad_below + length;
    if (gradient) std::fill(grad_here, grad_blended, 0.0f);
    read_row(image, begin, below);
    for (int64_t row = begin; row < end; ++row) {
      std::swap(here, below);
      if (row + 1 < h) read_row(image, row + 1, below);
      const int64_t last = row + 1 < h ? rows.begin_of(row + 1) : height;
      for (int64_t i = rows.begin_of(row); i < last; ++i) {
        const float share = rows.share[i];
        const int64_t at = image * height + i;
        if (!labels_of(mask, at, ignored, classes, labels.data())) return false;
        if (share != 0) blend_row(length, here, below, share, blended);
        const bool blends_grad = gradient && share != 0;
        if (blends_grad) std::fill(grad_blended, grad_blended + length, 0.0f);
        const PixelRow pixels{width, n, share != 0 ? blended : here, columns.first.data(), columns.second.data(),
                              columns.share.data(), labels.data(), factors};
        float* grad = gradient ? (blends_grad ? grad_blended : grad_here) : nullptr;
        losses[item] += loss_row(pixels, pixel, grad, &factor_sums[item]);
        if (!blends_grad) continue;
        add_scaled(length, 1 - share, grad_blended, grad_here);
        add_scaled(length, share, grad_blended, grad_below);
      }
      if (!gradient) continue;
      pack(classes, w, grad_here, 1, n, gradient + (image * classes * h + row) * w, plane);
      std::fill(grad_here, grad_here + length, 0.0f);
      std::swap(grad_here, grad_below);
    }
    if (gradient) std::copy(grad_here, grad_here + length, borders.data<float>() + item * length);
    return true;
  }

  // Adds what the strip before contributes to a strip's first row.
  void add_border(int64_t item) {
    if (item % strips == 0) return;
    const float* from = borders.data<float>() + (item - 1) * length;
    float* to = gradient + (item / strips * classes * h + item % strips * strip) * w;
    for (int64_t k = 0; k < classes; ++k)
      for (int64_t i = 0; i < w; ++i) to[k * h * w + i] += from[i * n + k];
  }
};

const int64_t TILE = 128;  // pixels of a row whose logits stay in the cache

// Of n <= TILE pixels with logits [classes, n], whose rows are `step` apart: the classes of the largest ones, and these,
// and the sums of e^(logit - the largest).
CLONED void answers_tile(int64_t n, int64_t classes, const float* logits, int64_t step, int32_t* answers, float* tops,
                         float* sums) {
  for (int64_t i = 0; i < n; ++i) {
    tops[i] = logits[i];
    answers[i] = 0;
    sums[i] = 0;
  }
  for (int32_t k = 1; k < (int32_t)classes; ++k) {
    const float* row = logits + k * step;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const bool larger = row[i] > tops[i];
      tops[i] = larger ? row[i] : tops[i];
      answers[i] = larger ? k : answers[i];
    }
  }
  for (int64_t k = 0; k < classes; ++k) {
    const float* row = logits + k * step;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sums[i] += exp_(row[i] - tops[i]);
  }
}

void check_operands(const Tensor& x, const Tensor& mask) {
  const auto shape = x.shape(), sides = mask.shape();
  expect(shape.size() == 4 && sides.size() == 3 && shape[0] == sides[0], "a loss of pixels");
  const auto type = mask.dtype();
  expect(type == paddle::DataType::UINT8 || type == paddle::DataType::INT32 || type == paddle::DataType::INT64,
         "a loss of pixels");
}

void check_labels(bool known) { PD_CHECK(known, "compiled operators: a mask has a class that there are no logits of"); }

}  // namespace

// Logits [B, K, h, w] and a mask [B, H, W] -> the loss of each image [B]; the sum of its pixels' factors [B]; the gradient
// of its loss times this sum [B, K, h, w] where it is asked for.
std::vector<Tensor> pixel_loss(const Tensor& x, const Tensor& mask, const Tensor& weight, int64_t ignored,
                               bool align_corners, bool with_gradient) {
  check_operands(x, mask);
  const auto shape = x.shape();
  const int64_t images = shape[0], classes = shape[1];
  const bool weighted = weight.shape().size() == 1;
  expect(!weighted || weight.numel() == classes, "a loss of pixels");
  std::vector<float> factors(classes, 1.0f);
  if (weighted) std::copy(weight.data<float>(), weight.data<float>() + classes, factors.begin());
  Tensor loss = sized({images}), total = sized({images});
  // Paddle 2.6 takes an output without elements for an error.
  Tensor gradient = sized(with_gradient ? shape : std::vector<int64_t>{1});
  PixelLoss work(x, mask, factors.data(), ignored, align_corners, with_gradient ? gradient.data<float>() : nullptr);
  const int64_t items = images * work.strips;
  bool known = true;
  // In Paddle's OpenMP, each thread would make all turns of GCC's dynamic loops.
#pragma omp parallel for schedule(static) reduction(&& : known)
  for (int64_t item = 0; item < items; ++item) known = work.compute_strip(item) && known;
  check_labels(known);
  if (with_gradient) {
#pragma omp parallel for schedule(static)
    for (int64_t item = 0; item < items; ++item) work.add_border(item);
  }
  for (int64_t image = 0; image < images; ++image) {
    double sum = 0, factor_sum = 0;
    for (int64_t item = image * work.strips; item < (image + 1) * work.strips; ++item) {
      sum += work.losses[item];
      factor_sum += work.factor_sums[item];
    }
    factor_sum = std::max(factor_sum, 1e-12);
    loss.data<float>()[image] = sum / factor_sum;
    total.data<float>()[image] = factor_sum;
  }
  return {loss, total, gradient};
}

std::vector<Tensor> pixel_loss_grad(const Tensor& total, const Tensor& gradient, const Tensor& dloss) {
  expect(gradient.shape().size() == 4, "the gradient of a loss of pixels");
  Tensor dx = like(gradient);
  const int64_t images = dloss.numel(), n = gradient.numel() / images;
  const float *from = gradient.data<float>(), *grads = dloss.data<float>(), *totals = total.data<float>();
  float* to = dx.data<float>();
  in_pieces(n, images, [=](int64_t image, int64_t first, int64_t length) {
    const int64_t at = image * n + first;
    std::copy(from + at, from + at + length, to + at);
    scale_row(length, grads[image] / totals[image], to + at);
  });
  return {dx};
}

// Logits [B, K, h, w] and a mask [B, H, W] -> the loss of each image [B], and the classes of the largest logits of each
// pixel [B, H, W] int32, of equal ones the lowest.
std::vector<Tensor> pixel_answers(const Tensor& x, const Tensor& mask, int64_t ignored, bool align_corners) {
  check_operands(x, mask);
  const int64_t images = x.shape()[0], classes = x.shape()[1], h = x.shape()[2], w = x.shape()[3];
  const int64_t height = mask.shape()[1], width = mask.shape()[2], plane = h * w;
  const bool same = h == height && w == width;
  const Axis rows(h, height, align_corners), columns(w, width, align_corners);
  Tensor loss = sized({images}), answers = paddle::empty(mask.shape(), paddle::DataType::INT32, paddle::CPUPlace());
  // For each thread, a row of a map, and a tile of all maps.
  const int64_t scratch_size = w + SPREAD + (same ? 0 : classes * TILE);
  Tensor scratch = sized({omp_get_max_threads(), scratch_size});
  float* taken = scratch.data<float>();
  const float* logits = x.data<float>();
  int32_t* chosen = answers.data<int32_t>();
  std::vector<double> losses(images * height);
  std::vector<int64_t> counts(images * height);
  bool known = true;
#pragma omp parallel reduction(&& : known)
  {
    float *row_scratch = taken + omp_get_thread_num() * scratch_size, *resized = row_scratch + w + SPREAD;
    float tops[TILE], sums[TILE];
    std::vector<int32_t> labels(width);
#pragma omp for schedule(static)
    for (int64_t at = 0; at < images * height; ++at) {
      const int64_t image = at / height, row = at % height;
      known = labels_of(mask, at, ignored, classes, labels.data()) && known;
      if (!known) continue;
      for (int64_t start = 0; start < width; start += TILE) {
        const int64_t n = std::min(TILE, width - start), step = same ? plane : TILE;
        const float* tile = same ? logits + image * classes * plane + row * w + start : resized;
        for (int64_t k = 0; k < classes && !same; ++k)
          resize_row(logits + (image * classes + k) * plane, w, rows, row, columns, start, n, row_scratch,
                     resized + k * TILE);
        answers_tile(n, classes, tile, step, chosen + at * width + start, tops, sums);
        for (int64_t i = 0; i < n; ++i) {
          const int32_t label = labels[start + i];
          if (label < 0) continue;
          losses[at] += std::log(sums[i]) + (tops[i] - tile[label * step + i]);
          ++counts[at];
        }
      }
    }
  }
  check_labels(known);
  for (int64_t image = 0; image < images; ++image) {
    double sum = 0;
    int64_t count = 0;
    for (int64_t at = image * height; at < (image + 1) * height; ++at) {
      sum += losses[at];
      count += counts[at];
    }
    loss.data<float>()[image] = sum / std::max<int64_t>(count, 1);
  }
  return {loss, answers};
}

PD_BUILD_OP(vit_pixel_loss)
    .Inputs({"X", "Mask", "Weight"})
    .Outputs({"Loss", "Total", "Gradient"})
    .Attrs({"ignored: int64_t", "align_corners: bool", "with_gradient: bool"})
    .SetKernelFn(PD_KERNEL(pixel_loss));
PD_BUILD_GRAD_OP(vit_pixel_loss)
    .Inputs({"Total", "Gradient", paddle::Grad("Loss")})
    .Outputs({paddle::Grad("X")})
    .SetKernelFn(PD_KERNEL(pixel_loss_grad));

PD_BUILD_OP(vit_pixel_answers)
    .Inputs({"X", "Mask"})
    .Outputs({"Loss", "Answers"})
    .Attrs({"ignored: int64_t", "align_corners: bool"})
    .SetKernelFn(PD_KERNEL(pixel_answers));
