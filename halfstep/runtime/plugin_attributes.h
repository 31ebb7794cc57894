/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The attributes of ops as kernels receive them, those of a plug-in and the library's own; part of plugin.h, which
 * includes it. An op whose attributes change gets another version (halfstep_plugin_table.kernel). Ops that are not
 * named here have none. Values that change from step to step (learning rate, loss scale, Philox offset) are passed as
 * tensors.
 */
#pragma once

#include <stdint.h>

/* A field's default: C++14 and newer initialize it so; in C it informs the reader. */
#if defined(__cplusplus) && __cplusplus >= 201402L
#define HALFSTEP_DEFAULT(...) = __VA_ARGS__
#else
#define HALFSTEP_DEFAULT(...)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Up to HALFSTEP_MAX_DIMS (8) integers. */
typedef struct halfstep_int_list {
  int64_t values[8] HALFSTEP_DEFAULT({});
  int32_t size HALFSTEP_DEFAULT(0);
} halfstep_int_list;

/* A scalar: `kind` 0 bool, 1 integer, 2 floating-point. */
typedef struct halfstep_scalar {
  double floating HALFSTEP_DEFAULT(0);
  int64_t integer HALFSTEP_DEFAULT(0);
  int32_t kind HALFSTEP_DEFAULT(2);
} halfstep_scalar;

/* Which loss of two tensors a kernel computes. */
enum {
  HALFSTEP_LOSS_MSE = 0,
  HALFSTEP_LOSS_L1 = 1,
  HALFSTEP_LOSS_SMOOTH_L1 = 2,
  HALFSTEP_LOSS_HUBER = 3,
  HALFSTEP_LOSS_KL_DIV = 4,
  HALFSTEP_LOSS_BCE_WITH_LOGITS = 5,
  HALFSTEP_LOSS_BCE = 6
};

/* add, sub: input + alpha * other. */
typedef struct halfstep_alpha_attributes {
  double alpha HALFSTEP_DEFAULT(1);
  int64_t integer_alpha HALFSTEP_DEFAULT(1);
} halfstep_alpha_attributes;

/* Ops of a tensor and one number: add_scalar, mul_scalar, pow_scalar, ... */
typedef struct halfstep_scalar_attributes {
  halfstep_scalar value HALFSTEP_DEFAULT({});
} halfstep_scalar_attributes;

/* full, fill. */
typedef struct halfstep_fill_attributes {
  halfstep_scalar value HALFSTEP_DEFAULT({});
} halfstep_fill_attributes;

/* to: conversion of dtype, keeping the layout. Null where Halfstep converts or copies inside of another call: the
 * output's dtype says all. */
typedef struct halfstep_cast_attributes {
  uint8_t dtype HALFSTEP_DEFAULT(0);
} halfstep_cast_attributes;

/* Views: geometry in elements. */
typedef struct halfstep_view_attributes {
  halfstep_int_list sizes HALFSTEP_DEFAULT({});
  halfstep_int_list strides HALFSTEP_DEFAULT({});
  int64_t offset HALFSTEP_DEFAULT(0);
  int64_t dim HALFSTEP_DEFAULT(0);
  int64_t other_dim HALFSTEP_DEFAULT(0);
  int64_t start HALFSTEP_DEFAULT(0);
  int64_t end HALFSTEP_DEFAULT(0);
  int64_t step HALFSTEP_DEFAULT(1);
} halfstep_view_attributes;

/* as_strided: geometry in elements (offsets from the storage's start), and the input's own. */
typedef struct halfstep_as_strided_attributes {
  halfstep_int_list sizes HALFSTEP_DEFAULT({});
  halfstep_int_list strides HALFSTEP_DEFAULT({});
  int64_t offset HALFSTEP_DEFAULT(0);
  halfstep_int_list input_strides HALFSTEP_DEFAULT({});
  int64_t input_offset HALFSTEP_DEFAULT(0);
} halfstep_as_strided_attributes;

/* sum_to, sum, mean, ...: reduced dimensions (none listed: all) and whether they stay with size 1. */
typedef struct halfstep_reduce_attributes {
  halfstep_int_list dims HALFSTEP_DEFAULT({});
  uint8_t keepdim HALFSTEP_DEFAULT(0);
  int8_t dtype HALFSTEP_DEFAULT(-1); /* a dtype or -1 */
} halfstep_reduce_attributes;

