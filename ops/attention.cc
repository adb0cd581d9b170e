// Attention in float32 on a CPU, as a Paddle custom operator: see ops/__init__.py.
#include "tensors.h"

// qkv [B, N, 3, H, d] -> [B, N, H * d]. Heads are read and written where they lie; their weights [N, N] are computed
// again in the gradient.

std::vector<Tensor> attention(const Tensor& qkv, float scale) {
  auto shape = qkv.shape();
  expect(shape.size() == 5 && shape[2] == 3, "attention");
  int64_t batch = shape[0], length = shape[1], heads = shape[3], d = shape[4], width = heads * d, step = 3 * width;
  Tensor out = sized({batch, length, width});
  const float* in = qkv.data<float>();
  float* to = out.data<float>();
  // Paddle's memory, and taken here: its end is Paddle's error, and not a crash, as of C++'s own or within the threads.
  Tensor scratch = sized({omp_get_max_threads(), length, length});
  float* weights = scratch.data<float>();
#pragma omp parallel
  {
    float* p = weights + omp_get_thread_num() * length * length;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < batch * heads; ++item) {
      int64_t b = item / heads, head = item % heads;
      const float* q = in + b * length * step + head * d;
      product('n', 't', length, length, d, scale, q, step, q + width, step, p, length);
      for (int64_t row = 0; row < length; ++row) softmax_row(length, p + row * length);
      float* o = to + b * length * width + head * d;
      product('n', 'n', length, d, length, 1, p, length, q + 2 * width, step, o, width);
    }
  }
  return {out};
}

std::vector<Tensor> attention_grad(const Tensor& qkv, const Tensor& dout, float scale) {
  auto shape = qkv.shape();
  int64_t batch = shape[0], length = shape[1], heads = shape[3], d = shape[4], width = heads * d, step = 3 * width;
  Tensor grad = like(qkv);
  const float *in = qkv.data<float>(), *from = dout.data<float>();
  float* to = grad.data<float>();
  Tensor scratch = sized({omp_get_max_threads(), 2, length, length});
  float* weights = scratch.data<float>();
#pragma omp parallel
  {
    float *p = weights + omp_get_thread_num() * 2 * length * length, *dp = p + length * length;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < batch * heads; ++item) {
      int64_t b = item / heads, head = item % heads;
      const float *q = in + b * length * step + head * d, *k = q + width, *v = k + width;
      const float* o = from + b * length * width + head * d;
      float* dq = to + b * length * step + head * d;
      product('n', 't', length, length, d, scale, q, step, k, step, p, length);
      product('n', 't', length, length, d, 1, o, width, v, step, dp, length);
      for (int64_t row = 0; row < length; ++row) softmax_row(length, p + row * length);
      product('t', 'n', length, d, length, 1, p, length, o, width, dq + 2 * width, step);
      for (int64_t row = 0; row < length; ++row)
        softmax_grad_row(length, p + row * length, dp + row * length);
      product('n', 'n', length, d, length, scale, dp, length, k, step, dq, step);
      product('t', 'n', length, d, length, scale, dp, length, q, step, dq + width, step);
    }
  }
  return {grad};
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
