// SPDX-License-Identifier: Apache-2.0
// Training with a state that ranks divide (ZeRO), beside the same with all of it on each rank: the same bits. And that
// one beside one process on the whole batch.
#include "halfstep/dist/zero.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/checkpoint.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/clip.h"
#include "halfstep/optim/lbfgs.h"
#include "halfstep/optim/sgd.h"
#include "halfstep/train/train_step.h"
#include "tests/ranks/networks.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using dist::DataParallel;
using dist::ZeroRedundancy;
using test::error_of;
using test::part_of;
using test::relative_error;
using test::values_of;
using test::world;

// fc2's weight has more elements than a norm's kernel adds up at a time, so that the order of its sums counts.
struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 24, .out = 160}});
  nn::LayerNorm norm = child("norm", nn::LayerNorm{{.normalized_shape = {160}}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 160, .out = 128}});
  nn::Linear fc3 = child("fc3", nn::Linear{{.in = 128, .out = 6}});
  Tensor forward(const Tensor& x) const { return fc3(relu(fc2(relu(norm(fc1(x)))))); }
};

// What is trained: float32, autocast to 16 bits, or 16-bit parameters with master weights.
struct Precision {
  const char* name;
  std::optional<DType> autocast;
  DType parameters = f32;
  bool scaled = false;
};
constexpr int kSteps = 6;
const Precision kPrecisions[] = {{"float32", std::nullopt},
                                 {"f16", f16, f32, true},
                                 {"bf16", bf16},
                                 {"f16 parameters", std::nullopt, f16, true},
                                 {"bf16 parameters", std::nullopt, bf16}};

struct Case {
  Precision precision;
  int accumulate = 1;
  double clip = 0;
  bool adam = true;
  std::string text(int stage) const {
    return fmt::format("{}, {} batches a step, clipped at {}, {}, stage {}, {} ranks", precision.name, accumulate, clip,
                       adam ? "AdamW" : "SGD", stage, world().size());
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Precision& p : kPrecisions) {
    for (const int accumulate : {1, 2}) {
      for (const double clip : {0.0, 0.25}) all.push_back({p, accumulate, clip, (accumulate == 1) == (clip == 0)});
    }
  }
  return all;
}

struct Result {
  std::vector<double> losses, weights, scaler;
  std::vector<std::string> overflows;
  std::map<std::string, std::vector<double>> state;  // of the optimizer, where it is whole
};

std::unique_ptr<optim::Optimizer> optimizer_of(const Case& c, const Net& net) {
  // Two groups, as runs without weight decay of biases have.
  NamedTensors matrices, vectors;
  for (const NamedTensor& p : net.parameters()) (p.tensor.dim() > 1 ? matrices : vectors).push_back(p);
  if (c.adam) {
    auto made = std::make_unique<optim::AdamW>(matrices, optim::AdamWOptions{.lr = 1e-3});
    made->add_param_group(vectors, {.lr = 1e-3, .weight_decay = 0});
    return made;
  }
  auto made = std::make_unique<optim::SGD>(matrices, optim::SGDOptions{.lr = 0.02, .momentum = 0.9});
  made->add_param_group(vectors, {.lr = 0.02, .momentum = 0.9});
  return made;
}

std::map<std::string, std::vector<double>> values_of(const optim::OptimizerState& state) {
  std::map<std::string, std::vector<double>> values;
  for (const NamedTensor& t : state.tensors) values[t.name] = t.tensor.to_vector<double>();
  for (const auto& [name, value] : state.numbers) values[name] = {value};
  return values;
}

