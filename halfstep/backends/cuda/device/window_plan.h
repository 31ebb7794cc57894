// SPDX-License-Identifier: Apache-2.0
// Which places of an image go with which: windows of pooling, neighbours of resampling, edges of padding, and the
// reverse of each, one dimension at a time. Plain arithmetic, which tests check on the host.
#pragma once

#include <cmath>

#include "device/geometry.h"

namespace hscuda {

/// Larger images are for the CPU: places are 32 bits here.
inline constexpr int64_t kMostPlaces = int64_t{1} << 30;

/// Numbers [first, end).
struct Range {
  int first, end;
};

HSCUDA_BOTH constexpr int larger(int a, int b) { return a > b ? a : b; }
HSCUDA_BOTH constexpr int smaller(int a, int b) { return a < b ? a : b; }

/// The windows along one dimension of an image. Window i has the places start(i) + k step, k from its range.
struct Windows {
  int size = 1, count = 1;  ///< places of the image, windows
  int kernel = 1, stride = 1, padding = 0, step = 1;
  bool adaptive = false;
  int widest = 1;  ///< places of the largest window, those outside of the image counted
  Divisor by_stride;

  HSCUDA_BOTH int start(int i) const {
    return adaptive ? static_cast<int>(static_cast<int64_t>(i) * size / count) : i * stride - padding;
  }
  /// The numbers of the window's places that lie in the image.
  HSCUDA_BOTH Range inside(int i) const {
    const int begin = start(i);
    if (adaptive) {
      return {0, static_cast<int>((static_cast<int64_t>(i + 1) * size + count - 1) / count) - begin};
    }
    const int first = begin < 0 ? (-begin + step - 1) / step : 0;
    const int end = begin >= size ? 0 : (size - begin + step - 1) / step;
    return {first, larger(first, smaller(kernel, end))};
  }
  /// Windows among which are all that have a place.
  HSCUDA_BOTH Range of_place(int place) const {
    if (adaptive) {
      const int64_t n = count;
      return {static_cast<int>(place * n / size),
              smaller(count, static_cast<int>(((place + 1) * n + size - 1) / size))};
    }
    const int at = place + padding, before = at - (kernel - 1) * step;
    const int first = before <= 0 ? 0 : static_cast<int>(by_stride.divide(static_cast<uint32_t>(before + stride - 1)));
    return {first, smaller(count, static_cast<int>(by_stride.divide(static_cast<uint32_t>(at))) + 1)};
  }
  /// The number of a place in a window, -1 where it is not in it.
  HSCUDA_BOTH int number(int i, int place) const {
    const int from = place - start(i);
    if (adaptive || step == 1) return from;
    return from % step == 0 ? from / step : -1;
  }
  /// What an average of window i is divided by.
  HSCUDA_BOTH int places(int i, bool with_padding) const {
    if (with_padding) return smaller(start(i) + kernel, size + padding) - start(i);
    const Range r = inside(i);
    return r.end - r.first;
  }
};

inline Windows fixed_windows(int64_t size, int64_t count, int64_t kernel, int64_t stride, int64_t padding,
                             int64_t dilation) {
  Windows w;
  w.size = static_cast<int>(size);
  w.count = static_cast<int>(count);
  w.kernel = w.widest = static_cast<int>(kernel);
  w.stride = static_cast<int>(std::min(stride, kMostPlaces));  // a larger one leaves a single window all the same
  w.padding = static_cast<int>(padding);
  w.step = kernel == 1 ? 1 : static_cast<int>(dilation);
  w.by_stride = Divisor(static_cast<uint32_t>(w.stride));
  return w;
}
inline Windows adaptive_windows(int64_t size, int64_t count) {
  Windows w;
  w.size = static_cast<int>(size);
  w.count = static_cast<int>(count);
  w.adaptive = true;
  // As op layer and CPU number them: the widest there is.
  w.widest = 0;
  for (int i = 0; i < w.count; ++i) w.widest = larger(w.widest, w.inside(i).end);
  return w;
}
/// Whether the averages of all windows have one divisor.
inline bool one_divisor(const Windows& w, bool with_padding) {
  if (w.adaptive) return w.size % w.count == 0;
  for (int i = 1; i < w.count; ++i) {
    if (w.places(i, with_padding) != w.places(0, with_padding)) return false;
  }
  return true;
}

/// How one dimension of an image is resampled.
struct Resampling {
  int from = 1, to = 1;
  double scale = 1;  ///< places of the source for one of the result
  int mode = 0;      ///< 0 nearest, 1 nearest_exact, 2 bilinear
  bool align_corners = false;

