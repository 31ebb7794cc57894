// SPDX-License-Identifier: Apache-2.0
// Whole training steps of the MLP, those that Model and the program run, and the parts of a step on their own.
#include <fmt/format.h>

#include <memory>
#include <optional>

#include "benchmarks/server/server.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/core/random.h"
#include "halfstep/models/mlp.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/random.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/train_step.h"

namespace halfstep::bench {
namespace {

// Numbers of the 784-512-512-10 network.
constexpr double kWeights = 784 * 512 + 512 * 512 + 512 * 10, kBiases = 512 + 512 + 10,
                 kHiddenWeights = 512 * 512 + 512 * 10;

struct StepKind {
  const char* name;
  std::optional<DType> low;
  bool scaled;
  bool captured;
};
constexpr StepKind kStepKinds[] = {
    {"f32", {}, false, false},         {"f32_scaled", {}, true, false},      {"f32_captured", {}, false, true},
    {"bf16", bf16, false, false},      {"bf16_captured", bf16, false, true}, {"f16", f16, true, false},
    {"f16_captured", f16, true, true}, {"f16_unscaled", f16, false, false}};

std::unique_ptr<optim::Optimizer> make_optimizer(const std::string& kind, const NamedTensors& parameters) {
  if (kind == "sgd") return std::make_unique<optim::SGD>(parameters, optim::SGDOptions{.lr = 0.01});
  return std::make_unique<optim::Adam>(parameters, optim::AdamOptions{.lr = 1e-3});
}

struct Step {
  models::MLP net;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::optional<training::TrainStep> step;
  data::Batch batch;
};

Prepared prepare_step(const StepKind& kind, const std::string& optimizer, std::int64_t batch) {
  manual_seed(1);
  auto s = std::make_shared<Step>();
  s->optimizer = make_optimizer(optimizer, s->net.parameters());
  const training::Classifier classifier{.module = &s->net,
                                        .forward = [net = &s->net](const Tensor& x) { return (*net)(x); }};
  s->step = training::make_train_step(std::make_shared<training::ClassificationTask>(classifier), *s->optimizer,
                                      amp::GradScaler({.enabled = kind.scaled}), {.autocast = kind.low});
  s->batch = {randn({batch, 784}), randint(0, 10, {batch})};
  if (kind.captured) return {[s] { s->step->run_captured({&s->batch, 1}); }};
  return {[s] { s->step->run({&s->batch, 1}); }};
}

// Multiplications and additions of the products: forward, gradients of the weights, gradients of the hidden values.
double step_operations(std::int64_t batch) {
  return 2.0 * static_cast<double>(batch) * (2 * kWeights + kHiddenWeights);
}

// What a step reads and writes once: weights forward and backward, gradients out and in, the optimizer's state.
double step_bytes(const StepKind& kind, const std::string& optimizer, std::int64_t batch) {
  const double parameters = kWeights + kBiases, low = kind.low ? 2 : 4;
  const double states = optimizer == "adam" ? 2 : 0;
  const double copy = kind.low ? 2 * parameters : 0;  // written by the optimizer in 16 bits
  return low * (parameters + kHiddenWeights) + 4 * parameters * (1 + 1 + 2 + 2 * states) + copy +
         4.0 * static_cast<double>(batch) * 784;
}

Prepared prepare_unscale() {
  struct State {
    models::MLP net;
    optim::SGD optimizer{net.parameters(), {.lr = 0.01}};
    amp::GradScaler scaler{{.init_scale = 1, .growth_factor = 1.0000001}};
  };
  auto state = std::make_shared<State>();
  for (const auto& [name, parameter] : state->net.parameters()) parameter.set_grad(full(parameter.sizes(), 1));
  state->scaler.scale(full({1}, 0));
  return {[state] {
    state->scaler.unscale_(state->optimizer);
    state->scaler.update();
  }};
}

constexpr std::int64_t kTensors = 50, kRows = 500, kColumns = 1000;  // 25 million parameters

Prepared prepare_optimizer(const std::string& kind) {
  NamedTensors parameters;
  for (std::int64_t i = 0; i < kTensors; ++i) {
    Tensor p = randn({kRows, kColumns});
    p.set_grad(randn({kRows, kColumns}));
    p.requires_grad_();
    parameters.push_back({fmt::format("p{}", i), p});
  }
  std::shared_ptr<optim::Optimizer> optimizer;
  if (kind == "sgd") {
    optimizer = std::make_shared<optim::SGD>(parameters, optim::SGDOptions{.lr = 1e-3, .momentum = 0.9});
  } else if (kind == "adam") {
    optimizer = std::make_shared<optim::Adam>(parameters, optim::AdamOptions{.lr = 1e-3});
  } else {
    optimizer = std::make_shared<optim::AdamW>(parameters, optim::AdamWOptions{.lr = 1e-3});
  }
  return {[optimizer] { optimizer->step(); }};
}

}  // namespace

void add_step_cases(std::vector<Case>& cases) {
  for (const StepKind& kind : kStepKinds) {
    for (const std::string optimizer : {"sgd", "adam"}) {
      for (const std::int64_t batch : {64, 1}) {
        cases.push_back({fmt::format("mlp/{}/{}/b{}", kind.name, optimizer, batch),
                         [&kind, optimizer, batch] { return prepare_step(kind, optimizer, batch); },
                         step_operations(batch), step_bytes(kind, optimizer, batch)});
      }
    }
  }
  cases.push_back({"scaler/mlp_unscale", prepare_unscale, 0, 4 * 2 * (kWeights + kBiases)});
  constexpr double kParameters = kTensors * kRows * kColumns;
  // Parameters, gradients and states are read, parameters and states are written.
  for (const auto& [kind, streams] : {std::pair{"sgd", 5}, {"adam", 7}, {"adamw", 7}}) {
    cases.push_back({fmt::format("optimizer/{}/fused", kind),
                     [kind = std::string(kind)] { return prepare_optimizer(kind); }, 0, 4.0 * streams * kParameters});
  }
}

}  // namespace halfstep::bench
