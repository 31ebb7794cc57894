// SPDX-License-Identifier: Apache-2.0
// Initialisers: they fill a tensor in place, without recording, from the default generator (core/random.h), and return
// it. Names, defaults and distributions are those of torch.nn.init.
#pragma once

#include "halfstep/core/tensor.h"

namespace halfstep::nn::init {

/// Uniform in [low, high).
HS_API Tensor uniform_(Tensor tensor, double low = 0, double high = 1);
/// Normal with this mean and standard deviation.
HS_API Tensor normal_(Tensor tensor, double mean = 0, double std = 1);
/// Normal, given that the value lies in [low, high].
HS_API Tensor trunc_normal_(Tensor tensor, double mean = 0, double std = 1, double low = -2, double high = 2);
/// One value.
HS_API Tensor constant_(Tensor tensor, double value);
/// All elements 0.
HS_API Tensor zeros_(Tensor tensor);
/// All elements 1.
HS_API Tensor ones_(Tensor tensor);
/// The identity, for a matrix of any sizes.
HS_API Tensor eye_(Tensor tensor);

/// What follows a layer, for calculate_gain.
enum class Nonlinearity : std::uint8_t { linear, sigmoid, tanh, relu, leaky_relu, selu };
/// By how much weights must be larger so that the function keeps variances: 1, 1, 5/3, sqrt(2), sqrt(2 / (1 +
/// slope^2)), 3/4.
HS_API double calculate_gain(Nonlinearity nonlinearity, double slope = 0.01);

/// Uniform with variance gain^2 * 2 / (fan_in + fan_out) (Glorot and Bengio, 2010). A weight [out, in, ...] has as fans
/// its sizes in and out times the product of the others; tensors of less than two dimensions throw ShapeError.
HS_API Tensor xavier_uniform_(Tensor tensor, double gain = 1);
/// Normal with the same variance.
HS_API Tensor xavier_normal_(Tensor tensor, double gain = 1);

/// Which of a weight's fans an initialiser keeps the variance for: of the forward or of the backward pass.
enum class FanMode : std::uint8_t { fan_in, fan_out };
/// Options of kaiming_uniform_ and kaiming_normal_.
struct KaimingOptions {
  double negative_slope = 0;  ///< of leaky_relu
  FanMode mode = FanMode::fan_in;
  Nonlinearity nonlinearity = Nonlinearity::leaky_relu;
};
/// Uniform with variance gain^2 / fan (He et al., 2015).
HS_API Tensor kaiming_uniform_(Tensor tensor, const KaimingOptions& options = {});
/// Normal with the same variance.
HS_API Tensor kaiming_normal_(Tensor tensor, const KaimingOptions& options = {});

/// A random matrix with orthonormal rows or columns, whichever are fewer, times `gain` (Saxe et al., 2013), uniform
/// over all such. Dimensions after the first count as one; less than two throw ShapeError. Computed in float64.
HS_API Tensor orthogonal_(Tensor tensor, double gain = 1);

/// A new tensor of what Linear and the convolutions start with: uniform in +-1 / sqrt(fan_in), which is
/// kaiming_uniform_ with a slope of sqrt(5); zeros without `initialise`.
HS_API Tensor uniform_fan_in(const Shape& sizes, std::int64_t fan_in, DType dtype, bool initialise = true);

}  // namespace halfstep::nn::init
