// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/trace.h"

#include <gtest/gtest.h>

#include "halfstep/autograd/checkpoint.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/norm_act.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/caching_allocator.h"
#include "tests/support/errors.h"

namespace halfstep::nn {
namespace {

struct Block : Module<Block> {
  Conv2d conv = child("conv", Conv2d{{.in = 2, .out = 2, .kernel = {3, 3}, .padding = 1, .bias = false}});
  BatchNorm2d bn = child("bn", BatchNorm2d{{.channels = 2}});
  Tensor forward(const Tensor& x) const { return bn(conv(x), Activation::relu, x); }
};
struct Net : Module<Net> {
  Block first = child("first", Block{});
  Linear fc = child("fc", Linear{{.in = 32, .out = 3}});
  Tensor forward(const Tensor& x) const { return relu(fc(flatten(first(x), 1)) * 2); }
};

std::vector<std::string> places(const Trace& t) {
  std::vector<std::string> result;
  for (const TracedCall& c : t.calls) result.push_back(c.module + "/" + c.op);
  return result;
}

TEST(Trace, TellsCallsWithTheirModulesAndFusedOpsInParts) {
  const Net net;
  const Tensor x = ones({1, 2, 4, 4});
  const Trace t = trace(net, [&](std::span<const Tensor> in) { return std::vector<Tensor>{net(in[0])}; }, {x});
  EXPECT_EQ(places(t), (std::vector<std::string>{"first.conv/conv2d", "first.bn/batch_norm", "first.bn/add",
                                                 "first.bn/relu", "/view", "fc/linear", "/mul_scalar", "/relu"}));
  EXPECT_TRUE(net.is_training());
  EXPECT_TRUE(net.first.bn.is_training());

  const auto value = [&](std::size_t call, std::size_t input) {
    return t.values[static_cast<std::size_t>(t.calls[call].inputs[input])];
  };
  using Kind = TracedValue::Kind;
  EXPECT_EQ(value(0, 0).kind, Kind::input);
  EXPECT_EQ(value(0, 1).kind, Kind::parameter);
  EXPECT_EQ(value(0, 1).name, "first.conv.weight");
  EXPECT_EQ(value(1, 3).name, "first.bn.running_mean");
  // What a call makes is what a later one reads: the residual is the input, the sum what relu reads.
  EXPECT_EQ(t.calls[1].inputs[0], t.calls[0].outputs[0]);
  EXPECT_EQ(t.calls[2].inputs[1], t.inputs[0]);
  EXPECT_EQ(t.calls[3].inputs[0], t.calls[2].outputs[0]);
  EXPECT_EQ(t.outputs, t.calls.back().outputs);
  EXPECT_EQ(t.calls[5].place(), "linear in module fc");
  EXPECT_EQ(t.calls[7].place(), "relu");
}

TEST(Trace, ConstantsOutliveTheirSources) {
  const Net net;
  const Trace t = trace(net,
                        [&](std::span<const Tensor> in) {
                          const Tensor ramp = [] {
                            // The size of its source, which is freed, is taken again by what comes next.
                            std::vector<double> values(64);
                            for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i);
                            return tensor(values);
                          }();
                          const std::vector<double> other(64, -1.0);
                          return std::vector<Tensor>{in[0] * ramp * tensor(other)};
                        },
                        {ones({64})});
  ASSERT_EQ(t.calls.size(), 2u);
  const TracedValue& constant = t.values[static_cast<std::size_t>(t.calls[0].inputs[1])];
  EXPECT_EQ(constant.kind, TracedValue::Kind::constant);
  const std::vector<float> values = constant.tensor.to(f32).to_vector<float>();
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], static_cast<float>(i));
}

TEST(Trace, CopiesAndConversionsAreNoCalls) {
  const Net net;
  const Trace t = trace(
      net, [&](std::span<const Tensor> in) { return std::vector<Tensor>{relu(in[0].to(f16).clone())}; }, {ones({3})});
  ASSERT_EQ(t.calls.size(), 1U);
  EXPECT_EQ(t.calls[0].inputs[0], t.inputs[0]);
}

TEST(Trace, RefusesMemoryWrittenThroughAnotherView) {
  const Net net;
  const auto forward = [](std::span<const Tensor> in) {
    const Tensor y = in[0] * 2;
    y.narrow(0, 0, 1).add_(1);
    return std::vector<Tensor>{y + 1};
  };
  EXPECT_EQ(test::error_of<Error>([&] { (void)trace(net, forward, {ones({3})}, "prepare"); }),
            "prepare: add_scalar: reads memory that was written in place through another view; a graph has no such "
            "writes");
  const auto nothing = [](std::span<const Tensor>) { return std::vector<Tensor>{}; };
  EXPECT_EQ(test::error_of<Error>([&] { (void)trace(net, nothing, {ones({3})}); }),
            "trace: expected at least one output, got none");
}

