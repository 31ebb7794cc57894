// SPDX-License-Identifier: Apache-2.0
// Levels, lists and to_float. The rules are MindSpore's; what they come to is written out here as casts made by hand,
// and results must have the same bits.
#include "halfstep/amp/level.h"

#include <gtest/gtest.h>

#include "halfstep/autograd/engine.h"
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/norm.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/conv.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/norm.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/softmax.h"
#include "halfstep/runtime/log.h"
#include "tests/support/errors.h"

namespace halfstep {
namespace {

using amp::Level;

template <class E, class F>
void expect_error(F&& f, const std::string& text) {
  const std::string message = test::error_of<E>(std::forward<F>(f));
  EXPECT_NE(message.find(text), std::string::npos) << "got: " << message;
}

// Ops that ran, as `linear(f16, f16, f16)`.
class Calls final : public OpObserver {
 public:
  Calls() { add_observer(this); }
  ~Calls() override { remove_observer(this); }
  void after_call(const ObservedCall& call) override {
    if (call.path == ExecutionPath::view) return;
    std::string text = std::string(call.name) + "(";
    for (const Tensor* t : call.inputs) {
      if (!t->defined()) continue;
      if (text.back() != '(') text += ", ";
      text += name(t->dtype());
    }
    list.push_back(text + ")");
  }
  std::ptrdiff_t count(const std::string& start) const {
    return std::count_if(list.begin(), list.end(), [&](const std::string& s) { return s.starts_with(start); });
  }
  std::string str() const {
    std::string all;
    for (const auto& s : list) all += s + "\n";
    return all;
  }
  std::vector<std::string> list;
};

// What is written to the log while it lives.
class LogLines {
 public:
  LogLines() {
    set_log_sink([this](LogLevel, std::string_view text) { lines.emplace_back(text); });
  }
  ~LogLines() { set_log_sink({}); }
  std::vector<std::string> lines;
};

struct Net : nn::Module<Net> {
  nn::Conv2d conv = child("conv", nn::Conv2d{{.in = 3, .out = 4, .kernel = {3}}});
  nn::BatchNorm2d bn = child("bn", nn::BatchNorm2d{{.channels = 4}});
  nn::Linear fc = child("fc", nn::Linear{{.in = 4, .out = 5}});
  Tensor forward(const Tensor& x) const { return softmax(fc(mean(relu(bn(conv(x))), Shape{2, 3})), 1); }
};

struct Mlp : nn::Module<Mlp> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 6, .out = 8}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 8, .out = 4}});
  Tensor forward(const Tensor& x) const { return fc2(relu(fc1(x))); }
};

Tensor images() {
  manual_seed(3);
  return randn({2, 3, 6, 6});
}
Tensor rows() {
  manual_seed(4);
  return randn({5, 6});
}
std::vector<float> bits(const Tensor& t) { return t.to(f32).to_vector<float>(); }

TEST(Level, NamesAreReadAndOthersRefused) {
  for (const Level level : {Level::O0, Level::O1, Level::O2, Level::O3, Level::automatic}) {
    EXPECT_EQ(amp::parse_level(amp::name(level)), level);
  }
  expect_error<AmpError>([] { amp::parse_level("O4"); }, "level: expected O0, O1, O2, O3 or auto, got 'O4'");
  const Mlp net;
  expect_error<AmpError>([&] { amp::auto_mixed_precision(net, "half"); }, "got 'half'");
  expect_error<AmpError>([&] { amp::auto_mixed_precision(net, Level::O2, f32); },
                         "auto_mixed_precision: expected f16 or bf16, got f32");
  expect_error<AmpError>([&] { amp::custom_mixed_precision(net, {.white = {"Linear"}, .dtype = f64}); },
                         "custom_mixed_precision: expected f16 or bf16, got f64");
  expect_error<AmpError>([&] { net.to_float(f64); }, "to_float: expected f16, bf16 or f32, got f64");
  expect_error<AmpError>([&] { net.to_float(i32); }, "got i32");
}

TEST(ToFloat, CastsInputsAndParametersAtTheCall) {
  for (const DType dtype : {f16, bf16}) {
    const nn::Linear layer = nn::Linear{{.in = 6, .out = 4}}.to_float(dtype);
    const Tensor x = rows(), y = layer(x);
    EXPECT_EQ(y.dtype(), dtype) << "what a module returns is not cast back";
    EXPECT_EQ(layer.weight.dtype(), f32);
    EXPECT_EQ(bits(y), bits(linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))));
    sum(y.to(f32)).backward();
    EXPECT_EQ(layer.weight.grad().dtype(), f32);
  }
}