/* matmul family: result dtype when it is not the inputs'. */
typedef struct halfstep_matmul_attributes {
  int8_t dtype HALFSTEP_DEFAULT(-1); /* a dtype or -1 */
} halfstep_matmul_attributes;

/* Ops along one dimension: cat, gather, scatter, index_select, ... */
typedef struct halfstep_along_attributes {
  int64_t dim HALFSTEP_DEFAULT(0);
} halfstep_along_attributes;

/* flip. */
typedef struct halfstep_dims_attributes {
  halfstep_int_list dims HALFSTEP_DEFAULT({});
} halfstep_dims_attributes;

/* scatter_value. */
typedef struct halfstep_scatter_value_attributes {
  int64_t dim HALFSTEP_DEFAULT(0);
  halfstep_scalar value HALFSTEP_DEFAULT({});
} halfstep_scatter_value_attributes;

/* index_add: alpha is a factor of the source. */
typedef struct halfstep_index_add_attributes {
  int64_t dim HALFSTEP_DEFAULT(0);
  halfstep_scalar alpha HALFSTEP_DEFAULT({1, 1, 1});
} halfstep_index_add_attributes;

/* index_put. */
typedef struct halfstep_index_put_attributes {
  uint8_t accumulate HALFSTEP_DEFAULT(0);
} halfstep_index_put_attributes;

/* nonzero: how many there are, which sizes the output. */
typedef struct halfstep_count_attributes {
  int64_t count HALFSTEP_DEFAULT(0);
} halfstep_count_attributes;

/* embedding, embedding_backward. */
typedef struct halfstep_embedding_attributes {
  int64_t rows HALFSTEP_DEFAULT(0);
  int64_t padding_idx HALFSTEP_DEFAULT(-1); /* -1: none */
  uint8_t zero_padding HALFSTEP_DEFAULT(0); /* read zeros for the row padding_idx */
  int8_t dtype HALFSTEP_DEFAULT(-1);        /* of the gradient, when it is not that of what comes in; a dtype or -1 */
} halfstep_embedding_attributes;

/* sort: NaN counts as the largest value. */
typedef struct halfstep_sort_attributes {
  int64_t dim HALFSTEP_DEFAULT(-1);
  uint8_t descending HALFSTEP_DEFAULT(0);
} halfstep_sort_attributes;

/* topk. */
typedef struct halfstep_top_k_attributes {
  int64_t dim HALFSTEP_DEFAULT(-1);
  int64_t k HALFSTEP_DEFAULT(1);
  uint8_t largest HALFSTEP_DEFAULT(1);
  uint8_t sorted HALFSTEP_DEFAULT(1);
} halfstep_top_k_attributes;

/* tril, triu, diagonal_backward. */
typedef struct halfstep_diagonal_attributes {
  halfstep_int_list sizes HALFSTEP_DEFAULT({});
  int64_t diagonal HALFSTEP_DEFAULT(0);
  int64_t dim1 HALFSTEP_DEFAULT(0);
  int64_t dim2 HALFSTEP_DEFAULT(1);
} halfstep_diagonal_attributes;

/* uniform, normal, randint, bernoulli: bounds, or mean and standard deviation, or a probability. */
typedef struct halfstep_random_attributes {
  double a HALFSTEP_DEFAULT(0);
  double b HALFSTEP_DEFAULT(1);
  int64_t low HALFSTEP_DEFAULT(0);
  uint64_t range HALFSTEP_DEFAULT(0); /* of randint: how many values from low on; 0: 2^64 */
} halfstep_random_attributes;

/* amp_update_scale: how the loss scale follows what a step found. */
typedef struct halfstep_scale_update_attributes {
  double growth_factor HALFSTEP_DEFAULT(2);
  double backoff_factor HALFSTEP_DEFAULT(0.5);
  int32_t growth_interval HALFSTEP_DEFAULT(2000);
  int32_t hysteresis HALFSTEP_DEFAULT(1); /* the scale falls with this overflow since the hysteresis was last whole */
  int32_t restart HALFSTEP_DEFAULT(0);    /* what the growth count is after an overflow */
  float floor HALFSTEP_DEFAULT(0);
  float cap HALFSTEP_DEFAULT(3.4028234663852886e38f);
  uint8_t refill_on_good_step HALFSTEP_DEFAULT(0); /* any good step makes the hysteresis whole, not only growth */
} halfstep_scale_update_attributes;

