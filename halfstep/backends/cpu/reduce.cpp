// SPDX-License-Identifier: Apache-2.0
// Reductions to one number an output: sum, mean, norms, products, extremes, variance, logsumexp.
//
// Inputs are read as blocks of float32 (float64 for float64). A block of some hundred elements a lane is added up in
// that type, blocks are added up in float64, and long reductions are cut into pieces that depend on the shape only: so
// the error grows with the block and not with the length, and no result depends on the number of threads. A block whose
// terms leave the range of float32 is taken again in float64, which has room for their squares.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "halfstep/backends/cpu/column_sums.h"
#include "halfstep/backends/cpu/convert_block.h"
#include "halfstep/backends/cpu/exp_block.h"
#include "halfstep/backends/cpu/fold.h"
#include "halfstep/backends/cpu/reduce_plan.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/visit.h"

namespace halfstep::cpu {
namespace {

using namespace fold;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kReduceBlock = 2048;  // elements of a buffer

template <class T, class C>
void read(const void* data, std::int64_t at, std::int64_t stride, std::int64_t n, C* to) {
  const T* from = static_cast<const T*>(data) + at;
  if constexpr (std::is_same_v<C, float>) {
    if (stride == 1) return to_floats(from, n, to);
  }
  for (std::int64_t i = 0; i < n; ++i) to[i] = convert<C>(from[i * stride]);
}

// How elements of a tensor come as C: straight from memory where they are C, else through a buffer.
template <class C>
struct Reader {
  const void* data;
  DType dtype;
  bool direct = false;
  void (*function)(const void* data, std::int64_t at, std::int64_t stride, std::int64_t n, C* to) = nullptr;

