// SPDX-License-Identifier: Apache-2.0
// Sessions of networks whose linear layers have weights in integers.
#include <gtest/gtest.h>

#include <algorithm>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/infer/session.h"
#include "halfstep/models/cnn.h"
#include "halfstep/models/mlp.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/random.h"
#include "halfstep/quant/quantization.h"
#include "halfstep/quant/weight_only.h"
#include "tests/support/errors.h"

namespace halfstep::infer {
namespace {

TEST(WeightOnlySession, ComputesWithTheIntegersAsTheNetworkDoes) {
  for (const int bits : {8, 4}) {
    manual_seed(5);
    const models::MLP net({.in = 48, .hidden = 32, .classes = 10});
    quant::quantize_weights(net, {.bits = bits, .group_size = 16});
    const NoGrad no_grad;
    const Session session(net, zeros({1, 48})), low(net, zeros({1, 48}), {.dtype = bf16});
    for (const Session* s : {&session, &low}) {
      const std::vector<std::string> calls = s->calls();
      EXPECT_EQ(std::count(calls.begin(), calls.end(), "linear_weight_only"), 3);
      EXPECT_EQ(std::count(calls.begin(), calls.end(), "linear"), 0);
    }
    for (const std::int64_t samples : {1, 5}) {
      const Tensor x = randn({samples, 48});
      for (int call = 0; call < 2; ++call) EXPECT_EQ(session(x).to_vector<float>(), net(x).to_vector<float>());
      const amp::Autocast autocast{{.dtype = bf16}};
      const Tensor expected = net(x);
      EXPECT_EQ(expected.dtype(), bf16);
      for (int call = 0; call < 2; ++call) EXPECT_EQ(low(x).to_vector<float>(), expected.to_vector<float>());
    }
    EXPECT_EQ(session.why_not(), "");
    EXPECT_EQ(low.why_not(), "");
  }
}

TEST(WeightOnlySession, GoesWithConvolutionsAndTheirNorms) {
  manual_seed(5);
  const models::CNN net;
  const auto layers = quant::quantize_weights(net);
  ASSERT_EQ(layers.size(), 1u);
  net.eval();
  const NoGrad no_grad;
  const Session session(net, zeros({1, 1, 28, 28}));
  const std::vector<std::string> calls = session.calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "batch_norm"), 0);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), "linear_weight_only"), 1);
  EXPECT_EQ(session(randn({4, 1, 28, 28})).sizes(), (Shape{4, 10}));
}

}  // namespace
}  // namespace halfstep::infer
