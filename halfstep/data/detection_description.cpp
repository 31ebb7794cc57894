// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/detection_description.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <set>
#include <system_error>
#include <unordered_set>

#include "halfstep/core/fail.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/text.h"
#include "halfstep/data/detection_description_internal.h"
#include "halfstep/data/detection_labels_internal.h"
#include "halfstep/data/image_folder.h"

namespace halfstep::data {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMostLabelBytes = 64 << 20;
constexpr std::uint64_t kMostJsonBytes = std::uint64_t{8} << 30;

bool has_ending(const fs::path& file, std::initializer_list<const char*> endings) {
  return std::any_of(endings.begin(), endings.end(), [&](const char* ending) { return file.extension() == ending; });
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

/// All pictures in a folder and below, sorted. Links to folders are not followed, as they could go round in a circle.
void add_folder(const fs::path& folder, std::vector<fs::path>& files) {
  const auto first = std::ssize(files);
  std::error_code error;
  for (fs::recursive_directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (!is_image_name(entry->path().filename().native())) continue;
    std::error_code ignored;
    if (entry->is_regular_file(ignored)) files.push_back(entry->path());
  }
  if (error) fail<IoError>("load_detection: reading {}: {}", shown_path(folder), error.message());
  std::sort(files.begin() + first, files.end());
}

/// The pictures of a list: relative to the root or, where the first isn't there, to the list's folder; a line that
/// begins with ./ is relative to the list's folder in any case.
void add_list(const fs::path& list, const fs::path& root, std::vector<fs::path>& files) {
  const std::vector<std::string> lines = read_lines(list);
  bool beside = true;
  for (const std::string& line : lines) {
    if (line.starts_with("./")) continue;
    beside = !is_file(root / line) && is_file(list.parent_path() / line);
    break;
  }
  for (const std::string& line : lines) {
    files.push_back((beside || line.starts_with("./") ? list.parent_path() : root) / line);
  }
}

/// The file of YOLO's labels for a picture.
fs::path label_file(const fs::path& picture) {
  std::vector<fs::path> folders;
  for (const fs::path& part : picture.parent_path()) folders.push_back(part);
  const auto last = std::find(folders.rbegin(), folders.rend(), fs::path("images"));
  if (last != folders.rend()) *last = "labels";
  fs::path file;
  for (const fs::path& part : folders) file /= part;
  return (file / picture.filename()).replace_extension(".txt");
}

std::string missing_label_text(const fs::path& first) {
  return fmt::format("{}, which isn't there, nor are those of the other pictures", shown_path(first));
}

/// Pictures with their labels, each found by `read(i, picture, problems)`, which returns whether to keep it. The order
/// stays.
class Collector {
 public:
  explicit Collector(const DetectionLoadOptions& options) : options_(options) {}

  template <class Read>
  void run(std::vector<LabeledPicture> pictures, const Read& read, DetectionData& data, LabelProblems& problems) const {
    std::vector<LabelProblems> own(pictures.size());
    std::vector<char> kept(pictures.size(), 0);
    for_each_file(pictures.size(), [&](std::size_t i) {
      try {
        kept[i] = check(pictures[i], own[i]) && read(i, pictures[i], own[i]) ? 1 : 0;
      } catch (const std::exception& error) {  // none may leave a thread
        own[i].add(error.what());
      }
    });
    data.pictures.reserve(pictures.size());
    for (std::size_t i = 0; i < pictures.size(); ++i) {
      problems.add(own[i]);
      if (kept[i] != 0) data.pictures.push_back(std::move(pictures[i]));
    }
  }

 private:
  bool check(LabeledPicture& picture, LabelProblems& problems) const {
    if (!options_.check_pictures) return true;
    std::int64_t width = 0, height = 0;
    std::string wrong = picture_sizes(picture.file, options_.limits, width, height);
    if (wrong.empty() && picture.width > 0) {
      // A smaller copy of the same picture is as good; another shape is another picture, or one that was turned.
      const double told = static_cast<double>(picture.width) / static_cast<double>(picture.height);
      const double found = static_cast<double>(width) / static_cast<double>(height);
      constexpr double kSameShape = 1.05;
      if (std::max(told, found) > kSameShape * std::min(told, found)) {
        wrong = fmt::format("{}: expected a picture of {}x{}, as its labels say, got {}x{}", shown_path(picture.file),
                            picture.width, picture.height, width, height);
      }
    }
    picture.width = width;
    picture.height = height;
    if (wrong.empty()) return true;
    problems.add(std::move(wrong));
    return false;
  }

  const DetectionLoadOptions& options_;
};

std::vector<LabeledPicture> pictures_of(std::vector<fs::path> files, LabelProblems& problems) {
  std::unordered_set<std::string> seen;
  std::vector<LabeledPicture> pictures;
  for (fs::path& file : files) {
    file = file.lexically_normal();
    if (!seen.insert(file.native()).second) {
      problems.add(fmt::format("{}: expected each picture once, got it again", shown_path(file)));
    } else {
      pictures.push_back({.file = std::move(file)});
    }
  }
  return pictures;
}

DetectionData load_yolo(const std::string& where, const std::string& split, std::vector<fs::path> files,
                        std::vector<std::string> classes, const DetectionLoadOptions& options) {
  DetectionData data;
  data.classes = std::move(classes);
  const auto count = std::ssize(data.classes);
  LabelProblems problems;
  std::vector<LabeledPicture> pictures = pictures_of(std::move(files), problems);
  if (pictures.empty()) {
    fail<IoError>("{}: {}: expected .jpg, .jpeg or .png pictures, found none", where, printable(split));
  }
  const fs::path first_label = label_file(pictures.front().file);
  std::vector<char> labelled(pictures.size(), 0);
  const auto read = [&](std::size_t i, LabeledPicture& picture, LabelProblems& own) {
    const fs::path file = label_file(picture.file);
    // Only what isn't there is background: one that can't be reached is an error of reading.
    std::error_code ignored;
    if (fs::status(file, ignored).type() == fs::file_type::not_found) return true;
    labelled[i] = 1;
    picture.objects = parse_yolo_labels(read_whole_file(file, kMostLabelBytes), file.native(), count, own);
    if (!options.keep_segments) {
      for (LabeledObject& object : picture.objects) object.segments.clear();
    }
    return true;
  };
  Collector(options).run(std::move(pictures), read, data, problems);
  const bool any = std::find(labelled.begin(), labelled.end(), 1) != labelled.end();
  if (!any && !data.pictures.empty() && split != "test") {
    fail<IoError>("{}: {}: expected labels in {}", where, printable(split), missing_label_text(first_label));
  }
  data.skipped = problems.skipped;
  data.problems = std::move(problems.first);
  return data;
}

/// The folder of a COCO JSON's pictures: the first of `folders` that has one of the first few or, where none has, one
/// of all.
fs::path picture_folder(const fs::path& json, const std::vector<fs::path>& folders, const DetectionData& data) {
  constexpr std::size_t kFew = 5;
  const std::size_t all = data.pictures.size();
  for (const std::size_t tried : {std::min(kFew, all), all}) {
    for (const fs::path& folder : folders) {
      if (!folder.empty() && !is_folder(folder)) continue;  // empty: the working directory
      for (std::size_t i = 0; i < tried; ++i) {
        if (is_file(folder / data.pictures[i].file)) return folder;
      }
    }
  }
  std::string places;
  for (const fs::path& folder : folders) places += (places.empty() ? "" : ", ") + shown_path(folder);
  fail<IoError>("{}: expected its pictures ({} first) in one of: {}; found them nowhere", shown_path(json),
                shown_path(data.pictures.front().file), places);
}

DetectionData load_coco(const fs::path& json, const std::string& split, std::vector<fs::path> folders,
                        const std::vector<std::string>& classes, const DetectionLoadOptions& options) {
  DetectionData data;
  {
    const std::string text = read_whole_file(json, kMostJsonBytes);
    data = parse_coco(
        text, json.native(),
        {.segment_boxes = options.segment_boxes.value_or(split == "train"), .keep_segments = options.keep_segments});
  }
  if (!classes.empty() && classes.size() != data.classes.size()) {
    fail<IoError>("{}: expected {} categories, as many as the description has names, got {}", shown_path(json),
                  classes.size(), data.classes.size());
  }
  if (data.pictures.empty()) fail<IoError>("{}: expected images, got none", shown_path(json));
  if (folders.empty()) {
    const fs::path own = json.parent_path(), above = own / "..";
    std::string stem = json.stem().native();
    const std::size_t underscore = stem.find_last_of('_');
    if (underscore != std::string::npos) stem.erase(0, underscore + 1);
    folders = {above / stem,     above / "images" / stem,
               above / split,    above / "images" / split,
               above / "images", own / stem,
               own / "images",   own};
  }
  const fs::path folder = picture_folder(json, folders, data);
  LabelProblems problems{.skipped = data.skipped, .first = std::move(data.problems)};
  std::vector<LabeledPicture> pictures = std::move(data.pictures);
  data.pictures.clear();
  for (LabeledPicture& picture : pictures) picture.file = (folder / picture.file).lexically_normal();
  const auto read = [](std::size_t, LabeledPicture&, LabelProblems&) { return true; };
  Collector(options).run(std::move(pictures), read, data, problems);
  data.skipped = problems.skipped;
  data.problems = std::move(problems.first);
  return data;
}

std::vector<std::string> names_in_annotations(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (has_ending(entry->path(), {".xml"})) files.push_back(entry->path());
  }
  if (error) fail<IoError>("load_detection: reading {}: {}", shown_path(folder), error.message());
  std::vector<std::vector<std::string>> names(files.size());
  for_each_file(files.size(), [&](std::size_t i) {
    try {
      LabelProblems ignored;  // named when the picture is read
      names[i] = parse_voc(read_whole_file(files[i], kMostLabelBytes), files[i].native(), ignored).names;
    } catch (const std::exception&) {
    }
  });
  std::set<std::string> all;
  for (const auto& some : names) all.insert(some.begin(), some.end());
  return {all.begin(), all.end()};
}

DetectionData load_voc(const fs::path& folder, const std::string& split, const DetectionLoadOptions& options) {
  fs::path list = folder / (split + ".txt");
  if (!is_file(list)) list = folder / "ImageSets" / "Main" / (split + ".txt");
  if (!is_file(list)) {
    fail<IoError>("{}: expected {}.txt (or ImageSets/Main/{}.txt) with the names of the pictures, found neither",
                  shown_path(folder), printable(split), printable(split));
  }
  DetectionData data;
  const fs::path annotations = folder / "Annotations", classes = folder / "classes.txt";
  data.classes = is_file(classes) ? read_classes(classes) : names_in_annotations(annotations);
  if (data.classes.empty()) fail<IoError>("{}: expected files with objects, found none", shown_path(annotations));
  if (std::ssize(data.classes) > kMostDetectionClasses) {
    fail<IoError>("{}: expected at most {} classes of objects, got {}", shown_path(annotations), kMostDetectionClasses,
                  data.classes.size());
  }
  std::vector<fs::path> files;
  for (const std::string& line : read_lines(list)) {
    // Lists of a class have 1 or -1 behind the name.
    std::string name = line.substr(0, line.find_first_of(" \t"));
    if (is_image_name(name)) name.erase(name.find_last_of('.'));
    fs::path file = folder / "JPEGImages" / (name + ".jpg");
    for (const char* ending : {".jpeg", ".png", ".JPG", ".JPEG", ".PNG"}) {
      if (!is_file(file)) file.replace_filename(fs::path(name + ending).filename());
    }
    if (!is_file(file)) file.replace_filename(fs::path(name + ".jpg").filename());
    files.push_back(std::move(file));
  }
  LabelProblems problems;
  std::vector<LabeledPicture> pictures = pictures_of(std::move(files), problems);
  if (pictures.empty()) fail<IoError>("{}: expected names of pictures, got none", shown_path(list));
  const fs::path images = folder / "JPEGImages";
  const auto read = [&](std::size_t, LabeledPicture& picture, LabelProblems& own) {
    fs::path file = annotations / picture.file.lexically_relative(images.lexically_normal());
    file.replace_extension(".xml");
    const VocAnnotation annotation = parse_voc(read_whole_file(file, kMostLabelBytes), file.native(), own);
    // Some tools write sizes that are not the picture's; boxes are in the picture's own pixels.
    if (picture.width == 0) {
      picture.width = annotation.width;
      picture.height = annotation.height;
    }
    if (picture.width == 0) fail<IoError>("{}: expected the picture's size, got none", shown_path(file));
    picture.objects = voc_objects(annotation, file.native(), picture.width, picture.height, data.classes, own);
    return true;
  };
  Collector(options).run(std::move(pictures), read, data, problems);
  data.skipped = problems.skipped;
  data.problems = std::move(problems.first);
  return data;
}

DetectionData load_file(const fs::path& file, const std::string& split, const DetectionLoadOptions& options) {
  DescriptionFile description = read_description(file, split);
  const bool json = description.places.size() == 1 && has_ending(description.places.front(), {".json"});
  if (json) return load_coco(description.places.front(), split, {}, description.classes, options);
  if (!description.annotations.empty()) {
    std::vector<fs::path> folders = std::move(description.places);
    folders.push_back(description.root);
    return load_coco(description.annotations, split, std::move(folders), description.classes, options);
  }
  if (description.classes.empty()) {
    fail<IoError>("{}: expected the classes' `names`, or their number `nc`, got neither", shown_path(file));
  }
  std::vector<fs::path> files;
  for (const fs::path& place : description.places) {
    if (is_folder(place)) {
      add_folder(place, files);
    } else if (has_ending(place, {".txt"}) && is_file(place)) {
      add_list(place, description.root, files);
    } else {
      fail<IoError>("{}: {}: expected a folder of pictures or a .txt file that lists them, got {} ({})",
                    shown_path(file), printable(split), shown_path(place),
                    is_file(place) ? "another file" : "not there");
    }
  }
  return load_yolo(shown_path(file), split, std::move(files), std::move(description.classes), options);
}

/// The description file in a folder; empty for none.
fs::path description_in(const fs::path& folder) {
  if (is_file(folder / "data.yaml")) return folder / "data.yaml";
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (has_ending(entry->path(), {".yaml", ".yml"})) found.push_back(entry->path());
  }
  return found.size() == 1 ? found.front() : fs::path{};
}

