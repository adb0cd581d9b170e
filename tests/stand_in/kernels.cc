// The stand-in's kernels, as few as do. For any other operator Paddle copies the inputs to the CPU, runs the kernel there
// and copies the results back. These can't go that way:
// - full, fill, contiguous, strided_copy, add: Paddle calls them on the device's memory from within its own code;
// - split, embedding_grad: Paddle would leave the results on the CPU;
// - adam, adamw, lamb: the powers of beta stay on the CPU, where they began, as the kernels for GPUs leave them.

#include "memory.h"
#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/common/int_array.h"
#include "paddle/phi/common/scalar.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/kernel_registry.h"
#include "paddle/phi/kernels/adam_kernel.h"
#include "paddle/phi/kernels/adamw_kernel.h"
#include "paddle/phi/kernels/contiguous_kernel.h"
#include "paddle/phi/kernels/elementwise_add_kernel.h"
#include "paddle/phi/kernels/embedding_grad_kernel.h"
#include "paddle/phi/kernels/lamb_kernel.h"
#include "paddle/phi/kernels/split_kernel.h"
#include "paddle/phi/kernels/strided_copy_kernel.h"

namespace stand_in {

using phi::DenseTensor;
using Maybe = paddle::optional<DenseTensor>;
using phi::Scalar;

template <typename T, typename Context>
void fill(const Context& context, const DenseTensor&, const Scalar& value, DenseTensor* out) {
  auto* data = reinterpret_cast<T*>(opened(context.template Alloc<T>(out), out->numel() * sizeof(T)));
  if (data) std::fill_n(data, out->numel(), value.to<T>());
}

template <typename T, typename Context>
void full(const Context& context, const phi::IntArray& shape, const Scalar& value, phi::DataType,
          DenseTensor* out) {
  out->Resize(common::make_ddim(shape.GetData()));
  fill<T>(context, *out, value, out);
}

// A tensor of the CPU over the same bytes: what a CPU's kernel reads and writes.
inline DenseTensor on_host(const DenseTensor& tensor) {
  DenseTensor host(tensor);
  if (!tensor.initialized()) return host;
  const auto& holder = tensor.Holder();
  if (char* bytes = opened(holder->ptr(), holder->size()))
    host.ResetHolder(std::make_shared<phi::Allocation>(bytes, holder->size(), phi::CPUPlace()));
  return host;
}

inline Maybe on_host(const Maybe& tensor) {
  if (tensor) return on_host(*tensor);
  return paddle::none;
}

// An output is an input, too, and stays where it is.
struct Output {
  DenseTensor host;
  bool given;
  operator DenseTensor*() { return given ? &host : nullptr; }
};

inline Output on_host(DenseTensor* const& tensor) {
  return {tensor ? on_host(static_cast<const DenseTensor&>(*tensor)) : DenseTensor(), tensor != nullptr};
}

inline const phi::CPUContext& cpu() {
  return *static_cast<const phi::CPUContext*>(phi::DeviceContextPool::Instance().Get(phi::CPUPlace()));
}

template <typename T, typename Context>
void contiguous(const Context& context, const DenseTensor& input, DenseTensor* out) {
  const phi::DenseTensorMeta plain(input.dtype(), input.dims(), input.layout());
  out->set_meta(plain);
  context.template Alloc<T>(out);
  phi::ContiguousKernel<T, phi::CPUContext>(cpu(), on_host(input), on_host(out));
}

template <typename T, typename Context>
void strided_copy(const Context&, const DenseTensor& input, const std::vector<int64_t>& dims,
                  const std::vector<int64_t>& strides, int64_t offset, DenseTensor* out) {
  Output host = on_host(out);
  phi::StridedCopyKernel<T, phi::CPUContext>(cpu(), on_host(input), dims, strides, offset, host);
  out->set_meta(host.host.meta());
}

template <typename T, typename Context>
void add(const Context& context, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {
  context.template Alloc<T>(out);
  phi::AddKernel<T, phi::CPUContext>(cpu(), on_host(x), on_host(y), on_host(out));
}

template <typename T, typename Context>
void split(const Context& context, const DenseTensor& input, const phi::IntArray& sections, const Scalar& axis,
           std::vector<DenseTensor*> outs) {
  std::vector<DenseTensor> hosts;
  std::vector<DenseTensor*> pointers;
  for (DenseTensor* out : outs) {
    context.template Alloc<T>(out);
    hosts.push_back(on_host(static_cast<const DenseTensor&>(*out)));
  }
  for (DenseTensor& host : hosts) pointers.push_back(&host);
  phi::SplitKernel<T, phi::CPUContext>(cpu(), on_host(input), sections, axis, pointers);
}

template <typename T, typename Context>
void embedding_grad(const Context& context, const DenseTensor& input, const DenseTensor& weight,
                    const DenseTensor& out_grad, int64_t padding, DenseTensor* weight_grad) {
  context.template Alloc<T>(weight_grad);
  phi::EmbeddingGradKernel<T, phi::CPUContext>(cpu(), on_host(input), on_host(weight), on_host(out_grad), padding,
                                               on_host(weight_grad));
}

template <typename T, typename Context>
void adamw(const Context&, const DenseTensor& param, const DenseTensor& grad, const DenseTensor& rate,
           const DenseTensor& moment1, const DenseTensor& moment2, const Maybe& moment2_max,
           const DenseTensor& beta1_pow, const DenseTensor& beta2_pow, const Maybe& master, const Maybe& skip,
           const Scalar& beta1, const Scalar& beta2, const Scalar& epsilon, float rate_ratio, float coefficient,
           bool with_decay, bool lazy, int64_t min_rows, bool multi_precision, bool use_global_beta_pow, bool amsgrad,
           DenseTensor* param_out, DenseTensor* moment1_out, DenseTensor* moment2_out, DenseTensor* moment2_max_out,
           DenseTensor* beta1_pow_out, DenseTensor* beta2_pow_out, DenseTensor* master_out) {
  phi::AdamwDenseKernel<T, phi::CPUContext>(
      cpu(), on_host(param), on_host(grad), on_host(rate), on_host(moment1), on_host(moment2), on_host(moment2_max),
      on_host(beta1_pow), on_host(beta2_pow), on_host(master), on_host(skip), beta1, beta2, epsilon, rate_ratio,
      coefficient, with_decay, lazy, min_rows, multi_precision, use_global_beta_pow, amsgrad, on_host(param_out),
      on_host(moment1_out), on_host(moment2_out), on_host(moment2_max_out), on_host(beta1_pow_out),
      on_host(beta2_pow_out), on_host(master_out));
}

template <typename T, typename Context>
void adam(const Context&, const DenseTensor& param, const DenseTensor& grad, const DenseTensor& rate,
          const DenseTensor& moment1, const DenseTensor& moment2, const Maybe& moment2_max,
          const DenseTensor& beta1_pow, const DenseTensor& beta2_pow, const Maybe& master, const Maybe& skip,
          const Scalar& beta1, const Scalar& beta2, const Scalar& epsilon, bool lazy, int64_t min_rows,
          bool multi_precision, bool use_global_beta_pow, bool amsgrad, DenseTensor* param_out,
          DenseTensor* moment1_out, DenseTensor* moment2_out, DenseTensor* moment2_max_out, DenseTensor* beta1_pow_out,
          DenseTensor* beta2_pow_out, DenseTensor* master_out) {
  phi::AdamDenseKernel<T, phi::CPUContext>(
      cpu(), on_host(param), on_host(grad), on_host(rate), on_host(moment1), on_host(moment2), on_host(moment2_max),
      on_host(beta1_pow), on_host(beta2_pow), on_host(master), on_host(skip), beta1, beta2, epsilon, lazy, min_rows,
      multi_precision, use_global_beta_pow, amsgrad, on_host(param_out), on_host(moment1_out), on_host(moment2_out),
      on_host(moment2_max_out), on_host(beta1_pow_out), on_host(beta2_pow_out), on_host(master_out));
}

template <typename T, typename Context>
void lamb(const Context&, const DenseTensor& param, const DenseTensor& grad, const DenseTensor& rate,
          const DenseTensor& moment1, const DenseTensor& moment2, const DenseTensor& beta1_pow,
          const DenseTensor& beta2_pow, const Maybe& master, const Maybe& skip, float weight_decay, float beta1,
          float beta2, float epsilon, bool always_adapt, bool multi_precision, DenseTensor* param_out,
          DenseTensor* moment1_out, DenseTensor* moment2_out, DenseTensor* beta1_pow_out, DenseTensor* beta2_pow_out,
          DenseTensor* master_out) {
  phi::LambKernel<T, phi::CPUContext>(
      cpu(), on_host(param), on_host(grad), on_host(rate), on_host(moment1), on_host(moment2), on_host(beta1_pow),
      on_host(beta2_pow), on_host(master), on_host(skip), weight_decay, beta1, beta2, epsilon, always_adapt,
      multi_precision, on_host(param_out), on_host(moment1_out), on_host(moment2_out), on_host(beta1_pow_out),
      on_host(beta2_pow_out), on_host(master_out));
}

// Inputs and outputs, by number, that Paddle leaves where they are: beta's powers, and `skip`.
inline void leave(phi::Kernel* kernel, std::initializer_list<int> inputs, std::initializer_list<int> outputs) {
  for (int input : inputs) kernel->InputAt(input).SetBackend(phi::Backend::ALL_BACKEND);
  for (int output : outputs) kernel->OutputAt(output).SetBackend(phi::Backend::UNDEFINED);
}

}  // namespace stand_in

PD_REGISTER_PLUGIN_KERNEL(full, stand_in, ALL_LAYOUT, stand_in::full, float, double, int, int64_t, uint8_t, bool,
                          phi::dtype::float16, phi::dtype::bfloat16) {}
PD_REGISTER_PLUGIN_KERNEL(fill, stand_in, ALL_LAYOUT, stand_in::fill, float, double, int, int64_t, uint8_t, bool,
                          phi::dtype::float16, phi::dtype::bfloat16) {}
PD_REGISTER_PLUGIN_KERNEL(contiguous, stand_in, ALL_LAYOUT, stand_in::contiguous, float, double, int, int64_t, uint8_t,
                          bool, phi::dtype::float16, phi::dtype::bfloat16) {}
PD_REGISTER_PLUGIN_KERNEL(strided_copy, stand_in, ALL_LAYOUT, stand_in::strided_copy, float, double, int, int64_t,
                          uint8_t, bool, phi::dtype::float16, phi::dtype::bfloat16) {}
PD_REGISTER_PLUGIN_KERNEL(add, stand_in, ALL_LAYOUT, stand_in::add, float, double, int, int64_t) {}
PD_REGISTER_PLUGIN_KERNEL(split, stand_in, ALL_LAYOUT, stand_in::split, float, double, int, int64_t, uint8_t, bool) {}
PD_REGISTER_PLUGIN_KERNEL(embedding_grad, stand_in, ALL_LAYOUT, stand_in::embedding_grad, float, double) {}
PD_REGISTER_PLUGIN_KERNEL(adamw, stand_in, ALL_LAYOUT, stand_in::adamw, float, double) {
  stand_in::leave(kernel, {6, 7, 9}, {4, 5});
}
PD_REGISTER_PLUGIN_KERNEL(adam, stand_in, ALL_LAYOUT, stand_in::adam, float, double) {
  stand_in::leave(kernel, {6, 7, 9}, {4, 5});
}
PD_REGISTER_PLUGIN_KERNEL(lamb, stand_in, ALL_LAYOUT, stand_in::lamb, float, double) {
  stand_in::leave(kernel, {5, 6, 8}, {3, 4});
}
