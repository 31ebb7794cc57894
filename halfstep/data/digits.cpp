// SPDX-License-Identifier: Apache-2.0
// Only additions, products, quotients and square roots are used here: IEEE 754 rounds them the same everywhere, which
// the mathematical functions of a C library don't promise.
#include "halfstep/data/digits.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "halfstep/core/error.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/philox.h"
#include "halfstep/data/digit_styles.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::data {
namespace {

constexpr int kSize = 28;

/// Random numbers in a row from a stream of its own.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : state_{.seed = seed, .offset = 0} {}

  std::uint32_t word() {
    if (used_ == block_.size()) {
      block_ = philox_block(state_, next_++);
      used_ = 0;
    }
    return block_[used_++];
  }
  float uniform() { return uniform_f32(word()); }
  float between(float low, float high) { return low + (high - low) * uniform(); }
  bool chance(float probability) { return uniform() < probability; }
  /// Close to a normal distribution of mean 0 and deviation 1, and never beyond 3.5: the sum of four uniform numbers.
  float normal() {
    const std::uint32_t a = word();
    const std::uint32_t b = word();
    const std::uint32_t sum = (a & 0xFFFF) + (a >> 16) + (b & 0xFFFF) + (b >> 16);
    constexpr float kRootOf3 = 1.7320508F;
    return (static_cast<float>(sum) * (1.0F / 65536) - 2) * kRootOf3;
  }
  PhiloxBlock block() { return philox_block(state_, next_++); }

 private:
  PhiloxState state_;
  std::uint64_t next_ = 0;
  PhiloxBlock block_{};
  std::size_t used_ = block_.size();
};

/// A point of the pen's path on the picture, in pixels.
struct Ink {
  float x;
  float y;
  float radius;
};

/// How one digit is written: everything but its style.
struct Hand {
  float width;     // stretches x
  float unsteady;  // deviation of the pen's points
  float bend_x;    // bends verticals
  float bend_y;    // bends horizontals
  float widen;     // makes the lower half wider than the upper one
  float slant;     // shear to the right
  float angle;     // rotation in radians
  float height;    // in pixels
  float shift_x;   // of the middle, in pixels
  float shift_y;
  float radius;    // of the pen, in pixels
  float pressure;  // change of the radius along a stroke
  float softness;  // width of the edge, in pixels
  float darkness;  // of the ink, 0 to 1
  float grain;     // noise of the ink
};

Hand random_hand(Dice& dice, int digit) {
  Hand hand{};
  hand.width = dice.between(0.76F, 1.26F);
  hand.unsteady = 0.012F + 0.06F * dice.uniform() * dice.uniform();
  hand.bend_x = 0.16F * dice.normal();
  hand.bend_y = 0.14F * dice.normal();
  hand.widen = 0.16F * dice.normal();
  hand.slant = 0.13F + 0.18F * dice.normal();
  hand.angle = 0.09F * dice.normal();
  // A sloped one is common, a lying one is not.
  if (digit == 1) hand.angle += 0.1F * dice.normal();
  hand.height = dice.between(16.5F, 20.5F);
  hand.shift_x = 0.7F * dice.normal();
  hand.shift_y = 0.7F * dice.normal();
  hand.radius = 0.85F + 1.0F * dice.uniform() * dice.uniform() + 0.35F * dice.uniform();
  hand.pressure = 0.22F * dice.normal();
  hand.softness = dice.between(0.9F, 1.8F);
  hand.darkness = 1 - 0.25F * dice.uniform() * dice.uniform();
  hand.grain = 0.16F * dice.uniform();
  return hand;
}

const DigitStyle& random_style(Dice& dice, int digit) {
  const auto styles = digit_styles(digit);
  float total = 0;
  for (const DigitStyle& style : styles) total += style.weight;
  float rest = total * dice.uniform();
  for (const DigitStyle& style : styles) {
    if (rest < style.weight) return style;
    rest -= style.weight;
  }
  return styles.front();
}

/// Where a point of the style lands with this hand, in units of the height around the middle.
PenPoint place(const Hand& hand, PenPoint point) {
  constexpr float kMiddle = 0.3F;  // the styles are some 0.6 wide
  float x = (point.x - kMiddle) * hand.width;
  float y = point.y - 0.5F;
  const float bent_x = x * (1 + hand.widen * y) + hand.bend_x * (y * y - 0.25F) * 0.7F;
  const float bent_y = y + hand.bend_y * x * x * 2;
  x = bent_x - hand.slant * bent_y;
  y = bent_y;
  // Sine and cosine by the first terms of their series: a rotation for angles as small as these.
  const float a = hand.angle;
  const float sine = a - a * a * a / 6;
  const float cosine = 1 - a * a / 2 + a * a * a * a / 24;
  return {x * cosine - y * sine, x * sine + y * cosine, point.corner};
}

