// SPDX-License-Identifier: Apache-2.0
// Kernels that take row-major tensors only: what Halfstep does for tensors of other layouts. The device is the test's
// own, with the host's memory.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/plugin_loader.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;

int g_calls = 0;

// out = in0 + alpha * in1, which must be of one shape and without gaps.
halfstep_status add_kernel(halfstep_context* context, const halfstep_tensor* in, int n, halfstep_tensor* out, int m,
                           const void* attributes) {
  ++g_calls;
  for (int i = 0; i < n; ++i) {
    if (!in[i].contiguous || in[i].numel != out[0].numel) return HALFSTEP_FAILED;
  }
  if (n != 2 || m != 1 || !out[0].contiguous || context->state != &g_calls) return HALFSTEP_FAILED;
  const auto* a = static_cast<const float*>(in[0].data);
  const auto* b = static_cast<const float*>(in[1].data);
  auto* r = static_cast<float*>(out[0].data);
  const double alpha = static_cast<const halfstep_alpha_attributes*>(attributes)->alpha;
  for (std::int64_t i = 0; i < out[0].numel; ++i) r[i] = a[i] + static_cast<float>(alpha) * b[i];
  return HALFSTEP_OK;
}

// A step that is skipped: writes nothing.
halfstep_status nothing_kernel(halfstep_context*, const halfstep_tensor*, int, halfstep_tensor* out, int, const void*) {
  return out[0].contiguous ? HALFSTEP_OK : HALFSTEP_FAILED;
}

template <class... A>
halfstep_status ok(A...) {
  return HALFSTEP_OK;
}

halfstep_plugin_table make_table() {
  halfstep_plugin_table t{};
  t.size = sizeof(t);
  t.major = HALFSTEP_PLUGIN_MAJOR;
  t.minor = HALFSTEP_PLUGIN_MINOR;
  t.name = "rowmajor";
  t.device_count = [] { return 1; };
  t.device_info = ok;
  t.error = [](halfstep_error* error) { error->status = HALFSTEP_OK; };
  t.synchronize = ok;
  t.allocate = [](std::int32_t, std::uint64_t bytes, void** data) {
    *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    return halfstep_status{*data ? HALFSTEP_OK : HALFSTEP_OUT_OF_MEMORY};
  };
  t.deallocate = [](std::int32_t, void* data, std::uint64_t) {
    std::free(data);
    return halfstep_status{HALFSTEP_OK};
  };
  t.memory_info = ok;
  t.copy = [](halfstep_queue*, void* to, const void* from, std::uint64_t bytes, std::int32_t) {
    std::memcpy(to, from, bytes);
    return halfstep_status{HALFSTEP_OK};
  };
  t.queue_create = ok;
  t.queue_destroy = t.queue_synchronize = t.queue_query = ok;
  t.queue_wait = ok;
  t.event_create = ok;
  t.event_destroy = t.event_query = t.event_synchronize = ok;
  t.event_record = ok;
  t.event_elapsed = ok;
  t.kernel = [](const char* op, std::int32_t, std::int32_t dtype, halfstep_kernel* kernel) {
    kernel->layouts = HALFSTEP_LAYOUT_CONTIGUOUS;
    kernel->state = &g_calls;
    if (dtype == HALFSTEP_F32 && std::strcmp(op, "add") == 0) kernel->run = add_kernel;
    if (dtype == HALFSTEP_F32 && std::strcmp(op, "test_nothing") == 0) kernel->run = nothing_kernel;
    return halfstep_status{kernel->run ? HALFSTEP_OK : HALFSTEP_UNSUPPORTED};
  };
  return t;
}

class RowMajorKernels : public testing::Test {
 protected:
  static Device device() {
    static const bool registered = (register_plugin(make_table(), "this test"), true);
    EXPECT_TRUE(registered);
    return Device("rowmajor");
  }
  RowMajorKernels() {
    set_log_sink([](LogLevel, std::string_view) {});
    g_calls = 0;
  }
  ~RowMajorKernels() override { set_log_sink({}); }
  Tensor a = tensor({{1, 2, 3}, {4, 5, 6}}, {.device = device()});
};

TEST_F(RowMajorKernels, GetCopiesOfOtherLayouts) {
  EXPECT_EQ((a + a).to_vector<double>(), (Values{2, 4, 6, 8, 10, 12}));
  const Tensor turned = a.t();
  const Tensor sum = turned + turned.contiguous();
  EXPECT_EQ(sum.to_vector<double>(), (Values{2, 8, 4, 10, 6, 12}));
  EXPECT_EQ((a.slice(1, 0, 3, 2) + a.slice(1, 1, 3)).to_vector<double>(), (Values{3, 6, 9, 12}));
  EXPECT_EQ(g_calls, 3);
}

TEST_F(RowMajorKernels, InPlaceFormsReachTheOriginal) {
  a.t().add_(a.t());
  EXPECT_EQ(a.to_vector<double>(), (Values{2, 4, 6, 8, 10, 12}));
  a.select(1, 1).add_(a.select(1, 0));
  EXPECT_EQ(a.to_vector<double>(), (Values{2, 6, 6, 8, 18, 12}));
  EXPECT_EQ(g_calls, 2);
}

TEST_F(RowMajorKernels, WhatAKernelDoesNotWriteStays) {
  const Tensor column = a.select(1, 1);
  const Tensor* out = &column;
  run_kernel(kernel_table("test_nothing"), "test_nothing", device(), f32, {}, {&out, 1});
  EXPECT_EQ(a.to_vector<double>(), (Values{1, 2, 3, 4, 5, 6}));
}

}  // namespace
}  // namespace halfstep
