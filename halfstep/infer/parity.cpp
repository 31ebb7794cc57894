// SPDX-License-Identifier: Apache-2.0
#include "halfstep/infer/parity.h"

#include <algorithm>
#include <cmath>

#include "halfstep/core/fail.h"
#include "halfstep/infer/quiet_thread_internal.h"
#include "halfstep/infer/sites_internal.h"

namespace halfstep::infer {
namespace {

// Steps between elements: integers, or multiples of `step`.
Differences differences(const Tensor& got, const Tensor& expected, double step) {
  const std::vector<double> a = got.to_vector<double>(), b = expected.to_vector<double>();
  if (a.size() != b.size()) {
    fail<InternalError>("compare_layers: {} elements and {} of one layer", a.size(), b.size());
  }
  Differences result;
  std::int64_t one = 0, more = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double off = a[i] == b[i] ? 0 : std::abs(a[i] - b[i]) / step;
    result.most = std::max(result.most, std::isnan(off) ? INFINITY : off);
    if (!(off <= 1)) {
      ++more;
    } else if (off > 0.5) {
      ++one;  // floating results are off by parts of a step, too
    }
  }
  const auto n = static_cast<double>(std::max<std::size_t>(a.size(), 1));
  result.by_one = static_cast<double>(one) / n;
  result.by_more = static_cast<double>(more) / n;
  return result;
}

double span_of(const Tensor& t) {
  const std::vector<double> values = t.to_vector<double>();
  if (values.empty()) return 1;
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return *most > *least ? *most - *least : 1;
}

}  // namespace

std::vector<LayerParity> compare_layers(const nn::ModuleBase& network, const nn::TracedForward& forward,
                                        std::vector<Tensor> inputs) {
  const detail::QuantizedSource quantized =
      detail::make_quantized_source("compare_layers", network, forward, inputs, false);
  const detail::Graph fake = detail::fake_graph(quantized), converted = detail::int8_graph(quantized);
  const detail::QuietThread quiet({});
  // What fake quantization computes, by the trace's value. A value that is quantized comes a second time, as that.
  std::vector<Tensor> expected(quantized.source.trace.values.size());
  const auto remember = [&](const detail::Graph& graph, int value, const Tensor& tensor) {
    const int traced = graph.values[static_cast<std::size_t>(value)].traced;
    if (traced >= 0) expected[static_cast<std::size_t>(traced)] = tensor.clone();
  };
  for (std::size_t i = 0; i < inputs.size(); ++i) remember(fake, fake.inputs[i], inputs[i]);
  for (const detail::Value& value : fake.values) {
    if (value.constant.defined() && value.traced >= 0) {
      expected[static_cast<std::size_t>(value.traced)] = value.constant;
    }
  }
  detail::run_graph(fake, inputs, [&](const detail::Node& node, std::span<const Tensor> results) {
    for (std::size_t i = 0; i < results.size(); ++i) remember(fake, node.outputs[i], results[i]);
  });

  // A value of the converted network as fake quantization has it.
  const auto as_fake = [&](int v) -> Tensor {
    if (v < 0) return {};
    const detail::Value& value = converted.values[static_cast<std::size_t>(v)];
    if (value.traced < 0) return value.constant;
    const Tensor& known = expected[static_cast<std::size_t>(value.traced)];
    return value.grid ? detail::to_grid(known, *value.grid) : known;
  };
  std::vector<LayerParity> layers;
  const std::int64_t samples = inputs[0].dim() == 0 ? 1 : inputs[0].sizes()[0];
  detail::run_graph(converted, inputs, [&](const detail::Node& node, std::span<const Tensor> results) {
    if (node.layer.empty()) return;
    const int v = node.outputs[0];
    const Tensor reference = as_fake(v);
    const bool floating = !converted.values[static_cast<std::size_t>(v)].grid;
    const double step = floating ? span_of(reference) / 255 : 1;
    std::vector<Tensor> given;
    for (const int i : node.inputs) given.push_back(as_fake(i));
    layers.push_back({.name = node.layer,
                      .module = node.module,
                      .call = node.name,
                      .elements = reference.numel(),
                      .floating = floating,
                      .chain = differences(results[0], reference, step),
                      .alone = differences(detail::run_node(node, given, samples)[0], reference, step)});
  });
  std::stable_sort(layers.begin(), layers.end(), [](const LayerParity& a, const LayerParity& b) {
    return a.chain.by_more != b.chain.by_more ? a.chain.by_more > b.chain.by_more : a.chain.by_one > b.chain.by_one;
  });
  return layers;
}

}  // namespace halfstep::infer