  struct Taps {
    int low;       ///< the place of the source
    double share;  ///< of the place behind it; 0: there is none
  };
  HSCUDA_BOTH Taps taps(int i) const {
    if (mode != 2) {
      if (mode == 0 && to == from) return {i, 0};
      if (mode == 0 && to == 2 * from) return {i / 2, 0};
      // In float32 whatever the dtype: in float64 some fall on the other side of a whole number.
      const float place = (static_cast<float>(i) + (mode == 0 ? 0.0f : 0.5f)) * static_cast<float>(scale);
      const float last = static_cast<float>(from - 1);
      return {smaller(from - 1, static_cast<int>(floorf(place < last ? place : last))), 0};
    }
    const auto at = static_cast<double>(i), last = static_cast<double>(from - 1);
    double place = align_corners ? at * scale : (at + 0.5) * scale - 0.5;
    if (from == to) place = at;
    place = place < 0 ? 0 : (place > last ? last : place);
    const int low = static_cast<int>(place);
    return {low, place - static_cast<double>(low)};
  }
  /// Places of the result among which are all that a place of the source goes into.
  HSCUDA_BOTH Range of_place(int place) const {
    if (!(scale > 0)) return {0, to};
    // Nearest places are off by what float32 rounds.
    const double wide = (from == to ? 1 : 1 / scale), margin = 2 + to / (1 << 18) + wide;
    const double middle = from == to ? place : (place + 0.5) / scale;
    const double first = middle - wide - margin, last = middle + wide + margin;
    return {place == 0 || first < 0 ? 0 : (first > to ? to : static_cast<int>(first)),
            place == from - 1 || last > to ? to : static_cast<int>(last)};
  }
  /// How much of a place of the source there is in place i of the result.
  HSCUDA_BOTH double weight(int i, int place) const {
    const Taps t = taps(i);
    return t.low == place ? 1 - t.share : (t.low + 1 == place ? t.share : 0);
  }
};

/// One dimension of a padded tensor.
struct PadDim {
  int64_t size = 1, inner = 1;        ///< with padding, and without
  int64_t before = 0, after = 0;      ///< negative: cut off
  int64_t padded_step = 0, step = 0;  ///< strides of the padded tensor and of the other
  int mode = 0;                       ///< 0 constant, 1 reflect, 2 replicate, 3 circular
  Divisor padded_divisor, divisor;    ///< by size and inner, where these fit

  HSCUDA_BOTH bool plain() const { return before == 0 && after == 0; }
  /// Where place i of the padded tensor comes from; -1: from nowhere.
  HSCUDA_BOTH int64_t source(int64_t i) const {
    const int64_t at = i - before;
    if (mode == 3) {
      // What was cut off doesn't come back at the other side.
      const int64_t low = before < 0 ? -before : 0, n = inner - low - (after < 0 ? -after : 0);
      return low + ((at - low) % n + n) % n;
    }
    if (at >= 0 && at < inner) return at;
    if (mode == 1) return at < 0 ? -at : 2 * (inner - 1) - at;
    if (mode == 2) return at < 0 ? 0 : inner - 1;
    return -1;
  }

