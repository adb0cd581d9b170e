// What the operators share: products, new tensors, sums over rows.
//
// Products are oneDNN's, which Paddle ships: its own go to an MKL of 2019, which takes a slow path on CPUs that aren't
// Intel's.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "paddle/extension.h"

using paddle::Tensor;

extern "C" int dnnl_sgemm(char transa, char transb, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                          int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc);

// c [m, n] = alpha * a b + beta * c, row-major; 't': the matrix is stored transposed.
//
// Of many rows of a transposed a, oneDNN multiplies some hundreds at a time faster than all: for 1,576 rows of 1,536 and
// 384 channels by a seventh.
inline void product(char ta, char tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
             const float* b, int64_t ldb, float* c, int64_t ldc, float beta = 0) {
  int64_t parts = ta == 't' && m * n >= 1 << 18 ? std::max<int64_t>(1, (k + 200) / 400) : 1;
  for (int64_t i = 0; i < parts; ++i, beta = 1) {
    int64_t first = k * i / parts, rows = k * (i + 1) / parts - first;
    if (dnnl_sgemm(ta, tb, m, n, rows, alpha, a + first * (ta == 't' ? lda : 1), lda, b + first * (tb == 't' ? 1 : ldb),
                   ldb, beta, c, ldc))
      PD_THROW("dnnl_sgemm failed");
  }
}

// Exported by oneDNN, if undocumented. On AVX512_BF16 twice as fast as sgemm; its matmul primitive is no faster.
extern "C" int dnnl_gemm_bf16bf16f32(char transa, char transb, int64_t m, int64_t n, int64_t k, float alpha,
                                     const bf16* a, int64_t lda, const bf16* b, int64_t ldb, float beta, float* c,
                                     int64_t ldc);

// The same of bfloat16 operands: products and sums in float32.
inline void product(char ta, char tb, int64_t m, int64_t n, int64_t k, float alpha, const bf16* a, int64_t lda,
                    const bf16* b, int64_t ldb, float* c, int64_t ldc) {
  if (dnnl_gemm_bf16bf16f32(ta, tb, m, n, k, alpha, a, lda, b, ldb, 0.0f, c, ldc)) PD_THROW("dnnl_gemm_bf16bf16f32 failed");
}

inline Tensor like(const Tensor& x) { return paddle::empty(x.shape(), paddle::DataType::FLOAT32, paddle::CPUPlace()); }

inline Tensor sized(const std::vector<int64_t>& shape) {
  return paddle::empty(shape, paddle::DataType::FLOAT32, paddle::CPUPlace());
}

// What products of either precision read and gradients keep: float32, or bfloat16 rounded from it.
template <typename T>
inline T* data(const Tensor& x) {
  return static_cast<T*>(const_cast<void*>(x.data()));
}

inline bool is_bf16(const Tensor& x) { return x.dtype() == paddle::DataType::BFLOAT16; }

inline Tensor like_bf16(const Tensor& x) {
  return paddle::empty(x.shape(), paddle::DataType::BFLOAT16, paddle::CPUPlace());
}

inline Tensor rounded(const Tensor& x) {
  Tensor y = like_bf16(x);
  int64_t n = x.numel(), blocks = (n + 4095) / 4096;
  const float* from = x.data<float>();
  bf16* to = data<bf16>(y);
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; ++block)
    round_row(std::min<int64_t>(4096, n - block * 4096), from + block * 4096, to + block * 4096);
  return y;
}

// x in the precision of `kept`
inline Tensor as(const Tensor& kept, const Tensor& x) { return is_bf16(kept) ? rounded(x) : x; }

// n floats as operands: themselves, or rounded into `to`
inline const float* operand(int64_t, const float* x, float*) { return x; }
inline const bf16* operand(int64_t n, const float* x, bf16* to) {
  round_row(n, x, to);
  return to;
}

// Paddle's own operators check shapes; beyond them lies other memory.
inline void expect(bool fits, const char* what) { PD_CHECK(fits, "compiled operators: shapes don't fit in ", what); }

