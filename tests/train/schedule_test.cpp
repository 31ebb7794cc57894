// SPDX-License-Identifier: Apache-2.0
// Rates over a run against the formulas of PyTorch's documentation, and runs that are cut in two inside an epoch.
#include "halfstep/train/schedule.h"

#include <gtest/gtest.h>

#include <numbers>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/norm.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/checkpoint.h"
#include "halfstep/train/optimizer.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

using test::Recorded;
using test::Samples;
using training::RateRule;
using training::TrainConfig;

TEST(RateRules, AreReadAsTheyAreWritten) {
  EXPECT_EQ(training::parse_rate_rule("constant").kind, RateRule::Kind::constant);
  const RateRule step = training::parse_rate_rule("step", 2.5);
  EXPECT_EQ(step.kind, RateRule::Kind::step);
  EXPECT_EQ(step.step_epochs, 30);
  EXPECT_EQ(step.factor, 0.1);
  EXPECT_EQ(step.warmup_epochs, 2.5);
  EXPECT_EQ(training::parse_rate_rule("step:7").step_epochs, 7);
  EXPECT_EQ(training::parse_rate_rule("step:7,0.5").factor, 0.5);
  EXPECT_EQ(training::parse_rate_rule("cosine", 1).kind, RateRule::Kind::cosine);
  EXPECT_EQ(training::parse_rate_rule("onecycle").pct_start, 0.3);
  EXPECT_EQ(training::parse_rate_rule("onecycle:0.25").pct_start, 0.25);
  for (const char* bad : {"", "x", "step:", "step:0", "step:1.5", "step:2,0", "step:2,2", "step:1,1,1", "cosine:3",
                          "constant:1", "onecycle:1", "onecycle:0", "onecycle:-1", "step:nan", "Step"}) {
    EXPECT_THROW(training::parse_rate_rule(bad), Error) << bad;
  }
  EXPECT_THROW(training::parse_rate_rule("onecycle", 1), Error);
  EXPECT_THROW(training::parse_rate_rule("cosine", -1), Error);
  EXPECT_THROW(training::parse_rate_rule("cosine", NAN), Error);
}

// The rate of each step of a run of three epochs with five steps (four batches and a smaller one).
std::vector<double> rates(const std::string& rule, double warmup = 0, double lr = 0.4) {
  const Samples samples(72, 4, 2, 1);
  TrainConfig config;
  config.epochs = 3;
  config.batch_size = 16;
  config.lr = lr;
  config.lr_schedule = rule;
  config.warmup_epochs = warmup;
  const test::Regression net(4, 2);
  std::vector<double> result;
  for (const auto& s : test::run(config, net, samples.dataset(), samples.dataset()).steps) result.push_back(s.lr);
  return result;
}

TEST(RateRules, GiveEachStepItsRate) {
  const double pi = std::numbers::pi;
  EXPECT_EQ(rates("constant"), std::vector<double>(15, 0.4));
  const auto step = rates("step:1,0.5");
  const auto cosine = rates("cosine");
  const auto warm = rates("cosine", 1);
  const auto constant = rates("constant", 0.4);
  const auto cycle = rates("onecycle:0.4");
  ASSERT_EQ(step.size(), 15U);
  for (int i = 0; i < 15; ++i) {
    const auto k = static_cast<std::size_t>(i);
    EXPECT_DOUBLE_EQ(step[k], 0.4 * std::pow(0.5, i / 5)) << i;
    EXPECT_NEAR(cosine[k], 0.2 * (1 + std::cos(pi * i / 15)), 1e-15) << i;
    const double rise = 0.4 * (1e-3 + (1 - 1e-3) * i / 5);
    EXPECT_NEAR(warm[k], i < 5 ? rise : 0.2 * (1 + std::cos(pi * (i - 5) / 10)), 1e-15) << i;
    EXPECT_NEAR(constant[k], i < 2 ? 0.4 * (1e-3 + (1 - 1e-3) * i / 2) : 0.4, 1e-15) << i;
    // torch.optim.lr_scheduler.OneCycleLR: the first phase ends at step 0.4 * 15 - 1, the second at step 14.
    const auto anneal = [&](double from, double to, double part) {
      return to + (from - to) / 2 * (1 + std::cos(pi * part));
    };
    const double expected = i <= 5 ? anneal(0.016, 0.4, i / 5.0) : anneal(0.4, 0.016 / 1e4, (i - 5) / 9.0);
    EXPECT_NEAR(cycle[k], expected, 1e-15) << i;
  }
  EXPECT_EQ(*std::max_element(cycle.begin(), cycle.end()), cycle[5]);
}

