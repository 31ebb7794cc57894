// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cmath>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/loss.h"
#include "halfstep/train/trainer.h"

namespace halfstep::training {

EvalReport evaluate(const Classifier& classifier, std::shared_ptr<const data::Dataset> test,
                    const EvalOptions& options) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  const NoGrad no_grad;
  const nn::EvalMode mode(*classifier.module);
  const NamedTensors state = classifier.module->state_dict();
  const Device device = state.empty() ? Device{} : state[0].tensor.device();
  data::DataLoader loader(
      std::move(test),
      {.batch_size = options.batch_size, .workers = options.workers, .prefetch = options.prefetch, .device = device});
  double loss_sum = 0;
  std::int64_t samples = 0;
  Hits hits;
  EvalProgress progress{.batch = 0, .batches = loader.size()};
  auto start = Clock::now();
  for (const auto& [input, target] : loader) {
    if (options.stop && options.stop->load(std::memory_order_relaxed)) {
      return {.epoch = 0, .step = 0, .loss = NAN, .top1 = NAN, .top5 = NAN, .best = false, .interrupted = true};
    }
    const amp::Autocast autocast{{.dtype = options.dtype.value_or(DType::f16), .enabled = options.dtype.has_value()}};
    const Tensor logits = classifier.forward(input);
    const std::int64_t n = input.size(0);
    const double loss = cross_entropy(logits, target).item<double>();
    loss_sum += loss * static_cast<double>(n);
    const Hits here = count_hits(logits.to_vector<float>(), target.to_vector<std::int64_t>());
    hits += here;
    samples += n;
    if (!options.on_batch) continue;
    const auto count = static_cast<double>(n);
    ++progress.batch;
    progress.seconds.add(since(start));
    progress.loss.add(loss, count);
    progress.top1.add(static_cast<double>(here.top1) / count, count);
    progress.top5.add(static_cast<double>(here.top5) / count, count);
    options.on_batch(progress);
    start = Clock::now();
  }
  const auto total = static_cast<double>(std::max<std::int64_t>(samples, 1));
  return {.epoch = 0,
          .step = 0,
          .loss = loss_sum / total,
          .top1 = static_cast<double>(hits.top1) / total,
          .top5 = static_cast<double>(hits.top5) / total,
          .best = false};
}

EvalReport evaluate(const Classifier& classifier, std::shared_ptr<const data::Dataset> test, std::optional<DType> dtype,
                    std::int64_t batch_size) {
  return evaluate(classifier, std::move(test), EvalOptions{.dtype = dtype, .batch_size = batch_size});
}

}  // namespace halfstep::training
