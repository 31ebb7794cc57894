/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The attributes of ops as a plug-in's kernels receive them; part of plugin.h, which includes it. A struct here has the
 * layout of the one of the same name in ops/attributes.h, where the library checks it. An op whose attributes change
 * gets another version (halfstep_plugin_table.kernel). Ops that are not named here have none.
 */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Up to HALFSTEP_MAX_DIMS (8) integers. */
typedef struct halfstep_int_list {
  int64_t values[8];
  int32_t size;
} halfstep_int_list;

/* A scalar: `kind` 0 bool, 1 integer, 2 floating-point. */
typedef struct halfstep_scalar {
  double floating;
  int64_t integer;
  int32_t kind;
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
  double alpha;
  int64_t integer_alpha;
} halfstep_alpha_attributes;

/* Ops of a tensor and one number: add_scalar, mul_scalar, pow_scalar, ... */
typedef struct halfstep_scalar_attributes {
  halfstep_scalar value;
} halfstep_scalar_attributes;

/* full, fill. */
typedef struct halfstep_fill_attributes {
  halfstep_scalar value;
} halfstep_fill_attributes;

/* to: conversion of dtype, keeping the layout. Null where Halfstep converts or copies inside of another call: the
 * output's dtype says all. */
typedef struct halfstep_cast_attributes {
  uint8_t dtype;
} halfstep_cast_attributes;

/* Views: geometry in elements. */
typedef struct halfstep_view_attributes {
  halfstep_int_list sizes;
  halfstep_int_list strides;
  int64_t offset;
  int64_t dim;
  int64_t other_dim;
  int64_t start;
  int64_t end;
  int64_t step;
} halfstep_view_attributes;

/* as_strided: geometry in elements (offsets from the storage's start), and the input's own. */
typedef struct halfstep_as_strided_attributes {
  halfstep_int_list sizes;
  halfstep_int_list strides;
  int64_t offset;
  halfstep_int_list input_strides;
  int64_t input_offset;
} halfstep_as_strided_attributes;

/* sum_to, sum, mean, ...: reduced dimensions (none listed: all) and whether they stay with size 1. */
typedef struct halfstep_reduce_attributes {
  halfstep_int_list dims;
  uint8_t keepdim;
  int8_t dtype; /* a dtype or -1 */
} halfstep_reduce_attributes;

/* matmul family: result dtype when it is not the inputs'. */
typedef struct halfstep_matmul_attributes {
  int8_t dtype; /* a dtype or -1 */
} halfstep_matmul_attributes;

/* Ops along one dimension: cat, gather, scatter, index_select, ... */
typedef struct halfstep_along_attributes {
  int64_t dim;
} halfstep_along_attributes;

/* flip. */
typedef struct halfstep_dims_attributes {
  halfstep_int_list dims;
} halfstep_dims_attributes;

/* scatter_value. */
typedef struct halfstep_scatter_value_attributes {
  int64_t dim;
  halfstep_scalar value;
} halfstep_scatter_value_attributes;

/* index_add: alpha is a factor of the source. */
typedef struct halfstep_index_add_attributes {
  int64_t dim;
  halfstep_scalar alpha;
} halfstep_index_add_attributes;

/* index_put. */
typedef struct halfstep_index_put_attributes {
  uint8_t accumulate;
} halfstep_index_put_attributes;

/* nonzero: how many there are, which sizes the output. */
typedef struct halfstep_count_attributes {
  int64_t count;
} halfstep_count_attributes;

/* embedding, embedding_backward. */
typedef struct halfstep_embedding_attributes {
  int64_t rows;
  int64_t padding_idx;  /* -1: none */
  uint8_t zero_padding; /* read zeros for the row padding_idx */
  int8_t dtype;         /* of the gradient, when it is not that of what comes in; a dtype or -1 */
} halfstep_embedding_attributes;

/* sort: NaN counts as the largest value. */
typedef struct halfstep_sort_attributes {
  int64_t dim;
  uint8_t descending;
} halfstep_sort_attributes;

