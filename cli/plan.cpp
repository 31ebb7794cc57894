// SPDX-License-Identifier: Apache-2.0
// `halfstep plan`: what a training step takes on this machine, before it runs.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/integers.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "halfstep/core/text.h"
#include "halfstep/ops/create.h"
#include "halfstep/runtime/machine.h"
#include "halfstep/train/config.h"
#include "halfstep/train/memory_plan.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/step_plan.h"
#include "halfstep/train/step_time.h"
#include "halfstep/train/trace_step.h"

namespace halfstep::cli {
namespace {

constexpr std::uint64_t kMostPlannedBatch = 1'000'000;

struct StepPlanOptions : CommonOptions {
  std::vector<std::string> batch_sizes{"64"}, amp{"off"};
  std::int64_t image_size = 0;
  std::string optimizer = "sgd", loss_scale, recompute, memory_budget;
  bool no_capture = false, measure = false, json = false;
};

// A precision and a number of samples: a column of the table.
struct StepPlan {
  std::string amp, dtype;
  std::int64_t batch_size;
  training::StepTime time = {};
  training::StepMemory memory = {};
  std::optional<training::MemoryPlan> recomputed = {};  ///< with --recompute and --memory-budget
  double samples_per_second() const { return static_cast<double>(batch_size) / time.seconds(); }
};

training::TrainConfig config_of(const StepPlanOptions& o, const std::string& amp, std::int64_t batch_size,
                                const training::NetworkInput& input) {
  training::TrainConfig config;
  config.model = o.model;
  config.amp = amp;
  config.loss_scale = o.loss_scale;
  config.optimizer = o.optimizer;
  config.batch_size = batch_size;
  // Networks of images are trained with momentum: its traffic belongs to the step.
  if (o.optimizer == "sgd" && input.images) config.momentum = 0.9;
  config.capture = !o.no_capture;
  config.recompute = o.recompute;
  config.memory_budget = o.memory_budget;
  as_usage([&] { training::check(config); });
  return config;
}

// A unit that leaves three digits or more.
std::string time_text(double seconds) {
  const double ms = seconds * 1e3;
  return ms >= 1000 ? fmt::format("{:.2f} s", seconds) : fmt::format("{:.3g} ms", ms);
}

std::string share_text(double part, double all) {
  return fmt::format("{} {:>3.0f}%", time_text(part), all > 0 ? 100 * part / all : 0);
}

std::string memory_text(std::uint64_t bytes) {
  const double mb = static_cast<double>(bytes) * 1e-6;
  return mb >= 1000 ? fmt::format("{:.2f} GB", mb * 1e-3) : fmt::format("{:.3g} MB", mb);
}

// What of the peak is none of what stays from step to step: results that the backward pass reads, 16-bit copies of
// weights, and what kernels work in.
std::uint64_t activations(const training::StepMemory& m) {
  const std::uint64_t stays = m.parameters + m.gradients + m.optimizer + m.buffers + m.batch;
  return m.peak - std::min(m.peak, stays);
}

void print_table(const std::vector<StepPlan>& plans) {
  const bool several = std::any_of(plans.begin(), plans.end(),
                                   [&](const StepPlan& p) { return p.batch_size != plans.front().batch_size; });
  std::vector<std::string> header{""};
  for (const StepPlan& p : plans) header.push_back(several ? fmt::format("{}, {}", p.dtype, p.batch_size) : p.dtype);
  std::vector<std::vector<std::string>> rows;
  const auto row = [&](const std::string& what, auto text) {
    rows.push_back({what});
    for (const StepPlan& p : plans) rows.back().push_back(text(p));
  };
  row("time of a step", [](const StepPlan& p) { return time_text(p.time.seconds()); });
  row("samples/s", [](const StepPlan& p) { return fmt::format("{:.4g}", p.samples_per_second()); });
  row("least possible", [](const StepPlan& p) { return time_text(p.time.limit()); });
  row("of what is possible",
      [](const StepPlan& p) { return fmt::format("{:.0f}%", 100 * p.time.limit() / p.time.seconds()); });
  for (const char* kind : training::step_time_kinds()) {
    const auto part_of = [&](const StepPlan& p) {
      return std::find_if(p.time.parts.begin(), p.time.parts.end(),
                          [&](const auto& part) { return part.kind == kind; });
    };
    if (std::all_of(plans.begin(), plans.end(), [&](const StepPlan& p) { return part_of(p) == p.time.parts.end(); })) {
      continue;
    }
    row(fmt::format("  {}", kind), [&](const StepPlan& p) {
      const auto part = part_of(p);
      return part == p.time.parts.end() ? "-" : share_text(part->seconds, p.time.seconds());
    });
  }
  if (std::any_of(plans.begin(), plans.end(), [](const StepPlan& p) { return p.time.calling > 0; })) {
    row("  between kernels", [](const StepPlan& p) { return share_text(p.time.calling, p.time.seconds()); });
  }
  if (plans.front().recomputed) {
    row("modules recomputed", [](const StepPlan& p) {
      return p.recomputed->candidates > 0
                 ? fmt::format("{} of {}", p.recomputed->recomputed.size(), p.recomputed->candidates)
                 : fmt::format("{}", p.recomputed->recomputed.size());
    });
  }
  row("memory of a step", [](const StepPlan& p) { return memory_text(p.memory.peak); });
  row("  parameters", [](const StepPlan& p) { return memory_text(p.memory.parameters); });
  row("  gradients", [](const StepPlan& p) { return memory_text(p.memory.gradients); });
  row("  optimizer", [](const StepPlan& p) { return memory_text(p.memory.optimizer); });
  row("  batch and buffers", [](const StepPlan& p) { return memory_text(p.memory.batch + p.memory.buffers); });
  row("  activations and work", [](const StepPlan& p) { return memory_text(activations(p.memory)); });
  fmt::print("{}", table(header, rows));
}

nlohmann::ordered_json json_of(const StepPlan& p) {
  nlohmann::ordered_json parts = nlohmann::ordered_json::array();
  for (const training::StepTimePart& part : p.time.parts) {
    parts.push_back({{"kind", part.kind},
                     {"calls", part.calls},
                     {"ms", 1e3 * part.seconds},
                     {"limit_ms", 1e3 * part.limit},
                     {"multiply_adds", part.multiply_adds},
                     {"bytes", part.bytes}});
  }
  nlohmann::ordered_json line = {{"amp", p.amp},
                                 {"dtype", p.dtype},
                                 {"batch", p.batch_size},
                                 {"ms_per_step", 1e3 * p.time.seconds()},
                                 {"samples_per_s", p.samples_per_second()},
                                 {"limit_ms", 1e3 * p.time.limit()},
                                 {"calling_ms", 1e3 * p.time.calling},
                                 {"calls_left_out", p.time.unknown},
                                 {"parts", std::move(parts)},
                                 {"memory",
                                  {{"peak", p.memory.peak},
                                   {"parameters", p.memory.parameters},
                                   {"gradients", p.memory.gradients},
                                   {"optimizer", p.memory.optimizer},
                                   {"buffers", p.memory.buffers},
                                   {"batch", p.memory.batch}}}};
  if (p.recomputed) line["recompute"] = p.recomputed->modules();
  return line;
}

// Whose forward passes run again, as in bench: the modules that are named, or those that the budget asks for.
void choose_recomputed(StepPlan& plan, training::TrainConfig& config, std::int64_t pixels) {
  if (!config.memory_budget.empty()) {
    plan.recomputed =
        training::plan_memory(config, plan.batch_size, pixels, training::parse_bytes(config.memory_budget));
    config.recompute = plan.recomputed->modules();
    config.memory_budget.clear();
  } else if (!config.recompute.empty()) {
    const DeviceGuard nowhere(kMeta);
    plan.recomputed = training::plan_of_run(config, as_usage([&] { return training::random_task(config); })->network());
  }
}

int run(const StepPlanOptions& o) {
  refuse_many_processes("plan", ", and each would measure while the others do");
  const Device device = apply_common(o);
  if (!device.is_cpu())
    throw UsageError(fmt::format("--device: plan knows the CPU's times only, got {}", device.str()));
  if (o.optimizer != "sgd" && o.optimizer != "adam") {
    throw UsageError(fmt::format("--optimizer: expected sgd or adam, got '{}'", o.optimizer));
  }
  const training::NetworkInput input = checked_input(o.model, o.image_size);
  const std::int64_t size = o.image_size > 0 ? o.image_size : input.image_size;
  std::vector<StepPlan> plans;
  std::vector<training::TrainConfig> configs;
  for (const std::string& text : o.batch_sizes) {
    const auto batch_size = static_cast<std::int64_t>(parse_whole("--batch-size", text, 1, kMostPlannedBatch));
    for (const std::string& amp : o.amp) {
      configs.push_back(config_of(o, amp, batch_size, input));
      const training::AmpMode mode = as_usage([&] { return training::amp_mode(configs.back()); });
      const bool level = amp.starts_with('O') || amp == "auto";
      const std::string dtype = mode.dtype() ? name(*mode.dtype()) : "f32";
      plans.push_back(
          {.amp = amp, .dtype = level ? fmt::format("{} {}", amp, dtype) : dtype, .batch_size = batch_size});
    }
  }
  training::CallTimes times({.again = o.measure});
  ProgressBar bar(is_terminal(2), stderr);  // measuring takes a while, the first time
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const std::int64_t pixels = input.images ? size : 0;
    choose_recomputed(plans[i], configs[i], pixels);
    plans[i].memory = training::predict_memory(configs[i], plans[i].batch_size, pixels);
    const auto calls = training::predict_calls(configs[i], plans[i].batch_size, pixels);
    const auto progress = [&](std::size_t done, std::size_t all) {
      bar.update(fmt::format("plan {}/{}", i + 1, plans.size()), static_cast<std::int64_t>(done),
                 static_cast<std::int64_t>(all), fmt::format("{} calls measured", times.measured()));
    };
    plans[i].time = training::predict_time(calls, times, {.captured = !o.no_capture, .progress = progress});
  }
  bar.clear();
  times.save();
  const MachineInfo info = machine();
  if (o.json) {
    nlohmann::ordered_json document{{"model", o.model},
                                    {"image_size", size},
                                    {"optimizer", o.optimizer},
                                    {"device", device.str()},
                                    {"captured", !o.no_capture},
                                    {"cpu", info.cpu},
                                    {"isa", info.isa},
                                    {"threads", info.threads},
                                    {"measured", times.measured()},
                                    {"file", times.file().native()},
                                    {"plans", nlohmann::ordered_json::array()}};
    for (const StepPlan& p : plans) document["plans"].push_back(json_of(p));
    fmt::print("{}\n", document.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
    return kDone;
  }
  std::vector<std::string> sizes;
  fmt::print("{}: a training step{} with {}, {}\n", o.model,
             o.batch_sizes.size() > 1 ? std::string() : fmt::format(" on {} samples", o.batch_sizes[0]), o.optimizer,
             o.no_capture ? "call by call" : "captured and replayed");
  fmt::print("{}, {}, {} threads; {} calls measured, {} in {}\n\n", info.cpu, info.isa, info.threads, times.measured(),
             times.measured() > 0 ? "kept" : "all others known", shown_path(times.file()));
  print_table(plans);
  for (const StepPlan& p : plans) {
    if (p.time.unknown == 0) continue;
    fmt::print("\n{} calls that can't be measured by themselves are left out\n", p.time.unknown);
    break;
  }
  return kDone;
}

}  // namespace

void add_plan(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "plan", "Predict time, memory and limit of a training step on this machine");
  auto o = std::make_shared<StepPlanOptions>();
  add_common(verb, *o);
  add_fresh_image_size(verb, o->image_size);
  verb.add_list("--batch-size,-b", o->batch_sizes, "Samples of a batch; several, such as 16,32,64")
      .split(',')
      .value("N=64");
  verb.add_list("--amp", o->amp, "Precisions and levels, such as off,bf16,O2").split(',').value("TEXT=off");
  add_word(verb, "--optimizer", o->optimizer, "sgd or adam");
  add_word(verb, "--loss-scale", o->loss_scale, "As in train");
  add_training_flag(verb, "--recompute", &o->recompute);
  add_training_flag(verb, "--memory-budget", &o->memory_budget);
  verb.add_switch("--no-capture", o->no_capture, "Of steps that are not captured and replayed");
  verb.add_switch("--measure", o->measure, "Measure all calls again, in place of the times kept on this machine");
  verb.add_switch("--json", o->json, "Print one JSON document instead of the table");
  verb.run([o, &status] { status = run(*o); });
}

}  // namespace halfstep::cli
