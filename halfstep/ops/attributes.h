// SPDX-License-Identifier: Apache-2.0
// The attributes of ops, as kernels receive them: one trivially copyable struct for each op that needs any. Values that
// change from step to step (learning rate, loss scale, Philox offset) are not here: they are passed as tensors.
#pragma once

#include <cstdint>

#include "halfstep/core/dtype.h"
#include "halfstep/core/shape.h"

namespace halfstep {

/// A dtype, or none: the op then takes the one that follows from its inputs.
struct OptionalDType {
  std::int8_t value = -1;
  constexpr OptionalDType() = default;
  constexpr OptionalDType(DType dtype) : value(static_cast<std::int8_t>(dtype)) {}
  constexpr bool has_value() const { return value >= 0; }
  constexpr DType or_else(DType other) const { return value >= 0 ? static_cast<DType>(value) : other; }
};

/// A list of up to kMaxDims integers.
struct IntList {
  std::int64_t values[kMaxDims] = {};
  std::int32_t size = 0;
  IntList() = default;
  IntList(const Shape& shape) : size(shape.size()) {
    for (int i = 0; i < size; ++i) values[i] = shape[i];
  }
  Shape shape() const { return Shape(std::span<const std::int64_t>(values, static_cast<std::size_t>(size))); }
};

/// A scalar: `kind` 0 bool, 1 integer, 2 floating-point.
struct ScalarValue {
  double floating = 0;
  std::int64_t integer = 0;
  std::int32_t kind = 2;
};

/// add, sub: input + alpha * other.
struct AlphaAttributes {
  double alpha = 1;
  std::int64_t integer_alpha = 1;
};
/// Ops of a tensor and one number: add_scalar, mul_scalar, pow_scalar, ...
struct ScalarAttributes {
  ScalarValue value = {};
};
/// full, fill.
struct FillAttributes {
  ScalarValue value = {};
};
/// to: conversion of dtype, keeping the layout.
struct CastAttributes {
  DType dtype = DType::f32;
};
/// Views: geometry in elements.
struct ViewAttributes {
  IntList sizes = {};
  IntList strides = {};
  std::int64_t offset = 0;
  std::int64_t dim = 0;
  std::int64_t other_dim = 0;
  std::int64_t start = 0;
  std::int64_t end = 0;
  std::int64_t step = 1;
};
/// as_strided: geometry in elements (offsets from the storage's start), and the input's own.
struct AsStridedAttributes {
  IntList sizes = {};
  IntList strides = {};
  std::int64_t offset = 0;
  IntList input_strides = {};
  std::int64_t input_offset = 0;
};
/// sum_to, sum, mean, ...: reduced dimensions (none listed: all) and whether they stay with size 1.
struct ReduceAttributes {
  IntList dims = {};
  bool keepdim = false;
  OptionalDType dtype = {};
};
/// matmul family: result dtype when it is not the inputs'.
struct MatmulAttributes {
  OptionalDType dtype = {};
};

// --- join, index, sort, triangle, random
/// Ops along one dimension: cat, gather, scatter, index_select, ...
struct AlongAttributes {
  std::int64_t dim = 0;
};
/// flip.
struct DimsAttributes {
  IntList dims = {};
};
/// scatter_value.
struct ScatterValueAttributes {
  std::int64_t dim = 0;
  ScalarValue value = {};
};
/// index_add: alpha is a factor of the source.
struct IndexAddAttributes {
  std::int64_t dim = 0;
  ScalarValue alpha = {.floating = 1, .integer = 1, .kind = 1};
};
/// index_put.
struct IndexPutAttributes {
  bool accumulate = false;
};
/// nonzero: how many there are, which sizes the output.
struct CountAttributes {
  std::int64_t count = 0;
};
/// embedding, embedding_backward.
struct EmbeddingAttributes {
  std::int64_t rows = 0;
  std::int64_t padding_idx = -1;  ///< -1: none
  bool zero_padding = false;      ///< read zeros for the row padding_idx
  OptionalDType dtype = {};       ///< of the gradient, when it is not that of what comes in
};
/// sort: NaN counts as the largest value.
struct SortAttributes {
  std::int64_t dim = -1;
  bool descending = false;
};
/// topk.
struct TopKAttributes {
  std::int64_t dim = -1;
  std::int64_t k = 1;
  bool largest = true;
  bool sorted = true;
};
/// tril, triu, diagonal_backward.
struct DiagonalAttributes {
  IntList sizes = {};
  std::int64_t diagonal = 0;
  std::int64_t dim1 = 0;
  std::int64_t dim2 = 1;
};
/// uniform, normal, randint, bernoulli: bounds, or mean and standard deviation, or a probability.
struct RandomAttributes {
  double a = 0;
  double b = 1;
  std::int64_t low = 0;
  std::uint64_t range = 0;  ///< of randint: how many values from low on; 0: 2^64
};

// --- amp
/// amp_update_scale: how the loss scale follows what a step found.
struct ScaleUpdateAttributes {
  double growth_factor = 2;
  double backoff_factor = 0.5;
  std::int32_t growth_interval = 2000;
  std::int32_t hysteresis = 1;  ///< the scale falls at this overflow since the hysteresis was last reset
  std::int32_t restart = 0;     ///< the growth count after an overflow
  float floor = 0;
  float cap = 3.4028234663852886e38f;
  bool refill_on_good_step = false;  ///< any good step resets the hysteresis, not only growth
};
/// The counters that amp_update_scale keeps, i32 [5].
namespace scale_counter {
inline constexpr int kGrowth = 0;   ///< good steps counted towards growth
inline constexpr int kUsed = 1;     ///< overflows since the hysteresis was last reset, at most the hysteresis
inline constexpr int kInARow = 2;   ///< overflows since the last good step
inline constexpr int kAtFloor = 3;  ///< overflows, in all, after which the scale was at its floor
inline constexpr int kStuck = 4;    ///< overflows, in all, that should have lowered a scale at its floor
inline constexpr int kCount = 5;
}  // namespace scale_counter

// --- optim
/// multi_norm, multi_clip.
struct ClipAttributes {
  double limit = 0;      ///< largest norm, or largest absolute value when there is no norm
  double norm_type = 2;  ///< exponent of the norm; infinity for the largest absolute value
};
/// sgd_step.
struct SgdAttributes {
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
};
/// adam_step.
struct AdamAttributes {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  bool decoupled = false;  ///< weight decay as AdamW's
};

// --- pointwise, compare, activation, dropout
/// nan_to_num.
struct NanToNumAttributes {
  double nan = 0;
  double posinf = 0;
  double neginf = 0;
};
/// clamp and its gradient; an absent bound is an infinity. The integer bounds count for integer tensors.
struct ClampAttributes {
  double min = 0;
  double max = 0;
  std::int64_t integer_min = 0;
  std::int64_t integer_max = 0;
};
/// Activations: slope, alpha, beta, threshold... in the order of the function's arguments.
struct ActivationAttributes {
  double a = 0;
  double b = 0;
  double c = 0;
};
/// dropout: the probability that an element is dropped. Seed and offset come as a tensor.
struct DropoutAttributes {
  double p = 0.5;
};

// --- reductions, softmax, normalisation, losses

/// norm: as ReduceAttributes, and the order.
struct NormAttributes {
  IntList dims = {};
  bool keepdim = false;
  OptionalDType dtype = {};
  double p = 2;
};
/// var, std, var_mean: as ReduceAttributes; the divisor is n - correction.
struct VarAttributes {
  IntList dims = {};
  bool keepdim = false;
  double correction = 1;
};
/// Ops along one dimension (argmax, max_dim, cumsum, softmax, ...); `reverse` runs from the end. `dim` is wrapped.
struct DimAttributes {
  std::int64_t dim = 0;
  bool keepdim = false;
  bool reverse = false;
  OptionalDType dtype = {};
};
/// How a loss sums up its terms (the values of Reduction in ops/loss.h): 0 none, 1 mean, 2 sum.
/// cross_entropy, nll_loss and their backward passes.
struct ClassLossAttributes {
  std::int32_t reduction = 1;
  std::int64_t ignore_index = -100;
  double label_smoothing = 0;
  std::int64_t classes = 0;  ///< for cross_entropy_targets, whose result is [N, classes, ...]
  OptionalDType dtype = {};  ///< of a gradient
};
/// Which loss of two tensors of one shape a kernel computes.
enum class PairLoss : std::int32_t { mse, l1, smooth_l1, huber, kl_div, bce_with_logits, bce };
/// Losses of two tensors of one shape: `parameter` is beta, delta or whether the target is a logarithm; `divisor` is
/// what the sum is divided by.
struct PairLossAttributes {
  PairLoss kind = PairLoss::mse;
  std::int32_t reduction = 1;
  double parameter = 0;
  double divisor = 1;
  bool want_input = true;  ///< which gradients are asked for
  bool want_target = true;
  OptionalDType dtype = {};  ///< of the input's gradient
};
/// layer_norm, rms_norm, group_norm and their backward pass: each of `rows` rows has its own statistics; `inner`
/// elements in a row share a parameter; after `groups` rows the parameters repeat.
struct RowNormAttributes {
  double eps = 1e-5;  ///< negative: that of the input's dtype
  std::int64_t rows = 1;
  std::int64_t inner = 1;
  std::int64_t groups = 1;
  bool rms = false;
  bool want_input = true;  ///< which gradients are asked for
  bool want_weight = true;
  bool want_bias = true;
  OptionalDType dtype = {};  ///< of the input's gradient
};
/// batch_norm and its backward pass; `count` values per channel.
struct BatchNormAttributes {
  double eps = 1e-5;
  double momentum = 0.1;
  double count = 1;
  bool training = false;
  bool want_input = true;
  bool want_weight = true;
  bool want_bias = true;
  OptionalDType dtype = {};
  bool want_residual = true;
  std::int32_t activation = 0;  ///< of batch_norm_act: 0 none, 1 relu, 2 relu6
};

// --- images
/// conv2d, conv_transpose2d and their backward passes: height, then width.
struct ConvAttributes {
  std::int64_t stride[2] = {1, 1};
  std::int64_t padding[2] = {};
  std::int64_t dilation[2] = {1, 1};
  std::int64_t groups = 1;
  IntList sizes = {};        ///< of the result, of a transposed convolution and of a backward pass
  OptionalDType dtype = {};  ///< of a gradient
};
/// max_pool2d, avg_pool2d and their backward passes: height, then width.
struct PoolAttributes {
  std::int64_t kernel[2] = {1, 1};
  std::int64_t stride[2] = {1, 1};
  std::int64_t padding[2] = {};
  std::int64_t dilation[2] = {1, 1};
  bool ceil_mode = false;
  bool count_include_pad = true;
  OptionalDType dtype = {};  ///< of a gradient
  std::int64_t divisor = 0;  ///< of an average; 0: the number of places
  IntList sizes = {};        ///< of a backward pass's result
};
/// adaptive_avg_pool2d, adaptive_max_pool2d and their backward passes.
struct AdaptivePoolAttributes {
  IntList sizes = {};        ///< of the result
  OptionalDType dtype = {};  ///< of a gradient
};
/// interpolate and its backward pass.
struct InterpolateAttributes {
  IntList sizes = {};     ///< of the result
  double scale[2] = {};   ///< places of the input for one of the output: height, width
  std::int32_t mode = 0;  ///< 0 nearest, 1 nearest_exact, 2 bilinear
  bool align_corners = false;
  OptionalDType dtype = {};  ///< of a gradient
};
/// pad and its backward pass: elements before and after, dimension by dimension; negative ones are cut off.
struct PadAttributes {
  IntList before = {};
  IntList after = {};
  ScalarValue value = {};
  std::int32_t mode = 0;     ///< 0 constant, 1 reflect, 2 replicate, 3 circular
  OptionalDType dtype = {};  ///< of a gradient
};

}  // namespace halfstep
