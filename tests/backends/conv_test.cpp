// SPDX-License-Identifier: Apache-2.0
// Every path of a convolution against the plain loops, with workspace that holds NaN until it is written. The 16-bit
// units' path runs here through oneDNN's emulation of bfloat16, where the processor has none.
#include "halfstep/backends/cpu/conv.h"

#include "halfstep/backends/cpu/amx_tile.h"
#include "halfstep/backends/cpu/conv_shares.h"
#include "halfstep/backends/cpu/conv_spread.h"
#include "halfstep/backends/cpu/conv_tuning.h"
#include "halfstep/backends/cpu/isa.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "halfstep/core/random.h"
#include "halfstep/core/tensor.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/parallel.h"
#include "halfstep/runtime/winograd.h"
#include "tests/backends/conv_calls.h"
#include "tests/backends/gemm_case.h"

namespace halfstep::cpu {
namespace {

TEST(ConvPaths, Agree) {
  manual_seed(1);
  ConvGeometry dilated = geometry(2, 32, 12, 24, 3, 1, 2);
  dilated.dilation[0] = dilated.dilation[1] = 2;
  dilated.oh = dilated.ow = 12;
  for (const ConvGeometry& g : {geometry(3, 24, 10, 32, 3, 1, 1), geometry(9, 16, 7, 40, 1, 1, 0),
                                geometry(5, 33, 9, 17, 3, 2, 1), geometry(2, 3, 30, 16, 7, 2, 3),
                                // An odd number of places in all, and a single one.
                                geometry(1, 16, 5, 20, 3, 1, 1), geometry(1, 40, 3, 33, 3, 1, 0),
                                // Taps that begin in the middle of 32 columns; strides, and windows that see nothing
                                // but what is around the image.
                                geometry(3, 48, 9, 30, 3, 2, 1), geometry(2, 80, 5, 20, 3, 1, 1),
                                geometry(2, 32, 11, 64, 5, 3, 2), geometry(1, 16, 3, 20, 3, 2, 4), dilated,
                                // Weights enough for two threads to reorder, in blocks of 48 output channels.
                                geometry(1, 256, 8, 512, 1, 2, 0)}) {
    for (const ConvPart part : {ConvPart::output, ConvPart::input, ConvPart::weight}) {
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        const auto last = MemoryFormat::channels_last;
        const Tensor x = randn({g.n, g.c, g.h, g.w}).to(dtype).contiguous(last),
                     w = randn({g.o, g.c, g.kh, g.kw}).to(dtype),
                     y = randn({g.n, g.o, g.oh, g.ow}).to(dtype).contiguous(last);
        const Tensor operands[] = {x, w, y};
        const int computed = part == ConvPart::input ? 0 : part == ConvPart::weight ? 1 : 2;
        const auto solve = [&](ConvPath path, bool magnitudes) {
          Tensor t[3];
          for (int i = 0; i < 3; ++i) {
            t[i] = magnitudes ? abs(operands[i].to(DType::f64)) : operands[i];
            if (i == computed)
              t[i] = full(t[i].sizes(), NAN).to(t[i].dtype()).contiguous(i == 1 ? MemoryFormat::contiguous : last);
          }
          ConvCall call{part, g, view(t[0]), view(t[1]), view(t[2])};
          Context context;
          EXPECT_EQ(convolve_by(path, &context, call), Status::ok) << context.error;
          return t[computed].to_vector<double>();
        };
        const double terms = part == ConvPart::output  ? static_cast<double>(g.c * g.kh * g.kw)
                             : part == ConvPart::input ? static_cast<double>(g.o * g.kh * g.kw)
                                                       : static_cast<double>(g.n * g.oh * g.ow);
        const double u = dtype == DType::f16 ? 0x1p-11 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-24;
        const auto exact = solve(ConvPath::reference, false), sizes = solve(ConvPath::reference, true);
        for (const ConvPath path : {ConvPath::products, ConvPath::pairs, ConvPath::tiles, ConvPath::blocks,
                                    ConvPath::native, ConvPath::matrix}) {
          if (path == ConvPath::products && part != ConvPart::weight) continue;
          const bool single = g.kh == 1 && g.before[0] == 0, dense = g.oh == g.h, in_parts = dtype != DType::bf16;
          const bool by_matrix = part == ConvPart::weight   ? in_parts
                                 : part == ConvPart::output ? dense || in_parts
                                                            : dense;
          if (path == ConvPath::matrix && !(single && by_matrix)) continue;
          if (path == ConvPath::tiles && part != ConvPart::weight) continue;
          if (path == ConvPath::pairs && (part != ConvPart::weight || dtype != DType::bf16)) continue;
          const auto got = solve(path, false);
          const std::string what =
              std::string(name(path)) + " part " + std::to_string(static_cast<int>(part)) + " " + name(dtype);
          ASSERT_EQ(got.size(), exact.size());
          for (std::size_t i = 0; i < got.size(); ++i) {
            // The reference rounds too.
            const double sum = (terms + 2) * 0x1p-24 * sizes[i];
            ASSERT_LE(std::abs(got[i] - exact[i]), 2 * u * std::abs(exact[i]) + 2 * sum + 0x1p-24) << what << ' ' << i;
          }
        }
      }
    }
  }
}

// Our own weight gradients against float64: of float32, of pairs of bf16, and by tiles (their model, where the
// processor has none) of bf16, float32 and f16. By tiles a term goes through at most 16 sums with others of its half of
// the pairs in 32 places, one of both halves, one for each 32 places behind it (six where elements are sums of
// bfloat16), and one for each share; by the others through one for each place or each chunk of places behind it: no
// more roundings than terms and five. Products of float32's parts that are left out are one more; with
// Float32Precision::high more is left out, kLostByHigh.
TEST(ConvWeight, KeepsItsBound) {
  manual_seed(2);
  const int threads = num_threads();
  ConvGeometry dilated = geometry(2, 20, 13, 35, 3, 1, 2), wide = geometry(3, 5, 12, 18, 3, 2, 2);
  dilated.dilation[0] = dilated.dilation[1] = 2;  // the padding gives 13 x 13 again
  dilated.oh = dilated.ow = 13;
  wide.dilation[1] = 2;
  wide.ow = 6, wide.after[1] = 1;
  ConvGeometry uneven = geometry(2, 17, 11, 33, 3, 1, 0);
  uneven.kh = 1, uneven.oh = 11;
  ConvGeometry lines = geometry(2, 13, 9, 34, 3, 1, 1);
  lines.dilation[0] = 2, lines.oh = 7;
  lines.before[1] = 2, lines.after[1] = 0;
  for (const ConvGeometry& g : {geometry(1, 16, 1, 16, 1, 1, 0),
                                geometry(1, 1, 1, 1, 1, 1, 0),
                                geometry(2, 33, 9, 17, 1, 1, 0),
                                geometry(64, 24, 3, 40, 3, 1, 1),
                                geometry(1, 3, 40, 16, 7, 2, 3),
                                geometry(2, 3, 15, 33, 7, 1, 3),
                                geometry(1, 3, 130, 40, 7, 2, 3),
                                geometry(2, 3, 4, 34, 5, 1, 4),
                                geometry(1, 3, 3, 33, 7, 1, 5),
                                geometry(3, 20, 5, 40, 5, 1, 0),
                                geometry(1, 3, 64, 16, 32, 32, 0),
                                geometry(1, 32, 64, 20, 3, 1, 1),
                                geometry(5, 32, 24, 40, 3, 1, 1),
                                geometry(3, 48, 8, 47, 3, 2, 1),
                                geometry(2, 70, 6, 300, 3, 1, 1),
                                geometry(1, 16, 70, 31, 1, 3, 0),
                                geometry(1, 256, 8, 512, 1, 2, 0),
                                geometry(1, 8, 300, 16, 1, 1, 0),
                                geometry(2, 544, 7, 40, 1, 2, 1),
                                geometry(3, 96, 5, 64, 1, 1, 0),
                                geometry(8, 48, 24, 70, 1, 1, 0),
                                geometry(5, 200, 17, 61, 1, 1, 0),
                                geometry(1, 600, 2, 530, 1, 1, 0),
                                geometry(1, 608, 2, 530, 1, 1, 0),
                                dilated,
                                wide,
                                uneven,
                                lines}) {
    const auto plain = MemoryFormat::contiguous, last = MemoryFormat::channels_last;
    const Tensor x = randn({g.n, g.c, g.h, g.w}).contiguous(last), y = randn({g.n, g.o, g.oh, g.ow}).contiguous(last);
    DType rounded = DType::f32;  // to this, for all dtypes
    Float32Precision precision = Float32Precision::highest;
    const auto solve = [&](ConvPath path, DType dtype, DType result, MemoryFormat format, bool magnitudes) {
      const auto of = [&](const Tensor& t) {
        const Tensor value = t.to(rounded).to(dtype);
        return magnitudes ? abs(value) : value;
      };
      const Tensor a = of(x), b = of(y), w = full({g.o, g.c, g.kh, g.kw}, NAN).to(result).contiguous(format);
      ConvCall call{ConvPart::weight, g, view(a), view(w), view(b)};
      call.precision = precision;
      Context context;
      EXPECT_EQ(convolve_by(path, &context, call), Status::ok) << context.error;
      return w.to_vector<double>();
    };
    const auto terms = static_cast<double>(g.n * g.oh * g.ow);
    for (const auto& [path, operands, high] :
         {std::tuple{ConvPath::products, DType::f32, false}, std::tuple{ConvPath::pairs, DType::bf16, false},
          std::tuple{ConvPath::tiles, DType::bf16, false}, std::tuple{ConvPath::tiles, DType::f32, false},
          std::tuple{ConvPath::tiles, DType::f32, true}, std::tuple{ConvPath::tiles, DType::f16, false}}) {
      rounded = operands;
      precision = high ? Float32Precision::high : Float32Precision::highest;
      const bool by_parts = path == ConvPath::tiles && operands != DType::bf16;
      const auto exact = solve(ConvPath::reference, DType::f64, DType::f64, plain, false);
      const auto sizes = solve(ConvPath::reference, DType::f64, DType::f64, plain, true);
      std::vector<double> before;
      for (const int n : {1, 2, 3}) {
        set_num_threads(n);
        for (const DType dtype : {DType::f32, DType::bf16}) {
          for (const MemoryFormat format : {plain, last}) {
            const auto got = solve(path, operands, dtype, format, false);
            const double u = dtype == DType::bf16 ? 0x1p-8 : 0;
            ASSERT_EQ(got.size(), exact.size());
            for (std::size_t i = 0; i < got.size(); ++i) {
              const double sum = ((terms + (by_parts ? 6 : 5)) * 0x1p-24 + (high ? kLostByHigh : 0)) * sizes[i];
              ASSERT_LE(std::abs(got[i] - exact[i]), u * (std::abs(exact[i]) + sum) + sum)
                  << name(path) << ' ' << g.c << " to " << g.o << ", " << g.kh << " x " << g.kw << ", " << n
                  << " threads: " << i;
            }
          }
        }
        const auto bits = solve(path, operands, DType::f32, plain, false);
        EXPECT_EQ(bits, solve(path, operands, DType::f32, last, false));
        if (n > 1) {
          EXPECT_EQ(bits, before) << "on " << n << " threads";
        }
        before = bits;
      }
    }
  }
  set_num_threads(threads);
}

// Infinities, NaN and numbers that round to infinity come through as by plain loops; for f16 and bf16 by tiles
// infinities may be NaN, and taps beside one that isn't finite, of the same filter and channel, may be NaN too.
TEST(ConvPaths, ShowWhatIsNotFinite) {
  manual_seed(4);
  const auto last = MemoryFormat::channels_last;
  for (const ConvGeometry& g : {geometry(2, 32, 9, 32, 3, 1, 1), geometry(2, 64, 8, 128, 1, 1, 0)}) {
    for (const auto& [dtype, precision] :
         {std::pair{DType::f32, Float32Precision::highest}, std::pair{DType::f32, Float32Precision::high},
          std::pair{DType::f16, Float32Precision::highest}, std::pair{DType::bf16, Float32Precision::highest}}) {
      // Products with the largest float32 are finite.
      Tensor x = randn({g.n, g.c, g.h, g.w}), w = randn({g.o, g.c, g.kh, g.kw}) * 0x1p-4,
             y = randn({g.n, g.o, g.oh, g.ow}) * 0x1p-4;
      const auto put = [](Tensor t, const std::vector<std::int64_t>& at, float value) {
        for (const std::int64_t i : at) t = t.select(0, i);
        t.fill_(value);
      };
      put(x, {0, 5, 4, 4}, INFINITY);
      put(x, {1, 7, 0, 3}, -INFINITY);
      put(y, {0, 3, 2, 2}, NAN);
      put(y, {1, 9, 5, 5}, INFINITY);
      if (dtype == DType::f32) put(x, {0, 1, 1, 1}, 0x1.fffffep127F);  // finite, but its first part is not
      x = x.to(dtype).contiguous(last), w = w.to(dtype).contiguous(last), y = y.to(dtype).contiguous(last);
      for (const ConvPart part : {ConvPart::output, ConvPart::input, ConvPart::weight}) {
        const auto kinds = [&, dtype = dtype, precision = precision](ConvPath path) {
          Tensor t[3] = {x, w, y};
          const int computed = part == ConvPart::input ? 0 : part == ConvPart::weight ? 1 : 2;
          t[computed] = zeros(t[computed].sizes(), {.dtype = dtype}).contiguous(last);
          ConvCall call{part, g, view(t[0]), view(t[1]), view(t[2])};
          call.precision = precision;
          Context context;
          EXPECT_EQ(convolve_by(path, &context, call), Status::ok) << context.error;
          std::string all;
          for (const float v : t[computed].to_vector<float>()) all += std::isnan(v) ? 'n' : std::isinf(v) ? 'i' : '.';
          return all;
        };
        const std::string exact = kinds(ConvPath::reference);
        const bool single = g.kh == 1 && (dtype != DType::bf16 || part != ConvPart::weight);
        const ConvPath path = single                     ? ConvPath::matrix
                              : part == ConvPart::weight ? ConvPath::tiles
                                                         : ConvPath::windows;
        const std::string got = kinds(path);
        ASSERT_EQ(got.size(), exact.size());
        EXPECT_NE(exact.find('.'), std::string::npos);
        EXPECT_NE(exact.find_first_of("ni"), std::string::npos);
        const bool stands = dtype != DType::f32 && !single;
        for (std::size_t i = 0; i < got.size(); ++i) {
          const std::size_t taps = static_cast<std::size_t>(g.kh * g.kw), first = i / taps * taps;
          const bool beside = stands && part == ConvPart::weight && got[i] == 'n' && exact[i] == '.' &&
                              exact.substr(first, taps).find_first_of("ni") != std::string::npos;
          ASSERT_TRUE(got[i] == exact[i] || beside || (stands && got[i] == 'n' && exact[i] == 'i'))
              << name(path) << ' ' << name(dtype) << " part " << static_cast<int>(part) << " at " << i << ": " << got[i]
              << " instead of " << exact[i];
        }
      }
    }
  }
}

// Against the reference: a result has g.o terms, and places that no window sees are zeros.
TEST(ConvSpread, IsTheInputGradient) {
  manual_seed(3);
  const int threads = num_threads();
  const auto strided = [](std::int64_t c, std::int64_t h, std::int64_t w, std::int64_t o, std::int64_t s0,
                          std::int64_t s1, std::int64_t groups) {
    ConvGeometry g = geometry(3, c, h, o, 1, 1, 0);
    g.w = w, g.groups = groups;
    g.stride[0] = s0, g.stride[1] = s1;
    g.oh = (h - 1) / s0 + 1, g.ow = (w - 1) / s1 + 1;
    g.after[0] = (g.oh - 1) * s0 + 1 - h, g.after[1] = (g.ow - 1) * s1 + 1 - w;
    return g;
  };
  for (const ConvGeometry& g :
       {strided(8, 8, 8, 16, 2, 2, 1), strided(64, 15, 14, 33, 2, 2, 1), strided(5, 9, 10, 4, 1, 3, 1),
        strided(3, 10, 7, 2, 4, 1, 1), strided(16, 7, 8, 8, 3, 2, 4), strided(32, 2, 1, 16, 2, 2, 1)}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      const auto last = MemoryFormat::channels_last;
      const Tensor w = randn({g.o, g.c / g.groups, 1, 1}).to(dtype),
                   y = randn({g.n, g.o, g.oh, g.ow}).to(dtype).contiguous(last);
      const auto solve = [&](bool reference, bool magnitudes) {
        const DType of = reference ? DType::f64 : dtype;
        const Tensor a = magnitudes ? abs(w.to(of)) : w.to(of), b = magnitudes ? abs(y.to(of)) : y.to(of),
                     x = full({g.n, g.c, g.h, g.w}, NAN).to(of).contiguous(last);
        ConvCall call{ConvPart::input, g, view(x), view(a), view(b)};
        EXPECT_EQ(is_spread(call), !reference);
        Context context;
        EXPECT_EQ(reference ? convolve_by(ConvPath::reference, &context, call) : convolve(&context, call), Status::ok)
            << context.error;
        return x.to_vector<double>();
      };
      const auto exact = solve(true, false), sizes = solve(true, true);
      const double u = dtype == DType::f16 ? 0x1p-11 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-24;
      for (const int n : {1, 3}) {
        set_num_threads(n);
        const auto got = solve(false, false);
        for (std::size_t i = 0; i < got.size(); ++i) {
          const double sum = (static_cast<double>(g.o) + 2) * 0x1p-24 * sizes[i];
          ASSERT_LE(std::abs(got[i] - exact[i]), u * (std::abs(exact[i]) + sum) + sum + 0x1p-25)
              << name(dtype) << ' ' << g.h << " x " << g.w << ' ' << i;
        }
      }
    }
  }
  set_num_threads(threads);
  const ConvGeometry g = strided(8, 8, 8, 16, 2, 2, 1);
  const Tensor x = empty({3, 8, 8, 8}), w = empty({16, 8, 1, 1}), y = empty({3, 16, 4, 4});
  ConvCall planes{ConvPart::input, g, view(x), view(w), view(y)};
  EXPECT_FALSE(is_spread(planes));
  const Tensor a = x.contiguous(MemoryFormat::channels_last), b = y.contiguous(MemoryFormat::channels_last);
  ConvCall call{ConvPart::input, g, view(a), view(w), view(b)};
  EXPECT_TRUE(is_spread(call));
  const TensorView bias = view(w);
  call.bias = &bias;
  EXPECT_FALSE(is_spread(call));
}

