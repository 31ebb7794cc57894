// SPDX-License-Identifier: Apache-2.0
// Checkpoints and evaluations of a state that ranks divide: what is saved in shards is read as a whole one, and passes
// bring parameters as those of training do.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/data/loader.h"
#include "halfstep/dist/zero.h"
#include "halfstep/io/checkpoint.h"
#include "halfstep/io/weights.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/optim/adam.h"
#include "halfstep/train/evaluate.h"
#include "tests/ranks/networks.h"
#include "tests/support/errors.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;
using dist::DataParallel;
using dist::ZeroRedundancy;
using test::error_of;
using test::values_of;
using test::world;

struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 12, .out = 32}});
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 32}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 32, .out = 4}});
  Tensor forward(const Tensor& x) const { return fc2(relu(norm(fc1(x)))); }
};

using State = std::map<std::string, std::vector<double>>;
State state_of(const optim::OptimizerState& state) {
  State values;
  for (const NamedTensor& t : state.tensors) values[t.name] = t.tensor.to_vector<double>();
  for (const auto& [name, value] : state.numbers) values[name] = {value};
  return values;
}

// A network in training, and the folder that all ranks write into.
class ZeroCheckpoint : public testing::TestWithParam<int> {
 protected:
  ZeroCheckpoint() {
    if (world().rank() == 0) own_.emplace();
    folder_ = world().broadcast_text(own_ ? own_->path().native() : std::string());
    file_ = folder_ / "run.safetensors";
    manual_seed(7);
    steps(3);
  }
  ~ZeroCheckpoint() override { world().barrier(); }

