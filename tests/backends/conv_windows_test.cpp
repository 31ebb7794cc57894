// SPDX-License-Identifier: Apache-2.0
// Convolutions of bfloat16, float32 and float16 by windows on the tiles of AMX, or by their model, against the plain
// loops in float64: any window, stride, dilation and padding, results that don't fill tiles, images that are cut into
// bands. Workspace holds NaN until it is written.
#include "halfstep/backends/cpu/conv_windows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/parallel.h"
#include "tests/backends/conv_calls.h"
#include "tests/backends/gemm_case.h"

namespace halfstep::cpu {
namespace {

struct Side {
  std::int64_t places, window, stride = 1, dilation = 1, before = 0, after = 0;
  std::int64_t results() const { return (places + before + after - dilation * (window - 1) - 1) / stride + 1; }
};

ConvGeometry windows(std::int64_t n, std::int64_t c, std::int64_t o, const Side& rows, const Side& columns) {
  return {n,
          c,
          rows.places,
          columns.places,
          o,
          rows.results(),
          columns.results(),
          rows.window,
          columns.window,
          1,
          {rows.stride, columns.stride},
          {rows.dilation, columns.dilation},
          {rows.before, columns.before},
          {rows.after, columns.after}};
}
ConvGeometry square(std::int64_t n, std::int64_t c, std::int64_t o, const Side& side) {
  return windows(n, c, o, side, side);
}

std::vector<ConvGeometry> geometries(DType dtype) {
  std::vector<ConvGeometry> all = {
      square(2, 32, 32, {14, 3, 1, 1, 1, 1}),
      square(5, 64, 96, {7, 3, 1, 1, 1, 1}),
      square(3, 32, 17, {9, 3, 2, 1, 1, 1}),
      square(2, 96, 33, {12, 1, 2}),
      square(1, 32, 64, {13, 1, 3}),
      square(2, 32, 40, {8, 2, 2}),
      square(1, 32, 1, {1, 3, 1, 1, 1, 1}),
      square(1, 64, 32, {11, 5, 1, 1, 2, 2}),
      square(2, 32, 32, {15, 7, 2, 1, 3, 3}),
      square(2, 32, 32, {12, 3, 1, 2, 2, 2}),
      square(1, 32, 32, {13, 3, 2, 3, 3, 3}),
      windows(2, 32, 64, {6, 1}, {19, 3, 1, 1, 1, 1}),
      windows(2, 64, 32, {9, 4, 1, 1, 1, 2}, {5, 2, 3, 1, 0, 1}),
      windows(1, 32, 32, {10, 3, 3, 1, 0, 2}, {9, 3, 1, 1, 2, 0}),
      // Windows that see nothing but what is around the image, and lines at its end that none sees.
      windows(1, 32, 32, {3, 3, 1, 1, 5, 5}, {3, 3, 2, 1, 4, 4}),
      windows(2, 32, 32, {6, 3, 2, 1, 0, -1}, {8, 3, 4, 1, 0, -1}),
      // Input gradients phase by phase.
      square(2, 40, 64, {14, 3, 2, 1, 1, 1}),
      square(1, 17, 32, {8, 4, 2, 1, 1, 1}),
      windows(2, 33, 32, {13, 7, 2, 1, 3, 3}, {10, 5, 3, 1, 2, 0}),
      windows(1, 32, 32, {2, 3, 3, 1, 0, 1}, {9, 3, 1, 2, 1, 1}),
      square(3, 200, 96, {6, 2, 2}),
      // Channels, or filters, of which elements of several parts take some at a time.
      square(1, 1600, 8, {3, 1, 2}),
      square(1, 8, 1600, {3, 1, 1}),
      // Weights that are read once for several images.
      square(7, 256, 128, {3, 3, 1, 1, 1, 1}),
  };
  // In bands, the last one of fewer lines. Elements of several parts take as much room in smaller images.
  const bool small = dtype != bf16;
  const Side high = {small ? 31 : 61, 3, 1, 1, 1, 1}, wide = {small ? 70 : 100, 3, 1, 1, 1, 1},
             high_strided = {small ? 61 : 91, 3, 2, 1, 1, 1}, wide_strided = {small ? 70 : 120, 3, 2, 1, 1, 1};
  all.push_back(windows(small ? 1 : 2, 64, 8, high, wide));
  all.push_back(windows(1, 64, 8, high_strided, wide_strided));
  return all;
}

std::string text(const ConvGeometry& g) {
  return std::to_string(g.n) + 'x' + std::to_string(g.c) + 'x' + std::to_string(g.h) + 'x' + std::to_string(g.w) +
         " to " + std::to_string(g.o) + " window " + std::to_string(g.kh) + 'x' + std::to_string(g.kw) + " stride " +
         std::to_string(g.stride[0]) + 'x' + std::to_string(g.stride[1]);
}

struct Restore {
  const int threads = num_threads();
  const Isa isa = compute_isa();
  ~Restore() {
    set_num_threads(threads);
    set_isa_for_test(isa);
  }
};

// A result of k products is at most k + 1 roundings of float32 of their sum of magnitudes from exact (one for the
// bias); then it is rounded once. Products of bfloat16 are exact; those of parts of float32 that are left out are one
// rounding more, and adding the other parts' two. Numbers below 2^-126 don't occur.
// With Float32Precision::high products lose kLostByHigh.
class ConvWindowsOf : public testing::TestWithParam<std::pair<DType, Float32Precision>> {};

TEST_P(ConvWindowsOf, KeepTheirBound) {
  const auto [dtype, precision] = GetParam();
  const double lost = precision == Float32Precision::high ? kLostByHigh : 0;
  const double half_unit = dtype == bf16 ? 0x1.01p-8 : dtype == f16 ? 0x1.01p-11 : 0;
  manual_seed(1);
  const Restore restore;
  const auto last = MemoryFormat::channels_last;
  for (const ConvGeometry& g : geometries(dtype)) {
    for (const ConvPart part : {ConvPart::output, ConvPart::input}) {
      for (const bool planes : {false, true}) {  // of the weight
        const bool forward = part == ConvPart::output, with_bias = forward == planes;
        const Tensor x = randn({g.n, g.c, g.h, g.w}).to(dtype).contiguous(last),
                     w = randn({g.o, g.c, g.kh, g.kw}).to(dtype),
                     y = randn({g.n, g.o, g.oh, g.ow}).to(dtype).contiguous(last),
                     bias = randn({forward ? g.o : g.c}).to(dtype);
        const auto solve = [&](ConvPath path, bool magnitudes) {
          const auto as = [&](const Tensor& t) {
            return magnitudes ? abs(t.to(f64)) : path == ConvPath::reference ? t.to(f64) : t;
          };
          Tensor a = as(x), b = as(w), c = as(y);
          if (!planes) b = b.contiguous(last);
          Tensor& result = forward ? c : a;
          result = full(result.sizes(), NAN).to(result.dtype()).contiguous(last);
          const Tensor added = as(bias);
          const TensorView added_view = view(added);
          ConvCall call{part, g, view(a), view(b), view(c)};
          call.precision = precision;
          if (with_bias) call.bias = &added_view;
          if (path == ConvPath::windows && !windows_serve(call)) return std::vector<double>();
          Context context;
          EXPECT_EQ(convolve_by(path, &context, call), Status::ok) << context.error;
          return result.to_vector<double>();
        };
        const auto exact = solve(ConvPath::reference, false), sizes = solve(ConvPath::reference, true);
        const double roundings = static_cast<double>((forward ? g.c : g.o) * g.kh * g.kw) + (dtype == bf16 ? 1 : 4);
        bool served = (forward ? g.c : g.o) % 32 == 0;
        for (int d = 0; d < 2 && !forward; ++d) {
          const std::int64_t window = d == 0 ? g.kh : g.kw;
          served = served && (g.stride[d] == 1 || g.dilation[d] == 1) &&
                   g.before[d] + g.stride[d] <= g.dilation[d] * (window - 1) + 1;
        }
        for (const Isa isa : {Isa::avx2, restore.isa}) {
          set_isa_for_test(isa);
          std::vector<double> before;
          for (const int threads : {1, 2, 3}) {
            set_num_threads(threads);
            const auto got = solve(ConvPath::windows, false);
            ASSERT_EQ(got.size(), served ? exact.size() : 0U) << text(g);
            for (std::size_t i = 0; i < got.size(); ++i) {
              ASSERT_NEAR(got[i], exact[i],
                          (roundings * 0x1p-24 + lost) * sizes[i] + half_unit * std::abs(exact[i]) +
                              (dtype == f16 ? 0x1p-25 : 0))
                  << text(g) << " part " << static_cast<int>(part) << ' ' << name(isa) << " at " << i;
            }
            if (!before.empty()) {
              ASSERT_EQ(got, before) << text(g) << ' ' << threads;
            }
            before = got;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, ConvWindowsOf,
                         testing::Values(std::pair{bf16, Float32Precision::highest},
                                         std::pair{f32, Float32Precision::highest},
                                         std::pair{f32, Float32Precision::high},
                                         std::pair{f16, Float32Precision::highest}),
                         [](const auto& info) {
                           const bool high = info.param.second == Float32Precision::high;
                           return std::string(name(info.param.first)) + (high ? "_high" : "");
                         });

TEST(ConvWindows, ServeByShape) {
  const auto last = MemoryFormat::channels_last;
  const auto serves = [&](ConvPart part, const ConvGeometry& g, DType dtype = bf16, bool planes = false) {
    const Tensor x = empty({g.n, g.c, g.h, g.w}, {.dtype = dtype}), w = empty({g.o, g.c, g.kh, g.kw}, {.dtype = dtype}),
                 y = empty({g.n, g.o, g.oh, g.ow}, {.dtype = dtype}).contiguous(last),
                 a = planes ? x : x.contiguous(last);
    return windows_serve({part, g, view(a), view(w), view(y)});
  };
  const ConvGeometry g = square(2, 32, 40, {9, 3, 1, 1, 1, 1});
  EXPECT_TRUE(serves(ConvPart::output, g));
  EXPECT_FALSE(serves(ConvPart::weight, g));
  EXPECT_TRUE(serves(ConvPart::output, g, f32));
  EXPECT_TRUE(serves(ConvPart::output, g, f16));
  EXPECT_FALSE(serves(ConvPart::output, g, f64));
  EXPECT_FALSE(serves(ConvPart::output, g, bf16, true));
  EXPECT_FALSE(serves(ConvPart::input, g));  // 40 filters
  EXPECT_TRUE(serves(ConvPart::input, square(2, 40, 32, {9, 3, 1, 1, 1, 1})));
  EXPECT_TRUE(serves(ConvPart::input, square(2, 32, 32, {9, 3, 2, 1, 1, 1})));
  EXPECT_FALSE(serves(ConvPart::input, square(2, 32, 32, {9, 3, 2, 1, 2, 2})));  // a phase's windows begin too late
  EXPECT_FALSE(serves(ConvPart::input, square(2, 32, 32, {9, 3, 2, 2, 1, 1})));
  EXPECT_FALSE(serves(ConvPart::input, square(2, 32, 32, {9, 1, 2})));  // places that none sees
  EXPECT_FALSE(serves(ConvPart::output, square(2, 40, 32, {9, 3, 1, 1, 1, 1})));
  EXPECT_FALSE(serves(ConvPart::input, square(2, 32, 32, {9, 3, 1, 1, 4, 4})));
  // A dilation much larger than the image.
  EXPECT_FALSE(serves(ConvPart::output, square(1, 32, 32, {5, 3, 1, 30000, 30000, 30000})));
  ConvGeometry grouped = square(2, 64, 64, {9, 3, 1, 1, 1, 1});
  grouped.groups = 2;
  EXPECT_FALSE(serves(ConvPart::output, grouped));
}

}  // namespace
}  // namespace halfstep::cpu
