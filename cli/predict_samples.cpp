// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "cli/fold.h"
#include "cli/integers.h"
#include "cli/precision.h"
#include "cli/predict.h"
#include "halfstep/core/text.h"
#include "halfstep/train/evaluate.h"
#include "halfstep/train/registry.h"

namespace halfstep::cli {

int predict_samples(PredictOptions& o, Device device) {
  constexpr std::int64_t kShown = 8;
  check_precision(o.amp);
  if (o.inputs.size() > 1) {
    throw UsageError(fmt::format("INPUT: expected at most one folder with data, got {} arguments", o.inputs.size()));
  }
  Loaded loaded = load_classifier(o.model, o.weights);
  const training::DataKind& kind = training::data_of(o.model);
  if (kind.images) {
    resolve_images(o.pictures, o.model, loaded);
  } else {
    refuse_image_flags(o.pictures, o.model, {"--image-size", "--resize"});
  }
  // Before the precision: at some levels networks compute with rounded copies of their weights.
  std::string folded = o.fold ? fold_network(loaded, o.model, kind.images ? o.pictures.images.image_size : 0) : "";
  if (o.int8) folded += use_integers(loaded, o.amp);
  const Precision precision = o.int8 ? Precision() : set_precision(loaded, o.amp);
  const DataPlace place = place_of_data(loaded, o.inputs.empty() ? std::filesystem::path() : o.inputs[0], {});
  const training::TrainConfig config =
      data_config(o.model, loaded, place, kind.images ? &o.pictures.images : nullptr, 0, device);
  if (kind.check) as_usage([&] { kind.check(config); });
  training::RunData data = training::load_data(config, false);
  if (!o.classes.empty()) {
    data.classes = read_class_names(o.classes, loaded.num_classes);
  } else if (!loaded.classes.empty()) {
    data.classes = loaded.classes;
  }
  const std::shared_ptr<training::Task> task = training::make_task(config, data, loaded.network);
  task->network().to(device);
  const std::vector<std::string> lines = training::predictions(*task, *data.test, kShown, precision.region);
  if (lines.empty()) {
    throw UsageError(fmt::format("MODEL: {} is trained for {}, which predict doesn't know", o.model,
                                 training::network_kind(o.model).task));
  }
  fmt::print("{}{}{}\n", loaded.text(o.model), precision.said, folded);
  for (std::size_t i = 0; i < lines.size(); ++i) fmt::print("{}: {}\n", i, printable(lines[i]));
  return kDone;
}

}  // namespace halfstep::cli
