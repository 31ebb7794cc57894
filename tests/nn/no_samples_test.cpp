// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/no_samples_internal.h"

#include <gtest/gtest.h>

#include "halfstep/core/random.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/random.h"

namespace halfstep {
namespace {

std::vector<double> numbers(const Tensor& t) { return t.to_vector<double>(); }

std::vector<double> buffers_of(const nn::ModuleBase& module) {
  std::vector<double> all;
  for (const NamedTensor& b : module.buffers()) {
    for (const double v : numbers(b.tensor)) all.push_back(v);
  }
  return all;
}

// Its own statistics normalise the batch, as ever, but nothing is kept of them.
TEST(NoSamples, LeaveBatchNormAlone) {
  manual_seed(1);
  for (const std::optional<double> momentum : {std::optional(0.1), std::optional<double>()}) {
    nn::BatchNorm2d norm{{.channels = 3, .momentum = momentum}};
    norm(randn({4, 3, 2, 2}));
    const std::vector<double> before = buffers_of(norm);
    const Tensor x = randn({1, 3, 2, 2});
    std::vector<double> standing_in;
    {
      const nn::detail::NoSamples none(true);
      standing_in = numbers(norm(x));
      EXPECT_EQ(buffers_of(norm), before);
    }
    EXPECT_EQ(numbers(norm(x)), standing_in);
    EXPECT_NE(buffers_of(norm), before);
  }
}

// One value a channel has no variance: the running statistics do, and where there are none, none.
TEST(NoSamples, NormaliseASingleValueByTheRunningStatistics) {
  manual_seed(1);
  nn::BatchNorm2d norm{{.channels = 3}};
  norm(randn({4, 3, 2, 2}));
  const Tensor x = randn({1, 3, 1, 1});
  norm.eval();
  const std::vector<double> expected = numbers(norm(x));
  norm.train();
  const std::vector<double> before = buffers_of(norm);
  const nn::BatchNorm2d bare{{.channels = 3, .track_running_stats = false}};
  const nn::detail::NoSamples none(true);
  EXPECT_EQ(numbers(norm(x)), expected);
  EXPECT_EQ(buffers_of(norm), before);
  const std::vector<double> got = numbers(bare(x)), given = numbers(x);
  for (std::size_t i = 0; i < given.size(); ++i) EXPECT_NEAR(got[i], given[i], 1e-4);
  {
    const nn::detail::NoSamples some(false);
    EXPECT_THROW(norm(x), ShapeError);
  }
}

}  // namespace
}  // namespace halfstep
