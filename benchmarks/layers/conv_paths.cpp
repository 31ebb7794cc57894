// SPDX-License-Identifier: Apache-2.0
// The paths of convolutions: which one computes a layer, and two of them in turns.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "benchmarks/layers/bench_conv.h"
#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/conv.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/fail.h"
#include "halfstep/ops/random.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::bench {
namespace {

cpu::ConvGeometry geometry_of(const ConvLayer& l, std::int64_t n) {
  const std::int64_t out = l.out_size();
  return {n,
          l.in,
          l.size,
          l.size,
          l.out,
          out,
          out,
          l.kernel,
          l.kernel,
          l.groups,
          {l.stride, l.stride},
          {1, 1},
          {l.padding, l.padding},
          {l.padding, l.padding}};
}

/// Memory for calls of kernels one after the other: what one took, the next one gets.
struct Workspace : KernelContext {
  Workspace() : KernelContext{} {
    workspace = [](KernelContext* self, std::uint64_t bytes) -> void* {
      auto& all = static_cast<Workspace*>(self)->pieces;
      auto& at = static_cast<Workspace*>(self)->used;
      if (at == all.size()) all.emplace_back();
      auto& [memory, size] = all[at++];
      if (size < bytes) memory.reset(std::aligned_alloc(64, (bytes + 63) / 64 * 64)), size = bytes;
      return memory.get();
    };
    set_error = [](KernelContext*, const char* text) { fmt::print(stderr, "{}\n", text); };
  }
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::vector<std::pair<std::unique_ptr<void, Free>, std::uint64_t>> pieces;
  std::size_t used = 0;
};

TensorView view_of(const Tensor& t) {
  TensorView v = {};
  v.data = t.raw_data(), v.sizes = t.sizes().data(), v.strides = t.strides().data();
  v.numel = t.numel(), v.ndim = t.dim(), v.dtype = t.dtype(), v.defined = true, v.contiguous = t.is_contiguous();
  return v;
}

}  // namespace

void list_implementations(const Options& options, const char* network, const std::vector<ConvLayer>& layers) {
  for (const DType dtype : options.dtypes) {
    fmt::print("\nConvolutions of {} in {}, batch {}\n{:<48} | {:<53} | {:<53} | {}\n", network, name(dtype),
               options.batch, "    image, channels, kernel", "forward", "input gradient", "weight gradient");
    for (const ConvLayer& l : layers) {
      const std::int64_t out = l.out_size(), n = options.batch;
      const auto view = [&](const Shape& sizes, const Shape& strides) {
        TensorView v = {};
        v.sizes = sizes.data(), v.strides = strides.data();
        v.numel = 1, v.ndim = 4, v.dtype = dtype, v.defined = true;
        return v;
      };
      const Shape x{n, l.in, l.size, l.size}, w{l.out, l.in / l.groups, l.kernel, l.kernel}, y{n, l.out, out, out};
      const auto last = [](const Shape& s) { return Shape{s[1] * s[2] * s[3], 1, s[3] * s[1], s[1]}; };
      const Shape x_strides = last(x), w_strides = last(w), y_strides = last(y);
      const cpu::ConvGeometry geometry = geometry_of(l, n);
      fmt::print("{:<48}", fmt::format("{:>2}x {}", l.count, title(l)));
      for (const cpu::ConvPart part : {cpu::ConvPart::output, cpu::ConvPart::input, cpu::ConvPart::weight}) {
        cpu::ConvCall call{part, geometry, view(x, x_strides), view(w, w_strides), view(y, y_strides)};
        fmt::print(" | {:<53}", cpu::describe_conv(call));
      }
      fmt::print("\n");
    }
  }
}

void compare_weight_gradients(const Options& options) {
  const cpu::ConvPath other = options.weight_by == "tiles"   ? cpu::ConvPath::tiles
                              : options.weight_by == "pairs" ? cpu::ConvPath::pairs
                                                             : cpu::ConvPath::products;
  if (other == cpu::ConvPath::tiles && !cpu::amx_usable()) fail<Error>("there is no AMX that this process may use");
  if (other == cpu::ConvPath::pairs && cpu::compute_isa() < cpu::Isa::avx512_bf16) {
    fail<Error>("there are no units for bf16");
  }
  if (options.threads > 0) set_num_threads(options.threads);
  for (const DType dtype : options.dtypes) {
    if (other == cpu::ConvPath::pairs && dtype != bf16) {
      if (options.dtypes.size() == 1) fail<Error>("pairs are of bf16 only");
      continue;
    }
    fmt::print("Weight gradients of {} in {}, batch {}, {} threads: milliseconds\n", options.network->name, name(dtype),
               options.batch, num_threads());
    fmt::print("{:<38} {:>30} {:>8} {:>9} {:>6}\n", "    image, channels, kernel", "chosen", "", options.weight_by,
               "of it");
    double sums[2] = {};
    for (const ConvLayer& l : options.network->convolutions) {
      if (l.groups > 1) continue;  // the other paths don't serve them
      const auto format = MemoryFormat::channels_last;
      const Tensor x = image(options.batch, l.in, l.size, dtype), y = image(options.batch, l.out, l.out_size(), dtype),
                   w = randn({l.out, l.in, l.kernel, l.kernel}).contiguous(format);
      cpu::ConvCall call{cpu::ConvPart::weight, geometry_of(l, options.batch), view_of(x), view_of(w), view_of(y)};
      const cpu::ConvPath paths[] = {cpu::choose_conv_path(call, cpu::compute_isa(), winograd()), other};
      Workspace workspaces[2];
      std::vector<double> seconds[2];
      for (int turn = -1; turn < options.turns; ++turn) {  // the first one is to warm up
        for (int i = 0; i < 2; ++i) {
          const double took = seconds_of([&] {
            workspaces[i].used = 0;
            cpu::convolve_by(paths[i], &workspaces[i], call);
          });
          if (turn >= 0) seconds[i].push_back(took);
        }
      }
      const double took[] = {median(seconds[0]), median(seconds[1])};
      for (int i = 0; i < 2; ++i) sums[i] += l.count * took[i];
      fmt::print("{:>2}x {:<34} {:>30} {:>8.3f} {:>9.3f} {:>6.2f}\n", l.count, title(l), cpu::describe_conv(call),
                 took[0] * 1e3, took[1] * 1e3, took[1] / took[0]);
    }
    fmt::print("{:<38} {:>30} {:>8.1f} {:>9.1f} {:>6.2f}\n", "    all", "", sums[0] * 1e3, sums[1] * 1e3,
               sums[1] / sums[0]);
  }
}

}  // namespace halfstep::bench