TEST(ToFloat, EveryOpInTheModuleRunsInIt) {
  struct Sensitive : nn::Module<Sensitive> {
    Tensor forward(const Tensor& x) const { return exp(softmax(x * 2, 1)); }
  };
  const Sensitive module;
  EXPECT_EQ(module.to_float(f16)(rows()).dtype(), f16);
  const Tensor x = rows().to(f16);
  EXPECT_EQ(bits(module(rows())), bits(exp(softmax(x * 2, 1))));
}

TEST(ToFloat, TheNearestSettingWins) {
  const Mlp net;
  net.to_float(f16);
  net.fc2.to_float(f32);
  const Tensor x = rows();
  const Tensor hidden = relu(linear(x.to(f16), net.fc1.weight.to(f16), net.fc1.bias.to(f16)));
  EXPECT_EQ(bits(net(x)), bits(linear(hidden.to(f32), net.fc2.weight, net.fc2.bias)));
  EXPECT_EQ(net(x).dtype(), f32);
  // A region around it is farther, a region inside nearer.
  {
    const amp::Autocast region({.dtype = bf16});
    EXPECT_EQ(net(x).dtype(), f32);
    EXPECT_EQ(net.fc1(x).dtype(), bf16) << "only the net was given a dtype, not this module";
  }
  struct WithRegion : nn::Module<WithRegion> {
    Mlp inner = child("inner", Mlp{});
    Tensor forward(const Tensor& x) const {
      const amp::Autocast off({.enabled = false});
      return linear(x, inner.fc1.weight, inner.fc1.bias);
    }
  };
  const WithRegion outer;
  EXPECT_EQ(bits(outer.to_float(f16)(x)),
            bits(linear(x.to(f16).to(f32), outer.inner.fc1.weight, outer.inner.fc1.bias)));
  EXPECT_FALSE(amp::is_autocast_enabled());
}

TEST(ToFloat, StandsWhereAMemberIsMadeAndIsSharedByHandles) {
  struct Tutorial : nn::Module<Tutorial> {
    nn::Linear fc1 = child("fc1", nn::Linear{{.in = 6, .out = 8}}.to_float(f16));
    nn::Linear fc2 = child("fc2", nn::Linear{{.in = 8, .out = 4}});
    Tensor forward(const Tensor& x) const { return fc2(relu(fc1(x)).to(f32)); }
  };
  const Tutorial net;
  EXPECT_EQ(net.fc1(rows()).dtype(), f16);
  EXPECT_EQ(net(rows()).dtype(), f32);
  EXPECT_EQ(net.str(), "Module(\n  (fc1): Linear(6, 8) [f16]\n  (fc2): Linear(8, 4)\n)");
  EXPECT_EQ(net.parameters()[0].name, "fc1.weight");
  const Tutorial copy = nn::clone(net);
  copy.fc1.to_float(bf16);
  EXPECT_EQ(net.fc1(rows()).dtype(), f16) << "a clone has a precision of its own";
  EXPECT_EQ(copy.fc1(rows()).dtype(), bf16);
}

TEST(Level, O0LeavesTheNetworkAndTakesLevelsAway) {
  const Mlp net;
  const auto plain = bits(net(rows()));
  amp::auto_mixed_precision(net, Level::O0);
  EXPECT_EQ(bits(net(rows())), plain);
  amp::auto_mixed_precision(net, Level::O3);
  EXPECT_NE(bits(net(rows())), plain);
  const LogLines log;
  amp::auto_mixed_precision(net, Level::O0);
  EXPECT_EQ(bits(net(rows())), plain);
  EXPECT_TRUE(log.lines.empty());
  EXPECT_EQ(net.str(), Mlp{}.str());
}

