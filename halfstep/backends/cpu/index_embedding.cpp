// SPDX-License-Identifier: Apache-2.0
// embedding and its gradient.
#include <algorithm>

#include "halfstep/backends/cpu/index_check.h"
#include "halfstep/backends/cpu/move.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

// Indices in row-major order, whatever their strides.
std::int64_t index_at(const TensorView& index, std::int64_t i) {
  const auto* data = static_cast<const std::int64_t*>(index.data);
  if (index.contiguous) return data[i];
  std::int64_t offset = 0;
  for (int d = index.ndim - 1; d >= 0; --d) {
    offset += i % index.sizes[d] * index.strides[d];
    i /= index.sizes[d];
  }
  return data[offset];
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

// Rows are shared out among the threads; the gradients of a row are added in the order of their positions, in float32
// (float64 for f64), a stretch of columns at a time.
template <class In, class Out>
void sum_rows(const TensorView& g, const TensorView& out, const std::int64_t* starts, const std::int64_t* positions,
              const EmbeddingAttributes& a) {
  using S = std::conditional_t<std::is_same_v<In, double> || std::is_same_v<Out, double>, double, float>;
  constexpr std::int64_t kStretch = 256;
  const std::int64_t width = out.sizes[1], n = starts[a.rows];
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
      if (starts[r] == starts[r + 1] || r == a.padding_idx) {
        std::memset(static_cast<void*>(to), 0, static_cast<std::size_t>(width) * sizeof(Out));
        continue;
      }
      for (std::int64_t first = 0; first < width; first += kStretch) {
        const std::int64_t m = std::min(kStretch, width - first);
        S sums[kStretch] = {};
        for (std::int64_t p = starts[r]; p < starts[r + 1]; ++p) {
          const In* from = row_of(positions[p]) + first * column;
          for (std::int64_t j = 0; j < m; ++j) sums[j] += convert<S>(from[j * column]);
        }
        for (std::int64_t j = 0; j < m; ++j) to[first + j] = convert<Out>(sums[j]);
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
  // The positions of each row, by counting.
  const std::int64_t n = index.numel;
  auto* starts = static_cast<std::int64_t*>(
      context->workspace(context, static_cast<std::size_t>(a.rows + 2 + n) * sizeof(std::int64_t)));
  if (!starts) return Status::failed;
  std::int64_t* positions = starts + a.rows + 2;
  std::fill(starts, starts + a.rows + 2, std::int64_t{0});
  // Shifted by two, so that after the fill below starts[r] is where row r begins.
  for (std::int64_t i = 0; i < n; ++i) ++starts[index_at(index, i) + 2];
  for (std::int64_t r = 1; r < a.rows + 2; ++r) starts[r] += starts[r - 1];
  for (std::int64_t i = 0; i < n; ++i) positions[starts[index_at(index, i) + 1]++] = i;
  visit_floating(g.dtype, [&](auto in_tag) {
    using In = typename decltype(in_tag)::type;
    visit_floating(out[0].dtype, [&](auto out_tag) {
      using Out = typename decltype(out_tag)::type;
      sum_rows<In, Out>(g, out[0], starts, positions, a);
    });
  });
  return Status::ok;
}

const RegisterCpuKernel registered[] = {
    {"embedding", kAllDTypes, embedding},
    {"embedding_backward", kFloatingDTypes, embedding_backward},
};

}  // namespace
}  // namespace halfstep::cpu
