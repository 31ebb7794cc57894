// SPDX-License-Identifier: Apache-2.0
// ONNX's operators that move, join and choose elements, as recorded ops.
#include <algorithm>
#include <limits>
#include <numeric>

#include "halfstep/core/fail.h"
#include "halfstep/io/onnx_import_internal.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/view.h"

namespace halfstep::io::detail {
namespace {

using C = OnnxCall;
using Ints = std::vector<std::int64_t>;
using std::int64_t;

Ints sizes_of(const C& c, int i) {
  if (c.is_host(i)) return c.host(i).dims;
  const Shape& sizes = c.in(i).sizes();
  return {sizes.begin(), sizes.end()};
}
void shape(C& c) {
  Ints sizes = sizes_of(c, 0);
  const auto n = static_cast<int64_t>(sizes.size());
  const auto place = [&](int64_t i) { return std::clamp<int64_t>(i < 0 ? std::max(i, -n) + n : i, 0, n); };
  const int64_t start = place(c.integer("start", 0)), end = place(c.integer("end", n));
  sizes.assign(sizes.begin() + start, sizes.begin() + std::max(start, end));
  c.out(OnnxHost{.dtype = DType::i64, .dims = {static_cast<int64_t>(sizes.size())}, .floats = {}, .ints = sizes});
}
void size(C& c) {
  const Ints sizes = sizes_of(c, 0);
  const int64_t n = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  c.out(OnnxHost{.dtype = DType::i64, .dims = {}, .floats = {}, .ints = {n}});
}

void reshape_op(C& c) {
  const Tensor x = c.in(0);
  Ints sizes = c.ints(1);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 0 || c.integer("allowzero", 0) != 0) continue;
    if (i >= static_cast<std::size_t>(x.dim())) c.refuse("keeps a size that isn't there");
    sizes[i] = x.sizes()[static_cast<int>(i)];
  }
  c.out(x.reshape(sizes));
}
// [the sizes before axis, those from it on]
void flatten_op(C& c) {
  const Tensor x = c.in(0);
  const int64_t given = c.integer("axis", 1);
  const int axis = given == x.dim() ? x.dim() : c.dim(given, x.dim());
  if (axis == 1 && x.dim() >= 2) return c.out(flatten(x, 1));
  int64_t before = 1;
  for (int i = 0; i < axis; ++i) before *= x.size(i);
  int64_t after = 1;
  for (int i = axis; i < x.dim(); ++i) after *= x.size(i);
  c.out(x.reshape({before, after}));
}
void transpose_op(C& c) {
  const Tensor x = c.in(0);
  Ints perm(static_cast<std::size_t>(x.dim()));
  std::iota(perm.rbegin(), perm.rend(), 0);
  c.out(x.permute(c.list("perm").value_or(perm)));
}
Ints axes_given(C& c) { return c.has(1) ? c.ints(1) : c.list("axes").value_or(Ints{}); }
void unsqueeze_op(C& c) {
  Tensor x = c.in(0);
  Ints axes = axes_given(c);
  if (axes.size() > static_cast<std::size_t>(kMaxDims)) c.refuse("has too many axes");
  const int dims = x.dim() + static_cast<int>(axes.size());
  for (int64_t& a : axes) a = c.dim(a, dims);
  std::sort(axes.begin(), axes.end());
  for (const int64_t a : axes) x = x.unsqueeze(a);
  c.out(x);
}
void squeeze_op(C& c) {
  Tensor x = c.in(0);
  Ints axes = axes_given(c);
  if (axes.empty()) return c.out(x.squeeze());
  for (int64_t& a : axes) a = c.dim(a, x.dim());
  std::sort(axes.rbegin(), axes.rend());
  for (const int64_t a : axes) {
    if (x.size(a) != 1) c.refuse(fmt::format("takes away dimension {} of size {}", a, x.size(a)));
    x = x.squeeze(a);
  }
  c.out(x);
}
void expand_op(C& c) {
  const Tensor x = c.in(0);
  const Ints sizes = c.ints(1);
  Ints to(std::max(sizes.size(), static_cast<std::size_t>(x.dim())), 1);
  for (std::size_t i = 0; i < to.size(); ++i) {
    const int64_t a = i < static_cast<std::size_t>(x.dim()) ? x.size(x.dim() - 1 - static_cast<int>(i)) : 1;
    const int64_t b = i < sizes.size() ? sizes[sizes.size() - 1 - i] : 1;
    if (a != b && a != 1 && b != 1) c.refuse(fmt::format("sizes {} and {} don't go together", a, b));
    to[to.size() - 1 - i] = a == 1 ? b : a;
  }
  c.out(x.expand(to));
}
void tile_op(C& c) { c.out(tile(c.in(0), c.ints(1))); }

