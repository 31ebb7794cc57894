// SPDX-License-Identifier: Apache-2.0
// Internal: which gradients are reduced together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "halfstep/autograd/parameter.h"

namespace halfstep::dist::detail {

struct Bucket {
  Tensor flat = {};  // where gradients are sharded, from its first gradient until it is reduced
  std::int64_t numel = 0;
  std::vector<std::size_t> parameters;
  std::vector<std::int64_t> offsets = {};  // of the parameters
  std::vector<std::int64_t> counts = {};   // elements of the ranks' parts, where gradients are sharded
  int waiting = 0;                         // gradients that haven't come in this pass
  std::function<void()> finish = {};       // of the reduction that runs

  // Ends a reduction of a pass that threw: until then it writes to the bucket.
  void abandon() {
    if (!finish) return;
    try {
      std::exchange(finish, {})();
    } catch (const std::exception&) {
    }
  }
};

/// Buckets of these parameters, which are numbers in `parameters` in the order that their gradients are expected in. A
/// bucket has one dtype and device and is full at `cap_mb` MiB, the first one at `first_cap_mb`.
std::vector<std::vector<std::size_t>> bucket_members(const NamedTensors& parameters, std::span<const std::size_t> order,
                                                     double first_cap_mb, double cap_mb);

}  // namespace halfstep::dist::detail
