// SPDX-License-Identifier: Apache-2.0
// Along one dimension: extremes with indices and cumulative sums and products; and the pieces of the reductions'
// gradients that are not ops elsewhere.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "halfstep/backends/cpu/extreme_row.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/strided_loop.h"
#include "halfstep/backends/cpu/visit.h"

namespace halfstep::cpu {
namespace {

const DimAttributes& dim_attributes(const void* attributes) { return *static_cast<const DimAttributes*>(attributes); }

// The place of the first largest (smallest) element of each row; NaN counts as the largest and the smallest.
template <bool kMax>
void find(const TensorView& x, std::int64_t dim, TensorView* values, TensorView& indices) {
  const RowPlan plan(x, dim);
  visit_numeric(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = ComputeOf<T>;
    const auto in_vectors = kMax ? largest_place : smallest_place;
    constexpr std::int64_t kLeast = 16;  // shorter rows take less time one by one than a call
    const bool side_by_side = is_floating(x.dtype) && plan.stride == 1 && plan.length >= kLeast;
    parallel_for(plan.rows.numel, row_grain(plan.length), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        const T* row = static_cast<const T*>(x.data) + plan.rows.offset(r);
        std::int64_t best = side_by_side ? in_vectors(x.dtype, row, plan.length) : 0;
        C top = convert<C>(row[0]);
        for (std::int64_t i = 1; i < plan.length && !side_by_side && top == top; ++i) {
          const C v = convert<C>(row[i * plan.stride]);
          if (v != v || (kMax ? v > top : v < top)) {
            top = v;
            best = i;
          }
        }
        static_cast<std::int64_t*>(indices.data)[r] = best;
        if (values) static_cast<T*>(values->data)[r] = row[best * plan.stride];
      }
    });
  });
}
template <bool kMax>
Status arg(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  if (out[0].numel > 0) find<kMax>(in[0], dim_attributes(attributes).dim, nullptr, out[0]);
  return Status::ok;
}
template <bool kMax>
Status extreme(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  if (out[0].numel > 0) find<kMax>(in[0], dim_attributes(attributes).dim, &out[0], out[1]);
  return Status::ok;
}

// Input 0 and the indices have size 1 along the dimension.
Status put_along(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const std::int64_t dim = static_cast<const ViewAttributes*>(attributes)->dim;
  const RowPlan to(out[0], dim), from(in[0], dim), at(in[1], dim);
  visit_numeric(out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    T* data = static_cast<T*>(out[0].data);
    std::fill_n(data, out[0].numel, T{});
    for (std::int64_t r = 0; r < from.rows.numel * (out[0].numel > 0); ++r) {
      const std::int64_t i = static_cast<const std::int64_t*>(in[1].data)[at.rows.offset(r)];
      data[to.rows.offset(r) + i * to.stride] = static_cast<const T*>(in[0].data)[from.rows.offset(r)];
    }
  });
  return Status::ok;
}
Status pick_along(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const std::int64_t dim = static_cast<const ViewAttributes*>(attributes)->dim;
  const RowPlan from(in[0], dim), at(in[1], dim);
  visit_numeric(out[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t r = 0; r < out[0].numel; ++r) {
      const std::int64_t i = static_cast<const std::int64_t*>(in[1].data)[at.rows.offset(r)];
      static_cast<T*>(out[0].data)[r] = static_cast<const T*>(in[0].data)[from.rows.offset(r) + i * from.stride];
    }
  });
  return Status::ok;
}

