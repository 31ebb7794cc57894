// SPDX-License-Identifier: Apache-2.0
// Pooling, resizing and padding (ops/pool.h, ops/resample.h, ops/pad.h) as modules, for Sequential. Lists have one
// number for all dimensions, or one for each: height, then width.
#pragma once

#include "halfstep/nn/module.h"
#include "halfstep/ops/pad.h"
#include "halfstep/ops/pool.h"
#include "halfstep/ops/resample.h"

namespace halfstep::nn {

/// Options of MaxPool1d and MaxPool2d: nn::MaxPool2d{{.kernel = {3}, .stride = {2}, .padding = {1}}}.
struct MaxPoolOptions {
  Shape kernel = {};  ///< places of a window; must be given
  Shape stride = {};  ///< none: the kernel
  Shape padding = {0};
  Shape dilation = {1};
  bool ceil_mode = false;
};
/// halfstep::max_pool1d.
class HS_API MaxPool1d : public Module<MaxPool1d> {
 public:
  explicit MaxPool1d(const MaxPoolOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "MaxPool1d"; }
  std::string describe() const override;
  MaxPoolOptions options;
};
/// halfstep::max_pool2d.
class HS_API MaxPool2d : public Module<MaxPool2d> {
 public:
  explicit MaxPool2d(const MaxPoolOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "MaxPool2d"; }
  std::string describe() const override;
  MaxPoolOptions options;
};

/// Options of AvgPool1d and AvgPool2d.
struct AvgPoolOptions {
  Shape kernel = {};  ///< places of a window; must be given
  Shape stride = {};  ///< none: the kernel
  Shape padding = {0};
  bool ceil_mode = false;
  bool count_include_pad = true;
  std::optional<std::int64_t> divisor_override = {};
};
/// halfstep::avg_pool1d.
class HS_API AvgPool1d : public Module<AvgPool1d> {
 public:
  explicit AvgPool1d(const AvgPoolOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "AvgPool1d"; }
  std::string describe() const override;
  AvgPoolOptions options;
};
/// halfstep::avg_pool2d.
class HS_API AvgPool2d : public Module<AvgPool2d> {
 public:
  explicit AvgPool2d(const AvgPoolOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "AvgPool2d"; }
  std::string describe() const override;
  AvgPoolOptions options;
};

/// Options of the adaptive pooling modules: nn::AdaptiveAvgPool2d{{.output_size = {1}}}.
struct AdaptivePoolOptions {
  Shape output_size = {};  ///< -1: as the input; must be given
};
/// halfstep::adaptive_avg_pool1d.
class HS_API AdaptiveAvgPool1d : public Module<AdaptiveAvgPool1d> {
 public:
  explicit AdaptiveAvgPool1d(const AdaptivePoolOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "AdaptiveAvgPool1d"; }
  std::string describe() const override;
  AdaptivePoolOptions options;
};
/// halfstep::adaptive_avg_pool2d.
class HS_API AdaptiveAvgPool2d : public Module<AdaptiveAvgPool2d> {
 public:
  explicit AdaptiveAvgPool2d(const AdaptivePoolOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "AdaptiveAvgPool2d"; }
  std::string describe() const override;
  AdaptivePoolOptions options;
};
/// halfstep::adaptive_max_pool2d.
class HS_API AdaptiveMaxPool2d : public Module<AdaptiveMaxPool2d> {
 public:
  explicit AdaptiveMaxPool2d(const AdaptivePoolOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "AdaptiveMaxPool2d"; }
  std::string describe() const override;
  AdaptivePoolOptions options;
};

/// halfstep::interpolate, with its options: nn::Upsample{{.scale_factor = {2}}}.
class HS_API Upsample : public Module<Upsample> {
 public:
  explicit Upsample(const InterpolateOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "Upsample"; }
  std::string describe() const override;
  InterpolateOptions options;
};

/// Options of the padding modules.
struct PaddingOptions {
  Shape padding = {};  ///< one number for all sides, or four: left, right, top, bottom
};
/// halfstep::pad with zeros, of images.
class HS_API ZeroPad2d : public Module<ZeroPad2d> {
 public:
  /// Throws ShapeError unless there are one or four numbers; so do the others.
  explicit ZeroPad2d(const PaddingOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "ZeroPad2d"; }
  std::string describe() const override;
  PaddingOptions options;
};
/// halfstep::pad with PadMode::reflect, of images.
class HS_API ReflectionPad2d : public Module<ReflectionPad2d> {
 public:
  explicit ReflectionPad2d(const PaddingOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "ReflectionPad2d"; }
  std::string describe() const override;
  PaddingOptions options;
};
/// halfstep::pad with PadMode::replicate, of images.
class HS_API ReplicationPad2d : public Module<ReplicationPad2d> {
 public:
  explicit ReplicationPad2d(const PaddingOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "ReplicationPad2d"; }
  std::string describe() const override;
  PaddingOptions options;
};

}  // namespace halfstep::nn
