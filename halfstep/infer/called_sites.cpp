// SPDX-License-Identifier: Apache-2.0
// Places of fake quantization that a network calls itself, read off a trace.
#include <algorithm>
#include <cstring>
#include <vector>

#include "halfstep/infer/sites_internal.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/pointwise.h"

namespace halfstep::infer::detail {
namespace {

using Kind = nn::TracedValue::Kind;

bool is_called(const nn::TracedCall& call) {
  return call.op == "fake_quantize" || call.op == "fake_quantize_learnable";
}

class Taker {
 public:
  explicit Taker(nn::Trace& trace) : trace_(trace) {
    const std::size_t n = trace.values.size();
    makers_.assign(n, -1);
    readers_.resize(n);
    is_output_.assign(n, false);
    for (const int v : trace.outputs) is_output_[at(v)] = true;
    for (std::size_t v = 0; v < n; ++v) {
      constant_.push_back(trace.values[v].kind == Kind::parameter || trace.values[v].kind == Kind::constant);
    }
    for (std::size_t c = 0; c < trace.calls.size(); ++c) {
      bool constant = true;
      for (const int v : trace.calls[c].inputs) {
        if (v < 0) continue;
        readers_[at(v)].push_back(c);
        constant = constant && constant_[at(v)];
      }
      for (const int v : trace.calls[c].outputs) {
        makers_[at(v)] = static_cast<int>(c);
        constant_[at(v)] = constant;
      }
    }
  }

  Sites take() {
    struct Place {
      std::size_t call;
      int input;
      Site site;
    };
    std::vector<Place> places;
    std::vector<bool> dropped(trace_.calls.size(), false), placed(trace_.calls.size(), false);
    for (std::size_t c = 0; c < trace_.calls.size(); ++c) {
      nn::TracedCall& call = trace_.calls[c];
      // A scale that follows the input has no integers.
      if (!is_called(call) || !constant_[at(call.inputs[1])] || !constant_[at(call.inputs[2])]) continue;
      Site site = site_of(call);
      const int from = call.inputs[0], to = call.outputs[0];
      if (constant_[at(from)] && !is_output_[at(to)]) {
        for (const std::size_t r : readers_[at(to)]) {
          std::vector<int>& inputs = trace_.calls[r].inputs;
          for (std::size_t i = 0; i < inputs.size(); ++i) {
            if (inputs[i] != to) continue;
            inputs[i] = from;
            places.push_back({r, static_cast<int>(i), site});
          }
        }
        dropped[c] = true;
        continue;
      }
      const int maker = makers_[at(from)];
      const bool alone = maker >= 0 && readers_[at(from)].size() == 1 && !is_output_[at(from)];
      if (alone && !placed[at(maker)] && trace_.calls[at(maker)].outputs[0] == from &&
          !is_called(trace_.calls[at(maker)]) && !quant::keeps_grid(trace_.calls[at(maker)])) {
        for (const std::size_t r : readers_[at(to)]) {
          std::replace(trace_.calls[r].inputs.begin(), trace_.calls[r].inputs.end(), to, from);
        }
        std::replace(trace_.outputs.begin(), trace_.outputs.end(), to, from);
        readers_[at(from)] = readers_[at(to)];
        is_output_[at(from)] = is_output_[at(to)];
        places.push_back({at(maker), -1, std::move(site)});
        placed[at(maker)] = true;
        dropped[c] = true;
        continue;
      }
      call.inputs = {from};
      call.outputs = {to};
      places.push_back({c, -1, std::move(site)});
    }
    // By the numbers of the calls that are left.
    std::vector<int> number(trace_.calls.size(), -1);
    std::vector<nn::TracedCall> left;
    for (std::size_t c = 0; c < trace_.calls.size(); ++c) {
      if (dropped[c]) continue;
      number[c] = static_cast<int>(left.size());
      left.push_back(std::move(trace_.calls[c]));
    }
    trace_.calls = std::move(left);
    Sites sites;
    for (Place& p : places) {
      if (number[p.call] >= 0) sites.add(number[p.call], p.input, std::move(p.site));
    }
    return sites;
  }

 private:
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }

  Site site_of(const nn::TracedCall& call) const {
    const nn::TracedValue &scale = trace_.values[at(call.inputs[1])], &zero = trace_.values[at(call.inputs[2])];
    QuantizeAttributes a{};
    if (call.attributes.size() == sizeof(a)) std::memcpy(&a, call.attributes.data(), sizeof(a));
    const auto least = static_cast<double>(a.quant_min), most = static_cast<double>(a.quant_max);
    const Tensor point = zero.tensor.detach();
    Site site{.name = scale.name,
              .scale = scale.tensor.detach().to(f32).clone(),
              .zero_point = (point.is_floating() ? clamp(round(point), least, most) : point.clone()).to(i32),
              .quant_min = a.quant_min,
              .quant_max = a.quant_max,
              .axis = a.axis < 0 ? std::nullopt : std::optional(a.axis)};
    // `quantize.relu1.scale`; a learned scale is computed from the parameter.
    constexpr std::string_view kScale = ".scale";
    if (site.name.ends_with(kScale)) site.name.resize(site.name.size() - kScale.size());
    if (site.name.empty()) site.name = call.module.empty() ? call.op : call.module;
    set_grid(site);
    return site;
  }

  nn::Trace& trace_;
  std::vector<int> makers_;                        // by value
  std::vector<std::vector<std::size_t>> readers_;  // likewise
  std::vector<bool> is_output_, constant_;
};

}  // namespace

Sites take_fake_quantization(nn::Trace& trace) { return Taker(trace).take(); }

bool is_grid_call(const nn::TracedCall& call) { return is_called(call) && call.inputs.size() == 1; }

}  // namespace halfstep::infer::detail
