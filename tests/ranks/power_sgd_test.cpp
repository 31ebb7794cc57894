// SPDX-License-Identifier: Apache-2.0
// PowerSGD beside the algorithm in float64 (tests/goldens/make_power_sgd.py), and beside what follows from it.
#include "halfstep/dist/power_sgd.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/data/digits.h"
#include "halfstep/data/loader.h"
#include "halfstep/models/mlp.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/sgd.h"
#include "tests/ranks/networks.h"
#include "tests/support/errors.h"
#include "tests/support/golden.h"

namespace halfstep {
namespace {

using dist::PowerSGD;
using test::error_of;
using test::relative_error;
using test::world;

using Gradients = NamedTensors;

// What DataParallel does with a hook, `per_bucket` parameters in a bucket. Returns the means.
Gradients reduced(const PowerSGD& compression, const Gradients& own, std::size_t per_bucket = 100) {
  const dist::CommunicationHook hook = compression.hook();
  Gradients means;
  std::vector<std::function<void()>> finishes;
  for (std::size_t begin = 0; begin < own.size(); begin += per_bucket) {
    const std::size_t end = std::min(begin + per_bucket, own.size());
    std::int64_t total = 0;
    for (std::size_t i = begin; i < end; ++i) total += own[i].tensor.numel();
    dist::GradBucket bucket{.index = static_cast<int>(begin / per_bucket),
                            .is_last = end == own.size(),
                            .buffer = zeros({total}, {.dtype = own[begin].tensor.dtype(), .device = Device{}}),
                            .gradients = {},
                            .names = {}};
    std::int64_t at = 0;
    for (std::size_t i = begin; i < end; ++i) {
      Tensor view = bucket.buffer.narrow(0, at, own[i].tensor.numel()).view(own[i].tensor.sizes());
      at += view.numel();
      view.copy_(own[i].tensor);
      bucket.gradients.push_back(view);
      bucket.names.push_back(own[i].name);
      means.push_back({own[i].name, view});
    }
    finishes.push_back(hook(bucket, world()));
  }
  for (const auto& finish : finishes) finish();
  return means;
}

std::string bits_of(const Gradients& g) {
  std::string bytes;
  for (const NamedTensor& t : g) {
    const Tensor dense = t.tensor.contiguous();
    bytes.append(static_cast<const char*>(dense.const_raw_data()),
                 static_cast<std::size_t>(dense.numel()) * dense.item_size());
  }
  return bytes;
}
void expect_same_on_all_ranks(const Gradients& g) {
  const std::string own = bits_of(g);
  for (const std::string& other : world().all_gather_text(own)) EXPECT_TRUE(other == own);
}

const std::vector<std::pair<std::string, Shape>>& parameters() {
  static const std::vector<std::pair<std::string, Shape>> all = {
      {"fc.weight", {12, 16}}, {"conv.weight", {8, 3, 3, 3}}, {"small.weight", {3, 4}}, {"fc.bias", {16}}};
  return all;
}
// As in make_power_sgd.py.
Gradients given(int rank, int pass) {
  Gradients all;
  std::int64_t p = 0;
  for (const auto& [name, sizes] : parameters()) {
    std::int64_t count = 1;
    for (int d = 0; d < sizes.size(); ++d) count *= sizes[d];
    std::vector<double> values;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t n = (i * 37 + i * i % 31 * 7 + rank * 101 + pass * 53 + p * 29) % 97 - 48;
      values.push_back(static_cast<double>(n) / 64);
    }
    all.push_back({name, tensor(values, sizes, {.device = Device{}})});
    ++p;
  }
  return all;
}
Gradients given(int pass) { return given(world().rank(), pass); }

TEST(PowerSGD, IsTheAlgorithmInFloat64) {
  int found = 0;
  for (const test::GoldenEntry& e : test::read_goldens("power_sgd.json")) {
    if (e.integer("ranks") != world().size()) continue;
    ++found;
    const PowerSGD written({.rank = static_cast<int>(e.integer("rank")), .start = 0});
    NamedTensors state{{"iteration", tensor_from_integers({0}, {}, {.device = Device{}})}};
    for (const char* name : {"fc.weight", "conv.weight"}) {
      const test::GoldenTensor& q = e.tensor(std::string("q.") + name);
      state.push_back({std::string("q.") + name, tensor(q.data, {q.shape[0], q.shape[1]}, {.device = Device{}})});
    }
    PowerSGD compression = written;
    compression.load_state_dict(state, world());
    Gradients means;
    for (int pass = 0; pass < e.integer("passes"); ++pass) means = reduced(compression, given(pass));
    for (const NamedTensor& mean : means) {
      const std::vector<double>& expected = e.tensor("mean." + mean.name).data;
      // Products of up to 27 terms in float32 and a division by a norm: 30 roundings of 2^-24 a product, three products
      // a pass, four passes, each of which begins with the errors of the last one.
      EXPECT_LT(relative_error(mean.tensor.to_vector<double>(), expected), 4 * 90 * 0x1p-24) << e.name << mean.name;
    }
    expect_same_on_all_ranks(means);
  }
  EXPECT_EQ(found, 2);
}

// Rank 1, rank 2, and zero, with two columns: what the ranks' mean is exactly, a product of factors, comes back.
TEST(PowerSGD, ReproducesGradientsOfLowRank) {
  PowerSGD compression({.rank = 2, .start = 0});
  for (int pass = 0; pass < 4; ++pass) {
    manual_seed(11 + static_cast<std::uint64_t>(pass));
    Gradients own;
    std::vector<std::vector<double>> expected;
    for (int r = 0; r < 3; ++r) {
      const Tensor right = randn({r == 0 ? 1 : r, 20});  // the same on all ranks
      std::vector<double> sum(24 * 20);
      Tensor mine;
      for (int rank = 0; rank < world().size(); ++rank) {
        const Tensor product = r == 0 ? zeros({24, 20}) : mm(randn({24, r}), right);
        if (rank == world().rank()) mine = product;
        const auto values = product.to_vector<double>();
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i] / world().size();
      }
      own.push_back({"p" + std::to_string(r), mine});
      expected.push_back(sum);
    }
    const Gradients means = reduced(compression, own, 2);
    for (std::size_t i = 0; i < means.size(); ++i) {
      const auto got = means[i].tensor.to_vector<double>();
      if (i == 0) {
        EXPECT_EQ(got, expected[i]);
      } else {
        // Products of up to 24 terms, 24 x 2^-24 each; the second column is what the first one leaves of it, which may
        // be a thirtieth where the columns that it is sought with are of another gradient.
        EXPECT_LT(relative_error(got, expected[i]), 2 * 30 * 24 * 0x1p-24) << i << " in pass " << pass;
      }
    }
    expect_same_on_all_ranks(means);
  }
  EXPECT_EQ(compression.stats().elements, 3 * 24 * 20);
  EXPECT_EQ(compression.stats().sent, 3 * 2 * (24 + 20));
}