DetectionData load_folder(const fs::path& folder, const std::string& split, const DetectionLoadOptions& options) {
  if (const fs::path file = description_in(folder); !file.empty()) return load_file(file, split, options);
  if (is_folder(folder / "JPEGImages") && is_folder(folder / "Annotations")) return load_voc(folder, split, options);
  const fs::path pictures = folder / "images" / split;
  if (!is_folder(pictures) || !is_file(folder / "classes.txt")) {
    fail<IoError>(
        "{}: expected a folder with data.yaml, or with classes.txt and images/{}, or with JPEGImages and Annotations; "
        "found {}",
        shown_path(folder), printable(split),
        is_folder(pictures) ? "no classes.txt" : fmt::format("no images/{}", printable(split)));
  }
  std::vector<fs::path> files;
  add_folder(pictures, files);
  return load_yolo(shown_path(folder), split, std::move(files), read_classes(folder / "classes.txt"), options);
}

}  // namespace

DetectionData load_detection(const fs::path& description, const std::string& split,
                             const DetectionLoadOptions& options) {
  if (split.empty() || split.find_first_of("/\\\0") != std::string::npos || split.front() == '.') {
    fail<Error>("load_detection: expected a part such as train, val or test, got '{}'", printable_start(split, 60));
  }
  DetectionData data;
  if (is_folder(description)) {
    data = load_folder(description, split, options);
  } else if (!is_file(description)) {
    fail<IoError>(
        "load_detection: expected a description of a data set (a .yaml file, a COCO .json or a folder), got "
        "{}, which {}",
        shown_path(description), fs::exists(description) ? "is neither" : "isn't there");
  } else if (has_ending(description, {".json"})) {
    data = load_coco(description, split, {}, {}, options);
  } else {
    data = load_file(description, split, options);
  }
  if (data.pictures.empty()) {
    fail<IoError>("{}: {}: expected pictures, got none that can be used; {} were skipped, the first: {}",
                  shown_path(description), printable(split), data.skipped,
                  data.problems.empty() ? "none" : data.problems.front());
  }
  return data;
}

}  // namespace halfstep::data
