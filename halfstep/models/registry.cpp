// SPDX-License-Identifier: Apache-2.0
#include "halfstep/models/registry.h"

#include <algorithm>
#include <cctype>
#include <numeric>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/models/cnn.h"
#include "halfstep/models/mlp.h"
#include "halfstep/models/mobilenet.h"
#include "halfstep/models/resnet.h"

namespace halfstep::models {
namespace {

template <class M>
Model model_of(const M& net, const ModelInfo& info) {
  // Not const itself: it may be folded (nn/fold.h).
  const auto module = std::make_shared<M>(net);
  return {.module = module, .forward = [module](const Tensor& x) { return (*module)(x); }, .info = info};
}

// The info has the classes that were asked for.
using Make = std::function<Model(const ModelInfo& info, const ModelOptions& options)>;
struct Entry {
  ModelInfo info;
  Make make;
};

Entry imagenet_resnet(const char* name, const char* description, ResNet (*make)(const ResNetOptions&)) {
  return {{name, description, DataKind::imagenet, 224, 3, 1000, "fc."},
          [make](const ModelInfo& info, const ModelOptions& o) {
            return model_of(make({.classes = info.classes, .zero_init_residual = o.zero_init_residual}), info);
          }};
}

Entry cifar_resnet_entry(int depth) {
  return {{fmt::format("resnet{}", depth), "ResNet of the paper's CIFAR experiments, 16-32-64 channels",
           DataKind::cifar, 32, 3, 10, "fc."},
          [depth](const ModelInfo& info, const ModelOptions& o) {
            return model_of(cifar_resnet(depth, {.classes = info.classes, .zero_init_residual = o.zero_init_residual}),
                            info);
          }};
}

void refuse_zero_init(const ModelInfo& info, const ModelOptions& o) {
  if (o.zero_init_residual) fail<Error>("make_model: {} has no zero_init_residual; the ResNets have", info.name);
}

const std::vector<Entry>& entries() {
  static const std::vector<Entry> all = {
      {{"mlp", "784-512-512-10 with ReLU", DataKind::digits, 28, 1, 10, "fc3."},
       [](const ModelInfo& info, const ModelOptions& o) {
         refuse_zero_init(info, o);
         return model_of(MLP{{.classes = info.classes}}, info);
       }},
      imagenet_resnet("resnet18", "ResNet-18", resnet18),
      imagenet_resnet("resnet34", "ResNet-34", resnet34),
      imagenet_resnet("resnet50", "ResNet-50 v1.5 (stride on the 3x3)", resnet50),
      imagenet_resnet("resnet101", "ResNet-101 v1.5", resnet101),
      imagenet_resnet("resnet152", "ResNet-152 v1.5", resnet152),
      cifar_resnet_entry(20),
      cifar_resnet_entry(32),
      cifar_resnet_entry(44),
      cifar_resnet_entry(56),
      cifar_resnet_entry(110),
      {{"resnet18_cifar", "ResNet-18 with a 3x3 stem for small images", DataKind::cifar, 32, 3, 10, "fc."},
       [](const ModelInfo& info, const ModelOptions& o) {
         return model_of(
             resnet18({.classes = info.classes, .cifar_stem = true, .zero_init_residual = o.zero_init_residual}), info);
       }},
      {{"mobilenet_v2", "MobileNetV2", DataKind::imagenet, 224, 3, 1000, "classifier.1."},
       [](const ModelInfo& info, const ModelOptions& o) {
         refuse_zero_init(info, o);
         return model_of(MobileNetV2{{.classes = info.classes}}, info);
       }},
      {{"cnn", "three 3x3 convolutions with batch norm, 32-64-128 channels", DataKind::digits, 28, 1, 10, "fc."},
       [](const ModelInfo& info, const ModelOptions& o) {
         refuse_zero_init(info, o);
         return model_of(CNN{{.classes = info.classes}}, info);
       }},
  };
  return all;
}

// Letters and digits only, small: `ResNet-50` and `resnet50` are the same.
std::string plain(std::string_view name) {
  std::string result;
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c))) {
      result += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  return result;
}

// The fewest letters to insert, drop or change that make `b` of `a`.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t corner = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = corner + (a[i - 1] == b[j - 1] ? 0 : 1);
      corner = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, change}));
    }
  }
  return row[b.size()];
}

const Entry& entry_of(std::string_view name) {
  for (const Entry& e : entries()) {
    if (e.info.name == name) return e;
  }
  const std::string meant = plain(name);
  const Entry* nearest = nullptr;
  std::size_t least = 3;  // more slips than two make another word
  for (const Entry& e : entries()) {
    const std::size_t slips = distance(meant, plain(e.info.name));
    if (slips < least) least = slips, nearest = &e;
  }
  fail<Error>("model: expected one of {}, got '{}'{}", fmt::join(model_names(), ", "), name,
              nearest ? fmt::format("; did you mean {}?", nearest->info.name) : "");
}

}  // namespace

const std::vector<ModelInfo>& all_models() {
  static const std::vector<ModelInfo> infos = [] {
    std::vector<ModelInfo> result;
    for (const Entry& e : entries()) result.push_back(e.info);
    return result;
  }();
  return infos;
}

std::vector<std::string> model_names() {
  std::vector<std::string> result;
  for (const Entry& e : entries()) result.push_back(e.info.name);
  return result;
}

const ModelInfo& model_info(std::string_view name) {
  const std::string& known = entry_of(name).info.name;
  return *std::find_if(all_models().begin(), all_models().end(), [&](const ModelInfo& i) { return i.name == known; });
}

Model make_model(std::string_view name, const ModelOptions& options) {
  const Entry& e = entry_of(name);
  ModelInfo info = e.info;
  info.classes = options.classes.value_or(info.classes);
  if (info.classes < 1) fail<Error>("make_model: expected at least 1 class, got {}", info.classes);
  return e.make(info, options);
}

}  // namespace halfstep::models
