// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>

#include "halfstep/core/fail.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/op.h"
#include "halfstep/quant/plan_internal.h"
#include "halfstep/quant/quantization.h"

namespace halfstep::quant::detail {
namespace {

using Kind = nn::TracedValue::Kind;

template <std::size_t N>
bool is_one_of(std::string_view op, const std::array<std::string_view, N>& names) {
  return std::find(names.begin(), names.end(), op) != names.end();
}

// Products with a weight.
bool has_weight(std::string_view op) { return op == "conv2d" || op == "linear"; }
// Elementwise functions that a product's last step can apply.
bool is_activation(std::string_view op) {
  static constexpr auto kNames = std::to_array<std::string_view>(
      {"relu", "silu", "hardtanh", "leaky_relu", "sigmoid", "tanh", "gelu", "hardswish", "hardsigmoid", "mish", "elu"});
  return is_one_of(op, kNames);
}
// Computed in integers where their inputs are.
bool combines(std::string_view op) {
  static constexpr auto kNames =
      std::to_array<std::string_view>({"add", "cat", "avg_pool2d", "adaptive_avg_pool2d", "mean", "interpolate"});
  return is_one_of(op, kNames);
}

class Planner {
 public:
  Planner(const nn::Trace& trace, const std::function<bool(const std::string&)>& skip, bool first, bool last)
      : trace_(trace), skip_(skip), first_(first), last_(last) {
    readers_.resize(trace.values.size());
    makers_.assign(trace.values.size(), -1);
    occurrence_.resize(trace.calls.size());
    std::map<std::pair<std::string, std::string>, int> seen;
    for (std::size_t c = 0; c < trace.calls.size(); ++c) {
      const nn::TracedCall& call = trace.calls[c];
      occurrence_[c] = seen[{call.module, call.op}]++;
      for (const int v : call.inputs) {
        if (v >= 0) readers_[static_cast<std::size_t>(v)].push_back(static_cast<int>(c));
      }
      for (const int v : call.outputs) makers_[static_cast<std::size_t>(v)] = static_cast<int>(c);
    }
    for (const int v : trace.outputs) outputs_.insert(v);
  }

  Plan plan() {
    find_quantized();
    find_groups();
    find_wanted();
    for (std::size_t c = 0; c < trace_.calls.size(); ++c) add_sites(c);
    return std::move(plan_);
  }

 private:
  const nn::TracedCall& call(int c) const { return trace_.calls[static_cast<std::size_t>(c)]; }
  const nn::TracedValue& value(int v) const { return trace_.values[static_cast<std::size_t>(v)]; }
  const std::vector<int>& readers(int v) const { return readers_[static_cast<std::size_t>(v)]; }

  // The products that are computed with quantized weights.
  void find_quantized() {
    quantized_.assign(trace_.calls.size(), false);
    std::size_t first = trace_.calls.size(), last = 0;
    for (std::size_t c = 0; c < trace_.calls.size(); ++c) {
      if (!has_weight(trace_.calls[c].op)) continue;
      first = std::min(first, c);
      last = c;
    }
    for (std::size_t c = 0; c < trace_.calls.size(); ++c) {
      const nn::TracedCall& product = trace_.calls[c];
      if (!has_weight(product.op)) continue;
      const std::string why = reason(product, c == first, c == last);
      if (why.empty()) {
        quantized_[c] = true;
      } else {
        plan_.left.push_back({product.module.empty() ? product.op : product.module, why});
      }
    }
  }
  // Why a product stays in floating point; empty: it doesn't.
  std::string reason(const nn::TracedCall& product, bool is_first, bool is_last) const {
    const int weight = product.inputs.size() < 2 ? -1 : product.inputs[1];
    if (weight < 0 || value(weight).kind != Kind::parameter) return "its weight is no parameter";
    if (value(product.inputs[0]).kind == Kind::parameter) return "it reads a parameter";
    if (skip_(product.module)) return "left out by option";
    if (is_first && !first_) return "the first product, left out by option";
    if (is_last && !last_) return "the last product, left out by option";
    return "";
  }