// Whether an element, or its magnitude, is the result: NaN is where that is NaN.
template <bool kMagnitudes, class C>
bool is_extreme(C v, C top) {
  return ((kMagnitudes ? std::abs(v) : v) == top) | ((v != v) & (top != top));
}
// The same for rows of elements that lie side by side: a thread a row, or all of them one long row after the other.
template <bool kMagnitudes, class T>
void extreme_rows(const TensorView* in, TensorView& out, const ReducePlan& from, const ReducePlan& to) {
  using C = ComputeOf<T>;
  constexpr std::int64_t kBlock = 2048, kFew = 8;
  constexpr bool kDirect = std::is_same_v<T, C>;
  const std::int64_t n = from.reduced.numel, rows = from.kept.numel;
  const auto top_of = [&](std::int64_t r) { return convert<C>(static_cast<const T*>(in[1].data)[r]); };
  // f(x, at, count) for blocks of elements [begin, end) of a row; `loaded` when the buffer has its only one.
  const auto for_blocks = [&](std::int64_t r, std::int64_t begin, std::int64_t end, C* buffer, bool loaded, auto&& f) {
    const std::int64_t row = from.kept.offset(r);
    for (std::int64_t at = begin; at < end; at += kBlock) {
      const std::int64_t count = std::min(kBlock, end - at);
      if constexpr (kDirect) {
        f(static_cast<const C*>(in[0].data) + row + at, at, count);
      } else {
        if (!loaded) read_row(in[0], row + at, 1, count, buffer);
        f(buffer, at, count);
      }
    }
  };
  const auto ties_of = [&](std::int64_t r, std::int64_t begin, std::int64_t end, C* buffer) {
    const C top = top_of(r);
    std::int64_t ties = 0;
    for_blocks(r, begin, end, buffer, false, [&](const C* x, std::int64_t, std::int64_t count) {
      int matches = 0;
      for (std::int64_t i = 0; i < count; ++i) matches += is_extreme<kMagnitudes>(x[i], top) ? 1 : 0;
      ties += matches;
    });
    return ties;
  };
  const auto write_weights = [&](std::int64_t r, std::int64_t begin, std::int64_t end, std::int64_t ties, C* buffer,
                                 bool loaded) {
    const C top = top_of(r), weight = C(1) / static_cast<C>(ties);
    const std::int64_t row = to.kept.offset(r);
    for_blocks(r, begin, end, buffer, loaded, [&](const C* x, std::int64_t at, std::int64_t count) {
      [[maybe_unused]] C weights[kBlock];
      C* y = weights;
      if constexpr (kDirect) y = static_cast<C*>(out.data) + row + at;
      for (std::int64_t i = 0; i < count; ++i) {
        const C share = kMagnitudes ? (x[i] > 0 ? weight : x[i] < 0 ? -weight : C(0)) : weight;
        y[i] = is_extreme<kMagnitudes>(x[i], top) ? share : C(0);
      }
      if constexpr (!kDirect) write_row(out, row + at, 1, count, weights);
    });
  };
  if (rows >= kFew || n < 2 * kReduceGrain) {
    return parallel_for(rows, row_grain(n), [&](std::int64_t begin, std::int64_t end) {
      C buffer[kBlock];
      for (std::int64_t r = begin; r < end; ++r) {
        const std::int64_t ties = ties_of(r, 0, n, buffer);
        write_weights(r, 0, n, ties, buffer, n <= kBlock);
      }
    });
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    std::atomic<std::int64_t> ties{0};
    parallel_for(n, kReduceGrain, [&](std::int64_t begin, std::int64_t end) {
      C buffer[kBlock];
      ties += ties_of(r, begin, end, buffer);
    });
    parallel_for(n, kReduceGrain, [&](std::int64_t begin, std::int64_t end) {
      C buffer[kBlock];
      write_weights(r, begin, end, ties.load(), buffer, false);
    });
  }
}

