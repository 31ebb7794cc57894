// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/io/safetensors_internal.h"

namespace halfstep::io::detail {
namespace {

using nlohmann::json;

struct DTypeName {
  DType dtype;
  const char* name;
};
constexpr DTypeName kDTypes[] = {
    {DType::f64, "F64"},        {DType::f32, "F32"},        {DType::f16, "F16"},      {DType::bf16, "BF16"},
    {DType::f8e4m3, "F8_E4M3"}, {DType::f8e5m2, "F8_E5M2"}, {DType::i64, "I64"},      {DType::i32, "I32"},
    {DType::i8, "I8"},          {DType::u8, "U8"},          {DType::boolean, "BOOL"},
};

std::optional<DType> from_format_name(std::string_view name) {
  for (const DTypeName& n : kDTypes) {
    if (n.name == name) return n.dtype;
  }
  return std::nullopt;
}

constexpr const char* kMetadata = "__metadata__";

// Takes the header apart as it is read, without a tree: a value is looked at once. (A parser of JSON objects merges
// names that stand twice.) Its functions are those that nlohmann::json calls; they return true to go on.
class HeaderReader {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}
  SafetensorsHeader take() { return std::move(header_); }

  bool null() { return other("null"); }
  bool boolean(bool value) { return other(value ? "true" : "false"); }
  bool number_integer(json::number_integer_t value) { return other(fmt::format("{}", value)); }
  bool number_float(json::number_float_t, const std::string& text) { return other(text); }
  bool binary(json::binary_t&) { return other("bytes"); }

  bool number_unsigned(json::number_unsigned_t value) {
    if (skipped()) return passed();
    if (in_ == kShape && array_) {
      if (shape_size_ == kMaxDims) fail_shape();
      shape_[static_cast<std::size_t>(shape_size_++)] = value;
      return true;
    }
    if (in_ == kOffsets && array_) {
      if (offsets_size_ == 2) fail_offsets();
      offsets_[offsets_size_++] = value;
      return true;
    }
    return other(fmt::format("{}", value));
  }

  bool string(std::string& value) {
    if (skipped()) return passed();
    if (in_ == kText) {
      if (!header_.metadata.emplace(key_, std::move(value)).second) twice(key_);
      in_ = kTexts;
      return true;
    }
    if (in_ != kDType) return other("a text");
    const auto dtype = from_format_name(value);
    if (!dtype) unknown_dtype(fmt::format("\"{}\"", printable_start(value)));
    entry_.dtype = *dtype;
    in_ = kFields;
    return true;
  }

  bool start_object(std::size_t) {
    if (skipped()) return deeper();
    switch (in_) {
      case kStart:
        in_ = kNames;
        return true;
      case kName:
        if (entry_.name == kMetadata) {
          if (std::exchange(has_metadata_, true)) twice(kMetadata);
          in_ = kTexts;
        } else {
          start_entry();
        }
        return true;
      default:
        return other("an object");
    }
  }

  bool end_object() {
    if (skipped()) return shallower();
    if (in_ == kFields) end_entry();
    in_ = in_ == kNames ? kEnd : kNames;
    return true;
  }

  bool start_array(std::size_t) {
    if (skipped()) return deeper();
    if ((in_ == kShape || in_ == kOffsets) && !array_) {
      array_ = true;
      return true;
    }
    return other("a list");
  }

  bool end_array() {
    if (skipped()) return shallower();
    array_ = false;
    in_ = kFields;
    return true;
  }

  bool key(std::string& name) {
    if (skip_depth_ > 0) return true;
    switch (in_) {
      case kNames:
        entry_.name = std::move(name);
        in_ = kName;
        return true;
      case kTexts:
      case kText:
        key_ = std::move(name);
        in_ = kText;
        return true;
      default:
        field(name);
        return true;
    }
  }

  bool parse_error(std::size_t, const std::string&, const json::exception& e) {
    fail<IoError>("{}: header is no valid JSON: {}", file_, printable_start(e.what(), 300));
  }

 private:
  enum In { kStart, kNames, kName, kTexts, kText, kFields, kDType, kShape, kOffsets, kOther, kEnd };

  // A value that the format doesn't know is passed over.
  bool skipped() const { return in_ == kOther; }
  bool deeper() {
    if (++skip_depth_ > 2) fail<IoError>("{}: header is nested too deeply", file_);
    return true;
  }
  bool shallower() {
    --skip_depth_;
    return passed();
  }
  bool passed() {
    if (skip_depth_ == 0) in_ = kFields;
    return true;
  }

  void start_entry() {
    std::string name = std::move(entry_.name);
    entry_ = {};
    entry_.name = std::move(name);
    shape_size_ = 0;
    offsets_size_ = 0;
    has_dtype_ = has_shape_ = has_offsets_ = false;
    in_ = kFields;
  }

  void field(std::string& name) {
    bool* has = nullptr;
    if (name == "dtype") {
      in_ = kDType;
      has = &has_dtype_;
    } else if (name == "shape") {
      in_ = kShape;
      has = &has_shape_;
    } else if (name == "data_offsets") {
      in_ = kOffsets;
      has = &has_offsets_;
    } else {
      in_ = kOther;
    }
    if (has != nullptr && std::exchange(*has, true)) twice(name);
  }

