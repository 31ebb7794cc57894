// SPDX-License-Identifier: Apache-2.0
// Blocks that recompute in training, and which of them a budget of memory asks for.
#include "halfstep/train/memory_plan.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <numeric>

#include "halfstep/amp/level.h"
#include "halfstep/core/random.h"
#include "halfstep/models/registry.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/train/optimizer.h"
#include "halfstep/train/quantize.h"
#include "halfstep/train/step_plan.h"
#include "halfstep/train/trace_step.h"
#include "halfstep/train/train_step.h"
#include "tests/support/errors.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

using test::error_of;
using training::MemoryPlan;
using training::TrainConfig;
using Paths = std::vector<std::string>;

// ----------------------------------------------------------------------------------------------- sizes and modules

TEST(MemoryPlan, ReadsSizes) {
  EXPECT_EQ(training::parse_bytes("1GB"), 1000000000U);
  EXPECT_EQ(training::parse_bytes("800MB"), 800000000U);
  EXPECT_EQ(training::parse_bytes("1.5GB"), 1500000000U);
  EXPECT_EQ(training::parse_bytes("2GiB"), 2147483648U);
  EXPECT_EQ(training::parse_bytes("64KiB"), 65536U);
  EXPECT_EQ(training::parse_bytes("123456"), 123456U);
  for (const char* wrong : {"", "GB", "-1GB", "0", "0MB", "1 GB", "1XB", "1GB2", "nan", "inf", "1e400", "99999999TB"}) {
    EXPECT_NE(error_of<Error>([&] { training::parse_bytes(wrong); }).find("expected a size such as 1GB"),
              std::string::npos)
        << wrong;
  }
}

TEST(MemoryPlan, FindsTheBlocksThatNetworksRepeat) {
  const auto blocks = [](const char* model) {
    return training::recompute_candidates(*models::make_model(model).module);
  };
  EXPECT_EQ(blocks("resnet18"),
            (Paths{"layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0", "layer3.1", "layer4.0", "layer4.1"}));
  EXPECT_EQ(blocks("resnet50").size(), 16U);
  EXPECT_EQ(blocks("mlp"), Paths());
  EXPECT_EQ(blocks("cnn"), Paths());
  const auto detector = training::random_task({.model = "yolov5n"});
  const Paths found = training::recompute_candidates(detector->network());
  EXPECT_GT(found.size(), 15U);
  EXPECT_EQ(found.front(), "model.0");
  // A list of plain layers is a block.
  struct Stages : nn::Module<Stages> {
    nn::Sequential first = child("first", nn::Sequential{nn::Linear{{.in = 4, .out = 4}}, nn::ReLU{}});
    nn::Sequential second = child("second", nn::Sequential{nn::Linear{{.in = 4, .out = 4}}, nn::ReLU{}});
    nn::Linear last = child("last", nn::Linear{{.in = 4, .out = 4}});
    Tensor forward(const Tensor& x) const { return last(second(first(x))); }
  };
  EXPECT_EQ(training::recompute_candidates(Stages()), (Paths{"first", "second"}));
}

TEST(MemoryPlan, SetsModulesByPath) {
  const auto model = models::make_model("resnet20");
  const nn::ModuleBase& network = *model.module;
  const auto recomputed = [&] {
    Paths result;
    network.apply([&](const std::string& path, const nn::ModuleBase& m) {
      if (m.is_recomputed()) result.push_back(path);
    });
    return result;
  };
  training::set_recomputed(network, "layer1.0,layer2.1.bn1");
  EXPECT_EQ(recomputed(), (Paths{"layer1.0", "layer2.1.bn1"}));
  training::set_recomputed(network, "");
  EXPECT_EQ(recomputed().size(), 2U);
  training::set_recomputed(network, "all");
  EXPECT_EQ(recomputed(), training::recompute_candidates(network));
  training::set_recomputed(network, "none");
  EXPECT_EQ(recomputed(), Paths());
  for (const char* wrong : {"layer9", "layer1.0,", "layer1.0 ,layer1.1", "ALL"}) {
    const std::string text = error_of<Error>([&] { training::set_recomputed(network, wrong); });
    EXPECT_NE(text.find("--recompute: expected all, none or paths of modules such as layer1.0, "), std::string::npos)
        << text;
  }
  EXPECT_EQ(recomputed(), Paths());
  const std::string text = error_of<Error>([] { training::set_recomputed(*models::make_model("mlp").module, "all"); });
  EXPECT_NE(text.find("has no blocks that repeat"), std::string::npos) << text;
}