// On this rank's part of each batch, or alone on all of it. A loss is that of the rank.
Result trained(const Case& c, int stage, bool divided = true) {
  manual_seed(3);
  const Net net;
  if (c.precision.parameters != f32) net.to(c.precision.parameters);
  const auto optimizer = optimizer_of(c, net);
  DataParallel parallel(net, divided ? world() : dist::ProcessGroup(),
                        {.bucket_cap_mb = 0.05, .first_bucket_cap_mb = 0.01});
  std::optional<ZeroRedundancy> zero;
  if (stage > 0) zero.emplace(parallel, *optimizer, dist::ZeroOptions{.stage = stage, .bucket_cap_mb = 0.02});
  // The first step overflows, whatever is divided.
  amp::GradScaler scaler(
      {.init_scale = 0x1p30, .backoff_factor = 0x1p-20, .growth_interval = 2, .enabled = c.precision.scaled});
  Result result;
  manual_seed(7);
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    for (int k = 0; k < c.accumulate; ++k) {
      Tensor x = randn({24, 24}), y = randint(0, 6, {24});
      if (divided) x = part_of(x), y = part_of(y);
      if (c.precision.parameters != f32) x = x.to(c.precision.parameters);
      std::optional<dist::DataParallelBase::NoSync> alone;
      if (k + 1 < c.accumulate) alone.emplace(parallel);
      Tensor loss;
      {
        std::optional<amp::Autocast> region;
        if (c.precision.autocast) region.emplace(amp::AutocastOptions{.dtype = *c.precision.autocast});
        loss = cross_entropy(parallel(x).to(f32), y);
      }
      result.losses.push_back(loss.item<double>());
      loss = loss / c.accumulate;
      // One parameter's gradient overflows, on one rank, after the scale has settled.
      const bool last = !divided || world().rank() == world().size() - 1;
      std::shared_ptr<void> held;
      if (c.precision.scaled && step == 4) {
        if (zero) held = zero->gather_parameters();
        if (last) loss = loss + sum(net.norm.bias.to(f32) * 3e38);
      }
      scaler.scale(loss).backward();
    }
    if (c.clip > 0) {
      Tensor norm = scaler.unscale_(*optimizer, {.norm = true});
      if (zero && !norm.defined()) {
        norm = zero->clip_grad_norm_(c.clip);
      } else {
        norm = optim::clip_grad_norm_(optimizer->named_parameters(), c.clip, {.norm = norm});
      }
      result.losses.push_back(norm.item<double>());
    }
    const amp::StepResult done = scaler.step(*optimizer);
    for (const std::string& name : done.overflows()) result.overflows.push_back(fmt::format("{} {}", step, name));
    if (c.precision.scaled) {
      result.losses.push_back(done.ran() ? 1 : 0);
      scaler.update();
      result.losses.push_back(scaler.get_scale());
    }
  }
  if (zero) zero->consolidate_state_dict();
  if (!zero || world().rank() == 0) result.state = values_of(optimizer->state_dict());
  const auto held = zero ? zero->gather_parameters() : nullptr;
  result.weights = values_of(net.parameters());
  return result;
}

// NaN is like NaN here: norms of steps that overflowed.
void expect_same(const std::vector<double>& got, const std::vector<double>& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(got[i]) && std::isnan(expected[i])) continue;
    ASSERT_EQ(got[i], expected[i]) << what << ", value " << i;
  }
}

class Zero : public testing::TestWithParam<Case> {};

TEST_P(Zero, HasTheBitsOfTheUndividedState) {
  const Case& c = GetParam();
  const Result whole = trained(c, 0);
  if (c.precision.scaled) {
    ASSERT_TRUE(std::find(whole.overflows.begin(), whole.overflows.end(), "4 norm.bias") != whole.overflows.end());
  }
  for (const int stage : {1, 2, 3}) {
    const Result divided = trained(c, stage);
    expect_same(divided.losses, whole.losses, c.text(stage) + ": losses");
    expect_same(divided.weights, whole.weights, c.text(stage) + ": weights");
    EXPECT_EQ(divided.overflows, whole.overflows) << c.text(stage);
    if (world().rank() > 0) continue;
    ASSERT_EQ(divided.state.size(), whole.state.size()) << c.text(stage);
    for (const auto& [name, values] : whole.state) {
      ASSERT_TRUE(divided.state.contains(name)) << c.text(stage) << ": " << name;
      expect_same(divided.state.at(name), values, c.text(stage) + ": " + name);
    }
  }
}

TEST_P(Zero, TrainsAsOneProcessDoes) {
  const Case& c = GetParam();
  if (c.precision.scaled && c.precision.parameters != f32) return;  // overflows are those of the parts
  const Result divided = trained(c, 3), alone = trained(c, 0, false);
  // A mean of parts rounds a few times more: 2^-24 of each sum in float32. In 16 bits each activation is rounded to
  // 2^-9 (bf16: 2^-8 in the gradients) in another place, and Adam's step is lr whatever the gradient's size: a gradient
  // near zero that changes its sign moves a weight by 2 lr a step, 1e-2 in kSteps, of weights that are 0.1 large.
  const double bound = c.precision.autocast || c.precision.parameters != f32 ? 0.1 : c.adam ? 5e-4 : 5e-6;
  EXPECT_LT(relative_error(divided.weights, alone.weights), bound) << c.text(3);
}

INSTANTIATE_TEST_SUITE_P(Matrix, Zero, testing::ValuesIn(cases()), [](const auto& info) {
  const Case& c = info.param;
  std::string name = fmt::format("{}_{}_{}", c.precision.name, c.accumulate == 1 ? "plain" : "accumulated",
                                 c.clip == 0 ? "unclipped" : "clipped");
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
});

// ------------------------------------------------------------------------------------------------------ what each has

