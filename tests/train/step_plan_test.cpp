// SPDX-License-Identifier: Apache-2.0
// What is predicted of a step without taking it is what the step then takes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>

#include "halfstep/amp/level.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/copy.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/train/registry.h"
#include "halfstep/train/step_plan.h"
#include "halfstep/train/trace_step.h"
#include "halfstep/train/train_step.h"
#include "halfstep/train/trainer.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using training::StepMemory;
using training::TrainConfig;

struct Case {
  const char* model;
  std::int64_t batch, image;
};

TrainConfig config_of(const Case& c, const std::string& amp, const std::string& optimizer, bool capture) {
  TrainConfig config;
  config.model = c.model;
  config.amp = amp.substr(0, amp.find(' '));
  if (amp.find(' ') != std::string::npos) config.amp_dtype = amp.substr(amp.find(' ') + 1);
  config.optimizer = optimizer;
  config.lr = 1e-3;
  if (optimizer == "sgd") config.momentum = 0.9;
  config.capture = capture;
  return config;
}

void expect_predicted(const TrainConfig& config, const Case& c) {
  constexpr double kTolerance = 0.001;
  const std::string what = c.model + (" " + config.amp + " " + config.amp_dtype + " " + config.optimizer) +
                           (config.capture ? " captured" : "");
  const StepMemory predicted = training::predict_memory(config, c.batch, c.image);
  const StepMemory measured = training::measure_memory(config, c.batch, c.image);
  EXPECT_EQ(predicted.parameters, measured.parameters) << what;
  EXPECT_EQ(predicted.gradients, measured.gradients) << what;
  EXPECT_EQ(predicted.optimizer, measured.optimizer) << what;
  EXPECT_EQ(predicted.buffers, measured.buffers) << what;
  EXPECT_EQ(predicted.batch, measured.batch) << what;
  EXPECT_GT(measured.peak, measured.parameters + measured.gradients) << what;
  const double ratio = static_cast<double>(predicted.peak) / static_cast<double>(measured.peak);
  EXPECT_NEAR(ratio, 1, kTolerance) << what << ": predicted " << predicted.peak << ", measured " << measured.peak;
  ::testing::Test::RecordProperty(what, fmt::format("{} of {}", predicted.peak, measured.peak));
}

constexpr const char* kPrecisions[] = {"off", "bf16", "f16", "O2", "O2 bf16"};

void expect_all(const Case& c) {
  for (const char* amp : kPrecisions) {
    for (const char* optimizer : {"sgd", "adam"}) {
      for (const bool capture : {false, true}) expect_predicted(config_of(c, amp, optimizer, capture), c);
    }
  }
}

TEST(StepPlan, PredictsMemoryOfAnMlp) { expect_all({"mlp", 64, 0}); }
TEST(StepPlan, PredictsMemoryOfACnn) { expect_all({"cnn", 16, 0}); }
TEST(StepPlan, PredictsMemoryOfResNet20) { expect_all({"resnet20", 8, 32}); }
TEST(StepPlan, PredictsMemoryOfResNet18) {
  const Case c{"resnet18", 2, 64};
  for (const char* amp : {"off", "bf16", "O2"}) expect_predicted(config_of(c, amp, "sgd", true), c);
  expect_predicted(config_of(c, "f16", "adam", false), c);
}
TEST(StepPlan, PredictsMemoryOfResNet50) {
  const Case c{"resnet50", 2, 64};
  for (const char* amp : {"off", "bf16", "O2 bf16"}) expect_predicted(config_of(c, amp, "sgd", true), c);
  expect_predicted(config_of(c, "f16", "adam", false), c);
}
TEST(StepPlan, PredictsMemoryOfADetector) {
  const Case c{"yolov5n", 2, 128};
  for (const char* amp : {"off", "bf16", "f16"}) expect_predicted(config_of(c, amp, "sgd", true), c);
  expect_predicted(config_of(c, "O2", "adam", false), c);
}

TEST(StepPlan, PredictsMemoryOfFurtherSettings) {
  const Case c{"resnet20", 4, 32};
  TrainConfig config = config_of(c, "f16", "sgd", true);
  config.accumulate = 3;
  config.clip_norm = 1;
  config.ema = 0.999;
  config.label_smoothing = 0.1;
  config.train_accuracy = true;
  config.norm_decay = false;
  config.loss_scale = "dynamic:1024";
  expect_predicted(config, c);
}

// Without measure_memory(), which has its program in common with the prediction.
TEST(StepPlan, PredictsAProgramThatIsWrittenOut) {
  for (const DType dtype : {f32, bf16}) {
    TrainConfig config;
    config.model = "resnet20";
    config.amp = dtype == f32 ? "off" : "bf16";
    config.momentum = 0.9;
    config.capture = false;
    const std::uint64_t before = memory_stats().allocated;
    manual_seed(1);
    const auto task = training::random_task(config);
    optim::SGD optimizer(task->network().parameters(), optim::SGDOptions{.lr = 0.01, .momentum = 0.9});
    training::TrainStep step =
        make_train_step(task, optimizer, {}, {.autocast = dtype == f32 ? std::nullopt : std::optional(dtype)});
    data::Batch batch = training::random_batch("resnet20", 16);
    batch.input = batch.input.contiguous(MemoryFormat::channels_last);
    reset_peak_memory();
    for (int i = 0; i < 3; ++i) step.run({&batch, 1});
    const std::uint64_t peak = memory_stats().allocated_peak - before;
    const double ratio = static_cast<double>(training::predict_memory(config, 16).peak) / static_cast<double>(peak);
    EXPECT_NEAR(ratio, 1, 0.02) << config.amp;
  }
}

