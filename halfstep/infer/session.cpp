// SPDX-License-Identifier: Apache-2.0
#include "halfstep/infer/session.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/recording_internal.h"
#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/infer/graph_internal.h"
#include "halfstep/infer/quiet_thread_internal.h"
#include "halfstep/infer/sites_internal.h"
#include "halfstep/ops/observer.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::infer {
namespace {

using halfstep::detail::Recording;

// The sink of this thread while it lives.
struct RecordingScope {
  CaptureSink* was;
  explicit RecordingScope(CaptureSink* sink) : was(std::exchange(capture_sink(), sink)) {}
  ~RecordingScope() { capture_sink() = was; }
  RecordingScope(const RecordingScope&) = delete;
  RecordingScope& operator=(const RecordingScope&) = delete;
};

// What a plan is for.
struct PlanKey {
  std::int64_t samples = 0;
  std::uint64_t layouts = 0;  // bit i: input i is channels-last
  void* queue = nullptr;      // of a device
  bool operator==(const PlanKey&) const = default;
};

struct Plan {
  PlanKey key;
  std::unique_ptr<Recording> recording;
  std::uint64_t used = 0;  // number of the last call
};

constexpr std::size_t kMostInputs = 64;  // bits of PlanKey::layouts

bool is_channels_last_only(const Tensor& t) {
  return t.dim() == 4 && !t.is_contiguous() && t.is_contiguous(MemoryFormat::channels_last);
}

std::string sizes_of(const Shape& sizes, bool any_batch) {
  if (!any_batch) return sizes.str();
  std::string text = "[N";
  for (int i = 1; i < sizes.size(); ++i) text += fmt::format(", {}", sizes[i]);
  return text + "]";
}

}  // namespace

struct Session::Impl {
  struct Port {
    Shape sizes;
    DType dtype;
    Device device;
  };

  detail::Graph graph;
  std::optional<DType> dtype;
  bool dynamic_batch = true;
  std::size_t most_plans = 0;
  std::vector<Port> ports;  // of the inputs

  mutable std::mutex mutex;
  std::vector<Plan> idle;
  std::size_t made = 0;  // plans that there are, idle or running
  std::uint64_t clock = 0;
  SessionStats stats;
  std::string why_not;

  std::string where(std::size_t i) const {
    return ports.size() == 1 ? std::string("the input") : fmt::format("input {}", i);
  }
  void check(std::span<const Tensor> inputs) const;
  PlanKey key_of(std::span<const Tensor> inputs) const;
  std::vector<Tensor> interpret(std::span<const Tensor> inputs) const;
  std::unique_ptr<Recording> record(std::span<const Tensor> inputs, std::string& refusal) const;
  Plan take(const PlanKey& key);
  void give_back(Plan plan) noexcept;
  template <class Use>
  void call(std::span<const Tensor> inputs, Use&& use);
};

void Session::Impl::check(std::span<const Tensor> inputs) const {
  if (inputs.size() != ports.size()) {
    fail<Error>("session: expected {} inputs, got {}", ports.size(), inputs.size());
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Tensor& t = inputs[i];
    const Port& port = ports[i];
    if (!t.defined()) fail<Error>("session: expected a tensor as {}, got an undefined one", where(i));
    if (t.dtype() != port.dtype) {
      fail<DTypeError>("session: expected {} as {}, got {}", name(port.dtype), where(i), name(t.dtype()));
    }
    if (t.device() != port.device) {
      fail<DeviceError>("session: expected {} on {}, got it on {}", where(i), port.device.str(), t.device().str());
    }
    bool fits = t.dim() == port.sizes.size();
    for (int d = dynamic_batch ? 1 : 0; fits && d < t.dim(); ++d) fits = t.sizes()[d] == port.sizes[d];
    if (!fits) {
      fail<ShapeError>("session: expected {} of sizes {}, got {}", where(i), sizes_of(port.sizes, dynamic_batch),
                       t.sizes().str());
    }
    if (dynamic_batch && (t.sizes()[0] < 1 || t.sizes()[0] != inputs[0].sizes()[0])) {
      fail<ShapeError>("session: expected {} with {} in dimension 0, got {}", where(i),
                       i == 0 ? "at least one sample" : "as many samples as input 0 has", t.sizes().str());
    }
  }
}

