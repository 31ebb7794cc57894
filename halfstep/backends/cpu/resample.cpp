// SPDX-License-Identifier: Apache-2.0
// interpolate and its backward pass, as weighted sums over tables of taps.
#include <cmath>
#include <cstring>

#include "halfstep/backends/cpu/gather_planes.h"
#include "halfstep/backends/cpu/image_rows.h"

namespace halfstep::cpu {
namespace {

// The index is taken in float32 whatever the dtype, as PyTorch does it: in float64 some fall on the other side of a
// whole number.
std::int64_t nearest(const InterpolateAttributes& a, int d, std::int64_t i, std::int64_t from, std::int64_t to) {
  if (a.mode == 0 && to == from) return i;
  if (a.mode == 0 && to == 2 * from) return i / 2;
  const float place = (static_cast<float>(i) + (a.mode == 0 ? 0.0f : 0.5f)) * static_cast<float>(a.scale[d]);
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(std::floor(place)), 0, from - 1);
}

// Where the places of one dimension of the result come from; false without memory.
bool taps_of(KernelContext* context, const InterpolateAttributes& a, int d, std::int64_t from, std::int64_t to,
             Taps& taps) {
  if (!allocate_taps(context, to, 2 * to, taps)) return false;
  std::int64_t n = 0;
  for (std::int64_t i = 0; i < to; ++i) {
    if (a.mode != 2) {
      taps.taps[n++] = {nearest(a, d, i, from, to), 0, 1};
    } else {
      const auto at = static_cast<double>(i);
      double place = a.align_corners ? at * a.scale[d] : (at + 0.5) * a.scale[d] - 0.5;
      if (from == to) place = at;
      place = std::clamp(place, 0.0, static_cast<double>(from - 1));
      const auto low = static_cast<std::int64_t>(place);
      const double share = place - static_cast<double>(low);
      taps.taps[n++] = {low, 0, 1 - share};
      if (share > 0) taps.taps[n++] = {low + 1, 1, share};
    }
    taps.first[i + 1] = n;
  }
  return true;
}

// Places of bytes, which nearest neighbours only move.
Status forward_bytes(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = *static_cast<const InterpolateAttributes*>(p);
  const TensorView &x = in[0], &y = out[0];
  if (a.mode == 2) return Status::unsupported;
  if (y.numel == 0) return Status::ok;
  Taps rows, columns;
  if (!taps_of(context, a, 0, x.sizes[2], y.sizes[2], rows) ||
      !taps_of(context, a, 1, x.sizes[3], y.sizes[3], columns)) {
    return Status::out_of_memory;
  }
  const ImageStrides from(x), to(y);
  const auto* source = elements<std::uint8_t>(x);
  auto* target = elements<std::uint8_t>(y);
  if (channels_side_by_side(x, y)) {
    for_image_rows(y, 1, [&](std::int64_t n, std::int64_t h, std::int64_t c, std::int64_t channels) {
      for (std::int64_t w = 0; w < columns.size; ++w) {
        std::memcpy(target + to.at(n, c, h, w), source + from.at(n, c, rows.begin(h)->at, columns.begin(w)->at),
                    static_cast<std::size_t>(channels));
      }
    });
    return Status::ok;
  }
  for_plane_rows(y, 4, [&](std::int64_t n, std::int64_t c, std::int64_t h) {
    for (std::int64_t w = 0; w < columns.size; ++w) {
      target[to.at(n, c, h, w)] = source[from.at(n, c, rows.begin(h)->at, columns.begin(w)->at)];
    }
  });
  return Status::ok;
}

Status interpolate_kernel(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = *static_cast<const InterpolateAttributes*>(p);
  const TensorView &x = in[0], &y = out[0];
  Taps rows, columns;
  if (!taps_of(context, a, 0, x.sizes[2], y.sizes[2], rows) ||
      !taps_of(context, a, 1, x.sizes[3], y.sizes[3], columns)) {
    return Status::out_of_memory;
  }
  gather_planes(x, y, rows, columns, {});
  return Status::ok;
}

Status interpolate_backward_kernel(KernelContext* context, const TensorView* in, int, TensorView* out, int,
                                   const void* p) {
  const auto& a = *static_cast<const InterpolateAttributes*>(p);
  const TensorView &g = in[0], &dx = out[0];
  Taps rows, columns, by_row, by_column;
  if (!taps_of(context, a, 0, dx.sizes[2], g.sizes[2], rows) ||
      !taps_of(context, a, 1, dx.sizes[3], g.sizes[3], columns) || !reversed_taps(context, rows, dx.sizes[2], by_row) ||
      !reversed_taps(context, columns, dx.sizes[3], by_column)) {
    return Status::out_of_memory;
  }
  gather_planes(g, dx, by_row, by_column, {});
  return Status::ok;
}

const RegisterCpuKernel resample_kernels[] = {
    {"interpolate", kFloatingDTypes, interpolate_kernel},
    {"interpolate", {DType::u8, DType::i8}, forward_bytes},
    {"interpolate_backward", kFloatingDTypes, interpolate_backward_kernel},
};

}  // namespace
}  // namespace halfstep::cpu