/* The counters that amp_update_scale keeps. */
enum {
  HALFSTEP_SCALE_GROWTH = 0,   /* good steps counted towards growth */
  HALFSTEP_SCALE_USED = 1,     /* overflows since the hysteresis was last whole, at most the hysteresis */
  HALFSTEP_SCALE_IN_A_ROW = 2, /* overflows since the last good step */
  HALFSTEP_SCALE_AT_FLOOR = 3, /* overflows, in all, after which the scale was at its floor */
  HALFSTEP_SCALE_STUCK = 4,    /* overflows, in all, that should have lowered a scale at its floor */
  HALFSTEP_SCALE_COUNTERS = 5
};

/* multi_norm, multi_clip. */
typedef struct halfstep_clip_attributes {
  double limit HALFSTEP_DEFAULT(0);     /* largest norm, or largest absolute value when there is no norm */
  double norm_type HALFSTEP_DEFAULT(2); /* exponent of the norm; infinity for the largest absolute value */
} halfstep_clip_attributes;

/* sgd_step. */
typedef struct halfstep_sgd_attributes {
  double momentum HALFSTEP_DEFAULT(0);
  double dampening HALFSTEP_DEFAULT(0);
  double weight_decay HALFSTEP_DEFAULT(0);
  uint8_t nesterov HALFSTEP_DEFAULT(0);
  uint8_t maximize HALFSTEP_DEFAULT(0);
} halfstep_sgd_attributes;

/* adam_step. */
typedef struct halfstep_adam_attributes {
  double beta1 HALFSTEP_DEFAULT(0.9);
  double beta2 HALFSTEP_DEFAULT(0.999);
  double eps HALFSTEP_DEFAULT(1e-8);
  double weight_decay HALFSTEP_DEFAULT(0);
  uint8_t amsgrad HALFSTEP_DEFAULT(0);
  uint8_t maximize HALFSTEP_DEFAULT(0);
  uint8_t decoupled HALFSTEP_DEFAULT(0); /* weight decay as AdamW's */
} halfstep_adam_attributes;

/* nan_to_num. */
typedef struct halfstep_nan_to_num_attributes {
  double nan HALFSTEP_DEFAULT(0);
  double posinf HALFSTEP_DEFAULT(0);
  double neginf HALFSTEP_DEFAULT(0);
} halfstep_nan_to_num_attributes;

/* clamp and its gradient; an absent bound is an infinity. The integer bounds count for integer tensors. */
typedef struct halfstep_clamp_attributes {
  double min HALFSTEP_DEFAULT(0);
  double max HALFSTEP_DEFAULT(0);
  int64_t integer_min HALFSTEP_DEFAULT(0);
  int64_t integer_max HALFSTEP_DEFAULT(0);
} halfstep_clamp_attributes;

/* Activations: slope, alpha, beta, threshold... in the order of the function's arguments. */
typedef struct halfstep_activation_attributes {
  double a HALFSTEP_DEFAULT(0);
  double b HALFSTEP_DEFAULT(0);
  double c HALFSTEP_DEFAULT(0);
} halfstep_activation_attributes;

/* dropout: the probability that an element is dropped. Seed and offset come as a tensor. */
typedef struct halfstep_dropout_attributes {
  double p HALFSTEP_DEFAULT(0.5);
} halfstep_dropout_attributes;

/* norm: as halfstep_reduce_attributes, and the order. */
typedef struct halfstep_norm_attributes {
  halfstep_int_list dims HALFSTEP_DEFAULT({});
  uint8_t keepdim HALFSTEP_DEFAULT(0);
  int8_t dtype HALFSTEP_DEFAULT(-1); /* a dtype or -1 */
  double p HALFSTEP_DEFAULT(2);
} halfstep_norm_attributes;

/* var, std, var_mean: as halfstep_reduce_attributes; the divisor is n - correction. */
typedef struct halfstep_var_attributes {
  halfstep_int_list dims HALFSTEP_DEFAULT({});
  uint8_t keepdim HALFSTEP_DEFAULT(0);
  double correction HALFSTEP_DEFAULT(1);
} halfstep_var_attributes;

/* Ops along one dimension (argmax, max_dim, cumsum, softmax, ...); `reverse` runs from the end. `dim` is wrapped. */
typedef struct halfstep_dim_attributes {
  int64_t dim HALFSTEP_DEFAULT(0);
  uint8_t keepdim HALFSTEP_DEFAULT(0);
  uint8_t reverse HALFSTEP_DEFAULT(0);
  int8_t dtype HALFSTEP_DEFAULT(-1); /* a dtype or -1 */
} halfstep_dim_attributes;