PlanKey Session::Impl::key_of(std::span<const Tensor> inputs) const {
  PlanKey key;
  key.samples = dynamic_batch ? inputs[0].sizes()[0] : 1;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    key.layouts |= std::uint64_t{is_channels_last_only(inputs[i])} << i;
  }
  if (const Device device = inputs[0].device(); !device.is_cpu()) key.queue = current_native_queue(device);
  return key;
}

std::vector<Tensor> Session::Impl::interpret(std::span<const Tensor> inputs) const {
  const detail::QuietThread quiet(dtype);
  return detail::run_graph(graph, inputs);
}

// Null, with a reason, where a run can't be repeated.
std::unique_ptr<Recording> Session::Impl::record(std::span<const Tensor> inputs, std::string& refusal) const {
  // What kernels keep of weights is made in the first runs, and stays.
  for (int attempt = 0; attempt < 4; ++attempt) {
    auto recording = std::make_unique<Recording>(inputs, std::vector<Ref<TensorImpl>>{});
    recording->leave_out_graphs();  // other threads' calls may be on the same queue
    std::vector<Tensor> results;
    {
      const RecordingScope scope(recording.get());
      results = interpret(recording->aliases());
      recording->settle(results, {});
    }
    const bool complete = recording->finish(results, {}, inputs);
    if (!recording->refusal().empty()) {
      refusal = recording->refusal();
      return nullptr;
    }
    if (complete) return recording;
  }
  refusal = "it keeps tensors that it makes";
  return nullptr;
}

// An idle plan for the key, or one without a recording.
Plan Session::Impl::take(const PlanKey& key) {
  const std::lock_guard lock(mutex);
  ++stats.calls;
  for (Plan& plan : idle) {
    if (!(plan.key == key)) continue;
    Plan taken = std::move(plan);
    plan = std::move(idle.back());
    idle.pop_back();
    return taken;
  }
  // Room for it when it comes back.
  idle.reserve(++made);
  return {.key = key, .recording = nullptr};
}

void Session::Impl::give_back(Plan plan) noexcept {
  Plan dropped;  // outside of the lock
  const std::lock_guard lock(mutex);
  if (!plan.recording) {
    --made;
    return;
  }
  plan.used = ++clock;
  idle.push_back(std::move(plan));
  if (idle.size() <= most_plans) return;
  const auto oldest =
      std::min_element(idle.begin(), idle.end(), [](const Plan& a, const Plan& b) { return a.used < b.used; });
  std::swap(*oldest, idle.back());
  dropped = std::move(idle.back());
  idle.pop_back();
  --made;
}

// Calls use(results, ours): `ours` tells that they are the plan's, and written again by its next run.
template <class Use>
void Session::Impl::call(std::span<const Tensor> inputs, Use&& use) {
  check(inputs);
  std::vector<Tensor> dense;
  if (!std::all_of(inputs.begin(), inputs.end(),
                   [](const Tensor& t) { return t.is_contiguous() || is_channels_last_only(t); })) {
    const detail::QuietThread quiet({});
    for (const Tensor& t : inputs) dense.push_back(is_channels_last_only(t) ? t : t.contiguous());
    inputs = dense;
  }
  bool by_itself = capture_sink() || observed();
  if (!by_itself) {
    const std::lock_guard lock(mutex);
    by_itself = !why_not.empty();
  }
  if (by_itself) {
    {
      const std::lock_guard lock(mutex);
      ++stats.calls;
      ++stats.interpreted;
    }
    use(std::span<const Tensor>(interpret(inputs)), false);
    return;
  }
  struct Taken {
    Impl& impl;
    Plan plan;
    ~Taken() { impl.give_back(std::move(plan)); }
  } taken{*this, take(key_of(inputs))};
  Plan& plan = taken.plan;
  if (!plan.recording || !plan.recording->ready()) {
    std::string refusal;
    plan.recording = record(inputs, refusal);
    const std::lock_guard lock(mutex);
    if (!plan.recording) {
      why_not = refusal;
      ++stats.interpreted;
    } else {
      ++stats.planned;
    }
  } else {
    plan.recording->run_again(inputs);
  }
  if (!plan.recording) {
    log(LogLevel::info, fmt::format("session: calls run op by op, since {}", why_not));
    use(std::span<const Tensor>(interpret(inputs)), false);
    return;
  }
  use(std::span<const Tensor>(plan.recording->results()), true);
}

