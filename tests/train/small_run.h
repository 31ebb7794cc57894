// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/core/random.h"
#include "halfstep/data/dataset.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/create.h"
#include "halfstep/train/trainer.h"

namespace halfstep::test {

/// Samples of values from -1 to 1 in eighths (which 16 bits hold), whose class is that of the largest of the first
/// ones, as plain numbers and as a data set.
struct Samples {
  std::size_t count, features;
  std::vector<double> x;
  std::vector<std::int64_t> y;
  Samples(std::size_t n, std::size_t width, std::size_t classes, std::uint64_t seed) : count(n), features(width) {
    RandomStream random(seed);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < width; ++j) x.push_back((random() % 17) / 8.0 - 1);
      const auto row = x.end() - static_cast<std::ptrdiff_t>(width);
      y.push_back(std::max_element(row, row + static_cast<std::ptrdiff_t>(classes)) - row);
    }
  }
  std::shared_ptr<const data::Dataset> dataset() const {
    const auto n = static_cast<std::int64_t>(count), width = static_cast<std::int64_t>(features);
    return std::make_shared<data::TensorDataset>(tensor(x, {n, width}), tensor(y, {n}));
  }
};

/// Softmax regression: its loss is convex in weight and bias.
struct Regression : nn::Module<Regression> {
  Regression(std::int64_t in, std::int64_t out) : fc(child("fc", nn::Linear{{.in = in, .out = out}})) {}
  Tensor forward(const Tensor& x) const { return fc(x); }
  nn::Linear fc;
};

/// What a run reported.
struct Recorded {
  training::RunReport report;
  std::vector<training::StepReport> steps;
  std::vector<training::EvalReport> evals;
  std::vector<std::filesystem::path> checkpoints;
  std::vector<double> losses() const {
    std::vector<double> result;
    for (const auto& s : steps) result.push_back(s.loss);
    return result;
  }
};

template <class Net>
Recorded run(const training::TrainConfig& config, const Net& net, const std::shared_ptr<const data::Dataset>& training,
             const std::shared_ptr<const data::Dataset>& evaluation, std::int64_t stop_after = 0,
             const std::function<void()>& after_step = {}) {
  std::atomic<bool> stop{false};
  Recorded result;
  training::TrainCallbacks callbacks;
  callbacks.on_step = [&](const training::StepReport& r) {
    result.steps.push_back(r);
    if (after_step) after_step();
    if (r.step == stop_after) stop = true;
  };
  callbacks.on_eval = [&](const training::EvalReport& r) { result.evals.push_back(r); };
  callbacks.on_checkpoint = [&](const std::filesystem::path& p) { result.checkpoints.push_back(p); };
  const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
  result.report = training::train(config, classifier, training, evaluation, callbacks, &stop);
  return result;
}

/// All values of a network's state, to compare bit by bit.
inline std::vector<std::vector<double>> values(const nn::ModuleBase& net) {
  std::vector<std::vector<double>> result;
  for (const auto& t : net.state_dict()) result.push_back(t.tensor.template to_vector<double>());
  return result;
}

}  // namespace halfstep::test
