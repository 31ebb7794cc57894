// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/image_folder.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <system_error>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/data/image.h"
#include "halfstep/data/image_list.h"
#include "halfstep/runtime/log.h"

namespace halfstep::data {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kLargestList = std::uint64_t{4} << 30;

/// The name of the folder that a path's last part stands in; empty without one.
std::string_view parent_name(std::string_view path) {
  const std::size_t end = path.find_last_of('/');
  if (end == std::string_view::npos) return {};
  const std::size_t begin = path.substr(0, end).find_last_of('/');
  return path.substr(begin == std::string_view::npos ? 0 : begin + 1,
                     end - (begin == std::string_view::npos ? 0 : begin + 1));
}

/// Names of classes by label, if each class is one folder with one label and the other way round.
std::optional<std::map<std::string, std::int64_t>> names_of(const std::vector<ImageListEntry>& entries) {
  std::map<std::string, std::int64_t> labels;
  std::map<std::int64_t, std::string_view> names;
  for (const ImageListEntry& entry : entries) {
    const std::string_view name = parent_name(entry.path);
    if (name.empty()) return std::nullopt;
    const auto known = names.find(entry.label);
    if (known != names.end()) {
      if (known->second != name) return std::nullopt;
    } else {
      names.emplace(entry.label, name);
      if (!labels.emplace(name, entry.label).second) return std::nullopt;
    }
  }
  return labels;
}

/// Warns when the labels of a list are not the places of the classes' folders in sorted order.
void compare_with_folders(const std::string& list, const std::map<std::string, std::int64_t>& labels,
                          const fs::path& sorted_root) {
  const std::vector<std::string> folders = class_folders(sorted_root);
  std::int64_t wrong = 0;
  std::string example;
  for (const auto& [name, label] : labels) {
    const auto place = std::lower_bound(folders.begin(), folders.end(), name);
    if (place == folders.end() || *place != name) continue;
    const std::int64_t sorted = place - folders.begin();
    if (sorted == label) continue;
    if (wrong++ == 0)
      example = fmt::format("{} is {} in the list and {} among the sorted folders", printable(name), label, sorted);
  }
  if (wrong == 0) return;
  log(LogLevel::warning,
      fmt::format("{} numbers {} of {} classes otherwise than the sorted folders of {} ({}). The list counts; weights "
                  "that were trained with the other order score nothing with it",
                  list, wrong, labels.size(), shown_path(sorted_root), example));
}

}  // namespace

bool is_image_name(std::string_view name) {
  const std::size_t dot = name.find_last_of('.');
  if (dot == std::string_view::npos || dot == 0 || name.front() == '.') return false;
  std::string ending(name.substr(dot + 1));
  for (char& c : ending) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return ending == "jpg" || ending == "jpeg" || ending == "png";
}

std::vector<std::string> class_folders(const fs::path& root) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(root, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    std::string name = entry->path().filename().string();
    if (entry->is_directory(ignored) && name.front() != '.') names.push_back(std::move(name));
  }
  // A list that broke off in the middle would number the classes otherwise.
  if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory) {
    fail<IoError>("class_folders: reading {}: {}", shown_path(root), error.message());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void ImageFolder::add(std::string_view path, std::int64_t label) {
  paths_ += path;
  ends_.push_back(paths_.size());
  labels_.push_back(static_cast<std::int32_t>(label));
}

ImageFolder::ImageFolder(const fs::path& root) : root_(root) {
  std::error_code error;
  if (!fs::is_directory(root, error)) {
    fail<IoError>("ImageFolder: expected a folder with a folder for each class, got {} ({})", shown_path(root),
                  fs::exists(root, error) ? "not a folder" : "no such folder");
  }
  const std::vector<std::string> folders = class_folders(root);
  std::vector<std::string> empty;
  std::vector<std::string> files;
  for (std::size_t label = 0; label < folders.size(); ++label) {
    classes_.push_back(kept_name(folders[label]));
    const std::string& name = classes_.back();
    class_to_index_.emplace(name, static_cast<std::int64_t>(label));
    files.clear();
    const fs::path folder = root / folders[label];
    // Links to folders are followed here, at the class, but not below, where they could go round in a circle.
    for (fs::recursive_directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
      if (!is_image_name(entry->path().filename().native())) continue;
      std::error_code ignored;
      if (entry->is_regular_file(ignored)) files.push_back(entry->path().lexically_relative(root).native());
    }
    if (error) fail<IoError>("ImageFolder: reading {}: {}", shown_path(folder), error.message());
    std::sort(files.begin(), files.end());
    for (const std::string& file : files) add(file, static_cast<std::int64_t>(label));
    if (files.empty()) empty.push_back(name);
  }
  if (labels_.empty()) {
    fail<IoError>("ImageFolder: expected folders with .jpg, .jpeg or .png files in {}, found {}", shown_path(root),
                  classes_.empty() ? "no folder" : fmt::format("{} folders without any", classes_.size()));
  }
  if (!empty.empty()) {
    log(LogLevel::warning, fmt::format("{}: {} of {} classes have no pictures, {} first", shown_path(root),
                                       empty.size(), classes_.size(), empty.front()));
  }
}

ImageFolder ImageFolder::from_list(const fs::path& list, const std::vector<fs::path>& roots,
                                   const fs::path& sorted_root) {
  std::vector<std::uint8_t> bytes;
  read_file(list, kLargestList, bytes);
  const std::vector<ImageListEntry> entries =
      parse_image_list({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, list.native());
  ImageFolder result;
  std::error_code ignored;
  const auto root = std::find_if(roots.begin(), roots.end(), [&](const fs::path& folder) {
    return fs::exists(folder / entries.front().path, ignored);
  });
  if (root == roots.end()) {
    std::string places;
    for (const fs::path& folder : roots) places += (places.empty() ? "" : " or ") + shown_path(folder);
    fail<IoError>("{}: expected its first picture, {}, in {}; found it nowhere", shown_path(list),
                  printable_start(entries.front().path), places);
  }
  result.root_ = *root;
  std::int64_t classes = 0;
  for (const ImageListEntry& entry : entries) {
    result.add(entry.path, entry.label);
    classes = std::max(classes, entry.label + 1);
  }
  for (std::int64_t label = 0; label < classes; ++label) result.classes_.push_back(std::to_string(label));
  // A list whose pictures lie in one folder (`val/NAME.JPEG 65`) says nothing about names.
  if (const auto names = names_of(entries); names && names->size() > 1) {
    compare_with_folders(shown_path(list), *names, sorted_root);
    for (const auto& [name, label] : *names) {
      result.classes_[static_cast<std::size_t>(label)] = kept_name(name);
      result.class_to_index_.emplace(kept_name(name), label);
    }
  }
  return result;
}

fs::path ImageFolder::path(std::int64_t index) const {
  const auto i = static_cast<std::size_t>(index);
  const std::uint64_t begin = i == 0 ? 0 : ends_[i - 1];
  return root_ / std::string_view(paths_).substr(begin, ends_[i] - begin);
}

std::string ImageFolder::name(std::int64_t index) const { return shown_path(path(index)); }

std::span<const std::uint8_t> ImageFolder::read(std::int64_t index, std::vector<std::uint8_t>& buffer) const {
  read_file(path(index), ImageLimits{}.max_bytes, buffer);
  return buffer;
}

}  // namespace halfstep::data
