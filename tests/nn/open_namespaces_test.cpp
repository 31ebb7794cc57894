// SPDX-License-Identifier: Apache-2.0
// Options of ops and of modules beside each other when both namespaces are open: an ambiguous name does not compile.
#include <gtest/gtest.h>

#include "halfstep/halfstep.h"

using namespace halfstep;
using namespace halfstep::nn;

namespace {

TEST(OpenNamespaces, OptionsOfOpsAndModulesHaveDifferentNames) {
  const ConvOptions conv{.in = 1, .out = 1, .kernel = {3}};
  const ConvFuncOptions conv_call{.padding = {1}};
  const ConvTransposeOptions transpose{.in = 1, .out = 1, .kernel = {3}};
  const ConvTransposeFuncOptions transpose_call{.stride = {2}};
  const EmbeddingOptions table{.num = 4, .dim = 2};
  const EmbeddingFuncOptions lookup{.padding_idx = 0};
  const SoftmaxOptions softmax_module{.dim = 1};
  const SoftmaxFuncOptions softmax_call{.dtype = f32};
  const MaxPoolOptions max_module{.kernel = {2}};
  const MaxPoolFuncOptions max_call{.stride = {2}};
  const AvgPoolOptions avg_module{.kernel = {2}};
  const AvgPoolFuncOptions avg_call{.stride = {2}};
  const BatchNormOptions norm{.channels = 3};
  const BatchNormFuncOptions norm_call{.training = true};

  const Tensor x = ones({1, 1, 4, 4});
  EXPECT_EQ(Conv2d{conv}(x).sizes(), Shape({1, 1, 2, 2}));
  EXPECT_EQ(conv2d(x, ones({1, 1, 3, 3}), {}, conv_call).sizes(), Shape({1, 1, 4, 4}));
  EXPECT_EQ(ConvTranspose2d{transpose}(x).sizes(), Shape({1, 1, 6, 6}));
  EXPECT_EQ(conv_transpose2d(x, ones({1, 1, 3, 3}), {}, transpose_call).sizes(), Shape({1, 1, 9, 9}));
  const Tensor first = zeros({1}, {.dtype = i64});
  EXPECT_EQ(Embedding{table}(first).sizes(), embedding(first, ones({4, 2}), lookup).sizes());
  EXPECT_EQ(Softmax{softmax_module}(x[0][0]).sizes(), softmax(x[0][0], 1, softmax_call).sizes());
  EXPECT_EQ(MaxPool2d{max_module}(x).sizes(), max_pool2d(x, {2}, max_call).sizes());
  EXPECT_EQ(AvgPool2d{avg_module}(x).sizes(), avg_pool2d(x, {2}, avg_call).sizes());
  EXPECT_EQ(BatchNorm2d{norm}(ones({2, 3, 4, 4})).sizes(), batch_norm(ones({2, 3, 4, 4}), norm_call).sizes());
}

}  // namespace
