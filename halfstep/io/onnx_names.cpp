// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/onnx_names_internal.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace halfstep::io::detail {
namespace {

// Names are shown and written into files by others.
constexpr std::size_t kLongest = 200;

bool is_plain(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

std::string plain(std::string_view name, bool dots) {
  std::string result;
  for (const char c : name.substr(0, kLongest)) {
    const bool begins = result.empty() || result.back() == '.';
    if (dots && (c == '.' || c == '/')) {
      if (!begins) result += '.';
    } else {
      result += is_plain(c) ? c : '_';
    }
  }
  while (!result.empty() && result.back() == '.') result.pop_back();
  return result.empty() ? "unnamed" : result;
}

}  // namespace

bool is_made_up(const std::string& name) {
  using namespace std::string_view_literals;
  // What torch.export calls the results of functions, which exporters compute where they can: `exp_2`.
  static constexpr std::array kFunctions{
      "add"sv,     "arange"sv, "cat"sv,       "clamp"sv,         "clone"sv,   "cos"sv,    "div"sv,     "exp"sv,
      "expand"sv,  "full"sv,   "getitem"sv,   "index"sv,         "linear"sv,  "log"sv,    "matmul"sv,  "minimum"sv,
      "mul"sv,     "neg"sv,    "ones"sv,      "permute"sv,       "pow"sv,     "repeat"sv, "reshape"sv, "select"sv,
      "sigmoid"sv, "sin"sv,    "slice"sv,     "slice_scatter"sv, "softmax"sv, "sqrt"sv,   "stack"sv,   "sub"sv,
      "t"sv,       "tanh"sv,   "transpose"sv, "unsqueeze"sv,     "view"sv,    "where"sv,  "zeros"sv};
  std::string_view function = name;
  if (const std::size_t end = function.find_last_not_of("0123456789");
      end != std::string_view::npos && end + 1 < function.size() && function[end] == '_') {
    function = function.substr(0, end);
  }
  if (std::find(kFunctions.begin(), kFunctions.end(), function) != kFunctions.end()) return true;
  static constexpr std::array kStarts{"val_"sv, "_val_"sv, "/"sv, "Constant"sv, "node_"sv, "_"sv, "tensor_constant"sv};
  if (name.find("::") != std::string::npos) return true;
  if (std::any_of(kStarts.begin(), kStarts.end(), [&](std::string_view s) { return name.starts_with(s); })) return true;
  return std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool is_constant_name(const std::string& name) {
  const std::string last = name.substr(name.rfind('.') + 1);
  static constexpr std::array kNames{"anchors",
                                     "anchor_grid",
                                     "grid",
                                     "strides",
                                     "stride",
                                     "mean",
                                     "std",
                                     "relative_position_index",
                                     "relative_coords_table",
                                     "mask",
                                     "attn_mask"};
  return std::any_of(kNames.begin(), kNames.end(), [&](const char* n) { return last == n; }) ||
         last.starts_with("constant") || last.starts_with("lifted_tensor");
}

std::string strip(const std::string& name) {
  constexpr std::string_view kSuffix = "_quantized";
  return name.ends_with(kSuffix) && name.size() > kSuffix.size() ? name.substr(0, name.size() - kSuffix.size()) : name;
}

std::string parameter_name(const std::string& name, const std::string& role) {
  std::string result = plain(name, true);
  if (role == "bias" && result.ends_with(".weight_bias")) result.replace(result.size() - 11, 11, "bias");
  return result;
}

std::string one_component(const std::string& name) { return plain(name, false); }

std::string path_of(const OnnxNode& node) {
  const std::string& name = node.name.empty() && !node.outputs.empty() ? node.outputs[0] : node.name;
  if (!name.starts_with('/')) return name.empty() ? node.op : plain(name, false);
  // `/layer1/layer1.0/conv1/Conv`: parts of lists repeat the list's name.
  std::vector<std::string> parts;
  std::string_view rest = name;
  while (!rest.empty()) {
    rest.remove_prefix(1);
    const std::size_t end = std::min(rest.find('/'), rest.size());
    std::string part(rest.substr(0, end));
    rest.remove_prefix(end);
    if (part.empty()) continue;
    if (!parts.empty() && part.starts_with(parts.back() + ".")) parts.pop_back();
    parts.push_back(std::move(part));
  }
  if (parts.size() > 1) parts.pop_back();  // the operator
  std::string path;
  for (const std::string& p : parts) path += (path.empty() ? "" : ".") + p;
  return plain(path, true);
}

}  // namespace halfstep::io::detail
