// Where attention's operands lie, and what else belongs to it: see attention.cc.
#pragma once

#include "small.h"
#include "tensors.h"

const int64_t SCORES = 16384;  // about as many are computed at once: they stay in a cache

// The heads of queries, keys, values or outputs in a tensor [batch, tokens, channels]; steps between elements.
struct Part {
  int64_t tensor, offset, item, head, row, column;

  template <typename T>
  T* at(T* base, int64_t b, int64_t h, int64_t first = 0) const {
    return base + offset + b * item + h * head + first * row;
  }
  void get(int64_t rows, int64_t columns, const float* from, float* to, int64_t ld) const {
    pack(rows, columns, from, row, column, to, ld);
  }
  void get_transposed(int64_t rows, int64_t columns, const float* from, float* to, int64_t ld) const {
    pack(columns, rows, from, column, row, to, ld);
  }
  void put(int64_t rows, int64_t columns, const float* from, int64_t ld, float* to) const {
    if (column == 1)
      pack(rows, columns, from, ld, 1, to, row);
    else
      pack(columns, rows, from, 1, ld, to, column);
  }
};

struct Plan {
  int64_t batch, heads, n, m, d, e;  // n queries and m keys of d channels; values of e
  int64_t mp, dp, ep, rows;          // the same in whole vectors; queries at once
  Part q, k, v, out;
  std::vector<int64_t> shape;  // of the output
  bool bf16;                   // products
};

inline bool given(const Tensor& x) { return x.shape().size() > 1; }
inline const float* values(const Tensor& x) { return given(x) ? x.data<float>() : nullptr; }

// Queries, keys and values lie in one tensor, two ([queries], [keys, values]) or three. Within it each part has all
// heads, or (by_head) each head all parts. Across: channels attend to channels; tokens are what they are made of.
inline Plan plan(const Tensor& q, const Tensor& k, const Tensor& v, int64_t heads, int64_t width, bool by_head,
                 bool across, bool bf16) {
  const Tensor* given_[] = {&q, &k, &v};
  int64_t tensors = 1 + given(k) + given(v), tokens[3], channels[3];
  for (int64_t i = 0; i < tensors; ++i) {
    auto shape = given_[i]->shape();
    expect(shape.size() == 3 && shape[0] == q.shape()[0] && shape[2] % heads == 0, "attention");
    tokens[i] = shape[1], channels[i] = shape[2];
  }
  int64_t last = channels[tensors - 1] / heads - (3 - tensors) * width, widths[3] = {width, width, last}, before = 0;
  Part parts[4];
  for (int64_t i = 0; i < 3; ++i) {
    int64_t t = std::min(i, tensors - 1), step = channels[t];
    if (t == i) before = 0;
    int64_t head = by_head ? step / heads : widths[i], offset = by_head ? before : before * heads;
    parts[i] = {t, offset, tokens[t] * step, head, across ? 1 : step, across ? step : 1};
    before += widths[i];
    expect(before * heads <= step && (t == tensors - 1 || before * heads == step), "attention");
  }
  int64_t n = tokens[0], m = tokens[std::min<int64_t>(1, tensors - 1)], all = heads * last;
  expect(last > 0 && m == tokens[tensors - 1] && (!across || (n == m && last == width)), "attention");
  parts[3] = {0, 0, n * all, last, across ? 1 : all, across ? all : 1};
  Plan p{q.shape()[0], heads, n, m, width, last, 0, 0, 0, 0, parts[0], parts[1], parts[2], parts[3]};
  p.shape = {p.batch, n, all}, p.bf16 = bf16;
  if (across) p.n = p.m = width, p.d = p.e = n;
  p.mp = padded(p.m), p.dp = padded(p.d), p.ep = padded(p.e);
  p.rows = std::min(p.n, std::max<int64_t>(8, SCORES / p.mp / 8 * 8));
  return p;
}

// What is added to the scores, and what else is done to queries and keys: turned by their places, or made vectors of
// length 1, whose products a head's own factor multiplies. An item's bias and mask are those of its number's remainder.
// A mask of one row is the same for all queries.
struct Extra {
  const float *bias, *mask, *factor, *cosines, *sines;
  int64_t biases = 1, masks = 1, mask_rows = 1;
  float scale;
  bool halves;

  Extra(const Plan& p, const Tensor& b, const Tensor& m, const Tensor& f, const Tensor& c, const Tensor& s,
        float scale_, bool halves_)
      : bias(values(b)), mask(values(m)), factor(values(f)), cosines(values(c)), sines(values(s)), scale(scale_),
        halves(halves_) {
    auto bs = b.shape(), ms = m.shape();
    expect(!bias || (bs.size() == 4 && bs[1] == p.heads && bs[2] == p.n && bs[3] == p.m), "a bias");
    expect(!mask || (ms.size() == 3 && (ms[1] == p.n || ms[1] == 1) && ms[2] == p.m), "a mask");
    if (bias) biases = bs[0];
    if (mask) masks = ms[0], mask_rows = ms[1];
    expect(p.batch % biases == 0 && p.batch % masks == 0, "attention: a bias or a mask of so many");
    expect(!factor || f.numel() == p.heads, "a factor");
    int64_t turns = p.n * (p.d / 2);
    expect(!cosines || (p.n == p.m && p.d % 2 == 0 && c.numel() == turns && s.numel() == turns), "a table of turns");
  }

  const float* bias_row(const Plan& p, int64_t b, int64_t h, int64_t row, const float* none) const {
    return bias ? bias + (((b % biases) * p.heads + h) * p.n + row) * p.m : none;
  }
  const float* mask_row(const Plan& p, int64_t b, int64_t row, const float* none) const {
    return mask ? mask + ((b % masks) * mask_rows + row % mask_rows) * p.m : none;
  }
  bool prepares() const { return factor || cosines; }
  float factor_of(int64_t head) const { return factor ? factor[head] : scale; }

  // Makes rows [.., d] of queries or keys what is compared; `inverse`: of the lengths.
  void prepare(int64_t d, int64_t first, int64_t rows, float* at, int64_t ld, float* inverse) const {
    for (int64_t i = 0, table = first * (d / 2); i < rows; ++i, table += d / 2)
      if (cosines)
        turn_row(d / 2, halves, cosines + table, sines + table, 1, at + i * ld);
      else if (factor)
        inverse[i] = unit_row(d, at + i * ld);
  }

  // Makes the gradient of what `prepare` gave, `at`, that of what it read.
  void restore(int64_t d, int64_t first, int64_t rows, const float* at, const float* inverse, float* grad,
               int64_t ld) const {
    for (int64_t i = 0, table = first * (d / 2); i < rows; ++i, table += d / 2)
      if (cosines)
        turn_row(d / 2, halves, cosines + table, sines + table, -1, grad + i * ld);
      else if (factor)
        unit_grad_row(d, at + i * ld, inverse[i], grad + i * ld);
  }
};
