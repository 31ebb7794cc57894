// SPDX-License-Identifier: Apache-2.0
// Non-maximum suppression: boxes by class and falling score, each class on its own.
#include <algorithm>
#include <cmath>

#include "halfstep/ops/attributes.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

template <class T>
struct Candidate {
  T score;
  std::int64_t index, rank, group;  // in the input, by falling score, and the class
};

// As sort does it: NaN is the greatest, and equal scores keep their order.
template <class T>
bool better(const Candidate<T>& a, const Candidate<T>& b) {
  const bool a_nan = a.score != a.score, b_nan = b.score != b.score;
  if (a_nan != b_nan) return a_nan;
  if (a.score != b.score && !a_nan) return a.score > b.score;
  return a.index < b.index;
}

// The boxes in the order in which they are compared, one array a number.
template <class T>
struct Columns {
  T *left, *top, *right, *bottom, *area, *alive;
};

// Boxes first to last are of one class; `alive` becomes 0 where one of a better score overlaps by more than `most`.
template <class T>
void suppress(const Columns<T>& c, std::int64_t first, std::int64_t last, T most, std::int64_t limit) {
  std::int64_t kept = 0;
  for (std::int64_t i = first; i < last; ++i) {
    if (c.alive[i] == 0) continue;
    if (kept == limit) {
      std::fill(c.alive + i, c.alive + last, T{0});
      return;
    }
    ++kept;
    const T left = c.left[i], top = c.top[i], right = c.right[i], bottom = c.bottom[i], area = c.area[i];
    for (std::int64_t j = i + 1; j < last; ++j) {
      const T width = std::min(right, c.right[j]) - std::max(left, c.left[j]);
      const T height = std::min(bottom, c.bottom[j]) - std::max(top, c.top[j]);
      const T both = std::max(width, T{0}) * std::max(height, T{0});
      const T share = both / (area + c.area[j] - both);
      c.alive[j] = share > most ? T{0} : c.alive[j];
    }
  }
}

template <class T>
Status run(KernelContext* context, const TensorView* in, int num_in, TensorView* out, const NmsAttributes& a) {
  const TensorView &boxes = in[0], &scores = in[1];
  const bool classed = num_in > 2 && in[2].data;
  const std::int64_t n = boxes.sizes[0], limit = a.limit < 0 ? n : a.limit;
  const auto size = static_cast<std::size_t>(n);
  auto* list = static_cast<Candidate<T>*>(context->workspace(context, (size + 1) * sizeof(Candidate<T>)));
  auto* numbers = static_cast<T*>(context->workspace(context, (6 * size + 1) * sizeof(T)));
  if (!list || !numbers) return Status::out_of_memory;

  for (std::int64_t i = 0; i < n; ++i) {
    list[i] = {static_cast<const T*>(scores.data)[i * scores.strides[0]], i, 0,
               classed ? static_cast<const std::int64_t*>(in[2].data)[i * in[2].strides[0]] : 0};
  }
  std::sort(list, list + n, better<T>);
  for (std::int64_t i = 0; i < n; ++i) list[i].rank = i;
  if (classed) {
    std::sort(list, list + n,
              [](const auto& p, const auto& q) { return p.group != q.group ? p.group < q.group : p.rank < q.rank; });
  }

  const Columns<T> c{numbers, numbers + n, numbers + 2 * n, numbers + 3 * n, numbers + 4 * n, numbers + 5 * n};
  for (std::int64_t i = 0; i < n; ++i) {
    const T* box = static_cast<const T*>(boxes.data) + list[i].index * boxes.strides[0];
    const std::int64_t step = boxes.strides[1];
    c.left[i] = box[0], c.top[i] = box[step], c.right[i] = box[2 * step], c.bottom[i] = box[3 * step];
    c.area[i] = (c.right[i] - c.left[i]) * (c.bottom[i] - c.top[i]);
    c.alive[i] = 1;
  }
  // The threshold is a double: the largest T that isn't above it decides as it does.
  T most = static_cast<T>(a.iou_threshold);
  if (static_cast<double>(most) > a.iou_threshold) most = std::nextafter(most, T{-1});
  for (std::int64_t first = 0; first < n;) {
    std::int64_t last = first + 1;
    while (last < n && list[last].group == list[first].group) ++last;
    suppress(c, first, last, most, limit);
    first = last;
  }

  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    if (c.alive[i] != 0) list[kept++] = list[i];
  }
  if (classed) std::sort(list, list + kept, [](const auto& p, const auto& q) { return p.rank < q.rank; });
  kept = std::min(kept, limit);
  auto* result = static_cast<std::int64_t*>(out[0].data);
  for (std::int64_t i = 0; i < n; ++i) result[i] = i < kept ? list[i].index : 0;
  *static_cast<std::int64_t*>(out[1].data) = kept;
  return Status::ok;
}

Status nms(KernelContext* context, const TensorView* in, int num_in, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const NmsAttributes*>(attributes);
  return in[0].dtype == DType::f64 ? run<double>(context, in, num_in, out, a) : run<float>(context, in, num_in, out, a);
}

const RegisterCpuKernel nms_kernels[] = {{"nms", {DType::f32, DType::f64}, nms}};

}  // namespace
}  // namespace halfstep::cpu
