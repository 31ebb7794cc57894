// SPDX-License-Identifier: Apache-2.0
// Ops that a device lacks or fails at, errors of asynchronous work, lost devices: on the simulated accelerator.
#include "halfstep/runtime/fallback.h"

#include <cmath>

#include "halfstep/core/error.h"
#include "halfstep/core/random.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/ops/sort.h"
#include "halfstep/runtime/transfer.h"
#include "tests/runtime/on_sim.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;
using test::error_of;
using Fallback = test::OnSim;
using DeviceFaults = test::OnSim;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_F(Fallback, ForwardAndBackwardAreTheCpus) {
  for (const DType d : {f32, f64, f16, bf16}) {
    manual_seed(3);
    const Tensor here = randn({4, 6}, {.device = Device{}}).to(d).requires_grad_();
    const Tensor there = here.detach().to(sim).requires_grad_();
    const auto f = [](const Tensor& x) { return sum(softmax(gelu(x), 1) * x); };
    f(here).backward();
    f(there).backward();
    EXPECT_EQ(there.grad().device(), sim);
    // gelu, softmax and their backward passes run on the CPU either way: the same bits, but for the product and sum,
    // which round once each.
    const double ulp = d == f64 ? 0x1p-52 : d == f32 ? 0x1p-23 : d == f16 ? 0x1p-10 : 0x1p-7;
    const auto got = there.grad().to_vector<double>(), want = here.grad().to_vector<double>();
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_NEAR(got[i], want[i], 4 * ulp * (1 + std::abs(want[i]))) << name(d);
  }
  std::vector<std::string> ops;
  for (const FallbackCount& c : fallback_counts()) ops.push_back(c.op);
  for (const char* op : {"gelu", "softmax", "gelu_backward", "softmax_backward"}) {
    EXPECT_TRUE(std::find(ops.begin(), ops.end(), op) != ops.end()) << op;
  }
}

TEST_F(Fallback, InPlaceFormsAndPartsOfAStorageAreWrittenBack) {
  Tensor x = tensor({{4, -1, 3}, {2, 9, 0}}, {.device = sim});
  x.select(1, 1).copy_(exp(x.select(1, 1)));
  Tensor column = x.select(1, 2);
  sigmoid_(column);
  const Tensor expected = tensor({{4, std::exp(-1.0), 1 / (1 + std::exp(-3.0))}, {2, std::exp(9.0), 0.5}});
  const auto got = x.to_vector<double>(), want = expected.to_vector<double>();
  for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(got[i], want[i], 2e-7 * want[i]) << i;
  EXPECT_GE(fallback_counts().size(), 2u);
  // Several outputs, and integers.
  const auto [values, indices] = sort(x, 1);
  EXPECT_EQ(indices.to_vector<double>(), (Values{1, 2, 0, 2, 0, 1}));
  EXPECT_EQ(indices.device(), sim);
}

// What lies between the elements of a result that is written straight into a part of a storage stays.
TEST_F(Fallback, GapsOfADestinationAreKept) {
  Tensor x = tensor({{1, 2, 3}, {4, 5, 6}}, {.dtype = f16, .device = sim});
  const Tensor other = tensor({10, 20}, {.device = sim});
  test::order_fault("unsupported:to:2");  // the first one converts the column to f32
  // Host memory that is handed out again holds something else than the column by chance.
  for (int i = 0; i < 2; ++i) std::vector<Tensor> used(8, full({16}, 7, {.device = Device{}}));
  x.select(1, 1).add_(other);  // computed in f32, converted into the column
  EXPECT_EQ(x.to_vector<double>(), (Values{1, 12, 3, 4, 25, 6}));
  ASSERT_EQ(fallback_counts().size(), 1u);
  EXPECT_EQ(fallback_counts()[0].calls, 1u);
}

TEST_F(Fallback, RandomNumbersAreTheSameOnEveryDevice) {
  for (const DType d : {f32, f64, f16, bf16}) {
    manual_seed(11);
    const Tensor here = randn({100}, {.dtype = d, .device = Device{}});
    manual_seed(11);
    const Tensor there = randn({100}, {.dtype = d, .device = sim});
    EXPECT_EQ(there.to_vector<double>(), here.to_vector<double>());
  }
}

TEST_F(Fallback, IsSaidOnceAndCounted) {
  const Tensor x = ones({1000}, {.device = sim});
  for (int i = 0; i < 3; ++i) cosh(x);
  int times = 0;
  for (const std::string& s : said) times += contains(s, "cosh: sim:0 has no kernel for f32") ? 1 : 0;
  EXPECT_EQ(times, 1) << ::testing::PrintToString(said);
  ASSERT_EQ(fallback_counts().size(), 1u);
  const FallbackCount c = fallback_counts()[0];
  EXPECT_EQ(c.op, "cosh");
  EXPECT_EQ(c.calls, 3u);
  EXPECT_EQ(c.bytes_to_host, 3u * 4000u) << "the input; the fresh output has nothing to keep";
  EXPECT_EQ(c.bytes_to_device, 0u) << "nobody has read a result on the device";
  EXPECT_GT(c.seconds, 0);
  EXPECT_EQ(c.failures, 0u);
}