  explicit Reader(const TensorView& x) : data(x.data), dtype(x.dtype) {
    if constexpr (std::is_same_v<C, double>) {
      direct = x.dtype == DType::f64;
      function = direct ? read<double, double> : read<float, double>;
    } else {
      direct = x.dtype == DType::f32;
      function = direct ? read<float, float> : x.dtype == DType::f16 ? read<Half, float> : read<BFloat16, float>;
    }
  }
  const C* at(std::int64_t offset) const { return static_cast<const C*>(data) + offset; }  // where `direct`
};

// In vectors, whose exponential is within 1.1 units in the last place.
double fold_block(const SumExponentials&, const float* x, std::int64_t n, float shift) {
  return exp_sum(x, n, shift, nullptr);
}

// Elements [begin, end) of the reduced dimensions of one output.
template <class Op, class C>
double fold_range(const Op& op, const Reader<C>& x, std::int64_t base, const DimGroup& reduced, std::int64_t begin,
                  std::int64_t end, C shift) {
  double total = Op::kInit;
  C buffer[kReduceBlock];
  std::int64_t held = 0;
  const auto flush = [&] {
    if (held > 0) total = op.combine(total, fold_block(op, static_cast<const C*>(buffer), held, shift));
    held = 0;
  };
  reduced.for_runs(begin, end, [&](std::int64_t offset, std::int64_t n, std::int64_t stride) {
    for (std::int64_t i = 0; i < n;) {
      if (x.direct && stride == 1 && n - i >= 64) {
        const std::int64_t run = std::min<std::int64_t>(n - i, 4 * kReduceBlock);
        total = op.combine(total, fold_block(op, x.at(base + offset + i), run, shift));
        i += run;
        continue;
      }
      const std::int64_t run = std::min(n - i, kReduceBlock - held);
      x.function(x.data, base + offset + i * stride, stride, run, buffer + held);
      held += run;
      i += run;
      if (held == kReduceBlock) flush();
    }
  });
  flush();
  return total;
}

constexpr std::int64_t kReduceColumns = 256;  // columns folded side by side

// Calls f(row) for rows [begin, end) of `columns` elements that lie next to each other.
template <class C, class F>
void for_rows(const Reader<C>& x, std::int64_t base, const DimGroup& reduced, std::int64_t begin, std::int64_t end,
              std::int64_t columns, const F& f) {
  C buffer[kReduceColumns];
  reduced.for_runs(begin, end, [&](std::int64_t offset, std::int64_t n, std::int64_t stride) {
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t at = base + offset + i * stride;
      if (!x.direct) x.function(x.data, at, 1, columns, buffer);
      f(x.direct ? x.at(at) : buffer);
    }
  });
}

// Takes in float64 those of the columns whose float32 sum `acc` of rows [begin, end) is spoilt: none depends on its
// neighbours.
template <class Op>
[[gnu::noinline]] void fold_columns_again(const Op& op, const Reader<float>& x, std::int64_t base,
                                          const DimGroup& reduced, std::int64_t begin, std::int64_t end,
                                          std::int64_t columns, const float* shifts, double* acc) {
  int again[kReduceColumns] = {}, any = 0;
  for_rows(x, base, reduced, begin, end, columns, [&](const float* row) {
    for (std::int64_t c = 0; c < columns; ++c) again[c] |= row[c] != shifts[c];
  });
  for (std::int64_t c = 0; c < columns; ++c) any |= again[c] &= spoilt<Op>(static_cast<float>(acc[c]), end - begin);
  if (!any) return;
  double wide[kReduceColumns];
  std::fill_n(wide, columns, Op::kInit);
  for_rows(x, base, reduced, begin, end, columns, [&](const float* row) {
    for (std::int64_t c = 0; c < columns; ++c) {
      wide[c] = op.fold(wide[c], static_cast<double>(row[c]), static_cast<double>(shifts[c]));
    }
  });
  for (std::int64_t c = 0; c < columns; ++c) {
    if (again[c]) acc[c] = wide[c];
  }
}

// A row of elements into one accumulator each.
template <class Op, class C>
void fold_row(const Op& op, const C* row, const C* shifts, std::int64_t columns, C* acc) {
  std::int64_t c = 0;
  if constexpr (!Op::kScalar) {
    constexpr std::int64_t kLanes = 32 / sizeof(C);
    for (; c + kLanes <= columns; c += kLanes) {
      Vec<C> total, v, shift;
      std::memcpy(&total, acc + c, sizeof total);
      std::memcpy(&v, row + c, sizeof v);
      std::memcpy(&shift, shifts + c, sizeof shift);
      total = op.fold(total, v, shift);
      std::memcpy(acc + c, &total, sizeof total);
    }
  }
  for (; c < columns; ++c) acc[c] = op.fold(acc[c], row[c], shifts[c]);
}
void fold_row(const SumExponentials&, const float* row, const float* shifts, std::int64_t columns, float* acc) {
  exp_add(row, shifts, columns, acc);
}

// Rows [begin, end) into one accumulator for each column.
template <class Op, class C>
void fold_rows(const Op& op, const Reader<C>& x, std::int64_t base, const DimGroup& reduced, std::int64_t begin,
               std::int64_t end, std::int64_t columns, const C* shifts, C* acc) {
  if constexpr (std::is_same_v<Op, Sum> && std::is_same_v<C, float>) {
    reduced.for_runs(begin, end, [&](std::int64_t offset, std::int64_t n, std::int64_t stride) {
      add_rows_to_sums(x.dtype, element(x.dtype, x.data, base + offset), n, stride, columns, acc);
    });
  } else {
    for_rows(x, base, reduced, begin, end, columns, [&](const C* row) { fold_row(op, row, shifts, columns, acc); });
  }
}

// `rows` rows of `length` elements that lie behind each other, turned to columns of a row each.
template <class C>
void turn_rows(const C* from, std::int64_t rows, std::int64_t length, C* to) {
  for (std::int64_t i = 0; i < length; ++i) {
    for (std::int64_t r = 0; r < rows; ++r) to[i * rows + r] = from[r * length + i];
  }
}

// Short rows that lie behind each other, an output each: all are folded side by side, as columns.
template <class Op, class C>
void fold_short_rows(const Op& op, const Reader<C>& x, std::int64_t at, std::int64_t rows, std::int64_t length,
                     const double* shift, double* total) {
  C buffer[kReduceBlock], columns[kReduceBlock], acc[kReduceColumns], shifts[kReduceColumns];
  if (!x.direct) x.function(x.data, at, 1, rows * length, buffer);
  const C* const from = x.direct ? x.at(at) : buffer;
  turn_rows(from, rows, length, columns);
  for (std::int64_t r = 0; r < rows; ++r) shifts[r] = shift ? static_cast<C>(shift[r]) : C(0);
  std::fill_n(acc, rows, static_cast<C>(Op::kInit));
  for (std::int64_t i = 0; i < length; ++i) fold_row(op, columns + i * rows, shifts, rows, acc);
  int again = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    total[r] = static_cast<double>(acc[r]);
    if constexpr (std::is_same_v<C, float> && Op::kTerms != Terms::kept) again |= spoilt<Op>(acc[r], length);
  }
  if constexpr (std::is_same_v<C, float> && Op::kTerms != Terms::kept) {
    for (std::int64_t r = 0; again && r < rows; ++r) {
      if (spoilt<Op>(acc[r], length)) total[r] = fold_again(op, from + r * length, length, shifts[r], total[r]);
    }
  }
}

