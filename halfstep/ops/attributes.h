// SPDX-License-Identifier: Apache-2.0
// The attributes of ops: the library's names for the structs of runtime/plugin_attributes.h, which kernels receive, and
// the one list of their fields.
#pragma once

#include <cstdint>
#include <span>

#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"
#include "halfstep/core/shape.h"
#include "halfstep/runtime/plugin_attributes.h"

/// Every struct of attributes, as S(name here, name there, its fields...). A field that is missing here is a compile
/// error (attributes.cpp).
#define HALFSTEP_ATTRIBUTES(S)                                                                                        \
  S(AlphaAttributes, halfstep_alpha_attributes, alpha, integer_alpha)                                                 \
  S(ScalarAttributes, halfstep_scalar_attributes, value)                                                              \
  S(FillAttributes, halfstep_fill_attributes, value)                                                                  \
  S(CastAttributes, halfstep_cast_attributes, dtype)                                                                  \
  S(ViewAttributes, halfstep_view_attributes, sizes, strides, offset, dim, other_dim, start, end, step)               \
  S(AsStridedAttributes, halfstep_as_strided_attributes, sizes, strides, offset, input_strides, input_offset)         \
  S(ReduceAttributes, halfstep_reduce_attributes, dims, keepdim, dtype)                                               \
  S(MatmulAttributes, halfstep_matmul_attributes, dtype)                                                              \
  S(AlongAttributes, halfstep_along_attributes, dim)                                                                  \
  S(DimsAttributes, halfstep_dims_attributes, dims)                                                                   \
  S(ScatterValueAttributes, halfstep_scatter_value_attributes, dim, value)                                            \
  S(IndexAddAttributes, halfstep_index_add_attributes, dim, alpha)                                                    \
  S(IndexPutAttributes, halfstep_index_put_attributes, accumulate)                                                    \
  S(CountAttributes, halfstep_count_attributes, count)                                                                \
  S(EmbeddingAttributes, halfstep_embedding_attributes, rows, padding_idx, zero_padding, dtype)                       \
  S(SortAttributes, halfstep_sort_attributes, dim, descending)                                                        \
  S(TopKAttributes, halfstep_top_k_attributes, dim, k, largest, sorted)                                               \
  S(DiagonalAttributes, halfstep_diagonal_attributes, sizes, diagonal, dim1, dim2)                                    \
  S(RandomAttributes, halfstep_random_attributes, a, b, low, range)                                                   \
  S(ScaleUpdateAttributes, halfstep_scale_update_attributes, growth_factor, backoff_factor, growth_interval,          \
    hysteresis, restart, floor, cap, refill_on_good_step)                                                             \
  S(ClipAttributes, halfstep_clip_attributes, limit, norm_type)                                                       \
  S(SgdAttributes, halfstep_sgd_attributes, momentum, dampening, weight_decay, nesterov, maximize)                    \
  S(AdamAttributes, halfstep_adam_attributes, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled)          \
  S(NanToNumAttributes, halfstep_nan_to_num_attributes, nan, posinf, neginf)                                          \
  S(ClampAttributes, halfstep_clamp_attributes, min, max, integer_min, integer_max)                                   \
  S(ActivationAttributes, halfstep_activation_attributes, a, b, c)                                                    \
  S(DropoutAttributes, halfstep_dropout_attributes, p)                                                                \
  S(NormAttributes, halfstep_norm_attributes, dims, keepdim, dtype, p)                                                \
  S(VarAttributes, halfstep_var_attributes, dims, keepdim, correction)                                                \
  S(DimAttributes, halfstep_dim_attributes, dim, keepdim, reverse, dtype)                                             \
  S(ClassLossAttributes, halfstep_class_loss_attributes, reduction, ignore_index, label_smoothing, classes, dtype)    \
  S(PairLossAttributes, halfstep_pair_loss_attributes, kind, reduction, parameter, divisor, want_input, want_target,  \
    dtype)                                                                                                            \
  S(RowNormAttributes, halfstep_row_norm_attributes, eps, rows, inner, groups, rms, want_input, want_weight,          \
    want_bias, dtype)                                                                                                 \
  S(BatchNormAttributes, halfstep_batch_norm_attributes, eps, momentum, count, training, want_input, want_weight,     \
    want_bias, dtype, want_residual, activation)                                                                      \
  S(ConvAttributes, halfstep_conv_attributes, stride, padding, dilation, groups, sizes, dtype)                        \
  S(PoolAttributes, halfstep_pool_attributes, kernel, stride, padding, dilation, ceil_mode, count_include_pad, dtype, \
    divisor, sizes)                                                                                                   \
  S(AdaptivePoolAttributes, halfstep_adaptive_pool_attributes, sizes, dtype)                                          \
  S(InterpolateAttributes, halfstep_interpolate_attributes, sizes, scale, mode, align_corners, dtype)                 \
  S(NmsAttributes, halfstep_nms_attributes, iou_threshold, limit)                                                     \
  S(RoiAlignAttributes, halfstep_roi_align_attributes, sizes, spatial_scale, sampling_ratio, aligned)                 \
  S(PadAttributes, halfstep_pad_attributes, before, after, value, mode, dtype)                                        \
  S(AttentionAttributes, halfstep_attention_attributes, scale, dropout, causal, want, dtypes)                         \
  S(QuantizeAttributes, halfstep_quantize_attributes, quant_min, quant_max, axis, grad_factor, want_mask, want_input, \
    want_scale, want_zero_point, dtype)                                                                               \
  S(QuantizationParametersAttributes, halfstep_quantization_parameters_attributes, quant_min, quant_max, symmetric,   \
    eps)                                                                                                              \
  S(ObserveRangeAttributes, halfstep_observe_range_attributes, axis, averaging_constant)                              \
  S(Int8ProductAttributes, halfstep_int8_product_attributes, stride, padding, dilation, groups, input_scale,          \
    input_zero_point, residual_scale, residual_zero_point, output_scale, output_zero_point, quant_min, quant_max,     \
    activation, a, b, dtype)                                                                                          \
  S(Int8GridAttributes, halfstep_int8_grid_attributes, input_scale, input_zero_point, other_scale, other_zero_point,  \
    output_scale, output_zero_point, quant_min, quant_max, relu, dims, keepdim, dtype)                                \
  S(WeightOnlyAttributes, halfstep_weight_only_attributes, group, bits)