// 1 / (number of ties) where an element (its magnitude) equals the result, times its sign for magnitudes.
Status extreme_weights(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const NormAttributes*>(attributes);
  const ReducePlan from(in[0], a.dims), to(out[0], a.dims);
  const bool magnitudes = a.p != 0;
  if (out[0].numel == 0) return Status::ok;
  // The result is row-major over the kept dimensions.
  visit_floating(in[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = ComputeOf<T>;
    if (from.reduced.contiguous() && to.reduced.contiguous()) {
      return (magnitudes ? extreme_rows<true, T> : extreme_rows<false, T>)(in, out[0], from, to);
    }
    const auto matches = [magnitudes](C v, C top) {
      return magnitudes ? is_extreme<true>(v, top) : is_extreme<false>(v, top);
    };
    // Outputs that lie side by side are taken together where the reduced elements don't, so that memory is read in its
    // order.
    constexpr std::int64_t kTogether = 256;
    const bool columns =
        from.reduced.inner_stride() != 1 && from.kept.inner_stride() == 1 && to.kept.inner_stride() == 1;
    const std::int64_t inner = columns ? std::min(from.kept.inner_size(), to.kept.inner_size()) : 1;
    const std::int64_t n = from.reduced.numel, blocks = (inner + kTogether - 1) / kTogether;
    const auto place = [](const DimGroup& group, std::int64_t i) {
      return group.n <= 1 ? i * group.inner_stride() : group.offset(i);
    };
    const std::int64_t grain = row_grain(n * std::min(inner, kTogether));
    parallel_for(from.kept.numel / inner * blocks, grain, [&](std::int64_t begin, std::int64_t end) {
      C top[kTogether], weight[kTogether], values[kTogether], results[kTogether];
      std::int64_t ties[kTogether];
      for (std::int64_t block = begin; block < end; ++block) {
        const std::int64_t column = block % blocks * kTogether, first = block / blocks * inner + column;
        const std::int64_t width = std::min(kTogether, inner - column);
        const T* x = static_cast<const T*>(in[0].data) + from.kept.offset(first);
        T* y = static_cast<T*>(out[0].data) + to.kept.offset(first);
        for (std::int64_t c = 0; c < width; ++c) {
          top[c] = convert<C>(static_cast<const T*>(in[1].data)[first + c]);
          ties[c] = 0;
        }
        // The i-th of the reduced elements, 16 bits of neighbours in vectors.
        const auto load = [&](std::int64_t i) -> const C* {
          const T* row = x + place(from.reduced, i);
          if constexpr (std::is_same_v<T, C>) {
            return row;
          } else if (width > 1) {
            to_floats(row, width, values);
          } else {
            values[0] = convert<C>(row[0]);
          }
          return values;
        };
        for (std::int64_t i = 0; i < n; ++i) {
          const C* row = load(i);
          for (std::int64_t c = 0; c < width; ++c) ties[c] += matches(row[c], top[c]);
        }
        for (std::int64_t c = 0; c < width; ++c) weight[c] = C(1) / static_cast<C>(ties[c]);
        for (std::int64_t i = 0; i < n; ++i) {
          const C* row = load(i);
          T* to_row = y + place(to.reduced, i);
          for (std::int64_t c = 0; c < width; ++c) {
            const C v = row[c], sign = !magnitudes ? C(1) : v > 0 ? C(1) : v < 0 ? C(-1) : C(0);
            results[c] = matches(v, top[c]) ? weight[c] * sign : C(0);
          }
          if constexpr (std::is_same_v<T, C>) {
            std::copy(results, results + width, to_row);
          } else if (width > 1) {
            store_floats(out[0].dtype, to_row, width, results);
          } else {
            to_row[0] = convert<T>(results[0]);
          }
        }
      }
    });
  });
  return Status::ok;
}

