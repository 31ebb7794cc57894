// SPDX-License-Identifier: Apache-2.0
// roi_align and its backward pass. A bin's samples are weighted sums of places, row by column, so that a region is a
// resampled image.
#include <cmath>
#include <limits>

#include "halfstep/backends/cpu/gather_planes.h"
#include "halfstep/backends/cpu/image_rows.h"

namespace halfstep::cpu {
namespace {

// A region along one dimension, in places of the input.
template <class T>
struct Extent {
  T start = 0, bin = 0;
  T samples = 0;        // of a bin
  bool finite = false;  // and not beyond all pictures

  Extent(T from, T to, std::int64_t bins, const RoiAlignAttributes& a) {
    const auto scale = static_cast<T>(a.spatial_scale), shift = static_cast<T>(a.aligned ? 0.5 : 0);
    start = from * scale - shift;
    T size = to * scale - shift - start;
    if (!a.aligned) size = std::max(size, T{1});
    bin = size / static_cast<T>(bins);
    samples = a.sampling_ratio > 0 ? static_cast<T>(a.sampling_ratio) : std::max(std::ceil(bin), T{0});
    constexpr T kMost = 0x1p31f;  // numbers of samples stay within int64
    finite = std::abs(start) < kMost && std::abs(size) < kMost;
  }
};

// The places of the samples of each bin, in tables of at most `room` taps; those outside have none.
template <class T>
bool bins_of(KernelContext* context, const Extent<T>& e, std::int64_t bins, std::int64_t size, Taps& to) {
  // Samples that can lie in [-1, size] are those between `first` and `last`, of a bin that may be far larger.
  const auto range = [&](std::int64_t bin, std::int64_t& first, std::int64_t& last) {
    const T from = e.start + static_cast<T>(bin) * e.bin, step = e.bin / e.samples;
    const auto at = [&](T place) { return step > 0 ? std::clamp((place - from) / step, T{0}, e.samples) : T{0}; };
    first = static_cast<std::int64_t>(std::max(at(T{-1}) - 2, T{0}));
    last = step > 0 ? static_cast<std::int64_t>(std::min(at(static_cast<T>(size)) + 2, e.samples))
                    : static_cast<std::int64_t>(std::min(e.samples, static_cast<T>(1024)));
  };
  std::int64_t count = e.finite ? 0 : bins;
  for (std::int64_t i = 0, first = 0, last = 0; e.finite && i < bins; ++i) {
    range(i, first, last);
    count += 2 * std::max<std::int64_t>(last - first, 0);
  }
  if (!allocate_taps(context, bins, count, to)) return false;
  std::int64_t n = 0;
  for (std::int64_t i = 0; i < bins; ++i) {
    if (!e.finite) {
      to.taps[n++] = {0, 0, std::numeric_limits<double>::quiet_NaN()};
    } else {
      std::int64_t first = 0, last = 0;
      range(i, first, last);
      for (std::int64_t k = first; k < last; ++k) {
        T place = e.start + static_cast<T>(i) * e.bin + (static_cast<T>(k) + T(0.5)) * e.bin / e.samples;
        if (place < T{-1} || place > static_cast<T>(size)) continue;
        place = std::max(place, T{0});
        const auto low = static_cast<std::int64_t>(place);
        if (low >= size - 1) {
          to.taps[n++] = {size - 1, 0, 1};
        } else {
          const T share = place - static_cast<T>(low);
          to.taps[n++] = {low, 0, static_cast<double>(1 - share)};
          to.taps[n++] = {low + 1, 1, static_cast<double>(share)};
        }
      }
    }
    to.first[i + 1] = n;
  }
  return true;
}

struct Region {
  std::int64_t picture = 0;
  double samples = 1;  // of a bin
  Taps rows, columns;
};

// Region k of `boxes`, on pictures of the sizes of `x`, with bins of the sizes of `y`.
template <class T>
Status region_of(KernelContext* context, const RoiAlignAttributes& a, const TensorView& boxes, std::int64_t k,
                 const TensorView& x, const TensorView& y, Region& to) {
  const T* box = static_cast<const T*>(boxes.data) + k * boxes.strides[0];
  const std::int64_t step = boxes.strides[1];
  if (!(box[0] >= 0 && box[0] < static_cast<T>(x.sizes[0]))) {
    context->set_error(context, "a box has the number of a picture that isn't in the input");
    return Status::failed;
  }
  to.picture = static_cast<std::int64_t>(box[0]);
  const Extent<T> rows(box[2 * step], box[4 * step], y.sizes[2], a), columns(box[step], box[3 * step], y.sizes[3], a);
  to.samples = std::max(1.0, static_cast<double>(rows.samples) * static_cast<double>(columns.samples));
  if (!rows.finite || !columns.finite) to.samples = 1;
  return bins_of(context, rows, y.sizes[2], x.sizes[2], to.rows) &&
                 bins_of(context, columns, y.sizes[3], x.sizes[3], to.columns)
             ? Status::ok
             : Status::out_of_memory;
}

template <class T>
Status forward(KernelContext* context, const TensorView& x, const TensorView& boxes, const TensorView& y,
               const RoiAlignAttributes& a) {
  for (std::int64_t k = 0; k < boxes.sizes[0] && y.numel > 0; ++k) {
    Region region;
    if (const Status s = region_of<T>(context, a, boxes, k, x, y, region); s != Status::ok) return s;
    const std::int64_t one_picture[] = {1, x.sizes[1], x.sizes[2], x.sizes[3]};
    const std::int64_t one_region[] = {1, y.sizes[1], y.sizes[2], y.sizes[3]};
    TensorView from = x, to = y;
    from.sizes = one_picture;
    to.sizes = one_region;
    from.numel = x.sizes[1] * x.sizes[2] * x.sizes[3];
    to.numel = y.sizes[1] * y.sizes[2] * y.sizes[3];
    from.data = static_cast<T*>(x.data) + region.picture * x.strides[0];
    to.data = static_cast<T*>(y.data) + k * y.strides[0];
    gather_planes(from, to, region.rows, region.columns, {.all = region.samples});
  }
  return Status::ok;
}

// Each thread has channels to itself and takes all regions in their order, so that sums have one order.
template <class T>
Status backward(KernelContext* context, const TensorView& g, const TensorView& boxes, const TensorView& dx,
                const RoiAlignAttributes& a) {
  const std::int64_t count = boxes.sizes[0], channels = dx.sizes[1];
  auto* regions =
      static_cast<Region*>(context->workspace(context, static_cast<std::size_t>(count + 1) * sizeof(Region)));
  if (!regions) return Status::out_of_memory;
  std::int64_t work = 1;
  for (std::int64_t k = 0; k < count; ++k) {
    regions[k] = {};
    if (const Status s = region_of<T>(context, a, boxes, k, dx, g, regions[k]); s != Status::ok) return s;
    work += regions[k].rows.first[g.sizes[2]] * regions[k].columns.first[g.sizes[3]];
  }
  const ImageStrides from(g), to(dx);
  T* out = static_cast<T*>(dx.data);
  std::fill_n(out, dx.numel, T{0});
  parallel_for(channels, row_grain(work), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = 0; k < count; ++k) {
      const Region& region = regions[k];
      for (std::int64_t i = 0; i < g.sizes[2]; ++i) {
        for (std::int64_t j = 0; j < g.sizes[3]; ++j) {
          const T* grad = static_cast<const T*>(g.data) + from.at(k, 0, i, j);
          for (const Tap* r = region.rows.begin(i); r != region.rows.end(i); ++r) {
            for (const Tap* c = region.columns.begin(j); c != region.columns.end(j); ++c) {
              const T weight = static_cast<T>(r->weight * c->weight / region.samples);
              T* place = out + to.at(region.picture, 0, r->at, c->at);
              for (std::int64_t ch = begin; ch < end; ++ch) place[ch * to.c] += weight * grad[ch * from.c];
            }
          }
        }
      }
    }
  });
  return Status::ok;
}

Status roi_align(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const RoiAlignAttributes*>(attributes);
  return in[0].dtype == DType::f64 ? forward<double>(context, in[0], in[1], out[0], a)
                                   : forward<float>(context, in[0], in[1], out[0], a);
}
Status roi_align_backward(KernelContext* context, const TensorView* in, int, TensorView* out, int,
                          const void* attributes) {
  const auto& a = *static_cast<const RoiAlignAttributes*>(attributes);
  return in[0].dtype == DType::f64 ? backward<double>(context, in[0], in[1], out[0], a)
                                   : backward<float>(context, in[0], in[1], out[0], a);
}

const RegisterCpuKernel roi_align_kernels[] = {
    {"roi_align", {DType::f32, DType::f64}, roi_align},
    {"roi_align_backward", {DType::f32, DType::f64}, roi_align_backward},
};

}  // namespace
}  // namespace halfstep::cpu