namespace halfstep {

/// Up to kMaxDims integers.
using IntList = halfstep_int_list;
/// A scalar: `kind` 0 bool, 1 integer, 2 floating-point.
using ScalarValue = halfstep_scalar;

/// A field of a struct of attributes, for code that prints or changes attributes whatever their type.
struct AttributeField {
  /// flag: a byte, 0 or 1; dtype: a byte; optional_dtype: a signed byte, -1 for none.
  enum class Kind : std::uint8_t { flag, i32, i64, u64, f32, f64, dtype, optional_dtype, list, scalar };
  const char* name;
  Kind kind;
  std::uint16_t offset;
  std::uint16_t size;   ///< in bytes
  std::uint16_t count;  ///< of elements, if it is an array; else 1
};
/// A struct of attributes.
struct AttributeStruct {
  const char* name;  ///< in the plug-in header
  std::uint32_t size;
  std::span<const AttributeField> fields;
};
/// All structs of attributes, in the header's order.
HS_API std::span<const AttributeStruct> attribute_structs();
/// That of type A, one of those below; for Op::attributes.
template <class A>
const AttributeStruct& attribute_struct();

/// The structs by their names here.
#define HALFSTEP_DECLARE(Name, c_name, ...) \
  using Name = c_name;                      \
  template <>                               \
  HS_API const AttributeStruct& attribute_struct<Name>();
HALFSTEP_ATTRIBUTES(HALFSTEP_DECLARE)
#undef HALFSTEP_DECLARE

/// A shape, or a list of dimensions, as a field.
inline IntList int_list(const Shape& shape) {
  IntList list;
  list.size = shape.size();
  for (int i = 0; i < list.size; ++i) list.values[i] = shape[i];
  return list;
}
/// The reverse of int_list().
inline Shape shape_of(const IntList& list) {
  return Shape(std::span<const std::int64_t>(list.values, static_cast<std::size_t>(list.size)));
}

/// The attributes of `to`.
inline CastAttributes cast_attributes(DType dtype) { return {.dtype = static_cast<std::uint8_t>(dtype)}; }
/// A dtype as a field that need not name one.
constexpr std::int8_t dtype_code(DType dtype) { return static_cast<std::int8_t>(dtype); }
/// In a field: the dtype follows from the op's inputs.
inline constexpr std::int8_t kNoDType = -1;
/// The dtype of a field, or `other` where it is kNoDType.
constexpr DType dtype_or(std::int8_t code, DType other) { return code >= 0 ? static_cast<DType>(code) : other; }

}  // namespace halfstep
