// SPDX-License-Identifier: Apache-2.0
#include "halfstep/debug/twin.h"

#include <gtest/gtest.h>

#include <cmath>

#include "halfstep/amp/autocast.h"
#include "halfstep/core/random.h"
#include "halfstep/models/mlp.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "tests/debug/nets.h"
#include "tests/debug/wrong_op.h"

namespace halfstep {
namespace {

using debug::twin;
using debug::TwinCall;
using debug::TwinReport;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A network as people have them, forward and backward: rounding explains all of it.
TEST(Twin, ExplainsAnOrdinaryStep) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    for (const DType dtype : {f16, bf16}) {
      manual_seed(seed);
      const models::MLP net;
      const Tensor x = randn({32, 784}), y = randint(0, 10, {32});
      const PhiloxState random = default_generator().state();
      const TwinReport report = twin(
          [&] {
            net.zero_grad();
            cross_entropy(dropout(net(x), 0.1), y).backward();
          },
          {.dtype = dtype});
      EXPECT_EQ(report.first(), nullptr) << report.str();
      EXPECT_TRUE(contains(report.str(), "no op departs beyond what the rounding of")) << report.str();
      EXPECT_LE(report.only_reference, 2u);
      EXPECT_LE(report.only_tested, 2u);
      std::size_t linear = 0, backward = 0;
      double largest = 0;
      for (const TwinCall& c : report.calls) {
        linear += c.site.op == "linear" && c.dtype == dtype ? 1 : 0;
        backward += c.site.backward_of.empty() ? 0 : 1;
        largest = std::max(largest, c.error);
      }
      EXPECT_EQ(linear, 3u);
      EXPECT_GT(backward, 6u);
      EXPECT_GT(largest, finfo(dtype).eps / 8) << "the runs are the same";
      // Each run continues from where the generator stood, and leaves it where one step does.
      EXPECT_GT(default_generator().state().offset, random.offset - 1);
    }
  }
}

struct Wrong : nn::Module<Wrong> {
  Tensor forward(const Tensor& x) const { return test::triple(x); }
};
struct WrongNet : nn::Module<WrongNet> {
  nn::Linear fc = child("fc", nn::Linear{{.in = 2, .out = 3, .bias = false}});
  Wrong wrong = child("wrong", Wrong{});
  Tensor forward(const Tensor& x) const { return relu(wrong(fc(x))); }
};

TEST(Twin, NamesTheWrongKernel) {
  const WrongNet net;
  test::set(net.fc.weight, {1, 0, 0, 1, 1, 1});
  const TwinReport report = twin([&] { net(tensor({1.0, 1.0}, {1, 2})); });
  ASSERT_TRUE(report.first());
  EXPECT_EQ(report.first()->site.op, "test_triple");
  EXPECT_EQ(report.first()->site.module, "wrong");
  EXPECT_DOUBLE_EQ(report.first()->error, 0.25 / 12);  // 3, 3 and 6.25
  EXPECT_TRUE(contains(report.str(), "first departure: wrong: test_triple, forward")) << report.str();
  EXPECT_TRUE(contains(report.first()->reason, "a wrong kernel"));
  // What comes after it passes the error on.
  EXPECT_EQ(std::count_if(report.calls.begin(), report.calls.end(), [](const TwinCall& c) { return c.departs; }), 1);
}

TEST(Twin, NamesOverflowInTheForwardPass) {
  const test::ExpNet net;
  test::set(net.fc.weight, {4, 4, 1, 0});
  const Tensor x = tensor({1.0, 2.0}, {1, 2});
  const TwinReport report =
      twin([&] { net(x); },
           [&] {
             const amp::Autocast autocast{{.dtype = f16, .ops = {{"exp", amp::Policy::lower_precision}}}};
             net(x);
           });
  ASSERT_TRUE(report.first());
  EXPECT_EQ(report.first()->site.str(), "head: exp");
  EXPECT_TRUE(contains(report.first()->reason, "f16 overflow: 1 values")) << report.first()->reason;
  EXPECT_TRUE(std::isinf(report.first()->error));
}

// Without a loss scale a gradient of 2^-30 is nothing in float16.
TEST(Twin, NamesUnderflowInTheBackwardPass) {
  const test::Small net;
  test::set(net.fc2.weight, {1, 1});
  test::set(net.fc2.bias, {0});
  test::set(net.fc1.weight, {1, 1, 1, 1, 1, 1});
  test::set(net.fc1.bias, {0, 0});
  const auto step = [&](double scale) {
    return [&net, scale] {
      net.zero_grad();
      (sum(net(ones({2, 3}))) * scale).backward();
    };
  };
  const TwinReport report = twin(step(0x1p-30));
  ASSERT_TRUE(report.first());
  EXPECT_NE(report.first()->site.backward_of, "");
  EXPECT_TRUE(contains(report.first()->reason, "f16 underflow")) << report.first()->reason;
  EXPECT_EQ(twin(step(1)).first(), nullptr) << twin(step(1)).str();
  EXPECT_EQ(twin(step(0x1p-30), {.dtype = bf16}).first(), nullptr);
}

// 1000.3 - 1000: float16 keeps 1000.5.
TEST(Twin, NamesCancellation) {
  const Tensor x = tensor({0.3, 0.2}, {2}), thousand = full({2}, 1000.0);
  const auto f = [&](DType dtype) {
    return [&, dtype] { sub(add(x.to(dtype), thousand.to(dtype)), thousand.to(dtype)); };
  };
  const TwinReport report = twin(f(f32), f(f16));
  ASSERT_TRUE(report.first());
  EXPECT_EQ(report.first()->site.op, "sub");
  EXPECT_EQ(report.first()->own_error, 0);
  EXPECT_TRUE(contains(report.first()->reason, "ill-conditioned")) << report.first()->reason;
}

TEST(Twin, LeavesTheThreadAsItWas) {
  const Tensor x = ones({4});
  manual_seed(7);
  std::vector<std::vector<double>> seen;
  twin([&] {
    seen.push_back(dropout(x, 0.5).to_vector<double>());
    EXPECT_EQ(amp::is_autocast_enabled(), seen.size() == 2);
  });
  EXPECT_EQ(seen.at(0), seen.at(1));
  EXPECT_FALSE(amp::is_autocast_enabled());
  EXPECT_FALSE(observed());
  EXPECT_THROW(twin([] { throw ShapeError("of the step"); }), ShapeError);
  EXPECT_FALSE(observed());
  EXPECT_THROW(twin([] {}, {.dtype = f32}), AmpError);
  EXPECT_THROW(twin([&] { relu(x.to(f16)); }), Error);
}

TEST(Twin, CountsWhatHasNoPartner) {
  const Tensor x = ones({4});
  const TwinReport report = twin([&] { relu(x), exp(x); }, [&] { exp(x), sqrt(x); });
  EXPECT_EQ(report.only_reference, 1u);
  EXPECT_EQ(report.only_tested, 1u);
  EXPECT_EQ(report.calls.size(), 1u);
  EXPECT_EQ(report.calls[0].site.op, "exp");
  EXPECT_EQ(report.calls[0].error, 0);
}

}  // namespace
}  // namespace halfstep
