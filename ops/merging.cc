// Token merging in float32 on a CPU, as Paddle custom operators: see ops/__init__.py and models/layers/merging.py.
#include <limits>
#include <numeric>

#include "small.h"
#include "tensors.h"

namespace {

// The patches of an image: those at even places (a) may be merged into those at odd places (b).
struct Match {
  int64_t tokens, channels, offset, heads, width, prefix, merged, a, b, bp;

  Match(const Tensor& keys, int64_t offset_, int64_t heads_, int64_t width_, int64_t prefix_, int64_t merged_)
      : offset(offset_), heads(heads_), width(width_), prefix(prefix_), merged(merged_) {
    auto shape = keys.shape();
    expect(shape.size() == 3 && prefix >= 0 && shape[1] >= prefix && heads > 0 && width > 0, "keys");
    tokens = shape[1], channels = shape[2];
    a = (tokens - prefix + 1) / 2, b = (tokens - prefix) / 2, bp = padded(b);
    expect(offset >= 0 && offset + heads * width <= channels && merged > 0 && merged <= b, "keys");
  }

  // of a thread's scratch
  int64_t size() const { return a * width + width * bp + a * bp + width + LANES; }

  // The mean of a token's keys over the heads, of length 1. The factor 1 / heads would change nothing.
  void mean_key(const float* token, float* to) const {
    std::fill(to, to + width, 0.0f);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < width; ++i) to[i] += token[offset + h * width + i];
    float square = 0;
    for (int64_t i = 0; i < width; ++i) square += to[i] * to[i];
    float factor = square > 1e-24f ? 1 / std::sqrt(square) : 0;
    for (int64_t i = 0; i < width; ++i) to[i] *= factor;
  }

  void run(const float* keys, float* scratch, int32_t* targets) const {
    float *from = scratch, *to = from + a * width, *scores = to + width * bp, *key = scores + a * bp;
    std::fill(to, to + width * bp, 0.0f);
    for (int64_t i = 0; i < a; ++i) mean_key(keys + (prefix + 2 * i) * channels, from + i * width);
    for (int64_t j = 0; j < b; ++j) {
      mean_key(keys + (prefix + 2 * j + 1) * channels, key);
      for (int64_t i = 0; i < width; ++i) to[i * bp + j] = key[i];
    }
    small_product(a, bp, width, from, width, 1, to, bp, false, scores, bp);

    // Of equal scores the first place wins. NaN never does, so that the order below is one.
    std::vector<float> best(a, -std::numeric_limits<float>::infinity());
    std::vector<int64_t> choice(a, 0), order(a);
    for (int64_t i = 0; i < a; ++i)
      for (int64_t j = 0; j < b; ++j)
        if (scores[i * bp + j] > best[i]) best[i] = scores[i * bp + j], choice[i] = j;
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + merged, order.end(), [&](int64_t i, int64_t j) {
      return best[i] > best[j] || (best[i] == best[j] && i < j);
    });
    std::vector<char> leaves(a, 0);
    for (int64_t i = 0; i < merged; ++i) leaves[order[i]] = 1;

    int64_t first_b = prefix + a - merged, kept = prefix;
    for (int64_t i = 0; i < prefix; ++i) targets[i] = i;
    for (int64_t i = 0; i < a; ++i) targets[prefix + 2 * i] = leaves[i] ? first_b + choice[i] : kept++;
    for (int64_t j = 0; j < b; ++j) targets[prefix + 2 * j + 1] = first_b + j;
  }
};

}  // namespace

