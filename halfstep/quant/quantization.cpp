// SPDX-License-Identifier: Apache-2.0
#include "halfstep/quant/quantization.h"

#include <algorithm>
#include <unordered_map>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/op.h"
#include "halfstep/quant/path_pattern_internal.h"
#include "halfstep/quant/plan_internal.h"
#include "halfstep/runtime/log.h"

namespace halfstep::quant {

/// Sites by the module in which they are called.
struct Quantization::Plan {
  std::vector<detail::Site> sites;
  std::vector<detail::LeftOut> left;
  std::vector<std::int64_t> channels;  // by site: of a weight
  // A call, and its sites.
  struct Call {
    std::string op;
    int occurrence;
    std::vector<std::size_t> sites;
  };
  std::unordered_map<std::string, std::vector<Call>> by_module;

  void index() {
    for (std::size_t i = 0; i < sites.size(); ++i) {
      std::vector<Call>& calls = by_module[sites[i].module];
      const auto same = [&](const Call& c) { return c.op == sites[i].op && c.occurrence == sites[i].occurrence; };
      auto at = std::find_if(calls.begin(), calls.end(), same);
      if (at == calls.end()) at = calls.insert(calls.end(), {sites[i].op, sites[i].occurrence, {}});
      at->sites.push_back(i);
    }
  }
};

namespace {

constexpr std::string_view kName = "quantization";

// Of an op, as a trace of its parts has them.
constexpr std::size_t kMostParts = 3;
struct Parts {
  std::array<std::string_view, kMostParts> names;
  std::size_t count = 0;
  void add(std::string_view name) { names[count++] = name; }
};
Parts parts_of(const Op& op, std::span<const Tensor* const> inputs, const void* attributes) {
  const std::string_view name = op.name;
  Parts parts;
  if (name == "batch_norm_silu") {
    parts.add("batch_norm");
    parts.add("silu");
  } else if (name == "batch_norm_act") {
    parts.add("batch_norm");
    if (inputs.size() > 5 && inputs[5]->defined()) parts.add("add");
    const auto activation = static_cast<Activation>(static_cast<const BatchNormAttributes*>(attributes)->activation);
    if (activation == Activation::relu) parts.add("relu");
    if (activation == Activation::relu6) parts.add("hardtanh");
  } else {
    parts.add(name);
  }
  return parts;
}

// Of this thread: networks run without their quantization.
thread_local bool is_left_out = false;
struct LeavingOut {
  const bool was = std::exchange(is_left_out, true);
  LeavingOut() = default;
  ~LeavingOut() { is_left_out = was; }
  LeavingOut(const LeavingOut&) = delete;
  LeavingOut& operator=(const LeavingOut&) = delete;
};

void check_bits(int bits, const char* what) {
  if ((bits < 2 || bits > 8) && bits != 16) fail<Error>("prepare: expected {} of 2 to 8 or 16, got {}", what, bits);
}

}  // namespace

// A forward() of the network.
class Quantizing final : public CallInterceptor {
 public:
  Quantizing(std::shared_ptr<const Quantization::Plan> plan, std::vector<std::shared_ptr<FakeQuantize>> quantizers)
      : plan_(std::move(plan)), quantizers_(std::move(quantizers)), prefix_(call_origin().module_path) {
    outer_ = std::exchange(thread_state().interceptor, this);
  }
  Quantizing(const Quantizing& other) = default;
  ~Quantizing() override {
    if (installed_) thread_state().interceptor = outer_;
  }
  std::shared_ptr<CallInterceptor> again() const override {
    auto copy = std::make_shared<Quantizing>(*this);
    copy->installed_ = false;
    return copy;
  }

  void call(const Op& op, std::span<const Tensor* const> inputs, const void* attributes,
            std::span<Tensor> outputs) override {
    const Quantization::Plan::Call* planned = find(op, inputs, attributes);
    if (!planned) return call_op(op, inputs, attributes, outputs);
    std::vector<Tensor> held;
    const std::vector<const Tensor*> taken = quantized(*planned, inputs, held);
    call_op(op, taken, attributes, outputs);
    for (const std::size_t i : planned->sites) {
      if (plan_->sites[i].input < 0) outputs[0] = (*quantizers_[i])(outputs[0]);
    }
  }

