// SPDX-License-Identifier: Apache-2.0
// pad moves elements: runs of the input where there is no padding, single elements at the edges. Its backward pass
// gathers, so that no two threads write to one place.
#include <cstring>
#include <span>

#include "halfstep/backends/cpu/move.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/window.h"
#include "halfstep/core/dtype.h"

namespace halfstep::cpu {
namespace {

constexpr std::int32_t kConstant = 0, kReflect = 1, kReplicate = 2, kCircular = 3;

/// One dimension of the padded tensor.
struct PadDim {
  std::int64_t size, inner;        ///< with padding, and without
  std::int64_t before, after;      ///< negative: cut off
  std::int64_t padded_step, step;  ///< strides of the padded tensor and of the other
  std::int32_t mode;

  bool plain() const { return before == 0 && after == 0; }
  /// Where place i of the padded tensor comes from; -1: from nowhere.
  std::int64_t source(std::int64_t i) const {
    const std::int64_t at = i - before;
    if (mode == kCircular) {
      // What was cut off doesn't come back at the other side.
      const std::int64_t low = std::max<std::int64_t>(-before, 0);
      const std::int64_t n = inner - low - std::max<std::int64_t>(-after, 0);
      return low + ((at - low) % n + n) % n;
    }
    if (at >= 0 && at < inner) return at;
    if (mode == kReflect) return at < 0 ? -at : 2 * (inner - 1) - at;
    if (mode == kReplicate) return at < 0 ? 0 : inner - 1;
    return -1;
  }
  /// The places that are not padding.
  std::int64_t first() const { return std::clamp<std::int64_t>(before, 0, size); }
  std::int64_t last() const { return std::clamp<std::int64_t>(size - after, first(), size); }
};

/// The dimensions in the order of the padded tensor's memory, the innermost first; those without padding that lie
/// behind each other in both are one.
struct PadPlan {
  int n = 0;
  PadDim dims[kMaxDims];

  PadPlan(const TensorView& padded, const TensorView& other, const PadAttributes& a) {
    int order[kMaxDims], count = 0;
    for (int i = padded.ndim - 1; i >= 0; --i) {
      if (padded.sizes[i] == 1 && a.before.values[i] == 0 && a.after.values[i] == 0) continue;
      int at = count++;
      for (; at > 0 && padded.strides[i] < padded.strides[order[at - 1]]; --at) order[at] = order[at - 1];
      order[at] = i;
    }
    for (int k = 0; k < count; ++k) {
      const int i = order[k];
      const PadDim dim{padded.sizes[i],  other.sizes[i], a.before.values[i], a.after.values[i], padded.strides[i],
                       other.strides[i], a.mode};
      PadDim* last = n > 0 ? &dims[n - 1] : nullptr;
      if (last && last->plain() && dim.plain() && dim.padded_step == last->padded_step * last->size &&
          dim.step == last->step * last->inner) {
        last->size *= dim.size;
        last->inner *= dim.inner;
      } else {
        dims[n++] = dim;
      }
    }
  }
  /// Elements at the inner end that lie side by side in both and have no padding; their dimension is taken out.
  std::int64_t take_block() {
    if (n == 0 || !dims[0].plain() || dims[0].padded_step != 1 || dims[0].step != 1) return 1;
    const std::int64_t block = dims[0].size;
    for (int i = 1; i < n; ++i) dims[i - 1] = dims[i];
    --n;
    return block;
  }
  /// The innermost dimension that is left, taken out.
  PadDim take_row() {
    if (n == 0) return {1, 1, 0, 0, 1, 1, 0};
    const PadDim row = dims[0];
    for (int i = 1; i < n; ++i) dims[i - 1] = dims[i];
    --n;
    return row;
  }
};

// n elements side by side. Rows of a few dozen bytes take longer to call a function for than to copy: two pieces, which
// overlap in the middle.
template <class U>
void copy_straight(U* to, const U* from, std::int64_t n) {
  const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(U);
  const auto in_pieces = [&](auto size) {
    unsigned char first[size()], last[size()];
    std::memcpy(first, from, size());
    std::memcpy(last, reinterpret_cast<const unsigned char*>(from) + (bytes - size()), size());
    std::memcpy(to, first, size());
    std::memcpy(reinterpret_cast<unsigned char*>(to) + (bytes - size()), last, size());
  };
  if (bytes > 64) {
    std::memcpy(to, from, bytes);
  } else if (bytes >= 32) {
    in_pieces(std::integral_constant<std::size_t, 32>());
  } else if (bytes >= 16) {
    in_pieces(std::integral_constant<std::size_t, 16>());
  } else if (bytes >= 8) {
    in_pieces(std::integral_constant<std::size_t, 8>());
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i] = from[i];
  }
}
template <class U>
void copy_run(U* to, std::int64_t to_step, const U* from, std::int64_t from_step, std::int64_t n) {
  if (to_step == 1 && from_step == 1) {
    copy_straight(to, from, n);
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i * to_step] = from[i * from_step];
  }
}

