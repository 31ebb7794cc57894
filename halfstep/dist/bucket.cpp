// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <utility>

#include "halfstep/dist/bucket_internal.h"

namespace halfstep::dist::detail {

std::vector<std::vector<std::size_t>> bucket_members(const NamedTensors& parameters, std::span<const std::size_t> order,
                                                     double first_cap_mb, double cap_mb) {
  struct Open {
    std::pair<DType, Device> kind;
    std::vector<std::size_t> parameters = {};
    std::int64_t bytes = 0;
  };
  std::vector<Open> open;  // in the order in which they were opened
  std::vector<std::vector<std::size_t>> closed;
  for (const std::size_t i : order) {
    const Tensor& p = parameters[i].tensor;
    const auto kind = std::pair(p.dtype(), p.device());
    auto at = std::find_if(open.begin(), open.end(), [&](const Open& o) { return o.kind == kind; });
    if (at == open.end()) at = open.insert(open.end(), Open{.kind = kind});
    at->parameters.push_back(i);
    at->bytes += p.numel() * static_cast<std::int64_t>(p.item_size());
    if (static_cast<double>(at->bytes) < (closed.empty() ? first_cap_mb : cap_mb) * 0x1p20) continue;
    closed.push_back(std::move(at->parameters));
    open.erase(at);
  }
  for (Open& bucket : open) closed.push_back(std::move(bucket.parameters));
  return closed;
}

}  // namespace halfstep::dist::detail
