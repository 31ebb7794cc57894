// SPDX-License-Identifier: Apache-2.0
// Sums by index, and what index_put writes: several values may go to one place, and do in their order.
#include <algorithm>
#include <type_traits>

#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/index_places.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kSumStretch = 256;  // elements that are converted, or columns that are summed, together

// From a 16-bit type to float32, or back.
template <class To, class From>
void convert_elements(const TensorView& to, const TensorView& from) {
  const StridedLoop<2> loop({&to, &from});
  loop.for_each_run(kGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* s) {
    To* t = static_cast<To*>(to.data) + at[0];
    const From* f = static_cast<const From*>(from.data) + at[1];
    if (s[0] != 1 || s[1] != 1) {
      for (std::int64_t i = 0; i < n; ++i) t[i * s[0]] = convert<To>(f[i * s[1]]);
    } else if constexpr (std::is_same_v<To, float>) {
      to_floats(f, n, t);
    } else {
      store_floats(to.dtype, t, n, f);
    }
  });
}

// Runs `add(sums, view)` on an output that holds the input: in place, or in float32 rounded once at the end.
template <class T, class F>
Status with_sums(KernelContext* context, const TensorView& out, const TensorView& input, F&& add) {
  if constexpr (!kWideSums<T>) {
    if (runs_dry(context)) return Status::ok;
    start_from(out, input);
    add(static_cast<T*>(out.data), out.strides);
    return Status::ok;
  } else {
    auto* sums = static_cast<float*>(context->workspace(context, static_cast<std::size_t>(out.numel) * sizeof(float)));
    if (!sums) return Status::failed;
    if (runs_dry(context)) return Status::ok;
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
    convert_elements<float, T>(wide, input);
    add(sums, strides);
    convert_elements<T, float>(out, wide);
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
        lines.with_steps([&](auto index_step, auto o_step, auto src_step) {
          lines.for_each([&](const std::int64_t(&at)[3]) {
            const auto* index = static_cast<const std::int64_t*>(in[1].data) + at[0];
            Sum<T>* o = sums + at[1];
            const T* src = static_cast<const T*>(in[2].data) + at[2];
            if constexpr (kWideSums<T>) {
              if (src_step == 1) {
                float values[kSumStretch];
                for (std::int64_t first = 0; first < lines.length; first += kSumStretch) {
                  const std::int64_t n = std::min(kSumStretch, lines.length - first);
                  to_floats(src + first, n, values);
                  for (std::int64_t j = 0; j < n; ++j) o[index[(first + j) * index_step] * o_step] += values[j];
                }
                return;
              }
            }
            for (std::int64_t j = 0; j < lines.length; ++j) {
              Sum<T>& s = o[index[j * index_step] * o_step];
              s = static_cast<Sum<T>>(s + convert<Sum<T>>(src[j * src_step]));
            }
          });
        });
      });
    }
  });
  return status;
}

// Which positions of an index go to each row, in their order: positions[starts[r]] to positions[starts[r + 1] - 1].
struct PositionsOfRows {
  std::int64_t *starts, *positions;
};
// By counting; `starts` is null where there is no memory for it.
PositionsOfRows positions_of_rows(KernelContext* context, const TensorView& index, std::int64_t rows) {
  const std::int64_t n = index.numel;
  auto* starts = static_cast<std::int64_t*>(
      context->workspace(context, static_cast<std::size_t>(rows + 2 + n) * sizeof(std::int64_t)));
  if (!starts || runs_dry(context)) return {starts, nullptr};
  std::int64_t* positions = starts + rows + 2;
  std::fill(starts, starts + rows + 2, std::int64_t{0});
  // Shifted by two, so that after the fill below starts[r] is where row r begins.
  for (std::int64_t i = 0; i < n; ++i) ++starts[index_at(index, i) + 2];
  for (std::int64_t r = 1; r < rows + 2; ++r) starts[r] += starts[r - 1];
  for (std::int64_t i = 0; i < n; ++i) positions[starts[index_at(index, i) + 1]++] = i;
  return {starts, positions};
}