TEST(ZeroMemory, IsDivided) {
  manual_seed(3);
  const Net net;
  std::int64_t elements = 0, largest = 0;
  for (const NamedTensor& p : net.parameters()) {
    elements += p.tensor.numel();
    largest = std::max(largest, p.tensor.numel());
  }
  for (const int stage : {1, 2, 3}) {
    const Net own = nn::clone(net);
    optim::Adam adam(own.parameters());
    DataParallel parallel(own, world());
    ZeroRedundancy zero(parallel, adam, {.stage = stage});
    manual_seed(7);
    cross_entropy(parallel(part_of(randn({24, 24}))), part_of(randint(0, 6, {24}))).backward();
    adam.step();
    const dist::ZeroMemory memory = zero.memory();
    std::int64_t mine = 0;
    for (const NamedTensor& p : own.parameters()) {
      if (zero.owner(p.tensor) == world().rank() || world().size() == 1) mine += p.tensor.numel();
    }
    // Whole parameters are dealt out: nobody has more than a share and the largest one.
    EXPECT_LE(mine, elements / world().size() + largest);
    EXPECT_EQ(memory.optimizer, 8 * mine) << "two moments in float32";
    EXPECT_EQ(memory.gradients, 4 * (stage >= 2 ? mine : elements));
    EXPECT_EQ(memory.parameters, 4 * (stage == 3 ? mine : elements));
  }
}

TEST(ZeroMemory, OfOthersParametersReadsAsNan) {
  if (world().size() == 1) return;
  const Net net;
  const std::vector<double> before = values_of(net.parameters());
  optim::SGD sgd(net.parameters(), {.lr = 0.1});
  DataParallel parallel(net, world());
  ZeroRedundancy zero(parallel, sgd, {.stage = 3});
  for (const NamedTensor& p : net.parameters()) {
    const double first = p.tensor.to_vector<double>()[0];
    EXPECT_EQ(std::isnan(first), zero.owner(p.tensor) != world().rank()) << p.name;
  }
  {
    const auto whole = zero.gather_parameters();
    EXPECT_EQ(dist::first_difference(net, world()), "");
  }
  EXPECT_NE(dist::first_difference(net, world()), "");
}

// ----------------------------------------------------------------------------------------------------------
// checkpoints

