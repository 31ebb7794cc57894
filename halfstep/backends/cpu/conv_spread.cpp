// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_spread.h"

#include <algorithm>
#include <cstring>

#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/image_order.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kBytesPerPiece = 64 << 10;

// The lines of the result: places that windows see from `from`, zeros elsewhere.
void spread(const ConvGeometry& g, const char* from, char* to, std::int64_t place) {
  const std::int64_t line = g.w * place, step = g.stride[1] * place;
  const std::int64_t grain = std::max<std::int64_t>(1, kBytesPerPiece / line);
  parallel_for(g.n * g.h, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t n = row / g.h, i = row % g.h;
      char* at = to + row * line;
      char* const behind = at + line;
      if (i % g.stride[0] == 0 && i / g.stride[0] < g.oh) {
        const char* seen = from + (n * g.oh + i / g.stride[0]) * g.ow * place;
        for (std::int64_t j = 0; j < g.ow; ++j, seen += place) {
          std::memcpy(at, seen, static_cast<std::size_t>(place));
          const std::int64_t zeros = std::min(step, behind - at) - place;
          std::memset(at + place, 0, static_cast<std::size_t>(zeros));
          at += place + zeros;
        }
      }
      std::memset(at, 0, static_cast<std::size_t>(behind - at));
    }
  });
}

}  // namespace

bool is_spread(const ConvCall& call) noexcept {
  const ConvGeometry& g = call.geometry;
  return call.part == ConvPart::input && g.kh * g.kw == 1 && (g.oh != g.h || g.ow != g.w) && g.before[0] == 0 &&
         g.before[1] == 0 && call.bias == nullptr && (g.oh - 1) * g.stride[0] < g.h && (g.ow - 1) * g.stride[1] < g.w &&
         all_floats(call) && channels_last(call.input) && channels_last(call.output);
}

SpreadCall::SpreadCall(const ConvCall& of, void* data) : call(of) {
  ConvGeometry& g = call.geometry;
  g.h = g.oh, g.w = g.ow;
  for (int d = 0; d < 2; ++d) g.stride[d] = g.dilation[d] = 1, g.after[d] = 0;
  const std::int64_t sizes[] = {g.n, g.c, g.h, g.w};
  std::copy_n(sizes, 4, sizes_);
  channels_last_strides(sizes_, strides_);
  TensorView& x = call.input;
  x.data = data, x.sizes = sizes_, x.strides = strides_, x.numel = g.n * g.h * g.w * g.c;
  x.contiguous = g.c == 1 || g.h * g.w == 1;
}

Status convolve_spread(KernelContext* context, ConvCall& call) {
  const ConvGeometry& g = call.geometry;
  const auto place = g.c * static_cast<std::int64_t>(item_size(call.input.dtype));
  char* seen = nullptr;
  if (!take_workspace(context, static_cast<std::size_t>(g.n * g.oh * g.ow * place), seen)) {
    return conv_out_of_memory(context);
  }
  SpreadCall dense(call, seen);
  const Status status = convolve(context, dense.call);
  if (status == Status::ok && !runs_dry(context)) spread(g, seen, static_cast<char*>(call.input.data), place);
  return status;
}

}  // namespace halfstep::cpu
