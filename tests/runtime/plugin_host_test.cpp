// SPDX-License-Identifier: Apache-2.0
// What the host lends to plug-ins: the CPU's kernels, called as a plug-in calls them, by the header alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/runtime/kernel_names.h"
#include "halfstep/runtime/plugin_loader.h"
#include "halfstep/runtime/plugin_numbers.h"

namespace halfstep {
namespace {

using halfstep_plugin_numbers::Half;

struct Answer : halfstep_kernel {
  halfstep_status status;
  Answer(const char* op, std::int32_t version, std::int32_t dtype) : halfstep_kernel{} {
    size = sizeof(halfstep_kernel);
    status = plugin_host().cpu_kernel(op, version, dtype, this);
  }
};

/// A plug-in's context: its own workspace and errors.
struct Context : halfstep_context {
  std::vector<std::unique_ptr<void, void (*)(void*)>> blocks;
  std::string error;
  explicit Context(const Answer& answer) : halfstep_context{} {
    size = sizeof(halfstep_context);
    owner = this;
    state = answer.state;
    workspace = [](halfstep_context* context, std::uint64_t bytes) -> void* {
      auto& self = *static_cast<Context*>(context->owner);
      self.blocks.emplace_back(std::aligned_alloc(64, (bytes + 64) / 64 * 64), std::free);
      return self.blocks.back().get();
    };
    set_error = [](halfstep_context* context, const char* text) {
      static_cast<Context*>(context->owner)->error = text;
    };
  }
};

template <class T>
halfstep_tensor view(std::vector<T>& values, const std::vector<std::int64_t>& sizes,
                     const std::vector<std::int64_t>& strides, std::uint8_t dtype) {
  halfstep_tensor t{};
  t.data = values.data();
  t.sizes = sizes.data();
  t.strides = strides.data();
  t.ndim = static_cast<std::int32_t>(sizes.size());
  t.numel = 1;
  std::int64_t row_major = 1;
  t.contiguous = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] != 1 && strides[i] != row_major) t.contiguous = 0;
    row_major *= sizes[i];
  }
  t.numel = row_major;
  t.dtype = dtype;
  t.defined = 1;
  return t;
}

TEST(PluginHost, LendsTheKernelsOfTheCpu) {
  const halfstep_host& host = plugin_host();
  EXPECT_EQ(host.size, sizeof(halfstep_host));
  EXPECT_EQ(host.minor, HALFSTEP_PLUGIN_MINOR);
  const Answer add("add", 1, HALFSTEP_F16);
  ASSERT_EQ(add.status, HALFSTEP_OK);
  EXPECT_EQ(add.layouts, std::uint32_t{HALFSTEP_LAYOUT_STRIDED});
  // [2, 3] whose columns lie side by side, and a row that is broadcast: 1 .. 6 plus 2 * (1, 2, 3), exact in f16.
  std::vector<std::uint16_t> a = {0x3c00, 0x4400, 0x4000, 0x4500, 0x4200, 0x4600}, b = {0x3c00, 0x4000, 0x4200};
  std::vector<std::uint16_t> to(6, 0xffff);
  const std::vector<std::int64_t> sizes = {2, 3}, columns = {1, 2}, rows = {3, 1}, row_sizes = {3}, row_strides = {1};
  const halfstep_tensor in[] = {view(a, sizes, columns, HALFSTEP_F16), view(b, row_sizes, row_strides, HALFSTEP_F16)};
  halfstep_tensor out[] = {view(to, sizes, rows, HALFSTEP_F16)};
  const halfstep_alpha_attributes two = {2, 2};
  Context context(add);
  ASSERT_EQ(add.run(&context, in, 2, out, 1, &two), HALFSTEP_OK) << context.error;
  EXPECT_EQ(context.state, add.state);  // for the next call
  std::vector<float> values;
  for (const std::uint16_t bits : to) values.push_back(halfstep_plugin_numbers::load(Half{bits}));
  EXPECT_EQ(values, (std::vector<float>{3, 6, 9, 6, 9, 12}));
}

TEST(PluginHost, AKernelOfTheCpuSaysWhatIsWrong) {
  const Answer loss("cross_entropy", 1, HALFSTEP_F32);
  ASSERT_EQ(loss.status, HALFSTEP_OK);
  std::vector<float> scores = {1, 2, 3, 4}, value(1), parts(4), divisor(1);
  std::vector<std::int64_t> labels = {1, 7};
  const std::vector<std::int64_t> sizes = {2, 2}, strides = {2, 1}, samples = {2}, one = {1}, none = {};
  const halfstep_tensor in[] = {view(scores, sizes, strides, HALFSTEP_F32), view(labels, samples, one, HALFSTEP_I64),
                                halfstep_tensor{}};
  halfstep_tensor out[] = {view(value, none, none, HALFSTEP_F32), view(parts, sizes, strides, HALFSTEP_F32),
                           view(divisor, none, none, HALFSTEP_F32)};
  halfstep_class_loss_attributes a{};
  a.ignore_index = -100;
  a.reduction = 1;
  Context context(loss);
  EXPECT_EQ(loss.run(&context, in, 3, out, 3, &a), HALFSTEP_FAILED);
  EXPECT_NE(context.error.find("expected class indices from 0 to 1"), std::string::npos) << context.error;
  EXPECT_NE(context.error.find("got 7"), std::string::npos) << context.error;
}

TEST(PluginHost, SaysWhatTheCpuHasNoKernelFor) {
  const auto names = kernel_names();
  const auto refuses = [](const char* op, std::int32_t version, std::int32_t dtype, const std::string& reason) {
    const Answer answer(op, version, dtype);
    EXPECT_EQ(answer.status, HALFSTEP_UNSUPPORTED) << op;
    EXPECT_EQ(answer.run, nullptr);
    EXPECT_EQ(std::string(answer.reason), reason);
  };
  refuses("no_such_op", 1, HALFSTEP_F32, "the CPU has no kernel for the op");
  refuses("add", 9, HALFSTEP_F32, "the op has another version");
  refuses("add", 1, HALFSTEP_F8E4M3, "the CPU has no kernel for this dtype");
  refuses("add", 1, 11, "the CPU has no kernel for this dtype");
  refuses("add", 1, -1, "the CPU has no kernel for this dtype");
  EXPECT_EQ(kernel_names(), names);  // asking makes no op
}

TEST(PluginHost, WritesNoMoreOfAnAnswerThanThePluginKnows) {
  halfstep_kernel answer{};
  answer.size = offsetof(halfstep_kernel, reason);
  const char* const mark = "untouched";
  answer.reason = mark;
  EXPECT_EQ(plugin_host().cpu_kernel("no_such_op", 1, HALFSTEP_F32, &answer), HALFSTEP_UNSUPPORTED);
  EXPECT_EQ(answer.reason, mark);
}

}  // namespace
}  // namespace halfstep
