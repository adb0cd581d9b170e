// Attention in float32 on a CPU, as a Paddle custom operator: see ops/__init__.py.
#include "tensors.h"

// qkv [B, N, 3, H, d] -> [B, N, H * d]. Heads are read and written where they lie; their weights [N, N] are computed
// again in the gradient.

// T: float, or bf16 in which everything that is multiplied is rounded.
template <typename T>
Tensor attended(const Tensor& qkv, float scale) {
  auto shape = qkv.shape();
  expect(shape.size() == 5 && shape[2] == 3, "attention");
  int64_t batch = shape[0], length = shape[1], heads = shape[3], d = shape[4], width = heads * d, step = 3 * width;
  Tensor out = sized({batch, length, width});
  const T* in = data<T>(qkv);
  float* to = out.data<float>();
  // Paddle's memory, and taken here: its end is Paddle's error, and not a crash, as of C++'s own or within the threads.
  int64_t square = length * length;
  const int64_t squares = sizeof(T) < sizeof(float) ? 2 : 1;
  Tensor scratch = sized({omp_get_max_threads(), squares, square});
  float* weights = scratch.data<float>();
#pragma omp parallel
  {
    float* p = weights + omp_get_thread_num() * squares * square;
    T* half = reinterpret_cast<T*>(p + square);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < batch * heads; ++item) {
      int64_t b = item / heads, head = item % heads;
      const T* q = in + b * length * step + head * d;
      product('n', 't', length, length, d, scale, q, step, q + width, step, p, length);
      for (int64_t row = 0; row < length; ++row) softmax_row(length, p + row * length);
      float* o = to + b * length * width + head * d;
      product('n', 'n', length, d, length, 1, operand(square, p, half), length, q + 2 * width, step, o, width);
    }
  }
  return out;
}

std::vector<Tensor> attention(const Tensor& qkv, float scale) { return {attended<float>(qkv, scale)}; }

std::vector<Tensor> attention_bf16(const Tensor& qkv, float scale) {
  Tensor kept = rounded(qkv);
  return {attended<bf16>(kept, scale), kept};
}

template <typename T>
Tensor attended_grad(const Tensor& qkv, const Tensor& dout, float scale) {
  auto shape = qkv.shape();
  int64_t batch = shape[0], length = shape[1], heads = shape[3], d = shape[4], width = heads * d, step = 3 * width;
  Tensor grad = like(qkv);
  const T *in = data<T>(qkv), *from = data<T>(dout);
  float* to = grad.data<float>();
  int64_t square = length * length;
  const int64_t squares = sizeof(T) < sizeof(float) ? 3 : 2;
  Tensor scratch = sized({omp_get_max_threads(), squares, square});
  float* weights = scratch.data<float>();
#pragma omp parallel
  {
    float *p = weights + omp_get_thread_num() * squares * square, *dp = p + square;
    T* half = reinterpret_cast<T*>(dp + square);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < batch * heads; ++item) {
      int64_t b = item / heads, head = item % heads;
      const T *q = in + b * length * step + head * d, *k = q + width, *v = k + width;
      const T* o = from + b * length * width + head * d;
      float* dq = to + b * length * step + head * d;
      product('n', 't', length, length, d, scale, q, step, k, step, p, length);
      product('n', 't', length, length, d, 1, o, width, v, step, dp, length);
      for (int64_t row = 0; row < length; ++row) softmax_row(length, p + row * length);
      product('t', 'n', length, d, length, 1, operand(square, p, half), length, o, width, dq + 2 * width, step);
      for (int64_t row = 0; row < length; ++row)
        softmax_grad_row(length, p + row * length, dp + row * length);
      const T* ds = operand(square, dp, half);
      product('n', 'n', length, d, length, scale, ds, length, k, step, dq, step);
      product('t', 'n', length, d, length, scale, ds, length, q, step, dq + width, step);
    }
  }
  return grad;
}

std::vector<Tensor> attention_grad(const Tensor& qkv, const Tensor& dout, float scale) {
  if (is_bf16(qkv)) return {attended_grad<bf16>(qkv, rounded(dout), scale)};
  return {attended_grad<float>(qkv, dout, scale)};
}

PD_BUILD_OP(vit_attention)
    .Inputs({"Qkv"})
    .Outputs({"Out"})
    .Attrs({"scale: float"})
    .SetKernelFn(PD_KERNEL(attention));
PD_BUILD_GRAD_OP(vit_attention)
    .Inputs({"Qkv", paddle::Grad("Out")})
    .Outputs({paddle::Grad("Qkv")})
    .Attrs({"scale: float"})
    .SetKernelFn(PD_KERNEL(attention_grad));
PD_BUILD_OP(vit_attention_bf16)
    .Inputs({"Qkv"})
    .Outputs({"Out", "Kept"})
    .Attrs({"scale: float"})
    .SetKernelFn(PD_KERNEL(attention_bf16));
PD_BUILD_GRAD_OP(vit_attention_bf16)
    .Inputs({"Kept", paddle::Grad("Out")})
    .Outputs({paddle::Grad("Qkv")})
    .Attrs({"scale: float"})
    .SetKernelFn(PD_KERNEL(attention_grad));
