// SPDX-License-Identifier: Apache-2.0
// The arithmetic of sizes that exporters write into the graph, on the host.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "halfstep/core/capture.h"
#include "halfstep/core/fail.h"
#include "halfstep/io/onnx_import_internal.h"

namespace halfstep::io::detail {
namespace {

using C = OnnxCall;
using Ints = std::vector<std::int64_t>;
using std::int64_t;
using std::size_t;

// More than any list of sizes or indices needs, and few enough to hold several.
constexpr int64_t kMostElements = int64_t{1} << 20;

OnnxHost like(const OnnxHost& a, Ints dims) {
  OnnxHost r{.dtype = a.dtype, .dims = std::move(dims)};
  const size_t n = host_elements(r.dims);
  (r.is_floating() ? r.floats.resize(n) : r.ints.resize(n));
  return r;
}
void copy(const OnnxHost& from, size_t i, OnnxHost& to, size_t j) {
  if (to.is_floating()) {
    to.floats[j] = from.floats[i];
  } else {
    to.ints[j] = from.ints[i];
  }
}

Ints strides_of(const Ints& dims) {
  Ints strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) strides[i - 1] = strides[i] * dims[i];
  return strides;
}

Ints broadcast(C& c, const Ints& a, const Ints& b) {
  Ints r(std::max(a.size(), b.size()), 1);
  for (size_t i = 0; i < r.size(); ++i) {
    const int64_t x = i < a.size() ? a[a.size() - 1 - i] : 1, y = i < b.size() ? b[b.size() - 1 - i] : 1;
    if (x != y && x != 1 && y != 1) c.refuse(fmt::format("sizes {} and {} don't go together", x, y));
    r[r.size() - 1 - i] = x == 1 ? y : x;
  }
  return r;
}
// `a` repeated to `dims`.
OnnxHost expanded(const OnnxHost& a, const Ints& dims) {
  OnnxHost r = like(a, dims);
  const Ints to = strides_of(dims), from = strides_of(a.dims);
  const size_t extra = dims.size() - a.dims.size();
  for (size_t j = 0; j < r.size(); ++j) {
    size_t i = 0;
    for (size_t d = 0; d < a.dims.size(); ++d) {
      const int64_t at = static_cast<int64_t>(j) / to[d + extra] % dims[d + extra];
      if (a.dims[d] != 1) i += static_cast<size_t>(at * from[d]);
    }
    copy(a, i, r, j);
  }
  return r;
}

int64_t whole_quotient(C& c, int64_t a, int64_t b) {
  if (b == 0) c.refuse("divides by 0");
  if (b == -1) return static_cast<int64_t>(-static_cast<std::uint64_t>(a));
  return a / b;
}
int64_t wrapping(int64_t a, int64_t b, char op) {
  const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
  return static_cast<int64_t>(op == '+' ? x + y : op == '-' ? x - y : x * y);
}
int64_t whole_number(double v) {
  constexpr double kLimit = 0x1p63;
  return v >= -kLimit && v < kLimit ? static_cast<int64_t>(v) : 0;
}
int64_t whole_modulus(C& c, int64_t a, int64_t b) {
  if (b == 0) c.refuse("divides by 0");
  if (b == -1) return 0;
  const int64_t r = a % b;
  return r != 0 && (r < 0) != (b < 0) && c.integer("fmod", 0) == 0 ? r + b : r;
}

double floating(C& c, double a, double b) {
  const std::string& op = c.type();
  if (op == "Add") return a + b;
  if (op == "Sub") return a - b;
  if (op == "Mul") return a * b;
  if (op == "Div") return a / b;
  if (op == "Pow") return std::pow(a, b);
  if (op == "Min") return std::min(a, b);
  if (op == "Max") return std::max(a, b);
  return std::fmod(a, b);  // Mod
}
int64_t integral(C& c, int64_t a, int64_t b) {
  const std::string& op = c.type();
  if (op == "Add") return wrapping(a, b, '+');
  if (op == "Sub") return wrapping(a, b, '-');
  if (op == "Mul") return wrapping(a, b, '*');
  if (op == "Div") return whole_quotient(c, a, b);
  if (op == "Pow") return whole_number(std::pow(static_cast<double>(a), static_cast<double>(b)));
  if (op == "Min") return std::min(a, b);
  if (op == "Max") return std::max(a, b);
  return whole_modulus(c, a, b);
}

void arithmetic(C& c) {
  OnnxHost r = c.host(0);
  for (int i = 1; i < c.inputs(); ++i) {
    const OnnxHost& other = c.host(i);
    if (other.is_floating() != r.is_floating()) c.refuse("reads a whole and a floating number");
    const Ints dims = broadcast(c, r.dims, other.dims);
    OnnxHost a = expanded(r, dims);
    const OnnxHost b = expanded(other, dims);
    for (size_t j = 0; j < a.size(); ++j) {
      if (a.is_floating()) {
        // As float32 has it.
        a.floats[j] = static_cast<float>(floating(c, a.floats[j], b.floats[j]));
      } else {
        a.ints[j] = integral(c, a.ints[j], b.ints[j]);
      }
    }
    r = std::move(a);
  }
  c.out(std::move(r));
}

bool holds(const std::string& op, double a, double b) {
  if (op == "Equal") return a == b;
  if (op == "Less") return a < b;
  if (op == "LessOrEqual") return a <= b;
  if (op == "Greater") return a > b;
  if (op == "GreaterOrEqual") return a >= b;
  if (op == "And") return a != 0 && b != 0;
  if (op == "Or") return a != 0 || b != 0;
  return (a != 0) != (b != 0);  // Xor
}
void comparison(C& c) {
  const Ints dims = broadcast(c, c.host(0).dims, c.host(1).dims);
  const OnnxHost a = expanded(c.host(0), dims), b = expanded(c.host(1), dims);
  OnnxHost r{.dtype = DType::boolean, .dims = dims, .floats = {}, .ints = Ints(a.size())};
  for (size_t j = 0; j < a.size(); ++j) r.ints[j] = holds(c.type(), a.number(j), b.number(j)) ? 1 : 0;
  c.out(std::move(r));
}

void unary(C& c) {
  OnnxHost r = c.host(0);
  const std::string& op = c.type();
  for (double& v : r.floats) {
    const double y = op == "Neg"     ? -v
                     : op == "Abs"   ? std::fabs(v)
                     : op == "Floor" ? std::floor(v)
                     : op == "Ceil"  ? std::ceil(v)
                     : op == "Round" ? std::nearbyint(v)
                     : op == "Sqrt"  ? std::sqrt(v)
                     : op == "Exp"   ? std::exp(v)
                     : op == "Log"   ? std::log(v)
                                     : 1 / v;  // Reciprocal
    v = static_cast<float>(y);
  }
  for (int64_t& v : r.ints) {
    if (op == "Not") {
      v = v == 0;
    } else if (op == "Neg" || (op == "Abs" && v < 0)) {
      v = wrapping(0, v, '-');
    } else if (op != "Abs") {
      c.refuse("reads whole numbers");
    }
  }
  c.out(std::move(r));
}

void host_cast(C& c) {
  const OnnxHost& x = c.host(0);
  const int64_t to = c.integer("to", 0);
  OnnxHost r{.dtype = DType::i64, .dims = x.dims};
  const bool is_floating = to == kOnnxFloat || to == kOnnxFloat16 || to == kOnnxDouble || to == kOnnxBfloat16;
  if (is_floating) r.dtype = DType::f32;
  if (to == kOnnxBool) r.dtype = DType::boolean;
  for (size_t i = 0; i < x.size(); ++i) {
    if (is_floating) {
      r.floats.push_back(static_cast<float>(x.number(i)));
    } else if (to == kOnnxBool) {
      r.ints.push_back(x.number(i) != 0);
    } else {
      const int64_t v = x.is_floating() ? whole_number(x.floats[i]) : x.ints[i];
      r.ints.push_back(to == kOnnxInt32 ? static_cast<std::int32_t>(v) : v);
    }
  }
  c.out(std::move(r));
}

// Sizes with 0 (as it is) and -1 (what is left).
Ints reshaped(C& c, const OnnxHost& x, Ints dims) {
  int64_t known = 1;
  int left = -1;
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] == 0 && c.integer("allowzero", 0) == 0) {
      if (i >= x.dims.size()) c.refuse("keeps a size that isn't there");
      dims[i] = x.dims[i];
    }
    if (dims[i] == -1 && left < 0) {
      left = static_cast<int>(i);
    } else if (dims[i] < 0 || __builtin_mul_overflow(known, dims[i], &known)) {
      c.refuse("expected sizes from 0 on, and one of -1");
    }
  }
  if (left >= 0) dims[static_cast<size_t>(left)] = known == 0 ? 0 : static_cast<int64_t>(x.size()) / known;
  if (host_elements(dims) != x.size()) c.refuse(fmt::format("{} elements don't fit the sizes", x.size()));
  return dims;
}
void reshape(C& c) {
  OnnxHost r = c.host(0);
  r.dims = reshaped(c, r, c.ints(1));
  c.out(std::move(r));
}
Ints host_axes(C& c) {
  if (c.has(1)) return c.ints(1);
  return c.list("axes").value_or(Ints{});
}
void unsqueeze(C& c) {
  OnnxHost r = c.host(0);
  Ints axes = host_axes(c);
  const int dims = static_cast<int>(r.dims.size() + axes.size());
  for (int64_t& a : axes) a = c.dim(a, dims);
  std::sort(axes.begin(), axes.end());
  for (const int64_t a : axes) {
    if (a > static_cast<int64_t>(r.dims.size())) c.refuse("names an axis twice");
    r.dims.insert(r.dims.begin() + a, 1);
  }
  c.out(std::move(r));
}
void squeeze(C& c) {
  OnnxHost r = c.host(0);
  Ints axes = host_axes(c), dims;
  for (int64_t& a : axes) a = c.dim(a, static_cast<int>(r.dims.size()));
  for (size_t i = 0; i < r.dims.size(); ++i) {
    const bool named = std::find(axes.begin(), axes.end(), static_cast<int64_t>(i)) != axes.end();
    if (named && r.dims[i] != 1) c.refuse("takes away a size other than 1");
    if (!(named || (axes.empty() && r.dims[i] == 1))) dims.push_back(r.dims[i]);
  }
  r.dims = dims;
  c.out(std::move(r));
}

