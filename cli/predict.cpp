// SPDX-License-Identifier: Apache-2.0
#include "cli/predict.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cli/fold.h"
#include "cli/integers.h"
#include "cli/precision.h"
#include "cli/verbs.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/registry.h"

namespace halfstep::cli {
namespace {

struct Predict : PredictOptions {
  struct Task {
    std::shared_ptr<Predictor> predictor;
    std::vector<std::string> flags;  // that no other task has
  };
  std::vector<Task> tasks;
};

int run(Predict& o) {
  if (const auto path = take_model_for_path(o.model); !path.empty()) o.inputs.insert(o.inputs.begin(), path);
  const Device device = apply_common(o);
  if (o.model.empty()) o.model = training::load_saved_weights(o.weights).model;
  // Weights that don't say what they are of, or of a network that isn't known, are refused where they are loaded.
  const bool known = is_network(o.model);
  const std::string task = known ? training::network_kind(o.model).task : o.tasks[0].predictor->task();
  Predictor* predictor = nullptr;
  for (const Predict::Task& t : o.tasks) {
    if (t.predictor->task() == task) {
      predictor = t.predictor.get();
      continue;
    }
    for (const std::string& flag : t.flags) {
      if (!known || o.pictures.count(flag) == 0) continue;
      throw UsageError(
          fmt::format("{}: a flag of {}, and {} is trained for {}", flag, t.predictor->task(), o.model, task));
    }
  }
  return predictor ? predictor->run(o, device) : predict_samples(o, device);
}

}  // namespace

void add_predict(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "predict", "Classify images, or find objects in them");
  auto o = std::make_shared<Predict>();
  add_trained(verb, *o);
  verb.add_list(
          "INPUT", [o](const std::vector<std::string>& list) { o->inputs.assign(list.begin(), list.end()); },
          "JPEG or PNG files; of detectors folders of them too; for mlp IDX files of 28x28 pictures (default: test "
          "pictures of --data)")
      .value("");
  add_path(verb, "--classes", o->classes, "File with one class name a line (default: those of the checkpoint)");
  add_image_sizes(verb, o->pictures);
  add_precision(verb, o->amp);
  add_fold(verb, o->fold);
  add_int8(verb, o->int8);
  for (auto make : {classification_predictor, detection_predictor}) {
    const std::vector<std::string> before = verb.flag_names();
    Predict::Task task{.predictor = make(), .flags = {}};
    task.predictor->add_flags(verb);
    for (const std::string& flag : verb.flag_names()) {
      if (std::find(before.begin(), before.end(), flag) == before.end()) task.flags.push_back(flag);
    }
    o->tasks.push_back(std::move(task));
  }
  verb.run([o, &status] { status = run(*o); });
}

}  // namespace halfstep::cli
