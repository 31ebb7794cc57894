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
  apply_common(o);
  const auto dtype = as_usage([&] { return train::amp_dtype(o.amp); });
  if (o.batch_size < 1) throw UsageError(fmt::format("--batch-size: expected at least 1, got {}", o.batch_size));
  std::shared_ptr<const void> holder;
  const train::Classifier classifier = train::make_classifier(o.model, holder);
  try {
    classifier.module->load_state_dict(train::load_weights(o.weights));
  } catch (const IoError&) {
    throw;
  } catch (const Error& e) {
    throw IoError(fmt::format("{}: {}", o.weights.string(), e.what()));
  }
  const auto start = std::chrono::steady_clock::now();
  const auto report =
      train::evaluate(classifier, make_dataset(load_pictures(o.data, data::Split::kTest, o.seed)), dtype, o.batch_size);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  fmt::print("{}: loss {:.4f}, top1 {:.2f}%, top5 {:.2f}% in {:.2f} s\n", o.model, report.loss, 100 * report.top1,
             100 * report.top5, seconds);
  if (!o.log_json.empty()) {
    train::JsonLog log(o.log_json);
    log.write("eval", {{"loss", report.loss},
                       {"top1", report.top1},
                       {"top5", report.top5},
                       {"seconds", seconds},
                       {"peak_rss_mb", train::peak_rss_mb()}});
  }
  return kDone;
}

}  // namespace

void add_eval(CLI::App& program, int& status) {
  auto* verb = program.add_subcommand("eval", "Evaluate a trained network on the test data");
  auto o = std::make_shared<Options>();
  add_common(*verb, *o);
  verb->add_option("--weights", o->weights, "Checkpoint, safetensors file, or folder of a run")->required();
  verb->add_option("DIR,--data", o->data, "Folder with the data set in MNIST's format (default: built-in digits)");
  verb->add_option("--amp", o->amp, "Mixed precision: off, bf16 or f16")->capture_default_str();
  verb->add_option("--batch-size", o->batch_size, "Samples of a batch")->capture_default_str();
  verb->add_option("--seed", o->seed, "Seed of the built-in data")->capture_default_str();
  verb->add_option("--log-json", o->log_json, "File for the result as a JSON line");
  verb->callback([o, &status] { status = run(*o); });
}

}  // namespace halfstep::cli
