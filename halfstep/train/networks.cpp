// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/networks.h"

#include <algorithm>

#include "halfstep/core/text.h"
#include "halfstep/train/registry.h"

namespace halfstep::training {
namespace {

bool is_known(const std::string& network) {
  const auto names = network_names();
  return std::find(names.begin(), names.end(), network) != names.end();
}

}  // namespace

NetworkInput network_input(const std::string& model) {
  const NetworkKind& kind = network_kind(model);
  NetworkInput input{.images = data_kind(kind.data).images};
  if (kind.image_size > 0) {
    input.image_size = kind.image_size;
  } else if (input.images) {
    input.image_size = ImageDataOptions().image_size;
  }
  return input;
}

std::string network_label(const TrainConfig& config) {
  std::string label;
  if (is_known(config.model)) {
    const NetworkKind& kind = network_kind(config.model);
    if (kind.described_by) label = kind.described_by(config);
  }
  return label.empty() ? config.model : label;
}

std::string data_label(const std::string& model, const std::filesystem::path& data) {
  if (!data.empty()) return shown_path(data);
  const std::string built_in = is_known(model) ? data_of(model).built_in : std::string();
  return built_in.empty() ? "no data" : built_in;
}

Classifier make_classifier(const std::string& model, std::shared_ptr<const void>& holder,
                           const ClassifierOptions& options) {
  TrainConfig c;
  c.model = model;
  c.zero_init_residual = options.zero_init_residual;
  RunData data;
  data.num_classes = options.classes;
  const auto made = std::make_shared<Network>(network_kind(model).make(c, data));
  holder = made;
  return {.module = made->module.get(), .forward = made->forward};
}

std::int64_t classes_of(const std::string& model, const NamedTensors& weights) {
  const NetworkKind& kind = network_kind(model);
  if (kind.classes_in) {
    const std::int64_t classes = kind.classes_in(weights);
    return classes > 0 ? classes : kind.classes;
  }
  for (const NamedTensor& t : weights) {
    if (!kind.head.empty() && t.name == kind.head + "weight" && t.tensor.dim() > 0) return t.tensor.size(0);
  }
  return kind.classes;
}

TrainConfig default_config(const std::string& model, std::int64_t batch_size, Device device) {
  const NetworkKind& kind = network_kind(model);
  const DataKind& data = data_kind(kind.data);
  TrainConfig c;
  c.model = model;
  c.device = device;
  if (kind.image_size > 0) c.images.image_size = kind.image_size;
  if (data.usual) {
    c.batch_size = batch_size;
    data.usual(c);
  } else if (batch_size > 0) {
    c.batch_size = batch_size;
  }
  return c;
}

ImageDataOptions default_images(const std::string& model, std::int64_t image_size) {
  const NetworkKind& kind = network_kind(model);
  TrainConfig c;
  if (kind.image_size > 0) c.images.image_size = kind.image_size;
  if (image_size > 0) c.images.image_size = image_size;
  if (const DataKind& data = data_kind(kind.data); data.usual) data.usual(c);
  return c.images;
}

}  // namespace halfstep::training
