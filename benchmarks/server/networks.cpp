// SPDX-License-Identifier: Apache-2.0
// Training steps of image networks, those that Model and the program run: f32, and bf16 and f16 under autocast,
// channels-last.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>

#include "benchmarks/server/layers.h"
#include "benchmarks/server/server.h"
#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/core/random.h"
#include "halfstep/debug/profiler.h"
#include "halfstep/models/registry.h"
#include "halfstep/ops/random.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/train_step.h"

namespace halfstep::bench {

namespace {

struct Network {
  const char* name;   // of the case
  const char* model;  // in the registry
  std::int64_t batch, size, features, classes;
  std::vector<ConvLayer> (*layers)();
};
constexpr Network kNetworks[] = {
    {"resnet50", "resnet50", 16, 224, 2048, 1000, resnet50_convolutions},
    {"resnet18_cifar", "resnet18_cifar", 128, 32, 512, 10, resnet18_cifar_convolutions},
};

class Training {
 public:
  Training(const Network& network, std::optional<DType> low)
      : low_(low),
        net_(models::make_model(network.model)),
        optimizer_(net_.module->parameters(), {.lr = 0.01, .momentum = 0.9}),
        task_(std::make_shared<training::ClassificationTask>(
            training::Classifier{.module = net_.module.get(), .forward = net_.forward})),
        step_(
            training::make_train_step(task_, optimizer_, amp::GradScaler({.enabled = low == f16}), {.autocast = low})),
        batch_{randn({network.batch, 3, network.size, network.size}).contiguous(MemoryFormat::channels_last),
               randint(0, network.classes, {network.batch})} {}

  void step() { step_.run({&batch_, 1}); }

  // What the forward pass leaves behind for the backward pass, and the part of a step that is not in convolutions. The
  // profiler takes fused passes apart and so makes the step longer: the whole is taken without it, in turns with it.
  std::map<std::string, double> facts() {
    const MemoryStats so_far = memory_stats();  // what a step needs, before the passes below add to it
    optimizer_.zero_grad();
    const std::uint64_t before = memory_stats().allocated;
    double saved = 0;
    {
      const Tensor kept = loss();
      saved = static_cast<double>(memory_stats().allocated - before);
    }
    double in_convolutions = 0, whole = 0;
    const auto begin = std::chrono::steady_clock::now();
    for (int turn = 0; turn < 3 && std::chrono::steady_clock::now() - begin < std::chrono::seconds(8); ++turn) {
      const auto start = std::chrono::steady_clock::now();
      step();
      whole += std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
      debug::Profiler profiler;
      step();
      profiler.stop();
      for (const debug::ProfileRow& row : profiler.ops()) {
        if (row.name.starts_with("conv")) in_convolutions += static_cast<double>(row.self_ns);
      }
    }
    std::map<std::string, double> found = {{"images", static_cast<double>(batch_.input.size(0))},
                                           {"handed_out_bytes", static_cast<double>(so_far.allocated_peak)},
                                           {"reserved_bytes", static_cast<double>(so_far.reserved_peak)},
                                           {"saved_bytes", saved}};
    // A part larger than the whole: the machine changed its speed between the two, and the share is not known.
    if (in_convolutions < whole) found["outside_convolutions"] = 1 - in_convolutions / whole;
    return found;
  }

 private:
  Tensor loss() {
    const amp::Autocast autocast{{.dtype = low_.value_or(f16), .enabled = low_.has_value()}};
    return task_->loss(batch_).loss;
  }

  std::optional<DType> low_;
  models::Model net_;
  optim::SGD optimizer_;
  std::shared_ptr<training::Task> task_;
  training::TrainStep step_;
  data::Batch batch_;
};

Prepared prepare(const Network& network, std::optional<DType> low) {
  manual_seed(1);
  const auto training = std::make_shared<Training>(network, low);
  return {[training] { training->step(); }, 1, [training] { return training->facts(); }};
}

}  // namespace

void add_network_cases(std::vector<Case>& cases) {
  for (const Network& network : kNetworks) {
    const double operations = step_operations(network.layers(), network.features, network.classes, network.batch);
    for (const auto& [dtype, low] :
         {std::pair{"f32", std::optional<DType>{}}, {"bf16", std::optional{bf16}}, {"f16", std::optional{f16}}}) {
      cases.push_back({fmt::format("network/{}/{}/b{}", network.name, dtype, network.batch),
                       [&network, low] { return prepare(network, low); }, operations});
    }
  }
}

}  // namespace halfstep::bench
