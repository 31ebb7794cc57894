// SPDX-License-Identifier: Apache-2.0
// The modules call the ops with their options; the ops are tested in tests/ops.
#include "halfstep/nn/pooling.h"

#include <gtest/gtest.h>

#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/random.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

template <class M>
void expect_calls(const M& module, const Tensor& input, const Tensor& expected, const char* kind, const char* text) {
  const Tensor got = module(input);
  EXPECT_EQ(got.sizes(), expected.sizes()) << kind;
  EXPECT_EQ(got.template to_vector<float>(), expected.template to_vector<float>()) << kind;
  EXPECT_EQ(module.kind(), kind);
  EXPECT_EQ(module.describe(), text);
  EXPECT_TRUE(module.parameters().empty());
}

TEST(PoolingModules, CallTheOps) {
  manual_seed(2);
  const Tensor x = rand({2, 3, 9, 8}), s = rand({2, 3, 9});
  expect_calls(nn::MaxPool2d{{.kernel = {3}, .stride = {2}, .padding = {1}}}, x,
               max_pool2d(x, {3}, {.stride = {2}, .padding = {1}}), "MaxPool2d",
               "kernel=[3], stride=[2], padding=[1], dilation=[1]");
  expect_calls(nn::MaxPool2d{{.kernel = {2, 3}, .dilation = {2}, .ceil_mode = true}}, x,
               max_pool2d(x, {2, 3}, {.dilation = {2}, .ceil_mode = true}), "MaxPool2d",
               "kernel=[2, 3], stride=[2, 3], padding=[0], dilation=[2], ceil_mode");
  expect_calls(nn::MaxPool1d{{.kernel = {2}, .padding = {1}, .ceil_mode = true}}, s,
               max_pool1d(s, {2}, {.padding = {1}, .ceil_mode = true}), "MaxPool1d",
               "kernel=[2], stride=[2], padding=[1], dilation=[1], ceil_mode");
  expect_calls(
      nn::AvgPool2d{{.kernel = {3}, .stride = {2}, .padding = {1}, .ceil_mode = true, .count_include_pad = false}}, x,
      avg_pool2d(x, {3}, {.stride = {2}, .padding = {1}, .ceil_mode = true, .count_include_pad = false}), "AvgPool2d",
      "kernel=[3], stride=[2], padding=[1], ceil_mode, without padding");
  expect_calls(nn::AvgPool2d{{.kernel = {2}, .divisor_override = 3}}, x, avg_pool2d(x, {2}, {.divisor_override = 3}),
               "AvgPool2d", "kernel=[2], stride=[2], padding=[0]");
  expect_calls(nn::AvgPool1d{{.kernel = {4}, .stride = {3}}}, s, avg_pool1d(s, {4}, {.stride = {3}}), "AvgPool1d",
               "kernel=[4], stride=[3], padding=[0]");
  expect_calls(nn::AdaptiveAvgPool2d{{.output_size = {1}}}, x, adaptive_avg_pool2d(x, {1}), "AdaptiveAvgPool2d", "[1]");
  expect_calls(nn::AdaptiveAvgPool1d{{.output_size = {4}}}, s, adaptive_avg_pool1d(s, {4}), "AdaptiveAvgPool1d", "[4]");
  expect_calls(nn::AdaptiveMaxPool2d{{.output_size = {4, -1}}}, x, adaptive_max_pool2d(x, {4, -1}), "AdaptiveMaxPool2d",
               "[4, -1]");
  expect_calls(nn::Upsample{{.scale_factor = {2, 1.5}, .mode = InterpolateMode::bilinear, .align_corners = true}}, x,
               interpolate(x, {.scale_factor = {2, 1.5}, .mode = InterpolateMode::bilinear, .align_corners = true}),
               "Upsample", "scale_factor=2 x 1.5, mode=bilinear, align_corners");
  expect_calls(nn::Upsample{{.size = {12}}}, x, interpolate(x, {.size = {12}}), "Upsample", "size=[12], mode=nearest");
  expect_calls(nn::ZeroPad2d{{.padding = {1, 2, 0, 3}}}, x, pad(x, {1, 2, 0, 3}), "ZeroPad2d", "[1, 2, 0, 3]");
  expect_calls(nn::ReflectionPad2d{{.padding = {2}}}, x, pad(x, {2, 2, 2, 2}, PadMode::reflect), "ReflectionPad2d",
               "[2, 2, 2, 2]");
  expect_calls(nn::ReplicationPad2d{{.padding = {3}}}, x[0], pad(x[0], {3, 3, 3, 3}, PadMode::replicate),
               "ReplicationPad2d", "[3, 3, 3, 3]");
}

TEST(PoolingModules, AreASequence) {
  const nn::Sequential net{nn::ZeroPad2d{{.padding = {1}}}, nn::MaxPool2d{{.kernel = {2}}},
                           nn::AdaptiveAvgPool2d{{.output_size = {1}}}, nn::Flatten{}};
  EXPECT_EQ(net(ones({2, 3, 6, 6})).sizes(), Shape({2, 3}));
}

TEST(PoolingModules, SayWhatTheyExpect) {
  using test::error_of;
  EXPECT_EQ(error_of([] {
              nn::ZeroPad2d{{.padding = {1, 2}}};
            }),
            "ZeroPad2d: expected one number of padding or four (left, right, top, bottom), got [1, 2]");
  EXPECT_EQ(error_of([] {
              nn::ReflectionPad2d{{.padding = {1}}}(zeros({3, 3}));
            }),
            "ReflectionPad2d: expected an input [N, C, H, W] or [C, H, W], got [3, 3]");
}

}  // namespace
}  // namespace halfstep
