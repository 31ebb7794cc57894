// SPDX-License-Identifier: Apache-2.0
// THE table: how autocast treats each op, and why. One table for all devices; a test fails when an op has no row. Those
// of backward passes need none: Op::backward says what they are.
#include "halfstep/amp/policy.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>

#include "halfstep/core/fail.h"

namespace halfstep::amp {
namespace {

struct Row {
  const char* op;
  const char* reason;
};

// Products of many terms: where the time goes, and 16-bit units are fastest; sums are taken in float32 inside.
constexpr const char* kProduct = "matrix product: fast in 16 bits, accumulates in float32";
constexpr Row kLowerPrecision[] = {
    {"scaled_dot_product_attention", "two matrix products; the softmax between them is taken in float32"},
    {"mm", kProduct},
    {"bmm", kProduct},
    {"mv", kProduct},
    {"matmul", kProduct},
    {"linear", kProduct},
    {"linear_weight_only", "matrix product: its result in 16 bits; weights are integers, scales and sums float32"},
    {"addmm", kProduct},
    {"addmv", kProduct},
    {"addr", kProduct},
    {"addbmm", kProduct},
    {"baddbmm", kProduct},
    {"outer", kProduct},
    {"einsum", kProduct},
    {"conv1d", kProduct},
    {"conv2d", kProduct},
    {"conv_transpose1d", kProduct},
    {"conv_transpose2d", kProduct},
    {"prelu", "as PyTorch has it: follows a matrix product, whose result is 16 bits"},
};

// The result leaves the range or loses the digits of 16 bits for ordinary inputs.
constexpr const char* kRange = "its result leaves the range of 16 bits, or magnifies the input's rounding";
constexpr const char* kStatistics = "mean and variance of many values, and a quotient by their root";
constexpr const char* kBoxes = "areas of boxes leave the range of 16 bits, and a quotient of their differences";
constexpr const char* kLoss = "a loss: sums many terms, and its gradient is where underflow begins";
constexpr Row kFloat32[] = {
    {"acos", kRange},
    {"asin", kRange},
    {"cosh", kRange},
    {"erfinv", kRange},
    {"exp", kRange},
    {"expm1", kRange},
    {"log", kRange},
    {"log2", kRange},
    {"log10", kRange},
    {"log1p", kRange},
    {"pow", kRange},
    {"pow_scalar", kRange},
    {"scalar_pow", kRange},
    {"reciprocal", kRange},
    {"rsqrt", kRange},
    {"sinh", kRange},
    {"tan", kRange},
    {"softplus", kRange},
    {"layer_norm", kStatistics},
    {"rms_norm", kStatistics},
    {"group_norm", kStatistics},
    {"logsumexp", "exponentials of large values, summed"},
    {"cosine_similarity", kStatistics},
    {"cross_entropy", kLoss},
    {"nll_loss", kLoss},
    {"mse_loss", kLoss},
    {"l1_loss", kLoss},
    {"smooth_l1_loss", kLoss},
    {"huber_loss", kLoss},
    {"kl_div", kLoss},
    {"binary_cross_entropy_with_logits", kLoss},
    {"interpolate", "as PyTorch has it: weighted means of neighbours, in float32 for what comes after"},
    {"box_iou", kBoxes},
    {"paired_box_iou", kBoxes},
};

// Accumulations whose result may be long or large: computed in float32 from the 16-bit input, without a float32 copy of
// it.
constexpr Row kFloat32Output[] = {
    {"sum", "a sum of many terms outgrows 16 bits"},
    {"prod", "a product of many factors leaves the range of 16 bits"},
    {"cumsum", "a sum of many terms outgrows 16 bits"},
    {"cumprod", "a product of many factors leaves the range of 16 bits"},
    {"norm", "squares leave the range of 16 bits, and their sum more so"},
    {"softmax", "exponentials and a quotient by their sum: small probabilities vanish in 16 bits"},
    {"log_softmax", "logarithms of small probabilities keep too few digits in 16 bits"},
};

// Computed in float32 from the input as it is, and rounded once to what the next op takes: a float32 input is not
// rounded before it is put on the grid.
constexpr const char* kGrid = "puts float32 values on a grid, then rounds once to what the next product takes";
constexpr Row kLowOutput[] = {
    {"fake_quantize", kGrid},
    {"fake_quantize_learnable", kGrid},
};

constexpr const char* kMixes = "takes several tensors of equal rank: the widest decides, so that none is cut";
constexpr Row kWidest[] = {
    {"addcmul", kMixes},   {"addcdiv", kMixes},     {"atan2", kMixes},        {"dot", kMixes},
    {"index_put", kMixes}, {"scatter_add", kMixes}, {"scatter_amax", kMixes}, {"tensordot", kMixes},
};

constexpr Row kBanned[] = {
    {"binary_cross_entropy",
     "the gradient of a probability near 0 or 1 does not fit 16 bits; use binary_cross_entropy_with_logits on the "
     "values before "
     "the sigmoid, or compute it in float32 inside Autocast{{.enabled = false}}"},
};

constexpr const char* kMoves = "only moves values";
constexpr const char* kPlaces = "reads or writes at places: values are only moved";
constexpr const char* kSums = "adds values to the input's, in float32, rounded once";
constexpr const char* kRandom = "random numbers in the dtype that the caller named";
constexpr Row kMoving[] = {
    {"cat", "mixed dtypes are promoted by the op itself"},
    {"flip", kMoves},
    {"gather", kPlaces},
    {"scatter", kPlaces},
    {"scatter_value", kPlaces},
    {"index", kPlaces},
    {"index_select", kPlaces},
    {"index_add", kSums},
    {"embedding", kPlaces},
    {"nonzero", "gives integers"},
    {"nonzero_count", "gives an integer"},
    {"sort", kMoves},
    {"topk", kMoves},
    {"tril", kMoves},
    {"triu", kMoves},
    {"diagonal", kMoves},
    {"uniform", kRandom},
    {"normal", kRandom},
    {"randint", kRandom},
    {"randperm", kRandom},
    {"bernoulli", kRandom},
    {"bernoulli_p", kRandom},
};

constexpr const char* kExact = "exact, or rounded once: 16 bits lose nothing more";
constexpr Row kPassThrough[] = {
    {"add", kExact},         {"sub", kExact},
    {"mul", kExact},         {"div", kExact},
    {"neg", kExact},         {"div_scalar", kExact},
    {"rdiv_scalar", kExact}, {"add_scalar", kExact},
    {"mul_scalar", kExact},  {"to", "the caller named the dtype"},
    {"clone", kMoves},       {"copy", kMoves},
    {"fill", kMoves},        {"view", kMoves},
    {"squeeze", kMoves},     {"unsqueeze", kMoves},
    {"expand", kMoves},      {"permute", kMoves},
    {"select", kMoves},      {"slice", kMoves},
    {"as_strided", kMoves},  {"to_device", kMoves},
};

// Reductions, softmax, normalisation and losses.
constexpr Row kPassThroughReductions[] = {
    {"batch_norm", "keeps its input's dtype: statistics and parameters are float32 inside"},
    {"batch_norm_act", "keeps its input's dtype, as batch_norm, and rounds once"},
    {"batch_norm_silu", "keeps its input's dtype, as batch_norm, and rounds once"},
    {"mean", kExact},
    {"var", kExact},
    {"std", kExact},
    {"var_mean", kExact},
    {"amax", kMoves},
    {"amin", kMoves},
    {"max_dim", kMoves},
    {"min_dim", kMoves},
    {"argmax", kMoves},
    {"argmin", kMoves},
    {"any", kExact},
    {"all", kExact},
    {"count_nonzero", kExact},
};

constexpr const char* kInside =
    "keeps its input's dtype and computes in float32 inside: the result is bounded by the input";
constexpr const char* kBool = "the result is bool or integer";
constexpr Row kPointwise[] = {
    {"abs", kExact},
    {"sign", kExact},
    {"square", kExact},
    {"floor", kExact},
    {"ceil", kExact},
    {"round", kExact},
    {"trunc", kExact},
    {"sqrt", kExact},
    {"exp2", kExact},
    {"sin", kExact},
    {"cos", kExact},
    {"atan", kExact},
    {"asinh", kExact},
    {"acosh", kExact},
    {"atanh", kExact},
    {"nan_to_num", kExact},
    {"maximum", kExact},
    {"minimum", kExact},
    {"fmod", kExact},
    {"remainder", kExact},
    {"floor_divide", kExact},
    {"hypot", kExact},
    {"clamp", kExact},
    {"hardtanh", kExact},
    {"lerp", kExact},
    {"lerp_scalar", kExact},
    {"masked_fill", kExact},
    {"where", kExact},
    {"relu", kExact},
    {"leaky_relu", kExact},
    {"elu", kExact},
    {"threshold", kExact},
    {"hardswish", kExact},
    {"hardsigmoid", kExact},
    {"dropout", "drops or scales, rounded once"},
    {"tanh", kInside},
    {"erf", kInside},
    {"erfc", kInside},
    {"sigmoid", kInside},
    {"gelu", kInside},
    {"gelu_tanh", kInside},
    {"silu", kInside},
    {"mish", kInside},
    {"logsigmoid", kInside},
    {"eq", kBool},
    {"ne", kBool},
    {"lt", kBool},
    {"le", kBool},
    {"gt", kBool},
    {"ge", kBool},
    {"isnan", kBool},
    {"isinf", kBool},
    {"isfinite", kBool},
    {"logical_and", kBool},
    {"logical_or", kBool},
    {"logical_xor", kBool},
    {"logical_not", kBool},
    {"bitwise_and", kBool},
    {"bitwise_or", kBool},
    {"bitwise_xor", kBool},
    {"bitwise_not", kBool},
};

// Pooling, resizing and padding of images.
constexpr Row kImages[] = {
    {"max_pool2d", kMoves},
    {"adaptive_max_pool2d", kMoves},
    {"avg_pool2d", kExact},
    {"adaptive_avg_pool2d", kExact},
    {"pad", kMoves},
    {"nms", "gives integers, and compares in float32"},
    {"roi_align", "as torchvision has it: keeps its input's dtype and computes in float32 inside"},
};

// Quantization apart from kLowOutput.
constexpr Row kQuantization[] = {
    {"pact", kExact},
    {"quantize", "gives integers, and computes in float32"},
    {"dequantize", "the caller named the dtype"},
    {"conv2d_int8", "integers, or rounded to the dtype that the caller named"},
    {"linear_int8", "integers, or rounded to the dtype that the caller named"},
    {"add_int8", "integers, or rounded to the dtype that the caller named"},
    {"mean_int8", "integers, or rounded to the dtype that the caller named"},
    {"lookup_int8", "only moves values"},
    {"quantization_parameters", "reads ranges, which are float32, and gives a float32 scale"},
};

struct Table {
  std::shared_mutex mutex;
  std::map<std::string, PolicyRow, std::less<>> rows;