// A bias of any dtype and stride is added before the result is rounded, forward and to what a transposed convolution
// writes; images and weights may differ in dtype.
TEST(ConvMatrix, AddsABias) {
  manual_seed(4);
  const auto last = MemoryFormat::channels_last;
  for (const ConvGeometry& g : {geometry(3, 20, 7, 36, 1, 1, 0), geometry(1, 33, 1, 5, 1, 1, 0)}) {
    for (const ConvPart part : {ConvPart::output, ConvPart::input}) {
      const bool forward = part == ConvPart::output;
      const std::int64_t from = forward ? g.c : g.o, to = forward ? g.o : g.c;
      for (const auto& [images, weights, biases] : {std::tuple{f16, f16, f16}, std::tuple{bf16, f32, f32},
                                                    std::tuple{f32, bf16, f16}, std::tuple{f32, f32, f32}}) {
        const Tensor w = randn({g.o, g.c, 1, 1}).to(weights),
                     a = randn({g.n, from, g.h, g.w}).to(images).contiguous(last),
                     bias = halfstep::select(randn({to, 2}).to(biases), 1, 1);
        const auto solve = [&](ConvPath path, DType dtype, bool magnitudes) {
          const auto operand = [&](const Tensor& t) { return magnitudes ? abs(t.to(dtype)) : t.to(dtype); };
          const bool as_they_are = dtype == images;
          const Tensor x = operand(a), v = as_they_are ? w : operand(w), b = as_they_are ? bias : operand(bias),
                       y = full({g.n, to, g.h, g.w}, NAN).to(dtype).contiguous(last);
          ConvCall call{part, g, view(forward ? x : y), view(v), view(forward ? y : x)};
          const TensorView added = view(b);
          call.bias = &added;
          Context context;
          EXPECT_EQ(convolve_by(path, &context, call), Status::ok) << context.error;
          return y.to_vector<double>();
        };
        const auto exact = solve(ConvPath::reference, f64, false), sizes = solve(ConvPath::reference, f64, true),
                   got = solve(ConvPath::matrix, images, false);
        const double u = images == f16 ? 0x1p-11 : images == bf16 ? 0x1p-8 : 0x1p-24;
        for (std::size_t i = 0; i < got.size(); ++i) {
          const double sum = (static_cast<double>(from) + 1) * 0x1p-24 * sizes[i];
          ASSERT_LE(std::abs(got[i] - exact[i]), u * (std::abs(exact[i]) + sum) + sum + 0x1p-25)
              << name(images) << ' ' << static_cast<int>(part) << ' ' << i;
        }
      }
    }
  }
}

