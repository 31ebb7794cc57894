// SPDX-License-Identifier: Apache-2.0
// Kernels leave the upper halves of the vector registers clean: with dirty ones SSE code, as the C library's and this
// library's own, takes up to 16 times as long on some processors, until some other kernel cleans them.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "halfstep/autograd/engine.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "tests/support/op_cases.h"

#if defined(__x86_64__)
#include <cpuid.h>

namespace halfstep {
namespace {

using test::OpCase;
using test::OpLayout;

// Which parts of the state the processor takes for in use (Intel's manual, volume 1, 13.6): bit 2 are the upper halves
// of ymm0 to ymm15.
bool dirty() {
  std::uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return (low & 4U) != 0;
}
void clean() { asm volatile("vzeroupper" ::: "xmm0"); }
void soil() { asm volatile("vpcmpeqd %%ymm0, %%ymm0, %%ymm0" ::: "xmm0"); }

bool tells() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(0xd, 1, &a, &b, &c, &d) == 0 || (a & 4U) == 0) return false;
  soil();
  const bool seen = dirty();
  clean();
  return seen && !dirty();
}

class Watch : public OpObserver {
 public:
  Watch() : thread_(std::this_thread::get_id()) { add_observer(this); }
  ~Watch() override { remove_observer(this); }
  void after_call(const ObservedCall& call) override {
    if (std::this_thread::get_id() != thread_) return;
    if (dirty()) found.emplace(call.name);
    ++calls;
    clean();
  }
  std::set<std::string> found;
  int calls = 0;

 private:
  std::thread::id thread_;
};

void run_case(const OpCase& c, OpLayout layout, DType dtype, Device device) {
  const DeviceGuard there(device);
  std::vector<Tensor> in = op_arguments(c, layout, dtype), roots, weights, leaves;
  for (Tensor& t : in) {
    if (!t.defined()) continue;
    if (!device.is_cpu()) {
      t = empty_strided(t.sizes(), t.strides(),
                        {.dtype = t.dtype(), .device = device, .requires_grad = t.requires_grad()});
    }
    if (t.requires_grad()) leaves.push_back(t);
  }
  try {
    for (const Tensor& t : c.call(in)) {
      if (!t.requires_grad()) continue;
      roots.push_back(t);
      weights.push_back(ones(t.sizes(), {.dtype = t.dtype(), .device = device}));
    }
    if (!roots.empty() && !leaves.empty()) grad(roots, leaves, {.grad_outputs = weights, .allow_unused = true});
  } catch (const Error&) {
    // A size that depends on values has none on meta.
    if (device.is_cpu()) throw;
  }
}

TEST(VectorState, KernelsLeaveCleanUpperHalves) {
  if (!tells()) GTEST_SKIP() << "this processor doesn't tell whether upper halves are in use";
  for (const Device device : {Device{}, kMeta}) {
    int calls = 0;
    for (const OpLayout layout : {OpLayout::contiguous, OpLayout::strided}) {
      for (const DType dtype : {f32, bf16, f16, f64}) {
        for (const OpCase& c : test::all_op_cases()) {
          Watch watch;
          run_case(c, layout, dtype, device);
          calls += watch.calls;
          for (const std::string& op : watch.found) {
            ADD_FAILURE() << op << " in a case of " << c.op << ", " << name(dtype) << " on " << device.str();
          }
        }
        // Fused ops step aside for observers.
        for (const OpCase& c : test::all_op_cases()) {
          clean();
          run_case(c, layout, dtype, device);
          EXPECT_FALSE(dirty()) << c.op << ", " << name(dtype) << " on " << device.str();
        }
      }
    }
    EXPECT_GT(calls, 5000) << device.str();
  }
}

}  // namespace
}  // namespace halfstep
#endif
