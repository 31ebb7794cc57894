// SPDX-License-Identifier: Apache-2.0
// Depthwise convolutions against the plain loops in float64: any window, stride, dilation and padding, channels that
// don't fill vectors, images smaller than a window. Workspace holds NaN until it is written.
#include "halfstep/backends/cpu/conv_depthwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/parallel.h"
#include "tests/backends/conv_calls.h"

namespace halfstep::cpu {
namespace {

struct Window {
  std::int64_t size, stride = 1, dilation = 1, before = 0, after = 0;
};

ConvGeometry depthwise(std::int64_t n, std::int64_t c, std::int64_t h, std::int64_t w, const Window& rows,
                       const Window& columns) {
  const auto out = [](std::int64_t places, const Window& k) {
    return (places + k.before + k.after - k.dilation * (k.size - 1) - 1) / k.stride + 1;
  };
  return {n,
          c,
          h,
          w,
          c,
          out(h, rows),
          out(w, columns),
          rows.size,
          columns.size,
          c,
          {rows.stride, columns.stride},
          {rows.dilation, columns.dilation},
          {rows.before, columns.before},
          {rows.after, columns.after}};
}

std::vector<ConvGeometry> geometries() {
  const Window three{3, 1, 1, 1, 1}, strided{3, 2, 1, 1, 1}, five{5, 1, 1, 2, 2}, seven{7, 1, 1, 3, 3};
  return {
      depthwise(2, 32, 14, 14, three, three),
      depthwise(3, 48, 7, 7, three, three),
      depthwise(1, 16, 1, 1, three, three),
      depthwise(2, 17, 2, 3, three, three),
      depthwise(2, 40, 9, 31, three, three),
      depthwise(2, 33, 15, 13, strided, strided),
      depthwise(2, 96, 16, 16, strided, strided),
      depthwise(1, 24, 11, 9, five, five),
      depthwise(1, 65, 12, 12, {5, 2, 1, 2, 2}, {5, 2, 1, 1, 2}),
      depthwise(1, 32, 9, 16, seven, seven),
      depthwise(1, 20, 13, 13, {7, 2, 1, 3, 3}, {7, 2, 1, 3, 3}),
      depthwise(2, 16, 9, 10, {3, 3, 1, 0, 2}, {3, 3, 1, 2, 0}),
      depthwise(1, 47, 12, 12, {3, 1, 2, 2, 2}, {3, 1, 3, 3, 3}),
      depthwise(1, 16, 13, 12, {3, 2, 2, 2, 2}, {5, 3, 2, 4, 4}),
      // Of sequences; windows of one row, of an even number of taps, and of one.
      depthwise(2, 36, 1, 70, {1}, {31, 1, 1, 15, 15}),
      depthwise(2, 19, 6, 9, {1}, three),
      depthwise(2, 19, 6, 9, three, {1}),
      depthwise(2, 16, 8, 8, {2, 2}, {2, 2}),
      depthwise(1, 35, 8, 9, {4, 1, 1, 1, 2}, {4, 1, 1, 2, 1}),
      depthwise(2, 33, 5, 4, {1}, {1}),
      depthwise(1, 16, 5, 7, {1, 3}, {1, 2}),
      // Windows that see nothing but what is around the image, a column that none sees, and negative padding after it.
      depthwise(1, 18, 3, 3, {3, 1, 1, 5, 5}, {3, 2, 1, 4, 4}),
      depthwise(2, 16, 6, 8, {3, 2, 1, 0, -1}, {3, 4, 1, 0, -1}),
      // A dilation much larger than the image.
      depthwise(1, 16, 4, 5, {3, 1, 30000, 30000, 30000}, {3, 1, 40000, 40000, 40000}),
  };
}

std::string text(const ConvGeometry& g) {
  return std::to_string(g.n) + 'x' + std::to_string(g.c) + 'x' + std::to_string(g.h) + 'x' + std::to_string(g.w) +
         " window " + std::to_string(g.kh) + 'x' + std::to_string(g.kw) + " stride " + std::to_string(g.stride[0]) +
         'x' + std::to_string(g.stride[1]);
}

// A result of 9 products, say, is at most 9 roundings of float32 of their sum of magnitudes from exact, a weight's
// gradient one for each place and five for the terms' and blocks' sums; then it is rounded once.
TEST(ConvDepthwise, KeepsItsBound) {
  manual_seed(1);
  const auto last = MemoryFormat::channels_last;
  const int threads = num_threads();
  const Isa best = compute_isa();
  for (const ConvGeometry& g : geometries()) {
    for (const DType dtype : {f32, bf16, f16}) {
      const Tensor x = randn({g.n, g.c, g.h, g.w}).to(dtype).contiguous(last),
                   w = randn({g.c, 1, g.kh, g.kw}).to(dtype),
                   y = randn({g.n, g.c, g.oh, g.ow}).to(dtype).contiguous(last);
      const Tensor operands[] = {x, w, y};
      for (const ConvPart part : {ConvPart::output, ConvPart::input, ConvPart::weight}) {
        const int computed = part == ConvPart::input ? 0 : part == ConvPart::weight ? 1 : 2;
        const auto solve = [&](bool exact, bool magnitudes) {
          Tensor t[3];
          for (int i = 0; i < 3; ++i) {
            t[i] = magnitudes ? abs(operands[i].to(f64)) : exact ? operands[i].to(f64) : operands[i];
            if (i == computed) {
              t[i] = full(t[i].sizes(), NAN).to(t[i].dtype()).contiguous(i == 1 ? MemoryFormat::contiguous : last);
            }
          }
          ConvCall call{part, g, view(t[0]), view(t[1]), view(t[2])};
          EXPECT_EQ(depthwise_serves(call), !exact && !magnitudes);
          Context context;
          EXPECT_EQ(convolve_by(exact || magnitudes ? ConvPath::reference : ConvPath::depthwise, &context, call),
                    Status::ok)
              << context.error;
          return t[computed].to_vector<double>();
        };
        const auto exact = solve(true, false), sizes = solve(true, true);
        const double terms =
            part == ConvPart::weight ? static_cast<double>(g.n * g.oh * g.ow) + 5 : static_cast<double>(g.kh * g.kw);
        const double u = dtype == f16 ? 0x1p-11 : dtype == bf16 ? 0x1p-8 : 0x1p-24;
        for (const Isa isa : {Isa::avx2, best}) {
          set_isa_for_test(isa);
          std::vector<double> before;
          for (const int n : {1, 2, 3}) {
            set_num_threads(n);
            const auto got = solve(false, false);
            ASSERT_EQ(got.size(), exact.size());
            for (std::size_t i = 0; i < got.size(); ++i) {
              const double sum = terms * 0x1p-24 * sizes[i];
              ASSERT_LE(std::abs(got[i] - exact[i]), u * (std::abs(exact[i]) + sum) + sum + 0x1p-25)
                  << text(g) << " part " << computed << ' ' << name(dtype) << ' ' << i;
            }
            if (n > 1) {
              EXPECT_EQ(got, before) << text(g) << " on " << n << " threads";
            }
            before = got;
          }
        }
      }
    }
  }
  set_isa_for_test(best);
  set_num_threads(threads);
}

// Large enough for results that go past the caches and for memory that is fetched ahead, several terms of a weight's
// gradient, and shares of channels.
TEST(ConvDepthwise, KeepsItsBoundOnLargeImages) {
  manual_seed(2);
  const auto last = MemoryFormat::channels_last;
  const int threads = num_threads();
  const Window three{3, 1, 1, 1, 1}, strided{3, 2, 1, 1, 1};
  for (const ConvGeometry& g : {depthwise(3, 64, 112, 112, three, three), depthwise(3, 64, 112, 112, strided, strided),
                                depthwise(2, 544, 14, 14, three, three),
                                // Few places: threads share channels, 568 of which aren't eight shares of vectors.
                                depthwise(3, 568, 7, 7, three, three), depthwise(1, 1048, 7, 7, three, three)}) {
    for (const DType dtype : {f32, bf16}) {
      const Tensor x = randn({g.n, g.c, g.h, g.w}).to(dtype).contiguous(last),
                   w = randn({g.c, 1, g.kh, g.kw}).to(dtype),
                   y = randn({g.n, g.c, g.oh, g.ow}).to(dtype).contiguous(last);
      for (const ConvPart part : {ConvPart::output, ConvPart::input, ConvPart::weight}) {
        const auto solve = [&](bool exact, bool magnitudes, DType result) {
          const auto of = [&](const Tensor& t) { return magnitudes ? abs(t.to(f64)) : exact ? t.to(f64) : t; };
          Tensor a = of(x), b = of(w), c = of(y);
          Tensor& computed = part == ConvPart::input ? a : part == ConvPart::weight ? b : c;
          const auto format = part == ConvPart::weight ? MemoryFormat::contiguous : last;
          computed = full(computed.sizes(), NAN).to(exact || magnitudes ? f64 : result).contiguous(format);
          ConvCall call{part, g, view(a), view(b), view(c)};
          Context context;
          EXPECT_EQ(convolve_by(exact || magnitudes ? ConvPath::reference : ConvPath::depthwise, &context, call),
                    Status::ok);
          return computed.to_vector<double>();
        };
        const DType result = part == ConvPart::weight ? f32 : dtype;
        const auto exact = solve(true, false, f64), sizes = solve(true, true, f64);
        const double terms = part == ConvPart::weight ? static_cast<double>(g.n * g.oh * g.ow) + 5 : 9;
        const double u = result == bf16 ? 0x1p-8 : 0x1p-24;
        std::vector<double> before;
        for (const int n : {1, 2, 5, 8}) {
          set_num_threads(n);
          const auto got = solve(false, false, result);
          for (std::size_t i = 0; i < got.size(); ++i) {
            const double sum = terms * 0x1p-24 * sizes[i];
            ASSERT_LE(std::abs(got[i] - exact[i]), u * (std::abs(exact[i]) + sum) + sum)
                << text(g) << " part " << static_cast<int>(part) << ' ' << name(dtype) << ' ' << i;
          }
          if (n > 1) {
            EXPECT_EQ(got, before) << text(g) << " on " << n << " threads";
          }
          before = got;
        }
      }
    }
  }
  set_num_threads(threads);
}

// A bias of any dtype and stride is added before the result is rounded, forward and to what a transposed convolution
// writes; weights may have another dtype than images, and any strides.
TEST(ConvDepthwise, AddsABias) {
  manual_seed(3);
  const auto last = MemoryFormat::channels_last;
  const ConvGeometry g = depthwise(2, 35, 9, 8, {3, 2, 1, 1, 1}, {3, 2, 1, 1, 1});
  for (const ConvPart part : {ConvPart::output, ConvPart::input}) {
    const bool forward = part == ConvPart::output;
    for (const DType images : {f32, bf16, f16}) {
      for (const DType weights : {f32, bf16}) {
        const Shape from = forward ? Shape{g.n, g.c, g.h, g.w} : Shape{g.n, g.c, g.oh, g.ow},
                    to = forward ? Shape{g.n, g.c, g.oh, g.ow} : Shape{g.n, g.c, g.h, g.w};
        const Tensor a = randn(from).to(images).contiguous(last),
                     w = permute(randn({3, 3, 1, g.c}).to(weights), {3, 2, 1, 0}),
                     bias = halfstep::select(randn({g.c, 2}).to(weights), 1, 1);
        const auto solve = [&](bool exact, bool magnitudes) {
          const auto of = [&](const Tensor& t) { return magnitudes ? abs(t.to(f64)) : exact ? t.to(f64) : t; };
          const Tensor x = of(a), v = of(w), b = of(bias),
                       y = full(to, NAN).to(exact || magnitudes ? f64 : images).contiguous(last);
          ConvCall call{part, g, view(forward ? x : y), view(v), view(forward ? y : x)};
          const TensorView added = view(b);
          call.bias = &added;
          Context context;
          EXPECT_EQ(convolve_by(exact || magnitudes ? ConvPath::reference : ConvPath::depthwise, &context, call),
                    Status::ok);
          return y.to_vector<double>();
        };
        const auto exact = solve(true, false), sizes = solve(true, true), got = solve(false, false);
        const double u = images == f16 ? 0x1p-11 : images == bf16 ? 0x1p-8 : 0x1p-24;
        for (std::size_t i = 0; i < got.size(); ++i) {
          const double sum = 10 * 0x1p-24 * sizes[i];
          ASSERT_LE(std::abs(got[i] - exact[i]), u * (std::abs(exact[i]) + sum) + sum + 0x1p-25)
              << name(images) << ' ' << static_cast<int>(part) << ' ' << i;
        }
      }
    }
  }
}

// A tap that sees what is around the image adds nothing to a result, even if it is infinite; an infinite or NaN place
// reaches the results that see it alone.
TEST(ConvDepthwise, KeepsWhatIsNotFinite) {
  manual_seed(4);
  const auto last = MemoryFormat::channels_last;
  const float infinity = std::numeric_limits<float>::infinity();
  const ConvGeometry g = depthwise(1, 32, 9, 9, {3, 1, 1, 1, 1}, {3, 1, 1, 1, 1});
  for (const DType dtype : {f32, bf16, f16}) {
    for (const ConvPart part : {ConvPart::output, ConvPart::input}) {
      for (const bool in_weight : {true, false}) {
        Tensor a = ones({1, 32, 9, 9}), w = ones({32, 1, 3, 3});
        if (in_weight) {
          w.data<float>()[3 * 9 + 0] = infinity;
          w.data<float>()[5 * 9 + 8] = NAN;
        } else {
          a.data<float>()[3 * 81 + 4 * 9 + 4] = infinity;
          a.data<float>()[7 * 81] = NAN;
        }
        a = a.to(dtype).contiguous(last), w = w.to(dtype);
        const auto solve = [&](ConvPath path) {
          const Tensor y = full({1, 32, 9, 9}, 7).to(dtype).contiguous(last);
          const bool forward = part == ConvPart::output;
          ConvCall call{part, g, view(forward ? a : y), view(w), view(forward ? y : a)};
          Context context;
          EXPECT_EQ(convolve_by(path, &context, call), Status::ok);
          return y.to_vector<double>();
        };
        const auto expected = solve(ConvPath::reference), got = solve(ConvPath::depthwise);
        for (std::size_t i = 0; i < got.size(); ++i) {
          ASSERT_TRUE(got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i])))
              << name(dtype) << ' ' << i << ": " << got[i] << ", not " << expected[i];
        }
      }
    }
  }
}

