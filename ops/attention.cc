// Attention in float32 on a CPU, as a Paddle custom operator: see ops/__init__.py.
//
// The keys and values of an item's head are brought into a cache, then its queries, some rows at a time. The weights
// aren't kept: of each row its largest score and its sum are, and the gradient computes them again.
#include "half.h"
#include "heads.h"

#define OPERANDS                                                                                                    \
  const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &bias, const Tensor &mask, const Tensor &factor, \
      const Tensor &cosines, const Tensor &sines
#define OPTIONS int64_t heads, int64_t width, float scale, bool by_head, bool across, bool halves, bool bf16

namespace {

// The scratch of a thread, zeros at first: rows end in zeros, up to a whole vector. All of it is taken in whole vectors:
// those that lie across two lines of the cache take longer.
struct Room {
  float* next;
  Room(float* start, int64_t size) : next(start) { std::fill(start, start + size, 0.0f); }
  float* take(int64_t n) { return (next += n) - n; }
};

// Products in float32 or, with room for their rounded factors, in bfloat16.
struct Products {
  uint32_t* pairs;

  void operator()(int64_t m, int64_t n, int64_t k, const float* a, int64_t ai, int64_t ak, const float* b, int64_t ldb,
                  bool add, float* c, int64_t ldc) const {
    if (pairs)
      half_product(m, n, k, a, ai, ak, b, ldb, add, c, ldc, pairs);
    else
      small_product(m, n, k, a, ai, ak, b, ldb, add, c, ldc);
  }
};

struct Forward {
  const Plan& p;
  const Extra& x;
  float *none, *k, *kt, *v, *q, *s, *o, *inverse;
  Products product;

  static int64_t halves(const Plan& p) {
    return p.bf16 ? std::max(pairs(p.rows, p.mp, p.d), pairs(p.rows, p.ep, p.m)) : 0;
  }
  static int64_t most(const Plan& p) { return padded(std::max(p.m, p.rows)); }
  static int64_t size(const Plan& p) {
    return p.mp * (1 + p.d) + p.m * (p.dp + p.ep) + p.rows * (p.mp + p.dp + p.ep) + most(p) + padded(halves(p));
  }
  Forward(const Plan& p_, const Extra& x_, Room room) : p(p_), x(x_) {
    none = room.take(p.mp), kt = room.take(p.d * p.mp), k = room.take(p.m * p.dp), v = room.take(p.m * p.ep);
    q = room.take(p.rows * p.dp), s = room.take(p.rows * p.mp), o = room.take(p.rows * p.ep);
    inverse = room.take(most(p));
    product.pairs = p.bf16 ? (uint32_t*)room.take(halves(p)) : nullptr;
  }

  void run(int64_t b, int64_t h, const float* const* in, float* out, float* kept) const {
    const float* keys = p.k.at(in[p.k.tensor], b, h);
    if (x.prepares()) {
      p.k.get(p.m, p.d, keys, k, p.dp);
      x.prepare(p.d, 0, p.m, k, p.dp, inverse);
      pack(p.d, p.m, k, 1, p.dp, kt, p.mp);
    } else {
      p.k.get_transposed(p.m, p.d, keys, kt, p.mp);
    }
    p.v.get(p.m, p.e, p.v.at(in[p.v.tensor], b, h), v, p.ep);
    for (int64_t first = 0; first < p.n; first += p.rows) {
      int64_t rows = std::min(p.rows, p.n - first);
      p.q.get(rows, p.d, p.q.at(in[0], b, h, first), q, p.dp);
      x.prepare(p.d, first, rows, q, p.dp, inverse);
      product(rows, p.mp, p.d, q, p.dp, 1, kt, p.mp, false, s, p.mp);
      for (int64_t i = 0; i < rows; ++i)
        exponentials_row(p.m, x.factor_of(h), x.bias_row(p, b, h, first + i, none), x.mask_row(p, b, first + i, none),
                         s + i * p.mp, kept + 2 * (first + i));
      product(rows, p.ep, p.m, s, p.mp, 1, v, p.ep, false, o, p.ep);
      for (int64_t i = 0; i < rows; ++i) scale_row(p.e, kept[2 * (first + i) + 1], o + i * p.ep);
      p.out.put(rows, p.e, o, p.ep, p.out.at(out, b, h, first));
    }
  }
};

struct Backward {
  const Plan& p;
  const Extra& x;
  float *none, *k, *kt, *vt, *q, *o, *s, *ds, *dq, *dk, *dv, *of_k, *of_q;
  Products product;

