// SPDX-License-Identifier: Apache-2.0
// Kernels that read and write along one dimension by index.
#include <algorithm>

#include "halfstep/backends/cpu/index_check.h"
#include "halfstep/backends/cpu/move.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

// gather and scatter walk lines of the index along its dimension: no two lines meet in one element, so that lines run
// in parallel and each in order.
struct Lines {
  int dim = 0;
  int others = 0;
  std::int64_t sizes[kMaxDims];       // of the index, without the dimension
  std::int64_t strides[3][kMaxDims];  // of the index and up to two more tensors
  std::int64_t steps[3] = {0, 0, 0};  // along the dimension
  std::int64_t count = 1, length = 1;

  Lines(std::int64_t wanted, std::initializer_list<const TensorView*> views) {
    const TensorView& index = **views.begin();
    int n = 1;
    for (const TensorView* v : views) n = std::max(n, v->ndim);
    dim = static_cast<int>(wanted < 0 ? wanted + n : wanted);
    length = index.ndim == 0 ? 1 : index.sizes[dim];
    for (int d = 0; d < index.ndim; ++d) {
      if (d == dim) continue;
      sizes[others] = index.sizes[d];
      count *= index.sizes[d];
      int k = 0;
      for (const TensorView* v : views) strides[k++][others] = v->strides[d];
      ++others;
    }
    int k = 0;
    for (const TensorView* v : views) steps[k++] = v->ndim == 0 ? 0 : v->strides[dim];
  }

  void offsets(std::int64_t line, std::int64_t (&at)[3]) const {
    at[0] = at[1] = at[2] = 0;
    for (int d = others - 1; d >= 0; --d) {
      const std::int64_t i = line % sizes[d];
      line /= sizes[d];
      for (int k = 0; k < 3; ++k) at[k] += i * strides[k][d];
    }
  }

  template <class F>
  void for_each(F&& f) const {
    if (count == 0 || length == 0) return;
    parallel_for(count, std::max<std::int64_t>(1, kGrain / 4 / length), [&](std::int64_t begin, std::int64_t end) {
      std::int64_t at[3];
      for (std::int64_t line = begin; line < end; ++line) {
        offsets(line, at);
        f(at);
      }
    });
  }
};

std::int64_t dim_size(const TensorView& v, std::int64_t wanted) {
  if (v.ndim == 0) return 1;
  return v.sizes[wanted < 0 ? wanted + v.ndim : wanted];
}

Status gather(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const std::int64_t dim = static_cast<const AlongAttributes*>(attributes)->dim;
  if (!check_indices(context, in[1], dim_size(in[0], dim), dim, in[0].ndim, false)) return Status::failed;
  if (out[0].numel == 0) return Status::ok;
  const Lines lines(dim, {&in[1], &in[0], &out[0]});
  visit_bits(out[0].dtype, [&](auto tag) {
    using U = typename decltype(tag)::type;
    lines.for_each([&](const std::int64_t(&at)[3]) {
      const auto* index = static_cast<const std::int64_t*>(in[1].data) + at[0];
      const U* x = static_cast<const U*>(in[0].data) + at[1];
      U* o = static_cast<U*>(out[0].data) + at[2];
      for (std::int64_t j = 0; j < lines.length; ++j) {
        o[j * lines.steps[2]] = x[index[j * lines.steps[0]] * lines.steps[1]];
      }
    });
  });
  return Status::ok;
}

// The output starts as the input, unless it is the same memory.
void start_from(const TensorView& out, const TensorView& input) {
  if (out.data != input.data && out.numel) move_elements(out, input);
}

// The output starts as the input; then put(lines) for the lines of the index, the output and the source.
template <class F>
Status scattered(KernelContext* context, const TensorView* in, TensorView* out, const void* attributes, F&& put) {
  const std::int64_t dim = static_cast<const AlongAttributes*>(attributes)->dim;
  if (!check_indices(context, in[1], dim_size(in[0], dim), dim, in[0].ndim, false)) return Status::failed;
  start_from(out[0], in[0]);
  return in[1].numel == 0 ? Status::ok : put(Lines(dim, {&in[1], &out[0], &in[2]}));
}

