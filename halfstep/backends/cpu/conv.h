// SPDX-License-Identifier: Apache-2.0
// Convolutions of the CPU backend: one geometry, three tensors, any of which is computed from the other two.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "halfstep/backends/cpu/onednn.h"
#include "halfstep/core/export.h"
#include "halfstep/core/storage.h"
#include "halfstep/runtime/float32_precision.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/winograd.h"

namespace halfstep::cpu {

/// A convolution's tensors, of any dense or strided layout; the part's is written. `bias` [o] (or null) is added to the
/// output, or to the input, when that is the part.
struct ConvCall {
  ConvPart part;
  ConvGeometry geometry;
  TensorView input, weight, output;
  const TensorView* bias = nullptr;
  Storage* weight_storage = nullptr;  ///< what the weight lies in, when packed weights may be kept with it
  Float32Precision precision = float32_precision();  ///< of f32 operands
  TensorView& result() { return part == ConvPart::output ? output : part == ConvPart::input ? input : weight; }
};

/// Whether all three tensors are of float32, float16 or bfloat16.
bool all_floats(const ConvCall& call) noexcept;

/// How a convolution is computed.
enum class ConvPath : std::uint8_t {
  reference,  ///< plain loops in float64 for float64, in float32 sums of float64 for others: whatever oneDNN refuses
  products,   ///< the weight's gradient as sums of outer products, see conv_weight.h
  pairs,      ///< the same on the processor's bf16 units
  tiles,      ///< the same on the tiles of AMX
  blocks,     ///< oneDNN's float32 kernels, on blocks of images that are widened before and rounded after
  native,     ///< the processor's 16-bit units through oneDNN
  winograd2,  ///< F(2x2, 3x3), see conv_winograd.h
  winograd4,  ///< F(4x4, 3x3)
  matrix,     ///< a 1x1 convolution as one matrix product, see conv_matrix.h
  windows,    ///< on the tiles of AMX, windows being read in place, see conv_windows.h
  depthwise,  ///< a window for each channel, see conv_depthwise.h
};

/// Which way a convolution goes on a processor with `isa`: a function of shape and dtypes alone, never of timing (and
/// with AMX of whether this process may use its tiles).
/// `allowed`: the largest tiles of Winograd's that it may go by.
HS_API ConvPath choose_conv_path(const ConvCall& call, Isa isa, Winograd allowed = Winograd::off) noexcept;

/// All paths that serve a call of floats of at most 32 bits, `first` first; for others that one only.
HS_API std::vector<ConvPath> conv_paths(const ConvCall& call, Isa isa, Winograd allowed, ConvPath first);

/// Computes the part by the path that was chosen, by timing where the program has asked for it (conv_tuning.h), or by a
/// given one.
HS_API Status convolve(KernelContext* context, ConvCall& call);
HS_API Status convolve_by(ConvPath path, KernelContext* context, ConvCall& call);

/// What computes the part on this processor, for people: "products", "pairs", "tiles", "matrix", "windows",
/// "depthwise", "reference", or oneDNN's name of its kernel and, where images are widened to float32, "blocks" before
/// it. Nothing is computed; the tensors' data aren't read.
HS_API std::string describe_conv(ConvCall& call);

/// By oneDNN's kernels on operands of `compute`: float32, to which others are widened, or the operands' own 16-bit
/// dtype. Unsupported, with nothing written, where it has no kernel that may run.
HS_API Status convolve_onednn(KernelContext* context, ConvCall& call, DType compute);

/// oneDNN's name of the kernel that convolve_onednn() runs, such as "brgconv:avx512_core"; empty where it has none.
std::string onednn_kernel(ConvCall& call, DType compute);

/// The reference, for any floating dtypes and strides; `bias` as float64.
void convolve_reference(ConvCall& call, const double* bias);

/// Reports that there is no memory for the workspace.
Status conv_out_of_memory(KernelContext* context);

/// `to`: `count` elements of the call's workspace, null for none. False: there is no memory.
template <class T>
bool take_workspace(KernelContext* context, std::size_t count, T*& to) {
  to = count == 0 ? nullptr : static_cast<T*>(context->workspace(context, count * sizeof(T)));
  return count == 0 || to != nullptr;
}

}  // namespace halfstep::cpu