std::vector<Tensor> match_tokens(const Tensor& keys, const Tensor& sizes, int64_t offset, int64_t heads, int64_t width,
                                 int64_t prefix, int64_t merged) {
  const Match match(keys, offset, heads, width, prefix, merged);
  const int64_t batch = keys.shape()[0], tokens = match.tokens, count = tokens - merged;
  const bool sized_ = sizes.shape().size() > 1;
  expect(!sized_ || sizes.shape() == std::vector<int64_t>({batch, tokens}), "sizes");
  Tensor targets = paddle::empty({batch, tokens}, paddle::DataType::INT32, paddle::CPUPlace());
  Tensor weights = sized({batch, tokens}), sums = sized({batch, count});
  Tensor scratch = sized({omp_get_max_threads(), match.size()});
  const float *from = keys.data<float>(), *own = sized_ ? sizes.data<float>() : nullptr;
  float *weight = weights.data<float>(), *sum = sums.data<float>(), *room = scratch.data<float>();
  int32_t* target = targets.data<int32_t>();
#pragma omp parallel for schedule(static)
  for (int64_t item = 0; item < batch; ++item) {
    int32_t* to = target + item * tokens;
    float *of = weight + item * tokens, *total = sum + item * count;
    match.run(from + item * tokens * match.channels, room + omp_get_thread_num() * match.size(), to);
    for (int64_t i = 0; i < tokens; ++i) of[i] = own ? own[item * tokens + i] : 1.0f;
    std::fill(total, total + count, 0.0f);
    for (int64_t i = 0; i < tokens; ++i) total[to[i]] += of[i];
    for (int64_t i = 0; i < tokens; ++i) of[i] /= total[to[i]];
  }
  return {targets, weights, sums};
}

std::vector<Tensor> merge_tokens(const Tensor& x, const Tensor& targets, const Tensor& weights, int64_t count) {
  auto shape = x.shape();
  expect(shape.size() == 3 && targets.shape() == std::vector<int64_t>({shape[0], shape[1]}) &&
             weights.shape() == targets.shape() && targets.dtype() == paddle::DataType::INT32,
         "tokens to merge");
  const int64_t batch = shape[0], tokens = shape[1], width = shape[2];
  const int32_t* target = targets.data<int32_t>();
  const bool inside =
      std::all_of(target, target + batch * tokens, [=](int32_t one) { return one >= 0 && one < count; });
  expect(inside, "targets of tokens");
  Tensor y = sized({batch, count, width});
  const float *from = x.data<float>(), *weight = weights.data<float>();
  float* to = y.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t item = 0; item < batch; ++item) {
    float* own = to + item * count * width;
    std::fill(own, own + count * width, 0.0f);
    for (int64_t i = item * tokens; i < (item + 1) * tokens; ++i) {
      float* sum = own + target[i] * width;
      for (int64_t j = 0; j < width; ++j) sum[j] += weight[i] * from[i * width + j];
    }
  }
  return {y};
}

std::vector<Tensor> merge_tokens_grad(const Tensor& targets, const Tensor& weights, const Tensor& dy, int64_t count) {
  const int64_t batch = targets.shape()[0], tokens = targets.shape()[1], width = dy.shape()[2];
  Tensor dx = sized({batch, tokens, width});
  const float *from = dy.data<float>(), *weight = weights.data<float>();
  const int32_t* target = targets.data<int32_t>();
  float* to = dx.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < batch * tokens; ++i) {
    const float* grad = from + (i / tokens * count + target[i]) * width;
    for (int64_t j = 0; j < width; ++j) to[i * width + j] = weight[i] * grad[j];
  }
  return {dx};
}

PD_BUILD_OP(vit_match_tokens)
    .Inputs({"Keys", "Sizes"})
    .Outputs({"Targets", "Weights", "Sums"})
    .Attrs({"offset: int64_t", "heads: int64_t", "width: int64_t", "prefix: int64_t", "merged: int64_t"})
    .SetKernelFn(PD_KERNEL(match_tokens));
PD_BUILD_OP(vit_merge_tokens)
    .Inputs({"X", "Targets", "Weights"})
    .Outputs({"Y"})
    .Attrs({"count: int64_t"})
    .SetKernelFn(PD_KERNEL(merge_tokens));
PD_BUILD_GRAD_OP(vit_merge_tokens)
    .Inputs({"Targets", "Weights", paddle::Grad("Y")})
    .Outputs({paddle::Grad("X")})
    .Attrs({"count: int64_t"})
    .SetKernelFn(PD_KERNEL(merge_tokens_grad));
