// SPDX-License-Identifier: Apache-2.0
// The C structs that plug-ins are compiled with have the layouts of ours: attributes cross the border as they are.
#include <cstddef>
#include <type_traits>

#include "halfstep/ops/attention_attributes.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/plugin.h"

namespace halfstep {
namespace {

// One member of both structs: the same place and size.
#define HALFSTEP_SAME(ours, theirs, member)                                                                           \
  static_assert(offsetof(ours, member) == offsetof(theirs, member) && sizeof(ours::member) == sizeof(theirs::member), \
                "ops/attributes.h and runtime/plugin_attributes.h differ")
// Both structs as a whole.
#define HALFSTEP_SAME_STRUCT(ours, theirs)                                                 \
  static_assert(sizeof(ours) == sizeof(theirs) && alignof(ours) == alignof(theirs) &&      \
                    std::is_standard_layout_v<ours> && std::is_trivially_copyable_v<ours>, \
                "ops/attributes.h and runtime/plugin_attributes.h differ")

HALFSTEP_SAME_STRUCT(IntList, halfstep_int_list);
HALFSTEP_SAME(IntList, halfstep_int_list, values);
HALFSTEP_SAME(IntList, halfstep_int_list, size);
HALFSTEP_SAME_STRUCT(ScalarValue, halfstep_scalar);
HALFSTEP_SAME(ScalarValue, halfstep_scalar, floating);
HALFSTEP_SAME(ScalarValue, halfstep_scalar, integer);
HALFSTEP_SAME(ScalarValue, halfstep_scalar, kind);
static_assert(sizeof(OptionalDType) == 1 && sizeof(DType) == 1 && sizeof(bool) == 1);
static_assert(kMaxDims == HALFSTEP_MAX_DIMS);
static_assert(static_cast<int>(DType::f32) == HALFSTEP_F32 && static_cast<int>(DType::f64) == HALFSTEP_F64 &&
              static_cast<int>(DType::f16) == HALFSTEP_F16 && static_cast<int>(DType::bf16) == HALFSTEP_BF16 &&
              static_cast<int>(DType::f8e4m3) == HALFSTEP_F8E4M3 &&
              static_cast<int>(DType::f8e5m2) == HALFSTEP_F8E5M2 && static_cast<int>(DType::i64) == HALFSTEP_I64 &&
              static_cast<int>(DType::i32) == HALFSTEP_I32 && static_cast<int>(DType::i8) == HALFSTEP_I8 &&
              static_cast<int>(DType::u8) == HALFSTEP_U8 && static_cast<int>(DType::boolean) == HALFSTEP_BOOL);
static_assert(static_cast<int>(PairLoss::mse) == HALFSTEP_LOSS_MSE &&
              static_cast<int>(PairLoss::l1) == HALFSTEP_LOSS_L1 &&
              static_cast<int>(PairLoss::smooth_l1) == HALFSTEP_LOSS_SMOOTH_L1 &&
              static_cast<int>(PairLoss::huber) == HALFSTEP_LOSS_HUBER &&
              static_cast<int>(PairLoss::kl_div) == HALFSTEP_LOSS_KL_DIV &&
              static_cast<int>(PairLoss::bce_with_logits) == HALFSTEP_LOSS_BCE_WITH_LOGITS &&
              static_cast<int>(PairLoss::bce) == HALFSTEP_LOSS_BCE);

HALFSTEP_SAME_STRUCT(AlphaAttributes, halfstep_alpha_attributes);
HALFSTEP_SAME(AlphaAttributes, halfstep_alpha_attributes, alpha);
HALFSTEP_SAME(AlphaAttributes, halfstep_alpha_attributes, integer_alpha);
HALFSTEP_SAME_STRUCT(ScalarAttributes, halfstep_scalar_attributes);
HALFSTEP_SAME(ScalarAttributes, halfstep_scalar_attributes, value);
HALFSTEP_SAME_STRUCT(FillAttributes, halfstep_fill_attributes);
HALFSTEP_SAME(FillAttributes, halfstep_fill_attributes, value);
HALFSTEP_SAME_STRUCT(CastAttributes, halfstep_cast_attributes);
HALFSTEP_SAME(CastAttributes, halfstep_cast_attributes, dtype);
HALFSTEP_SAME_STRUCT(ViewAttributes, halfstep_view_attributes);
HALFSTEP_SAME(ViewAttributes, halfstep_view_attributes, sizes);
HALFSTEP_SAME(ViewAttributes, halfstep_view_attributes, strides);
HALFSTEP_SAME(ViewAttributes, halfstep_view_attributes, offset);
HALFSTEP_SAME(ViewAttributes, halfstep_view_attributes, dim);
HALFSTEP_SAME(ViewAttributes, halfstep_view_attributes, other_dim);
HALFSTEP_SAME(ViewAttributes, halfstep_view_attributes, start);
HALFSTEP_SAME(ViewAttributes, halfstep_view_attributes, end);
HALFSTEP_SAME(ViewAttributes, halfstep_view_attributes, step);
HALFSTEP_SAME_STRUCT(AsStridedAttributes, halfstep_as_strided_attributes);
HALFSTEP_SAME(AsStridedAttributes, halfstep_as_strided_attributes, sizes);
HALFSTEP_SAME(AsStridedAttributes, halfstep_as_strided_attributes, strides);
HALFSTEP_SAME(AsStridedAttributes, halfstep_as_strided_attributes, offset);
HALFSTEP_SAME(AsStridedAttributes, halfstep_as_strided_attributes, input_strides);
HALFSTEP_SAME(AsStridedAttributes, halfstep_as_strided_attributes, input_offset);
HALFSTEP_SAME_STRUCT(ReduceAttributes, halfstep_reduce_attributes);
HALFSTEP_SAME(ReduceAttributes, halfstep_reduce_attributes, dims);
HALFSTEP_SAME(ReduceAttributes, halfstep_reduce_attributes, keepdim);
HALFSTEP_SAME(ReduceAttributes, halfstep_reduce_attributes, dtype);
HALFSTEP_SAME_STRUCT(MatmulAttributes, halfstep_matmul_attributes);
HALFSTEP_SAME(MatmulAttributes, halfstep_matmul_attributes, dtype);
HALFSTEP_SAME_STRUCT(AlongAttributes, halfstep_along_attributes);
HALFSTEP_SAME(AlongAttributes, halfstep_along_attributes, dim);
HALFSTEP_SAME_STRUCT(DimsAttributes, halfstep_dims_attributes);
HALFSTEP_SAME(DimsAttributes, halfstep_dims_attributes, dims);
HALFSTEP_SAME_STRUCT(ScatterValueAttributes, halfstep_scatter_value_attributes);
HALFSTEP_SAME(ScatterValueAttributes, halfstep_scatter_value_attributes, dim);
HALFSTEP_SAME(ScatterValueAttributes, halfstep_scatter_value_attributes, value);
HALFSTEP_SAME_STRUCT(IndexAddAttributes, halfstep_index_add_attributes);
HALFSTEP_SAME(IndexAddAttributes, halfstep_index_add_attributes, dim);
HALFSTEP_SAME(IndexAddAttributes, halfstep_index_add_attributes, alpha);
HALFSTEP_SAME_STRUCT(IndexPutAttributes, halfstep_index_put_attributes);
HALFSTEP_SAME(IndexPutAttributes, halfstep_index_put_attributes, accumulate);
HALFSTEP_SAME_STRUCT(CountAttributes, halfstep_count_attributes);
HALFSTEP_SAME(CountAttributes, halfstep_count_attributes, count);
HALFSTEP_SAME_STRUCT(EmbeddingAttributes, halfstep_embedding_attributes);
HALFSTEP_SAME(EmbeddingAttributes, halfstep_embedding_attributes, rows);
HALFSTEP_SAME(EmbeddingAttributes, halfstep_embedding_attributes, padding_idx);
HALFSTEP_SAME(EmbeddingAttributes, halfstep_embedding_attributes, zero_padding);
HALFSTEP_SAME(EmbeddingAttributes, halfstep_embedding_attributes, dtype);
HALFSTEP_SAME_STRUCT(SortAttributes, halfstep_sort_attributes);
HALFSTEP_SAME(SortAttributes, halfstep_sort_attributes, dim);
HALFSTEP_SAME(SortAttributes, halfstep_sort_attributes, descending);
HALFSTEP_SAME_STRUCT(TopKAttributes, halfstep_top_k_attributes);
HALFSTEP_SAME(TopKAttributes, halfstep_top_k_attributes, dim);
HALFSTEP_SAME(TopKAttributes, halfstep_top_k_attributes, k);
HALFSTEP_SAME(TopKAttributes, halfstep_top_k_attributes, largest);
HALFSTEP_SAME(TopKAttributes, halfstep_top_k_attributes, sorted);
HALFSTEP_SAME_STRUCT(DiagonalAttributes, halfstep_diagonal_attributes);
HALFSTEP_SAME(DiagonalAttributes, halfstep_diagonal_attributes, sizes);
HALFSTEP_SAME(DiagonalAttributes, halfstep_diagonal_attributes, diagonal);
HALFSTEP_SAME(DiagonalAttributes, halfstep_diagonal_attributes, dim1);
HALFSTEP_SAME(DiagonalAttributes, halfstep_diagonal_attributes, dim2);
HALFSTEP_SAME_STRUCT(RandomAttributes, halfstep_random_attributes);
HALFSTEP_SAME(RandomAttributes, halfstep_random_attributes, a);
HALFSTEP_SAME(RandomAttributes, halfstep_random_attributes, b);
HALFSTEP_SAME(RandomAttributes, halfstep_random_attributes, low);
HALFSTEP_SAME(RandomAttributes, halfstep_random_attributes, range);
HALFSTEP_SAME_STRUCT(ScaleUpdateAttributes, halfstep_scale_update_attributes);
HALFSTEP_SAME(ScaleUpdateAttributes, halfstep_scale_update_attributes, growth_factor);
HALFSTEP_SAME(ScaleUpdateAttributes, halfstep_scale_update_attributes, backoff_factor);
HALFSTEP_SAME(ScaleUpdateAttributes, halfstep_scale_update_attributes, growth_interval);
HALFSTEP_SAME(ScaleUpdateAttributes, halfstep_scale_update_attributes, hysteresis);
HALFSTEP_SAME(ScaleUpdateAttributes, halfstep_scale_update_attributes, restart);
HALFSTEP_SAME(ScaleUpdateAttributes, halfstep_scale_update_attributes, floor);
HALFSTEP_SAME(ScaleUpdateAttributes, halfstep_scale_update_attributes, cap);
HALFSTEP_SAME(ScaleUpdateAttributes, halfstep_scale_update_attributes, refill_on_good_step);
static_assert(scale_counter::kGrowth == HALFSTEP_SCALE_GROWTH && scale_counter::kUsed == HALFSTEP_SCALE_USED &&
              scale_counter::kInARow == HALFSTEP_SCALE_IN_A_ROW && scale_counter::kAtFloor == HALFSTEP_SCALE_AT_FLOOR &&
              scale_counter::kStuck == HALFSTEP_SCALE_STUCK && scale_counter::kCount == HALFSTEP_SCALE_COUNTERS);
HALFSTEP_SAME_STRUCT(ClipAttributes, halfstep_clip_attributes);
HALFSTEP_SAME(ClipAttributes, halfstep_clip_attributes, limit);
HALFSTEP_SAME(ClipAttributes, halfstep_clip_attributes, norm_type);
HALFSTEP_SAME_STRUCT(SgdAttributes, halfstep_sgd_attributes);
HALFSTEP_SAME(SgdAttributes, halfstep_sgd_attributes, momentum);
HALFSTEP_SAME(SgdAttributes, halfstep_sgd_attributes, dampening);
HALFSTEP_SAME(SgdAttributes, halfstep_sgd_attributes, weight_decay);
HALFSTEP_SAME(SgdAttributes, halfstep_sgd_attributes, nesterov);
HALFSTEP_SAME(SgdAttributes, halfstep_sgd_attributes, maximize);
HALFSTEP_SAME_STRUCT(AdamAttributes, halfstep_adam_attributes);
HALFSTEP_SAME(AdamAttributes, halfstep_adam_attributes, beta1);
HALFSTEP_SAME(AdamAttributes, halfstep_adam_attributes, beta2);
HALFSTEP_SAME(AdamAttributes, halfstep_adam_attributes, eps);
HALFSTEP_SAME(AdamAttributes, halfstep_adam_attributes, weight_decay);
HALFSTEP_SAME(AdamAttributes, halfstep_adam_attributes, amsgrad);
HALFSTEP_SAME(AdamAttributes, halfstep_adam_attributes, maximize);
HALFSTEP_SAME(AdamAttributes, halfstep_adam_attributes, decoupled);
HALFSTEP_SAME_STRUCT(NanToNumAttributes, halfstep_nan_to_num_attributes);
HALFSTEP_SAME(NanToNumAttributes, halfstep_nan_to_num_attributes, nan);
HALFSTEP_SAME(NanToNumAttributes, halfstep_nan_to_num_attributes, posinf);
HALFSTEP_SAME(NanToNumAttributes, halfstep_nan_to_num_attributes, neginf);
HALFSTEP_SAME_STRUCT(ClampAttributes, halfstep_clamp_attributes);
HALFSTEP_SAME(ClampAttributes, halfstep_clamp_attributes, min);
HALFSTEP_SAME(ClampAttributes, halfstep_clamp_attributes, max);
HALFSTEP_SAME(ClampAttributes, halfstep_clamp_attributes, integer_min);
HALFSTEP_SAME(ClampAttributes, halfstep_clamp_attributes, integer_max);
HALFSTEP_SAME_STRUCT(ActivationAttributes, halfstep_activation_attributes);
HALFSTEP_SAME(ActivationAttributes, halfstep_activation_attributes, a);
HALFSTEP_SAME(ActivationAttributes, halfstep_activation_attributes, b);
HALFSTEP_SAME(ActivationAttributes, halfstep_activation_attributes, c);
HALFSTEP_SAME_STRUCT(DropoutAttributes, halfstep_dropout_attributes);
HALFSTEP_SAME(DropoutAttributes, halfstep_dropout_attributes, p);
HALFSTEP_SAME_STRUCT(NormAttributes, halfstep_norm_attributes);
HALFSTEP_SAME(NormAttributes, halfstep_norm_attributes, dims);
HALFSTEP_SAME(NormAttributes, halfstep_norm_attributes, keepdim);
HALFSTEP_SAME(NormAttributes, halfstep_norm_attributes, dtype);
HALFSTEP_SAME(NormAttributes, halfstep_norm_attributes, p);
HALFSTEP_SAME_STRUCT(VarAttributes, halfstep_var_attributes);
HALFSTEP_SAME(VarAttributes, halfstep_var_attributes, dims);
HALFSTEP_SAME(VarAttributes, halfstep_var_attributes, keepdim);
HALFSTEP_SAME(VarAttributes, halfstep_var_attributes, correction);
HALFSTEP_SAME_STRUCT(DimAttributes, halfstep_dim_attributes);
HALFSTEP_SAME(DimAttributes, halfstep_dim_attributes, dim);
HALFSTEP_SAME(DimAttributes, halfstep_dim_attributes, keepdim);
HALFSTEP_SAME(DimAttributes, halfstep_dim_attributes, reverse);
HALFSTEP_SAME(DimAttributes, halfstep_dim_attributes, dtype);
HALFSTEP_SAME_STRUCT(ClassLossAttributes, halfstep_class_loss_attributes);
HALFSTEP_SAME(ClassLossAttributes, halfstep_class_loss_attributes, reduction);
HALFSTEP_SAME(ClassLossAttributes, halfstep_class_loss_attributes, ignore_index);
HALFSTEP_SAME(ClassLossAttributes, halfstep_class_loss_attributes, label_smoothing);
HALFSTEP_SAME(ClassLossAttributes, halfstep_class_loss_attributes, classes);
HALFSTEP_SAME(ClassLossAttributes, halfstep_class_loss_attributes, dtype);
HALFSTEP_SAME_STRUCT(PairLossAttributes, halfstep_pair_loss_attributes);
HALFSTEP_SAME(PairLossAttributes, halfstep_pair_loss_attributes, kind);
HALFSTEP_SAME(PairLossAttributes, halfstep_pair_loss_attributes, reduction);
HALFSTEP_SAME(PairLossAttributes, halfstep_pair_loss_attributes, parameter);
HALFSTEP_SAME(PairLossAttributes, halfstep_pair_loss_attributes, divisor);
HALFSTEP_SAME(PairLossAttributes, halfstep_pair_loss_attributes, want_input);
HALFSTEP_SAME(PairLossAttributes, halfstep_pair_loss_attributes, want_target);
HALFSTEP_SAME(PairLossAttributes, halfstep_pair_loss_attributes, dtype);
HALFSTEP_SAME_STRUCT(RowNormAttributes, halfstep_row_norm_attributes);
HALFSTEP_SAME(RowNormAttributes, halfstep_row_norm_attributes, eps);
HALFSTEP_SAME(RowNormAttributes, halfstep_row_norm_attributes, rows);
HALFSTEP_SAME(RowNormAttributes, halfstep_row_norm_attributes, inner);
HALFSTEP_SAME(RowNormAttributes, halfstep_row_norm_attributes, groups);
HALFSTEP_SAME(RowNormAttributes, halfstep_row_norm_attributes, rms);
HALFSTEP_SAME(RowNormAttributes, halfstep_row_norm_attributes, want_input);
HALFSTEP_SAME(RowNormAttributes, halfstep_row_norm_attributes, want_weight);
HALFSTEP_SAME(RowNormAttributes, halfstep_row_norm_attributes, want_bias);
HALFSTEP_SAME(RowNormAttributes, halfstep_row_norm_attributes, dtype);
HALFSTEP_SAME_STRUCT(BatchNormAttributes, halfstep_batch_norm_attributes);
HALFSTEP_SAME(BatchNormAttributes, halfstep_batch_norm_attributes, eps);
HALFSTEP_SAME(BatchNormAttributes, halfstep_batch_norm_attributes, momentum);
HALFSTEP_SAME(BatchNormAttributes, halfstep_batch_norm_attributes, count);
HALFSTEP_SAME(BatchNormAttributes, halfstep_batch_norm_attributes, training);
HALFSTEP_SAME(BatchNormAttributes, halfstep_batch_norm_attributes, want_input);
HALFSTEP_SAME(BatchNormAttributes, halfstep_batch_norm_attributes, want_weight);
HALFSTEP_SAME(BatchNormAttributes, halfstep_batch_norm_attributes, want_bias);
HALFSTEP_SAME(BatchNormAttributes, halfstep_batch_norm_attributes, dtype);
HALFSTEP_SAME(BatchNormAttributes, halfstep_batch_norm_attributes, want_residual);
HALFSTEP_SAME(BatchNormAttributes, halfstep_batch_norm_attributes, activation);
HALFSTEP_SAME_STRUCT(ConvAttributes, halfstep_conv_attributes);
HALFSTEP_SAME(ConvAttributes, halfstep_conv_attributes, stride);
HALFSTEP_SAME(ConvAttributes, halfstep_conv_attributes, padding);
HALFSTEP_SAME(ConvAttributes, halfstep_conv_attributes, dilation);
HALFSTEP_SAME(ConvAttributes, halfstep_conv_attributes, groups);
HALFSTEP_SAME(ConvAttributes, halfstep_conv_attributes, sizes);
HALFSTEP_SAME(ConvAttributes, halfstep_conv_attributes, dtype);
HALFSTEP_SAME_STRUCT(PoolAttributes, halfstep_pool_attributes);
HALFSTEP_SAME(PoolAttributes, halfstep_pool_attributes, kernel);
HALFSTEP_SAME(PoolAttributes, halfstep_pool_attributes, stride);
HALFSTEP_SAME(PoolAttributes, halfstep_pool_attributes, padding);
HALFSTEP_SAME(PoolAttributes, halfstep_pool_attributes, dilation);
HALFSTEP_SAME(PoolAttributes, halfstep_pool_attributes, ceil_mode);
HALFSTEP_SAME(PoolAttributes, halfstep_pool_attributes, count_include_pad);
HALFSTEP_SAME(PoolAttributes, halfstep_pool_attributes, dtype);
HALFSTEP_SAME(PoolAttributes, halfstep_pool_attributes, divisor);
HALFSTEP_SAME(PoolAttributes, halfstep_pool_attributes, sizes);
HALFSTEP_SAME_STRUCT(AdaptivePoolAttributes, halfstep_adaptive_pool_attributes);
HALFSTEP_SAME(AdaptivePoolAttributes, halfstep_adaptive_pool_attributes, sizes);
HALFSTEP_SAME(AdaptivePoolAttributes, halfstep_adaptive_pool_attributes, dtype);
HALFSTEP_SAME_STRUCT(InterpolateAttributes, halfstep_interpolate_attributes);
HALFSTEP_SAME(InterpolateAttributes, halfstep_interpolate_attributes, sizes);
HALFSTEP_SAME(InterpolateAttributes, halfstep_interpolate_attributes, scale);
HALFSTEP_SAME(InterpolateAttributes, halfstep_interpolate_attributes, mode);
HALFSTEP_SAME(InterpolateAttributes, halfstep_interpolate_attributes, align_corners);
HALFSTEP_SAME(InterpolateAttributes, halfstep_interpolate_attributes, dtype);
HALFSTEP_SAME_STRUCT(PadAttributes, halfstep_pad_attributes);
HALFSTEP_SAME(PadAttributes, halfstep_pad_attributes, before);
HALFSTEP_SAME(PadAttributes, halfstep_pad_attributes, after);
HALFSTEP_SAME(PadAttributes, halfstep_pad_attributes, value);
HALFSTEP_SAME(PadAttributes, halfstep_pad_attributes, mode);
HALFSTEP_SAME(PadAttributes, halfstep_pad_attributes, dtype);
HALFSTEP_SAME_STRUCT(AttentionAttributes, halfstep_attention_attributes);
HALFSTEP_SAME(AttentionAttributes, halfstep_attention_attributes, scale);
HALFSTEP_SAME(AttentionAttributes, halfstep_attention_attributes, dropout);
HALFSTEP_SAME(AttentionAttributes, halfstep_attention_attributes, causal);
HALFSTEP_SAME(AttentionAttributes, halfstep_attention_attributes, want);
HALFSTEP_SAME(AttentionAttributes, halfstep_attention_attributes, dtypes);

#undef HALFSTEP_SAME
#undef HALFSTEP_SAME_STRUCT

}  // namespace
}  // namespace halfstep