// A state that was saved by some ranks goes on as a whole one, and divided among any number of them.
TEST(ZeroState, IsWholeAgainOnAnyNumberOfRanks) {
  const auto steps = [](optim::Optimizer& optimizer, DataParallel<Net>& parallel, int count) {
    for (int i = 0; i < count; ++i) {
      optimizer.zero_grad();
      const Tensor x = randn({4, 24}),
                   y = randint(0, 6, {4});  // the same on all ranks, so that their number is no matter
      cross_entropy(parallel(x), y).backward();
      optimizer.step();
    }
  };
  for (const int stage : {1, 2, 3}) {
    manual_seed(3);
    const Net net;
    optim::Adam adam(net.parameters());
    DataParallel parallel(net, world());
    ZeroRedundancy zero(parallel, adam, {.stage = stage});
    manual_seed(7);
    steps(adam, parallel, 3);
    if (world().size() > 1) {
      EXPECT_NE(error_of<Error>([&] { adam.state_dict(); }).find("consolidate_state_dict"), std::string::npos);
    }
    optim::OptimizerState state;  // every rank has it in turn
    for (int to = 0; to < world().size(); ++to) {
      zero.consolidate_state_dict(to);
      if (to == world().rank()) state = adam.state_dict();
    }
    for (NamedTensor& t : state.tensors) t.tensor = t.tensor.clone();  // the next steps write to it
    NamedTensors weights;
    {
      const auto whole = zero.gather_parameters();
      for (const NamedTensor& p : net.state_dict()) weights.push_back({p.name, p.tensor.clone()});
    }
    const PhiloxState random = default_generator().state();
    steps(adam, parallel, 3);
    const auto whole = zero.gather_parameters();
    const std::vector<double> expected = values_of(net.parameters());

    // Halves of the ranks, and each rank alone.
    // (A mean of three same numbers isn't always that number.)
    const int size = world().size();
    for (const int ranks : size == 3 ? std::vector<int>{3} : std::vector<int>{std::max(size / 2, 1), 1}) {
      dist::ProcessGroup group = world().split(world().rank() / ranks);
      const Net next;
      next.load_state_dict(weights);
      optim::Adam again(next.parameters());
      DataParallel on(next, group);
      ZeroRedundancy divided(on, again, {.stage = stage});
      again.load_state_dict(state);
      default_generator().set_state(random);
      steps(again, on, 3);
      const auto held = divided.gather_parameters();
      expect_same(values_of(next.parameters()), expected, fmt::format("stage {}, on {} ranks", stage, ranks));
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------
// misuse

TEST(ZeroMisuse, IsNamed) {
  const Net net;
  DataParallel parallel(net, world());
  optim::SGD sgd(net.parameters());
  EXPECT_NE(error_of<Error>([&] { ZeroRedundancy(parallel, sgd, {.stage = 4}); }).find("a stage from 1 to 3, got 4"),
            std::string::npos);
  if (world().size() == 1) return;
  optim::LBFGS lbfgs(net.parameters());
  EXPECT_NE(error_of<Error>([&] { ZeroRedundancy(parallel, lbfgs); }).find("LBFGS: its steps need the whole state"),
            std::string::npos);
  optim::SGD rounded(net.parameters(), {.low_precision = optim::LowPrecision::stochastic_rounding});
  EXPECT_NE(error_of<Error>([&] { ZeroRedundancy(parallel, rounded); }).find("stochastic rounding"), std::string::npos);
  ZeroRedundancy zero(parallel, sgd, {.stage = 2});
  EXPECT_NE(error_of<Error>([&] { ZeroRedundancy(parallel, sgd); }).find("sharded already"), std::string::npos);
  const auto pass = [&] { cross_entropy(parallel(randn({4, 24})), randint(0, 6, {4})).backward(); };
  pass();
  // The owner of some parameter is this rank, with 2 to 4 ranks and 8 parameters.
  EXPECT_NE(error_of<Error>(pass).find("call zero_grad() after each reduction"), std::string::npos);
}

// ------------------------------------------------------------------------------------------- recomputed and captured

TEST(ZeroSteps, MayBeRecomputedInTheBackwardPass) {
  const auto run = [](int stage, bool recomputed) {
    manual_seed(3);
    const Net net;
    optim::SGD sgd(net.parameters(), {.lr = 0.05, .momentum = 0.9});
    DataParallel parallel(net, world());
    std::optional<ZeroRedundancy> zero;
    if (stage > 0) zero.emplace(parallel, sgd, dist::ZeroOptions{.stage = stage});
    manual_seed(7);
    for (int i = 0; i < 3; ++i) {
      sgd.zero_grad();
      const Tensor x = part_of(randn({24, 24})), y = part_of(randint(0, 6, {24}));
      const amp::Autocast region({.dtype = bf16});
      const Tensor logits = recomputed ? checkpoint([&](const Tensor& in) { return net(in); }, x) : net(x);
      cross_entropy(logits, y).backward();
      sgd.step();
    }
    const auto whole = zero ? zero->gather_parameters() : nullptr;
    return values_of(net.parameters());
  };
  const std::vector<double> expected = run(0, false);
  for (const int stage : {1, 2, 3}) {
    expect_same(run(stage, true), expected, fmt::format("stage {}, recomputed", stage));
  }
}

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

TEST(ZeroSteps, AreCapturedAtStagesOneAndTwo) {
  const auto run = [](int stage, std::optional<DType> autocast, std::string* why) {
    manual_seed(3);
    const Net net;
    optim::Adam adam(net.parameters());
    const auto parallel = std::make_shared<dist::DataParallelBase>(
        net, world(), dist::DataParallelOptions{.bucket_cap_mb = 0.05, .first_bucket_cap_mb = 0.01});
    std::optional<ZeroRedundancy> zero;
    if (stage > 0) zero.emplace(*parallel, net, adam, dist::ZeroOptions{.stage = stage});
    std::optional<amp::GradScaler> scaler;
    if (autocast == f16) scaler.emplace(amp::GradScalerOptions{.init_scale = 1024, .growth_interval = 3});
    training::TrainStep step =
        training::make_train_step(std::make_shared<Task>(net), adam, std::move(scaler),
                                  {.autocast = autocast, .clip_norm = 0.5, .parallel = parallel});
    manual_seed(7);
    std::vector<double> values;
    for (int i = 0; i < 8; ++i) {
      const std::vector<data::Batch> batches{{part_of(randn({24, 24})), part_of(randint(0, 6, {24}))}};
      values.push_back(step.run_captured(batches).loss().item<double>());
    }
    if (why) {
      EXPECT_EQ(step.capture_stats().replayed > 0, stage <= 2) << stage << ": " << step.why_not_captured();
      *why = step.why_not_captured();
    }
    const auto whole = zero ? zero->gather_parameters() : nullptr;
    for (const double v : values_of(net.parameters())) values.push_back(v);
    return values;
  };
  for (const std::optional<DType> autocast : {std::optional<DType>(), std::optional(f16), std::optional(bf16)}) {
    const std::vector<double> expected = run(0, autocast, nullptr);
    for (const int stage : {1, 2, 3}) {
      std::string why;
      expect_same(run(stage, autocast, world().size() > 1 ? &why : nullptr), expected, fmt::format("stage {}", stage));
      if (world().size() > 1 && stage > 2) {
        EXPECT_EQ(why, "parameters are divided among the ranks (ZeRO stage 3)");
      }
    }
  }
}

}  // namespace
}  // namespace halfstep
