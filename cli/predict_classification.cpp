// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "cli/fold.h"
#include "cli/integers.h"
#include "cli/precision.h"
#include "cli/predict.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/core/text.h"
#include "halfstep/data/idx.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/train/networks.h"

namespace halfstep::cli {
namespace {

const char* type_name(data::IdxType type) {
  switch (type) {
    case data::IdxType::kUint8:
      return "bytes";
    case data::IdxType::kInt8:
      return "signed bytes";
    case data::IdxType::kInt16:
      return "16-bit integers";
    case data::IdxType::kInt32:
      return "32-bit integers";
    case data::IdxType::kFloat32:
      return "float32";
    case data::IdxType::kFloat64:
      break;
  }
  return "float64";
}

data::MnistData pictures_of(const PredictOptions& o, const DataPlace& place) {
  if (o.inputs.empty()) return training::load_pictures(place.folder, data::Split::kTest, place.seed);
  data::MnistData all;
  for (const auto& path : o.inputs) {
    const data::IdxArray file = data::read_idx(path);
    if (file.type != data::IdxType::kUint8 || file.shape.size() != 3 || file.shape[1] != 28 || file.shape[2] != 28) {
      throw IoError(fmt::format("{}: expected an IDX file of bytes with the shape [N, 28, 28], got {} with [{}]",
                                shown_path(path), type_name(file.type), fmt::join(file.shape, ", ")));
    }
    if (file.shape[0] == 0) throw IoError(fmt::format("{}: expected at least one picture, got none", shown_path(path)));
    all.count += file.shape[0];
    all.images.insert(all.images.end(), file.data.begin(), file.data.end());
  }
  all.labels.assign(static_cast<std::size_t>(all.count), 0);
  return all;
}

int predict_digits(PredictOptions& o, const ClassifierFlags& flags, Device device) {
  refuse_image_flags(o.pictures, o.model, {"--image-size", "--resize", "--classes", "--top"});
  check_precision(o.amp);
  Loaded loaded = load_classifier(o.model, o.weights);
  std::string folded = o.fold ? fold_network(loaded, o.model, 0) : "";
  if (o.int8) folded += use_integers(loaded, o.amp);
  const Precision precision = o.int8 ? Precision() : set_precision(loaded, o.amp);
  const training::Classifier& classifier = loaded.classifier;
  const auto seed = o.pictures.count("--seed") > 0 ? std::optional(flags.seed) : std::nullopt;
  const DataPlace place = o.inputs.empty() ? place_of_data(loaded, flags.data, seed) : DataPlace{};
  const data::MnistData pictures = pictures_of(o, place);
  if (o.inputs.empty()) check_same_data(loaded, place, "test", training::checksum(pictures));
  fmt::print("{}{}{}{}\n", loaded.text(o.model), o.inputs.empty() ? " on " + place.text(loaded) : std::string(),
             precision.said, folded);
  std::vector<std::int64_t> chosen = flags.indices;
  for (std::int64_t i : chosen) {
    if (i >= pictures.count) {
      throw UsageError(fmt::format("--index: expected 0 to {}, got {}", pictures.count - 1, i));
    }
  }
  if (chosen.empty()) {
    chosen.resize(static_cast<std::size_t>(std::min<std::int64_t>(flags.count, pictures.count)));
    std::iota(chosen.begin(), chosen.end(), 0);
  }
  const NoGrad no_grad;
  classifier.module->eval();
  classifier.module->to(device);
  const data::Batch batch = training::pictures_dataset(pictures)->batch({.indices = chosen});
  Tensor logits;
  {
    const amp::Autocast autocast{{.dtype = precision.region.value_or(f16), .enabled = precision.region.has_value()}};
    logits = classifier.forward(batch.input.to(device));
  }
  const auto p = softmax(logits.to(f32), 1).to_vector<float>();
  std::vector<DigitPicture> drawn;
  std::size_t right = 0;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const auto begin = p.begin() + static_cast<std::ptrdiff_t>(10 * i);
    const auto best = static_cast<int>(std::max_element(begin, begin + 10) - begin);
    const int label = pictures.labels[static_cast<std::size_t>(chosen[i])];
    const bool known = o.inputs.empty();
    right += known && best == label ? 1 : 0;
    std::string caption = fmt::format("{} ({:.1f}%)", best, 100 * static_cast<double>(begin[best]));
    if (known && best != label) caption += fmt::format(", is {}", label);
    drawn.push_back({pictures.image(chosen[i]), caption});
  }
  fmt::print("{}", draw_digits(drawn));
  if (o.inputs.empty()) fmt::print("{} of {} right\n", right, chosen.size());
  return kDone;
}

class ClassificationPredictor final : public Predictor {
 public:
  std::string task() const override { return "classification"; }
  void add_flags(const Verb& verb) override {
    add_path(verb, "--data", flags_.data,
             "Folder with the data set in MNIST's format (default: the run's data, or else the built-in digits)");
    verb.add_list(
            "--index",
            [this](const std::vector<std::string>& list) {
              for (const std::string& text : list) {
                flags_.indices.push_back(static_cast<std::int64_t>(parse_whole("--index", text, 0, kMostCount)));
              }
            },
            "Numbers of the pictures, from 0")
        .split(',')
        .value("N,...");
    add_whole(verb, "--top", flags_.top, 1, kMostCount, "How many classes to name for an image");
    add_whole(verb, "--count", flags_.count, 1, kMostCount, "How many of the first pictures");
    add_data_seed(verb, flags_.seed);
  }
  int run(PredictOptions& o, Device device) override {
    if (!is_network(o.model)) return predict_digits(o, flags_, device);
    const training::DataKind& kind = training::data_of(o.model);
    if (kind.images) return predict_images(o, flags_, device);
    if (kind.pictures) return predict_digits(o, flags_, device);
    refuse_image_flags(o.pictures, o.model, {"--data", "--index", "--top", "--count", "--seed"});
    return predict_samples(o, device);
  }

 private:
  ClassifierFlags flags_;
};

}  // namespace

std::unique_ptr<Predictor> classification_predictor() { return std::make_unique<ClassificationPredictor>(); }

}  // namespace halfstep::cli
