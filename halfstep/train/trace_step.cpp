// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/trace_step.h"

#include "halfstep/amp/level.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/create.h"
#include "halfstep/runtime/queue.h"
#include "halfstep/train/optimizer.h"
#include "halfstep/train/registry.h"
#include "halfstep/train/train_step.h"

namespace halfstep::training {

data::Batch random_batch(const std::string& model, std::int64_t batch_size, std::int64_t image_size) {
  const NetworkKind& kind = network_kind(model);
  const DataKind& data = data_kind(kind.data);
  if (!data.random) fail<Error>("{}: its data, {}, have no random samples", model, data.name);
  return data.random(kind, batch_size, image_size);
}

Tensor example_input(const std::string& model, std::int64_t batch_size, std::int64_t image_size, Device device) {
  const PhiloxState state = default_generator().state();
  const Tensor sample = random_batch(model, 1, image_size).input;
  default_generator().set_state(state);
  Shape sizes = sample.sizes();
  sizes[0] = batch_size;
  return zeros(sizes, {.dtype = sample.dtype(), .device = device});
}

std::shared_ptr<Task> random_task(const TrainConfig& config) {
  RunData data;
  data.num_classes = network_kind(config.model).classes;
  return make_task(config, data);
}

std::vector<debug::TracedCall> trace_step(const TrainConfig& config, std::int64_t image_size) {
  check(config);
  const PhiloxState random = default_generator().state();
  const std::shared_ptr<Task> task = random_task(config);
  const nn::ModuleBase& network = task->network();
  network.to(config.device);
  const AmpMode mode = amp_mode(config);
  if (mode.level != amp::Level::O0) amp::set_level(network, mode.level, mode.level_dtype);
  const auto optimizer = make_optimizer(config, network.parameters());
  TrainStep step =
      make_train_step(task, *optimizer, make_scaler(config), {.autocast = mode.region, .clip_norm = config.clip_norm});
  network.train();
  data::Batch batch = random_batch(config.model, config.batch_size, image_size);
  if (batch.input.dim() == 4) batch.input = batch.input.contiguous(MemoryFormat::channels_last);  // as loaders give it
  visit_tensors(batch, [&](Tensor& t) {
    if (t.defined()) t = t.to(config.device);
  });
  const std::span<const data::Batch> one(&batch, 1);
  step.run(one);
  debug::CallTrace trace;
  step.run(one);
  trace.stop();
  if (!config.device.is_cpu()) Queue::current(config.device).synchronize();
  default_generator().set_state(random);
  return trace.calls();
}

}  // namespace halfstep::training
