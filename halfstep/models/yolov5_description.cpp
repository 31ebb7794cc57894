// SPDX-License-Identifier: Apache-2.0
#include "halfstep/models/yolov5_description.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <system_error>

#include "halfstep/core/fail.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/text.h"

namespace halfstep::models {
namespace {

constexpr std::uint64_t kMostBytes = 1 << 20;
constexpr std::size_t kMostRows = 1000, kMostNumbers = 64;

class Description {
 public:
  Description(std::string_view text, std::string_view name) : name_(name) {
    if (const std::size_t zero = text.find('\0'); zero != std::string_view::npos) {
      fail<IoError>("{}: expected text, got a zero byte at offset {}", name_, zero);
    }
    try {
      document_ = YAML::Load(std::string(text));
    } catch (const YAML::Exception& error) {
      fail<IoError>("{}:{}: expected YAML: {}", name_, error.mark.line + 1, printable(error.msg));
    }
  }

  Yolov5Options read() {
    try {
      return options();
    } catch (const YAML::Exception& error) {
      fail<IoError>("{}:{}: expected the description of a detector: {}", name_, error.mark.line + 1,
                    printable(error.msg));
    }
  }

 private:
  Yolov5Options options() {
    if (!document_.IsMap()) {
      fail<IoError>("{}: expected the keys nc, depth_multiple, width_multiple, anchors, backbone and head, got {}",
                    name_, shown(document_));
    }
    YAML::Node nc, depth, width, anchors, backbone, head;
    struct Key {
      const char* name;
      YAML::Node* node;
    };
    const Key keys[] = {{"nc", &nc},           {"depth_multiple", &depth}, {"width_multiple", &width},
                        {"anchors", &anchors}, {"backbone", &backbone},    {"head", &head}};
    for (const auto& entry : document_) {
      const Key* known = nullptr;
      for (const Key& key : keys) {
        if (entry.first.IsScalar() && entry.first.Scalar() == key.name) known = &key;
      }
      if (!known) {
        refuse(entry.first,
               fmt::format("expected one of the keys nc, depth_multiple, width_multiple, anchors, backbone and head, "
                           "got {}",
                           shown(entry.first)));
      }
      if (known->node->IsDefined() && !known->node->IsNull()) {
        refuse(entry.first, fmt::format("expected {} once, got it again", known->name));
      }
      known->node->reset(entry.second);
    }
    for (const Key& key : keys) {
      if (!key.node->IsDefined() || key.node->IsNull())
        fail<IoError>("{}: expected the key {}, got none", name_, key.name);
    }
    Yolov5Options o;
    classes_ = whole(nc, "nc", 1, 1 << 16);
    o.classes = classes_;
    o.depth = factor(depth, "depth_multiple");
    o.width = factor(width, "width_multiple");
    if (!anchors.IsSequence() || anchors.size() == 0 || anchors.size() > kMostNumbers) {
      refuse(anchors, fmt::format("anchors: expected a list for each level of widths and heights in pixels, got {}",
                                  shown(anchors)));
    }
    for (const YAML::Node& level : anchors) o.anchors.push_back(sides(level));
    for (const auto& [key, part] : {std::pair("backbone", backbone), std::pair("head", head)}) {
      if (!part.IsSequence() || o.layers.size() + part.size() > kMostRows) {
        refuse(part, fmt::format("{}: expected a list of rows [from, number, module, arguments], at most {} in all, "
                                 "got {}",
                                 key, kMostRows, part.IsSequence() ? fmt::format("{}", part.size()) : shown(part)));
      }
      for (const YAML::Node& row : part) o.layers.push_back(layer(row, o.layers.size()));
    }
    if (o.layers.empty() || o.layers.back().module != "Detect") {
      refuse(head, fmt::format("head: expected Detect in the last row, got {}",
                               o.layers.empty() ? "no rows" : o.layers.back().module));
    }
    return o;
  }

  DetectorLayer layer(const YAML::Node& row, std::size_t number) {
    row_ = fmt::format("layer {}: ", number);
    if (!row.IsSequence() || row.size() != 4) {
      refuse(row, fmt::format("expected a row [from, number, module, arguments], got {}",
                              row.IsSequence() ? fmt::format("a list of {}", row.size()) : shown(row)));
    }
    if (!row[2].IsScalar()) refuse(row[2], fmt::format("expected the name of a module, got {}", shown(row[2])));
    DetectorLayer result;
    const std::string& module = row[2].Scalar();
    row_ = fmt::format("layer {} ({}): ", number, printable_start(module, 40));
    result.module = module == "nn.Upsample" ? "Upsample" : module;
    const YAML::Node from = row[0], arguments = row[3];
    result.from.clear();
    if (from.IsSequence() && from.size() > 0 && from.size() <= kMostNumbers) {
      for (const YAML::Node& f : from) result.from.push_back(reads(f, number));
    } else {
      result.from.push_back(reads(from, number));
    }
    result.repeats = whole(row[1], "number", 1, 1000);
    if (!arguments.IsSequence() || arguments.size() > kMostNumbers) {
      refuse(arguments, fmt::format("expected a list of arguments, got {}", shown(arguments)));
    }
    take_arguments(arguments, result);
    row_.clear();
    return result;
  }

