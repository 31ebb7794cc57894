// SPDX-License-Identifier: Apache-2.0
// Observers: modules that see the values of a tensor step by step and find the range that its integers are to cover.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "halfstep/nn/module.h"
#include "halfstep/ops/quantize.h"

namespace halfstep::quant {

class Pending;

/// How an observer finds a range.
enum class ObserverKind : std::uint8_t {
  min_max,         ///< the least and the largest value seen; PyTorch's MinMaxObserver, PerChannelMinMaxObserver
  moving_average,  ///< their moving averages; PyTorch's MovingAverageMinMaxObserver, ...PerChannelMinMaxObserver
  histogram,       ///< the range of least squared error of a histogram; PyTorch's HistogramObserver
  percentile,      ///< a share of a histogram's values
  entropy,         ///< the range whose quantized histogram diverges least from the whole one (TensorRT's calibration)
};
/// `min_max`, `moving_average`, `histogram`, `percentile`, `entropy`.
HS_API const char* name(ObserverKind kind);
/// The kind of that name, or none.
HS_API std::optional<ObserverKind> parse_observer_kind(std::string_view text);

/// Options of Observer.
struct ObserverOptions {
  ObserverKind kind = ObserverKind::moving_average;
  std::int64_t quant_min = 0;  ///< of the integers
  std::int64_t quant_max = 255;
  bool symmetric = false;                 ///< see quantization_parameters
  std::optional<std::int64_t> axis = {};  ///< of channels with a range each (min_max and moving_average only)
  std::int64_t channels = 0;              ///< how many there are; with an axis
  double averaging_constant = 0.01;       ///< of moving_average: weight of the newest range
  double eps = 1.1920928955078125e-07;    ///< the smallest scale
  std::int64_t bins = 2048;               ///< of a histogram
  double percentile = 99.99;              ///< share of the values that the range holds, in percent, above 0 to 100
};

/// Sees tensors and finds their range. Buffers, with PyTorch's names: `eps`, `histogram` (of kinds that have one),
/// `min_val` and `max_val` (f32; infinity and minus infinity until something was seen; 0-d, or [channels]).
///
/// min_max and moving_average read each tensor once, on its device, and nothing is read by the host. Kinds with a
/// histogram are for calibration: they compute on the host, waiting for the device.
///
/// What a step sees is in the buffers at once, as in PyTorch, and pending until commit(): where the step was skipped
/// because of an overflow, the device drops it. Elements that are infinite or NaN are never seen, so that they spoil no
/// range. entropy does not count zeros, which every grid holds exactly.
class HS_API Observer : public nn::Module<Observer> {
 public:
  /// Throws Error for options that don't go together.
  explicit Observer(const ObserverOptions& options = {});
  /// Sees the input, without a gradient, and returns it. Throws ShapeError when it doesn't have the channels.
  Tensor forward(const Tensor& input) const;
  /// Scale and zero point of the range seen so far: 1 and 0 before anything was. The same bits as PyTorch's.
  QuantizationParameters calculate_qparams() const;
  /// What was seen since the last call counts from now on, or, where `found_inf` (f32 or bool of one element on the
  /// buffers' device; undefined: 0) isn't 0, is forgotten. The device decides; the host doesn't wait.
  void commit(const Tensor& found_inf = {}) const;
  /// Forgets all that was seen, as PyTorch's method of that name.
  void reset_min_max_vals() const;
  /// PyTorch's name of the class, where it has one.
  std::string kind() const override;
  std::string describe() const override;
  void unshare() override;
  ObserverOptions options;
  nn::Buffer eps;
  nn::Buffer histogram;
  nn::Buffer min_val;
  nn::Buffer max_val;

 private:
  bool has_histogram() const;
  void see_on_host(const Tensor& input) const;
  std::shared_ptr<Pending> pending_;
};

}  // namespace halfstep::quant
