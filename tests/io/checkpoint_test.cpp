// SPDX-License-Identifier: Apache-2.0
// Checkpoints of custom loops: a loop resumes bit-exactly, and a file that doesn't fit is refused before anything is
// changed.
#include "halfstep/io/checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/core/fail.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/checkpoint.h"
#include "tests/support/checkpoint_file.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"
#include "tests/train/small_run.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::error_of;

struct Net : nn::Module<Net> {
  explicit Net(std::int64_t hidden = 8)
      : fc(child("fc", nn::Linear{{.in = 4, .out = hidden}})),
        norm(child("norm", nn::BatchNorm1d{{.channels = hidden}})),
        dropout(child("dropout", nn::Dropout{{.p = 0.25}})),
        last(child("last", nn::Linear{{.in = hidden, .out = 3}})) {}
  Tensor forward(const Tensor& x) const { return last(dropout(norm(fc(x)))); }
  nn::Linear fc;
  nn::BatchNorm1d norm;
  nn::Dropout dropout;
  nn::Linear last;
};

// All that a custom loop has: dropout from the default generator, f16 with a scale that moves, rates that move, a
// shuffled loader.
struct Loop {
  Net net;
  optim::AdamW optimizer{net.parameters(), {.lr = 0.05}};
  amp::GradScaler scaler{amp::LossScalePolicy({.init_scale = 1 << 20, .growth_interval = 3, .hysteresis = 2})};
  optim::WarmupCosineLR schedule{optimizer, {.warmup_steps = 3, .total_steps = 40}};
  optim::EMA average{net.parameters(), {.decay = 0.9}};
  data::DataLoader loader{test::Samples(50, 4, 3, 7).dataset(), {.batch_size = 8, .shuffle = true, .seed = 5}};
  std::int64_t steps = 0;
  std::vector<double> losses = {};

  // Until so many steps are done, from wherever it stands.
  void run(std::int64_t until) {
    while (steps < until) {
      for (const data::Batch& batch : loader) {
        optimizer.zero_grad();
        Tensor loss;
        {
          const amp::Autocast region({.dtype = f16});
          loss = cross_entropy(net(batch.input), batch.target);
        }
        scaler.scale(loss).backward();
        scaler.step(optimizer);
        scaler.update();
        schedule.step();
        average.update();
        losses.push_back(loss.item<double>());
        if (++steps == until) break;
      }
    }
  }
  void save(const fs::path& path) {
    io::save_checkpoint(path,
                        {net, optimizer, scaler, schedule, average, default_generator(), loader, {"steps", steps}});
  }
  void load(const fs::path& path) {
    io::load_checkpoint(path,
                        {net, optimizer, scaler, schedule, average, default_generator(), loader, {"steps", steps}});
  }
  // Everything, to compare bit by bit.
  std::vector<std::vector<double>> values() const {
    auto all = test::values(net);
    const optim::OptimizerState state = optimizer.state_dict();
    for (const NamedTensor& t : state.tensors) all.push_back(t.tensor.to_vector<double>());
    for (const NamedTensor& t : average.averages()) all.push_back(t.tensor.to_vector<double>());
    all.push_back({static_cast<double>(average.updates())});
    for (const auto& numbers : {state.numbers, scaler.state_dict(), schedule.state_dict()}) {
      std::vector<double> row;
      for (const auto& [name, value] : numbers) row.push_back(value);
      all.push_back(row);
    }
    const data::LoaderState at = loader.state();
    const PhiloxState random = default_generator().state();
    all.push_back({static_cast<double>(at.epoch), static_cast<double>(at.batch), static_cast<double>(random.seed),
                   static_cast<double>(random.offset), static_cast<double>(steps)});
    return all;
  }
};

class OwnCheckpoints : public ::testing::Test {
 protected:
  // The error of loading, which names the file; what is loaded into stays as it was.
  template <class F>
  std::string refused(F&& load) {
    std::string said = error_of<IoError>(std::forward<F>(load));
    EXPECT_NE(said.find(file_.filename().string()), std::string::npos) << said;
    return said;
  }
  static bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

