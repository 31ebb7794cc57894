// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/module.h"

#include <gtest/gtest.h>

#include "halfstep/amp/autocast.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/core/capture.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/linear.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/reduce.h"

namespace halfstep {
namespace {

struct Block : nn::Module<Block> {
  nn::Linear inner = child("inner", nn::Linear{{.in = 4, .out = 4}});
  nn::Parameter scale = parameter("scale", ones({4}));
  nn::Buffer count = buffer("count", zeros({}));
  Tensor forward(const Tensor& x) const { return inner(x) * scale; }
  std::string kind() const override { return "Block"; }
};

struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 3, .out = 4}});
  Block block = child("block", Block{});
  nn::Linear head = child("head", nn::Linear{{.in = 4, .out = 2, .bias = false}});
  mutable std::vector<std::string> paths;
  Tensor forward(const Tensor& x) const {
    paths.push_back(amp::module_path());
    return head(block(fc1(x)));
  }
};

std::vector<std::string> names(const NamedTensors& list) {
  std::vector<std::string> result;
  for (const auto& t : list) result.push_back(t.name);
  return result;
}

TEST(Module, ParametersHavePyTorchsNamesAndOrder) {
  const Net net;
  EXPECT_EQ(names(net.parameters()),
            (std::vector<std::string>{"fc1.weight", "fc1.bias", "block.scale", "block.inner.weight", "block.inner.bias",
                                      "head.weight"}));
  EXPECT_EQ(names(net.state_dict()),
            (std::vector<std::string>{"fc1.weight", "fc1.bias", "block.scale", "block.count", "block.inner.weight",
                                      "block.inner.bias", "head.weight"}));
  for (const auto& p : net.parameters()) EXPECT_TRUE(p.tensor.requires_grad()) << p.name;
  EXPECT_FALSE(net.block.count.requires_grad());
}

TEST(Module, CopiesAndMovesShare) {
  const Net net;
  Net copy = net;
  const Net moved = std::move(copy);
  for (std::size_t i = 0; i < net.parameters().size(); ++i) {
    EXPECT_TRUE(net.parameters()[i].tensor.is_same(moved.parameters()[i].tensor));
  }
  moved.eval();
  EXPECT_FALSE(net.block.inner.is_training());
}

TEST(Module, ClonesAreIndependent) {
  const Net net;
  const Net other = nn::clone(net);
  ASSERT_EQ(names(other.parameters()), names(net.parameters()));
  for (std::size_t i = 0; i < net.parameters().size(); ++i) {
    const Tensor a = net.parameters()[i].tensor, b = other.parameters()[i].tensor;
    EXPECT_FALSE(a.is_same(b));
    EXPECT_NE(a.storage()->data(), b.storage()->data());
    EXPECT_EQ(a.to_vector<float>(), b.to_vector<float>());
    EXPECT_TRUE(b.requires_grad());
  }
  other.eval();
  EXPECT_TRUE(net.is_training());
}

TEST(Module, AssignedMembersAreSeen) {
  Net net;
  const nn::Linear other{{.in = 3, .out = 4}};
  net.fc1 = other;
  EXPECT_TRUE(net.parameters()[0].tensor.is_same(other.weight));
  EXPECT_EQ(net.parameters()[0].name, "fc1.weight");
  net.block.scale = full({4}, 2.0);
  EXPECT_EQ(net.state_dict()[2].tensor.to_vector<float>(), (std::vector<float>{2, 2, 2, 2}));
  net.fc1.bias = Tensor();
  EXPECT_EQ(net.parameters().size(), 5u);
  // A captured step holds the tensors that it saw.
  const auto generation = capture_generation().load();
  net.fc1.weight = net.block.inner.weight;
  EXPECT_GT(capture_generation().load(), generation);
}

// As PyTorch's C++ users write it: register_module() in the constructor.
struct Late : nn::Module<Late> {
  nn::ModuleList<Block> blocks;
  nn::Sequential head;
  nn::Parameter scale;
  nn::Buffer steps;
  explicit Late(int depth) {
    nn::ModuleList<Block> list;
    for (int i = 0; i < depth; ++i) list.push_back(Block{});
    blocks = child("blocks", list);
    head = child("head", nn::Sequential{nn::Linear{{.in = 4, .out = 2}}});
    scale = parameter("scale", ones({4}));
    steps = buffer("steps", zeros({}));
  }
  Tensor forward(Tensor x) const {
    for (const Block& b : blocks) x = b(x);
    return head(x * scale);
  }
};

