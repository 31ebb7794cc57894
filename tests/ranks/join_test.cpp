// SPDX-License-Identifier: Apache-2.0
// Loops of different lengths on the ranks, beside one process that has the batches of all.
#include <gtest/gtest.h>

#include "halfstep/capture/capture.h"
#include "halfstep/core/random.h"
#include "halfstep/dist/data_parallel.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/optim/sgd.h"
#include "tests/ranks/networks.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using dist::DataParallel;
using dist::DistError;
using test::error_of;
using test::relative_error;
using test::values_of;
using test::world;

struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 12, .out = 32}});
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 32}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 32, .out = 4}});
  bool normed = false;
  Tensor forward(const Tensor& x) const { return fc2(relu(normed ? norm(fc1(x)) : fc1(x) * norm.weight + norm.bias)); }
};

// Rank 0 has none, the others ever more.
int steps_of(int rank) { return 3 * rank; }

struct Data {
  Tensor x, y;
  Data(int rank, int step) {
    manual_seed(static_cast<std::uint64_t>(100 * rank + step + 1));
    x = randn({6, 12});
    y = randint(0, 4, {6});
  }
};

TEST(Join, RanksWithFewerBatchesTakePart) {
  for (const bool by_all : {true, false}) {
    for (const int accumulate : {1, 2}) {
      manual_seed(3);
      const Net net, alone = nn::clone(net);
      DataParallel parallel(net, world(), {.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001});
      optim::SGD sgd(net.parameters(), {.lr = 0.1, .momentum = 0.9}),
          one(alone.parameters(), {.lr = 0.1, .momentum = 0.9});
      int shadowed = 0;
      parallel.join(
          [&] {
            for (int i = 0; i < steps_of(world().rank()); ++i) {
              sgd.zero_grad();
              for (int k = 0; k < accumulate; ++k) {
                std::optional<dist::DataParallelBase::NoSync> guard;
                if (k + 1 < accumulate) guard.emplace(parallel);
                const Data d(world().rank(), 10 * i + k);
                cross_entropy(parallel(d.x), d.y).backward();
              }
              sgd.step();
            }
          },
          {.divide_by_initial_world_size = by_all, .step = [&] {
             ++shadowed;
             sgd.step();
           }});
      const int longest = steps_of(world().size() - 1);
      EXPECT_EQ(shadowed, longest - steps_of(world().rank()));
      for (int i = 0; i < longest; ++i) {
        one.zero_grad();
        int active = 0;
        for (int r = 0; r < world().size(); ++r) active += i < steps_of(r) ? 1 : 0;
        for (int r = 0; r < world().size(); ++r) {
          if (i >= steps_of(r)) continue;
          for (int k = 0; k < accumulate; ++k) {
            const Data d(r, 10 * i + k);
            (cross_entropy(alone(d.x), d.y) / (by_all ? world().size() : active)).backward();
          }
        }
        one.step();
      }
      EXPECT_EQ(dist::first_difference(net, world()), "");
      // Up to nine steps of sums in another order, a few roundings of 2^-24 each.
      EXPECT_LT(relative_error(values_of(net.parameters()), values_of(alone.parameters())), 5e-6);
      // Optimizers are the same too: one more step of all.
      sgd.zero_grad();
      const Data d(0, 0);
      cross_entropy(parallel(d.x), d.y).backward();
      sgd.step();
      EXPECT_EQ(dist::first_difference(net, world()), "");
    }
  }
}

// Without a step of their own the ranks whose loops are over get the weights in the end; buffers are those of a rank
// that goes on.
TEST(Join, WeightsAndBuffersAreThoseOfARankThatWentOn) {
  manual_seed(3);
  Net net;
  net.normed = true;
  DataParallel parallel(net, world());
  optim::SGD sgd(net.parameters(), {.lr = 0.1});
  std::vector<double> own;
  parallel.join([&] {
    for (int i = 0; i < steps_of(world().rank()); ++i) {
      sgd.zero_grad();
      const Data d(world().rank(), i);
      cross_entropy(parallel(d.x), d.y).backward();
      sgd.step();
    }
    own = values_of(net.state_dict());
  });
  EXPECT_EQ(dist::first_difference(net, world()), "");
  if (world().rank() == world().size() - 1) {
    EXPECT_EQ(values_of(net.state_dict()), own);
  }
  EXPECT_EQ(parallel.stats().reductions, static_cast<std::uint64_t>(steps_of(world().size() - 1)));
}

TEST(Join, AllEndWithTheFirstWhereThatIsTheWish) {
  manual_seed(3);
  DataParallel parallel(Net(), world());
  const std::string text = error_of<DistError>([&] {
    parallel.join(
        [&] {
          for (int i = 0; i < steps_of(world().rank()); ++i) {
            const Data d(world().rank(), i);
            cross_entropy(parallel(d.x), d.y).backward();
          }
        },
        {.throw_on_early_termination = true});
  });
  EXPECT_NE(text.find("the loop of rank 0 is over"), std::string::npos) << text;
  // It can go on.
  const Data d(0, 0);
  parallel.join([&] { cross_entropy(parallel(d.x), d.y).backward(); }, {.throw_on_early_termination = true});
  EXPECT_NE(error_of<Error>([&] { parallel.join([&] { parallel.join([] {}); }); }).find("inside"), std::string::npos);
}

TEST(Join, IsWhyAStepIsNotCaptured) {
  manual_seed(3);
  const Net net;
  DataParallel parallel(net, world());
  parallel.join([&] {
    auto fast = capture([&](const Tensor& x, const Tensor& y) {
      for (const NamedTensor& p : net.parameters()) p.tensor.set_grad({});
      const Tensor loss = cross_entropy(parallel(x), y);
      loss.backward();
      return loss;
    });
    for (int i = 0; i < steps_of(world().rank()); ++i) {
      const Data d(world().rank(), i);
      fast(d.x, d.y);
    }
    EXPECT_EQ(fast.stats().replayed, 0U);
    EXPECT_EQ(fast.why_not(), world().rank() == 0 ? "" : "other ranks may be at the end of their loops (join)");
  });
}

}  // namespace
}  // namespace halfstep