TEST(ConvDepthwise, ServesByShape) {
  const auto last = MemoryFormat::channels_last;
  const auto path = [&](ConvGeometry g, DType x_dtype, DType y_dtype, bool planes = false) {
    const Tensor x = empty({g.n, g.c, g.h, g.w}, {.dtype = x_dtype}).contiguous(last),
                 w = empty({g.o, g.c / g.groups, g.kh, g.kw}), y = empty({g.n, g.o, g.oh, g.ow}, {.dtype = y_dtype}),
                 z = planes ? y : y.contiguous(last);
    return choose_conv_path({ConvPart::output, g, view(x), view(w), view(z)}, compute_isa());
  };
  const Window three{3, 1, 1, 1, 1};
  const ConvGeometry g = depthwise(2, 32, 9, 9, three, three);
  for (const DType dtype : {f32, bf16, f16}) EXPECT_EQ(path(g, dtype, dtype), ConvPath::depthwise);
  EXPECT_EQ(path(g, f64, f64), ConvPath::reference);
  EXPECT_NE(path(g, f32, bf16), ConvPath::depthwise);
  EXPECT_NE(path(g, f32, f32, true), ConvPath::depthwise);
  for (const DType dtype : {f32, bf16}) {  // nor by units, which take long for groups of one channel
    EXPECT_EQ(path(depthwise(2, 8, 9, 9, three, three), dtype, dtype), ConvPath::blocks);
  }
  ConvGeometry grouped = g;
  grouped.groups = 16;
  EXPECT_NE(path(grouped, f32, f32), ConvPath::depthwise);
  ConvGeometry twice = g;
  twice.o = 64;
  EXPECT_NE(path(twice, f32, f32), ConvPath::depthwise);
}

}  // namespace
}  // namespace halfstep::cpu