float spline(float a, float b, float c, float d, float t) {
  // Catmull and Rom's cubic through b (t = 0) and c (t = 1), with tangents from the neighbours.
  return b + 0.5F * t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)));
}

/// The path through the points of a stroke, smooth but at its corners.
void trace(const std::vector<PenPoint>& points, const Hand& hand, std::vector<Ink>& path) {
  const std::size_t n = points.size();
  constexpr int kSteps = 5;
  for (std::size_t i = 0; i + 1 < n; ++i) {
    const PenPoint& b = points[i];
    const PenPoint& c = points[i + 1];
    const PenPoint& a = i > 0 && !b.corner ? points[i - 1] : b;
    const PenPoint& d = i + 2 < n && !c.corner ? points[i + 2] : c;
    for (int step = i == 0 ? 0 : 1; step <= kSteps; ++step) {
      const float t = static_cast<float>(step) / kSteps;
      const float along = (static_cast<float>(i) + t) / static_cast<float>(n - 1);
      // Heavier or lighter towards the end of the stroke, and a little thinner where the pen is put on and lifted.
      const float from_end = std::min(along, 1 - along);
      const float radius =
          hand.radius * (1 + hand.pressure * (along - 0.5F) * 2) * (0.8F + 0.2F * std::min(1.0F, from_end * 8));
      path.push_back({spline(a.x, b.x, c.x, d.x, t), spline(a.y, b.y, c.y, d.y, t), std::max(radius, 0.5F)});
    }
  }
}

/// Raises the pixels near the segment from p to q: 1 inside the pen's track, falling to 0 over the softness of its
/// edge.
void draw_segment(const Ink& p, const Ink& q, float softness, std::array<float, kSize * kSize>& canvas) {
  const float reach = std::max(p.radius, q.radius) + softness * 0.5F;
  const float reach2 = reach * reach;
  const int x0 = std::max(0, static_cast<int>(std::min(p.x, q.x) - reach));
  const int x1 = std::min(kSize - 1, static_cast<int>(std::max(p.x, q.x) + reach) + 1);
  const int y0 = std::max(0, static_cast<int>(std::min(p.y, q.y) - reach));
  const int y1 = std::min(kSize - 1, static_cast<int>(std::max(p.y, q.y) + reach) + 1);
  const float dx = q.x - p.x;
  const float dy = q.y - p.y;
  const float length2 = dx * dx + dy * dy;
  const float inverse_length2 = length2 > 0 ? 1 / length2 : 0;
  const float inverse_softness = 1 / softness;
  const float dr = q.radius - p.radius;
  for (int y = y0; y <= y1; ++y) {
    float* row = canvas.data() + y * kSize;
    const float py = static_cast<float>(y) - p.y;
    for (int x = x0; x <= x1; ++x) {
      const float px = static_cast<float>(x) - p.x;
      const float t = std::clamp((px * dx + py * dy) * inverse_length2, 0.0F, 1.0F);
      const float ex = px - t * dx;
      const float ey = py - t * dy;
      const float distance2 = ex * ex + ey * ey;
      if (distance2 >= reach2) continue;
      const float distance = std::sqrt(distance2);
      const float value = std::clamp((p.radius + t * dr - distance) * inverse_softness + 0.5F, 0.0F, 1.0F);
      row[x] = std::max(row[x], value);
    }
  }
}

void to_pixels(const std::array<float, kSize * kSize>& canvas, const Hand& hand, Dice& dice,
               std::span<std::uint8_t, kDigitPixels> pixels) {
  const float full = 255 * hand.darkness;
  // Specks of dust on some of the pictures.
  const int specks = dice.chance(0.2F) ? static_cast<int>(dice.between(1, 8)) : 0;
  std::array<float, 4> grain{};
  for (std::size_t i = 0; i < canvas.size(); i += 16) {
    const PhiloxBlock block = dice.block();
    for (std::size_t w = 0; w < 4; ++w) {
      std::uint32_t word = block[w];
      for (float& g : grain) {
        g = static_cast<float>(word & 0xFF) * (1.0F / 255) - 0.5F;
        word >>= 8;
      }
      for (std::size_t b = 0; b < 4; ++b) {
        const float v = canvas[i + 4 * w + b];
        const float smooth = v * v * (3 - 2 * v);
        const float value = smooth * full * (1 + hand.grain * grain[b]);
        pixels[i + 4 * w + b] = static_cast<std::uint8_t>(std::min(value, 255.0F) + 0.5F > 255 ? 255 : value + 0.5F);
      }
    }
  }
  for (int s = 0; s < specks; ++s) {
    auto& pixel = pixels[dice.word() % kDigitPixels];
    pixel = std::max(pixel, static_cast<std::uint8_t>(dice.between(30, 140)));
  }
}

