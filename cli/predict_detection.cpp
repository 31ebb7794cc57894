// SPDX-License-Identifier: Apache-2.0
// Objects in pictures.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>

#include "cli/detection_files.h"
#include "cli/fold.h"
#include "cli/integers.h"
#include "cli/precision.h"
#include "cli/predict.h"
#include "halfstep/core/atomic_file.h"
#include "halfstep/core/text.h"
#include "halfstep/data/image.h"
#include "halfstep/train/detection_pictures.h"
#include "halfstep/train/detector.h"
#include "halfstep/train/run_folder.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

struct DetectorFlags {
  double score = 0.25, overlap = 0.45, line_width = 0;
  std::int64_t limit = 300;
  std::string only;
  fs::path out;
  bool agnostic = false, save_txt = false, save_conf = false, save_json = false;
  bool no_pictures = false, hide_labels = false, hide_scores = false;
};

std::vector<std::int64_t> only_classes(const std::string& text, const std::vector<std::string>& names,
                                       std::int64_t classes) {
  std::vector<std::int64_t> result;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    begin = end + 1;
    const auto named = std::find(names.begin(), names.end(), word);
    std::int64_t number = named - names.begin();
    if (named == names.end()) {
      const auto [rest, error] = std::from_chars(word.data(), word.data() + word.size(), number);
      const bool whole = error == std::errc{} && rest == word.data() + word.size();
      if (!whole || number < 0 || number >= classes) {
        throw UsageError(fmt::format("--only: expected names of classes or numbers from 0 to {}, got '{}'", classes - 1,
                                     printable_start(word, 40)));
      }
    }
    result.push_back(number);
  }
  return result;
}

