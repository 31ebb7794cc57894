// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/data/detection_labels_internal.h"

namespace halfstep::data {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kMostSide = 1 << 24;

struct CocoAnnotation {
  std::int64_t number = 0;  // in its list
  std::int64_t id = -1, image = 0, category = 0;
  bool boxed = false;
  LabelBox box;  // in pixels
  double area = -1;
  bool crowd = false;
  std::vector<std::vector<double>> segments;  // in pixels
};

const Json* find(const Json& object, const char* key) {
  const auto at = object.find(key);
  return at == object.end() || at->is_null() ? nullptr : &*at;
}

bool whole_number(const Json* value, std::int64_t& to) {
  if (value == nullptr) return false;
  if (value->is_number_unsigned()) {
    if (value->get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) return false;
    to = value->get<std::int64_t>();
    return true;
  }
  if (value->is_number_integer()) {
    to = value->get<std::int64_t>();
    return true;
  }
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (!value->is_number_float()) return false;
  const double number = value->get<double>();
  if (!(std::abs(number) <= kExact) || number != std::floor(number)) return false;
  to = static_cast<std::int64_t>(number);
  return true;
}

/// Reads the file as it is parsed: of the annotations, which are most of it, nothing is kept but what counts.
class CocoReader {
 public:
  CocoReader(std::string_view name, const CocoOptions& options) : name_(printable(name)), options_(options) {}

  DetectionData read(std::string_view text) {
    const auto visit = [this](int depth, Json::parse_event_t event, Json& value) { return on(depth, event, value); };
    try {
      const Json rest = Json::parse(text, visit);
      if (!rest.is_object()) fail<IoError>("{}: expected a JSON object with images and annotations", name_);
    } catch (const Json::exception& error) {
      fail<IoError>("{}: expected COCO's JSON: {}", name_, printable_start(error.what(), 300));
    }
    for (const char* key : {"images", "annotations", "categories"}) {
      if (!lists_.contains(key)) {
        fail<IoError>("{}: expected COCO's JSON with the lists images, annotations and categories, got no '{}'", name_,
                      key);
      }
    }
    number_categories();
    for (CocoAnnotation& a : annotations_) place(a);
    for (LabeledPicture& picture : data_.pictures) drop_equal(picture.objects, name_, problems_);
    data_.skipped = problems_.skipped;
    data_.problems = std::move(problems_.first);
    return std::move(data_);
  }

 private:
  /// Whether to keep what was just parsed.
  bool on(int depth, Json::parse_event_t event, Json& value) {
    using Event = Json::parse_event_t;
    if (depth == 1 && event == Event::key) {
      key_ = value.get<std::string>();
      known_ = key_ == "images" || key_ == "annotations" || key_ == "categories";
      number_ = 0;
      return known_;
    }
    if (!known_) return true;
    if (depth == 1 && event == Event::array_start) lists_.insert(key_);
    if (depth == 2 && event == Event::object_end) {
      if (key_ == "images") {
        add_image(value);
      } else if (key_ == "annotations") {
        add_annotation(value);
      } else {
        add_category(value);
      }
      ++number_;
      return false;
    }
    if (depth == 2 && event == Event::value) {
      problem(fmt::format("{}[{}]: expected an object", key_, number_++));
      return false;
    }
    return true;
  }

  void problem(const std::string& text) { problems_.add(name_ + ": " + text); }

  void add_image(const Json& image) {
    LabeledPicture picture;
    const Json* file = find(image, "file_name");
    const bool has_file = file != nullptr && file->is_string() && !file->get_ref<const std::string&>().empty() &&
                          file->get_ref<const std::string&>().find('\0') == std::string::npos;
    if (!whole_number(find(image, "id"), picture.id) || !has_file) {
      problem(fmt::format("images[{}]: expected a whole number 'id' and a text 'file_name'", number_));
      return;
    }
    if (!whole_number(find(image, "width"), picture.width) || !whole_number(find(image, "height"), picture.height) ||
        picture.width < 1 || picture.height < 1 || picture.width > kMostSide || picture.height > kMostSide) {
      problem(fmt::format("images[{}]: expected a 'width' and a 'height' over 0", number_));
      return;
    }
    picture.file = file->get_ref<const std::string&>();
    if (!places_.emplace(picture.id, data_.pictures.size()).second) {
      problem(fmt::format("images[{}]: expected different ids, got {} twice", number_, picture.id));
      return;
    }
    data_.pictures.push_back(std::move(picture));
  }

  void add_category(const Json& category) {
    if (number_ >= kMostDetectionClasses) {
      fail<IoError>("{}: expected at most {} categories, got more", name_, kMostDetectionClasses);
    }
    std::int64_t id = 0;
    const Json* name = find(category, "name");
    if (!whole_number(find(category, "id"), id) || name == nullptr || !name->is_string()) {
      fail<IoError>("{}: categories[{}]: expected a whole number 'id' and a text 'name'", name_, number_);
    }
    if (!categories_.emplace(id, printable(name->get_ref<const std::string&>())).second) {
      fail<IoError>("{}: categories[{}]: expected different ids, got {} twice", name_, number_, id);
    }
  }

