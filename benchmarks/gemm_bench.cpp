// SPDX-License-Identifier: Apache-2.0
// Matrix products by every path that takes them.
//
//   build/benchmarks/gemm_bench --benchmark_filter=fwd --benchmark_repetitions=5
//
// `GFLOP/s` counts two operations a multiply-add, `workspace_MB` is scratch memory. HALFSTEP_THREADS and HALFSTEP_ISA
// apply.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <cstdlib>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/backends/cpu/gemm.h"
#include "halfstep/core/dtype.h"
#include "halfstep/runtime/parallel.h"

namespace {

using namespace halfstep;
using namespace halfstep::cpu;

struct Shape {
  const char* name;
  std::int64_t m, n, k;
  bool turn_a, turn_b;  ///< stored as [k, m] and [n, k]
  bool f32_result;
  std::int64_t batch = 1;
};

// The products of a 784-512-512-10 network (forward, weight gradient, input gradient), squares, and attention.
const Shape kShapes[] = {
    {"fwd_64x512x784", 64, 512, 784, false, true, false},
    {"fwd_64x512x512", 64, 512, 512, false, true, false},
    {"fwd_64x10x512", 64, 10, 512, false, true, false},
    {"weight_512x784x64", 512, 784, 64, true, false, true},
    {"weight_512x512x64", 512, 512, 64, true, false, true},
    {"weight_10x512x64", 10, 512, 64, true, false, true},
    {"input_64x512x512", 64, 512, 512, false, false, false},
    {"input_64x512x10", 64, 512, 10, false, false, false},
    {"fwd_1x512x784", 1, 512, 784, false, true, false},
    {"input_1x512x512", 1, 512, 512, false, false, false},
    {"weight_512x784x1", 512, 784, 1, true, false, true},
    {"fwd_4096x512x784", 4096, 512, 784, false, true, false},
    {"weight_512x784x4096", 512, 784, 4096, true, false, true},
    {"input_4096x512x512", 4096, 512, 512, false, false, false},
    {"fwd_4096x2048x2048", 4096, 2048, 2048, false, true, false},
    {"weight_2048x2048x4096", 2048, 2048, 4096, true, false, true},
    {"square_512", 512, 512, 512, false, false, false},
    {"square_1024", 1024, 1024, 1024, false, false, false},
    {"square_2048", 2048, 2048, 2048, false, false, false},
    {"attention_96x64x64x64", 64, 64, 64, false, true, false, 96},
};

using Buffer = std::unique_ptr<void, decltype(&std::free)>;

Buffer filled(std::int64_t count, DType dtype) {
  const std::size_t bytes = (static_cast<std::size_t>(count) * item_size(dtype) + 63) / 64 * 64;
  Buffer buffer(std::aligned_alloc(64, bytes), &std::free);
  visit_floating(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (std::int64_t i = 0; i < count; ++i) {
      static_cast<T*>(buffer.get())[i] = convert<T>(static_cast<float>(i % 17) / 16.0f - 0.5f);
    }
  });
  return buffer;
}

/// Keeps its largest workspace, as the caching allocator does.
struct Context : KernelContext {
  Context() : KernelContext{} {
    workspace = [](KernelContext* self, std::size_t bytes) -> void* {
      auto& c = *static_cast<Context*>(self);
      c.asked = bytes;
      if (bytes > c.size) {
        c.size = (bytes + 63) / 64 * 64;
        c.memory = Buffer(std::aligned_alloc(64, c.size), &std::free);
      }
      return c.memory.get();
    };
    set_error = [](KernelContext*, const char*) {};
  }
  std::size_t size = 0, asked = 0;
  Buffer memory{nullptr, &std::free};
};

void product(benchmark::State& state, const Shape& s, DType dtype, int path) {
  const DType result = s.f32_result ? f32 : dtype;
  const Buffer a = filled(s.batch * s.m * s.k, dtype), b = filled(s.batch * s.k * s.n, dtype),
               c = filled(s.batch * s.m * s.n, result);
  GemmArgs g;
  g.m = s.m, g.n = s.n, g.k = s.k;
  g.a = {a.get(), dtype, s.turn_a ? 1 : s.k, s.turn_a ? s.m : 1};
  g.b = {b.get(), dtype, s.turn_b ? 1 : s.n, s.turn_b ? s.k : 1};
  g.c = c.get(), g.c_dtype = result, g.ldc = s.n;
  g.batch = s.batch, g.a_batch_stride = s.m * s.k, g.b_batch_stride = s.k * s.n, g.c_batch_stride = s.m * s.n;
  Context context;
  for (auto _ : state) {
    const Status status = path < 0 ? gemm(&context, g) : gemm_by(static_cast<GemmPath>(path), &context, g);
    if (status != Status::ok) {
      state.SkipWithError("this path does not take it");
      break;
    }
  }
  state.counters["GFLOP/s"] = benchmark::Counter(
      2e-9 * static_cast<double>(s.batch * s.m * s.n * s.k) * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
  state.counters["workspace_MB"] = static_cast<double>(context.asked) / 1e6;
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  const struct {
    const char* name;
    int path;
  } paths[] = {{"chosen", -1},
               {"narrow", static_cast<int>(GemmPath::narrow)},
               {"blocked", static_cast<int>(GemmPath::blocked)},
               {"onednn", static_cast<int>(GemmPath::onednn)},
               {"tiles", static_cast<int>(GemmPath::tiles)},
               {"split", static_cast<int>(GemmPath::split)}};
  for (const Shape& shape : kShapes) {
    for (const DType dtype : {f32, bf16, f16}) {
      for (const auto& path : paths) {
        benchmark::RegisterBenchmark(
            fmt::format("{}/{}/{}", shape.name, name(dtype), path.name).c_str(),
            [&shape, dtype, path](benchmark::State& state) { product(state, shape, dtype, path.path); })
            ->Unit(benchmark::kMicrosecond)
            ->UseRealTime();
      }
    }
  }
  fmt::print("instruction set {}, {} threads\n", name(compute_isa()), num_threads());
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
