// SPDX-License-Identifier: Apache-2.0
// The structs of attributes: their layouts, which plug-ins are compiled with, and the lists of their fields.
#include "halfstep/ops/attributes.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "halfstep/ops/op.h"

namespace halfstep {
namespace {

// What a C compiler made of version 1 of the header: name and size of the struct, then the offset and size of each
// field. Plug-ins compiled then read attributes of today.
constexpr const char* kLayouts =
    "halfstep_alpha_attributes 16: alpha 0+8 integer_alpha 8+8\n"
    "halfstep_scalar_attributes 24: value 0+24\n"
    "halfstep_fill_attributes 24: value 0+24\n"
    "halfstep_cast_attributes 1: dtype 0+1\n"
    "halfstep_view_attributes 192: sizes 0+72 strides 72+72 offset 144+8 dim 152+8 other_dim 160+8 start "
    "168+8 end 176+8 step 184+8\n"
    "halfstep_as_strided_attributes 232: sizes 0+72 strides 72+72 offset 144+8 input_strides 152+72 "
    "input_offset 224+8\n"
    "halfstep_reduce_attributes 80: dims 0+72 keepdim 72+1 dtype 73+1\n"
    "halfstep_matmul_attributes 1: dtype 0+1\n"
    "halfstep_along_attributes 8: dim 0+8\n"
    "halfstep_dims_attributes 72: dims 0+72\n"
    "halfstep_scatter_value_attributes 32: dim 0+8 value 8+24\n"
    "halfstep_index_add_attributes 32: dim 0+8 alpha 8+24\n"
    "halfstep_index_put_attributes 1: accumulate 0+1\n"
    "halfstep_count_attributes 8: count 0+8\n"
    "halfstep_embedding_attributes 24: rows 0+8 padding_idx 8+8 zero_padding 16+1 dtype 17+1\n"
    "halfstep_sort_attributes 16: dim 0+8 descending 8+1\n"
    "halfstep_top_k_attributes 24: dim 0+8 k 8+8 largest 16+1 sorted 17+1\n"
    "halfstep_diagonal_attributes 96: sizes 0+72 diagonal 72+8 dim1 80+8 dim2 88+8\n"
    "halfstep_random_attributes 32: a 0+8 b 8+8 low 16+8 range 24+8\n"
    "halfstep_scale_update_attributes 40: growth_factor 0+8 backoff_factor 8+8 growth_interval 16+4 "
    "hysteresis 20+4 restart 24+4 floor 28+4 cap 32+4 refill_on_good_step 36+1\n"
    "halfstep_clip_attributes 16: limit 0+8 norm_type 8+8\n"
    "halfstep_sgd_attributes 32: momentum 0+8 dampening 8+8 weight_decay 16+8 nesterov 24+1 maximize 25+1\n"
    "halfstep_adam_attributes 40: beta1 0+8 beta2 8+8 eps 16+8 weight_decay 24+8 amsgrad 32+1 maximize "
    "33+1 decoupled 34+1\n"
    "halfstep_nan_to_num_attributes 24: nan 0+8 posinf 8+8 neginf 16+8\n"
    "halfstep_clamp_attributes 32: min 0+8 max 8+8 integer_min 16+8 integer_max 24+8\n"
    "halfstep_activation_attributes 24: a 0+8 b 8+8 c 16+8\n"
    "halfstep_dropout_attributes 8: p 0+8\n"
    "halfstep_norm_attributes 88: dims 0+72 keepdim 72+1 dtype 73+1 p 80+8\n"
    "halfstep_var_attributes 88: dims 0+72 keepdim 72+1 correction 80+8\n"
    "halfstep_dim_attributes 16: dim 0+8 keepdim 8+1 reverse 9+1 dtype 10+1\n"
    "halfstep_class_loss_attributes 40: reduction 0+4 ignore_index 8+8 label_smoothing 16+8 classes 24+8 "
    "dtype 32+1\n"
    "halfstep_pair_loss_attributes 32: kind 0+4 reduction 4+4 parameter 8+8 divisor 16+8 want_input 24+1 "
    "want_target 25+1 dtype 26+1\n"
    "halfstep_row_norm_attributes 40: eps 0+8 rows 8+8 inner 16+8 groups 24+8 rms 32+1 want_input 33+1 "
    "want_weight 34+1 want_bias 35+1 dtype 36+1\n"
    "halfstep_batch_norm_attributes 40: eps 0+8 momentum 8+8 count 16+8 training 24+1 want_input 25+1 "
    "want_weight 26+1 want_bias 27+1 dtype 28+1 want_residual 29+1 activation 32+4\n"
    "halfstep_conv_attributes 136: stride 0+16 padding 16+16 dilation 32+16 groups 48+8 sizes 56+72 dtype "
    "128+1\n"
    "halfstep_pool_attributes 152: kernel 0+16 stride 16+16 padding 32+16 dilation 48+16 ceil_mode 64+1 "
    "count_include_pad 65+1 dtype 66+1 divisor 72+8 sizes 80+72\n"
    "halfstep_adaptive_pool_attributes 80: sizes 0+72 dtype 72+1\n"
    "halfstep_interpolate_attributes 96: sizes 0+72 scale 72+16 mode 88+4 align_corners 92+1 dtype 93+1\n"
    "halfstep_nms_attributes 16: iou_threshold 0+8 limit 8+8\n"
    "halfstep_roi_align_attributes 96: sizes 0+72 spatial_scale 72+8 sampling_ratio 80+8 aligned 88+1\n"
    "halfstep_pad_attributes 176: before 0+72 after 72+72 value 144+24 mode 168+4 dtype 172+1\n"
    "halfstep_attention_attributes 24: scale 0+8 dropout 8+8 causal 16+1 want 17+4 dtypes 21+3\n"
    "halfstep_quantize_attributes 40: quant_min 0+8 quant_max 8+8 axis 16+8 grad_factor 24+8 want_mask 32+1 want_input "
    "33+1 want_scale 34+1 want_zero_point 35+1 dtype 36+1\n"
    "halfstep_quantization_parameters_attributes 32: quant_min 0+8 quant_max 8+8 symmetric 16+1 eps 24+8\n"
    "halfstep_observe_range_attributes 16: axis 0+8 averaging_constant 8+8\n"
    "halfstep_int8_product_attributes 152: stride 0+16 padding 16+16 dilation 32+16 groups 48+8 input_scale 56+8 "
    "input_zero_point 64+8 residual_scale 72+8 residual_zero_point 80+8 output_scale 88+8 output_zero_point 96+8 "
    "quant_min 104+8 quant_max 112+8 activation 120+4 a 128+8 b 136+8 dtype 144+1\n"
    "halfstep_int8_grid_attributes 152: input_scale 0+8 input_zero_point 8+8 other_scale 16+8 other_zero_point 24+8 "
    "output_scale 32+8 output_zero_point 40+8 quant_min 48+8 quant_max 56+8 relu 64+1 dims 72+72 keepdim 144+1 dtype "
    "145+1\n"
    "halfstep_weight_only_attributes 16: group 0+8 bits 8+4\n";

TEST(Attributes, HaveTheLayoutsThatPluginsAreCompiledWith) {
  std::string layouts;
  for (const AttributeStruct& a : attribute_structs()) {
    layouts += fmt::format("{} {}:", a.name, a.size);
    for (const AttributeField& f : a.fields) layouts += fmt::format(" {} {}+{}", f.name, f.offset, f.size);
    layouts += '\n';
  }
  EXPECT_EQ(layouts, kLayouts);
  EXPECT_EQ(sizeof(halfstep_int_list), 72u);
  EXPECT_EQ(offsetof(halfstep_int_list, size), 64u);
  EXPECT_EQ(sizeof(halfstep_scalar), 24u);
  EXPECT_EQ(offsetof(halfstep_scalar, integer), 8u);
  EXPECT_EQ(offsetof(halfstep_scalar, kind), 16u);
}

// Most are PyTorch's defaults of the arguments of that name.
TEST(Attributes, HaveDefaultsInCpp) {
  const AdamAttributes adam;
  EXPECT_EQ(adam.beta1, 0.9);
  EXPECT_EQ(adam.beta2, 0.999);
  EXPECT_EQ(adam.eps, 1e-8);
  EXPECT_EQ(adam.amsgrad, 0);
  const ConvAttributes conv;
  EXPECT_EQ(conv.stride[0] + conv.stride[1] + conv.dilation[0] + conv.dilation[1] + conv.groups, 5);
  EXPECT_EQ(conv.padding[0] + conv.padding[1] + conv.sizes.size, 0);
  EXPECT_EQ(conv.dtype, kNoDType);
  const AttentionAttributes attention;
  for (const auto want : attention.want) EXPECT_EQ(want, 1);
  for (const auto dtype : attention.dtypes) EXPECT_EQ(dtype, kNoDType);
  const IndexAddAttributes add;
  EXPECT_EQ(add.alpha.kind, 1);
  EXPECT_EQ(add.alpha.integer, 1);
  EXPECT_EQ(ClassLossAttributes{}.ignore_index, -100);
  EXPECT_EQ(ScalarAttributes{}.value.kind, 2);
}

TEST(Attributes, OfEveryOpAreDescribed) {
  for (const Op* op : all_ops()) {
    if (std::string_view(op->name).starts_with("test_")) continue;
    EXPECT_EQ(op->attributes != nullptr, op->attributes_size != 0) << op->name;
    if (!op->attributes) continue;
    EXPECT_EQ(op->attributes->size, op->attributes_size) << op->name;
    if (op->dtype_attribute < 0) continue;
    bool found = false;
    for (const AttributeField& f : op->attributes->fields) {
      found = found || (f.offset == op->dtype_attribute && f.kind == AttributeField::Kind::optional_dtype);
    }
    EXPECT_TRUE(found) << op->name << "'s dtype_attribute is no optional dtype";
  }
}

TEST(Attributes, ListsAndDtypesConvertBack) {
  EXPECT_EQ(shape_of(int_list({})), Shape{});
  EXPECT_EQ(shape_of(int_list({7, 0, -3})), (Shape{7, 0, -3}));
  EXPECT_EQ(dtype_or(dtype_code(bf16), f32), bf16);
  EXPECT_EQ(dtype_or(kNoDType, f64), f64);
  EXPECT_EQ(cast_attributes(f16).dtype, static_cast<int>(f16));
}

}  // namespace
}  // namespace halfstep