struct Scratch {
  std::vector<PenPoint> points;
  std::vector<Ink> path;
  std::vector<std::size_t> ends;
};

int draw(std::uint64_t seed, Split split, std::int64_t index, std::span<std::uint8_t, kDigitPixels> pixels,
         Scratch& scratch) {
  Dice dice(derive_seed(seed, split == Split::kTrain ? 0 : 1, static_cast<std::uint64_t>(index)));
  const int digit = static_cast<int>(std::uint64_t{dice.word()} * 10 >> 32);
  const Hand hand = random_hand(dice, digit);
  const DigitStyle& style = random_style(dice, digit);

  scratch.path.clear();
  scratch.ends.clear();
  for (const PenStroke& stroke : style.strokes) {
    scratch.points.clear();
    // Separate strokes miss each other a little, the points of one stroke follow each other more closely.
    const float miss_x = hand.unsteady * dice.normal();
    const float miss_y = hand.unsteady * dice.normal();
    for (std::size_t i = 0; i < stroke.size(); ++i) {
      PenPoint point = stroke[i];
      const bool end = i == 0 || i + 1 == stroke.size();
      const float loose = hand.unsteady * (end ? 1.6F : 1.0F);
      point.x += miss_x + loose * dice.normal();
      point.y += miss_y + loose * dice.normal();
      scratch.points.push_back(place(hand, point));
    }
    trace(scratch.points, hand, scratch.path);
    scratch.ends.push_back(scratch.path.size());
  }

  // Written size and place are measured on what came out, as the pictures of MNIST were fitted into a box. A digit that
  // is far wider than high is kept inside the picture.
  float left = 1e9F;
  float right = -1e9F;
  float top = 1e9F;
  float bottom = -1e9F;
  for (const Ink& ink : scratch.path) {
    left = std::min(left, ink.x);
    right = std::max(right, ink.x);
    top = std::min(top, ink.y);
    bottom = std::max(bottom, ink.y);
  }
  const float room = kSize - 3 - 2 * hand.radius;
  const float height = std::max(bottom - top, 0.1F);
  const float width = std::max(right - left, 0.1F);
  const float scale = std::min({hand.height / std::max(height, 0.8F * width), room / width, room / height});
  const float spare_x = (room - scale * width) * 0.5F;
  const float spare_y = (room - scale * height) * 0.5F;
  const float middle = (kSize - 1) * 0.5F;
  const float move_x = middle + std::clamp(hand.shift_x, -spare_x, spare_x) - scale * (left + right) * 0.5F;
  const float move_y = middle + std::clamp(hand.shift_y, -spare_y, spare_y) - scale * (top + bottom) * 0.5F;
  for (Ink& ink : scratch.path) {
    ink.x = ink.x * scale + move_x;
    ink.y = ink.y * scale + move_y;
  }

  std::array<float, kSize * kSize> canvas{};
  std::size_t begin = 0;
  for (const std::size_t end : scratch.ends) {
    for (std::size_t i = begin; i + 1 < end; ++i)
      draw_segment(scratch.path[i], scratch.path[i + 1], hand.softness, canvas);
    begin = end;
  }
  to_pixels(canvas, hand, dice, pixels);
  return digit;
}

}  // namespace

MnistData make_digits(Split split, const DigitOptions& options) {
  if (options.count < 0) fail<Error>("make_digits: expected a count of at least 0, got {}", options.count);
  if (options.count > std::numeric_limits<std::int64_t>::max() / kDigitPixels) {
    fail<OutOfMemoryError>("make_digits: {} digits are more than memory has addresses for", options.count);
  }
  MnistData data;
  data.count = options.count != 0 ? options.count : split == Split::kTrain ? 60000 : 10000;
  data.images.resize(static_cast<std::size_t>(data.count * kDigitPixels));
  data.labels.resize(static_cast<std::size_t>(data.count));
  constexpr std::int64_t kGrain = 8;  // a digit takes some microseconds
  parallel_for(data.count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    Scratch scratch;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::span<std::uint8_t, kDigitPixels> pixels(data.images.data() + i * kDigitPixels, kDigitPixels);
      data.labels[static_cast<std::size_t>(i)] =
          static_cast<std::uint8_t>(draw(options.seed, split, i, pixels, scratch));
    }
  });
  return data;
}

int draw_digit(std::uint64_t seed, Split split, std::int64_t index, std::span<std::uint8_t, kDigitPixels> pixels) {
  Scratch scratch;
  return draw(seed, split, index, pixels, scratch);
}

}  // namespace halfstep::data
