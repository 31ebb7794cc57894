// SPDX-License-Identifier: Apache-2.0
// Whole training steps, or calls of sessions, on random data: `halfstep bench mlp --amp off,bf16,f16`.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "cli/bench_inference.h"
#include "cli/integers.h"
#include "cli/options.h"
#include "cli/verbs.h"
#include "cli/weight_only.h"
#include "halfstep/core/random.h"
#include "halfstep/core/text.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/runtime/float32_precision.h"
#include "halfstep/runtime/machine.h"
#include "halfstep/runtime/tuning.h"
#include "halfstep/runtime/winograd.h"
#include "halfstep/train/config.h"
#include "halfstep/train/device_memory.h"
#include "halfstep/train/memory_plan.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/trace_step.h"
#include "halfstep/train/train_step.h"
#include "halfstep/train/trainer.h"

namespace halfstep::cli {
namespace {

// A million digits.
constexpr std::uint64_t kMostBatch = 1'000'000;
constexpr std::int64_t kMostValues = 784'000'000;

struct BenchOptions : CommonOptions {
  std::int64_t batch_size = 64;
  std::int64_t image_size = 0;
  std::vector<std::string> amp{"off"};
  int steps = 200, warmup = 20;
  std::string optimizer = "sgd", loss_scale, recompute, memory_budget;
  bool no_capture = false, inference = false, int8 = false, weight_only = false;
  int weight_bits = 8;
  std::int64_t group_size = 0;
  std::filesystem::path onnx_to;
  std::function<bool(const std::string& flag)> given;
};

constexpr double kMomentum = 0.9;
constexpr const char *kOnnxFlag = "--write-onnx", *kWeightBitsFlag = "--quant-weight-bits";

void check_mode(const BenchOptions& o) {
  if (!o.inference) {
    for (const char* flag : {kInt8Flag, kOnnxFlag, kWeightOnlyFlag, kWeightBitsFlag, kGroupSizeFlag}) {
      if (o.given(flag)) throw UsageError(fmt::format("{}: only with --inference", flag));
    }
    return;
  }
  for (const char* flag : {kWeightBitsFlag, kGroupSizeFlag}) {
    if (o.given(flag) && !o.weight_only) throw UsageError(fmt::format("{}: only with {}", flag, kWeightOnlyFlag));
  }
  for (const char* flag : {"--optimizer", "--loss-scale", "--no-capture", "--recompute", "--memory-budget"}) {
    if (o.given(flag)) throw UsageError(fmt::format("{}: of training steps, and --inference is given", flag));
  }
  std::error_code error;
  if (o.given(kOnnxFlag) && !std::filesystem::is_directory(o.onnx_to, error)) {
    throw UsageError(fmt::format("{}: expected a folder, got {}", kOnnxFlag, shown_path(o.onnx_to)));
  }
}

// One training step after another, each timed; in turn over the precisions, so that drift of the machine hits all.
struct Run {
  std::string amp;
  training::AmpMode mode;
  std::shared_ptr<training::Task> task;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::optional<training::TrainStep> train_step = {};
  std::optional<training::MemoryPlan> memory = {};
  std::vector<double> ms = {};
  double loss_first = 0, loss_last = 0;

