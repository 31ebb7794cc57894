// SPDX-License-Identifier: Apache-2.0
// Elementwise kernels: cost of a small call, bandwidth in cache and in memory, for each dtype.
#include <benchmark/benchmark.h>

#include <string>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/pointwise.h"

namespace {

using namespace halfstep;

constexpr DType kDTypes[] = {f32, f16, bf16};

void set_bytes(benchmark::State& state, const Tensor& t, int tensors) {
  state.SetItemsProcessed(state.iterations() * t.numel());
  state.SetBytesProcessed(state.iterations() * t.numel() * static_cast<std::int64_t>(t.item_size()) * tensors);
}

void binary(benchmark::State& state, Tensor& (*f)(Tensor&, const Tensor&, const Tensor&), DType dtype) {
  const NoGrad no_grad;
  const Tensor a = full({state.range(0)}, 1.5, {.dtype = dtype}), b = full({state.range(0)}, 0.5, {.dtype = dtype});
  Tensor out = empty_like(a);
  for (auto _ : state) f(out, a, b);
  set_bytes(state, a, 3);
}
void unary(benchmark::State& state, Tensor (*f)(const Tensor&), DType dtype) {
  const NoGrad no_grad;
  const Tensor x = full({state.range(0)}, 0.7, {.dtype = dtype});
  for (auto _ : state) benchmark::DoNotOptimize(f(x));
  set_bytes(state, x, 2);
}
void cast(benchmark::State& state, DType from, DType to) {
  const NoGrad no_grad;
  const Tensor x = full({state.range(0)}, 0.7, {.dtype = from});
  for (auto _ : state) benchmark::DoNotOptimize(x.to(to));
  state.SetItemsProcessed(state.iterations() * x.numel());
  state.SetBytesProcessed(state.iterations() * x.numel() * static_cast<std::int64_t>(item_size(from) + item_size(to)));
}
void transpose(benchmark::State& state, DType dtype) {
  const NoGrad no_grad;
  const Tensor x = full({state.range(0), state.range(0)}, 1, {.dtype = dtype});
  for (auto _ : state) benchmark::DoNotOptimize(x.t().contiguous());
  set_bytes(state, x, 2);
}

}  // namespace

int main(int argc, char** argv) {
  for (const DType d : kDTypes) {
    const std::string suffix = std::string("/") + name(d);
    const auto sizes = [](benchmark::internal::Benchmark* b) { b->Arg(16)->Arg(8192)->Arg(8 << 20)->UseRealTime(); };
    sizes(benchmark::RegisterBenchmark(("add_out" + suffix).c_str(), [d](benchmark::State& s) {
      binary(
          s, [](Tensor& o, const Tensor& a, const Tensor& b) -> Tensor& { return add_out(o, a, b); }, d);
    }));
    sizes(benchmark::RegisterBenchmark(("mul_out" + suffix).c_str(),
                                       [d](benchmark::State& s) { binary(s, mul_out, d); }));
    const std::pair<const char*, Tensor (*)(const Tensor&)> functions[] = {
        {"relu", relu},
        {"exp", exp},
        {"tanh", tanh},
        {"sigmoid", sigmoid},
        {"silu", silu},
        {"gelu", [](const Tensor& x) { return gelu(x); }},
        {"erf", erf},
        {"log", log},
        {"sin", sin},
        {"dropout", [](const Tensor& x) { return dropout(x); }},
        {"gt", [](const Tensor& x) { return gt(x, x); }},
    };
    for (const auto& [function, f] : functions) {
      sizes(benchmark::RegisterBenchmark((function + suffix).c_str(),
                                         [f = f, d](benchmark::State& s) { unary(s, f, d); }));
    }
    benchmark::RegisterBenchmark(("transpose" + suffix).c_str(), [d](benchmark::State& s) { transpose(s, d); })
        ->Arg(512)
        ->Arg(2048)
        ->UseRealTime();
    if (d != f32) {
      sizes(benchmark::RegisterBenchmark(("from f32" + suffix).c_str(), [d](benchmark::State& s) { cast(s, f32, d); }));
      sizes(benchmark::RegisterBenchmark(("to f32" + suffix).c_str(), [d](benchmark::State& s) { cast(s, d, f32); }));
    }
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
