// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/evaluate.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/create.h"
#include "halfstep/runtime/queue.h"

namespace halfstep::training {
namespace {

// The values of batches, read when they are wanted: the first read waits for the device, the others find it done.
class Sums {
 public:
  void add(const TaskLoss& made, std::int64_t samples, double seconds) {
    pending_.push_back({static_cast<double>(samples), seconds, made.loss, made.parts, made.count_later});
  }
  std::size_t pending() const { return pending_.size(); }
  /// Reads what is pending; `seen` is called after each batch.
  void read(Device device, EvalProgress& progress, const std::function<void(const EvalProgress&)>& seen) {
    for (const Entry& e : pending_) {
      ++progress.batch;
      samples_ += e.samples;
      progress.seconds.add(e.seconds);
      if (e.loss.defined()) progress.loss.add(e.loss.item<double>(), e.samples);
      std::map<std::string, double> sums;
      for (const NamedTensor& p : e.parts) sums[p.name] = p.tensor.item<double>();
      if (e.later) {
        // Its copies have arrived when a value behind them was read.
        if (!e.loss.defined() && e.parts.empty() && !device.is_cpu()) Queue::current(device).synchronize();
        e.later(sums);
      }
      for (const auto& [name, sum] : sums) {
        progress.parts[name].add(sum / e.samples, e.samples);
        part(name) += sum;
      }
      if (seen) seen(progress);
    }
    pending_.clear();
  }
  /// Names the parts where this rank, `none`, has seen no batch: ranks add up the same numbers. Called by all ranks if
  /// one of them has none.
  void name_parts(dist::ProcessGroup& group, bool none) {
    std::string own;
    for (const auto& [name, sum] : parts_) own += name + '\n';
    for (const std::string& names : group.all_gather_text(own)) {
      std::istringstream in(names);
      for (std::string name; none && std::getline(in, name);) part(name);
    }
  }
  /// The means over all ranks' samples, in the order in which the parts came. False if there are no samples.
  bool results(const EvalProgress& progress, dist::ProcessGroup& group, MetricResults& results) {
    std::vector<double> own{progress.loss.sum, progress.loss.count, samples_};
    for (const auto& [name, sum] : parts_) own.push_back(sum);
    const auto count = static_cast<std::int64_t>(own.size());
    const Tensor sums = tensor(own, {count}, {.dtype = f64, .device = Device{}});
    group.all_reduce(sums, dist::ReduceOp::sum, "results of the evaluation").wait();
    const std::vector<double> all = sums.to_vector<double>();
    if (all[2] == 0) return false;
    if (all[1] > 0) results.set("loss", all[0] / all[1]);
    for (std::size_t i = 0; i < parts_.size(); ++i) results.set(parts_[i].first, all[i + 3] / all[2]);
    return true;
  }

 private:
  struct Entry {
    double samples, seconds;
    Tensor loss;
    NamedTensors parts;
    std::function<void(std::map<std::string, double>&)> later;
  };
  double& part(const std::string& name) {
    for (auto& [known, sum] : parts_) {
      if (known == name) return sum;
    }
    return parts_.emplace_back(name, 0.0).second;
  }

  std::vector<Entry> pending_;
  double samples_ = 0;
  std::vector<std::pair<std::string, double>> parts_;
};

data::Batch on_device(data::Batch batch, Device device) {
  visit_tensors(batch, [&](Tensor& t) {
    if (t.defined()) t = t.to(device);
  });
  return batch;
}

}  // namespace

double max_of(dist::ProcessGroup& group, double value) {
  if (group.size() == 1) return value;
  const Tensor all = full({1}, value, {.dtype = f64, .device = Device{}});
  group.all_reduce(all, dist::ReduceOp::max, "agreement").wait();
  return all.item<double>();
}

Device device_of(const nn::ModuleBase& network) {
  const NamedTensors state = network.state_dict();
  return state.empty() ? Device{} : state[0].tensor.device();
}

bool evaluate(Task& task, const Batches& batches, MetricResults& results, const EvaluationOptions& options) {
  using Clock = std::chrono::steady_clock;
  const NoGrad no_grad;
  const nn::EvalMode mode(task.network());
  if (options.read_every < 1) {
    fail<Error>("{}: expected at least 1 batch between reads, got {}", options.who, options.read_every);
  }
  // Copies of outputs wait on the host until they are counted.
  constexpr int kMostPending = 100;
  const auto read_every = static_cast<std::size_t>(std::min(options.read_every, kMostPending));
  const Device device = device_of(task.network());
  Sums sums;
  EvalProgress progress{.batches = batches.size()};
  auto start = Clock::now();
  bool stopped = false;
  task.begin_evaluation();
  dist::ProcessGroup group = options.group;
  // Ranks' parts may differ by a sample, and so by a batch, or be empty: behind the last one that all have, nobody
  // gives up.
  const std::int64_t common = static_cast<std::int64_t>(-max_of(group, -static_cast<double>(batches.size())));
  // Passes bring parameters from their owners: all ranks make as many.
  optim::StateSharding* divided = options.sharding.get();
  if (divided && !divided->parameters_too()) divided = nullptr;
  const double most = divided ? max_of(group, static_cast<double>(batches.size())) : 0;
  std::shared_ptr<void> whole;
  if (divided && common == 0) {
    whole = divided->gather_parameters();
    divided = nullptr;
  }
  std::int64_t at = 0, passes = 0;
  batches.each([&](const data::Batch& given) {
    if (options.stop && at++ < common && max_of(group, options.stop() ? 1 : 0) != 0) {
      stopped = true;
      return false;
    }
    const data::Batch batch = on_device(given, device);
    TaskLoss made;
    {
      std::optional<amp::Autocast> region;
      if (options.autocast) region.emplace(amp::AutocastOptions{.dtype = *options.autocast});
      const std::shared_ptr<void> watched = divided ? divided->watch_pass() : nullptr;
      made = task.evaluate(batch);
      ++passes;
    }
    sums.add(made, task.samples(batch), std::chrono::duration<double>(Clock::now() - start).count());
    if (device.is_cpu() || sums.pending() >= read_every) sums.read(device, progress, options.on_batch);
    start = Clock::now();
    return true;
  });
  if (stopped) return false;
  for (; divided && static_cast<double>(passes) < most; ++passes) divided->follow_pass();
  sums.read(device, progress, options.on_batch);
  MetricResults made = results;
  if (group.size() > 1 && common == 0) sums.name_parts(group, progress.batch == 0);
  if (!sums.results(progress, group, made)) fail<Error>("{}: expected at least one batch, got none", options.who);
  batches.finish_epoch();
  task.merge_evaluation(group);
  task.end_evaluation(made);
  results = std::move(made);
  return true;
}

std::vector<std::string> predictions(Task& task, const data::Dataset& samples, std::int64_t count,
                                     std::optional<DType> autocast) {
  const NoGrad no_grad;
  const nn::EvalMode mode(task.network());
  std::vector<std::int64_t> first(static_cast<std::size_t>(std::clamp<std::int64_t>(count, 0, samples.size())));
  std::iota(first.begin(), first.end(), std::int64_t{0});
  if (first.empty()) return {};
  const data::Batch batch = on_device(samples.batch({.indices = first}), device_of(task.network()));
  std::optional<amp::Autocast> region;
  if (autocast) region.emplace(amp::AutocastOptions{.dtype = *autocast});
  return task.predictions(batch);
}

}  // namespace halfstep::training