  void steps(int count) {
    for (int i = 0; i < count; ++i) {
      adam_.zero_grad();
      cross_entropy(parallel_(randn({8, 12})), randint(0, 4, {8})).backward();
      adam_.step();
    }
  }
  std::vector<double> weights() {
    const auto whole = zero_.gather_parameters();
    return values_of(net_.state_dict());
  }
  State state() {  // on all ranks
    State found;
    for (int to = 0; to < world().size(); ++to) {
      zero_.consolidate_state_dict(to);
      if (to == world().rank()) found = state_of(adam_.state_dict());
    }
    zero_.drop_state_dict();
    return found;
  }
  std::vector<std::string> files() {
    world().barrier();
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
  std::vector<std::string> expected_files(int number) const {
    std::vector<std::string> names{"run.safetensors"};
    for (int rank = 0; rank < world().size() && world().size() > 1; ++rank) {
      names.push_back(fmt::format("run.{}.rank{}-of-{}.safetensors", number, rank, world().size()));
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  void save() { io::save_checkpoint(file_, {net_, adam_, {"steps", steps_}}); }
  // Each rank by itself, as one process.
  void expect_saved(const std::vector<double>& weights, const State& state) {
    world().barrier();
    const Net net;
    optim::Adam adam(net.parameters());
    std::int64_t steps = 0;
    io::load_checkpoint(file_, {net, adam, {"steps", steps}});
    EXPECT_EQ(values_of(net.state_dict()), weights);
    EXPECT_EQ(state_of(adam.state_dict()), state);
    EXPECT_EQ(steps, 11);
    world().barrier();
  }

  std::optional<test::TemporaryDir> own_;
  fs::path folder_, file_;
  Net net_ = (manual_seed(3), Net());
  optim::Adam adam_{net_.parameters()};
  DataParallel<Net> parallel_{net_, world()};
  ZeroRedundancy zero_{parallel_, adam_, {.stage = GetParam()}};
  std::int64_t steps_ = 11;
};

TEST_P(ZeroCheckpoint, OfOnesOwnLoopIsReadByOneProcess) {
  save();
  EXPECT_EQ(files(), expected_files(1));
  expect_saved(weights(), state());
  // The next one takes its place, with its shards.
  steps(2);
  save();
  EXPECT_EQ(files(), expected_files(2));
  expect_saved(weights(), state());
  const NamedTensors tensors = io::load_weights_file(file_).tensors;
  EXPECT_EQ(std::count_if(tensors.begin(), tensors.end(), [](const auto& t) { return t.name == "fc1.weight"; }), 1);
  world().barrier();
}

TEST_P(ZeroCheckpoint, GoesOnWithTheBitsOfTheRunThatWentOn) {
  save();
  const PhiloxState random = default_generator().state();
  steps(3);
  const std::vector<double> expected = weights();
  world().barrier();
  const Net next;
  optim::Adam again(next.parameters());
  std::int64_t count = 0;
  io::load_checkpoint(file_, {next, again, {"steps", count}});
  DataParallel on(next, world());
  ZeroRedundancy divided(on, again, {.stage = GetParam()});
  default_generator().set_state(random);
  for (int i = 0; i < 3; ++i) {
    again.zero_grad();
    cross_entropy(on(randn({8, 12})), randint(0, 4, {8})).backward();
    again.step();
  }
  const auto whole = divided.gather_parameters();
  EXPECT_EQ(values_of(next.state_dict()), expected);
}

// One rank that can't write is an error of all, which names it; the checkpoint before stays whole.
TEST_P(ZeroCheckpoint, OfARankThatCanNotWriteFailsOnAll) {
  if (world().size() == 1) return;
  save();
  const std::vector<double> before = weights();
  const State state_before = state();
  steps(1);
  const int last = world().size() - 1;
  const std::string name = expected_files(2)[static_cast<std::size_t>(last)];
  if (world().rank() == 0) fs::create_directories(folder_ / name / "in the way");
  world().barrier();
  const std::string said = error_of<IoError>([&] { save(); });
  EXPECT_NE(said.find(name + ": can't be written: it is a folder"), std::string::npos) << said;
  EXPECT_EQ(said.starts_with(fmt::format("rank {}: ", last)), world().rank() != last) << said;
  expect_saved(before, state_before);
  // What was left of it is in nobody's way.
  if (world().rank() == 0) fs::remove_all(folder_ / name);
  world().barrier();
  save();
  EXPECT_EQ(files(), expected_files(2));
  expect_saved(weights(), state());
}

// With the whole state on one rank, that one writes one file.
TEST_P(ZeroCheckpoint, IsOneFileOfAStateThatWasConsolidated) {
  const std::vector<double> expected = weights();
  const State expected_state = state();
  zero_.consolidate_state_dict();
  const auto whole = zero_.gather_parameters();
  if (world().rank() == 0) save();
  EXPECT_EQ(files(), std::vector<std::string>{"run.safetensors"});
  expect_saved(expected, expected_state);
}

INSTANTIATE_TEST_SUITE_P(Stages, ZeroCheckpoint, testing::Values(1, 2, 3));

// ------------------------------------------------------------------------------------------------------- evaluations

class Task final : public training::Task {
 public:
  explicit Task(Net net) : net_(std::move(net)) {}
  const nn::ModuleBase& network() const override { return net_; }
  training::TaskLoss loss(const data::Batch& batch) override {
    return {.loss = cross_entropy(net_(batch.input), batch.target)};
  }

 private:
  Net net_;
};

// The rank with most batches has one or several more than the others.
TEST(ZeroEvaluation, BringsParametersAsModulesRun) {
  const auto evaluated = [](int stage, std::int64_t more) {
    manual_seed(3);
    const Net net;
    optim::Adam adam(net.parameters());
    DataParallel parallel(net, world());
    ZeroRedundancy zero(parallel, adam, {.stage = stage});
    const std::int64_t own = zero.memory().parameters, samples = 8 + (world().rank() == 0 ? more : 0);
    manual_seed(20 + static_cast<std::uint64_t>(world().rank()));
    data::DataLoader loader(data::TensorDataset(randn({samples, 12}), randint(0, 4, {samples})),
                            {.batch_size = 4, .workers = 0});
    Task task(net);
    training::MetricResults results;
    int batches = 0;
    const bool done = training::evaluate(task, loader, results,
                                         {.on_batch =
                                              [&](const training::EvalProgress&) {
                                                ++batches;
                                                EXPECT_EQ(zero.memory().parameters, own);
                                              },
                                          .stop = [] { return false; },
                                          .group = world(),
                                          .sharding = adam.sharding()});
    EXPECT_TRUE(done);
    EXPECT_EQ(batches, (samples + 3) / 4);
    EXPECT_EQ(zero.memory().parameters, own);
    // Steps go on after it.
    cross_entropy(parallel(randn({8, 12})), randint(0, 4, {8})).backward();
    adam.step();
    return static_cast<double>(results["loss"]);
  };
  for (const std::int64_t more : {0, 1, 9}) {
    const double expected = evaluated(1, more);
    EXPECT_EQ(evaluated(3, more), expected) << more << " samples more on rank 0";
    EXPECT_EQ(evaluated(2, more), expected);
  }
}

}  // namespace
}  // namespace halfstep
