// SPDX-License-Identifier: Apache-2.0
// What is drawn for a training sample, and where its boxes come to lie.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "halfstep/data/detection_augment_internal.h"
#include "halfstep/data/mixup.h"

namespace halfstep::data {
namespace {

/// Each step has numbers of its own, so that turning one on doesn't change what the others draw.
enum class DetectionStep : std::uint64_t {
  mosaic,
  view,
  flip,
  colour,
  paste,
  mixup,
  partner,
  partner_view,
  partner_paste
};

RandomStream detection_stream(const SampleKey& key, DetectionStep step) {
  constexpr std::uint64_t kPurpose = 0x626F786573;  // keeps these apart from other uses of seed and epoch
  const std::uint64_t epoch = derive_seed(key.seed, static_cast<std::uint64_t>(key.epoch), kPurpose);
  return RandomStream(derive_seed(epoch, static_cast<std::uint64_t>(key.sample), static_cast<std::uint64_t>(step)));
}

Projection shifted(double x, double y) { return {{1, 0, x, 0, 1, y, 0, 0, 1}}; }

double area_of(const LabelBox& box) { return (box.right - box.left) * (box.bottom - box.top); }

LabelBox intersection(const LabelBox& a, const LabelBox& b) {
  return {std::max(a.left, b.left), std::max(a.top, b.top), std::min(a.right, b.right), std::min(a.bottom, b.bottom)};
}

bool has_area(const LabelBox& box) { return box.right > box.left && box.bottom > box.top; }

/// Draws the view of a canvas: the rotation, scale, shear, perspective and shift of an input of `size`.
void draw_view(const DetectionTransform& t, RandomStream random, Composition& composition) {
  const auto around = [&](double most) { return random.uniform(-most, most); };
  // All are drawn, used or not, so that each keeps its place.
  const double perspective_x = around(t.perspective), perspective_y = around(t.perspective);
  const double angle = around(t.degrees) * std::numbers::pi / 180;
  const double scale = 1 + around(t.scale);
  const double shear_x = std::tan(around(t.shear) * std::numbers::pi / 180);
  const double shear_y = std::tan(around(t.shear) * std::numbers::pi / 180);
  const double size = static_cast<double>(t.size);
  const double x = (0.5 + around(t.translate)) * size, y = (0.5 + around(t.translate)) * size;
  const double half = static_cast<double>(composition.canvas) / 2;
  const double along = t.degrees == 0 ? scale : scale * std::cos(angle);
  const double across = t.degrees == 0 ? 0 : scale * std::sin(angle);
  const Projection tilt{{1, 0, 0, 0, 1, 0, perspective_x, perspective_y, 1}};
  const Projection rotation{{along, across, 0, -across, along, 0, 0, 0, 1}};
  const Projection sheared{{1, shear_x, 0, shear_y, 1, 0, 0, 0, 1}};
  composition.to_input = shifted(x, y) * sheared * rotation * tilt * shifted(-half, -half);
  composition.scale = scale;
}

/// Four pictures around a point of a canvas twice as large as the input.
void draw_mosaic(const DetectionTransform& t, std::int64_t first, RandomStream random,
                 const DetectionPictures& pictures, std::int64_t count, Composition& composition) {
  const std::int64_t canvas = 2 * t.size;
  composition.canvas = canvas;
  const auto centre = [&] {
    return t.size / 2 + static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(t.size + 1)));
  };
  const std::int64_t x = centre(), y = centre();
  std::array<std::int64_t, 4> chosen{first};
  for (std::size_t i = 1; i < 4; ++i) {
    chosen[i] = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(count)));
  }
  std::rotate(chosen.begin(), chosen.begin() + random.below(4), chosen.end());
  for (std::size_t i = 0; i < 4; ++i) {
    const std::int64_t w = pictures.width(chosen[i]), h = pictures.height(chosen[i]);
    Tile tile{.picture = chosen[i]};
    tile.x = i % 2 == 0 ? x - w : x;
    tile.y = i / 2 == 0 ? y - h : y;
    tile.left = std::max<std::int64_t>(tile.x, 0);
    tile.top = std::max<std::int64_t>(tile.y, 0);
    tile.right = std::min(tile.x + w, canvas);
    tile.bottom = std::min(tile.y + h, canvas);
    composition.tiles.push_back(tile);
  }
}