  void call_into(const Op& op, std::span<const Tensor* const> inputs, const void* attributes, Tensor& destination,
                 bool in_place) override {
    const Quantization::Plan::Call* planned = find(op, inputs, attributes);
    if (!planned) return call_op_into(op, inputs, attributes, destination, in_place);
    // Not where it is: the op may keep its result for the backward pass, which quantizing it there would change.
    std::vector<Tensor> held;
    const std::vector<const Tensor*> taken = quantized(*planned, inputs, held);
    Tensor result;
    call_op(op, taken, attributes, {&result, 1});
    for (const std::size_t i : planned->sites) {
      if (plan_->sites[i].input < 0) result = (*quantizers_[i])(result);
    }
    destination.copy_(result);
  }

 private:
  // The planned call that this one is; null: it has no sites.
  const Quantization::Plan::Call* find(const Op& op, std::span<const Tensor* const> inputs, const void* attributes) {
    std::string_view path = call_origin().module_path;
    if (!prefix_.empty() && path.starts_with(prefix_)) path.remove_prefix(std::min(path.size(), prefix_.size() + 1));
    key_.assign(path);
    const auto module = plan_->by_module.find(key_);
    if (module == plan_->by_module.end()) return nullptr;
    const Parts parts = parts_of(op, inputs, attributes);
    const Quantization::Plan::Call* found = nullptr;
    for (std::size_t i = 0; i < parts.count; ++i) {
      int& seen = seen_[key_][std::string(parts.names[i])];
      for (const auto& call : module->second) {
        if (call.op == parts.names[i] && call.occurrence == seen) found = &call;
      }
      ++seen;
    }
    return found;
  }

  std::vector<const Tensor*> quantized(const Quantization::Plan::Call& planned, std::span<const Tensor* const> inputs,
                                       std::vector<Tensor>& held) const {
    std::vector<const Tensor*> result(inputs.begin(), inputs.end());
    held.reserve(planned.sites.size());
    for (const std::size_t i : planned.sites) {
      const int at = plan_->sites[i].input;
      if (at < 0 || static_cast<std::size_t>(at) >= result.size()) continue;
      held.push_back((*quantizers_[i])(*result[static_cast<std::size_t>(at)]));
      result[static_cast<std::size_t>(at)] = &held.back();
    }
    return result;
  }