// What is left out comes later: the sum of all means approaches that of the whole gradients, which it doesn't alone.
TEST(PowerSGD, ErrorFeedbackSendsWhatWasLeftOut) {
  double left[2];
  for (const bool feedback : {false, true}) {
    const PowerSGD compression({.rank = 1, .start = 0, .error_feedback = feedback});
    std::vector<double> sum(12 * 16), whole(12 * 16);
    for (int pass = 0; pass < 60; ++pass) {
      const auto got = reduced(compression, given(0))[0].tensor.to_vector<double>();
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += got[i];
      for (int rank = 0; rank < world().size(); ++rank) {
        const auto g = given(rank, 0)[0].tensor.to_vector<double>();
        for (std::size_t i = 0; i < whole.size(); ++i) whole[i] += g[i] / world().size();
      }
    }
    left[feedback] = relative_error(sum, whole);
  }
  EXPECT_LT(left[1], 12.0 / 60);  // its 12 components in turn: each waits for 12 passes of 60 at most
  EXPECT_GT(left[0], 0.5);        // all but the largest component of each
}

TEST(PowerSGD, DoesNotDependOnBuckets) {
  const PowerSGD one({.start = 1}), three({.start = 1});
  for (int pass = 0; pass < 4; ++pass) {
    EXPECT_TRUE(bits_of(reduced(one, given(pass))) == bits_of(reduced(three, given(pass), pass == 0 ? 2 : 1))) << pass;
  }
}

TEST(PowerSGD, SendsWholeGradientsBeforeItsStart) {
  const PowerSGD compression({.start = 2});
  for (int pass = 0; pass < 3; ++pass) {
    const Gradients means = reduced(compression, given(pass));
    Gradients whole = given(pass);
    for (const NamedTensor& t : whole) world().all_reduce(t.tensor, dist::ReduceOp::mean).wait();
    if (pass < 2) {
      EXPECT_TRUE(bits_of(means) == bits_of(whole)) << pass;
    } else {
      EXPECT_FALSE(bits_of({means[0]}) == bits_of({whole[0]}));
      EXPECT_FALSE(bits_of({means[1]}) == bits_of({whole[1]}));
      // Sent as they are.
      EXPECT_TRUE(bits_of({means[2], means[3]}) == bits_of({whole[2], whole[3]}));
    }
  }
  EXPECT_EQ(compression.stats().sent, (12 + 16) + (8 + 27) + 12 + 16);
}