  static int64_t halves(const Plan& p) {
    int64_t wide = std::max(p.dp, p.ep), most = std::max(pairs(p.rows, p.mp, wide), pairs(p.m, wide, p.rows));
    return p.bf16 ? std::max(most, pairs(p.rows, p.dp, p.m)) : 0;
  }
  static int64_t size(const Plan& p) {
    return p.mp * (2 + p.d + p.e + 2 * p.dp + p.ep) + p.rows * (2 * p.mp + 2 * p.dp + p.ep) + padded(p.rows) +
           padded(halves(p));
  }
  Backward(const Plan& p_, const Extra& x_, Room room) : p(p_), x(x_) {
    none = room.take(p.mp), kt = room.take(p.d * p.mp), vt = room.take(p.e * p.mp);
    k = room.take(p.mp * p.dp), dk = room.take(p.mp * p.dp), dv = room.take(p.mp * p.ep), of_k = room.take(p.mp);
    s = room.take(p.rows * p.mp), ds = room.take(p.rows * p.mp), q = room.take(p.rows * p.dp);
    dq = room.take(p.rows * p.dp), o = room.take(p.rows * p.ep), of_q = room.take(padded(p.rows));
    product.pairs = p.bf16 ? (uint32_t*)room.take(halves(p)) : nullptr;
  }

  // grads: of the tensors that `in` are; biases: where the scores' gradients are added [n, m], or null. Returns the
  // gradient of the head's factor.
  float run(int64_t b, int64_t h, const float* const* in, const float* kept, const float* dout, float* const* grads,
            float* biases) const {
    float factor = x.factor_of(h), of_factor = 0;
    p.k.get(p.m, p.d, p.k.at(in[p.k.tensor], b, h), k, p.dp);
    x.prepare(p.d, 0, p.m, k, p.dp, of_k);
    pack(p.d, p.m, k, 1, p.dp, kt, p.mp);
    p.v.get_transposed(p.m, p.e, p.v.at(in[p.v.tensor], b, h), vt, p.mp);
    for (int64_t first = 0; first < p.n; first += p.rows) {
      int64_t rows = std::min(p.rows, p.n - first);
      p.q.get(rows, p.d, p.q.at(in[0], b, h, first), q, p.dp);
      x.prepare(p.d, first, rows, q, p.dp, of_q);
      p.out.get(rows, p.e, p.out.at(dout, b, h, first), o, p.ep);
      product(rows, p.mp, p.d, q, p.dp, 1, kt, p.mp, false, s, p.mp);
      product(rows, p.mp, p.e, o, p.ep, 1, vt, p.mp, false, ds, p.mp);
      for (int64_t i = 0; i < rows; ++i) {
        weights_grad_row(p.m, factor, x.bias_row(p, b, h, first + i, none), x.mask_row(p, b, first + i, none),
                         kept + 2 * (first + i), s + i * p.mp, ds + i * p.mp);
        if (biases) add_bias(p.m, ds + i * p.mp, biases + (first + i) * p.m);
      }
      product(p.m, p.ep, rows, s, 1, p.mp, o, p.ep, first > 0, dv, p.ep);
      product(p.m, p.dp, rows, ds, 1, p.mp, q, p.dp, first > 0, dk, p.dp);
      product(rows, p.dp, p.m, ds, p.mp, 1, k, p.dp, false, dq, p.dp);
      if (x.factor) of_factor += dot(rows * p.dp, q, dq);
      scale_row(rows * p.dp, factor, dq);
      x.restore(p.d, first, rows, q, of_q, dq, p.dp);
      p.q.put(rows, p.d, dq, p.dp, p.q.at(grads[0], b, h, first));
    }
    scale_row(p.m * p.dp, factor, dk);
    x.restore(p.d, 0, p.m, k, of_k, dk, p.dp);
    p.k.put(p.m, p.d, dk, p.dp, p.k.at(grads[p.k.tensor], b, h));
    p.v.put(p.m, p.e, dv, p.ep, p.v.at(grads[p.v.tensor], b, h));
    return of_factor;
  }
};

}  // namespace