// ------------------------------------------------------------------------------------------------------ same training

struct Outcome {
  std::vector<double> values;
  std::uint64_t replayed = 0;
  std::string why;  // it wasn't
};

// Steps of a network that the configuration names, on random batches.
Outcome trained(const TrainConfig& config, int steps = 4) {
  manual_seed(1);
  const auto task = training::random_task(config);
  const nn::ModuleBase& network = task->network();
  if (config.quantization.is_on()) training::prepare_quantization(config, *task);
  const training::AmpMode mode = training::amp_mode(config);
  if (mode.level != amp::Level::O0) amp::set_level(network, mode.level, mode.level_dtype);
  const auto optimizer = training::make_optimizer(config, network.parameters());
  training::TrainStep step = training::make_train_step(task, *optimizer, training::make_scaler(config),
                                                       {.autocast = mode.region, .clip_norm = config.clip_norm});
  network.train();
  manual_seed(2);
  Outcome result;
  for (int i = 0; i < steps; ++i) {
    const data::Batch batch = training::random_batch(config.model, config.batch_size);
    const training::StepValues values = config.capture ? step.run_captured({&batch, 1}) : step.run({&batch, 1});
    result.values.push_back(values.loss().item<double>());
    result.values.push_back(values.scale.item<double>());
  }
  for (const NamedTensor& p : network.parameters()) {
    for (const double v : p.tensor.grad().to_vector<double>()) result.values.push_back(v);
  }
  for (const auto& tensor : test::values(network)) {
    result.values.insert(result.values.end(), tensor.begin(), tensor.end());
  }
  result.replayed = step.capture_stats().replayed;
  result.why = step.why_not_captured();
  return result;
}

TEST(Recomputed, NetworksTrainToTheSameBits) {
  struct Case {
    const char* model;
    const char* modules;
    std::int64_t batch;
  };
  for (const Case& c : {Case{"resnet20", "all", 4}, Case{"resnet20", "layer1,layer2.0,fc", 4},
                        Case{"cnn", "conv1,bn1,bn2,conv3", 8}, Case{"mlp", "fc1,fc2", 8}}) {
    for (const char* amp : {"off", "bf16", "f16", "O2"}) {
      for (const bool capture : {false, true}) {
        TrainConfig config{.model = c.model, .batch_size = c.batch, .momentum = 0.9, .amp = amp, .capture = capture};
        const Outcome plain = trained(config);
        config.recompute = c.modules;
        const Outcome again = trained(config);
        EXPECT_TRUE(again.values == plain.values) << c.model << " " << c.modules << " " << amp << " " << capture;
        EXPECT_EQ(again.replayed, plain.replayed) << c.model << " " << amp << ": " << again.why;
        EXPECT_EQ(again.replayed > 0, capture);
      }
    }
  }
}

// Ranges are observed once, and the second run has those of the first.
TEST(Recomputed, QuantizedNetworksTrainToTheSameBits) {
  for (const bool learned : {false, true}) {
    for (const bool capture : {false, true}) {
      TrainConfig config{.model = "resnet20", .batch_size = 4, .momentum = 0.9};
      config.quantization.on = true;
      config.quantization.learned = learned;
      config.capture = capture;
      const Outcome plain = trained(config);
      config.recompute = "all";
      EXPECT_TRUE(trained(config).values == plain.values) << learned << " " << capture;
    }
  }
}

