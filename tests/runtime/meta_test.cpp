// SPDX-License-Identifier: Apache-2.0
// The device meta: tensors without values. What ops make there is what they make on the CPU, but for the values.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "halfstep/autograd/engine.h"
#include "halfstep/core/dlpack.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/nn/summary.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/runtime/devices.h"
#include "halfstep/runtime/queue.h"
#include "tests/support/errors.h"
#include "tests/support/op_cases.h"

namespace halfstep {
namespace {

using test::error_of;
using test::OpCase;
using test::OpLayout;

std::uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * 4096;
}

Tensor on_meta(const Tensor& t) {
  if (!t.defined()) return t;
  return empty_strided(t.sizes(), t.strides(),
                       {.dtype = t.dtype(), .device = kMeta, .requires_grad = t.requires_grad()});
}

std::string kind_of(const Tensor& t) {
  if (!t.defined()) return "none";
  return fmt::format("{} {} strides {}{}", name(t.dtype()), t.sizes().str(), t.strides().str(),
                     t.requires_grad() ? ", requires grad" : "");
}

// The kinds of what a case gives and of the gradients of its arguments, or the text of its error.
std::vector<std::string> kinds(const OpCase& c, const std::vector<Tensor>& in, Device device) {
  std::vector<std::string> result;
  try {
    std::vector<Tensor> roots, weights, leaves;
    for (const Tensor& t : c.call(in)) {
      result.push_back(kind_of(t));
      EXPECT_TRUE(!t.defined() || t.device() == device) << c.op;
      if (!t.requires_grad()) continue;
      roots.push_back(t);
      weights.push_back(ones(t.sizes(), {.dtype = t.dtype(), .device = device}));
    }
    for (const Tensor& t : in) {
      if (t.requires_grad()) leaves.push_back(t);
    }
    if (roots.empty() || leaves.empty()) return result;
    for (const Tensor& g : grad(roots, leaves, {.grad_outputs = weights, .allow_unused = true})) {
      result.push_back("gradient " + kind_of(g));
    }
  } catch (const std::exception& e) {
    result.push_back(e.what());
  }
  return result;
}

TEST(Meta, OpsMakeWhatTheyMakeOnTheCpu) {
  // Sizes that depend on values.
  const std::set<std::string> dependent = {"nonzero", "nonzero_count", "masked_select", "nms"};
  std::size_t compared = 0;
  for (const OpCase& c : test::all_op_cases()) {
    for (const OpLayout layout : {OpLayout::contiguous, OpLayout::strided, OpLayout::empty}) {
      for (const DType dtype : {f32, f64, bf16, f16}) {
        const std::vector<Tensor> in = op_arguments(c, layout, dtype);
        std::vector<Tensor> without;
        for (const Tensor& t : in) without.push_back(on_meta(t));
        const std::vector<std::string> expected = kinds(c, in, Device{});
        std::vector<std::string> got;
        {
          const DeviceGuard there(kMeta);
          got = kinds(c, without, kMeta);
        }
        if (dependent.contains(c.op) && got != expected) {
          ASSERT_FALSE(got.empty());
          EXPECT_NE(got.back().find("depend on values"), std::string::npos) << c.op << ": " << got.back();
          continue;
        }
        EXPECT_EQ(got, expected) << c.op << " " << name(dtype) << " layout " << static_cast<int>(layout);
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 1000U);
}

TEST(Meta, IsADevice) {
  EXPECT_EQ(Device("meta"), kMeta);
  EXPECT_EQ(Device("meta:0"), kMeta);
  EXPECT_EQ(kMeta.str(), "meta");
  EXPECT_TRUE(kMeta.is_meta() && kMeta.is_host() && !kMeta.is_cpu());
  EXPECT_FALSE(Device{}.is_meta());
  EXPECT_EQ(error_of<DeviceError>([] { Device("meta:1"); }), "device: expected meta or meta:0, got 'meta:1'");
  EXPECT_EQ(device_count("meta"), 1);
  EXPECT_EQ(device_info(kMeta).device, kMeta);
  for (const DeviceInfo& d : devices()) EXPECT_NE(d.device, kMeta);  // it computes nothing
  EXPECT_TRUE(op_support(kMeta, "mm", f32).native);
  const Queue queue = Queue::current(kMeta);
  queue.synchronize();
  synchronize(kMeta);
  const Event event(kMeta);
  event.record();
  EXPECT_TRUE(event.query());
}

TEST(Meta, TakesNoMemory) {
  const std::uint64_t before = resident_bytes(), allocated = memory_stats(kMeta).allocated;
  {
    const Tensor a = ones({std::int64_t{1} << 20, 1 << 14}, {.device = kMeta});  // 64 GiB
    const Tensor b = randn({1 << 14, 1 << 14}, {.device = kMeta});
    const Tensor c = relu(matmul(a, b) + 1);
    EXPECT_EQ(c.sizes(), a.sizes());
    EXPECT_GE(memory_stats(kMeta).allocated - allocated, std::uint64_t{128} << 30);
  }
  EXPECT_EQ(memory_stats(kMeta).allocated, allocated);
  EXPECT_LT(resident_bytes(), before + (std::uint64_t{64} << 20));
  empty_memory_cache(kMeta);
  EXPECT_EQ(memory_stats(kMeta).reserved, memory_stats(kMeta).allocated);
}

TEST(Meta, CountsAsTheCpuDoes) {
  const auto run = [](Device device) {
    empty_memory_cache(device);
    const MemoryStats before = memory_stats(device);
    reset_peak_memory(device);
    std::vector<Tensor> held;
    for (const std::int64_t n : {1, 16, 17, 100, 1000, 12345, 1 << 20, 3 << 20, 100, 1000}) {
      held.push_back(empty({n}, {.device = device}));
      if (held.size() % 3 == 0) held.erase(held.begin());
    }
    const MemoryStats s = memory_stats(device);
    return std::vector{s.allocated - before.allocated,     s.allocated_peak - before.allocated,
                       s.reserved - before.reserved,       s.reserved_peak - before.reserved,
                       s.allocations - before.allocations, s.cache_hits - before.cache_hits};
  };
  EXPECT_EQ(run(kMeta), run(Device{}));
}

TEST(Meta, CopiesOnlyToIt) {
  const Tensor a = tensor({1, 2, 3, 4, 5, 6}, {2, 3}).t();
  const Tensor m = a.to(kMeta);
  EXPECT_EQ(kind_of(m), kind_of(a));
  EXPECT_EQ(m.device(), kMeta);
  EXPECT_EQ(a.to(kMeta, bf16).dtype(), bf16);
  Tensor to = zeros({3, 2}, {.device = kMeta});
  to.copy_(a);
  EXPECT_EQ(kind_of(m + ones({})), kind_of(a + 1));  // a number of the CPU joins
  EXPECT_EQ(error_of<DeviceError>([&] { m.to(Device{}); }),
            "to: expected values to copy to cpu, got f32 [3, 2] of the device meta, where tensors have none");
  Tensor back = zeros({3, 2});
  EXPECT_NE(error_of<DeviceError>([&] { back.copy_(m); }).find("of the device meta"), std::string::npos);
}

TEST(Meta, HasNoValuesToRead) {
  const Tensor m = ones({2, 2}, {.device = kMeta});
  EXPECT_EQ(error_of<DeviceError>([&] { sum(m).item<float>(); }),
            "item: expected values to copy to cpu, got f32 [] of the device meta, where tensors have none");
  EXPECT_NE(error_of<DeviceError>([&] { m.to_vector<double>(); }).find("to_vector: expected values"),
            std::string::npos);
  EXPECT_NE(error_of<DeviceError>([&] { m.data<const float>(); }).find("of the device meta"), std::string::npos);
  EXPECT_NE(error_of<DeviceError>([&] { nonzero(m); }).find("nonzero: the sizes of its result depend on values"),
            std::string::npos);
  EXPECT_NE(error_of<DeviceError>([&] { masked_select(m, gt(m, 0)); }).find("masked_select: the sizes"),
            std::string::npos);
  EXPECT_NE(error_of<DeviceError>([&] { one_hot(zeros({2}, {.dtype = i64, .device = kMeta})); }).find("one_hot"),
            std::string::npos);
  EXPECT_NE(error_of<DeviceError>([&] { to_dlpack(m); }).find("meta have no values"), std::string::npos);
  EXPECT_EQ(m.str(), "tensor(..., size=[2, 2], device=meta)");
}

TEST(MetaDeathTest, IsNotTouched) {
  const Tensor m = ones({2, 2}, {.device = kMeta});
  const auto* const data = static_cast<const volatile char*>(m.const_raw_data());
  EXPECT_DEATH({ (void)*data; }, "");
}

TEST(Meta, TrainsAModule) {
  const DeviceGuard there(kMeta);
  struct Net : nn::Module<Net> {
    Tensor forward(const Tensor& x) const { return fc2(norm(relu(fc1(x)))); }
    nn::Linear fc1 = child("fc1", nn::Linear{{.in = 8, .out = 4}});
    nn::LayerNorm norm = child("norm", nn::LayerNorm{{.normalized_shape = {4}}});
    nn::Linear fc2 = child("fc2", nn::Linear{{.in = 4, .out = 2}});
  };
  const Net net;
  mean(net(ones({16, 8}))).backward();
  for (const NamedTensor& p : net.parameters()) {
    EXPECT_EQ(p.tensor.device(), kMeta);
    ASSERT_TRUE(p.tensor.grad().defined()) << p.name;
    EXPECT_EQ(p.tensor.grad().sizes(), p.tensor.sizes());
  }
}

TEST(Meta, SummaryIsTheCpus) {
  struct Net : nn::Module<Net> {
    Tensor forward(const Tensor& x) const { return fc2(relu(fc1(x))); }
    nn::Linear fc1 = child("fc1", nn::Linear{{.in = 8, .out = 4}});
    nn::Linear fc2 = child("fc2", nn::Linear{{.in = 4, .out = 2}});
  };
  const auto rows = [](Device device) {
    const DeviceGuard there(device);
    const Net net;
    std::vector<std::string> text;
    for (const nn::SummaryRow& r : nn::summary(net, ones({16, 8}), {.amp = bf16}).rows) {
      text.push_back(fmt::format("{} {} {} {} {} {} {}", r.path, r.kind, r.output.str(), r.parameters, r.multiply_adds,
                                 r.saved_float32, r.saved_low));
    }
    return text;
  };
  EXPECT_EQ(rows(kMeta), rows(Device{}));
}

}  // namespace
}  // namespace halfstep
