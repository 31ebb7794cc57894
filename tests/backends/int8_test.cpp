// SPDX-License-Identifier: Apache-2.0
// The paths of a product of integers against each other, bit by bit: oneDNN's units, exact blocks, and plain loops.
// That those are right is shown in tests/ops/int8_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "halfstep/backends/cpu/int8_product.h"
#include "halfstep/backends/cpu/int8_shares.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/backends/cpu/onednn_int8.h"
#include "halfstep/core/random.h"
#include "halfstep/core/tensor.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/int8.h"
#include "halfstep/ops/random.h"
#include "halfstep/runtime/caching_allocator.h"
#include "halfstep/runtime/parallel.h"
#include "tests/backends/conv_calls.h"
#include "tests/support/guarded.h"
#include "tests/support/isa_child.h"

namespace halfstep::cpu {
namespace {

ConvGeometry byte_geometry(std::int64_t n, std::int64_t c, std::int64_t size, std::int64_t o, std::int64_t k,
                           std::int64_t stride, std::int64_t padding, std::int64_t groups = 1,
                           std::int64_t dilation = 1) {
  const std::int64_t out = (size + 2 * padding - dilation * (k - 1) - 1) / stride + 1;
  return {n,
          c,
          size,
          size,
          o,
          out,
          out,
          k,
          k,
          groups,
          {stride, stride},
          {dilation, dilation},
          {padding, padding},
          {padding, padding}};
}

const ConvGeometry kByteGeometries[] = {
    byte_geometry(2, 3, 21, 16, 7, 2, 3),      byte_geometry(1, 64, 14, 64, 1, 1, 0),
    byte_geometry(3, 48, 9, 33, 3, 1, 1),      byte_geometry(1, 256, 7, 128, 3, 1, 1),
    byte_geometry(2, 17, 10, 40, 3, 2, 1),     byte_geometry(1, 32, 12, 32, 3, 1, 1, 32),
    byte_geometry(2, 24, 11, 24, 5, 2, 2, 24), byte_geometry(1, 16, 9, 32, 3, 1, 1, 4),
    byte_geometry(1, 8, 12, 5, 3, 1, 2, 1, 2), byte_geometry(5, 1, 6, 7, 3, 1, 1),
    byte_geometry(1, 128, 8, 256, 1, 2, 0),    byte_geometry(1, 2048, 1, 100, 1, 1, 0),
};

Tensor random_bytes(const Shape& sizes, DType dtype) {
  const Tensor t = dtype == u8 ? randint(0, 256, sizes, {.dtype = u8}) : randint(-128, 128, sizes, {.dtype = i8});
  return t.contiguous(MemoryFormat::channels_last);
}

/// Operands of a call, extreme ones among them: sums of pairs leave 16 bits.
struct ByteOperands {
  Tensor x, w, residual, scale, bias;
  ByteOperands(const ConvGeometry& g, DType input, DType residual_dtype, bool extreme) {
    const auto last = MemoryFormat::channels_last;
    x = extreme ? full({g.n, g.c, g.h, g.w}, input == u8 ? 255 : -128, {.dtype = input}).contiguous(last)
                : random_bytes({g.n, g.c, g.h, g.w}, input);
    w = extreme ? full({g.o, g.c / g.groups, g.kh, g.kw}, -128, {.dtype = i8})
                : randint(-128, 128, {g.o, g.c / g.groups, g.kh, g.kw}, {.dtype = i8});
    residual = random_bytes({g.n, g.o, g.oh, g.ow}, residual_dtype);
    scale = rand({g.o}, {.dtype = f32});
    bias = randn({g.o}, {.dtype = f32});
  }
  Int8Call call(const ConvGeometry& g, const Int8Epilogue& e, const TensorView* residual_view, const Tensor& y) const {
    Int8Call c;
    c.geometry = g;
    c.input = view(x), c.weight = view(w), c.output = view(y);
    c.residual = residual_view;
    c.scale = static_cast<const float*>(scale.raw_data());
    c.bias = static_cast<const float*>(bias.raw_data());
    c.epilogue = e;
    return c;
  }
};

Tensor empty_result(const ConvGeometry& g, DType dtype) {
  return full({g.n, g.o, g.oh, g.ow}, dtype == f32 ? NAN : 99, {.dtype = dtype})
      .contiguous(MemoryFormat::channels_last);
}

constexpr std::int32_t kSilu = 3, kHardswish = 5;

void expect_same_paths(const std::vector<Int8Path>& paths) {
  manual_seed(1);
  int number = 0;
  for (const ConvGeometry& g : kByteGeometries) {
    for (int turn = 0; turn < 24; ++turn, ++number) {
      const DType input = turn % 2 == 0 ? u8 : i8, dtype = turn % 3 == 0 ? u8 : turn % 3 == 1 ? i8 : f32;
      const ByteOperands t(g, input, turn % 4 < 2 ? u8 : i8, turn == 5 || turn == 6);
      // Of the order of what makes the scaled sums fill the range.
      const float spread = 1.0F / (60.0F * std::sqrt(static_cast<float>(g.c / g.groups * g.kh * g.kw)));
      Int8Epilogue e;
      e.residual = turn % 5 < 2;
      e.residual_dtype = t.residual.dtype();
      e.middle = e.residual && turn % 2 == 0 ? 0.03F : 1;
      e.activation = turn % 6;
      e.a = e.activation == 2 ? -1.0F : e.activation == 4 ? 0.1F : 0;
      e.b = e.activation == 2 ? 2.5F : 0;
      e.dtype = dtype;
      e.integers = dtype != f32;
      e.last = turn % 7 == 0 ? 1 : e.activation == 2 ? 40.0F : spread;
      e.zero_point = dtype == u8 ? 31 : dtype == i8 ? -7 : 0;
      e.least = (dtype == u8 ? 0 : -128) - e.zero_point + (turn % 8 == 0 ? 5 : 0);
      e.most = (dtype == u8 ? 255 : 127) - e.zero_point - (turn % 8 == 0 ? 5 : 0);
      const TensorView residual = view(t.residual);
      std::vector<std::vector<double>> results;
      for (const Int8Path path : paths) {
        const Tensor y = empty_result(g, dtype);
        Int8Call call = t.call(g, e, e.residual ? &residual : nullptr, y);
        call.zero_point = turn % 3 == 1 ? 0 : input == u8 ? 128 : -3;
        if (turn % 9 == 0) call.bias = nullptr;
        Context context;
        ASSERT_EQ(int8_by(path, &context, call), Status::ok)
            << context.error << static_cast<int>(path) << ' ' << number;
        results.push_back(y.to_vector<double>());
        if (!e.residual || dtype != t.residual.dtype()) continue;
        // Into the residual's own memory.
        const Tensor both = t.residual.clone();
        const TensorView both_view = view(both);
        Int8Call again = t.call(g, e, &both_view, both);
        again.zero_point = call.zero_point, again.bias = call.bias;
        ASSERT_EQ(int8_by(path, &context, again), Status::ok);
        ASSERT_EQ(both.to_vector<double>(), results.back()) << static_cast<int>(path) << ' ' << number;
      }
      for (std::size_t r = 1; r < results.size(); ++r) {
        const std::string what = "path " + std::to_string(static_cast<int>(paths[r])) + " case " +
                                 std::to_string(number) + " activation " + std::to_string(e.activation);
        std::int64_t others = 0;
        for (std::size_t i = 0; i < results[0].size(); ++i) {
          const double want = results[0][i], got = results[r][i];
          if (e.activation != kSilu && e.activation != kHardswish) {
            ASSERT_EQ(got, want) << what << " element " << i;
          } else if (e.integers) {
            // The last bits of a sigmoid: the next integer, where the value is close to the middle of two.
            ASSERT_NEAR(got, want, 1) << what << " element " << i;
            others += got != want;
          } else {
            ASSERT_NEAR(got, want, 0x1p-19 * (std::abs(want) + std::abs(static_cast<double>(e.last)))) << what;
          }
        }
        EXPECT_LE(others, 1 + static_cast<std::int64_t>(results[0].size()) / 500) << what;
      }
    }
  }
}

// Channels that are no whole vector, single places, strides: within the memory of the operands and the workspace.
TEST(Int8Paths, DISABLED_StayInTheirMemory) {
  std::vector<Int8Path> paths = {Int8Path::reference, Int8Path::blocked};
  if (compute_isa(u8) >= Isa::avx512_vnni) paths.push_back(Int8Path::onednn);
  for (const ConvGeometry& g :
       {byte_geometry(1, 4, 32, 8, 1, 2, 0), byte_geometry(2, 3, 32, 8, 1, 2, 0), byte_geometry(1, 12, 17, 20, 1, 3, 0),
        byte_geometry(1, 3, 17, 5, 3, 1, 1), byte_geometry(1, 1, 9, 1, 3, 1, 1), byte_geometry(1, 5, 7, 13, 3, 2, 1),
        byte_geometry(2, 33, 5, 17, 3, 1, 1), byte_geometry(1, 7, 6, 7, 3, 1, 1, 7),
        byte_geometry(1, 66, 4, 66, 3, 1, 1, 66), byte_geometry(1, 3, 40, 16, 6, 2, 2),
        byte_geometry(1, 70, 1, 35, 1, 1, 0), byte_geometry(1, 6, 8, 9, 3, 1, 1, 3)}) {
    for (const Int8Path path : paths) {
      for (const DType input : {u8, i8}) {
        const Shape xs{g.n, g.c, g.h, g.w}, ws{g.o, g.c / g.groups, g.kh, g.kw}, ys{g.n, g.o, g.oh, g.ow};
        const Shape x_strides = channels_last_strides(xs), w_strides = contiguous_strides(ws),
                    y_strides = channels_last_strides(ys);
        const auto bytes = [](const Shape& s) { return static_cast<std::size_t>(s[0] * s[1] * s[2] * s[3]); };
        const test::Guarded x(bytes(xs)), w(bytes(ws)), y(bytes(ys)), r(bytes(ys)),
            scale(static_cast<std::size_t>(g.o) * 4), bias(static_cast<std::size_t>(g.o) * 4);
        const auto guarded = [](const test::Guarded& memory, const Shape& sizes, const Shape& strides, DType dtype) {
          return TensorView{.data = memory.data(),
                            .sizes = sizes.data(),
                            .strides = strides.data(),
                            .numel = sizes[0] * sizes[1] * sizes[2] * sizes[3],
                            .ndim = 4,
                            .dtype = dtype,
                            .defined = true,
                            .contiguous = false};
        };
        const TensorView residual = guarded(r, ys, y_strides, u8);
        Int8Call call;
        call.geometry = g;
        call.input = guarded(x, xs, x_strides, input), call.weight = guarded(w, ws, w_strides, i8);
        call.output = guarded(y, ys, y_strides, u8);
        call.residual = &residual;
        call.zero_point = 3;
        call.scale = static_cast<const float*>(scale.data()), call.bias = static_cast<const float*>(bias.data());
        call.epilogue.residual = true;
        call.epilogue.activation = 3;
        call.epilogue.most = 255;
        test::GuardedContext context;
        EXPECT_EQ(int8_by(path, &context, call), Status::ok);
      }
    }
  }
}

class Int8PathsOf : public testing::TestWithParam<Isa> {};
TEST_P(Int8PathsOf, GiveTheSameIntegers) {
  if (GetParam() > detected_isa()) GTEST_SKIP() << "this processor has no " << name(GetParam());
  test::pass_in_child(GetParam(), "Int8Paths.DISABLED_GiveTheSameIntegers");
}
TEST_P(Int8PathsOf, StayInTheirMemory) {
  if (GetParam() > detected_isa()) GTEST_SKIP() << "this processor has no " << name(GetParam());
  test::pass_in_child(GetParam(), "Int8Paths.DISABLED_StayInTheirMemory");
}
INSTANTIATE_TEST_SUITE_P(All, Int8PathsOf, test::kIsas, test::isa_name);

TEST(Int8Paths, DISABLED_GiveTheSameIntegers) {
  std::vector<Int8Path> paths = {Int8Path::reference, Int8Path::blocked};
  if (compute_isa(u8) >= Isa::avx512_vnni) paths.push_back(Int8Path::onednn);
  expect_same_paths(paths);
}

// Not by oneDNN's kernels for processors without VNNI, which saturate sums of pairs in 16 bits.
TEST(Int8Paths, FollowTheProcessorAndTheShape) {
  const auto path = [](const ConvGeometry& g, Isa isa) {
    const ByteOperands t(g, u8, u8, false);
    const Tensor y = empty_result(g, u8);
    return choose_int8_path(t.call(g, {}, nullptr, y), isa);
  };
  const ConvGeometry square = byte_geometry(1, 32, 8, 32, 3, 1, 1),
                     depthwise = byte_geometry(1, 32, 8, 32, 3, 1, 1, 32);
  EXPECT_EQ(path(square, Isa::avx2), Int8Path::blocked);
  EXPECT_EQ(path(square, Isa::avx512), Int8Path::blocked);
  EXPECT_EQ(path(square, Isa::avx512_vnni), Int8Path::onednn);
  EXPECT_EQ(path(square, Isa::amx), Int8Path::onednn);
  EXPECT_EQ(path(depthwise, Isa::avx512), Int8Path::blocked);
  EXPECT_EQ(path(depthwise, Isa::amx), Int8Path::onednn);
  ConvGeometry nothing = square;
  nothing.c = 0;
  EXPECT_EQ(path(nothing, Isa::amx), Int8Path::reference);
}

// oneDNN has a kernel of its own for all that networks have: none is computed by its plain loops.
TEST(Int8Paths, HaveUnitsForEveryConvolution) {
  if (compute_isa(u8) < Isa::avx512_vnni) GTEST_SKIP() << "this processor has no VNNI";
  for (const ConvGeometry& g : kByteGeometries) {
    for (const DType input : {u8, i8}) {
      for (const bool zero_point : {false, true}) {
        Int8Epilogue e;
        e.residual = zero_point;
        e.last = 0.5F;
        e.activation = 3;
        e.most = 255;
        const auto conv = OneDnnInt8Conv::find(g, input, zero_point, true, e);
        ASSERT_NE(conv, nullptr) << g.c << " to " << g.o;
        const std::string kernel = conv->implementation();
        EXPECT_TRUE(kernel.starts_with("brgconv") || kernel.starts_with("brgdmm") || kernel.starts_with("brdgmm") ||
                    kernel.starts_with("jit"))
            << kernel;
      }
    }
  }
}

// Each place of the result is in one piece, and a piece sees what the whole would.
TEST(Int8Shares, CoverTheResultOnce) {
  for (const ConvGeometry& g : kByteGeometries) {
    for (const int threads : {1, 2, 3, 5, 16}) {
      if (g.n * g.oh * g.ow == 1) continue;  // cut by channels
      std::vector<int> seen(static_cast<std::size_t>(g.n * g.oh * g.ow));
      ConvGeometry large = g;  // so that every thread is asked
      large.o = 1 << 20;
      std::int64_t most = 0, least = INT64_MAX;
      for (const auto& share : int8_shares(large, threads)) {
        std::int64_t places = 0;
        EXPECT_LE(share.size(), 3u);
        for (const Int8Piece& piece : share) {
          const ConvGeometry& p = piece.geometry;
          EXPECT_LE(piece.input + p.n * p.h * p.w, g.n * g.h * g.w);
          for (std::int64_t i = 0; i < p.n * p.oh * p.ow; ++i) ++seen[static_cast<std::size_t>(piece.output + i)];
          places += p.n * p.oh * p.ow;
        }
        most = std::max(most, places), least = std::min(least, places);
      }
      for (const int n : seen) ASSERT_EQ(n, 1);
      EXPECT_LE(most - least, g.ow) << "shares differ by a row at most";
    }
  }
}

TEST(Int8Shares, CutASinglePlaceByChannels) {
  for (const int threads : {1, 2, 3, 16}) {
    const ConvGeometry g = byte_geometry(1, 2048, 1, 1000, 1, 1, 0);
    const auto shares = int8_shares(g, threads);
    EXPECT_EQ(shares.size(), static_cast<std::size_t>(std::min(threads, 4)));
    std::int64_t next = 0;
    for (const auto& share : shares) {
      ASSERT_EQ(share.size(), 1u);
      EXPECT_EQ(share[0].first, next);
      EXPECT_GE(share[0].geometry.o, 192);
      next += share[0].geometry.o;
    }
    EXPECT_EQ(next, 1000);
  }
  EXPECT_EQ(int8_shares(byte_geometry(1, 64, 1, 100, 1, 1, 0), 4).size(), 1u);
}

// Packed weights stay with the weight, as those of other convolutions do (tests/ops/packed_weight_test.cpp).
TEST(Int8Paths, KeepPackedWeights) {
  const Tensor x = zeros({1, 64, 8, 8}, {.dtype = u8}).contiguous(MemoryFormat::channels_last);
  Tensor w = randint(-128, 128, {64, 64, 3, 3}, {.dtype = i8});
  const Tensor scale = ones({64});
  const auto kept = [&] {
    const std::uint64_t before = memory_stats().allocated;
    (void)conv2d_int8(x, w, scale);
    return memory_stats().allocated - before;
  };
  EXPECT_EQ(kept(), 0u);
  EXPECT_GE(kept(), std::uint64_t{64 * 64 * 9});
  EXPECT_EQ(kept(), 0u);
  const Tensor ones_in = ones({1, 64, 8, 8}, {.dtype = u8});
  const auto before = conv2d_int8(ones_in, w, scale).to_vector<double>();
  w.fill_(1);
  const auto after = conv2d_int8(ones_in, w, scale).to_vector<double>();
  EXPECT_NE(before, after);
  EXPECT_EQ(after[0], 64 * 9);
}

}  // namespace
}  // namespace halfstep::cpu
