// SPDX-License-Identifier: Apache-2.0
// `halfstep plan-parallel`: what data parallel training would cost on many ranks.
#include "cli/plan_parallel.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "cli/options.h"
#include "cli/terminal.h"
#include "halfstep/core/text.h"
#include "halfstep/dist/measure_cost.h"
#include "halfstep/nn/summary.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/trace_step.h"

namespace halfstep::cli {
namespace {

constexpr int kMostPlanned = 1 << 20;
constexpr double kMebibyte = 0x1p20, kMillion = 1e6;

struct PlanOptions {
  std::string model = "resnet50", system = "dgx-a100", ranks = "8-1024", amp = "off,f16", algorithm = "fastest";
  std::string step_ms, images, buckets = "1,2,5,10,25,50,100";
  std::int64_t batch_size = 128, image_size = 0;
  std::int64_t per_machine = 0;
  std::optional<double> latency_inside, latency, bandwidth_inside, bandwidth;  // as given: us, GB/s
  double interference = 0, variation = 2;
  bool full_gradients = false, measure = false, json = false;
  std::filesystem::path figure;
};

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

std::vector<double> positive_list(const char* flag, const std::string& text) {
  std::vector<double> values;
  for (const std::string& part : split_list(text)) {
    values.push_back(parse_real(flag, part));
    if (!(values.back() > 0) || !std::isfinite(values.back()))
      throw UsageError(fmt::format("{}: expected numbers above 0, got '{}'", flag, part));
  }
  return values;
}

// `8,24`, and `8-64` for 8, 16, 32, 64.
std::vector<int> planned_ranks(const std::string& text) {
  std::vector<int> ranks;
  for (const std::string& part : split_list(text)) {
    const std::size_t dash = part.find('-', 1);
    const auto whole = [](const std::string& t) {
      return static_cast<int>(parse_whole("--ranks", t, 1, kMostPlanned));
    };
    const int first = whole(part.substr(0, dash)),
              last = dash == std::string::npos ? first : whole(part.substr(dash + 1));
    if (last < first) throw UsageError(fmt::format("--ranks: expected a range such as 8-1024, got '{}'", part));
    for (int r = first; r <= last; r *= 2) ranks.push_back(r);
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  if (ranks.empty()) throw UsageError("--ranks: expected numbers of ranks, got ''");
  return ranks;
}

struct PlannedNetwork {
  nn::Summary summary;
  double multiply_adds = 0;  // of an image
  std::int64_t image_size = 0;
};

PlannedNetwork look_at(const std::string& model, std::int64_t image_size) {
  const training::NetworkInput input = checked_input(model, image_size);
  std::shared_ptr<const void> holder;
  const training::Classifier net = training::make_classifier(model, holder);
  const Tensor images = training::random_batch(model, 1, image_size).input;
  PlannedNetwork found{.summary = nn::summary(*net.module, [&] { net.forward(images); }), .image_size = image_size};
  found.multiply_adds = static_cast<double>(found.summary.rows.at(0).multiply_adds);
  if (found.image_size == 0) found.image_size = input.image_size;
  return found;
}

// Seconds of a step of each precision on one rank.
std::vector<double> compute_seconds(const PlanOptions& o, const std::vector<std::string>& precisions,
                                    const PlanSystem& system, const PlannedNetwork& network) {
  if (!o.step_ms.empty() && !o.images.empty()) {
    throw UsageError("--step-ms and --images-per-second say the same: give one of them");
  }
  const char* flag = o.step_ms.empty() ? "--images-per-second" : "--step-ms";
  const std::vector<double> given = positive_list(flag, o.step_ms.empty() ? o.images : o.step_ms);
  if (!given.empty() && given.size() != precisions.size()) {
    throw UsageError(fmt::format("{}: expected a number for each precision of --amp, {}, got {}", flag,
                                 precisions.size(), given.size()));
  }
  std::vector<double> seconds;
  const auto batch = static_cast<double>(o.batch_size);
  std::optional<double> reference;  // multiply-adds of an image of ResNet-50
  for (std::size_t i = 0; i < precisions.size(); ++i) {
    if (!given.empty()) {
      seconds.push_back(o.step_ms.empty() ? batch / given[i] : given[i] * 1e-3);
      continue;
    }
    const double images = precisions[i] == "off" ? system.f32_images : system.f16_images;
    if (o.measure || !(images > 0)) {
      throw UsageError(fmt::format("--step-ms: needed, as `halfstep bench` prints it: {}",
                                   o.measure
                                       ? "what these machines compute in a step isn't measured"
                                       : fmt::format("no speed in {} is known of {}", precisions[i], system.name)));
    }
    if (!reference)
      reference =
          o.model == "resnet50" && o.image_size == 0 ? network.multiply_adds : look_at("resnet50", 0).multiply_adds;
    seconds.push_back(batch / images * network.multiply_adds / *reference);
  }
  return seconds;
}

dist::ClusterCost planned_cluster(const PlanOptions& o, const PlanSystem& system, dist::ProcessGroup& group) {
  dist::ClusterCost cluster = o.measure ? dist::measure_cluster(group) : cluster_of(system);
  if (o.per_machine > 0) cluster.ranks_per_machine = static_cast<int>(o.per_machine);
  const auto set = [](double& value, const std::optional<double>& given, double unit) {
    if (given) value = *given * unit;
  };
  set(cluster.inside.latency, o.latency_inside, 1e-6);
  set(cluster.between.latency, o.latency, 1e-6);
  set(cluster.inside.bandwidth, o.bandwidth_inside, 1e9);
  set(cluster.between.bandwidth, o.bandwidth, 1e9);
  // What is measured is how Halfstep reduces over MPI.
  if (o.algorithm == "ring" || (o.algorithm == "fastest" && o.measure)) {
    cluster.algorithm = dist::AllReduceAlgorithm::ring;
  } else if (o.algorithm == "tree") {
    cluster.algorithm = dist::AllReduceAlgorithm::tree;
  } else if (o.algorithm != "fastest") {
    throw UsageError(fmt::format("--algorithm: expected fastest, ring or tree, got '{}'", o.algorithm));
  }
  return cluster;
}

std::string link_text(const dist::LinkCost& link) {
  if (!(link.bandwidth > 0)) return "not measured";
  return fmt::format("{:.3g} us, {:.3g} GB/s", link.latency * 1e6, link.bandwidth * 1e-9);
}

PlanSeries plan_series(const std::string& precision, const dist::StepCost& step, const dist::ClusterCost& cluster,
                       const std::vector<int>& ranks, const std::vector<double>& buckets) {
  PlanSeries series{.precision = precision, .compute = step.seconds()};
  for (const int n : ranks) {
    const dist::BucketCost best = dist::best_bucket(step, cluster, n, buckets);
    PlanRow row{.ranks = n, .bucket = best.others, .step = dist::predict_step(step, cluster, n, best)};
    for (const double size : buckets) {
      row.of_buckets.push_back(
          dist::predict_step(step, cluster, n, {.first = std::min(size, kMebibyte), .others = size}).seconds);
    }
    series.rows.push_back(std::move(row));
  }
  return series;
}

void print_tables(const std::vector<PlanSeries>& all, const PlanOptions& o, const dist::ClusterCost& cluster,
                  const std::vector<double>& buckets) {
  for (const PlanSeries& series : all) {
    fmt::print("\n{}: a step takes {:.4g} ms without communication\n", series.precision, 1e3 * series.compute);
    std::vector<std::string> header{"ranks",      "machines", "bucket MiB", "step ms", "sending ms",
                                    "not hidden", "waiting",  "efficiency", "images/s"};
    std::vector<std::vector<std::string>> rows;
    for (const PlanRow& row : series.rows) {
      const int machines = (row.ranks + cluster.ranks_per_machine - 1) / cluster.ranks_per_machine;
      rows.push_back({std::to_string(row.ranks), std::to_string(machines), fmt::format("{:g}", row.bucket / kMebibyte),
                      fmt::format("{:.2f}", 1e3 * row.step.seconds),
                      fmt::format("{:.2f}", 1e3 * row.step.communication),
                      fmt::format("{:.2f}", 1e3 * row.step.exposed), fmt::format("{:.2f}", 1e3 * row.step.waiting),
                      fmt::format("{:.1f}%", 100 * row.step.efficiency()),
                      fmt::format("{:.0f}", row.ranks * static_cast<double>(o.batch_size) / row.step.seconds)});
    }
    fmt::print("{}", table(header, rows));
    if (buckets.size() < 2) continue;
    header = {"ms of a step, by MiB"};
    for (const double b : buckets) header.push_back(fmt::format("{:g}", b / kMebibyte));
    rows.clear();
    for (const PlanRow& row : series.rows) {
      rows.push_back({fmt::format("{} rank{}", row.ranks, row.ranks == 1 ? "" : "s")});
      for (const double seconds : row.of_buckets) rows.back().push_back(fmt::format("{:.2f}", 1e3 * seconds));
    }
    fmt::print("\n{}", table(header, rows));
  }
}

void print_json(const std::vector<PlanSeries>& all, const PlanOptions& o, const dist::ClusterCost& cluster,
                const PlannedNetwork& network) {
  using Json = nlohmann::ordered_json;
  const auto link = [](const dist::LinkCost& l) {
    return Json{{"latency_us", l.latency * 1e6}, {"bandwidth_gbs", l.bandwidth * 1e-9}};
  };
  Json document{{"model", o.model},
                {"parameters", network.summary.rows[0].parameters},
                {"batch_size", o.batch_size},
                {"ranks_per_machine", cluster.ranks_per_machine},
                {"inside", link(cluster.inside)},
                {"between", link(cluster.between)},
                {"rows", Json::array()}};
  for (const PlanSeries& series : all) {
    for (const PlanRow& row : series.rows) {
      document["rows"].push_back({{"precision", series.precision},
                                  {"ranks", row.ranks},
                                  {"bucket_mb", row.bucket / kMebibyte},
                                  {"buckets", row.step.buckets},
                                  {"compute_ms", 1e3 * series.compute},
                                  {"step_ms", 1e3 * row.step.seconds},
                                  {"communication_ms", 1e3 * row.step.communication},
                                  {"exposed_ms", 1e3 * row.step.exposed},
                                  {"waiting_ms", 1e3 * row.step.waiting},
                                  {"efficiency", row.step.efficiency()},
                                  {"samples_per_s", row.ranks * static_cast<double>(o.batch_size) / row.step.seconds}});
    }
  }
  fmt::print("{}\n", document.dump());
}

int plan(const PlanOptions& o) {
  dist::ProcessGroup group;
  if (o.measure) {
    if (!one_of_several("plan-parallel")) {
      throw UsageError(
          "--measure: start it on several processes, such as `halfstep launch --nproc-per-node 2 "
          "plan-parallel --measure --step-ms 100,80`");
    }
    group = dist::ProcessGroup::init();
    g_rank = group.rank();
  } else {
    refuse_many_processes("plan-parallel", "; --measure measures what is between them");
  }
  const PlanSystem& system = plan_system(o.system);
  const std::vector<int> ranks = planned_ranks(o.ranks);
  const std::vector<std::string> precisions = split_list(o.amp);
  for (const std::string& p : precisions) {
    if (p != "off" && p != "f16" && p != "bf16") {
      throw UsageError(fmt::format("--amp: expected off, f16 and bf16, with commas between, got '{}'", o.amp));
    }
  }
  if (precisions.empty()) throw UsageError("--amp: expected a precision, got ''");
  std::vector<double> buckets = positive_list("--buckets-mb", o.buckets);
  if (buckets.empty()) throw UsageError("--buckets-mb: expected sizes, got ''");
  for (double& b : buckets) b *= kMebibyte;
  std::sort(buckets.begin(), buckets.end());
  const PlannedNetwork network = look_at(o.model, o.image_size);
  const std::vector<double> seconds = compute_seconds(o, precisions, system, network);
  const dist::ClusterCost cluster = planned_cluster(o, system, group);
  if (!(cluster.between.bandwidth > 0) && ranks.back() > cluster.ranks_per_machine) {
    throw UsageError(
        fmt::format("--bandwidth: needed for {} ranks, {} on a machine, since all of this job's are on one",
                    ranks.back(), cluster.ranks_per_machine));
  }
  if (group.rank() > 0) return kDone;  // what is wrong is wrong on all ranks

  std::vector<PlanSeries> all;
  for (std::size_t i = 0; i < precisions.size(); ++i) {
    dist::StepCost step = dist::step_cost(network.summary, seconds[i]);
    const bool low = precisions[i] != "off", compressed = low && !o.full_gradients;
    step.sent = compressed ? 0.5 : 1;
    step.interference = o.interference;
    step.variation = o.variation / 100;
    all.push_back(
        plan_series(low ? fmt::format("{}, gradients in {}", precisions[i], compressed ? precisions[i] : "f32")
                        : std::string("f32"),
                    step, cluster, ranks, buckets));
  }
  const std::string what =
      fmt::format("{}: {:.3g} million parameters, {} samples a rank", o.model,
                  static_cast<double>(network.summary.rows[0].parameters) / kMillion, o.batch_size);
  const std::string where = o.measure ? fmt::format("measured by {} ranks, {}", group.size(), group.library())
                                      : fmt::format("{} ({})", system.name, system.description);
  if (o.json) {
    print_json(all, o, cluster, network);
  } else {
    fmt::print("{}\n{}\n", what, where);
    fmt::print("inside a machine of {}: {}; between machines: {}\n", cluster.ranks_per_machine,
               link_text(cluster.inside), link_text(cluster.between));
    if (o.step_ms.empty() && o.images.empty()) fmt::print("speed of a rank: {}\n", system.source);
    print_tables(all, o, cluster, buckets);
  }
  if (!o.figure.empty()) {
    draw_plan({.title = fmt::format("Data parallel training of {} on {}", o.model,
                                    o.measure ? "these machines" : system.name),
               .subtitle = fmt::format("{} samples a rank; {}; buckets of the best size at each number of ranks",
                                       o.batch_size, o.measure ? where : system.description),
               .series = all,
               .buckets = buckets})
        .save(o.figure);
    if (!o.json) fmt::print("\n{}\n", shown_path(o.figure));
  }
  return kDone;
}

// `--flag X`, which is known to have been given.
void add_given(const Verb& verb, const char* name, std::optional<double>& value, const FlagRange& range,
               const char* help) {
  const auto read = [name, range, &value](const std::string& text) {
    value = parse_real(name, text);
    if (!range.contains(*value)) {
      throw UsageError(fmt::format("{}: expected {}, got {}", name, range.text(false), text));
    }
  };
  add_flag(verb, {.names = name, .field = training::FlagSetter(read), .help = help, .value = "X"});
}

}  // namespace

void add_plan_parallel(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "plan-parallel", "Predict the step time of data parallel training on many ranks");
  const auto o = std::make_shared<PlanOptions>();
  add_word(verb, "MODEL", o->model, "Network");
  add_word(verb, "--ranks", o->ranks, "Numbers of ranks: 8-1024 doubles from 8 to 1024; 8,24,48 takes these three");
  add_word(verb, "--amp", o->amp, "Precisions, separated by commas: off, f16, bf16");
  add_training_flag(verb, "--batch-size", &o->batch_size, "Samples per rank in a step");
  add_fresh_image_size(verb, o->image_size);
  std::vector<std::string> names;
  for (const PlanSystem& s : plan_systems()) names.emplace_back(s.name);
  add_word(verb, "--system", o->system, fmt::format("Machines: {}", fmt::join(names, ", ")));
  add_word(verb, "--step-ms", o->step_ms,
           "Milliseconds of a rank's step, one for each precision, instead of the speed of --system");
  add_word(verb, "--images-per-second", o->images,
           "Samples per second of a rank, one for each precision, instead of --step-ms");
  add_whole(verb, "--ranks-per-machine", o->per_machine, 1, kMostPlanned,
            "Ranks per machine, instead of those of --system");
  const FlagRange latency = FlagRange::at_least(0), bandwidth = FlagRange::above(0);
  add_given(verb, "--latency-inside", o->latency_inside, latency,
            "Latency of a message inside a machine, in microseconds");
  add_given(verb, "--bandwidth-inside", o->bandwidth_inside, bandwidth,
            "Bandwidth of a rank inside a machine, in one direction, in GB/s (1e9 bytes)");
  add_given(verb, "--latency", o->latency, latency, "Latency of a message between machines, in microseconds");
  add_given(verb, "--bandwidth", o->bandwidth, bandwidth,
            "Bandwidth of a machine to others, in one direction, in GB/s");
  add_word(verb, "--algorithm", o->algorithm, "All-reduce algorithm: fastest, ring or tree");
  add_flag(verb, {.names = "--interference",
                  .field = &o->interference,
                  .help = "Share of a processor that communication takes from the backward pass",
                  .range = FlagRange::from_to(0, 1)});
  add_flag(verb,
           {.names = "--variation",
            .field = &o->variation,
            .help = "Percent by which a rank's computing time varies (standard deviation): all wait for the slowest",
            .range = FlagRange::from_to(0, 100)});
  add_word(verb, "--buckets-mb", o->buckets, "Bucket sizes to compare, in MiB");
  verb.add_switch("--full-gradients", o->full_gradients, "Send gradients in float32 in f16 and bf16 too");
  verb.add_switch("--measure", o->measure,
                  "Measure latency and bandwidth between the processes of this job (mpirun, launch)");
  add_path(verb, "--figure", o->figure, "Draw efficiency and step time: FILE.svg or FILE.png");
  verb.add_switch("--json", o->json, "Print one JSON document instead of the tables");
  verb.run([o, &status] { status = plan(*o); });
}

}  // namespace halfstep::cli
