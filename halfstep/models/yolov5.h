// SPDX-License-Identifier: Apache-2.0
// One-stage detectors of the YOLOv5 family: a backbone of cross-stage partial blocks (Wang et al. 2020), a path
// aggregation neck (Liu et al. 2018) and anchor-based heads (Redmon and Farhadi 2018), with the names of the published
// state dicts.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "halfstep/nn/container.h"
#include "halfstep/nn/conv.h"
#include "halfstep/nn/module.h"
#include "halfstep/nn/norm.h"

namespace halfstep::models {

/// Options of ConvNormSiLU.
struct ConvNormSiLUOptions {
  std::int64_t in = nn::kNotGiven;
  std::int64_t out = nn::kNotGiven;
  std::int64_t kernel = 1;
  std::int64_t stride = 1;
  std::int64_t padding = -1;  ///< -1: half of the kernel
};
/// Convolution without a bias, batch norm (eps 1e-3, momentum 0.03) and SiLU.
class HS_API ConvNormSiLU : public nn::Module<ConvNormSiLU> {
 public:
  explicit ConvNormSiLU(const ConvNormSiLUOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "ConvNormSiLU"; }

  nn::Conv2d conv;     ///< as in the published state dicts
  nn::BatchNorm2d bn;  ///< the same
};

/// Options of CspBottleneck, CspBlock and SpatialPyramid.
struct CspOptions {
  std::int64_t in = nn::kNotGiven;
  std::int64_t out = nn::kNotGiven;
  std::int64_t blocks = 1;  ///< bottlenecks of a CspBlock
  bool shortcut = true;     ///< bottlenecks add their input, where the channels agree
  std::int64_t kernel = 5;  ///< of a SpatialPyramid's pooling, odd
};
/// 1x1 and 3x3 convolution at full width, with a shortcut.
class HS_API CspBottleneck : public nn::Module<CspBottleneck> {
 public:
  explicit CspBottleneck(const CspOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "CspBottleneck"; }

  ConvNormSiLU cv1;  ///< 1x1
  ConvNormSiLU cv2;  ///< 3x3
  bool add;          ///< whether the input is added
};
/// Cross-stage partial block with three convolutions ("C3"): cv3(concat(m(cv1(x)), cv2(x))) at half the width inside.
class HS_API CspBlock : public nn::Module<CspBlock> {
 public:
  explicit CspBlock(const CspOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "CspBlock"; }

  ConvNormSiLU cv1;  ///< in front of the bottlenecks
  ConvNormSiLU cv2;  ///< beside them
  ConvNormSiLU cv3;  ///< of both
  nn::Sequential m;  ///< the bottlenecks
};
/// Spatial pyramid pooling ("SPPF"): three max pools one behind the other, of which all results are used.
class HS_API SpatialPyramid : public nn::Module<SpatialPyramid> {
 public:
  explicit SpatialPyramid(const CspOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "SpatialPyramid"; }

  ConvNormSiLU cv1;     ///< to half of the channels
  ConvNormSiLU cv2;     ///< of the input and the results of the pools
  std::int64_t kernel;  ///< of the pooling
};

/// Options of DetectionHead.
struct DetectionHeadOptions {
  std::vector<std::int64_t> in = {};              ///< channels of each level
  std::vector<std::int64_t> strides = {};         ///< pixels to a cell of each level
  std::vector<std::vector<double>> anchors = {};  ///< of each level: widths and heights in pixels, in turn
  std::int64_t classes = 80;
};
/// 1x1 convolutions from the levels' features to predictions: [N, in, H, W] each, to [N, anchors, H, W, 5 + classes] of
/// x, y, width, height, objectness and classes, before the sigmoid. Biases start at a prior: 8 objects in a picture of
/// 640 x 640, and 0.6 of all classes in each.
class HS_API DetectionHead : public nn::Module<DetectionHead> {
 public:
  explicit DetectionHead(const DetectionHeadOptions& options);
  std::vector<Tensor> forward(const std::vector<Tensor>& levels) const;
  std::string kind() const override { return "DetectionHead"; }
  std::string describe() const override;

