// What the operators share: products, new tensors, sums over rows.
//
// Products are oneDNN's, which Paddle ships: its own go to an MKL of 2019, which takes a slow path on CPUs that aren't
// Intel's.
#pragma once

#include <omp.h>

#include <vector>

#include "kernels.h"
#include "paddle/extension.h"

using paddle::Tensor;

extern "C" int dnnl_sgemm(char transa, char transb, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                          int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc);

// c [m, n] = alpha * a b + beta * c, row-major; 't': the matrix is stored transposed.
inline void product(char ta, char tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
             const float* b, int64_t ldb, float* c, int64_t ldc, float beta = 0) {
  if (dnnl_sgemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)) PD_THROW("dnnl_sgemm failed");
}

inline Tensor like(const Tensor& x) { return paddle::empty(x.shape(), paddle::DataType::FLOAT32, paddle::CPUPlace()); }

inline Tensor sized(const std::vector<int64_t>& shape) {
  return paddle::empty(shape, paddle::DataType::FLOAT32, paddle::CPUPlace());
}

// Paddle's own operators check shapes; beyond them lies other memory.
inline void expect(bool fits, const char* what) { PD_CHECK(fits, "compiled operators: shapes don't fit in ", what); }

// x [.., k] times w [k, n], or 't': times the transpose of w [n, k]: [.., n]. The gradient of x is the latter.
inline Tensor times(const Tensor& x, const Tensor& w, char form = 'n') {
  auto shape = x.shape();
  expect(w.shape().size() == 2 && shape.back() == w.shape()[form == 't'], "a product");
  int64_t k = shape.back(), n = w.shape()[form != 't'];
  shape.back() = n;
  Tensor y = sized(shape);
  product('n', form, x.numel() / k, n, k, 1, x.data<float>(), k, w.data<float>(), w.shape()[1], y.data<float>(), n);
  return y;
}

// x [.., k], grad [.., n] -> the gradient of w [k, n]
inline Tensor weight_grad(const Tensor& x, const Tensor& grad) {
  int64_t k = x.shape().back(), n = grad.shape().back(), rows = grad.numel() / n;
  Tensor dw = sized({k, n});
  product('t', 'n', k, n, rows, 1, x.data<float>(), k, grad.data<float>(), n, dw.data<float>(), n);
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
