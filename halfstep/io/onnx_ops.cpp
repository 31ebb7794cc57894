// SPDX-License-Identifier: Apache-2.0
// How calls of ops are written in ONNX's operators.
#include <cmath>
#include <limits>
#include <numbers>

#include "halfstep/core/fail.h"
#include "halfstep/io/onnx_internal.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/triangle.h"

namespace halfstep::io::detail {
namespace {

using B = OnnxBuilder;
using Ints = std::vector<std::int64_t>;
using std::int64_t;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();

std::vector<std::string> all_inputs(B& b) {
  std::vector<std::string> names;
  for (int i = 0; i < b.inputs(); ++i) names.push_back(b.in(i));
  return names;
}

// --- arithmetic

void add_or_sub(B& b, const char* op) {
  std::string other = b.in(1);
  const auto& a = b.attributes<AlphaAttributes>();
  const DType dtype = b.out_tensor().dtype();
  if (a.alpha != 1) {
    ScalarValue alpha{.floating = a.alpha, .integer = a.integer_alpha, .kind = is_floating(dtype) ? 2 : 1};
    other = b.node("Mul", {other, b.number(alpha, dtype)});
  }
  b.result(op, {b.in(0), other});
}

void with_number(B& b, const char* op, bool number_first = false) {
  const std::string x = b.in(0);
  const std::string n = b.number(b.attributes<ScalarAttributes>().value, b.out_tensor().dtype());
  if (number_first) return b.result(op, {n, x});
  b.result(op, {x, n});
}

void clamp(B& b) {
  const auto& a = b.attributes<ClampAttributes>();
  const DType dtype = b.out_tensor().dtype();
  std::string low, high;
  if (is_floating(dtype)) {
    if (a.min != -kInfinity) low = b.number(a.min, dtype);
    if (a.max != kInfinity) high = b.number(a.max, dtype);
  } else {
    using Limits = std::numeric_limits<int64_t>;
    const auto bound = [&](int64_t v) { return b.number(ScalarValue{.integer = v, .kind = 1}, dtype); };
    if (a.integer_min != Limits::min()) low = bound(a.integer_min);
    if (a.integer_max != Limits::max()) high = bound(a.integer_max);
  }
  std::vector<std::string> inputs{b.in(0), low, high};
  while (inputs.back().empty()) inputs.pop_back();
  b.result("Clip", inputs);
}

void cast(B& b) {
  std::string x = b.in(0);
  const bool spread = b.in_dims(0) != b.out_dims();
  const int64_t type = b.type_of(b.out_tensor().dtype());
  const bool same_type = b.type_of(b.in_tensor(0).dtype()) == type;
  if (spread) {
    const std::string sizes = b.shape_tensor(b.out_dims());
    if (same_type) return b.result("Expand", {x, sizes});
    x = b.node("Expand", {x, sizes});
  }
  b.result("Cast", {x}, {{"to", type}});
}

// --- activations

const ActivationAttributes& parameters(B& b) { return b.attributes<ActivationAttributes>(); }
float f(double v) { return static_cast<float>(v); }

void gelu(B& b) {
  if (b.opset() >= 20) return b.result("Gelu", {b.in(0)});
  const std::string x = b.in(0);
  const DType t = b.out_tensor().dtype();
  const std::string erf = b.node("Erf", {b.node("Mul", {x, b.number(1 / std::numbers::sqrt2, t)})});
  b.result("Mul", {b.node("Mul", {x, b.number(0.5, t)}), b.node("Add", {erf, b.number(1, t)})});
}

void gelu_tanh(B& b) {
  if (b.opset() >= 20) return b.result("Gelu", {b.in(0)}, {{"approximate", std::string("tanh")}});
  const std::string x = b.in(0);
  const DType t = b.out_tensor().dtype();
  // sqrt(2 / pi) (x + 0.044715 x^3)
  const std::string square = b.node("Mul", {x, x});
  const std::string factor = b.node("Add", {b.node("Mul", {square, b.number(0.044715, t)}), b.number(1, t)});
  const double root = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;
  const std::string inner = b.node("Mul", {b.node("Mul", {x, b.number(root, t)}), factor});
  const std::string sum = b.node("Add", {b.node("Tanh", {inner}), b.number(1, t)});
  b.result("Mul", {b.node("Mul", {x, b.number(0.5, t)}), sum});
}

void elu(B& b) {
  const auto& a = parameters(b);
  if (a.b == 1) return b.result("Elu", {b.in(0)}, {{"alpha", f(a.a)}});
  b.result("Selu", {b.in(0)}, {{"alpha", f(a.a)}, {"gamma", f(a.b)}});
}

void softplus(B& b) {
  const auto& a = parameters(b);  // beta, threshold
  const std::string x = b.in(0);
  const DType t = b.out_tensor().dtype();
  // Above 20 it differs from x by less than any rounding.
  const bool cut = a.b < 20;
  if (a.a == 1 && !cut) return b.result("Softplus", {x});
  const std::string scaled = a.a == 1 ? x : b.node("Mul", {x, b.number(a.a, t)});
  const std::string soft = b.node("Softplus", {scaled});
  if (!cut) return b.result("Div", {soft, b.number(a.a, t)});
  const std::string y = a.a == 1 ? soft : b.node("Div", {soft, b.number(a.a, t)});
  b.result("Where", {b.node("Greater", {scaled, b.number(a.b, t)}), x, y});
}

void threshold(B& b) {
  const auto& a = parameters(b);
  const DType t = b.out_tensor().dtype();
  const std::string x = b.in(0);
  b.result("Where", {b.node("Greater", {x, b.number(a.a, t)}), x, b.number(a.b, t)});
}

// --- views and layout

void view(B& b) { b.reshape(b.in(0), b.in_dims(0), b.out_dims(), true); }

void expand(B& b) {
  const OnnxDims from = b.in_dims(0);
  OnnxDims to = b.out_dims();
  const std::size_t extra = to.size() - from.size();
  for (std::size_t i = extra; i < to.size(); ++i) {
    if (to[i] == from[i - extra]) to[i] = {.fixed = 1};  // stays as it is
  }
  b.result("Expand", {b.in(0), b.shape_tensor(to)});
}

void permute(B& b) {
  const auto order = static_cast<std::uint64_t>(b.attributes<ViewAttributes>().start);  // four bits a dimension
  Ints perm;
  for (int i = 0; i < b.in_sizes(0).size(); ++i) perm.push_back(static_cast<int64_t>(order >> (4 * i) & 15));
  b.result("Transpose", {b.in(0)}, {{"perm", perm}});
}

void select(B& b) {
  const auto& a = b.attributes<ViewAttributes>();
  b.result("Gather", {b.in(0), b.number(ScalarValue{.integer = a.start, .kind = 1}, DType::i64)}, {{"axis", a.dim}});
}

void slice(B& b) {
  const auto& a = b.attributes<ViewAttributes>();
  const int64_t end = a.end == b.in_sizes(0)[static_cast<int>(a.dim)] ? kEnd : a.end;
  b.result("Slice", {b.in(0), b.ints({a.start}), b.ints({end}), b.ints({a.dim}), b.ints({a.step})});
}

void flip(B& b) {
  const IntList& dims = b.attributes<DimsAttributes>().dims;
  const auto n = static_cast<std::size_t>(dims.size);
  Ints axes;
  for (std::size_t i = 0; i < n; ++i) axes.push_back(wrap_dim(dims.values[i], b.in_sizes(0).size(), "flip"));
  b.result("Slice", {b.in(0), b.ints(Ints(n, -1)), b.ints(Ints(n, std::numeric_limits<int64_t>::min())), b.ints(axes),
                     b.ints(Ints(n, -1))});
}

void cat(B& b) {
  const int64_t dim = wrap_dim(b.attributes<AlongAttributes>().dim, b.out_sizes().size(), "cat");
  std::vector<std::string> parts;
  for (int i = 0; i < b.inputs(); ++i) {
    // Vectors of none stand for nothing.
    if (b.in_tensor(i).numel() != 0) parts.push_back(b.in(i));
  }
  b.result("Concat", parts, {{"axis", dim}});
}

void triangle(B& b, bool upper) {
  const int64_t diagonal = b.attributes<DiagonalAttributes>().diagonal;
  b.result("Trilu", {b.in(0), b.number(ScalarValue{.integer = diagonal, .kind = 1}, DType::i64)},
           {{"upper", int64_t{upper}}});
}

// --- products

void linear(B& b) {
  std::vector<std::string> inputs{b.in(0), b.in(1)};
  if (b.has(2)) inputs.push_back(b.in(2));
  b.result("Gemm", inputs, {{"transB", int64_t{1}}});
}

void linear_weight_only(B& b) {
  const std::string weight = b.dequantized_weight(static_cast<int>(b.attributes<WeightOnlyAttributes>().bits));
  if (b.in_sizes(0).size() == 2) {
    std::vector<std::string> inputs{b.in(0), weight};
    if (b.has(3)) inputs.push_back(b.in(3));
    return b.result("Gemm", inputs, {{"transB", int64_t{1}}});
  }
  const std::string turned = b.node("Transpose", {weight}, {{"perm", Ints{1, 0}}});
  if (!b.has(3)) return b.result("MatMul", {b.in(0), turned});
  b.result("Add", {b.node("MatMul", {b.in(0), turned}), b.in(3)});
}

void matmul(B& b) { b.result("MatMul", {b.in(0), b.in(1)}); }

void attention(B& b) {
  const auto& a = b.attributes<AttentionAttributes>();
  if (a.dropout > 0) b.refuse("drops weights, which is for training");
  const OnnxDims queries = b.in_dims(0), keys = b.in_dims(1);
  for (int i = 0; i < 3; ++i) {
    const OnnxDim heads = b.in_dims(i)[1];
    if (!(heads == b.out_dims()[1]) && !(heads == OnnxDim{.fixed = 1})) {
      b.refuse("shares heads among groups of queries, which has no form in ONNX here");
    }
  }
  const DType t = b.out_tensor().dtype();
  const std::string k = b.node("Transpose", {b.in(1)}, {{"perm", Ints{0, 1, 3, 2}}});
  std::string scores = b.node("MatMul", {b.node("Mul", {b.in(0), b.number(a.scale, t)}), k});
  std::string seen;  // where a query sees a key
  if (a.causal) {
    if (queries[2].per_batch != 0 || keys[2].per_batch != 0) b.refuse("a causal mask whose sizes follow the batch");
    seen = b.constant(tril(ones({queries[2].fixed, keys[2].fixed}, {.dtype = DType::boolean, .device = Device{}})));
  } else if (b.has(3) && b.in_tensor(3).dtype() == DType::boolean) {
    seen = b.in(3);
  } else if (b.has(3)) {
    scores = b.node("Add", {scores, b.in(3)});
  }
  if (!seen.empty()) scores = b.node("Where", {seen, scores, b.number(-kInfinity, t)});
  std::string weights = b.node("Softmax", {scores}, {{"axis", int64_t{-1}}});
  // A query that sees nothing has weights of 0, not of 0 / 0.
  if (!seen.empty()) weights = b.node("Where", {seen, weights, b.number(0, t)});
  b.result("MatMul", {weights, b.in(2)});
}

// --- reductions

Ints axes_of(B& b, const IntList& dims) {
  Ints axes;
  for (int i = 0; i < dims.size; ++i) axes.push_back(wrap_dim(dims.values[i], b.in_sizes(0).size(), "a reduction"));
  return axes;
}

std::string reduced(B& b, const char* op, const std::string& x, const Ints& axes, bool keepdim, bool final,
                    int output = 0) {
  OnnxAttributes attributes{{"keepdims", int64_t{keepdim}}};
  std::vector<std::string> inputs{x};
  // Axes became an input with opset 18, of the sum before; none of them: all.
  if (!axes.empty()) {
    if (b.opset() >= 18 || std::string_view(op) == "ReduceSum") {
      inputs.push_back(b.ints(axes));
    } else {
      attributes.push_back({"axes", axes});
    }
  }
  if (!final) return b.node(op, inputs, attributes);
  b.result(op, inputs, attributes, output);
  return {};
}

void reduce(B& b, const char* op) {
  const auto& a = b.attributes<ReduceAttributes>();
  if (b.in_sizes(0).empty()) return b.same(b.in(0));
  reduced(b, op, b.in(0), axes_of(b, a.dims), a.keepdim, true);
}

void norm(B& b) {
  const auto& a = b.attributes<NormAttributes>();
  if (a.p != 1 && a.p != 2) b.refuse("expected a norm of 1 or 2, which ONNX has");
  if (b.in_sizes(0).empty()) return b.result("Abs", {b.in(0)});
  reduced(b, a.p == 1 ? "ReduceL1" : "ReduceL2", b.in(0), axes_of(b, a.dims), a.keepdim, true);
}

void arg(B& b, const char* op, int output) {
  const auto& a = b.attributes<DimAttributes>();
  if (b.in_sizes(0).empty()) b.refuse("a number has no dimension to look along");
  b.result(op, {b.in(0)}, {{"axis", a.dim}, {"keepdims", int64_t{a.keepdim}}}, output);
}

void extreme(B& b, const char* value, const char* index) {
  const auto& a = b.attributes<DimAttributes>();
  if (b.wanted(1)) arg(b, index, 1);
  if (b.wanted(0)) reduced(b, value, b.in(0), {a.dim}, a.keepdim, true);
}

void softmax(B& b, const char* op) {
  if (b.in_sizes(0).empty()) b.refuse("a number has no dimension to look along");
  b.result(op, {b.in(0)}, {{"axis", b.attributes<DimAttributes>().dim}});
}

void cumsum(B& b) {
  const auto& a = b.attributes<DimAttributes>();
  b.result("CumSum", {b.in(0), b.number(ScalarValue{.integer = a.dim, .kind = 1}, DType::i64)},
           {{"reverse", int64_t{a.reverse}}});
}

// --- normalisation

void batch_norm(B& b) {
  const auto& a = b.attributes<BatchNormAttributes>();
  if (a.training || !b.has(3) || !b.has(4)) b.refuse("takes the batch's statistics, which is for training");
  const int64_t channels = b.in_sizes(0)[1];
  // Parameters and statistics are float32 whatever the activations are.
  const std::string weight = b.has(1) ? b.in_float(1) : b.filled(channels, 1, true);
  const std::string bias = b.has(2) ? b.in_float(2) : b.filled(channels, 0, true);
  b.result("BatchNormalization", {b.in(0), weight, bias, b.in_float(3), b.in_float(4)}, {{"epsilon", f(a.eps)}});
}

// The dimension from which on the rows that have statistics of their own are laid out.
int first_axis(B& b) {
  const Shape& sizes = b.in_sizes(0);
  if (b.has(1)) return sizes.size() - b.in_sizes(1).size();
  int64_t rows = 1;
  int axis = 0;
  while (axis < sizes.size() - 1 && rows != b.attributes<RowNormAttributes>().rows) rows *= sizes[axis++];
  return axis;
}

void layer_norm(B& b) {
  const int axis = first_axis(b);
  const Shape& sizes = b.in_sizes(0);
  std::string weight = b.in(1);
  if (!b.has(1)) {
    Shape row;
    for (int i = axis; i < sizes.size(); ++i) row.push_back(sizes[i]);
    weight = b.constant(ones(row, {.device = Device{}}));
  }
  std::vector<std::string> inputs{b.in(0), weight};
  if (b.has(2)) inputs.push_back(b.in(2));
  b.result("LayerNormalization", inputs,
           {{"axis", int64_t{axis}}, {"epsilon", f(b.attributes<RowNormAttributes>().eps)}});
}

void rms_norm(B& b) {
  const int axis = first_axis(b);
  const double eps = b.attributes<RowNormAttributes>().eps;
  const DType t = b.out_tensor().dtype();
  const std::string x = b.in(0);
  Ints axes;
  for (int i = axis; i < b.in_sizes(0).size(); ++i) axes.push_back(i);
  const std::string mean = reduced(b, "ReduceMean", b.node("Mul", {x, x}), axes, true, false);
  const std::string sum = b.node("Add", {mean, b.number(eps >= 0 ? eps : finfo(DType::f32).eps, t)});
  const std::string deviation = b.node("Sqrt", {sum});
  if (!b.has(1)) return b.result("Div", {x, deviation});
  b.result("Mul", {b.node("Div", {x, deviation}), b.in(1)});
}

void group_norm(B& b) {
  const auto& a = b.attributes<RowNormAttributes>();
  const OnnxDims dims = b.in_dims(0);
  int64_t row = dims[1].fixed / a.groups;
  for (std::size_t i = 2; i < dims.size(); ++i) {
    if (dims[i].per_batch != 0) b.refuse("a size but the first follows the batch; export with a fixed batch");
    row *= dims[i].fixed;
  }
  const OnnxDims grouped{dims[0], {.fixed = a.groups}, {.fixed = row}};
  const std::string groups = b.reshape(b.in(0), dims, grouped);
  std::string y =
      b.node("InstanceNormalization", {groups, b.filled(a.groups, 1), b.filled(a.groups, 0)}, {{"epsilon", f(a.eps)}});
  if (!b.has(1) && !b.has(2)) return static_cast<void>(b.reshape(y, grouped, dims, true));
  y = b.reshape(y, grouped, dims);
  OnnxDims per_channel(dims.size() - 1, {.fixed = 1});
  per_channel[0] = dims[1];
  const OnnxDims channels{dims[1]};
  if (b.has(1)) {
    const std::string weight = b.reshape(b.in(1), channels, per_channel);
    if (!b.has(2)) return b.result("Mul", {y, weight});
    y = b.node("Mul", {y, weight});
  }
  b.result("Add", {y, b.reshape(b.in(2), channels, per_channel)});
}

// --- choosing

void masked_fill(B& b) {
  const DType t = b.out_tensor().dtype();
  b.result("Where", {b.in(1), b.number(b.attributes<ScalarAttributes>().value, t), b.in(0)});
}

void embedding(B& b) {
  if (b.attributes<EmbeddingAttributes>().zero_padding)
    b.refuse("reads zeros for a row, which has no form in ONNX here");
  b.result("Gather", {b.in(0), b.in(1)}, {{"axis", int64_t{0}}});
}

OnnxTranslators make_table() {
  OnnxTranslators t;
  add_image_translators(t);
  t["abs"] = [](B& b) { b.result("Abs", {b.in(0)}); };
  t["acos"] = [](B& b) { b.result("Acos", {b.in(0)}); };
  t["acosh"] = [](B& b) { b.result("Acosh", {b.in(0)}); };
  t["asin"] = [](B& b) { b.result("Asin", {b.in(0)}); };
  t["asinh"] = [](B& b) { b.result("Asinh", {b.in(0)}); };
  t["atan"] = [](B& b) { b.result("Atan", {b.in(0)}); };
  t["atanh"] = [](B& b) { b.result("Atanh", {b.in(0)}); };
  t["ceil"] = [](B& b) { b.result("Ceil", {b.in(0)}); };
  t["cos"] = [](B& b) { b.result("Cos", {b.in(0)}); };
  t["cosh"] = [](B& b) { b.result("Cosh", {b.in(0)}); };
  t["erf"] = [](B& b) { b.result("Erf", {b.in(0)}); };
  t["exp"] = [](B& b) { b.result("Exp", {b.in(0)}); };
  t["floor"] = [](B& b) { b.result("Floor", {b.in(0)}); };
  t["log"] = [](B& b) { b.result("Log", {b.in(0)}); };
  t["neg"] = [](B& b) { b.result("Neg", {b.in(0)}); };
  t["reciprocal"] = [](B& b) { b.result("Reciprocal", {b.in(0)}); };
  t["round"] = [](B& b) { b.result("Round", {b.in(0)}); };
  t["rsqrt"] = [](B& b) { b.result("Reciprocal", {b.node("Sqrt", {b.in(0)})}); };
  t["sign"] = [](B& b) { b.result("Sign", {b.in(0)}); };
  t["sin"] = [](B& b) { b.result("Sin", {b.in(0)}); };
  t["sinh"] = [](B& b) { b.result("Sinh", {b.in(0)}); };
  t["sqrt"] = [](B& b) { b.result("Sqrt", {b.in(0)}); };
  t["square"] = [](B& b) { b.result("Mul", {b.in(0), b.in(0)}); };
  t["tan"] = [](B& b) { b.result("Tan", {b.in(0)}); };
  t["tanh"] = [](B& b) { b.result("Tanh", {b.in(0)}); };

  t["add"] = [](B& b) { add_or_sub(b, "Add"); };
  t["sub"] = [](B& b) { add_or_sub(b, "Sub"); };
  t["mul"] = [](B& b) { b.result("Mul", all_inputs(b)); };
  t["div"] = [](B& b) { b.result("Div", all_inputs(b)); };
  t["add_scalar"] = [](B& b) { with_number(b, "Add"); };
  t["mul_scalar"] = [](B& b) { with_number(b, "Mul"); };
  t["div_scalar"] = [](B& b) { with_number(b, "Div"); };
  t["rdiv_scalar"] = [](B& b) { with_number(b, "Div", true); };
  t["pow"] = [](B& b) { b.result("Pow", all_inputs(b)); };
  t["pow_scalar"] = [](B& b) { with_number(b, "Pow"); };
  t["scalar_pow"] = [](B& b) { with_number(b, "Pow", true); };
  t["maximum"] = [](B& b) { b.result("Max", all_inputs(b)); };
  t["minimum"] = [](B& b) { b.result("Min", all_inputs(b)); };
  t["clamp"] = clamp;
  t["hardtanh"] = clamp;
  t["to"] = cast;
  t["copy"] = cast;

  t["eq"] = [](B& b) { b.result("Equal", all_inputs(b)); };
  t["ne"] = [](B& b) { b.result("Not", {b.node("Equal", all_inputs(b))}); };
  t["lt"] = [](B& b) { b.result("Less", all_inputs(b)); };
  t["le"] = [](B& b) { b.result("LessOrEqual", all_inputs(b)); };
  t["gt"] = [](B& b) { b.result("Greater", all_inputs(b)); };
  t["ge"] = [](B& b) { b.result("GreaterOrEqual", all_inputs(b)); };
  t["where"] = [](B& b) { b.result("Where", all_inputs(b)); };
  t["masked_fill"] = masked_fill;

  t["relu"] = [](B& b) { b.result("Relu", {b.in(0)}); };
  t["sigmoid"] = [](B& b) { b.result("Sigmoid", {b.in(0)}); };
  t["silu"] = [](B& b) { b.result("Mul", {b.in(0), b.node("Sigmoid", {b.in(0)})}); };
  t["logsigmoid"] = [](B& b) { b.result("Neg", {b.node("Softplus", {b.node("Neg", {b.in(0)})})}); };
  t["mish"] = [](B& b) { b.result("Mul", {b.in(0), b.node("Tanh", {b.node("Softplus", {b.in(0)})})}); };
  t["hardswish"] = [](B& b) { b.result("HardSwish", {b.in(0)}); };
  t["hardsigmoid"] = [](B& b) { b.result("HardSigmoid", {b.in(0)}, {{"alpha", f(1.0 / 6)}, {"beta", f(0.5)}}); };
  t["leaky_relu"] = [](B& b) { b.result("LeakyRelu", {b.in(0)}, {{"alpha", f(parameters(b).a)}}); };
  t["prelu"] = [](B& b) { b.result("PRelu", all_inputs(b)); };
  t["elu"] = elu;
  t["gelu"] = gelu;
  t["gelu_tanh"] = gelu_tanh;
  t["softplus"] = softplus;
  t["threshold"] = threshold;
  t["softmax"] = [](B& b) { softmax(b, "Softmax"); };
  t["log_softmax"] = [](B& b) { softmax(b, "LogSoftmax"); };

  t["view"] = view;
  t["squeeze"] = view;
  t["unsqueeze"] = view;
  t["expand"] = expand;
  t["permute"] = permute;
  t["select"] = select;
  t["slice"] = slice;
  t["flip"] = flip;
  t["cat"] = cat;
  t["tril"] = [](B& b) { triangle(b, false); };
  t["triu"] = [](B& b) { triangle(b, true); };

  t["linear"] = linear;
  t["linear_weight_only"] = linear_weight_only;
  t["mm"] = matmul;
  t["bmm"] = matmul;
  t["dot"] = matmul;
  t["scaled_dot_product_attention"] = attention;

  t["sum"] = [](B& b) { reduce(b, "ReduceSum"); };
  t["mean"] = [](B& b) { reduce(b, "ReduceMean"); };
  t["prod"] = [](B& b) { reduce(b, "ReduceProd"); };
  t["amax"] = [](B& b) { reduce(b, "ReduceMax"); };
  t["amin"] = [](B& b) { reduce(b, "ReduceMin"); };
  t["norm"] = norm;
  t["logsumexp"] = [](B& b) { reduce(b, "ReduceLogSumExp"); };
  t["argmax"] = [](B& b) { arg(b, "ArgMax", 0); };
  t["argmin"] = [](B& b) { arg(b, "ArgMin", 0); };
  t["max_dim"] = [](B& b) { extreme(b, "ReduceMax", "ArgMax"); };
  t["min_dim"] = [](B& b) { extreme(b, "ReduceMin", "ArgMin"); };
  t["cumsum"] = cumsum;

  t["batch_norm"] = batch_norm;
  // What they do is in the grids (take_grids).
  t["fake_quantize"] = [](B& b) { b.same(b.in(0)); };
  t["fake_quantize_learnable"] = [](B& b) { b.same(b.in(0)); };

  t["layer_norm"] = layer_norm;
  t["rms_norm"] = rms_norm;
  t["group_norm"] = group_norm;

  t["embedding"] = embedding;
  t["index_select"] = [](B& b) { b.result("Gather", all_inputs(b), {{"axis", b.attributes<AlongAttributes>().dim}}); };
  t["gather"] = [](B& b) {
    b.result("GatherElements", all_inputs(b), {{"axis", b.attributes<AlongAttributes>().dim}});
  };
  return t;
}

}  // namespace

const OnnxTranslators& onnx_translators() {
  static const OnnxTranslators& table = *new OnnxTranslators(make_table());
  return table;
}

}  // namespace halfstep::io::detail
