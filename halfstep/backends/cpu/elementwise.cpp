// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/elementwise.h"

#include <cstring>

#include "halfstep/backends/cpu/strided_loop.h"

namespace halfstep::cpu {
namespace {

// Elements of a block on the stack: with four inputs and an output of eight bytes, 20 KB, which stay in the first
// cache.
constexpr std::int64_t kElementwiseBlock = 512;

template <class U>
void gather_as(void* to, const void* from, std::int64_t step, std::int64_t n) {
  auto* t = static_cast<U*>(to);
  const auto* f = static_cast<const U*>(from);
  for (std::int64_t i = 0; i < n; ++i) t[i] = f[i * step];
}
template <class U>
void scatter_as(void* to, std::int64_t step, const void* from, std::int64_t n) {
  auto* t = static_cast<U*>(to);
  const auto* f = static_cast<const U*>(from);
  for (std::int64_t i = 0; i < n; ++i) t[i * step] = f[i];
}
void gather(std::size_t size, void* to, const void* from, std::int64_t step, std::int64_t n) {
  switch (size) {
    case 1:
      return gather_as<std::uint8_t>(to, from, step, n);
    case 2:
      return gather_as<std::uint16_t>(to, from, step, n);
    case 4:
      return gather_as<std::uint32_t>(to, from, step, n);
    default:
      return gather_as<std::uint64_t>(to, from, step, n);
  }
}
void scatter(std::size_t size, void* to, std::int64_t step, const void* from, std::int64_t n) {
  switch (size) {
    case 1:
      return scatter_as<std::uint8_t>(to, step, from, n);
    case 2:
      return scatter_as<std::uint16_t>(to, step, from, n);
    case 4:
      return scatter_as<std::uint32_t>(to, step, from, n);
    default:
      return scatter_as<std::uint64_t>(to, step, from, n);
  }
}

// One run of any strides: what is not contiguous goes through blocks.
template <int N>
void run_through_blocks(const Runs& runs, const void* state, char* const* base, const std::size_t* size,
                        const std::int64_t* step, std::int64_t n) {
  alignas(64) char blocks[N + 1][kElementwiseBlock * 8];
  for (int k = 1; k <= N; ++k) {
    if (step[k] == 0) gather(size[k], blocks[k], base[k], 0, std::min(n, kElementwiseBlock));
  }
  for (std::int64_t at = 0; at < n; at += kElementwiseBlock) {
    const std::int64_t m = std::min(n - at, kElementwiseBlock);
    const void* in[N + 1] = {};
    for (int k = 1; k <= N; ++k) {
      const char* from = base[k] + at * step[k] * static_cast<std::int64_t>(size[k]);
      if (step[k] != 1 && step[k] != 0) gather(size[k], blocks[k], from, step[k], m);
      in[k - 1] = step[k] == 1 ? from : blocks[k];
    }
    char* to = base[0] + at * step[0] * static_cast<std::int64_t>(size[0]);
    if (step[0] == 1) {
      runs.straight(state, to, in, m);
    } else {
      runs.straight(state, blocks[0], in, m);
      scatter(size[0], to, step[0], blocks[0], m);
    }
  }
}

template <int N>
Status run(const Runs& runs, const void* state, const TensorView* in, TensorView* out) {
  std::size_t size[N + 1] = {};
  char* data[N + 1] = {};
  std::array<const TensorView*, N + 1> views = {};
  views[0] = out;
  bool straight = out->contiguous;
  for (int k = 0; k < N; ++k) {
    views[k + 1] = &in[k];
    straight = straight && in[k].contiguous && in[k].numel == out->numel;
  }
  for (int k = 0; k <= N; ++k) {
    size[k] = item_size(views[k]->dtype);
    data[k] = static_cast<char*>(views[k]->data);
  }
  if (straight) {
    if (out->numel == 0) return Status::ok;
    const void* inputs[N + 1] = {};
    if (out->numel < 2 * runs.grain) {
      for (int k = 0; k < N; ++k) inputs[k] = data[k + 1];
      runs.straight(state, data[0], inputs, out->numel);
      return Status::ok;
    }
    parallel_for(out->numel, runs.grain, [&](std::int64_t begin, std::int64_t end) {
      const void* from[N + 1] = {};
      for (int k = 0; k < N; ++k) from[k] = data[k + 1] + begin * static_cast<std::int64_t>(size[k + 1]);
      runs.straight(state, data[0] + begin * static_cast<std::int64_t>(size[0]), from, end - begin);
    });
    return Status::ok;
  }
  const StridedLoop<N + 1> loop(views);
  loop.for_each_run(runs.grain, [&](const std::int64_t* at, std::int64_t n, const std::int64_t* step) {
    char* base[N + 1] = {};
    const void* from[N + 1] = {};
    int odd = step[0] != 1;  // operands that are not contiguous
    int which = 0;
    for (int k = 0; k <= N; ++k) {
      base[k] = data[k] + at[k] * static_cast<std::int64_t>(size[k]);
      if (k > 0) {
        from[k - 1] = base[k];
        if (step[k] != 1) {
          ++odd;
          which = k;
        }
      }
    }
    if (odd == 0) {
      runs.straight(state, base[0], from, n);
    } else if (odd == 1 && (which == 1 || which == 2) && step[which] == 0 && runs.repeated[which - 1]) {
      runs.repeated[which - 1](state, base[0], from, n);
    } else {
      run_through_blocks<N>(runs, state, base, size, step, n);
    }
  });
  return Status::ok;
}

}  // namespace

Status run_elementwise(const Runs& runs, const void* state, const TensorView* in, int n_in, TensorView* out) {
  switch (n_in) {
    case 0:
      return run<0>(runs, state, in, out);
    case 1:
      return run<1>(runs, state, in, out);
    case 2:
      return run<2>(runs, state, in, out);
    case 3:
      return run<3>(runs, state, in, out);
    case 4:
      return run<4>(runs, state, in, out);
    default:
      return Status::unsupported;
  }
}

}  // namespace halfstep::cpu