std::vector<Tensor> attention(OPERANDS, OPTIONS) {
  const Plan p = plan(q, k, v, heads, width, by_head, across, bf16);
  const Extra x(p, bias, mask, factor, cosines, sines, scale, halves);
  Tensor out = sized(p.shape), kept = sized({p.batch, heads, p.n, 2});
  const float* in[] = {q.data<float>(), values(k), values(v)};
  float *to = out.data<float>(), *sums = kept.data<float>();
  // Paddle's memory, and taken here: its end is Paddle's error, and not a crash, as of C++'s own or within the threads.
  Tensor scratch = sized({omp_get_max_threads(), Forward::size(p)});
  float* shared = scratch.data<float>();
#pragma omp parallel
  {
    const Forward head(p, x, Room(shared + omp_get_thread_num() * Forward::size(p), Forward::size(p)));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p.batch * heads; ++i) head.run(i / heads, i % heads, in, to, sums + i * p.n * 2);
  }
  return {out, kept};
}

std::vector<Tensor> attention_grad(OPERANDS, const Tensor& kept, const Tensor& dout, OPTIONS) {
  const Plan p = plan(q, k, v, heads, width, by_head, across, bf16);
  const Extra x(p, bias, mask, factor, cosines, sines, scale, halves);
  const float *in[] = {q.data<float>(), values(k), values(v)}, *kept_ = kept.data<float>(), *from = dout.data<float>();
  Tensor dq = like(q), dk = like(k), dv = like(v), dbias = like(bias), dfactor = like(factor);
  float* grads[] = {dq.data<float>(), dk.data<float>(), dv.data<float>()};
  // Items that share a bias are cut into a few chunks, each with a sum of its own: the same for any number of threads.
  int64_t shared = x.bias ? x.biases * heads : 1, items = x.bias ? p.batch / x.biases : p.batch * heads;
  int64_t chunks = x.bias ? std::min(items, std::max<int64_t>(1, 32 / shared)) : items, area = p.n * p.m;
  Tensor sums = sized({x.bias ? chunks : 1, x.bias ? shared * area : 1}), factors = sized({p.batch, heads});
  Tensor scratch = sized({omp_get_max_threads(), Backward::size(p)});
  float *sum = sums.data<float>(), *room = scratch.data<float>(), *of_factors = factors.data<float>();
#pragma omp parallel
  {
    const Backward head(p, x, Room(room + omp_get_thread_num() * Backward::size(p), Backward::size(p)));
#pragma omp for schedule(static)
    for (int64_t task = 0; task < shared * chunks; ++task) {
      int64_t chunk = task % chunks, which = task / chunks;
      float* own = x.bias ? sum + (chunk * shared + which) * area : nullptr;
      if (own) std::fill(own, own + area, 0.0f);
      for (int64_t i = items * chunk / chunks; i < items * (chunk + 1) / chunks; ++i) {
        int64_t b = x.bias ? i * x.biases + which / heads : i / heads, h = x.bias ? which % heads : i % heads;
        int64_t at = b * heads + h;
        of_factors[at] = head.run(b, h, in, kept_ + at * p.n * 2, from, grads, own);
      }
    }
  }
  if (x.bias) add_up(chunks, shared * area, sum, dbias.data<float>());
  if (x.factor) add_up(p.batch, heads, of_factors, dfactor.data<float>());
  return {dq, dk, dv, dbias, dfactor};
}

#define ATTRIBUTES {"heads: int64_t", "width: int64_t", "scale: float", "by_head: bool", "across: bool", "halves: bool", "bf16: bool"}
PD_BUILD_OP(vit_attention)
    .Inputs({"Q", "K", "V", "Bias", "Mask", "Factor", "Cosines", "Sines"})
    .Outputs({"Out", "Kept"})
    .Attrs(ATTRIBUTES)
    .SetKernelFn(PD_KERNEL(attention));
PD_BUILD_GRAD_OP(vit_attention)
    .Inputs({"Q", "K", "V", "Bias", "Mask", "Factor", "Cosines", "Sines", "Kept", paddle::Grad("Out")})
    .Outputs({paddle::Grad("Q"), paddle::Grad("K"), paddle::Grad("V"), paddle::Grad("Bias"), paddle::Grad("Factor")})
    .Attrs(ATTRIBUTES)
    .SetKernelFn(PD_KERNEL(attention_grad));