// Of ops in a row that run on the CPU, only the first one's input and the last one's result travel, and that when a
// kernel of the device wants it.
TEST_F(Fallback, ResultsStayOnTheHostUntilTheDeviceReadsThem) {
  const Tensor x = tensor({0.5, -1, 2, 0}, {.device = sim});
  synchronize(sim);
  auto copies = [this, before = test::sim_stats()]() mutable {
    synchronize(sim);
    const auto now = test::sim_stats();
    const auto were = std::exchange(before, now);
    return std::pair(now.host_reads - were.host_reads, now.copied_bytes - were.copied_bytes);
  };
  using Copies = std::pair<std::uint64_t, std::uint64_t>;
  copies();
  Tensor y = softmax(sigmoid(cosh(x)), 0);
  sigmoid_(y);
  EXPECT_EQ(y.device(), sim);
  EXPECT_EQ(copies(), Copies(1, 16)) << "x, to the host";
  const auto values = y.to_vector<double>();
  EXPECT_EQ(y.to(Device{}).to_vector<double>(), values);
  EXPECT_EQ(y.select(0, 1).item<double>(), values[1]);
  EXPECT_EQ(copies(), Copies(0, 0)) << "the host reads what it has";
  const Tensor twice = y * 2;
  EXPECT_EQ((y + y).to_vector<double>(), twice.to_vector<double>());
  const auto [reads, bytes] = copies();
  EXPECT_EQ(reads, 2u) << "the two sums";
  EXPECT_EQ(bytes, 16u + 2 * 16u) << "y, once";
  EXPECT_EQ(twice.to_vector<float>()[1], static_cast<float>(2 * values[1]));
  std::uint64_t counted = 0;
  for (const FallbackCount& c : fallback_counts()) counted += c.bytes_to_device;
  EXPECT_EQ(counted, 16u);
  // A part that is written, a part that is read, an address that is given away, and results that nobody wants.
  Tensor z = cosh(x);
  z.narrow(0, 1, 2).copy_(x.narrow(0, 0, 2));
  EXPECT_NEAR(z.to_vector<double>()[0], std::cosh(0.5), 1e-6);
  EXPECT_EQ(z.to_vector<float>()[2], -1);
  Tensor part = cosh(x).narrow(0, 2, 2);
  EXPECT_NEAR((part * 1).to_vector<double>()[0], std::cosh(2.0), 1e-6);
  sigmoid_(part);
  EXPECT_NEAR(part.to_vector<double>()[1], 1 / (1 + std::exp(-1.0)), 1e-6);
  Tensor held = cosh(x);
  EXPECT_NE(held.raw_data(), nullptr);
  copies();
  sigmoid_(held);
  EXPECT_EQ(copies(), Copies(1, 32)) << "who has the address finds it there";
  cosh(x);
  EXPECT_EQ(copies(), Copies(1, 16));
}

// The CPU's convolution keeps a weight that it meets again in an order of its own, until something writes to the
// weight: here to a result that is still on the host.
TEST_F(Fallback, WhatIsDerivedFromAResultOnTheHostEndsWithAWriteToIt) {
  const Tensor x = randn({2, 32, 6, 6}, {.device = Device{}}), v = randn({32, 32, 3, 3}, {.device = Device{}});
  const auto conv = [](const Tensor& input, const Tensor& weight) {
    return conv2d(input, weight, {}, {.padding = {1}});
  };
  const Tensor there = x.to(sim);
  Tensor weight = cosh(v.to(sim));
  ASSERT_FALSE(op_support(sim, "cosh", f32).native || op_support(sim, "conv2d", f32).native);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(conv(there, weight).to_vector<float>(), conv(x, cosh(v)).to_vector<float>());
  sigmoid_(weight);
  EXPECT_EQ(conv(there, weight).to_vector<float>(), conv(x, sigmoid(cosh(v))).to_vector<float>());
}

// An event recorded after the op covers its result on every queue.
TEST_F(Fallback, ResultsOnTheHostAreThereForOtherQueues) {
  const Tensor x = full({1 << 16}, 0.5, {.device = sim});
  test::order_fault("delay:*:1:always:2ms");
  const Queue other(sim);
  for (int i = 0; i < 5; ++i) {
    const Tensor y = cosh(x);
    const Event made(sim);
    made.record();
    const Tensor here = y * 1;
    const QueueGuard guard(other);
    other.wait(made);
    EXPECT_NEAR((y * 1).to_vector<double>()[65535], std::cosh(0.5), 1e-6);
  }
}

