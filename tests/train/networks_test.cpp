// SPDX-License-Identifier: Apache-2.0
// What a network's name stands for: data, transforms and the numbers it is trained with.
#include "halfstep/train/networks.h"

#include <gtest/gtest.h>

#include "halfstep/core/error.h"
#include "halfstep/core/random.h"
#include "halfstep/ops/create.h"
#include "halfstep/train/data.h"
#include "halfstep/train/registry.h"
#include "halfstep/train/schedule.h"
#include "halfstep/train/trace_step.h"

namespace halfstep {
namespace {

using training::ImageDataOptions;

TEST(TrainNetworks, HaveTheNumbersOfTheirPapers) {
  for (const std::string& name : training::network_names()) {
    const training::TrainConfig c = training::default_config(name);
    EXPECT_NO_THROW(training::check(c)) << name;
    EXPECT_EQ(c.model, name);
    EXPECT_NO_THROW(training::parse_rate_rule(c.lr_schedule)) << name;
  }
  // The ImageNet script's: 0.1 for 256 images, a tenth every 30 epochs.
  const training::TrainConfig large = training::default_config("resnet50", 256);
  EXPECT_DOUBLE_EQ(large.lr, 0.1);
  EXPECT_EQ(large.lr_schedule, "step:30,0.1");
  EXPECT_EQ(large.momentum, 0.9);
  EXPECT_EQ(large.weight_decay, 1e-4);
  EXPECT_EQ(large.epochs, 90);
  EXPECT_DOUBLE_EQ(training::default_config("resnet50", 64).lr, 0.025);
  EXPECT_EQ(training::default_config("resnet50").eval_batch_size, training::default_config("resnet50").batch_size);
  EXPECT_EQ(training::default_config("resnet20").lr_schedule, "onecycle");
  // The mlp's are the library's.
  const training::TrainConfig mlp = training::default_config("mlp"), plain;
  EXPECT_EQ(mlp.lr, plain.lr);
  EXPECT_EQ(mlp.batch_size, plain.batch_size);
  EXPECT_EQ(mlp.momentum, 0);
  EXPECT_THROW(training::default_config("resnet19"), Error);
}

TEST(TrainNetworks, SeeImagesAsTheyWereMadeFor) {
  EXPECT_FALSE(training::network_input("mlp").images);
  EXPECT_TRUE(training::network_input("resnet20").images);
  EXPECT_EQ(training::network_input("resnet20").image_size, 32);
  EXPECT_EQ(training::network_input("resnet50").image_size, 224);
  const auto photo = training::eval_transform(training::default_images("resnet50"), "resnet50");
  EXPECT_EQ(photo.size, 224);
  EXPECT_EQ(photo.resize, 256);
  EXPECT_EQ(training::default_images("resnet50", 160).resize, 183);  // 160 * 256 / 224 = 182.9
  const auto small = training::train_transform(training::default_images("resnet20"), "resnet20");
  EXPECT_EQ(small.size, 32);
  EXPECT_EQ(small.crop, data::CropKind::padded);
  EXPECT_EQ(small.normalization.mean, data::kCifarNormalization.mean);
  const auto crop = training::train_transform(training::default_images("resnet18"), "resnet18");
  EXPECT_EQ(crop.crop, data::CropKind::random_resized);
  EXPECT_EQ(crop.normalization.mean, data::kImageNetNormalization.mean);
  EXPECT_EQ(crop.jitter.brightness, 0);
}

// One that is registered without a size has the options' own.
TEST(TrainNetworks, WithoutASizeHaveTheUsualOne) {
  training::register_network({.name = "net without a size",
                              .task = "classification",
                              .data = "imagenet",
                              .make = training::network_kind("resnet18").make});
  EXPECT_EQ(training::default_images("net without a size").image_size, ImageDataOptions().image_size);
  EXPECT_EQ(training::default_images("net without a size").resize, 256);
  EXPECT_EQ(training::default_config("net without a size").images.image_size, ImageDataOptions().image_size);
  EXPECT_EQ(training::default_images("net without a size", 112).image_size, 112);
  EXPECT_TRUE(training::network_input("net without a size").images);
  EXPECT_EQ(training::network_input("net without a size").image_size, ImageDataOptions().image_size);
  // It takes random samples of its kind of data without being one of the library's.
  const data::Batch batch = training::random_batch("net without a size", 2, 32);
  EXPECT_EQ(batch.input.sizes(), (Shape{2, 3, 32, 32}));
  EXPECT_EQ(batch.target.to_vector<std::int64_t>(), (std::vector<std::int64_t>{0, 0})) << "it says no classes";
}

TEST(TrainNetworks, HaveExamplesOfTheirInput) {
  const auto sizes = [](const char* model, std::int64_t n, std::int64_t image_size) {
    const Tensor example = training::example_input(model, n, image_size);
    EXPECT_EQ(example.dtype(), f32);
    return example.sizes();
  };
  EXPECT_EQ(sizes("mlp", 2, 0), (Shape{2, 784}));
  EXPECT_EQ(sizes("cnn", 1, 64), (Shape{1, 784})) << "digits have one size";
  EXPECT_EQ(sizes("resnet20", 1, 0), (Shape{1, 3, 32, 32}));
  EXPECT_EQ(sizes("resnet18", 3, 64), (Shape{3, 3, 64, 64}));
  EXPECT_EQ(sizes("yolov5n", 1, 64), (Shape{1, 3, 64, 64}));
}

TEST(TrainNetworks, HaveDataThatAreCalledByTheirPlace) {
  EXPECT_EQ(training::data_label("resnet18", "a/folder"), "a/folder");
  EXPECT_EQ(training::data_label("mlp", {}), "the built-in digits");
  for (const char* without : {"resnet18", "yolov5n", "registered by nobody"}) {
    EXPECT_EQ(training::data_label(without, {}), "no data");
  }
}

TEST(TrainNetworks, AreCalledByWhatDescribesThem) {
  training::TrainConfig c;
  c.model = "yolov5n";
  EXPECT_EQ(training::network_label(c), "yolov5n");
  c.description.text = "{nc: 2}";
  EXPECT_EQ(training::network_label(c), "--cfg describes");
  c.description.file = "p6.yaml";
  EXPECT_EQ(training::network_label(c), "--cfg p6.yaml");
  for (const char* other : {"mlp", "registered by nobody"}) {
    c.model = other;
    EXPECT_EQ(training::network_label(c), other);
  }
}

TEST(TrainNetworks, ClassesAreTheRowsOfTheLastLayer) {
  manual_seed(1);
  std::shared_ptr<const void> holder;
  const training::Classifier net = training::make_classifier("resnet20", holder, {.classes = 7});
  EXPECT_EQ(training::classes_of("resnet20", net.module->state_dict()), 7);
  EXPECT_EQ(training::classes_of("resnet50", {}), 1000);
  EXPECT_EQ(net.forward(zeros({1, 3, 8, 8})).sizes(), (Shape{1, 7}));
  // Each residual block begins as its shortcut.
  const training::Classifier zero = training::make_classifier("resnet20", holder, {.zero_init_residual = true});
  int blank = 0;
  for (const auto& t : zero.module->state_dict()) {
    if (t.name.ends_with("bn2.weight")) blank += t.tensor.to_vector<float>()[0] == 0 ? 1 : 0;
  }
  EXPECT_EQ(blank, 9);
  EXPECT_THROW(training::make_classifier("mlp", holder, {.zero_init_residual = true}), Error);
}

TEST(TrainData, OptionsOutOfRangeAreNamed) {
  const auto error = [](auto&& change) -> std::string {
    ImageDataOptions o = training::default_images("resnet50");
    o.folder = "somewhere";
    change(o);
    try {
      training::check(o);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(error([](ImageDataOptions&) {}), "no error");
  EXPECT_EQ(error([](ImageDataOptions& o) { o.resize = 0; }), "no error");
  const std::pair<std::string, std::string> cases[] = {
      {"--image-size", error([](ImageDataOptions& o) { o.image_size = 0; })},
      {"--resize", error([](ImageDataOptions& o) { o.resize = 200; })},
      {"--crop", error([](ImageDataOptions& o) { o.crop = "middle"; })},
      {"--min-area", error([](ImageDataOptions& o) { o.min_area = 1.5; })},
      {"--color-jitter", error([](ImageDataOptions& o) { o.color_jitter = -0.1; })},
      {"--max-damaged", error([](ImageDataOptions& o) { o.max_damaged = -1; })},
      {"--data", error([](ImageDataOptions& o) { o.folder.clear(); })}};
  for (const auto& [flag, text] : cases) EXPECT_TRUE(text.starts_with(flag + ": ")) << text;
}

}  // namespace
}  // namespace halfstep
