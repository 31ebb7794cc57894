// SPDX-License-Identifier: Apache-2.0
// Calls of sessions in float32, bf16 and 8-bit integers, of networks with random weights, as `halfstep bench
// --inference` makes them.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "benchmarks/server/layers.h"
#include "benchmarks/server/server.h"
#include "halfstep/core/random.h"
#include "halfstep/infer/session.h"
#include "halfstep/io/onnx.h"
#include "halfstep/train/quantize.h"
#include "halfstep/train/registry.h"
#include "halfstep/train/trace_step.h"

namespace halfstep::bench {

namespace {

struct Timed {
  std::string name;
  std::int64_t size;
  double operations;  // of a picture
};

const std::vector<Timed>& networks() {
  static const std::vector<Timed> all = {
      {"resnet50", 224, forward_operations(resnet50_convolutions(), 2048, 1000)},
      {"yolov5n", 640, kYolov5nOperations},
  };
  return all;
}

struct Made {
  training::TrainConfig config;
  training::RunData data;
  training::Network network;

  explicit Made(const Timed& t) {
    manual_seed(1);
    config.model = t.name;
    config.images.image_size = t.size;
    data.num_classes = training::network_kind(t.name).classes;
    network = training::network_kind(t.name).make(config, data);
  }
  void quantize() { training::prepare_random_quantization(config, data, network); }
  Tensor pictures(std::int64_t batch) const {
    return training::random_batch(config.model, batch, config.images.image_size)
        .input.contiguous(MemoryFormat::contiguous);
  }
  nn::TracedForward forward() const {
    return [this](std::span<const Tensor> in) { return std::vector<Tensor>{network.forward(in[0])}; };
  }
  void write(const std::filesystem::path& file) const {
    const Tensor example = pictures(1);
    io::export_onnx(file, *network.module, forward(), std::span<const Tensor>(&example, 1));
  }
};

Prepared prepare(const Timed& t, const std::string& dtype, std::int64_t batch) {
  const auto made = std::make_shared<Made>(t);
  const bool int8 = dtype == "int8";
  if (int8) made->quantize();
  const Tensor input = made->pictures(batch);
  infer::SessionOptions options{.int8 = int8};
  if (dtype == "bf16") options.dtype = bf16;
  const auto session =
      std::make_shared<infer::Session>(*made->network.module, made->forward(), std::vector{input}, options);
  return {[made, session, input] { (void)(*session)(input); }, 1,
          [batch] {
            return std::map<std::string, double>{{"images", static_cast<double>(batch)}};
          }};
}

}  // namespace

void add_inference_cases(std::vector<Case>& cases) {
  for (const Timed& t : networks()) {
    for (const char* dtype : {"f32", "bf16", "int8"}) {
      for (const std::int64_t batch : {1, 32}) {
        cases.push_back({fmt::format("inference/{}/{}/b{}", t.name, dtype, batch),
                         [&t, dtype, batch] { return prepare(t, dtype, batch); },
                         t.operations * static_cast<double>(batch)});
      }
    }
  }
}

void write_onnx_files(const std::filesystem::path& folder) {
  for (const Timed& t : networks()) {
    Made made(t);
    made.write(folder / (t.name + "-f32.onnx"));
    made.quantize();
    made.write(folder / (t.name + "-int8.onnx"));
  }
}

}  // namespace halfstep::bench
