// SPDX-License-Identifier: Apache-2.0
// A network of text with its data and its task, which tasks_test.py puts beside the program as a library: all that is
// known of them is what they register.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/nn/embedding.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"
#include "halfstep/train/registry.h"

namespace {

using namespace halfstep;

// Of each text the next numbers of 0 1 2 ... 7 0 1 ...
class Counting final : public data::Dataset {
 public:
  std::int64_t size() const override { return 64; }
  data::Batch batch(const data::BatchRequest& request) const override {
    std::vector<std::int64_t> ids;
    for (const std::int64_t i : request.indices) {
      for (std::int64_t k = 0; k < 6; ++k) ids.push_back((i + k) % 8);
    }
    return {tensor(ids, {static_cast<std::int64_t>(request.indices.size()), 6}), {}};
  }
};

struct Bigram : nn::Module<Bigram> {
  Bigram() : table(child("table", nn::Embedding{{.num = 8, .dim = 8}})) {}
  Tensor forward(const Tensor& ids) const { return table(ids); }
  nn::Embedding table;
};

class NextNumber final : public training::Task {
 public:
  explicit NextNumber(std::shared_ptr<const Bigram> net) : net_(std::move(net)) {}
  const nn::ModuleBase& network() const override { return *net_; }
  training::TaskLoss loss(const data::Batch& batch) override {
    const Tensor logits = (*net_)(batch.input.narrow(1, 0, 5)).reshape({-1, 8});
    return {.loss = cross_entropy(logits, batch.input.narrow(1, 1, 5).reshape({-1}))};
  }
  void end_evaluation(training::MetricResults& results) override {
    results.set("perplexity", std::exp(static_cast<double>(results["loss"])));
  }
  std::string best_by() const override { return "perplexity"; }
  std::vector<std::string> predictions(const data::Batch& batch) override {
    const Tensor next = argmax((*net_)(batch.input.narrow(1, 5, 1)).reshape({-1, 8}), 1);
    std::vector<std::string> lines;
    for (const std::int64_t id : next.to_vector<std::int64_t>()) lines.push_back("then " + std::to_string(id));
    return lines;
  }

 private:
  std::shared_ptr<const Bigram> net_;
};

const bool registered = [] {
  training::register_data({.name = "counting",
                           .load =
                               [](const training::TrainConfig&, bool training) {
                                 training::RunData data;
                                 if (training) data.training = std::make_shared<Counting>();
                                 data.test = std::make_shared<Counting>();
                                 data.checksums = {{"train", "1"}, {"test", "1"}};
                                 return data;
                               },
                           .flags = "text",
                           .built_in = "numbers in order",
                           .lines = false,
                           .random =
                               [](const training::NetworkKind&, std::int64_t n, std::int64_t) {
                                 return data::Batch{zeros({n, 6}, {.dtype = i64}), {}};
                               }});
  training::register_network({.name = "bigram",
                              .task = "next-number",
                              .data = "counting",
                              .make =
                                  [](const training::TrainConfig&, const training::RunData&) {
                                    const auto net = std::make_shared<Bigram>();
                                    return training::Network{
                                        .module = net, .forward = [net](const Tensor& ids) { return (*net)(ids); }};
                                  },
                              .image_size = 6});
  training::register_task(
      {.name = "next-number",
       .make = [](const training::TrainConfig&, const training::RunData&, const training::Network& network) {
         return std::make_shared<NextNumber>(network.as<Bigram>());
       }});
  return true;
}();

}  // namespace
