// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/trace_step.h"

#include "halfstep/amp/level.h"
#include "halfstep/core/random.h"
#include "halfstep/models/registry.h"
#include "halfstep/ops/random.h"
#include "halfstep/runtime/queue.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/optimizer.h"
#include "halfstep/train/train_step.h"

namespace halfstep::training {

data::Batch random_batch(const std::string& model, std::int64_t batch_size, std::int64_t image_size) {
  const models::ModelInfo& info = models::model_info(model);
  const std::int64_t side = image_size > 0 ? image_size : info.image_size;
  const Shape sizes = info.data == models::DataKind::digits ? Shape{batch_size, info.image_size * info.image_size}
                                                            : Shape{batch_size, info.channels, side, side};
  return {.input = randn(sizes), .target = randint(0, info.classes, {batch_size}, {.dtype = i64})};
}

std::vector<debug::TracedCall> trace_step(const TrainConfig& config, std::int64_t image_size) {
  check(config);
  const PhiloxState random = default_generator().state();
  std::shared_ptr<const void> holder;
  const auto task = std::make_shared<ClassificationTask>(make_classifier(config.model, holder));
  const nn::ModuleBase& network = task->network();
  network.to(config.device);
  const AmpMode mode = amp_mode(config);
  if (mode.level != amp::Level::O0) amp::set_level(network, mode.level, mode.level_dtype);
  const auto optimizer = make_optimizer(config, network.parameters());
  TrainStep step =
      make_train_step(task, *optimizer, make_scaler(config), {.autocast = mode.region, .clip_norm = config.clip_norm});
  network.train();
  data::Batch batch = random_batch(config.model, config.batch_size, image_size);
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
