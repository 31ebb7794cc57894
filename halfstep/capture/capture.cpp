// SPDX-License-Identifier: Apache-2.0
#include "halfstep/capture/capture.h"

#include <map>
#include <set>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/capture/recording_internal.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/op.h"
#include "halfstep/runtime/fallback.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/queue.h"

namespace halfstep {
namespace {

using detail::Recording;

constexpr std::size_t kMostRecordings = 8;  // kinds of inputs
constexpr int kMostRenewals = 16;           // of one of them, without a replay in between

using Key = std::vector<std::int64_t>;

// The sink of this thread while it lives.
struct SinkScope {
  CaptureSink* was;
  explicit SinkScope(CaptureSink* sink) : was(std::exchange(capture_sink(), sink)) {}
  ~SinkScope() { capture_sink() = was; }
  SinkScope(const SinkScope&) = delete;
  SinkScope& operator=(const SinkScope&) = delete;
};

// What decides which kernels run: the inputs' kinds, and the thread's modes.
Key kind_of(std::span<const Tensor> inputs) {
  Key key;
  const ThreadState& state = thread_state();
  key.push_back(state.grad_enabled);
  key.push_back(state.autocast.enabled);
  key.push_back(static_cast<std::int64_t>(state.autocast.dtype));
  key.push_back(state.autocast.device_types);
  key.push_back(state.autocast.cache);
  key.push_back(static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(state.autocast.overrides.get())));
  // How ops run on devices.
  const FallbackOptions fallback = fallback_options();
  key.push_back(synchronous());
  key.push_back(fallback.missing);
  key.push_back(fallback.failing);
  for (const Tensor& t : inputs) {
    key.push_back(t.defined());
    if (!t.defined()) continue;
    const TensorImpl& p = *t.impl();
    key.push_back(static_cast<std::int64_t>(p.dtype));
    key.push_back(p.storage->device().type);
    key.push_back(p.storage->device().index);
    key.push_back(p.requires_grad);
    key.push_back(p.sizes.size());
    for (int d = 0; d < p.sizes.size(); ++d) {
      key.push_back(p.sizes[d]);
      key.push_back(p.strides[d]);
    }
  }
  return key;
}

}  // namespace

struct CapturedStep::Impl {
  struct Entry {
    std::unique_ptr<Recording> recording;
    std::any frame;
    std::uint64_t generation = 0;
    int renewals = 0;
    int incomplete = 0;
  };

  Function step;
  CaptureOptions options;
  CaptureStats stats;
  bool replayed = false;
  std::string why_not;
  std::map<Key, std::string> watched;  // kinds of inputs that ran once, and why they can't be captured
  std::vector<Ref<TensorImpl>> leaves;
  std::set<const TensorImpl*> known_leaves;
  std::vector<std::shared_ptr<const void>> overrides;
  std::map<Key, Entry> entries;
  bool running = false;

  Result plain(std::span<const Tensor> inputs) {
    ++stats.plain;
    return step(inputs);
  }
  void refused(const std::string& why, std::string& place) {
    place = why_not = why;
    log(LogLevel::info, fmt::format("capture: the step runs as it is, since {}", why));
  }
  // A run that only looks.
  Result watch(std::span<const Tensor> inputs, std::string& refusal) {
    // Its address is part of what tells kinds of calls apart.
    if (thread_state().autocast.overrides) overrides.push_back(thread_state().autocast.overrides);
    Recording watcher;
    Result result;
    {
      const SinkScope scope(&watcher);
      result = plain(inputs);
    }
    for (const Tensor& t : inputs) {
      if (!t.defined()) continue;
      if (t.requires_grad()) watcher.refuse("an input requires grad");
      for (const Tensor& r : result.tensors) {
        if (r.defined() && r.storage().get() == t.storage().get()) watcher.refuse("it returns an input");
      }
    }
    for (const auto& leaf : watcher.leaves()) {
      if (known_leaves.insert(leaf.get()).second) leaves.push_back(leaf);
    }
    if (!watcher.refusal().empty()) refused(watcher.refusal(), refusal);
    return result;
  }
  // A run that is remembered.
  Result record(std::span<const Tensor> inputs, Entry& entry, std::string& refusal) {
    entry.recording.reset();
    entry.generation = capture_generation().load(std::memory_order_relaxed);
    auto recording = std::make_unique<Recording>(inputs, leaves);
    if (!options.chains) recording->leave_out_chains();
    Result result;
    {
      const SinkScope scope(recording.get());
      result = step(recording->aliases());
      recording->settle(result.tensors, leaves);
    }
    ++stats.recorded;
    // The graph of the results keeps what the step made.
    std::vector<Tensor> values;
    for (const Tensor& t : result.tensors) values.push_back(t.defined() ? t.detach() : t);
    result.tensors = values;
    const bool complete = recording->finish(values, leaves, inputs);
    if (!recording->refusal().empty()) {
      refused(recording->refusal(), refusal);
      return result;
    }
    if (!complete) {
      // State is made at the first use: the next run finds it there.
      if (++entry.incomplete >= 3) refused("it keeps tensors that it makes, other than gradients", refusal);
      return result;
    }
    entry.frame = result.frame;
    entry.recording = std::move(recording);
    // The recording's memory is written again by replays: the caller gets values of its own, as from them.
    const NoGrad no_grad;
    for (Tensor& t : result.tensors) {
      if (t.defined()) t = t.clone();
    }
    return result;
  }
  Result call(std::span<const Tensor> inputs);
};

