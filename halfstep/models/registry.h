// SPDX-License-Identifier: Apache-2.0
// The networks by name, as the command line knows them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/nn/module.h"

namespace halfstep::models {

/// Names of the kinds of data that these networks are designed for; training::DataKind has what a kind means.
namespace DataKind {
inline constexpr const char* digits = "digits";      ///< 28x28, one channel: MNIST and the like
inline constexpr const char* cifar = "cifar";        ///< 32x32, three channels
inline constexpr const char* imagenet = "imagenet";  ///< photographs, cropped to 224x224, three channels
}  // namespace DataKind

/// What is known about a network without creating it.
struct ModelInfo {
  std::string name;         ///< such as `resnet50`
  std::string description;  ///< one line
  std::string data;         ///< the kind of data that it takes, which selects its default data and transforms
  std::int64_t image_size;  ///< height and width of the images that it is designed for
  std::int64_t channels;    ///< of an image
  std::int64_t classes;     ///< unless others are requested
  std::string head;         ///< prefix of the last layer's parameters, such as `fc.`: the part that depends on classes
  std::string task = "classification";  ///< what it is trained for, see training::TaskKind
};

/// Options of make_model. Networks that don't have an option refuse it with an Error.
struct ModelOptions {
  std::optional<std::int64_t> classes = {};  ///< logits; by default the network's own
  bool zero_init_residual = false;           ///< residual blocks start as identity mappings
};

/// A network and its call function.
struct Model {
  std::shared_ptr<const nn::ModuleBase> module;  ///< parameters, state and mode
  std::function<Tensor(const Tensor&)> forward;  ///< logits [N, classes]; keeps the module alive
  ModelInfo info;                                ///< with the number of classes that it was created with
};

/// All networks, in the order in which they are listed to users.
HS_API const std::vector<ModelInfo>& all_models();
/// Their names.
HS_API std::vector<std::string> model_names();
/// The description of the network called `name`. Throws Error naming the choices and the closest match.
HS_API const ModelInfo& model_info(std::string_view name);
/// Creates it with fresh weights from the default generator (core/random.h).
HS_API Model make_model(std::string_view name, const ModelOptions& options = {});

}  // namespace halfstep::models
