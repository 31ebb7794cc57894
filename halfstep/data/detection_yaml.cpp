// SPDX-License-Identifier: Apache-2.0
// Description files of data sets for detection.
#include <yaml-cpp/yaml.h>

#include <charconv>
#include <map>
#include <optional>
#include <system_error>

#include "halfstep/core/fail.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/text.h"
#include "halfstep/data/detection_description_internal.h"
#include "halfstep/runtime/log.h"

namespace halfstep::data {
namespace {

namespace fs = std::filesystem;

std::string place_in(const fs::path& file, const YAML::Node& node) {
  const YAML::Mark mark = node.Mark();
  return mark.line < 0 ? shown_path(file) : fmt::format("{}:{}", shown_path(file), mark.line + 1);
}

const char* kind_of(const YAML::Node& node) {
  if (node.IsSequence()) return "a list";
  if (node.IsMap()) return "a map";
  return node.IsScalar() ? "a text" : "nothing";
}

YAML::Node read_yaml(const fs::path& file) {
  constexpr std::uint64_t kMostBytes = 4 << 20;
  const std::string text = read_whole_file(file, kMostBytes);
  if (const std::size_t zero = text.find('\0'); zero != std::string::npos) {
    fail<IoError>("{}: expected text, got a zero byte at offset {}", shown_path(file), zero);
  }
  try {
    YAML::Node document = YAML::Load(text);
    if (!document.IsMap()) {
      fail<IoError>("{}: expected lines such as `train: images/train`, got {}", shown_path(file), kind_of(document));
    }
    return document;
  } catch (const YAML::Exception& error) {
    fail<IoError>("{}:{}: expected YAML: {}", shown_path(file), error.mark.line + 1, printable(error.msg));
  }
}

std::optional<std::int64_t> whole_number(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string text_in(const fs::path& file, const std::string& key, const YAML::Node& node) {
  if (!node.IsScalar() || node.Scalar().empty()) {
    fail<IoError>("{}: {}: expected a text, got {}", place_in(file, node), key,
                  node.IsScalar() ? "an empty one" : kind_of(node));
  }
  return node.Scalar();
}

std::vector<std::string> names_in(const fs::path& file, const YAML::Node& names) {
  std::vector<std::string> classes;
  if (names.IsSequence()) {
    for (const YAML::Node& name : names) classes.push_back(printable(text_in(file, "names", name)));
    return classes;
  }
  if (!names.IsMap()) {
    fail<IoError>("{}: names: expected a list or a map from 0 on, got {}", place_in(file, names), kind_of(names));
  }
  std::map<std::int64_t, std::string> numbered;
  for (const auto& entry : names) {
    const std::optional<std::int64_t> number =
        entry.first.IsScalar() ? whole_number(entry.first.Scalar()) : std::nullopt;
    if (!number || *number < 0 || *number >= kMostDetectionClasses) {
      fail<IoError>("{}: names: expected the number of a class, got '{}'", place_in(file, entry.first),
                    entry.first.IsScalar() ? printable_start(entry.first.Scalar(), 60) : kind_of(entry.first));
    }
    if (!numbered.emplace(*number, printable(text_in(file, "names", entry.second))).second) {
      fail<IoError>("{}: names: expected each number once, got {} again", place_in(file, entry.first), *number);
    }
  }
  for (const auto& [number, name] : numbered) {
    if (number != std::ssize(classes)) {
      fail<IoError>("{}: names: expected the numbers 0 to {}, got no {}", place_in(file, names), numbered.size() - 1,
                    classes.size());
    }
    classes.push_back(name);
  }
  return classes;
}

std::vector<std::string> classes_in(const fs::path& file, const YAML::Node& document) {
  std::vector<std::string> classes;
  const YAML::Node names = document["names"], count = document["nc"];
  if (names && !names.IsNull()) classes = names_in(file, names);
  if (static_cast<std::int64_t>(classes.size()) > kMostDetectionClasses) {
    fail<IoError>("{}: names: expected at most {}, got {}", shown_path(file), kMostDetectionClasses, classes.size());
  }
  if (!count || count.IsNull()) return classes;
  const std::optional<std::int64_t> n = count.IsScalar() ? whole_number(count.Scalar()) : std::nullopt;
  if (!n || *n < 1 || *n > kMostDetectionClasses) {
    fail<IoError>("{}: nc: expected a number of classes from 1 to {}, got {}", place_in(file, count),
                  kMostDetectionClasses,
                  count.IsScalar() ? "'" + printable_start(count.Scalar(), 60) + "'" : kind_of(count));
  }
  if (classes.empty()) {
    for (std::int64_t i = 0; i < *n; ++i) classes.push_back(std::to_string(i));
  } else if (std::ssize(classes) != *n) {
    fail<IoError>("{}: nc: expected {}, as many as there are names, got {}", place_in(file, count), classes.size(), *n);
  }
  return classes;
}

/// What `path` says: relative to the file's folder or, where that isn't there, to the working folder.
fs::path root_in(const fs::path& file, const YAML::Node& document) {
  const fs::path folder = file.parent_path();
  const YAML::Node node = document["path"];
  if (!node || node.IsNull()) return folder;
  const fs::path path = text_in(file, "path", node);
  std::error_code ignored;
  if (fs::is_directory(folder / path, ignored)) return folder / path;
  if (fs::is_directory(path, ignored)) return path;
  const YAML::Node download = document["download"];
  fail<IoError>("{}: path: expected a folder, relative to {} or to the working folder, got {}, which isn't there{}",
                place_in(file, node), folder.empty() ? "the file's own" : shown_path(folder), shown_path(path),
                download && !download.IsNull() ? "; what `download` names is not fetched" : "");
}

}  // namespace

DescriptionFile read_description(const fs::path& file, const std::string& split) {
  const YAML::Node document = read_yaml(file);
  try {
    DescriptionFile description;
    if (const YAML::Node download = document["download"]; download && !download.IsNull()) {
      log(LogLevel::info, fmt::format("{}: the key `download` is ignored: get the data yourself", shown_path(file)));
    }
    description.classes = classes_in(file, document);
    description.root = root_in(file, document);
    const auto absolute = [&](const std::string& path) { return description.root / path; };
    const YAML::Node annotations = document["annotations"];
    if (annotations && !annotations.IsNull()) {
      if (!annotations.IsMap()) {
        fail<IoError>("{}: annotations: expected a map such as `train: instances_train.json`, got {}",
                      place_in(file, annotations), kind_of(annotations));
      }
      const YAML::Node own = annotations[split];
      if (own && !own.IsNull()) description.annotations = absolute(text_in(file, "annotations", own));
    }
    const YAML::Node part = document[split];
    if (!part || part.IsNull()) {
      fail<IoError>("{}: expected the key `{}` with a folder or a list of pictures, got none", shown_path(file),
                    printable(split));
    }
    if (part.IsSequence()) {
      for (const YAML::Node& place : part) description.places.push_back(absolute(text_in(file, split, place)));
      if (description.places.empty())
        fail<IoError>("{}: {}: expected paths, got an empty list", place_in(file, part), split);
    } else {
      description.places.push_back(absolute(text_in(file, split, part)));
    }
    return description;
  } catch (const YAML::Exception& error) {
    fail<IoError>("{}:{}: expected a description of a data set: {}", shown_path(file), error.mark.line + 1,
                  printable(error.msg));
  }
}

}  // namespace halfstep::data
