// SPDX-License-Identifier: Apache-2.0
// Convolutions: by matrix products where they suit, else by cuDNN where it has a plan, else by our own kernels.
#include "kernels/conv_direct.h"
#include "kernels/conv_products.h"
#include "kernels/copy.h"
#include "libraries/dnn.h"

namespace hscuda {
namespace {

/// A tensor in workspace, as a plan has it.
struct Staged {
  int64_t strides[4];
  Tensor tensor;

  Staged(const ConvProblem& problem, const int64_t (&sizes)[4], int dtype) {
    problem.strides(sizes, strides);
    tensor = {};
    tensor.sizes = sizes;
    tensor.strides = strides;
    tensor.numel = conv_numel(sizes);
    tensor.ndim = 4;
    tensor.dtype = static_cast<uint8_t>(dtype);
    tensor.defined = 1;
  }
  bool allocate(const Call& call) {
    constexpr int64_t kBytes[] = {4, 8, 2, 2};
    tensor.data = call.workspace<char>(tensor.numel * kBytes[tensor.dtype]);
    return tensor.data != nullptr;
  }
};

halfstep_status run(Call& call, const ConvCall& conv, Dnn& dnn, const ConvPlan& way, const DnnPlan& plan) {
  const ConvProblem& p = way.problem;
  const auto dtype = [&](ConvPart part) { return part == p.part ? p.result() : p.dtype; };
  Staged x(p, p.x, dtype(ConvPart::kInput)), w(p, p.w, dtype(ConvPart::kWeight)), y(p, p.y, dtype(ConvPart::kOutput));
  struct Role {
    ConvPart part;
    const Tensor* given;
    Staged* staged;
    bool copy;
  };
  const Role roles[] = {{ConvPart::kInput, conv.x, &x, way.copy_x},
                        {ConvPart::kWeight, conv.w, &w, way.copy_w},
                        {ConvPart::kOutput, conv.y, &y, way.copy_y}};
  // All memory first: where there is none, nothing may have been enqueued.
  void* workspace = nullptr;
  if (plan.workspace > 0) {
    workspace = call.workspace<char>(plan.workspace);
    if (workspace == nullptr) return call.no_memory();
  }
  const Tensor* result = nullptr;
  for (const Role& role : roles) {
    if (!role.copy) {
      role.staged->tensor.data = role.given->data;
    } else if (!role.staged->allocate(call)) {
      return call.no_memory();
    }
    if (role.part == p.part) result = &role.staged->tensor;
  }
  for (const Role& role : roles) {
    if (role.copy && role.part != p.part) copy_view(call, role.staged->tensor, *role.given);
  }
  const void* const bias = p.epilogue == ConvEpilogue::kBias ? conv.bias->data : nullptr;
  if (const auto status = dnn.run(call, plan, x.tensor.data, w.tensor.data, y.tensor.data, bias, workspace)) {
    return status;
  }
  if (way.add_bias) {
    add_channel_bias(call, conv.result(), *result, *conv.bias);
  } else if (result->data != conv.result().data) {
    copy_view(call, conv.result(), *result);
  }
  return call.launched();
}

halfstep_status convolve(Call& call, const ConvCall& conv) {
  if (conv.result().numel == 0) return HALFSTEP_OK;
  if (products_suit(conv)) return convolve_by_products(call, conv);
  if (Dnn* const dnn = call.device().dnn()) {
    ConvPlan ways[kConvPlans];
    const char* why = nullptr;
    const int count = plan_convolution(conv, {.tf32 = tf32_allowed(), .compile = dnn->compiles()}, ways, &why);
    for (int i = 0; i < count; ++i) {
      if (const auto plan = dnn->plan(ways[i].problem)) {
        call.queue().keep(plan);  // kernels that cuDNN compiled go with it
        return run(call, conv, *dnn, ways[i], *plan);
      }
    }
  }
  return convolve_directly(call, conv);
}

ConvCall call_of(Call& call, ConvPart part) {
  return {part, nullptr, nullptr, nullptr, nullptr, &call.attributes<halfstep_conv_attributes>()};
}

halfstep_status conv2d(Call& call) {
  ConvCall conv = call_of(call, ConvPart::kOutput);
  conv.x = &call.in[0], conv.w = &call.in[1], conv.y = &call.out[0];
  if (call.has(2)) conv.bias = &call.in[2];
  return convolve(call, conv);
}

/// Of a convolution, and a transposed convolution itself.
halfstep_status conv2d_backward_input(Call& call) {
  ConvCall conv = call_of(call, ConvPart::kInput);
  conv.y = &call.in[0], conv.w = &call.in[1], conv.x = &call.out[0];
  if (call.has(2)) conv.bias = &call.in[2];
  return convolve(call, conv);
}

halfstep_status conv2d_backward_weight(Call& call) {
  ConvCall conv = call_of(call, ConvPart::kWeight);
  conv.y = &call.in[0], conv.x = &call.in[1], conv.w = &call.out[0];
  return convolve(call, conv);
}

constexpr KernelDef kKernels[] = {
    {.op = "conv2d", .dtypes = kFloating, .layouts = kStrided, .attributes = true, .run = conv2d},
    {.op = "conv2d_backward_input",
     .dtypes = kFloating,
     .layouts = kStrided,
     .attributes = true,
     .run = conv2d_backward_input},
    {.op = "conv_transpose2d",
     .dtypes = kFloating,
     .layouts = kStrided,
     .attributes = true,
     .run = conv2d_backward_input},
    {.op = "conv2d_backward_weight",
     .dtypes = kFloating,
     .layouts = kStrided,
     .attributes = true,
     .run = conv2d_backward_weight},
};

}  // namespace

std::span<const KernelDef> conv_kernels() { return kKernels; }

}  // namespace hscuda