// Rows [begin, end) of `columns` outputs that lie next to each other.
template <class Op, class C>
void fold_columns(const Op& op, const Reader<C>& x, std::int64_t base, const DimGroup& reduced, std::int64_t begin,
                  std::int64_t end, std::int64_t columns, const double* shift, double* total) {
  constexpr std::int64_t kRows = 128;
  static constexpr C kNoShifts[kReduceColumns] = {};
  C acc[kReduceColumns], given[kReduceColumns];
  if (shift) std::transform(shift, shift + columns, given, [](double v) { return static_cast<C>(v); });
  const C* const shifts = shift ? given : kNoShifts;
  if (begin >= end) std::fill_n(total, columns, Op::kInit);
  // What a block gives is the total so far, or joins it.
  const auto take = [&](const auto* block, bool only) {
    for (std::int64_t c = 0; only && c < columns; ++c) total[c] = static_cast<double>(block[c]);
    for (std::int64_t c = 0; !only && c < columns; ++c) total[c] = op.combine(total[c], static_cast<double>(block[c]));
  };
  for (std::int64_t first = begin; first < end; first += kRows) {
    const std::int64_t last = std::min(first + kRows, end);
    std::fill_n(acc, columns, static_cast<C>(Op::kInit));
    fold_rows(op, x, base, reduced, first, last, columns, shifts, acc);
    if constexpr (std::is_same_v<C, float> && Op::kTerms != Terms::kept) {
      int again = 0;
      for (std::int64_t c = 0; c < columns; ++c) again |= spoilt<Op>(acc[c], last - first);
      if (again) {
        double sums[kReduceColumns];
        std::copy_n(acc, columns, sums);
        fold_columns_again(op, x, base, reduced, first, last, columns, shifts, sums);
        take(sums, first == begin);
        continue;
      }
    }
    take(acc, first == begin);
  }
}

