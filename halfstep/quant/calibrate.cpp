// SPDX-License-Identifier: Apache-2.0
#include "halfstep/quant/calibrate.h"

#include <utility>
#include <vector>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/error.h"
#include "halfstep/quant/fake_quantize.h"
#include "halfstep/quant/quantization.h"

namespace halfstep::quant {
namespace {

// Observing without rounding, as long as it lives.
class Observing {
 public:
  explicit Observing(const Quantization& quantization) : quantization_(quantization) {
    for (const QuantizedTensor& t : quantization.tensors()) {
      bool& in_eval = quantization.at(t.name).options.observe_in_eval;
      before_.emplace_back(&in_eval, in_eval);
      in_eval = true;
    }
    enable_fake_quant(quantization, false);
    enable_observer(quantization, true);
  }
  ~Observing() {
    enable_observer(quantization_, false);
    enable_fake_quant(quantization_, true);
    for (const auto& [in_eval, was] : before_) *in_eval = was;
  }
  Observing(const Observing&) = delete;
  Observing& operator=(const Observing&) = delete;

 private:
  const Quantization& quantization_;
  std::vector<std::pair<bool*, bool>> before_;
};

}  // namespace

void calibrate(const nn::ModuleBase& network, const std::function<bool()>& next) {
  const std::shared_ptr<Quantization> quantization = quantization_of(network);
  if (!quantization) throw Error("calibrate: expected a prepared network (quant::prepare), got one that isn't");
  const NoGrad no_grad;
  const nn::EvalMode evaluation(network);
  const Observing observing(*quantization);
  for (bool more = true; more;) {
    more = next();
    commit(*quantization);
  }
}

}  // namespace halfstep::quant