  void take_arguments(const YAML::Node& given, DetectorLayer& to) {
    const auto count = [&](std::size_t least, std::size_t most, const char* text) {
      if (given.size() < least || given.size() > most) {
        refuse(given, fmt::format("expected the arguments {}, got {} arguments", text, given.size()));
      }
    };
    const auto number = [&](std::size_t i, const char* what) {
      to.arguments.push_back(static_cast<double>(whole(given[i], what, 0, 1 << 20)));
    };
    if (to.module == "Conv") {
      count(1, 4, "[channels, kernel = 1, stride = 1, padding = None]");
      constexpr const char* kNames[] = {"channels", "kernel", "stride", "padding"};
      for (std::size_t i = 0; i < given.size(); ++i) {
        // Half of the kernel, as where it is left out.
        if (i < 3 || !is_none(given[i])) number(i, kNames[i]);
      }
    } else if (to.module == "C3") {
      count(1, 2, "[channels, shortcut = True]");
      number(0, "channels");
      if (given.size() > 1) to.arguments.push_back(truth(given[1], "shortcut") ? 1 : 0);
    } else if (to.module == "SPPF") {
      count(1, 2, "[channels, kernel = 5]");
      number(0, "channels");
      if (given.size() > 1) number(1, "kernel");
    } else if (to.module == "Upsample") {
      count(3, 3, "[None, factor, 'nearest']");
      if (!is_none(given[0])) refuse(given[0], fmt::format("expected None as the size, got {}", shown(given[0])));
      if (!given[2].IsScalar() || given[2].Scalar() != "nearest") {
        refuse(given[2], fmt::format("expected 'nearest' as the mode, got {}", shown(given[2])));
      }
      number(1, "factor");
    } else if (to.module == "Concat") {
      count(1, 1, "[1]");
      if (!given[0].IsScalar() || given[0].Scalar() != "1") {
        refuse(given[0], fmt::format("expected the dimension 1, got {}", shown(given[0])));
      }
    } else if (to.module == "Detect") {
      count(2, 2, "[nc, anchors]");
      const bool named = given[0].IsScalar() && given[0].Scalar() == "nc";
      if (!named && whole(given[0], "classes", 1, 1 << 16) != classes_) {
        refuse(given[0], fmt::format("expected nc or {}, its value, got {}", classes_, shown(given[0])));
      }
      if (!given[1].IsScalar() || given[1].Scalar() != "anchors") {
        refuse(given[1], fmt::format("expected anchors, the key above, got {}", shown(given[1])));
      }
    } else {
      refuse(given, "expected Conv, C3, SPPF, nn.Upsample, Concat or Detect");
    }
  }

  // Which layer a row reads: -1 and below count back from it, and -1 of the first is the images.
  int reads(const YAML::Node& node, std::size_t number) {
    const auto most = static_cast<std::int64_t>(number);
    const std::int64_t from = whole(node, "from", -most - 1, std::max<std::int64_t>(most - 1, -1));
    return static_cast<int>(from);
  }

  std::vector<double> sides(const YAML::Node& level) {
    if (!level.IsSequence() || level.size() == 0 || level.size() % 2 != 0 || level.size() > kMostNumbers) {
      refuse(level, fmt::format("anchors: expected pairs of a width and a height, got {}",
                                level.IsSequence() ? fmt::format("{} numbers", level.size()) : shown(level)));
    }
    std::vector<double> result;
    for (const YAML::Node& side : level) {
      const std::optional<double> value = number_in(side);
      if (!value || !(*value > 0 && *value <= 1 << 20)) {
        refuse(side, fmt::format("anchors: expected pixels above 0, got {}", shown(side)));
      }
      result.push_back(*value);
    }
    return result;
  }

  double factor(const YAML::Node& node, const char* key) {
    const std::optional<double> value = number_in(node);
    if (!value || !(*value > 0 && *value <= 100)) {
      refuse(node, fmt::format("{}: expected a factor above 0, at most 100, got {}", key, shown(node)));
    }
    return *value;
  }

  std::int64_t whole(const YAML::Node& node, const char* what, std::int64_t least, std::int64_t most) {
    const std::optional<double> value = number_in(node);
    if (!value || *value != std::floor(*value) || *value < static_cast<double>(least) ||
        *value > static_cast<double>(most)) {
      refuse(node, fmt::format("{}: expected a whole number from {} to {}, got {}", what, least, most, shown(node)));
    }
    return static_cast<std::int64_t>(*value);
  }

  bool truth(const YAML::Node& node, const char* what) {
    if (node.IsScalar()) {
      const std::string& text = node.Scalar();
      if (text == "True" || text == "true") return true;
      if (text == "False" || text == "false") return false;
    }
    refuse(node, fmt::format("{}: expected True or False, got {}", what, shown(node)));
  }

