// SPDX-License-Identifier: Apache-2.0
// models::GPT against PyTorch (tests/goldens/make_gpt.py), and its own rules.
#include "halfstep/models/gpt.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/sgd.h"
#include "tests/models/peer_numbers.h"
#include "tests/support/errors.h"
#include "tests/support/golden.h"
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

using test::GoldenEntry;

models::GPT network(const GoldenEntry& e, DType dtype) {
  models::GPT net{{.vocabulary = e.integer("vocabulary"),
                   .context = e.integer("context"),
                   .layers = e.integer("layers"),
                   .heads = e.integer("heads"),
                   .width = e.integer("width"),
                   .dropout = 0,
                   .bias = e.flag("bias")}};
  net.to(dtype);
  net.load_state_dict(test::peer_state(net));
  return net;
}

// The largest difference, as a share of the largest value.
double difference(const Tensor& got, const test::GoldenTensor& expected) {
  EXPECT_EQ(got.sizes(), Shape(expected.shape));
  const std::vector<double> v = got.to_vector<double>();
  double most = 0, largest = 0;
  for (std::size_t i = 0; i < v.size(); ++i) {
    most = std::max(most, std::abs(v[i] - expected.data.at(i)));
    largest = std::max(largest, std::abs(expected.data[i]));
  }
  return std::isfinite(most) ? most / largest : 1e300;
}

Tensor loss_of(const Tensor& logits, const Tensor& targets) {
  return cross_entropy(flatten(logits, 0, 1), flatten(targets));
}

// Both sides round in float64, in other orders: sums of at most 48 terms, through at most 3 blocks and 5 steps.
TEST(GPT, TrainsAlongPyTorchsTrajectory) {
  for (const GoldenEntry& e : test::read_goldens("gpt.json")) {
    SCOPED_TRACE(e.name);
    const models::GPT net = network(e, f64);
    const Tensor ids = test::to_tensor(e.inputs.at(0)), targets = test::to_tensor(e.inputs.at(1));
    EXPECT_LE(difference(net(ids), e.outputs.at(0)), 1e-12);
    optim::SGD optimizer{net.parameters(), {.lr = e.real("lr"), .momentum = 0.9}};
    for (const double expected : e.tensor("losses").data) {
      optimizer.zero_grad();
      const Tensor loss = loss_of(net(ids), targets);
      EXPECT_NEAR(loss.item<double>(), expected, 1e-11);
      loss.backward();
      optimizer.step();
    }
    EXPECT_LE(difference(net(ids), e.outputs.at(1)), 1e-10);
  }
}

// A block rounds some ten times in the activations' dtype (norm, weights and result of each product, attention, GELU,
// two sums), each by half a unit of numbers of the result's order; the embeddings' sum, the last norm and the logits'
// product with its rounded weights make four more.
TEST(GPT, LogitsInFewerBitsAreNearFloat64s) {
  for (const GoldenEntry& e : test::read_goldens("gpt.json")) {
    SCOPED_TRACE(e.name);
    const models::GPT net = network(e, f32);
    const Tensor ids = test::to_tensor(e.inputs.at(0));
    const NoGrad no_grad;
    const double roundings = 10 * static_cast<double>(e.integer("layers")) + 4;
    EXPECT_LE(difference(net(ids), e.outputs.at(0)), roundings * std::ldexp(1, -24));
    for (const auto& [dtype, bits] : {std::pair{bf16, 9}, {f16, 12}}) {
      const amp::Autocast autocast{{.dtype = dtype}};
      EXPECT_LE(difference(net(ids), e.outputs.at(0)), roundings * std::ldexp(1, -bits)) << name(dtype);
    }
  }
}

TEST(GPT, AttendsToEarlierTokensOnly) {
  manual_seed(3);
  const models::GPT net{{.vocabulary = 20, .context = 10, .layers = 2, .heads = 2, .width = 16, .dropout = 0}};
  const NoGrad no_grad;
  const Tensor ids = randint(0, 20, {2, 10}), other = ids.clone();
  for (std::int64_t n = 0; n < 2; ++n) {
    Tensor token = other.select(0, n).select(0, 6);
    token.fill_((token.item<std::int64_t>() + 1) % 20);
  }
  const Tensor a = net(ids), b = net(other);
  EXPECT_EQ(a.narrow(1, 0, 6).to_vector<float>(), b.narrow(1, 0, 6).to_vector<float>());
  for (std::int64_t t = 6; t < 10; ++t) EXPECT_NE(a.select(1, t).to_vector<float>(), b.select(1, t).to_vector<float>());
  // Shorter sequences have the logits of the longer ones' beginning.
  const std::vector<float> head = net(ids.narrow(1, 0, 4)).to_vector<float>();
  const std::vector<float> whole = a.narrow(1, 0, 4).to_vector<float>();
  for (std::size_t i = 0; i < head.size(); ++i) EXPECT_NEAR(head[i], whole[i], 1e-6);
}

TEST(GPT, HasTheSmallGPT2sParametersAndStartsAsIt) {
  const models::GPT net;
  std::int64_t count = 0;
  for (const NamedTensor& p : net.parameters()) count += p.tensor.numel();
  EXPECT_EQ(count, 124'439'808);
  const auto deviation = [&](const Tensor& t) {
    double sum = 0;
    for (const double v : t.to_vector<double>()) sum += v * v;
    return std::sqrt(sum / static_cast<double>(t.numel()));
  };
  // Samples of at least 768 * 768 numbers: relative deviation 1 / sqrt(2 n) < 0.1%.
  EXPECT_NEAR(deviation(net.wpe.weight), 0.02, 0.0002);
  EXPECT_NEAR(deviation(net.h[3].attn.c_attn.weight), 0.02, 0.0002);
  EXPECT_NEAR(deviation(net.h[3].attn.c_proj.weight), 0.02 / std::sqrt(24), 0.0001);
  EXPECT_EQ(deviation(net.h[0].mlp.c_fc.bias), 0);
  EXPECT_EQ(net.parameters().front().name, "wte.weight");
}

TEST(GPT, DropsOnlyWhileTraining) {
  manual_seed(4);
  const models::GPT net{{.vocabulary = 20, .context = 10, .layers = 1, .heads = 2, .width = 16, .dropout = 0.5}};
  const NoGrad no_grad;
  const Tensor ids = randint(0, 20, {2, 10});
  EXPECT_NE(net(ids).to_vector<float>(), net(ids).to_vector<float>());
  net.eval();
  EXPECT_EQ(net(ids).to_vector<float>(), net(ids).to_vector<float>());
}

TEST(GPT, RefusesWhatDoesNotFit) {
  EXPECT_THROW((models::GPT{{.layers = 0}}), Error);
  const std::string said = test::error_of<Error>([] { models::GPT{{.heads = 5, .width = 16}}; });
  EXPECT_NE(said.find(".heads 5 and .width 16"), std::string::npos) << said;
  const models::GPT net{{.vocabulary = 20, .context = 10, .layers = 1, .heads = 2, .width = 16}};
  EXPECT_THROW(net(zeros({2, 11}, {.dtype = i64})), ShapeError);
  EXPECT_THROW(net(zeros({4}, {.dtype = i64})), ShapeError);
  EXPECT_THROW(net(full({1, 2}, 20, {.dtype = i64})), Error);
}

}  // namespace
}  // namespace halfstep
