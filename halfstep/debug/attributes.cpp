// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/attributes.h"

#include <fmt/format.h>

#include <cmath>
#include <initializer_list>
#include <string_view>
#include <type_traits>
#include <unordered_map>

#include "halfstep/debug/attributes_internal.h"
#include "halfstep/ops/attention_attributes.h"
#include "halfstep/ops/op.h"

namespace halfstep::debug::detail {
namespace {

using Json = nlohmann::ordered_json;

Json json(const IntList& list) { return std::vector<std::int64_t>(list.values, list.values + list.size); }
Json json(OptionalDType dtype) { return dtype.has_value() ? Json(name(dtype.or_else(DType::f32))) : Json(nullptr); }
Json json(const ScalarValue& v) {
  return v.kind == 2 ? number(v.floating) : v.kind == 1 ? Json(v.integer) : Json(v.integer != 0);
}

Json describe(const AlphaAttributes& a) { return {{"alpha", number(a.alpha)}}; }
Json describe(const ScalarAttributes& a) { return {{"value", json(a.value)}}; }
Json describe(const FillAttributes& a) { return {{"value", json(a.value)}}; }
Json describe(const CastAttributes& a) { return {{"dtype", name(a.dtype)}}; }
Json describe(const MatmulAttributes& a) { return {{"dtype", json(a.dtype)}}; }
Json describe(const ReduceAttributes& a) {
  return {{"dims", json(a.dims)}, {"keepdim", a.keepdim}, {"dtype", json(a.dtype)}};
}
Json describe(const VarAttributes& a) {
  return {{"dims", json(a.dims)}, {"keepdim", a.keepdim}, {"correction", number(a.correction)}};
}
Json describe(const DimAttributes& a) {
  return {{"dim", a.dim}, {"keepdim", a.keepdim}, {"reverse", a.reverse}, {"dtype", json(a.dtype)}};
}
Json describe(const AlongAttributes& a) { return {{"dim", a.dim}}; }
Json describe(const ClampAttributes& a) { return {{"min", number(a.min)}, {"max", number(a.max)}}; }
Json describe(const DropoutAttributes& a) { return {{"p", number(a.p)}}; }
Json describe(const RandomAttributes& a) {
  return {{"a", number(a.a)}, {"b", number(a.b)}, {"low", a.low}, {"range", a.range}};
}
Json describe(const ClassLossAttributes& a) {
  return {{"reduction", a.reduction}, {"ignore_index", a.ignore_index}, {"label_smoothing", number(a.label_smoothing)}};
}
Json describe(const PairLossAttributes& a) {
  return {{"kind", static_cast<int>(a.kind)},
          {"reduction", a.reduction},
          {"parameter", number(a.parameter)},
          {"divisor", number(a.divisor)}};
}
Json describe(const RowNormAttributes& a) {
  return {{"eps", number(a.eps)}, {"rows", a.rows}, {"inner", a.inner}, {"groups", a.groups}, {"rms", a.rms}};
}
Json describe(const BatchNormAttributes& a) {
  return {
      {"eps", number(a.eps)}, {"momentum", number(a.momentum)}, {"training", a.training}, {"activation", a.activation}};
}
Json pair(const std::int64_t (&values)[2]) { return Json::array({values[0], values[1]}); }
Json describe(const ConvAttributes& a) {
  return {{"stride", pair(a.stride)},
          {"padding", pair(a.padding)},
          {"dilation", pair(a.dilation)},
          {"groups", a.groups},
          {"sizes", json(a.sizes)}};
}
Json describe(const PoolAttributes& a) {
  return {{"kernel", pair(a.kernel)},
          {"stride", pair(a.stride)},
          {"padding", pair(a.padding)},
          {"dilation", pair(a.dilation)},
          {"count_include_pad", a.count_include_pad},
          {"divisor", a.divisor}};
}
Json describe(const AdaptivePoolAttributes& a) { return {{"sizes", json(a.sizes)}}; }
Json describe(const InterpolateAttributes& a) {
  return {{"sizes", json(a.sizes)},
          {"scale", Json::array({number(a.scale[0]), number(a.scale[1])})},
          {"mode", a.mode},
          {"align_corners", a.align_corners}};
}
Json describe(const PadAttributes& a) {
  return {{"before", json(a.before)}, {"after", json(a.after)}, {"mode", a.mode}};
}
Json describe(const EmbeddingAttributes& a) { return {{"rows", a.rows}, {"padding_idx", a.padding_idx}}; }
Json describe(const ViewAttributes& a) {
  return {{"sizes", json(a.sizes)},   {"strides", json(a.strides)}, {"offset", a.offset}, {"dim", a.dim},
          {"other_dim", a.other_dim}, {"start", a.start},           {"end", a.end},       {"step", a.step}};
}

Json describe(const ActivationAttributes& a) { return {{"a", number(a.a)}, {"b", number(a.b)}, {"c", number(a.c)}}; }
Json describe(const NanToNumAttributes& a) {
  return {{"nan", number(a.nan)}, {"posinf", number(a.posinf)}, {"neginf", number(a.neginf)}};
}
Json describe(const NormAttributes& a) {
  return {{"dims", json(a.dims)}, {"keepdim", a.keepdim}, {"dtype", json(a.dtype)}, {"p", number(a.p)}};
}
Json describe(const AttentionAttributes& a) {
  return {{"scale", number(a.scale)}, {"dropout", number(a.dropout)}, {"causal", a.causal}};
}
Json describe(const TopKAttributes& a) {
  return {{"dim", a.dim}, {"k", a.k}, {"largest", a.largest}, {"sorted", a.sorted}};
}
Json describe(const SortAttributes& a) { return {{"dim", a.dim}, {"descending", a.descending}}; }
Json describe(const DiagonalAttributes& a) { return {{"diagonal", a.diagonal}, {"dim1", a.dim1}, {"dim2", a.dim2}}; }
Json describe(const ScatterValueAttributes& a) { return {{"dim", a.dim}, {"value", json(a.value)}}; }
Json describe(const IndexAddAttributes& a) { return {{"dim", a.dim}, {"alpha", json(a.alpha)}}; }
Json describe(const IndexPutAttributes& a) { return {{"accumulate", a.accumulate}}; }
Json describe(const CountAttributes& a) { return {{"count", a.count}}; }
Json describe(const DimsAttributes& a) { return {{"dims", json(a.dims)}}; }

// A result dtype that the call asked for, where it did.
void widen(OptionalDType& place, DType dtype) {
  if (place.has_value() && is_floating(place.or_else(DType::f32))) place = dtype;
}

struct Known {
  std::size_t size = 0;
  Json (*describe)(const void*) = nullptr;
  void (*widen)(void*, DType) = nullptr;
};
template <class A>
constexpr Known kKnown{sizeof(A), [](const void* p) { return describe(*static_cast<const A*>(p)); },
                       [](void* p, DType dtype) {
                         A& a = *static_cast<A*>(p);
                         if constexpr (std::is_same_v<A, AttentionAttributes>) {
                           for (OptionalDType& d : a.dtypes) widen(d, dtype);
                         } else if constexpr (std::is_same_v<A, CastAttributes>) {
                           if (is_floating(a.dtype)) a.dtype = dtype;
                         } else if constexpr (requires { a.dtype; }) {
                           widen(a.dtype, dtype);
                         }
                       }};

struct Table : std::unordered_map<std::string_view, Known> {
  Table() {
    add<AlphaAttributes>({"add", "sub"});
    add<ScalarAttributes>({"add_scalar", "mul_scalar", "div_scalar", "rdiv_scalar", "pow_scalar", "scalar_pow",
                           "signed_pow", "masked_fill", "lerp_scalar", "addcmul", "addcdiv"});
    add<FillAttributes>({"fill"});
    add<CastAttributes>({"to"});
    add<MatmulAttributes>({"mm", "bmm", "linear"});
    add<ReduceAttributes>({"sum", "mean", "prod", "amax", "amin", "any", "all", "count_nonzero", "logsumexp"});
    add<VarAttributes>({"var", "std", "var_mean"});
    add<NormAttributes>({"norm", "extreme_weights"});
    add<DimAttributes>({"softmax", "log_softmax", "softmax_backward", "log_softmax_backward", "argmax", "argmin",
                        "max_dim", "min_dim", "cumsum", "cumprod", "cumprod_backward", "prod_others"});
    add<AlongAttributes>({"cat", "gather", "scatter", "scatter_add", "index_select"});
    add<DimsAttributes>({"flip"});
    add<ScatterValueAttributes>({"scatter_value"});
    add<IndexAddAttributes>({"index_add"});
    add<IndexPutAttributes>({"index_put"});
    add<CountAttributes>({"nonzero"});
    add<SortAttributes>({"sort"});
    add<TopKAttributes>({"topk"});
    add<DiagonalAttributes>({"diagonal", "diagonal_backward", "tril", "triu"});
    add<ClampAttributes>({"clamp", "clamp_backward", "hardtanh", "hardtanh_backward"});
    add<NanToNumAttributes>({"nan_to_num"});
    add<ActivationAttributes>(
        {"leaky_relu", "leaky_relu_backward", "elu", "elu_backward", "softplus", "softplus_backward", "threshold"});
    add<DropoutAttributes>({"dropout"});
    add<RandomAttributes>({"uniform", "normal", "randint", "randperm", "bernoulli_p"});
    add<ClassLossAttributes>(
        {"cross_entropy", "cross_entropy_backward", "cross_entropy_targets", "nll_loss", "nll_loss_backward"});
    add<PairLossAttributes>({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy",
                             "binary_cross_entropy_with_logits", "pair_loss_backward"});
    add<RowNormAttributes>({"layer_norm", "rms_norm", "group_norm", "norm_backward"});
    add<BatchNormAttributes>({"batch_norm", "batch_norm_backward", "batch_norm_act", "batch_norm_act_backward"});
    add<ConvAttributes>({"conv2d", "conv_transpose2d", "conv2d_backward_input", "conv2d_backward_weight"});
    add<PoolAttributes>({"max_pool2d", "max_pool2d_backward", "max_pool2d_pick", "avg_pool2d", "avg_pool2d_backward"});
    add<AdaptivePoolAttributes>({"adaptive_avg_pool2d", "adaptive_avg_pool2d_backward", "adaptive_max_pool2d",
                                 "adaptive_max_pool2d_backward", "adaptive_max_pool2d_pick"});
    add<InterpolateAttributes>({"interpolate", "interpolate_backward"});
    add<PadAttributes>({"pad", "pad_backward"});
    add<EmbeddingAttributes>({"embedding", "embedding_backward"});
    add<AttentionAttributes>({"scaled_dot_product_attention", "scaled_dot_product_attention_backward"});
    add<ViewAttributes>({"view", "permute", "expand", "squeeze", "unsqueeze", "select", "slice", "slice_backward",
                         "clone", "pick_along", "put_along"});
  }
  template <class A>
  void add(std::initializer_list<std::string_view> ops) {
    for (const std::string_view op : ops) emplace(op, kKnown<A>);
  }
};

// What is known of the op's attributes; nothing for ops of programs.
const Known* known(const Op& op) {
  static const Table& table = *new Table;
  const auto it = table.find(op.name);
  return it != table.end() && it->second.size == op.attributes_size ? &it->second : nullptr;
}

}  // namespace

Json number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

Json attributes_of(const ObservedCall& call) {
  if (!call.op || !call.attributes || call.op->attributes_size == 0) return nullptr;
  if (const Known* k = known(*call.op)) return k->describe(call.attributes);
  std::string bytes;
  for (std::uint32_t i = 0; i < call.op->attributes_size; ++i) {
    bytes += fmt::format("{:02x}", static_cast<const unsigned char*>(call.attributes)[i]);
  }
  return {{"bytes", bytes}};
}

void widen_results(const Op& op, void* attributes, DType dtype) {
  if (const Known* k = known(op)) {
    k->widen(attributes, dtype);
  } else if (op.dtype_attribute >= 0) {
    widen(*reinterpret_cast<OptionalDType*>(static_cast<char*>(attributes) + op.dtype_attribute), dtype);
  }
}

}  // namespace halfstep::debug::detail