// Folds every output and hands `finish(first output, values, count)` the results. False: out of memory.
template <class C, class Op, class Finish>
bool fold_all(KernelContext* context, const Op& op, const TensorView& view, const ReducePlan& plan, const double* shift,
              const Finish& finish) {
  const std::int64_t outputs = plan.kept.numel, length = plan.reduced.numel;
  if (outputs == 0) return true;
  const Reader<C> x(view);
  if (plan.reduced.n == 1 && short_rows_in_order(plan.kept, length, plan.reduced.inner_stride())) {
    if (runs_dry(context)) return true;
    const std::int64_t together = std::min(kReduceColumns, kReduceBlock / length);
    parallel_for((outputs + together - 1) / together, row_grain(together * length),
                 [&](std::int64_t begin, std::int64_t end) {
                   double values[kReduceColumns];
                   for (std::int64_t i = begin; i < end; ++i) {
                     const std::int64_t first = i * together, count = std::min(together, outputs - first);
                     fold_short_rows(op, x, first * length, count, length, shift ? shift + first : nullptr, values);
                     finish(first, values, count);
                   }
                 });
    return true;
  }
  const std::int64_t inner = plan.kept.inner_size();
  const bool by_columns =
      inner >= 4 && plan.kept.inner_stride() == 1 && (plan.reduced.inner_stride() != 1 || length == 1);
  const std::int64_t width = by_columns ? std::min(inner, kReduceColumns) : 1;
  const std::int64_t blocks_inner = by_columns ? (inner + width - 1) / width : 1;
  const std::int64_t blocks = by_columns ? outputs / inner * blocks_inner : outputs;
  // Few outputs of long reductions: pieces, whose number depends on the shape only.
  constexpr std::int64_t kPiece = 1 << 16;
  const std::int64_t piece_length = std::max<std::int64_t>(kPiece / width, 128);
  const std::int64_t pieces =
      blocks < 32 && length >= 2 * piece_length ? (length + piece_length - 1) / piece_length : 1;
  double* partial = nullptr;
  if (pieces > 1) {
    partial =
        static_cast<double*>(context->workspace(context, static_cast<std::size_t>(pieces * outputs) * sizeof(double)));
    if (!partial) return false;
  }
  if (runs_dry(context)) return true;
  const std::int64_t work = std::min(length, pieces > 1 ? piece_length : length) * width;
  parallel_for(blocks * pieces, row_grain(work), [&](std::int64_t begin, std::int64_t end) {
    double values[kReduceColumns];
    std::int64_t held = 0;  // single outputs are handed on together
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t piece = i / blocks, block = i % blocks;
      const std::int64_t from = piece * piece_length, to = pieces > 1 ? std::min(length, from + piece_length) : length;
      std::int64_t first = block, count = 1;
      if (by_columns) {
        const std::int64_t outer = block / blocks_inner, column = block % blocks_inner * width;
        first = outer * inner + column;
        count = std::min(width, inner - column);
        fold_columns(op, x, plan.kept.offset(first), plan.reduced, from, to, count, shift ? shift + first : nullptr,
                     values);
      } else {
        values[held] = fold_range(op, x, plan.kept.offset(block), plan.reduced, from, to,
                                  shift ? static_cast<C>(shift[block]) : C(0));
        if (!partial && ++held < kReduceColumns && i + 1 < end) continue;
        if (!partial) {
          first = block + 1 - held;
          count = held;
          held = 0;
        }
      }
      if (partial) {
        std::copy_n(values, count, partial + piece * outputs + first);
      } else {
        finish(first, values, count);
      }
    }
  });
  if (partial) {
    for (std::int64_t o = 0; o < outputs; ++o) {
      double total = partial[o];
      for (std::int64_t p = 1; p < pieces; ++p) total = op.combine(total, partial[p * outputs + o]);
      finish(o, &total, 1);
    }
  }
  return true;
}

// With the input's type and the type it is computed in; `wide` asks for float64.
template <class Op, class Finish>
bool fold_any(KernelContext* context, const Op& op, const TensorView& x, const ReducePlan& plan, const double* shift,
              bool wide, const Finish& finish) {
  if (wide || x.dtype == DType::f64) return fold_all<double>(context, op, x, plan, shift, finish);
  return fold_all<float>(context, op, x, plan, shift, finish);
}

bool floating(const TensorView& x) { return x.dtype <= DType::bf16 && is_floating(x.dtype); }

// Stores float64 results in the output's dtype, each rounded once.
void store_results(TensorView& out, std::int64_t first, const double* values, std::int64_t n) {
  if (floating(out)) return write_row(out, first, 1, n, values);
  visit_all(out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = static_cast<T*>(out.data) + first;
    for (std::int64_t i = 0; i < n; ++i) to[i] = convert<T>(values[i]);
  });
}
// `finish` that applies f to each value and stores it.
template <class F>
auto store_as(TensorView& out, const F& f) {
  return [&out, f](std::int64_t first, double* values, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) values[i] = f(values[i]);
    store_results(out, first, values, n);
  };
}

