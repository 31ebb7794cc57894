// SPDX-License-Identifier: Apache-2.0
// From the bytes of a picture to what a network sees. The rules are torchvision's.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <variant>

#include "halfstep/core/dtype.h"
#include "halfstep/core/export.h"
#include "halfstep/core/random.h"
#include "halfstep/core/tensor.h"
#include "halfstep/data/image.h"
#include "halfstep/data/resize.h"

namespace halfstep::data {

/// A pixel p from 0 to 255 becomes (p / 255 - mean) / std, channel by channel, each step rounded to float32.
struct Normalization {
  std::array<float, 3> mean = {0, 0, 0};
  std::array<float, 3> std = {1, 1, 1};
};
/// What networks trained on ImageNet expect.
inline constexpr Normalization kImageNetNormalization{.mean = {0.485F, 0.456F, 0.406F},
                                                      .std = {0.229F, 0.224F, 0.225F}};
/// Mean and standard deviation of CIFAR-10's training pixels.
inline constexpr Normalization kCifarNormalization{.mean = {0.4914F, 0.4822F, 0.4465F},
                                                   .std = {0.2470F, 0.2435F, 0.2616F}};

/// How far colours are changed at random, in an order drawn anew for each picture: brightness, contrast and saturation
/// by a factor from max(0, 1 - x) to 1 + x, hue by -x to x of a circle. 0 leaves a step out.
struct ColorJitter {
  double brightness = 0;
  double contrast = 0;
  double saturation = 0;
  double hue = 0;
};

/// What a training picture is cut out by.
enum class CropKind {
  random_resized,  ///< a part of random area and shape, resized: ImageNet's way
  padded,          ///< the picture with black pixels around it, shifted at random: CIFAR's way
  none,            ///< the whole picture, resized whatever its shape
};

/// What a training picture goes through: crop, flip, colours, normalisation. The defaults are ImageNet's.
struct TrainTransform {
  std::int64_t size = 224;  ///< height and width of the result
  CropKind crop = CropKind::random_resized;
  /// random_resized: the part's share of the picture's area, and its width over height, uniform in its logarithm. Ten
  /// tries; then the largest part in the middle whose shape is allowed.
  double min_area = 0.08;
  double max_area = 1;
  double min_ratio = 3.0 / 4;
  double max_ratio = 4.0 / 3;
  /// padded: pixels added on each side. A picture of other sizes than `size` is resized first.
  std::int64_t padding = 4;
  double flip = 0.5;  ///< the probability of mirroring left and right
  ColorJitter jitter = {};
  ResizeFilter filter = ResizeFilter::bilinear;
  Normalization normalization = kImageNetNormalization;
  /// Lets a JPEG be decoded at 1/2, 1/4 or 1/8 of its size where the part is still at least twice as large as the
  /// result: several times as fast, with slightly other pixels.
  bool scaled_decode = true;
};

/// What a picture goes through in evaluation: the shorter side becomes `resize`, then the middle is cut out.
struct EvalTransform {
  std::int64_t size = 224;    ///< height and width of the result
  std::int64_t resize = 256;  ///< at least `size`; 0: the whole picture becomes size x size, whatever its shape
  ResizeFilter filter = ResizeFilter::bilinear;
  Normalization normalization = kImageNetNormalization;
};

/// CIFAR's: 32x32, shifted by up to 4 pixels and flipped.
HS_API TrainTransform cifar_train_transform();
HS_API EvalTransform cifar_eval_transform();

/// One of the two.
using ImageTransform = std::variant<TrainTransform, EvalTransform>;

/// What decides everything random about a picture: the same three numbers give the same pixels, whichever thread makes
/// them and whatever was made before.
struct SampleKey {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
  std::int64_t sample = 0;
};

/// The part of a picture that CropKind::random_resized takes: torchvision's RandomResizedCrop.get_params.
HS_API PixelRegion random_resized_region(std::int64_t width, std::int64_t height, const TrainTransform& transform,
                                         RandomStream& random);

/// Memory that is used again from picture to picture.
struct TransformScratch {
  Image decoded;
  Image rows;
  Image result;
};

/// Runs a transform. Any number of threads may, each with a scratch of its own.
class HS_API ImagePipeline {
 public:
  /// Pictures come out as `dtype`: f32, f16 or bf16. Throws Error for options that make no sense, DTypeError.
  explicit ImagePipeline(const ImageTransform& transform, DType dtype = f32);

  /// Height and width of what comes out.
  std::int64_t size() const { return size_; }
  /// Of the elements that come out.
  DType dtype() const { return dtype_; }

  /// The picture before normalisation, in scratch.result; the errors are the decoder's. Returns whether it is still to
  /// be mirrored.
  bool make(ImageDecoder& picture, const SampleKey& key, TransformScratch& scratch) const;
  /// Normalised into `out`, [size, size, 3] elements of dtype().
  void run(ImageDecoder& picture, const SampleKey& key, TransformScratch& scratch, void* out) const;

 private:
  void write(const Image& image, bool mirrored, void* out) const;

  ImageTransform transform_;
  DType dtype_;
  std::int64_t size_;
  // Of each channel: what a pixel becomes. The second as bits, for f16 and bf16.
  std::array<std::array<float, 256>, 3> values_;
  std::array<std::array<std::uint16_t, 256>, 3> short_values_;
};

/// Memory for n pictures of the pipeline: [n, 3, size, size] with channels-last strides.
HS_API Tensor empty_image_batch(std::int64_t n, std::int64_t size, DType dtype = f32);

/// Pictures from files as one batch, for a prediction.
HS_API Tensor read_images(std::span<const std::filesystem::path> paths, const EvalTransform& transform = {},
                          DType dtype = f32, const ImageLimits& limits = {});

}  // namespace halfstep::data
