// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/networks.h"

#include "halfstep/train/registry.h"

namespace halfstep::training {

NetworkInput network_input(const std::string& model) {
  const NetworkKind& kind = network_kind(model);
  const bool images = kind.image_size > 0 && data_kind(kind.data).flags != "";
  return {.images = images, .image_size = kind.image_size > 0 ? kind.image_size : NetworkInput().image_size};
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
