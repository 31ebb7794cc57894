// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/index_check.h"

#include <cstdio>

#include "halfstep/core/shape.h"

namespace halfstep::cpu {

bool check_indices(KernelContext* context, const TensorView& index, std::int64_t size, std::int64_t dim, int ndim,
                   bool negative) {
  if (runs_dry(context)) return true;
  const auto* data = static_cast<const std::int64_t*>(index.data);
  const std::int64_t low = negative ? -size : 0;
  const auto outside = [&](std::int64_t v) { return v < low || v >= size; };
  std::int64_t position[kMaxDims] = {};
  std::int64_t bad = 0;
  bool found = false;
  if (index.contiguous) {
    bool any = false;
    for (std::int64_t i = 0; i < index.numel; ++i) any |= outside(data[i]);
    if (!any) return true;
  }
  for (std::int64_t i = 0; i < index.numel && !found; ++i) {
    std::int64_t offset = 0, rest = i;
    for (int d = index.ndim - 1; d >= 0; --d) {
      position[d] = rest % index.sizes[d];
      rest /= index.sizes[d];
      offset += position[d] * index.strides[d];
    }
    bad = data[offset];
    found = outside(bad);
  }
  if (!found) return true;
  char where[kMaxDims * 24] = "";
  int used = 0;
  for (int d = 0; d < index.ndim; ++d) {
    used += std::snprintf(where + used, sizeof(where) - static_cast<std::size_t>(used), "%s%lld", d ? ", " : "",
                          static_cast<long long>(position[d]));
  }
  char which[32] = "";
  if (dim < 0 && ndim > 0) dim += ndim;
  if (ndim > 0) std::snprintf(which, sizeof(which), "dimension %lld of ", static_cast<long long>(dim));
  char text[512];
  if (size == 0) {
    std::snprintf(text, sizeof(text), "index %lld at [%s] lies outside %ssize 0, which has no elements",
                  static_cast<long long>(bad), where, which);
  } else {
    std::snprintf(text, sizeof(text), "index %lld at [%s] lies outside %ssize %lld (%lld to %lld)",
                  static_cast<long long>(bad), where, which, static_cast<long long>(size), static_cast<long long>(low),
                  static_cast<long long>(size - 1));
  }
  context->set_error(context, text);
  return false;
}

}  // namespace halfstep::cpu