TEST(Module, MembersCanBeRegisteredInTheConstructor) {
  const std::vector<std::string> expected = {
      "scale",         "steps",      "blocks.0.scale", "blocks.0.count", "blocks.0.inner.weight", "blocks.0.inner.bias",
      "head.0.weight", "head.0.bias"};
  auto net = std::make_unique<Late>(1);
  EXPECT_EQ(names(net->state_dict()), expected);
  EXPECT_EQ(net->blocks.name(), "blocks");
  EXPECT_TRUE(net->own_tensor("scale").is_same(net->scale));
  const Late copy = nn::clone(*net);
  net.reset();
  EXPECT_EQ(names(copy.state_dict()), expected);
  EXPECT_EQ((*copy.parameters().begin()).tensor.impl(), copy.scale.impl());
  // The last that was registered is gone: what takes its place in memory is another's.
  for (int i = 0; i < 3; ++i) {
    Late other(2);
    nn::Parameter temporary = other.scale;
    temporary = std::move(other.steps);  // which is undefined then, and not listed
    other.head = nn::Sequential{nn::Linear{{.in = 4, .out = 2}}};
    EXPECT_EQ(other.state_dict().size(), expected.size() + 3);
  }
  EXPECT_EQ(names(copy.state_dict()), expected);
}

struct Local : nn::Module<Local> {
  Local() { const nn::ModuleList<Block> list = child("list", nn::ModuleList<Block>{Block{}}); }
};

struct Sliced : nn::Module<Sliced> {
  Tensor scale = parameter("scale", ones({2}));
};

TEST(Module, SaysWhatIsNoMember) {
  const Local local;
  try {
    local.parameters();
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(
        e.what(),
        "module: 'list' was registered but is no member of the Module: expected what child() returns to be a member");
  }
  const Sliced sliced;
  try {
    sliced.parameters();
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "module: 'scale' was registered but is no member of the Module: expected what parameter() or buffer() "
                 "returns to be a member, an nn::Parameter; did you declare it as a Tensor?");
  }
}

TEST(Module, CallsOpenTheModulesScope) {
  const Net net;
  const auto decisions = amp::explain([&] {
    amp::Autocast autocast{{.modules = {{.path = "block.inner", .enabled = false}}}};
    net(ones({2, 3}));
  });
  std::vector<std::string> ran;
  for (const auto& d : decisions) {
    if (d.op == "linear") ran.push_back(d.module + " " + name(d.used[0]));
  }
  // Switched off, autocast has nothing to say about block.inner.
  EXPECT_EQ(ran, (std::vector<std::string>{"fc1 f16", "head f16"}));
  EXPECT_EQ(net.paths, std::vector<std::string>{""});
  EXPECT_EQ(amp::module_path(), "");
}

TEST(Module, LoadsAStateAndNamesWhatDoesNotFit) {
  const Net net, other;
  EXPECT_TRUE(net.load_state_dict(other.state_dict()).missing.empty());
  EXPECT_EQ(net.fc1.weight.to_vector<float>(), other.fc1.weight.to_vector<float>());
  NamedTensors state = other.state_dict();
  state[0].name = "fc0.weight";
  try {
    net.load_state_dict(state);
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "load_state_dict: the state is of another network: missing [fc1.weight], unexpected [fc0.weight]");
  }
  const nn::LoadReport report = net.load_state_dict(state, false);
  EXPECT_EQ(report.missing, std::vector<std::string>{"fc1.weight"});
  // A wrong shape at the end of the state leaves what stands before it as it was.
  state = Net{}.state_dict();
  state.back().tensor = zeros({4, 5});
  EXPECT_THROW(net.load_state_dict(state), ShapeError);
  EXPECT_EQ(net.fc1.bias.to_vector<float>(), other.fc1.bias.to_vector<float>());
}

