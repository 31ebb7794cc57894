// SPDX-License-Identifier: Apache-2.0
// The networks that can be trained by name: their inputs and usual training settings.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/nn/module.h"
#include "halfstep/train/config.h"

namespace halfstep::training {

/// A classification network as a function of a batch.
struct Classifier {
  const nn::ModuleBase* module;                  ///< for parameters, state and mode
  std::function<Tensor(const Tensor&)> forward;  ///< logits [N, classes]
};

/// Options of make_classifier.
struct ClassifierOptions {
  std::int64_t classes = 0;         ///< 0: as many as the network has where it was published
  bool zero_init_residual = false;  ///< the last weight of normalisation in each residual block begins as 0
};

/// The classifier of that name with fresh weights from the default generator. It lives as long as `holder`. Throws
/// Error naming the choices.
HS_API Classifier make_classifier(const std::string& model, std::shared_ptr<const void>& holder,
                                  const ClassifierOptions& options = {});

/// Classes of a network of that name with these weights: the rows of its last layer.
HS_API std::int64_t classes_of(const std::string& model, const NamedTensors& weights);

/// The input of a network.
struct NetworkInput {
  bool images = false;           ///< colour images [N, 3, H, W]; otherwise what its data are (DataKind), as [N, 784]
  std::int64_t image_size = 28;  ///< pixels of a side, customarily
};
/// The input of the network of that name. Throws Error naming the choices.
HS_API NetworkInput network_input(const std::string& model);
/// Names of all networks.
HS_API std::vector<std::string> network_names();

/// What messages call the network of a configuration: what describes it (NetworkKind::described_by), or else its name,
/// which the registry needn't know.
HS_API std::string network_label(const TrainConfig& config);

/// What messages call the data of the network of that name: the folder or file, or else DataKind::built_in, `no data`
/// where there is none and for a name that the registry doesn't know.
HS_API std::string data_label(const std::string& model, const std::filesystem::path& data);

/// The usual training settings of the network of that name: number of epochs, batch size, rate, schedule, momentum,
/// decay. `batch_size` 0: its usual one; on a CPU, a smaller one for networks with large images. Image networks scale
/// the rate linearly with the batch size (Goyal et al., Accurate, Large Minibatch SGD, 2017).
HS_API TrainConfig default_config(const std::string& model, std::int64_t batch_size = 0, Device device = {});

}  // namespace halfstep::training
