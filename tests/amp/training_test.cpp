// SPDX-License-Identifier: Apache-2.0
// Whole small trainings against PyTorch's curves, in f32, bf16 and f16 with a scaler. The bounds are derived in
// tests/goldens/README.md: ten times what reordered sums alone do in f32, five times in f16; one more rounding in bf16.
#include <gtest/gtest.h>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/grad_scaler.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/optim/adam.h"
#include "halfstep/optim/sgd.h"
#include "tests/support/op_golden.h"

namespace halfstep {
namespace {

using test::GoldenEntry;

struct Network {
  Tensor x, labels;
  NamedTensors parameters;

  explicit Network(const GoldenEntry& e) : x(test::to_tensor(e.inputs[0])), labels(test::to_tensor(e.inputs[1])) {
    const char* names[] = {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"};
    for (std::size_t i = 0; i < 4; ++i) parameters.push_back({names[i], test::to_tensor(e.inputs[2 + i], true)});
  }
  const Tensor& p(std::size_t i) const { return parameters[i].tensor; }
  Tensor loss() const { return cross_entropy(linear(relu(linear(x, p(0), p(1))), p(2), p(3)), labels); }
};

GoldenEntry entry(const std::string& name) {
  for (GoldenEntry& e : test::read_goldens("training.json")) {
    if (e.name == name) return e;
  }
  throw std::runtime_error("no golden " + name);
}

void check_curve(const std::string& name, double bound) {
  const GoldenEntry e = entry(name);
  const Network net(e);
  const std::string mode = e.text("mode");
  optim::SGD optimizer(net.parameters, {.lr = e.real("lr"), .momentum = e.real("momentum")});
  amp::GradScaler scaler{{.init_scale = e.real("init_scale", 1),
                          .growth_interval = static_cast<int>(e.integer("growth_interval", 1)),
                          .enabled = mode == "f16"}};
  const auto& losses = e.tensor("loss").data;
  for (std::size_t step = 0; step < losses.size(); ++step) {
    SCOPED_TRACE(name + " step " + std::to_string(step));
    optimizer.zero_grad();
    const Tensor loss = [&] {
      const amp::Autocast region{{.dtype = mode == "bf16" ? bf16 : f16, .enabled = mode != "f32"}};
      return net.loss();
    }();
    EXPECT_EQ(loss.dtype(), f32);
    scaler.scale(loss).backward();
    for (const NamedTensor& p : net.parameters) EXPECT_EQ(p.tensor.grad().dtype(), f32);
    const auto result = scaler.step(optimizer);
    scaler.update();
    ASSERT_NEAR(loss.item<double>(), losses[step], bound);
    if (mode == "f16") {
      ASSERT_EQ(scaler.get_scale(), e.tensor("scale").data[step]);
      ASSERT_EQ(result.ran(), e.tensor("ran").data[step] != 0);
    }
  }
}

// Weight gradients stay in float32 here, so that the curves to match are those of PyTorch with such gradients.
TEST(Training, CurveInFloat32) { check_curve("mlp_8_16_4/f32", 5e-6); }
TEST(Training, CurveInBFloat16) { check_curve("mlp_8_16_4/bf16_wide_grads", 2e-3); }
TEST(Training, CurveInFloat16WithAScaler) { check_curve("mlp_8_16_4/f16_wide_grads", 4e-4); }

void check_steps(const std::string& name, double bound) {
  const GoldenEntry e = entry(name);
  const Network net(e);
  std::unique_ptr<optim::Optimizer> optimizer;
  if (e.text("optimizer") == "sgd") {
    optimizer = std::make_unique<optim::SGD>(net.parameters,
                                             optim::SGDOptions{.lr = e.real("lr"), .momentum = e.real("momentum")});
  } else {
    optimizer = std::make_unique<optim::Adam>(net.parameters, optim::AdamOptions{.lr = e.real("lr")});
  }
  const auto near = [&](const Tensor& ours, const test::GoldenTensor& golden, double allowed, const char* what) {
    const auto values = ours.to_vector<double>();
    ASSERT_EQ(values.size(), golden.data.size());
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], golden.data[i], allowed) << what << " " << i;
  };
  for (std::size_t step = 0; step < 5; ++step) {
    optimizer->zero_grad();
    const Tensor loss = net.loss();
    loss.backward();
    EXPECT_NEAR(loss.item<double>(), e.tensor("loss").data[step], 2e-6);
    for (std::size_t i = 0; i < 4 && step == 0; ++i) near(net.p(i).grad(), *e.grads[2 + i], 2e-6, "gradient");
    optimizer->step();
  }
  for (std::size_t i = 0; i < 4; ++i) near(net.p(i), e.outputs[i], bound, "parameter");
}

TEST(Training, StepsOfSgd) { check_steps("mlp_64_32_10/sgd", 2e-6); }
TEST(Training, StepsOfAdam) { check_steps("mlp_64_32_10/adam", 2e-5); }

}  // namespace
}  // namespace halfstep
