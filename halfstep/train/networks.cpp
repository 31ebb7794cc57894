// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/networks.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "halfstep/core/fail.h"
#include "halfstep/models/mlp.h"

namespace halfstep::train {
namespace {

constexpr const char* kMlp = "mlp";

void check_name(const std::string& model) {
  const auto names = network_names();
  if (std::find(names.begin(), names.end(), model) != names.end()) return;
  fail<Error>("model: expected {}, got '{}'", fmt::join(names, ", "), model);
}

}  // namespace

std::vector<std::string> network_names() { return {kMlp}; }

NetworkInput network_input(const std::string& model) {
  check_name(model);
  return {};
}

Classifier make_classifier(const std::string& model, std::shared_ptr<const void>& holder,
                           const ClassifierOptions& options) {
  check_name(model);
  auto net = std::make_shared<models::MLP>(
      models::MLPOptions{.classes = options.classes > 0 ? options.classes : models::MLPOptions{}.classes});
  holder = net;
  return {.module = net.get(), .forward = [net](const Tensor& x) { return (*net)(x); }};
}

TrainConfig default_config(const std::string& model, std::int64_t batch_size, Device device) {
  const NetworkInput input = network_input(model);
  TrainConfig c;
  c.model = model;
  c.device = device;
  if (!input.images) {
    if (batch_size > 0) c.batch_size = batch_size;
    return c;
  }
  c.momentum = 0.9;
  c.prefetch = 2;
  constexpr std::int64_t kLargeImages = 64;
  double lr = 0, samples = 0;  // rate of a batch of so many samples
  if (input.image_size < kLargeImages) {
    c.batch_size = 128;
    c.epochs = 8;
    c.weight_decay = 5e-4;
    c.lr_schedule = "onecycle";
    lr = 0.4, samples = 128;
  } else {
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

}  // namespace halfstep::train
