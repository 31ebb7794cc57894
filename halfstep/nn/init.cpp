// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/init.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <tuple>
#include <utility>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::nn::init {
namespace {

// Draws on the host in row-major order: element i comes from block i of the stream, whatever the device.
template <class Draw>
Tensor fill(Tensor tensor, const char* op, Draw draw) {
  check_defined(tensor, op, "a tensor");
  check_floating(tensor, op);
  const auto n = static_cast<std::size_t>(tensor.numel());
  const PhiloxState start = default_generator().reserve(n);
  if (tensor.device().is_meta()) return tensor;
  std::vector<double> values(n);
  // Networks have tens of millions of weights; a draw takes some 50 ns.
  parallel_for(static_cast<std::int64_t>(n), 256, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      RandomStream stream(start.seed, start.offset + i);
      values[i] = draw(stream);
    }
  });
  const NoGrad no_grad;
  tensor.copy_(halfstep::tensor(values, tensor.sizes(), {.dtype = f64}));
  return tensor;
}

struct Fans {
  double in, out;
};
Fans fans_of(const Tensor& tensor, const char* op) {
  check_defined(tensor, op, "a tensor");
  if (tensor.dim() < 2) {
    fail<ShapeError>("{}: expected at least 2 dimensions, [out, in, ...], got {}", op, tensor.sizes().str());
  }
  double rest = 1;
  for (int d = 2; d < tensor.dim(); ++d) rest *= static_cast<double>(tensor.size(d));
  return {static_cast<double>(tensor.size(1)) * rest, static_cast<double>(tensor.size(0)) * rest};
}

double kaiming_std(const Tensor& tensor, const KaimingOptions& o, const char* op) {
  const Fans fans = fans_of(tensor, op);
  const double fan = o.mode == FanMode::fan_in ? fans.in : fans.out;
  return fan > 0 ? calculate_gain(o.nonlinearity, o.negative_slope) / std::sqrt(fan) : 0;
}

double xavier_std(const Tensor& tensor, double gain, const char* op) {
  const Fans fans = fans_of(tensor, op);
  return fans.in + fans.out > 0 ? gain * std::sqrt(2 / (fans.in + fans.out)) : 0;
}

double normal_cdf(double x) { return std::erfc(-x / std::numbers::sqrt2) / 2; }

// Where the normal distribution function is `p`, within [low, high]: Newton's steps, halving where they leave.
double normal_quantile(double p, double low, double high) {
  double x = std::clamp(0.0, low, high);
  for (int i = 0; i < 100 && low < high; ++i) {
    const double error = normal_cdf(x) - p;
    if (error == 0) break;
    (error > 0 ? high : low) = x;
    const double density = std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi);
    double next = x - error / density;
    if (!(next > low && next < high)) next = low + (high - low) / 2;
    if (std::abs(next - x) <= 1e-15 * std::abs(x)) break;
    x = next;
  }
  return x;
}

}  // namespace

Tensor uniform_(Tensor tensor, double low, double high) {
  if (!(low <= high)) fail<Error>("init.uniform_: expected low <= high, got {} and {}", low, high);
  return fill(std::move(tensor), "init.uniform_", [&](RandomStream& s) { return s.uniform(low, high); });
}

Tensor normal_(Tensor tensor, double mean, double std) {
  if (!(std >= 0)) fail<Error>("init.normal_: expected a standard deviation of at least 0, got {}", std);
  return fill(std::move(tensor), "init.normal_", [&](RandomStream& s) { return mean + std * s.normal(); });
}

Tensor constant_(Tensor tensor, double value) {
  check_defined(tensor, "init.constant_", "a tensor");
  const NoGrad no_grad;
  tensor.fill_(value);
  return tensor;
}

Tensor zeros_(Tensor tensor) { return constant_(std::move(tensor), 0); }
Tensor ones_(Tensor tensor) { return constant_(std::move(tensor), 1); }

Tensor eye_(Tensor tensor) {
  check_defined(tensor, "init.eye_", "a tensor");
  if (tensor.dim() != 2) fail<ShapeError>("init.eye_: expected a matrix, got {}", tensor.sizes().str());
  const NoGrad no_grad;
  const std::int64_t rows = tensor.size(0), columns = tensor.size(1);
  std::vector<double> values(static_cast<std::size_t>(rows * columns));
  for (std::int64_t i = 0; i < std::min(rows, columns); ++i) values[static_cast<std::size_t>(i * columns + i)] = 1;
  tensor.copy_(halfstep::tensor(values, tensor.sizes(), {.dtype = f64}));
  return tensor;
}

