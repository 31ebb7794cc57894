// SPDX-License-Identifier: Apache-2.0
// Kernels that read and write by index: one element, or row, for each place of it.
#include <algorithm>
#include <atomic>

#include "halfstep/backends/cpu/index_places.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

// A line is checked just before it is read, so that its indices come from memory once.
Status gather(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const std::int64_t dim = static_cast<const AlongAttributes*>(attributes)->dim, size = dim_size(in[0], dim);
  if (out[0].numel == 0) return Status::ok;
  const Lines lines(dim, {&in[1], &in[0], &out[0]});
  const bool check_lines = lines.steps[0] == 1;
  if (!check_lines && !check_indices(context, in[1], size, dim, in[0].ndim, false)) return Status::failed;
  std::atomic<bool> outside{false};
  visit_bits(out[0].dtype, [&](auto tag) {
    using U = typename decltype(tag)::type;
    lines.with_steps([&](auto index_step, auto x_step, auto o_step) {
      lines.for_each([&](const std::int64_t(&at)[3]) {
        const auto* index = static_cast<const std::int64_t*>(in[1].data) + at[0];
        const U* x = static_cast<const U*>(in[0].data) + at[1];
        U* o = static_cast<U*>(out[0].data) + at[2];
        if (check_lines && any_outside(index, lines.length, 0, size)) {
          outside.store(true, std::memory_order_relaxed);
          return;
        }
        for (std::int64_t j = 0; j < lines.length; ++j) o[j * o_step] = x[index[j * index_step] * x_step];
      });
    });
  });
  if (!outside.load(std::memory_order_relaxed)) return Status::ok;
  return check_indices(context, in[1], size, dim, in[0].ndim, false) ? Status::ok : Status::failed;
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
      lines.with_steps([&](auto index_step, auto o_step, auto src_step) {
        lines.for_each([&](const std::int64_t(&at)[3]) {
          const auto* index = static_cast<const std::int64_t*>(in[1].data) + at[0];
          U* o = static_cast<U*>(out[0].data) + at[1];
          const U* src = static_cast<const U*>(in[2].data) + at[2];
          for (std::int64_t j = 0; j < lines.length; ++j) o[index[j * index_step] * o_step] = src[j * src_step];
        });
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
      for (std::int64_t i = begin; i < end;) {
        const std::int64_t o = i / n, first = i % n, last = std::min(n, first + end - i);
        const auto* at = static_cast<const std::int64_t*>(index.data);
        const U* from = static_cast<const U*>(x.data) + offset_of(x, x.strides, 0, around.dim, o);
        U* to = static_cast<U*>(out[0].data) + i * around.inner;
        i += last - first;
        if (around.inner == 1) {
          for (std::int64_t k = first; k < last; ++k) *to++ = from[at[k * index_step] * dim_step];
          continue;
        }
        for (std::int64_t k = first; k < last; ++k, to += around.inner) {
          const U* row = from + at[k * index_step] * dim_step;
          if (step == 1) {
            std::memcpy(to, row, static_cast<std::size_t>(around.inner) * sizeof(U));
          } else {
            for (std::int64_t j = 0; j < around.inner; ++j) {
              to[j] = row[step ? j * step : offset_of(x, x.strides, around.dim + 1, x.ndim, j)];
            }
          }
        }
      }
    });
  });
  return Status::ok;
}

Status index(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void*) {
  const TensorView& x = in[0];
  const int k = n - 1, broadcast = out[0].ndim - (x.ndim - k);
  const Places places(context, in + 1, k, x, x.strides, out[0].sizes, broadcast);
  if (places.status != Status::ok) return places.status;
  if (runs_dry(context)) return Status::ok;
  if (out[0].numel == 0) return Status::ok;
  const Rest rest(x.sizes, k, x.ndim, x.strides, out[0].strides + broadcast);
  visit_bits(x.dtype, [&](auto tag) {
    using U = typename decltype(tag)::type;
    const auto grain = std::max<std::int64_t>(1, kGrain / 2 / rest.count);
    parallel_for(places.count, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const U* from = static_cast<const U*>(x.data) + places.offsets[i];
        U* to = static_cast<U*>(out[0].data) + i * rest.count;
        if (rest.count == 1) {
          *to = *from;
          continue;
        }
        if (rest.straight) {
          std::memcpy(to, from, static_cast<std::size_t>(rest.count) * sizeof(U));
          continue;
        }
        for (std::int64_t j = 0; j < rest.count; ++j) {
          std::int64_t a = 0, b = 0;
          rest.offsets(j, a, b);
          to[b] = from[a];
        }
      }
    });
  });
  return Status::ok;
}

Status embedding(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const EmbeddingAttributes*>(attributes);
  const TensorView &weight = in[0], &index = in[1];
  if (!check_indices(context, index, weight.sizes[0], 0, 2, false)) return Status::failed;
  if (out[0].numel == 0) return Status::ok;
  const std::int64_t width = weight.sizes[1], row = weight.strides[0], column = weight.strides[1];
  visit_bits(weight.dtype, [&](auto tag) {
    using U = typename decltype(tag)::type;
    parallel_for(index.numel, std::max<std::int64_t>(1, kGrain / width), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t at = index_at(index, i);
        const U* from = static_cast<const U*>(weight.data) + at * row;
        U* to = static_cast<U*>(out[0].data) + i * width;
        if (a.zero_padding && at == a.padding_idx) {
          std::fill(to, to + width, U{0});
        } else if (column == 1) {
          std::memcpy(to, from, static_cast<std::size_t>(width) * sizeof(U));
        } else {
          for (std::int64_t j = 0; j < width; ++j) to[j] = from[j * column];
        }
      }
    });
  });
  return Status::ok;
}

const RegisterCpuKernel index_kernels[] = {
    {"gather", kAllDTypes, gather},
    {"scatter", kAllDTypes, scatter},
    {"scatter_value", kAllDTypes, scatter_value},
    {"scatter_amax", kComputeDTypes, scatter_amax},
    {"index_select", kAllDTypes, index_select},
    {"index", kAllDTypes, index, kRunsDry},
    {"embedding", kAllDTypes, embedding},
};

}  // namespace
}  // namespace halfstep::cpu
