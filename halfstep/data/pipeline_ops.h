// SPDX-License-Identifier: Apache-2.0
// The operations of a pipeline on a column of its samples: MindSpore's Rescale, Normalize, HWC2CHW and TypeCast, and
// functions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"
#include "halfstep/core/shape.h"
#include "halfstep/core/tensor.h"
#include "halfstep/data/dataset.h"
#include "halfstep/data/transforms.h"

namespace halfstep::data {

/// The type of one column of a sample.
struct ColumnType {
  Shape sizes;                     ///< of one sample, without the dimension of the batch
  DType dtype = f32;               ///< of its elements
  HS_API std::string str() const;  ///< `u8 [28, 28, 1]`
  friend bool operator==(const ColumnType&, const ColumnType&) = default;
};

/// x becomes x * scale + shift, computed in float64 and rounded once to float32 (float64 stays float64).
/// `Rescale{1.0 / 255}` maps pixels to 0 to 1, `Rescale{1 / 127.5, -1}` to -1 to 1.
struct Rescale {
  double scale = 1;
  double shift = 0;
};

/// x becomes (x - mean) / std, channel by channel, computed in float64 and rounded once to float32 (float64 stays
/// float64). As many means and deviations as the sample has channels.
struct Normalize {
  std::vector<double> mean;
  std::vector<double> std;
  bool is_hwc = true;  ///< channels are the last of the three dimensions; otherwise the first
};

/// [H, W, C] becomes [C, H, W]. Nothing is copied: a batch has channels-last strides, the layout that convolutions
/// prefer.
struct HWC2CHW {};

/// Another dtype, with the conversions of Tensor::to: to nearest even; to integers towards zero, saturating.
struct TypeCast {
  DType dtype;
};

/// One step of Pipeline::map: one of the above, or a function of one sample, `Tensor(const Tensor& sample)`. Such a
/// function derives any randomness from a second parameter, `const SampleKey& key` (seed, epoch and index of the
/// sample), so that the same run sees the same samples with any number of workers. It is called by several threads at
/// once, without gradient recording or autocast.
class HS_API ColumnTransform {
 public:
  /// Throws Error when the numbers are not finite.
  ColumnTransform(const Rescale& rescale);
  /// Throws Error if there are none or different numbers of them, if one is not finite, or if a deviation is not
  /// above 0.
  ColumnTransform(const Normalize& normalize);
  ColumnTransform(HWC2CHW);
  ColumnTransform(TypeCast cast);
  /// A function of a sample. Throws Error for an empty std::function.
  template <class F>
  requires(std::is_invocable_r_v<Tensor, const F&, const Tensor&> ||
           std::is_invocable_r_v<Tensor, const F&, const Tensor&, const SampleKey&>) ColumnTransform(F function)
      : ColumnTransform(Function(with_key(std::move(function))), 0) {}

  /// The step's name, as in `Rescale`.
  const std::string& name() const;
  /// Transforms the samples of a batch, [N, ...] on the CPU, selected by `request`. Throws ShapeError or DTypeError,
  /// naming the transform, when it can't be applied to such samples, and what a function throws.
  Tensor apply(const Tensor& batch, const BatchRequest& request) const;

  struct Impl;

 private:
  using Function = std::function<Tensor(const Tensor&, const SampleKey&)>;
  ColumnTransform(Function function, int);

  template <class F>
  static Function with_key(F function) {
    // An empty std::function stays empty in its wrapping.
    if constexpr (std::is_pointer_v<F> || std::is_same_v<F, std::function<Tensor(const Tensor&)>> ||
                  std::is_same_v<F, Function>) {
      if (!function) return {};
    }
    if constexpr (std::is_invocable_r_v<Tensor, const F&, const Tensor&, const SampleKey&>) {
      return Function(std::move(function));
    } else {
      return [f = std::move(function)](const Tensor& sample, const SampleKey&) { return f(sample); };
    }
  }

  std::shared_ptr<const Impl> impl_;
};

}  // namespace halfstep::data
