// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/onnx.h"

#include <algorithm>
#include <cstring>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/core/write_internal.h"
#include "halfstep/io/onnx_internal.h"
#include "halfstep/ops/index.h"

namespace halfstep::io {
namespace {

using detail::OnnxGraph;

// `n` samples, from the first again where there are fewer. Copied on the CPU, since devices may have no index_select.
Tensor samples(const Tensor& example, std::int64_t n) {
  Tensor rows = empty({n}, {.dtype = DType::i64, .device = Device{}});
  std::int64_t* row = write_data<std::int64_t>(rows);
  for (std::int64_t i = 0; i < n; ++i) row[i] = i % example.sizes()[0];
  return index_select(example.to(Device{}), 0, rows).to(example.device());
}

void check(std::span<const Tensor> inputs, const OnnxOptions& o) {
  if (o.opset < 17 || o.opset > 21) fail<Error>("export_onnx: expected an opset from 17 to 21, got {}", o.opset);
  if (o.dtype != DType::f32 && o.dtype != DType::f16) {
    fail<DTypeError>("export_onnx: expected dtype f32 or f16, got {}; ONNX's convolution has no other", name(o.dtype));
  }
  if (inputs.empty()) fail<Error>("export_onnx: expected at least one input, got none");
  for (const Tensor& t : inputs) {
    if (!t.defined()) fail<Error>("export_onnx: expected defined inputs, got an undefined one");
    if (t.numel() == 0) fail<ShapeError>("export_onnx: expected inputs with elements, got {}", t.sizes().str());
    if (!o.dynamic_batch) continue;
    if (t.dim() == 0 || inputs[0].dim() == 0 || t.sizes()[0] != inputs[0].sizes()[0]) {
      fail<ShapeError>("export_onnx: expected inputs with the batch in dimension 0, got {} and {}",
                       inputs[0].sizes().str(), t.sizes().str());
    }
  }
}

[[noreturn]] void differ(const nn::TracedCall& call, const char* what) {
  fail<Error>("export_onnx: {}: {} follows the batch; export with a fixed batch", call.place(), what);
}

// Two runs must have called the same on the same.
void compare(const nn::Trace& a, const nn::Trace& b) {
  for (std::size_t i = 0; i < std::min(a.calls.size(), b.calls.size()); ++i) {
    const nn::TracedCall &x = a.calls[i], &y = b.calls[i];
    if (x.op != y.op || x.module != y.module || x.inputs != y.inputs || x.outputs != y.outputs) {
      differ(x, "what the network calls");
    }
  }
  if (a.calls.size() != b.calls.size() || a.values.size() != b.values.size() || a.outputs != b.outputs) {
    fail<Error>("export_onnx: what the network calls follows the batch; export with a fixed batch");
  }
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.impl()->data() == b.impl()->data() ||
         std::memcmp(a.impl()->data(), b.impl()->data(), static_cast<std::size_t>(a.numel()) * a.item_size()) == 0;
}

// ... and it must come to the same graph: attributes and constants as well.
void compare(const OnnxGraph& a, const OnnxGraph& b) {
  const auto refuse = [](const std::string& what) {
    fail<Error>("export_onnx: {} follows the batch; export with a fixed batch", what);
  };
  for (std::size_t i = 0; i < std::min(a.nodes.size(), b.nodes.size()); ++i) {
    if (!(a.nodes[i] == b.nodes[i])) refuse(a.nodes[i].name);
  }
  if (a.nodes.size() != b.nodes.size() || a.initializers.size() != b.initializers.size()) refuse("the graph");
  for (std::size_t i = 0; i < a.initializers.size(); ++i) {
    const auto &x = a.initializers[i], &y = b.initializers[i];
    if (x.name != y.name || x.type != y.type || x.dims != y.dims || !same_bytes(x.tensor, y.tensor)) {
      const auto reads = [&](const detail::OnnxNode& n) {
        return std::find(n.inputs.begin(), n.inputs.end(), x.name) != n.inputs.end();
      };
      const auto reader = std::find_if(a.nodes.begin(), a.nodes.end(), reads);
      refuse(reader == a.nodes.end() ? x.name : fmt::format("a constant of {}", reader->name));
    }
  }
}

struct Run {
  nn::Trace trace;
  std::vector<quant::TracedGrid> grids = {};
};
// Scales are float32, and what they are of.
void check_dtype(const detail::OnnxGrids& grids, const OnnxOptions& o) {
  if (grids.empty() || o.dtype == DType::f32) return;
  fail<DTypeError>("export_onnx: expected dtype f32 for a quantized network, got {}", name(o.dtype));
}

Run traced(const nn::ModuleBase& module, const OnnxForward& forward, std::vector<Tensor> inputs) {
  if (!quant::quantization_of(module)) return {.trace = nn::trace(module, forward, std::move(inputs), "export_onnx")};
  quant::QuantizedTrace run = quant::trace_quantized(module, forward, std::move(inputs), "export_onnx");
  return {.trace = std::move(run.trace), .grids = std::move(run.grids)};
}

}  // namespace

OnnxSummary export_onnx(const std::filesystem::path& path, const nn::ModuleBase& module, const OnnxForward& forward,
                        std::span<const Tensor> inputs, const OnnxOptions& given) {
  check(inputs, given);
  OnnxOptions options = given;
  if (given.nms) {
    detail::check_nms(*given.nms);
    if (given.output_names.size() > 1) {
      fail<Error>("export_onnx: nms: expected one name of an output, got {}", given.output_names.size());
    }
    options.output_names = {};  // of what comes before it
  }
  const NoGrad no_grad;
  const AutocastOff autocast_off;
  std::vector<Tensor> first, second;
  for (const Tensor& t : inputs) {
    first.push_back(options.dynamic_batch ? samples(t, 2) : t.clone());
    if (options.dynamic_batch) second.push_back(samples(t, 3));
  }
  Run run = traced(module, forward, std::move(first));
  OnnxGraph graph;
  if (options.dynamic_batch) {
    Run other = traced(module, forward, std::move(second));
    compare(run.trace, other.trace);
    const detail::OnnxGrids grids = detail::take_grids(run.trace, run.grids);
    check_dtype(grids, options);
    const detail::OnnxGrids other_grids = detail::take_grids(other.trace, other.grids);
    graph = detail::OnnxBuilder(run.trace, &other.trace, grids, options).build();
    compare(graph, detail::OnnxBuilder(other.trace, &run.trace, other_grids, options).build());
  } else {
    const detail::OnnxGrids grids = detail::take_grids(run.trace, run.grids);
    check_dtype(grids, options);
    graph = detail::OnnxBuilder(run.trace, nullptr, grids, options).build();
  }
  if (given.nms) {
    detail::add_nms(graph, *given.nms, given.output_names.empty() ? "detections" : given.output_names[0]);
  }
  graph.name = module.kind();
  OnnxSummary summary{.nodes = static_cast<std::int64_t>(graph.nodes.size()),
                      .initializers = static_cast<std::int64_t>(graph.initializers.size())};
  for (const auto& t : graph.initializers) {
    std::int64_t elements = 1;
    for (const std::int64_t n : t.dims) elements *= n;
    summary.elements += elements;
  }
  summary.bytes = detail::write_onnx(path, graph, options.opset);
  return summary;
}

std::vector<std::string> onnx_ops() {
  std::vector<std::string> names;
  for (const auto& [name, translator] : detail::onnx_translators()) names.emplace_back(name);
  return names;
}

}  // namespace halfstep::io
