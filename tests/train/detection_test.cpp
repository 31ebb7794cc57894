// SPDX-License-Identifier: Apache-2.0
// The detection task: what a step counts, and where boxes of an evaluation are in their pictures.
#include "halfstep/train/detection.h"

#include <gtest/gtest.h>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/random.h"
#include "halfstep/train/networks.h"
#include "halfstep/train/trace_step.h"

namespace halfstep {
namespace {

using training::DetectionTask;

std::shared_ptr<const models::Yolov5> network(std::int64_t classes = 2) {
  return std::make_shared<const models::Yolov5>(models::yolov5n({.classes = classes}));
}

// Two pictures of 64 x 64 with one and two objects.
data::Batch batch() {
  return {.input = rand({2, 3, 64, 64}),
          .target = tensor({0, 0.5, 0.5, 0.2, 0.3, -1, 0, 0, 0, 0, 1, 0.25, 0.25, 0.2, 0.2, 0, 0.7, 0.6, 0.1, 0.4},
                           {2, 2, 5}),
          .more = {tensor({0, 1, 0, 0, 64, 64, 1, 1, 0, 0, 64, 64}, {2, 6}, {.dtype = f64})}};
}

TEST(DetectionTask, CountsThePartsOfTheLossAndTheObjects) {
  manual_seed(1);
  const auto net = network();
  DetectionTask task(net);
  const data::Batch b = batch();
  const training::TaskLoss made = task.loss(b);
  const models::DetectionLoss loss = models::detection_loss((*net)(b.input), b.target, net->head(), {.image_size = 64});
  EXPECT_EQ(made.loss.item<float>(), loss.loss.item<float>());
  std::map<std::string, double> parts;
  for (const NamedTensor& p : made.parts) parts[p.name] = p.tensor.item<double>();
  // Sums over two pictures of means.
  EXPECT_EQ(parts.at("box"), 2 * loss.box.item<double>());
  EXPECT_EQ(parts.at("obj"), 2 * loss.objectness.item<double>());
  EXPECT_EQ(parts.at("cls"), 2 * loss.classes.item<double>());
  EXPECT_EQ(parts.at("labels"), 3);
  EXPECT_EQ(parts.at("img_size"), 2 * 64);
  const auto columns = task.progress({.epoch = 1,
                                      .epochs = 3,
                                      .samples = 2,
                                      .memory_mb = 1234,
                                      .last = {{"labels", 1.5}, {"img_size", 64}},
                                      .means = {{"box", 0.25}, {"obj", 0.5}, {"cls", 0.125}}});
  std::string text;
  for (const auto& c : columns) text += c.name + "=" + c.value + " ";
  EXPECT_EQ(text, "Epoch=0/2 mem=1.23G box=0.25 obj=0.5 cls=0.125 labels=3 img_size=64 ");
}

// A head of zero weights finds the same everywhere: a box of each anchor's size in the middle of each cell, all of
// class 0. In an input of 64 x 32 the coarsest level, of 32 pixels, has its centres at (16, 16) and (48, 16).
TEST(DetectionTask, PutsBoxesIntoThePicturesThatTheyAreOf) {
  const auto net = network(1);
  {
    const NoGrad no_grad;
    for (std::int64_t l = 0; l < 3; ++l) {
      Tensor weight = net->head().m[static_cast<std::size_t>(l)].weight,
             bias = net->head().m[static_cast<std::size_t>(l)].bias;
      weight.fill_(0);
      // Sigmoids of zero give the cell's centre and the anchor's sides; the rest is as good as 1 in the coarsest level.
      bias.copy_(tensor({0, 0, 0, 0, l == 2 ? 30.0 : -30.0, 30, 0, 0, 0, 0, -30, 30, 0, 0, 0, 0, -30, 30}, {18}));
    }
  }
  net->eval();
  // A picture of 200 x 80 at a scale of 0.25, 50 x 20 pixels, 7 pixels from the left and 6 from the top. The anchor of
  // 116 x 90 around (16, 16) covers all of it; that around (48, 16) begins at -10: all of it too.
  DetectionTask task(net);
  task.begin_evaluation();
  const data::Batch b{.input = rand({1, 3, 32, 64}),
                      .target = tensor({0, (7 + 25) / 64.0, (6 + 10) / 32.0, 50 / 64.0, 20 / 32.0}, {1, 1, 5}),
                      .more = {tensor({0, 0.25, 7, 6, 200, 80}, {1, 6}, {.dtype = f64})}};
  const NoGrad no_grad;
  EXPECT_TRUE(task.evaluate(b).loss.defined());
  training::MetricResults results;
  task.end_evaluation(results);
  EXPECT_EQ(task.evaluation().pictures(), 1);
  EXPECT_EQ(task.evaluation().objects(), 1);
  // Cut at the picture's edges, what is found is the object exactly: an overlap of 1.
  EXPECT_EQ(static_cast<double>(results["recall"]), 1);
  EXPECT_NEAR(static_cast<double>(results["COCO_AP"]), 1, 1e-12);
}

// What the data set says stands in place of the batch's objects, which lack crowds and areas.
TEST(DetectionTask, TakesTheTruthFromTheDataSet) {
  data::DetectionData all;
  all.classes = {"a", "b"};
  all.pictures.push_back({.file = "none.png", .width = 64, .height = 64, .id = -1, .objects = {}});
  all.pictures[0].objects = {{.label = 0, .x = 0.5, .y = 0.5, .width = 0.5, .height = 0.5},
                             {.label = 1, .x = 0.5, .y = 0.5, .width = 1, .height = 1, .crowd = true}};
  const auto net = network();
  net->eval();
  DetectionTask task(net, {.evaluated = std::make_shared<data::DetectionDataset>(
                               all, data::DetectionTransform{.train = false, .size = 64})});
  task.begin_evaluation();
  const NoGrad no_grad;
  task.evaluate({.input = rand({1, 3, 64, 64}),
                 .target = tensor({0, 0.5, 0.5, 0.5, 0.5}, {1, 1, 5}),
                 .more = {tensor({0, 1, 0, 0, 64, 64}, {1, 6}, {.dtype = f64})}});
  EXPECT_EQ(task.evaluation().objects(), 2);
}

TEST(DetectionTask, RefusesWhatDoesNotFit) {
  EXPECT_THROW(DetectionTask(nullptr), Error);
  DetectionTask task(network());
  data::Batch b = batch();
  b.more.clear();
  const NoGrad no_grad;
  EXPECT_THROW(task.evaluate(b), ShapeError);
  EXPECT_NO_THROW(task.check_saved({{"box", 1}, {"labels", 3}}, 4, 0.5));
  EXPECT_THROW(task.check_saved({{"top1", 1}}, 4, {}), Error);
  EXPECT_THROW(task.check_saved({{"box", -1}}, 4, {}), Error);
  EXPECT_THROW(task.check_saved({}, 4, 1.5), Error);
}

// Weights say how many classes they are of: 3 anchors of 5 numbers and the classes.
TEST(DetectionTask, IsMadeByName) {
  EXPECT_EQ(training::classes_of("yolov5n", network(7)->state_dict()), 7);
  EXPECT_EQ(training::classes_of("yolov5n", {}), 80);
  training::TrainConfig config;
  config.model = "yolov5n";
  const auto task = training::random_task(config);
  const data::Batch b = training::random_batch("yolov5n", 2, 64);
  EXPECT_EQ(b.input.sizes(), (Shape{2, 3, 64, 64}));
  EXPECT_GT(task->loss(b).loss.item<float>(), 0);
}

}  // namespace
}  // namespace halfstep
