// SPDX-License-Identifier: Apache-2.0
// Networks that would compute and never train: members that were not registered, options that were not given.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/models/mobilenet.h"
#include "halfstep/models/resnet.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/embedding.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/nn/pooling.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/runtime/log.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using test::error_of;

struct ForgottenChild : nn::Module<ForgottenChild> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 3, .out = 4}});
  nn::Linear fc2{{.in = 4, .out = 2}};
  Tensor forward(const Tensor& x) const { return fc2(relu(fc1(x))); }
};

// Every way to the network's tensors says so, and the first call, which needs no optimizer.
TEST(Registration, AForgottenChildIsNamed) {
  const ForgottenChild net;
  for (const auto& use :
       std::vector<std::function<void()>>{[&] { net.parameters(); }, [&] { net.state_dict(); }, [&] { net.buffers(); },
                                          [&] {
                                            net(ones({1, 3}));
                                          },
                                          [&] { net.to(f16); }, [&] { net.requires_grad_(); }}) {
    const std::string text = error_of<Error>(use);
    for (const char* part : {"ForgottenChild has a member", "Linear(4, 2)", "after 'fc1'", "child(\"name\""}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

struct Inner : nn::Module<Inner> {
  std::array<nn::Linear, 2> pair{nn::Linear{{.in = 2, .out = 2}}, nn::Linear{{.in = 2, .out = 2}}};
  Tensor forward(const Tensor& x) const { return pair[1](pair[0](x)); }
};
struct Outer : nn::Module<Outer> {
  Inner inner = child("inner", Inner{});
  Tensor forward(const Tensor& x) const { return inner(x); }
};
TEST(Registration, TheModuleWithTheMistakeIsNamedNotTheOneAroundIt) {
  const std::string text = error_of<Error>([] { Outer().parameters(); });
  EXPECT_NE(text.find("Inner has a member nn::Linear(2, 2) (before all"), std::string::npos) << text;
  // In a container too.
  const nn::Sequential net{nn::ReLU{}, ForgottenChild{}};
  EXPECT_NE(error_of<Error>([&] { net.parameters(); }).find("ForgottenChild"), std::string::npos);
}

struct ForgottenParameter : nn::Module<ForgottenParameter> {
  nn::Parameter scale = parameter("scale", ones({2}));
  nn::Parameter shift;
  ForgottenParameter() { shift = zeros({2}).requires_grad_(); }
  Tensor forward(const Tensor& x) const { return x * scale + shift; }
};
TEST(Registration, AForgottenParameterIsNamed) {
  const std::string text = error_of<Error>([] { ForgottenParameter().parameters(); });
  for (const char* part : {"ForgottenParameter has a Parameter", "f32 [2]", "after 'scale'", "parameter(\"name\""}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

struct ForgottenDropout : nn::Module<ForgottenDropout> {
  nn::Linear fc = child("fc", nn::Linear{{.in = 2, .out = 2}});
  nn::Dropout drop{{.p = 0.5}};
  Tensor forward(const Tensor& x) const { return drop(fc(x)); }
};
TEST(Registration, DropoutThatEvalWouldNotReachIsNamed) {
  EXPECT_NE(error_of<Error>([] { ForgottenDropout().parameters(); }).find("Dropout(0.5)"), std::string::npos);
}

// What makes no difference is allowed: activations, empty parameters, and further handles on what is registered.
struct Harmless : nn::Module<Harmless> {
  nn::Linear fc = child("fc", nn::Linear{{.in = 2, .out = 2}});
  nn::Linear again = fc;
  nn::ReLU relu;
  nn::Sequential none;
  nn::Parameter absent;
  nn::Parameter weight = fc.weight;
  std::vector<nn::Linear> frozen;
  Tensor forward(const Tensor& x) const { return again(none(relu(fc(x)))); }
};
TEST(Registration, WhatMakesNoDifferenceIsAllowed) {
  const Harmless net;
  EXPECT_EQ(net.parameters().size(), 2u);
  EXPECT_EQ(net(ones({1, 2})).sizes(), (Shape{1, 2}));
}

// A clone has weights of its own, but nothing tells it which of its other members meant the old ones.
TEST(Registration, AnUnregisteredHandleInACloneIsNamed) {
  const Harmless net, copy = nn::clone(net);
  EXPECT_NE(error_of<Error>([&] { copy.parameters(); }).find("Harmless has a member"), std::string::npos);
}

class Messages {
 public:
  Messages() {
    set_log_sink([this](LogLevel, std::string_view text) { list.emplace_back(text); });
  }
  ~Messages() { set_log_sink({}); }
  std::vector<std::string> list;
};

// Behind a pointer or in a vector a module's place says nothing; but its call inside of the network does.
struct Behind : nn::Module<Behind> {
  nn::Linear fc = child("fc", nn::Linear{{.in = 5, .out = 5}});
  std::vector<nn::Linear> more{nn::Linear{{.in = 5, .out = 5}}};
  Tensor forward(const Tensor& x) const { return more[0](fc(x)); }
};
TEST(Registration, AModuleBehindAVectorIsWarnedOfOnce) {
  const Messages messages;
  const Behind net;
  {
    const NoGrad no_grad;  // a frozen teacher is nobody's mistake
    net(ones({1, 5}));
  }
  EXPECT_TRUE(messages.list.empty());
  net(ones({1, 5}));
  net(ones({1, 5}));
  ASSERT_EQ(messages.list.size(), 1u);
  for (const char* part : {"Linear(5, 5) is called inside of Behind", "nn::ModuleList"}) {
    EXPECT_NE(messages.list[0].find(part), std::string::npos) << messages.list[0];
  }
}

// A wrapper that owns nothing leaves the choice of parameters to the program; frozen weights are meant to stay.
struct Wrapper : nn::Module<Wrapper> {
  std::shared_ptr<nn::Linear> net = std::make_shared<nn::Linear>(nn::LinearOptions{.in = 6, .out = 6});
  Tensor forward(const Tensor& x) const { return sum((*net)(x)); }
};
struct WithTeacher : nn::Module<WithTeacher> {
  nn::Linear student = child("student", nn::Linear{{.in = 7, .out = 7}});
  std::shared_ptr<nn::Linear> teacher = std::make_shared<nn::Linear>(nn::LinearOptions{.in = 7, .out = 7});
  WithTeacher() { teacher->requires_grad_(false); }
  Tensor forward(const Tensor& x) const { return student(x) - (*teacher)(x); }
};
TEST(Registration, WrappersAndFrozenTeachersAreNotWarnedOf) {
  const Messages messages;
  Wrapper()(ones({1, 6}));
  WithTeacher()(ones({1, 7}));
  nn::Sequential{nn::Linear{{.in = 3, .out = 3}}, nn::BatchNorm1d{{.channels = 3}}}(ones({4, 3}));
  for (const std::string& text : messages.list) {
    EXPECT_NE(text.find("runs on the CPU"), std::string::npos) << text;  // a device without the kernel may say so
  }
}

// --- options

template <class M, class O>
void expect_not_given(const O& options, const std::string& kind, const std::string& field) {
  const std::string text = error_of<Error>([&] { M{options}; });
  EXPECT_NE(text.find(kind + ": expected ." + field), std::string::npos)
      << kind << " without " << field << ": " << text;
  EXPECT_NE(text.find("to be given, as in " + kind + "{{."), std::string::npos) << text;
}

TEST(RequiredOptions, WhatWasNotGivenIsNamed) {
  expect_not_given<nn::Linear>(nn::LinearOptions{.in = 3}, "Linear", "out");
  expect_not_given<nn::Linear>(nn::LinearOptions{.out = 3}, "Linear", "in");
  expect_not_given<nn::Linear>(nn::LinearOptions{}, "Linear", "in");
  expect_not_given<nn::Conv1d>(nn::ConvOptions{.out = 3, .kernel = {1}}, "Conv1d", "in");
  expect_not_given<nn::Conv2d>(nn::ConvOptions{.in = 3, .kernel = {1}}, "Conv2d", "out");
  expect_not_given<nn::Conv2d>(nn::ConvOptions{.in = 3, .out = 3}, "Conv2d", "kernel");
  expect_not_given<nn::ConvTranspose1d>(nn::ConvTransposeOptions{.in = 3, .out = 3}, "ConvTranspose1d", "kernel");
  expect_not_given<nn::ConvTranspose2d>(nn::ConvTransposeOptions{.in = 3}, "ConvTranspose2d", "out");
  expect_not_given<nn::LayerNorm>(nn::LayerNormOptions{}, "LayerNorm", "normalized_shape");
  expect_not_given<nn::LayerNorm>(nn::LayerNormOptions{.affine = false}, "LayerNorm", "normalized_shape");
  expect_not_given<nn::RMSNorm>(nn::RMSNormOptions{.affine = false}, "RMSNorm", "normalized_shape");
  expect_not_given<nn::GroupNorm>(nn::GroupNormOptions{.channels = 4}, "GroupNorm", "groups");
  expect_not_given<nn::GroupNorm>(nn::GroupNormOptions{.groups = 4}, "GroupNorm", "channels");
  expect_not_given<nn::BatchNorm1d>(nn::BatchNormOptions{}, "BatchNorm", "channels");
  expect_not_given<nn::BatchNorm2d>(nn::BatchNormOptions{.affine = false}, "BatchNorm", "channels");
  expect_not_given<nn::Embedding>(nn::EmbeddingOptions{.num = 4}, "Embedding", "dim");
  expect_not_given<nn::Embedding>(nn::EmbeddingOptions{.dim = 4}, "Embedding", "num");
  expect_not_given<nn::Softmax>(nn::SoftmaxOptions{}, "Softmax", "dim");
  expect_not_given<nn::LogSoftmax>(nn::SoftmaxOptions{}, "LogSoftmax", "dim");
  expect_not_given<nn::MaxPool1d>(nn::MaxPoolOptions{}, "MaxPool1d", "kernel");
  expect_not_given<nn::MaxPool2d>(nn::MaxPoolOptions{.stride = {2}}, "MaxPool2d", "kernel");
  expect_not_given<nn::AvgPool1d>(nn::AvgPoolOptions{}, "AvgPool1d", "kernel");
  expect_not_given<nn::AvgPool2d>(nn::AvgPoolOptions{}, "AvgPool2d", "kernel");
  expect_not_given<nn::AdaptiveAvgPool1d>(nn::AdaptivePoolOptions{}, "AdaptiveAvgPool1d", "output_size");
  expect_not_given<nn::AdaptiveAvgPool2d>(nn::AdaptivePoolOptions{}, "AdaptiveAvgPool2d", "output_size");
  expect_not_given<nn::AdaptiveMaxPool2d>(nn::AdaptivePoolOptions{}, "AdaptiveMaxPool2d", "output_size");
  expect_not_given<nn::Upsample>(InterpolateOptions{}, "Upsample", "size");
  expect_not_given<models::ConvNormReLU6>(models::ConvNormReLU6Options{.in = 3}, "ConvNormReLU6", "out");
  expect_not_given<models::InvertedResidual>(models::InvertedResidualOptions{.out = 3}, "InvertedResidual", "in");
  expect_not_given<models::BasicBlock>(models::ResidualBlockOptions{.in = 3}, "BasicBlock", "width");
  expect_not_given<models::Bottleneck>(models::ResidualBlockOptions{.width = 3}, "Bottleneck", "in");
}

TEST(RequiredOptions, NothingOnPurposeIsStillAllowed) {
  EXPECT_EQ((nn::Linear{{.in = 3, .out = 0}}(ones({2, 3})).sizes()), (Shape{2, 0}));
  EXPECT_EQ((nn::Linear{{.in = 0, .out = 2}}(ones({2, 0})).sizes()), (Shape{2, 2}));
}

}  // namespace
}  // namespace halfstep