TEST(ConvPaths, FollowTheShape) {
  Winograd allowed = Winograd::off;
  const auto path = [&](const ConvGeometry& g, ConvPart part, DType dtype, bool last, Isa isa = Isa::avx512_vnni) {
    const Tensor x = empty({g.n, g.c, g.h, g.w}, {.dtype = dtype}), y = empty({g.n, g.o, g.oh, g.ow}, {.dtype = dtype});
    const auto format = last ? MemoryFormat::channels_last : MemoryFormat::contiguous;
    const Tensor w = empty({g.o, g.c, g.kh, g.kw}, {.dtype = dtype}), a = x.contiguous(format),
                 b = y.contiguous(format);
    return choose_conv_path({part, g, view(a), view(w), view(b)}, isa, allowed);
  };
  const ConvGeometry single = geometry(2, 64, 56, 64, 1, 1, 0), square = geometry(2, 64, 56, 64, 3, 1, 1);
  EXPECT_EQ(path(square, ConvPart::output, DType::f64, true), ConvPath::reference);
  EXPECT_EQ(path(square, ConvPart::output, DType::f32, true), ConvPath::blocks);
  EXPECT_EQ(path(square, ConvPart::weight, DType::f32, true), ConvPath::blocks);
  EXPECT_EQ(path(single, ConvPart::weight, DType::f32, true), ConvPath::products);
  EXPECT_EQ(path(single, ConvPart::weight, DType::f32, false), ConvPath::blocks);
  EXPECT_EQ(path(square, ConvPart::output, DType::bf16, true), ConvPath::blocks);
  EXPECT_EQ(path(square, ConvPart::output, DType::bf16, true, Isa::avx512_bf16), ConvPath::native);
  EXPECT_EQ(path(square, ConvPart::output, DType::f16, true, Isa::avx512_bf16), ConvPath::blocks);
  EXPECT_EQ(path(square, ConvPart::output, DType::f16, true, Isa::avx512_fp16), ConvPath::blocks);
  EXPECT_EQ(path(single, ConvPart::output, DType::f32, true), ConvPath::blocks);
  EXPECT_EQ(path(single, ConvPart::output, DType::bf16, true), ConvPath::matrix);
  EXPECT_EQ(path(single, ConvPart::input, DType::f16, true, Isa::avx512_bf16), ConvPath::matrix);
  EXPECT_EQ(path(single, ConvPart::input, DType::f16, true, Isa::avx512_fp16), ConvPath::matrix);
  EXPECT_EQ(path(single, ConvPart::input, DType::f16, false), ConvPath::blocks);
  EXPECT_EQ(path(single, ConvPart::output, DType::f16, true, Isa::avx2), ConvPath::matrix);
  // Float32, where images come from memory.
  const ConvGeometry many = geometry(16, 64, 56, 256, 1, 1, 0);
  EXPECT_EQ(path(many, ConvPart::output, DType::f32, true), ConvPath::matrix);
  EXPECT_EQ(path(many, ConvPart::input, DType::f32, true), ConvPath::matrix);
  EXPECT_EQ(path(many, ConvPart::output, DType::f32, true, Isa::avx2), ConvPath::blocks);
  EXPECT_EQ(path(geometry(16, 32, 56, 256, 1, 1, 0), ConvPart::output, DType::f32, true), ConvPath::blocks);
  EXPECT_EQ(path(geometry(16, 512, 56, 128, 1, 1, 0), ConvPart::output, DType::f32, true), ConvPath::blocks);
  EXPECT_EQ(path(geometry(16, 512, 56, 128, 1, 1, 0), ConvPart::input, DType::f32, true), ConvPath::matrix);
  EXPECT_EQ(path(geometry(16, 16, 112, 96, 1, 1, 0), ConvPart::output, DType::f32, true), ConvPath::blocks);
  EXPECT_EQ(path(geometry(16, 16, 112, 96, 1, 1, 0), ConvPart::input, DType::f32, true), ConvPath::matrix);
  EXPECT_EQ(path(geometry(16, 64, 56, 256, 1, 2, 0), ConvPart::output, DType::f32, true), ConvPath::blocks);
  const ConvGeometry one = geometry(2, 64, 56, 1, 1, 1, 0);
  EXPECT_EQ(path(one, ConvPart::output, DType::f32, true), ConvPath::matrix);
  EXPECT_EQ(path(one, ConvPart::output, DType::bf16, true, Isa::avx512_bf16), ConvPath::matrix);
  EXPECT_EQ(path(one, ConvPart::input, DType::bf16, true, Isa::avx512_bf16), ConvPath::native);
  const ConvGeometry few = geometry(2, 64, 56, 24, 1, 1, 0);
  EXPECT_EQ(path(few, ConvPart::output, DType::f16, true), ConvPath::matrix);
  EXPECT_EQ(path(few, ConvPart::output, DType::f16, true, Isa::avx2), ConvPath::blocks);
  EXPECT_EQ(path(geometry(2, 64, 56, 3, 1, 1, 0), ConvPart::input, DType::f16, true), ConvPath::blocks);
  EXPECT_EQ(path(geometry(2, 64, 56, 64, 1, 2, 0), ConvPart::output, DType::f16, true), ConvPath::blocks);
  EXPECT_EQ(path(square, ConvPart::output, DType::bf16, false, Isa::amx), ConvPath::blocks);
  // Weight gradients of bf16 on units: our own where they are the faster ones.
  const ConvGeometry wide = geometry(2, 64, 56, 256, 1, 1, 0), strided = geometry(2, 64, 56, 64, 3, 2, 1);
  EXPECT_EQ(path(wide, ConvPart::weight, DType::bf16, true, Isa::avx512_bf16), ConvPath::pairs);
  EXPECT_EQ(path(strided, ConvPart::weight, DType::bf16, true, Isa::avx512_fp16),
            has_bf16_units(Isa::avx512_fp16) ? ConvPath::pairs : ConvPath::products);
  EXPECT_EQ(path(square, ConvPart::weight, DType::bf16, true, Isa::avx512_bf16), ConvPath::native);
  EXPECT_EQ(path(wide, ConvPart::output, DType::bf16, true, Isa::avx512_bf16), ConvPath::native);
  const ConvPath tiles = amx_usable() ? ConvPath::tiles : ConvPath::native;
  // Images of bf16 by AMX: 1x1 as matrix products, where channels or filters fill lines of the cache; others by
  // windows.
  const ConvPath matrix = amx_usable() ? ConvPath::matrix : ConvPath::native,
                 windows = amx_usable() ? ConvPath::windows : ConvPath::native;
  EXPECT_EQ(path(single, ConvPart::output, DType::bf16, true, Isa::amx), matrix);
  EXPECT_EQ(path(wide, ConvPart::input, DType::bf16, true, Isa::amx), matrix);
  EXPECT_EQ(path(few, ConvPart::output, DType::bf16, true, Isa::amx), matrix);
  EXPECT_EQ(path(geometry(2, 40, 56, 24, 1, 1, 0), ConvPart::output, DType::bf16, true, Isa::amx), ConvPath::native);
  EXPECT_EQ(path(square, ConvPart::output, DType::bf16, true, Isa::amx), windows);
  EXPECT_EQ(path(square, ConvPart::input, DType::bf16, true, Isa::amx), windows);
  EXPECT_EQ(path(strided, ConvPart::output, DType::bf16, true, Isa::amx), windows);
  EXPECT_EQ(path(strided, ConvPart::input, DType::bf16, true, Isa::amx), windows);
  // Not in many phases, or in phases of few places.
  EXPECT_EQ(path(geometry(2, 64, 56, 64, 4, 4, 0), ConvPart::input, DType::bf16, true, Isa::amx), ConvPath::native);
  EXPECT_EQ(path(geometry(2, 64, 6, 64, 3, 2, 1), ConvPart::input, DType::bf16, true, Isa::amx), ConvPath::native);
  EXPECT_EQ(path(geometry(2, 64, 28, 64, 1, 2, 0), ConvPart::output, DType::bf16, true, Isa::amx), windows);
  EXPECT_EQ(path(geometry(2, 64, 14, 64, 1, 2, 0), ConvPart::output, DType::bf16, true, Isa::amx), windows);
  // Not where more than a quarter of the sums would be dropped: 36 places of 64.
  EXPECT_EQ(path(geometry(2, 64, 12, 64, 1, 2, 0), ConvPart::output, DType::bf16, true, Isa::amx), ConvPath::native);
  EXPECT_EQ(path(single, ConvPart::weight, DType::bf16, true, Isa::amx), tiles);
  EXPECT_EQ(path(wide, ConvPart::weight, DType::bf16, true, Isa::amx), tiles);
  EXPECT_EQ(path(strided, ConvPart::weight, DType::bf16, true, Isa::amx), tiles);
  EXPECT_EQ(path(square, ConvPart::weight, DType::bf16, true, Isa::amx), tiles);
  EXPECT_EQ(path(geometry(2, 512, 7, 512, 3, 1, 1), ConvPart::weight, DType::bf16, true, Isa::amx), tiles);
  EXPECT_EQ(path(geometry(2, 3, 64, 64, 7, 2, 3), ConvPart::weight, DType::bf16, true, Isa::amx), tiles);
  // Not where most of what tiles would multiply is padding, or a line fills the cache.
  EXPECT_EQ(path(geometry(2, 64, 4, 64, 4, 1, 0), ConvPart::weight, DType::bf16, true, Isa::amx), ConvPath::native);
  ConvGeometry long_lines = geometry(1, 64, 3, 64, 3, 1, 1);
  long_lines.h = long_lines.oh = 1, long_lines.w = long_lines.ow = 1 << 16;
  EXPECT_EQ(path(long_lines, ConvPart::weight, DType::bf16, true, Isa::amx), ConvPath::native);
  EXPECT_EQ(path(geometry(2, 16, 56, 16, 1, 1, 0), ConvPart::weight, DType::bf16, true, Isa::amx), ConvPath::native);
  EXPECT_EQ(path(wide, ConvPart::weight, DType::bf16, true, Isa::avx512_vnni), ConvPath::products);
  // Those of float32 and f16: 1x1 as matrix products, in f16 unless there are many places.
  if (amx_usable()) {
    EXPECT_EQ(path(wide, ConvPart::weight, DType::f32, true, Isa::amx), ConvPath::matrix);
    EXPECT_EQ(path(many, ConvPart::weight, DType::f32, true, Isa::amx), ConvPath::matrix);
    ConvGeometry line = geometry(1, 256, 1, 256, 1, 1, 0);
    line.w = line.ow = 1 << 14;
    EXPECT_EQ(path(line, ConvPart::weight, DType::f32, true, Isa::amx), ConvPath::matrix);
    if (!has_f16_units(Isa::amx)) {
      EXPECT_EQ(path(wide, ConvPart::weight, DType::f16, true, Isa::amx), ConvPath::matrix);
      EXPECT_EQ(path(many, ConvPart::weight, DType::f16, true, Isa::amx), ConvPath::tiles);
    }
    EXPECT_EQ(path(square, ConvPart::weight, DType::f32, true, Isa::amx), ConvPath::tiles);
    EXPECT_EQ(path(geometry(2, 64, 56, 16, 3, 1, 1), ConvPart::weight, DType::f32, true, Isa::amx), ConvPath::blocks);
  }
  // Winograd's where they are asked for and faster.
  const auto by = [&](const ConvGeometry& g, ConvPart part, DType dtype, Winograd most, Isa isa = Isa::avx512_vnni) {
    allowed = most;
    const ConvPath chosen = path(g, part, dtype, true, isa);
    allowed = Winograd::off;
    return chosen;
  };
  const Winograd small = Winograd::tiles_2x2, large = Winograd::tiles_4x4;
  EXPECT_EQ(by(square, ConvPart::output, DType::f32, small), ConvPath::winograd2);
  EXPECT_EQ(by(square, ConvPart::input, DType::f16, large), ConvPath::winograd4);
  EXPECT_EQ(by(square, ConvPart::weight, DType::f32, large), ConvPath::winograd4);
  EXPECT_EQ(by(square, ConvPart::weight, DType::bf16, small, Isa::avx512_bf16), ConvPath::native);
  EXPECT_EQ(by(square, ConvPart::output, DType::f64, large), ConvPath::reference);
  EXPECT_EQ(by(single, ConvPart::output, DType::f32, large), ConvPath::blocks);
  EXPECT_EQ(by(strided, ConvPart::output, DType::f32, large), ConvPath::blocks);
  EXPECT_EQ(by(geometry(1, 512, 7, 512, 3, 1, 1), ConvPart::output, DType::f32, large), ConvPath::blocks);
  EXPECT_EQ(by(geometry(32, 512, 2, 512, 3, 1, 1), ConvPart::output, DType::f32, large), ConvPath::blocks);
  EXPECT_EQ(by(square, ConvPart::output, DType::bf16, small, Isa::avx512_bf16), ConvPath::native);
  EXPECT_EQ(by(square, ConvPart::output, DType::bf16, large, Isa::avx512_bf16), ConvPath::winograd4);
  EXPECT_EQ(by(square, ConvPart::output, DType::bf16, large, Isa::amx), windows);
}

