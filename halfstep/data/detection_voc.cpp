// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <cmath>
#include <pugixml.hpp>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/data/detection_labels_internal.h"

namespace halfstep::data {
namespace {

/// The line of an offset, for rising offsets: a file is counted through once.
class LineCounter {
 public:
  explicit LineCounter(std::string_view text) : text_(text) {}
  std::int64_t at(std::ptrdiff_t offset) {
    const auto end = static_cast<std::size_t>(std::clamp<std::ptrdiff_t>(offset, 0, std::ssize(text_)));
    if (end > counted_) {
      line_ += std::ranges::count(text_.substr(counted_, end - counted_), '\n');
      counted_ = end;
    }
    return line_;
  }

 private:
  std::string_view text_;
  std::size_t counted_ = 0;
  std::int64_t line_ = 1;
};

/// An element's text as a number; NaN for none.
double number_in(const pugi::xml_node& node) {
  std::string_view text = node.text().get();
  const auto blank = [](char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return !text.empty() && error == std::errc() && end == text.data() + text.size() ? value : NAN;
}

/// A picture's side; 0 for none.
std::int64_t side_in(const pugi::xml_node& node) {
  constexpr double kMostPixels = 1 << 24;
  const double value = number_in(node);
  return value >= 1 && value <= kMostPixels ? static_cast<std::int64_t>(value) : 0;
}

}  // namespace

VocAnnotation parse_voc(std::string_view text, std::string_view name, LabelProblems& problems) {
  const std::string shown = printable(name);
  pugi::xml_document document;
  // No entity is declared by a document's own type, so none can grow.
  const pugi::xml_parse_result result = document.load_buffer(text.data(), text.size(), pugi::parse_default);
  LineCounter lines(text);
  if (!result) {
    fail<IoError>("{}:{}: expected XML of Pascal VOC: {}", shown, lines.at(result.offset), result.description());
  }
  const pugi::xml_node root = document.child("annotation");
  if (!root) {
    fail<IoError>("{}: expected XML of Pascal VOC with the element 'annotation', got '{}'", shown,
                  printable_start(document.document_element().name(), 60));
  }
  VocAnnotation annotation;
  annotation.file = root.child("filename").text().get();
  annotation.width = side_in(root.child("size").child("width"));
  annotation.height = side_in(root.child("size").child("height"));
  if (annotation.width == 0 || annotation.height == 0) annotation.width = annotation.height = 0;
  for (const pugi::xml_node& object : root.children("object")) {
    const std::int64_t line = lines.at(object.offset_debug());
    const char* const label = object.child("name").text().get();
    if (*label == '\0') {
      problems.add(fmt::format("{}:{}: expected an object with a name, got none", shown, line));
      continue;
    }
    const pugi::xml_node box = object.child("bndbox");
    const LabelBox edges{number_in(box.child("xmin")), number_in(box.child("ymin")), number_in(box.child("xmax")),
                         number_in(box.child("ymax"))};
    if (!std::isfinite(edges.left + edges.top + edges.right + edges.bottom)) {
      problems.add(fmt::format("{}:{}: expected a bndbox with numbers xmin, ymin, xmax, ymax", shown, line));
      continue;
    }
    annotation.names.emplace_back(label);
    annotation.boxes.push_back(edges);
    annotation.lines.push_back(line);
  }
  return annotation;
}

std::vector<LabeledObject> voc_objects(const VocAnnotation& annotation, std::string_view name, std::int64_t width,
                                       std::int64_t height, std::span<const std::string> classes,
                                       LabelProblems& problems) {
  if (width < 1 || height < 1) {
    fail<Error>("voc_objects: expected a picture's sizes over 0, got {}x{}", width, height);
  }
  std::vector<LabeledObject> objects;
  const auto w = static_cast<double>(width), h = static_cast<double>(height);
  for (std::size_t i = 0; i < annotation.boxes.size(); ++i) {
    const auto place = std::find(classes.begin(), classes.end(), annotation.names[i]);
    LabeledObject object;
    std::string wrong;
    if (place == classes.end()) {
      wrong = fmt::format("expected one of the {} classes, got '{}'", classes.size(),
                          printable_start(annotation.names[i], 60));
    } else {
      const LabelBox& box = annotation.boxes[i];
      object.label = place - classes.begin();
      wrong = place_box({box.left / w, box.top / h, box.right / w, box.bottom / h}, object);
    }
    if (wrong.empty()) {
      objects.push_back(std::move(object));
    } else {
      problems.add(fmt::format("{}:{}: {}", printable(name), annotation.lines[i], wrong));
    }
  }
  drop_equal(objects, name, problems);
  return objects;
}

}  // namespace halfstep::data
