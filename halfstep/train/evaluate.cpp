// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/evaluate.h"

#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"

namespace halfstep::training {
namespace {

// What batches came to, read when it is wanted: the first read waits for the device, the others find it done.
class Sums {
 public:
  void add(const TaskLoss& made, std::int64_t samples) {
    Entry entry{
        .samples = static_cast<double>(samples), .loss = made.loss, .parts = made.parts, .later = made.count_later};
    pending_.push_back(std::move(entry));
  }
  void read(EvalProgress& progress) {
    for (const Entry& e : pending_) {
      samples_ += e.samples;
      if (e.loss.defined()) progress.loss.add(e.loss.item<double>(), e.samples);
      std::map<std::string, double> sums;
      for (const NamedTensor& p : e.parts) sums[p.name] = p.tensor.item<double>();
      if (e.later) e.later(sums);
      for (const auto& [name, sum] : sums) {
        progress.parts[name].add(sum / e.samples, e.samples);
        part(name) += sum;
      }
    }
    pending_.clear();
  }
  /// The means, in the order in which the parts came.
  void results(const EvalProgress& progress, MetricResults& results) const {
    if (progress.loss.count > 0) results.set("loss", progress.loss.sum / progress.loss.count);
    for (const auto& [name, sum] : parts_) results.set(name, sum / samples_);
  }

 private:
  struct Entry {
    double samples;
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

}  // namespace

bool evaluate(Task& task, const Batches& batches, MetricResults& results, const EvaluationOptions& options) {
  using Clock = std::chrono::steady_clock;
  const NoGrad no_grad;
  const nn::EvalMode mode(task.network());
  const NamedTensors state = task.network().state_dict();
  const Device device = state.empty() ? Device{} : state[0].tensor.device();
  Sums sums;
  EvalProgress progress{.batches = batches.size()};
  auto start = Clock::now();
  bool stopped = false;
  task.begin_evaluation();
  batches.each([&](const data::Batch& given) {
    if (options.stop && options.stop()) {
      stopped = true;
      return false;
    }
    data::Batch batch = given;
    visit_tensors(batch, [&](Tensor& t) {
      if (t.defined()) t = t.to(device);
    });
    TaskLoss made;
    {
      std::optional<amp::Autocast> region;
      if (options.autocast) region.emplace(amp::AutocastOptions{.dtype = *options.autocast});
      made = task.evaluate(batch);
    }
    sums.add(made, task.samples(batch));
    ++progress.batch;
    const bool read = device.is_cpu() || progress.batch % options.read_every == 0 || progress.batch == progress.batches;
    if (read) sums.read(progress);
    progress.seconds.add(std::chrono::duration<double>(Clock::now() - start).count());
    if (read && options.on_batch) options.on_batch(progress);
    start = Clock::now();
    return true;
  });
  if (stopped) return false;
  if (progress.batch == 0) fail<Error>("{}: expected at least one batch, got none", options.who);
  sums.read(progress);
  batches.finish_epoch();
  MetricResults made = results;
  sums.results(progress, made);
  task.end_evaluation(made);
  results = std::move(made);
  return true;
}

}  // namespace halfstep::training
