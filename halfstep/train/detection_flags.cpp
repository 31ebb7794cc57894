// SPDX-License-Identifier: Apache-2.0
// The flags of detectors: one row each, see flag_table.cpp.
#include "halfstep/train/flags.h"

namespace halfstep::training {
namespace {

Flag number(const char* names, double* field, const char* help, const FlagRange& range) {
  return {.names = names, .field = field, .help = help, .range = range, .resume = FlagResume::recipe};
}

Flag of_evaluations(Flag flag) {
  flag.evaluation = true;
  return flag;
}

}  // namespace

std::vector<Flag> flags(DetectionConfig& o) {
  const FlagRange share = FlagRange::from_to(0, 1), positive = FlagRange::at_least(0);
  std::vector<Flag> all = {
      number("--mosaic", &o.mosaic, "Probability that four training pictures are put together", share),
      number("--mixup-pictures", &o.mixup, "Probability that a training picture is blended with another one", share),
      number("--copy-paste", &o.copy_paste, "Share of the objects with polygons that are copied, mirrored", share),
      number("--degrees", &o.degrees, "Largest random rotation in degrees", FlagRange::from_to(0, 180)),
      number("--translate", &o.translate, "Largest random shift, as a fraction of the side", share),
      number("--scale", &o.scale, "Random scaling by 1 - X to 1 + X", FlagRange::from_under(0, 1)),
      number("--shear", &o.shear, "Largest random shear in degrees", FlagRange::from_to(0, 45)),
      number("--perspective", &o.perspective, "Largest random perspective", FlagRange::from_to(0, 0.001)),
      number("--hsv-h", &o.hsv_h, "Random change of hue, as a fraction", share),
      number("--hsv-s", &o.hsv_s, "Random change of saturation, as a fraction", share),
      number("--hsv-v", &o.hsv_v, "Random change of value, as a fraction", share),
      number("--flip-ud", &o.flip_ud, "Probability of a picture upside down", share),
      number("--flip-lr", &o.flip_lr, "Probability of a mirrored picture", share),
      {.names = "--multi-scale",
       .field = &o.multi_scale,
       .help = "Batches of 0.5 to 1.5 times the --image-size",
       .resume = FlagResume::recipe},
      {.names = "--no-rect",
       .field = TurnsOff{&o.rect},
       .help = "Square pictures in evaluations",
       .resume = FlagResume::recipe,
       .evaluation = true},
      {.names = "--no-polygon-boxes",
       .field = TurnsOff{&o.polygon_boxes},
       .help = "Boxes of COCO's files as they are, not those around the objects' polygons",
       .resume = FlagResume::recipe},
      {.names = "--cache",
       .field = &o.cache,
       .help = "Where decoded pictures are kept: off, ram or disk",
       .choices = {"off", "ram", "disk"},
       .standard = "ram"},
      number("--box-gain", &o.box_gain, "Weight of the boxes in the loss", positive),
      number("--object-gain", &o.object_gain, "Weight of objectness in the loss", positive),
      number("--class-gain", &o.class_gain, "Weight of the classes in the loss", positive),
      number("--anchor-ratio", &o.anchor_ratio, "Factor by which an object's sides may differ from an anchor's",
             FlagRange::above(1)),
      number("--focal-gamma", &o.focal_gamma, "Gamma of focal loss, such as 1.5; 0: plain cross entropy", positive),
      number("--class-weight", &o.class_weight, "Weight of positives among the classes", FlagRange::above(0)),
      number("--object-weight", &o.object_weight, "Weight of positives in objectness", FlagRange::above(0)),
      of_evaluations(number("--conf-thres,--conf", &o.score, "Least score of a box in an evaluation", share)),
      of_evaluations(
          number("--iou-thres,--iou", &o.overlap, "Largest overlap of boxes of one class in an evaluation", share)),
      {.names = "--max-detections",
       .field = &o.max_detections,
       .help = "Most boxes of a picture in an evaluation",
       .range = FlagRange::at_least(1),
       .resume = FlagResume::recipe,
       .evaluation = true}};
  for (Flag& flag : all) {
    flag.group = "Detection";
    flag.data = "boxes";
  }
  return all;
}

}  // namespace halfstep::training
