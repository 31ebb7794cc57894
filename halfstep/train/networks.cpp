// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/networks.h"

#include "halfstep/core/fail.h"
#include "halfstep/models/registry.h"

namespace halfstep::training {

std::vector<std::string> network_names() { return models::model_names(); }

NetworkInput network_input(const std::string& model) {
  const models::ModelInfo& info = models::model_info(model);
  return {.images = info.data != models::DataKind::digits, .image_size = info.image_size};
}

Classifier make_classifier(const std::string& model, std::shared_ptr<const void>& holder,
                           const ClassifierOptions& options) {
  models::ModelOptions o{.zero_init_residual = options.zero_init_residual};
  if (options.classes > 0) o.classes = options.classes;
  const auto made = std::make_shared<models::Model>(models::make_model(model, o));
  holder = made;
  return {.module = made->module.get(), .forward = made->forward};
}

std::int64_t classes_of(const std::string& model, const NamedTensors& weights) {
  const models::ModelInfo& info = models::model_info(model);
  for (const NamedTensor& t : weights) {
    if (t.name == info.head + "weight" && t.tensor.dim() > 0) return t.tensor.size(0);
  }
  return info.classes;
}

TrainConfig default_config(const std::string& model, std::int64_t batch_size, Device device) {
  const models::ModelInfo& info = models::model_info(model);
  TrainConfig c;
  c.model = model;
  c.device = device;
  if (info.data == models::DataKind::digits) {
    if (batch_size > 0) c.batch_size = batch_size;
    if (model == "mlp") return c;  // the tutorials' settings, which are the library's
    if (batch_size == 0) c.batch_size = 128;
    c.lr = 0.1 * static_cast<double>(c.batch_size) / 128;
    c.momentum = 0.9;
    c.epochs = 3;
    c.weight_decay = 5e-4;
    c.lr_schedule = "onecycle";
    c.eval_batch_size = c.batch_size;
    return c;
  }
  c.momentum = 0.9;
  c.prefetch = 2;
  double lr = 0, samples = 0;  // the rate for a batch of so many samples
  if (info.data == models::DataKind::cifar) {
    c.batch_size = 128;
    c.epochs = 8;
    c.weight_decay = 5e-4;
    c.lr_schedule = "onecycle";
    lr = 0.2, samples = 128;
  } else {
    // 256 images of 224 x 224 take 40 GB in float32.
    c.batch_size = device.is_cpu() ? 32 : 256;
    c.epochs = 90;
    c.weight_decay = 1e-4;
    c.lr_schedule = "step:30,0.1";
    lr = 0.1, samples = 256;
  }
  if (batch_size > 0) c.batch_size = batch_size;
  c.lr = lr * static_cast<double>(c.batch_size) / samples;
  c.eval_batch_size = c.batch_size;
  return c;
}

}  // namespace halfstep::training
