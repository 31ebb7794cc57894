// SPDX-License-Identifier: Apache-2.0
// Convolutions as a library is asked for them: plain arithmetic, which tests check on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "halfstep/runtime/plugin.h"

namespace hscuda {

/// Which of the three tensors that a convolution ties together is sought: y [N, O, OH, OW], x [N, C, H, W] or the
/// weight [O, C / groups, KH, KW].
enum class ConvPart : int32_t { kOutput, kInput, kWeight };

/// A convolution, its three tensors and what may have been left out. Of a backward pass x or w is the result.
struct ConvCall {
  ConvPart part;
  const halfstep_tensor* x;
  const halfstep_tensor* w;
  const halfstep_tensor* y;
  const halfstep_tensor* bias;  ///< null: none
  const halfstep_conv_attributes* attributes;

  const halfstep_tensor& result() const { return part == ConvPart::kOutput ? *y : part == ConvPart::kInput ? *x : *w; }
  /// One of the tensors that are read; both have one dtype.
  const halfstep_tensor& operand() const { return part == ConvPart::kOutput ? *x : *y; }
};

/// In which orders a tensor's elements may be said to lie without gaps; dimensions of size 1 lie anyhow.
enum ConvLayout : uint32_t { kRowMajor = 1, kChannelsLast = 2 };
uint32_t conv_layouts(const halfstep_tensor& t);

/// What a graph does behind its convolution, on the sums as they are: nothing, adding a bias, or storing them wider
/// than the operands.
enum class ConvEpilogue : int32_t { kNone, kBias, kWiden };

/// What a library's plan is made for and found by: nothing else of a call matters to it. It has no padding bytes, so
/// that it is hashed as bytes.
struct ConvProblem {
  int64_t x[4], w[4], y[4];  ///< sizes, always N C H W, O C KH KW
  int64_t stride[2], padding[2], dilation[2], groups;
  ConvPart part;
  ConvEpilogue epilogue;
  int32_t dtype;          ///< of the operands, the bias and, without kWiden, the result; with it the result is f32
  int32_t channels_last;  ///< how all three lie: 1 channels-last, 0 row-major
  int32_t alignment;      ///< of the addresses in bytes: 16, or that of an element
  int32_t tf32;           ///< whether float32 may be rounded to TF32

  bool operator==(const ConvProblem&) const = default;
  int32_t result() const { return epilogue == ConvEpilogue::kWiden ? HALFSTEP_F32 : dtype; }
  /// Strides of a tensor of these sizes.
  void strides(const int64_t (&sizes)[4], int64_t (&strides)[4]) const;
};
static_assert(sizeof(ConvProblem) == 19 * 8 + 6 * 4);

std::size_t hash(const ConvProblem& problem);

/// A way to bring a call to a library: which of its tensors go through workspace of the problem's layout and dtype, and
/// the problem that is left.
struct ConvPlan {
  ConvProblem problem;
  bool copy_x, copy_w, copy_y;  ///< the result is copied afterwards
  bool add_bias;                ///< in a pass of its own behind it, with the one rounding of the result
};

struct ConvChoices {
  bool tf32 = false;     ///< whether float32 may be rounded to TF32
  bool compile = false;  ///< whether the library may compile kernels when it makes a plan, which takes seconds
};

/// The ways to bring a call to a library, the best first; their number, or 0 and `why` when no library is to be asked:
/// for empty tensors, strides with gaps, more elements than 31 bits count, and where the sizes are not those that
/// windows fit.
///
/// cuDNN has kernels whose result has the operands' dtype. What the contract rounds once, it mustn't round before:
/// 16-bit operands with a result of another dtype, or with a bias that isn't added to the sums themselves, are brought
/// to float32 first. Their products are exact in TF32 too, which holds 11 bits as f16 does, so that it is allowed
/// there.
inline constexpr int kConvPlans = 3;
int plan_convolution(const ConvCall& call, const ConvChoices& choices, ConvPlan (&plans)[kConvPlans], const char** why);

/// Elements of the problem's tensors.
int64_t conv_numel(const int64_t (&sizes)[4]);

}  // namespace hscuda
