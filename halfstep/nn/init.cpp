// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/init.h"

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"

namespace halfstep::nn::init {
namespace {

// Draws on the host in row-major order: element i comes from block i of the stream, whatever the device.
template <class Draw>
Tensor fill(Tensor tensor, const char* op, Draw draw) {
  check_defined(tensor, op, "a tensor");
  check_floating(tensor, op);
  const auto n = static_cast<std::size_t>(tensor.numel());
  const PhiloxState start = default_generator().reserve(n);
  std::vector<double> values(n);
  for (std::size_t i = 0; i < n; ++i) {
    RandomStream stream(start.seed, start.offset + i);
    values[i] = draw(stream);
  }
  const NoGrad no_grad;
  tensor.copy_(halfstep::tensor(values, tensor.sizes(), {.dtype = f64}));
  return tensor;
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

}  // namespace halfstep::nn::init