// Scans carry their total in float64 (in 64 bits for integers) and round each result once. Rows of floats are taken in
// blocks, so that conversions are done in vectors, and kRows at a time, since a total waits for the one before it.
template <bool kProduct, int kRows>
void scan_rows(const TensorView& x, TensorView& y, const RowPlan& from, const RowPlan& to, bool reverse,
               std::int64_t row) {
  constexpr std::int64_t kBlock = 256;
  double values[kRows][kBlock], total[kRows];
  std::fill_n(total, kRows, kProduct ? 1.0 : 0.0);
  for (std::int64_t done = 0; done < from.length; done += kBlock) {
    const std::int64_t n = std::min(kBlock, from.length - done), at = reverse ? from.length - done - n : done;
    for (int k = 0; k < kRows; ++k) {
      read_row(x, from.rows.offset(row + k) + at * from.stride, from.stride, n, values[k]);
    }
    const std::int64_t step = reverse ? -1 : 1;
    for (std::int64_t j = 0, i = reverse ? n - 1 : 0; j < n; ++j, i += step) {
      for (int k = 0; k < kRows; ++k) {
        total[k] = kProduct ? total[k] * values[k][i] : total[k] + values[k][i];
        values[k][i] = total[k];
      }
    }
    for (int k = 0; k < kRows; ++k) {
      write_row(y, to.rows.offset(row + k) + at * to.stride, to.stride, n, values[k]);
    }
  }
}
// Short rows one behind the other, as many as a block holds: they are converted together.
template <bool kProduct>
void scan_short_rows(const TensorView& x, TensorView& y, std::int64_t rows, std::int64_t length, bool reverse) {
  constexpr std::int64_t kBlock = 1024;
  const std::int64_t together = kBlock / length;
  parallel_for((rows + together - 1) / together, row_grain(kBlock), [&](std::int64_t begin, std::int64_t end) {
    double values[kBlock];
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * together, n = std::min(together, rows - first) * length;
      read_row(x, first * length, 1, n, values);
      for (double* row = values; row < values + n; row += length) {
        double total = kProduct ? 1 : 0;
        for (std::int64_t j = 0; j < length; ++j) {
          double& v = row[reverse ? length - 1 - j : j];
          v = total = kProduct ? total * v : total + v;
        }
      }
      write_row(y, first * length, 1, n, values);
    }
  });
}
template <bool kProduct>
void scan_floats(const TensorView& x, TensorView& y, const RowPlan& from, const RowPlan& to, bool reverse) {
  const auto in_order = [](const RowPlan& p) { return short_rows_in_order(p.rows, p.length, p.stride); };
  if (in_order(from) && in_order(to)) {
    return scan_short_rows<kProduct>(x, y, from.rows.numel, from.length, reverse);
  }
  constexpr int kTogether = 8;
  parallel_for(from.rows.numel, row_grain(from.length), [&](std::int64_t begin, std::int64_t end) {
    std::int64_t r = begin;
    for (; r + kTogether <= end; r += kTogether) scan_rows<kProduct, kTogether>(x, y, from, to, reverse, r);
    for (; r < end; ++r) scan_rows<kProduct, 1>(x, y, from, to, reverse, r);
  });
}
// Rows whose elements lie side by side, row beside row: a stretch of rows together, so that memory is read in its
// order.
template <bool kProduct>
void scan_columns(const TensorView& x, TensorView& y, const RowPlan& from, const RowPlan& to, bool reverse) {
  constexpr std::int64_t kTogether = 128;
  const std::int64_t inner = std::min(from.rows.inner_size(), to.rows.inner_size());
  const std::int64_t blocks = (inner + kTogether - 1) / kTogether, grain = row_grain(from.length * kTogether);
  visit_floating(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(from.rows.numel / inner * blocks, grain, [&](std::int64_t begin, std::int64_t end) {
      double totals[kTogether];
      [[maybe_unused]] float values[kTogether];
      for (std::int64_t block = begin; block < end; ++block) {
        const std::int64_t column = block % blocks * kTogether, first = block / blocks * inner + column;
        const std::int64_t width = std::min(kTogether, inner - column);
        const T* rows = static_cast<const T*>(x.data) + from.rows.offset(first);
        T* results = static_cast<T*>(y.data) + to.rows.offset(first);
        std::fill_n(totals, width, kProduct ? 1.0 : 0.0);
        for (std::int64_t j = 0; j < from.length; ++j) {
          const std::int64_t i = reverse ? from.length - 1 - j : j;
          const auto add = [&](const auto* row) {
            for (std::int64_t c = 0; c < width; ++c) {
              const auto v = static_cast<double>(row[c]);
              totals[c] = kProduct ? totals[c] * v : totals[c] + v;
            }
          };
          if constexpr (std::is_floating_point_v<T>) {
            add(rows + i * from.stride);
            for (std::int64_t c = 0; c < width; ++c) results[i * to.stride + c] = static_cast<T>(totals[c]);
          } else {
            to_floats(rows + i * from.stride, width, values);
            add(values);
            store_doubles(y.dtype, results + i * to.stride, width, totals);
          }
        }
      }
    });
  });
}
template <bool kProduct>
void scan_integers(const TensorView& x, TensorView& y, const RowPlan& from, const RowPlan& to, bool reverse) {
  visit_numeric(x.dtype, [&](auto zero) {
    using In = decltype(zero);
    visit_numeric(y.dtype, [&](auto out_zero) {
      using Out = decltype(out_zero);
      if constexpr (std::is_integral_v<In> && std::is_integral_v<Out>)
        parallel_for(from.rows.numel, row_grain(from.length), [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t r = begin; r < end; ++r) {
            const In* row = static_cast<const In*>(x.data) + from.rows.offset(r);
            Out* result = static_cast<Out*>(y.data) + to.rows.offset(r);
            std::uint64_t total = kProduct ? 1 : 0;
            for (std::int64_t j = 0; j < from.length; ++j) {
              const std::int64_t i = reverse ? from.length - 1 - j : j;
              const auto v = static_cast<std::uint64_t>(static_cast<std::int64_t>(row[i * from.stride]));
              total = kProduct ? total * v : total + v;
              result[i * to.stride] = convert<Out>(static_cast<std::int64_t>(total));
            }
          }
        });
    });
  });
}

