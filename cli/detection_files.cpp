// SPDX-License-Identifier: Apache-2.0
#include "cli/detection_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/data/image_folder.h"

namespace halfstep::cli {
namespace fs = std::filesystem;

namespace {

// In the order of their numbers, which leave out 12, 26, 29, 30, 45, 66, 68, 69, 71 and 83 (Lin et al. 2014).
constexpr std::string_view kCocoClasses[] = {
    "person",         "bicycle",    "car",           "motorcycle",    "airplane",     "bus",           "train",
    "truck",          "boat",       "traffic light", "fire hydrant",  "stop sign",    "parking meter", "bench",
    "bird",           "cat",        "dog",           "horse",         "sheep",        "cow",           "elephant",
    "bear",           "zebra",      "giraffe",       "backpack",      "umbrella",     "handbag",       "tie",
    "suitcase",       "frisbee",    "skis",          "snowboard",     "sports ball",  "kite",          "baseball bat",
    "baseball glove", "skateboard", "surfboard",     "tennis racket", "bottle",       "wine glass",    "cup",
    "fork",           "knife",      "spoon",         "bowl",          "banana",       "apple",         "sandwich",
    "orange",         "broccoli",   "carrot",        "hot dog",       "pizza",        "donut",         "cake",
    "chair",          "couch",      "potted plant",  "bed",           "dining table", "toilet",        "tv",
    "laptop",         "mouse",      "remote",        "keyboard",      "cell phone",   "microwave",     "oven",
    "toaster",        "sink",       "refrigerator",  "book",          "clock",        "vase",          "scissors",
    "teddy bear",     "hair drier", "toothbrush"};
constexpr std::int64_t kNoCocoNumbers[] = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83};

double rounded(double value, double places) { return std::round(value * places) / places; }

}  // namespace

std::vector<fs::path> pictures_in(const std::vector<fs::path>& inputs) {
  std::vector<fs::path> files;
  for (const fs::path& input : inputs) {
    std::error_code error;
    if (!fs::is_directory(input, error)) {
      files.push_back(input);
      continue;
    }
    std::vector<fs::path> inside;
    fs::directory_iterator entries(input, error);
    for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
      std::error_code unknown;
      if (data::is_image_name(entries->path().filename().native()) && !entries->is_directory(unknown)) {
        inside.push_back(entries->path());
      }
    }
    if (error) throw IoError(fmt::format("{}: can't be read: {}", shown_path(input), error.message()));
    if (inside.empty()) {
      throw IoError(
          fmt::format("{}: expected a folder with pictures, .jpg or .png, got none in it", shown_path(input)));
    }
    std::sort(inside.begin(), inside.end());
    files.insert(files.end(), inside.begin(), inside.end());
  }
  return files;
}

std::vector<std::string> names_of(const std::vector<fs::path>& pictures) {
  std::vector<std::string> names;
  std::set<std::string> taken;
  for (const fs::path& p : pictures) {
    const std::string stem = p.stem().native().empty() ? "picture" : p.stem().native();
    std::string name = stem;
    for (int number = 2; !taken.insert(name).second; ++number) name = fmt::format("{}-{}", stem, number);
    names.push_back(name);
  }
  return names;
}

std::string yolo_labels(const std::vector<models::Detection>& objects, std::int64_t width, std::int64_t height,
                        bool scores) {
  const auto w = static_cast<double>(width), h = static_cast<double>(height);
  std::string text;
  for (const models::Detection& d : objects) {
    text += fmt::format("{} {:.6g} {:.6g} {:.6g} {:.6g}", d.label, (d.left + d.right) / 2 / w,
                        (d.top + d.bottom) / 2 / h, (d.right - d.left) / w, (d.bottom - d.top) / h);
    text += scores ? fmt::format(" {:.6g}\n", d.score) : "\n";
  }
  return text;
}

std::vector<std::int64_t> coco_categories(const std::vector<std::string>& classes) {
  if (!std::equal(classes.begin(), classes.end(), std::begin(kCocoClasses), std::end(kCocoClasses))) return {};
  std::vector<std::int64_t> numbers;
  for (std::int64_t number = 1; numbers.size() < classes.size(); ++number) {
    const auto* end = std::end(kNoCocoNumbers);
    if (std::find(std::begin(kNoCocoNumbers), end, number) == end) numbers.push_back(number);
  }
  return numbers;
}

CocoResults::CocoResults(std::vector<std::string> classes)
    : classes_(std::move(classes)), categories_(coco_categories(classes_)) {}

void CocoResults::add(const std::string& name, const std::vector<models::Detection>& objects) {
  constexpr std::size_t kMostDigits = 18;
  const bool is_number =
      !name.empty() && name.size() <= kMostDigits && name.find_first_not_of("0123456789") == std::string::npos;
  for (const models::Detection& d : objects) {
    nlohmann::ordered_json row;
    const auto label = static_cast<std::size_t>(d.label);
    if (is_number) {
      row["image_id"] = std::stoll(name);
    } else {
      row["image_id"] = printable(name);
    }
    if (label < categories_.size()) {
      row["category_id"] = categories_[label];
    } else if (label < classes_.size()) {
      row["category"] = printable(classes_[label]);
    } else {
      row["category_id"] = d.label;
    }
    // As fine as the files that COCO's evaluation takes usually are.
    row["bbox"] = {rounded(d.left, 1e3), rounded(d.top, 1e3), rounded(d.right - d.left, 1e3),
                   rounded(d.bottom - d.top, 1e3)};
    row["score"] = rounded(d.score, 1e5);
    rows_ += (rows_.empty() ? "" : ",\n") + row.dump();
  }
}

std::string CocoResults::text() const { return "[" + rows_ + "]\n"; }

}  // namespace halfstep::cli