TEST(ConvPaths, AreDescribed) {
  const auto described = [](const ConvGeometry& g, ConvPart part, DType dtype) {
    const auto last = MemoryFormat::channels_last;
    const Tensor x = empty({g.n, g.c, g.h, g.w}, {.dtype = dtype}).contiguous(last),
                 w = empty({g.o, g.c, g.kh, g.kw}, {.dtype = dtype}).contiguous(last),
                 y = empty({g.n, g.o, g.oh, g.ow}, {.dtype = dtype}).contiguous(last);
    ConvCall call{part, g, view(x), view(w), view(y)};
    return describe_conv(call);
  };
  const ConvGeometry single = geometry(2, 64, 56, 64, 1, 1, 0), square = geometry(2, 64, 56, 64, 3, 1, 1);
  EXPECT_EQ(described(square, ConvPart::output, DType::f64), "reference");
  const bool by_tiles = compute_isa() == Isa::amx && amx_usable();
  EXPECT_EQ(described(single, ConvPart::weight, DType::f32), "products");
  EXPECT_EQ(described(geometry(2, 64, 56, 128, 1, 1, 0), ConvPart::weight, DType::f32),
            by_tiles ? "matrix" : "products");
  EXPECT_EQ(described(square, ConvPart::weight, DType::f32) == "tiles", by_tiles);
  set_winograd(Winograd::tiles_2x2);
  EXPECT_EQ(described(square, ConvPart::output, DType::f32), by_tiles ? "windows" : "winograd 2x2");
  set_winograd(Winograd::off);
  for (const ConvPart part : {ConvPart::output, ConvPart::input}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      const std::string text = described(square, part, dtype);
      if (by_tiles && !(dtype == DType::f16 && has_f16_units(Isa::amx))) {
        EXPECT_EQ(text, "windows");
      } else {
        EXPECT_NE(text.find(':'), std::string::npos) << text;  // oneDNN's, with an instruction set
      }
      EXPECT_EQ(text.find("ref"), std::string::npos) << text;
    }
  }
}

