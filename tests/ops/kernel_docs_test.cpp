// SPDX-License-Identifier: Apache-2.0
// Holds docs/devices/kernels.md against the kernels that there are and the calls that are made. A row's inputs and
// outputs become a pattern of dtypes, which the tensors of every observed call have to match.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <set>
#include <sstream>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/amp/loss_scaler.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attention.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/detection.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/int8.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/quantize.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/resample.h"
#include "halfstep/ops/sort.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/clip.h"
#include "halfstep/optim/ema.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/quant/observer.h"
#include "halfstep/runtime/kernel_names.h"
#include "tests/support/op_cases.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

constexpr char kLetters[] = "sdhbxylicuo";  // of the dtypes, in their order
constexpr char kAbsent = '-';

char letter(DType dtype) { return kLetters[static_cast<std::size_t>(dtype)]; }

/// The letters of `f32/f64`, `float`, `acc`, ...; of none the key's own.
std::string letters_of(const std::string& types, DType key) {
  if (types.empty()) return {letter(key)};
  std::string result;
  std::stringstream stream(types);
  for (std::string type; std::getline(stream, type, '/');) {
    if (type == "acc") {
      result += key == f64 ? 'd' : 's';
    } else if (type == "float") {
      result += "sdhb";
    } else if (type == "integer") {
      result += "licuo";
    } else if (type == "number") {
      result += "sdhblicu";
    } else if (type == "value") {
      result += "sdhblicuo";
    } else if (type == "any") {
      result += kLetters;
    } else {
      bool known = false;
      for (int i = 0; i < kNumDTypes; ++i) {
        if (type != name(static_cast<DType>(i))) continue;
        result += kLetters[i];
        known = true;
      }
      EXPECT_TRUE(known) << "docs/devices/kernels.md: no dtype is called " << type;
    }
  }
  return result;
}

/// `x:f32?`, `[x]`, `x...`, `(a, b)...`, separated by commas, as a regular expression on letters.
class Pattern {
 public:
  Pattern(const std::string& text, DType key) : text_(text), key_(key) {
    expression = list();
    EXPECT_EQ(at_, text_.size()) << "docs/devices/kernels.md: can't read `" << text << "`";
  }
  std::string expression;
  std::vector<bool> optional;  ///< of the tensors before the first one that repeats or may be missing

 private:
  bool take(const std::string& word) {
    if (text_.compare(at_, word.size(), word) != 0) return false;
    at_ += word.size();
    return true;
  }
  std::string list() {
    std::string result = item();
    while (take(", ")) result += item();
    return result;
  }
  std::string item() {
    if (take("(")) {
      fixed_ = false;
      std::string inner = "(?:" + list() + ")";
      EXPECT_TRUE(take(")")) << text_;
      return inner + (take("...") ? "+" : "");
    }
    if (take("[")) {
      fixed_ = false;
      const std::string inner = item();
      EXPECT_TRUE(take("]")) << text_;
      return inner + "?";
    }
    const std::size_t begin = at_;
    const auto word = [&] {
      const std::size_t from = at_;
      while (at_ < text_.size() &&
             (std::isalnum(static_cast<unsigned char>(text_[at_])) || text_[at_] == '_' || text_[at_] == '/')) {
        ++at_;
      }
      return text_.substr(from, at_ - from);
    };
    word();
    EXPECT_GT(at_, begin) << "docs/devices/kernels.md: can't read `" << text_ << "`";
    std::string letters = letters_of(take(":") ? word() : "", key_);
    const bool absent = take("?");
    if (absent) letters += kAbsent;
    const bool repeats = take("...");
    fixed_ = fixed_ && !repeats;
    if (fixed_) optional.push_back(absent);
    return "[" + letters + "]" + (repeats ? "+" : "");
  }

  const std::string& text_;
  DType key_;
  std::size_t at_ = 0;
  bool fixed_ = true;
};

struct Row {
  std::vector<std::string> names;
  std::string in, out, attributes, key, dtypes;
};

std::string trimmed(const std::string& s) {
  const std::size_t from = s.find_first_not_of(' '), to = s.find_last_not_of(' ');
  return from == std::string::npos ? "" : s.substr(from, to - from + 1);
}
std::string without(std::string s, char c) {
  std::erase(s, c);
  return s;
}