  double step(const data::Batch& batch, bool captured) {
    const auto start = std::chrono::steady_clock::now();
    const training::StepValues values = captured ? train_step->run_captured({&batch, 1}) : train_step->run({&batch, 1});
    loss_last = values.loss().item<double>();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }
};

int run(const BenchOptions& o) {
  check_mode(o);
  const Device device = apply_common(o);
  if (o.optimizer != "sgd" && o.optimizer != "adam") {
    throw UsageError(fmt::format("--optimizer: expected sgd or adam, got '{}'", o.optimizer));
  }
  const training::NetworkInput input = checked_input(o.model, o.image_size);
  const std::int64_t size = o.image_size > 0 ? o.image_size : input.image_size;
  const std::int64_t values = training::example_input(o.model, 1, size).numel();
  // Random pictures are held in float64 and float32.
  if (o.batch_size > kMostValues / values) {
    throw UsageError(fmt::format("--batch-size: expected at most {} pictures of {} values, got {}",
                                 kMostValues / values, values, o.batch_size));
  }
  if (o.inference) {
    std::optional<quant::WeightOnlyOptions> weights;
    if (o.weight_only) weights = weight_only_options({.weight_bits = o.weight_bits}, o.group_size);
    return bench_inference({.model = o.model,
                            .device = device,
                            .batch_size = o.batch_size,
                            .image_size = size,
                            .amp = o.amp,
                            .int8 = o.int8,
                            .weights = weights,
                            .steps = o.steps,
                            .warmup = o.warmup,
                            .onnx_to = o.onnx_to});
  }
  std::vector<Run> runs;
  std::uint64_t budgets = 0;
  for (const std::string& precision : o.amp) {
    training::TrainConfig config;
    config.amp = precision;
    config.loss_scale = o.loss_scale;
    config.optimizer = o.optimizer;
    config.model = o.model;
    config.recompute = o.recompute;
    config.memory_budget = o.memory_budget;
    // Networks of images are trained with momentum: its traffic belongs to the step.
    if (o.optimizer == "sgd" && input.images) config.momentum = kMomentum;
    config.capture = !o.no_capture;
    config.batch_size = o.batch_size;
    config.images.image_size = size;
    config.images.resize = 0;
    as_usage([&] { training::check(config); });
    manual_seed(0);
    Run r{.amp = precision,
          .mode = as_usage([&] { return training::amp_mode(config); }),
          .task = as_usage([&] { return training::random_task(config); }),
          .optimizer = nullptr};
    const nn::ModuleBase& network = r.task->network();
    r.memory = training::plan_of_run(config, network);
    if (r.memory && r.memory->budget > 0) {
      training::set_recomputed(network, r.memory->modules());
      budgets += r.memory->budget;
    }
    network.to(device);
    if (r.mode.level != amp::Level::O0) amp::set_level(network, r.mode.level, r.mode.level_dtype);
    const NamedTensors parameters = network.parameters();
    if (o.optimizer == "sgd") {
      r.optimizer =
          std::make_unique<optim::SGD>(parameters, optim::SGDOptions{.lr = 0.01, .momentum = config.momentum});
    } else {
      r.optimizer = std::make_unique<optim::Adam>(parameters, optim::AdamOptions{.lr = 1e-3});
    }
    r.train_step =
        training::make_train_step(r.task, *r.optimizer, training::make_scaler(config), {.autocast = r.mode.region});
    runs.push_back(std::move(r));
  }
  const MemoryCacheLimitGuard cache_limit(o.no_capture || !device.is_cpu() ? 0 : budgets);
  reset_peak_memory(device);
  manual_seed(1);
  data::Batch batch = training::random_batch(o.model, o.batch_size, input.images ? size : 0);
  if (input.images) batch.input = batch.input.contiguous(MemoryFormat::channels_last);
  visit_tensors(batch, [&](Tensor& t) {
    if (t.defined()) t = t.to(device);  // text may have no target of its own
  });
  for (int s = 0; s < o.warmup + o.steps; ++s) {
    for (Run& r : runs) {
      const double ms = r.step(batch, !o.no_capture);
      if (s == 0) r.loss_first = r.loss_last;
      if (s >= o.warmup) r.ms.push_back(ms);
    }
  }
  for (Run& r : runs) {
    std::sort(r.ms.begin(), r.ms.end());
    const double median = r.ms[r.ms.size() / 2];
    nlohmann::ordered_json line = {{"model", o.model},
                                   {"batch", o.batch_size},
                                   {"dtype", r.mode.dtype() ? name(*r.mode.dtype()) : "f32"},
                                   {"image_size", size},
                                   {"device", device.str()},
                                   {"optimizer", o.optimizer},
                                   {"replayed", r.train_step->capture_stats().replayed},
                                   {"ms_per_step_median", median},
                                   {"ms_per_step_min", r.ms.front()},
                                   {"ms_per_step_max", r.ms.back()},
                                   {"samples_per_s", 1000 * static_cast<double>(o.batch_size) / median},
                                   {"peak_rss_mb", training::peak_rss_mb()},
                                   {"loss_first", r.loss_first},
                                   {"loss_last", r.loss_last},
                                   {"isa", machine().isa},
                                   {"cpu", machine().cpu},
                                   {"threads", machine().threads}};
    if (r.amp.starts_with('O') || r.amp == "auto") line["level"] = r.amp;
    if (r.memory) {
      line["recompute"] = r.memory->modules();
      if (r.memory->budget > 0) line["predicted_peak_mb"] = static_cast<double>(r.memory->peak) / 1e6;
    }
    // Of one precision: those of a second one would lie beside it.
    if (runs.size() == 1) {
      const MemoryStats memory = memory_stats(device);
      line["tensor_peak_mb"] = static_cast<double>(memory.allocated_peak) / 1e6;
      line["reserved_peak_mb"] = static_cast<double>(memory.reserved_peak) / 1e6;
    }
    if (winograd() != Winograd::off) line["winograd"] = name(winograd());
    if (float32_precision() != Float32Precision::highest) line["float32_precision"] = name(float32_precision());
    if (tuning()) line["tuning"] = true;
    if (!device.is_cpu()) line["device_peak_mb"] = training::device_peak_mb(device);
    fmt::print("{}\n", line.dump());
  }
  return kDone;
}

}  // namespace

void add_bench(CLI::App& program, int& status) {
  const Verb verb =
      add_verb(program, "bench", "Time training steps or inference on random data; one JSON line per precision");
  auto o = std::make_shared<BenchOptions>();
  add_common(verb, *o);
  add_fresh_image_size(verb, o->image_size);
  // Random samples of more wouldn't fit into memory.
  add_whole(verb, "--batch-size,-b", o->batch_size, 1, kMostBatch, "Samples of a batch");
  verb.add_list("--amp", o->amp, "Precisions and levels, such as off,bf16,O2").split(',').value("TEXT=off");
  add_whole(verb, "--steps", o->steps, 1, kMostCount, "Timed steps");
  add_whole(verb, "--warmup", o->warmup, 0, kMostCount, "Untimed steps before them");
  add_word(verb, "--optimizer", o->optimizer, "sgd or adam");
  add_word(verb, "--loss-scale", o->loss_scale, "As in train");
  add_training_flag(verb, "--recompute", &o->recompute);
  add_training_flag(verb, "--memory-budget", &o->memory_budget);
  verb.add_switch("--no-capture", o->no_capture, "Don't capture and replay steps");
  verb.add_switch("--inference", o->inference,
                  "Time calls of inference sessions, as in `halfstep predict`, instead of training steps");
  verb.add_switch(kInt8Flag, o->int8, "With --inference: time 8-bit integers too");
  verb.add_switch(kWeightOnlyFlag, o->weight_only,
                  "With --inference: time integer weights of linear layers too, in each precision of --amp");
  add_whole(verb, kWeightBitsFlag, o->weight_bits, 4, 8, "With --weight-only: bits of weights, 8 or 4");
  add_whole(verb, kGroupSizeFlag, o->group_size, 0, kMostCount,
            "With --weight-only: weights of a row that share a scale; 0: whole rows")
      .value("N");
  add_path(verb, kOnnxFlag, o->onnx_to,
           "With --inference: folder for MODEL.onnx and MODEL-int8.onnx, to time the same networks elsewhere");
  o->given = [verb](const std::string& flag) { return verb.count(flag) > 0; };
  verb.run([o, &status] { status = run(*o); });
}

}  // namespace halfstep::cli