// A run that stops and goes on, with and without.
struct Dropping : nn::Module<Dropping> {
  struct Block : nn::Module<Block> {
    nn::Linear fc = child("fc", nn::Linear{{.in = 12, .out = 12}});
    nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 12}});
    Tensor forward(const Tensor& x) const { return x + dropout(norm(fc(x), Activation::relu), 0.5, is_training()); }
  };
  nn::Sequential blocks = child("blocks", nn::Sequential{Block(), Block(), Block()});
  nn::Linear head = child("head", nn::Linear{{.in = 12, .out = 4}});
  Tensor forward(const Tensor& x) const { return head(blocks(x)); }
};

TEST(Recomputed, RunsResumeToTheSameBits) {
  const test::Samples samples(64, 12, 4, 1);
  manual_seed(4);
  const Dropping start;
  const auto folder = std::filesystem::path(testing::TempDir()) / "recompute_resume";
  std::filesystem::remove_all(folder);
  TrainConfig config{.epochs = 2, .batch_size = 16, .lr = 0.1, .momentum = 0.9, .amp = "bf16", .workers = 0};
  const auto run = [&](const char* recompute, const TrainConfig& of, std::int64_t stop_after) {
    TrainConfig c = of;
    c.recompute = recompute;
    const Dropping net = nn::clone(start);
    manual_seed(9);
    const auto recorded = test::run(c, net, samples.dataset(), samples.dataset(), stop_after);
    return std::pair(recorded.losses(), test::values(net));
  };
  const auto whole = run("", config, 0);
  EXPECT_EQ(run("all", config, 0), whole);
  config.out = folder;
  const auto first = run("blocks.0,blocks.2", config, 3);
  config.resume = folder;
  const auto rest = run("all", config, 0);
  std::vector<double> losses = first.first;
  losses.insert(losses.end(), rest.first.begin(), rest.first.end());
  EXPECT_EQ(losses, whole.first);
  EXPECT_EQ(rest.second, whole.second);
  std::filesystem::remove_all(folder);
}

// ------------------------------------------------------------------------------------------------------------- choice

// A chain of blocks: what they keep, what their input takes, and what they cost.
struct Chain {
  std::vector<double> kept, input, cost;

  // The most at a time: everything kept at the end of the forward pass, or a block's second run.
  std::uint64_t peak(const std::vector<bool>& again) const {
    double below = 0, most = 0;
    for (std::size_t i = 0; i < kept.size(); ++i) {
      most = std::max(most, below + kept[i]);
      below += again[i] ? input[i] : kept[i];
    }
    return static_cast<std::uint64_t>(1000 + std::max(most, below));
  }
  std::vector<training::RecomputeCandidate> blocks() const {
    std::vector<training::RecomputeCandidate> result;
    for (std::size_t i = 0; i < kept.size(); ++i) {
      result.push_back({.path = std::to_string(i), .cost = cost[i], .alike = std::to_string(i)});
    }
    return result;
  }
};

TEST(MemoryPlan, ChoosesTheCheapestBlocksThatFit) {
  RandomStream random(3);
  int met = 0, optimal = 0;
  for (int round = 0; round < 60; ++round) {
    Chain chain;
    const std::size_t n = 4 + round % 6;
    for (std::size_t i = 0; i < n; ++i) {
      chain.kept.push_back(static_cast<double>(500 + random() % 4000));
      chain.input.push_back(static_cast<double>(50 + random() % 400));
      chain.cost.push_back(static_cast<double>(1 + random() % 50));
    }
    const std::uint64_t none = chain.peak(std::vector<bool>(n, false)), all = chain.peak(std::vector<bool>(n, true));
    const std::uint64_t budget = all + (none - all) * static_cast<std::uint64_t>(round % 10) / 10;
    double best = INFINITY;
    for (unsigned set = 0; set < 1U << n; ++set) {
      std::vector<bool> again;
      double cost = 0;
      for (std::size_t i = 0; i < n; ++i) {
        again.push_back((set >> i & 1) != 0);
        if (again.back()) cost += chain.cost[i];
      }
      if (chain.peak(again) <= budget) best = std::min(best, cost);
    }
    int calls = 0;
    const MemoryPlan plan = training::choose_recomputed(
        chain.blocks(),
        [&](const std::vector<bool>& again) {
          ++calls;
          return chain.peak(again);
        },
        budget);
    double cost = 0;
    std::vector<bool> chosen(n, false);
    for (const std::string& path : plan.recomputed) {
      chosen[std::stoul(path)] = true;
      cost += chain.cost[std::stoul(path)];
    }
    EXPECT_EQ(plan.peak, chain.peak(chosen));
    EXPECT_EQ(plan.peak_without, none);
    EXPECT_LE(plan.peak, budget) << round;
    EXPECT_LE(calls, 40);
    EXPECT_LE(cost, 1.25 * best) << round;
    ++met;
    optimal += cost <= best ? 1 : 0;
  }
  EXPECT_GE(optimal, met * 9 / 10);
}