// Elements along an axis of `x` by their numbers.
OnnxHost chosen(C& c, const OnnxHost& x, int axis, const Ints& indices, const Ints& in_place) {
  Ints dims(x.dims.begin(), x.dims.begin() + axis);
  dims.insert(dims.end(), in_place.begin(), in_place.end());
  dims.insert(dims.end(), x.dims.begin() + axis + 1, x.dims.end());
  OnnxHost r = like(x, dims);
  const int64_t size = x.dims[static_cast<size_t>(axis)];
  const int64_t inner = std::accumulate(x.dims.begin() + axis + 1, x.dims.end(), int64_t{1}, std::multiplies<>());
  const auto count = static_cast<int64_t>(indices.size());
  if (r.size() == 0) return r;
  for (size_t j = 0; j < r.size(); ++j) {
    const auto at = static_cast<int64_t>(j);
    int64_t index = indices[static_cast<size_t>(at / inner % count)];
    if (index < -size || index >= size) c.refuse(fmt::format("index {} of {} elements", index, size));
    if (index < 0) index += size;
    copy(x, static_cast<size_t>((at / inner / count * size + index) * inner + at % inner), r, j);
  }
  return r;
}
void gather(C& c) {
  const OnnxHost &x = c.host(0), &index = c.host(1);
  if (index.is_floating()) c.refuse("expected whole numbers as indices");
  const int axis = c.dim(c.integer("axis", 0), static_cast<int>(x.dims.size()));
  c.out(chosen(c, x, axis, index.ints, index.dims));
}
void host_slice(C& c) {
  OnnxHost r = c.host(0);
  const Ints starts = c.ints(1), ends = c.ints(2);
  Ints axes(starts.size()), steps(starts.size(), 1);
  std::iota(axes.begin(), axes.end(), 0);
  if (c.has(3)) axes = c.ints(3);
  if (c.has(4)) steps = c.ints(4);
  if (ends.size() != starts.size() || axes.size() != starts.size() || steps.size() != starts.size()) {
    c.refuse("expected as many ends, axes and steps as starts");
  }
  for (size_t i = 0; i < starts.size(); ++i) {
    const int axis = c.dim(axes[i], static_cast<int>(r.dims.size()));
    const int64_t n = r.dims[static_cast<size_t>(axis)], step = steps[i];
    if (step == 0 || step == std::numeric_limits<int64_t>::min()) c.refuse("expected a step other than 0");
    int64_t from = starts[i] < 0 ? starts[i] + n : starts[i];
    int64_t to = ends[i] < 0 ? std::max(ends[i], -n - 1) + n : ends[i];
    from = step > 0 ? std::clamp<int64_t>(from, 0, n) : std::clamp<int64_t>(from, -1, n - 1);
    to = step > 0 ? std::clamp<int64_t>(to, 0, n) : std::clamp<int64_t>(to, -1, n - 1);
    Ints indices;
    const int64_t stride = std::clamp<int64_t>(step, -n - 1, n + 1);
    for (int64_t at = from; step > 0 ? at < to : at > to; at += stride) indices.push_back(at);
    r = chosen(c, r, axis, indices, {static_cast<int64_t>(indices.size())});
  }
  c.out(std::move(r));
}
void concat(C& c) {
  const OnnxHost& first = c.host(0);
  const int axis = c.dim(c.integer("axis", 0), static_cast<int>(first.dims.size()));
  Ints dims = first.dims;
  int64_t& total = dims[static_cast<size_t>(axis)];
  total = 0;
  for (int i = 0; i < c.inputs(); ++i) {
    Ints other = c.host(i).dims;
    if (other.size() != dims.size() || c.host(i).is_floating() != first.is_floating()) {
      c.refuse("joins arrays of different dimensions or types");
    }
    total += other[static_cast<size_t>(axis)];
    other[static_cast<size_t>(axis)] = first.dims[static_cast<size_t>(axis)];
    if (other != first.dims) c.refuse("joins arrays of different sizes");
  }
  OnnxHost r = like(first, dims);
  const int64_t inner = std::accumulate(dims.begin() + axis + 1, dims.end(), int64_t{1}, std::multiplies<>());
  int64_t begin = 0;
  for (int i = 0; i < c.inputs(); ++i) {
    const OnnxHost& part = c.host(i);
    const int64_t row = part.dims[static_cast<size_t>(axis)] * inner;
    for (size_t j = 0; j < part.size(); ++j) {
      const auto at = static_cast<int64_t>(j);
      copy(part, j, r, static_cast<size_t>(at / row * total * inner + begin + at % row));
    }
    begin += row;
  }
  c.out(std::move(r));
}
void split(C& c) {
  const OnnxHost& x = c.host(0);
  const int axis = c.dim(c.integer("axis", 0), static_cast<int>(x.dims.size()));
  const int64_t n = x.dims[static_cast<size_t>(axis)];
  Ints sizes = c.has(1) ? c.ints(1) : c.list("split").value_or(Ints{});
  const int64_t parts = c.outputs();
  const int64_t each = (n + parts - 1) / parts;
  for (int64_t i = 0; sizes.size() < static_cast<size_t>(parts) && !c.has(1); ++i) {
    sizes.push_back(std::clamp<int64_t>(n - i * each, 0, each));
  }
  int64_t begin = 0;
  for (int i = 0; i < c.outputs(); ++i) {
    const int64_t size = static_cast<size_t>(i) < sizes.size() ? sizes[static_cast<size_t>(i)] : -1;
    if (size < 0 || size > n - begin) c.refuse("its parts don't fit the size");
    Ints indices(static_cast<size_t>(size));
    std::iota(indices.begin(), indices.end(), begin);
    if (c.wanted(i)) c.out(chosen(c, x, axis, indices, {size}), i);
    begin += size;
  }
}
void transpose(C& c) {
  const OnnxHost& x = c.host(0);
  Ints perm(x.dims.size());
  std::iota(perm.rbegin(), perm.rend(), 0);
  if (const auto given = c.list("perm")) perm = *given;
  Ints sorted = perm, dims;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sorted.size() != x.dims.size() || sorted[i] != static_cast<int64_t>(i)) c.refuse("expected each axis once");
  }
  const Ints from = strides_of(x.dims);
  for (const int64_t p : perm) dims.push_back(x.dims[static_cast<size_t>(p)]);
  OnnxHost r = like(x, dims);
  const Ints to = strides_of(dims);
  for (size_t j = 0; j < r.size(); ++j) {
    int64_t i = 0;
    for (size_t d = 0; d < dims.size(); ++d) {
      i += static_cast<int64_t>(j) / to[d] % dims[d] * from[static_cast<size_t>(perm[d])];
    }
    copy(x, static_cast<size_t>(i), r, j);
  }
  c.out(std::move(r));
}
void host_expand(C& c) { c.out(expanded(c.host(0), broadcast(c, c.host(0).dims, c.ints(1)))); }
void tile(C& c) {
  OnnxHost r = c.host(0);
  const Ints repeats = c.ints(1);
  if (repeats.size() != r.dims.size()) c.refuse("expected a number for each dimension");
  for (size_t d = 0; d < repeats.size(); ++d) {
    int64_t size = 0;
    if (repeats[d] < 0 || __builtin_mul_overflow(r.dims[d], repeats[d], &size) || size > kMostElements) {
      c.refuse(fmt::format("repeats {} elements {} times", r.dims[d], repeats[d]));
    }
    Ints indices(static_cast<size_t>(size));
    for (size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<int64_t>(i) % r.dims[d];
    r = chosen(c, r, static_cast<int>(d), indices, {size});
  }
  c.out(std::move(r));
}
void range(C& c) {
  const OnnxHost &a = c.host(0), &b = c.host(1), &s = c.host(2);
  if (a.size() != 1 || b.size() != 1 || s.size() != 1) c.refuse("expected three numbers");
  const double step = s.number(0), count = std::ceil((b.number(0) - a.number(0)) / step);
  if (!(count < static_cast<double>(kMostElements))) c.refuse("has too many elements");
  OnnxHost r = like(a, {count > 0 ? static_cast<int64_t>(count) : 0});
  for (size_t i = 0; i < r.size(); ++i) {
    if (r.is_floating()) {
      r.floats[i] = static_cast<float>(a.floats[0] + static_cast<double>(i) * step);
    } else {
      r.ints[i] = wrapping(a.ints[0], wrapping(static_cast<int64_t>(i), s.is_floating() ? 0 : s.ints[0], '*'), '+');
    }
  }
  c.out(std::move(r));
}
void where(C& c) {
  if (c.host(1).is_floating() != c.host(2).is_floating()) c.refuse("reads a whole and a floating number");
  const Ints dims = broadcast(c, broadcast(c, c.host(0).dims, c.host(1).dims), c.host(2).dims);
  const OnnxHost condition = expanded(c.host(0), dims), a = expanded(c.host(1), dims), b = expanded(c.host(2), dims);
  OnnxHost r = like(a, dims);
  for (size_t j = 0; j < r.size(); ++j) copy(condition.number(j) != 0 ? a : b, j, r, j);
  c.out(std::move(r));
}
void host_reduce(C& c) {
  const OnnxHost& x = c.host(0);
  Ints axes = host_axes(c);
  if (axes.empty()) {
    if (c.integer("noop_with_empty_axes", 0) != 0) return c.out(x);
    for (size_t i = 0; i < x.dims.size(); ++i) axes.push_back(static_cast<int64_t>(i));
  }
  for (int64_t& a : axes) a = c.dim(a, static_cast<int>(x.dims.size()));
  if (axes.size() != x.dims.size()) c.refuse("reduces some axes of what the host knows; expected all");
  if (x.size() == 0) c.refuse("reduces no elements");
  OnnxHost r = like(x, Ints(c.integer("keepdims", 1) != 0 ? x.dims.size() : 0, 1));
  const std::string& op = c.type();
  for (size_t i = 0; i < x.size(); ++i) {
    if (x.is_floating()) {
      const double v = x.floats[i], t = r.floats[0];
      r.floats[0] = i == 0               ? v
                    : op == "ReduceProd" ? t * v
                    : op == "ReduceMax"  ? std::max(t, v)
                    : op == "ReduceMin"  ? std::min(t, v)
                                         : t + v;
    } else {
      const int64_t v = x.ints[i], t = r.ints[0];
      r.ints[0] = i == 0               ? v
                  : op == "ReduceProd" ? wrapping(t, v, '*')
                  : op == "ReduceMax"  ? std::max(t, v)
                  : op == "ReduceMin"  ? std::min(t, v)
                                       : wrapping(t, v, '+');
    }
  }
  c.out(std::move(r));
}

// Rows of the first array replaced: the last dimension of the indices names each.
void scatter_nd(C& c) {
  if (c.text("reduction", "none") != "none") c.refuse("reduction: expected none");
  OnnxHost r = c.host(0);
  const OnnxHost &index = c.host(1), &rows = c.host(2);
  if (index.is_floating() || rows.is_floating() != r.is_floating()) c.refuse("expected whole numbers as indices");
  if (index.dims.empty() || index.dims.back() < 1 || index.dims.back() > static_cast<int64_t>(r.dims.size())) {
    c.refuse("expected indices for the first dimensions");
  }
  const auto named = static_cast<size_t>(index.dims.back());
  const Ints strides = strides_of(r.dims);
  const auto row = static_cast<size_t>(strides[named - 1]);
  const size_t count = index.size() / named;
  if (rows.size() != count * row) c.refuse("expected a row for each index");
  for (size_t i = 0; i < count; ++i) {
    int64_t at = 0;
    for (size_t d = 0; d < named; ++d) {
      const int64_t n = index.ints[i * named + d], size = r.dims[d];
      if (n < -size || n >= size) c.refuse(fmt::format("index {} of {} elements", n, size));
      at += (n < 0 ? n + size : n) * strides[d];
    }
    for (size_t j = 0; j < row; ++j) copy(rows, i * row + j, r, static_cast<size_t>(at) + j);
  }
  c.out(std::move(r));
}

void constant_of_shape(C& c) {
  OnnxHost r{.dtype = DType::f32, .dims = c.ints(0)};
  const size_t n = host_elements(r.dims);
  const OnnxAttribute* value = c.attribute("value");
  if (!value) {
    r.floats.assign(n, 0);
    return c.out(std::move(r));
  }
  const OnnxInitializer& t = *std::get<std::shared_ptr<const OnnxInitializer>>(value->value);
  if (t.tensor.numel() != 1) c.refuse("expected a value of one element");
  const CapturePause pause;  // it is the file's
  if (halfstep::is_floating(t.tensor.dtype())) {
    r.floats.assign(n, t.tensor.to_vector<double>()[0]);
  } else {
    r.dtype = t.tensor.dtype() == DType::boolean ? DType::boolean : DType::i64;
    r.ints.assign(n, t.tensor.to_vector<int64_t>()[0]);
  }
  c.out(std::move(r));
}

}  // namespace

