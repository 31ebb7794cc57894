// SPDX-License-Identifier: Apache-2.0
#include "tests/support/golden_calls.h"

#include <limits>

#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attention.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/detection.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/einsum.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/pad.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/quantize.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/resample.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/sort.h"
#include "halfstep/ops/triangle.h"
#include "halfstep/ops/view.h"

namespace halfstep::test {
namespace {

using Tensors = std::vector<Tensor>;

Reduction reduction(const GoldenEntry& e) {
  const std::string text = e.text("reduction", "mean");
  if (text == "batchmean") return Reduction::batchmean;
  return text == "none" ? Reduction::none : text == "sum" ? Reduction::sum : Reduction::mean;
}

std::optional<DType> dtype_attribute(const GoldenEntry& e) {
  if (!e.has("dtype")) return std::nullopt;
  return e.text("dtype") == "f64" ? f64 : e.text("dtype") == "f16" ? f16 : e.text("dtype") == "bf16" ? bf16 : f32;
}

GoldenCall unary(Tensor (*f)(const Tensor&)) {
  return [f](const GoldenEntry&, const Tensors& in) { return Tensors{f(in[0])}; };
}
GoldenCall binary(Tensor (*f)(const Tensor&, const Tensor&)) {
  return [f](const GoldenEntry&, const Tensors& in) { return Tensors{f(in[0], in[1])}; };
}

template <class F>
GoldenCall call_of(F f) {
  return [f](const GoldenEntry& e, const Tensors& in) { return Tensors{f(e, in)}; };
}

/// An input that some entries have.
Tensor at(const Tensors& in, std::size_t i) { return i < in.size() ? in[i] : Tensor(); }
Tensor given(const GoldenEntry& e, const char* flag, const Tensors& in, std::size_t i) {
  return e.flag(flag, false) ? at(in, i) : Tensor();
}

void add_products(std::map<std::string, GoldenCall>& r) {
  r["matmul"] = binary(matmul);
  r["mm"] = call_of([](auto&, auto& in) { return mm(in[0], in[1]); });
  r["bmm"] = call_of([](auto&, auto& in) { return bmm(in[0], in[1]); });
  r["mv"] = binary(mv);
  r["linear"] = call_of([](auto&, auto& in) { return linear(in[0], in[1], in.size() > 2 ? in[2] : Tensor()); });
  const auto with_factors = [](auto f) {
    return call_of([f](auto& e, auto& in) {
      return f(in[0], in[1], in[2], AddmmOptions{.beta = e.real("beta"), .alpha = e.real("alpha")});
    });
  };
  r["addmm"] = with_factors(addmm);
  r["addmv"] = with_factors(addmv);
  r["addr"] = with_factors(addr);
  r["addbmm"] = with_factors(addbmm);
  r["baddbmm"] = with_factors(baddbmm);
  r["outer"] = binary(outer);
  r["tensordot"] =
      call_of([](auto& e, auto& in) { return tensordot(in[0], in[1], static_cast<int>(e.integer("dims"))); });
  r["scaled_dot_product_attention"] = call_of([](auto& e, auto& in) {
    AttentionOptions options{.is_causal = e.flag("is_causal"), .enable_gqa = e.flag("enable_gqa", false)};
    if (in.size() > 3) options.mask = in[3];
    if (e.has("scale")) options.scale = e.real("scale");
    return scaled_dot_product_attention(in[0], in[1], in[2], options);
  });
  r["prelu"] = binary(prelu);
}

void add_elementwise(std::map<std::string, GoldenCall>& r) {
  for (const auto& [name, f] :
       std::map<std::string, Tensor (*)(const Tensor&)>{{"exp", exp},       {"expm1", expm1},
                                                        {"log", log},       {"log2", log2},
                                                        {"log10", log10},   {"log1p", log1p},
                                                        {"rsqrt", rsqrt},   {"acos", acos},
                                                        {"asin", asin},     {"cosh", cosh},
                                                        {"sinh", sinh},     {"tan", tan},
                                                        {"erfinv", erfinv}, {"relu", relu},
                                                        {"silu", silu},     {"sigmoid", sigmoid},
                                                        {"tanh", tanh},     {"abs", abs},
                                                        {"neg", neg},       {"square", square},
                                                        {"sin", sin},       {"cos", cos},
                                                        {"erf", erf},       {"sign", sign},
                                                        {"sqrt", sqrt},     {"reciprocal", reciprocal}}) {
    r[name] = unary(f);
  }
  r["softplus"] = call_of([](auto&, auto& in) { return softplus(in[0]); });
  r["pow"] = call_of([](auto& e, auto& in) {
    if (e.has("exponent")) return pow(in[0], e.real("exponent"));
    if (e.has("base")) return pow(Scalar(e.real("base")), in[0]);
    return pow(in[0], in[1]);
  });
  r["add"] = call_of([](auto&, auto& in) { return add(in[0], in[1]); });
  r["sub"] = call_of([](auto&, auto& in) { return sub(in[0], in[1]); });
  r["mul"] = call_of([](auto&, auto& in) { return mul(in[0], in[1]); });
  r["div"] = call_of([](auto&, auto& in) { return div(in[0], in[1]); });
  r["maximum"] = binary(maximum);
  r["minimum"] = binary(minimum);
  r["atan2"] = binary(atan2);
  r["addcmul"] = call_of([](auto& e, auto& in) { return addcmul(in[0], in[1], in[2], e.real("value")); });
  r["addcdiv"] = call_of([](auto& e, auto& in) { return addcdiv(in[0], in[1], in[2], e.real("value")); });
  r["gelu"] = call_of([](auto& e, auto& in) {
    return gelu(in[0], e.text("approximate") == "tanh" ? GeluForm::tanh : GeluForm::exact);
  });
  r["leaky_relu"] = call_of([](auto& e, auto& in) { return leaky_relu(in[0], e.real("negative_slope")); });
  r["where"] = call_of([](auto&, auto& in) { return where(in[0], in[1], in[2]); });
  r["clamp"] = call_of([](auto& e, auto& in) { return clamp(in[0], Scalar(e.real("min")), Scalar(e.real("max"))); });
  r["masked_fill"] = call_of([](auto& e, auto& in) { return masked_fill(in[0], in[1], e.real("value")); });
  r["lt"] = call_of([](auto&, auto& in) { return lt(in[0], in[1]); });
  r["dropout"] = call_of([](auto& e, auto& in) { return dropout(in[0], e.real("p"), e.flag("training")); });
  r["fake_quantize"] = call_of([](auto& e, auto& in) {
    return fake_quantize(in[0], in[1], in[2], {e.integer("quant_min"), e.integer("quant_max")});
  });
  r["fake_quantize_learnable"] = call_of([](auto& e, auto& in) {
    return fake_quantize_learnable(in[0], in[1], in[2], {e.integer("quant_min"), e.integer("quant_max")});
  });
}

void add_reductions(std::map<std::string, GoldenCall>& r) {
  r["sum"] = call_of([](auto& e, auto& in) {
    return sum(in[0], test::golden_dims(e), {.keepdim = e.flag("keepdim", false), .dtype = dtype_attribute(e)});
  });
  const auto dims = golden_dims;
  const auto keep = [](const GoldenEntry& e) { return KeepOptions{.keepdim = e.flag("keepdim", false)}; };
  const auto options = [](const GoldenEntry& e) {
    return ReduceOptions{.keepdim = e.flag("keepdim", false), .dtype = dtype_attribute(e)};
  };
  const auto var_options = [](const GoldenEntry& e) {
    return VarOptions{.correction = e.real("correction", 1), .keepdim = e.flag("keepdim", false)};
  };
  const auto dim = [](const GoldenEntry& e) {
    return e.has("dim") ? std::optional<std::int64_t>(e.integer("dim")) : std::nullopt;
  };
  const auto order = [](const GoldenEntry& e) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (!std::holds_alternative<std::string>(e.attributes.at("p"))) return e.real("p");
    return e.text("p") == "-inf" ? -kInfinity : kInfinity;
  };
  r["mean"] = call_of([=](auto& e, auto& in) { return mean(in[0], dims(e), options(e)); });
  r["prod"] = call_of([=](auto& e, auto& in) { return prod(in[0], dims(e), options(e)); });
  r["var"] = call_of([=](auto& e, auto& in) { return var(in[0], dims(e), var_options(e)); });
  r["std"] = call_of([=](auto& e, auto& in) { return std(in[0], dims(e), var_options(e)); });
  r["amax"] = call_of([=](auto& e, auto& in) { return amax(in[0], dims(e), keep(e)); });
  r["amin"] = call_of([=](auto& e, auto& in) { return amin(in[0], dims(e), keep(e)); });
  r["any"] = call_of([=](auto& e, auto& in) { return any(in[0], dims(e), keep(e)); });
  r["all"] = call_of([=](auto& e, auto& in) { return all(in[0], dims(e), keep(e)); });
  r["argmax"] = call_of([=](auto& e, auto& in) { return argmax(in[0], dim(e), keep(e)); });
  r["argmin"] = call_of([=](auto& e, auto& in) { return argmin(in[0], dim(e), keep(e)); });
  r["norm"] = call_of([=](auto& e, auto& in) { return norm(in[0], order(e), dims(e), options(e)); });
  r["logsumexp"] = call_of([=](auto& e, auto& in) { return logsumexp(in[0], dims(e), keep(e)); });
  r["cumsum"] =
      call_of([](auto& e, auto& in) { return cumsum(in[0], e.integer("dim"), {.dtype = dtype_attribute(e)}); });
  r["cumprod"] =
      call_of([](auto& e, auto& in) { return cumprod(in[0], e.integer("dim"), {.dtype = dtype_attribute(e)}); });
  r["max"] = [=](const GoldenEntry& e, const Tensors& in) {
    if (!e.has("dim")) return Tensors{max(in[0])};
    const auto [values, indices] = max(in[0], e.integer("dim"), keep(e));
    return Tensors{values, indices};
  };
  r["min"] = [=](const GoldenEntry& e, const Tensors& in) {
    if (!e.has("dim")) return Tensors{min(in[0])};
    const auto [values, indices] = min(in[0], e.integer("dim"), keep(e));
    return Tensors{values, indices};
  };
  r["dot"] = call_of([](auto&, auto& in) { return dot(in[0], in[1]); });
  r["softmax"] =
      call_of([](auto& e, auto& in) { return softmax(in[0], e.integer("dim"), {.dtype = dtype_attribute(e)}); });
  r["log_softmax"] =
      call_of([](auto& e, auto& in) { return log_softmax(in[0], e.integer("dim"), {.dtype = dtype_attribute(e)}); });
  r["nll_loss"] = call_of([](auto& e, auto& in) {
    return nll_loss(in[0], in[1],
                    {.weight = given(e, "weighted", in, 2),
                     .reduction = reduction(e),
                     .ignore_index = e.integer("ignore_index", -100)});
  });
  r["cross_entropy"] = call_of([](auto& e, auto& in) {
    return cross_entropy(in[0], in[1],
                         {.weight = given(e, "weighted", in, 2),
                          .reduction = reduction(e),
                          .ignore_index = e.integer("ignore_index", -100),
                          .label_smoothing = e.real("label_smoothing", 0)});
  });
}

void add_norms_and_losses(std::map<std::string, GoldenCall>& r) {
  r["layer_norm"] = call_of([](auto& e, auto& in) {
    return layer_norm(in[0], Shape(e.integers("normalized_shape")),
                      {.weight = at(in, 1), .bias = at(in, 2), .eps = e.real("eps")});
  });
  r["rms_norm"] = call_of([](auto& e, auto& in) {
    return rms_norm(in[0], Shape(e.integers("normalized_shape")), {.weight = at(in, 1), .eps = e.real("eps")});
  });
  r["group_norm"] = call_of([](auto& e, auto& in) {
    return group_norm(in[0], e.integer("num_groups"), {.weight = at(in, 1), .bias = at(in, 2), .eps = e.real("eps")});
  });
  r["batch_norm"] = [](const GoldenEntry& e, const Tensors& in) {
    // The running statistics are written to: each call gets its own.
    const Tensor mean = in[3].clone(), var = in[4].clone();
    Tensors result{batch_norm(in[0], {.weight = in[1],
                                      .bias = in[2],
                                      .running_mean = mean,
                                      .running_var = var,
                                      .training = e.flag("training"),
                                      .momentum = e.real("momentum"),
                                      .eps = e.real("eps")})};
    if (e.outputs.size() == 3) result.insert(result.end(), {mean, var});
    return result;
  };
  r["cosine_similarity"] = call_of([](auto& e, auto& in) {
    return cosine_similarity(in[0], in[1], {.dim = e.integer("dim"), .eps = e.real("eps")});
  });
  r["mse_loss"] = call_of([](auto& e, auto& in) { return mse_loss(in[0], in[1], {.reduction = reduction(e)}); });
  r["l1_loss"] = call_of([](auto& e, auto& in) { return l1_loss(in[0], in[1], {.reduction = reduction(e)}); });
  r["smooth_l1_loss"] = call_of([](auto& e, auto& in) {
    return smooth_l1_loss(in[0], in[1], {.reduction = reduction(e), .beta = e.real("beta", 1)});
  });
  r["huber_loss"] = call_of([](auto& e, auto& in) {
    return huber_loss(in[0], in[1], {.reduction = reduction(e), .delta = e.real("delta", 1)});
  });
  r["kl_div"] = call_of([](auto& e, auto& in) {
    return kl_div(in[0], in[1], {.reduction = reduction(e), .log_target = e.flag("log_target", false)});
  });
  r["binary_cross_entropy_with_logits"] = call_of([](auto& e, auto& in) {
    return binary_cross_entropy_with_logits(in[0], in[1],
                                            {.weight = given(e, "weighted", in, 2),
                                             .pos_weight = given(e, "pos_weighted", in, 3),
                                             .reduction = reduction(e)});
  });
  r["binary_cross_entropy"] = call_of([](auto& e, auto& in) {
    return binary_cross_entropy(in[0], in[1], {.weight = given(e, "weighted", in, 2), .reduction = reduction(e)});
  });
}

void add_indexing(std::map<std::string, GoldenCall>& r) {
  r["cat"] = call_of([](auto& e, auto& in) { return cat(std::span<const Tensor>(in), e.integer("dim")); });
  r["stack"] = call_of([](auto& e, auto& in) { return stack(std::span<const Tensor>(in), e.integer("dim")); });
  r["embedding"] = call_of([](auto& e, auto& in) {
    return embedding(
        in[1], in[0],
        e.has("padding_idx") ? EmbeddingFuncOptions{.padding_idx = e.integer("padding_idx")} : EmbeddingFuncOptions{});
  });
  r["gather"] = call_of([](auto& e, auto& in) { return gather(in[0], e.integer("dim"), in[1]); });
  r["scatter_amax"] = call_of([](auto& e, auto& in) { return scatter_amax(in[0], e.integer("dim"), in[1], in[2]); });
  r["scatter_add"] = call_of([](auto& e, auto& in) { return scatter_add(in[0], e.integer("dim"), in[1], in[2]); });
  r["index_put"] = call_of([](auto& e, auto& in) { return index_put(in[0], {in[1]}, in[2], e.flag("accumulate")); });
  r["tril"] = call_of([](auto& e, auto& in) { return tril(in[0], e.integer("diagonal")); });
  r["einsum"] = call_of([](auto& e, auto& in) { return einsum(e.text("equation"), in); });
}

void add_shapes(std::map<std::string, GoldenCall>& r) {
  r["triu"] = call_of([](auto& e, auto& in) { return triu(in[0], e.integer("diagonal")); });
  r["diagonal"] = call_of(
      [](auto& e, auto& in) { return diagonal(in[0], e.integer("offset"), e.integer("dim1"), e.integer("dim2")); });
  r["reshape"] = call_of([](auto& e, auto& in) { return in[0].reshape(Shape(e.integers("shape"))); });
  r["expand"] = call_of([](auto& e, auto& in) { return in[0].expand(Shape(e.integers("shape"))); });
  r["flatten"] =
      call_of([](auto& e, auto& in) { return flatten(in[0], e.integer("start_dim"), e.integer("end_dim")); });
  r["transpose"] = call_of([](auto& e, auto& in) { return in[0].transpose(e.integer("dim0"), e.integer("dim1")); });
  r["permute"] = call_of([](auto& e, auto& in) { return in[0].permute(Shape(e.integers("dims"))); });
  r["squeeze"] = call_of([](auto& e, auto& in) { return in[0].squeeze(e.integer("dim")); });
  r["unsqueeze"] = call_of([](auto& e, auto& in) { return in[0].unsqueeze(e.integer("dim")); });
  r["narrow"] = call_of(
      [](auto& e, auto& in) { return in[0].narrow(e.integer("dim"), e.integer("start"), e.integer("length")); });
  r["slice"] = call_of([](auto& e, auto& in) {
    return in[0].slice(e.integer("dim"), e.integer("start"), e.integer("end"), e.integer("step"));
  });
  r["select"] = call_of([](auto& e, auto& in) { return in[0].select(e.integer("dim"), e.integer("index")); });
  r["flip"] = call_of([](auto& e, auto& in) { return flip(in[0], Shape(e.integers("dims"))); });
  r["roll"] =
      call_of([](auto& e, auto& in) { return roll(in[0], Shape(e.integers("shifts")), Shape(e.integers("dim"))); });
  r["repeat"] = call_of([](auto& e, auto& in) { return repeat(in[0], Shape(e.integers("repeats"))); });
  r["split"] = [](const GoldenEntry& e, const Tensors& in) {
    if (e.has("size")) return split(in[0], e.integer("size"), e.integer("dim"));
    return split(in[0], e.integers("sizes"), e.integer("dim"));
  };
  r["chunk"] = [](const GoldenEntry& e, const Tensors& in) {
    return chunk(in[0], e.integer("chunks"), e.integer("dim"));
  };
  r["unbind"] = [](const GoldenEntry& e, const Tensors& in) { return unbind(in[0], e.integer("dim")); };
  r["scatter"] = call_of([](auto& e, auto& in) { return scatter(in[0], e.integer("dim"), in[1], in[2]); });
  r["index_select"] = call_of([](auto& e, auto& in) { return index_select(in[0], e.integer("dim"), in[1]); });
  r["index_add"] = call_of(
      [](auto& e, auto& in) { return index_add(in[0], e.integer("dim"), in[1], in[2], Scalar(e.real("alpha", 1.0))); });
  r["one_hot"] = call_of([](auto& e, auto& in) { return one_hot(in[0], e.integer("num_classes")); });
  r["sort"] = [](const GoldenEntry& e, const Tensors& in) {
    const auto [values, indices] = sort(in[0], e.integer("dim"), {.descending = e.flag("descending")});
    return Tensors{values, indices};
  };
  r["topk"] = [](const GoldenEntry& e, const Tensors& in) {
    const auto [values, indices] = topk(in[0], e.integer("k"), e.integer("dim"), {.largest = e.flag("largest")});
    return Tensors{values, indices};
  };
}

void add_convolutions(std::map<std::string, GoldenCall>& r) {
  const auto list = [](const GoldenEntry& e, const char* name, std::int64_t otherwise) {
    return e.has(name) ? Shape(e.integers(name)) : Shape{otherwise};
  };
  const auto options = [=](const GoldenEntry& e) {
    return ConvFuncOptions{.stride = list(e, "stride", 1),
                           .padding = list(e, "padding", 0),
                           .dilation = list(e, "dilation", 1),
                           .groups = e.has("groups") ? e.integer("groups") : 1};
  };
  const auto transposed = [=](const GoldenEntry& e) {
    return ConvTransposeFuncOptions{.stride = list(e, "stride", 1),
                                    .padding = list(e, "padding", 0),
                                    .output_padding = list(e, "output_padding", 0),
                                    .groups = e.has("groups") ? e.integer("groups") : 1,
                                    .dilation = list(e, "dilation", 1)};
  };
  r["conv1d"] = call_of([=](auto& e, auto& in) { return conv1d(in[0], in[1], at(in, 2), options(e)); });
  r["conv2d"] = call_of([=](auto& e, auto& in) { return conv2d(in[0], in[1], at(in, 2), options(e)); });
  r["conv_transpose1d"] =
      call_of([=](auto& e, auto& in) { return conv_transpose1d(in[0], in[1], at(in, 2), transposed(e)); });
  r["conv_transpose2d"] =
      call_of([=](auto& e, auto& in) { return conv_transpose2d(in[0], in[1], at(in, 2), transposed(e)); });
}

void add_images(std::map<std::string, GoldenCall>& r) {
  const auto sizes = [](const GoldenEntry& e, const char* name, Shape otherwise) {
    return e.has(name) ? Shape(e.integers(name)) : otherwise;
  };
  const auto max_options = [=](const GoldenEntry& e) {
    return MaxPoolFuncOptions{.stride = sizes(e, "stride", {}),
                              .padding = sizes(e, "padding", {0}),
                              .dilation = sizes(e, "dilation", {1}),
                              .ceil_mode = e.flag("ceil_mode", false)};
  };
  const auto avg_options = [=](const GoldenEntry& e) {
    AvgPoolFuncOptions o{.stride = sizes(e, "stride", {}),
                         .padding = sizes(e, "padding", {0}),
                         .ceil_mode = e.flag("ceil_mode", false),
                         .count_include_pad = e.flag("count_include_pad", true)};
    if (e.has("divisor_override")) o.divisor_override = e.integer("divisor_override");
    return o;
  };
  const auto kernel = [](const GoldenEntry& e) { return Shape(e.integers("kernel")); };
  const auto size = [](const GoldenEntry& e) { return Shape(e.integers("size")); };
  r["max_pool2d"] = [=](const GoldenEntry& e, const Tensors& in) {
    if (e.outputs.size() == 1) return Tensors{max_pool2d(in[0], kernel(e), max_options(e))};
    const auto [values, indices] = max_pool2d_with_indices(in[0], kernel(e), max_options(e));
    return Tensors{values, indices};
  };
  r["max_pool1d"] = call_of([=](auto& e, auto& in) { return max_pool1d(in[0], kernel(e), max_options(e)); });
  r["avg_pool2d"] = call_of([=](auto& e, auto& in) { return avg_pool2d(in[0], kernel(e), avg_options(e)); });
  r["avg_pool1d"] = call_of([=](auto& e, auto& in) { return avg_pool1d(in[0], kernel(e), avg_options(e)); });
  r["adaptive_avg_pool2d"] = call_of([=](auto& e, auto& in) { return adaptive_avg_pool2d(in[0], size(e)); });
  r["adaptive_avg_pool1d"] = call_of([=](auto& e, auto& in) { return adaptive_avg_pool1d(in[0], size(e)); });
  r["adaptive_max_pool2d"] = [=](const GoldenEntry& e, const Tensors& in) {
    const auto [values, indices] = adaptive_max_pool2d_with_indices(in[0], size(e));
    return Tensors{values, indices};
  };
  r["interpolate"] = call_of([=](auto& e, auto& in) {
    const std::string mode = e.text("mode");
    InterpolateOptions o{.size = sizes(e, "size", {}),
                         .mode = mode == "bilinear"  ? InterpolateMode::bilinear
                                 : mode == "nearest" ? InterpolateMode::nearest
                                                     : InterpolateMode::nearest_exact,
                         .align_corners = e.flag("align_corners", false),
                         .recompute_scale_factor = e.flag("recompute", false)};
    if (e.has("scale_factor")) o.scale_factor = e.reals("scale_factor");
    return interpolate(in[0], o);
  });
  const auto kind = [](const GoldenEntry& e) {
    const std::string text = e.text("kind");
    return text == "iou" ? BoxIou::iou : text == "giou" ? BoxIou::giou : text == "diou" ? BoxIou::diou : BoxIou::ciou;
  };
  const auto format = [](const GoldenEntry& e, const char* key) {
    const std::string text = e.text(key);
    return text == "xyxy" ? BoxFormat::xyxy : text == "xywh" ? BoxFormat::xywh : BoxFormat::cxcywh;
  };
  r["box_iou"] = call_of([=](auto& e, auto& in) { return box_iou(in[0], in[1], {.kind = kind(e)}); });
  r["paired_box_iou"] = call_of([=](auto& e, auto& in) { return paired_box_iou(in[0], in[1], {.kind = kind(e)}); });
  r["box_convert"] =
      call_of([=](auto& e, auto& in) { return box_convert(in[0], format(e, "source"), format(e, "target")); });
  r["box_area"] = call_of([](auto&, auto& in) { return box_area(in[0]); });
  r["clip_boxes_to_image"] =
      call_of([](auto& e, auto& in) { return clip_boxes_to_image(in[0], e.real("height"), e.real("width")); });
  r["nms"] = call_of([](auto& e, auto& in) { return nms(in[0], in[1], {.iou_threshold = e.real("iou_threshold")}); });
  r["batched_nms"] = call_of(
      [](auto& e, auto& in) { return batched_nms(in[0], in[1], in[2], {.iou_threshold = e.real("iou_threshold")}); });
  r["roi_align"] = call_of([=](auto& e, auto& in) {
    return roi_align(in[0], in[1],
                     {.output_size = size(e),
                      .spatial_scale = e.real("scale"),
                      .sampling_ratio = e.integer("ratio"),
                      .aligned = e.flag("aligned")});
  });
  r["pad"] = call_of([](auto& e, auto& in) {
    const std::string mode = e.text("mode");
    return pad(in[0], e.integers("pads"),
               mode == "reflect"     ? PadMode::reflect
               : mode == "replicate" ? PadMode::replicate
               : mode == "circular"  ? PadMode::circular
                                     : PadMode::constant,
               e.real("value", 0));
  });
}

}  // namespace

const std::map<std::string, GoldenCall>& golden_calls() {
  static const auto all = [] {
    std::map<std::string, GoldenCall> r;
    add_products(r);
    add_elementwise(r);
    add_reductions(r);
    add_norms_and_losses(r);
    add_indexing(r);
    add_shapes(r);
    add_convolutions(r);
    add_images(r);
    return r;
  }();
  return all;
}

}  // namespace halfstep::test