Session::Session(const nn::ModuleBase& network, const nn::TracedForward& forward, std::vector<Tensor> example,
                 const SessionOptions& options)
    : impl_(std::make_shared<Impl>()) {
  if (options.dtype && *options.dtype != f32 && !is_low_precision(*options.dtype)) {
    fail<DTypeError>("session: expected dtype f32, f16 or bf16, got {}", name(*options.dtype));
  }
  if (options.plans < 1) fail<Error>("session: expected plans of at least 1, got {}", options.plans);
  if (example.size() > kMostInputs) {
    fail<Error>("session: expected at most {} inputs, got {}", kMostInputs, example.size());
  }
  std::optional<detail::PictureNumbers> pictures;
  if (options.pictures) pictures = {options.pictures->mean, options.pictures->std};
  impl_->dynamic_batch = options.dynamic_batch;
  impl_->dtype = options.dtype;
  impl_->most_plans = static_cast<std::size_t>(options.plans);
  if (options.int8) {
    impl_->graph = detail::int8_graph(
        detail::make_quantized_source("session: int8", network, forward, example, options.dynamic_batch), pictures,
        options.dtype);
  } else {
    const detail::Source source = detail::make_source(
        "session", [&](std::vector<Tensor> in) { return nn::trace(network, forward, std::move(in), "session"); },
        example, options.dynamic_batch);
    impl_->graph = detail::float_graph(source, options.dtype, pictures);
  }
  for (const Tensor& t : example) {
    impl_->ports.push_back({t.sizes(), options.pictures ? u8 : t.dtype(), t.device()});
  }
}

Tensor Session::operator()(const Tensor& input) const {
  if (impl_->graph.outputs.size() != 1) {
    fail<Error>("session: the network has {} outputs; call run()", impl_->graph.outputs.size());
  }
  return run({&input, 1})[0];
}

std::vector<Tensor> Session::run(std::span<const Tensor> inputs) const {
  std::vector<Tensor> outputs;
  impl_->call(inputs, [&](std::span<const Tensor> results, bool ours) {
    const NoGrad no_grad;
    for (const Tensor& t : results) outputs.push_back(ours ? t.clone() : t);
  });
  return outputs;
}

void Session::run_into(std::span<const Tensor> inputs, std::span<Tensor> outputs) const {
  if (outputs.size() != impl_->graph.outputs.size()) {
    fail<Error>("session: expected {} outputs to write to, got {}", impl_->graph.outputs.size(), outputs.size());
  }
  impl_->call(inputs, [&](std::span<const Tensor> results, bool) {
    for (std::size_t i = 0; i < results.size(); ++i) {
      const Tensor &from = results[i], &to = outputs[i];
      if (!to.defined() || to.sizes() != from.sizes() || to.dtype() != from.dtype() || to.device() != from.device()) {
        fail<ShapeError>("session: expected {} {} on {} to write output {} to, got {}", name(from.dtype()),
                         from.sizes().str(), from.device().str(), i,
                         to.defined()
                             ? fmt::format("{} {} on {}", name(to.dtype()), to.sizes().str(), to.device().str())
                             : std::string("an undefined tensor"));
      }
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      const Tensor& from = results[i];
      Tensor& to = outputs[i];
      if (from.device().is_cpu() && to.is_contiguous() && !to.requires_grad()) {
        std::memcpy(write_raw_data(to), from.const_raw_data(),
                    static_cast<std::size_t>(from.numel()) * from.item_size());
      } else {
        const NoGrad no_grad;
        to.copy_(from);
      }
    }
  });
}

SessionStats Session::stats() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->stats;
}

SessionMemory Session::memory() const {
  SessionMemory memory{.weights = detail::constant_bytes(impl_->graph)};
  const std::lock_guard lock(impl_->mutex);
  for (const Plan& plan : impl_->idle) {
    memory.activations = std::max<std::uint64_t>(memory.activations, plan.recording->bytes());
  }
  return memory;
}

std::string Session::why_not() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->why_not;
}

std::vector<std::string> Session::calls() const {
  std::vector<std::string> names;
  for (const detail::Node& node : impl_->graph.nodes) names.push_back(node.name);
  return names;
}

}  // namespace halfstep::infer