Status scatter(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  return scattered(context, in, out, attributes, [&](const Lines& lines) {
    visit_bits(out[0].dtype, [&](auto tag) {
      using U = typename decltype(tag)::type;
      lines.for_each([&](const std::int64_t(&at)[3]) {
        const auto* index = static_cast<const std::int64_t*>(in[1].data) + at[0];
        U* o = static_cast<U*>(out[0].data) + at[1];
        const U* src = static_cast<const U*>(in[2].data) + at[2];
        for (std::int64_t j = 0; j < lines.length; ++j) {
          o[index[j * lines.steps[0]] * lines.steps[1]] = src[j * lines.steps[2]];
        }
      });
    });
    return Status::ok;
  });
}

Status scatter_value(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const ScatterValueAttributes*>(attributes);
  if (!check_indices(context, in[1], dim_size(in[0], a.dim), a.dim, in[0].ndim, false)) return Status::failed;
  start_from(out[0], in[0]);
  if (in[1].numel == 0) return Status::ok;
  const Lines lines(a.dim, {&in[1], &out[0]});
  visit_all(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T value = a.value.kind == 2 ? convert<T>(a.value.floating) : convert<T>(a.value.integer);
    lines.for_each([&](const std::int64_t(&at)[3]) {
      const auto* index = static_cast<const std::int64_t*>(in[1].data) + at[0];
      T* o = static_cast<T*>(out[0].data) + at[1];
      for (std::int64_t j = 0; j < lines.length; ++j) o[index[j * lines.steps[0]] * lines.steps[1]] = value;
    });
  });
  return Status::ok;
}

// Sums in float32 for the 16-bit types need a place of their own as large as the output.
template <class T>
constexpr bool kWideSums = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;
template <class T>
using Sum = std::conditional_t<kWideSums<T>, float, T>;

Status scatter_amax(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  return scattered(context, in, out, attributes, [&](const Lines& lines) {
    Status status = Status::ok;
    visit_all(out[0].dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (is_float8(dtype_of<T>)) {
        status = Status::failed;
      } else {
        using C = Sum<T>;  // that values are compared in
        lines.for_each([&](const std::int64_t(&at)[3]) {
          const auto* index = static_cast<const std::int64_t*>(in[1].data) + at[0];
          T* o = static_cast<T*>(out[0].data) + at[1];
          const T* src = static_cast<const T*>(in[2].data) + at[2];
          for (std::int64_t j = 0; j < lines.length; ++j) {
            T& most = o[index[j * lines.steps[0]] * lines.steps[1]];
            const C here = convert<C>(most), value = convert<C>(src[j * lines.steps[2]]);
            // NaN, once there, stays.
            if (here == here && !(here >= value)) most = src[j * lines.steps[2]];
          }
        });
      }
    });
    return status;
  });
}

// Runs `add(sums, view)` on an output that holds the input: in place, or in float32 rounded once at the end.
template <class T, class F>
Status with_sums(KernelContext* context, const TensorView& out, const TensorView& input, F&& add) {
  if constexpr (!kWideSums<T>) {
    start_from(out, input);
    add(static_cast<T*>(out.data), out.strides);
    return Status::ok;
  } else {
    auto* sums = static_cast<float*>(context->workspace(context, static_cast<std::size_t>(out.numel) * sizeof(float)));
    if (!sums) return Status::failed;
    std::int64_t strides[kMaxDims];
    std::int64_t step = 1;
    for (int d = out.ndim - 1; d >= 0; --d) {
      strides[d] = step;
      step *= out.sizes[d];
    }
    TensorView wide = out;
    wide.data = sums;
    wide.dtype = DType::f32;
    wide.strides = strides;
    wide.contiguous = true;
    const auto copy = [](const TensorView& to, const TensorView& from, auto* t, const auto* f) {
      const StridedLoop<2> loop({&to, &from});
      using To = std::remove_reference_t<decltype(*t)>;
      loop.for_each_run(kGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* s) {
        for (std::int64_t i = 0; i < n; ++i) t[at[0] + i * s[0]] = convert<To>(f[at[1] + i * s[1]]);
      });
    };
    copy(wide, input, sums, static_cast<const T*>(input.data));
    add(sums, strides);
    copy(out, wide, static_cast<T*>(out.data), static_cast<const float*>(sums));
    return Status::ok;
  }
}