/* How a loss sums up its terms: 0 none, 1 mean, 2 sum. cross_entropy,
 * nll_loss and their backward passes. */
typedef struct halfstep_class_loss_attributes {
  int32_t reduction HALFSTEP_DEFAULT(1);
  int64_t ignore_index HALFSTEP_DEFAULT(-100);
  double label_smoothing HALFSTEP_DEFAULT(0);
  int64_t classes HALFSTEP_DEFAULT(0); /* for cross_entropy_targets, whose result is [N, classes, ...] */
  int8_t dtype HALFSTEP_DEFAULT(-1);   /* of a gradient; a dtype or -1 */
} halfstep_class_loss_attributes;

/* Losses of two tensors of one shape: `parameter` is beta, delta or whether the target is a logarithm; `divisor` is
 * what the sum is divided by. */
typedef struct halfstep_pair_loss_attributes {
  int32_t kind HALFSTEP_DEFAULT(HALFSTEP_LOSS_MSE); /* HALFSTEP_LOSS_... */
  int32_t reduction HALFSTEP_DEFAULT(1);
  double parameter HALFSTEP_DEFAULT(0);
  double divisor HALFSTEP_DEFAULT(1);
  uint8_t want_input HALFSTEP_DEFAULT(1); /* which gradients are asked for */
  uint8_t want_target HALFSTEP_DEFAULT(1);
  int8_t dtype HALFSTEP_DEFAULT(-1); /* of the input's gradient; a dtype or -1 */
} halfstep_pair_loss_attributes;

/* layer_norm, rms_norm, group_norm and their backward pass: each of `rows` rows has its own statistics;
 * `inner` elements in a row share a parameter; after `groups` rows the parameters repeat. */
typedef struct halfstep_row_norm_attributes {
  double eps HALFSTEP_DEFAULT(1e-5); /* negative: that of the input's dtype */
  int64_t rows HALFSTEP_DEFAULT(1);
  int64_t inner HALFSTEP_DEFAULT(1);
  int64_t groups HALFSTEP_DEFAULT(1);
  uint8_t rms HALFSTEP_DEFAULT(0);
  uint8_t want_input HALFSTEP_DEFAULT(1); /* which gradients are asked for */
  uint8_t want_weight HALFSTEP_DEFAULT(1);
  uint8_t want_bias HALFSTEP_DEFAULT(1);
  int8_t dtype HALFSTEP_DEFAULT(-1); /* of the input's gradient; a dtype or -1 */
} halfstep_row_norm_attributes;

/* batch_norm and its backward pass; `count` values per channel. */
typedef struct halfstep_batch_norm_attributes {
  double eps HALFSTEP_DEFAULT(1e-5);
  double momentum HALFSTEP_DEFAULT(0.1);
  double count HALFSTEP_DEFAULT(1);
  uint8_t training HALFSTEP_DEFAULT(0);
  uint8_t want_input HALFSTEP_DEFAULT(1);
  uint8_t want_weight HALFSTEP_DEFAULT(1);
  uint8_t want_bias HALFSTEP_DEFAULT(1);
  int8_t dtype HALFSTEP_DEFAULT(-1); /* a dtype or -1 */
  uint8_t want_residual HALFSTEP_DEFAULT(1);
  int32_t activation HALFSTEP_DEFAULT(0); /* of batch_norm_act: 0 none, 1 relu, 2 relu6 */
} halfstep_batch_norm_attributes;

/* conv2d, conv_transpose2d and their backward passes: height, then width. */
typedef struct halfstep_conv_attributes {
  int64_t stride[2] HALFSTEP_DEFAULT({1, 1});
  int64_t padding[2] HALFSTEP_DEFAULT({});
  int64_t dilation[2] HALFSTEP_DEFAULT({1, 1});
  int64_t groups HALFSTEP_DEFAULT(1);
  halfstep_int_list sizes HALFSTEP_DEFAULT({}); /* of the result, of a transposed convolution and of a backward pass */
  int8_t dtype HALFSTEP_DEFAULT(-1);            /* of a gradient; a dtype or -1 */
} halfstep_conv_attributes;

