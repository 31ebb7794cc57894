// SPDX-License-Identifier: Apache-2.0
// Fake quantization as a module, with the range of its integers observed or learned; and the switches of a whole
// network.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "halfstep/nn/module.h"
#include "halfstep/quant/observer.h"

namespace halfstep::quant {

/// Where a scale comes from.
enum class ScaleSource : std::uint8_t {
  observed,  ///< from the range that an observer sees
  learned,   ///< a parameter (LSQ, Esser et al. 2019; with a learned zero point LSQ+)
  clipped,   ///< from the learned bound of the values (PACT, Choi et al. 2018)
};
/// `observed`, `learned`, `clipped`.
HS_API const char* name(ScaleSource source);

/// Options of FakeQuantize.
struct FakeQuantizeOptions {
  int bits = 8;               ///< 2 to 8, or 16
  bool is_signed = false;     ///< integers around 0; else from 0 on
  bool symmetric = false;     ///< see quantization_parameters
  bool narrow_range = false;  ///< without the least integer: -127 to 127
  bool reduce_range = false;  ///< with one bit less, so that sums of products fit 16 bits on CPUs without VNNI
  std::optional<std::int64_t> axis = {};  ///< of channels with a scale each
  std::int64_t channels = 0;              ///< how many there are; with an axis
  ScaleSource source = ScaleSource::observed;
  ObserverKind observer = ObserverKind::moving_average;
  double averaging_constant = 0.01;     ///< of a moving average: weight of the newest range
  double percentile = 99.99;            ///< of a percentile observer
  std::int64_t bins = 2048;             ///< of observers with a histogram
  double eps = 1.1920928955078125e-07;  ///< the smallest scale
  bool observe_in_eval = false;         ///< observe in evaluation mode too, as PyTorch does: for calibration
  bool scale_gradient = true;           ///< learned: multiply the scale's gradient by lsq_grad_factor
  std::int64_t gradient_elements = 0;   ///< the n of lsq_grad_factor; 0: the input's elements, as in PyTorch
  double alpha = 6;                     ///< clipped: where the bound starts
};
/// Those of a weight [channels, ...]: signed, symmetric, a scale for each output channel from its newest values.
HS_API FakeQuantizeOptions weight_options(std::int64_t channels, int bits = 8);
/// Those of an activation: unsigned and affine, one scale from a moving average.
HS_API FakeQuantizeOptions activation_options(int bits = 8);

/// fake_quantize() of its input, with a scale that follows it. A handle's switches are shared with its copies.
///
/// Tensors, with PyTorch's names: buffers `fake_quant_enabled` and `observer_enabled` (u8 [1]), `scale` (f32) and
/// `zero_point` (i32) of [1] or [channels], and the observer's below `activation_post_process`. With a learned source
/// `scale` is a parameter, and `zero_point` too (f32) unless symmetric or unsigned from 0; with a clipped one there is
/// a parameter `alpha` [1].
///
/// Observed: while the observer is enabled and the module trains, the input is observed, and scale and zero point
/// follow, before it is quantized; PyTorch's module does so in evaluation, too (`observe_in_eval`). An observer with a
/// histogram is searched when its result is used: in quantized forward passes, and when it is disabled. What a step
/// changed is pending until commit(), or until the observer is disabled. Forward passes that checkpoint() repeats in a
/// backward pass don't observe.
///
/// Learned: `scale` is 1, which the first input makes 2 mean|x| / sqrt(quant_max) of itself unless another one was
/// loaded, and is trained; the observer is disabled, and while it is enabled, scale and zero point follow it instead.
///
/// Clipped: the input is clipped to 0 to `alpha` and the scale is alpha / quant_max; the bound's gradient is that of
/// pact(). Weight decay on `alpha` is the paper's regularization.
class HS_API FakeQuantize : public nn::Module<FakeQuantize> {
 public:
  /// Throws Error for options that don't go together.
  explicit FakeQuantize(const FakeQuantizeOptions& options = {});
  /// The input in its dtype (the region's under autocast), on the grid if fake quantization is enabled. Throws
  /// ShapeError when it doesn't have the channels.
  Tensor forward(const Tensor& input) const;
  /// As PyTorch's methods. A captured step is recorded again after a change.
  void enable_fake_quant(bool on = true) const;
  void enable_observer(bool on = true) const;
  void disable_fake_quant() const { enable_fake_quant(false); }
  void disable_observer() const { enable_observer(false); }
  /// The switches. Reads the buffers only after they were loaded.
  bool is_fake_quant_enabled() const;
  bool is_observer_enabled() const;
  /// The observer's scale and zero point.
  QuantizationParameters calculate_qparams() const { return activation_post_process.calculate_qparams(); }
  /// What was observed since the last call counts from now on, or, where `found_inf` (f32 or bool of one element;
  /// undefined: 0) isn't 0, ranges, scale and zero point become what they were. The device decides; the host doesn't
  /// wait.
  void commit(const Tensor& found_inf = {}) const;
  /// The least and the largest integer.
  std::int64_t quant_min() const { return quant_min_; }
  std::int64_t quant_max() const { return quant_max_; }
  std::string kind() const override { return "FakeQuantize"; }
  /// `8 bits, 0 to 255, moving_average`
  std::string describe() const override;
  void unshare() override;
  FakeQuantizeOptions options;
  nn::Buffer fake_quant_enabled;
  nn::Buffer observer_enabled;
  nn::Parameter scale;
  nn::Parameter zero_point;
  nn::Parameter alpha;
  Observer activation_post_process;

 private:
  struct State;
  bool has_zero_point_parameter() const;
  Tensor grid_scale(const Tensor& input) const;
  void follow_observer() const;
  void start_scale(const Tensor& input) const;
  std::int64_t quant_min_ = 0, quant_max_ = 0;
  std::shared_ptr<State> state_;
};

/// Turns all fake quantizations in `module` on or off, itself included. torch.ao.quantization.enable_fake_quant.
HS_API void enable_fake_quant(const nn::ModuleBase& module, bool on = true);
/// Turns their observers on or off. torch.ao.quantization.enable_observer, disable_observer.
HS_API void enable_observer(const nn::ModuleBase& module, bool on = true);
/// Commits what all fake quantizations and observers in `module` have seen: at the end of a step,
/// `quant::commit(net, scaler.step(optimizer).found_inf())`. Steps that don't commit keep what they see pending.
HS_API void commit(const nn::ModuleBase& module, const Tensor& found_inf = {});

}  // namespace halfstep::quant
