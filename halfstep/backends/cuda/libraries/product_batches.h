// SPDX-License-Identifier: Apache-2.0
// Products over several dimensions of batches, of which the library knows one: plain arithmetic, which tests check on
// the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "libraries/product.h"

namespace hscuda {

/// A dimension that products are repeated over: steps of the three matrices, in elements. Where c's step is 0, the
/// products are added up.
struct BatchDim {
  int64_t size = 1;
  int64_t a = 0, b = 0, c = 0;
};

/// Calls f(product) for the fewest products that make those over all `dims` (the slowest first) and p's own batch of 1:
/// dimensions that lie behind each other become one, the largest is the product's batch, the others are walked over.
/// f returns a status; one that isn't 0 ends the walk and is returned.
template <int N, class F>
int for_batches(const Product& p, const BatchDim (&dims)[N], F&& f) {
  BatchDim merged[N];
  int n = 0;
  for (const BatchDim& d : dims) {
    if (d.size == 0) return 0;
    if (d.size == 1) continue;
    // Sums stay dimensions of their own: their products must come one after the other.
    if (n > 0 && d.c != 0 && merged[n - 1].c == d.c * d.size && merged[n - 1].a == d.a * d.size &&
        merged[n - 1].b == d.b * d.size) {
      merged[n - 1] = {merged[n - 1].size * d.size, d.a, d.b, d.c};
    } else {
      merged[n++] = d;
    }
  }
  int batch = -1;
  for (int i = 0; i < n; ++i) {
    if (merged[i].c != 0 && (batch < 0 || merged[i].size > merged[batch].size)) batch = i;
  }
  const int64_t item = float_size(p.dtype), out_item = float_size(p.out_dtype);
  int64_t index[N] = {};
  while (true) {
    Product one = p;
    int64_t a = 0, b = 0, c = 0;
    for (int i = 0; i < n; ++i) {
      a += index[i] * merged[i].a, b += index[i] * merged[i].b, c += index[i] * merged[i].c;
      if (merged[i].c == 0 && index[i] > 0) one.accumulate = true;
    }
    one.a.data = static_cast<char*>(p.a.data) + a * item;
    one.b.data = static_cast<char*>(p.b.data) + b * item;
    one.c.data = static_cast<char*>(p.c.data) + c * out_item;
    if (batch >= 0) {
      one.batch = merged[batch].size;
      one.a.batch = merged[batch].a, one.b.batch = merged[batch].b, one.c.batch = merged[batch].c;
    }
    if (const int status = f(one)) return status;
    int i = n - 1;
    for (; i >= 0; --i) {
      if (i == batch) continue;
      if (++index[i] < merged[i].size) break;
      index[i] = 0;
    }
    if (i < 0) return 0;
  }
}

/// What a, b and c do where `heads` heads of attention are walked: `groups` neighbouring ones share a matrix, the steps
/// are from one matrix to the next. Writes three dimensions; false where the groups don't nest in each other. One of
/// the groups is 1.
inline bool head_dims(int64_t heads, const int64_t (&groups)[3], const int64_t (&steps)[3], BatchDim* dims) {
  int64_t sorted[3] = {groups[0], groups[1], groups[2]};
  std::sort(sorted, sorted + 3);
  const int64_t small = sorted[1], large = sorted[2];
  if (sorted[0] != 1 || large % small != 0 || heads % large != 0) return false;
  const int64_t sizes[] = {heads / large, large / small, small}, units[] = {large, small, 1};
  for (int i = 0; i < 3; ++i) {
    int64_t step[3];
    for (int t = 0; t < 3; ++t) step[t] = units[i] >= groups[t] ? steps[t] * (units[i] / groups[t]) : 0;
    dims[i] = {sizes[i], step[0], step[1], step[2]};
  }
  return true;
}

}  // namespace hscuda