/* max_pool2d, avg_pool2d and their backward passes: height, then width. */
typedef struct halfstep_pool_attributes {
  int64_t kernel[2] HALFSTEP_DEFAULT({1, 1});
  int64_t stride[2] HALFSTEP_DEFAULT({1, 1});
  int64_t padding[2] HALFSTEP_DEFAULT({});
  int64_t dilation[2] HALFSTEP_DEFAULT({1, 1});
  uint8_t ceil_mode HALFSTEP_DEFAULT(0);
  uint8_t count_include_pad HALFSTEP_DEFAULT(1);
  int8_t dtype HALFSTEP_DEFAULT(-1);            /* of a gradient; a dtype or -1 */
  int64_t divisor HALFSTEP_DEFAULT(0);          /* of an average; 0: the number of places */
  halfstep_int_list sizes HALFSTEP_DEFAULT({}); /* of a backward pass's result */
} halfstep_pool_attributes;

/* adaptive_avg_pool2d, adaptive_max_pool2d and their backward passes. */
typedef struct halfstep_adaptive_pool_attributes {
  halfstep_int_list sizes HALFSTEP_DEFAULT({}); /* of the result */
  int8_t dtype HALFSTEP_DEFAULT(-1);            /* of a gradient; a dtype or -1 */
} halfstep_adaptive_pool_attributes;

/* interpolate and its backward pass. */
typedef struct halfstep_interpolate_attributes {
  halfstep_int_list sizes HALFSTEP_DEFAULT({}); /* of the result */
  double scale[2] HALFSTEP_DEFAULT({});         /* places of the input for one of the output: height, width */
  int32_t mode HALFSTEP_DEFAULT(0);             /* 0 nearest, 1 nearest_exact, 2 bilinear */
  uint8_t align_corners HALFSTEP_DEFAULT(0);
  int8_t dtype HALFSTEP_DEFAULT(-1); /* of a gradient; a dtype or -1 */
} halfstep_interpolate_attributes;

/* nms. */
typedef struct halfstep_nms_attributes {
  double iou_threshold HALFSTEP_DEFAULT(0.5);
  int64_t limit HALFSTEP_DEFAULT(-1); /* the most boxes that are kept; -1: any number */
} halfstep_nms_attributes;

/* roi_align and its backward pass. */
typedef struct halfstep_roi_align_attributes {
  halfstep_int_list sizes HALFSTEP_DEFAULT({}); /* of the result */
  double spatial_scale HALFSTEP_DEFAULT(1);     /* from the boxes' unit to places of the input */
  int64_t sampling_ratio HALFSTEP_DEFAULT(0);   /* samples per bin and direction; 0: as many as it has places */
  uint8_t aligned HALFSTEP_DEFAULT(0);          /* centres of pixels are at half numbers */
} halfstep_roi_align_attributes;

/* pad and its backward pass: elements before and after, dimension by dimension; negative ones are cut off. */
typedef struct halfstep_pad_attributes {
  halfstep_int_list before HALFSTEP_DEFAULT({});
  halfstep_int_list after HALFSTEP_DEFAULT({});
  halfstep_scalar value HALFSTEP_DEFAULT({});
  int32_t mode HALFSTEP_DEFAULT(0);  /* 0 constant, 1 reflect, 2 replicate, 3 circular */
  int8_t dtype HALFSTEP_DEFAULT(-1); /* of a gradient; a dtype or -1 */
} halfstep_pad_attributes;

/* scaled_dot_product_attention and its backward pass. */
typedef struct halfstep_attention_attributes {
  double scale HALFSTEP_DEFAULT(1);
  double dropout HALFSTEP_DEFAULT(0);
  uint8_t causal HALFSTEP_DEFAULT(0);
  uint8_t want[4] HALFSTEP_DEFAULT({1, 1, 1, 1});  /* which gradients are asked for: query, key, value, mask */
  int8_t dtypes[3] HALFSTEP_DEFAULT({-1, -1, -1}); /* of the gradients of query, key and value; a dtype or -1 */
} halfstep_attention_attributes;

/* fake_quantize, fake_quantize_learnable and their backward passes, quantize, dequantize; of pact_backward the wanted
 * gradients. */
