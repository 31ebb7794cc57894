// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/detection_labels.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <set>
#include <tuple>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/data/detection_labels_internal.h"

namespace halfstep::data {
namespace {

constexpr std::string_view kBlank = " \t\r\v\f";
constexpr std::size_t kShownBytes = 60;

/// The next word of a line, empty at its end.
std::string_view next_word(std::string_view& line) {
  line.remove_prefix(std::min(line.find_first_not_of(kBlank), line.size()));
  const std::string_view word = line.substr(0, line.find_first_of(kBlank));
  line.remove_prefix(word.size());
  return word;
}

/// All of a word as a number; it may be infinite or NaN, which the caller refuses.
std::optional<double> number_of(std::string_view word) {
  if (word.starts_with('+')) word.remove_prefix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (word.empty() || end != word.data() + word.size()) return std::nullopt;
  if (error == std::errc::result_out_of_range) return std::nullopt;
  if (error != std::errc()) return std::nullopt;
  return value;
}

/// One line's object, or what is wrong with it.
std::string parse_line(std::string_view line, std::int64_t classes, LabeledObject& object) {
  const std::string_view first = next_word(line);
  const std::optional<double> label = number_of(first);
  if (!label || *label != std::floor(*label)) {
    return fmt::format("expected the number of a class, got '{}'", printable_start(first, kShownBytes));
  }
  if (!(*label >= 0 && *label < static_cast<double>(classes))) {
    return fmt::format("expected a class from 0 to {}, got {}", classes - 1, printable_start(first, kShownBytes));
  }
  object.label = static_cast<std::int64_t>(*label);
  std::vector<double> numbers;
  for (std::string_view word = next_word(line); !word.empty(); word = next_word(line)) {
    const std::optional<double> number = number_of(word);
    if (!number) return fmt::format("expected numbers behind the class, got '{}'", printable_start(word, kShownBytes));
    numbers.push_back(*number);
  }
  if (numbers.size() == 4) {
    const double x = numbers[0], y = numbers[1], half_width = numbers[2] / 2, half_height = numbers[3] / 2;
    return place_box({x - half_width, y - half_height, x + half_width, y + half_height}, object);
  }
  if (numbers.size() < 6 || numbers.size() % 2 != 0) {
    return fmt::format("expected a class and 4 numbers, or the corners of a polygon, got {} numbers behind the class",
                       numbers.size());
  }
  object.segments.push_back(std::move(numbers));
  return place_segments(object);
}

}  // namespace

void LabelProblems::add(std::string text) {
  ++skipped;
  if (first.size() < kMost) first.push_back(std::move(text));
}

void LabelProblems::add(const LabelProblems& other) {
  skipped += other.skipped;
  for (const std::string& text : other.first) {
    if (first.size() < kMost) first.push_back(text);
  }
}

std::string place_box(const LabelBox& box, LabeledObject& object) {
  for (const double edge : {box.left, box.top, box.right, box.bottom}) {
    if (!std::isfinite(edge)) return fmt::format("expected finite numbers, got {}", edge);
  }
  const double width = box.right - box.left, height = box.bottom - box.top;
  if (!(width > 0 && height > 0)) return "expected a box with a width and a height over 0";
  const LabelBox in{std::clamp(box.left, 0.0, 1.0), std::clamp(box.top, 0.0, 1.0), std::clamp(box.right, 0.0, 1.0),
                    std::clamp(box.bottom, 0.0, 1.0)};
  const double share = (in.right - in.left) / width * ((in.bottom - in.top) / height);
  if (!(share >= kLeastInside)) {
    return fmt::format(
        "expected a box that lies in the picture, got one from ({:.6g}, {:.6g}) to ({:.6g}, {:.6g}), where the picture "
        "is from 0 to 1",
        box.left, box.top, box.right, box.bottom);
  }
  object.x = (in.left + in.right) / 2;
  object.y = (in.top + in.bottom) / 2;
  object.width = in.right - in.left;
  object.height = in.bottom - in.top;
  // What remains of a box that is narrower than the distance of two numbers.
  if (!(object.width > 0 && object.height > 0)) return "expected a box with a width and a height over 0";
  return {};
}

std::string place_segments(LabeledObject& object) {
  LabelBox box{INFINITY, INFINITY, -INFINITY, -INFINITY};
  for (const std::vector<double>& polygon : object.segments) {
    for (std::size_t i = 0; i + 1 < polygon.size(); i += 2) {
      if (!std::isfinite(polygon[i]) || !std::isfinite(polygon[i + 1])) return "expected finite numbers in a polygon";
      box.left = std::min(box.left, polygon[i]);
      box.right = std::max(box.right, polygon[i]);
      box.top = std::min(box.top, polygon[i + 1]);
      box.bottom = std::max(box.bottom, polygon[i + 1]);
    }
  }
  std::string wrong = place_box(box, object);
  if (!wrong.empty()) return wrong;
  for (std::vector<double>& polygon : object.segments) {
    for (double& number : polygon) number = std::clamp(number, 0.0, 1.0);
  }
  return {};
}

void drop_equal(std::vector<LabeledObject>& objects, std::string_view name, LabelProblems& problems) {
  std::set<std::tuple<std::int64_t, double, double, double, double, bool>> seen;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < objects.size(); ++i) {
    const LabeledObject& o = objects[i];
    if (!seen.emplace(o.label, o.x, o.y, o.width, o.height, o.crowd).second) {
      problems.add(fmt::format("{}: expected different labels, got class {} at ({:.6g}, {:.6g}) twice; one is kept",
                               printable(name), o.label, o.x, o.y));
      continue;
    }
    if (kept != i) objects[kept] = std::move(objects[i]);
    ++kept;
  }
  objects.resize(kept);
}

std::vector<LabeledObject> parse_yolo_labels(std::string_view text, std::string_view name, std::int64_t classes,
                                             LabelProblems& problems) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  std::vector<LabeledObject> objects;
  for (std::int64_t number = 1; !text.empty(); ++number) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    if (line.find_first_not_of(kBlank) == std::string_view::npos) continue;
    LabeledObject object;
    const std::string wrong = parse_line(line, classes, object);
    if (wrong.empty()) {
      objects.push_back(std::move(object));
    } else {
      problems.add(fmt::format("{}:{}: {}", printable(name), number, wrong));
    }
  }
  drop_equal(objects, name, problems);
  return objects;
}

}  // namespace halfstep::data