void place_single(const DetectionTransform& t, std::int64_t picture, const DetectionPictures& pictures,
                  Composition& composition) {
  composition.canvas = t.size;
  const std::int64_t w = pictures.width(picture), h = pictures.height(picture);
  const std::int64_t x = (t.size - w) / 2, y = (t.size - h) / 2;
  composition.tiles.push_back(
      {.picture = picture, .left = x, .top = y, .right = x + w, .bottom = y + h, .x = x, .y = y});
}

/// An object where it is on the canvas; without a box if the canvas doesn't show it.
CanvasObject on_canvas(const LabeledObject& o, const Composition& composition, std::size_t number,
                       const DetectionPictures& pictures) {
  const Tile& tile = composition.tiles[number];
  const auto w = static_cast<double>(pictures.width(tile.picture)),
             h = static_cast<double>(pictures.height(tile.picture));
  const auto x = static_cast<double>(tile.x), y = static_cast<double>(tile.y);
  const LabelBox shown{static_cast<double>(tile.left), static_cast<double>(tile.top), static_cast<double>(tile.right),
                       static_cast<double>(tile.bottom)};
  CanvasObject object{.label = o.label, .tile = number, .box = {}, .segments = {}};
  for (const std::vector<double>& polygon : o.segments) {
    std::vector<double> moved(polygon.size());
    for (std::size_t i = 0; i + 1 < polygon.size(); i += 2) {
      moved[i] = x + polygon[i] * w;
      moved[i + 1] = y + polygon[i + 1] * h;
    }
    moved = clip_polygon(moved, shown);
    if (!moved.empty()) object.segments.push_back(std::move(moved));
  }
  if (!o.segments.empty()) {
    object.box = box_around(object.segments);
    return object;
  }
  object.box = intersection({x + (o.x - o.width / 2) * w, y + (o.y - o.height / 2) * h, x + (o.x + o.width / 2) * w,
                             y + (o.y + o.height / 2) * h},
                            shown);
  return object;
}

/// Copies objects with polygons to the other side of the canvas, where they hide little of what is there.
void draw_pasted(const DetectionTransform& t, RandomStream random, const DetectionData& data,
                 const DetectionPictures& pictures, Composition& composition) {
  constexpr double kMostHidden = 0.3;
  std::vector<CanvasObject> there;
  for (std::size_t i = 0; i < composition.tiles.size(); ++i) {
    for (const LabeledObject& o : data.pictures[static_cast<std::size_t>(composition.tiles[i].picture)].objects) {
      CanvasObject object = on_canvas(o, composition, i, pictures);
      if (has_area(object.box)) there.push_back(std::move(object));
    }
  }
  const auto side = static_cast<double>(composition.canvas);
  std::vector<LabelBox> taken;
  for (const CanvasObject& object : there) taken.push_back(object.box);
  for (const CanvasObject& object : there) {
    if (object.segments.empty() || !random.bernoulli(t.copy_paste)) continue;
    const LabelBox box{side - object.box.right, object.box.top, side - object.box.left, object.box.bottom};
    const bool hides = std::any_of(taken.begin(), taken.end(), [&](const LabelBox& other) {
      const LabelBox common = intersection(box, other);
      return has_area(common) && area_of(common) > kMostHidden * area_of(other);
    });
    if (hides) continue;
    CanvasObject copy = object;
    copy.box = box;
    for (std::vector<double>& polygon : copy.segments) {
      for (std::size_t i = 0; i < polygon.size(); i += 2) polygon[i] = side - polygon[i];
    }
    taken.push_back(box);
    composition.pasted.push_back(std::move(copy));
  }
}

/// Objects smaller than this many pixels, or cut down to less than a share of their area, are not worth learning.
constexpr double kLeastSide = 2, kMostRatio = 100, kLeastShare = 0.1, kLeastShareOfPolygon = 0.01;