TEST(Level, O1RunsTheWhiteListIn16BitsAndAllElseInFloat32) {
  const Net net = amp::auto_mixed_precision(Net{}, Level::O1);
  net.eval();  // one call of the norm's op, without the update of its statistics
  Tensor y;
  const Calls calls;
  y = net(images());
  EXPECT_EQ(y.dtype(), f32);
  EXPECT_EQ(calls.count("conv2d(f16, f16"), 1) << calls.str();
  EXPECT_EQ(calls.count("batch_norm_act(f32") + calls.count("batch_norm(f32"), 1) << calls.str();
  EXPECT_EQ(calls.count("relu(f16"), 1) << calls.str();
  EXPECT_EQ(calls.count("mean(f32"), 1) << calls.str();
  EXPECT_EQ(calls.count("linear(f16"), 1) << calls.str();
  EXPECT_EQ(calls.count("softmax(f32"), 1) << calls.str();
}

TEST(Level, O1GivesTheBitsOfCastsByHand) {
  const Net net = amp::auto_mixed_precision(Net{}, Level::O1, bf16);
  const Tensor x = images();
  const NoGrad no_grad;
  const auto low = [](const Tensor& t) { return t.to(bf16); };
  Tensor h = conv2d(low(x), low(net.conv.weight), low(net.conv.bias)).to(f32);
  h = batch_norm(h, {.weight = net.bn.weight, .bias = net.bn.bias, .training = true});
  h = mean(relu(low(h)).to(f32), Shape{2, 3});
  h = linear(low(h), low(net.fc.weight), low(net.fc.bias)).to(f32);
  EXPECT_EQ(bits(net(x)), bits(softmax(h, 1)));
}

TEST(Level, O2KeepsNormsInFloat32AndTheRestIn16Bits) {
  const Net net = amp::auto_mixed_precision(Net{}, Level::O2);
  const Tensor x = images();
  {
    const Calls calls;
    EXPECT_EQ(net(x).dtype(), f32);
    EXPECT_EQ(calls.count("softmax(f16"), 1) << calls.str();
    EXPECT_EQ(calls.count("batch_norm_act(f16, f32, f32") + calls.count("batch_norm(f16, f32, f32"), 1) << calls.str();
  }
  // MindSpore casts to float32 before the norm and back behind it.
  const NoGrad no_grad;
  const auto low = [](const Tensor& t) { return t.to(f16); };
  Tensor h = conv2d(low(x), low(net.conv.weight), low(net.conv.bias)).to(f32);
  h = low(batch_norm(h, {.weight = net.bn.weight, .bias = net.bn.bias, .training = true}));
  h = mean(relu(h), Shape{2, 3});
  h = softmax(linear(h, low(net.fc.weight), low(net.fc.bias)), 1);
  EXPECT_EQ(bits(net(x)), bits(h));
}

TEST(Level, O3CastsTheWeightsOfNormsTooButNeverStatistics) {
  const Net net = amp::auto_mixed_precision(Net{}, Level::O3);
  {
    const NoGrad no_grad;
    Tensor weight = net.bn.weight;
    weight.fill_(1 + 0x1p-12);  // not a number of f16's
  }
  const Tensor x = images();
  net(x);
  EXPECT_EQ(net.bn.running_mean.dtype(), f32);
  net.eval();
  const NoGrad no_grad;
  const auto low = [](const Tensor& t) { return t.to(f16); };
  Tensor h = conv2d(low(x), low(net.conv.weight), low(net.conv.bias));
  h = batch_norm(h, {.weight = low(net.bn.weight),
                     .bias = low(net.bn.bias),
                     .running_mean = net.bn.running_mean,
                     .running_var = net.bn.running_var});
  h = softmax(linear(mean(relu(h), Shape{2, 3}), low(net.fc.weight), low(net.fc.bias)), 1);
  EXPECT_EQ(bits(net(x)), bits(h));
  EXPECT_EQ(net(x).dtype(), f32);
}

TEST(Level, AutoIsAutocast) {
  const Net net = amp::auto_mixed_precision(Net{}, Level::automatic, bf16);
  net.eval();
  const Tensor x = images();
  const Net plain = nn::clone(net);
  amp::auto_mixed_precision(plain, Level::O0);
  Tensor expected;
  {
    const amp::Autocast region({.dtype = bf16});
    expected = plain(x);
  }
  EXPECT_EQ(bits(net(x)), bits(expected));
  EXPECT_EQ(net(x).dtype(), f32);
}

