// SPDX-License-Identifier: Apache-2.0
// Whole networks against PyTorch (peer_networks.py): weights from torch.save in both its forms, logits in three
// precisions, five steps of training, and the trained weights back into PyTorch. Needs a Python with PyTorch.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/io/pth.h"
#include "halfstep/models/registry.h"
#include "halfstep/ops/loss.h"
#include "halfstep/optim/sgd.h"
#include "tests/support/test_data.h"

namespace halfstep {
namespace {

namespace fs = std::filesystem;

fs::path source_dir() { return test::goldens_dir().parent_path().parent_path(); }

// $HALFSTEP_PEER_PYTHON, else the environment that scripts/peer_env.sh makes; empty when neither has PyTorch.
std::string peer_python() {
  const char* given = std::getenv("HALFSTEP_PEER_PYTHON");
  const std::string python = given ? given : (source_dir() / "build/peer-venv/bin/python").string();
  return std::system(("'" + python + "' -c 'import torch' >/dev/null 2>&1").c_str()) == 0 ? python : "";
}

double largest(const std::vector<double>& values) {
  double result = 0;
  for (const double v : values) result = std::max(result, std::abs(v));
  return result;
}

// The largest difference, as a share of the largest value.
double difference(const Tensor& got, const Tensor& expected) {
  std::vector<double> v = got.to_vector<double>();
  const std::vector<double> w = expected.to_vector<double>();
  EXPECT_EQ(got.sizes(), expected.sizes());
  for (std::size_t i = 0; i < v.size(); ++i) v[i] -= w[i];
  const double d = largest(v);
  return std::isfinite(d) ? d / largest(w) : 1e300;
}

class PeerSlow : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, PeerSlow, testing::Values("resnet50", "resnet20"),
                         [](const auto& name) { return std::string(name.param); });

TEST_P(PeerSlow, GoesThroughPyTorchAndBack) {
  const std::string name = GetParam();
  const std::string python = peer_python();
  if (python.empty()) GTEST_SKIP() << "no PyTorch: set HALFSTEP_PEER_PYTHON, or run scripts/peer_env.sh";
  const test::TemporaryDir dir;
  const auto peer = [&](const char* what) {
    const fs::path script = source_dir() / "tests/models/peer_networks.py";
    return std::system(
        ("'" + python + "' -B '" + script.string() + "' " + what + " " + name + " '" + dir.path().string() + "'")
            .c_str());
  };
  ASSERT_EQ(peer("write"), 0);
  std::map<std::string, Tensor> others;
  for (const NamedTensor& t : io::load_pth(dir.path() / "others.pth").tensors) others[t.name] = t.tensor;
  const Tensor x = others.at("x"), labels = others.at("labels"), expected = others.at("logits");

  const models::Model net = models::make_model(name), old = models::make_model(name);
  net.module->load_state_dict(io::load_pth(dir.path() / "peer.pth").tensors);
  old.module->load_state_dict(io::load_pth(dir.path() / "legacy.pth").tensors);
  net.module->eval();
  old.module->eval();
  {
    const NoGrad no_grad;
    const Tensor logits = net.forward(x);
    const double off = difference(logits, expected);
    EXPECT_LE(off, 1e-4);
    EXPECT_EQ(old.forward(x).to_vector<float>(), logits.to_vector<float>()) << "the file in the older form";
    std::printf("%s: logits differ from PyTorch's by %.2g of the largest in f32", name.c_str(), off);
    for (const DType dtype : {bf16, f16}) {
      const amp::Autocast autocast{{.dtype = dtype}};
      const double rounded = difference(net.forward(x), expected);
      EXPECT_LE(rounded, 2e-2) << halfstep::name(dtype);
      EXPECT_GT(rounded, 10 * off) << "nothing was rounded to " << halfstep::name(dtype);
      std::printf(", %.2g in %s", rounded, halfstep::name(dtype));
    }
    std::printf("\n");
  }

  net.module->train();
  optim::SGD optimizer{net.module->parameters(),
                       {.lr = others.at("lr").item<double>(), .momentum = 0.9, .weight_decay = 1e-4}};
  const auto losses = others.at("losses64").to_vector<double>();
  const auto peers = others.at("losses").to_vector<double>();
  double spread = 0;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    optimizer.zero_grad();
    const Tensor loss = cross_entropy(net.forward(x), labels);
    // Fifty layers of ReLU and batch statistics magnify rounding step by step, by as much as they do for PyTorch's
    // float32, whose distance from its float64 is the measure: one draw of a random sum, hence the factor. Where that
    // is small by chance, a float32 loss of 7 still has some units of 5e-7 in its last place.
    spread = std::max(spread, std::abs(losses[i] - peers[i]));
    EXPECT_NEAR(loss.item<double>(), losses[i], 1e-5 + 10 * spread) << "step " << i;
    std::printf("step %zu: loss %.6f, %.2g from PyTorch's in float64 (PyTorch's float32: at most %.2g)\n", i,
                loss.item<double>(), loss.item<double>() - losses[i], spread);
    loss.backward();
    optimizer.step();
  }
  EXPECT_LT(spread, 1e-2 * std::abs(losses.front() - losses.back())) << "too wide to measure anything by";

  net.module->eval();
  const NoGrad no_grad;
  io::save_pth(dir.path() / "trained.pth", net.module->state_dict());
  io::save_pth(dir.path() / "ours.pth", {{"logits", net.forward(x)}});
  EXPECT_EQ(peer("check"), 0);
}

}  // namespace
}  // namespace halfstep
