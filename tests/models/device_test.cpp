// SPDX-License-Identifier: Apache-2.0
// Image networks on a device that has some kernels of its own, none of them of images: the simulated one.
#include <gtest/gtest.h>

#ifdef HALFSTEP_SIM_PLUGIN
#include <cmath>

#include "halfstep/autograd/engine.h"
#include "halfstep/core/random.h"
#include "halfstep/models/mobilenet.h"
#include "halfstep/models/resnet.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/view.h"
#include "halfstep/optim/sgd.h"
#include "tests/models/peer_numbers.h"
#include "tests/runtime/on_sim.h"

namespace halfstep {
namespace {

class NetworksOnSim : public test::OnSim {};

struct Step {
  double loss;
  NamedTensors start, gradients, state;
};

// A step of training from numbers that don't depend on the device.
template <class M>
Step step_on(const M& net, Device device, std::int64_t size) {
  net.load_state_dict(test::peer_state(net));
  net.to(device);
  net.to(MemoryFormat::channels_last);
  Step result;
  for (const NamedTensor& t : net.state_dict()) result.start.push_back({t.name, t.tensor.to(Device()).clone()});
  optim::SGD optimizer{net.parameters(), {.lr = 0.05, .momentum = 0.9, .weight_decay = 1e-4}};
  const Tensor images = test::peer_images(7, {4, 3, size, size}, f32).to(device);
  const Tensor labels = tensor(std::vector<std::int64_t>{0, 1, 2, 3}, {4}).to(device);
  const Tensor loss = cross_entropy(net(images), labels);
  loss.backward();
  optimizer.step();
  EXPECT_EQ(loss.device(), device);
  result.loss = loss.item<double>();
  for (const NamedTensor& p : net.parameters()) {
    EXPECT_EQ(p.tensor.grad().device(), device) << p.name;
    result.gradients.push_back({p.name, p.tensor.grad().to(Device())});
  }
  for (const NamedTensor& t : net.state_dict()) {
    EXPECT_EQ(t.tensor.device(), device) << t.name;
    result.state.push_back({t.name, t.tensor.to(Device())});
  }
  return result;
}

// `bound`: the largest difference, as a share of the tensor's largest value.
void expect_near(const NamedTensors& got, const NamedTensors& expected, double bound) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto a = got[i].tensor.to_vector<double>(), b = expected[i].tensor.to_vector<double>();
    ASSERT_EQ(a.size(), b.size()) << got[i].name;
    double difference = 0, largest = 0;
    for (std::size_t k = 0; k < a.size(); ++k) {
      difference = std::max(difference, std::isfinite(a[k]) ? std::abs(a[k] - b[k]) : INFINITY);
      largest = std::max(largest, std::abs(b[k]));
    }
    EXPECT_LE(difference, bound * largest) << got[i].name;
  }
}

// Both compute in float32, sums of some hundred terms in other orders: a few units of 2^-24 of each value, which batch
// statistics of a few dozen values magnify by up to some hundred (as tests/goldens/README.md has it of float64).
template <class M>
void compare(const M& net, const M& other, std::int64_t size, Device device) {
  const Step here = step_on(net, Device(), size), there = step_on(other, device, size);
  expect_near(there.start, here.start, 0);
  EXPECT_NEAR(there.loss, here.loss, 1e-5 * here.loss);
  expect_near(there.gradients, here.gradients, 1e-4);
  expect_near(there.state, here.state, 1e-4);
  // What is compared has moved.
  int moved = 0;
  for (std::size_t i = 0; i < here.state.size(); ++i) {
    if (here.state[i].tensor.to_vector<double>() != here.start[i].tensor.to_vector<double>()) ++moved;
  }
  EXPECT_EQ(moved, static_cast<int>(here.state.size()));
}

TEST_F(NetworksOnSim, ResNetsTrainAsOnTheCpu) {
  const models::ResNetOptions options{
      .block = models::ResNetBlock::basic, .layers = {1, 1, 1}, .width = 4, .classes = 10, .cifar_stem = true};
  compare(models::ResNet{options}, models::ResNet{options}, 8, sim);
}

TEST_F(NetworksOnSim, MobileNetTrainsAsOnTheCpu) {
  const models::InvertedResidualOptions options{.in = 3, .out = 3, .expand = 2};
  // One block of it: its seventeen blocks of depthwise convolutions are one like the other.
  struct Small : nn::Module<Small> {
    explicit Small(const models::InvertedResidualOptions& o)
        : block(child("block", models::InvertedResidual{o})), fc(child("fc", nn::Linear{{.in = 3 * 64, .out = 10}})) {}
    Tensor forward(const Tensor& x) const { return fc(flatten(block(x), 1)); }
    std::string kind() const override { return "Small"; }
    models::InvertedResidual block;
    nn::Linear fc;
  };
  compare(Small{options}, Small{options}, 8, sim);
}

}  // namespace
}  // namespace halfstep
#endif
