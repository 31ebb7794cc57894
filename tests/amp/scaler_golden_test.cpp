// SPDX-License-Identifier: Apache-2.0
// GradScaler against trajectories of PyTorch's: bit-identical.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>

#include "halfstep/amp/grad_scaler.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/optim/sgd.h"
#include "tests/support/golden.h"

namespace halfstep {
namespace {

using amp::GradScaler;
using Values = std::vector<double>;
constexpr double kInf = std::numeric_limits<double>::infinity();
const Values kInjected = {0, kInf, std::numeric_limits<double>::quiet_NaN(), -kInf};

TEST(GradScalerGolden, Trajectories) {
  int seen = 0;
  for (const test::GoldenEntry& e : test::read_goldens("scaler.json")) {
    if (e.op != "grad_scaler") continue;
    SCOPED_TRACE(e.name);
    ++seen;
    const auto interval = static_cast<int>(e.integer("growth_interval"));
    GradScaler scaler{{.init_scale = e.real("init_scale"),
                       .growth_factor = e.real("growth_factor"),
                       .backoff_factor = e.real("backoff_factor"),
                       .growth_interval = interval}};
    const auto n = static_cast<std::size_t>(e.integer("optimizers"));
    const auto unscale_first = e.integers("unscale_first");
    std::vector<Tensor> params;
    std::vector<std::unique_ptr<optim::SGD>> optimizers;
    for (std::size_t k = 0; k < n; ++k) {
      params.push_back(ones({1}, {.requires_grad = true}));
      optimizers.push_back(
          std::make_unique<optim::SGD>(NamedTensors{{"p", params[k]}}, optim::SGDOptions{.lr = e.real("lr")}));
    }
    const auto& scales = e.tensor("scale").data;
    for (std::size_t step = 0; step < scales.size(); ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      for (std::size_t k = 0; k < n; ++k) {
        optimizers[k]->zero_grad();
        scaler.scale(sum(params[k])).backward();
        const auto kind = static_cast<std::size_t>(e.tensor("found" + std::to_string(k)).data[step]);
        if (kind) params[k].grad().fill_(kInjected[kind]);
      }
      for (const std::int64_t k : unscale_first) scaler.unscale_(*optimizers[static_cast<std::size_t>(k)]);
      for (std::size_t k = 0; k < n; ++k) {
        const auto result = scaler.step(*optimizers[k]);
        const std::string number = std::to_string(k);
        ASSERT_EQ(result.ran(), e.tensor("ran" + number).data[step] != 0);
        EXPECT_EQ(result.first_overflow(), result.ran() ? "" : "p");
        ASSERT_EQ(params[k].item<double>(), e.tensor("param" + number).data[step]);
      }
      scaler.update();
      // PyTorch's scale falls until it is 0; ours stops where its inverse is still a number.
      ASSERT_EQ(scaler.get_scale(), std::max(scales[step], 0x1p-126));
      ASSERT_EQ(scaler.growth_tracker(), e.tensor("tracker").data[step]);
    }
    const auto state = scaler.state_dict();
    for (const char* key : {"growth_factor", "backoff_factor", "growth_interval"}) {
      EXPECT_EQ(state.at(key), e.real(std::string("state.") + key)) << key;
    }
    EXPECT_EQ(state.at("scale"), std::max(e.real("state.scale"), 0x1p-126));
    EXPECT_EQ(state.at("_growth_tracker"), e.real("state.growth_tracker"));
  }
  EXPECT_GE(seen, 20);
}

TEST(GradScalerGolden, UnscaledBits) {
  int seen = 0;
  for (const test::GoldenEntry& e : test::read_goldens("scaler.json")) {
    if (e.op != "unscale_") continue;
    SCOPED_TRACE(e.name);
    ++seen;
    const DType dtype = e.inputs[0].dtype == "f32" ? f32 : bf16;
    const Shape sizes(e.inputs[0].shape);
    const Tensor p = zeros(sizes, {.dtype = dtype, .requires_grad = true});
    optim::SGD optimizer({{"p", p}}, {.lr = 1});
    GradScaler scaler{{.init_scale = e.real("scale")}};
    scaler.scale(zeros({}));
    p.set_grad(tensor(e.inputs[0].data, sizes, {.dtype = dtype}));
    scaler.unscale_(optimizer);
    EXPECT_EQ(p.grad().dtype(), dtype);
    const auto ours = p.grad().to_vector<double>();
    for (std::size_t i = 0; i < ours.size(); ++i) {
      const double expected = e.outputs[0].data[i];
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(ours[i])) << i;
      } else {
        EXPECT_EQ(ours[i], expected) << i;
        EXPECT_EQ(std::signbit(ours[i]), std::signbit(expected)) << i;
      }
    }
    EXPECT_EQ(scaler.step(optimizer).ran(), !e.flag("found_inf"));
  }
  EXPECT_GE(seen, 18);
}

}  // namespace
}  // namespace halfstep