/* topk. */
typedef struct halfstep_top_k_attributes {
  int64_t dim;
  int64_t k;
  uint8_t largest;
  uint8_t sorted;
} halfstep_top_k_attributes;

/* tril, triu, diagonal_backward. */
typedef struct halfstep_diagonal_attributes {
  halfstep_int_list sizes;
  int64_t diagonal;
  int64_t dim1;
  int64_t dim2;
} halfstep_diagonal_attributes;

/* uniform, normal, randint, bernoulli: bounds, or mean and standard deviation, or a probability. */
typedef struct halfstep_random_attributes {
  double a;
  double b;
  int64_t low;
  uint64_t range; /* of randint: how many values from low on; 0: 2^64 */
} halfstep_random_attributes;

/* amp_update_scale: how the loss scale follows what a step found. */
typedef struct halfstep_scale_update_attributes {
  double growth_factor;
  double backoff_factor;
  int32_t growth_interval;
  int32_t hysteresis; /* the scale falls with this overflow since the hysteresis was last whole */
  int32_t restart;    /* what the growth count is after an overflow */
  float floor;
  float cap;
  uint8_t refill_on_good_step; /* any good step makes the hysteresis whole, not only growth */
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
  double limit;     /* largest norm, or largest absolute value when there is no norm */
  double norm_type; /* exponent of the norm; infinity for the largest absolute value */
} halfstep_clip_attributes;

/* sgd_step. */
typedef struct halfstep_sgd_attributes {
  double momentum;
  double dampening;
  double weight_decay;
  uint8_t nesterov;
  uint8_t maximize;
} halfstep_sgd_attributes;

/* adam_step. */
typedef struct halfstep_adam_attributes {
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  uint8_t amsgrad;
  uint8_t maximize;
  uint8_t decoupled; /* weight decay as AdamW's */
} halfstep_adam_attributes;

/* nan_to_num. */
typedef struct halfstep_nan_to_num_attributes {
  double nan;
  double posinf;
  double neginf;
} halfstep_nan_to_num_attributes;

/* clamp and its gradient; an absent bound is an infinity. The integer bounds count for integer tensors. */
typedef struct halfstep_clamp_attributes {
  double min;
  double max;
  int64_t integer_min;
  int64_t integer_max;
} halfstep_clamp_attributes;

/* Activations: slope, alpha, beta, threshold... in the order of the function's arguments. */
typedef struct halfstep_activation_attributes {
  double a;
  double b;
  double c;
} halfstep_activation_attributes;

/* dropout: the probability that an element is dropped. Seed and offset come as a tensor. */
typedef struct halfstep_dropout_attributes {
  double p;
} halfstep_dropout_attributes;

/* norm: as halfstep_reduce_attributes, and the order. */
typedef struct halfstep_norm_attributes {
  halfstep_int_list dims;
  uint8_t keepdim;
  int8_t dtype; /* a dtype or -1 */
  double p;
} halfstep_norm_attributes;

/* var, std, var_mean: as halfstep_reduce_attributes; the divisor is n - correction. */
typedef struct halfstep_var_attributes {
  halfstep_int_list dims;
  uint8_t keepdim;
  double correction;
} halfstep_var_attributes;

/* Ops along one dimension (argmax, max_dim, cumsum, softmax, ...); `reverse` runs from the end. `dim` is wrapped. */
typedef struct halfstep_dim_attributes {
  int64_t dim;
  uint8_t keepdim;
  uint8_t reverse;
  int8_t dtype; /* a dtype or -1 */
} halfstep_dim_attributes;

/* How a loss sums up its terms: 0 none, 1 mean, 2 sum. cross_entropy,
 * nll_loss and their backward passes. */
typedef struct halfstep_class_loss_attributes {
  int32_t reduction;
  int64_t ignore_index;
  double label_smoothing;
  int64_t classes; /* for cross_entropy_targets, whose result is [N, classes, ...] */
  int8_t dtype;    /* of a gradient; a dtype or -1 */
} halfstep_class_loss_attributes;

/* Losses of two tensors of one shape: `parameter` is beta, delta or whether the target is a logarithm; `divisor` is
 * what the sum is divided by. */