  test::TemporaryDir temporary_;
  const fs::path file_ = temporary_.path() / "loop.safetensors";
};

// 7 batches an epoch: saved in the middle of an epoch, and at the end of one.
TEST_F(OwnCheckpoints, ResumeBitExactly) {
  manual_seed(3);
  Loop whole;
  whole.run(24);
  for (const std::int64_t at : {1, 10, 14, 23}) {
    manual_seed(3);
    Loop first;
    first.run(at);
    first.save(file_);
    manual_seed(99);
    Loop second;
    second.load(file_);
    EXPECT_EQ(second.values(), first.values()) << at;
    second.run(24);
    EXPECT_EQ(second.values(), whole.values()) << at;
    EXPECT_EQ(second.losses, std::vector<double>(whole.losses.begin() + at, whole.losses.end())) << at;
  }
  EXPECT_NE(whole.scaler.get_scale(), 1 << 20) << "a scale that doesn't move proves nothing";
}

TEST_F(OwnCheckpoints, AnySubsetInAnyOrder) {
  manual_seed(3);
  Loop from;
  from.run(5);
  io::save_checkpoint(file_, {from.schedule, from.net});
  Loop to;
  EXPECT_NE(test::values(to.net), test::values(from.net));
  io::load_checkpoint(file_, {to.net});
  EXPECT_EQ(test::values(to.net), test::values(from.net));
  EXPECT_EQ(to.schedule.steps(), 0) << "it wasn't asked for";
  io::load_checkpoint(file_, {to.net, to.schedule});
  EXPECT_EQ(to.schedule.steps(), 5);
  const std::string missing = refused([&] { to.load(file_); });
  EXPECT_TRUE(has(missing, "expected a part 'optimizer' (optimizer), got a checkpoint of model, schedule")) << missing;
}

// Two of a kind have names of their own, and their tensors don't mix.
TEST_F(OwnCheckpoints, SeveralOfAKind) {
  manual_seed(3);
  Net a, b(5);
  optim::SGD sgd{a.parameters(), {.lr = 0.5, .momentum = 0.9}};
  optim::Adam adam{b.parameters(), {.lr = 0.25}};
  for (const auto& net : {a.fc, b.fc}) Tensor(net.weight).set_grad(ones(net.weight.sizes()));
  sgd.step();
  adam.step();
  double best = -std::numeric_limits<double>::infinity();
  std::int64_t count = (std::int64_t{1} << 60) + 1;
  amp::DynamicLossScaler scaler{1024, 2, 50};
  optim::ReduceLROnPlateau plateau{sgd};
  io::save_checkpoint(
      file_, {a, {"second", b}, sgd, {"second_adam", adam}, {"best", best}, {"count", count}, scaler, plateau});
  manual_seed(4);
  Net c, d(5);
  optim::SGD sgd2{c.parameters(), {.lr = 0.1, .momentum = 0.9}};
  optim::Adam adam2{d.parameters(), {.lr = 0.1}};
  double best2 = 0;
  std::int64_t count2 = 0;
  amp::DynamicLossScaler scaler2{4, 2, 50};
  optim::ReduceLROnPlateau plateau2{sgd2};
  plateau2.step(1);
  io::load_checkpoint(
      file_, {{"second_adam", adam2}, {"best", best2}, {"count", count2}, {"second", d}, c, sgd2, scaler2, plateau2});
  EXPECT_EQ(test::values(c), test::values(a));
  EXPECT_EQ(test::values(d), test::values(b));
  EXPECT_EQ(sgd2.lr(), 0.5);
  EXPECT_EQ(adam2.lr(), 0.25);
  const auto tensors = [](const optim::Optimizer& o) {
    std::vector<std::vector<double>> all;
    for (const NamedTensor& t : o.state_dict().tensors) all.push_back(t.tensor.to_vector<double>());
    return all;
  };
  EXPECT_EQ(tensors(sgd2), tensors(sgd));
  EXPECT_EQ(tensors(adam2), tensors(adam));
  EXPECT_EQ(best2, best);
  EXPECT_EQ(count2, count);
  EXPECT_EQ(scaler2.scale_value(), 1024);
  EXPECT_EQ(plateau2.best(), plateau.best());
}

