// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/fold.h"

#include <cmath>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/core/fail.h"
#include "halfstep/nn/fold_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/observer.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/view.h"

namespace halfstep::nn {
namespace detail {

// In float64, so that the new weights are rounded once.
NormFactors norm_factors(const ConstantNorm& norm, const Tensor& bias) {
  const NoGrad no_grad;
  const auto wide = [](const Tensor& t) { return t.to(f64); };
  Tensor factor = rsqrt(wide(norm.running_var) + norm.eps);
  if (norm.weight.defined()) factor = factor * wide(norm.weight);
  Tensor shift = neg(wide(norm.running_mean));
  if (bias.defined()) shift = shift + wide(bias);
  shift = shift * factor;
  if (norm.bias.defined()) shift = shift + wide(norm.bias);
  return {factor, shift};
}

FoldedWeights folded_weights(const Tensor& weight, const Tensor& bias, const ConstantNorm& norm) {
  const NoGrad no_grad;
  const auto [factor, shift] = norm_factors(norm, bias);
  Shape per_output = Shape::filled(weight.dim(), 1);
  per_output[0] = weight.size(0);
  return {(weight.to(f64) * factor.view(per_output)).to(weight.dtype()), shift.to(weight.dtype())};
}

}  // namespace detail

namespace {

void check_pair(const ConvBase& conv, const BatchNormBase& norm) {
  if (!norm.running_mean.defined()) {
    fail<Error>("fuse_conv_bn_eval: expected a batch norm with running statistics, got one without");
  }
  if (conv.options.out != norm.options.channels) {
    fail<Error>("fuse_conv_bn_eval: expected a batch norm of the convolution's {} channels, got one of {}",
                conv.options.out, norm.options.channels);
  }
}

void fold_into(ConvBase& conv, const BatchNormBase& norm) {
  const bool trained = conv.weight.requires_grad();
  const detail::FoldedWeights folded = detail::folded_weights(conv.weight, conv.bias,
                                                              {.weight = norm.weight,
                                                               .bias = norm.bias,
                                                               .running_mean = norm.running_mean,
                                                               .running_var = norm.running_var,
                                                               .eps = norm.options.eps});
  conv.weight = folded.weight.detach().requires_grad_(trained);
  conv.bias = folded.bias.detach().requires_grad_(trained);
  conv.options.bias = true;
}

template <class Conv, class Norm>
Conv fused(const Conv& conv, const Norm& norm) {
  check_pair(conv, norm);
  Conv result = clone(conv);
  fold_into(result, norm);
  return result;
}

// Which norm reads which convolution's result.
class Reads final : public OpObserver {
 public:
  explicit Reads(const ModuleBase& module) {
    module.apply([&](const std::string&, const ModuleBase& m) {
      if (const auto* conv = dynamic_cast<const ConvBase*>(&m)) add(convs_, conv->weight, conv);
      const auto* norm = dynamic_cast<const BatchNormBase*>(&m);
      if (norm && norm->running_mean.defined()) add(norms_, norm->running_mean, norm);
    });
  }

  struct Norm {
    int calls = 0;
    const ConvBase* conv = nullptr;  // whose result it reads
  };
  struct Conv {
    int calls = 0, readers = 0;
    Tensor result = {};  // kept, so that no other takes its memory
  };
  // Of a norm or convolution that shares its tensors, or was not called: none.
  std::map<const BatchNormBase*, Norm> norms;
  std::map<const ConvBase*, Conv> convs;

