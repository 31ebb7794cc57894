// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_inference.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/integers.h"
#include "cli/options.h"
#include "cli/verbs.h"
#include "halfstep/core/random.h"
#include "halfstep/infer/session.h"
#include "halfstep/io/onnx.h"
#include "halfstep/runtime/machine.h"
#include "halfstep/runtime/queue.h"
#include "halfstep/train/device_memory.h"
#include "halfstep/train/quantize.h"
#include "halfstep/train/registry.h"
#include "halfstep/train/trace_step.h"

namespace halfstep::cli {
namespace {

struct SessionRun {
  std::string dtype;
  infer::Session session;
  bool weight_only = false;
  std::vector<double> ms = {};

  double call(const Tensor& input) {
    const auto start = std::chrono::steady_clock::now();
    const Tensor result = session(input);
    if (!input.device().is_cpu()) Queue::current(input.device()).synchronize();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }
};

DType session_dtype(const std::string& amp) {
  if (amp == "off") return f32;
  const std::optional<DType> dtype = parse_dtype(amp);
  if (dtype == bf16 || dtype == f16) return *dtype;
  throw UsageError(fmt::format("--amp: expected off, bf16 or f16 with --inference, got '{}'", amp));
}

nn::TracedForward traced(const training::Network& network) {
  return [&network](std::span<const Tensor> in) { return std::vector<Tensor>{network.forward(in[0])}; };
}

}  // namespace

int bench_inference(const InferenceBench& o) {
  std::vector<DType> dtypes;
  for (const std::string& amp : o.amp) dtypes.push_back(session_dtype(amp));
  if (o.int8 && !o.device.is_cpu()) {
    throw UsageError(fmt::format("{}: integers are computed on the CPU, got --device {}", kInt8Flag, o.device.str()));
  }
  training::TrainConfig config;
  config.model = o.model;
  config.images.image_size = o.image_size;
  training::RunData data;
  data.num_classes = training::network_kind(o.model).classes;
  manual_seed(0);
  const training::Network network = training::network_kind(o.model).make(config, data);
  if (!network.forward) throw UsageError(fmt::format("--inference: {} doesn't have one input and one result", o.model));
  manual_seed(1);
  const Tensor on_host = training::random_batch(o.model, o.batch_size, o.image_size).input;
  const Tensor input = on_host.contiguous(MemoryFormat::contiguous).to(o.device);
  const auto write = [&](const char* ending) {
    if (o.onnx_to.empty()) return;
    const Tensor example = on_host.narrow(0, 0, 1);
    io::export_onnx(o.onnx_to / (o.model + ending), *network.module, traced(network),
                    std::span<const Tensor>(&example, 1));
  };
  write(".onnx");
  network.module->to(o.device);
  std::vector<SessionRun> runs;
  for (const DType dtype : dtypes) {
    runs.push_back({.dtype = std::string(name(dtype)),
                    .session = infer::Session(*network.module, traced(network), {input}, {.dtype = dtype})});
  }
  if (o.weights) {
    manual_seed(0);
    const training::Network converted = training::network_kind(o.model).make(config, data);
    as_usage([&] { quant::quantize_weights(*converted.module, *o.weights); });
    converted.module->to(o.device);
    for (const DType dtype : dtypes) {
      runs.push_back({.dtype = std::string(name(dtype)),
                      .session = infer::Session(*converted.module, traced(converted), {input}, {.dtype = dtype}),
                      .weight_only = true});
    }
  }
  if (o.int8) {
    training::prepare_random_quantization(config, data, network);
    write("-int8.onnx");
    runs.push_back(
        {.dtype = "int8", .session = infer::Session(*network.module, traced(network), {input}, {.int8 = true})});
  }
  for (int s = 0; s < o.warmup + o.steps; ++s) {
    for (SessionRun& r : runs) {
      const double ms = r.call(input);
      if (s >= o.warmup) r.ms.push_back(ms);
    }
  }
  for (SessionRun& r : runs) {
    std::sort(r.ms.begin(), r.ms.end());
    const double median = r.ms[r.ms.size() / 2];
    nlohmann::ordered_json line = {{"model", o.model},
                                   {"batch", o.batch_size},
                                   {"dtype", r.dtype},
                                   {"mode", "inference"},
                                   {"image_size", o.image_size},
                                   {"device", o.device.str()},
                                   {"ms_median", median},
                                   {"ms_min", r.ms.front()},
                                   {"ms_max", r.ms.back()},
                                   {"samples_per_s", 1000 * static_cast<double>(o.batch_size) / median},
                                   {"peak_rss_mb", training::peak_rss_mb()},
                                   {"isa", machine().isa},
                                   {"cpu", machine().cpu},
                                   {"threads", machine().threads}};
    if (r.weight_only) {
      line["weight_bits"] = o.weights->bits;
      line["group_size"] = o.weights->group_size;
    }
    if (!o.device.is_cpu()) line["device_peak_mb"] = training::device_peak_mb(o.device);
    fmt::print("{}\n", line.dump());
  }
  return kDone;
}

}  // namespace halfstep::cli