// A run of one step has no cycle, and no end to go past.
TEST(RateRules, ShortRunsHaveRatesToo) {
  for (const char* rule : {"onecycle", "cosine", "step:1"}) {
    TrainConfig config;
    config.lr_schedule = rule;
    config.lr = 0.5;
    config.warmup_epochs = std::string(rule) == "onecycle" ? 0 : 3;
    const Samples samples(8, 4, 2, 1);
    const test::Regression net(4, 2);
    const Recorded r = test::run(config, net, samples.dataset(), samples.dataset());
    ASSERT_EQ(r.steps.size(), 1U);
    EXPECT_GT(r.steps[0].lr, 0) << rule;
    EXPECT_LE(r.steps[0].lr, 0.5) << rule;
  }
}

struct Normed : nn::Module<Normed> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 12, .out = 24}});
  nn::BatchNorm1d bn = child("bn", nn::BatchNorm1d{{.channels = 24}});
  nn::Dropout drop = child("drop", nn::Dropout{{.p = 0.2}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 24, .out = 6}});
  Tensor forward(const Tensor& x) const { return fc2(drop(relu(bn(fc1(x))))); }
};

TrainConfig everything() {
  TrainConfig config;
  config.epochs = 4;
  config.batch_size = 16;
  config.lr = 0.2;
  config.momentum = 0.9;
  config.nesterov = true;
  config.weight_decay = 1e-3;
  config.norm_decay = false;
  config.label_smoothing = 0.1;
  config.mixup = 0.3;
  config.num_classes = 6;
  config.train_accuracy = true;
  config.seed = 4;
  return config;
}

// Batch norm's running statistics, the schedule, the counts of hits and the generator's state are all of the
// checkpoint. Stopped inside an epoch, at its end and before its evaluation.
TEST(TrainSchedules, ResumeBitForBit) {
  const test::TemporaryDir temporary;
  const Samples samples(200, 12, 6, 1), others(90, 12, 6, 2);
  for (const char* rule : {"onecycle", "cosine", "step:1,0.5"}) {
    for (const std::int64_t stop : {5, 20, 26}) {
      for (const std::int64_t group : {1, 3}) {
        TrainConfig config = everything();
        config.lr_schedule = rule;
        config.accumulate = static_cast<int>(group);
        const std::int64_t at = group == 1 ? stop : stop / 3;
        manual_seed(8);
        const Normed net;
        const Normed first_net = nn::clone(net), rest_net = nn::clone(net);
        manual_seed(9);
        const Recorded whole = test::run(config, net, samples.dataset(), others.dataset());
        config.out = temporary.path() / rule / std::to_string(10 * stop + group);
        manual_seed(9);
        const Recorded first = test::run(config, first_net, samples.dataset(), others.dataset(), at);
        EXPECT_TRUE(first.report.interrupted);
        config.resume = config.out;
        manual_seed(77);
        const Recorded rest = test::run(config, rest_net, samples.dataset(), others.dataset());
        EXPECT_EQ(test::values(rest_net), test::values(net)) << rule << " " << stop;
        ASSERT_EQ(first.steps.size() + rest.steps.size(), whole.steps.size());
        ASSERT_EQ(first.evals.size() + rest.evals.size(), whole.evals.size());
        for (std::size_t i = 0; i < whole.steps.size(); ++i) {
          const auto& a = whole.steps[i];
          const auto& b = i < first.steps.size() ? first.steps[i] : rest.steps[i - first.steps.size()];
          EXPECT_EQ(a.loss, b.loss) << i;
          EXPECT_EQ(a.lr, b.lr) << i;
          EXPECT_EQ(a.part_means.at("top1").mean(), b.part_means.at("top1").mean()) << i;
          EXPECT_EQ(a.part_means.at("top5").mean(), b.part_means.at("top5").mean()) << i;
        }
        EXPECT_GT(whole.steps.back().part_means.at("top5").mean(), whole.steps.back().part_means.at("top1").mean());
        EXPECT_LT(whole.steps.front().part_means.at("top1").mean(), 1);
      }
    }
  }
}

// Accuracy is counted where it is shown: a run that resumes inside an epoch may begin to count there, or cease to.
TEST(TrainSchedules, AccuracyIsOfTheSamplesThatWereCounted) {
  const test::TemporaryDir temporary;
  const Samples samples(400, 12, 6, 1);
  TrainConfig config = everything();  // 25 steps
  config.epochs = 1;
  manual_seed(8);
  const Normed net;
  config.out = temporary.path() / "a";
  std::int64_t stop = 0;
  double top1 = 0, count = 0;
  for (const bool counted : {false, true, true, false, true}) {
    config.train_accuracy = counted;
    const Recorded part = test::run(config, net, samples.dataset(), samples.dataset(), stop += 4);
    ASSERT_EQ(part.steps.size(), 4u);
    EXPECT_EQ(part.steps.back().part_means.contains("top1"), counted) << stop;
    if (!counted) top1 = count = 0;
    for (const auto& step : part.steps) {
      if (!counted) continue;
      top1 += step.parts.at("top1");
      count += static_cast<double>(step.samples);
      EXPECT_EQ(step.part_means.at("top1").sum, top1) << step.step;
      EXPECT_EQ(step.part_means.at("top1").count, count) << step.step;
    }
    config.resume = config.out;
  }
}