Status outcome(bool ok) { return ok ? Status::ok : Status::failed; }

template <class Op, class F>
Status reduce_floats(KernelContext* context, const Op& op, const TensorView* in, TensorView* out, const IntList& dims,
                     const F& f) {
  const ReducePlan plan(in[0], dims);
  return outcome(fold_any(context, op, in[0], plan, nullptr, in[0].dtype == DType::f32 && out[0].dtype == DType::f64,
                          store_as(out[0], f)));
}

void store_integer(TensorView& out, std::int64_t at, std::int64_t value) {
  visit_all(out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    static_cast<T*>(out.data)[at] = convert<T>(value);
  });
}

// Integers and bools, exactly in 64 bits.
template <class F>
Status reduce_integers(const TensorView* in, TensorView* out, const IntList& dims, std::int64_t init, const F& f) {
  const ReducePlan plan(in[0], dims);
  visit_integral(in[0].dtype, [&](auto zero) {
    using In = decltype(zero);
    const In* x = static_cast<const In*>(in[0].data);
    parallel_for(out[0].numel, row_grain(plan.reduced.numel), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t o = begin; o < end; ++o) {
        const In* base = x + plan.kept.offset(o);
        std::int64_t acc = init;
        plan.reduced.for_runs(0, plan.reduced.numel, [&](std::int64_t at, std::int64_t n, std::int64_t stride) {
          for (std::int64_t i = 0; i < n; ++i) acc = f(acc, static_cast<std::int64_t>(base[at + i * stride]));
        });
        store_integer(out[0], o, acc);
      }
    });
  });
  return Status::ok;
}

std::int64_t wrapping_add(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
}
std::int64_t wrapping_mul(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
}
constexpr auto same = [](double v) { return v; };

const ReduceAttributes& reduce_attributes(const void* attributes) {
  return *static_cast<const ReduceAttributes*>(attributes);
}

Status sum(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const IntList& dims = reduce_attributes(attributes).dims;
  if (floating(in[0])) return reduce_floats(context, Sum{}, in, out, dims, same);
  return reduce_integers(in, out, dims, 0, wrapping_add);
}
Status mean(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const double n = static_cast<double>(in[0].numel) / static_cast<double>(out[0].numel);
  return reduce_floats(context, Sum{}, in, out, reduce_attributes(attributes).dims, [n](double v) { return v / n; });
}
Status prod(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const IntList& dims = reduce_attributes(attributes).dims;
  if (floating(in[0])) return reduce_floats(context, Product{}, in, out, dims, same);
  return reduce_integers(in, out, dims, 1, wrapping_mul);
}
Status amax(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const IntList& dims = reduce_attributes(attributes).dims;
  if (floating(in[0])) return reduce_floats(context, Max{}, in, out, dims, same);
  return reduce_integers(in, out, dims, INT64_MIN, [](std::int64_t a, std::int64_t b) { return std::max(a, b); });
}
Status amin(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const IntList& dims = reduce_attributes(attributes).dims;
  if (floating(in[0])) return reduce_floats(context, Min{}, in, out, dims, same);
  return reduce_integers(in, out, dims, INT64_MAX, [](std::int64_t a, std::int64_t b) { return std::min(a, b); });
}
Status count_nonzero(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const IntList& dims = reduce_attributes(attributes).dims;
  if (floating(in[0])) return reduce_floats(context, CountNonzero{}, in, out, dims, same);
  return reduce_integers(in, out, dims, 0, [](std::int64_t a, std::int64_t b) { return a + (b != 0 ? 1 : 0); });
}
Status any(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const IntList& dims = reduce_attributes(attributes).dims;
  if (floating(in[0])) {
    return reduce_floats(context, CountNonzero{}, in, out, dims, [](double v) { return v > 0 ? 1.0 : 0.0; });
  }
  return reduce_integers(in, out, dims, 0, [](std::int64_t a, std::int64_t b) -> std::int64_t { return a | (b != 0); });
}
Status all(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const IntList& dims = reduce_attributes(attributes).dims;
  if (floating(in[0])) {
    const double n = static_cast<double>(in[0].numel) / static_cast<double>(std::max<std::int64_t>(out[0].numel, 1));
    return reduce_floats(context, CountNonzero{}, in, out, dims, [n](double v) { return v == n ? 1.0 : 0.0; });
  }
  return reduce_integers(in, out, dims, 1, [](std::int64_t a, std::int64_t b) -> std::int64_t { return a & (b != 0); });
}