TEST(MemoryPlan, TakesNothingWhereAllFitsAndTheLeastWhereNothingDoes) {
  const Chain chain{.kept = {1000, 1000, 1000, 1000}, .input = {10, 10, 10, 10}, .cost = {1, 1, 1, 1}};
  const auto choose = [&](std::uint64_t budget) {
    return training::choose_recomputed(
        chain.blocks(), [&](const std::vector<bool>& again) { return chain.peak(again); }, budget);
  };
  EXPECT_EQ(choose(5000).recomputed, Paths());
  EXPECT_EQ(choose(4999).recomputed.size(), 1U);
  const MemoryPlan least = choose(100);
  EXPECT_EQ(least.peak, 2030U);
  EXPECT_GT(least.peak, 100U);
}

// The least that an error names doesn't depend on the budget, and a budget of as much is met.
TEST(MemoryPlan, FindsTheLeastWhateverTheBudget) {
  // The inputs of some blocks are larger than what they keep: the least leaves these out.
  const Chain chain{.kept = {900, 200, 700, 150, 500, 200, 900, 300},
                    .input = {100, 300, 100, 250, 100, 220, 100, 200},
                    .cost = {4, 1, 3, 1, 2, 1, 2, 1}};
  const std::size_t n = chain.kept.size();
  std::uint64_t least = ~std::uint64_t{0};
  for (unsigned bits = 0; bits < 1U << n; ++bits) {
    std::vector<bool> again(n);
    for (std::size_t i = 0; i < n; ++i) again[i] = (bits >> i & 1U) != 0;
    least = std::min(least, chain.peak(again));
  }
  for (const std::uint64_t budget : {least, least - 1, least * 9 / 10, least / 2, std::uint64_t{1}}) {
    const MemoryPlan plan = training::choose_recomputed(
        chain.blocks(), [&](const std::vector<bool>& again) { return chain.peak(again); }, budget);
    EXPECT_EQ(plan.peak, least) << budget;
  }
}

// ---------------------------------------------------------------------------------------------------- prediction

std::uint64_t measured(const TrainConfig& config) { return training::measure_memory(config, config.batch_size).peak; }

void expect_close(std::uint64_t predicted, std::uint64_t got, const std::string& what) {
  EXPECT_NEAR(static_cast<double>(predicted), static_cast<double>(got), 0.02 * static_cast<double>(got)) << what;
}

TEST(MemoryPlan, PredictsWhatRecomputationSaves) {
  for (const char* amp : {"off", "bf16"}) {
    for (const bool capture : {false, true}) {
      TrainConfig config{.model = "resnet20", .batch_size = 16, .momentum = 0.9, .amp = amp, .capture = capture};
      std::uint64_t last = ~std::uint64_t{0};
      for (const char* modules : {"none", "layer1.0,layer1.1", "all"}) {
        config.recompute = modules;
        const std::uint64_t predicted = training::predict_memory(config, config.batch_size).peak;
        expect_close(predicted, measured(config), fmt::format("{} {} {}", amp, capture, modules));
        EXPECT_LT(predicted, last) << modules;
        last = predicted;
      }
    }
  }
}

