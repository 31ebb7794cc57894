// SPDX-License-Identifier: Apache-2.0
// Checkpoints whose numbers no run leaves behind: each is refused, with what is wrong and where; and whatever is done
// to the state of one, a run either goes on from it or says why not.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "halfstep/io/safetensors.h"
#include "halfstep/nn/norm.h"
#include "halfstep/train/checkpoint.h"
#include "tests/support/checkpoint_file.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::Samples;
using training::TrainConfig;

constexpr const char* kState = test::kCheckpointState;

struct Normed : nn::Module<Normed> {
  nn::Linear fc = child("fc", nn::Linear{{.in = 4, .out = 6}});
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 6}});
  nn::Linear last = child("last", nn::Linear{{.in = 6, .out = 2}});
  Tensor forward(const Tensor& x) const { return last(norm(fc(x))); }
};

using test::write_signed_checkpoint;

class Checkpoints : public ::testing::Test {
 protected:
  Checkpoints() {
    config_.batch_size = 16;
    config_.optimizer = "adam";
    config_.amp = "f16";
    config_.loss_scale = "megatron:1024,hysteresis=3";
    config_.out = folder_ / "run";
    test::run(config_, net_, samples_.dataset(), samples_.dataset());
    good_ = io::load_safetensors(config_.out / "last.safetensors");
    state_ = json::parse(good_.metadata.at(kState));
    config_.resume = folder_ / "changed.safetensors";
    config_.out.clear();
    config_.epochs = 2;
  }
  // What going on from such a file says; empty when it does.
  std::string go_on(const std::string& state, const NamedTensors& tensors) {
    write_signed_checkpoint(config_.resume, state, tensors);
    const Normed net;
    try {
      test::run(config_, net, samples_.dataset(), samples_.dataset());
    } catch (const Error& e) {  // nothing else, and no crash
      return e.what();
    }
    return "";
  }
  std::string go_on_with(const char* key, const json& value) {
    json state = state_;
    state[key] = value;
    return go_on(state.dump(), good_.tensors);
  }
  std::string go_on_with(const std::string& tensor, const Tensor& value) {
    NamedTensors tensors = good_.tensors;
    const auto it = std::find_if(tensors.begin(), tensors.end(), [&](const auto& t) { return t.name == tensor; });
    EXPECT_NE(it, tensors.end()) << tensor;
    if (it != tensors.end()) it->tensor = value;
    return go_on(state_.dump(), tensors);
  }

  test::TemporaryDir temporary_;
  const fs::path folder_ = temporary_.path();
  const Samples samples_{40, 4, 2, 1};
  const Normed net_;
  TrainConfig config_;
  io::Safetensors good_;
  json state_;
};

TEST_F(Checkpoints, NumbersThatNoRunLeavesBehind) {
  EXPECT_EQ(go_on(state_.dump(), good_.tensors), "") << "as it was";
  EXPECT_EQ(state_["step"], 3) << "40 samples in batches of 16";
  const json huge = std::uint64_t{1} << 63, most = std::numeric_limits<std::int64_t>::max(), null;
  const std::pair<const char*, std::vector<json>> cases[] = {
      {"epoch", {-1, 1.5, huge, most, 3000000000LL, null, "1", true, json::array({1})}},
      {"batch", {-1, 0.5, huge, most, 4, null, "1", true}},
      {"step", {-1, 3.0, huge, most, 1LL << 61, 7, null, "3", false}},
      {"skipped", {-1, 0.5, huge, most, 4, null}},
      {"samples", {-1, 40.5, huge, most, null, "40"}},
      {"batch_size", {-16, 0, 16.5, huge, null, true}},
      {"accumulate", {-1, 0, 1.5, huge, most, 1LL << 40, null, true}},
      {"loss_samples", {-1, 41, 1e300, most, null}},
      {"loss_sum", {null, "0", true, json::object()}},
      {"best", {"0.5", -0.5, 1.5, 1e300, -2, true}},
      {"best_by", {null, 1}},
      {"parts",
       {1, json::object({{"top1", -1}}), json::object({{"top1", 41}}), json::object({{"top5", 0.5}}),
        json::object({{"top5", 1e300}}), json::object({{"top1", null}}), json::object({{"object", 3}})}},
      {"part_samples", {-1, 41, 0.5, null}},
      {"loader_seed", {-1, 0.5, null, "0", true}},
      {"shuffle", {1, null, "true"}},
      {"drop_last", {0, null, "false"}},
      {"finite", {0, null, "false"}},
      {"repeat", {0, 1.5, null, true}},
      {"random_seed", {-1, 0.5, null, "0", 1e30}},
      {"random_offset", {-1, 0.5, null}},
      {"version", {0, 2, 1.0, 1.5, true, null, "1", huge}},
      {"model", {null, 1, json::array()}},
      {"network", {null, 1, json::array({"a"}), std::string((1 << 20) + 1, 'x')}},
      {"amp", {null, 1}},
      {"classes", {1, "ab", json::array({1}), json::object({{"a", "b"}})}},
      {"recipe", {1, json::array({"a"}), json::object({{"lr", 1}})}},
      {"data", {1, json::object({{"train", 1}})}},
      {"optimizer_kind", {null, 1}},
      {"optimizer",
       {null, 1, json::object(), json::object({{"group0.lr", null}}), json::object({{"group0.lr", true}})}},
      {"scaler", {null, 1, json::object(), json::object({{"scale", "x"}}), json::array()}},
      {"scale_rules", {1, json::object({{"floor", null}}), json::object({{"hysteresis", 2}})}},
  };
  for (const auto& [key, values] : cases) {
    for (const json& value : values) {
      const std::string said = go_on_with(key, value);
      EXPECT_NE(said.find("changed.safetensors"), std::string::npos) << key << " " << value << ": " << said;
      // The rules of the loss scale are flags of the run as much as they are its state.
      if (value.is_null() || std::string(key) == "optimizer" || std::string(key) == "scaler") continue;
      const bool named = said.find(key) != std::string::npos || said.find("--") != std::string::npos ||
                         said.find("hysteresis") != std::string::npos ||
                         said.find("steps in each") != std::string::npos;
      EXPECT_TRUE(named) << key << " " << value << ": " << said;
    }
  }
}