TEST(Level, BetweenNeighboursIn16BitsThereAreNoCasts) {
  for (const Level level : {Level::O1, Level::O2, Level::O3, Level::automatic}) {
    const Mlp net = amp::auto_mixed_precision(Mlp{}, level);
    const Tensor x = rows();
    const Calls calls;
    net(x);
    // The input, two weights, two biases, and the result.
    EXPECT_EQ(calls.count("to(") + calls.count("copy("), 6) << amp::name(level) << "\n" << calls.str();
    EXPECT_EQ(calls.count("linear(f16, f16, f16"), 2) << calls.str();
  }
}

TEST(Level, GradientsReachTheFloat32Parameters) {
  for (const Level level : {Level::O1, Level::O2, Level::O3, Level::automatic}) {
    const Net net = amp::auto_mixed_precision(Net{}, level);
    const Net plain = nn::clone(net);
    amp::auto_mixed_precision(plain, Level::O0);
    const Tensor x = images();
    sum(square(net(x))).backward();
    sum(square(plain(x))).backward();
    for (const auto& p : net.parameters()) {
      ASSERT_TRUE(p.tensor.grad().defined()) << p.name;
      EXPECT_EQ(p.tensor.grad().dtype(), f32) << p.name;
    }
    // f16's rounding, 2^-11, of activations around 1 and weights under 1, through three layers.
    const auto ours = net.fc.weight.grad().to_vector<float>(), theirs = plain.fc.weight.grad().to_vector<float>();
    for (std::size_t i = 0; i < ours.size(); ++i) EXPECT_NEAR(ours[i], theirs[i], 8 * 0x1p-11);
  }
}

TEST(Level, WhatWasSaidOfAModuleHoldsAgainstTheLevel) {
  const Mlp before;
  before.fc2.to_float(f32);
  amp::auto_mixed_precision(before, Level::O3);
  const Mlp after = amp::auto_mixed_precision(Mlp{}, Level::O1);
  after.fc2.to_float(f32);
  for (const Mlp* net : {&before, &after}) {
    const Calls calls;
    (*net)(rows());
    EXPECT_EQ(calls.count("linear(f16"), 1) << calls.str();
    EXPECT_EQ(calls.count("linear(f32"), 1) << calls.str();
  }
}

TEST(Level, ASecondLevelTakesThePlaceOfTheFirstAndSaysSo) {
  const Mlp net = amp::auto_mixed_precision(Mlp{}, Level::O1, f16);
  const LogLines log;
  amp::auto_mixed_precision(net, Level::O3, bf16);
  ASSERT_EQ(log.lines.size(), 1U);
  EXPECT_EQ(log.lines[0], "auto_mixed_precision: the network has a level or lists already; O3 takes their place");
  EXPECT_EQ(net.str(), "Module(\n  (fc1): Linear(6, 8) [bf16]\n  (fc2): Linear(8, 4) [bf16]\n) [bf16]");
}

TEST(Level, PrintingShowsEachModulesPrecision) {
  const Net net;
  const auto shown = [&](Level level) {
    amp::auto_mixed_precision(net, Level::O0);
    std::string text = amp::auto_mixed_precision(net, level).str(), result;
    for (std::size_t at = 0; (at = text.find(") [", at)) != std::string::npos;) {
      const std::size_t end = text.find(']', at);
      result += (result.empty() ? "" : " ") + text.substr(at + 3, end - at - 3);
      at = end;
    }
    return result;
  };
  // conv, bn, fc, the net.
  EXPECT_EQ(shown(Level::O1), "f16 f32 f16 f32");
  EXPECT_EQ(shown(Level::O2), "f16 f32 f16 f16");
  EXPECT_EQ(shown(Level::O3), "f16 f16 f16 f16");
  EXPECT_EQ(shown(Level::automatic), "auto f16 auto f16 auto f16 auto f16");
}

TEST(Level, AFunctionHasAutoOnly) {
  const auto product =
      amp::auto_mixed_precision([](const Tensor& a, const Tensor& b) { return mm(a, b); }, Level::automatic, bf16);
  EXPECT_EQ(product(ones({2, 3}), ones({3, 2})).dtype(), bf16);
  expect_error<AmpError>([] { amp::auto_mixed_precision([](const Tensor& a) { return a; }, Level::O2); },
                         "a function has no modules to go by; expected the level auto, got O2");
}