Tensor trunc_normal_(Tensor tensor, double mean, double std, double low, double high) {
  if (!(std > 0)) fail<Error>("init.trunc_normal_: expected a standard deviation above 0, got {}", std);
  if (!(low < high)) fail<Error>("init.trunc_normal_: expected low < high, got {} and {}", low, high);
  // Far in the upper tail the distribution function has no digits left: there the mirror image is drawn.
  const double sign = low > mean ? -1 : 1;
  double a = (low - mean) / std, b = (high - mean) / std;
  if (sign < 0) std::tie(a, b) = std::pair(-b, -a);
  return fill(std::move(tensor), "init.trunc_normal_", [&](RandomStream& s) {
    const double p = s.uniform(normal_cdf(a), normal_cdf(b));
    return std::clamp(mean + std * sign * normal_quantile(p, a, b), low, high);
  });
}

double calculate_gain(Nonlinearity nonlinearity, double slope) {
  switch (nonlinearity) {
    case Nonlinearity::linear:
    case Nonlinearity::sigmoid:
      return 1;
    case Nonlinearity::tanh:
      return 5.0 / 3;
    case Nonlinearity::relu:
      return std::numbers::sqrt2;
    case Nonlinearity::leaky_relu:
      return std::sqrt(2 / (1 + slope * slope));
    case Nonlinearity::selu:
      return 0.75;
  }
  fail<Error>("init.calculate_gain: unknown nonlinearity {}", static_cast<int>(nonlinearity));
}

// A uniform variable in +-b has the standard deviation b / sqrt(3).
Tensor xavier_uniform_(Tensor tensor, double gain) {
  const double bound = std::numbers::sqrt3 * xavier_std(tensor, gain, "init.xavier_uniform_");
  return uniform_(std::move(tensor), -bound, bound);
}
Tensor xavier_normal_(Tensor tensor, double gain) {
  const double std = xavier_std(tensor, gain, "init.xavier_normal_");
  return normal_(std::move(tensor), 0, std);
}
Tensor kaiming_uniform_(Tensor tensor, const KaimingOptions& options) {
  const double bound = std::numbers::sqrt3 * kaiming_std(tensor, options, "init.kaiming_uniform_");
  return uniform_(std::move(tensor), -bound, bound);
}
Tensor kaiming_normal_(Tensor tensor, const KaimingOptions& options) {
  const double std = kaiming_std(tensor, options, "init.kaiming_normal_");
  return normal_(std::move(tensor), 0, std);
}

Tensor orthogonal_(Tensor tensor, double gain) {
  fans_of(tensor, "init.orthogonal_");
  if (tensor.device().is_meta()) return tensor;
  const auto rows = static_cast<std::size_t>(tensor.size(0));
  const std::size_t columns = rows > 0 ? static_cast<std::size_t>(tensor.numel()) / rows : 0;
  const bool wide = columns >= rows;
  // The vectors that are made orthonormal: rows, or columns where there are fewer.
  const std::size_t count = wide ? rows : columns, length = wide ? columns : rows;
  const Tensor random = normal_(
      empty({static_cast<std::int64_t>(count), static_cast<std::int64_t>(length)}, {.dtype = f64, .device = Device{}}));
  std::vector<double> v = random.to_vector<double>();
  for (std::size_t i = 0; i < count; ++i) {
    double* x = v.data() + i * length;
    // Gram-Schmidt; the second round takes away what the first one's rounding left.
    for (int round = 0; round < 2; ++round) {
      for (std::size_t j = 0; j < i; ++j) {
        const double* y = v.data() + j * length;
        const double product = std::inner_product(x, x + length, y, 0.0);
        for (std::size_t k = 0; k < length; ++k) x[k] -= product * y[k];
      }
    }
    const double norm = std::sqrt(std::inner_product(x, x + length, x, 0.0));
    for (std::size_t k = 0; k < length; ++k) x[k] /= norm;
  }
  std::vector<double> values(v.size());
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t k = 0; k < length; ++k) values[wide ? i * length + k : k * count + i] = gain * v[i * length + k];
  }
  const NoGrad no_grad;
  tensor.copy_(halfstep::tensor(values, tensor.sizes(), {.dtype = f64}));
  return tensor;
}

Tensor uniform_fan_in(const Shape& sizes, std::int64_t fan_in, DType dtype, bool initialise) {
  if (!initialise) return zeros(sizes, {.dtype = dtype});
  const double bound = fan_in > 0 ? 1 / std::sqrt(static_cast<double>(fan_in)) : 0;
  return uniform_(empty(sizes, {.dtype = dtype}), -bound, bound);
}

}  // namespace halfstep::nn::init