TEST_F(Fallback, CanBeForbidden) {
  const Tensor x = ones({4}, {.device = sim});
  set_fallback_options({.missing = false});
  const std::string text = error_of([&] { cosh(x); });
  EXPECT_TRUE(contains(text, "cosh: sim:0 has no kernel for f32")) << text;
  EXPECT_TRUE(contains(text, "HALFSTEP_FALLBACK=1")) << text;
  EXPECT_EQ((x + x).to_vector<double>(), (Values{2, 2, 2, 2}));
  EXPECT_TRUE(fallback_counts().empty());
  test::order_fault("unsupported:add:1");
  EXPECT_TRUE(contains(error_of([&] { x + x; }), "HALFSTEP_FALLBACK=1"));
}

TEST_F(Fallback, AKernelThatRefusesACallIsReplaced) {
  const Tensor x = tensor({1, 2}, {.device = sim});
  test::order_fault("unsupported:add:1");
  EXPECT_EQ((x + x).to_vector<double>(), (Values{2, 4}));
  ASSERT_EQ(fallback_counts().size(), 1u);
  EXPECT_EQ(fallback_counts()[0].op, "add");
}

TEST_F(Fallback, ErrorsOfTheCpusKernelsStayClear) {
  const Tensor x = ones({4}, {.device = sim});
  const Tensor bad = tensor_from_integers({9}, {1}, {.dtype = i64, .device = sim});
  EXPECT_TRUE(contains(error_of([&] { index_select(x, 0, bad).to_vector<double>(); }), "9"));
}

TEST_F(DeviceFaults, AFailureOfAsynchronousWorkNamesItsOp) {
  const Tensor x = ones({4, 4}, {.device = sim});
  synchronize(sim);
  test::order_fault("fail:mm:1");
  const Tensor y = mm(x, x) + x * x;
  const std::string text = error_of([&] { y.to_vector<double>(); });
  EXPECT_TRUE(contains(text, "mm (call ")) << text;
  EXPECT_TRUE(contains(text, "failed on sim:0")) << text;
  EXPECT_TRUE(contains(text, "found out in copy to host")) << text;
  // Said once; the device goes on.
  EXPECT_EQ(mm(x, x).to_vector<double>(), Values(16, 4));
}

TEST_F(DeviceFaults, SynchronousModeFailsAtTheCall) {
  const Tensor x = ones({4}, {.device = sim});
  set_synchronous(true);
  test::order_fault("fail:add:1");
  const std::string text = error_of([&] { x + x; });
  EXPECT_TRUE(contains(text, "add (call ")) << text;
}

TEST_F(DeviceFaults, ARefusalAtTheCallIsAnError) {
  const Tensor x = ones({4}, {.device = sim});
  test::order_fault("refuse:add:1");
  EXPECT_TRUE(contains(error_of([&] { x + x; }), "add: "));
  EXPECT_EQ((x + x).to_vector<double>(), Values(4, 2));
}

TEST_F(DeviceFaults, FailingKernelsAreReplacedWhereThatIsOn) {
  set_fallback_options({.failing = true});
  const Tensor x = tensor({1, 2, 3}, {.device = sim});
  for (const char* fault : {"fail:add:1", "refuse:add:1"}) {
    test::order_fault(fault);
    EXPECT_EQ((x + x).to_vector<double>(), (Values{2, 4, 6})) << fault;
  }
  ASSERT_EQ(fallback_counts().size(), 1u);
  EXPECT_EQ(fallback_counts()[0].failures, 2u);
  // In place the inputs are gone when it fails on the queue, and are there when it was refused.
  Tensor y = x.clone();
  test::order_fault("refuse:add:1");
  y.add_(x);
  EXPECT_EQ(y.to_vector<double>(), (Values{2, 4, 6}));
  test::order_fault("fail:add:1");
  EXPECT_TRUE(contains(error_of([&] { y.add_(x); }), "in place"));
}

TEST_F(DeviceFaults, ADelayChangesNoResult) {
  test::order_fault("delay:*:1:always:2ms");
  Tensor x = ones({4, 4}, {.device = sim});
  for (int i = 0; i < 5; ++i) x = mm(x, x) * 0.25;
  test::order_fault("clear");
  EXPECT_EQ(x.to_vector<double>(), Values(16, 1));
}

// A failure that turns up where nothing can be thrown (memory given back, a queue that goes) is not forgotten.
TEST_F(DeviceFaults, AFailureFoundOutOnTheSideIsKept) {
  const Tensor x = ones({4}, {.device = sim});
  synchronize(sim);
  {
    const Queue other(sim);
    const QueueGuard guard(other);
    test::order_fault("fail:add:1");
    x + x;
  }
  const std::string text = error_of([&] { (x * x).to_vector<double>(); });
  EXPECT_TRUE(contains(text, "add (call ")) << text;
  EXPECT_EQ((x * x).to_vector<double>(), Values(4, 1));
}

}  // namespace
}  // namespace halfstep