// What is stopped while it is evaluated makes the evaluation again, with the same result as if nothing had happened.
TEST(TrainSchedules, AnEvaluationThatIsStoppedIsMadeAgain) {
  const test::TemporaryDir temporary;
  const Samples samples(200, 12, 6, 1), others(90, 12, 6, 2);
  TrainConfig config = everything();
  config.epochs = 2;
  config.eval_batch_size = 10;
  config.out = temporary.path() / "a";
  manual_seed(8);
  const Normed net;
  std::atomic<bool> stop{false};
  int batches = 0, evaluations = 0;
  training::TrainCallbacks callbacks;
  callbacks.on_eval_batch = [&](const training::EvalProgress& p) {
    EXPECT_EQ(p.batches, 9);
    stop = ++batches == 9 + 4;
  };
  callbacks.on_eval = [&](const training::EvalReport&) { ++evaluations; };
  const training::Classifier classifier{.module = &net, .forward = [&](const Tensor& x) { return net(x); }};
  const auto report = training::train(config, classifier, samples.dataset(), others.dataset(), callbacks, &stop);
  EXPECT_TRUE(report.interrupted);
  EXPECT_EQ(evaluations, 1);
  EXPECT_EQ(report.epochs, 1);
  const training::Checkpoint saved = training::load_checkpoint(config.out);
  EXPECT_EQ(saved.step, 26);
  EXPECT_EQ(saved.loader, (data::LoaderState{.epoch = 1, .batch = 13}));
  config.resume = config.out;
  const Normed rest_net;
  const Recorded rest = test::run(config, rest_net, samples.dataset(), others.dataset());
  EXPECT_EQ(rest.steps.size(), 0U);
  ASSERT_EQ(rest.evals.size(), 1U);
  EXPECT_EQ(rest.report.epochs, 2);
  EXPECT_EQ(rest.evals[0].metrics["loss"],
            training::evaluate(classifier, others.dataset(), std::nullopt, 10).metrics["loss"]);
}

TEST(TrainSchedules, RunsGoOnWithTheirOwnRecipeOnly) {
  const test::TemporaryDir temporary;
  const Samples samples(64, 12, 6, 1);
  TrainConfig config = everything();
  config.lr_schedule = "cosine";
  config.classes = {"a", "b"};
  config.data_flags = {{"image-size", "32"}};
  config.out = temporary.path() / "a";
  const Normed net;
  test::run(config, net, samples.dataset(), samples.dataset(), 2);
  config.resume = config.out;
  config.out.clear();
  const auto error = [&](auto&& change) -> std::string {
    TrainConfig other = config;
    change(other);
    try {
      test::run(other, net, samples.dataset(), samples.dataset());
    } catch (const IoError& e) {
      return e.what();
    }
    return "no error";
  };
  const auto says = [&](auto&& change, const std::string& text) {
    const std::string got = error(change);
    EXPECT_NE(got.find(text), std::string::npos) << got;
  };
  says([](TrainConfig& c) { c.lr_schedule = "onecycle"; }, "--lr-schedule cosine, got onecycle");
  says([](TrainConfig& c) { c.epochs = 9; }, "--epochs 4, got 9");
  says([](TrainConfig& c) { c.warmup_epochs = 1; }, "--warmup-epochs 0, got 1");
  says([](TrainConfig& c) { c.lr = 0.1; }, "--lr 0.2, got 0.1");
  says([](TrainConfig& c) { c.nesterov = false; }, "--nesterov yes, got no");
  says([](TrainConfig& c) { c.norm_decay = true; }, "--no-norm-decay yes, got no");
  says([](TrainConfig& c) { c.mixup = 0; }, "--mixup 0.3, got 0");
  says([](TrainConfig& c) { c.label_smoothing = 0; }, "--label-smoothing 0.1, got 0");
  says([](TrainConfig& c) { c.data_flags = {{"image-size", "64"}}; }, "--image-size 32, got 64");
  says([](TrainConfig& c) { c.classes = {"a", "c"}; }, "the run had 2 classes, a to b, got 2, a to c");
  EXPECT_EQ(error([](TrainConfig&) {}), "no error");
  EXPECT_EQ(training::load_checkpoint(config.resume).classes, config.classes);
  EXPECT_EQ(training::load_saved_weights(config.resume).recipe.at("image-size"), "32");
}