  const std::shared_ptr<const Quantization::Plan> plan_;
  const std::vector<std::shared_ptr<FakeQuantize>> quantizers_;
  const std::string prefix_;
  std::string key_;
  std::unordered_map<std::string, std::unordered_map<std::string, int>> seen_;
  CallInterceptor* outer_ = nullptr;
  bool installed_ = true;  // as the thread's, while it lives
};

Quantization::Quantization(std::shared_ptr<const Plan> plan, const QuantizationOptions& options)
    : options(options), plan_(std::move(plan)) {
  for (std::size_t i = 0; i < plan_->sites.size(); ++i) {
    const detail::Site& site = plan_->sites[i];
    FakeQuantizeOptions o;
    if (site.weight) {
      o = weight_options(plan_->channels[i], options.weight_bits);
      if (!options.per_channel) {
        o.axis.reset();
        o.channels = 0;
      }
      o.narrow_range = true;
    } else {
      o = activation_options(options.activation_bits);
      o.is_signed = o.symmetric = options.symmetric;
      o.reduce_range = options.reduce_range;
      o.observer = options.observer;
      o.averaging_constant = options.averaging_constant;
    }
    if (options.learned) o.source = ScaleSource::learned;
    quantizers_.push_back(std::make_shared<FakeQuantize>(o));
    set_name(*quantizers_.back(), site.name);
  }
}
Quantization::Quantization(const Quantization& other) = default;
Quantization::~Quantization() = default;

std::vector<std::pair<std::string, nn::ModuleBase*>> Quantization::held() const {
  std::vector<std::pair<std::string, nn::ModuleBase*>> result;
  for (std::size_t i = 0; i < quantizers_.size(); ++i) result.emplace_back(plan_->sites[i].name, quantizers_[i].get());
  return result;
}

void Quantization::unshare() {
  Module::unshare();
  for (auto& quantizer : quantizers_) {
    auto own = std::make_shared<FakeQuantize>(nn::clone(*quantizer));
    set_name(*own, quantizer->name());
    quantizer = std::move(own);
  }
}

std::shared_ptr<void> Quantization::around_forward(const nn::ModuleBase& owner) const {
  (void)owner;
  if (is_left_out) return nullptr;
  return std::make_shared<Quantizing>(plan_, quantizers_);
}

std::vector<QuantizedTensor> Quantization::tensors() const {
  std::vector<QuantizedTensor> result;
  for (const detail::Site& s : plan_->sites) {
    result.push_back({.name = s.name, .module = s.module, .weight = s.weight, .group = s.group});
  }
  return result;
}

FakeQuantize& Quantization::at(std::string_view name) const {
  for (std::size_t i = 0; i < quantizers_.size(); ++i) {
    if (plan_->sites[i].name == name) return *quantizers_[i];
  }
  fail<Error>("Quantization: expected the name of a quantized tensor, got '{}'", name);
}

std::vector<std::string> Quantization::left() const {
  std::vector<std::string> result;
  for (const detail::LeftOut& l : plan_->left) result.push_back(fmt::format("{}: {}", l.module, l.why));
  return result;
}

std::string Quantization::describe() const {
  return fmt::format("weights {} bits{}, activations {} bits{}", options.weight_bits,
                     options.per_channel ? " by channel" : "", options.activation_bits,
                     options.learned ? ", learned scales" : "");
}

Quantization prepare(const nn::ModuleBase& network, const nn::TracedForward& forward, std::vector<Tensor> inputs,
                     const QuantizationOptions& options) {
  check_bits(options.weight_bits, "weight_bits");
  check_bits(options.activation_bits, "activation_bits");
  if (network.attached(kName)) fail<Error>("prepare: the network is prepared already");
  const nn::Trace trace = nn::trace(network, forward, std::move(inputs), "prepare");
  auto plan = std::make_shared<Quantization::Plan>();
  std::vector<std::string> used;
  const detail::Plan found = detail::plan_quantization(
      trace,
      [&](const std::string& module) {
        return std::any_of(options.skip.begin(), options.skip.end(), [&](const std::string& pattern) {
          if (!detail::matches(pattern, module)) return false;
          used.push_back(pattern);
          return true;
        });
      },
      options.first, options.last);
  for (const std::string& pattern : options.skip) {
    if (std::find(used.begin(), used.end(), pattern) == used.end()) {
      fail<Error>("prepare: expected the paths of modules with weights in `skip`, got '{}', which fits none", pattern);
    }
  }
  plan->sites = found.sites;
  plan->left = found.left;
  if (plan->sites.empty()) {
    fail<Error>("prepare: expected a network with convolutions or linear layers to quantize, got none");
  }
  const NamedTensors state = network.state_dict();
  for (const detail::Site& site : plan->sites) plan->channels.push_back(site.channels);
  plan->index();
  auto attached = std::make_shared<Quantization>(plan, options);
  Device device;
  for (const NamedTensor& t : state) {
    if (t.tensor.defined()) device = t.tensor.device();
  }
  attached->to(device);
  network.attach(std::string(kName), attached);
  return *attached;
}

std::shared_ptr<Quantization> quantization_of(const nn::ModuleBase& network) {
  return std::dynamic_pointer_cast<Quantization>(network.attached(kName));
}

std::vector<TracedGrid> Quantization::grids(const nn::Trace& trace, std::string_view who) const {
  std::vector<TracedGrid> result;
  std::vector<bool> found(plan_->sites.size());
  std::unordered_map<std::string, std::unordered_map<std::string, int>> seen;
  for (std::size_t c = 0; c < trace.calls.size(); ++c) {
    const nn::TracedCall& call = trace.calls[c];
    const int occurrence = seen[call.module][call.op]++;
    const auto module = plan_->by_module.find(call.module);
    if (module == plan_->by_module.end()) continue;
    for (const Plan::Call& planned : module->second) {
      if (planned.op != call.op || planned.occurrence != occurrence) continue;
      for (const std::size_t i : planned.sites) {
        const detail::Site& site = plan_->sites[i];
        result.push_back({.call = static_cast<int>(c),
                          .input = site.input,
                          .weight = site.weight,
                          .quantizer = quantizers_[i],
                          .name = site.name});
        found[i] = true;
      }
    }
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i]) continue;
    fail<Error>("{}: expected the calls that the network was prepared with, but '{}' isn't computed", who,
                plan_->sites[i].name);
  }
  return result;
}

QuantizedTrace trace_quantized(const nn::ModuleBase& network, const nn::TracedForward& forward,
                               std::vector<Tensor> inputs, std::string_view who) {
  const std::shared_ptr<Quantization> quantization = quantization_of(network);
  if (!quantization) fail<Error>("{}: expected a network that quant::prepare() has prepared", who);
  QuantizedTrace result;
  {
    const LeavingOut left_out;
    result.trace = nn::trace(network, forward, std::move(inputs), who);
  }
  result.grids = quantization->grids(result.trace, who);
  return result;
}

}  // namespace halfstep::quant
