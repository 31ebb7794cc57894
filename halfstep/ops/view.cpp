// SPDX-License-Identifier: Apache-2.0
#include "halfstep/ops/view.h"

#include <algorithm>

#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/op.h"

namespace halfstep {
namespace {

// Strides under which the elements of a tensor appear in another shape without a copy, if there are such.
std::optional<Shape> strides_for_view(const Shape& sizes, const Shape& strides, const Shape& wanted) {
  if (sizes.numel() == 0) return contiguous_strides(wanted);
  Shape result = Shape::filled(wanted.size(), 0);
  int w = wanted.size() - 1;
  // From the innermost dimension: a group of old dimensions that lie behind each other must be split into new ones
  // exactly.
  for (int i = sizes.size() - 1; i >= 0;) {
    std::int64_t group = sizes[i];
    std::int64_t step = strides[i];
    int j = i - 1;
    while (j >= 0 && (sizes[j] == 1 || group == 1 || strides[j] == step * group)) {
      if (group == 1 && sizes[j] != 1) step = strides[j];
      group *= sizes[j];
      --j;
    }
    std::int64_t left = group, stride = step;
    while (w >= 0 && (left > 1 || wanted[w] == 1)) {
      if (left % wanted[w] != 0) return std::nullopt;
      result[w] = stride;
      stride *= wanted[w];
      left /= wanted[w];
      --w;
    }
    if (left != 1) return std::nullopt;
    i = j;
  }
  for (; w >= 0; --w) result[w] = 1;
  return result;
}

// Fills in a -1 and checks the number of elements.
Shape resolve_sizes(const Tensor& x, const Shape& sizes, const char* op) {
  Shape result = sizes;
  int unknown = -1;
  std::int64_t known = 1;
  for (int i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == -1) {
      if (unknown >= 0) fail<ShapeError>("{}: expected at most one size of -1, got {}", op, sizes.str());
      unknown = i;
    } else if (sizes[i] < 0) {
      fail<ShapeError>("{}: expected sizes of at least 0 or one -1, got {}", op, sizes.str());
    } else if (__builtin_mul_overflow(known, sizes[i], &known)) {
      fail<ShapeError>("{}: {} has too many elements", op, sizes.str());
    }
  }
  const std::int64_t n = x.numel();
  if (unknown >= 0) {
    if (known == 0 || n % known != 0) {
      fail<ShapeError>("{}: {} can't hold the {} elements of {}", op, sizes.str(), n, x.sizes().str());
    }
    result[unknown] = n / known;
  } else if (known != n) {
    fail<ShapeError>("{}: expected a shape of {} elements for {}, got {}", op, n, x.sizes().str(), sizes.str());
  }
  return result;
}

ViewAttributes geometry(const Shape& sizes, const Shape& strides, std::int64_t offset) {
  return {.sizes = int_list(sizes), .strides = int_list(strides), .offset = offset};
}

// All views carry their geometry; what differs is the gradient.
void infer_geometry(InferContext& ctx) {
  const auto& a = ctx.attributes<ViewAttributes>();
  ctx.view(shape_of(a.sizes), shape_of(a.strides), a.offset);
}

void reshape_gradient(GradContext& c) { c.set(0, c.grad().reshape(c.input_sizes(0))); }

Op view_declaration(const char* name, const char* signature, GradFn grad) {
  return {.name = name,
          .signature = signature,
          .infer = infer_geometry,
          .grad = grad,
          .attributes = &attribute_struct<ViewAttributes>(),
          .view = true};
}

const Op& view_op = define_op(view_declaration("view", "view(input, sizes)", reshape_gradient));
const Op& squeeze_op = define_op(view_declaration("squeeze", "squeeze(input, dim)", reshape_gradient));
const Op& unsqueeze_op = define_op(view_declaration("unsqueeze", "unsqueeze(input, dim)", reshape_gradient));
const Op& expand_op =
    define_op(view_declaration("expand", "expand(input, sizes)", [](GradContext& c) { c.set(0, c.grad()); }));
const Op& permute_op = define_op(view_declaration("permute", "permute(input, dims)", [](GradContext& c) {
  // `strides` of a permute's attributes are the result's; the order itself is coded in `start`, four bits a dimension.
  const auto order = static_cast<std::uint64_t>(c.attributes<ViewAttributes>().start);
  const int n = c.input_sizes(0).size();
  Shape inverse = Shape::filled(n, 0);
  for (int i = 0; i < n; ++i) inverse[static_cast<int>(order >> (4 * i) & 15)] = i;
  c.set(0, permute(c.grad(), inverse));
}));

// Padded with zeros: for recorded backward passes. Others join the gradients of slices (Op::grad_slice).
void slice_gradient(GradContext& c) {
  const GradSlice s = c.op().grad_slice(&c.attributes<ViewAttributes>());
  const Tensor g = s.selected ? c.grad().unsqueeze(s.dim) : c.grad();
  c.set(0, slice_backward(g, c.input_sizes(0), s.dim, s.start, s.end, s.step));
}

Op slice_declaration(const char* name, const char* signature, GradSlice (*slice)(const void*)) {
  Op op = view_declaration(name, signature, slice_gradient);
  op.grad_slice = slice;
  return op;
}

const Op& select_op =
    define_op(slice_declaration("select", "select(input, dim, index)", [](const void* attributes) -> GradSlice {
      const auto& a = *static_cast<const ViewAttributes*>(attributes);
      return {.dim = static_cast<int>(a.dim), .start = a.start, .end = a.start + 1, .selected = true};
    }));
const Op& slice_op = define_op(
    slice_declaration("slice", "slice(input, dim, start, end, step)", [](const void* attributes) -> GradSlice {
      const auto& a = *static_cast<const ViewAttributes*>(attributes);
      return {.dim = static_cast<int>(a.dim), .start = a.start, .end = a.end, .step = a.step};
    }));

const Op& slice_backward_op = define_op({
    .name = "slice_backward",
    .signature = "slice_backward(gradient, sizes, dim, start, end, step)",
    .infer =
        [](InferContext& ctx) { ctx.output(shape_of(ctx.attributes<ViewAttributes>().sizes), ctx.input(0).dtype()); },
    .grad =
        [](GradContext& c) {
          const auto& a = c.attributes<ViewAttributes>();
          c.set(0, c.grad().slice(a.dim, a.start, a.end, a.step));
        },
    .attributes = &attribute_struct<ViewAttributes>(),
    .backward = true,
});

const Op& as_strided_op = define_op({
    .name = "as_strided",
    .signature = "as_strided(input, sizes, strides, offset)",
    .infer =
        [](InferContext& ctx) {
          const auto& a = ctx.attributes<AsStridedAttributes>();
          ctx.view(shape_of(a.sizes), shape_of(a.strides), a.offset);
        },
    .grad =
        [](GradContext& c) {
          const auto& a = c.attributes<AsStridedAttributes>();
          const Shape sizes = shape_of(a.sizes), strides = shape_of(a.strides),
                      input_strides = shape_of(a.input_strides);
          const Shape& input_sizes = c.input_sizes(0);
          if (!is_dense(input_sizes, input_strides)) {
            fail<AutogradError>("as_strided: a gradient is only there for a dense input, got strides {}",
                                input_strides.str());
          }
          if (sizes.numel() == 0) {
            c.set(0, zeros(input_sizes, {.dtype = c.grad().dtype(), .device = c.device(0)}));
            return;
          }
          const std::int64_t n = input_sizes.numel(), first = a.offset - a.input_offset;
          std::int64_t last = first;
          for (int i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
          if (first < 0 || last >= n) {
            fail<AutogradError>("as_strided: no gradient for places outside of the input {}", input_sizes.str());
          }
          // The input as a vector in the order of memory; several views of one place add up.
          const Tensor places = as_strided(arange(n), sizes, strides, first).reshape({-1}).to(c.device(0));
          const Tensor flat = zeros({n}, {.dtype = c.grad_dtype(0), .device = c.device(0)});
          c.set(0, as_strided(index_add(flat, 0, places, c.grad().reshape({-1})), input_sizes, input_strides, 0));
        },
    .attributes = &attribute_struct<AsStridedAttributes>(),
    .view = true,
});

Tensor make_view(const Op& op, const Tensor& x, const ViewAttributes& attributes) { return call(op, {&x}, attributes); }

}  // namespace

Tensor Tensor::view(const Shape& wanted) const {
  check_defined(*this, "view", "a tensor");
  const Shape sizes = resolve_sizes(*this, wanted, "view");
  const auto strides = strides_for_view(this->sizes(), this->strides(), sizes);
  if (!strides) {
    fail<ShapeError>("view: {} with strides {} can't be seen as {} without a copy; use reshape", this->sizes().str(),
                     this->strides().str(), sizes.str());
  }
  return make_view(view_op, *this, geometry(sizes, *strides, storage_offset()));
}

Tensor Tensor::reshape(const Shape& wanted) const {
  check_defined(*this, "reshape", "a tensor");
  const Shape sizes = resolve_sizes(*this, wanted, "reshape");
  if (sizes == this->sizes()) return *this;
  if (const auto strides = strides_for_view(this->sizes(), this->strides(), sizes)) {
    return make_view(view_op, *this, geometry(sizes, *strides, storage_offset()));
  }
  return clone(MemoryFormat::contiguous).view(sizes);
}

Tensor Tensor::permute(const Shape& dims) const {
  check_defined(*this, "permute", "a tensor");
  const int n = dim();
  if (dims.size() != n) {
    fail<ShapeError>("permute: expected {} dimensions for {}, got {}", n, sizes().str(), dims.str());
  }
  Shape new_sizes = sizes(), new_strides = sizes();
  std::uint64_t order = 0;
  unsigned seen = 0;
  for (int i = 0; i < n; ++i) {
    const int d = wrap_dim(dims[i], n, "permute");
    if (seen >> d & 1) fail<ShapeError>("permute: expected each dimension once, got {}", dims.str());
    seen |= 1u << d;
    new_sizes[i] = sizes()[d];
    new_strides[i] = strides()[d];
    order |= static_cast<std::uint64_t>(d) << (4 * i);
  }
  ViewAttributes a = geometry(new_sizes, new_strides, storage_offset());
  a.start = static_cast<std::int64_t>(order);
  return make_view(permute_op, *this, a);
}

Tensor Tensor::transpose(std::int64_t dim0, std::int64_t dim1) const {
  check_defined(*this, "transpose", "a tensor");
  const int a = wrap_dim(dim0, dim(), "transpose"), b = wrap_dim(dim1, dim(), "transpose");
  Shape order;
  for (int i = 0; i < dim(); ++i) order.push_back(i == a ? b : i == b ? a : i);
  return permute(order);
}

Tensor Tensor::t() const {
  check_defined(*this, "t", "a tensor");
  if (dim() > 2) fail<ShapeError>("t: expected at most 2 dimensions, got {}; use transpose(-2, -1)", sizes().str());
  return dim() < 2 ? *this : transpose(0, 1);
}

Tensor Tensor::expand(const Shape& wanted) const {
  check_defined(*this, "expand", "a tensor");
  const int extra = wanted.size() - dim();
  Shape target = wanted;
  for (int i = 0; i < wanted.size(); ++i) {
    const std::int64_t have = i < extra ? 1 : sizes()[std::max(i - extra, 0)];
    if (target[i] == -1 && i >= extra) target[i] = have;
    if (extra < 0 || target[i] < 0 || (have != target[i] && have != 1)) {
      fail<ShapeError>("expand: {} can't be repeated to {}", sizes().str(), wanted.str());
    }
  }
  if (extra < 0) fail<ShapeError>("expand: {} can't be repeated to {}", sizes().str(), wanted.str());
  if (target == sizes()) return *this;
  return make_view(expand_op, *this, geometry(target, broadcast_strides(sizes(), strides(), target), storage_offset()));
}

Tensor Tensor::squeeze(std::int64_t d) const {
  check_defined(*this, "squeeze", "a tensor");
  const int i = wrap_dim(d, dim(), "squeeze");
  if (dim() == 0 || sizes()[i] != 1) return *this;
  Shape new_sizes = sizes(), new_strides = strides();
  new_sizes.erase(i);
  new_strides.erase(i);
  return make_view(squeeze_op, *this, geometry(new_sizes, new_strides, storage_offset()));
}

Tensor Tensor::squeeze() const {
  Shape new_sizes, new_strides;
  for (int i = 0; i < dim(); ++i) {
    if (sizes()[i] == 1) continue;
    new_sizes.push_back(sizes()[i]);
    new_strides.push_back(strides()[i]);
  }
  if (new_sizes.size() == dim()) return *this;
  return make_view(squeeze_op, *this, geometry(new_sizes, new_strides, storage_offset()));
}

Tensor Tensor::unsqueeze(std::int64_t d) const {
  check_defined(*this, "unsqueeze", "a tensor");
  const int i = wrap_dim(d, dim() + 1, "unsqueeze");
  Shape new_sizes = sizes(), new_strides = strides();
  new_strides.insert(i, i < dim() ? sizes()[i] * strides()[i] : 1);
  new_sizes.insert(i, 1);
  return make_view(unsqueeze_op, *this, geometry(new_sizes, new_strides, storage_offset()));
}

Tensor Tensor::select(std::int64_t d, std::int64_t index) const {
  check_defined(*this, "select", "a tensor");
  if (dim() == 0) fail<ShapeError>("select: expected at least one dimension, got a 0-d tensor");
  const int i = wrap_dim(d, dim(), "select");
  const std::int64_t n = sizes()[i];
  if (index < -n || index >= n) {
    fail<ShapeError>("select: expected an index from {} to {} along dimension {} of {}, got {}", -n, n - 1, i,
                     sizes().str(), index);
  }
  if (index < 0) index += n;
  Shape new_sizes = sizes(), new_strides = strides();
  new_sizes.erase(i);
  new_strides.erase(i);
  ViewAttributes a = geometry(new_sizes, new_strides, storage_offset() + index * strides()[i]);
  a.dim = i;
  a.start = index;
  return make_view(select_op, *this, a);
}

Tensor Tensor::slice(std::int64_t d, std::int64_t start, std::int64_t end, std::int64_t step) const {
  check_defined(*this, "slice", "a tensor");
  if (dim() == 0) fail<ShapeError>("slice: expected at least one dimension, got a 0-d tensor");
  if (step < 1) fail<ShapeError>("slice: expected a step of at least 1, got {}", step);
  const int i = wrap_dim(d, dim(), "slice");
  const std::int64_t n = sizes()[i];
  if (start < 0) start = std::max<std::int64_t>(start + n, 0);
  if (end < 0) end = std::max<std::int64_t>(end + n, 0);
  start = std::min(start, n);
  end = std::max(std::min(end, n), start);
  Shape new_sizes = sizes(), new_strides = strides();
  new_sizes[i] = end > start ? (end - start - 1) / step + 1 : 0;
  if (new_sizes[i] < 2) {
    // The step leads nowhere, and may be too large to multiply by.
    step = 1;
    end = start + new_sizes[i];
  }
  new_strides[i] *= step;
  ViewAttributes a = geometry(new_sizes, new_strides, storage_offset() + start * strides()[i]);
  a.dim = i;
  a.start = start;
  a.end = end;
  a.step = step;
  return make_view(slice_op, *this, a);
}

Tensor Tensor::narrow(std::int64_t d, std::int64_t start, std::int64_t length) const {
  const std::int64_t n = size(d);
  if (start < 0) start += n;
  if (start < 0 || length < 0 || start > n - length) {
    fail<ShapeError>("narrow: {} elements from {} don't lie in dimension {} of {}", length, start, d, sizes().str());
  }
  return slice(d, start, start + length);
}

Tensor flatten(const Tensor& input, std::int64_t start, std::int64_t end) {
  check_defined(input, "flatten", "a tensor");
  if (input.dim() == 0) return input.reshape({1});
  const int a = wrap_dim(start, input.dim(), "flatten"), b = wrap_dim(end, input.dim(), "flatten");
  if (a > b) fail<ShapeError>("flatten: expected start before end, got {} and {}", start, end);
  Shape sizes;
  for (int i = 0; i < input.dim(); ++i) {
    if (i > a && i <= b) {
      sizes.back() *= input.sizes()[i];
    } else {
      sizes.push_back(input.sizes()[i]);
    }
  }
  return input.reshape(sizes);
}

Tensor as_strided(const Tensor& input, const Shape& sizes, const Shape& strides, std::int64_t offset) {
  check_defined(input, "as_strided", "a tensor");
  if (sizes.size() != strides.size()) {
    fail<ShapeError>("as_strided: expected as many strides as sizes, got {} for {}", strides.str(), sizes.str());
  }
  std::int64_t last = offset, numel = 1;
  bool inside = offset >= 0;
  for (int i = 0; i < sizes.size(); ++i) {
    inside &= sizes[i] >= 0 && strides[i] >= 0 && !__builtin_mul_overflow(numel, sizes[i], &numel);
    std::int64_t step = 0;
    inside &= !__builtin_mul_overflow(sizes[i] - 1, strides[i], &step) && !__builtin_add_overflow(last, step, &last);
  }
  const auto places = static_cast<std::int64_t>(input.storage()->bytes() / input.item_size());
  if (!inside || (numel != 0 && last >= places)) {
    fail<ShapeError>("as_strided: {} with strides {} from {} leaves the storage of {} elements", sizes.str(),
                     strides.str(), offset, places);
  }
  return call(as_strided_op, {&input},
              AsStridedAttributes{int_list(sizes), int_list(strides), offset, int_list(input.strides()),
                                  input.storage_offset()});
}

Tensor view(const Tensor& input, const Shape& sizes) { return input.view(sizes); }
Tensor view_as(const Tensor& input, const Tensor& other) { return input.view(other.sizes()); }
Tensor reshape_as(const Tensor& input, const Tensor& other) { return input.reshape(other.sizes()); }

Tensor unflatten(const Tensor& input, std::int64_t dim, const Shape& sizes) {
  check_defined(input, "unflatten", "a tensor");
  if (input.dim() == 0) fail<ShapeError>("unflatten: expected at least one dimension, got a 0-d tensor");
  const int d = wrap_dim(dim, input.dim(), "unflatten");
  const std::int64_t n = input.sizes()[d];
  Shape parts = sizes;
  std::int64_t known = 1;
  int unknown = -1;
  bool fits = !sizes.empty();
  for (int i = 0; i < parts.size(); ++i) {
    if (parts[i] == -1 && unknown < 0) {
      unknown = i;
    } else {
      fits = fits && parts[i] >= 0 && !__builtin_mul_overflow(known, parts[i], &known);
    }
  }
  if (fits && unknown >= 0) {
    fits = known != 0 && n % known == 0;
    if (fits) parts[unknown] = n / known;
  } else {
    fits = fits && known == n;
  }
  if (!fits) {
    fail<ShapeError>("unflatten: expected sizes of {} elements for dimension {} of {}, got {}", n, d,
                     input.sizes().str(), sizes.str());
  }
  Shape whole;
  for (int i = 0; i < input.dim(); ++i) {
    if (i != d) {
      whole.push_back(input.sizes()[i]);
    } else {
      for (std::int64_t p : parts) whole.push_back(p);
    }
  }
  return input.reshape(whole);
}

Tensor squeeze(const Tensor& input) { return input.squeeze(); }
Tensor squeeze(const Tensor& input, std::int64_t dim) { return input.squeeze(dim); }
Tensor unsqueeze(const Tensor& input, std::int64_t dim) { return input.unsqueeze(dim); }
Tensor expand(const Tensor& input, const Shape& sizes) { return input.expand(sizes); }
Tensor expand_as(const Tensor& input, const Tensor& other) { return input.expand(other.sizes()); }
Tensor broadcast_to(const Tensor& input, const Shape& sizes) { return input.expand(sizes); }

std::vector<Tensor> broadcast_tensors(std::span<const Tensor> tensors) {
  Shape sizes;
  for (const Tensor& t : tensors) {
    check_defined(t, "broadcast_tensors", "tensors");
    sizes = broadcast_shapes(sizes, t.sizes(), "broadcast_tensors");
  }
  std::vector<Tensor> result;
  for (const Tensor& t : tensors) result.push_back(t.expand(sizes));
  return result;
}

std::vector<Tensor> meshgrid(std::span<const Tensor> tensors) {
  Shape sizes;
  for (const Tensor& t : tensors) {
    check_defined(t, "meshgrid", "tensors");
    if (t.dim() > 1) fail<ShapeError>("meshgrid: expected vectors, got {}", t.sizes().str());
    sizes.push_back(t.numel());
  }
  std::vector<Tensor> result;
  for (int i = 0; i < sizes.size(); ++i) {
    Shape own = Shape::filled(sizes.size(), 1);
    own[i] = sizes[i];
    result.push_back(tensors[static_cast<std::size_t>(i)].reshape(own).expand(sizes));
  }
  return result;
}

Tensor select(const Tensor& input, std::int64_t dim, std::int64_t index) { return input.select(dim, index); }
Tensor narrow(const Tensor& input, std::int64_t dim, std::int64_t start, std::int64_t length) {
  return input.narrow(dim, start, length);
}

Tensor movedim(const Tensor& input, const Shape& source, const Shape& destination) {
  check_defined(input, "movedim", "a tensor");
  const int n = input.dim();
  if (source.size() != destination.size()) {
    fail<ShapeError>("movedim: expected one destination for each dimension, got {} for {}", destination.str(),
                     source.str());
  }
  Shape order = Shape::filled(n, -1);
  unsigned moved = 0;
  for (int i = 0; i < source.size(); ++i) {
    const int from = wrap_dim(source[i], n, "movedim"), to = wrap_dim(destination[i], n, "movedim");
    if (n == 0) return input;
    if (moved >> from & 1 || order[to] >= 0) {
      fail<ShapeError>("movedim: expected each dimension once, got {} to {}", source.str(), destination.str());
    }
    moved |= 1u << from;
    order[to] = from;
  }
  int next = 0;
  for (int i = 0; i < n; ++i) {
    if (order[i] >= 0) continue;
    while (moved >> next & 1) ++next;
    order[i] = next++;
  }
  return input.permute(order);
}

Tensor swapaxes(const Tensor& input, std::int64_t axis0, std::int64_t axis1) { return input.transpose(axis0, axis1); }

Tensor to_channels_last(const Tensor& input) {
  check_defined(input, "to_channels_last", "a tensor");
  if (input.dim() != 4) fail<ShapeError>("to_channels_last: expected [N, C, H, W], got {}", input.sizes().str());
  Tensor last = input.contiguous(MemoryFormat::channels_last);
  // What lies the same in both layouts says by its strides which one is meant: ops on images follow those.
  if (last.strides() == channels_last_strides(last.sizes()) || !last.is_contiguous()) return last;
  return last.reshape({last.size(0), last.size(2), last.size(3), last.size(1)}).permute({0, 3, 1, 2});
}
bool is_channels_last(const Tensor& input) { return input.is_contiguous(MemoryFormat::channels_last); }

Tensor reshape(const Tensor& input, const Shape& sizes) { return input.reshape(sizes); }
Tensor transpose(const Tensor& input, std::int64_t dim0, std::int64_t dim1) { return input.transpose(dim0, dim1); }
Tensor permute(const Tensor& input, const Shape& dims) { return input.permute(dims); }
Tensor matrix_transpose(const Tensor& input) { return input.transpose(-2, -1); }

Tensor slice_backward(const Tensor& gradient, const Shape& sizes, std::int64_t dim, std::int64_t start,
                      std::int64_t end, std::int64_t step) {
  return call(slice_backward_op, {&gradient},
              ViewAttributes{.sizes = int_list(sizes), .dim = dim, .start = start, .end = end, .step = step});
}

}  // namespace halfstep