// A name of another kind of part is one like any other.
TEST_F(OwnCheckpoints, PartsUnderTheNamesOfOtherKinds) {
  manual_seed(3);
  Net a, b(5);
  optim::SGD d_sgd{a.parameters(), {.lr = 0.5, .momentum = 0.9}};
  optim::Adam g_adam{b.parameters(), {.lr = 0.25}};
  for (const auto& net : {a.fc, b.fc}) Tensor(net.weight).set_grad(ones(net.weight.sizes()));
  d_sgd.step();
  g_adam.step();
  std::int64_t n = 3, m = 7;
  Generator own(5), other(6);
  io::save_checkpoint(
      file_,
      {{"optimizer", d_sgd}, {"generator", g_adam}, {"schedule", n}, {"loader", m}, {"model", own}, {"scaler", other}});
  Net c, d(5);
  optim::SGD sgd{c.parameters(), {.lr = 0.1, .momentum = 0.9}};
  optim::Adam adam{d.parameters(), {.lr = 0.1}};
  std::int64_t n2 = 0, m2 = 0;
  Generator own2(1), other2(1);
  io::load_checkpoint(
      file_,
      {{"optimizer", sgd}, {"generator", adam}, {"schedule", n2}, {"loader", m2}, {"model", own2}, {"scaler", other2}});
  EXPECT_EQ(sgd.lr(), 0.5);
  EXPECT_EQ(adam.lr(), 0.25);
  EXPECT_EQ(n2, 3);
  EXPECT_EQ(m2, 7);
  EXPECT_EQ(own2.seed(), 5u);
  EXPECT_EQ(other2.seed(), 6u);
}

// Earlier versions kept them by their names among the standard ones: read where nothing was lost, else refused.
TEST_F(OwnCheckpoints, PartsUnderTheNamesOfOtherKindsInEarlierFiles) {
  std::int64_t n = 0, m = 0;
  const json one = {{"version", 1}, {"holds", {{"schedule", "whole number"}}}, {"value", 3}};
  test::write_signed_checkpoint(file_, one.dump(), {});
  io::load_checkpoint(file_, {{"schedule", n}});
  EXPECT_EQ(n, 3);
  json two = one;
  two["holds"]["loader"] = "whole number";
  test::write_signed_checkpoint(file_, two.dump(), {});
  for (const char* part : {"schedule", "loader"}) {
    EXPECT_TRUE(has(refused([&] { io::load_checkpoint(file_, {{part, m}}); }), "were written over one another"));
  }
  EXPECT_EQ(m, 0);
}

TEST_F(OwnCheckpoints, KnowTheKindOfSchedule) {
  Net net;
  optim::SGD sgd{net.parameters(), {.lr = 0.1}};
  optim::StepLR steps{sgd, {.step_size = 2}};
  optim::CosineAnnealingLR cosine{sgd, {.t_max = 9}};
  optim::Schedule rule{sgd, [](double base, std::int64_t) { return base; }};
  for (int i = 0; i < 5; ++i) steps.step();
  io::save_checkpoint(file_, {steps});
  EXPECT_TRUE(has(refused([&] { io::load_checkpoint(file_, {cosine}); }),
                  "its part 'schedule' doesn't fit: expected the state of CosineAnnealingLR, got that of StepLR"));
  EXPECT_TRUE(has(refused([&] { io::load_checkpoint(file_, {rule}); }), "expected the state of Schedule, got that of"));
  EXPECT_EQ(cosine.steps(), 0);
  optim::StepLR same{sgd, {.step_size = 2}};
  io::load_checkpoint(file_, {same});
  EXPECT_EQ(same.steps(), 5);
  // Earlier files don't say it.
  json state = json::parse(io::load_safetensors(file_).metadata.at(test::kCheckpointState));
  state.erase("schedule_kind");
  test::write_signed_checkpoint(file_, state.dump(), {});
  io::load_checkpoint(file_, {cosine});
  EXPECT_EQ(cosine.steps(), 5);
}