/// Rows without gaps whose padding is one value, which differ in their place only: all that is said of them is in
/// registers, since rows of narrow images take a few instructions.
template <class U>
struct SolidRows {
  std::int64_t before, copied, after;  ///< elements of a row
  U value;
  /// Rows [i, stop) along `dim`; `from` is null where all are padding.
  void operator()(PadDim dim, std::int64_t i, std::int64_t stop, U* to, const U* from) const {
    const SolidRows row = *this;  // which no store to `to` changes
    for (; i < stop; ++i) {
      U* y = to + i * dim.padded_step;
      const std::int64_t at = i - dim.before;
      if (!from || at < 0 || at >= dim.inner) {
        std::fill_n(y, row.before + row.copied + row.after, row.value);
        continue;
      }
      for (std::int64_t k = 0; k < row.before; ++k) y[k] = row.value;
      copy_straight(y + row.before, from + at * dim.step, row.copied);
      for (std::int64_t k = 0; k < row.after; ++k) y[row.before + row.copied + k] = row.value;
    }
  }
};

template <class U>
void pad_elements(const TensorView& x, const TensorView& y, const PadAttributes& a, U value) {
  PadPlan plan(y, x, a);
  const std::int64_t block = plan.take_block();
  const PadDim row = plan.take_row();
  const bool solid = row.padded_step == block && row.step == block;
  const std::int64_t first = row.first(), last = row.last();
  const bool same = solid && row.mode == kConstant && first < last;
  const SolidRows<U> solid_rows{first * block, (last - first) * block, (row.size - last) * block, value};
  const auto edge = [&](U* to, const U* from, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t source = from ? row.source(i) : -1;
      if (block == 1) {
        to[i * row.padded_step] = source < 0 ? value : from[source * row.step];
      } else if (source < 0) {
        std::fill_n(to + i * row.padded_step, block, value);
      } else {
        copy_run(to + i * row.padded_step, 1, from + source * row.step, 1, block);
      }
    }
  };
  const auto middle = [&](U* to, const U* from) {
    if (solid) return copy_straight(to, from, (last - first) * block);
    if (block == 1) return copy_run(to, row.padded_step, from, row.step, last - first);
    for (std::int64_t i = 0; i < last - first; ++i) {
      copy_run(to + i * row.padded_step, 1, from + i * row.step, 1, block);
    }
  };
  // `from` is null for a row of padding.
  const auto pad_row = [&](U* to, const U* from) {
    if (!from) {
      if (row.padded_step != block) return edge(to, nullptr, 0, row.size);
      std::fill_n(to, row.size * block, value);
      return;
    }
    edge(to, from, 0, first);
    if (first < last) middle(to + first * row.padded_step, from + (first - row.before) * row.step);
    edge(to, from, last, row.size);
  };
  // Rows that follow each other along one dimension together.
  const PadDim next = plan.take_row();
  std::int64_t rows = next.size;
  for (int d = 0; d < plan.n; ++d) rows *= plan.dims[d].size;
  parallel_for(rows, row_grain(row.size * block), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end;) {
      U* to = static_cast<U*>(y.data);
      const U* from = static_cast<const U*>(x.data);
      std::int64_t rest = r / next.size;
      for (int d = 0; d < plan.n; ++d) {
        const PadDim& dim = plan.dims[d];
        const std::int64_t i = rest % dim.size, source = dim.source(i);
        rest /= dim.size;
        to += i * dim.padded_step;
        from = from && source >= 0 ? from + source * dim.step : nullptr;
      }
      std::int64_t i = r % next.size;
      const std::int64_t stop = std::min(next.size, i + end - r);
      r += stop - i;
      if (same) {
        solid_rows(next, i, stop, to, from ? from + (first - row.before) * row.step : nullptr);
        continue;
      }
      for (; i < stop; ++i) {
        const std::int64_t source = from ? next.source(i) : -1;
        pad_row(to + i * next.padded_step, source >= 0 ? from + source * next.step : nullptr);
      }
    }
  });
}

Status forward(KernelContext*, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = *static_cast<const PadAttributes*>(p);
  if (out[0].numel == 0) return Status::ok;
  visit_all(out[0].dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T value = a.value.kind == 2 ? convert<T>(a.value.floating) : convert<T>(a.value.integer);
    visit_bits(out[0].dtype, [&](auto bits) {
      using U = typename decltype(bits)::type;
      if constexpr (sizeof(U) == sizeof(T)) {
        U pattern;
        std::memcpy(&pattern, &value, sizeof(U));
        pad_elements<U>(in[0], out[0], a, pattern);
      }
    });
  });
  return Status::ok;
}