  // A value that doesn't belong where it stands.
  [[noreturn]] void misplaced(const std::string& what) {
    switch (in_) {
      case kName:
        if (entry_.name == kMetadata) fail<IoError>("{}: {} is no object", file_, kMetadata);
        fail_fields();
      case kText:
        fail<IoError>("{}: '{}' in {} is no text", file_, printable_start(key_), kMetadata);
      case kDType:
        unknown_dtype(what);
      case kShape:
        if (!array_) fail_shape();
        fail<IoError>("{}: a size of '{}' is no whole number of at least 0", file_, name());
      case kOffsets:
        if (!array_) fail_offsets();
        fail<IoError>("{}: an offset of '{}' is no whole number of at least 0", file_, name());
      default:
        fail<IoError>("{}: header is no object", file_);
    }
  }
  bool other(const std::string& what) {
    if (!skipped()) misplaced(what);
    return passed();
  }

  std::string name() const { return printable_start(entry_.name); }
  [[noreturn]] void twice(const std::string& what) const {
    fail<IoError>("{}: '{}' is there twice in the header", file_, printable_start(what));
  }
  [[noreturn]] void unknown_dtype(const std::string& what) const {
    fail<IoError>("{}: '{}' has the dtype {}, which is not known here", file_, name(), what);
  }
  [[noreturn]] void fail_fields() const {
    fail<IoError>("{}: expected dtype, shape and data_offsets for '{}'", file_, name());
  }
  [[noreturn]] void fail_shape() const {
    fail<IoError>("{}: expected a shape of at most {} dimensions for '{}'", file_, kMaxDims, name());
  }
  [[noreturn]] void fail_offsets() const { fail<IoError>("{}: expected two data_offsets for '{}'", file_, name()); }

  void end_entry() {
    if (!has_dtype_ || !has_shape_ || !has_offsets_) fail_fields();
    if (offsets_size_ != 2) fail_offsets();
    std::uint64_t bytes = item_size(entry_.dtype);
    for (int i = 0; i < shape_size_; ++i) {
      const std::uint64_t n = shape_[static_cast<std::size_t>(i)];
      if (n > (std::uint64_t{1} << 48) || __builtin_mul_overflow(bytes, n, &bytes)) {
        fail<IoError>("{}: '{}' is too large: shape [{}]", file_, name(),
                      fmt::join(shape_, shape_ + shape_size_, ", "));
      }
      entry_.sizes.push_back(static_cast<std::int64_t>(n));
    }
    entry_.begin = offsets_[0];
    entry_.end = offsets_[1];
    if (entry_.end < entry_.begin || entry_.end - entry_.begin != bytes) {
      fail<IoError>("{}: '{}' is {} {} and needs {} bytes, but its offsets are {} to {}", file_, name(),
                    safetensors_dtype(entry_.dtype), entry_.sizes.str(), bytes, entry_.begin, entry_.end);
    }
    header_.entries.push_back(std::move(entry_));
  }

  const std::string& file_;
  SafetensorsHeader header_;
  SafetensorsEntry entry_;
  std::string key_;
  In in_ = kStart;
  bool array_ = false;
  bool has_metadata_ = false, has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  std::uint64_t shape_[kMaxDims] = {};
  int shape_size_ = 0;
  std::uint64_t offsets_[2] = {};
  std::size_t offsets_size_ = 0;
  int skip_depth_ = 0;
};

void check_names(const std::vector<SafetensorsEntry>& entries, const std::string& file) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const SafetensorsEntry& e : entries) names.push_back(e.name);
  // Most files are in order, and comparing a million names takes its time.
  if (!std::is_sorted(names.begin(), names.end())) std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) fail<IoError>("{}: '{}' is there twice in the header", file, printable_start(*twice));
}

}  // namespace

const char* safetensors_dtype(DType dtype) {
  for (const DTypeName& n : kDTypes) {
    if (n.dtype == dtype) return n.name;
  }
  return "";
}

SafetensorsHeader read_safetensors_header(std::string_view text, std::uint64_t data_bytes, const std::string& file) {
  HeaderReader reader(file);
  json::sax_parse(text.data(), text.data() + text.size(), &reader);
  SafetensorsHeader header = reader.take();
  check_names(header.entries, file);
  const auto before = [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  };
  if (!std::is_sorted(header.entries.begin(), header.entries.end(), before)) {
    std::sort(header.entries.begin(), header.entries.end(), before);
  }
  std::uint64_t at = 0;
  for (const SafetensorsEntry& e : header.entries) {
    if (e.begin != at) {
      fail<IoError>("{}: '{}' begins at {}, but the tensor before ends at {}", file, printable_start(e.name), e.begin,
                    at);
    }
    at = e.end;
    if (at > data_bytes) {
      fail<IoError>("{}: cut short: '{}' ends at byte {} of the data, which has {}", file, printable_start(e.name), at,
                    data_bytes);
    }
  }
  if (at != data_bytes) fail<IoError>("{}: expected {} bytes of data, got {}", file, at, data_bytes);
  return header;
}

}  // namespace halfstep::io::detail