TEST(Lists, ByKindPathAndOp) {
  const Tensor x = images();
  const auto run = [&](const amp::PrecisionLists& lists) {
    const Net net = amp::custom_mixed_precision(Net{}, lists);
    net.eval();
    const Calls calls;
    EXPECT_EQ(net(x).dtype(), f32);
    std::string result;
    for (const std::string& s : calls.list) {
      for (const char* op : {"conv2d(", "batch_norm", "linear(", "softmax("}) {
        if (s.starts_with(op)) result += s.substr(s.find('(') + 1, s.find_first_of(",)") - s.find('(') - 1) + " ";
      }
    }
    return result;
  };
  EXPECT_EQ(run({.white = {"Linear"}}), "f32 f32 f16 f32 ");
  EXPECT_EQ(run({.white = {"conv", "softmax"}}), "f16 f32 f32 f16 ");
  EXPECT_EQ(run({.white = {"*"}, .dtype = bf16}), "bf16 bf16 bf16 f32 ");
  EXPECT_EQ(run({.black = {"fc", "BatchNorm2d"}}), "f16 f16 f32 f16 ");
  EXPECT_EQ(run({.black = {"softmax", "conv2d", "batch_norm"}}), "f32 f32 f16 f32 ");
  // A path takes out of a kind, and the black list out of the white one.
  EXPECT_EQ(run({.white = {"Linear", "Conv2d"}, .black = {"fc"}}), "f16 f32 f32 f32 ");
}

TEST(Lists, AModuleUnderTwoNamesIsOne) {
  struct Twice : nn::Module<Twice> {
    nn::Linear a = child("a", nn::Linear{{.in = 6, .out = 6}});
    nn::Linear b = child("b", a);
    Tensor forward(const Tensor& x) const { return b(a(x)); }
  };
  for (const char* name : {"a", "b"}) {
    const Twice net = amp::custom_mixed_precision(Twice{}, {.white = {name}});
    const Calls calls;
    net(rows());
    EXPECT_EQ(calls.count("linear(f16, f16, f16"), 2) << name << "\n" << calls.str();
  }
}

TEST(Level, FloatsComeOutOfListsToo) {
  struct Many : nn::Module<Many> {
    nn::Linear fc = child("fc", nn::Linear{{.in = 6, .out = 6}});
    std::pair<std::array<Tensor, 2>, std::optional<Tensor>> forward(const Tensor& x) const {
      const Tensor y = fc(x);
      return {{y, y * 2}, y};
    }
  };
  const auto [two, one] = amp::auto_mixed_precision(Many{}, Level::O3)(rows());
  EXPECT_EQ(two[1].dtype(), f32);
  EXPECT_EQ(one->dtype(), f32);
}

TEST(Lists, MisuseIsAnswered) {
  const Net net;
  const auto refused = [&](const amp::PrecisionLists& lists, const char* text) {
    expect_error<AmpError>([&] { amp::custom_mixed_precision(net, lists); }, text);
    EXPECT_EQ(net.str(), Net{}.str()) << "nothing was changed";
  };
  refused({}, "custom_mixed_precision: expected a white list or a black list, got neither");
  refused({.white = {"Linear"}, .black = {"Linear"}}, "is on the white list and on the black list");
  refused({.white = {"fc"}, .black = {"*"}}, "fc (Linear) is on the white list and on the black list");
  refused({.white = {"softmax"}, .black = {"softmax"}}, "'softmax' is on the white list and on the black list");
  refused({.white = {"Dense"}},
          "'Dense' is neither a kind of module in the network (BatchNorm2d, Conv2d, Linear, Module), nor a path in it, "
          "nor an op");
  refused({.black = {"head.fc"}}, "'head.fc' is neither");
}

TEST(Lists, ABlackListWithoutTheNetworksNormsIsWarnedOf) {
  const LogLines log;
  amp::custom_mixed_precision(Net{}, {.black = {"Linear"}});
  ASSERT_EQ(log.lines.size(), 1U);
  EXPECT_NE(log.lines[0].find("BatchNorm2d is not on the black list given"), std::string::npos);
}

TEST(Lists, AreCopies) {
  auto list = amp::black_list();
  list.clear();
  EXPECT_FALSE(amp::black_list().empty());
  const auto white = amp::white_list();
  EXPECT_NE(std::find(white.begin(), white.end(), "Linear"), white.end());
  // All that stands on them exists.
  const Net net;
  amp::custom_mixed_precision(net, {.white = white});
  const LogLines log;
  amp::custom_mixed_precision(net, {.black = amp::black_list()});
}

}  // namespace
}  // namespace halfstep