TEST(MemoryPlan, MeetsABudget) {
  TrainConfig config{.model = "resnet20", .batch_size = 16, .momentum = 0.9, .amp = "bf16"};
  config.recompute = "none";
  const std::uint64_t without = training::predict_memory(config, 16).peak;
  config.recompute = "all";
  const std::uint64_t all = training::predict_memory(config, 16).peak;
  config.recompute.clear();
  manual_seed(8);
  const auto place = default_generator().state();
  const std::uint64_t budget = all + (without - all) / 2;
  const MemoryPlan plan = training::plan_memory(config, 16, 0, budget);
  EXPECT_EQ(default_generator().state(), place);
  EXPECT_LE(plan.peak, budget);
  EXPECT_EQ(plan.peak_without, without);
  EXPECT_FALSE(plan.recomputed.empty());
  EXPECT_LT(plan.recomputed.size(), plan.candidates);
  EXPECT_GT(plan.extra, 0);
  EXPECT_LT(plan.extra, 0.3);
  config.recompute = plan.modules();
  expect_close(plan.peak, measured(config), plan.text());
  config.recompute.clear();
  EXPECT_EQ(training::plan_memory(config, 16, 0, without).recomputed, Paths());
  // An average of the weights is more to hold.
  config.ema = 0.9;
  EXPECT_GT(training::plan_memory(config, 16, 0, 2 * without).peak, without);
  config.ema = 0;
  const std::string text = error_of<Error>([&] { training::plan_memory(config, 16, 0, all / 2); });
  EXPECT_NE(text.find("--memory-budget: expected at least "), std::string::npos) << text;
  EXPECT_NE(text.find("the least that a step of resnet20 on 16 samples needs with "), std::string::npos) << text;
}

// The result of a batch norm that only a pooling reads isn't kept for anything else: recomputing that layer, which
// multiplies no matrices, is the first thing to do.
TEST(MemoryPlan, ChoosesANormBeforeAPooling) {
  TrainConfig config{.model = "resnet18", .batch_size = 4, .momentum = 0.9};
  config.recompute = "none";
  const std::uint64_t without = training::predict_memory(config, 4, 64).peak;
  config.recompute = "bn1";
  const std::uint64_t with = training::predict_memory(config, 4, 64).peak;
  constexpr std::uint64_t kResult = 4 * 64 * 32 * 32 * 4;
  EXPECT_NEAR(static_cast<double>(without - with), static_cast<double>(kResult), 0.05 * kResult);
  config.recompute.clear();
  const MemoryPlan plan = training::plan_memory(config, 4, 64, without - 1);
  EXPECT_EQ(plan.recomputed, Paths{"bn1"});
  EXPECT_EQ(plan.candidates, 9U);  // and 8 blocks
  EXPECT_EQ(plan.peak, with);
  // The least that is named is the same whatever was asked for, and is enough.
  const std::string least = error_of<Error>([&] { training::plan_memory(config, 4, 64, 1); });
  const std::size_t at = least.find("at least ") + 9;
  const std::string named = least.substr(at, least.find(" MB", at) - at) + "MB";
  EXPECT_NO_THROW(training::plan_memory(config, 4, 64, training::parse_bytes(named))) << named;
  for (const std::uint64_t budget : {with / 2, with * 3 / 4}) {
    const std::string text = error_of<Error>([&] { training::plan_memory(config, 4, 64, budget); });
    EXPECT_EQ(text.substr(0, text.find(", got")), least.substr(0, least.find(", got")));
  }
}

TEST(MemoryPlan, RefusesWhatItDoesntKnow) {
  const auto refused = [](const TrainConfig& config) { return error_of<Error>([&] { training::check(config); }); };
  EXPECT_NE(refused({.memory_budget = "1PB"}).find("--memory-budget: expected a size such as 1GB"), std::string::npos);
  EXPECT_NE(refused({.recompute = "all", .memory_budget = "1GB"}).find("give one of them"), std::string::npos);
  EXPECT_NE(refused({.memory_budget = "1GB", .zero = 1}).find("--zero"), std::string::npos);
}

}  // namespace
}  // namespace halfstep