  Table() {
    const auto add = [&](std::span<const Row> list, Policy policy) {
      for (const Row& r : list) rows.emplace(r.op, PolicyRow{r.op, policy, r.reason});
    };
    add(kMoving, Policy::pass_through);
    add(kLowerPrecision, Policy::lower_precision);
    add(kFloat32, Policy::float32);
    add(kFloat32Output, Policy::float32_output);
    add(kLowOutput, Policy::low_output);
    add(kQuantization, Policy::pass_through);
    add(kWidest, Policy::widest);
    add(kBanned, Policy::banned);
    add(kPassThrough, Policy::pass_through);
    add(kPassThroughReductions, Policy::pass_through);
    add(kPointwise, Policy::pass_through);
    add(kImages, Policy::pass_through);
  }
};

Table& table() {
  static Table& instance = *new Table;
  return instance;
}

constexpr const char* kBackward = "part of a backward pass, which runs in the dtypes of the forward pass";

PolicyRow row_without_entry(const Op& op) {
  return {op.name, Policy::pass_through, op.backward ? kBackward : "not in the table: a custom op"};
}

constexpr const char* kNames[] = {"lower precision", "float32", "float32 output", "widest",
                                  "pass through",    "banned",  "low output"};

}  // namespace

const char* name(Policy policy) { return kNames[static_cast<int>(policy)]; }

std::optional<Policy> parse_policy(std::string_view text) {
  std::string plain(text);
  std::replace(plain.begin(), plain.end(), '_', ' ');
  for (std::size_t i = 0; i < std::size(kNames); ++i) {
    if (plain == kNames[i]) return static_cast<Policy>(i);
  }
  return std::nullopt;
}

std::vector<PolicyRow> policy_table() {
  Table& t = table();
  std::shared_lock lock(t.mutex);
  std::vector<PolicyRow> result;
  for (const auto& [name, row] : t.rows) result.push_back(row);
  for (const Op* op : all_ops()) {
    if (op->backward && !t.rows.contains(std::string_view(op->name))) result.push_back(row_without_entry(*op));
  }
  std::sort(result.begin(), result.end(),
            [](const PolicyRow& a, const PolicyRow& b) { return std::tie(a.policy, a.op) < std::tie(b.policy, b.op); });
  return result;
}

PolicyRow policy_row(const Op& op) {
  Table& t = table();
  std::shared_lock lock(t.mutex);
  const auto it = t.rows.find(std::string_view(op.name));
  return it != t.rows.end() ? it->second : row_without_entry(op);
}

Policy policy_of(const Op& op) {
  // Looked up once an op: this is on the path of every call in a region.
  const std::int8_t known = __atomic_load_n(&op.autocast_class, __ATOMIC_RELAXED);
  if (known >= 0) return static_cast<Policy>(known);
  const Policy policy = policy_row(op).policy;
  __atomic_store_n(&op.autocast_class, static_cast<std::int8_t>(policy), __ATOMIC_RELAXED);
  return policy;
}

void add_policy(std::string_view op, Policy policy, std::string_view reason) {
  const Op* known = find_op(op);
  if (!known) fail<AmpError>("add_policy: there is no op called {}", op);
  if (known->backward) fail<AmpError>("add_policy: {} is part of a backward pass: {}", op, kBackward);
  Table& t = table();
  std::lock_guard lock(t.mutex);
  if (!t.rows.emplace(std::string(op), PolicyRow{std::string(op), policy, std::string(reason)}).second) {
    fail<AmpError>("add_policy: {} has a row already; use the overrides of a region", op);
  }
  __atomic_store_n(&known->autocast_class, static_cast<std::int8_t>(policy), __ATOMIC_RELAXED);
}

}  // namespace halfstep::amp