/// The places of the padded tensor that those of a dimension were copied to.
struct PadSources {
  bool plain;
  std::int64_t size, padded_step, step;
  Taps taps;
  /// How many there are for place i, and the k-th.
  std::int64_t count(std::int64_t i) const { return plain ? 1 : taps.first[i + 1] - taps.first[i]; }
  std::int64_t place(std::int64_t i, std::int64_t k) const { return plain ? i : taps.begin(i)[k].at; }
};
bool sources_of(KernelContext* context, const PadDim& dim, PadSources& to) {
  to = {dim.plain(), dim.inner, dim.padded_step, dim.step, {}};
  if (to.plain) return true;
  Taps from;
  if (!allocate_taps(context, dim.size, dim.size, from)) return false;
  for (std::int64_t i = 0; i < dim.size; ++i) {
    from.taps[i] = {dim.source(i), 0, 1};
    from.first[i + 1] = i + 1;
  }
  return reversed_taps(context, from, dim.inner, to.taps);
}

/// f(offset) for the elements of the padded tensor that the place `index` of some dimensions was copied to.
template <class F>
void for_sources(std::span<const PadSources> dims, const std::int64_t* index, F&& f) {
  std::int64_t at[kMaxDims] = {};
  const int n = static_cast<int>(dims.size());
  for (int d = 0; d < n; ++d) {
    if (dims[static_cast<std::size_t>(d)].count(index[d]) == 0) return;
  }
  while (true) {
    std::int64_t offset = 0;
    for (int d = 0; d < n; ++d) {
      const PadSources& dim = dims[static_cast<std::size_t>(d)];
      offset += dim.place(index[d], at[d]) * dim.padded_step;
    }
    f(offset);
    int d = 0;
    for (; d < n; ++d) {
      if (++at[d] < dims[static_cast<std::size_t>(d)].count(index[d])) break;
      at[d] = 0;
    }
    if (d == n) return;
  }
}

template <class T, class C>
void collect(const TensorView& g, TensorView& dx, std::span<const PadSources> dims, const PadSources& row,
             std::int64_t block) {
  constexpr std::int64_t kBlock = 512;
  std::int64_t rows = 1;
  for (const PadSources& d : dims) rows *= d.size;
  parallel_for(rows, row_grain(row.size * block * 4), [&](std::int64_t begin, std::int64_t end) {
    alignas(64) C sum[kBlock], values[kBlock];
    for (std::int64_t r = begin; r < end; ++r) {
      std::int64_t index[kMaxDims], rest = r, to = 0;
      for (std::size_t d = 0; d < dims.size(); ++d) {
        index[d] = rest % dims[d].size;
        rest /= dims[d].size;
        to += index[d] * dims[d].step;
      }
      if (block == 1) {
        const T* from = static_cast<const T*>(g.data);
        for (std::int64_t i0 = 0; i0 < row.size; i0 += kBlock) {
          const std::int64_t width = std::min(kBlock, row.size - i0);
          std::fill_n(sum, width, C(0));
          for_sources(dims, index, [&](std::int64_t offset) {
            for (std::int64_t i = 0; i < width; ++i) {
              for (std::int64_t k = 0; k < row.count(i0 + i); ++k) {
                sum[i] += convert<C>(from[offset + row.place(i0 + i, k) * row.padded_step]);
              }
            }
          });
          write_row(dx, to + i0 * row.step, row.step, width, sum);
        }
        continue;
      }
      for (std::int64_t i = 0; i < row.size; ++i) {
        for (std::int64_t j = 0; j < block; j += kBlock) {
          const std::int64_t width = std::min(kBlock, block - j);
          std::fill_n(sum, width, C(0));
          for_sources(dims, index, [&](std::int64_t offset) {
            for (std::int64_t k = 0; k < row.count(i); ++k) {
              read_row(g, offset + row.place(i, k) * row.padded_step + j, 1, width, values);
              for (std::int64_t c = 0; c < width; ++c) sum[c] += values[c];
            }
          });
          write_row(dx, to + i * row.step + j, 1, width, sum);
        }
      }
    }
  });
}

Status backward(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* p) {
  const auto& a = *static_cast<const PadAttributes*>(p);
  const TensorView& g = in[0];
  TensorView& dx = out[0];
  if (dx.numel == 0) return Status::ok;
  PadPlan plan(g, dx, a);
  const std::int64_t block = plan.take_block();
  PadSources row, dims[kMaxDims];
  if (!sources_of(context, plan.take_row(), row)) return Status::out_of_memory;
  for (int d = 0; d < plan.n; ++d) {
    if (!sources_of(context, plan.dims[d], dims[d])) return Status::out_of_memory;
  }
  const std::span<const PadSources> others(dims, static_cast<std::size_t>(plan.n));
  visit_floating(g.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (g.dtype == DType::f64 || dx.dtype == DType::f64) {
      collect<T, double>(g, dx, others, row, block);
    } else {
      collect<T, float>(g, dx, others, row, block);
    }
  });
  return Status::ok;
}

const RegisterCpuKernel pad_kernels[] = {
    {"pad", kAllDTypes, forward},
    {"pad_backward", kFloatingDTypes, backward},
};

}  // namespace
}  // namespace halfstep::cpu
