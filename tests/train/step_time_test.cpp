// SPDX-License-Identifier: Apache-2.0
// The time of a step from the times of its calls: sums, kinds, what lies in the cache, and the file of times.
#include "halfstep/train/step_time.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "halfstep/debug/call_timer.h"
#include "halfstep/ops/create.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/parallel.h"
#include "halfstep/train/step_plan.h"
#include "halfstep/train/trace_step.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using debug::OperandPlace;
using debug::TracedCall;
using debug::TracedTensor;
using training::CallMeasurement;
using training::CallTimes;
using training::StepTime;

constexpr std::int64_t kMiB = 1 << 20;

TracedTensor operand(std::uint64_t address, std::int64_t bytes) {
  return {.defined = true, .dtype = f32, .sizes = {bytes / 4}, .strides = {1}, .address = address};
}

TracedCall made(const std::string& op, std::vector<TracedTensor> inputs, std::vector<TracedTensor> results,
                std::int64_t multiply_adds = 0, DType dtype = f32) {
  TracedCall call;
  call.site.op = call.kernel = op;
  call.dtype = dtype;
  call.multiply_adds = multiply_adds;
  call.inputs = std::move(inputs);
  call.results = std::move(results);
  call.repeatable = true;
  return call;
}

constexpr MachineLimits kLimits{.operations = 100e9,
                                .bf16_operations = 200e9,
                                .f16_operations = 100e9,
                                .inner_bandwidth = 100e9,
                                .cache_bandwidth = 50e9,
                                .memory_bandwidth = 10e9,
                                .cache_bytes = 8 * kMiB,
                                .inner_bytes = 1 * kMiB};

// 0.5 ms from the inner caches, 1 ms from the last one, 3 ms from memory.
CallMeasurement measured_by(int& count, double factor = 1) {
  return {.call =
              [&count, factor](const TracedCall&, OperandPlace place) {
                ++count;
                return factor * (place == OperandPlace::inner ? 0.5e-3 : place == OperandPlace::cache ? 1e-3 : 3e-3);
              },
          .calling = [] { return 1e-6; },
          .limits = [] { return kLimits; }};
}

class StepTimes : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / fmt::format("halfstep-step-time-{}", getpid());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    set_log_sink([this](LogLevel, std::string_view text) { said_.emplace_back(text); });
  }
  void TearDown() override {
    set_log_sink({});
    fs::permissions(folder_, fs::perms::owner_all);
    fs::remove_all(folder_);
  }
  CallTimes times(int& count, bool again = false, double factor = 1) const {
    return CallTimes({.file = folder_ / "calls" / "here.json", .again = again, .measure = measured_by(count, factor)});
  }
  std::string text() const {
    std::ostringstream all;
    all << std::ifstream(folder_ / "calls" / "here.json").rdbuf();
    return all.str();
  }
  void write(const std::string& text) const { std::ofstream(folder_ / "calls" / "here.json") << text; }

  fs::path folder_;
  std::vector<std::string> said_;
};

TEST_F(StepTimes, WhatWasTouchedLastLiesInTheCache) {
  // 2 MiB are read again when 2, then 10 MiB have been touched since; the third is too large for the cache itself.
  const auto a = operand(64 * kMiB, 2 * kMiB), b = operand(128 * kMiB, 2 * kMiB), c = operand(256 * kMiB, 8 * kMiB),
             huge = operand(512 * kMiB, 32 * kMiB);
  std::vector<TracedCall> calls{made("relu", {a}, {}),    made("relu", {b}, {}),   made("relu", {a}, {}),
                                made("relu", {c}, {}),    made("relu", {a}, {}),   made("relu", {huge}, {}),
                                made("relu", {huge}, {}), made("add", {a, a}, {a})};
  const std::vector<double> shares = training::shares_in_cache(calls, 8 * kMiB);
  // The step is repeated: the first call finds what the last one of the step before has touched.
  EXPECT_EQ(shares, (std::vector<double>{1, 0, 1, 0, 0, 0, 0, 0}));
  // Memory of another tensor is as warm as it was there.
  calls = {made("fill", {}, {a}), made("relu", {operand(65 * kMiB, 2 * kMiB)}, {}), made("relu", {huge}, {})};
  EXPECT_EQ(training::shares_in_cache(calls, 8 * kMiB)[1], 0.5);
}