// Smoothed cross entropy is the mean of the plain one with share 1 - e and that over all classes with share e.
TEST(TrainSchedules, LabelSmoothingIsInTheLossOfTrainingOnly) {
  const Samples samples(16, 4, 3, 1);
  TrainConfig config;
  config.batch_size = 16;
  config.lr = 1e-30;
  const test::Regression net(4, 3);
  const auto w = net.fc.weight.to_vector<double>(), b = net.fc.bias.to_vector<double>();
  double plain = 0, smooth = 0;
  for (std::size_t i = 0; i < 16; ++i) {
    double z[3], total = 0, all = 0;
    for (std::size_t k = 0; k < 3; ++k) {
      z[k] = b[k];
      for (std::size_t j = 0; j < 4; ++j) z[k] += w[4 * k + j] * samples.x[4 * i + j];
      total += std::exp(z[k]);
    }
    for (const double v : z) all += (std::log(total) - v) / 3;
    const double own = std::log(total) - z[samples.y[i]];
    plain += own / 16;
    smooth += (0.8 * own + 0.2 * all) / 16;
  }
  const double bound = 64 * 0x1p-24 * 4;  // of 16 terms under 4, each of some roundings
  EXPECT_NEAR(test::run(config, net, samples.dataset(), samples.dataset()).steps[0].loss, plain, bound);
  config.label_smoothing = 0.2;
  const Recorded r = test::run(config, net, samples.dataset(), samples.dataset());
  EXPECT_NEAR(r.steps[0].loss, smooth, bound);
  EXPECT_NEAR(r.evals[0].metrics["loss"], plain, bound);
  EXPECT_GT(std::abs(plain - smooth), 100 * bound);
}

// With gradients of 0 only the decay moves a weight: by lr times the decay of itself.
TEST(TrainOptimizer, NormsAndBiasesNeedNotDecay) {
  const Normed net;
  for (const char* kind : {"sgd", "adamw"}) {
    for (const bool all : {true, false}) {
      TrainConfig config;
      config.optimizer = kind;
      config.lr = 0.5;
      config.weight_decay = 0.25;
      config.norm_decay = all;
      {
        const NoGrad no_grad;
        for (const auto& p : net.parameters()) Tensor(p.tensor).fill_(1);
      }
      const auto optimizer = training::make_optimizer(config, net.parameters());
      EXPECT_EQ(optimizer->num_groups(), all ? 1 : 2);
      std::vector<Tensor> none;
      for (const auto& p : optimizer->named_parameters()) none.push_back(zeros(p.tensor.sizes()));
      optimizer->step(none);
      for (const auto& p : net.parameters()) {
        const double expected = all || p.tensor.dim() > 1 ? 0.875 : 1;
        EXPECT_EQ(p.tensor.to_vector<double>()[0], expected) << p.name << " " << kind;
      }
    }
  }
}

TEST(TrainSchedules, BeginAtALaterEpoch) {
  const Samples samples(64, 4, 2, 1);
  TrainConfig config;
  config.epochs = 5;
  config.batch_size = 16;
  config.lr = 0.4;
  config.lr_schedule = "step:2,0.5";
  config.start_epoch = 3;
  const test::Regression net(4, 2);
  const Recorded r = test::run(config, net, samples.dataset(), samples.dataset());
  ASSERT_EQ(r.steps.size(), 8U);
  EXPECT_EQ(r.steps[0].epoch, 4);
  EXPECT_EQ(r.steps[0].step, 13);
  EXPECT_EQ(r.steps[0].lr, 0.2);
  EXPECT_EQ(r.steps[4].lr, 0.1);
  EXPECT_EQ(r.report.epochs, 5);
}

// As if the epochs before had passed: the rates are those of all epochs of the run.
TEST(TrainSchedules, ALaterEpochHasItsPlaceInTheWholeSchedule) {
  const Samples samples(64, 4, 2, 1);
  for (const bool cosine : {true, false}) {
    TrainConfig config;
    config.epochs = 5;
    config.batch_size = 16;  // 4 steps an epoch
    config.lr = 0.4;
    config.lr_schedule = cosine ? "cosine" : "linear:0.25";
    config.start_epoch = 2;
    const test::Regression net(4, 2);
    const Recorded r = test::run(config, net, samples.dataset(), samples.dataset());
    ASSERT_EQ(r.steps.size(), 12U);
    for (std::size_t i = 0; i < 12; ++i) {
      const double part = (8 + static_cast<double>(i)) / 20;
      const double expected = cosine ? 0.2 * (1 + std::cos(std::numbers::pi * part)) : 0.4 * (1 - 0.75 * part);
      EXPECT_NEAR(r.steps[i].lr, expected, 1e-15) << i;
    }
  }
}

}  // namespace
}  // namespace halfstep
