// SPDX-License-Identifier: Apache-2.0
// From an image's bytes to a network's input. The rules are torchvision's.
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

/// The largest side of a network's input, in pixels: of all transforms, and of `--image-size` of every command.
inline constexpr std::int64_t kLargestInputSide = 8192;

/// A pixel p from 0 to 255 becomes (p / 255 - mean) / std, channel by channel, each step rounded to float32.
struct Normalization {
  std::array<float, 3> mean = {0, 0, 0};
  std::array<float, 3> std = {1, 1, 1};
};
/// The normalisation that networks trained on ImageNet expect.
inline constexpr Normalization kImageNetNormalization{.mean = {0.485F, 0.456F, 0.406F},
                                                      .std = {0.229F, 0.224F, 0.225F}};
/// Mean and standard deviation of CIFAR-10's training pixels.
inline constexpr Normalization kCifarNormalization{.mean = {0.4914F, 0.4822F, 0.4465F},
                                                   .std = {0.2470F, 0.2435F, 0.2616F}};

/// The range of random colour changes, in a random order for each image: brightness, contrast and saturation by a
/// factor from max(0, 1 - x) to 1 + x, hue by -x to x of a circle. 0 omits a step.
struct ColorJitter {
  double brightness = 0;
  double contrast = 0;
  double saturation = 0;
  double hue = 0;
};

/// How a training image is cropped.
enum class CropKind {
  random_resized,  ///< a part of random area and shape, resized, as for ImageNet
  padded,          ///< the image padded with black pixels and shifted at random, as for CIFAR
  none,            ///< the whole image, resized whatever its shape
};

/// The transforms of a training image: crop, flip, colours, normalisation. The defaults are ImageNet's.
struct TrainTransform {
  std::int64_t size = 224;  ///< height and width of the result
  CropKind crop = CropKind::random_resized;
  /// random_resized: the crop's fraction of the image's area, and its width divided by its height, uniform in the
  /// logarithm. After ten failed tries, the largest central crop with an allowed shape.
  double min_area = 0.08;
  double max_area = 1;
  double min_ratio = 3.0 / 4;
  double max_ratio = 4.0 / 3;
  /// padded: pixels added on each side. An image of a different size than `size` is resized first.
  std::int64_t padding = 4;
  double flip = 0.5;  ///< the probability of mirroring left and right
  ColorJitter jitter = {};
  ResizeFilter filter = ResizeFilter::bilinear;
  Normalization normalization = kImageNetNormalization;
  /// Lets a JPEG be decoded at 1/2, 1/4 or 1/8 of its size if the crop is still at least twice as large as the result:
  /// several times as fast, with slightly different pixels.
  bool scaled_decode = true;
};

/// The transforms of an evaluation image: the shorter side is resized to `resize`, then the centre is cropped.
struct EvalTransform {
  std::int64_t size = 224;    ///< height and width of the result
  std::int64_t resize = 256;  ///< at least `size`; 0: the whole image becomes size x size, whatever its shape
  ResizeFilter filter = ResizeFilter::bilinear;
  Normalization normalization = kImageNetNormalization;
};

/// CIFAR's: 32x32, shifted by up to 4 pixels and flipped.
HS_API TrainTransform cifar_train_transform();
HS_API EvalTransform cifar_eval_transform();

/// One of the two.
using ImageTransform = std::variant<TrainTransform, EvalTransform>;

/// The key of an image's randomness: the same three numbers give the same pixels, whichever thread computes them and
/// whatever was computed before.
struct SampleKey {
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
  std::int64_t sample = 0;
};

/// The crop that CropKind::random_resized takes: torchvision's RandomResizedCrop.get_params.
HS_API PixelRegion random_resized_region(std::int64_t width, std::int64_t height, const TrainTransform& transform,
                                         RandomStream& random);

/// Memory that is reused from image to image.
struct TransformScratch {
  Image decoded;
  Image rows;
  Image result;
};

/// Runs a transform. Any number of threads may do so, each with its own scratch.
class HS_API ImagePipeline {
 public:
  /// The results have `dtype`: f32, f16 or bf16. Throws Error for invalid options, DTypeError.
  explicit ImagePipeline(const ImageTransform& transform, DType dtype = f32);

  /// Height and width of the results.
  std::int64_t size() const { return size_; }
  /// The dtype of the results.
  DType dtype() const { return dtype_; }

  /// The image before normalisation, in scratch.result; errors are the decoder's. Returns whether it still has to be
  /// mirrored.
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

/// Memory for n images of the pipeline: [n, 3, size, size] with channels-last strides.
HS_API Tensor empty_image_batch(std::int64_t n, std::int64_t size, DType dtype = f32);

/// Images from files as one batch, for prediction.
HS_API Tensor read_images(std::span<const std::filesystem::path> paths, const EvalTransform& transform = {},
                          DType dtype = f32, const ImageLimits& limits = {});

}  // namespace halfstep::data