TEST_F(OwnCheckpoints, WhatDoesNotFitIsRefusedAndChangesNothing) {
  manual_seed(3);
  Loop from;
  from.run(5);
  from.save(file_);
  Loop to;
  Net wide(9);
  optim::AdamW of_wide{wide.parameters(), {.lr = 0.1}};
  optim::SGD sgd{to.net.parameters(), {.lr = 0.1}};
  optim::EMA average_of_wide{wide.parameters()};
  amp::GradScaler off({.enabled = false});
  amp::DynamicLossScaler other{4, 2, 50};
  optim::ReduceLROnPlateau plateau{to.optimizer};
  const auto samples = [](std::size_t n) { return test::Samples(n, 4, 3, 7).dataset(); };
  data::DataLoader fewer{samples(49), {.batch_size = 8, .shuffle = true, .seed = 5}},
      larger{samples(50), {.batch_size = 9, .shuffle = true, .seed = 5}},
      seeded{samples(50), {.batch_size = 8, .shuffle = true, .seed = 6}},
      ordered{samples(50), {.batch_size = 8, .seed = 5}},
      twice{samples(50), {.batch_size = 8, .shuffle = true, .seed = 5, .repeat = 2}};
  double real = 0;
  const auto before = to.values();  // the networks above have drawn from the default generator
  // The last of the parts doesn't fit: those before it were restored, and are as they were again.
  const auto says = [&](const io::CheckpointPart& last, const std::string& part) {
    const std::string said = refused([&] {
      if (last.name() == "optimizer") {
        io::load_checkpoint(file_, {to.scaler, to.schedule, default_generator(), to.loader, to.net, last});
      } else if (last.name() == "scaler") {
        io::load_checkpoint(file_, {to.optimizer, to.schedule, default_generator(), to.loader, to.net, last});
      } else if (last.name() == "loader") {
        io::load_checkpoint(file_, {to.optimizer, to.scaler, to.schedule, default_generator(), to.net, last});
      } else if (last.name() == "schedule") {
        io::load_checkpoint(file_, {to.optimizer, to.scaler, to.loader, default_generator(), to.net, last});
      } else if (last.name() == "steps" || last.name() == "epochs") {
        io::load_checkpoint(file_, {to.average, to.optimizer, to.scaler, to.loader, to.net, last});
      } else {
        io::load_checkpoint(file_, {to.optimizer, to.scaler, to.schedule, default_generator(), to.loader, last});
      }
    });
    EXPECT_TRUE(has(said, part)) << said;
    EXPECT_EQ(to.values(), before) << part;
  };
  says(wide, "its part 'model' doesn't fit: expected fc.weight [9, 4], got [8, 4]");
  says(of_wide, "its part 'optimizer' doesn't fit: AdamW: expected");
  says(average_of_wide, "its part 'average' doesn't fit: EMA: expected fc.weight");
  says(sgd, "its part 'optimizer' doesn't fit: expected the state of SGD, got that of AdamW");
  says(off, "expected the state of a disabled scaler, got that of an enabled one");
  says(other, "expected its part 'scaler' to be a loss scaler, got a gradient scaler");
  says(plateau, "expected its part 'schedule' to be a plateau schedule, got a schedule");
  says(fewer, "its part 'loader' doesn't fit: expected a loader of samples 50, got one of 49");
  says(larger, "expected a loader of batch size 8, got one of 9");
  says(seeded, "expected a loader of seed 5, got one of 6");
  says(ordered, "expected a loader of shuffle true, got one of false");
  says(twice, "expected a loader of repeat 1, got one of 2");
  says({"steps", real}, "expected its part 'steps' to be a number, got a whole number");
  says({"epochs", to.steps},
       "expected a part 'epochs' (whole number), got a checkpoint of average, generator, loader, model,");
}

