// SPDX-License-Identifier: Apache-2.0
// The network that training saw: calls as they are, with fake quantization where it stands.
#include "halfstep/autograd/grad_mode.h"
#include "halfstep/infer/sites_internal.h"

namespace halfstep::infer::detail {

Graph fake_graph(const QuantizedSource& quantized) {
  const NoGrad no_grad;
  GraphMaker maker(quantized.source);
  const auto add_fake = [&](const Site& site, int from, const std::string& module, int traced) {
    return maker.add_function(
        "fake_quantize", module, [site](std::span<const Tensor> in) { return std::vector<Tensor>{site.fake(in[0])}; },
        {from}, traced);
  };
  for (int c = 0; c < maker.calls(); ++c) {
    if (maker.is_constant_call(c)) continue;
    const nn::TracedCall& call = maker.call(c);
    if (is_grid_call(call)) {
      const int from = maker.value(call.inputs[0], call);
      maker.set_value(call.outputs[0], add_fake(*quantized.sites.find(c, -1), from, call.module, call.outputs[0]));
      continue;
    }
    std::vector<int> inputs;
    for (std::size_t i = 0; i < call.inputs.size(); ++i) {
      const int v = call.inputs[i];
      const Site* site = quantized.sites.find(c, static_cast<int>(i));
      int value = maker.value(v, call);
      // As a value of its own: others read what isn't quantized.
      if (site) value = add_fake(*site, value, call.module, -1);
      inputs.push_back(value);
    }
    maker.add_call(c, std::move(inputs));
    if (const Site* site = quantized.sites.find(c, -1)) {
      const int v = call.outputs[0];
      maker.set_value(v, add_fake(*site, maker.known_value(v), call.module, v));
    }
  }
  return maker.finish();
}

}  // namespace halfstep::infer::detail