void place_object(const CanvasObject& object, const Composition& composition, std::int64_t input,
                  std::vector<LabeledObject>& objects) {
  if (!has_area(object.box)) return;
  const auto side = static_cast<double>(input);
  const LabelBox frame{0, 0, side, side};
  const auto project = [&](const std::vector<double>& points, std::vector<double>& to) {
    // Near the horizon lengths grow without bound.
    constexpr double kLeastDenominator = 0.1;
    to.resize(points.size());
    for (std::size_t i = 0; i + 1 < points.size(); i += 2) {
      const Projection::Point p = composition.to_input.at(points[i], points[i + 1]);
      if (!(p.w > kLeastDenominator)) return false;
      to[i] = p.x;
      to[i + 1] = p.y;
    }
    return true;
  };
  std::vector<std::vector<double>> outlines = object.segments;
  if (outlines.empty()) {
    const LabelBox& b = object.box;
    outlines.push_back({b.left, b.top, b.right, b.top, b.right, b.bottom, b.left, b.bottom});
  }
  std::vector<double> moved;
  std::vector<std::vector<double>> shown;
  for (const std::vector<double>& outline : outlines) {
    if (!project(outline, moved)) return;
    shown.push_back(object.segments.empty() ? moved : clip_polygon(moved, frame));
  }
  const LabelBox box = intersection(box_around(shown), frame);
  const double width = box.right - box.left, height = box.bottom - box.top;
  if (!(width > kLeastSide && height > kLeastSide)) return;
  if (std::max(width / height, height / width) >= kMostRatio) return;
  const double before = area_of(object.box) * composition.scale * composition.scale;
  if (width * height <= (object.segments.empty() ? kLeastShare : kLeastShareOfPolygon) * before) return;
  objects.push_back({.label = object.label,
                     .x = (box.left + box.right) / 2 / side,
                     .y = (box.top + box.bottom) / 2 / side,
                     .width = width / side,
                     .height = height / side});
}

}  // namespace

Projection Projection::inverse() const {
  const auto minor = [&](std::size_t a, std::size_t b, std::size_t c, std::size_t d) {
    return m[a] * m[d] - m[b] * m[c];
  };
  const double det = m[0] * minor(4, 5, 7, 8) - m[1] * minor(3, 5, 6, 8) + m[2] * minor(3, 4, 6, 7);
  Projection result{{minor(4, 5, 7, 8), -minor(1, 2, 7, 8), minor(1, 2, 4, 5), -minor(3, 5, 6, 8), minor(0, 2, 6, 8),
                     -minor(0, 2, 3, 5), minor(3, 4, 6, 7), -minor(0, 1, 6, 7), minor(0, 1, 3, 4)}};
  for (double& v : result.m) v /= det;
  return result;
}

Projection Projection::operator*(const Projection& other) const {
  Projection product;
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = 0; j < 3; ++j) {
      double sum = 0;
      for (std::size_t k = 0; k < 3; ++k) sum += m[3 * i + k] * other.m[3 * k + j];
      product.m[3 * i + j] = sum;
    }
  }
  return product;
}

std::vector<double> clip_polygon(const std::vector<double>& polygon, const LabelBox& to) {
  std::vector<double> in = polygon, out;
  // Each side of the rectangle: an axis, the limit, and which way is inside.
  const struct {
    std::size_t axis;
    double limit, sign;
  } sides[] = {{0, to.left, 1}, {0, to.right, -1}, {1, to.top, 1}, {1, to.bottom, -1}};
  for (const auto& side : sides) {
    out.clear();
    for (std::size_t i = 0; i + 1 < in.size(); i += 2) {
      const std::size_t before = i == 0 ? in.size() - 2 : i - 2;
      const double d0 = side.sign * (in[before + side.axis] - side.limit),
                   d1 = side.sign * (in[i + side.axis] - side.limit);
      if ((d0 < 0) != (d1 < 0)) {
        const double share = d0 / (d0 - d1);
        std::array<double, 2> p{in[before] + share * (in[i] - in[before]),
                                in[before + 1] + share * (in[i + 1] - in[before + 1])};
        p[side.axis] = side.limit;
        out.insert(out.end(), p.begin(), p.end());
      }
      if (d1 >= 0) out.insert(out.end(), {in[i], in[i + 1]});
    }
    std::swap(in, out);
  }
  return in;
}

