// SPDX-License-Identifier: Apache-2.0
// Integer ops for inference: products of 8-bit integers, what stands between them, and floating products whose weights
// alone are integers.
//
// A tensor of u8 or i8 stands for real numbers on a grid: q is (q - zero_point) * scale. Weights are i8, symmetric
// (zero point 0), with one scale for each output channel. What training with fake quantization (ops/quantize.h)
// computed in floating point comes out of these ops in integers. The scheme is that of Jacob et al. 2018
// (Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference) and PyTorch's
// quantized ops, whose results it is compared with.
//
// Sums of products are exact: 32-bit integers. After them a result is rounded once, in float32, to nearest even. All
// kernels on all processors give the same integers, except with silu and hardswish: there the float32 value before
// rounding differs in its last bits, so that an integer may be the next one where that value lies so close to the
// middle between two.
//
// The CPU computes them with the VNNI (or AMX) units of processors that have them, and with exact products of 16 bits
// on others: no range needs to be reduced (PyTorch's reduce_range) for sums to fit. On other devices they run on the
// CPU. None has a gradient; inputs of no requirement come without history.
#pragma once

#include <cstdint>
#include <optional>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Integers q that stand for (q - zero_point) * scale.
struct Int8Grid {
  double scale = 1;             ///< finite and above 0
  std::int64_t zero_point = 0;  ///< a value of the dtype
  /// What a result is clamped to, within the dtype; of inputs it isn't read.
  std::int64_t quant_min = 0, quant_max = 255;
  DType dtype = u8;  ///< u8 or i8; of inputs it isn't read: the tensor tells
};

/// What follows a product before it is rounded. hardtanh clamps to [a, b] (ReLU6: 0 and 6), leaky_relu has the slope a.
enum class Int8Activation : std::int32_t { none, relu, hardtanh, silu, leaky_relu, hardswish };

/// Options of linear_int8.
struct Int8ProductOptions {
  Int8Grid input;                                    ///< scale and zero point of the input
  Int8Grid residual;                                 ///< likewise of the residual, where there is one
  std::optional<Int8Grid> output = {};               ///< of the result; none: floating, of `dtype`
  DType dtype = f32;                                 ///< of a floating result: f32, f16 or bf16
  Int8Activation activation = Int8Activation::none;  ///< after the residual was added
  double a = 0, b = 0;                               ///< the activation's numbers
};
/// Options of conv2d_int8. Lists have one number, or one for height and one for width.
struct Conv2dInt8Options : Int8ProductOptions {
  Shape stride = {1};       ///< places between windows
  Shape padding = {0};      ///< places on either side that stand for the real number 0
  Shape dilation = {1};     ///< places between the elements of a window
  std::int64_t groups = 1;  ///< independent groups of channels
};

/// Convolution of integers. `input` u8 or i8 [N, C, H, W], `weight` i8 [O, C / groups, KH, KW], `weight_scale` f32 [O]
/// (finite, above 0), `bias` f32 [O] of real numbers as PyTorch has it, or i32 [O] in units of input.scale *
/// weight_scale[o] (or undefined), `residual` u8 or i8 of the result's sizes (or undefined): [N, O, OH, OW],
/// channels-last. With x, w, r the inputs, zx, zr their zero points, and an i32 bias times its unit,
///
///     v = sum((x - zx) w) input.scale weight_scale[o] + bias + (r - zr) residual.scale
///     result = activation(v), or clamp(round(activation(v) / output.scale) + zero_point, quant_min, quant_max)
///
/// in float32 from the sum on, where all scales of a step are one factor. Weights are brought into the kernel's order
/// once and kept while they aren't written to; other layouts than channels-last are copied first. A residual may not
/// be written to by others meanwhile, but may be the result's own memory. At most 65793 products a sum (32 bits hold
/// them). Throws ShapeError, DTypeError, and Error for a grid without meaning. Semantics:
/// torch.ao.nn.quantized.functional.conv2d.
HS_API Tensor conv2d_int8(const Tensor& input, const Tensor& weight, const Tensor& weight_scale,
                          const Tensor& bias = {}, const Tensor& residual = {}, const Conv2dInt8Options& options = {});
/// The same for a linear layer: `input` [..., K], `weight` [O, K], result and residual [..., O]. Semantics:
/// torch.ao.nn.quantized.functional.linear.
HS_API Tensor linear_int8(const Tensor& input, const Tensor& weight, const Tensor& weight_scale,
                          const Tensor& bias = {}, const Tensor& residual = {}, const Int8ProductOptions& options = {});

/// The sum of two tensors (u8 or i8, each with its grid) of the same sizes, with `relu` none of them below 0; laid out
/// as `a`. Without an `output` grid it is floating, of `dtype`. Semantics: torch.ops.quantized.add and add_relu.
HS_API Tensor add_int8(const Tensor& a, const Tensor& b, const Int8Grid& a_grid, const Int8Grid& b_grid,
                       const std::optional<Int8Grid>& output = {}, bool relu = false, DType dtype = f32);
/// table[input]: any elementwise function, and any change of grid. `input` u8 or i8; `table` [256], u8 or i8, by the
/// input's byte: the entry of i8 -1 is number 255. The result has the table's dtype.
HS_API Tensor lookup_int8(const Tensor& input, const Tensor& table);
/// The mean over `dims` (none: all), of integers whose sum is exact; with H and W global average pooling. Without an
/// `output` grid it is floating, of `dtype`. Semantics: torch.mean of a quantized tensor.
HS_API Tensor mean_int8(const Tensor& input, const Shape& dims, bool keepdim, const Int8Grid& input_grid,
                        const std::optional<Int8Grid>& output = {}, DType dtype = f32);

/// Options of linear_weight_only.
struct LinearWeightOnlyOptions {
  /// Elements of a row that share a scale, a divisor of K, even with 4 bits; 0: as many as `scale` says.
  std::int64_t group_size = 0;
};
/// A linear layer of floating `input` [..., K] (f32, f16 or bf16) whose weights are integers: i8 [O, K], or of 4 bits
/// as u8 [O, K / 2], two in a byte, the first in the low half, from -8 to 7 in two's complement. Weight k of row o
/// stands for w[o, k] * scale[o, k / group_size]; `scale` is f32 [O] for whole rows, or [O, K / group_size]. `bias` [O]
/// is floating (or undefined). Weights are widened block by block in the cache, sums are float32, the result is rounded
/// once to the input's dtype. For small batches, whose time is that of reading the weights. No gradient. Throws
/// ShapeError, DTypeError. The scheme is that of GPTQ (Frantar et al. 2022) and AWQ without zero points.
HS_API Tensor linear_weight_only(const Tensor& input, const Tensor& weight, const Tensor& scale,
                                 const Tensor& bias = {}, const LinearWeightOnlyOptions& options = {});

}  // namespace halfstep