TEST_F(StepTimes, AStepIsTheSumOfItsCallsByKind) {
  const auto a = operand(64 * kMiB, 4 * kMiB), b = operand(128 * kMiB, 4 * kMiB), far = operand(512 * kMiB, 64 * kMiB);
  TracedCall view = made("view", {a}, {a});
  view.kernel.clear();
  view.site.path = ExecutionPath::view;
  TracedCall sgd = made("sgd_step", {far}, {});
  sgd.site.standalone = true;
  TracedCall own = made("my_kernel", {a}, {});
  own.repeatable = false;
  const std::vector<TracedCall> calls{made("conv2d", {a}, {b}, 1'000'000'000),
                                      view,
                                      made("conv2d", {a}, {b}, 1'000'000'000),
                                      made("conv2d_backward_weight", {a}, {b}, 1'000'000'000, bf16),
                                      own,
                                      sgd};
  int count = 0;
  CallTimes known = times(count);
  const StepTime step = training::predict_time(calls, known);
  ASSERT_EQ(step.parts.size(), 3u);
  EXPECT_EQ(step.parts[0].kind, "convolutions, forward");
  EXPECT_EQ(step.parts[0].calls, 2u);
  // The first finds neither operand, the second one finds both.
  EXPECT_DOUBLE_EQ(step.parts[0].seconds, 4e-3);
  EXPECT_DOUBLE_EQ(step.parts[0].limit, 2 * 2e9 / 100e9);
  EXPECT_EQ(step.parts[1].kind, "convolutions, weight gradients");
  EXPECT_DOUBLE_EQ(step.parts[1].seconds, 1e-3);
  EXPECT_DOUBLE_EQ(step.parts[1].limit, 2e9 / 200e9);
  EXPECT_EQ(step.parts[2].kind, "optimizer");
  EXPECT_DOUBLE_EQ(step.parts[2].seconds, 3e-3);
  EXPECT_DOUBLE_EQ(step.parts[2].limit, 64.0 * kMiB / 10e9);
  EXPECT_DOUBLE_EQ(step.seconds(), 8e-3);
  EXPECT_EQ(step.calling, 0);
  EXPECT_EQ(step.unknown, 1u);
  EXPECT_EQ(count, 4);  // conv2d in both places, and the two others in one
  // Where steps aren't replayed, each call costs more, views too.
  EXPECT_DOUBLE_EQ(training::predict_time(calls, known, {.captured = false}).seconds(), 8e-3 + 6e-6);
}

TEST_F(StepTimes, PartsOfOperandsLieInDifferentPlaces) {
  // Of 4 MiB a quarter has just been touched, another one not too long ago.
  const auto near = operand(1024 * kMiB, kMiB), middle = operand(64 * kMiB, kMiB), far = operand(128 * kMiB, 2 * kMiB);
  const std::vector<TracedCall> calls{made("relu", {operand(512 * kMiB, 64 * kMiB)}, {}), made("relu", {middle}, {}),
                                      made("relu", {operand(2048 * kMiB, 2 * kMiB)}, {}), made("relu", {near}, {}),
                                      made("gelu", {near, middle, far}, {})};
  int count = 0;
  CallTimes known = times(count);
  const StepTime step = training::predict_time(calls, known);
  // relu: 3 ms from memory four times.
  EXPECT_DOUBLE_EQ(step.seconds(), 4 * 3e-3 + 0.25 * 0.5e-3 + 0.25 * 1e-3 + 0.5 * 3e-3);
  EXPECT_DOUBLE_EQ(step.limit(), 68.0 * kMiB / 10e9 + kMiB / 100e9 + kMiB / 50e9 + 2.0 * kMiB / 10e9);
}

TEST_F(StepTimes, KindsOfCalls) {
  const auto kind = [](const char* op, bool standalone = false) {
    TracedCall call = made(op, {}, {});
    call.site.standalone = standalone;
    return std::string(training::step_time_kind(call));
  };
  EXPECT_EQ(kind("conv2d_backward_input"), "convolutions, input gradients");
  EXPECT_EQ(kind("linear"), "products");
  EXPECT_EQ(kind("scaled_dot_product_attention_backward"), "products");
  EXPECT_EQ(kind("batch_norm_act_backward"), "norms");
  EXPECT_EQ(kind("max_pool2d_backward"), "pooling");
  EXPECT_EQ(kind("cross_entropy_backward"), "loss");
  EXPECT_EQ(kind("to"), "casts and copies");
  EXPECT_EQ(kind("adam_step", true), "optimizer");
  EXPECT_EQ(kind("amp_update_scale", true), "optimizer");
  EXPECT_EQ(kind("gelu"), "elementwise and others");
}

TEST_F(StepTimes, WhatWasMeasuredIsKept) {
  const TracedCall call = made("relu", {operand(0, 4096)}, {}), other = made("gelu", {operand(0, 4096)}, {});
  int first = 0, second = 0, third = 0;
  CallTimes a = times(first), b = times(second);
  EXPECT_EQ(a.seconds(call, OperandPlace::cache), 1e-3);
  EXPECT_EQ(a.seconds(call, OperandPlace::cache), 1e-3);
  EXPECT_EQ(a.limits().memory_bandwidth, 10e9);
  EXPECT_EQ(first, 1);
  EXPECT_EQ(a.measured(), 2);
  // Another program measures other calls at the same time: the file has those of both.
  b.seconds(other, OperandPlace::memory);
  b.calling();
  EXPECT_TRUE(a.save());
  EXPECT_TRUE(b.save());
  CallTimes c = times(third, false, 100);
  EXPECT_EQ(c.seconds(call, OperandPlace::cache), 1e-3);
  EXPECT_EQ(c.seconds(other, OperandPlace::memory), 3e-3);
  EXPECT_EQ(c.calling(), 1e-6);
  EXPECT_EQ(c.limits().bf16_operations, 200e9);
  EXPECT_EQ(c.limits().cache_bytes, 8 * kMiB);
  EXPECT_EQ(third, 0);
  EXPECT_EQ(c.measured(), 0);
  // Where the operands lie elsewhere it is another time.
  EXPECT_EQ(c.seconds(call, OperandPlace::memory), 0.3);
  EXPECT_TRUE(said_.empty());
}

TEST_F(StepTimes, MeasuringAgainReplacesWhatIsAskedFor) {
  const TracedCall call = made("relu", {operand(0, 4096)}, {}), other = made("gelu", {operand(0, 4096)}, {});
  int count = 0;
  {
    CallTimes known = times(count);
    known.seconds(call, OperandPlace::cache);
    known.seconds(other, OperandPlace::cache);
    ASSERT_TRUE(known.save());
  }
  CallTimes again = times(count, true, 2);
  EXPECT_EQ(again.seconds(call, OperandPlace::cache), 2e-3);
  EXPECT_EQ(again.seconds(call, OperandPlace::cache), 2e-3);
  EXPECT_EQ(count, 3);
  ASSERT_TRUE(again.save());
  CallTimes after = times(count);
  EXPECT_EQ(after.seconds(call, OperandPlace::cache), 2e-3);
  EXPECT_EQ(after.seconds(other, OperandPlace::cache), 1e-3);
  EXPECT_EQ(count, 3);
}

TEST_F(StepTimes, ADamagedFileIsMeasuredAgain) {
  const TracedCall call = made("relu", {operand(0, 4096)}, {});
  int count = 0;
  {
    CallTimes known = times(count);
    known.seconds(call, OperandPlace::cache);
    known.limits();
    ASSERT_TRUE(known.save());
  }
  const std::string good = text();
  std::string negative = good, null = good;
  negative.replace(negative.find("0.001"), 5, "-1.00");
  null.replace(null.find("0.001"), 5, "null ");
  for (const std::string& bad :
       {std::string(), good.substr(0, good.size() / 2), std::string("[1, 2]"), negative, null}) {
    write(bad);
    said_.clear();
    count = 0;
    CallTimes known = times(count);
    ASSERT_EQ(said_.size(), 1u) << bad;
    EXPECT_NE(said_[0].find("here.json is damaged"), std::string::npos) << said_[0];
    EXPECT_EQ(known.seconds(call, OperandPlace::cache), 1e-3);
    known.limits();
    EXPECT_EQ(count, 1) << bad;
    EXPECT_TRUE(known.save());
    EXPECT_EQ(text(), good);
  }
}

TEST_F(StepTimes, TimesOfAnotherMachineAreNotTaken) {
  const TracedCall call = made("relu", {operand(0, 4096)}, {});
  int count = 0;
  {
    CallTimes known = times(count);
    known.seconds(call, OperandPlace::cache);
    ASSERT_TRUE(known.save());
  }
  const std::string here = text();
  for (const char* field :
       {"\"cpu\": \"", "\"isa\": \"", "\"library\": \"", "\"winograd\": \"", "\"float32_precision\": \""}) {
    std::string changed = here;
    ASSERT_NE(changed.find(field), std::string::npos) << field;
    changed.insert(changed.find(field) + std::string_view(field).size(), "another ");
    write(changed);
    count = 0;
    CallTimes known = times(count, false, 5);
    EXPECT_EQ(known.seconds(call, OperandPlace::cache), 5e-3) << field;
    EXPECT_EQ(count, 1) << field;
  }
  // Nor are those of another number of threads, which have a file of their own unless one is named.
  write(here);
  const int threads = num_threads();
  const fs::path usual = CallTimes::default_file();
  set_num_threads(threads + 1);
  EXPECT_NE(CallTimes::default_file(), usual);
  CallTimes known = times(count, false, 5);
  EXPECT_EQ(known.seconds(call, OperandPlace::cache), 5e-3);
  set_num_threads(threads);
  EXPECT_TRUE(said_.empty());
}

TEST_F(StepTimes, AFolderThatCannotBeWrittenIsSaid) {
  int count = 0;
  std::ofstream(folder_ / "file") << "no folder";
  CallTimes known({.file = folder_ / "file" / "here.json", .measure = measured_by(count)});
  known.limits();
  EXPECT_FALSE(known.save());
  ASSERT_EQ(said_.size(), 1u);
  EXPECT_NE(said_[0].find("measured times are not kept"), std::string::npos) << said_[0];
  if (geteuid() == 0) return;  // who may write everywhere
  fs::permissions(folder_, fs::perms::owner_read | fs::perms::owner_exec);
  CallTimes closed({.file = folder_ / "here.json", .measure = measured_by(count)});
  closed.limits();
  EXPECT_FALSE(closed.save());
  EXPECT_EQ(said_.size(), 2u);
}

TEST_F(StepTimes, SignaturesSayWhatTheTimeDependsOn) {
  const auto a = operand(4096, 4096), b = operand(8192, 4096);
  const std::string plain = debug::signature(made("add", {a, b}, {}));
  EXPECT_EQ(debug::signature(made("add", {operand(64, 4096), operand(1 << 20, 4096)}, {})), plain);
  EXPECT_NE(debug::signature(made("add", {a, a}, {})), plain);
  EXPECT_NE(debug::signature(made("add", {a, b}, {a})), debug::signature(made("add", {a, b}, {b})));
  EXPECT_NE(debug::signature(made("add", {a, operand(8192, 8192)}, {})), plain);
  EXPECT_NE(debug::signature(made("add", {a, TracedTensor()}, {})), plain);
  EXPECT_NE(debug::signature(made("mul", {a, b}, {})), plain);
  EXPECT_NE(debug::signature(made("add", {a, b}, {}, 0, bf16)), plain);
  TracedTensor strided = b;
  strided.strides = {2};
  EXPECT_NE(debug::signature(made("add", {a, strided}, {})), plain);
}

// Every call of real steps can be run again by itself, has the same name on the device meta, and takes some time.
TEST_F(StepTimes, CallsOfStepsCanBeMeasured) {
  for (const auto& [model, image_size, amp, optimizer] :
       {std::tuple("mlp", 0, "f16", "adam"), std::tuple("resnet20", 32, "bf16", "sgd"),
        std::tuple("resnet50", 32, "off", "sgd"), std::tuple("yolov5n", 64, "O2", "sgd")}) {
    training::TrainConfig config;
    config.model = model;
    config.amp = amp;
    config.optimizer = optimizer;
    config.batch_size = 2;
    const auto calls = training::trace_step(config, image_size), again = training::predict_calls(config, 2, image_size);
    std::map<std::string, const TracedCall*> kinds, kinds_again;
    for (const TracedCall& call : calls) {
      if (call.kernel.empty()) continue;
      EXPECT_TRUE(call.repeatable) << model << ": " << call.site.str();
      kinds.emplace(debug::signature(call), &call);
    }
    for (const TracedCall& call : again) {
      if (!call.kernel.empty()) kinds_again.emplace(debug::signature(call), &call);
    }
    ASSERT_FALSE(kinds.empty());
    for (const auto& [key, call] : kinds) {
      // What the host makes comes to another device by a transfer.
      EXPECT_TRUE(call->site.op == "copy" || kinds_again.contains(key)) << model << ": " << call->site.str();
      EXPECT_GT(debug::time_call(*call, OperandPlace::cache), 0) << model << ": " << call->site.str();
    }
  }
}

TEST_F(StepTimes, ACallThatCannotBeRepeatedIsRefused) {
  TracedCall call = made("relu", {operand(0, 64)}, {operand(0, 64)});
  EXPECT_GT(debug::time_call(call, OperandPlace::memory), 0);
  call.repeatable = false;
  EXPECT_EQ(test::error_of<Error>([&] { debug::time_call(call, OperandPlace::cache); }),
            "time_call: relu can't be run again by itself");
}

TEST(MachineLimits, AreMeasured) {
  const MachineLimits limits = measure_machine_limits();
  EXPECT_GT(limits.operations, 1e8);
  EXPECT_GE(limits.bf16_operations, limits.operations);
  EXPECT_GE(limits.f16_operations, limits.operations);
  EXPECT_GT(limits.memory_bandwidth, 1e7);
  EXPECT_GT(limits.cache_bandwidth, 1e7);
  EXPECT_GT(limits.cache_bytes, 0);
  EXPECT_EQ(run_multiply_adds(f32, 20), 2 * run_multiply_adds(f32, 10));
  std::vector<float> to(100'001, 1), from(100'001, 1e6f);
  run_stream(to.data(), from.data(), 100'001);
  for (const float x : to) ASSERT_NEAR(x, 2, 1e-5);
}

}  // namespace
}  // namespace halfstep