Status norm(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const auto& a = *static_cast<const NormAttributes*>(attributes);
  const double p = a.p;
  if (p == 2) return reduce_floats(context, SumSquares{}, in, out, a.dims, [](double v) { return std::sqrt(v); });
  if (p == 1) return reduce_floats(context, SumAbs{}, in, out, a.dims, same);
  if (p == 0) return reduce_floats(context, CountNonzero{}, in, out, a.dims, same);
  if (p == kInfinity) return reduce_floats(context, MaxAbs{}, in, out, a.dims, same);
  if (p == -kInfinity) return reduce_floats(context, MinAbs{}, in, out, a.dims, same);
  SumPowers powers;
  powers.p = p;
  return reduce_floats(context, powers, in, out, a.dims, [p](double v) { return std::pow(v, 1 / p); });
}

// The first pass of two: one number an output, in float64.
template <class Op, class F>
double* first_pass(KernelContext* context, const Op& op, const TensorView& x, const ReducePlan& plan, bool wide,
                   const F& f) {
  auto* result =
      static_cast<double*>(context->workspace(context, static_cast<std::size_t>(plan.kept.numel) * sizeof(double)));
  if (!result) return nullptr;
  const bool ok =
      fold_any(context, op, x, plan, nullptr, wide, [&](std::int64_t first, double* values, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i) result[first + i] = f(values[i]);
      });
  return ok ? result : nullptr;
}

// var, std, var_mean: the mean first, then the squared distances from it.
template <class F>
Status variance(KernelContext* context, const TensorView* in, TensorView* out, int outputs, const void* attributes,
                const F& f) {
  const auto& a = *static_cast<const VarAttributes*>(attributes);
  const ReducePlan plan(in[0], a.dims);
  const double n = static_cast<double>(plan.reduced.numel);
  double* means = first_pass(context, Sum{}, in[0], plan, false, [n](double v) { return v / n; });
  if (!means) return Status::failed;
  const double divisor = std::max(n - a.correction, 0.0);
  const bool ok = fold_any(context, SumSquaredDistances{}, in[0], plan, means, false,
                           store_as(out[0], [&](double v) { return f(v / divisor); }));
  if (outputs > 1) store_as(out[1], same)(0, means, plan.kept.numel);
  return outcome(ok);
}
Status var(KernelContext* context, const TensorView* in, int, TensorView* out, int m, const void* attributes) {
  return variance(context, in, out, m, attributes, same);
}
Status std_deviation(KernelContext* context, const TensorView* in, int, TensorView* out, int m,
                     const void* attributes) {
  return variance(context, in, out, m, attributes, [](double v) { return std::sqrt(v); });
}

Status logsumexp(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const ReducePlan plan(in[0], reduce_attributes(attributes).dims);
  // An infinite shift would give inf - inf: such rows are summed as they are.
  double* shift = first_pass(context, Max{}, in[0], plan, false, [](double v) { return std::isfinite(v) ? v : 0.0; });
  if (!shift) return Status::failed;
  const bool ok = fold_any(context, SumExponentials{}, in[0], plan, shift, false,
                           [&](std::int64_t first, double* values, std::int64_t n) {
                             for (std::int64_t i = 0; i < n; ++i) shift[first + i] += std::log(values[i]);
                           });
  if (ok) store_as(out[0], same)(0, shift, plan.kept.numel);
  return outcome(ok);
}

