// SPDX-License-Identifier: Apache-2.0
// Fake quantization (values put on a grid of integers times a scale, with straight-through gradients), and quantization
// to integers. The results are bit-identical to PyTorch's in float32.
//
// An element x is the integer q = clamp(round(x * (1 / scale)) + zero_point, quant_min, quant_max), and q stands for
// (q - zero_point) * scale. round() is to the nearest even integer, the reciprocal is taken first, in float32. NaN
// becomes quant_min, as in PyTorch. Where PyTorch's kernels for channels turn what leaves int64 (infinities too) into
// quant_min, these clamp it, as PyTorch's kernel for whole tensors does; and what is float64 stays so, where that
// kernel rounds it to float32.
//
// `scale` is f32 and above 0, `zero_point` i32, or f32 where a function says so; both lie on the input's device and are
// never read by the host. Without an `axis` they have one element; with one they are [C], one for each of the C slices
// along that dimension (negative: counted from the end). All floating inputs are computed in float32 inside (f64 in
// float64) and rounded once. All functions throw ShapeError, DTypeError, and Error for quant_min above quant_max or
// beyond 2^23.
#pragma once

#include <cstdint>
#include <optional>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Options of fake_quantize.
struct FakeQuantizeFuncOptions {
  std::int64_t quant_min = -128;
  std::int64_t quant_max = 127;
  std::optional<std::int64_t> axis = {};  ///< of the channels; none: one scale for the tensor
};
/// The input on its grid: (q - zero_point) * scale. The gradient passes where the integer before clamping is between
/// quant_min and quant_max, and is 0 elsewhere; the backward pass keeps one byte an element and reads no input. Scale
/// and zero point get none. The result has the input's dtype, and under autocast the region's: a float32 weight is
/// quantized as it is and rounded once to what the next product takes, and its gradient may come in float32.
///
/// A zero point of f32 is cut to an integer without an axis; with one, it is added before rounding and may have a
/// fraction, as PyTorch has it. torch.fake_quantize_per_tensor_affine, torch.fake_quantize_per_channel_affine.
HS_API Tensor fake_quantize(const Tensor& input, const Tensor& scale, const Tensor& zero_point,
                            const FakeQuantizeFuncOptions& options = {});

/// Options of fake_quantize_learnable.
struct LearnableFakeQuantizeOptions {
  std::int64_t quant_min = -128;
  std::int64_t quant_max = 127;
  std::optional<std::int64_t> axis = {};  ///< of the channels; none: one scale for the tensor
  double grad_factor = 1;                 ///< of the gradients of scale and zero point; see lsq_grad_factor
};
/// fake_quantize with gradients for scale and zero point too: learned step sizes (LSQ, Esser et al. 2019; LSQ+, Bhalgat
/// et al. 2020). The zero point (i32, or f32 to learn it) is rounded and clamped before it is used; PyTorch's backward
/// pass for whole tensors rounds it in another way than its forward pass, here both round to nearest even. Each element
/// adds its gradient times grad_factor times
///
///     to scale's: (q - zero_point) - x / scale inside the range, quant_min - zero_point below, quant_max - zero_point
///     above; to zero_point's: 0 inside, -scale outside.
///
/// One fused pass; the sums, in float32 or better, are the same for any number of threads. A recorded gradient takes
/// these factors as constants. torch._fake_quantize_learnable_per_tensor_affine and ..._per_channel_affine.
HS_API Tensor fake_quantize_learnable(const Tensor& input, const Tensor& scale, const Tensor& zero_point,
                                      const LearnableFakeQuantizeOptions& options = {});
/// 1 / sqrt(n * quant_max), which LSQ multiplies a scale's gradient by; n is the number of weights, or of an
/// activation's features, that share the scale. Throws Error unless both are above 0.
HS_API double lsq_grad_factor(std::int64_t n, std::int64_t quant_max);

/// clip(input, 0, alpha): an activation with a learned bound (PACT, Choi et al. 2018). `alpha` is f32 of one element.
/// The input's gradient passes between 0 and alpha, both excluded; alpha's is the sum of those where input >= alpha.
HS_API Tensor pact(const Tensor& input, const Tensor& alpha);

/// Options of quantize.
struct QuantizeOptions {
  DType dtype = u8;                            ///< u8, i8 or i32
  std::optional<std::int64_t> quant_min = {};  ///< by default the least value of the dtype; of i32 that of 16 bits
  std::optional<std::int64_t> quant_max = {};  ///< likewise the largest
  std::optional<std::int64_t> axis = {};       ///< of the channels; none: one scale for the tensor
};
/// The integers q. For a zero point of f32 see fake_quantize. torch.quantize_per_tensor, torch.quantize_per_channel.
HS_API Tensor quantize(const Tensor& input, const Tensor& scale, const Tensor& zero_point,
                       const QuantizeOptions& options = {});

/// Options of dequantize.
struct DequantizeOptions {
  std::optional<std::int64_t> axis = {};  ///< of the channels; none: one scale for the tensor
  DType dtype = f32;                      ///< of the result: f32, f64, f16 or bf16
};
/// (q - zero_point) * scale of integers (u8, i8, i32): fake_quantize's values, from quantize's.
HS_API Tensor dequantize(const Tensor& input, const Tensor& scale, const Tensor& zero_point,
                         const DequantizeOptions& options = {});

/// Options of observe_range.
struct ObserveRangeOptions {
  std::optional<std::int64_t> axis = {};          ///< of the channels; none: one range for the tensor
  std::optional<double> averaging_constant = {};  ///< weight of what is seen now; none: the widest range
};
/// Lets the range that was seen so far follow the input, in place and on the device, which reads it once. `min` and
/// `max` are f32, of one element or [C], and start as infinity and minus infinity: the first input sets them, later
/// ones widen them, or move them by averaging_constant times the difference. Elements that are infinite or NaN are
/// not seen, and an input without finite ones changes nothing; PyTorch's observers take them over for good. Not
/// recorded. Throws ShapeError, DTypeError, and Error for an averaging_constant outside of 0 to 1.
HS_API void observe_range(const Tensor& input, Tensor& min, Tensor& max, const ObserveRangeOptions& options = {});

/// Options of quantization_parameters.
struct QuantizationParametersOptions {
  std::int64_t quant_min = 0;
  std::int64_t quant_max = 255;
  bool symmetric = false;
  double eps = 1.1920928955078125e-07;  ///< the smallest scale; that of float32
};
/// A scale (f32) and a zero point (i32) of the range's sizes.
struct QuantizationParameters {
  Tensor scale;
  Tensor zero_point;
};
/// Scale and zero point for values from `min` to `max` (f32 of one shape), which are widened to contain 0. Symmetric:
/// scale = max(-min, max) / ((quant_max - quant_min) / 2); the zero point is 0, and for unsigned integers (quant_min of
/// at least 0) the middle of the range, 128 for 0 to 255 and rounded down for others. Else scale = (max - min) /
/// (quant_max - quant_min), and the zero point is quant_min - round(min / scale), clamped. A range of nothing (min
/// infinite, max minus infinite), or one with a NaN, gives 1 and 0. Computed on the device; not differentiable. The
/// same bits as calculate_qparams of PyTorch's observers.
HS_API QuantizationParameters quantization_parameters(const Tensor& min, const Tensor& max,
                                                      const QuantizationParametersOptions& options = {});

}  // namespace halfstep
