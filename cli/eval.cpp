// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "cli/fold.h"
#include "cli/integers.h"
#include "cli/options.h"
#include "cli/precision.h"
#include "cli/progress.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "halfstep/train/device_memory.h"
#include "halfstep/train/json_log.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/trainer.h"

namespace halfstep::cli {
namespace {

struct EvalOptions : TrainedOptions {
  training::TrainConfig config;  // of which flags of training are taken
  std::filesystem::path data, log_json;
  std::string amp;
  std::int64_t batch_size = 0;
  std::int64_t print_freq = 10;
  int workers = 1;
  std::uint64_t seed = 0;
  bool fold = false, int8 = false;
};

// Of the flags of training those that an evaluation takes.
std::vector<Flag> evaluation_flags(training::TrainConfig& config) {
  std::vector<Flag> all = training::flags(config);
  std::erase_if(all, [](const Flag& f) { return !f.evaluation; });
  return all;
}

int run(EvalOptions& o) {
  if (o.data.empty()) o.data = take_model_for_path(o.model);
  const Device device = apply_common(o);
  if (!o.log_json.empty()) refuse_many_processes("eval");
  training::check_log(o.log_json, {}, {o.weights, o.data});
  check_precision(o.amp);
  Loaded loaded = load_classifier(o.model, o.weights);
  const training::DataKind& kind = training::data_of(o.model);
  const std::vector<Flag> given = evaluation_flags(o.config);
  for (const Flag& row : given) {
    if (o.pictures.count(row.name()) > 0 && !training::takes(o.model, row)) {
      const std::string of = row.data.substr(0, row.data.find(','));
      throw UsageError(fmt::format("{}: {} is no network of {}", row.name(), o.model, of));
    }
  }
  const bool images = kind.images;
  if (images) {
    resolve_images(o.pictures, o.model, loaded);
    o.config.images = o.pictures.images;
  }
  // Before the precision: at some levels networks compute with rounded copies of their weights.
  std::string folded = o.fold ? fold_network(loaded, o.model, images ? o.pictures.images.image_size : 0) : "";
  if (o.int8) folded += use_integers(loaded, o.amp);
  const Precision precision = o.int8 ? Precision() : set_precision(loaded, o.amp);
  const auto seed = o.pictures.count("--seed") > 0 ? std::optional(o.seed) : std::nullopt;
  const DataPlace place = place_of_data(loaded, o.data, seed);
  fmt::print("evaluating {} on {}{}{}\n", loaded.text(o.model), place.text(loaded), precision.said, folded);
  std::fflush(stdout);
  training::TrainConfig c =
      data_config(o.model, loaded, place, images ? &o.pictures.images : nullptr, o.batch_size, device);
  const std::vector<Flag> used = evaluation_flags(c);
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (o.pictures.count(used[i].name()) > 0) training::copy_value(given[i], used[i]);
  }
  if (kind.check) as_usage([&] { kind.check(c); });
  training::RunData data = training::load_data(c, false);
  if (!data.classes.empty()) check_classes(loaded, data.classes, o.weights, place.folder);
  // A kind of data may have no checksums.
  if (const auto now = data.checksums.find("test"); now != data.checksums.end()) {
    check_same_data(loaded, place, now->first, now->second);
  }
  if (!loaded.classes.empty()) data.classes = loaded.classes;
  const std::shared_ptr<training::Task> task = training::make_task(c, data, loaded.network);
  task->network().to(device);
  training::JsonLog log;
  if (!o.log_json.empty()) log = training::JsonLog(o.log_json);
  training::EvalOptions options{.autocast = precision.region,
                                .batch_size = o.batch_size > 0 ? o.batch_size : c.eval_batch_size,
                                .workers = std::max(o.workers, 1),
                                .prefetch = c.prefetch,
                                .read_every = o.print_freq > 0 ? static_cast<int>(o.print_freq) : 100};
  if (kind.lines && o.print_freq > 0) {
    options.on_batch = [&](const training::EvalProgress& p) {
      if ((p.batch - 1) % o.print_freq != 0 && p.batch != p.batches) return;
      fmt::print("{}\n", eval_line(p));
      std::fflush(stdout);
    };
  }
  training::ResultTable classes_table;
  options.table = &classes_table;
  const auto start = std::chrono::steady_clock::now();
  const auto report = training::evaluate(*task, data.test, options);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (kind.lines) fmt::print("{}\n", accuracy_line(report.metrics));
  for (const auto& damaged : data.damaged) {
    if (damaged() > 0) complain(fmt::format("{} pictures could not be read", damaged()));
  }
  if (!classes_table.rows.empty()) {
    fmt::print("{}{}{}\n", table(classes_table.header, classes_table.rows), classes_table.note,
               classes_table.note.empty() ? "" : "\n");
  }
  fmt::print("{}: {} in {:.2f} s\n", o.model, results_text(report.metrics), seconds);
  training::JsonLog::Fields fields;
  training::add_metrics(fields, report.metrics);
  fields.insert(fields.end(), {{"seconds", seconds}, {"peak_rss_mb", training::peak_rss_mb()}});
  if (!device.is_cpu()) fields.emplace_back("device_peak_mb", training::device_peak_mb(device));
  log.write("eval", fields);
  return kDone;
}

}  // namespace

void add_eval(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "eval", "Evaluate a trained network on the test data");
  auto o = std::make_shared<EvalOptions>();
  add_trained(verb, *o);
  add_path(verb, "DIR,--data", o->data,
           "Folder with the data set: MNIST's format for mlp, else val or test with class folders, list files or "
           "archives (default: the data of the run; for mlp, where none is known, the built-in digits)");
  add_image_sizes(verb, o->pictures);
  for (const Flag& row : evaluation_flags(o->config)) {
    if (!verb.has(row.name())) add_flag(verb, row);
  }
  add_training_flag(verb, "--workers", &o->workers);
  add_whole(verb, "--print-freq,-p", o->print_freq, 0, kMostCount, "Batches between two lines; 0: none");
  add_precision(verb, o->amp);
  add_training_flag(verb, "--batch-size", &o->batch_size);
  add_data_seed(verb, o->seed);
  add_fold(verb, o->fold);
  add_int8(verb, o->int8);
  add_path(verb, "--log-json", o->log_json, "File for the result as a JSON line");
  verb.run([o, &status] { status = run(*o); });
}

}  // namespace halfstep::cli