std::size_t host_elements(const std::vector<std::int64_t>& dims) {
  int64_t n = 1;
  for (const int64_t d : dims) {
    if (d < 0) fail<Error>("a size of {}", d);
    if (__builtin_mul_overflow(n, d, &n) || n > kMostElements) {
      fail<Error>("more than {} elements, which the host doesn't compute", kMostElements);
    }
  }
  if (dims.size() > static_cast<size_t>(kMaxDims)) fail<Error>("more than {} dimensions", kMaxDims);
  return static_cast<size_t>(n);
}

void add_host_operators(OnnxOperators& t) {
  for (const char* op : {"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Mod"}) t[op].on_host = arithmetic;
  for (const char* op : {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor"}) {
    t[op].on_host = comparison;
  }
  for (const char* op : {"Neg", "Abs", "Floor", "Ceil", "Round", "Sqrt", "Exp", "Log", "Reciprocal", "Not"}) {
    t[op].on_host = unary;
  }
  for (const char* op : {"ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin"}) t[op].on_host = host_reduce;
  t["Identity"].on_host = [](C& c) { c.out(c.host(0)); };
  t["Shape"].on_host = t["Shape"].run;
  t["Size"].on_host = t["Size"].run;
  t["Cast"].on_host = host_cast;
  t["Reshape"].on_host = reshape;
  t["Unsqueeze"].on_host = unsqueeze;
  t["Squeeze"].on_host = squeeze;
  t["Gather"].on_host = gather;
  t["Slice"].on_host = host_slice;
  t["Concat"].on_host = concat;
  t["Split"].on_host = split;
  t["Transpose"].on_host = transpose;
  t["Expand"].on_host = host_expand;
  t["Tile"].on_host = tile;
  t["Range"].on_host = range;
  t["ScatterND"].on_host = scatter_nd;
  t["Where"].on_host = where;
  t["ConstantOfShape"].on_host = constant_of_shape;
}

bool run_on_host(const OnnxPlan& plan, const OnnxStep& step, std::vector<OnnxValue>& values) {
  if (!step.op->on_host) return false;
  for (const int v : step.inputs) {
    if (v >= 0 && !values[static_cast<size_t>(v)].host) return false;
  }
  OnnxCall call(plan, step, values, Device{}, false);
  step.op->on_host(call);
  return true;
}

}  // namespace halfstep::io::detail