// `4 RBC, 1 WBC`, in the order of classes.
std::string objects_text(const std::vector<models::Detection>& objects, const std::vector<std::string>& names) {
  std::map<std::int64_t, int> counts;
  for (const models::Detection& d : objects) ++counts[d.label];
  std::vector<std::string> parts;
  for (const auto& [label, n] : counts) {
    const auto i = static_cast<std::size_t>(label);
    parts.push_back(i < names.size() && !names[i].empty() ? fmt::format("{} {}", n, printable(names[i]))
                                                          : fmt::format("{} of class {}", n, label));
  }
  return parts.empty() ? "nothing" : fmt::format("{}", fmt::join(parts, ", "));
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void write_file(const fs::path& path, const std::string& bytes) {
  AtomicFile file(path, false);
  file.write(bytes.data(), bytes.size());
  file.commit();
}

// Where the files go: --out, or a new folder.
struct Output {
  training::RunFolder fresh = {};
  fs::path folder = {};
};
Output open_output(const fs::path& given) {
  Output output;
  if (given.empty()) {
    output.fresh = training::RunFolder::make("runs/predict");
    output.folder = output.fresh.path();
  } else {
    make_folder(given);
    output.folder = given;
  }
  return output;
}

class DetectionPredictor final : public Predictor {
 public:
  std::string task() const override { return "detection"; }

  void add_flags(const Verb& verb) override {
    DetectorFlags& f = flags_;
    const auto share = FlagRange::from_to(0, 1);
    add_path(verb, "--out", f.out, "Folder for pictures with boxes and what else is written (default: runs/predict)");
    add_flag(verb,
             {.names = "--conf-thres,--score", .field = &f.score, .help = "Least score of an object", .range = share});
    add_flag(verb, {.names = "--iou-thres,--overlap",
                    .field = &f.overlap,
                    .help = "Boxes that overlap a better one by more are dropped (non-maximum suppression)",
                    .range = share});
    add_whole(verb, "--max-detections,--max-det", f.limit, 1, kMostCount, "Most objects of a picture");
    add_word(verb, "--only", f.only, "Only objects of these classes: names or numbers with commas between them")
        .value("CLASS,...");
    verb.add_switch("--agnostic,--agnostic-nms", f.agnostic, "Boxes of different classes suppress each other too");
    verb.add_switch("--save-txt", f.save_txt, "Write labels/NAME.txt with the objects in YOLO's form");
    verb.add_switch("--save-conf", f.save_conf, "With the score at the end of each line of --save-txt");
    verb.add_switch("--save-json", f.save_json,
                    "Write predictions.json in the form of COCO's results, with names where the classes aren't COCO's");
    verb.add_switch("--no-pictures,--nosave", f.no_pictures, "Write no pictures");
    verb.add_switch("--hide-labels", f.hide_labels, "Boxes without names");
    verb.add_switch("--hide-scores,--hide-conf", f.hide_scores, "Names without scores");
    add_flag(verb, {.names = "--line-width,--line-thickness",
                    .field = &f.line_width,
                    .help = "Width of the boxes' lines in pixels (default: by the size of the picture)",
                    .range = FlagRange::above_to(0, 1000),
                    .value = "X"});
  }

  int run(PredictOptions& o, Device device) override;

 private:
  DetectorFlags flags_;
};

int DetectionPredictor::run(PredictOptions& o, Device device) {
  const DetectorFlags& f = flags_;
  check_precision(o.amp);
  if (o.pictures.count("--resize") > 0) throw UsageError(fmt::format("--resize: {} takes whole pictures", o.model));
  if (f.save_conf && !f.save_txt) throw UsageError("--save-conf: expected --save-txt with it");
  if (o.inputs.empty()) throw UsageError("INPUT: expected at least one image, .jpg or .png, or a folder of them");
  const std::vector<fs::path> files = pictures_in(o.inputs);
  const std::vector<std::string> names = names_of(files);
  Loaded loaded = load_classifier(o.model, o.weights);
  // Before the precision: at some levels networks compute with rounded copies of their weights.
  std::string folded = o.fold ? fold_network(loaded, o.model, 64) : "";
  if (o.int8) folded += use_integers(loaded, o.amp);
  const Precision precision = o.int8 ? Precision() : set_precision(loaded, o.amp);
  const std::vector<std::string> classes =
      o.classes.empty() ? loaded.classes : read_class_names(o.classes, loaded.num_classes);
  resolve_images(o.pictures, o.model, loaded);
  loaded.network.module->to(device);
  training::DetectorOptions options{
      .image_size = o.pictures.images.image_size,
      .detections = {.score = f.score, .overlap = f.overlap, .limit = f.limit, .agnostic = f.agnostic},
      .classes = only_classes(f.only, classes, loaded.num_classes),
      .autocast = precision.region,
      .levels = loaded.network.outputs};
  const training::Detector detector(loaded.network.as<models::Yolov5>(), options);
  const Output output = open_output(f.out);
  const auto picture_file = [&](std::size_t i) { return output.folder / (names[i] + ".png"); };
  for (std::size_t i = 0; !f.no_pictures && i < files.size(); ++i) {
    for (const fs::path& read : files) {
      std::error_code error;
      if (!fs::equivalent(picture_file(i), read, error)) continue;
      throw IoError(fmt::format("--out {}: {} would be written over the picture that is read; name another folder",
                                shown_path(output.folder), shown_path(picture_file(i))));
    }
  }
  const auto label_file = [&](std::size_t i) { return output.folder / "labels" / (names[i] + ".txt"); };
  const fs::path results_file = output.folder / "predictions.json";
  // They may be the truth that somebody labelled.
  std::vector<fs::path> written;
  for (std::size_t i = 0; f.save_txt && i < files.size(); ++i) written.push_back(label_file(i));
  if (f.save_json) written.push_back(results_file);
  for (const fs::path& file : written) {
    std::error_code error;
    if (!fs::is_regular_file(file, error)) continue;
    throw IoError(fmt::format("--out {}: {} is there and would be written over; name another folder",
                              shown_path(output.folder), shown_path(file)));
  }
  if (f.save_txt) make_folder(output.folder / "labels");
  fmt::print("{}{}{}\n", loaded.text(o.model), precision.said, folded);
  std::fflush(stdout);
  int status = kDone;
  const auto failed = [&](const std::string& why) {
    complain(why);
    status = kFailed;
  };
  CocoResults results(classes);
  std::size_t seen = 0, objects = 0;
  std::vector<double> prepare, forward, suppress;
  for (std::size_t i = 0; i < files.size(); ++i) {
    data::Image image;
    try {
      image = data::read_image(files[i]);
    } catch (const Error& e) {
      failed(e.what());
      continue;
    }
    const training::FoundObjects found = detector(image.view());
    if (!found.finite) {
      failed(fmt::format("{}: the network gives numbers that are none", shown_path(files[i])));
      continue;
    }
    ++seen;
    objects += found.objects.size();
    prepare.push_back(found.prepare_ms), forward.push_back(found.forward_ms), suppress.push_back(found.suppress_ms);
    fmt::print("{}/{} {}: {}x{}, {}; {:.1f} ms pre-processing, {:.1f} ms inference, {:.1f} ms NMS\n", i + 1,
               files.size(), shown_path(files[i]), found.height, found.width, objects_text(found.objects, classes),
               found.prepare_ms, found.forward_ms, found.suppress_ms);
    std::fflush(stdout);
    if (f.save_txt) {
      write_file(label_file(i), yolo_labels(found.objects, image.width, image.height, f.save_conf));
    }
    if (f.save_json) results.add(names[i], found.objects);
    if (f.no_pictures) continue;
    std::vector<training::ShownBox> boxes;
    for (const models::Detection& d : found.objects)
      boxes.push_back({d.label, d.left, d.top, d.right, d.bottom, d.score});
    const training::ShownBoxOptions shown{
        .labels = !f.hide_labels, .scores = !f.hide_scores, .line_width = f.line_width};
    const std::int64_t width = image.width, height = image.height;
    std::string png;
    try {
      png = training::draw_detections({width, height, std::move(image.pixels)}, boxes, classes, shown).png(1);
    } catch (const Error& e) {
      // Larger than what can be drawn on.
      failed(fmt::format("{}: no picture with boxes is written: {}", shown_path(files[i]), e.what()));
      continue;
    }
    write_file(picture_file(i), png);
  }
  if (f.save_json) write_file(results_file, results.text());
  fmt::print("{} of {} pictures, {} objects; median {:.1f} ms pre-processing, {:.1f} ms inference, {:.1f} ms NMS\n",
             seen, files.size(), objects, median(prepare), median(forward), median(suppress));
  if (!f.no_pictures || f.save_txt || f.save_json) fmt::print("written into {}\n", shown_path(output.folder));
  return status;
}

}  // namespace

std::unique_ptr<Predictor> detection_predictor() { return std::make_unique<DetectionPredictor>(); }

}  // namespace halfstep::cli
