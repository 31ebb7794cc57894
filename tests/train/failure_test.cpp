// SPDX-License-Identifier: Apache-2.0
// Runs that are interrupted, meet numbers that are none, or find the disk full.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>
#include <sstream>

#include "halfstep/nn/activation.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/train/checkpoint.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using test::Recorded;
using test::Regression;
using test::Samples;
using training::TrainConfig;

struct Dropping : nn::Module<Dropping> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 12, .out = 40}});
  nn::Dropout drop = child("drop", nn::Dropout{{.p = 0.4}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 40, .out = 6}});
  // What mode the batches of each size saw: training has 16 (8 at the end), evaluation 90.
  mutable std::vector<bool> evaluated_in_training, trained_in_evaluation;
  Tensor forward(const Tensor& x) const {
    (x.size(0) > 16 ? evaluated_in_training : trained_in_evaluation).push_back(is_training() == (x.size(0) > 16));
    return fc2(drop(relu(fc1(x))));
  }
};

class TrainFailure : public ::testing::Test {
 protected:
  static std::string bytes(const fs::path& file) {
    std::ifstream stream(file, std::ios::binary);
    std::ostringstream text;
    text << stream.rdbuf();
    return text.str();
  }
  test::TemporaryDir temporary_;
  const fs::path folder_ = temporary_.path();
};