TEST_F(OwnCheckpoints, FilesThatAreNone) {
  Loop loop;
  const auto before = loop.values();
  const auto load = [&] { loop.load(file_); };
  EXPECT_TRUE(has(refused(load), "there is no such file"));
  std::ofstream(file_) << "not a checkpoint";
  EXPECT_NE(refused(load), "");
  io::save_safetensors(file_, loop.net.state_dict());
  EXPECT_TRUE(has(refused(load), "expected a checkpoint, got a safetensors file without training state"));
  loop.save(file_);
  // One bit of a weight.
  std::fstream bytes(file_, std::ios::in | std::ios::out | std::ios::binary);
  bytes.seekg(-1, std::ios::end);
  const char last = static_cast<char>(bytes.get());
  bytes.seekp(-1, std::ios::end);
  bytes.put(static_cast<char>(last ^ 1));
  bytes.close();
  EXPECT_TRUE(has(refused(load), "its checksum is"));
  EXPECT_EQ(loop.values(), before);
}

// A file of a later version, or by another hand: its checksum is right.
TEST_F(OwnCheckpoints, UnknownPartsAreRefused) {
  Loop loop;
  loop.save(file_);
  io::Safetensors content = io::load_safetensors(file_);
  const json state = json::parse(content.metadata.at(test::kCheckpointState));
  const auto with = [&](const auto& change) {
    json changed = state;
    change(changed);
    test::write_signed_checkpoint(file_, changed.dump(), content.tensors);
    return refused([&] { loop.load(file_); });
  };
  EXPECT_EQ(error_of([&] { loop.load(file_); }), "");
  EXPECT_TRUE(has(with([](json& s) { s["holds"]["ema"] = "average of weights"; }),
                  "its part 'ema' is a 'average of weights', which this version of Halfstep doesn't know"));
  EXPECT_TRUE(has(with([](json& s) { s["holds"] = 3; }), "an object of texts"));
  EXPECT_TRUE(has(with([](json& s) { s["holds"]["model"] = 3; }), "a text for 'holds.model'"));
  EXPECT_TRUE(has(with([](json& s) { s.erase("others"); }), "a whole number"));
  EXPECT_TRUE(has(with([](json& s) { s["others"]["steps"]["value"] = "many"; }), "a whole number"));
  EXPECT_TRUE(has(with([](json& s) { s["schedule"]["steps"] = "3"; }), "a finite number"));
  EXPECT_TRUE(has(with([](json& s) { s["schedule"] = json::object(); }), "its part 'schedule' doesn't fit"));
  EXPECT_TRUE(has(with([](json& s) { s["epoch"] = -1; }), "for 'epoch'"));
  EXPECT_TRUE(has(with([](json& s) { s["batch"] = 8; }), "its part 'loader' doesn't fit"));
  EXPECT_TRUE(has(with([](json& s) { s["random_seed"] = -1; }), "64 bits"));
}

TEST_F(OwnCheckpoints, MistakesInTheCall) {
  Net a, b;
  struct Odd : nn::Module<Odd> {
    nn::Linear fc = child("optimizer", nn::Linear{{.in = 2, .out = 2}});
  } odd;
  optim::SGD sgd{odd.parameters(), {.lr = 0.1, .momentum = 0.9}};
  EXPECT_TRUE(has(error_of([&] { io::save_checkpoint(file_, {}); }), "expected at least one part"));
  EXPECT_TRUE(has(error_of([&] { io::save_checkpoint(file_, {a, b}); }), "expected one part called 'model', got two"));
  EXPECT_TRUE(has(error_of([&] { io::save_checkpoint(file_, {{"", a}}); }), "got ''"));
  EXPECT_TRUE(has(error_of([&] { io::save_checkpoint(file_, {{"a.b", a}}); }), "got 'a.b'"));
  EXPECT_TRUE(has(error_of([&] { io::save_checkpoint(file_, {odd, sgd}); }), "begins with the name of the part"));
  EXPECT_FALSE(fs::exists(file_));
  EXPECT_EQ(error_of([&] { io::save_checkpoint(file_, {odd, {"sgd", sgd}}); }), "");
}

