// SPDX-License-Identifier: Apache-2.0
// ONNX's operators as recorded ops: arithmetic, activations, products, normalisations, reductions.
#include <cmath>
#include <numeric>

#include "halfstep/core/fail.h"
#include "halfstep/io/onnx_import_internal.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/einsum.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/triangle.h"
#include "halfstep/ops/view.h"

namespace halfstep::io::detail {
namespace {

using C = OnnxCall;
using Ints = std::vector<std::int64_t>;
using std::int64_t;

// A number that the host knows beside a tensor of at least as many dimensions.
std::optional<Scalar> number_beside(C& c, int i, const Tensor& other) {
  if (!c.is_host(i)) return std::nullopt;
  const OnnxHost& h = c.host(i);
  if (h.size() != 1 || h.dims.size() > static_cast<std::size_t>(other.dim())) return std::nullopt;
  if (h.is_floating()) return Scalar(h.floats[0]);
  if (h.dtype == DType::boolean) return Scalar(h.ints[0] != 0);
  return Scalar(h.ints[0]);
}

using WithTensor = Tensor (*)(const Tensor&, const Tensor&);
using WithNumber = Tensor (*)(const Tensor&, Scalar);
using NumberFirst = Tensor (*)(Scalar, const Tensor&);

// Of two inputs, with the numbers that the host knows as numbers.
void binary(C& c, WithTensor tensors, WithNumber number, NumberFirst first) {
  if (c.is_host(1) && !c.is_host(0)) {
    const Tensor x = c.in(0);
    if (const auto n = number_beside(c, 1, x); n && number) return c.out(number(x, *n));
  }
  if (c.is_host(0) && !c.is_host(1)) {
    const Tensor x = c.in(1);
    if (const auto n = number_beside(c, 0, x); n && first) return c.out(first(*n, x));
  }
  c.out(tensors(c.in(0), c.in(1)));
}

void add_op(C& c) {
  binary(
      c, [](const Tensor& a, const Tensor& b) { return a + b; }, [](const Tensor& a, Scalar b) { return a + b; },
      [](Scalar a, const Tensor& b) { return a + b; });
}
void sub_op(C& c) {
  binary(
      c, [](const Tensor& a, const Tensor& b) { return a - b; }, [](const Tensor& a, Scalar b) { return a - b; },
      [](Scalar a, const Tensor& b) { return a - b; });
}
void mul_op(C& c) {
  binary(
      c, [](const Tensor& a, const Tensor& b) { return a * b; }, [](const Tensor& a, Scalar b) { return a * b; },
      [](Scalar a, const Tensor& b) { return a * b; });
}
void div_op(C& c) {
  if (!c.is_host(0) && !c.in(0).is_floating()) c.refuse("divides whole numbers of tensors");
  binary(
      c, [](const Tensor& a, const Tensor& b) { return a / b; }, [](const Tensor& a, Scalar b) { return a / b; },
      [](Scalar a, const Tensor& b) { return a / b; });
}
void pow_op(C& c) {
  binary(
      c, [](const Tensor& a, const Tensor& b) { return pow(a, b); },
      [](const Tensor& a, Scalar b) { return pow(a, b); }, [](Scalar a, const Tensor& b) { return pow(a, b); });
}
void mod_op(C& c) {
  const bool like_c = c.integer("fmod", 0) != 0;
  c.out(like_c ? fmod(c.in(0), c.in(1)) : remainder(c.in(0), c.in(1)));
}
void extreme_op(C& c, bool most) {
  Tensor x = c.in(0);
  for (int i = 1; i < c.inputs(); ++i) x = most ? maximum(x, c.in(i)) : minimum(x, c.in(i));
  c.out(x);
}

template <WithTensor tensors, WithNumber number>
void compare_op(C& c) {
  binary(c, tensors, number, nullptr);
}

void clip(C& c) {
  std::optional<Scalar> low, high;
  if (c.has(1)) low = c.number(1);
  if (c.has(2)) high = c.number(2);
  const Tensor x = c.in(0);
  if (!low && !high) return c.out(x);
  // As networks have it, for those who look for activations.
  if (low && high && x.is_floating() && low->to_double() <= high->to_double()) {
    return c.out(hardtanh(x, low->to_double(), high->to_double()));
  }
  c.out(clamp(x, low, high));
}

void where_op(C& c) { c.out(where(c.in(0), c.in(1), c.in(2))); }

void cast_op(C& c) {
  const Tensor x = c.in(0);
  switch (c.integer("to", 0)) {
    case kOnnxFloat:
    case kOnnxFloat16:
    case kOnnxDouble:
    case kOnnxBfloat16:
      return c.out(x.is_floating() ? x : x.to(DType::f32));  // all floating tensors are float32 here
    case kOnnxInt64:
      return c.out(x.to(DType::i64));
    case kOnnxInt32:
      return c.out(x.to(DType::i32));
    case kOnnxInt8:
      return c.out(x.to(DType::i8));
    case kOnnxUint8:
      return c.out(x.to(DType::u8));
    case kOnnxBool:
      return c.out(x.to(DType::boolean));
    default:
      c.refuse(fmt::format("to type {}, which isn't read", c.integer("to", 0)));
  }
}

// --- activations

void hard_sigmoid(C& c) {
  const double alpha = c.real("alpha", 0.2F), beta = c.real("beta", 0.5);
  if (static_cast<float>(alpha) == 1.0F / 6 && beta == 0.5) return c.out(hardsigmoid(c.in(0)));
  c.out(clamp(c.in(0) * alpha + beta, 0, 1));
}
void selu_op(C& c) {
  const double alpha = c.real("alpha", 1.67326319217681884765625), gamma = c.real("gamma", 1.05070102214813232421875);
  if (static_cast<float>(alpha) == 1.67326319217681884765625F && static_cast<float>(gamma) == 1.0507010221481323F) {
    return c.out(selu(c.in(0)));
  }
  c.out(elu(c.in(0), alpha) * gamma);
}
void gelu_op(C& c) {
  const std::string form = c.text("approximate", "none");
  if (form != "none" && form != "tanh") c.refuse("approximate: expected none or tanh");
  c.out(gelu(c.in(0), form == "tanh" ? GeluForm::tanh : GeluForm::exact));
}
void prelu_op(C& c) {
  const Tensor x = c.in(0), slope = c.in(1);
  // One slope for all, or one for each channel; `slope` is [C, 1, 1] then.
  const bool by_channel = x.dim() >= 2 && slope.dim() == x.dim() - 1 && slope.numel() == slope.size(0);
  if (slope.numel() == 1 || by_channel) return c.out(prelu(x, slope.reshape({slope.numel()})));
  c.out(where(gt(x, 0), x, x * slope));
}
// Before opset 13 all dimensions from `axis` on were one.
void softmax_op(C& c) {
  const bool old = c.opset() < 13;
  const Tensor x = c.in(0);
  const int axis = c.dim(c.integer("axis", old ? 1 : -1), x.dim());
  const auto function = [&](const Tensor& t, int dim) {
    return c.type() == "Softmax" ? softmax(t, dim) : log_softmax(t, dim);
  };
  if (!old || axis == x.dim() - 1) return c.out(function(x, axis));
  c.out(function(flatten(x, axis), axis).reshape(x.sizes()));
}

void dropout_op(C& c) {
  double p = c.real("ratio", 0.5);
  if (c.has(1)) p = c.number(1);
  if (c.wanted(1)) c.refuse("its mask is read");
  if (!(p >= 0 && p < 1)) c.refuse(fmt::format("expected a ratio from 0 to 1, got {}", p));
  c.out(c.training() ? dropout(c.in(0), p) : c.in(0));
}

// --- products

void linear_op(C& c) { c.out(linear(c.in(0), c.in(1), c.has(2) ? c.in(2) : Tensor())); }
void matmul_op(C& c) { c.out(matmul(c.in(0), c.in(1))); }
void gemm(C& c) {
  Tensor a = c.in(0), b = c.in(1);
  if (a.dim() != 2 || b.dim() != 2) c.refuse("expected matrices");
  if (c.integer("transA", 0) != 0) a = a.t();
  if (c.integer("transB", 0) != 0) b = b.t();
  const double alpha = c.real("alpha", 1), beta = c.real("beta", 1);
  Tensor y = mm(a, b);
  if (alpha != 1) y = y * alpha;
  if (c.has(2)) y = y + (beta == 1 ? c.in(2) : c.in(2) * beta);
  c.out(y);
}
void einsum_op(C& c) {
  std::vector<Tensor> inputs;
  for (int i = 0; i < c.inputs(); ++i) inputs.push_back(c.in(i));
  c.out(einsum(c.text("equation", ""), inputs));
}

// --- normalisations

void batch_norm_op(C& c) {
  for (int i = 1; i < c.outputs(); ++i) {
    if (c.wanted(i)) c.refuse("its running statistics are read");
  }
  c.out(batch_norm(c.in(0), {.weight = c.in(1),
                             .bias = c.in(2),
                             .running_mean = c.in(3),
                             .running_var = c.in(4),
                             .training = c.training(),
                             .momentum = 1 - c.real("momentum", 0.9F),
                             .eps = c.real("epsilon", 1e-5F)}));
}
Shape sizes_from(const Tensor& x, int axis) {
  Shape sizes;
  for (int i = axis; i < x.dim(); ++i) sizes.push_back(x.sizes()[i]);
  return sizes;
}
void layer_norm_op(C& c) {
  if (c.wanted(1) || c.wanted(2)) c.refuse("its statistics are read");
  const Tensor x = c.in(0);
  const Shape sizes = sizes_from(x, c.dim(c.integer("axis", -1), x.dim()));
  NormOptions options{.eps = c.real("epsilon", 1e-5F)};
  options.weight = c.in(1).expand(sizes);
  if (c.has(2)) options.bias = c.in(2).expand(sizes);
  c.out(layer_norm(x, sizes, options));
}
void rms_norm_op(C& c) {
  const Tensor x = c.in(0);
  const Shape sizes = sizes_from(x, c.dim(c.integer("axis", -1), x.dim()));
  c.out(rms_norm(x, sizes, {.weight = c.in(1).expand(sizes), .eps = c.real("epsilon", 1e-5F)}));
}
void group_norm_op(C& c) {
  const Tensor x = c.in(0);
  const bool instance = c.type() == "InstanceNormalization";
  if (x.dim() < 2) c.refuse("expected an input [N, C, ...]");
  const int64_t groups = instance ? x.size(1) : c.integer("num_groups", 0);
  const Tensor weight = c.in(1), bias = c.in(2);
  if (weight.numel() != x.size(1)) c.refuse("expected a scale for each channel, as opset 21 has it");
  c.out(group_norm(x, groups, {.weight = weight, .bias = bias, .eps = c.real("epsilon", 1e-5F)}));
}

// --- reductions

void reduce_op(C& c) {
  const Tensor x = c.in(0);
  Ints axes = c.has(1) ? c.ints(1) : c.list("axes").value_or(Ints{});
  if (axes.empty() && c.integer("noop_with_empty_axes", 0) != 0) return c.out(x);
  Shape dims;
  for (const int64_t a : axes) dims.push_back(c.dim(a, x.dim()));
  const bool keep = c.integer("keepdims", 1) != 0;
  const std::string& op = c.type();
  if (op == "ReduceMean") return c.out(mean(x, dims, {.keepdim = keep}));
  if (op == "ReduceSum") return c.out(sum(x, dims, {.keepdim = keep}));
  if (op == "ReduceProd") return c.out(prod(x, dims, {.keepdim = keep}));
  if (op == "ReduceMax") return c.out(amax(x, dims, {.keepdim = keep}));
  if (op == "ReduceMin") return c.out(amin(x, dims, {.keepdim = keep}));
  if (op == "ReduceL1") return c.out(norm(x, 1, dims, {.keepdim = keep}));
  if (op == "ReduceL2") return c.out(norm(x, 2, dims, {.keepdim = keep}));
  if (op == "ReduceSumSquare") return c.out(sum(square(x), dims, {.keepdim = keep}));
  if (dims.empty()) {
    for (int i = 0; i < x.dim(); ++i) dims.push_back(i);
  }
  c.out(logsumexp(x, dims, {.keepdim = keep}));
}
void arg_op(C& c) {
  if (c.integer("select_last_index", 0) != 0) c.refuse("the last of equal elements isn't found");
  const Tensor x = c.in(0);
  const int axis = c.dim(c.integer("axis", 0), x.dim());
  const KeepOptions keep{.keepdim = c.integer("keepdims", 1) != 0};
  c.out(c.type() == "ArgMax" ? argmax(x, axis, keep) : argmin(x, axis, keep));
}
void cumsum_op(C& c) {
  if (c.integer("exclusive", 0) != 0 || c.integer("reverse", 0) != 0) c.refuse("expected exclusive and reverse of 0");
  const Tensor x = c.in(0);
  c.out(cumsum(x, c.dim(static_cast<int64_t>(c.number(1)), x.dim())));
}
void trilu(C& c) {
  const auto diagonal = c.has(1) ? static_cast<int64_t>(c.number(1)) : 0;
  c.out(c.integer("upper", 1) != 0 ? triu(c.in(0), diagonal) : tril(c.in(0), diagonal));
}

OnnxOperators make_operators() {
  OnnxOperators t;
  const auto unary = [&](const char* name, OnnxOperator::Run run) { t[name].run = run; };
  const auto two = [&](const char* name, OnnxOperator::Run run, std::string_view attributes = {}) {
    t[name] = {.least_inputs = 2, .most_inputs = 2, .attributes = attributes, .run = run};
  };
  unary("Abs", [](C& c) { c.out(abs(c.in(0))); });
  unary("Acos", [](C& c) { c.out(acos(c.in(0))); });
  unary("Acosh", [](C& c) { c.out(acosh(c.in(0))); });
  unary("Asin", [](C& c) { c.out(asin(c.in(0))); });
  unary("Asinh", [](C& c) { c.out(asinh(c.in(0))); });
  unary("Atan", [](C& c) { c.out(atan(c.in(0))); });
  unary("Atanh", [](C& c) { c.out(atanh(c.in(0))); });
  unary("Ceil", [](C& c) { c.out(ceil(c.in(0))); });
  unary("Cos", [](C& c) { c.out(cos(c.in(0))); });
  unary("Cosh", [](C& c) { c.out(cosh(c.in(0))); });
  unary("Erf", [](C& c) { c.out(erf(c.in(0))); });
  unary("Exp", [](C& c) { c.out(exp(c.in(0))); });
  unary("Floor", [](C& c) { c.out(floor(c.in(0))); });
  unary("HardSwish", [](C& c) { c.out(hardswish(c.in(0))); });
  unary("Identity", [](C& c) { c.out(c.in(0)); });
  unary("Log", [](C& c) { c.out(log(c.in(0))); });
  unary("Mish", [](C& c) { c.out(mish(c.in(0))); });
  unary("Neg", [](C& c) { c.out(neg(c.in(0))); });
  unary("Not", [](C& c) { c.out(logical_not(c.in(0))); });
  unary("Reciprocal", [](C& c) { c.out(reciprocal(c.in(0))); });
  unary("Relu", [](C& c) { c.out(relu(c.in(0))); });
  unary("Round", [](C& c) { c.out(round(c.in(0))); });
  unary("Sigmoid", [](C& c) { c.out(sigmoid(c.in(0))); });
  unary("Sign", [](C& c) { c.out(sign(c.in(0))); });
  unary("Sin", [](C& c) { c.out(sin(c.in(0))); });
  unary("Sinh", [](C& c) { c.out(sinh(c.in(0))); });
  unary("Softplus", [](C& c) { c.out(softplus(c.in(0))); });
  unary("Sqrt", [](C& c) { c.out(sqrt(c.in(0))); });
  unary("Tan", [](C& c) { c.out(tan(c.in(0))); });
  unary("Tanh", [](C& c) { c.out(tanh(c.in(0))); });
  unary("silu", [](C& c) { c.out(silu(c.in(0))); });
  t["Elu"] = {.attributes = "alpha:f", .run = [](C& c) { c.out(elu(c.in(0), c.real("alpha", 1))); }};
  t["Selu"] = {.attributes = "alpha:f gamma:f", .run = selu_op};
  t["LeakyRelu"] = {.attributes = "alpha:f", .run = [](C& c) { c.out(leaky_relu(c.in(0), c.real("alpha", 0.01F))); }};
  t["HardSigmoid"] = {.attributes = "alpha:f beta:f", .run = hard_sigmoid};
  t["Gelu"] = {.attributes = "approximate:s", .run = gelu_op};
  t["Softmax"] = {.attributes = "axis:i", .run = softmax_op};
  t["LogSoftmax"] = {.attributes = "axis:i", .run = softmax_op};
  two("PRelu", prelu_op);
  two("Add", add_op);
  two("Sub", sub_op);
  two("Mul", mul_op);
  two("Div", div_op);
  two("Pow", pow_op);
  two("Mod", mod_op, "fmod:i");
  constexpr int kMany = 1 << 16;
  t["Min"] = {.most_inputs = kMany, .run = [](C& c) { extreme_op(c, false); }};
  t["Max"] = {.most_inputs = kMany, .run = [](C& c) { extreme_op(c, true); }};
  two("Equal", compare_op<eq, eq>);
  two("Less", compare_op<lt, lt>);
  two("LessOrEqual", compare_op<le, le>);
  two("Greater", compare_op<gt, gt>);
  two("GreaterOrEqual", compare_op<ge, ge>);
  two("And", [](C& c) { c.out(logical_and(c.in(0), c.in(1))); });
  two("Or", [](C& c) { c.out(logical_or(c.in(0), c.in(1))); });
  two("Xor", [](C& c) { c.out(logical_xor(c.in(0), c.in(1))); });
  t["Where"] = {.least_inputs = 3, .most_inputs = 3, .run = where_op};
  t["Clip"] = {.most_inputs = 3, .run = clip};
  t["Cast"] = {.attributes = "to:i saturate:i", .run = cast_op};
  t["Dropout"] = {.most_inputs = 3, .attributes = "seed:i ratio:f", .run = dropout_op};
  two("MatMul", matmul_op);
  t["linear"] = {.least_inputs = 2, .most_inputs = 3, .run = linear_op};
  t["Gemm"] = {.least_inputs = 2, .most_inputs = 3, .attributes = "alpha:f beta:f transA:i transB:i", .run = gemm};
  t["Einsum"] = {.most_inputs = kMany, .attributes = "equation:s", .run = einsum_op};
  t["BatchNormalization"] = {
      .least_inputs = 5, .most_inputs = 5, .attributes = "epsilon:f momentum:f training_mode:i", .run = batch_norm_op};
  t["LayerNormalization"] = {
      .least_inputs = 2, .most_inputs = 3, .attributes = "axis:i epsilon:f stash_type:i", .run = layer_norm_op};
  t["RMSNormalization"] = {
      .least_inputs = 2, .most_inputs = 2, .attributes = "axis:i epsilon:f stash_type:i", .run = rms_norm_op};
  t["InstanceNormalization"] = {.least_inputs = 3, .most_inputs = 3, .attributes = "epsilon:f", .run = group_norm_op};
  t["GroupNormalization"] = {
      .least_inputs = 3, .most_inputs = 3, .attributes = "epsilon:f num_groups:i stash_type:i", .run = group_norm_op};
  for (const char* name : {"ReduceMean", "ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2",
                           "ReduceSumSquare", "ReduceLogSumExp"}) {
    t[name] = {.most_inputs = 2, .attributes = "axes:I keepdims:i noop_with_empty_axes:i", .run = reduce_op};
  }
  for (const char* name : {"ArgMax", "ArgMin"}) {
    t[name] = {.attributes = "axis:i keepdims:i select_last_index:i", .run = arg_op};
  }
  two("CumSum", cumsum_op, "exclusive:i reverse:i");
  t["Trilu"] = {.most_inputs = 2, .attributes = "upper:i", .run = trilu};
  add_image_operators(t);
  add_view_operators(t);
  add_host_operators(t);
  return t;
}

}  // namespace

const OnnxOperators& onnx_operators() {
  static const OnnxOperators& table = *new OnnxOperators(make_operators());
  return table;
}

}  // namespace halfstep::io::detail
