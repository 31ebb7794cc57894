// SPDX-License-Identifier: Apache-2.0
// Products of 8-bit integers: what follows the exact sums, and the paths that compute them.
#pragma once

#include <cstdint>

#include "halfstep/backends/cpu/isa.h"
#include "halfstep/backends/cpu/onednn.h"
#include "halfstep/core/export.h"
#include "halfstep/core/storage.h"
#include "halfstep/runtime/kernel.h"

namespace halfstep::cpu {

/// From a sum of products to a result, step by step in float32. Each step rounds once (products and sums apart), on
/// every path alike:
///
///     v = float(sum) * scale[o] + bias[o];  v = (v + float(r)) * middle;  v = activation(v) * last
///
/// where what has no meaning for a call is left out. Floating results are v; integers are round(v), clamped to
/// [least, most], plus zero_point. With a residual, scale and bias are in its unit and bias has its zero point.
struct Int8Epilogue {
  bool residual = false;
  DType residual_dtype = DType::u8;
  float middle = 1;             ///< 1: left out; else there is a residual
  std::int32_t activation = 0;  ///< as halfstep_int8_product_attributes has it
  float a = 0, b = 0;
  float last = 1;        ///< likewise
  bool integers = true;  ///< whether the result is rounded
  std::int32_t zero_point = 0, least = 0, most = 0;
  DType dtype = DType::u8;  ///< of the result: u8, i8 or f32
};

/// A product of dense channels-last images and its numbers, [o] each; `bias` may be null. Every path writes `output`.
struct Int8Call {
  ConvGeometry geometry;
  TensorView input, weight, output;
  const TensorView* residual = nullptr;
  std::int32_t zero_point = 0;  ///< of the input
  const float* scale = nullptr;
  const float* bias = nullptr;
  Int8Epilogue epilogue;
  Storage* weight_storage = nullptr;  ///< what the weight lies in, when packed weights may be kept with it
};

/// How a product of integers is computed.
enum class Int8Path : std::uint8_t {
  reference,  ///< plain loops: any strides
  blocked,    ///< exact products of 16 bits, in blocks: processors without VNNI
  onednn,     ///< the processor's units for 8 bits
};

/// Which path a product takes on a processor with `isa`: a function of shape and layout alone.
HS_API Int8Path choose_int8_path(const Int8Call& call, Isa isa) noexcept;

/// The result by a given path. Unsupported, with nothing written, where a path can't. `output` is u8, i8 or f32.
HS_API Status int8_by(Int8Path path, KernelContext* context, Int8Call& call);

/// The steps of an epilogue up to the floating result, and from there to the integer. `residual` 0 where there is none.
float int8_value(const Int8Epilogue& epilogue, std::int32_t sum, float scale, float bias, float residual);
std::int32_t int8_integer(const Int8Epilogue& epilogue, float value);

Status int8_onednn(KernelContext* context, Int8Call& call);
/// Unsupported but for channels-last images.
Status int8_blocked(KernelContext* context, Int8Call& call);
Status int8_reference(Int8Call& call);

}  // namespace halfstep::cpu