struct Tied : nn::Module<Tied> {
  nn::Linear there = child("there", nn::Linear{{.in = 3, .out = 3}});
  nn::Linear back = child("back", nn::Linear{{.in = 3, .out = 3, .bias = false}});
  Tied() { back.weight = there.weight; }
  Tensor forward(const Tensor& x) const { return back(there(x)); }
};

// An optimizer is to move a shared parameter once; a file is to have both names, as PyTorch's has.
TEST(Module, SharedParametersAreListedOnceAndSavedTwice) {
  const Tied net;
  EXPECT_EQ(names(net.parameters()), (std::vector<std::string>{"there.weight", "there.bias"}));
  EXPECT_EQ(names(net.state_dict()), (std::vector<std::string>{"there.weight", "there.bias", "back.weight"}));
}

// Inside one region: contents of another storage are cast anew, though both were written equally often.
TEST(Module, ReplacedContentsAreCastAnew) {
  const nn::Linear layer{{.in = 2, .out = 2, .bias = false}};
  const Tensor x = ones({1, 2});
  const auto contents = [](double value) { return full({2, 2}, value); };
  amp::Autocast autocast{{.dtype = bf16}};
  nn::replace_contents(layer.weight, contents(1));
  EXPECT_EQ(layer(x).to_vector<float>(), (std::vector<float>{2, 2}));
  nn::replace_contents(layer.weight, contents(3));
  EXPECT_EQ(layer(x).to_vector<float>(), (std::vector<float>{6, 6}));
}

TEST(Module, FreezingAndConversionInPlace) {
  const Net net;
  net.fc1.requires_grad_(false);
  EXPECT_EQ(names(net.trainable_parameters()).front(), "block.scale");
  const Tensor held = net.head.weight;
  net.to(f16);
  EXPECT_EQ(held.dtype(), f16);
  EXPECT_EQ(net.block.count.dtype(), f32) << "buffers keep their digits";
  net.to(f32);
  const Tensor y = net(ones({2, 3}));
  sum(y).backward();
  EXPECT_FALSE(net.fc1.weight.grad().defined());
  EXPECT_EQ(held.grad().dtype(), f32);
  net.to(f64);
  EXPECT_FALSE(held.grad().defined()) << "a gradient of the old dtype goes";
  sum(net(ones({2, 3}, {.dtype = f64}))).backward();
  EXPECT_EQ(held.grad().dtype(), f64);
  net.zero_grad();
  EXPECT_FALSE(held.grad().defined());
}

TEST(Module, ModesAndMovesCanBeChained) {
  const Net net;
  const Net& same = net.to(f64).to(default_device()).to(MemoryFormat::contiguous).eval();
  EXPECT_EQ(&same, &net);
  EXPECT_EQ(net.head.weight.dtype(), f64);
  EXPECT_FALSE(net.is_training());
  EXPECT_EQ(&net.train(), &net);
  EXPECT_TRUE(net.is_training());
  EXPECT_EQ(net.to(f32).eval()(ones({2, 3})).sizes(), (Shape{2, 2}));
  const nn::ModuleBase& base = net;
  EXPECT_EQ(&base.to(f16).train(false), &base);
}

TEST(Module, PrintsItsTree) {
  EXPECT_EQ(Net{}.str(),
            "Module(\n  (fc1): Linear(3, 4)\n  (block): Block(\n    (inner): Linear(4, 4)\n  )\n  (head): Linear(4, 2, "
            "bias=false)\n)");
}

TEST(Linear, GivesTheFormulaAndRefusesOtherShapes) {
  const nn::Linear layer{{.in = 3, .out = 2}};
  const Tensor x = tensor({1, 2, 3, 4, 5, 6}, {2, 3});
  const auto got = layer(x).to_vector<float>(), formula = (mm(x, layer.weight.t()) + layer.bias).to_vector<float>();
  if (default_device().is_cpu()) {
    EXPECT_EQ(got, formula);
  }
  // A device may sum four terms, all of them under 8, in another order.
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], formula[i], 2 * 4 * 0x1p-24 * 4 * 8);
  try {
    layer(ones({64, 1, 28, 28}));
    FAIL();
  } catch (const ShapeError& e) {
    EXPECT_STREQ(e.what(), "linear: expected input [*, 3], got [64, 1, 28, 28]");
  }
}

}  // namespace
}  // namespace halfstep