  void after_call(const ObservedCall& call) override {
    if (std::this_thread::get_id() != thread_) return;
    const std::string_view op = call.name;
    // What goes on in a convolution's own call: images of one dimension are views of those of two.
    const bool view = call.path == ExecutionPath::view;
    for (std::size_t i = 0; i < call.inputs.size(); ++i) {
      if (!call.inputs[i]->defined()) continue;
      const auto made = results_.find(call.inputs[i]->storage().get());
      if (made == results_.end() || view) continue;
      Conv& conv = convs[made->second];
      ++conv.readers;
      const auto* norm = op == "batch_norm" && i == 0 ? find(norms_, call.inputs, 3) : nullptr;
      if (norm && has_channels_of(*call.inputs[0], conv.result)) norms[norm].conv = made->second;
    }
    if (op == "batch_norm" && call.op) {
      if (const auto* norm = find(norms_, call.inputs, 3)) ++norms[norm].calls;
    }
    if (op != "conv2d") return;
    const auto* conv = find(convs_, call.inputs, 1);
    if (!conv) return;
    Conv& seen = convs[conv];
    ++seen.calls;
    seen.result = *call.outputs[0];
    results_[seen.result.storage().get()] = conv;
  }

 private:
  // A sequence's convolution is that of an image one pixel high: its result is a view.
  static bool has_channels_of(const Tensor& read, const Tensor& made) {
    return read.numel() == made.numel() && read.size(1) == made.size(1) && read.strides()[1] == made.strides()[1];
  }
  template <class M>
  using ByStorage = std::unordered_map<const Storage*, const M*>;
  template <class M>
  static void add(ByStorage<M>& to, const Tensor& t, const M* module) {
    const auto [at, fresh] = to.emplace(t.storage().get(), module);
    if (!fresh) at->second = nullptr;  // shared: neither can be changed alone
  }
  template <class M>
  static const M* find(const ByStorage<M>& in, std::span<const Tensor* const> inputs, std::size_t i) {
    if (i >= inputs.size() || !inputs[i]->defined()) return nullptr;
    const auto at = in.find(inputs[i]->storage().get());
    return at == in.end() ? nullptr : at->second;
  }

  std::thread::id thread_ = std::this_thread::get_id();
  ByStorage<ConvBase> convs_;
  ByStorage<BatchNormBase> norms_;
  std::unordered_map<const Storage*, const ConvBase*> results_;
};

// Why a norm can't be folded; empty where it can.
std::string reason(const BatchNormBase& norm, Reads& seen) {
  if (!norm.running_mean.defined()) return "has no running statistics";
  const auto found = seen.norms.find(&norm);
  if (found == seen.norms.end() || found->second.calls == 0) return "was not called, or shares its tensors";
  if (found->second.calls > 1) return "is called more than once";
  if (!found->second.conv) return "reads no convolution's result";
  const Reads::Conv& conv = seen.convs[found->second.conv];
  if (conv.calls > 1) return "its convolution is called more than once";
  if (conv.readers > 1) return "its convolution's result is read elsewhere, too";
  return "";
}

}  // namespace

Conv1d fuse_conv_bn_eval(const Conv1d& conv, const BatchNorm1d& norm) { return fused(conv, norm); }
Conv2d fuse_conv_bn_eval(const Conv2d& conv, const BatchNorm2d& norm) { return fused(conv, norm); }

FoldReport fold_batch_norms(ModuleBase& module, const std::function<void()>& forward) {
  module.eval();
  Reads seen(module);
  {
    const NoGrad no_grad;
    const AutocastOff autocast_off;
    const Observing observing(&seen);
    forward();
  }
  FoldReport report;
  module.apply([&](const std::string& path, const ModuleBase& m) {
    const auto* norm = dynamic_cast<const BatchNormBase*>(&m);
    if (!norm || norm->is_folded()) return;
    if (const std::string why = reason(*norm, seen); !why.empty()) {
      report.left.push_back(fmt::format("{}: {}", path, why));
      return;
    }
    // Both are parts of `module`, which the caller may change.
    fold_into(const_cast<ConvBase&>(*seen.norms[norm].conv), *norm);
    const_cast<BatchNormBase&>(*norm).set_folded();
    report.folded.push_back(path);
  });
  return report;
}

}  // namespace halfstep::nn