const std::vector<Row>& rows() {
  static const std::vector<Row> all = [] {
    std::vector<Row> result;
    std::ifstream file(test::goldens_dir() / "../../docs/devices/kernels.md");
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with("| `")) continue;
      std::vector<std::string> cells;
      std::stringstream stream(line.substr(1));
      for (std::string cell; std::getline(stream, cell, '|');) cells.push_back(trimmed(cell));
      EXPECT_EQ(cells.size(), 7U) << line;
      if (cells.size() != 7) continue;
      Row row{.names = {},
              .in = without(cells[1], '`'),
              .out = without(cells[2], '`'),
              .attributes = without(cells[3], '`'),
              .key = cells[4],
              .dtypes = cells[5]};
      std::stringstream names(without(without(cells[0], '`'), ' '));
      for (std::string name; std::getline(names, name, ',');) row.names.push_back(name);
      result.push_back(row);
    }
    return result;
  }();
  return all;
}

std::map<std::string, const Row*> rows_by_name() {
  std::map<std::string, const Row*> result;
  for (const Row& row : rows()) {
    for (const std::string& name : row.names) {
      EXPECT_TRUE(result.emplace(name, &row).second) << "docs/devices/kernels.md has two rows for " << name;
    }
  }
  return result;
}

std::string dtypes_of(const KernelTable& table) {
  std::string result;
  for (int i = 0; i < kNumDTypes; ++i) {
    if (table.find(Device{}, static_cast<DType>(i))) result += kLetters[i];
  }
  return result;
}

bool is_attribute_struct(const std::string& name) {
  const auto all = attribute_structs();
  return std::any_of(all.begin(), all.end(), [&](const AttributeStruct& a) { return name == a.name; });
}

TEST(KernelDocs, HaveEveryKernel) {
  const auto documented = rows_by_name();
  std::set<std::string> there;
  for (const std::string& name : kernel_names()) {
    const KernelTable& table = kernel_table(name);
    const std::string dtypes = dtypes_of(table);
    if (dtypes.empty() || name.starts_with("test_")) continue;
    there.insert(name);
    EXPECT_TRUE(documented.contains(name)) << name << " has no row in docs/devices/kernels.md";
    EXPECT_EQ(table.version, 1) << "docs/devices/kernels.md says that all kernels are of version 1; " << name
                                << " isn't";
    if (!documented.contains(name)) continue;
    std::string said;
    std::stringstream stream(without(documented.at(name)->dtypes, ' '));
    for (std::string part; std::getline(stream, part, ',');) said += letters_of(part, f32);
    std::string ordered;
    for (const char c : std::string(kLetters)) {
      if (said.find(c) != std::string::npos) ordered += c;
    }
    EXPECT_EQ(ordered, dtypes) << name << " (letters of dtypes: " << kLetters << ")";
  }
  for (const auto& [name, row] : documented) {
    EXPECT_TRUE(there.contains(name)) << "docs/devices/kernels.md has a row for " << name
                                      << ", which no kernel is called";
  }
}

TEST(KernelDocs, NameTheAttributesAndTheKeyInput) {
  for (const auto& [name, row] : rows_by_name()) {
    const bool none = row->attributes == "none";
    const std::string type = row->attributes.substr(0, row->attributes.find(' '));
    EXPECT_TRUE(none || is_attribute_struct(type)) << name << ": " << type;
    const Op* op = find_op(name);
    if (!op) continue;
    EXPECT_EQ(type, op->attributes ? op->attributes->name : "none") << name;
    // An input that may be missing can't be the key; the output it goes into has its dtype.
    const bool by_output = op->key < 0 || row->in.starts_with("[");
    EXPECT_EQ(row->key, by_output ? "out 0" : std::to_string(op->key)) << name;
  }
}

/// Holds every call against its row.
class Checker : public OpObserver {
 public:
  Checker() { add_observer(this); }
  ~Checker() override { remove_observer(this); }

