// SPDX-License-Identifier: Apache-2.0
// Every row of the policy table whose op exists, as PyTorch's CUDA list has it: dtypes exactly, values against float64
// within the bounds of tests/goldens/README.md, and the same bits as casts made by hand with autocast off.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>

#include "halfstep/amp/autocast.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/einsum.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/triangle.h"
#if __has_include("halfstep/ops/norm.h")
#include "halfstep/ops/norm.h"
#endif
#if __has_include("halfstep/ops/pair_loss.h")
#include "halfstep/ops/pair_loss.h"
#endif
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

using test::GoldenCall;
using test::GoldenEntry;
using Tensors = std::vector<Tensor>;

Reduction reduction(const GoldenEntry& e) {
  const std::string text = e.text("reduction");
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

void add_products(std::map<std::string, GoldenCall>& r) {
  r["matmul"] = binary(matmul);
  r["mm"] = call_of([](auto&, auto& in) { return mm(in[0], in[1]); });
  r["bmm"] = call_of([](auto&, auto& in) { return bmm(in[0], in[1]); });
  r["mv"] = binary(mv);
  r["linear"] = call_of([](auto&, auto& in) { return linear(in[0], in[1], in.size() > 2 ? in[2] : Tensor()); });
  r["addmm"] = call_of(
      [](auto& e, auto& in) { return addmm(in[0], in[1], in[2], {.beta = e.real("beta"), .alpha = e.real("alpha")}); });
  r["baddbmm"] = call_of([](auto& e, auto& in) {
    return baddbmm(in[0], in[1], in[2], {.beta = e.real("beta"), .alpha = e.real("alpha")});
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
}

void add_reductions(std::map<std::string, GoldenCall>& r) {
  r["sum"] = call_of([](auto& e, auto& in) {
    return sum(in[0], test::golden_dims(e), {.keepdim = e.flag("keepdim", false), .dtype = dtype_attribute(e)});
  });
  const auto dims = test::golden_dims;
  r["mean"] = call_of([=](auto& e, auto& in) { return mean(in[0], dims(e), {.keepdim = e.flag("keepdim", false)}); });
  r["prod"] = call_of([=](auto& e, auto& in) { return prod(in[0], dims(e), {.keepdim = e.flag("keepdim", false)}); });
  r["var"] = call_of([=](auto& e, auto& in) { return var(in[0], dims(e), {.correction = e.real("correction")}); });
  r["std"] = call_of([=](auto& e, auto& in) { return std(in[0], dims(e), {.correction = e.real("correction")}); });
  r["amax"] = call_of([=](auto& e, auto& in) { return amax(in[0], dims(e)); });
  r["amin"] = call_of([=](auto& e, auto& in) { return amin(in[0], dims(e)); });
  r["argmax"] = call_of([](auto& e, auto& in) { return argmax(in[0], e.integer("dim")); });
  r["norm"] = call_of([=](auto& e, auto& in) {
    const double p = e.has("p") && std::holds_alternative<std::string>(e.attributes.at("p"))
                         ? std::numeric_limits<double>::infinity()
                         : e.real("p");
    return norm(in[0], p, dims(e), {.keepdim = e.flag("keepdim", false), .dtype = dtype_attribute(e)});
  });
  r["logsumexp"] = call_of([=](auto& e, auto& in) { return logsumexp(in[0], dims(e)); });
  r["cumsum"] = call_of([](auto& e, auto& in) { return cumsum(in[0], e.integer("dim")); });
  r["cumprod"] = call_of([](auto& e, auto& in) { return cumprod(in[0], e.integer("dim")); });
  r["dot"] = call_of([](auto&, auto& in) { return dot(in[0], in[1]); });
  r["softmax"] =
      call_of([](auto& e, auto& in) { return softmax(in[0], e.integer("dim"), {.dtype = dtype_attribute(e)}); });
  r["log_softmax"] =
      call_of([](auto& e, auto& in) { return log_softmax(in[0], e.integer("dim"), {.dtype = dtype_attribute(e)}); });
  r["nll_loss"] = call_of([](auto& e, auto& in) { return nll_loss(in[0], in[1], {.reduction = reduction(e)}); });
  r["cross_entropy"] = call_of([](auto& e, auto& in) {
    return cross_entropy(in[0], in[1], {.reduction = reduction(e), .label_smoothing = e.real("label_smoothing", 0)});
  });
}

void add_norms_and_losses(std::map<std::string, GoldenCall>& r) {
  r["layer_norm"] = call_of([](auto& e, auto& in) {
    return layer_norm(in[0], Shape(e.integers("normalized_shape")),
                      {.weight = in[1], .bias = in[2], .eps = e.real("eps")});
  });
  r["rms_norm"] = call_of([](auto& e, auto& in) {
    return rms_norm(in[0], Shape(e.integers("normalized_shape")), {.weight = in[1], .eps = e.real("eps")});
  });
  r["group_norm"] = call_of([](auto& e, auto& in) {
    return group_norm(in[0], e.integer("num_groups"), {.weight = in[1], .bias = in[2], .eps = e.real("eps")});
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
  r["smooth_l1_loss"] =
      call_of([](auto& e, auto& in) { return smooth_l1_loss(in[0], in[1], {.reduction = reduction(e)}); });
  r["huber_loss"] = call_of([](auto& e, auto& in) { return huber_loss(in[0], in[1], {.reduction = reduction(e)}); });
  r["kl_div"] = call_of([](auto& e, auto& in) {
    return kl_div(in[0], in[1], {.reduction = reduction(e), .log_target = e.flag("log_target", false)});
  });
  r["binary_cross_entropy_with_logits"] = call_of(
      [](auto& e, auto& in) { return binary_cross_entropy_with_logits(in[0], in[1], {.reduction = reduction(e)}); });
  r["binary_cross_entropy"] =
      call_of([](auto& e, auto& in) { return binary_cross_entropy(in[0], in[1], {.reduction = reduction(e)}); });
}

void add_indexing(std::map<std::string, GoldenCall>& r) {
  r["cat"] = call_of([](auto& e, auto& in) { return cat(std::span<const Tensor>(in), e.integer("dim")); });
  r["stack"] = call_of([](auto& e, auto& in) { return stack(std::span<const Tensor>(in), e.integer("dim")); });
  r["embedding"] = call_of([](auto&, auto& in) { return embedding(in[1], in[0]); });
  r["gather"] = call_of([](auto& e, auto& in) { return gather(in[0], e.integer("dim"), in[1]); });
  r["scatter_add"] = call_of([](auto& e, auto& in) { return scatter_add(in[0], e.integer("dim"), in[1], in[2]); });
  r["index_put"] = call_of([](auto& e, auto& in) { return index_put(in[0], {in[1]}, in[2], e.flag("accumulate")); });
  r["tril"] = call_of([](auto& e, auto& in) { return tril(in[0], e.integer("diagonal")); });
  r["einsum"] = call_of([](auto& e, auto& in) { return einsum(e.text("equation"), in); });
}

const std::map<std::string, GoldenCall>& registry() {
  static const auto all = [] {
    std::map<std::string, GoldenCall> r;
    add_products(r);
    add_elementwise(r);
    add_reductions(r);
    add_norms_and_losses(r);
    add_indexing(r);
    return r;
  }();
  return all;
}

DType region_of(const GoldenEntry& e) { return e.text("region") == "f16" ? f16 : bf16; }

// What the policy makes of the inputs, by hand; nothing for results whose dtype alone is set.
std::optional<Tensors> cast_by_hand(const GoldenEntry& e, const Tensors& inputs) {
  const std::string policy = e.text("policy");
  const auto eligible = [](const Tensor& t) { return t.dtype() == f32 || t.dtype() == f16 || t.dtype() == bf16; };
  std::optional<DType> to;
  if (policy == "lower") to = region_of(e);
  if (policy == "fp32") to = f32;
  if (policy == "fp32_dtype") return std::nullopt;
  if (policy == "promote") {
    for (const Tensor& t : inputs) {
      if (eligible(t)) to = !to || *to == t.dtype() ? t.dtype() : f32;
    }
  }
  Tensors result = inputs;
  if (to) {
    for (Tensor& t : result) {
      if (eligible(t)) t = t.to(*to);
    }
  }
  return result;
}

double half_unit(DType d) { return d == f64 ? 0x1p-53 : d == f16 ? 0x1p-11 : d == bf16 ? 0x1p-8 : 0x1p-24; }

void check_values(const GoldenEntry& e, const Tensor& ours, std::size_t i) {
  ASSERT_EQ(std::string(name(ours.dtype())), e.outputs[i].dtype);
  ASSERT_EQ(ours.sizes(), Shape(e.outputs[i].shape));
  const auto values = ours.to_vector<double>();
  if (!ours.is_floating()) {
    EXPECT_EQ(values, e.outputs[i].data);
    return;
  }
  const auto& exact = e.exact.at(i).data;
  double scale = 0;
  for (const double v : exact) scale = std::isfinite(v) ? std::max(scale, std::abs(v)) : scale;
  const double u32 = 0x1p-24, terms = e.has("terms") ? e.real("terms") : 0;
  for (std::size_t k = 0; k < values.size(); ++k) {
    if (!std::isfinite(exact[k]) || !std::isfinite(e.outputs[i].data[k])) {
      EXPECT_EQ(std::isnan(values[k]), std::isnan(e.outputs[i].data[k])) << k;
      if (!std::isnan(values[k])) {
        EXPECT_EQ(values[k], e.outputs[i].data[k]) << k;
      }
      continue;
    }
    const double room = e.tensors.contains("magnitude")
                            ? terms * u32 / (1 - terms * u32) * e.tensor("magnitude").data[k]
                            : 16 * u32 * scale;
    EXPECT_NEAR(values[k], exact[k],
                half_unit(ours.dtype()) * std::abs(exact[k]) + room + (ours.dtype() == f16 ? 0x1p-25 : 0))
        << k;
  }
}

TEST(PolicyOps, MatchPyTorchsListInDtypesAndValues) {
  std::set<std::string> missing;
  int run = 0;
  for (const GoldenEntry& e : test::read_goldens("policy_ops.json")) {
    const auto found = registry().find(e.op);
    if (found == registry().end()) {
      if (find_op(e.op)) missing.insert(e.op);
      continue;
    }
    SCOPED_TRACE(e.name);
    ++run;
    Tensors inputs;
    for (const test::GoldenTensor& t : e.inputs) inputs.push_back(test::to_tensor(t));
    if (e.flag("throws", false) && e.text("policy") == "banned") {
      const amp::Autocast region{{.dtype = region_of(e)}};
      EXPECT_THROW(found->second(e, inputs), AmpError);
      continue;
    }
    const Tensors ours = [&] {
      const amp::Autocast region{{.dtype = region_of(e)}};
      return found->second(e, inputs);
    }();
    if (e.flag("throws", false)) {
      // PyTorch throws for the half type that isn't the region's, in an order of arguments of its choice; here the
      // widest dtype holds whatever the order.
      EXPECT_EQ(ours[0].dtype(), f32);
    } else {
      ASSERT_EQ(ours.size(), e.outputs.size());
      for (std::size_t i = 0; i < ours.size(); ++i) check_values(e, ours[i], i);
    }
    if (const auto cast = cast_by_hand(e, inputs)) {
      const Tensors by_hand = found->second(e, *cast);
      for (std::size_t i = 0; i < ours.size(); ++i) {
        EXPECT_EQ(ours[i].dtype(), by_hand[i].dtype());
        const auto a = ours[i].to_vector<double>(), b = by_hand[i].to_vector<double>();
        EXPECT_TRUE(a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0) << "other bits";
      }
    }
  }
  EXPECT_GT(run, 200);
  std::string list;
  for (const std::string& op : missing) list += op + " ";
  EXPECT_TRUE(missing.empty()) << "ops that exist, but this test doesn't call: " << list;
}

}  // namespace
}  // namespace halfstep
