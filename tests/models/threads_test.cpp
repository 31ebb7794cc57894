// SPDX-License-Identifier: Apache-2.0
// The loss and all gradients of a training step have the same bits for any number of threads.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>

#include "halfstep/amp/autocast.h"
#include "halfstep/core/random.h"
#include "halfstep/models/detection_loss.h"
#include "halfstep/models/gpt.h"
#include "halfstep/models/registry.h"
#include "halfstep/models/yolov5.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/random.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/winograd.h"
#include "tests/support/threads.h"

namespace halfstep {
namespace {

using Loss = std::function<Tensor()>;

struct Network {
  std::shared_ptr<const nn::ModuleBase> module;
  Loss loss;
};

Network classifier(const char* model, const Shape& images) {
  const models::Model net = models::make_model(model);
  const Tensor x = randn(images), y = randint(0, 10, {images[0]});
  return {net.module, [net, x, y] { return cross_entropy(net.forward(x).to(f32), y); }};
}

Network language_model() {
  auto net = std::make_shared<models::GPT>(
      models::GPTOptions{.vocabulary = 65, .context = 64, .layers = 2, .heads = 4, .width = 96, .dropout = 0.1});
  const Tensor x = randint(0, 65, {6, 64}), y = randint(0, 65, {6, 64});
  return {net, [net, x, y] { return cross_entropy(flatten((*net)(x).to(f32), 0, 1), flatten(y)); }};
}

Network detector() {
  auto net = std::make_shared<models::Yolov5>(models::yolov5n());
  const Tensor x = rand({2, 3, 96, 96});
  // Class, centre, width and height of two objects in each image.
  const Tensor objects =
      tensor({{{3, .5, .5, .4, .3}, {7, .2, .6, .1, .2}}, {{1, .7, .3, .5, .5}, {9, .4, .8, .2, .2}}});
  return {net, [net, x, objects] {
            return models::detection_loss((*net)(x), objects, net->head(), {.image_size = 96.0}).loss;
          }};
}

std::map<std::string, std::vector<double>> step(const std::function<Network()>& make, DType dtype) {
  manual_seed(3);
  const Network net = make();
  Tensor loss;
  if (dtype == f32) {
    loss = net.loss();
  } else {
    const amp::Autocast autocast({.dtype = dtype});
    loss = net.loss();
  }
  loss.backward();
  std::map<std::string, std::vector<double>> numbers = {{"loss", loss.to_vector<double>()}};
  for (const auto& [name, p] : net.module->parameters()) numbers[name] = p.grad().to_vector<double>();
  return numbers;
}

TEST(Threads, DoNotChangeTheBitsOfATrainingStep) {
  const test::ThreadsGuard guard;
  const std::map<std::string, std::function<Network()>> networks = {
      {"mlp",
       [] {
         return classifier("mlp", {70, 784});
       }},
      {"resnet20",
       [] {
         return classifier("resnet20", {9, 3, 32, 32});
       }},
      {"resnet50",
       [] {
         return classifier("resnet50", {2, 3, 64, 64});
       }},
      {"GPT", language_model},
      {"yolov5n", detector},
  };
  const Winograd before = winograd();
  for (const Winograd allowed : {Winograd::off, Winograd::tiles_4x4}) {
    set_winograd(allowed);
    for (const auto& [network, make] : networks) {
      if (allowed != Winograd::off && network != "resnet20") continue;
      for (const DType dtype : {f32, bf16, f16}) {
        if (dtype == f16 && network == "resnet50") continue;  // takes as long as all others together
        set_num_threads(1);
        const auto one = step(make, dtype);
        for (const int n : {3, 16}) {
          set_num_threads(n);
          for (const auto& [name, numbers] : step(make, dtype)) {
            EXPECT_EQ(std::memcmp(numbers.data(), one.at(name).data(), numbers.size() * sizeof(double)), 0)
                << network << " in " << halfstep::name(dtype) << " on " << n << " threads: " << name;
          }
        }
      }
    }
  }
  set_winograd(before);
}

}  // namespace
}  // namespace halfstep