Status scatter_add(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const std::int64_t dim = static_cast<const AlongAttributes*>(attributes)->dim;
  if (!check_indices(context, in[1], dim_size(in[0], dim), dim, in[0].ndim, false)) return Status::failed;
  Status status = Status::ok;
  visit_all(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (is_float8(dtype_of<T>)) {
      status = Status::failed;
    } else {
      status = with_sums<T>(context, out[0], in[0], [&](Sum<T>* sums, const std::int64_t* strides) {
        if (in[1].numel == 0) return;
        TensorView to = out[0];
        to.strides = strides;
        const Lines lines(dim, {&in[1], &to, &in[2]});
        lines.for_each([&](const std::int64_t(&at)[3]) {
          const auto* index = static_cast<const std::int64_t*>(in[1].data) + at[0];
          Sum<T>* o = sums + at[1];
          const T* src = static_cast<const T*>(in[2].data) + at[2];
          for (std::int64_t j = 0; j < lines.length; ++j) {
            Sum<T>& s = o[index[j * lines.steps[0]] * lines.steps[1]];
            s = static_cast<Sum<T>>(s + convert<Sum<T>>(src[j * lines.steps[2]]));
          }
        });
      });
    }
  });
  return status;
}

// A tensor around one dimension, seen as [outer, dimension, inner]. Row-major tensors have one outer and one inner
// step; others are walked element by element.
struct Around {
  std::int64_t outer = 1, inner = 1;
  int dim = 0;
  Around(const TensorView& v, std::int64_t wanted) : dim(static_cast<int>(wanted < 0 ? wanted + v.ndim : wanted)) {
    if (v.ndim == 0) dim = 0;
    for (int d = 0; d < dim; ++d) outer *= v.sizes[d];
    for (int d = dim + 1; d < v.ndim; ++d) inner *= v.sizes[d];
  }
};
// Offset of element `i` in row-major order over dimensions [begin, end).
std::int64_t offset_of(const TensorView& v, const std::int64_t* strides, int begin, int end, std::int64_t i) {
  std::int64_t offset = 0;
  for (int d = end - 1; d >= begin; --d) {
    offset += i % v.sizes[d] * strides[d];
    i /= v.sizes[d];
  }
  return offset;
}
// The step between neighbours of the inner part where it is one, else 0.
std::int64_t inner_step(const TensorView& v, const std::int64_t* strides, int dim) {
  std::int64_t step = 1, expected = 0;
  bool first = true;
  for (int d = v.ndim - 1; d > dim; --d) {
    if (v.sizes[d] == 1) continue;
    if (first) {
      step = strides[d];
      first = false;
    } else if (strides[d] != expected) {
      return 0;
    }
    expected = strides[d] * v.sizes[d];
  }
  return step;
}