  // Values that a quantized product reads, directly or through calls that keep integers: from the last call to the
  // first.
  void find_wanted() {
    wanted_.assign(trace_.values.size(), false);
    for (int c = static_cast<int>(trace_.calls.size()) - 1; c >= 0; --c) {
      const nn::TracedCall& reader = call(c);
      const bool reads = has_weight(reader.op) ? quantized_[static_cast<std::size_t>(c)]
                         : keeps_grid(reader)  ? is_wanted(c)
                                               : is_integer_sum(c);
      if (!reads) continue;
      for (std::size_t i = 0; i < (has_weight(reader.op) ? 1U : reader.inputs.size()); ++i) {
        if (reader.inputs[i] >= 0) wanted_[static_cast<std::size_t>(reader.inputs[i])] = true;
      }
    }
  }

  // A sum or the like that is computed in integers: not behind a product in floating point, in one go with that.
  bool is_integer_sum(int c) const {
    return combines(call(c).op) && !floating_[static_cast<std::size_t>(c)] && is_wanted(end_of(c));
  }
  // The last call of the group that `c` is in, and whether its result is wanted in integers.
  int end_of(int c) const {
    while (next_[static_cast<std::size_t>(c)] >= 0) c = next_[static_cast<std::size_t>(c)];
    return c;
  }
  bool is_wanted(int c) const {
    const std::vector<int>& results = call(c).outputs;
    return std::any_of(results.begin(), results.end(), [&](int v) { return wanted_[static_cast<std::size_t>(v)]; });
  }

  bool is_output(int v) const { return outputs_.contains(v); }
  // The one call that reads the result of `c`; -1: none, or several.
  int only_reader(int c) const {
    const nn::TracedCall& maker = call(c);
    if (maker.outputs.empty()) return -1;
    const int v = maker.outputs[0];
    return readers(v).size() == 1 && !is_output(v) ? readers(v)[0] : -1;
  }

  // next_[c]: the call that goes on with the result of c before it is rounded to integers; -1: none.
  void find_groups() {
    next_.assign(trace_.calls.size(), -1);
    text_.resize(trace_.calls.size());
    ends_add_.assign(trace_.calls.size(), -1);
    floating_.assign(trace_.calls.size(), false);
    for (int c = 0; c < static_cast<int>(trace_.calls.size()); ++c) {
      const auto at = static_cast<std::size_t>(c);
      const nn::TracedCall& maker = call(c);
      const bool starts = has_weight(maker.op);
      if (starts) floating_[at] = !quantized_[at];
      const bool goes_on = maker.op == "batch_norm" || maker.op == "add";
      if (text_[at].empty()) text_[at] = maker.op;
      if (!starts && !goes_on) continue;
      const int reader = only_reader(c);
      if (reader < 0) continue;
      const nn::TracedCall& next = call(reader);
      const bool first = next.inputs[0] == maker.outputs[0];
      const bool fits = (next.op == "batch_norm" && starts && first) || (is_activation(next.op) && first) ||
                        (next.op == "add" && maker.op != "add" && is_residual(reader));
      if (!fits) continue;
      if (next.op == "add") {
        // Of two products that are added up the one that is computed last takes the other's integers.
        int& taken = ends_add_[static_cast<std::size_t>(reader)];
        if (taken >= 0) next_[static_cast<std::size_t>(taken)] = -1;
        taken = c;
      }
      floating_[static_cast<std::size_t>(reader)] = floating_[at];
      next_[at] = reader;
      text_[static_cast<std::size_t>(reader)] = text_[at] + " + " + next.op;
    }
  }
  // Whether an addition is one of two activations of one shape.
  bool is_residual(int c) const {
    const nn::TracedCall& sum = call(c);
    return sum.inputs.size() == 2 && sum.inputs[0] >= 0 && sum.inputs[1] >= 0 && is_activity(sum.inputs[0]) &&
           is_activity(sum.inputs[1]) && value(sum.inputs[0]).tensor.sizes() == value(sum.inputs[1]).tensor.sizes();
  }
  bool is_activity(int v) const { return value(v).kind == Kind::computed || value(v).kind == Kind::input; }

