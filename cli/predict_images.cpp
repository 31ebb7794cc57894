// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>

#include "cli/precision.h"
#include "cli/predict.h"
#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/text.h"
#include "halfstep/data/transforms.h"
#include "halfstep/ops/softmax.h"

namespace halfstep::cli {
namespace {

// One name a line; a carriage return before the end of the line belongs to the line's end.
std::vector<std::string> read_names(const std::filesystem::path& path, std::int64_t expected) {
  std::ifstream file(path);
  if (!file || std::filesystem::is_directory(path)) {
    throw IoError(fmt::format("{}: expected a file with one class name a line, it can't be read", shown_path(path)));
  }
  std::vector<std::string> names;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    names.push_back(line);
    if (static_cast<std::int64_t>(names.size()) > expected) break;
  }
  while (!names.empty() && names.back().empty()) names.pop_back();
  if (static_cast<std::int64_t>(names.size()) != expected) {
    throw IoError(fmt::format(
        "{}: expected {} class names, one a line, as many as the network has classes, got {}", shown_path(path),
        expected, static_cast<std::int64_t>(names.size()) > expected ? "more" : std::to_string(names.size())));
  }
  return names;
}

}  // namespace

int predict_images(PredictOptions& o) {
  const Device device = apply_common(o);
  check_precision(o.amp);
  for (const char* flag : {"--data", "--index", "--count"}) {
    if (o.pictures.count(flag) > 0) {
      throw UsageError(
          fmt::format("{}: {} takes files: halfstep predict {} --weights FILE IMAGE...", flag, o.model, o.model));
    }
  }
  if (o.inputs.empty()) throw UsageError("INPUT: expected at least one image, .jpg or .png");
  const Loaded loaded = load_classifier(o.model, o.weights);
  const Precision precision = set_precision(loaded, o.amp);
  resolve_images(o.pictures, o.model, loaded);
  fmt::print("{}{}\n", loaded.text(o.model), precision.said);
  o.pictures.images.folder = ".";  // none is needed here
  as_usage([&] { training::check(o.pictures.images); });
  const std::vector<std::string> names = o.classes.empty() ? loaded.classes : read_names(o.classes, loaded.num_classes);
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
    const std::size_t shown = std::min(static_cast<std::size_t>(o.top), order.size());
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
