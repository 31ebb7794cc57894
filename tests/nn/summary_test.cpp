// SPDX-License-Identifier: Apache-2.0
// Summaries against published counts and closed forms.
#include "halfstep/nn/summary.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "halfstep/core/random.h"
#include "halfstep/models/registry.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attention.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/dropout.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/quant/quantization.h"

namespace halfstep {
namespace {

nn::Summary summary_of(const char* name, const Shape& sizes, std::optional<DType> amp = {}) {
  const models::Model net = models::make_model(name);
  const Tensor images = randn(sizes);
  return nn::summary(*net.module, [&] { net.forward(images); }, {.amp = amp});
}

const nn::SummaryRow& row(const nn::Summary& s, const std::string& path) {
  return *std::find_if(s.rows.begin(), s.rows.end(), [&](const nn::SummaryRow& r) { return r.path == path; });
}

// torchvision's documentation has 25,557,032 parameters and 4.09 GFLOPS (multiply-adds) for ResNet-50. To the last one,
// by the layers of Table 1 of the paper with the stride on the 3x3: 7x7, 3 to 64 channels, to 112x112; per stage the
// 1x1, 3x3 and 1x1 of its blocks and the shortcut of the first; 2048 to 1000.
TEST(Summary, CountsOfResNet50AreThePublishedOnes) {
  const nn::Summary s = summary_of("resnet50", {1, 3, 224, 224});
  EXPECT_EQ(s.rows[0].parameters, 25557032);
  EXPECT_EQ(s.trainable, 25557032);
  std::int64_t sum = 112 * 112 * 64 * 3 * 49 + 2048 * 1000;
  const std::int64_t blocks[] = {3, 4, 6, 3};
  std::int64_t in = 64, before = 56;
  for (int stage = 0; stage < 4; ++stage) {
    const std::int64_t width = std::int64_t{64} << stage, side = 56 >> stage, places = side * side;
    for (std::int64_t b = 0; b < blocks[stage]; ++b) {
      const std::int64_t first = b == 0 ? before * before : places;  // the first 1x1 sees the stage's input
      sum += first * in * width + places * width * width * 9 + places * width * 4 * width;
      if (b == 0) sum += places * in * 4 * width;
      in = 4 * width;
    }
    before = side;
  }
  EXPECT_EQ(sum, 4089184256);
  EXPECT_EQ(s.rows[0].multiply_adds, sum);
  EXPECT_EQ(row(s, "layer4").output, (Shape{1, 2048, 7, 7}));
  EXPECT_EQ(row(s, "layer4.2.conv3").output, (Shape{1, 2048, 7, 7}));
  EXPECT_EQ(row(s, "fc").parameters, 2049000);
  EXPECT_EQ(row(s, "fc").multiply_adds, 2048000);
  EXPECT_EQ(row(s, "").output, (Shape{1, 1000}));
  // Each convolution and each batch norm keeps what it reads, in 16 bits half of it.
  const double share = static_cast<double>(s.rows[0].saved_low) / static_cast<double>(s.rows[0].saved_float32);
  EXPECT_NEAR(share, 0.5, 0.01);
  const std::string text = s.str(1);
  EXPECT_NE(text.find("multiply-adds of a forward pass: 4,089,184,256\n"), std::string::npos) << text;
  EXPECT_NE(text.find("parameters: 25,557,032 (25,557,032 trainable), 102.2 MB in float32"), std::string::npos);
  EXPECT_EQ(text.find("downsample"), std::string::npos);
}

TEST(Summary, MemoryOfAnMlpIsWhatItsGradientsRead) {
  constexpr std::int64_t kBatch = 8;
  const nn::Summary s = summary_of("mlp", {kBatch, 784}, bf16);
  EXPECT_EQ(s.rows[0].parameters, 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10);
  EXPECT_EQ(s.rows[0].multiply_adds, kBatch * (784 * 512 + 512 * 512 + 512 * 10));
  // The inputs of the three layers; what the second and the third read are the results that relu keeps too.
  EXPECT_EQ(s.rows[0].saved_float32, kBatch * (784 + 512 + 512) * 4u);
  EXPECT_EQ(s.rows[0].saved_low, kBatch * (784 + 512 + 512) * 2u);
  // The first layer's input needs no gradient, which alone would read its weight.
  EXPECT_EQ(s.weight_copies, (512 * 512 + 512 * 10) * 2u);
  EXPECT_EQ(row(s, "fc1").saved_float32, kBatch * 784 * 4u);
  EXPECT_EQ(row(s, "fc1").kind, "Linear(784, 512)");
  EXPECT_EQ(row(s, "fc2").dtype, bf16);
  EXPECT_TRUE(s.autocast);
  const auto linear = std::find_if(s.ops.begin(), s.ops.end(), [](const auto& p) { return p.op == "linear"; });
  ASSERT_NE(linear, s.ops.end());
  EXPECT_EQ(linear->dtype, bf16);
  EXPECT_EQ(linear->forward, 3u);
}

struct Unusual : nn::Module<Unusual> {
  nn::Linear shared = child("shared", nn::Linear{{.in = 4, .out = 4}});
  nn::BatchNorm1d norm = child("norm", nn::BatchNorm1d{{.channels = 4}});
  nn::Linear unused = child("unused", nn::Linear{{.in = 2, .out = 3}});
  Tensor forward(const Tensor& x) const { return dropout(norm(shared(shared(x))), 0.5); }
};

TEST(Summary, LeavesTheNetworkAsItWas) {
  manual_seed(1);
  const Unusual net;
  net.eval();
  net.norm.train();
  const Tensor x = randn({6, 4});
  std::vector<std::vector<double>> before;
  for (const NamedTensor& t : net.state_dict()) before.push_back(t.tensor.to_vector<double>());
  const auto random = default_generator().state();
  const nn::Summary s = nn::summary(net, x);
  EXPECT_EQ(default_generator().state(), random);
  std::size_t i = 0;
  for (const NamedTensor& t : net.state_dict()) EXPECT_EQ(t.tensor.to_vector<double>(), before[i++]) << t.name;
  EXPECT_FALSE(net.is_training());
  EXPECT_TRUE(net.norm.is_training());
  for (const NamedTensor& p : net.parameters()) EXPECT_FALSE(p.tensor.grad().defined());
  // Both calls of one module count; a module that isn't called has no output.
  EXPECT_EQ(row(s, "shared").multiply_adds, 2 * 6 * 4 * 4);
  EXPECT_EQ(row(s, "shared").parameters, 20);
  EXPECT_FALSE(row(s, "unused").called);
  EXPECT_EQ(s.buffers, 4 + 4 + 1);
  EXPECT_THROW(nn::summary(net, randn({6, 5})), Error);
  EXPECT_FALSE(net.is_training());
}

TEST(Summary, AModuleOfAnotherOne) {
  const Unusual net;
  const nn::Summary s = nn::summary(net.shared, randn({2, 4}));
  EXPECT_EQ(s.rows.size(), 1u);
  EXPECT_EQ(s.rows[0].multiply_adds, 2 * 4 * 4);
  EXPECT_EQ(s.rows[0].output, (Shape{2, 4}));
}

std::int64_t traced(const std::function<void()>& f) {
  debug::CallTrace trace;
  f();
  std::int64_t sum = 0;
  for (const debug::TracedCall& c : trace.calls()) sum += c.multiply_adds;
  return sum;
}

TEST(MultiplyAdds, OfEachKindOfProduct) {
  EXPECT_EQ(traced([] { matmul(ones({3, 4}), ones({4, 5})); }), 3 * 4 * 5);
  EXPECT_EQ(traced([] { matmul(ones({2, 3, 4}), ones({2, 4, 5})); }), 2 * 3 * 4 * 5);
  // Groups: each output sees half the channels.
  EXPECT_EQ(traced([] {
              conv2d(ones({2, 4, 5, 5}), ones({6, 2, 3, 3}), {}, {.padding = {1}, .groups = 2});
            }),
            2 * 6 * 25 * 2 * 9);
  // Each input goes to 3x3 places of each of 6 channels.
  EXPECT_EQ(traced([] { conv_transpose2d(ones({2, 4, 5, 5}), ones({4, 6, 3, 3})); }), 2 * 4 * 25 * 6 * 9);
  // Heads 2, 3 queries, 5 keys, 4 values each: Q K and P V.
  EXPECT_EQ(traced([] {
              scaled_dot_product_attention(ones({1, 2, 3, 4}), ones({1, 2, 5, 4}), ones({1, 2, 5, 4}));
            }),
            2 * 3 * 5 * (4 + 4));
  EXPECT_EQ(traced([] { add(ones({3}), ones({3})); }), 0);
  // Both gradients of a convolution have as many products as itself.
  EXPECT_EQ(traced([] {
              const Tensor x = ones({2, 4, 5, 5}, {.requires_grad = true});
              const Tensor w = ones({6, 4, 3, 3}, {.requires_grad = true});
              sum(conv2d(x, w, {}, {.padding = {1}})).backward();
            }),
            3 * 2 * 6 * 25 * 4 * 9);
}

// The rows of modules list what is attached to the network for them.
TEST(Summary, TellsWhatIsQuantized) {
  const models::Model net = models::make_model("resnet20");
  const Tensor images = randn({2, 3, 32, 32});
  const auto forward = [&](std::span<const Tensor> in) { return std::vector<Tensor>{net.forward(in[0])}; };
  const std::size_t rows = summary_of("resnet20", {2, 3, 32, 32}).rows.size();
  quant::prepare(*net.module, forward, {images}, {.weight_bits = 4, .skip = {"layer1.0.conv2"}});
  const nn::Summary s = nn::summary(*net.module, [&] { net.forward(images); });
  EXPECT_EQ(s.rows.size(), rows + 1);  // the quantization itself
  EXPECT_EQ(row(s, "quantization").kind, "Quantization(weights 4 bits by channel, activations 8 bits)");
  EXPECT_EQ(row(s, "").attached, "input 8 bits, adaptive_avg_pool2d 8 bits");
  EXPECT_EQ(row(s, "layer1.0.conv1").attached, "weight 4 bits");
  EXPECT_EQ(row(s, "layer1.0.bn1").attached, "");  // nothing that computes in integers reads it
  EXPECT_EQ(row(s, "layer2.0.bn1").attached, "output 8 bits");
  EXPECT_EQ(row(s, "layer1.0.conv2").attached, "");
  EXPECT_EQ(row(s, "fc").attached, "weight 4 bits");
  EXPECT_NE(s.str().find("attached"), std::string::npos);
  EXPECT_EQ(summary_of("resnet20", {2, 3, 32, 32}).str().find("attached"), std::string::npos);
}

}  // namespace
}  // namespace halfstep