// The op gives floats for floats and integers for integers.
template <bool kProduct>
Status scan(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = dim_attributes(attributes);
  const RowPlan from(in[0], a.dim), to(out[0], a.dim);
  if (out[0].numel == 0) return Status::ok;
  const bool floating = is_floating(in[0].dtype);
  constexpr std::int64_t kFew = 8;  // rows that are not worth a walk across them
  const bool columns = from.stride != 1 && from.rows.inner_stride() == 1 && to.rows.inner_stride() == 1 &&
                       std::min(from.rows.inner_size(), to.rows.inner_size()) >= kFew;
  if (floating && columns && in[0].dtype == out[0].dtype) {
    scan_columns<kProduct>(in[0], out[0], from, to, a.reverse);
  } else if (floating) {
    scan_floats<kProduct>(in[0], out[0], from, to, a.reverse);
  } else {
    scan_integers<kProduct>(in[0], out[0], from, to, a.reverse);
  }
  return Status::ok;
}

// dx[i] = sum over k >= i of g[k] * product of x[j], j <= k, j != i. Before the first zero that is the sum of g y from
// i on, over x[i]; at the first zero the products are taken without it; after it all are zero. Blocks of a row come
// from behind, with the products of what is before each from a first pass: dividing them out again would be slower.
Status cumprod_backward(KernelContext* context, const TensorView* in, int, TensorView* out, int,
                        const void* attributes) {
  const std::int64_t dim = dim_attributes(attributes).dim;
  const RowPlan from_g(in[0], dim), from_x(in[1], dim), to(out[0], dim);
  if (out[0].numel == 0) return Status::ok;
  constexpr std::int64_t kBlock = 1024;
  const std::int64_t n = to.length, blocks = (n + kBlock - 1) / kBlock;
  double* products = nullptr;  // before each block of each row
  if (blocks > 1) {
    products = static_cast<double*>(
        context->workspace(context, static_cast<std::size_t>(to.rows.numel * blocks) * sizeof(double)));
    if (!products) return Status::out_of_memory;
  }
  if (runs_dry(context)) return Status::ok;
  parallel_for(to.rows.numel, row_grain(n), [&](std::int64_t begin, std::int64_t end) {
    double g[kBlock], x[kBlock], y[kBlock], first = 1;
    for (std::int64_t r = begin; r < end; ++r) {
      double* const before = blocks > 1 ? products + r * blocks : &first;
      const auto load = [&](const TensorView& t, const RowPlan& plan, std::int64_t at, std::int64_t count, double* v) {
        read_row(t, plan.rows.offset(r) + at * plan.stride, plan.stride, count, v);
      };
      const auto write = [&](std::int64_t at, std::int64_t count) {
        write_row(out[0], to.rows.offset(r) + at * to.stride, to.stride, count, y);
      };
      std::int64_t zero = 0;  // the first one's place, or n
      double product = 1;     // up to it
      while (zero < n) {
        const std::int64_t count = std::min(kBlock, n - zero);
        before[zero / kBlock] = product;
        load(in[1], from_x, zero, count, x);
        int zeros = 0;  // looking for one in vectors is quicker than for its place
        for (std::int64_t i = 0; i < count; ++i) zeros |= x[i] == 0;
        const std::int64_t nonzero = zeros ? std::find(x, x + count, 0.0) - x : count;
        if (zero + nonzero < n) {
          for (std::int64_t i = 0; i < nonzero; ++i) product *= x[i];
        }
        zero += nonzero;
        if (nonzero < count) break;
      }
      double sum = 0;
      for (std::int64_t at = zero; at < n; at += kBlock) {
        const std::int64_t count = std::min(kBlock, n - at);
        load(in[0], from_g, at, count, g);
        load(in[1], from_x, at, count, x);
        if (at == zero) x[0] = 1;
        for (std::int64_t i = 0; i < count; ++i) sum += g[i] * (product *= x[i]);
        std::fill_n(y, count, 0.0);
        write(at, count);
      }
      if (zero < n) {
        y[0] = sum;
        write(zero, 1);
      }
      sum = 0;
      for (std::int64_t at = (zero - 1) / kBlock * kBlock; zero > 0 && at >= 0; at -= kBlock) {
        const std::int64_t count = std::min(kBlock, zero - at);
        load(in[0], from_g, at, count, g);
        if (blocks > 1 || zero < n) load(in[1], from_x, at, count, x);  // else it is there
        product = before[at / kBlock];
        for (std::int64_t i = 0; i < count; ++i) y[i] = g[i] * (product *= x[i]);
        for (std::int64_t i = count - 1; i >= 0; --i) y[i] = sum += y[i];
        for (std::int64_t i = 0; i < count; ++i) y[i] /= x[i];
        write(at, count);
      }
    }
  });
  return Status::ok;
}