  /// The places of the padded tensor that a place was copied to, in order: start, start + step, ... or, mirrored, up to
  /// three of which the k-th is at(k). They have names, as an array would lie in a kernel's local memory.
  struct Copies {
    int64_t start = 0, step = 1, count = 0;
    int64_t second = 0, third = 0;
    bool listed = false;
    HSCUDA_BOTH int64_t at(int64_t k) const {
      if (!listed) return start + k * step;
      return k == 0 ? start : k == 1 ? second : third;
    }
    HSCUDA_BOTH void list(bool there, int64_t place) {
      if (!there) return;
      (count == 0 ? start : count == 1 ? second : third) = place;
      ++count;
    }
  };
  HSCUDA_BOTH Copies copies(int64_t place) const {
    Copies c;
    const int64_t at = place + before;
    const bool there = at >= 0 && at < size;
    if (mode == 1 && !plain()) {
      c.listed = true;
      const int64_t low = before - place, high = before + 2 * (inner - 1) - place;
      c.list(place > 0 && low >= 0 && low < size, low);
      c.list(there, at);
      c.list(place < inner - 1 && high >= 0 && high < size, high);
    } else if (mode == 2 && !plain()) {
      const int64_t first = place == 0 ? 0 : at, end = place == inner - 1 ? size : at + 1;
      c.start = first < 0 ? 0 : first;
      const int64_t last = end < size ? end : size;
      c.count = last > c.start ? last - c.start : 0;
    } else if (mode == 3 && !plain()) {
      const int64_t low = before < 0 ? -before : 0, n = inner - low - (after < 0 ? -after : 0);
      if (place < low || place >= low + n) return c;
      c.step = n;
      c.start = at % n;  // at is not negative here
      c.count = c.start < size ? (size - c.start + n - 1) / n : 0;
    } else {
      c.start = at;
      c.count = there ? 1 : 0;
    }
    return c;
  }
};

/// The dimensions of a padded tensor in the order of its memory, the innermost first; those without padding that lie
/// behind each other in both are one.
struct PadPlan {
  int n = 0;
  PadDim dims[HALFSTEP_MAX_DIMS];
};
inline PadPlan pad_plan(const halfstep_tensor& padded, const halfstep_tensor& other, const halfstep_pad_attributes& a) {
  int order[HALFSTEP_MAX_DIMS], count = 0;
  for (int i = padded.ndim - 1; i >= 0; --i) {
    if (padded.sizes[i] == 1 && a.before.values[i] == 0 && a.after.values[i] == 0) continue;
    order[count++] = i;
  }
  std::stable_sort(order, order + count, [&](int x, int y) { return padded.strides[x] < padded.strides[y]; });
  PadPlan plan;
  for (int k = 0; k < count; ++k) {
    const int i = order[k];
    PadDim dim;
    dim.size = padded.sizes[i];
    dim.inner = other.sizes[i];
    dim.before = a.before.values[i];
    dim.after = a.after.values[i];
    dim.padded_step = padded.strides[i];
    dim.step = other.strides[i];
    dim.mode = a.mode;
    PadDim* last = plan.n > 0 ? &plan.dims[plan.n - 1] : nullptr;
    if (last && last->plain() && dim.plain() && dim.padded_step == last->padded_step * last->size &&
        dim.step == last->step * last->inner) {
      last->size *= dim.size;
      last->inner *= dim.inner;
    } else {
      plan.dims[plan.n++] = dim;
    }
  }
  return plan;
}
/// Elements that move as one: a power of 2, at most `most`, of the innermost dimension that has no padding, at whose
/// multiples all others begin.
inline int pad_width(const PadPlan& plan, int most) {
  if (plan.n == 0 || !plan.dims[0].plain() || plan.dims[0].padded_step != 1 || plan.dims[0].step != 1) return 1;
  const auto fits = [&](int64_t width) {
    if (plan.dims[0].size % width != 0) return false;
    for (int d = 1; d < plan.n; ++d) {
      if (plan.dims[d].padded_step % width != 0 || plan.dims[d].step % width != 0) return false;
    }
    return true;
  };
  int width = most;
  while (width > 1 && !fits(width)) width /= 2;
  return width;
}
/// The plan in units of `width` elements.
inline PadPlan in_units(PadPlan plan, int width) {
  for (int d = 0; d < plan.n; ++d) {
    PadDim& dim = plan.dims[d];
    if (d == 0 && width > 1) {
      dim.size /= width;
      dim.inner /= width;
    } else {
      dim.padded_step /= width;
      dim.step /= width;
    }
  }
  return plan;
}

/// The order in which threads go over images [N, C, H, W]: channels first where they lie side by side, else columns.
struct ImageOrder {
  bool channels_first = true;
  int64_t images = 0;     ///< samples
  int64_t per_image = 0;  ///< units of one
  Divisor channels, height, width;

  struct Place {
    int n, c, h, w;
  };
  /// Unit i of the images; c counts units of channels.
  HSCUDA_BOTH Place place(uint32_t i) const {
    Place p;
    const auto take = [&](const Divisor& d) {
      const uint32_t next = d.divide(i), index = i - next * d.divisor;
      i = next;
      return static_cast<int>(index);
    };
    if (channels_first) {
      p.c = take(channels);
      p.w = take(width);
      p.h = take(height);
    } else {
      p.w = take(width);
      p.h = take(height);
      p.c = take(channels);
    }
    p.n = static_cast<int>(i);
    return p;
  }
};
/// For a tensor that is written; `width` channels are a unit.
inline ImageOrder image_order(const halfstep_tensor& t, int width) {
  ImageOrder order;
  order.images = t.sizes[0];
  const int64_t channels = t.sizes[1] / width, h = t.sizes[2], w = t.sizes[3];
  order.per_image = channels * h * w;
  order.channels_first = width > 1 || t.strides[1] < (w > 1 ? t.strides[3] : t.strides[2]);
  order.channels = Divisor(static_cast<uint32_t>(channels));
  order.height = Divisor(static_cast<uint32_t>(h));
  order.width = Divisor(static_cast<uint32_t>(w));
  return order;
}

}  // namespace hscuda