  DetectionHeadOptions options;  ///< as constructed
  nn::Buffer anchors;            ///< [levels, anchors, 2] in cells of their level
  nn::ModuleList<nn::Conv2d> m;  ///< of each level
};

/// A row of a detector's description: which layers it reads, how often it is repeated, what it is and its arguments.
struct DetectorLayer {
  std::vector<int> from = {-1};        ///< numbers of layers; negative ones count back from this one
  std::int64_t repeats = 1;            ///< times the depth factor
  std::string module = "Conv";         ///< Conv, C3, SPPF, Upsample, Concat or Detect
  std::vector<double> arguments = {};  ///< Conv: channels, kernel, stride, padding; C3: channels, shortcut (1); SPPF:
                                       ///< channels, kernel; Upsample: factor
};
/// Options of Yolov5. The defaults are YOLOv5n's.
struct Yolov5Options {
  double depth = 0.33;  ///< factor on repeats
  double width = 0.25;  ///< factor on channels, which become multiples of 8
  std::int64_t classes = 80;
  std::vector<std::vector<double>> anchors = {};  ///< empty: the published ones, of COCO at 640 pixels
  std::vector<DetectorLayer> layers = {};         ///< empty: the published ones; the last is Detect
};

/// What a detector's forward pass gives in training: a tensor a level, as DetectionHead gives them.
using DetectorLevels = std::vector<Tensor>;

/// A detector of images [N, 3, H, W] in any layout (it computes in channels-last) with H and W multiples of the largest
/// stride, 32. Convolutions start as nn::Conv2d's. Throws Error for a description that can't be built, ShapeError for
/// unsuitable images.
class HS_API Yolov5 : public nn::Module<Yolov5> {
 public:
  explicit Yolov5(const Yolov5Options& options = {});
  DetectorLevels forward(const Tensor& images) const;
  /// Boxes in pixels from the result of forward(): [N, predictions, 5 + classes] of centre x, centre y, width, height,
  /// objectness and classes (0 to 1), in float32; levels one behind the other, each by anchor, row and column.
  Tensor decode(const DetectorLevels& levels) const;
  std::string kind() const override { return "Yolov5"; }
  std::string describe() const override;

  /// Of each level, from the finest: pixels to a cell.
  const std::vector<std::int64_t>& strides() const { return head().options.strides; }
  const DetectionHead& head() const;

  /// The layers by number, "0", "1", ...; called `model` in parameters' names.
  class HS_API Layers : public nn::Module<Layers> {
   public:
    Layers() = default;
    explicit Layers(const Yolov5Options& options);
    DetectorLevels forward(const Tensor& images) const;
    std::string kind() const override { return "Layers"; }
    void unshare() override;
    const nn::ModuleBase& operator[](std::size_t i) const { return *nodes_.at(i).module; }
    std::size_t size() const { return nodes_.size(); }

   protected:
    std::vector<std::pair<std::string, nn::ModuleBase*>> held() const override;

   private:
    struct Node {
      std::vector<std::size_t> from;  // numbers of layers, plus one: 0 is the images
      std::shared_ptr<nn::ModuleBase> module;
      Tensor (*call)(const nn::ModuleBase& module, const std::vector<Tensor>& inputs);
      std::size_t last_use = 0;  // number of the last layer that reads its result
    };
    std::vector<Node> nodes_;
    friend class Yolov5;
  };

  Yolov5Options options;  ///< with what was left empty
  Layers model;
};

/// The published sizes: nano, small, medium, large and extra large. `options` may change classes and anchors.
HS_API Yolov5 yolov5n(const Yolov5Options& options = {});
HS_API Yolov5 yolov5s(const Yolov5Options& options = {});
HS_API Yolov5 yolov5m(const Yolov5Options& options = {});
HS_API Yolov5 yolov5l(const Yolov5Options& options = {});
HS_API Yolov5 yolov5x(const Yolov5Options& options = {});

}  // namespace halfstep::models
