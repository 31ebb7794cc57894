// SPDX-License-Identifier: Apache-2.0
// Training steps of image networks, of a detector and of a language model, those that Model and the program run: f32,
// and bf16 and f16 under autocast, channels-last.
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
#include "halfstep/models/detection_loss.h"
#include "halfstep/models/gpt.h"
#include "halfstep/models/registry.h"
#include "halfstep/models/yolov5.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/train/classification.h"
#include "halfstep/train/memory_plan.h"
#include "halfstep/train/train_step.h"

namespace halfstep::bench {

namespace {

// What is trained, on which batch.
struct Work {
  std::shared_ptr<training::Task> task;
  data::Batch batch;
};
struct Network {
  std::string name;  // of the case
  std::int64_t batch;
  double operations;  // of a step
  std::function<Work()> make;
};

Tensor pictures(std::int64_t batch, std::int64_t size) {
  return randn({batch, 3, size, size}).contiguous(MemoryFormat::channels_last);
}

class Classification final : public training::Task {
 public:
  explicit Classification(models::Model net)
      : net_(std::move(net)), task_(training::Classifier{.module = net_.module.get(), .forward = net_.forward}) {}
  const nn::ModuleBase& network() const override { return *net_.module; }
  training::TaskLoss loss(const data::Batch& batch) override { return task_.loss(batch); }

 private:
  models::Model net_;
  training::ClassificationTask task_;
};

Network classifier(const char* name, std::int64_t batch, std::int64_t size, std::int64_t features, std::int64_t classes,
                   const std::vector<ConvLayer>& layers) {
  return {name, batch, step_operations(layers, features, classes, batch), [name, batch, size, classes] {
            return Work{std::make_shared<Classification>(models::make_model(name)),
                        {pictures(batch, size), randint(0, classes, {batch})}};
          }};
}

class Detection final : public training::Task {
 public:
  explicit Detection(std::int64_t size) : options_{.image_size = static_cast<double>(size)} {}
  const nn::ModuleBase& network() const override { return net_; }
  training::TaskLoss loss(const data::Batch& batch) override {
    return {.loss = models::detection_loss(net_(batch.input), batch.target, net_.head(), options_).loss};
  }

 private:
  models::Yolov5 net_ = models::yolov5n();
  models::DetectionLossOptions options_;
};

// YOLOv5n for 80 classes, 8 objects a picture. The first layer's operations have no gradient of the input.
Network detector(const char* name, std::int64_t batch, std::int64_t size) {
  const double share = static_cast<double>(size * size) / (640 * 640);
  const double first = 2.0 * 320 * 320 * 16 * 3 * 36;
  return {name, batch, share * (3 * kYolov5nOperations - first) * static_cast<double>(batch), [batch, size] {
            const Tensor objects =
                cat({randint(0, 80, {batch, 8, 1}).to(f32), rand({batch, 8, 2}), rand({batch, 8, 2}) * 0.5 + 0.02}, 2);
            return Work{std::make_shared<Detection>(size), {pictures(batch, size), objects}};
          }};
}

class NextToken final : public training::Task {
 public:
  explicit NextToken(const models::GPTOptions& options) : net_(options) {}
  const nn::ModuleBase& network() const override { return net_; }
  training::TaskLoss loss(const data::Batch& batch) override {
    return {.loss = cross_entropy(flatten(net_(batch.input), 0, 1), flatten(batch.target, 0))};
  }

