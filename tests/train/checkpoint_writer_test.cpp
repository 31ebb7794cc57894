// SPDX-License-Identifier: Apache-2.0
// Checkpoints that are written while the run goes on. A named pipe in the place of the file makes the disk as slow as
// the test likes: nothing is written before somebody reads.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <thread>

#include "halfstep/core/error.h"
#include "halfstep/train/checkpoint.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using test::Regression;
using test::Samples;
using training::TrainConfig;

std::string bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class BesideTraining : public ::testing::Test {
 protected:
  BesideTraining() {
    config_.batch_size = 16;
    config_.momentum = 0.9;
    config_.save_every = 2;
    config_.out = folder_ / "run";
  }

  // 6 steps an epoch.
  test::Recorded run(const TrainConfig& config, std::int64_t stop_after = 0,
                     const std::function<void()>& after_step = {}) {
    const Samples samples(96, 4, 2, 1);
    manual_seed(0);
    const Regression net(4, 2);
    return test::run(config, net, samples.dataset(), samples.dataset(), stop_after, after_step);
  }

  test::TemporaryDir temporary_;
  const fs::path folder_ = temporary_.path();
  TrainConfig config_;
};

TEST_F(BesideTraining, StepsGoOnAndTheFileHasTheStateOfItsStep) {
  TrainConfig stopped = config_;
  stopped.out = folder_ / "stopped";
  run(stopped, 2);
  const fs::path pipe = config_.out / "last.safetensors", read = folder_ / "read.safetensors";
  std::atomic<int> steps{0};
  std::atomic<bool> in_time{false}, removed{false};
  std::thread reader;
  run(config_, 0, [&] {
    if (++steps == 1) {
      ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
      reader = std::thread([&] {
        // The third step is done before a byte of the checkpoint after the second one is.
        for (int i = 0; i < 2000 && steps < 3; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        in_time = steps == 3 || steps == 4;  // the fifth has to wait: one is written at a time
        std::ifstream from(pipe, std::ios::binary);
        fs::remove(pipe);
        removed = true;
        std::ofstream(read, std::ios::binary) << from.rdbuf();
      });
    }
    // The next checkpoint must not find the pipe.
    for (int i = 0; i < 2000 && steps == 3 && !removed; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  });
  reader.join();
  EXPECT_TRUE(in_time);
  EXPECT_EQ(steps, 6);
  EXPECT_EQ(bytes(read), bytes(stopped.out / "last.safetensors"));
  EXPECT_EQ(training::load_checkpoint(config_.out).step, 6);
}

TEST_F(BesideTraining, AnErrorEndsTheRunSoonAndTheOneBeforeStays) {
  config_.epochs = 1000;
  int steps = 0;
  std::string before;
  try {
    run(config_, 0, [&] {
      if (++steps == 3) {
        const fs::path last = config_.out / "last.safetensors";
        for (int i = 0; i < 2000 && !fs::exists(last); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        before = bytes(last);
        fs::rename(last, folder_ / "kept");
        fs::create_directory(last);
      }
      if (steps > 3) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    });
    FAIL() << "the run ended well";
  } catch (const IoError& e) {
    EXPECT_NE(std::string(e.what()).find("last.safetensors: can't be written: it is "), std::string::npos) << e.what();
  }
  EXPECT_LT(steps, 1000) << "of 6000";
  EXPECT_EQ(training::load_checkpoint(folder_ / "kept").step, 2);
  EXPECT_FALSE(before.empty());
}

TEST_F(BesideTraining, AnErrorOfTheLastOneIsOneOfTheRun) {
  int steps = 0;
  EXPECT_THROW(run(config_, 0,
                   [&] {
                     if (++steps == 6) fs::create_directory(config_.out / "best.safetensors");
                   }),
               IoError);
}

TEST_F(BesideTraining, WaitingForThemGivesTheSameBytes) {
  TrainConfig waiting = config_;
  waiting.out = folder_ / "waiting";
  waiting.sync_checkpoints = true;
  waiting.epochs = config_.epochs = 2;
  std::vector<bool> there;
  run(waiting, 0, [&] { there.push_back(fs::exists(waiting.out / "last.safetensors")); });
  // A step is reported before its checkpoint.
  EXPECT_EQ(std::vector<bool>(there.begin(), there.begin() + 4), (std::vector<bool>{false, false, true, true}));
  run(config_);
  for (const char* name : {"last.safetensors", "best.safetensors"}) {
    EXPECT_EQ(bytes(waiting.out / name), bytes(config_.out / name));
  }
}

}  // namespace
}  // namespace halfstep
