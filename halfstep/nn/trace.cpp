// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/trace.h"

#include <algorithm>
#include <map>
#include <thread>
#include <tuple>
#include <unordered_map>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/op.h"

namespace halfstep::nn {
namespace {

using Kind = TracedValue::Kind;

bool is_random(std::string_view op) {
  constexpr std::string_view kRandom[] = {"uniform",   "normal",      "randint", "randperm",
                                          "bernoulli", "bernoulli_p", "dropout"};
  return std::find(std::begin(kRandom), std::end(kRandom), op) != std::end(kRandom);
}

// Which elements of a storage a tensor is, and in what order. Strides of dimensions of size 1 mean nothing.
using Geometry = std::tuple<std::int64_t, std::vector<std::int64_t>, std::vector<std::int64_t>, DType>;
Geometry geometry_of(const Tensor& t) {
  std::vector<std::int64_t> sizes(t.sizes().begin(), t.sizes().end()), strides;
  for (int i = 0; i < t.dim(); ++i) strides.push_back(t.sizes()[i] == 1 ? 0 : t.strides()[i]);
  return {t.storage_offset(), std::move(sizes), std::move(strides), t.dtype()};
}

class Tracer final : public OpObserver {
 public:
  Tracer(const ModuleBase& module, std::string_view who) : who_(who) {
    for (const NamedTensor& p : module.state_dict()) {
      if (!p.tensor.defined() || find(p.tensor) >= 0) continue;  // tied ones go by their first name
      show(p.tensor, add(Kind::parameter, p.tensor, p.name));
    }
  }

  // Reads are checked against the writes that were seen: memory that was written through one tensor isn't what another
  // one on it was before.
  int find(const Tensor& t) const {
    const auto storage = memory_.find(t.storage()->id());
    if (storage == memory_.end()) return -1;
    const auto shown = storage->second.shown.find(geometry_of(t));
    if (shown == storage->second.shown.end() || shown->second.writes != storage->second.writes) return -1;
    return shown->second.value;
  }

  int lookup(const Tensor& t, const std::string& place) {
    if (!t.defined()) return -1;
    if (const int value = find(t); value >= 0) return value;
    const auto storage = memory_.find(t.storage()->id());
    if (storage != memory_.end() && storage->second.computed) {
      fail<Error>("{}: {}: reads memory that was written in place through another view; a graph has no such writes",
                  who_, place);
    }
    const int value = add(Kind::constant, t);
    show(t, value);
    return value;
  }

  void after_call(const ObservedCall& call) override {
    if (std::this_thread::get_id() != thread_) return;
    const std::string_view op = call.name;
    const std::string& module = call_origin().module_path;
    // What is written over doesn't matter to these.
    const bool copies = op == "copy", fills = op == "fill";
    TracedCall c{.op = call.name, .module = module, .inputs = {}, .outputs = {}, .attributes = {}};
    for (std::size_t i = copies && call.op ? 1 : 0; i < call.inputs.size() && !fills; ++i) {
      c.inputs.push_back(lookup(*call.inputs[i], c.place()));
    }
    const bool view = call.path == ExecutionPath::view;
    if (const int source = passes_through(call, c.inputs); source >= 0) {
      if (!view) written(*call.outputs[0]);
      // A constant may lie in memory of its caller, as the values of tensor({...}) do: its copy stays.
      const bool moved = !view && trace.values[static_cast<std::size_t>(source)].kind == Kind::constant;
      show(*call.outputs[0], moved ? add(Kind::constant, *call.outputs[0]) : source);
      return;
    }
    const bool constant = !is_random(op) && std::all_of(c.inputs.begin(), c.inputs.end(), [&](int i) {
      return i < 0 || trace.values[static_cast<std::size_t>(i)].kind == Kind::constant;
    });
    const bool follows_inputs = std::any_of(c.inputs.begin(), c.inputs.end(), [&](int i) {
      return i >= 0 && made_[static_cast<std::size_t>(i)].of_inputs;
    });
    for (const Tensor* t : call.outputs) {
      if (!view) written(*t);
      const int value = add(constant ? Kind::constant : Kind::computed, *t, {}, follows_inputs);
      show(*t, value);
      c.outputs.push_back(value);
    }
    if (constant) return;
    for (const Tensor* t : call.outputs) memory_[t->storage()->id()].computed = true;
    if (call.op && call.attributes) {
      const auto* bytes = static_cast<const unsigned char*>(call.attributes);
      c.attributes.assign(bytes, bytes + call.op->attributes_size);
    }
    trace.calls.push_back(std::move(c));
  }

