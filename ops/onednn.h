// The part of oneDNN's C interface that the operators use, and what owns its objects.
//
// Paddle ships the library (3.2 in 2.6.2, 3.6 in 3.3.1), not its headers. Names and numbers are those of oneDNN 3, whose
// binary interface stays. https://uxlfoundation.github.io/oneDNN/
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tensors.h"

extern "C" {
struct dnnl_engine;
struct dnnl_stream;
struct dnnl_memory_desc;
struct dnnl_memory;
struct dnnl_primitive_desc;
struct dnnl_primitive;
struct dnnl_primitive_attr;
struct dnnl_exec_arg {
  int arg;
  dnnl_memory* memory;
};
int dnnl_engine_create(dnnl_engine** engine, int kind, size_t index);
int dnnl_stream_create(dnnl_stream** stream, dnnl_engine* engine, unsigned flags);
int dnnl_stream_wait(dnnl_stream* stream);
int dnnl_memory_desc_create_with_strides(dnnl_memory_desc** md, int ndims, const int64_t* dims, int type,
                                         const int64_t* strides);
int dnnl_memory_desc_create_with_tag(dnnl_memory_desc** md, int ndims, const int64_t* dims, int type, int tag);
int dnnl_memory_desc_destroy(dnnl_memory_desc* md);
int dnnl_memory_desc_clone(dnnl_memory_desc** md, const dnnl_memory_desc* from);
int dnnl_memory_desc_equal(const dnnl_memory_desc* a, const dnnl_memory_desc* b);
size_t dnnl_memory_desc_get_size(const dnnl_memory_desc* md);
int dnnl_memory_create(dnnl_memory** memory, const dnnl_memory_desc* md, dnnl_engine* engine, void* data);
int dnnl_memory_destroy(dnnl_memory* memory);
int dnnl_primitive_attr_create(dnnl_primitive_attr** attr);
int dnnl_primitive_attr_set_scratchpad_mode(dnnl_primitive_attr* attr, int mode);
int dnnl_primitive_attr_destroy(dnnl_primitive_attr* attr);
const dnnl_memory_desc* dnnl_primitive_desc_query_md(const dnnl_primitive_desc* pd, int what, int index);
int dnnl_primitive_desc_destroy(dnnl_primitive_desc* pd);
int dnnl_primitive_create(dnnl_primitive** primitive, const dnnl_primitive_desc* pd);
int dnnl_primitive_execute(const dnnl_primitive* primitive, dnnl_stream* stream, int count, const dnnl_exec_arg* args);
int dnnl_primitive_destroy(dnnl_primitive* primitive);
int dnnl_reorder_primitive_desc_create(dnnl_primitive_desc** pd, const dnnl_memory_desc* from, dnnl_engine* from_engine,
                                       const dnnl_memory_desc* to, dnnl_engine* to_engine,
                                       const dnnl_primitive_attr* attr);
int dnnl_convolution_forward_primitive_desc_create(
    dnnl_primitive_desc** pd, dnnl_engine* engine, int propagation, int algorithm, const dnnl_memory_desc* src,
    const dnnl_memory_desc* weights, const dnnl_memory_desc* bias, const dnnl_memory_desc* dst, const int64_t* strides,
    const int64_t* dilates, const int64_t* padding_l, const int64_t* padding_r, const dnnl_primitive_attr* attr);
int dnnl_convolution_backward_data_primitive_desc_create(
    dnnl_primitive_desc** pd, dnnl_engine* engine, int algorithm, const dnnl_memory_desc* diff_src,
    const dnnl_memory_desc* weights, const dnnl_memory_desc* diff_dst, const int64_t* strides, const int64_t* dilates,
    const int64_t* padding_l, const int64_t* padding_r, const dnnl_primitive_desc* forward,
    const dnnl_primitive_attr* attr);
int dnnl_convolution_backward_weights_primitive_desc_create(
    dnnl_primitive_desc** pd, dnnl_engine* engine, int algorithm, const dnnl_memory_desc* src,
    const dnnl_memory_desc* diff_weights, const dnnl_memory_desc* diff_bias, const dnnl_memory_desc* diff_dst,
    const int64_t* strides, const int64_t* dilates, const int64_t* padding_l, const int64_t* padding_r,
    const dnnl_primitive_desc* forward, const dnnl_primitive_attr* attr);
}