  void after_call(const ObservedCall& call) override {
    if (call.path == ExecutionPath::view || call.path == ExecutionPath::transfer) return;
    const std::lock_guard lock(mutex_);
    std::string name = call.name;
    // Parts of other calls go by these.
    if (!call.op && name == "copy") name = "to";
    if (!call.op && name == "batch_norm") name = "batch_norm_update";
    if (name.starts_with("test_")) return;
    const auto it = rows_.find(name);
    if (it == rows_.end()) {
      ADD_FAILURE() << "docs/devices/kernels.md has no row for " << name;
      return;
    }
    const Row& row = *it->second;
    seen_.insert(name);
    const DType key = row.key == "out 0"                         ? call.outputs[0]->dtype()
                      : std::isdigit(row.key[0]) == 0            ? f32
                      : call.inputs[row.key[0] - '0']->defined() ? call.inputs[row.key[0] - '0']->dtype()
                                                                 : f32;
    check(name, "inputs", row.in, key, call.inputs, missing_in_[&row]);
    check(name, "outputs", row.out, key, call.outputs, missing_out_[&row]);
    // Lists of parameters and gradients are promised to be dense.
    if (!call.op && row.in.find("...") != std::string::npos) {
      for (const auto list : {call.inputs, call.outputs}) {
        for (const Tensor* t : list) {
          EXPECT_TRUE(!t->defined() || t->is_contiguous(MemoryFormat::preserve)) << name << " " << t->strides().str();
        }
      }
    }
    // Notes of the forward pass and the operands of row norms and pair losses are promised to be row-major.
    for (const char* family : {"layer_norm", "norm_backward", "mse_loss", "pair_loss_backward"}) {
      if (rows_.at(family) != &row) continue;
      for (const auto list : {call.inputs, call.outputs}) {
        for (const Tensor* t : list)
          EXPECT_TRUE(!t->defined() || t->is_contiguous()) << name << " " << t->strides().str();
      }
    }
    if (row.attributes.ends_with(" or null")) return;
    EXPECT_EQ(call.attributes == nullptr, row.attributes == "none") << name;
  }

  /// What the calls didn't show: kernels, and optional tensors that were always there or never.
  void expect_all_seen() const {
    // Fused ops, of which observers see the parts, and what only gradients on several ranks need.
    const std::set<std::string> hidden = {
        "batch_norm_act",  "batch_norm_act_backward",  "batch_norm_act_backward_of_sum",
        "batch_norm_silu", "batch_norm_silu_backward", "multi_norm_pieces"};
    for (const auto& [name, row] : rows_) {
      EXPECT_NE(seen_.contains(name), hidden.contains(name)) << name << " was not called, or was though it is hidden";
    }
    for (const Row& row : rows()) {
      expect_both(row, "input", row.in, missing_in_);
      expect_both(row, "output", row.out, missing_out_);
    }
  }

 private:
  struct Seen {
    std::set<std::size_t> absent, present;
  };
  using Missing = std::map<const Row*, Seen>;

  static void check(const std::string& name, const char* what, const std::string& text, DType key,
                    std::span<const Tensor* const> tensors, Seen& seen) {
    std::string letters;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const bool there = tensors[i]->defined();
      letters += there ? letter(tensors[i]->dtype()) : kAbsent;
      (there ? seen.present : seen.absent).insert(i);
    }
    static std::map<std::pair<std::string, DType>, std::regex>& known =
        *new std::map<std::pair<std::string, DType>, std::regex>;
    auto it = known.find({text, key});
    if (it == known.end()) {
      it = known.emplace(std::pair(text, key), std::regex(Pattern(text, key).expression)).first;
    }
    EXPECT_TRUE(std::regex_match(letters, it->second))
        << name << " was called with " << what << " `" << letters << "` (letters of dtypes: " << kLetters
        << "), docs/devices/kernels.md says `" << text << "`";
  }
  static void expect_both(const Row& row, const char* what, const std::string& text, const Missing& missing) {
    const Pattern pattern(text, f32);
    const auto it = missing.find(&row);
    if (it == missing.end()) return;
    for (std::size_t i = 0; i < pattern.optional.size(); ++i) {
      if (!pattern.optional[i]) continue;
      EXPECT_TRUE(it->second.absent.contains(i)) << row.names[0] << ": " << what << " " << i << " was never absent";
      EXPECT_TRUE(it->second.present.contains(i)) << row.names[0] << ": " << what << " " << i << " was always absent";
    }
  }

  std::map<std::string, const Row*> rows_ = rows_by_name();
  std::mutex mutex_;
  std::set<std::string> seen_;
  Missing missing_in_, missing_out_;
};

/// Backward passes: the fused ones, and those that are recorded.
void differentiate(const std::vector<Tensor>& results, const std::vector<Tensor>& in) {
  std::vector<Tensor> roots, weights, leaves;
  for (const Tensor& t : results) {
    if (!t.requires_grad()) continue;
    roots.push_back(t);
    weights.push_back(ones(t.sizes(), {.dtype = t.dtype(), .device = t.device()}).requires_grad_());
  }
  for (const Tensor& t : in) {
    if (t.requires_grad()) leaves.push_back(t);
  }
  if (roots.empty() || leaves.empty()) return;
  grad(roots, leaves, {.grad_outputs = weights, .retain_graph = true, .allow_unused = true});
  grad(roots, leaves, {.grad_outputs = weights, .create_graph = true, .allow_unused = true});
}