Status dot(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void*) {
  const std::int64_t n = in[0].numel;
  const std::int64_t sa = in[0].strides[0], sb = in[1].strides[0];
  if (!floating(in[0])) {
    std::int64_t total = 0;
    visit_integral(in[0].dtype, [&](auto zero) {
      using T = decltype(zero);
      const T *a = static_cast<const T*>(in[0].data), *b = static_cast<const T*>(in[1].data);
      for (std::int64_t i = 0; i < n; ++i) total = wrapping_add(total, wrapping_mul(a[i * sa], b[i * sb]));
    });
    store_integer(out[0], 0, total);
    return Status::ok;
  }
  // Pieces of one size, whatever the threads, each with its own sum.
  constexpr std::int64_t kPiece = 1 << 14;
  const std::int64_t pieces = (n + kPiece - 1) / kPiece;
  auto* sums = static_cast<double*>(context->workspace(context, static_cast<std::size_t>(pieces + 1) * sizeof(double)));
  if (!sums) return Status::failed;
  visit_floating(in[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = ComputeOf<T>;
    parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end) {
      constexpr std::int64_t kRun = 512;
      C x_buffer[kRun], y_buffer[kRun];
      // Elements of C that lie side by side are used where they are.
      const auto run_of = [](const void* data, std::int64_t at, std::int64_t stride, std::int64_t count, C* buffer) {
        if constexpr (std::is_same_v<T, C>) {
          if (stride == 1) return static_cast<const C*>(data) + at;
        }
        read<T>(data, at * stride, stride, count, buffer);
        return static_cast<const C*>(buffer);
      };
      for (std::int64_t piece = begin; piece < end; ++piece) {
        double total = 0;
        for (std::int64_t i = piece * kPiece; i < std::min(n, (piece + 1) * kPiece); i += kRun) {
          const std::int64_t run = std::min(kRun, std::min(n, (piece + 1) * kPiece) - i);
          const C* x = run_of(in[0].data, i, sa, run, x_buffer);
          const C* y = run_of(in[1].data, i, sb, run, y_buffer);
          double sum = dot_of(x, y, run);
          if (!std::isfinite(sum)) {  // the sum may fit float64
            for (std::int64_t j = 0; j < run; ++j) x_buffer[j] = x[j] * y[j];
            sum = fold_block(Sum{}, static_cast<const C*>(x_buffer), run, C(0));
          }
          total += sum;
        }
        sums[piece] = total;
      }
    });
  });
  double total = 0;
  for (std::int64_t piece = 0; piece < pieces; ++piece) total += sums[piece];
  store_results(out[0], 0, &total, 1);
  return Status::ok;
}

const RegisterCpuKernel reduce_kernels[] = {
    {"sum", kIntegralDTypes, sum},
    {"sum", {DType::boolean}, sum},
    {"sum", kFloatingDTypes, sum, kRunsDry},
    {"mean", kFloatingDTypes, mean, kRunsDry},
    {"prod", kComputeDTypes, prod},
    {"amax", kIntegralDTypes, amax},
    {"amax", {DType::boolean}, amax},
    {"amax", kFloatingDTypes, amax, kRunsDry},
    {"amin", kIntegralDTypes, amin},
    {"amin", {DType::boolean}, amin},
    {"amin", kFloatingDTypes, amin, kRunsDry},
    {"count_nonzero", kComputeDTypes, count_nonzero},
    {"any", kComputeDTypes, any},
    {"all", kComputeDTypes, all},
    {"norm", kFloatingDTypes, norm, kRunsDry},
    {"var", kFloatingDTypes, var},
    {"std", kFloatingDTypes, std_deviation},
    {"var_mean", kFloatingDTypes, var},
    {"logsumexp", kFloatingDTypes, logsumexp},
    {"dot", kNumericDTypes, dot},
};

}  // namespace
}  // namespace halfstep::cpu
