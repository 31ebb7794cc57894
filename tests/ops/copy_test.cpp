// SPDX-License-Identifier: Apache-2.0
// Conversions of every pair of dtypes, copies of every layout, fills.
#include "halfstep/ops/copy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "halfstep/core/random.h"
#include "halfstep/ops/create.h"

namespace halfstep {
namespace {

using Values = std::vector<double>;

constexpr DType kAll[] = {f32, f64, f16, bf16, f8e4m3, f8e5m2, i64, i32, i8, u8, boolean};

// A GPU's own conversion makes one NaN of all.
bool any_nan() { return default_device().str().starts_with("cuda"); }

// The element conversions are tested exhaustively in tests/core: here the kernels must give the same bits.
TEST(Cast, EveryPairIsTheElementsConversion) {
  Values v{0, -0.0, 1, -1, 0.5, 2.5, 3.5, 255, 300, 65504, 65520, 1e-8, 1e-40, 1e30, -1e300, INFINITY, -INFINITY, NAN};
  RandomStream random(1);
  while (v.size() < 203) v.push_back(std::ldexp(random.uniform(-1, 1), static_cast<int>(random.below(60)) - 30));
  for (const DType from : kAll) {
    const Tensor x = tensor(v, {.dtype = from});
    for (const DType to : kAll) {
      for (const Tensor& view : {x, x.slice(0, 1, 200, 3)}) {
        const Tensor y = view.to(to);
        ASSERT_EQ(y.dtype(), to);
        const Tensor in = view.to(Device{}), out = y.to(Device{});
        visit_all(from, [&](auto f) {
          visit_all(to, [&](auto t) {
            using From = typename decltype(f)::type;
            using To = typename decltype(t)::type;
            for (std::int64_t i = 0; i < view.numel(); ++i) {
              const To want = convert<To>(static_cast<const From*>(in.raw_data())[i * in.stride(0)]);
              const To got = static_cast<const To*>(out.raw_data())[i * out.stride(0)];
              if (any_nan() && std::isnan(convert<double>(want)) && std::isnan(convert<double>(got))) continue;
              ASSERT_EQ(std::memcmp(&want, &got, sizeof(To)), 0) << name(from) << " to " << name(to) << " " << i;
            }
          });
        });
      }
    }
  }
}

TEST(Cast, EveryFloat16PatternBothWays) {
  for (const DType dtype : {f16, bf16}) {
    Tensor x = empty({65536}, {.dtype = dtype, .device = Device{}});
    auto* bits = static_cast<std::uint16_t*>(x.raw_data());
    for (int i = 0; i < 65536; ++i) bits[i] = static_cast<std::uint16_t>(i);
    const Tensor back = x.to(default_device()).to(f32).to(dtype).to(Device{});
    const auto* got = static_cast<const std::uint16_t*>(back.raw_data());
    const Values v = x.to_vector<double>();
    const Values returned = back.to_vector<double>();
    for (std::size_t i = 0; i < 65536; ++i) {
      if (any_nan() && std::isnan(v[i]) && std::isnan(returned[i])) continue;
      const int quiet = !std::isnan(v[i]) ? 0 : dtype == f16 ? 0x200 : 0x40;
      ASSERT_EQ(got[i], bits[i] | quiet);
    }
  }
}

TEST(Copy, TransposedAndStridedInEverySize) {
  for (const DType dtype : {f64, f32, f16, u8}) {
    for (const Shape& sizes :
         {Shape{3, 5}, Shape{40, 70}, Shape{64, 64}, Shape{2, 33, 9, 65}, Shape{300, 8}, Shape{7, 1000}}) {
      Values v(static_cast<std::size_t>(sizes.numel()));
      for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<double>(i % 251);
      const Tensor x = tensor(v, sizes, {.dtype = dtype});
      for (int a = 0; a < x.dim(); ++a) {
        for (int b = 0; b < a; ++b) {
          const Tensor view = x.transpose(a, b);
          const Tensor dense = view.contiguous();
          EXPECT_TRUE(dense.is_contiguous());
          const auto got = dense.to_vector<double>();
          // By index, element for element.
          Shape index = Shape::filled(view.dim(), 0);
          for (std::size_t i = 0; i < got.size(); ++i) {
            std::int64_t at = 0;
            for (int d = 0; d < view.dim(); ++d) at += index[d] * view.strides()[d];
            ASSERT_EQ(got[i], v[static_cast<std::size_t>(at)]) << sizes.str() << " " << a << b << " " << i;
            for (int d = view.dim() - 1; d >= 0 && ++index[d] == view.sizes()[d]; --d) index[d] = 0;
          }
          // And back into the view of another tensor.
          Tensor other = zeros(sizes, {.dtype = dtype});
          other.transpose(a, b).copy_(dense);
          EXPECT_EQ(other.to_vector<double>(), v);
        }
      }
    }
  }
}

TEST(Copy, ChannelsLastBothWays) {
  RandomStream random(2);
  Values v(2 * 19 * 11 * 13);
  for (double& d : v) d = random.uniform(-1, 1);
  const Tensor x = tensor(v, {2, 19, 11, 13});
  const Tensor last = x.contiguous(MemoryFormat::channels_last);
  EXPECT_TRUE(last.is_contiguous(MemoryFormat::channels_last));
  EXPECT_EQ(last.to_vector<double>(), x.to_vector<double>());
  EXPECT_EQ(last.contiguous().to_vector<double>(), x.to_vector<double>());
  EXPECT_EQ(last.to(bf16).to_vector<double>(), x.to(bf16).to_vector<double>());
  EXPECT_TRUE(last.to(bf16).is_contiguous(MemoryFormat::channels_last));
}

// Runs of a few elements, of a step or of one element again and again, in blocks of more rows than one.
TEST(Copy, ShortRuns) {
  for (const DType dtype : {f64, f32, bf16, u8}) {
    for (const std::int64_t rows : {3, 16, 511, 512, 1100}) {
      for (const std::int64_t run : {1, 2, 3, 7, 8}) {
        for (const std::int64_t step : {0, 1, 2}) {
          SCOPED_TRACE(testing::Message() << name(dtype) << " " << rows << " runs of " << run << ", step " << step);
          const std::int64_t width = 2 * run + 1;
          Values v;
          for (std::int64_t i = 0; i < 2 * rows * width; ++i) v.push_back(static_cast<double>(i * 37 % 101));
          const Tensor x = tensor(v, {2, rows, width}, {.dtype = dtype});
          const Tensor view = step == 0 ? x.slice(2, 1, 2).expand({2, rows, run}) : x.slice(2, 0, run * step, step);
          Values want;
          for (std::int64_t r = 0; r < 2 * rows; ++r) {
            for (std::int64_t i = 0; i < run; ++i) {
              want.push_back(v[static_cast<std::size_t>(r * width + (step == 0 ? 1 : i * step))]);
            }
          }
          EXPECT_EQ(view.clone().contiguous().to_vector<double>(), want);
          Tensor to = zeros({2, rows, width}, {.dtype = dtype});
          if (step == 0) continue;
          to.slice(2, 0, run * step, step).copy_(view);
          EXPECT_EQ(to.slice(2, 0, run * step, step).contiguous().to_vector<double>(), want);
          const double all = to.to(f64).to_vector<double>().back();
          EXPECT_EQ(all, 0) << "beside what was written";
        }
      }
    }
  }
}

TEST(Copy, BroadcastsConvertsAndChecks) {
  Tensor x = zeros({2, 3}, {.dtype = bf16});
  x.copy_(tensor(Values{1, 2, 3}, {.dtype = f64}));
  EXPECT_EQ(x.to_vector<double>(), (Values{1, 2, 3, 1, 2, 3}));
  x.copy_(x);
  EXPECT_EQ(x.to_vector<double>(), (Values{1, 2, 3, 1, 2, 3}));
  EXPECT_THROW(x.copy_(zeros({4})), ShapeError);
  Tensor empty_one = zeros({0, 3});
  empty_one.copy_(zeros({0, 3}));
  EXPECT_EQ(empty_one.to(f16).sizes(), (Shape{0, 3}));
}

TEST(Fill, EveryDtypeAndStrides) {
  for (const DType dtype : kAll) {
    for (const std::int64_t n : {1, 5, 64, 203}) {
      EXPECT_EQ(full({n}, 1, {.dtype = dtype}).to_vector<double>(), Values(static_cast<std::size_t>(n), 1));
    }
    Tensor x = zeros({4, 6}, {.dtype = dtype});
    x.slice(1, 0, 6, 2).fill_(1);
    EXPECT_EQ(x.to_vector<double>(), (Values{1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0}));
  }
  EXPECT_EQ(full({2}, 1e9, {.dtype = f16}).to_vector<double>(), (Values{INFINITY, INFINITY}));
}

}  // namespace
}  // namespace halfstep
