// SPDX-License-Identifier: Apache-2.0
#include "halfstep/models/detection_loss.h"

#include "halfstep/core/fail.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/compare.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/detection.h"
#include "halfstep/ops/index.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/loss.h"
#include "halfstep/ops/op.h"
#include "halfstep/ops/pointwise.h"
#include "halfstep/ops/reduce.h"
#include "halfstep/ops/view.h"

namespace halfstep::models {
namespace {

// Objects, and the cells of one level that may answer for them: [N, M, anchors, 5] candidates, one in the centre's cell
// and one in each of its neighbours. All constants.
struct Candidates {
  Tensor chosen;  // 1 for matches, else 0
  Tensor place;   // number of the cell's anchor in the level (i64)
  Tensor box;     // [..., 4] what it is to predict: centre from the cell's corner, sides, in cells
  Tensor anchor;  // [..., 2] sides in cells
  Tensor label;   // class (i64); 0 for rows that fill up
};

// `cells`: [N, H, W, anchors, ...], the order in which a channels-last convolution writes them.
Candidates candidates_of(const Tensor& cells, const Tensor& objects, const Tensor& anchors, double ratio) {
  const DType dtype = objects.dtype();
  const Device device = objects.device();
  const std::int64_t n = cells.size(0), height = cells.size(1), width = cells.size(2), each = cells.size(3);
  const std::int64_t m = objects.size(1);
  const Shape all{n, m, each, 5};
  const Tensor size =
      tensor({static_cast<double>(width), static_cast<double>(height)}, {2}, {.dtype = dtype, .device = device});
  const Tensor centre = objects.narrow(2, 1, 2) * size, sides = objects.narrow(2, 3, 2) * size;

  const Tensor quotient = sides.unsqueeze(2) / anchors;  // [N, M, anchors, 2]
  constexpr double kLeast = 1e-9;                        // of rows that fill up and have no size
  const Tensor similar = lt(amax(maximum(quotient, reciprocal(clamp_min(quotient, kLeast))), {-1}), ratio);
  const Tensor real = ge(objects.select(2, 0), 0);

  // A neighbour answers where the centre is in the half of its cell next to it, and where there is one.
  const auto near = [](const Tensor& from_edge) {
    return logical_and(lt(from_edge - floor(from_edge), 0.5), gt(from_edge, 1));
  };
  const Tensor before = near(centre), behind = near(size - centre);  // [N, M, 2]
  const Tensor open = stack({real, logical_and(real, before.select(2, 0)), logical_and(real, before.select(2, 1)),
                             logical_and(real, behind.select(2, 0)), logical_and(real, behind.select(2, 1))},
                            2);  // [N, M, 5]
  const Tensor shift = tensor({0, 0, -1, 0, 0, -1, 1, 0, 0, 1}, {5, 2}, {.dtype = dtype, .device = device});
  const Tensor cell = floor(centre).unsqueeze(2) + shift;  // [N, M, 5, 2]
  const Tensor column = clamp(cell.select(3, 0), 0.0, static_cast<double>(width - 1));
  const Tensor row = clamp(cell.select(3, 1), 0.0, static_cast<double>(height - 1));

  const auto whole = [&](std::int64_t count, const Shape& sizes) {
    return arange(0, count, 1, {.dtype = i64, .device = device}).view(sizes);
  };
  Candidates c;
  c.chosen = logical_and(similar.unsqueeze(3), open.unsqueeze(2)).to(dtype);
  const Tensor row_number = whole(n, {n, 1, 1}) * height + row.to(i64),
               cell_number = row_number * width + column.to(i64);
  c.place = cell_number.unsqueeze(2) * each + whole(each, {1, 1, each, 1});
  const Tensor corner = stack({column, row}, -1);
  const Tensor box = cat({centre.unsqueeze(2) - corner, sides.unsqueeze(2).expand({n, m, 5, 2})}, -1);  // [N, M, 5, 4]
  c.box = box.unsqueeze(2).expand({n, m, each, 5, 4});
  c.anchor = anchors.view({1, 1, each, 1, 2}).expand({n, m, each, 5, 2});
  c.label = clamp_min(objects.select(2, 0), 0).to(i64).view({n, m, 1, 1}).expand(all);
  return c;
}

// Binary cross entropy of logits, element by element; with gamma above 0 focal.
Tensor cross_entropy_of(const Tensor& logits, const Tensor& target, double positive_weight, double gamma) {
  const Tensor weight = full({}, positive_weight, {.dtype = logits.dtype(), .device = logits.device()});
  const Tensor loss = binary_cross_entropy_with_logits(
      logits, target, {.pos_weight = positive_weight == 1 ? Tensor{} : weight, .reduction = Reduction::none});
  if (gamma == 0) return loss;
  const Tensor p = sigmoid(logits);
  const Tensor right = target * p + (1 - target) * (1 - p);
  constexpr double kPositives = 0.25;
  return loss * (target * kPositives + (1 - target) * (1 - kPositives)) * pow(1 - right, gamma);
}

void check(const DetectorLevels& levels, const Tensor& objects, const DetectionHead& head,
           const DetectionLossOptions& o) {
  if (levels.size() != head.m.size()) {
    fail<Error>("detection_loss: expected {} levels, got {}", head.m.size(), levels.size());
  }
  if (!objects.defined() || objects.dim() != 3 || objects.size(0) != levels[0].size(0) || objects.size(2) != 5) {
    fail<ShapeError>("detection_loss: expected objects [{}, M, 5], got {}", levels[0].size(0),
                     objects.defined() ? objects.sizes().str() : "none");
  }
  if (!(o.anchor_ratio > 1) || !(o.label_smoothing >= 0 && o.label_smoothing < 1) || !(o.focal_gamma >= 0)) {
    fail<Error>(
        "detection_loss: expected an anchor_ratio above 1, a label_smoothing of at least 0 and below 1 and a "
        "focal_gamma of at least 0, got {}, {} and {}",
        o.anchor_ratio, o.label_smoothing, o.focal_gamma);
  }
}

}  // namespace

DetectionLoss detection_loss(const DetectorLevels& levels, const Tensor& objects, const DetectionHead& head,
                             const DetectionLossOptions& o) {
  check(levels, objects, head, o);
  // Areas of boxes and quotients of their sides leave the range of 16 bits.
  const AutocastOff autocast_off;
  const DType dtype = levels[0].dtype() == f64 ? f64 : f32;
  const Device device = levels[0].device();
  const Tensor all = objects.detach().to(dtype);
  const std::int64_t classes = head.options.classes;
  const auto zero = [&] { return zeros({}, {.dtype = dtype, .device = device}); };
  DetectionLoss sum_of{.loss = {}, .box = zero(), .objectness = zero(), .classes = zero(), .matches = zero()};
  for (std::size_t l = 0; l < levels.size(); ++l) {
    // Views of what the head wrote, in its dtype: a copy of all predictions would be larger than any activation.
    const Tensor cells = levels[l].permute({0, 2, 3, 1, 4});
    const Tensor anchors = head.anchors.select(0, static_cast<std::int64_t>(l)).to(dtype);
    const Candidates c = candidates_of(cells, all, anchors, o.anchor_ratio);
    const Tensor place = c.place.reshape({-1}), chosen = c.chosen.reshape({-1});
    const Tensor count = sum(chosen), at_least_one = clamp_min(count, 1);
    const Tensor rows = index_select(cells.reshape({-1, cells.size(4)}), 0, place).to(dtype);

    const Tensor p = sigmoid(rows.narrow(1, 0, 4)) * 2;
    const Tensor box = cat({p.narrow(1, 0, 2) - 0.5, square(p.narrow(1, 2, 2)) * c.anchor.reshape({-1, 2})}, 1);
    const Tensor overlap =
        paired_box_iou(box, c.box.reshape({-1, 4}), {.kind = BoxIou::ciou, .format = BoxFormat::cxcywh});
    sum_of.box = sum_of.box + sum((1 - overlap) * chosen) / at_least_one;

    const Tensor logits = cells.select(4, 4).to(dtype);
    const Tensor object = scatter_amax(zeros({logits.numel()}, {.dtype = dtype, .device = device}), 0, place,
                                       clamp_min(overlap.detach(), 0) * chosen);
    const double balance = l < o.balance.size() ? o.balance[l] : 1;
    sum_of.objectness =
        sum_of.objectness +
        mean(cross_entropy_of(logits, object.view(logits.sizes()), o.object_weight, o.focal_gamma)) * balance;

    if (classes > 1) {
      const Tensor right = eq(c.label.reshape({-1, 1}), arange(0, classes, 1, {.dtype = i64, .device = device}));
      const Tensor target = right.to(dtype) * (1 - o.label_smoothing) + o.label_smoothing / 2;
      const Tensor terms = cross_entropy_of(rows.narrow(1, 5, classes), target, o.class_weight, o.focal_gamma);
      sum_of.classes =
          sum_of.classes + sum(terms * chosen.unsqueeze(1)) / (at_least_one * static_cast<double>(classes));
    }
    sum_of.matches = sum_of.matches + count;
  }
  const double share = 3 / static_cast<double>(levels.size()), side = o.image_size / 640;
  sum_of.box = sum_of.box * (o.box * share);
  sum_of.objectness = sum_of.objectness * (o.objectness * share * side * side);
  sum_of.classes = sum_of.classes * (o.classes * share * static_cast<double>(classes) / 80);
  sum_of.loss = sum_of.box + sum_of.objectness + sum_of.classes;
  return sum_of;
}

}  // namespace halfstep::models