LabelBox box_around(const std::vector<std::vector<double>>& polygons) {
  LabelBox box{INFINITY, INFINITY, -INFINITY, -INFINITY};
  for (const std::vector<double>& polygon : polygons) {
    for (std::size_t i = 0; i + 1 < polygon.size(); i += 2) {
      box.left = std::min(box.left, polygon[i]);
      box.right = std::max(box.right, polygon[i]);
      box.top = std::min(box.top, polygon[i + 1]);
      box.bottom = std::max(box.bottom, polygon[i + 1]);
    }
  }
  return box.left <= box.right ? box : LabelBox{};
}

SamplePlan plan_sample(const DetectionTransform& t, const SampleKey& key, const DetectionData& data,
                       const DetectionPictures& pictures, std::int64_t input) {
  SamplePlan plan;
  const auto count = std::ssize(data.pictures);
  const auto compose = [&](bool mosaic, std::int64_t first, DetectionStep tiles, DetectionStep view,
                           DetectionStep paste) {
    Composition& composition = plan.parts.emplace_back();
    RandomStream random = detection_stream(key, tiles);
    (void)random.next64();  // whether there is a mosaic, and which picture is the second's first
    (void)random.next64();
    if (mosaic) {
      draw_mosaic(t, first, random, pictures, count, composition);
      if (t.copy_paste > 0) draw_pasted(t, detection_stream(key, paste), data, pictures, composition);
    } else {
      place_single(t, first, pictures, composition);
    }
    draw_view(t, detection_stream(key, view), composition);
  };
  const bool mosaic = detection_stream(key, DetectionStep::mosaic).bernoulli(t.mosaic);
  compose(mosaic, key.sample, DetectionStep::mosaic, DetectionStep::view, DetectionStep::paste);
  RandomStream mixing = detection_stream(key, DetectionStep::mixup);
  if (mosaic && mixing.bernoulli(t.mixup)) {
    constexpr double kBeta = 32;
    plan.share = beta(kBeta, mixing);
    const auto other = static_cast<std::int64_t>(
        detection_stream(key, DetectionStep::partner).below(static_cast<std::uint64_t>(count)));
    compose(true, other, DetectionStep::partner, DetectionStep::partner_view, DetectionStep::partner_paste);
  }
  // Flips and the batch's own size are part of the map: they cost nothing.
  RandomStream flips = detection_stream(key, DetectionStep::flip);
  const bool up_down = flips.bernoulli(t.flip_up_down), left_right = flips.bernoulli(t.flip_left_right);
  const auto side = static_cast<double>(input);
  const double zoom = side / static_cast<double>(t.size);
  const Projection last{
      {left_right ? -zoom : zoom, 0, left_right ? side : 0, 0, up_down ? -zoom : zoom, up_down ? side : 0, 0, 0, 1}};
  for (Composition& composition : plan.parts) {
    composition.to_input = last * composition.to_input;
    composition.scale *= zoom;
  }
  plan.colours = t.hue > 0 || t.saturation > 0 || t.value > 0;
  if (plan.colours) {
    RandomStream colours = detection_stream(key, DetectionStep::colour);
    const double hue = 1 + colours.uniform(-t.hue, t.hue),
                 saturation = 1 + colours.uniform(-t.saturation, t.saturation),
                 value = 1 + colours.uniform(-t.value, t.value);
    plan.hsv = hsv_tables(hue, saturation, value);
  }
  return plan;
}

void place_objects(const Composition& composition, const DetectionData& data, const DetectionPictures& pictures,
                   const std::array<bool, 4>& bad, std::int64_t input, std::vector<LabeledObject>& objects) {
  for (std::size_t i = 0; i < composition.tiles.size(); ++i) {
    if (bad[i]) continue;
    for (const LabeledObject& o : data.pictures[static_cast<std::size_t>(composition.tiles[i].picture)].objects) {
      if (!o.crowd) place_object(on_canvas(o, composition, i, pictures), composition, input, objects);
    }
  }
  for (const CanvasObject& object : composition.pasted) {
    if (!bad[object.tile]) place_object(object, composition, input, objects);
  }
}

}  // namespace halfstep::data
