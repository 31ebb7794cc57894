// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>

#include "cli/options.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "cli/weights_files.h"
#include "halfstep/core/tensor.h"
#include "halfstep/core/text.h"

namespace halfstep::cli {
namespace {

using nlohmann::ordered_json;

// Of the finite values, but for the counts.
struct Statistics {
  std::optional<double> min, max, mean;
  std::int64_t nan = 0, inf = 0, zeros = 0;
  std::int64_t f16_overflow = 0;   // finite here, infinite as float16
  std::int64_t f16_underflow = 0;  // not zero here, zero as float16
};

Statistics statistics_of(const Tensor& tensor) {
  // Where rounding to nearest even leaves float16's range: half a unit above 65504 and half the least subnormal.
  constexpr double kOverflow = 65520, kUnderflow = 0x1p-25;
  const Tensor dense = tensor.contiguous();
  Statistics s;
  double sum = 0, low = INFINITY, high = -INFINITY;
  std::int64_t finite = 0;
  visit_dtype(dense.dtype(), [&](auto tag) {
    using T = storage_t<decltype(tag)::value>;
    const T* values = dense.data<const T>();
    const std::int64_t n = dense.numel();
    for (std::int64_t i = 0; i < n; ++i) {
      const double v = convert<double>(values[i]);
      if (std::isnan(v)) {
        ++s.nan;
        continue;
      }
      if (std::isinf(v)) {
        ++s.inf;
        continue;
      }
      ++finite;
      sum += v;
      low = std::min(low, v);
      high = std::max(high, v);
      s.zeros += v == 0;
      if constexpr (is_floating(decltype(tag)::value)) {
        s.f16_overflow += std::abs(v) >= kOverflow;
        s.f16_underflow += v != 0 && std::abs(v) <= kUnderflow;
      }
    }
  });
  if (finite > 0) {
    s.min = low;
    s.max = high;
    s.mean = sum / static_cast<double>(finite);
  }
  return s;
}

// Running statistics are state, but nothing that is trained.
bool is_parameter(const NamedTensor& t) {
  return t.tensor.is_floating() && !t.name.ends_with("running_mean") && !t.name.ends_with("running_var");
}

struct Summary {
  std::int64_t parameters = 0, values = 0, nan = 0, inf = 0, f16_overflow = 0, f16_underflow = 0;
};

ordered_json number(const std::optional<double>& value) { return value ? ordered_json(*value) : ordered_json(nullptr); }
std::string text(const std::optional<double>& value) { return value ? fmt::format("{:.4g}", *value) : "-"; }
std::string count(std::int64_t n) { return n == 0 ? "" : fmt::format("{}", n); }

std::string shortened(const std::string& value) {
  constexpr std::size_t kMost = 100;
  std::string result = value.substr(0, kMost);
  // Not in the middle of a character.
  while (value.size() > kMost && !result.empty() && (static_cast<unsigned char>(value[result.size()]) & 0xc0) == 0x80) {
    result.pop_back();
  }
  result = printable(result);
  return value.size() > kMost ? fmt::format("{}... ({} bytes)", result, value.size()) : result;
}

int run(const std::filesystem::path& path, bool as_json) {
  const io::WeightsFile file = io::load_weights_file(path);
  const auto tied = tied_names(file.tensors);
  const bool checkpoint = is_checkpoint(file);
  Summary total;
  ordered_json entries = ordered_json::array();
  std::vector<std::vector<std::string>> rows;
  for (const NamedTensor& t : file.tensors) {
    const Statistics s = statistics_of(t.tensor);
    const auto other = tied.find(t.name);
    if (other == tied.end()) {
      total.values += t.tensor.numel();
      if (is_parameter(t) && !(checkpoint && t.name.starts_with("optimizer."))) total.parameters += t.tensor.numel();
      total.nan += s.nan;
      total.inf += s.inf;
      total.f16_overflow += s.f16_overflow;
      total.f16_underflow += s.f16_underflow;
    }
    if (as_json) {
      const Shape& sizes = t.tensor.sizes();
      ordered_json entry = {{"name", t.name},
                            {"dtype", name(t.tensor.dtype())},
                            {"shape", std::vector<std::int64_t>(sizes.begin(), sizes.end())},
                            {"min", number(s.min)},
                            {"max", number(s.max)},
                            {"mean", number(s.mean)},
                            {"nan", s.nan},
                            {"inf", s.inf},
                            {"zeros", s.zeros},
                            {"f16_overflow", s.f16_overflow},
                            {"f16_underflow", s.f16_underflow}};
      if (other != tied.end()) entry["tied"] = other->second;
      entries.push_back(std::move(entry));
    } else {
      rows.push_back({shortened(t.name), std::string(name(t.tensor.dtype())), t.tensor.sizes().str(), text(s.min),
                      text(s.max), text(s.mean), count(s.zeros), count(s.nan), count(s.inf), count(s.f16_overflow),
                      count(s.f16_underflow), other == tied.end() ? "" : "= " + shortened(other->second)});
    }
  }
  const char* format = file.format == io::WeightsFormat::pth ? "pth" : "safetensors";
  const std::uint64_t bytes = total_bytes(file.tensors);
  if (as_json) {
    ordered_json others = ordered_json::array();
    for (const NamedTensor& t : file.others) others.push_back(t.name);
    const ordered_json all = {
        {"file", path.string()},          {"format", format},       {"tensors", entries}, {"others", others},
        {"parameters", total.parameters}, {"values", total.values}, {"bytes", bytes},     {"metadata", file.metadata}};
    fmt::print("{}\n", all.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
    return kDone;
  }
  fmt::print("{}",
             table({"", "dtype", "shape", "min", "max", "mean", "zeros", "NaN", "inf", ">f16", "<f16", ""}, rows));
  fmt::print("{}: {}, {} tensors, {} values in {}, {} of them parameters\n", shown_path(path), format,
             file.tensors.size(), total.values, bytes_text(bytes), total.parameters);
  if (total.nan + total.inf > 0) fmt::print("not finite: {} NaN, {} infinite\n", total.nan, total.inf);
  if (total.f16_overflow + total.f16_underflow > 0) {
    fmt::print("as float16, {} would be infinite and {} zero that are not\n", total.f16_overflow, total.f16_underflow);
  }
  if (!file.others.empty()) {
    fmt::print("beside the state dict: {} tensors in {}, such as {}\n", file.others.size(),
               bytes_text(total_bytes(file.others)), shortened(file.others.front().name));
  }
  for (const auto& [key, value] : file.metadata) fmt::print("{}: {}\n", shortened(key), shortened(value));
  return kDone;
}

}  // namespace

std::map<std::string, std::string> tied_names(const NamedTensors& tensors) {
  using Memory = std::tuple<std::uint64_t, std::int64_t, std::string, std::string, DType>;
  std::map<Memory, std::string> first;
  std::map<std::string, std::string> tied;
  for (const NamedTensor& t : tensors) {
    if (t.tensor.numel() == 0) continue;
    const auto [it, fresh] = first.emplace(Memory{t.tensor.storage()->id(), t.tensor.storage_offset(),
                                                  t.tensor.sizes().str(), t.tensor.strides().str(), t.tensor.dtype()},
                                           t.name);
    if (!fresh) tied[t.name] = it->second;
  }
  return tied;
}

std::uint64_t total_bytes(const NamedTensors& tensors) {
  const auto tied = tied_names(tensors);
  std::uint64_t bytes = 0;
  for (const NamedTensor& t : tensors) {
    if (!tied.contains(t.name)) bytes += static_cast<std::uint64_t>(t.tensor.numel()) * t.tensor.item_size();
  }
  return bytes;
}

std::string bytes_text(std::uint64_t bytes) {
  if (bytes < 10'000) return fmt::format("{} bytes", bytes);
  return fmt::format("{:.{}f} MB", static_cast<double>(bytes) / 1e6, bytes < 1'000'000 ? 3 : 1);
}

bool is_checkpoint(const io::WeightsFile& file) {
  return file.format == io::WeightsFormat::safetensors && file.metadata.contains("halfstep_checkpoint");
}

void add_inspect(CLI::App& program, int& status) {
  const Verb verb = add_verb(program, "inspect", "List the contents of a weight file: names, shapes, dtypes, ranges");
  struct InspectOptions {
    std::filesystem::path file;
    bool json = false;
  };
  auto o = std::make_shared<InspectOptions>();
  add_path(verb, "FILE", o->file, "A .safetensors or .pth file, recognised by its content").required();
  add_read_limits(verb);
  verb.add_switch("--json", o->json, "One JSON object instead of a table");
  verb.run([o, &status] { status = run(o->file, o->json); });
}

}  // namespace halfstep::cli