template <class Error, class F>
std::string message(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

// The masks of the dropout come from the generator, whose state is part of the checkpoint. Stopped inside an epoch, at
// its end and in its first step; the reports of the rest are those of the run in one piece too.
TEST_F(TrainFailure, ResumesBitForBitWithDropout) {
  const Samples samples(200, 12, 6, 1), others(90, 12, 6, 2);
  for (const char* amp : {"off", "f16"}) {
    // Thirteen steps an epoch.
    for (const std::int64_t stop : amp == std::string("off") ? std::vector{20} : std::vector{26, 14}) {
      TrainConfig config;
      config.epochs = 5;
      config.batch_size = 16;
      config.lr = 0.3;
      config.momentum = 0.9;
      config.amp = amp;
      config.seed = 4;
      if (config.amp == "f16") config.loss_scale = "dynamic:1e9,2,0.5,6";
      manual_seed(8);
      const Dropping net;
      const Dropping first_net = nn::clone(net), rest_net = nn::clone(first_net);
      net.eval();  // training is the run's own matter
      manual_seed(9);
      const Recorded whole = test::run(config, net, samples.dataset(), others.dataset());
      config.out = folder_ / amp / std::to_string(stop);
      manual_seed(9);
      const Recorded first = test::run(config, first_net, samples.dataset(), others.dataset(), stop);
      EXPECT_EQ(first.report.steps, stop);
      EXPECT_TRUE(first.report.interrupted);
      config.resume = config.out;
      manual_seed(77);
      const Recorded rest = test::run(config, rest_net, samples.dataset(), others.dataset());
      EXPECT_EQ(test::values(rest_net), test::values(net)) << amp << " " << stop;
      EXPECT_NE(test::values(first_net), test::values(net));
      ASSERT_EQ(first.steps.size() + rest.steps.size(), whole.steps.size());
      for (std::size_t i = 0; i < whole.steps.size(); ++i) {
        const auto& a = whole.steps[i];
        const auto& b = i < first.steps.size() ? first.steps[i] : rest.steps[i - first.steps.size()];
        EXPECT_EQ(a.step, b.step);
        EXPECT_EQ(a.loss, b.loss) << i;
        EXPECT_EQ(a.mean_loss, b.mean_loss) << i;
        EXPECT_EQ(a.scale, b.scale) << i;
        EXPECT_EQ(a.skipped, b.skipped) << i;
      }
      std::size_t worse = 0;
      ASSERT_EQ(first.evals.size() + rest.evals.size(), whole.evals.size());
      for (std::size_t i = 0; i < whole.evals.size(); ++i) {
        const auto& a = whole.evals[i];
        const auto& b = i < first.evals.size() ? first.evals[i] : rest.evals[i - first.evals.size()];
        EXPECT_EQ(a.metrics["loss"], b.metrics["loss"]) << i;
        EXPECT_EQ(a.metrics["top1"], b.metrics["top1"]) << i;
        EXPECT_EQ(a.best, b.best) << i;
        worse += a.best ? 0 : 1;
      }
      EXPECT_GT(worse, 0U) << "an epoch that isn't the best, or a lost record wouldn't show";
      if (config.amp == "f16") {
        EXPECT_GT(whole.report.skipped, 0);
      }
      for (const Dropping* n : {&net, &rest_net}) {
        EXPECT_EQ(std::count(n->evaluated_in_training.begin(), n->evaluated_in_training.end(), true), 0);
        EXPECT_EQ(std::count(n->trained_in_evaluation.begin(), n->trained_in_evaluation.end(), true), 0);
      }
      // The best file is the one of the last best evaluation.
      std::int64_t best_step = 0;
      for (const auto& e : whole.evals) best_step = e.best ? e.step : best_step;
      EXPECT_EQ(training::load_checkpoint(config.out / "best.safetensors").step, best_step);
    }
  }
}

// With a rate that moves no weight every epoch is as good as the first, and none is better: resumed or not.
TEST_F(TrainFailure, ResumingRemembersTheBest) {
  const Samples samples(64, 4, 2, 1);
  TrainConfig config;
  config.batch_size = 16;
  config.epochs = 3;
  config.lr = 1e-30;
  config.out = folder_ / "a";
  const Regression net(4, 2);
  const Recorded first = test::run(config, net, samples.dataset(), samples.dataset(), 6);
  ASSERT_EQ(first.evals.size(), 1U);
  EXPECT_TRUE(first.evals[0].best);
  config.resume = config.out;
  const Recorded rest = test::run(config, net, samples.dataset(), samples.dataset());
  ASSERT_EQ(rest.evals.size(), 2U);
  for (const auto& e : rest.evals) EXPECT_FALSE(e.best);
  EXPECT_EQ(training::load_checkpoint(config.out / "best.safetensors").step, 4);
}

TEST_F(TrainFailure, CheckpointsAreWrittenAsOftenAsAsked) {
  const Samples samples(160, 4, 2, 1);
  TrainConfig config;
  config.batch_size = 16;
  config.save_every = 4;
  config.out = folder_ / "a";
  const Regression net(4, 2);
  const Recorded r = test::run(config, net, samples.dataset(), samples.dataset());
  EXPECT_EQ(r.checkpoints.size(), 3U) << "after the steps 4 and 8, and at the end";
  EXPECT_EQ(r.report.checkpoint, config.out / "last.safetensors");
  EXPECT_EQ(training::load_checkpoint(config.out).step, 10);
}

// In float32 nothing can be lowered to mend it: the run ends at once, naming epoch and step, and the checkpoint of
// before is there, with finite weights.
TEST_F(TrainFailure, ANaNEndsAFloat32RunAtOnce) {
  Samples samples(64, 4, 2, 1);
  const auto order = data::shuffled_order(64, 3, 0);
  samples.x[static_cast<std::size_t>(order[40]) * 4] = NAN;  // the third batch of 16
  TrainConfig config;
  config.batch_size = 16;
  config.seed = 3;
  config.save_every = 1;
  for (const char* scale : {"", "fixed:1024"}) {
    config.out = folder_ / (std::string("a") + scale);
    config.loss_scale = scale;
    const Regression net(4, 2);
    const std::string error = message<Error>([&] { test::run(config, net, samples.dataset(), samples.dataset()); });
    EXPECT_NE(error.find("finite loss, got nan in epoch 1, step 3"), std::string::npos) << error;
    EXPECT_NE(error.find("last.safetensors"), std::string::npos) << error;
    const training::Checkpoint last = training::load_checkpoint(config.out);
    EXPECT_EQ(last.step, 2);
    for (const auto& t : last.weights) {
      for (double v : t.tensor.to_vector<double>()) EXPECT_TRUE(std::isfinite(v)) << t.name;
    }
  }
}

// With a dynamic scale one such batch is a skipped step: the rest of the run goes on, and so does a run resumed from a
// checkpoint of the same epoch.
TEST_F(TrainFailure, ABadBatchIsSkippedUnderADynamicScale) {
  Samples samples(64, 4, 2, 1), good(64, 4, 2, 1);
  const auto order = data::shuffled_order(64, 3, 0);
  samples.x[static_cast<std::size_t>(order[20]) * 4] = 1e6;  // infinite in f16; the second batch
  TrainConfig config;
  config.batch_size = 16;
  config.seed = 3;
  config.epochs = 2;
  config.amp = "f16";
  config.save_every = 1;
  config.out = folder_ / "a";
  config.log_json = folder_ / "log.jsonl";
  manual_seed(1);
  const Regression net(4, 2), other = nn::clone(net);
  const Recorded whole = test::run(config, net, samples.dataset(), good.dataset());
  EXPECT_EQ(whole.report.skipped, 2) << "one an epoch";
  ASSERT_EQ(whole.steps.size(), 8U);
  EXPECT_FALSE(std::isfinite(whole.steps[1].loss));
  EXPECT_EQ(whole.checkpoints.size(), 6U) << "none straight after the bad batch";
  EXPECT_EQ(whole.steps[1].overflow, "fc.weight");
  EXPECT_EQ(whole.steps[2].scale, 32768);
  // The mean is that of the steps that have a loss.
  EXPECT_DOUBLE_EQ(whole.steps[2].mean_loss, (whole.steps[0].loss + whole.steps[2].loss) / 2);
  for (const auto& t : test::values(net)) {
    for (double v : t) EXPECT_TRUE(std::isfinite(v));
  }
  EXPECT_NE(bytes(config.log_json).find("\"loss\":null"), std::string::npos);
  config.out = folder_ / "b";
  test::run(config, other, samples.dataset(), good.dataset(), 3);
  config.resume = config.out;
  const Recorded rest = test::run(config, other, samples.dataset(), good.dataset());
  EXPECT_EQ(rest.steps.front().step, 4);
  EXPECT_EQ(rest.steps.front().mean_loss, whole.steps[3].mean_loss);
  EXPECT_EQ(test::values(other), test::values(net));
}

// What no scale mends ends the run: twenty bad losses in a row are borne.
TEST_F(TrainFailure, ALastingNaNEndsADynamicRunToo) {
  Samples samples(640, 4, 2, 1);
  for (double& v : samples.x) v = NAN;
  TrainConfig config;
  config.batch_size = 16;
  config.amp = "f16";
  const Regression net(4, 2);
  const auto before = test::values(net);
  const std::string error = message<Error>([&] { test::run(config, net, samples.dataset(), samples.dataset()); });
  EXPECT_NE(error.find("in epoch 1, step 21; last checkpoint: none was written"), std::string::npos) << error;
  EXPECT_EQ(test::values(net), before) << "every step was skipped";
}

// A limit on the size of files stands for a full disk: write() fails in the middle of the file.
TEST_F(TrainFailure, AFullDiskLeavesTheLastGoodCheckpoint) {
  const Samples samples(32, 2000, 2, 1);
  TrainConfig config;
  config.batch_size = 16;
  config.out = folder_ / "a";
  const Regression net(2000, 2);
  test::run(config, net, samples.dataset(), samples.dataset());
  const std::string good = bytes(config.out / "last.safetensors");
  ASSERT_GT(good.size(), 16000U);
  config.epochs = 2;
  config.resume = config.out;
  rlimit was{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &was), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit less{.rlim_cur = 8192, .rlim_max = was.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &less), 0);
  const std::string error = message<IoError>([&] { test::run(config, net, samples.dataset(), samples.dataset()); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &was), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(error.find(".safetensors: writing failed"), std::string::npos) << error;
  EXPECT_NE(error.find("what stood there before is unchanged"), std::string::npos) << error;
  EXPECT_EQ(bytes(config.out / "last.safetensors"), good);
  EXPECT_EQ(training::load_checkpoint(config.out).step, 2);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(config.out)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"best.safetensors", "classes.csv", "confusion.svg", "curves.svg",
                                             "last.safetensors", "results.csv"}))
      << "nothing half written stays";
  // With room again, it goes on from there.
  EXPECT_EQ(test::run(config, net, samples.dataset(), samples.dataset()).report.steps, 4);
}

