// SPDX-License-Identifier: Apache-2.0
// The event files of a run: with its first values, before its checkpoints, and when it resumes.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

#include "halfstep/io/atomic_file.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;

// The contents of all event files, in the order in which they were made.
std::vector<std::string> event_files(const fs::path& folder) {
  std::vector<fs::path> paths;
  std::error_code none;
  for (const auto& e : fs::directory_iterator(folder / "tensorboard", none)) paths.push_back(e.path());
  std::sort(paths.begin(), paths.end(),
            [](const auto& a, const auto& b) { return fs::last_write_time(a) < fs::last_write_time(b); });
  std::vector<std::string> contents;
  for (const fs::path& p : paths) contents.push_back(io::read_file(p, 1 << 22));
  return contents;
}

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

class TensorBoardRuns : public ::testing::Test {
 protected:
  TensorBoardRuns() {
    config_.batch_size = 16;  // 25 steps an epoch; a point of the curves is every tenth
    config_.save_every = 10;
    config_.tensorboard = true;
    config_.out = temporary_.path() / "run";
  }
  training::RunReport train(const training::TrainCallbacks& callbacks, const std::atomic<bool>* stop = nullptr) {
    const training::Classifier classifier{.module = &net_, .forward = [&](const Tensor& x) { return net_(x); }};
    return training::train(config_, classifier, samples_.dataset(), samples_.dataset(), callbacks, stop);
  }

  test::TemporaryDir temporary_;
  const test::Samples samples_{400, 4, 2, 1};
  const test::Regression net_{4, 2};
  training::TrainConfig config_;
};

// A process that is killed behind a checkpoint leaves all that the run won't compute again.
TEST_F(TensorBoardRuns, HaveWhatACheckpointHasBehindIt) {
  std::vector<std::string> at;  // the file as it is at each checkpoint
  training::TrainCallbacks callbacks;
  callbacks.on_checkpoint = [&](const fs::path&) { at.push_back(event_files(config_.out).at(0)); };
  config_.sync_checkpoints = true;  // no further steps meanwhile
  train(callbacks);
  ASSERT_EQ(at.size(), 3u);  // at steps 10, 20 and 25
  for (const auto& [checkpoint, steps, epochs] : {std::tuple{0, 1, 0}, {1, 2, 0}, {2, 2, 1}}) {
    const std::string& file = at[static_cast<std::size_t>(checkpoint)];
    EXPECT_EQ(count(file, "train/loss"), steps) << checkpoint;
    EXPECT_EQ(count(file, "epoch/loss"), epochs) << checkpoint;
    EXPECT_EQ(count(file, "eval/top1"), epochs) << checkpoint;
  }
}

TEST_F(TensorBoardRuns, BeginWithTheirFirstValues) {
  training::TrainCallbacks callbacks;
  callbacks.on_step = [&](const training::StepReport& r) {
    if (r.step > 10) return;
    EXPECT_TRUE(event_files(config_.out).empty());
  };
  train(callbacks);
  EXPECT_EQ(event_files(config_.out).size(), 1u);
}

TEST_F(TensorBoardRuns, SayWhereTheyResume) {
  std::atomic<bool> stop{false};
  training::TrainCallbacks callbacks;
  callbacks.on_step = [&](const training::StepReport& r) { stop = r.step == 20; };
  train(callbacks, &stop);
  // An epoch that was stopped has no point of its own.
  EXPECT_EQ(count(event_files(config_.out).at(0), "epoch/loss"), 0);
  config_.resume = config_.out;
  train({});
  const auto files = event_files(config_.out);
  ASSERT_EQ(files.size(), 2u);
  // session_log (field 7): status (1): START (1), at step (2) 21, the first that comes again.
  const std::string start = "\x10\x15\x3a\x02\x08\x01";
  EXPECT_EQ(count(files[0], start), 0);
  EXPECT_EQ(count(files[1], start), 1);
  EXPECT_EQ(count(files[1], "epoch/loss"), 1);
}

}  // namespace
}  // namespace halfstep
