// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/index_check.h"

#include <atomic>
#include <cstdio>

#include "halfstep/backends/cpu/strided_loop.h"

namespace halfstep::cpu {

// In 64 bits that wrap, v - low and size - 1 - v are both without the sign's bit just for what lies inside.
bool any_outside(const std::int64_t* index, std::int64_t n, std::int64_t low, std::int64_t size) {
  const auto first = static_cast<std::uint64_t>(low), last = static_cast<std::uint64_t>(size) - 1;
  std::uint64_t signs = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto v = static_cast<std::uint64_t>(index[i]);
    signs |= (v - first) | (last - v);
  }
  return signs >> 63 != 0;
}

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
    std::atomic<bool> any{false};
    parallel_for(index.numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
      if (any_outside(data + begin, end - begin, low, size)) any.store(true, std::memory_order_relaxed);
    });
    if (!any.load(std::memory_order_relaxed)) return true;
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