TEST_F(TrainFailure, AFullDiskUnderTheLogIsNamed) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "this system has no /dev/full";
  const Samples samples(32, 4, 2, 1);
  TrainConfig config;
  config.log_json = "/dev/full";
  const Regression net(4, 2);
  const std::string error = message<IoError>([&] { test::run(config, net, samples.dataset(), samples.dataset()); });
  EXPECT_NE(error.find("/dev/full: writing failed"), std::string::npos) << error;
}

TEST_F(TrainFailure, CheckpointsOfAnotherSeedOrModelAreRefused) {
  const Samples samples(32, 4, 2, 1);
  TrainConfig config;
  config.out = folder_ / "a";
  const Regression net(4, 2);
  test::run(config, net, samples.dataset(), samples.dataset());
  config.resume = config.out;
  config.epochs = 2;
  config.seed = 1;
  std::string error = message<IoError>([&] { test::run(config, net, samples.dataset(), samples.dataset()); });
  EXPECT_NE(error.find("--batch-size 64 --seed 0, got 64 and 1"), std::string::npos) << error;
  config.seed = 0;
  training::Checkpoint c = training::load_checkpoint(config.out);
  c.model = "resnet18";
  training::save_checkpoint(config.out / "last.safetensors", c);
  error = message<IoError>([&] { test::run(config, net, samples.dataset(), samples.dataset()); });
  EXPECT_NE(error.find("expected a checkpoint of mlp, got one of resnet18"), std::string::npos) << error;
}

}  // namespace
}  // namespace halfstep