Status index_select(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const std::int64_t wanted = static_cast<const AlongAttributes*>(attributes)->dim;
  const TensorView &x = in[0], &index = in[1];
  if (!check_indices(context, index, dim_size(x, wanted), wanted, x.ndim, false)) return Status::failed;
  if (out[0].numel == 0) return Status::ok;
  const Around around(x, wanted);
  const std::int64_t n = index.numel, index_step = index.ndim ? index.strides[0] : 0;
  const std::int64_t dim_step = x.ndim ? x.strides[around.dim] : 0, step = inner_step(x, x.strides, around.dim);
  visit_bits(x.dtype, [&](auto tag) {
    using U = typename decltype(tag)::type;
    const auto grain = std::max<std::int64_t>(1, kGrain / 2 / around.inner);
    parallel_for(around.outer * n, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t at = static_cast<const std::int64_t*>(index.data)[i % n * index_step];
        const U* from = static_cast<const U*>(x.data) + at * dim_step + offset_of(x, x.strides, 0, around.dim, i / n);
        U* to = static_cast<U*>(out[0].data) + i * around.inner;
        if (step == 1) {
          std::memcpy(to, from, static_cast<std::size_t>(around.inner) * sizeof(U));
        } else {
          for (std::int64_t j = 0; j < around.inner; ++j) {
            to[j] = from[step ? j * step : offset_of(x, x.strides, around.dim + 1, x.ndim, j)];
          }
        }
      }
    });
  });
  return Status::ok;
}

Status index_add(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const IndexAddAttributes*>(attributes);
  const TensorView &index = in[1], &source = in[2];
  if (!check_indices(context, index, dim_size(in[0], a.dim), a.dim, in[0].ndim, false)) return Status::failed;
  const Around around(out[0], a.dim);
  const std::int64_t n = index.numel, index_step = index.ndim ? index.strides[0] : 0;
  Status status = Status::ok;
  visit_all(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = Sum<T>;
    if constexpr (is_float8(dtype_of<T>)) {
      status = Status::failed;
    } else {
      const S alpha = a.alpha.kind == 2 ? convert<S>(a.alpha.floating) : convert<S>(a.alpha.integer);
      status = with_sums<T>(context, out[0], in[0], [&](S* sums, const std::int64_t* strides) {
        if (n == 0 || out[0].numel == 0) return;
        const int dim = around.dim, ndim = out[0].ndim;
        const std::int64_t to_dim = ndim ? strides[dim] : 0, from_dim = ndim ? source.strides[dim] : 0;
        const std::int64_t to_step = inner_step(out[0], strides, dim);
        const std::int64_t from_step = inner_step(source, source.strides, dim);
        // Columns are shared out, so that the sums of one element are taken in order by one thread.
        const std::int64_t columns = around.outer * around.inner;
        parallel_for(columns, std::max<std::int64_t>(1, kGrain / 4 / n), [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end;) {
            const std::int64_t o = i / around.inner, first = i % around.inner;
            const std::int64_t last = std::min(around.inner, first + end - i);
            S* to = sums + offset_of(out[0], strides, 0, dim, o);
            const T* from = static_cast<const T*>(source.data) + offset_of(source, source.strides, 0, dim, o);
            for (std::int64_t k = 0; k < n; ++k) {
              S* row = to + static_cast<const std::int64_t*>(index.data)[k * index_step] * to_dim;
              const T* values = from + k * from_dim;
              for (std::int64_t j = first; j < last; ++j) {
                S& s = row[to_step ? j * to_step : offset_of(out[0], strides, dim + 1, ndim, j)];
                const T v = values[from_step ? j * from_step : offset_of(source, source.strides, dim + 1, ndim, j)];
                s = static_cast<S>(s + alpha * convert<S>(v));
              }
            }
            i += last - first;
          }
        });
      });
    }
  });
  return status;
}

const RegisterCpuKernel registered[] = {
    {"gather", kAllDTypes, gather},
    {"scatter", kAllDTypes, scatter},
    {"scatter_value", kAllDTypes, scatter_value},
    {"scatter_add", kComputeDTypes, scatter_add},
    {"scatter_amax", kComputeDTypes, scatter_amax},
    {"index_select", kAllDTypes, index_select},
    {"index_add", kComputeDTypes, index_add},
};

}  // namespace
}  // namespace halfstep::cpu