CapturedStep::Result CapturedStep::Impl::call(std::span<const Tensor> inputs) {
  replayed = false;
  why_not.clear();
  if (capture_sink()) return plain(inputs);  // part of a larger step that is captured
  if (observed()) {
    why_not = "ops are observed for debugging or profiling";
    return plain(inputs);
  }
  Key key = kind_of(inputs);
  const auto [known, first] = watched.try_emplace(key);
  if (!known->second.empty()) {
    why_not = known->second;
    return plain(inputs);
  }
  if (first) {
    if (watched.size() > kMostRecordings) {
      watched.erase(known);
      why_not = fmt::format("its inputs had more than {} kinds of shapes", kMostRecordings);
      return plain(inputs);
    }
    try {
      return watch(inputs, known->second);
    } catch (...) {
      watched.erase(known);  // what it uses has not been seen
      throw;
    }
  }
  // A gradient that is there is added to, or dropped by the step; one that isn't is made.
  for (const auto& leaf : leaves) key.push_back(detail::gradient_of(*leaf).defined());
  Entry& entry = entries[key];
  const std::uint64_t generation = capture_generation().load(std::memory_order_relaxed);
  bool usable = entry.recording && entry.generation == generation && entry.recording->valid();
  if (usable) usable = entry.recording->ready();
  if (!usable) {
    if (++entry.renewals > kMostRenewals) {
      refused("what it works on changes too often", known->second);
      return plain(inputs);
    }
    return record(inputs, entry, known->second);
  }
  ++stats.replayed;
  replayed = true;
  entry.renewals = entry.incomplete = 0;
  const std::uint64_t chained = entry.recording->chained_calls();
  std::vector<Tensor> tensors = entry.recording->replay(inputs);
  stats.chained += entry.recording->chained_calls() - chained;
  stats.graphs += entry.recording->used_graphs() ? 1 : 0;
  return {std::move(tensors), entry.frame};
}

void detail::refuse_arity(std::size_t expected, std::size_t got) {
  fail<Error>("capture: expected {} inputs, as at the first call, got {}", expected, got);
}

CapturedStep::CapturedStep(Function step, const CaptureOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->step = std::move(step);
  impl_->options = options;
}
CapturedStep::CapturedStep(CapturedStep&&) noexcept = default;
CapturedStep& CapturedStep::operator=(CapturedStep&&) noexcept = default;
CapturedStep::~CapturedStep() = default;

CapturedStep::Result CapturedStep::operator()(std::span<const Tensor> inputs) {
  if (impl_->running) fail<Error>("capture: the step was called by itself, or by two threads at a time");
  struct Running {
    bool& flag;
    ~Running() { flag = false; }
  } running{impl_->running};
  running.flag = true;
  return impl_->call(inputs);
}

bool CapturedStep::replayed() const { return impl_->replayed; }
const std::string& CapturedStep::why_not() const { return impl_->why_not; }
const CaptureStats& CapturedStep::stats() const { return impl_->stats; }
void CapturedStep::release() {
  for (auto& [key, entry] : impl_->entries) {
    entry.recording.reset();
    entry.frame.reset();
    entry.renewals = 0;
  }
}
void CapturedStep::reset() {
  impl_->watched.clear();
  impl_->entries.clear();
  impl_->overrides.clear();
  impl_->leaves.clear();
  impl_->known_leaves.clear();
}

}  // namespace halfstep
