// SPDX-License-Identifier: Apache-2.0
#include "libraries/conv_plan.h"

#include <algorithm>
#include <functional>
#include <string_view>

#include "halfstep/runtime/plugin_numbers.h"

namespace hscuda {
namespace {

using halfstep_plugin_numbers::item_size;

// For a stride of 2^31 - 1 cuDNN 9.14 wrote zeros on an H100, for a dilation of 2^30 it failed in a kernel.
constexpr int64_t kMostStep = 1 << 12;
constexpr int kOrders[2][4] = {{3, 2, 1, 0}, {1, 3, 2, 0}};  // the fastest dimension first

bool lies(const halfstep_tensor& t, const int (&order)[4]) {
  int64_t stride = 1;
  for (int d : order) {
    if (t.sizes[d] != 1 && t.strides[d] != stride) return false;
    stride *= t.sizes[d];
  }
  return true;
}

bool floating(int dtype) { return dtype >= HALFSTEP_F32 && dtype <= HALFSTEP_BF16; }

bool aligned(const halfstep_tensor& t, bool copied) { return copied || reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

}  // namespace

uint32_t conv_layouts(const halfstep_tensor& t) {
  if (t.ndim != 4) return 0;
  return (lies(t, kOrders[0]) ? kRowMajor : 0u) | (lies(t, kOrders[1]) ? kChannelsLast : 0u);
}

int64_t conv_numel(const int64_t (&sizes)[4]) { return sizes[0] * sizes[1] * sizes[2] * sizes[3]; }

void ConvProblem::strides(const int64_t (&sizes)[4], int64_t (&strides)[4]) const {
  int64_t stride = 1;
  for (int d : kOrders[channels_last]) {
    strides[d] = stride;
    stride *= sizes[d];
  }
}

std::size_t hash(const ConvProblem& problem) {
  return std::hash<std::string_view>{}({reinterpret_cast<const char*>(&problem), sizeof problem});
}

int plan_convolution(const ConvCall& call, const ConvChoices& choices, ConvPlan (&plans)[kConvPlans],
                     const char** why) {
  const auto refuse = [&](const char* text) {
    *why = text;
    return 0;
  };
  const halfstep_conv_attributes& a = *call.attributes;
  const halfstep_tensor* const tensors[] = {call.x, call.w, call.y};
  uint32_t common = kRowMajor | kChannelsLast;
  uint32_t layouts[3];
  for (int i = 0; i < 3; ++i) {
    if (!floating(tensors[i]->dtype)) return refuse("a dtype that is not floating");
    // A result may have no elements, and a sum no terms.
    if (tensors[i]->numel == 0) return refuse("an empty tensor");
    if (tensors[i]->numel > INT32_MAX) return refuse("more elements than 31 bits count");
    layouts[i] = conv_layouts(*tensors[i]);
    if (layouts[i] == 0) return refuse("strides with gaps");
    common &= layouts[i];
  }
  if (call.bias != nullptr && call.bias->numel > 1 && call.bias->strides[0] != 1) return refuse("a strided bias");

  ConvPlan plan = {};
  ConvProblem& p = plan.problem;
  std::copy_n(call.x->sizes, 4, p.x);
  std::copy_n(call.w->sizes, 4, p.w);
  std::copy_n(call.y->sizes, 4, p.y);
  p.groups = a.groups;
  for (int d = 0; d < 2; ++d) {
    p.stride[d] = a.stride[d];
    p.padding[d] = a.padding[d];
    p.dilation[d] = a.dilation[d];
    if (std::max({p.stride[d], p.padding[d], p.dilation[d]}) > kMostStep) {
      return refuse("a stride, padding or dilation beyond what cuDNN computes with");
    }
    const int64_t room = p.x[2 + d] + 2 * p.padding[d] - p.dilation[d] * (p.w[2 + d] - 1) - 1;
    // Libraries derive y's sizes, and take no others.
    if (room < 0 || room / p.stride[d] + 1 != p.y[2 + d]) return refuse("other sizes than windows fit");
  }
  p.part = call.part;
  p.dtype = call.operand().dtype;
  p.tf32 = choices.tf32 && p.dtype == HALFSTEP_F32;
  // Matrix units read channels-last, so that everything is brought there where the tensors don't agree.
  p.channels_last = common == 0 || (common & kChannelsLast) != 0;
  const uint32_t wanted = p.channels_last ? kChannelsLast : kRowMajor;
  plan.copy_x = (layouts[0] & wanted) == 0;
  plan.copy_w = (layouts[1] & wanted) == 0;
  plan.copy_y = (layouts[2] & wanted) == 0;
  const bool all = aligned(*call.x, plan.copy_x) && aligned(*call.w, plan.copy_w) && aligned(*call.y, plan.copy_y) &&
                   (call.bias == nullptr || aligned(*call.bias, false));
  p.alignment = all ? 16 : static_cast<int32_t>(item_size(p.dtype));

  int count = 0;
  const int result = call.result().dtype;
  const bool low = item_size(p.dtype) == 2, bias = call.bias != nullptr;
  bool& copy_result = p.part == ConvPart::kOutput  ? plan.copy_y
                      : p.part == ConvPart::kInput ? plan.copy_x
                                                   : plan.copy_w;
  const auto add = [&](ConvPlan way, ConvEpilogue epilogue) {
    way.problem.epilogue = epilogue;
    way.add_bias = bias && epilogue != ConvEpilogue::kBias;
    plans[count++] = way;
  };
  if (bias && p.part == ConvPart::kOutput && result == p.dtype) add(plan, ConvEpilogue::kBias);
  if (low && result == HALFSTEP_F32 && choices.compile) add(plan, ConvEpilogue::kWiden);
  copy_result |= result != p.dtype;
  if (!low || (result == p.dtype && !bias)) add(plan, ConvEpilogue::kNone);
  if (low) {
    plan.copy_x = plan.copy_w = plan.copy_y = true;
    copy_result = result != HALFSTEP_F32 || (layouts[static_cast<int>(p.part == ConvPart::kOutput  ? 2
                                                                      : p.part == ConvPart::kInput ? 0
                                                                                                   : 1)] &
                                             wanted) == 0;
    p.dtype = HALFSTEP_F32;
    p.tf32 = 1;
    p.alignment = copy_result || aligned(call.result(), false) ? 16 : 4;
    add(plan, ConvEpilogue::kNone);
  }
  return count;
}

}  // namespace hscuda