  void add_annotation(const Json& json) {
    CocoAnnotation a;
    a.number = number_;
    if (!whole_number(find(json, "image_id"), a.image) || !whole_number(find(json, "category_id"), a.category)) {
      problem(fmt::format("annotations[{}]: expected whole numbers 'image_id' and 'category_id'", number_));
      return;
    }
    if (whole_number(find(json, "id"), a.id) && !ids_.insert(a.id).second) {
      problem(fmt::format("annotations[{}]: expected different ids, got {} twice", number_, a.id));
      return;
    }
    std::int64_t crowd = 0;
    const Json* flag = find(json, "iscrowd");
    a.crowd = flag != nullptr && (flag->is_boolean() ? flag->get<bool>() : whole_number(flag, crowd) && crowd != 0);
    if (const Json* area = find(json, "area"); area != nullptr && area->is_number()) {
      const double value = area->get<double>();
      if (std::isfinite(value) && value >= 0) a.area = value;
    }
    if (const Json* box = find(json, "bbox"); box != nullptr && box->is_array() && box->size() == 4) {
      a.boxed = std::all_of(box->begin(), box->end(), [](const Json& n) { return n.is_number(); });
      if (a.boxed) {
        const double x = (*box)[0].get<double>(), y = (*box)[1].get<double>();
        a.box = {x, y, x + (*box)[2].get<double>(), y + (*box)[3].get<double>()};
      }
    }
    if (options_.segment_boxes || options_.keep_segments) add_segments(json, a);
    if (!a.boxed && a.segments.empty()) {
      problem(fmt::format("annotations[{}]: expected a 'bbox' of 4 numbers", number_));
      return;
    }
    annotations_.push_back(std::move(a));
  }

  /// Polygons; of anything else nothing.
  void add_segments(const Json& json, CocoAnnotation& a) {
    const Json* list = find(json, "segmentation");
    if (a.crowd || list == nullptr || !list->is_array()) return;
    for (const Json& polygon : *list) {
      const bool sound = polygon.is_array() && polygon.size() >= 6 && polygon.size() % 2 == 0 &&
                         std::all_of(polygon.begin(), polygon.end(), [](const Json& n) { return n.is_number(); });
      if (!sound) {
        a.segments.clear();
        if (a.boxed) return;
        break;
      }
      a.segments.push_back(polygon.get<std::vector<double>>());
    }
  }

  void number_categories() {
    if (categories_.empty()) fail<IoError>("{}: expected categories, got none", name_);
    for (const auto& [id, name] : categories_) {
      labels_.emplace(id, std::ssize(data_.classes));
      data_.classes.push_back(name);
      data_.category_ids.push_back(id);
    }
  }

  void place(CocoAnnotation& a) {
    const auto picture_at = places_.find(a.image);
    const auto label = labels_.find(a.category);
    if (picture_at == places_.end() || label == labels_.end()) {
      problem(fmt::format("annotations[{}]: expected {}, got {}", a.number,
                          picture_at == places_.end() ? "the id of an image that is in the file" : "a category's id",
                          picture_at == places_.end() ? a.image : a.category));
      return;
    }
    LabeledPicture& picture = data_.pictures[picture_at->second];
    const auto w = static_cast<double>(picture.width), h = static_cast<double>(picture.height);
    LabeledObject object{.label = label->second, .area = a.area, .crowd = a.crowd};
    object.segments = std::move(a.segments);
    for (std::vector<double>& polygon : object.segments) {
      for (std::size_t i = 0; i + 1 < polygon.size(); i += 2) {
        polygon[i] /= w;
        polygon[i + 1] /= h;
      }
    }
    const bool by_segments = !object.segments.empty() && (options_.segment_boxes || !a.boxed);
    std::string wrong;
    if (!object.segments.empty()) {
      wrong = place_segments(object);
      if (!wrong.empty() && a.boxed) object.segments.clear();  // the box may still be sound
    }
    if (!by_segments || (!wrong.empty() && a.boxed)) {
      wrong = place_box({a.box.left / w, a.box.top / h, a.box.right / w, a.box.bottom / h}, object);
    }
    if (!wrong.empty()) {
      problem(fmt::format("annotations[{}]: {}", a.number, wrong));
      return;
    }
    if (!options_.keep_segments) object.segments.clear();
    picture.objects.push_back(std::move(object));
  }

  std::string name_;
  CocoOptions options_;
  DetectionData data_;
  LabelProblems problems_;
  std::string key_;  // of the list that is read
  bool known_ = false;
  std::int64_t number_ = 0;  // in that list
  std::unordered_set<std::string> lists_;
  std::unordered_map<std::int64_t, std::size_t> places_;  // of pictures by their ids
  std::unordered_set<std::int64_t> ids_;                  // of annotations
  std::map<std::int64_t, std::string> categories_;
  std::unordered_map<std::int64_t, std::int64_t> labels_;  // by the category's id
  std::vector<CocoAnnotation> annotations_;
};

}  // namespace

DetectionData parse_coco(std::string_view text, std::string_view name, const CocoOptions& options) {
  return CocoReader(name, options).read(text);
}

}  // namespace halfstep::data