TEST(PowerSGD, WithoutWarmStartDrawsInEachPass) {
  const PowerSGD compression({.start = 0, .error_feedback = false, .warm_start = false});
  const std::string first = bits_of(reduced(compression, given(0))), second = bits_of(reduced(compression, given(0)));
  EXPECT_FALSE(first == second);
  const PowerSGD other({.start = 0, .error_feedback = false, .warm_start = false});
  EXPECT_TRUE(bits_of(reduced(other, given(0))) == first);
  expect_same_on_all_ranks(reduced(compression, given(1)));
}

// One rank's gradient isn't finite: no rank's mean is, and afterwards all is as if the pass had not been.
TEST(PowerSGD, APassThatIsNotFiniteLeavesNoTrace) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 3e38F}) {
    for (const std::size_t where : {0U, 1U, 3U}) {  // matrices, and what isn't compressed
      const PowerSGD compression({.start = 0}), calm({.start = 0});
      for (int pass = 0; pass < 3; ++pass) {
        if (pass == 1) {
          Gradients own = given(7);
          if (world().rank() == world().size() - 1) Tensor(own[where].tensor).fill_(static_cast<double>(bad));
          const Gradients means = reduced(compression, own, 2);
          bool finite = true;
          for (const double v : means[where].tensor.to_vector<double>()) finite = finite && std::isfinite(v);
          // Of large values sums overflow where there are products of them; they don't in a plain mean.
          EXPECT_EQ(finite, std::isfinite(bad) && where == 3) << bad << ' ' << where;
          if (finite) continue;  // then it counted
        }
        if (std::isfinite(bad) && where == 3) continue;
        EXPECT_TRUE(bits_of(reduced(compression, given(pass))) == bits_of(reduced(calm, given(pass)))) << bad << where;
      }
    }
  }
}

// Powers of 2: exact, so that bits are the same whatever the scale was in the passes before.
TEST(PowerSGD, FollowsTheLossScale) {
  PowerSGD plain({.start = 0}), scaled({.start = 0});
  double scale = 1;
  scaled.follow([&] { return scale; });
  for (int pass = 0; pass < 5; ++pass) {
    scale = pass % 2 == 0 ? 1024 : 0.25;
    Gradients own = given(pass);
    const Gradients expected = reduced(plain, own);
    for (const NamedTensor& t : own) Tensor(t.tensor).mul_(scale);
    const Gradients means = reduced(scaled, own);
    for (const NamedTensor& t : means) Tensor(t.tensor).mul_(1 / scale);
    EXPECT_TRUE(bits_of(means) == bits_of(expected)) << pass;
  }
}

TEST(PowerSGD, GoesOnFromAState) {
  PowerSGD whole({.rank = 2, .start = 1});
  for (int pass = 0; pass < 3; ++pass) reduced(whole, given(pass));
  const NamedTensors state = whole.state_dict(world());
  EXPECT_EQ(state.empty(), world().rank() != 0);
  // As by a file that all ranks read.
  NamedTensors read;
  for (const char* name : {"iteration", "q.fc.weight", "q.conv.weight", "error.fc.weight", "error.conv.weight"}) {
    Tensor t;
    for (const NamedTensor& s : state) {
      if (s.name == name) t = s.tensor;
    }
    ASSERT_EQ(t.defined(), world().rank() == 0) << name;
    const std::string key(name);
    const std::int64_t n = key.ends_with("fc.weight") ? 12 : 8, m = key.ends_with("fc.weight") ? 16 : 27;
    if (!t.defined()) {
      t = key == "iteration"      ? tensor_from_integers({0}, {}, {.device = Device{}})
          : key.starts_with("q.") ? zeros({m, 2})
                                  : zeros({world().size(), n, m});
    }
    world().broadcast(t).wait();
    read.push_back({name, t});
  }
  PowerSGD resumed({.rank = 2, .start = 1}), alone({.rank = 2, .start = 1});
  resumed.load_state_dict(read, world());
  // On another number of ranks: the mean of what they left out.
  dist::ProcessGroup one;
  alone.load_state_dict(read, one);
  for (const NamedTensor& t : alone.state_dict(one)) {
    if (t.name != "error.fc.weight") continue;
    const auto all = read[3].tensor.to_vector<double>(), mean = t.tensor.to_vector<double>();
    for (std::size_t i = 0; i < mean.size(); ++i) {
      double sum = 0;
      for (int r = 0; r < world().size(); ++r) sum += all[static_cast<std::size_t>(r) * mean.size() + i];
      EXPECT_NEAR(mean[i], sum / world().size(), 1e-6);
    }
  }
  for (int pass = 3; pass < 6; ++pass) {
    EXPECT_TRUE(bits_of(reduced(resumed, given(pass))) == bits_of(reduced(whole, given(pass)))) << pass;
  }
  EXPECT_NE(error_of<Error>([&] { resumed.load_state_dict({}, world()); }).find("iteration"), std::string::npos);
  EXPECT_NE(error_of<Error>([&] {
              resumed.load_state_dict({{"fc.weight", zeros({2})}}, world());
            }).find("fc.weight"),
            std::string::npos);
}

