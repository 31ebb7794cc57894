// SPDX-License-Identifier: Apache-2.0
// What tests of networks on several ranks share.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "halfstep/nn/module.h"
#include "tests/ranks/ranks.h"

namespace halfstep::test {

using dist::test::world;

/// Part `rank` of a batch along dimension 0: n * rank / size to n * (rank + 1) / size.
inline Tensor part_of(const Tensor& whole) {
  const std::int64_t n = whole.size(0), begin = n * world().rank() / world().size(),
                     end = n * (world().rank() + 1) / world().size();
  return whole.narrow(0, begin, end - begin);
}

/// All values of a list of tensors, one behind the other.
inline std::vector<double> values_of(const NamedTensors& tensors) {
  std::vector<double> all;
  for (const NamedTensor& t : tensors) {
    for (const double v : t.tensor.to_vector<double>()) all.push_back(v);
  }
  return all;
}
inline NamedTensors gradients_of(const nn::ModuleBase& module) {
  NamedTensors result;
  for (const NamedTensor& p : module.parameters()) {
    if (p.tensor.grad().defined()) result.push_back({p.name, p.tensor.grad()});
  }
  return result;
}

/// |a - b| / |b| as vectors.
inline double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / std::max(norm, 1e-300));
}

}  // namespace halfstep::test