// One format: a run's checkpoint is read here, and the weights of one from here are read as those of a run.
TEST_F(OwnCheckpoints, AreOfTheSameFormatAsARuns) {
  manual_seed(3);
  const test::Samples samples(50, 4, 3, 7);
  const Net net;
  training::TrainConfig config;
  config.batch_size = 8;
  config.optimizer = "adamw";
  config.amp = "f16";
  config.loss_scale = "dynamic:1024";  // too small to skip a step
  config.seed = 5;
  config.out = temporary_.path() / "run";
  test::run(config, net, samples.dataset(), samples.dataset());
  Loop loop;
  amp::GradScaler scaler;
  manual_seed(77);
  const fs::path last = config.out / "last.safetensors";
  io::load_checkpoint(last, {loop.net, loop.optimizer, scaler, default_generator(), loop.loader});
  EXPECT_EQ(test::values(loop.net), test::values(net));
  EXPECT_EQ(loop.loader.state(), (data::LoaderState{.epoch = 1, .batch = 0}));
  EXPECT_EQ(loop.optimizer.state_dict().tensors.front().tensor.to_vector<std::int64_t>().front(), 7);
  EXPECT_NE(default_generator().seed(), 77u);
  EXPECT_TRUE(
      has(error_of<IoError>([&] { io::load_checkpoint(last, {loop.schedule}); }), "expected a part 'schedule'"));

  // Its order is a shuffled one.
  data::DataLoader ordered{samples.dataset(), {.batch_size = 8, .seed = 5}},
      shorter{samples.dataset(), {.batch_size = 8, .shuffle = true, .drop_last = true, .seed = 5}},
      twice{samples.dataset(), {.batch_size = 8, .shuffle = true, .seed = 5, .repeat = 2}};
  for (const auto& [loader, said] : {std::pair{&ordered, "expected a loader of shuffle true, got one of false"},
                                     {&shorter, "expected a loader of drop_last false, got one of true"},
                                     {&twice, "expected a loader of repeat 1, got one of 2"}}) {
    EXPECT_TRUE(has(error_of<IoError>([&] { io::load_checkpoint(last, {*loader}); }), said)) << said;
  }
  // Files of earlier versions don't say it.
  const io::Safetensors content = io::load_safetensors(last);
  json state = json::parse(content.metadata.at(test::kCheckpointState));
  for (const char* key : {"shuffle", "drop_last", "repeat"}) EXPECT_EQ(state.erase(key), 1u) << key;
  test::write_signed_checkpoint(file_, state.dump(), content.tensors);
  io::load_checkpoint(file_, {ordered});
  EXPECT_EQ(ordered.state(), (data::LoaderState{.epoch = 1, .batch = 0}));

  loop.save(file_);
  const training::SavedWeights weights = training::load_saved_weights(file_);
  EXPECT_EQ(weights.model, "");
  EXPECT_EQ(weights.tensors.size(), net.state_dict().size());
  Net other;
  other.load_state_dict(weights.tensors);
  EXPECT_EQ(test::values(other), test::values(net));
  const std::string said = refused([&] { training::load_checkpoint(file_); });
  EXPECT_TRUE(has(said, "expected a checkpoint of a run, got a checkpoint of average, generator, loader, model"))
      << said;
  io::save_checkpoint(file_, {loop.optimizer});
  EXPECT_TRUE(has(refused([&] { training::load_saved_weights(file_); }), "expected a network, got a checkpoint of"));
}

}  // namespace
}  // namespace halfstep