// The product of the others, from both ends. Rows are taken kRows at a time, since a product waits for the one before
// it, and in blocks: rows of a power of two would get into each other's way in the cache.
template <int kRows, class T>
void others_of_rows(const TensorView& in, TensorView& out, const RowPlan& from, const RowPlan& to, std::int64_t row) {
  using C = ComputeOf<T>;
  constexpr std::int64_t kBlock = 64;
  const T* x[kRows];
  T* y[kRows];
  C product[kRows], values[kRows][kBlock], others[kRows][kBlock];
  for (int k = 0; k < kRows; ++k) {
    x[k] = static_cast<const T*>(in.data) + from.rows.offset(row + k);
    y[k] = static_cast<T*>(out.data) + to.rows.offset(row + k);
    product[k] = 1;
  }
  // Where elements lie apart, across the rows, whose elements then share lines: along one row each line would be gone
  // from the first cache before the next row needs it.
  const auto each = [](auto* const* p, std::int64_t stride, std::int64_t at, std::int64_t n, auto&& f) {
    for (int k = 0; stride == 1 && k < kRows; ++k) {
      auto* const row = p[k] + at;
      for (std::int64_t i = 0; i < n; ++i) f(row[i], k, i);
    }
    for (std::int64_t i = 0; stride != 1 && i < n; ++i) {
      for (int k = 0; k < kRows; ++k) f(p[k][(at + i) * stride], k, i);
    }
  };
  const auto load = [&](auto* const* p, std::int64_t stride, std::int64_t at, std::int64_t n, C(*block)[kBlock]) {
    each(p, stride, at, n, [&](const T& v, int k, std::int64_t i) { block[k][i] = convert<C>(v); });
  };
  const auto store = [&](std::int64_t at, std::int64_t n) {
    each(y, to.stride, at, n, [&](T& v, int k, std::int64_t i) { v = convert<T>(others[k][i]); });
  };
  for (std::int64_t at = 0; at < to.length; at += kBlock) {
    const std::int64_t n = std::min(kBlock, to.length - at);
    load(x, from.stride, at, n, values);
    for (std::int64_t i = 0; i < n; ++i) {
      for (int k = 0; k < kRows; ++k) {
        others[k][i] = product[k];
        product[k] *= values[k][i];
      }
    }
    store(at, n);
  }
  std::fill_n(product, kRows, C(1));
  for (std::int64_t end = to.length; end > 0;) {
    const std::int64_t n = (end - 1) % kBlock + 1, at = end - n;
    load(x, from.stride, at, n, values);
    load(y, to.stride, at, n, others);
    for (std::int64_t i = n - 1; i >= 0; --i) {
      for (int k = 0; k < kRows; ++k) {
        others[k][i] *= product[k];
        product[k] *= values[k][i];
      }
    }
    store(at, n);
    end = at;
  }
}
Status prod_others(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const std::int64_t dim = dim_attributes(attributes).dim;
  const RowPlan from(in[0], dim), to(out[0], dim);
  if (out[0].numel == 0) return Status::ok;
  visit_floating(in[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kTogether = 8;
    parallel_for(to.rows.numel, row_grain(to.length * 4), [&](std::int64_t begin, std::int64_t end) {
      std::int64_t r = begin;
      for (; r + kTogether <= end; r += kTogether) others_of_rows<kTogether, T>(in[0], out[0], from, to, r);
      for (; r < end; ++r) others_of_rows<1, T>(in[0], out[0], from, to, r);
    });
  });
  return Status::ok;
}

