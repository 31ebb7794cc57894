// SPDX-License-Identifier: Apache-2.0
// The convolutions of ops/conv.h as modules. Weights start uniform in +-1/sqrt(fan in), where fan in is the weight's
// number of elements per channel of its first dimension, and biases in the same interval: PyTorch's defaults. Lists of
// sizes have one number for all dimensions, or one for each (height, then width).
#pragma once

#include <concepts>

#include "halfstep/nn/module.h"

namespace halfstep::nn {

/// Zeros (or what the padding mode says) on either side of the input: numbers, or `"same"` (the result has the input's
/// size; stride 1 only; where the sum is odd the end gets one more) or `"valid"` (none).
class HS_API Padding {
 public:
  Padding() = default;
  template <std::integral I>
  Padding(I all) : sizes_{static_cast<std::int64_t>(all)} {}
  Padding(std::initializer_list<std::int64_t> sizes) : sizes_(sizes) {}
  Padding(const Shape& sizes) : sizes_(sizes) {}
  /// Throws Error for words other than `same` and `valid`.
  Padding(const char* word);

  /// Whether it is `same`, whose numbers follow from the kernel.
  bool is_same() const { return same_; }
  /// The numbers; not used when is_same().
  const Shape& sizes() const { return sizes_; }
  std::string str() const { return same_ ? "same" : sizes_.str(); }

 private:
  Shape sizes_ = {0};
  bool same_ = false;
};

/// How a convolution pads its input: zeros, the input mirrored at the outermost element, that element repeated, or the
/// input wrapped around.
enum class PaddingMode : std::uint8_t { zeros, reflect, replicate, circular };

/// Options of Conv1d and Conv2d.
struct ConvOptions {
  std::int64_t in = kNotGiven;   ///< channels of an input, a multiple of groups
  std::int64_t out = kNotGiven;  ///< channels of an output, a multiple of groups
  Shape kernel = {};             ///< sizes of the window, at least 1; must be given
  Shape stride = {1};            ///< step between windows
  Padding padding = 0;           ///< on either side
  Shape dilation = {1};          ///< step between the elements of a window
  std::int64_t groups = 1;
  bool bias = true;
  PaddingMode padding_mode = PaddingMode::zeros;
  DType dtype = f32;
  bool initialise = true;  ///< false: the weight is left at zero, to save time if it is filled in afterwards
};

/// Options of ConvTranspose1d and ConvTranspose2d.
struct ConvTransposeOptions {
  std::int64_t in = kNotGiven;   ///< channels of an input, a multiple of groups
  std::int64_t out = kNotGiven;  ///< channels of an output, a multiple of groups
  Shape kernel = {};             ///< must be given
  Shape stride = {1};
  Shape padding = {0};         ///< of the convolution whose gradient this is: it makes the output smaller
  Shape output_padding = {0};  ///< makes one side of the output larger; under stride or dilation
  std::int64_t groups = 1;
  bool bias = true;
  Shape dilation = {1};
  DType dtype = f32;
};

/// What Conv1d and Conv2d share.
class HS_API ConvBase : public ModuleBase {
 public:
  std::string describe() const override;
  /// As constructed, every list with one number a dimension.
  ConvOptions options;
  Parameter weight;  ///< [out, in / groups, kernel...]
  Parameter bias;    ///< [out]; undefined without

 protected:
  ConvBase(const ConvOptions& options, int dims, const char* kind);
  Tensor convolve(const Tensor& input) const;
};
/// halfstep::conv1d for sequences [N, in, L] or [in, L].
class HS_API Conv1d : public Module<Conv1d, ConvBase> {
 public:
  /// Throws Error for options that don't fit each other.
  explicit Conv1d(const ConvOptions& o) : Module(o, 1, "Conv1d") {}
  Tensor forward(const Tensor& input) const { return convolve(input); }
  std::string kind() const override { return "Conv1d"; }
};
/// halfstep::conv2d for images [N, in, H, W] or [in, H, W] in any layout; channels-last is fast and stays.
class HS_API Conv2d : public Module<Conv2d, ConvBase> {
 public:
  /// Throws Error for options that don't fit each other.
  explicit Conv2d(const ConvOptions& o) : Module(o, 2, "Conv2d") {}
  Tensor forward(const Tensor& input) const { return convolve(input); }
  std::string kind() const override { return "Conv2d"; }
};

/// What ConvTranspose1d and ConvTranspose2d share.
class HS_API ConvTransposeBase : public ModuleBase {
 public:
  std::string describe() const override;
  /// As constructed, every list with one number a dimension.
  ConvTransposeOptions options;
  Parameter weight;  ///< [in, out / groups, kernel...]
  Parameter bias;    ///< [out]; undefined without

 protected:
  ConvTransposeBase(const ConvTransposeOptions& options, int dims, const char* kind);
  Tensor convolve(const Tensor& input) const;
};
/// halfstep::conv_transpose1d for sequences [N, in, L] or [in, L].
class HS_API ConvTranspose1d : public Module<ConvTranspose1d, ConvTransposeBase> {
 public:
  /// Throws Error for options that don't fit each other.
  explicit ConvTranspose1d(const ConvTransposeOptions& o) : Module(o, 1, "ConvTranspose1d") {}
  Tensor forward(const Tensor& input) const { return convolve(input); }
  std::string kind() const override { return "ConvTranspose1d"; }
};
/// halfstep::conv_transpose2d for images [N, in, H, W] or [in, H, W] in any layout.
class HS_API ConvTranspose2d : public Module<ConvTranspose2d, ConvTransposeBase> {
 public:
  /// Throws Error for options that don't fit each other.
  explicit ConvTranspose2d(const ConvTransposeOptions& o) : Module(o, 2, "ConvTranspose2d") {}
  Tensor forward(const Tensor& input) const { return convolve(input); }
  std::string kind() const override { return "ConvTranspose2d"; }
};

}  // namespace halfstep::nn
