// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "halfstep/backends/cpu/window_lines.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/window_lines.h"

HWY_BEFORE_NAMESPACE();
namespace halfstep::cpu {
namespace HWY_NAMESPACE {

// Whole vectors: what one row writes behind its end, the next one writes over.
void cut_windows_of_target(const WindowLines& w) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::CappedTag<float, WindowLines::kBehind> d;
  const hn::Half<decltype(d)> h;  // for what is left: fewer of them lie in two lines of the cache
  const auto half = static_cast<std::int64_t>(hn::Lanes(h));
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t columns = w.rows * w.width, end = round_up(columns, 16);
  const float* place = w.lines;
  float* to = w.to;
  for (std::int64_t q = 0; q < w.places; ++q, place += w.step, to += w.stride) {
    const float* HWY_RESTRICT from = place;
    float* HWY_RESTRICT row = to;
    for (std::int64_t k = 0; k < w.rows; ++k, from += w.line, row += w.width) {
      std::int64_t i = 0;
      for (; i + half < w.width; i += lanes) hn::StoreU(hn::LoadU(d, from + i), d, row + i);
      if (i < w.width) hn::StoreU(hn::LoadU(h, from + i), h, row + i);
    }
    for (std::int64_t i = columns; i < end; i += lanes) hn::StoreU(hn::Zero(d), d, to + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace halfstep::cpu {
HWY_EXPORT(cut_windows_of_target);
void cut_windows(const WindowLines& w) { HWY_DYNAMIC_DISPATCH(cut_windows_of_target)(w); }
}  // namespace halfstep::cpu
#endif