  static bool is_none(const YAML::Node& node) { return node.IsNull() || (node.IsScalar() && node.Scalar() == "None"); }
  static std::optional<double> number_in(const YAML::Node& node) {
    if (!node.IsScalar()) return std::nullopt;
    const std::string& text = node.Scalar();
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (text.empty() || error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
      return std::nullopt;
    }
    return value;
  }
  static std::string shown(const YAML::Node& node) {
    if (node.IsSequence()) return "a list";
    if (node.IsMap()) return "a map";
    return node.IsScalar() ? "'" + printable_start(node.Scalar(), 60) + "'" : "nothing";
  }

  [[noreturn]] void refuse(const YAML::Node& node, const std::string& what) const {
    const YAML::Mark mark = node.Mark();
    fail<IoError>("{}: {}{}", mark.line < 0 ? name_ : fmt::format("{}:{}", name_, mark.line + 1), row_, what);
  }

  std::string name_;
  std::string row_;  // which row is being read, for messages
  YAML::Node document_;
  std::int64_t classes_ = 0;
};

}  // namespace

namespace {

// What a row has behind `number`: the module with all its arguments.
std::pair<std::string, std::string> module_and_arguments(const DetectorLayer& layer) {
  const auto argument = [&](std::size_t i, double otherwise) {
    return fmt::format("{}", i < layer.arguments.size() ? layer.arguments[i] : otherwise);
  };
  const std::string& module = layer.module;
  if (module == "Conv") {
    const std::string padding = layer.arguments.size() > 3 ? argument(3, 0) : "None";
    return {module, fmt::format("[{}, {}, {}, {}]", argument(0, 0), argument(1, 1), argument(2, 1), padding)};
  }
  if (module == "C3")
    return {module, fmt::format("[{}, {}]", argument(0, 0), argument(1, 1) == "0" ? "False" : "True")};
  if (module == "SPPF") return {module, fmt::format("[{}, {}]", argument(0, 0), argument(1, 5))};
  if (module == "Upsample") return {"nn.Upsample", fmt::format("[None, {}, 'nearest']", argument(0, 2))};
  return {module, module == "Concat" ? "[1]" : "[nc, anchors]"};
}

std::string row_of(const DetectorLayer& layer) {
  const auto [module, arguments] = module_and_arguments(layer);
  const std::string from =
      layer.from.size() == 1 ? fmt::format("{}", layer.from[0]) : fmt::format("[{}]", fmt::join(layer.from, ", "));
  return fmt::format("[{}, {}, {}, {}]", from, layer.repeats, module, arguments);
}

std::string anchors_of(const Yolov5Options& options) {
  std::string text;
  for (const auto& level : options.anchors) {
    text += fmt::format("{}[{}]", text.empty() ? "" : ", ", fmt::join(level, ", "));
  }
  return "[" + text + "]";
}

// The layers that the row reads, by their numbers: -1 is the images.
std::vector<int> sources(const DetectorLayer& layer, std::size_t number) {
  std::vector<int> from = layer.from;
  for (int& f : from) f += f < 0 ? static_cast<int>(number) : 0;
  return from;
}

}  // namespace

std::string yolov5_description(const Yolov5Options& o) {
  std::vector<std::string> rows;
  for (const DetectorLayer& layer : o.layers) rows.push_back(row_of(layer));
  return fmt::format("{{nc: {}, depth_multiple: {}, width_multiple: {}, anchors: {}, backbone: [], head: [{}]}}",
                     o.classes, o.depth, o.width, anchors_of(o), fmt::join(rows, ", "));
}

std::string yolov5_difference(const Yolov5Options& a, const Yolov5Options& b) {
  const auto differ = [](const std::string& what, const auto& x, const auto& y) {
    return fmt::format("{} is {} and {}", what, x, y);
  };
  if (a.depth != b.depth) return differ("depth_multiple", a.depth, b.depth);
  if (a.width != b.width) return differ("width_multiple", a.width, b.width);
  for (std::size_t i = 0; i < std::min(a.layers.size(), b.layers.size()); ++i) {
    const DetectorLayer &x = a.layers[i], &y = b.layers[i];
    if (sources(x, i) != sources(y, i) || x.repeats != y.repeats ||
        module_and_arguments(x) != module_and_arguments(y)) {
      return differ(fmt::format("layer {}", i), row_of(x), row_of(y));
    }
  }
  if (a.layers.size() != b.layers.size()) return differ("the number of layers", a.layers.size(), b.layers.size());
  if (a.anchors != b.anchors) return differ("anchors", anchors_of(a), anchors_of(b));
  return {};
}

Yolov5Options parse_yolov5_description(std::string_view text, std::string_view name) {
  return Description(text, name).read();
}

Yolov5Options read_yolov5_description(const std::filesystem::path& file) {
  return parse_yolov5_description(read_whole_file(file, kMostBytes), shown_path(file));
}

}  // namespace halfstep::models