typedef struct halfstep_pair_loss_attributes {
  int32_t kind; /* HALFSTEP_LOSS_... */
  int32_t reduction;
  double parameter;
  double divisor;
  uint8_t want_input; /* which gradients are asked for */
  uint8_t want_target;
  int8_t dtype; /* of the input's gradient; a dtype or -1 */
} halfstep_pair_loss_attributes;

/* layer_norm, rms_norm, group_norm and their backward pass: each of `rows` rows has its own statistics;
 * `inner` elements in a row share a parameter; after `groups` rows the parameters repeat. */
typedef struct halfstep_row_norm_attributes {
  double eps; /* negative: that of the input's dtype */
  int64_t rows;
  int64_t inner;
  int64_t groups;
  uint8_t rms;
  uint8_t want_input; /* which gradients are asked for */
  uint8_t want_weight;
  uint8_t want_bias;
  int8_t dtype; /* of the input's gradient; a dtype or -1 */
} halfstep_row_norm_attributes;

/* batch_norm and its backward pass; `count` values per channel. */
typedef struct halfstep_batch_norm_attributes {
  double eps;
  double momentum;
  double count;
  uint8_t training;
  uint8_t want_input;
  uint8_t want_weight;
  uint8_t want_bias;
  int8_t dtype; /* a dtype or -1 */
  uint8_t want_residual;
  int32_t activation; /* of batch_norm_act: 0 none, 1 relu, 2 relu6 */
} halfstep_batch_norm_attributes;

/* conv2d, conv_transpose2d and their backward passes: height, then width. */
typedef struct halfstep_conv_attributes {
  int64_t stride[2];
  int64_t padding[2];
  int64_t dilation[2];
  int64_t groups;
  halfstep_int_list sizes; /* of the result, of a transposed convolution and of a backward pass */
  int8_t dtype;            /* of a gradient; a dtype or -1 */
} halfstep_conv_attributes;

/* max_pool2d, avg_pool2d and their backward passes: height, then width. */
typedef struct halfstep_pool_attributes {
  int64_t kernel[2];
  int64_t stride[2];
  int64_t padding[2];
  int64_t dilation[2];
  uint8_t ceil_mode;
  uint8_t count_include_pad;
  int8_t dtype;            /* of a gradient; a dtype or -1 */
  int64_t divisor;         /* of an average; 0: the number of places */
  halfstep_int_list sizes; /* of a backward pass's result */
} halfstep_pool_attributes;

/* adaptive_avg_pool2d, adaptive_max_pool2d and their backward passes. */
typedef struct halfstep_adaptive_pool_attributes {
  halfstep_int_list sizes; /* of the result */
  int8_t dtype;            /* of a gradient; a dtype or -1 */
} halfstep_adaptive_pool_attributes;

/* interpolate and its backward pass. */
typedef struct halfstep_interpolate_attributes {
  halfstep_int_list sizes; /* of the result */
  double scale[2];         /* places of the input for one of the output: height, width */
  int32_t mode;            /* 0 nearest, 1 nearest_exact, 2 bilinear */
  uint8_t align_corners;
  int8_t dtype; /* of a gradient; a dtype or -1 */
} halfstep_interpolate_attributes;

/* pad and its backward pass: elements before and after, dimension by dimension; negative ones are cut off. */
typedef struct halfstep_pad_attributes {
  halfstep_int_list before;
  halfstep_int_list after;
  halfstep_scalar value;
  int32_t mode; /* 0 constant, 1 reflect, 2 replicate, 3 circular */
  int8_t dtype; /* of a gradient; a dtype or -1 */
} halfstep_pad_attributes;

/* scaled_dot_product_attention and its backward pass. */
typedef struct halfstep_attention_attributes {
  double scale;
  double dropout;
  uint8_t causal;
  uint8_t want[4];  /* which gradients are asked for: query, key, value, mask */
  int8_t dtypes[3]; /* of the gradients of query, key and value; a dtype or -1 */
} halfstep_attention_attributes;

#ifdef __cplusplus
} /* extern "C" */
#endif
