// SPDX-License-Identifier: Apache-2.0
// The places of elements that are not zero.
#include <algorithm>

#include "halfstep/backends/cpu/strided_loop.h"
#include "halfstep/ops/attributes.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kFlagPiece = 1024;             // elements looked at together
constexpr std::int64_t kFlagShare = 16 * kFlagPiece;  // elements that a thread takes at a time

// Which elements of a tensor of any strides are not zero, in row-major order.
class Flags {
 public:
  explicit Flags(const TensorView& x) : data_(x.data), loop_(loop_over(x)) {
    visit_all(x.dtype, [&](auto tag) { read_ = read<typename decltype(tag)::type>; });
  }
  std::int64_t numel() const { return loop_.numel; }
  std::int64_t shares() const { return (numel() + kFlagShare - 1) / kFlagShare; }

  // Calls f(flags, first, n) for the pieces of a share.
  template <class F>
  void for_pieces(std::int64_t share, F&& f) const {
    std::uint8_t flags[kFlagPiece];
    const std::int64_t end = std::min(numel(), (share + 1) * kFlagShare);
    for (std::int64_t first = share * kFlagShare; first < end; first += kFlagPiece) {
      const std::int64_t n = std::min(kFlagPiece, end - first);
      loop_.for_runs(first, first + n, [&](const std::int64_t* at, std::int64_t run, const std::int64_t* step) {
        read_(data_, at[1], step[1], run, flags + (at[0] - first));
      });
      f(flags, first, n);
    }
  }
  std::int64_t count(std::int64_t share) const {
    std::int64_t total = 0;
    for_pieces(share, [&](const std::uint8_t* flags, std::int64_t, std::int64_t n) {
      int set = 0;
      for (std::int64_t i = 0; i < n; ++i) set += flags[i];
      total += set;
    });
    return total;
  }

 private:
  template <class T>
  static void read(const void* data, std::int64_t at, std::int64_t step, std::int64_t n, std::uint8_t* flags) {
    const T* x = static_cast<const T*>(data) + at;
    if (step == 1) {
      for (std::int64_t i = 0; i < n; ++i) flags[i] = convert<bool>(x[i]);
    } else {
      for (std::int64_t i = 0; i < n; ++i) flags[i] = convert<bool>(x[i * step]);
    }
  }
  // Beside a row-major tensor of the same sizes, whose offsets are the elements' numbers.
  static StridedLoop<2> loop_over(const TensorView& x) {
    std::int64_t strides[kMaxDims], step = 1;
    for (int d = x.ndim - 1; d >= 0; --d) {
      strides[d] = step;
      step *= x.sizes[d];
    }
    const TensorView numbers{nullptr, x.sizes, strides, x.numel, x.ndim, DType::boolean, true, true};
    return StridedLoop<2>({&numbers, &x});
  }

  const void* data_;
  StridedLoop<2> loop_;
  void (*read_)(const void*, std::int64_t, std::int64_t, std::int64_t, std::uint8_t*) = nullptr;
};

// Writes the positions of the elements first + found[j], j < n, in ascending order.
void write_positions(const TensorView& x, std::int64_t first, const std::int32_t* found, std::int64_t n,
                     std::int64_t* to) {
  if (x.ndim == 0) return;
  if (x.ndim == 1) {
    for (std::int64_t j = 0; j < n; ++j) to[j] = first + found[j];
    return;
  }
  const int inner = x.ndim - 1;
  const std::int64_t width = x.sizes[inner];
  std::int64_t outer[kMaxDims] = {}, row_begin = 0, row_end = 0;  // of the row that the last one lies in
  for (std::int64_t j = 0; j < n; ++j) {
    const std::int64_t i = first + found[j];
    if (i >= row_end) {
      std::int64_t row = i / width;
      row_begin = row * width;
      row_end = row_begin + width;
      for (int d = inner - 1; d >= 0; --d) {
        outer[d] = row % x.sizes[d];
        row /= x.sizes[d];
      }
    }
    for (int d = 0; d < inner; ++d) *to++ = outer[d];
    *to++ = i - row_begin;
  }
}

Status nonzero_count(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void*) {
  std::int64_t total = 0;
  if (in[0].numel != 0) {
    const Flags flags(in[0]);
    const std::int64_t shares = flags.shares();
    auto* counts = static_cast<std::int64_t*>(
        context->workspace(context, static_cast<std::size_t>(shares) * sizeof(std::int64_t)));
    if (!counts) return Status::failed;
    parallel_for(shares, 4, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t share = begin; share < end; ++share) counts[share] = flags.count(share);
    });
    for (std::int64_t share = 0; share < shares; ++share) total += counts[share];
  }
  *static_cast<std::int64_t*>(out[0].data) = total;
  return Status::ok;
}

// The shares are counted first, so that each knows where its places begin. Another thread may write the input between
// that, or the count of the attributes, and the rest: no share writes beyond its part, and what it lacks is zero.
Status nonzero(KernelContext* context, const TensorView* in, int, TensorView* out, int, const void* attributes) {
  const std::int64_t count = static_cast<const CountAttributes*>(attributes)->count;
  if (out[0].numel == 0) return Status::ok;
  const Flags flags(in[0]);
  const std::int64_t shares = flags.shares(), ndim = in[0].ndim;
  auto* starts = static_cast<std::int64_t*>(
      context->workspace(context, static_cast<std::size_t>(shares + 1) * sizeof(std::int64_t)));
  if (!starts) return Status::failed;
  starts[0] = 0;
  parallel_for(shares, 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t share = begin; share < end; ++share) starts[share + 1] = flags.count(share);
  });
  for (std::int64_t share = 0; share < shares; ++share) {
    starts[share + 1] = std::min(count, starts[share] + starts[share + 1]);
  }
  auto* to = static_cast<std::int64_t*>(out[0].data);
  parallel_for(shares, 1, [&](std::int64_t begin, std::int64_t end) {
    std::int32_t found[kFlagPiece];
    for (std::int64_t share = begin; share < end; ++share) {
      std::int64_t at = starts[share];
      const std::int64_t limit = starts[share + 1];
      flags.for_pieces(share, [&](const std::uint8_t* set, std::int64_t first, std::int64_t n) {
        std::int64_t m = 0;
        for (std::int64_t i = 0; i < n; ++i) {
          found[m] = static_cast<std::int32_t>(i);
          m += set[i];
        }
        m = std::min(m, limit - at);
        write_positions(in[0], first, found, m, to + at * ndim);
        at += m;
      });
      std::fill(to + at * ndim, to + limit * ndim, std::int64_t{0});
    }
  });
  std::fill(to + starts[shares] * ndim, to + out[0].numel, std::int64_t{0});
  return Status::ok;
}

const RegisterCpuKernel index_nonzero_kernels[] = {
    {"nonzero_count", kAllDTypes, nonzero_count},
    {"nonzero", kAllDTypes, nonzero},
};

}  // namespace
}  // namespace halfstep::cpu