// index_add of 16 bits whose slices are rows side by side: the sums of a stretch of one row at a time, in float32 on
// the stack.
Status index_add_rows(KernelContext* context, const TensorView* in, TensorView& out, const Around& around,
                      float alpha) {
  const TensorView &x = in[0], &source = in[2];
  const int dim = around.dim;
  const std::int64_t rows = out.sizes[dim];
  const PositionsOfRows of = positions_of_rows(context, in[1], rows);
  if (!of.starts) return Status::failed;
  if (runs_dry(context)) return Status::ok;
  const auto at = [dim](const TensorView& t, std::int64_t o, std::int64_t r) {
    return offset_of(t, t.strides, 0, dim, o) + r * t.strides[dim];
  };
  const std::int64_t per_row = around.inner * (in[1].numel / rows + 2);
  parallel_for(
      around.outer * rows, std::max<std::int64_t>(1, kGrain / per_row), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const std::int64_t o = i / rows, r = i % rows, x_at = at(x, o, r), out_at = at(out, o, r);
          for (std::int64_t first = 0; first < around.inner; first += kSumStretch) {
            const std::int64_t n = std::min(kSumStretch, around.inner - first);
            float sums[kSumStretch];
            load_floats(x.dtype, x.data, x_at + first, n, sums);
            for (std::int64_t p = of.starts[r]; p < of.starts[r + 1]; ++p) {
              const std::int64_t from = at(source, o, of.positions[p]) + first;
              add_floats(x.dtype, element(x.dtype, static_cast<const void*>(source.data), from), n, alpha, sums);
            }
            store_floats(out.dtype, out.data, out_at + first, n, sums);
          }
        }
      });
  return Status::ok;
}

// to[i] += alpha * from[i], four at a time, which a compiler makes vectors of without a loop for the rest.
template <class S, class T>
void add_scaled(S* to, const T* from, std::int64_t n, S alpha) {
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    S sums[4];
    for (int j = 0; j < 4; ++j) sums[j] = static_cast<S>(to[i + j] + alpha * convert<S>(from[i + j]));
    for (int j = 0; j < 4; ++j) to[i + j] = sums[j];
  }
  for (; i < n; ++i) to[i] = static_cast<S>(to[i] + alpha * convert<S>(from[i]));
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
      if constexpr (kWideSums<T>) {
        constexpr std::int64_t kRow = 128;  // elements that are worth the calls for a row
        const auto in_rows = [&](const TensorView& t) { return inner_step(t, t.strides, around.dim) == 1; };
        if (around.inner >= kRow && out[0].numel != 0 && in_rows(out[0]) && in_rows(in[0]) && in_rows(source)) {
          status = index_add_rows(context, in, out[0], around, alpha);
          return;
        }
      }
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
            const auto* at = static_cast<const std::int64_t*>(index.data);
            if (around.inner == 1) {
              for (std::int64_t k = 0; k < n; ++k) {
                S& s = to[at[k * index_step] * to_dim];
                s = static_cast<S>(s + alpha * convert<S>(from[k * from_dim]));
              }
              ++i;
              continue;
            }
            for (std::int64_t k = 0; k < n; ++k) {
              S* row = to + at[k * index_step] * to_dim;
              const T* values = from + k * from_dim;
              if (to_step == 1 && from_step == 1) {
                add_scaled(row + first, values + first, last - first, alpha);
                continue;
              }
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

// Writes or adds `values` in the order of the places. Columns of the dimensions that are not indexed are shared out
// among the threads, so that the order at one element is always the same.
template <class Total, class T, bool kAdd>
void put(Total* to, const Places& places, const Rest& rest, const TensorView& values, int broadcast) {
  parallel_for(rest.count, std::max<std::int64_t>(1, kGrain / 4 / std::max<std::int64_t>(places.count, 1)),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = 0; i < places.count; ++i) {
                   std::int64_t at = 0, left = i;
                   for (int d = broadcast - 1; d >= 0; --d) {
                     at += left % values.sizes[d] * values.strides[d];
                     left /= values.sizes[d];
                   }
                   Total* row = to + places.offsets[i];
                   const T* from = static_cast<const T*>(values.data) + at;
                   for (std::int64_t j = begin; j < end; ++j) {
                     std::int64_t a = j, b = j;
                     if (!rest.straight) rest.offsets(j, a, b);
                     if constexpr (kAdd) {
                       row[a] = static_cast<Total>(row[a] + convert<Total>(from[b]));
                     } else {
                       row[a] = from[b];
                     }
                   }
                 }
               });
}