void concat_op(C& c) {
  std::vector<Tensor> parts;
  for (int i = 0; i < c.inputs(); ++i) parts.push_back(c.in(i));
  c.out(cat(parts, c.dim(c.integer("axis", 0), parts[0].dim())));
}
void split_op(C& c) {
  const Tensor x = c.in(0);
  const int axis = c.dim(c.integer("axis", 0), x.dim());
  const int64_t n = x.size(axis), parts = c.outputs();
  Ints sizes = c.has(1) ? c.ints(1) : c.list("split").value_or(Ints{});
  const int64_t each = (n + parts - 1) / parts;
  const bool given = c.has(1) || !sizes.empty();
  for (int64_t i = 0; !given && i < parts; ++i) sizes.push_back(std::clamp<int64_t>(n - i * each, 0, each));
  if (sizes.size() != static_cast<std::size_t>(parts)) c.refuse("expected a size for each result");
  int64_t begin = 0;
  for (int i = 0; i < parts; ++i) {
    const int64_t size = sizes[static_cast<std::size_t>(i)];
    if (size < 0 || size > n - begin) c.refuse("its parts don't fit the size");
    if (c.wanted(i)) c.out(x.narrow(axis, begin, size), i);
    begin += size;
  }
}

void slice_op(C& c) {
  Tensor x = c.in(0);
  const Ints starts = c.ints(1), ends = c.ints(2);
  Ints axes(starts.size()), steps(starts.size(), 1);
  std::iota(axes.begin(), axes.end(), 0);
  if (c.has(3)) axes = c.ints(3);
  if (c.has(4)) steps = c.ints(4);
  if (ends.size() != starts.size() || axes.size() != starts.size() || steps.size() != starts.size()) {
    c.refuse("expected as many ends, axes and steps as starts");
  }
  for (std::size_t i = 0; i < starts.size(); ++i) {
    const int axis = c.dim(axes[i], x.dim());
    const int64_t n = x.size(axis), step = steps[i];
    if (step == 0 || step == std::numeric_limits<int64_t>::min()) c.refuse("expected a step other than 0");
    int64_t from = starts[i] < 0 ? starts[i] + n : starts[i];
    int64_t to = ends[i] < 0 ? std::max(ends[i], -n - 1) + n : ends[i];
    if (step > 0) {
      from = std::clamp<int64_t>(from, 0, n);
      to = std::clamp<int64_t>(to, from, n);
      if (from != 0 || to != n || step != 1) x = x.slice(axis, from, to, step);
      continue;
    }
    from = std::clamp<int64_t>(from, -1, n - 1);
    to = std::clamp<int64_t>(to, -1, from);
    x = flip(x, {axis}).slice(axis, n - 1 - from, n - 1 - to, -step);
  }
  c.out(x);
}

Tensor whole_numbers(Ints numbers, Device device) {
  const auto n = static_cast<int64_t>(numbers.size());
  return host_tensor({.dtype = DType::i64, .dims = {n}, .floats = {}, .ints = std::move(numbers)}, device);
}

void gather_op(C& c) {
  const Tensor x = c.in(0);
  const int axis = c.dim(c.integer("axis", 0), x.dim());
  const int64_t n = x.size(axis);
  if (!c.is_host(1)) {
    const Tensor index = c.in(1);
    if (axis == 0 && x.dim() == 2 && !index.is_floating()) return c.out(embedding(index, x));
    Shape sizes;
    for (int i = 0; i < axis; ++i) sizes.push_back(x.size(i));
    for (const int64_t s : index.sizes()) sizes.push_back(s);
    for (int i = axis + 1; i < x.dim(); ++i) sizes.push_back(x.size(i));
    return c.out(index_select(x, axis, index.reshape({index.numel()})).reshape(sizes));
  }
  const OnnxHost& given = c.host(1);
  if (given.is_floating()) c.refuse("expected whole numbers as indices");
  Ints indices = given.ints;
  for (int64_t& i : indices) {
    if (i < -n || i >= n) c.refuse(fmt::format("index {} of {} elements", i, n));
    if (i < 0) i += n;
  }
  if (given.dims.empty()) return c.out(x.select(axis, indices[0]));
  Shape sizes;
  for (int i = 0; i < axis; ++i) sizes.push_back(x.size(i));
  for (const int64_t s : given.dims) sizes.push_back(s);
  for (int i = axis + 1; i < x.dim(); ++i) sizes.push_back(x.size(i));
  bool run = !indices.empty();
  for (std::size_t i = 1; i < indices.size(); ++i) run &= indices[i] == indices[i - 1] + 1;
  if (run) return c.out(x.narrow(axis, indices[0], static_cast<int64_t>(indices.size())).reshape(sizes));
  const Tensor index = whole_numbers(indices, x.device());
  c.out(index_select(x, axis, index).reshape(sizes));
}
// The last dimension of the indices names places in the first dimensions.
void gather_nd(C& c) {
  const Tensor x = c.in(0);
  const OnnxHost& index = c.host(1);
  if (c.integer("batch_dims", 0) != 0) c.refuse("batch_dims: expected 0");
  if (index.is_floating() || index.dims.empty() || index.dims.back() < 1 || index.dims.back() > x.dim()) {
    c.refuse("expected whole numbers for the first dimensions");
  }
  const auto named = static_cast<int>(index.dims.back());
  const std::size_t count = index.size() / static_cast<std::size_t>(named);
  Ints places(count, 0);
  int64_t all = 1;
  for (int d = 0; d < named; ++d) {
    const int64_t n = x.size(d);
    all *= n;
    for (std::size_t i = 0; i < count; ++i) {
      const int64_t at = index.ints[i * static_cast<std::size_t>(named) + static_cast<std::size_t>(d)];
      if (at < -n || at >= n) c.refuse(fmt::format("index {} of {} elements", at, n));
      places[i] = places[i] * n + (at < 0 ? at + n : at);
    }
  }
  Shape flat{all}, sizes;
  for (std::size_t i = 0; i + 1 < index.dims.size(); ++i) sizes.push_back(index.dims[i]);
  for (int d = named; d < x.dim(); ++d) {
    flat.push_back(x.size(d));
    sizes.push_back(x.size(d));
  }
  c.out(index_select(x.reshape(flat), 0, whole_numbers(places, x.device())).reshape(sizes));
}
void gather_elements(C& c) {
  const Tensor x = c.in(0);
  c.out(gather(x, c.dim(c.integer("axis", 0), x.dim()), c.in(1)));
}

