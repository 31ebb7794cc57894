// SPDX-License-Identifier: Apache-2.0
// All networks by name: their state dicts are those that PyTorch has (tests/goldens/make_models.py).
#include "halfstep/models/registry.h"

#include <gtest/gtest.h>

#include <set>

#include "halfstep/ops/create.h"
#include "tests/support/errors.h"
#include "tests/support/golden.h"

namespace halfstep {
namespace {

// FNV-1a of 64 bits.
std::string fnv(const std::string& text) {
  std::uint64_t h = 0xCBF29CE484222325U;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3U;
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(h));
  return digits;
}

TEST(Registry, StatesAreThoseOfPyTorch) {
  std::set<std::string> known;
  for (const test::GoldenEntry& e : test::read_goldens("models.json")) {
    if (e.op != "state") continue;
    const std::string name = e.name.substr(6);
    known.insert(name);
    const models::Model net = models::make_model(name);
    std::string described;
    const NamedTensors state = net.module->state_dict();
    for (const NamedTensor& t : state) described += t.name + " " + t.tensor.sizes().str() + "\n";
    std::int64_t values = 0;
    for (const NamedTensor& t : net.module->parameters()) values += t.tensor.numel();
    EXPECT_EQ(state.size(), static_cast<std::size_t>(e.integer("entries"))) << name;
    EXPECT_EQ(net.module->parameters().size(), static_cast<std::size_t>(e.integer("tensors"))) << name;
    EXPECT_EQ(values, e.integer("parameters")) << name;
    EXPECT_EQ(state.back().name, e.text("last")) << name;
    EXPECT_EQ(fnv(described), e.text("hash")) << name << "\n" << described.substr(0, 2000);
    EXPECT_TRUE(e.text("last").starts_with(net.info.head)) << name;
  }
  const std::vector<std::string> names = models::model_names();
  EXPECT_EQ(known, std::set<std::string>(names.begin(), names.end()));
}

TEST(Registry, NetworksTakeTheImagesThatTheyAreMadeFor) {
  for (const char* name : {"mlp", "resnet20", "resnet18_cifar", "mobilenet_v2", "resnet18"}) {
    const models::Model net = models::make_model(name, {.classes = 7});
    EXPECT_EQ(net.info.classes, 7);
    net.module->eval();
    const Tensor images = zeros({1, net.info.channels, net.info.image_size, net.info.image_size});
    EXPECT_EQ(net.forward(images).sizes(), (Shape{1, 7})) << name;
    // Only the head depends on the classes.
    for (const NamedTensor& t : net.module->state_dict()) {
      if (t.name.starts_with(net.info.head)) {
        EXPECT_EQ(t.tensor.size(0), 7) << name << " " << t.name;
      }
    }
  }
  EXPECT_EQ(models::model_info("resnet50").classes, 1000);
  EXPECT_EQ(models::model_info("resnet50").image_size, 224);
}

TEST(Registry, UnknownNamesAndOptionsAreExplained) {
  const auto said = [](const char* name) { return test::error_of<Error>([&] { models::make_model(name); }); };
  EXPECT_NE(said("resnt50").find("did you mean resnet50?"), std::string::npos) << said("resnt50");
  EXPECT_NE(said("ResNet-101").find("did you mean resnet101?"), std::string::npos);
  EXPECT_NE(said("mobilenetv2").find("did you mean mobilenet_v2?"), std::string::npos);
  EXPECT_NE(said("vgg16").find("expected one of mlp, resnet18, "), std::string::npos);
  EXPECT_EQ(said("transformer").find("did you mean"), std::string::npos);
  EXPECT_THROW(models::model_info("nothing"), Error);
  EXPECT_THROW(models::make_model("resnet20", {.classes = 0}), Error);
  EXPECT_THROW(models::make_model("mlp", {.zero_init_residual = true}), Error);
  EXPECT_THROW(models::make_model("mobilenet_v2", {.zero_init_residual = true}), Error);
}

}  // namespace
}  // namespace halfstep