typedef struct halfstep_quantize_attributes {
  int64_t quant_min HALFSTEP_DEFAULT(-128);
  int64_t quant_max HALFSTEP_DEFAULT(127);
  int64_t axis HALFSTEP_DEFAULT(-1);      /* the dimension of the channels, wrapped; -1: one scale for all */
  double grad_factor HALFSTEP_DEFAULT(1); /* of the gradients of scale and zero point */
  uint8_t want_mask HALFSTEP_DEFAULT(0);  /* of fake_quantize: whether the mask is asked for */
  uint8_t want_input HALFSTEP_DEFAULT(1); /* which gradients are asked for */
  uint8_t want_scale HALFSTEP_DEFAULT(1); /* of pact_backward: alpha's */
  uint8_t want_zero_point HALFSTEP_DEFAULT(1);
  int8_t dtype HALFSTEP_DEFAULT(-1); /* of the result; a dtype or -1 */
} halfstep_quantize_attributes;

/* quantization_parameters. */
typedef struct halfstep_quantization_parameters_attributes {
  int64_t quant_min HALFSTEP_DEFAULT(0);
  int64_t quant_max HALFSTEP_DEFAULT(255);
  uint8_t symmetric HALFSTEP_DEFAULT(0);
  double eps HALFSTEP_DEFAULT(1.1920928955078125e-07); /* the smallest scale */
} halfstep_quantization_parameters_attributes;

/* observe_range. */
typedef struct halfstep_observe_range_attributes {
  int64_t axis HALFSTEP_DEFAULT(-1);              /* the dimension of the channels, wrapped; -1: one range for all */
  double averaging_constant HALFSTEP_DEFAULT(-1); /* weight of what is seen now; negative: the widest range */
} halfstep_observe_range_attributes;

/* conv2d_int8 and linear_int8: products of integers, whose real numbers are (q - zero_point) * scale. Of linear_int8
 * the geometry is unused. */
typedef struct halfstep_int8_product_attributes {
  int64_t stride[2] HALFSTEP_DEFAULT({1, 1});
  int64_t padding[2] HALFSTEP_DEFAULT({});
  int64_t dilation[2] HALFSTEP_DEFAULT({1, 1});
  int64_t groups HALFSTEP_DEFAULT(1);
  double input_scale HALFSTEP_DEFAULT(1);
  int64_t input_zero_point HALFSTEP_DEFAULT(0);
  double residual_scale HALFSTEP_DEFAULT(1); /* of what is added before the activation */
  int64_t residual_zero_point HALFSTEP_DEFAULT(0);
  double output_scale HALFSTEP_DEFAULT(1); /* this and the next three: of integers that come out */
  int64_t output_zero_point HALFSTEP_DEFAULT(0);
  int64_t quant_min HALFSTEP_DEFAULT(-128);
  int64_t quant_max HALFSTEP_DEFAULT(127);
  int32_t activation HALFSTEP_DEFAULT(0); /* 0 none, 1 relu, 2 hardtanh from a to b, 3 silu, 4 leaky_relu of slope a,
                                             5 hardswish */
  double a HALFSTEP_DEFAULT(0);
  double b HALFSTEP_DEFAULT(0);
  uint8_t dtype HALFSTEP_DEFAULT(0); /* of the result: u8, i8, or a floating one */
} halfstep_int8_product_attributes;

/* add_int8, lookup_int8 and mean_int8: integers on two grids, and those on a third that come out. */
typedef struct halfstep_int8_grid_attributes {
  double input_scale HALFSTEP_DEFAULT(1);
  int64_t input_zero_point HALFSTEP_DEFAULT(0);
  double other_scale HALFSTEP_DEFAULT(1);
  int64_t other_zero_point HALFSTEP_DEFAULT(0);
  double output_scale HALFSTEP_DEFAULT(1);
  int64_t output_zero_point HALFSTEP_DEFAULT(0);
  int64_t quant_min HALFSTEP_DEFAULT(-128);
  int64_t quant_max HALFSTEP_DEFAULT(127);
  uint8_t relu HALFSTEP_DEFAULT(0);            /* of a sum */
  halfstep_int_list dims HALFSTEP_DEFAULT({}); /* of a mean */
  uint8_t keepdim HALFSTEP_DEFAULT(0);         /* likewise */
  uint8_t dtype HALFSTEP_DEFAULT(0);           /* of the result: u8 or i8; of a mean and a sum a floating one too */
} halfstep_int8_grid_attributes;

/* linear_weight_only: floating inputs times weights in integers. */
typedef struct halfstep_weight_only_attributes {
  int64_t group HALFSTEP_DEFAULT(0); /* elements of a row that share a scale; 0: all */
  int32_t bits HALFSTEP_DEFAULT(8);  /* 8, or 4: two elements a byte, the first in the low half */
} halfstep_weight_only_attributes;

#ifdef __cplusplus
} /* extern "C" */
#endif
