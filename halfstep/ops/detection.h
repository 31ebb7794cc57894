// SPDX-License-Identifier: Apache-2.0
// Ops of object detection, with the semantics of torchvision.ops.
//
// Boxes are tensors [..., 4] of a floating dtype, in pixels or any other unit that is the same in both directions.
#pragma once

#include <cstdint>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// What the four numbers of a box are.
enum class BoxFormat {
  xyxy,    ///< left, top, right, bottom
  xywh,    ///< left, top, width, height
  cxcywh,  ///< centre, width, height
};

/// The boxes in another format; differentiable. Throws ShapeError unless the last dimension has 4 numbers, DTypeError
/// unless they are floating.
HS_API Tensor box_convert(const Tensor& boxes, BoxFormat from, BoxFormat to);
/// Width times height of boxes [..., 4], as [...]: float32 for 16-bit boxes, whose areas leave the range of 16 bits.
HS_API Tensor box_area(const Tensor& boxes, BoxFormat format = BoxFormat::xyxy);
/// The boxes (xyxy) with all corners inside an image, 0 to width and 0 to height.
HS_API Tensor clip_boxes_to_image(const Tensor& boxes, double height, double width);

/// A measure of how well two boxes overlap.
enum class BoxIou {
  iou,   ///< intersection over union, 0 to 1
  giou,  ///< less the share of the enclosing box that neither covers, -1 to 1 (Rezatofighi et al. 2019)
  diou,  ///< iou less the squared distance of the centres over the squared diagonal of the enclosing box (Zheng et al.
         ///< 2020)
  ciou,  ///< diou less a term for the difference of the aspect ratios (the same paper); the term's weight has no
         ///< gradient
};
/// Options of box_iou.
struct BoxIouOptions {
  BoxIou kind = BoxIou::iou;
  BoxFormat format = BoxFormat::xyxy;
};
/// The overlap of each box of `a` [N, 4] with each of `b` [M, 4], as [N, M]; differentiable, in float32 for 16-bit
/// boxes and under autocast. torchvision's box_iou, generalized_box_iou, distance_box_iou and complete_box_iou: as
/// there, the overlap of two boxes without an area is NaN for iou and giou.
HS_API Tensor box_iou(const Tensor& a, const Tensor& b, const BoxIouOptions& options = {});

/// Options of paired_box_iou.
struct PairedBoxIouOptions {
  BoxIou kind = BoxIou::iou;
  BoxFormat format = BoxFormat::xyxy;
  double eps = 1e-7;  ///< added to each divisor, so that boxes without an area have an overlap
};
/// The overlap of each box of `a` with the box of `b` in its place: [..., 4] and [..., 4], broadcast, to [...]. One
/// less than it is the loss of torchvision's generalized_box_iou_loss, distance_box_iou_loss and complete_box_iou_loss.
HS_API Tensor paired_box_iou(const Tensor& a, const Tensor& b, const PairedBoxIouOptions& options = {});

/// Options of nms and batched_nms.
struct NmsOptions {
  double iou_threshold = 0.5;  ///< boxes that overlap one of a better score by more than this are dropped; 0 to 1
  std::int64_t limit = -1;     ///< the most boxes kept, the best ones; -1: any number
};
/// Non-maximum suppression: the numbers (int64) of the boxes (xyxy, [N, 4]) that are kept, by falling score [N]. Equal
/// scores keep the order of the boxes, so that the result is the same on any number of threads. On a device the result
/// is waited for. Throws ShapeError, DTypeError, and Error for a threshold outside 0 to 1.
HS_API Tensor nms(const Tensor& boxes, const Tensor& scores, const NmsOptions& options = {});
/// The same for boxes of several classes ([N] of int64), of which each suppresses its own only.
HS_API Tensor batched_nms(const Tensor& boxes, const Tensor& scores, const Tensor& classes,
                          const NmsOptions& options = {});

/// Options of roi_align.
struct RoiAlignOptions {
  Shape output_size = {1};          ///< height and width of the result, or one number for both
  double spatial_scale = 1;         ///< from the boxes' unit to places of the input
  std::int64_t sampling_ratio = 0;  ///< samples per bin and direction; 0: as many as the bin has places, rounded up
  bool aligned = false;  ///< pixels' centres are at half numbers; else at whole ones, and boxes at least 1 wide
};
/// Means of bilinear samples of `input` [N, C, H, W] in the bins of regions: [K, C, height, width] for `boxes` [K, 5],
/// each the number of a picture and a box (xyxy). Differentiable in the input; in float32 under autocast, and inside
/// for 16-bit dtypes. Samples more than one place outside of the picture count as zero; a box that isn't finite gives
/// NaN. Throws ShapeError, DTypeError, and Error for a picture that isn't there. He et al. 2017, torchvision's
/// roi_align.
HS_API Tensor roi_align(const Tensor& input, const Tensor& boxes, const RoiAlignOptions& options);

}  // namespace halfstep