TEST_F(Checkpoints, ScalersThatNoRunLeavesBehind) {
  for (const auto& [key, value] : {std::pair<const char*, double>{"scale", 0},
                                   {"scale", -1},
                                   {"scale", 1e300},
                                   {"_growth_tracker", 0.5},
                                   {"_growth_tracker", -7},
                                   {"_growth_tracker", 1e18},
                                   {"growth_interval", 0},
                                   {"growth_factor", 0.5},
                                   {"backoff_factor", 2},
                                   {"hysteresis_used", -1},
                                   {"hysteresis_used", 1.5}}) {
    json scaler = state_["scaler"];
    scaler[key] = value;
    EXPECT_NE(go_on_with("scaler", scaler).find("changed.safetensors"), std::string::npos) << key << " " << value;
  }
}

// Counters are whole numbers: a NaN in their place would become one.
TEST_F(Checkpoints, NumbersThatAreNoneInCounters) {
  const std::string tracked = "norm.num_batches_tracked", steps = "optimizer.group0.steps";
  const auto old = [&](const std::string& name) {
    const auto it =
        std::find_if(good_.tensors.begin(), good_.tensors.end(), [&](const auto& t) { return t.name == name; });
    return it->tensor;
  };
  ASSERT_EQ(old(tracked).dtype(), i64);
  ASSERT_EQ(old(steps).dtype(), i64);
  for (const std::string& name : {tracked, steps}) {
    const Shape sizes = old(name).sizes();
    for (const DType dtype : {f32, f64, f16}) {
      for (const double value : {std::nan(""), std::numeric_limits<double>::infinity(), 1.0}) {
        const std::string said = go_on_with(name, full(sizes, value, {.dtype = dtype}));
        EXPECT_NE(said.find("as i64, got"), std::string::npos) << name << " " << value << ": " << said;
      }
    }
    for (const std::int64_t value :
         {std::int64_t{-1}, std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()}) {
      const Tensor wrong = zeros(sizes, {.dtype = i64});
      for (std::int64_t i = 0; i < wrong.numel(); ++i) wrong.data<std::int64_t>()[i] = value;
      const std::string said = go_on_with(name, wrong);
      EXPECT_NE(said.find(name.substr(name.find("group") == std::string::npos ? 0 : 10)), std::string::npos) << said;
      EXPECT_NE(said.find(std::to_string(value)), std::string::npos) << said;
    }
  }
  // A parameter made no more steps than the run.
  EXPECT_NE(go_on_with(steps, full(old(steps).sizes(), 4, {.dtype = i64})).find("expected from 0 to 3"),
            std::string::npos);
  EXPECT_NE(go_on_with("optimizer.fc.weight.exp_avg", zeros({6, 4}, {.dtype = i32})).find("floating"),
            std::string::npos);
}