  Site site(std::size_t c) const {
    const nn::TracedCall& at = trace_.calls[c];
    return {.module = at.module, .op = at.op, .occurrence = occurrence_[c]};
  }

  void add_sites(std::size_t c) {
    const nn::TracedCall& at = trace_.calls[c];
    const std::string place = at.module.empty() ? at.op : at.module;
    // What comes from outside is quantized where it is read first: by a call that computes with it in integers.
    for (std::size_t i = 0; i < at.inputs.size(); ++i) {
      const int v = at.inputs[i];
      if (v < 0) continue;
      if (has_weight(at.op) && i == 1 && quantized_[c]) {
        Site s = site(c);
        s.input = 1;
        s.weight = true;
        s.channels = value(v).tensor.size(0);
        s.name = unique(value(v).name);
        plan_.sites.push_back(std::move(s));
      } else if (value(v).kind == Kind::input && wanted_[static_cast<std::size_t>(v)] && reads_integers(c, i)) {
        Site s = site(c);
        s.input = static_cast<int>(i);
        const auto number = std::find(trace_.inputs.begin(), trace_.inputs.end(), v) - trace_.inputs.begin();
        s.name = trace_.inputs.size() == 1 ? "input" : fmt::format("input_{}", number);
        plan_.sites.push_back(std::move(s));
      }
    }
    if (at.outputs.empty() || next_[c] >= 0 || keeps_grid(at)) return;
    if (!wanted_[static_cast<std::size_t>(at.outputs[0])]) return;
    if (!is_floating(value(at.outputs[0]).tensor.dtype())) return;
    Site s = site(c);
    s.name = unique(place);
    s.group = text_[c];
    s.non_negative = at.op == "relu" || at.op == "sigmoid" || at.op == "hardsigmoid";
    plan_.sites.push_back(std::move(s));
  }
  // Whether a call computes with its input `i` in integers: a product, or one behind which there is one.
  bool reads_integers(std::size_t c, std::size_t i) const {
    const nn::TracedCall& at = trace_.calls[c];
    if (has_weight(at.op)) return quantized_[c] && i == 0;
    return is_integer_sum(static_cast<int>(c));
  }

  // Several calls of a module, or several functions in one, have numbers.
  std::string unique(const std::string& name) {
    std::string result = name;
    for (int i = 1; !names_.insert(result).second; ++i) result = fmt::format("{}_{}", name, i);
    return result;
  }

  const nn::Trace& trace_;
  const std::function<bool(const std::string&)>& skip_;
  const bool first_, last_;
  std::vector<std::vector<int>> readers_;  // by value
  std::vector<int> makers_;                // by value
  std::vector<int> occurrence_;            // by call
  std::set<int> outputs_;
  std::vector<bool> quantized_;  // by call
  std::vector<bool> floating_;   // by call: part of what a product in floating point computes
  std::vector<bool> wanted_;     // by value
  std::vector<int> next_, ends_add_;
  std::vector<std::string> text_;
  std::set<std::string> names_;
  Plan plan_;
};

}  // namespace

Plan plan_quantization(const nn::Trace& trace, const std::function<bool(const std::string& module)>& skip, bool first,
                       bool last) {
  return Planner(trace, skip, first, last).plan();
}

}  // namespace halfstep::quant::detail

namespace halfstep::quant {

bool keeps_grid(const nn::TracedCall& call) {
  static constexpr auto kNames = std::to_array<std::string_view>(
      {"max_pool2d", "adaptive_max_pool2d", "pad", "flip", "index_select", "gather", "amax", "max_dim"});
  if (call.op == "interpolate" && call.attributes.size() >= sizeof(InterpolateAttributes)) {
    InterpolateAttributes a;
    std::memcpy(&a, call.attributes.data(), sizeof(a));
    constexpr std::int32_t kBilinear = 2;
    return a.mode != kBilinear;
  }
  const Op* known = find_op(call.op);
  return (known && known->view) || std::find(kNames.begin(), kNames.end(), call.op) != kNames.end();
}

}  // namespace halfstep::quant
