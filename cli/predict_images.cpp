// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cli/fold.h"
#include "cli/integers.h"
#include "cli/precision.h"
#include "cli/predict.h"
#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/text.h"
#include "halfstep/data/transforms.h"
#include "halfstep/ops/softmax.h"

namespace halfstep::cli {
int predict_images(PredictOptions& o, const ClassifierFlags& flags, Device device) {
  check_precision(o.amp);
  for (const char* flag : {"--data", "--index", "--count"}) {
    if (o.pictures.count(flag) > 0) {
      throw UsageError(
          fmt::format("{}: {} takes files: halfstep predict {} --weights FILE IMAGE...", flag, o.model, o.model));
    }
  }
  if (o.inputs.empty()) throw UsageError("INPUT: expected at least one image, .jpg or .png");
  Loaded loaded = load_classifier(o.model, o.weights);
  resolve_images(o.pictures, o.model, loaded);
  std::string folded = o.fold ? fold_network(loaded, o.model, o.pictures.images.image_size) : "";
  if (o.int8) folded += use_integers(loaded, o.amp);
  const Precision precision = o.int8 ? Precision() : set_precision(loaded, o.amp);
  fmt::print("{}{}{}\n", loaded.text(o.model), precision.said, folded);
  o.pictures.images.folder = ".";  // none is needed here
  as_usage([&] { training::check(o.pictures.images); });
  const std::vector<std::string> names =
      o.classes.empty() ? loaded.classes : read_class_names(o.classes, loaded.num_classes);
  const data::EvalTransform transform = training::eval_transform(o.pictures.images, o.model);
  loaded.classifier.module->eval();
  loaded.classifier.module->to(device);
  const NoGrad no_grad;
  int status = kDone;
  for (const auto& path : o.inputs) {
    Tensor input;
    try {
      input = data::read_images(std::span(&path, 1), transform);
    } catch (const Error& e) {
      complain(e.what());
      status = kFailed;
      continue;
    }
    Tensor logits;
    {
      const amp::Autocast autocast{{.dtype = precision.region.value_or(f16), .enabled = precision.region.has_value()}};
      logits = loaded.classifier.forward(input.to(device));
    }
    const auto p = softmax(logits.to(f32), 1).to_vector<float>();
    if (std::any_of(p.begin(), p.end(), [](float v) { return std::isnan(v); })) {
      complain(fmt::format("{}: the network gives numbers that are none", shown_path(path)));
      status = kFailed;
      continue;
    }
    std::vector<std::size_t> order(p.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const std::size_t shown = std::min(static_cast<std::size_t>(flags.top), order.size());
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(shown), order.end(),
                      [&](std::size_t a, std::size_t b) { return p[a] > p[b] || (p[a] == p[b] && a < b); });
    fmt::print("{}\n", shown_path(path));
    for (std::size_t i = 0; i < shown; ++i) {
      fmt::print("  {:6.2f}%  {}\n", 100 * static_cast<double>(p[order[i]]),
                 names.empty() ? std::to_string(order[i]) : printable(names[order[i]]));
    }
    std::fflush(stdout);
  }
  return status;
}

}  // namespace halfstep::cli
