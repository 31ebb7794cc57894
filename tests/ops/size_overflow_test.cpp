// SPDX-License-Identifier: Apache-2.0
// Sizes whose product or sum leaves 64 bits: an error for every function that takes sizes, never a tensor whose number
// of elements has wrapped round.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "halfstep/core/error.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attention.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/pad.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/resample.h"
#include "halfstep/ops/triangle.h"
#include "halfstep/ops/view.h"

namespace halfstep {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kHalf = std::int64_t{1} << 32;  // kHalf * kHalf wraps round to 0
constexpr std::int64_t kBig = std::int64_t{1} << 61;   // 8 * kBig wraps round to 0
using Tensors = std::vector<Tensor>;

struct Case {
  const char* name;
  std::function<void()> call;
};

const std::vector<Case>& cases() {
  static const Tensor one = ones({1, 1}), zero = zeros({0}), row = ones({3}), image = ones({1, 1, 2, 2});
  // A tensor of kHalf elements in no memory.
  static const Tensor long_row = one.expand({1, kHalf}), tall = one.expand({kHalf, 1}),
                      longest = row[0].expand({kMost});
  static const std::vector<Case> all = {
      {"expand",
       [] {
         one.expand({kHalf, kHalf});
       }},
      {"expand to -2^63",
       [] {
         one.expand({kHalf, kHalf / 2});
       }},
      {"expand with more dimensions",
       [] {
         row.expand({kBig, 8, 3});
       }},
      {"broadcast_to",
       [] {
         broadcast_to(one, {kHalf, kHalf});
       }},
      {"expand of a long row",
       [] {
         long_row.expand({kHalf, kHalf});
       }},
      {"broadcast_tensors",
       [] {
         broadcast_tensors(Tensors{long_row, tall});
       }},
      {"meshgrid",
       [] {
         meshgrid(Tensors{long_row[0], long_row[0]});
       }},
      {"add", [] { add(long_row, tall); }},
      {"eq", [] { eq(long_row, tall); }},
      {"where",
       [] {
         where(eq(row, row)[0].expand({kHalf, kHalf}), one, one);
       }},
      {"matmul", [] { matmul(tall, long_row); }},
      {"view of nothing",
       [] {
         zero.view({kHalf, kHalf});
       }},
      {"reshape of nothing",
       [] {
         zero.reshape({kHalf, kHalf});
       }},
      {"reshape to -2^63",
       [] {
         row.reshape({kHalf, kHalf / 2});
       }},
      {"unflatten",
       [] {
         unflatten(zero, 0, {kHalf, kHalf});
       }},
      {"flatten",
       [] {
         flatten(one.expand({kHalf, kHalf}));
       }},
      {"as_strided",
       [] {
         as_strided(row, {kHalf, kHalf}, {0, 0}, 0);
       }},
      {"empty",
       [] {
         empty({kHalf, kHalf});
       }},
      {"empty bytes",
       [] {
         empty({kBig, 2});
       }},
      {"empty_strided",
       [] {
         empty_strided({kHalf, kHalf}, {0, 0});
       }},
      {"zeros",
       [] {
         zeros({kBig, 8});
       }},
      {"full",
       [] {
         full({kBig, 8, 8}, 1.5);
       }},
      {"rand",
       [] {
         rand({kHalf, kHalf});
       }},
      {"randn",
       [] {
         randn({kBig, 8});
       }},
      {"randint",
       [] {
         randint(0, 10, {kBig, 8});
       }},
      {"randperm", [] { randperm(kMost); }},
      {"tensor",
       [] {
         tensor(std::vector<double>{}, {kHalf, kHalf});
       }},
      {"arange", [] { arange(0, kMost); }},
      {"arange, long", [] { arange(0, std::int64_t{1} << 58); }},
      {"arange of floats", [] { arange(0.0, 1e300, 1.0); }},
      {"linspace", [] { linspace(0, 1, kMost); }},
      {"logspace", [] { logspace(0, 1, std::int64_t{1} << 58); }},
      {"eye", [] { eye(kHalf); }},
      {"eye, wrapped", [] { eye(kHalf + 1); }},
      {"diag", [] { diag(long_row[0]); }},
      {"diag with an offset", [] { diag(row, kMost - 1); }},
      {"diag_embed with an offset", [] { diag_embed(row, -kMost); }},
      {"repeat",
       [] {
         repeat(one, {kHalf, kHalf});
       }},
      {"repeat of four", [] { repeat(ones({4}), {kBig * 2}); }},
      {"repeat of nothing",
       [] {
         repeat(zeros({0, 4}), {1, kBig * 2});
       }},
      {"repeat in eight dimensions",
       [] {
         repeat(ones({2, 1, 1, 1, 1, 1, 1, 1}), {kMost, 1, 1, 1, 1, 1, 1, 1});
       }},
      {"tile", [] { tile(row, {kMost}); }},
      {"repeat_interleave", [] { repeat_interleave(row, kMost, 0); }},
      {"repeat_interleave of nothing",
       [] {
         repeat_interleave(zeros({0, 4}), kBig * 2, 1);
       }},
      {"cat",
       [] {
         cat(Tensors{longest, longest, longest});
       }},
      {"cat of nothing",
       [] {
         cat(Tensors{zeros({0}).reshape({0, 1}).expand({0, kMost}), zeros({0, 1}).expand({0, kMost})}, 1);
       }},
      {"stack",
       [] {
         stack(Tensors{longest, longest, longest});
       }},
      {"one_hot", [] { one_hot(arange(3), kMost); }},
      {"pad",
       [] {
         pad(row, {kMost, kMost});
       }},
      {"pad to a negative size",
       [] {
         pad(row, {kMost, 0});
       }},
      {"pad two dimensions",
       [] {
         pad(one, {kHalf, 0, kHalf, 0});
       }},
      {"pad by reflection",
       [] {
         pad(ones({1, 4}), {kMost, kMost}, PadMode::reflect);
       }},
      {"pad by repetition",
       [] {
         pad(ones({1, 4}), {kMost, kMost}, PadMode::replicate);
       }},
      {"conv2d",
       [] {
         conv2d(image, ones({1, 1, 1, 1}), {}, {.padding = {kBig * 2, kBig * 2}});
       }},
      {"conv2d, wrapped",
       [] {
         conv2d(image, ones({1, 1, 1, 1}), {}, {.padding = {kHalf, kHalf}});
       }},
      {"conv2d with dilation",
       [] {
         conv2d(image, ones({1, 1, 2, 2}), {}, {.dilation = {kMost, kMost}});
       }},
      {"conv_transpose2d",
       [] {
         conv_transpose2d(image, ones({1, 1, 1, 1}), {}, {.stride = {kMost, kMost}});
       }},
      {"conv_transpose2d, wrapped",
       [] {
         conv_transpose2d(image, ones({1, 1, 1, 1}), {}, {.stride = {kHalf, kHalf}});
       }},
      {"max_pool2d", [] { max_pool2d(image, {2}, {.dilation = {kMost}}); }},
      {"avg_pool2d", [] { avg_pool2d(image, {kMost}, {.padding = {kMost / 2}}); }},
      {"adaptive_avg_pool2d",
       [] {
         adaptive_avg_pool2d(image, {kHalf, kHalf});
       }},
      {"adaptive_max_pool2d",
       [] {
         adaptive_max_pool2d(image, {kHalf, kHalf});
       }},
      {"interpolate",
       [] {
         interpolate(image, {.size = {kHalf, kHalf}});
       }},
      {"interpolate by a factor",
       [] {
         interpolate(image, {.scale_factor = {1e18, 1e18}});
       }},
      {"index_select",
       [] {
         index_select(one.expand({1, kMost}), 0, zeros({4}, {.dtype = i64}));
       }},
      {"gather",
       [] {
         gather(one, 0, zeros({1, 1}, {.dtype = i64}).expand({kHalf, kHalf}));
       }},
      {"embedding",
       [] {
         embedding(zeros({1}, {.dtype = i64}).expand({kHalf}), one.expand({1, kHalf}));
       }},
      {"slice",
       [] {
         row.slice(0, 0, kMost, kMost).expand({kMost, 3});
       }},
  };
  return all;
}

TEST(SizeOverflow, EveryFunctionThatTakesSizesRefusesIt) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    try {
      c.call();
      ADD_FAILURE() << c.name << ": no error";
    } catch (const Error& e) {
      EXPECT_STRNE(e.what(), "");
    } catch (const std::exception& e) {
      ADD_FAILURE() << c.name << ": " << e.what();
    }
  }
}

TEST(SizeOverflow, LongTensorsOfNoMemoryStillWork) {
  const Tensor x = ones({1, 1}).expand({kHalf, kHalf / 4});
  EXPECT_EQ(x.numel(), std::int64_t{1} << 62);
  EXPECT_EQ(zeros({0, 3}).expand({0, 3}).numel(), 0);
  EXPECT_EQ(zeros({0}).view({kHalf, 0, kHalf}).numel(), 0);
}

}  // namespace
}  // namespace halfstep