// Whatever is cut, every output row (input row, where the input is computed) of every image is there once, in the
// shares' order, and sees the rows of the other tensor that the whole convolution has for it.
TEST(ConvShares, CoverEveryRowOnce) {
  for (const ConvPart part : {ConvPart::output, ConvPart::input, ConvPart::weight}) {
    for (const int threads : {1, 2, 3, 16}) {  // of two images of 14 rows 16 threads get 14 shares
      for (const std::int64_t n : {1, 2, 3, 5, 16, 33}) {
        for (const auto& [size, window, stride, padding] :
             {std::array<std::int64_t, 4>{56, 3, 1, 1}, {57, 3, 2, 1}, {224, 7, 2, 3}, {14, 1, 1, 0}, {15, 1, 2, 0}}) {
          const ConvGeometry g = geometry(n, 64, size, 64, window, stride, padding);
          const ConvShares cut = conv_shares(part, g, threads, 4);
          ASSERT_LE(cut.shares.size(), static_cast<std::size_t>(threads));
          const bool back = part == ConvPart::input;
          const std::int64_t rows = back ? g.h : g.oh;
          std::int64_t next = 0, longest = 0;
          for (const auto& share : cut.shares) {
            std::int64_t in_share = 0;
            ASSERT_FALSE(share.empty());
            for (const ConvPiece& piece : share) {
              const ConvGeometry& p = piece.geometry;
              const std::int64_t own = back ? p.h : p.oh, first = back ? piece.input_row : piece.output_row;
              ASSERT_EQ(piece.first * rows + first, next);
              next += p.n * own;
              in_share += p.n * own;
              EXPECT_LE(p.n, 4);
              // Output row q of the piece is row piece.output_row + q of the whole: its window begins at the same
              // place.
              EXPECT_EQ(piece.input_row - p.before[0], piece.output_row * stride - padding);
              const std::int64_t extent = p.kh, end = (p.oh - 1) * stride + extent - p.before[0];
              EXPECT_GE(p.h + p.after[0], end);
              EXPECT_LT(p.h + p.after[0], end + stride);
              if (!back) {
                // Nothing that a window sees is missing.
                EXPECT_TRUE(piece.input_row == 0 || p.before[0] == 0);
                EXPECT_TRUE(piece.input_row + p.h == g.h || p.after[0] == 0);
              } else {
                EXPECT_EQ(piece.input_row % stride, 0);  // in the phase of the whole
                // The output rows beside those of the piece see nothing of it.
                const std::int64_t above = (piece.output_row - 1) * stride - padding + extent;
                const std::int64_t below = (piece.output_row + p.oh) * stride - padding;
                EXPECT_TRUE(piece.output_row == 0 || above <= piece.input_row);
                EXPECT_TRUE(piece.output_row + p.oh == g.oh || below >= piece.input_row + p.h);
              }
            }
            longest = std::max(longest, in_share);
          }
          EXPECT_EQ(next, n * rows);
          const auto shares = static_cast<std::int64_t>(cut.shares.size());
          const double mean = static_cast<double>(n * rows) / static_cast<double>(shares);
          const auto whole = static_cast<double>((n + shares - 1) / shares * rows);
          EXPECT_LE(static_cast<double>(longest), cut.bands ? 1.2 * mean + 2 : whole) << n << ' ' << threads;
        }
      }
    }
  }
}

// Several for each thread, all alike, if each of them is worth it.
TEST(ConvShares, AreStolenWhereImagesDivideEvenly) {
  const auto stolen = [](std::int64_t n, std::int64_t threads) {
    return stolen_shares(geometry(n, 64, 56, 64, 3, 1, 1), threads);
  };
  EXPECT_EQ(stolen(16, 1), 1);
  EXPECT_EQ(stolen(16, 2), 8);
  EXPECT_EQ(stolen(16, 4), 16);
  EXPECT_EQ(stolen(6, 2), 6);
  EXPECT_EQ(stolen(16, 3), 3);
  EXPECT_EQ(stolen(5, 2), 2);
  EXPECT_EQ(stolen(1, 2), 2);                                         // bands of rows
  EXPECT_EQ(stolen_shares(geometry(16, 32, 56, 56, 1, 1, 0), 2), 4);  // 90 million multiply-adds
  EXPECT_EQ(stolen_shares(geometry(16, 8, 14, 8, 3, 1, 1), 2), 2);    // 2 million
}

}  // namespace
}  // namespace halfstep::cpu
