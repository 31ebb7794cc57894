// SPDX-License-Identifier: Apache-2.0
// Which ops this device has, in which dtypes and layouts, and what it refuses. The rest is left out on purpose, so that
// somebody runs into it (docs/devices/sim.md).
#include "kernel.h"

namespace sim {
namespace {

constexpr uint32_t kAlpha = sizeof(halfstep_alpha_attributes), kScalar = sizeof(halfstep_scalar_attributes);

// --- copies. `to` and `clone` have the source only; `copy` has its destination as input 0 when it is called as the op
// that copy_() is, and the source only when the host moves tensors of its own.
constexpr KernelDef kCopy{.op = "copy", .dtypes = kAll, .layouts = kStrided, .attribute_bytes = 0, .source_of = "to"};
constexpr KernelDef kTo{.op = "to", .dtypes = kAll, .layouts = kStrided, .attribute_bytes = 0};
constexpr KernelDef kClone{.op = "clone", .dtypes = kAll, .layouts = kStrided, .attribute_bytes = 0};
constexpr KernelDef kFill{
    .op = "fill", .dtypes = kAll, .layouts = kStrided, .attribute_bytes = sizeof(halfstep_fill_attributes)};

// --- elementwise
constexpr KernelDef kAdd{.op = "add", .dtypes = kComputed, .layouts = kStrided, .attribute_bytes = kAlpha};
constexpr KernelDef kSub{.op = "sub", .dtypes = kNumeric, .layouts = kStrided, .attribute_bytes = kAlpha};
constexpr KernelDef kMul{.op = "mul", .dtypes = kComputed, .layouts = kStrided, .attribute_bytes = 0};
constexpr KernelDef kDiv{.op = "div", .dtypes = kFloating, .layouts = kStrided, .attribute_bytes = 0};
constexpr KernelDef kNeg{.op = "neg", .dtypes = kNumeric, .layouts = kStrided, .attribute_bytes = 0};
constexpr KernelDef kAddScalar{
    .op = "add_scalar", .dtypes = kComputed, .layouts = kStrided, .attribute_bytes = kScalar};
constexpr KernelDef kMulScalar{
    .op = "mul_scalar", .dtypes = kComputed, .layouts = kStrided, .attribute_bytes = kScalar};
constexpr KernelDef kDivScalar{
    .op = "div_scalar", .dtypes = kFloating, .layouts = kStrided, .attribute_bytes = kScalar};
// Of flags; other dtypes are for the CPU.
constexpr KernelDef kLogicalNot{.op = "logical_not", .dtypes = kFlag, .layouts = kStrided, .attribute_bytes = 0};
constexpr KernelDef kRelu{.op = "relu",
                          .dtypes = kNumeric & ~dtypes({HALFSTEP_BF16}),
                          .layouts = kStrided,
                          .attribute_bytes = 0,
                          .missing = "the activation unit takes no bf16"};
constexpr KernelDef kReluBackward{
    .op = "relu_backward", .dtypes = kFloating, .layouts = kStrided, .attribute_bytes = 0};

// --- matrix products
bool is_floating(const halfstep_tensor& t) { return (kFloating >> t.dtype & 1) != 0; }
const char* refuses_product(const Call& call) {
  const halfstep_tensor &a = call.in[0], &b = call.in[1];
  if (is_floating(a) != is_floating(call.out[0])) return "the result is of another kind";
  if (b.dtype != a.dtype) return "the factors differ in dtype";
  return !is_floating(a) && call.in.size() > 2 && call.in[2].defined ? "integers take no bias" : nullptr;
}
constexpr KernelDef product(const char* op) {
  return {.op = op,
          .dtypes = kFloating | dtypes({HALFSTEP_I64, HALFSTEP_I32}),
          .layouts = kContiguous,
          .attribute_bytes = sizeof(halfstep_matmul_attributes),
          .missing = "the matrix unit takes no integers of 8 bits",
          .refuses = refuses_product};
}
constexpr KernelDef kMm = product("mm"), kBmm = product("bmm"), kLinear = product("linear");

// --- reductions and losses
constexpr KernelDef kSum{
    .op = "sum", .dtypes = kComputed, .layouts = kStrided, .attribute_bytes = sizeof(halfstep_reduce_attributes)};
constexpr KernelDef kMean{.op = "mean",
                          .dtypes = kFloating & ~dtypes({HALFSTEP_F64}),
                          .layouts = kStrided,
                          .attribute_bytes = sizeof(halfstep_reduce_attributes),
                          .missing = "the reduction unit has no f64 divider"};
constexpr KernelDef kCrossEntropy{.op = "cross_entropy",
                                  .dtypes = kFloating,
                                  .layouts = kContiguous,
                                  .attribute_bytes = sizeof(halfstep_class_loss_attributes)};
constexpr KernelDef kCrossEntropyBackward{.op = "cross_entropy_backward",
                                          .dtypes = kFloating,
                                          .layouts = kContiguous,
                                          .attribute_bytes = sizeof(halfstep_class_loss_attributes)};

// --- all gradients at once: asked for with f32, whatever they are
constexpr uint32_t kF32 = dtypes({HALFSTEP_F32});
constexpr KernelDef kMultiNorm{
    .op = "multi_norm", .dtypes = kF32, .layouts = kStrided, .attribute_bytes = sizeof(halfstep_clip_attributes)};
// Its partial results are kept in device memory.
constexpr KernelDef kUnscale{
    .op = "amp_unscale", .dtypes = kF32, .layouts = kStrided, .attribute_bytes = 0, .workspace = 64 << 10};
constexpr KernelDef kCheck{.op = "amp_check", .dtypes = kF32, .layouts = kStrided, .attribute_bytes = 0};
constexpr KernelDef kAllFinite{.op = "all_finite", .dtypes = kF32, .layouts = kStrided, .attribute_bytes = 0};
constexpr KernelDef kUpdateScale{.op = "amp_update_scale",
                                 .dtypes = kF32,
                                 .layouts = kContiguous,
                                 .attribute_bytes = sizeof(halfstep_scale_update_attributes)};

// --- optimizers. Inputs: hyper, random state, a flag, the scale, the gradients. Outputs: the step counters, then for
// each parameter itself, its master weight, its compensation and more.
constexpr std::size_t kRandomState = 1, kFirstGradient = 4, kCompensation = 2;
const char* refuses_step(const Call& call) {
  if (call.in[kRandomState].defined) return "stochastic rounding is not done on this device";
  const std::size_t count = call.in.size() - kFirstGradient;
  const std::size_t width = count == 0 ? 0 : (call.out.size() - 1) / count;
  for (std::size_t k = 0; k < count; ++k) {
    if (call.out[1 + k * width + kCompensation].defined) return "compensated weights are not updated on this device";
  }
  return nullptr;
}
constexpr KernelDef step(const char* op, std::size_t attribute_bytes) {
  return {.op = op,
          .dtypes = dtypes({HALFSTEP_F32, HALFSTEP_F64}),
          .layouts = kStrided,
          .attribute_bytes = static_cast<uint32_t>(attribute_bytes),
          .refuses = refuses_step};
}
constexpr KernelDef kSgd = step("sgd_step", sizeof(halfstep_sgd_attributes)),
                    kAdam = step("adam_step", sizeof(halfstep_adam_attributes));

}  // namespace

std::span<const Kernel> kernels() {
  static constexpr Kernel kKernels[] = {
      kernel<kCopy>,       kernel<kTo>,           kernel<kClone>,        kernel<kFill>,
      kernel<kAdd>,        kernel<kSub>,          kernel<kMul>,          kernel<kDiv>,
      kernel<kNeg>,        kernel<kAddScalar>,    kernel<kMulScalar>,    kernel<kDivScalar>,
      kernel<kLogicalNot>, kernel<kRelu>,         kernel<kReluBackward>, kernel<kMm>,
      kernel<kBmm>,        kernel<kLinear>,       kernel<kSum>,          kernel<kMean>,
      kernel<kMultiNorm>,  kernel<kCrossEntropy>, kernel<kUnscale>,      kernel<kCrossEntropyBackward>,
      kernel<kCheck>,      kernel<kAllFinite>,    kernel<kUpdateScale>,  kernel<kSgd>,
      kernel<kAdam>,
  };
  return kKernels;
}

}  // namespace sim