namespace onednn {

enum { kCpu = 1, kInOrder = 1, kFloat32 = 3, kAny = 1, kUserScratchpad = 1 };
enum { kForwardTraining = 64, kForwardInference = 96, kDirect = 1 };
enum { kSrc = 1, kDst = 17, kWeights = 33, kBias = 41, kScratchpad = 80 };  // arguments
enum { kDiffSrc = 129, kDiffDst = 145, kDiffWeights = 161, kDiffBias = 169 };
enum { kScratchpadMd = 136, kArgumentMd = 255 };  // queries

inline void check(int status, const char* what) {
  PD_CHECK(status == 0, "oneDNN: ", what, " failed with status ", status);
}

using Desc = std::shared_ptr<dnnl_memory_desc>;
using PrimitiveDesc = std::shared_ptr<dnnl_primitive_desc>;
using Primitive = std::shared_ptr<dnnl_primitive>;
using Dims = std::vector<int64_t>;

inline dnnl_engine* engine() {
  static dnnl_engine* one = [] {
    dnnl_engine* made = nullptr;
    check(dnnl_engine_create(&made, kCpu, 0), "an engine");
    return made;
  }();
  return one;
}

inline dnnl_stream* stream() {
  thread_local dnnl_stream* one = [] {
    dnnl_stream* made = nullptr;
    check(dnnl_stream_create(&made, engine(), kInOrder), "a stream");
    return made;
  }();
  return one;
}

// Layouts of float32: with strides, in rows, and for oneDNN to choose.
inline Desc strided(const Dims& dims, const Dims& strides) {
  dnnl_memory_desc* md = nullptr;
  check(dnnl_memory_desc_create_with_strides(&md, dims.size(), dims.data(), kFloat32, strides.data()), "a layout");
  return Desc(md, dnnl_memory_desc_destroy);
}

inline Desc dense(const Dims& dims) {
  Dims strides(dims.size(), 1);
  for (int i = static_cast<int>(dims.size()) - 2; i >= 0; --i) strides[i] = strides[i + 1] * dims[i + 1];
  return strided(dims, strides);
}

inline Desc any(const Dims& dims) {
  dnnl_memory_desc* md = nullptr;
  check(dnnl_memory_desc_create_with_tag(&md, dims.size(), dims.data(), kFloat32, kAny), "a layout");
  return Desc(md, dnnl_memory_desc_destroy);
}

inline Primitive primitive(const PrimitiveDesc& pd) {
  dnnl_primitive* made = nullptr;
  check(dnnl_primitive_create(&made, pd.get()), "a primitive");
  return Primitive(made, dnnl_primitive_destroy);
}

inline Desc layout(const PrimitiveDesc& pd, int query, int index) {
  dnnl_memory_desc* md = nullptr;
  check(dnnl_memory_desc_clone(&md, dnnl_primitive_desc_query_md(pd.get(), query, index)), "a layout");
  return Desc(md, dnnl_memory_desc_destroy);
}

// What changes one layout into another.
inline Primitive reorder(const Desc& from, const Desc& to) {
  dnnl_primitive_desc* pd = nullptr;
  check(dnnl_reorder_primitive_desc_create(&pd, from.get(), engine(), to.get(), engine(), nullptr), "a reorder");
  return primitive(PrimitiveDesc(pd, dnnl_primitive_desc_destroy));
}

// A primitive's temporary memory is its caller's.
struct Attributes {
  dnnl_primitive_attr* made = nullptr;
  Attributes() {
    check(dnnl_primitive_attr_create(&made), "attributes");
    check(dnnl_primitive_attr_set_scratchpad_mode(made, kUserScratchpad), "attributes");
  }
  ~Attributes() { dnnl_primitive_attr_destroy(made); }
  const dnnl_primitive_attr* get() const { return made; }
};

inline void execute(const Primitive& primitive, const std::vector<int>& ids, const std::vector<Desc>& layouts,
                    const std::vector<void*>& data) {
  std::vector<dnnl_exec_arg> args;
  std::vector<std::unique_ptr<dnnl_memory, int (*)(dnnl_memory*)>> owned;
  for (size_t i = 0; i < ids.size(); ++i) {
    dnnl_memory* memory = nullptr;
    check(dnnl_memory_create(&memory, layouts[i].get(), engine(), data[i]), "memory");
    owned.emplace_back(memory, dnnl_memory_destroy);
    args.push_back({ids[i], memory});
  }
  check(dnnl_primitive_execute(primitive.get(), stream(), args.size(), args.data()), "a primitive");
  check(dnnl_stream_wait(stream()), "a primitive");
}

// A primitive between tensors, the last of which is its output: what it wants in another layout is reordered.
class Pass {
 public:
  Pass(const PrimitiveDesc& pd, std::vector<int> ids, std::vector<Desc> given)
      : ids_(std::move(ids)), output_(ids_.size() - 1), primitive_(primitive(pd)), given_(std::move(given)) {
    for (size_t i = 0; i < ids_.size(); ++i) {
      wanted_.push_back(layout(pd, kArgumentMd, ids_[i]));
      bool same = dnnl_memory_desc_equal(given_[i].get(), wanted_[i].get());
      const Desc &from = i == output_ ? wanted_[i] : given_[i], &to = i == output_ ? given_[i] : wanted_[i];
      reorders_.push_back(same ? nullptr : reorder(from, to));
    }
    ids_.push_back(kScratchpad);
    wanted_.push_back(layout(pd, kScratchpadMd, 0));
  }

  void operator()(const std::vector<const float*>& tensors) const {
    std::vector<Tensor> taken;
    auto take = [&](const Desc& md) {
      int64_t floats = (dnnl_memory_desc_get_size(md.get()) + 3) / 4;
      if (floats == 0) return static_cast<void*>(nullptr);
      taken.push_back(sized({floats}));
      return static_cast<void*>(taken.back().data<float>());
    };
    std::vector<void*> data;
    for (size_t i = 0; i < tensors.size(); ++i) {
      void* given = const_cast<float*>(tensors[i]);
      data.push_back(reorders_[i] ? take(wanted_[i]) : given);
      if (reorders_[i] && i != output_) execute(reorders_[i], {kSrc, kDst}, {given_[i], wanted_[i]}, {given, data[i]});
    }
    data.push_back(take(wanted_.back()));
    execute(primitive_, ids_, wanted_, data);
    if (reorders_[output_])
      execute(reorders_[output_], {kSrc, kDst}, {wanted_[output_], given_[output_]},
              {data[output_], const_cast<float*>(tensors[output_])});
  }

 private:
  std::vector<int> ids_;
  size_t output_;
  Primitive primitive_;
  std::vector<Desc> given_, wanted_;
  std::vector<Primitive> reorders_;
};

}  // namespace onednn