// x [.., k] times w [k, n], or 't': times the transpose of w [n, k]: [.., n], in the precision of x. The gradient of x is
// the latter.
inline Tensor times(const Tensor& x, const Tensor& w, char form = 'n') {
  auto shape = x.shape();
  expect(w.shape().size() == 2 && shape.back() == w.shape()[form == 't'], "a product");
  int64_t k = shape.back(), n = w.shape()[form != 't'];
  shape.back() = n;
  Tensor y = sized(shape);
  int64_t rows = x.numel() / k, step = w.shape()[1];
  if (is_bf16(x)) {
    product('n', form, rows, n, k, 1, data<bf16>(x), k, data<bf16>(rounded(w)), step, y.data<float>(), n);
  } else {
    product('n', form, rows, n, k, 1, x.data<float>(), k, w.data<float>(), step, y.data<float>(), n);
  }
  return y;
}

// A factor, and the elements from one row to the next.
//
// Rows of a multiple of 2,048 bytes share few sets of the cache. oneDNN multiplies such a transposed factor at down to half
// its speed if the other factor has few columns. The rows are copied apart then, unless so few columns don't pay for it.
struct Factor {
  const float* data;
  int64_t step;
  Tensor copy;

  Factor(const Tensor& x, int64_t other) : data(x.data<float>()), step(x.shape().back()) {
    int64_t n = step, count = x.numel() / n;
    if (n % 512 || other < 64 || (other > 256 && std::max(n, other) > 512)) return;
    step = n + 16;
    copy = sized({count, step});
    const float* from = data;
    float* to = copy.data<float>();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < count; ++row) std::copy(from + row * n, from + (row + 1) * n, to + row * step);
    data = to;
  }
};

// x [.., k], grad [.., n], of one precision -> the gradient of w [k, n]
inline Tensor weight_grad(const Tensor& x, const Tensor& grad) {
  int64_t k = x.shape().back(), n = grad.shape().back(), rows = grad.numel() / n;
  Tensor dw = sized({k, n});
  if (is_bf16(x)) {
    product('t', 'n', k, n, rows, 1, data<bf16>(x), k, data<bf16>(grad), n, dw.data<float>(), n);
  } else {
    const Factor a(x, n), b(grad, k);
    product('t', 'n', k, n, rows, 1, a.data, a.step, b.data, b.step, dw.data<float>(), n);
  }
  return dw;
}

// Calls f(row, sums) for every row; returns what was added up in the `width` sums. Each block of rows has its own, added
// up in order: the result doesn't depend on the number of threads.
template <typename F>
std::vector<float> summed(int64_t rows, int64_t width, F f) {
  const int64_t blocks = 32;
  std::vector<float> sums(blocks * width, 0.0f);
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t row = rows * block / blocks; row < rows * (block + 1) / blocks; ++row)
      f(row, sums.data() + block * width);
  for (int64_t block = 1; block < blocks; ++block) add_bias(width, sums.data() + block * width, sums.data());
  return sums;
}

// Calls f(block, first, count) over each of `blocks` blocks of n, by pieces that stay in the cache.
template <typename F>
void in_pieces(int64_t n, int64_t blocks, F f) {
  const int64_t piece = 8192, pieces = (n + piece - 1) / piece;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < blocks * pieces; ++i) {
    int64_t first = i % pieces * piece;
    f(i / pieces, first, std::min(piece, n - first));
  }
}

inline Tensor filled(const float* values, int64_t n) {
  Tensor t = sized({n});
  std::copy(values, values + n, t.data<float>());
  return t;
}

inline Tensor column_sums(const Tensor& grad) {
  int64_t n = grad.shape().back();
  const float* g = grad.data<float>();
  auto sums = summed(grad.numel() / n, n, [=](int64_t row, float* own) { add_bias(n, g + row * n, own); });
  return filled(sums.data(), n);
}

// to [n] = the sum of rows [count, n], in their order.
inline void add_up(int64_t count, int64_t n, const float* rows, float* to) {
  const int64_t piece = 4096;
#pragma omp parallel for schedule(static)
  for (int64_t start = 0; start < n; start += piece) {
    int64_t length = std::min(piece, n - start);
    std::copy(rows + start, rows + start + length, to + start);
    for (int64_t i = 1; i < count; ++i) add_bias(length, rows + i * n + start, to + start);
  }
}

inline void add_bias_rows(const Tensor& bias, Tensor* y) {
  int64_t n = y->shape().back(), rows = y->numel() / n;
  const float* b = bias.data<float>();
  float* p = y->data<float>();
  expect(bias.numel() == n, "a bias");
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) add_bias(n, b, p + row * n);
}