Status index_put(KernelContext* context, const TensorView* in, int n, TensorView* out, int, const void* attributes) {
  const bool accumulate = static_cast<const IndexPutAttributes*>(attributes)->accumulate;
  const TensorView &x = out[0], &values = in[1];
  const int k = n - 2, broadcast = values.ndim - (x.ndim - k);
  const bool wide = accumulate && (x.dtype == DType::f16 || x.dtype == DType::bf16);
  // Sums of 16-bit values are taken in float32, in a row-major copy.
  std::int64_t row_major[kMaxDims];
  std::int64_t step = 1;
  for (int d = x.ndim - 1; d >= 0; --d) {
    row_major[d] = step;
    step *= x.sizes[d];
  }
  const std::int64_t* strides = wide ? row_major : x.strides;
  const Places places(context, in + 2, k, x, strides, values.sizes, broadcast);
  if (places.status != Status::ok) return places.status;
  if (runs_dry(context)) {
    const bool sums = wide && x.numel != 0;
    const auto bytes = static_cast<std::size_t>(x.numel) * sizeof(float);
    return !sums || context->workspace(context, bytes) ? Status::ok : Status::failed;
  }
  if (!wide && out[0].data != in[0].data && x.numel) move_elements(x, in[0]);
  if (x.numel == 0) return Status::ok;
  const Rest rest(x.sizes, k, x.ndim, strides, values.strides + broadcast);
  Status status = Status::ok;
  if (!accumulate) {
    visit_bits(x.dtype, [&](auto tag) {
      using U = typename decltype(tag)::type;
      if (values.numel) put<U, U, false>(static_cast<U*>(x.data), places, rest, values, broadcast);
    });
    return status;
  }
  visit_all(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (is_float8(dtype_of<T>)) {
      status = Status::failed;
    } else if constexpr (is_low_precision(dtype_of<T>)) {
      auto* sums = static_cast<float*>(context->workspace(context, static_cast<std::size_t>(x.numel) * sizeof(float)));
      if (!sums) {
        status = Status::failed;
        return;
      }
      TensorView total = x;
      total.data = sums;
      total.strides = row_major;
      total.contiguous = true;
      convert_elements<float, T>(total, in[0]);
      if (values.numel) put<float, T, true>(sums, places, rest, values, broadcast);
      convert_elements<T, float>(x, total);
    } else {
      if (values.numel) put<T, T, true>(static_cast<T*>(x.data), places, rest, values, broadcast);
    }
  });
  return status;
}

// Rows are shared out among the threads; the gradients of a row are added in the order of their positions, in float32
// (float64 for f64), a stretch of columns at a time.
template <class In, class Out>
void sum_rows(const TensorView& g, const TensorView& out, const PositionsOfRows& of, const EmbeddingAttributes& a) {
  using S = std::conditional_t<std::is_same_v<In, double> || std::is_same_v<Out, double>, double, float>;
  const std::int64_t width = out.sizes[1], n = of.starts[a.rows];
  // Positions are row-major numbers over all but the last dimension of the gradient.
  const std::int64_t column = g.strides[g.ndim - 1];
  const auto row_of = [&](std::int64_t i) {
    std::int64_t offset = 0;
    for (int d = g.ndim - 2; d >= 0; --d) {
      offset += i % g.sizes[d] * g.strides[d];
      i /= g.sizes[d];
    }
    return static_cast<const In*>(g.data) + offset;
  };
  const std::int64_t per_row = std::max<std::int64_t>(1, width * (n / std::max<std::int64_t>(a.rows, 1) + 1));
  parallel_for(a.rows, std::max<std::int64_t>(1, kGrain / per_row), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      Out* to = static_cast<Out*>(out.data) + r * width;
      if (of.starts[r] == of.starts[r + 1] || r == a.padding_idx) {
        std::memset(static_cast<void*>(to), 0, static_cast<std::size_t>(width) * sizeof(Out));
        continue;
      }
      for (std::int64_t first = 0; first < width; first += kSumStretch) {
        const std::int64_t m = std::min(kSumStretch, width - first);
        S sums[kSumStretch] = {};
        for (std::int64_t p = of.starts[r]; p < of.starts[r + 1]; ++p) {
          const In* from = row_of(of.positions[p]) + first * column;
          if constexpr (std::is_same_v<S, float>) {
            if (column == 1) {
              add_floats(g.dtype, from, m, 1, sums);
              continue;
            }
          }
          for (std::int64_t j = 0; j < m; ++j) sums[j] += convert<S>(from[j * column]);
        }
        if constexpr (std::is_same_v<S, float>) {
          store_floats(out.dtype, to + first, m, sums);
        } else {
          store_doubles(out.dtype, to + first, m, sums);
        }
      }
    }
  });
}

Status embedding_backward(KernelContext* context, const TensorView* in, int, TensorView* out, int,
                          const void* attributes) {
  const auto& a = *static_cast<const EmbeddingAttributes*>(attributes);
  const TensorView &g = in[0], &index = in[1];
  if (!check_indices(context, index, a.rows, 0, 2, false)) return Status::failed;
  if (out[0].numel == 0) return Status::ok;
  const PositionsOfRows of = positions_of_rows(context, index, a.rows);
  if (!of.starts) return Status::failed;
  if (runs_dry(context)) return Status::ok;
  visit_floating(g.dtype, [&](auto in_tag) {
    using In = typename decltype(in_tag)::type;
    visit_floating(out[0].dtype, [&](auto out_tag) {
      using Out = typename decltype(out_tag)::type;
      sum_rows<In, Out>(g, out[0], of, a);
    });
  });
  return Status::ok;
}

const RegisterCpuKernel index_scatter_kernels[] = {
    {"scatter_add", kComputeDTypes, scatter_add, kRunsDry},
    {"index_add", kComputeDTypes, index_add, kRunsDry},
    {"index_put", kAllDTypes, index_put, kRunsDry},
    {"embedding_backward", kFloatingDTypes, embedding_backward, kRunsDry},
};

}  // namespace
}  // namespace halfstep::cpu