Status div_or_zero(KernelContext*, const TensorView* in, int, TensorView* out, int, const void*) {
  const StridedLoop<3> loop({&out[0], &in[0], &in[1]});
  visit_floating(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = ComputeOf<T>;
    loop.for_each_run(kGrain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* step) {
      for (std::int64_t i = 0; i < n; ++i) {
        const C a = convert<C>(static_cast<const T*>(in[0].data)[at[1] + i * step[1]]);
        const C b = convert<C>(static_cast<const T*>(in[1].data)[at[2] + i * step[2]]);
        static_cast<T*>(out[0].data)[at[0] + i * step[0]] = convert<T>(b == 0 ? C(0) : a / b);
      }
    });
  });
  return Status::ok;
}
// sign(x) |x|^exponent, 0 of 0; of NaN NaN.
template <class C>
void signed_powers(const TensorView& in, TensorView& out, double exponent) {
  constexpr std::int64_t kBlock = 512;
  const StridedLoop<2> loop({&out, &in});
  loop.for_each_run(kGrain / 4, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* step) {
    C x[kBlock];
    for (std::int64_t i = 0; i < n; i += kBlock) {
      const std::int64_t count = std::min(kBlock, n - i);
      read_row(in, at[1] + i * step[1], step[1], count, x);
      for (std::int64_t k = 0; exponent == 0 && k < count; ++k) {
        const C v = x[k];
        x[k] = (v > 0 ? C(1) : C(0)) - (v < 0 ? C(1) : C(0)) + (v == v ? C(0) : v);
      }
      for (std::int64_t k = 0; exponent != 0 && k < count; ++k) {
        x[k] = x[k] == 0 ? C(0) : std::copysign(std::pow(std::abs(x[k]), static_cast<C>(exponent)), x[k]);
      }
      write_row(out, at[0] + i * step[0], step[0], count, x);
    }
  });
}
Status signed_pow(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const double exponent = static_cast<const ScalarAttributes*>(attributes)->value.floating;
  if (in[0].dtype == DType::f64 || out[0].dtype == DType::f64) {
    signed_powers<double>(in[0], out[0], exponent);
  } else {
    signed_powers<float>(in[0], out[0], exponent);
  }
  return Status::ok;
}

const RegisterCpuKernel scan_kernels[] = {
    {"argmax", kComputeDTypes, arg<true>},
    {"argmin", kComputeDTypes, arg<false>},
    {"max_dim", kComputeDTypes, extreme<true>},
    {"min_dim", kComputeDTypes, extreme<false>},
    {"put_along", kComputeDTypes, put_along},
    {"pick_along", kComputeDTypes, pick_along},
    {"extreme_weights", kFloatingDTypes, extreme_weights},
    {"cumsum", kComputeDTypes, scan<false>},
    {"cumprod", kComputeDTypes, scan<true>},
    {"cumprod_backward", kFloatingDTypes, cumprod_backward, kRunsDry},
    {"prod_others", kFloatingDTypes, prod_others},
    {"div_or_zero", kFloatingDTypes, div_or_zero},
    {"signed_pow", kFloatingDTypes, signed_pow},
};

}  // namespace
}  // namespace halfstep::cpu