// Every call of relu reads twice its input.
struct Doubler final : CallInterceptor {
  void call(const Op& op, std::span<const Tensor* const> inputs, const void* attributes,
            std::span<Tensor> outputs) override {
    ++calls;
    if (std::string_view(op.name) != "relu") return call_op(op, inputs, attributes, outputs);
    const Tensor twice = *inputs[0] * 2;
    const Tensor* const input = &twice;
    call_op(op, {&input, 1}, attributes, outputs);
  }
  void call_into(const Op& op, std::span<const Tensor* const> inputs, const void* attributes, Tensor& destination,
                 bool in_place) override {
    ++writes;
    call_op_into(op, inputs, attributes, destination, in_place);
  }
  std::shared_ptr<CallInterceptor> again() const override { return std::make_shared<Doubler>(*this); }
  int calls = 0, writes = 0;
};

TEST(Interceptor, TakesCallsOfItsThreadButNotItsOwn) {
  Doubler doubler;
  thread_state().interceptor = &doubler;
  Tensor x = full({2}, 3.0);  // a write
  const int before = doubler.calls;
  const Tensor y = relu(x);
  EXPECT_EQ(doubler.calls, before + 1);
  EXPECT_EQ(thread_state().interceptor, &doubler);
  EXPECT_THROW(relu(Tensor{}), Error);
  EXPECT_EQ(thread_state().interceptor, &doubler);
  const int writes = doubler.writes;
  Tensor z = y;
  z.add_(1);
  EXPECT_EQ(doubler.writes, writes + 1);
  thread_state().interceptor = nullptr;
  EXPECT_EQ(y.to_vector<float>(), (std::vector<float>{7, 7}));
  EXPECT_EQ(relu(x).to_vector<float>(), (std::vector<float>{3, 3}));
}

// A run of 20 layers needs the memory of a forward pass, not that of all results.
TEST(Trace, ReleasesWhatTheNetworkReleases) {
  const Tensor x = ones({1 << 20});
  const std::uint64_t bytes = std::uint64_t{4} << 20, before = memory_stats().allocated;
  reset_peak_memory();
  const auto forward = [](std::span<const Tensor> in) {
    Tensor y = in[0];
    for (int i = 0; i < 20; ++i) y = y * 2;
    return std::vector<Tensor>{y};
  };
  const Trace t = trace(Net(), forward, {x});
  EXPECT_LE(memory_stats().allocated_peak - before, 3 * bytes);  // a call's input, its result, and a little
  EXPECT_LE(memory_stats().allocated - before, bytes + 65536);   // the output
  ASSERT_EQ(t.calls.size(), 20U);
  const TracedValue& middle = t.values[static_cast<std::size_t>(t.calls[9].outputs[0])];
  EXPECT_EQ(middle.tensor.sizes(), x.sizes());
  EXPECT_EQ(middle.tensor.dtype(), f32);
  EXPECT_EQ(t.values[static_cast<std::size_t>(t.outputs[0])].tensor.slice(0, 0, 1).item<float>(), 1048576.0F);
  // Memory that is used again is another tensor's: no call reads what an earlier one left there.
  for (std::size_t c = 1; c < t.calls.size(); ++c) EXPECT_EQ(t.calls[c].inputs[0], t.calls[c - 1].outputs[0]);
}

// What is computed from parameters alone stays: a graph holds it as a constant.
TEST(Trace, KeepsWhatDoesNotFollowTheInputs) {
  const Linear fc({.in = 2, .out = 2, .bias = false});
  const auto forward = [&](std::span<const Tensor> in) { return std::vector<Tensor>{linear(in[0], fc.weight * 3)}; };
  const Trace t = trace(fc, forward, {ones({1, 2})});
  const Tensor kept = t.values[static_cast<std::size_t>(t.calls[0].outputs[0])].tensor;
  EXPECT_EQ(kept.to_vector<float>(), (fc.weight * 3).to_vector<float>());
}

TEST(Interceptor, TakesWhatACheckpointRunsAgain) {
  Tensor x = full({2}, 3.0);
  x.requires_grad_();
  Tensor y;
  {
    Doubler doubler;
    thread_state().interceptor = &doubler;
    y = checkpoint([](const Tensor& t) { return square(relu(t)); }, x);
    thread_state().interceptor = nullptr;
  }
  EXPECT_EQ(y.detach().to_vector<float>(), (std::vector<float>{36, 36}));
  sum(y).backward();  // of (2 x)^2
  EXPECT_EQ(x.grad().to_vector<float>(), (std::vector<float>{24, 24}));
  EXPECT_EQ(thread_state().interceptor, nullptr);
}

}  // namespace
}  // namespace halfstep::nn