void run_op_cases() {
  using test::OpLayout;
  for (const test::OpCase& c : test::all_op_cases()) {
    const auto run = [&](OpLayout layout, DType dtype) {
      const auto in = op_arguments(c, layout, dtype);
      differentiate(c.call(in), in);
    };
    run(OpLayout::strided, f64);
    run(OpLayout::empty, f32);
    if (c.sixteen_bits) run(OpLayout::contiguous, f16);
  }
}

void run_without_gradients() {
  const Tensor a = tensor(std::vector<double>{0, 1, 2, 3}, {2, 2}, {.dtype = i32}), b = a + 1, yes = gt(a, 1);
  for (const DType dtype : {f32, f16, i64, i32, i8, u8, boolean}) {
    const Tensor x = b.to(dtype);
    for (const DType to : {f32, f8e4m3, f8e5m2, i64, boolean}) x.to(to).to(f32);
    eq(x, x), ne(x, x), lt(x, x), le(x, x), gt(x, x), ge(x, x);
    isnan(x), isinf(x), isfinite(x), logical_and(x, x), logical_or(x, x), logical_xor(x, x), logical_not(x);
    any(x), all(x), count_nonzero(x), argmax(x, 0), argmin(x), sum(x), prod(x), cumsum(x, 0), sort(x);
    where(yes, x, x), masked_fill(x, yes, 1), nonzero(x), x.clone().fill_(1), x.clone().copy_(a.to(f32).to(dtype));
    max(x, 0), maximum(x, x);
    if (!is_floating(dtype)) bitwise_and(x, x), bitwise_or(x, x), bitwise_xor(x, x), bitwise_not(x), x / x;
    if (dtype != boolean)
      floor_divide(x, x), mm(x, x), bmm(x.unsqueeze(0), x.unsqueeze(0)), x + 1.5, relu(x), dot(x[0], x[1]);
    if (!is_floating(dtype)) continue;
    nan_to_num(x), bernoulli(x * 0), rand_like(x), randn_like(x);
  }
  one_hot(a.to(i64)), randint(0, 5, {3}), randperm(4), full({2}, 1.5);
  for (const DType dtype : {u8, i8, i32}) {
    for (const DType zero : {i32, f32}) {
      const Tensor q = quantize(b.to(f32), ones({1}), zeros({1}, {.dtype = zero}), {.dtype = dtype});
      dequantize(q, ones({1}), zeros({1}, {.dtype = zero}), {.dtype = bf16});
    }
  }
  quantization_parameters(zeros({2}), ones({2}));
  for (const DType dtype : {f32, f16, bf16}) {
    const Tensor x = ones({3, 4}, {.dtype = dtype});
    linear_weight_only(x, zeros({5, 4}, {.dtype = i8}), ones({5}), ones({5}));
    linear_weight_only(x, zeros({5, 2}, {.dtype = u8}), ones({5, 2}));
  }
  for (const DType dtype : {u8, i8}) {
    const Tensor q = zeros({2, 4, 3, 3}, {.dtype = dtype}), w = zeros({4, 4, 1, 1}, {.dtype = i8}), s = ones({4});
    Conv2dInt8Options o;
    o.output = Int8Grid{};
    conv2d_int8(q, w, s, zeros({4}, {.dtype = i32}), q, o), conv2d_int8(q, w, s);
    linear_int8(q.reshape({-1, 4}), w.reshape({4, 4}), s, zeros({4}, {.dtype = i32}), q.reshape({-1, 4}), o);
    linear_int8(q.reshape({-1, 4}), w.reshape({4, 4}), s);
    add_int8(q, q, {}, {}, Int8Grid{}), lookup_int8(q, zeros({256}, {.dtype = u8})), mean_int8(q, {2, 3}, false, {});
    max_pool2d(q, {2}), adaptive_max_pool2d(q, {2}), interpolate(q, {.size = {5}});
  }
  const quant::Observer observer;
  for (const DType dtype : {f32, f64, f16}) {
    observer(b.to(dtype));
    observer.commit(dtype == f64 ? zeros({1}) : Tensor());
  }
  nms(ones({2, 4}), ones({2})), batched_nms(ones({2, 4}), ones({2}), a.to(i64).select(0, 0));
}