// A replay has the memory of the step by itself, planned once. That may be more by scratch of 1 MiB, and by gaps that
// places leave.
TEST(StepPlan, CapturedStepsNeedHardlyMore) {
  struct Network {
    Case of;
    const char* recompute;
  };
  for (const Network& n : {Network{{"resnet50", 16, 224}, "none"}, Network{{"resnet50", 16, 224}, "all"},
                           Network{{"resnet20", 64, 32}, "none"}, Network{{"yolov5n", 2, 256}, "none"}}) {
    for (const char* amp : {"off", "bf16"}) {
      TrainConfig config = config_of(n.of, amp, "sgd", false);
      config.recompute = n.recompute;
      const auto plain = static_cast<double>(training::predict_memory(config, n.of.batch, n.of.image).peak);
      config.capture = true;
      const auto captured = static_cast<double>(training::predict_memory(config, n.of.batch, n.of.image).peak);
      EXPECT_LT(captured, 1.01 * plain + (2 << 20)) << n.of.model << " " << amp << " " << n.recompute;
    }
  }
}

// What the allocator keeps beyond what is in use: the heap of meta hands out its blocks as the CPU's does.
TEST(StepPlan, TheAllocatorKeepsHardlyMoreThanTheStepTakes) {
  struct Step {
    Case of;
    const char* recompute;
  };
  for (const Step& step :
       {Step{{"resnet50", 16, 224}, "none"}, Step{{"resnet50", 16, 224}, "layer1.0,layer1.1,layer1.2"},
        Step{{"resnet20", 64, 32}, "none"}, Step{{"yolov5n", 4, 640}, "none"}}) {
    for (const char* amp : {"off", "bf16"}) {
      TrainConfig config = config_of(step.of, amp, "sgd", false);
      config.recompute = step.recompute;
      config.capture = false;
      empty_memory_cache(kMeta);
      reset_peak_memory(kMeta);
      training::predict_memory(config, step.of.batch, step.of.image);
      const MemoryStats stats = memory_stats(kMeta);
      EXPECT_LT(static_cast<double>(stats.reserved_peak), 1.1 * static_cast<double>(stats.allocated_peak))
          << step.of.model << " " << amp << " " << step.recompute;
    }
  }
}

TEST(StepPlan, PredictsWhatWouldNotFit) {
  TrainConfig config;
  config.model = "resnet50";
  config.momentum = 0.9;
  config.amp = "bf16";
  const double rss = training::peak_rss_mb();
  const auto start = std::chrono::steady_clock::now();
  const StepMemory memory = training::predict_memory(config, 1024, 224);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_GT(memory.peak, std::uint64_t{40} << 30);
  EXPECT_EQ(memory.batch, std::uint64_t{1024} * (3 * 224 * 224 * 4 + 8));
  EXPECT_LT(took.count(), 120);
  EXPECT_LT(training::peak_rss_mb(), rss + 1000);
}

TEST(StepPlan, CallsAreThoseOfTheStep) {
  TrainConfig config;
  config.model = "cnn";
  config.batch_size = 8;
  config.momentum = 0.9;
  for (const char* amp : {"off", "f16", "O2"}) {
    config.amp = amp;
    const auto text = [](const std::vector<debug::TracedCall>& calls) {
      std::vector<std::string> lines;
      for (const debug::TracedCall& c : calls) {
        std::string line =
            fmt::format("{} {} {} {} {}", c.site.op, c.kernel, name(c.dtype), c.multiply_adds, c.site.device.str());
        for (const Shape& s : c.outputs) line += s.str();
        lines.push_back(line);
      }
      return lines;
    };
    EXPECT_EQ(text(training::predict_calls(config, 8)), text(training::trace_step(config))) << amp;
  }
}

TEST(StepPlan, LeavesTheGeneratorAndTheMemory) {
  TrainConfig config;
  config.model = "mlp";
  const PhiloxState random = default_generator().state();
  const std::uint64_t allocated = memory_stats(kMeta).allocated;
  training::predict_memory(config, 32);
  training::predict_calls(config, 32);
  EXPECT_EQ(default_generator().state().offset, random.offset);
  EXPECT_EQ(memory_stats(kMeta).allocated, allocated);
}

TEST(StepPlan, RefusesWhatTrainRefuses) {
  TrainConfig config;
  config.model = "nosuch";
  EXPECT_NE(test::error_of<Error>([&] { training::predict_memory(config, 8); }).find("nosuch"), std::string::npos);
  config.model = "mlp";
  EXPECT_NE(test::error_of<Error>([&] { training::predict_memory(config, 0); }), "");
}

}  // namespace
}  // namespace halfstep
