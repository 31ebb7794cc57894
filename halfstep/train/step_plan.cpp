// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/step_plan.h"

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

#include "halfstep/amp/level.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/create.h"
#include "halfstep/optim/ema.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/runtime/queue.h"
#include "halfstep/train/optimizer.h"
#include "halfstep/train/quantize.h"
#include "halfstep/train/trace_step.h"
#include "halfstep/train/train_step.h"

namespace halfstep::training {
namespace {

std::uint64_t bytes_of(const Tensor& t) {
  return t.defined() ? static_cast<std::uint64_t>(t.numel()) * t.item_size() : 0;
}
std::uint64_t bytes_of(const NamedTensors& tensors) {
  std::uint64_t sum = 0;
  for (const NamedTensor& t : tensors) sum += bytes_of(t.tensor);
  return sum;
}

// Sizes of a batch from those of one sample and of two, so that no large one has to be made: what grows from one to two
// grows on.
Tensor scaled(const Tensor& one, const Tensor& two, std::int64_t samples, Device device) {
  if (!one.defined() || samples == 1) return one.defined() ? one.to(device) : one;
  Shape sizes = one.sizes();
  for (int d = 0; d < sizes.size(); ++d) sizes[d] += (samples - 1) * (two.sizes()[d] - one.sizes()[d]);
  return zeros(sizes, {.dtype = one.dtype(), .device = device});
}

data::Batch batch_of(const std::string& model, std::int64_t samples, std::int64_t image_size, Device device) {
  const DeviceGuard on_cpu(Device{});
  data::Batch batch = random_batch(model, 1, image_size), two;
  if (samples > 1) two = random_batch(model, 2, image_size);
  std::vector<Tensor> of_two;
  visit_tensors(two, [&](Tensor& t) { of_two.push_back(t); });
  std::size_t i = 0;
  visit_tensors(batch, [&](Tensor& t) {
    const bool image = t.defined() && t.dim() == 4;
    t = scaled(t, samples > 1 ? of_two.at(i) : Tensor(), samples, device);
    if (image) t = t.contiguous(MemoryFormat::channels_last);
    ++i;
  });
  return batch;
}

// A run's parts as far as its steps use memory.
class Trial {
 public:
  Trial(TrainConfig config, std::int64_t batch_size, std::int64_t image_size, Device device)
      : config_(std::move(config)), device_(device), random_(default_generator().state()) {
    config_.batch_size = batch_size;
    config_.device = device;
    check(config_);
    try {
      make(image_size);
    } catch (...) {
      default_generator().set_state(random_);
      throw;
    }
  }
  ~Trial() { default_generator().set_state(random_); }
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  void step(bool captured) {
    const std::span<const data::Batch> batches(batches_);
    const StepValues values = captured ? step_->run_captured(batches) : step_->run(batches);
    if (average_) average_->update_unless(values.overflow);
    if (!device_.is_host()) Queue::current(device_).synchronize();
  }

  StepMemory memory() {
    StepMemory m;
    const nn::ModuleBase& network = task_->network();
    m.parameters = bytes_of(network.parameters());
    for (const NamedTensor& p : network.parameters()) m.gradients += bytes_of(p.tensor.grad());
    m.optimizer = bytes_of(optimizer_->state_dict().tensors);
    if (average_) m.optimizer += bytes_of(average_->averages());
    m.buffers = bytes_of(network.buffers());
    for (data::Batch& b : batches_) visit_tensors(b, [&](const Tensor& t) { m.batch += bytes_of(t); });
    return m;
  }

 private:
  void make(std::int64_t image_size) {
    {
      const DeviceGuard there(device_);
      task_ = random_task(config_);
    }
    const nn::ModuleBase& network = task_->network();
    network.to(device_);
    const AmpMode mode = amp_mode(config_);
    if (mode.level != amp::Level::O0) amp::set_level(network, mode.level, mode.level_dtype);
    optimizer_ = make_optimizer(config_, network.parameters());
    step_.emplace(make_train_step(task_, *optimizer_, make_scaler(config_),
                                  {.autocast = mode.region,
                                   .clip_norm = config_.clip_norm,
                                   .sum_over_samples = config_.nominal_batch > 0,
                                   .parallel = {},
                                   .shards = static_cast<int>(config_.reproducible)}));
    if (config_.ema > 0) {
      average_.emplace(without_activation_ranges(network),
                       optim::EMAOptions{.decay = config_.ema, .warmup = config_.ema_warmup});
    }
    network.train();
    for (int i = 0; i < config_.accumulate; ++i) {
      batches_.push_back(batch_of(config_.model, config_.batch_size, image_size, device_));
    }
  }

  TrainConfig config_;
  const Device device_;
  const PhiloxState random_;
  std::shared_ptr<Task> task_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::optional<TrainStep> step_;
  std::optional<optim::EMA> average_;
  std::vector<data::Batch> batches_;
};

// One that runs, one that is recorded once all state is there, one that is replayed.
constexpr int kCapturedSteps = 4, kPlainSteps = 2;

StepMemory memory_on(const TrainConfig& config, std::int64_t batch_size, std::int64_t image_size, Device device) {
  const std::uint64_t others = memory_stats(device).allocated;
  Trial trial(config, batch_size, image_size, device);
  reset_peak_memory(device);
  const int steps = config.capture ? kCapturedSteps : kPlainSteps;
  for (int i = 0; i < steps; ++i) trial.step(config.capture);
  StepMemory memory = trial.memory();
  memory.peak = memory_stats(device).allocated_peak - others;
  return memory;
}

// The counts of meta are the process's.
std::mutex& one_at_a_time() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

StepMemory predict_memory(const TrainConfig& config, std::int64_t batch_size, std::int64_t image_size) {
  const std::lock_guard lock(one_at_a_time());
  return memory_on(config, batch_size, image_size, kMeta);
}

StepMemory measure_memory(const TrainConfig& config, std::int64_t batch_size, std::int64_t image_size) {
  return memory_on(config, batch_size, image_size, config.device);
}

std::vector<debug::TracedCall> predict_calls(const TrainConfig& config, std::int64_t batch_size,
                                             std::int64_t image_size) {
  const std::lock_guard lock(one_at_a_time());
  Trial trial(config, batch_size, image_size, kMeta);
  trial.step(false);
  debug::CallTrace trace;
  trial.step(false);
  trace.stop();
  std::vector<debug::TracedCall> calls = trace.calls();
  for (debug::TracedCall& c : calls) {
    if (c.site.device == kMeta) c.site.device = config.device;
  }
  return calls;
}

}  // namespace halfstep::training