TEST(PowerSGD, RefusesOptionsOutOfRange) {
  EXPECT_NE(error_of<Error>([] { PowerSGD({.rank = 0}); }).find("rank of at least 1, got 0"), std::string::npos);
  EXPECT_NE(error_of<Error>([] { PowerSGD({.start = -1}); }).find("start"), std::string::npos);
  EXPECT_NE(error_of<Error>([] { PowerSGD({.min_compression_rate = 0}); }).find("rate"), std::string::npos);
}

struct Trained {
  double accuracy;
  std::uint64_t bytes;
  std::uint64_t skipped;
};
Trained trained(bool compressed) {
  manual_seed(1);
  const data::ImageOptions form{.flatten = true, .mean = 0.1307, .std = 0.3081};
  const data::MnistDataset digits{data::make_digits(data::Split::kTrain, {.count = 4096}), form},
      test{data::make_digits(data::Split::kTest, {.count = 1000}), form};
  data::DataLoader loader{
      digits, {.batch_size = 64, .shuffle = true, .workers = 0, .rank = world().rank(), .ranks = world().size()}};
  PowerSGD compression({.rank = 2, .start = 10});
  amp::GradScaler scaler({.init_scale = 0x1p30, .growth_interval = 20});
  compression.follow([&] { return scaler.get_scale(); });
  dist::DataParallelOptions options;
  if (compressed) options.hook = compression.hook();
  dist::DataParallel net{models::MLP({.hidden = 128}), world(), options};
  optim::SGD optimizer{net.module().parameters(), {.lr = 0.05, .momentum = 0.9}};
  const std::uint64_t before = world().stats().bytes_sent;
  Trained result{};
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (const data::Batch& batch : loader) {
      optimizer.zero_grad();
      // Some steps overflow: those of one rank, for all.
      const double factor = epoch == 1 && world().rank() == 0 && result.skipped < 2 ? 1e38 : 1;
      scaler.scale(cross_entropy(net(batch.input), batch.target) * factor).backward();
      result.skipped += scaler.step(optimizer).ran() ? 0 : 1;
      scaler.update();
    }
  }
  result.bytes = world().stats().bytes_sent - before;
  EXPECT_EQ(dist::first_difference(net.module(), world()), "");
  const NoGrad no_grad;
  const nn::EvalMode mode(net.module());
  data::DataLoader all{test, {.batch_size = 500, .workers = 0}};
  int right = 0;
  for (const data::Batch& batch : all) {
    const auto scores = net.module()(batch.input).to_vector<double>();
    const auto labels = batch.target.to_vector<std::int64_t>();
    for (std::size_t i = 0; i < labels.size(); ++i) {
      const auto row = scores.begin() + static_cast<std::ptrdiff_t>(10 * i);
      right += std::max_element(row, row + 10) - row == labels[i] ? 1 : 0;
    }
  }
  result.accuracy = right / 1000.0;
  return result;
}

TEST(PowerSGD, TrainsAsWholeGradientsDo) {
  const Trained plain = trained(false), compressed = trained(true);
  // Of 1,000 samples a few more or less are right with other roundings: three deviations of sqrt(p (1 - p) / 1000).
  const double deviation = std::sqrt(plain.accuracy * (1 - plain.accuracy) / 1000);
  EXPECT_GT(plain.accuracy, 0.9);
  EXPECT_GT(compressed.accuracy, plain.accuracy - 3 * deviation - 0.001);
  EXPECT_GE(compressed.skipped, 2U);
  // 10 of 192 steps are whole ones; a hundredth of the bytes otherwise, descriptors and losses beside.
  EXPECT_LT(static_cast<double>(compressed.bytes), 0.2 * static_cast<double>(plain.bytes));
  if (world().rank() == 0) {
    std::printf("accuracy %.3f and %.3f, %.2f and %.2f MB sent\n", plain.accuracy, compressed.accuracy,
                static_cast<double>(plain.bytes) / 1e6, static_cast<double>(compressed.bytes) / 1e6);
  }
}

}  // namespace
}  // namespace halfstep