// Blocks of channels become places (DepthToSpace), or the other way round.
void depth_to_space(C& c) {
  const Tensor x = c.in(0);
  const int64_t b = c.integer("blocksize", 0);
  const std::string mode = c.text("mode", "DCR");
  if (x.dim() != 4 || b < 1 || b > std::numeric_limits<std::int32_t>::max() || x.size(1) % (b * b) != 0) {
    c.refuse("expected images whose channels are a multiple of the block");
  }
  if (mode != "DCR" && mode != "CRD") c.refuse("mode: expected DCR or CRD");
  const int64_t n = x.size(0), depth = x.size(1) / (b * b), h = x.size(2), w = x.size(3);
  const Tensor y = mode == "DCR" ? x.reshape({n, b, b, depth, h, w}).permute({0, 3, 4, 1, 5, 2})
                                 : x.reshape({n, depth, b, b, h, w}).permute({0, 1, 4, 2, 5, 3});
  c.out(y.reshape({n, depth, h * b, w * b}));
}
void space_to_depth(C& c) {
  const Tensor x = c.in(0);
  const int64_t b = c.integer("blocksize", 0);
  if (x.dim() != 4 || b < 1 || x.size(2) % b != 0 || x.size(3) % b != 0) {
    c.refuse("expected images whose sides are a multiple of the block");
  }
  const int64_t n = x.size(0), depth = x.size(1), h = x.size(2) / b, w = x.size(3) / b;
  c.out(x.reshape({n, depth, h, b, w, b}).permute({0, 3, 5, 1, 2, 4}).reshape({n, depth * b * b, h, w}));
}

}  // namespace

void add_view_operators(OnnxOperators& t) {
  constexpr int kMany = 1 << 16;
  t["Shape"] = {.attributes = "start:i end:i", .run = shape};
  t["Size"].run = size;
  t["Reshape"] = {.least_inputs = 2, .most_inputs = 2, .attributes = "allowzero:i", .run = reshape_op};
  t["Flatten"] = {.attributes = "axis:i", .run = flatten_op};
  t["Transpose"] = {.attributes = "perm:I", .run = transpose_op};
  t["Unsqueeze"] = {.most_inputs = 2, .attributes = "axes:I", .run = unsqueeze_op};
  t["Squeeze"] = {.most_inputs = 2, .attributes = "axes:I", .run = squeeze_op};
  t["Expand"] = {.least_inputs = 2, .most_inputs = 2, .run = expand_op};
  t["Tile"] = {.least_inputs = 2, .most_inputs = 2, .run = tile_op};
  t["Concat"] = {.most_inputs = kMany, .attributes = "axis:i", .run = concat_op};
  t["Split"] = {.most_inputs = 2, .attributes = "axis:i split:I num_outputs:i", .run = split_op};
  t["Slice"] = {.least_inputs = 3, .most_inputs = 5, .run = slice_op};
  t["Gather"] = {.least_inputs = 2, .most_inputs = 2, .attributes = "axis:i", .run = gather_op};
  t["GatherElements"] = {.least_inputs = 2, .most_inputs = 2, .attributes = "axis:i", .run = gather_elements};
  t["DepthToSpace"] = {.attributes = "blocksize:i mode:s", .run = depth_to_space};
  t["SpaceToDepth"] = {.attributes = "blocksize:i", .run = space_to_depth};
  t["GatherND"] = {.least_inputs = 2, .most_inputs = 2, .attributes = "batch_dims:i", .run = gather_nd};
  // Of sizes and other constants, on the host alone.
  t["ScatterND"] = {.least_inputs = 3, .most_inputs = 3, .attributes = "reduction:s"};
  t["Range"] = {.least_inputs = 3, .most_inputs = 3};
  t["ConstantOfShape"] = {.attributes = "value:t"};
}

}  // namespace halfstep::io::detail