// Optional tensors that the op cases always have, or never.
void run_variants() {
  const auto x = [](const Shape& sizes) { return rand(sizes, {.dtype = f32}).requires_grad_(); };
  const auto run = [](const std::vector<Tensor>& in, const Tensor& y) { differentiate({y}, in); };
  const Tensor image = x({3, 4, 5}), row = x({4}), other = x({4});
  run({image}, layer_norm(image, {5}));
  run({image, row, other}, group_norm(image, 2, {.weight = row, .bias = other}));
  const Tensor mean = zeros({4}), var = ones({4});
  run({image}, batch_norm(image, {.running_mean = mean, .running_var = var, .training = true}));
  run({image}, batch_norm(image, {.running_mean = mean, .running_var = var}));
  run({image, row, other}, batch_norm(image, {.weight = row, .bias = other, .training = true}));
  const Tensor logits = x({3, 4}), classes = tensor(std::vector<double>{0, 3, 1}, {3}, {.dtype = i64});
  const Tensor weight = ones({4});
  for (const DType dtype : {i64, i32, u8}) {
    const Tensor target = classes.to(dtype);
    run({logits}, cross_entropy(logits, target));
    run({logits}, cross_entropy(logits, target, {.weight = weight}));
    run({logits}, nll_loss(logits, target));
    run({logits}, nll_loss(logits, target, {.weight = weight}));
  }
  const Tensor half = full({3, 4}, 0.5);
  run({logits}, binary_cross_entropy_with_logits(logits, half));
  run({logits}, binary_cross_entropy_with_logits(logits, half, {.weight = half, .pos_weight = weight}));
  const Tensor q = x({2, 2, 3, 4});
  run({q}, scaled_dot_product_attention(q, q, q));
  run({q}, scaled_dot_product_attention(q, q, q, {.mask = ones({3, 3}, {.dtype = boolean}), .dropout_p = 0.5}));
}

template <class Make>
void run_optimizer(const Make& make) {
  using optim::LowPrecision;
  for (const DType dtype : {f32, f64, f16, bf16}) {
    for (const LowPrecision how : {LowPrecision::master_weights, LowPrecision::stochastic_rounding, LowPrecision::kahan,
                                   LowPrecision::nearest}) {
      // One lies the other way round in memory; its gradient comes row-major.
      const NamedTensors parameters = {{"a", ones({2, 3}, {.dtype = dtype}).transpose(0, 1).requires_grad_()},
                                       {"b", ones({2}, {.dtype = dtype}).requires_grad_()},
                                       {"unused", ones({2}, {.dtype = dtype}).requires_grad_()}};
      const auto loss = [&] { return sum(parameters[0].tensor).to(f32) + sum(parameters[1].tensor).to(f32); };
      const auto optimizer = make(parameters, how);
      loss().backward();
      optimizer->step();
      amp::GradScaler scaler({.init_scale = 8});
      optimizer->zero_grad();
      scaler.scale(loss()).backward();
      amp::DynamicLossScaler other(8, 2, 3);
      other.unscale(parameters[0].tensor.grad());
      other.adjust(amp::all_finite({parameters[0].tensor.grad(), parameters[1].tensor.grad()}));
      scaler.step(*optimizer);
      scaler.update();
      for (const bool norm : {false, true}) {
        optimizer->zero_grad();
        scaler.scale(loss()).backward();
        scaler.unscale_(*optimizer, {.norm = norm});
        optim::clip_grad_norm_(parameters, 0.1);
        optim::clip_grad_value_(parameters, 0.1);
        const auto result = scaler.step(*optimizer);
        scaler.update();
        optim::EMA average(parameters);
        average.update();
        average.update(result);
      }
    }
  }
}

void run_optimizers() {
  using optim::LowPrecision;
  for (const double momentum : {0.0, 0.9}) {
    run_optimizer([&](const NamedTensors& p, LowPrecision how) {
      return std::make_unique<optim::SGD>(p, optim::SGDOptions{.momentum = momentum, .low_precision = how});
    });
  }
  for (const bool amsgrad : {false, true}) {
    run_optimizer([&](const NamedTensors& p, LowPrecision how) {
      return std::make_unique<optim::Adam>(p, optim::AdamOptions{.amsgrad = amsgrad, .low_precision = how});
    });
  }
}

TEST(KernelDocs, AreWhatIsCalled) {
  Checker checker;
  manual_seed(1);
  run_op_cases();
  run_without_gradients();
  run_variants();
  run_optimizers();
  checker.expect_all_seen();
}

}  // namespace
}  // namespace halfstep