  // `of_inputs`: its contents are not kept.
  int add(Kind kind, const Tensor& t, std::string name = {}, bool of_inputs = false) {
    // A tensor of our own on the same memory: in-place forms may give their handle other memory later.
    trace.values.push_back({.kind = kind, .tensor = of_inputs ? Tensor() : t, .name = std::move(name)});
    made_.push_back({.storage = t.storage()->id(),
                     .of_inputs = of_inputs || kind == Kind::input,
                     .sizes = t.sizes(),
                     .options = {.dtype = t.dtype(), .device = t.device()}});
    return static_cast<int>(trace.values.size()) - 1;
  }
  void show(const Tensor& t, int value) {
    Memory& memory = memory_[t.storage()->id()];
    memory.shown[geometry_of(t)] = {value, memory.writes};
    TracedValue& v = trace.values[static_cast<std::size_t>(value)];
    if (made_[static_cast<std::size_t>(value)].storage == t.storage()->id()) v.writes = memory.writes;
    memory.computed |= v.kind == Kind::input || v.kind == Kind::computed;
  }

  // Outside of the observation: it makes tensors.
  Trace finish(std::span<const Tensor> outputs) {
    for (std::size_t i = 0; i < trace.values.size(); ++i) {
      TracedValue& v = trace.values[i];
      const Made& made = made_[i];
      v.overwritten = memory_[made.storage].writes != v.writes;
      if (!v.tensor.defined()) v.tensor = zeros({}, made.options).expand(made.sizes);
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      TracedValue& v = trace.values[static_cast<std::size_t>(trace.outputs[i])];
      if (v.kind == Kind::computed && v.tensor.dtype() == outputs[i].dtype()) v.tensor = outputs[i];
    }
    return std::move(trace);
  }

  Trace trace;

 private:
  struct Shown {
    int value;
    std::uint64_t writes;  // of the memory, when it was shown
  };
  // What a value was when it was made.
  struct Made {
    std::uint64_t storage;  // Storage::id()
    bool of_inputs;         // follows from the network's inputs
    Shape sizes;
    TensorOptions options;
  };
  struct Memory {
    std::uint64_t writes = 0;
    bool computed = false;  // holds what depends on the inputs or parameters
    std::map<Geometry, Shown> shown;
  };

  void written(const Tensor& t) { ++memory_[t.storage()->id()].writes; }

  // The value that the call's result is just another layout, place or precision of; -1 otherwise. Floating
  // dtypes count as one.
  static bool same_type(DType a, DType b) { return a == b || (is_floating(a) && is_floating(b)); }
  int passes_through(const ObservedCall& call, const std::vector<int>& inputs) const {
    if (call.outputs.size() != 1 || inputs.empty()) return -1;
    const std::string_view op = call.name;
    const Tensor &from = *call.inputs.back(), &to = *call.outputs[0];
    const bool copies = op == "copy" || op == "to" || op == "clone" || op == "to_device";
    // A view that changes nothing but strides of size 1.
    const bool unchanged =
        call.path == ExecutionPath::view && op != "as_strided" && geometry_of(from) == geometry_of(to);
    if (!unchanged && !(copies && from.sizes() == to.sizes() && same_type(from.dtype(), to.dtype()))) return -1;
    return inputs.back();
  }

  std::string_view who_;
  std::thread::id thread_ = std::this_thread::get_id();
  std::unordered_map<std::uint64_t, Memory> memory_;  // by Storage::id()
  std::vector<Made> made_;                            // by value
};

}  // namespace

std::string TracedCall::place() const { return module.empty() ? op : fmt::format("{} in module {}", op, module); }

Trace trace(const ModuleBase& module, const TracedForward& forward, std::vector<Tensor> inputs, std::string_view who) {
  const NoGrad no_grad;
  const AutocastOff autocast_off;
  const EvalMode evaluation(module);
  Tracer tracer(module, who);
  for (const Tensor& t : inputs) {
    const int value = tracer.add(Kind::input, t);
    tracer.show(t, value);
    tracer.trace.inputs.push_back(value);
  }
  std::vector<Tensor> outputs;
  {
    const Observing observing(&tracer);
    outputs = forward(inputs);
  }
  if (outputs.empty()) fail<Error>("{}: expected at least one output, got none", who);
  for (const Tensor& t : outputs) {
    if (!t.defined()) fail<Error>("{}: expected defined outputs, got an undefined one", who);
    tracer.trace.outputs.push_back(tracer.lookup(t, "the output"));
  }
  return tracer.finish(outputs);
}

}  // namespace halfstep::nn