 private:
  models::GPT net_;
};

// Of characters, as small as is trained on one machine, without dropout.
Network language_model(const char* name, std::int64_t batch, const models::GPTOptions& o) {
  const auto n = static_cast<double>(batch), t = static_cast<double>(o.context), w = static_cast<double>(o.width);
  // Multiply-adds of a token's forward pass: four linear layers a block (12 width^2) and the logits. Attention is not
  // halved for its mask, as usual. The gradient of the first embedding is no product.
  const double products =
      static_cast<double>(o.layers) * (12 * w * w + 2 * t * w) + static_cast<double>(o.vocabulary) * w;
  return {name, batch, 3 * 2 * n * t * products, [batch, o] {
            const auto ids = [&] { return randint(0, o.vocabulary, {batch, o.context}); };
            return Work{std::make_shared<NextToken>(o), {ids(), ids()}};
          }};
}

const std::vector<Network>& networks() {
  static const std::vector<Network> all = {
      classifier("resnet50", 16, 224, 2048, 1000, resnet50_convolutions()),
      classifier("resnet18_cifar", 128, 32, 512, 10, resnet18_cifar_convolutions()),
      classifier("mobilenet_v2", 32, 224, 1280, 1000, mobilenet_v2_convolutions()),
      detector("yolov5n", 16, 640),
      detector("yolov5n_640", 4, 640),
      detector("yolov5n_320", 4, 320),
      language_model(
          "gpt", 8,
          {.vocabulary = 65, .context = 256, .layers = 6, .heads = 6, .width = 384, .dropout = 0, .bias = false}),
  };
  return all;
}

class Training {
 public:
  Training(const Network& network, std::optional<DType> low, std::uint64_t budget)
      : low_(low),
        work_(network.make()),
        optimizer_(work_.task->network().parameters(), {.lr = 0.01, .momentum = 0.9}),
        step_(training::make_train_step(work_.task, optimizer_, amp::GradScaler({.enabled = low == f16}),
                                        {.autocast = low})) {
    if (budget == 0) return;
    // As `halfstep train --memory-budget` does.
    const training::TrainConfig config{.model = network.name, .batch_size = network.batch, .momentum = 0.9};
    const auto plan = training::plan_memory(config, network.batch, work_.batch.input.size(3), budget);
    training::set_recomputed(work_.task->network(), plan.modules());
    cache_limit_.emplace(budget);
    empty_memory_cache();
  }

  void step() { cache_limit_ ? step_.run_captured({&work_.batch, 1}) : step_.run({&work_.batch, 1}); }
  void uncaptured_step() { step_.run({&work_.batch, 1}); }

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
      uncaptured_step();
      whole += std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
      debug::Profiler profiler;
      uncaptured_step();
      profiler.stop();
      for (const debug::ProfileRow& row : profiler.ops()) {
        if (row.name.starts_with("conv")) in_convolutions += static_cast<double>(row.self_ns);
      }
    }
    std::map<std::string, double> found = {{"images", static_cast<double>(work_.batch.input.size(0))},
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
    return work_.task->loss(work_.batch).loss;
  }

  std::optional<DType> low_;
  Work work_;
  optim::SGD optimizer_;
  training::TrainStep step_;
  std::optional<MemoryCacheLimitGuard> cache_limit_;
};

// `budget` of memory in bytes; 0: none.
Prepared prepare(const Network& network, std::optional<DType> low, std::uint64_t budget = 0) {
  manual_seed(1);
  const auto training = std::make_shared<Training>(network, low, budget);
  return {[training] { training->step(); }, 1, [training] { return training->facts(); }};
}

}  // namespace

void add_network_cases(std::vector<Case>& cases) {
  for (const Network& network : networks()) {
    for (const auto& [dtype, low] :
         {std::pair{"f32", std::optional<DType>{}}, {"bf16", std::optional{bf16}}, {"f16", std::optional{f16}}}) {
      cases.push_back({fmt::format("network/{}/{}/b{}", network.name, dtype, network.batch),
                       [&network, low] { return prepare(network, low); }, network.operations});
    }
    // Less than 0.4 of what PyTorch's process takes.
    if (network.name == "resnet50") {
      cases.push_back({fmt::format("network/{}/f32_890MB/b{}", network.name, network.batch),
                       [&network] { return prepare(network, {}, 890'000'000); }, network.operations});
    }
  }
}

}  // namespace halfstep::bench
