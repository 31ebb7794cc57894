// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <chrono>

#include "cli/options.h"
#include "cli/verbs.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/json_log.h"
#include "halfstep/train/trainer.h"

namespace halfstep::cli {
namespace {

struct Options : CommonOptions {
  std::filesystem::path weights, data, log_json;
  std::string amp = "off";
  std::int64_t batch_size = 1000;
  std::uint64_t seed = 0;
};

int run(const Options& o) {
  const Device device = apply_common(o);
  const auto dtype = as_usage([&] { return train::amp_dtype(o.amp); });
  std::shared_ptr<const void> holder;
  const train::Classifier classifier = load_classifier(o.model, o.weights, holder);
  classifier.module->to(device);
  const auto test = make_dataset(load_pictures(o.data, data::Split::kTest, o.seed));
  train::JsonLog log;
  if (!o.log_json.empty()) log = train::JsonLog(o.log_json);
  const auto start = std::chrono::steady_clock::now();
  const auto report = train::evaluate(classifier, test, dtype, o.batch_size);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  fmt::print("{}: loss {:.4f}, top1 {:.2f}%, top5 {:.2f}% in {:.2f} s\n", o.model, report.loss, 100 * report.top1,
             100 * report.top5, seconds);
  log.write("eval", {{"loss", report.loss},
                     {"top1", report.top1},
                     {"top5", report.top5},
                     {"seconds", seconds},
                     {"peak_rss_mb", train::peak_rss_mb()}});
  return kDone;
}

}  // namespace

void add_eval(CLI::App& program, int& status) {
  auto* verb = program.add_subcommand("eval", "Evaluate a trained network on the test data");
  auto o = std::make_shared<Options>();
  add_common(*verb, *o);
  add_path(*verb, "--weights", o->weights, "Checkpoint, safetensors file, or folder of a run")->required();
  add_path(*verb, "DIR,--data", o->data, "Folder with the data set in MNIST's format (default: built-in digits)");
  add_word(*verb, "--amp", o->amp, "Mixed precision: off, bf16 or f16");
  add_whole(*verb, "--batch-size", o->batch_size, 1, kMostCount, "Samples of a batch");
  add_whole(*verb, "--seed", o->seed, 0, kMostSeed, "Seed of the built-in data");
  add_path(*verb, "--log-json", o->log_json, "File for the result as a JSON line");
  verb->callback([o, &status] { status = run(*o); });
}

}  // namespace halfstep::cli