// Anything in any place of the state.
TEST_F(Checkpoints, WhateverTheStateSaysNothingCrashes) {
  RandomStream random(11);
  const json odd[] = {-1,
                      0,
                      1,
                      7,
                      1.5,
                      1e300,
                      -1e300,
                      std::numeric_limits<std::int64_t>::max(),
                      std::numeric_limits<std::int64_t>::min(),
                      std::numeric_limits<std::uint64_t>::max(),
                      nullptr,
                      true,
                      "",
                      "x",
                      std::string(5000, 'y'),
                      json::array(),
                      json::object(),
                      json::array({1, "a"}),
                      json::object({{"group0.lr", -1}})};
  int refused = 0, went_on = 0;
  for (int i = 0; i < 600; ++i) {
    json state = state_;
    for (std::uint64_t changes = 1 + random() % 2; changes > 0; --changes) {
      auto it = state.begin();
      std::advance(it, static_cast<std::ptrdiff_t>(random() % state.size()));
      if (it->is_object() && !it->empty() && random() % 2 == 0) {
        auto inner = it->begin();
        std::advance(inner, static_cast<std::ptrdiff_t>(random() % it->size()));
        *inner = odd[random() % std::size(odd)];
      } else if (random() % 5 == 0) {
        state.erase(it);
      } else {
        *it = odd[random() % std::size(odd)];
      }
    }
    const std::string said = go_on(state.dump(), good_.tensors);
    (said.empty() ? went_on : refused)++;
    EXPECT_LT(said.size(), 1000U) << "a page of what was found";
  }
  EXPECT_GT(refused, 300);
  EXPECT_GT(went_on, 10) << "changes that make no difference, or none that can't be";
}

// Weights of any file: PyTorch's own counters are integers, and so is whatever is loaded into one.
TEST(StateDict, ANumberThatIsNoneIsNoCounter) {
  const Normed net;
  const auto load = [&](double value, DType dtype) {
    NamedTensors state = net.state_dict();
    for (NamedTensor& t : state) {
      if (t.name == "norm.num_batches_tracked") t.tensor = full({}, value, {.dtype = dtype});
    }
    net.load_state_dict(state);
    return net.norm.num_batches_tracked.item<std::int64_t>();
  };
  EXPECT_EQ(load(7, f32), 7);
  EXPECT_EQ(load(9, i32), 9);
  for (const double value : {std::nan(""), HUGE_VAL, -HUGE_VAL, 0.5, 1e300}) {
    EXPECT_THROW(load(value, f64), Error) << value;
    EXPECT_EQ(net.norm.num_batches_tracked.item<std::int64_t>(), 9) << "nothing was loaded";
  }
}

// hysteresis that was used up stays used up: the scale falls with the third overflow, whichever part of the run it is
// in.
TEST(LossScales, PoliciesGoOnWhereTheyWere) {
  const test::TemporaryDir temporary;
  const Samples samples(64, 4, 2, 1);
  TrainConfig config;
  config.batch_size = 16;
  config.amp = "f16";
  config.epochs = 2;
  for (const char* scale :
       {"megatron:1e9,hysteresis=3", "deepspeed:1e9,hysteresis=3", "apex:1e9", "jmp:1e9", "keras:1e9"}) {
    config.loss_scale = scale;
    config.resume.clear();
    config.out = temporary.path() / "whole";
    config.overwrite = true;
    manual_seed(4);
    const test::Regression net(4, 2), other = nn::clone(net);
    const test::Recorded whole = test::run(config, net, samples.dataset(), samples.dataset());
    config.out = temporary.path() / "parts";
    const test::Recorded first = test::run(config, other, samples.dataset(), samples.dataset(), 2);
    config.resume = config.out;
    config.overwrite = false;
    const test::Recorded rest = test::run(config, other, samples.dataset(), samples.dataset());
    ASSERT_EQ(first.steps.size() + rest.steps.size(), whole.steps.size());
    bool moved = false;
    for (std::size_t i = 0; i < whole.steps.size(); ++i) {
      const auto& step = i < 2 ? first.steps[i] : rest.steps[i - 2];
      EXPECT_EQ(step.scale, whole.steps[i].scale) << scale << " " << i;
      moved |= step.scale != 1e9;
    }
    EXPECT_TRUE(moved) << scale;
    // With another rule it is another run.
    config.epochs = 3;
    config.loss_scale =
        std::string(scale).find("hysteresis") == std::string::npos ? "deepspeed" : "megatron:1e9,hysteresis=2";
    EXPECT_THROW(test::run(config, other, samples.dataset(), samples.dataset()), IoError) << scale;
    config.epochs = 2;
  }
}

}  // namespace
}  // namespace halfstep
