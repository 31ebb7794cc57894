// SPDX-License-Identifier: Apache-2.0
// Integers beside floats: the convolutions of ResNet-50, depthwise ones, and linear layers whose weights alone are
// integers. docs/reference/performance.md says how to read it.
#include <fmt/format.h>
#include <immintrin.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/server/layers.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/int8.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/runtime/machine.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::bench {
namespace {

double seconds_of(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The median of the turns, each of as many runs as take some milliseconds.
double median_of(const std::function<void()>& run, int turns) {
  for (int i = 0; i < 3; ++i) run();  // weights are packed at the second call
  const int runs = std::clamp(static_cast<int>(0.004 / std::max(seconds_of(run), 1e-7)), 1, 10000);
  std::vector<double> seconds;
  for (int turn = 0; turn < turns; ++turn) {
    seconds.push_back(seconds_of([&] {
                        for (int i = 0; i < runs; ++i) run();
                      }) /
                      runs);
  }
  std::nth_element(seconds.begin(), seconds.begin() + turns / 2, seconds.end());
  return seconds[static_cast<std::size_t>(turns / 2)];
}

constexpr std::int64_t kRounds = 1'000'000;
constexpr int kChains = 16;

// Products of bytes that don't wait for each other: 2 operations for each of the 64 of an instruction.
__attribute__((target("avx512f,avx512vnni"))) int multiply_bytes() {
  __m512i sums[kChains], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
  for (__m512i& s : sums) s = _mm512_setzero_si512();
  for (std::int64_t i = 0; i < kRounds; ++i) {
#pragma GCC unroll 16
    for (int k = 0; k < kChains; ++k) sums[k] = _mm512_dpbusd_epi32(sums[k], a, b);
    __asm__ volatile("" : "+v"(a), "+v"(b));
  }
  int total = 0;
  for (const __m512i& s : sums) total += _mm512_reduce_add_epi32(s);
  return total;
}

// Operations a second of all threads; 0 without VNNI.
double vnni_peak() {
  if (!__builtin_cpu_supports("avx512vnni")) return 0;
  double best = 1e9;
  for (int turn = 0; turn < 3; ++turn) {
    best = std::min(best, seconds_of([] {
                      parallel_for(num_threads(), 1, [](std::int64_t begin, std::int64_t end) {
                        for (std::int64_t i = begin; i < end; ++i) {
                          volatile int sink = multiply_bytes();
                          (void)sink;
                        }
                      });
                    }));
  }
  return 2.0 * 64 * kChains * static_cast<double>(kRounds) * num_threads() / best;
}

Tensor bytes(const Shape& sizes, DType dtype = u8) {
  return randint(0, 100, sizes, {.dtype = dtype}).contiguous(MemoryFormat::channels_last);
}
Tensor floats(const Shape& sizes, DType dtype) {
  return randn(sizes).to(dtype).contiguous(MemoryFormat::channels_last);
}

Conv2dInt8Options int8_options(std::int64_t stride, std::int64_t padding) {
  Conv2dInt8Options o;
  o.stride = {stride};
  o.padding = {padding};
  o.input = {.scale = 0.02, .zero_point = 7};
  o.residual = {.scale = 0.03, .zero_point = 9};
  o.output = Int8Grid{.scale = 0.05, .zero_point = 11};
  o.activation = Int8Activation::relu;
  return o;
}

struct Sums {
  double f32 = 0, bf16 = 0, i8 = 0, residual = 0, operations = 0;
};

void convolutions(std::int64_t batch, int turns, double peak) {
  fmt::print("\nConvolutions of ResNet-50, batch {} (int8: with bias, ReLU and the next grid; and with a residual)\n",
             batch);
  fmt::print("{:>3} {:<28} {:>8} | {:>8} {:>8} {:>8} {:>8} | {:>7} {:>6} | {:>6} {:>6}\n", "",
             "image, channels, kernel", "GOP", "f32 ms", "bf16 ms", "int8 ms", "+ res ms", "GOP/s", "peak", "/ f32",
             "/ bf16");
  Sums all;
  for (const ConvLayer& layer : resnet50_convolutions()) {
    const Shape image{batch, layer.in, layer.size, layer.size},
        result{batch, layer.out, layer.out_size(), layer.out_size()},
        weight{layer.out, layer.in, layer.kernel, layer.kernel};
    const ConvFuncOptions conv{.stride = {layer.stride}, .padding = {layer.padding}};
    const double operations = 2 * static_cast<double>(batch) * layer.multiply_adds();
    double seconds[2];
    for (int i = 0; i < 2; ++i) {
      const DType dtype = i == 0 ? f32 : bf16;
      const Tensor x = floats(image, dtype), w = floats(weight, dtype);
      seconds[i] = median_of([&] { conv2d(x, w, {}, conv); }, turns);
    }
    const Tensor x = bytes(image), w = randint(-128, 128, weight, {.dtype = i8}), scale = full({layer.out}, 0.01),
                 bias = randint(-100, 100, {layer.out}, {.dtype = i32}), residual = bytes(result);
    const Conv2dInt8Options o = int8_options(layer.stride, layer.padding);
    const double i8_seconds = median_of([&] { conv2d_int8(x, w, scale, bias, {}, o); }, turns),
                 residual_seconds = median_of([&] { conv2d_int8(x, w, scale, bias, residual, o); }, turns);
    fmt::print(
        "{:>2}x {:<28} {:>8.3f} | {:>8.3f} {:>8.3f} {:>8.3f} {:>8.3f} | {:>7.0f} {:>5.0f}% | {:>6.2f} {:>6.2f}\n",
        layer.count,
        fmt::format("{0}x{0}, {1} -> {2}, {3}x{3}{4}", layer.size, layer.in, layer.out, layer.kernel,
                    layer.stride == 1 ? "" : fmt::format(" / {}", layer.stride)),
        operations * 1e-9, seconds[0] * 1e3, seconds[1] * 1e3, i8_seconds * 1e3, residual_seconds * 1e3,
        operations / i8_seconds * 1e-9, peak > 0 ? operations / i8_seconds / peak * 100 : 0, seconds[0] / i8_seconds,
        seconds[1] / i8_seconds);
    std::fflush(stdout);
    all.f32 += layer.count * seconds[0];
    all.bf16 += layer.count * seconds[1];
    all.i8 += layer.count * i8_seconds;
    all.residual += layer.count * residual_seconds;
    all.operations += layer.count * operations;
  }
  fmt::print("{:>3} {:<28} {:>8.3f} | {:>8.3f} {:>8.3f} {:>8.3f} {:>8.3f} | {:>7.0f} {:>5.0f}% | {:>6.2f} {:>6.2f}\n",
             "", "all of them", all.operations * 1e-9, all.f32 * 1e3, all.bf16 * 1e3, all.i8 * 1e3, all.residual * 1e3,
             all.operations / all.i8 * 1e-9, peak > 0 ? all.operations / all.i8 / peak * 100 : 0, all.f32 / all.i8,
             all.bf16 / all.i8);
}

// What isn't in ResNet-50: windows of single channels, and passes between convolutions.
void others(std::int64_t batch, int turns) {
  fmt::print("\nDepthwise convolutions and passes between convolutions, batch {}\n{:<40} {:>8} {:>8} {:>8}\n", batch,
             "", "f32 ms", "bf16 ms", "int8 ms");
  const auto row = [](const std::string& what, double a, double b, double c) {
    fmt::print("{:<40} {:>8.4f} {:>8.4f} {:>8.4f}\n", what, a * 1e3, b * 1e3, c * 1e3);
    std::fflush(stdout);
  };
  const std::int64_t depthwise[][4] = {
      {32, 112, 3, 1}, {96, 112, 3, 2}, {144, 56, 3, 1}, {960, 7, 3, 1}, {240, 14, 5, 1}};
  for (const auto& [c, size, k, stride] : depthwise) {
    const ConvFuncOptions conv{.stride = {stride}, .padding = {k / 2}, .groups = c};
    Conv2dInt8Options o = int8_options(stride, k / 2);
    o.groups = c;
    double seconds[2];
    for (int i = 0; i < 2; ++i) {
      const DType dtype = i == 0 ? f32 : bf16;
      const Tensor x = floats({batch, c, size, size}, dtype), w = floats({c, 1, k, k}, dtype);
      seconds[i] = median_of([&] { conv2d(x, w, {}, conv); }, turns);
    }
    const Tensor x = bytes({batch, c, size, size}), w = randint(-128, 128, {c, 1, k, k}, {.dtype = i8}),
                 scale = full({c}, 0.01);
    row(fmt::format("{0}x{0}, {1}, {2}x{2} depthwise / {3}", size, c, k, stride), seconds[0], seconds[1],
        median_of([&] { conv2d_int8(x, w, scale, {}, {}, o); }, turns));
  }
  const auto three = [&](const std::string& what, const Shape& sizes, const std::function<void(const Tensor&)>& f,
                         const std::function<void(const Tensor&)>& integers) {
    const Tensor a = floats(sizes, f32), b = floats(sizes, bf16), q = bytes(sizes);
    row(what, median_of([&] { f(a); }, turns), median_of([&] { f(b); }, turns), median_of([&] { integers(q); }, turns));
  };
  const auto pool = [](const Tensor& x) { max_pool2d(x, {3}, {.stride = {2}, .padding = {1}}); };
  three("112x112, 64: max pooling 3x3 / 2", {batch, 64, 112, 112}, pool, pool);
  three(
      "7x7, 2048: mean of the image", {batch, 2048, 7, 7}, [](const Tensor& x) { adaptive_avg_pool2d(x, {1}); },
      [](const Tensor& x) {
        mean_int8(x, {2, 3}, true, {}, Int8Grid{});
      });
  three(
      "56x56, 256: sum of two", {batch, 256, 56, 56}, [](const Tensor& x) { x + x; },
      [](const Tensor& x) { add_int8(x, x, {}, {}, Int8Grid{}); });
  const Tensor table = randint(0, 256, {256}, {.dtype = u8});
  three(
      "56x56, 256: clone (int8: lookup)", {batch, 256, 56, 56}, [](const Tensor& x) { x.clone(); },
      [&](const Tensor& x) { lookup_int8(x, table); });
}

void linears(int turns) {
  fmt::print("\nLinear layers (GB/s: of the weights)\n{:<30} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}\n", "", "f32 ms",
             "bf16 ms", "w8 ms", "w4 ms", "int8 ms", "w8 GB/s", "w4 GB/s");
  for (const std::int64_t rows : {1, 4, 16, 64, 512}) {
    for (const auto& [k, outputs] : {std::pair<std::int64_t, std::int64_t>{2048, 1000}, {4096, 4096}}) {
      const Tensor x = randn({rows, k}), w = randn({outputs, k}), half = x.to(bf16), half_w = w.to(bf16);
      const Tensor q = randint(-128, 128, {outputs, k}, {.dtype = i8}),
                   four = randint(0, 256, {outputs, k / 2}, {.dtype = u8}), scale = full({outputs}, 0.01),
                   groups = full({outputs, k / 128}, 0.01), xq = randint(0, 256, {rows, k}, {.dtype = u8});
      const double t[] = {median_of([&] { linear(x, w); }, turns), median_of([&] { linear(half, half_w); }, turns),
                          median_of([&] { linear_weight_only(x, q, scale); }, turns),
                          median_of([&] { linear_weight_only(x, four, groups); }, turns),
                          median_of([&] { linear_int8(xq, q, scale, {}, {}, int8_options(1, 0)); }, turns)};
      const double weights = static_cast<double>(k * outputs) * 1e-9;
      fmt::print("{:<30} {:>8.4f} {:>8.4f} {:>8.4f} {:>8.4f} {:>8.4f} {:>8.1f} {:>8.1f}\n",
                 fmt::format("{} x {} to {}", rows, k, outputs), t[0] * 1e3, t[1] * 1e3, t[2] * 1e3, t[3] * 1e3,
                 t[4] * 1e3, weights / t[2], weights / 2 / t[3]);
      std::fflush(stdout);
    }
  }
}

bool number(std::string_view text, int& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 1 && value <= 4096;
}

int run(int argc, char** argv) {
  int batch = 0, turns = 5, threads = 0;
  std::string only;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    const bool known = (flag == "--batch" && number(value, batch)) || (flag == "--turns" && number(value, turns)) ||
                       (flag == "--threads" && number(value, threads)) ||
                       (flag == "--only" && (value == "convolutions" || value == "others" || value == "linears"));
    if (!known) {
      std::fprintf(stderr, "usage: %s [--batch N] [--turns N] [--threads N] [--only convolutions|others|linears]\n",
                   argv[0]);
      return 2;
    }
    if (flag == "--only") only = value;
  }
  if (threads > 0) set_num_threads(threads);
  manual_seed(1);
  const NoGrad no_grad;
  const double peak = vnni_peak();
  const MachineInfo info = machine();
  fmt::print("{}, {}, {} threads; VNNI: {:.0f} GOP/s. Times are medians of {} turns.\n", info.cpu, info.isa,
             info.threads, peak * 1e-9, turns);
  for (const std::int64_t n : batch > 0 ? std::vector<std::int64_t>{batch} : std::vector<std::int64_t>{1, 32}) {
    if (only.empty() || only == "convolutions") convolutions(n, turns, peak);
    if (only.empty() || only == "others") others(n, turns);
  }
  if (only.empty() || only == "linears") linears(turns);
  return 0;
}

}  // namespace
}  // namespace halfstep::bench

int main(int argc, char** argv) {
  try {
    return halfstep::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_int8: %s\n", error.what());
    return 1;
  }
}
