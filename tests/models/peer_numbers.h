// SPDX-License-Identifier: Apache-2.0
// The numbers of tests/goldens/torch_models.py: weights and images that both sides make, so that goldens need not hold
// them.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "halfstep/nn/module.h"
#include "halfstep/ops/create.h"

namespace halfstep::test {

/// `numbers` of torch_models.py: in [-1, 1), on a grid of 2^-23.
inline std::vector<double> peer_numbers(std::uint32_t seed, std::size_t count) {
  std::vector<double> result(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t h = static_cast<std::uint32_t>(i) * 0x9E3779B1U + seed * 0x632BE5ABU;
    h = (h ^ (h >> 16)) * 0x21F0AAADU;
    h = (h ^ (h >> 15)) * 0x735A2D97U;
    h ^= h >> 15;
    result[i] = static_cast<double>(h >> 8) / (1 << 23) - 1;
  }
  return result;
}

/// Images [N, C, H, W] of such numbers.
inline Tensor peer_images(std::uint32_t seed, const Shape& sizes, DType dtype) {
  return tensor(peer_numbers(seed, static_cast<std::size_t>(sizes.numel())), sizes, {.dtype = dtype});
}

/// The state that `fill` of torch_models.py gives the same network.
inline NamedTensors peer_state(const nn::ModuleBase& module) {
  NamedTensors result;
  std::uint32_t k = 0;
  for (const NamedTensor& t : module.state_dict()) {
    const Shape& sizes = t.tensor.sizes();
    if (t.name.ends_with("num_batches_tracked")) {
      result.push_back({t.name, tensor(std::vector<std::int64_t>{k}, {1}).reshape({})});
      ++k;
      continue;
    }
    std::vector<double> values = peer_numbers(k++, static_cast<std::size_t>(sizes.numel()));
    double fan_in = 1;
    for (int d = 1; d < sizes.size(); ++d) fan_in *= static_cast<double>(sizes[d]);
    const double bound = std::sqrt(6 / fan_in);
    for (double& v : values) {
      if (sizes.size() > 1) {
        v *= bound;
      } else if (t.name.ends_with("running_var")) {
        v = 1 + 0.5 * v;
      } else if (t.name.ends_with("weight")) {
        v = 1 + 0.2 * v;
      } else {
        v *= 0.1;
      }
      v = static_cast<float>(v);
    }
    result.push_back({t.name, tensor(values, sizes, {.dtype = f64})});
  }
  return result;
}

}  // namespace halfstep::test
