// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "halfstep/core/fail.h"
#include "halfstep/debug/dump.h"
#include "halfstep/io/atomic_file.h"

namespace halfstep::io {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxHeader = 100'000'000;
constexpr std::uintmax_t kMaxFile = std::uintmax_t{1} << 40;

struct DTypeName {
  DType dtype;
  const char* name;
};
constexpr DTypeName kNames[] = {
    {DType::f64, "F64"},        {DType::f32, "F32"},        {DType::f16, "F16"},      {DType::bf16, "BF16"},
    {DType::f8e4m3, "F8_E4M3"}, {DType::f8e5m2, "F8_E5M2"}, {DType::i64, "I64"},      {DType::i32, "I32"},
    {DType::i8, "I8"},          {DType::u8, "U8"},          {DType::boolean, "BOOL"},
};

const char* format_name(DType dtype) {
  for (const DTypeName& n : kNames) {
    if (n.dtype == dtype) return n.name;
  }
  return "";
}

std::optional<DType> from_format_name(const std::string& name) {
  for (const DTypeName& n : kNames) {
    if (n.name == name) return n.dtype;
  }
  return std::nullopt;
}

// What the header says of one tensor.
struct Entry {
  std::string name;
  DType dtype;
  Shape sizes;
  std::uint64_t begin, end;
};

// Refuses names that stand twice, which a JSON object would quietly merge, and nesting that the format has no use for.
json parse_header(const char* begin, const char* end, const std::string& file) {
  std::vector<std::set<std::string>> keys;
  const auto callback = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > 4) fail<IoError>("{}: header is nested too deeply", file);
    switch (event) {
      case json::parse_event_t::object_start:
        keys.emplace_back();
        break;
      case json::parse_event_t::object_end:
        keys.pop_back();
        break;
      case json::parse_event_t::key:
        if (!keys.back().insert(parsed.get<std::string>()).second) {
          fail<IoError>("{}: '{}' is there twice in the header", file, parsed.get<std::string>());
        }
        break;
      default:
        break;
    }
    return true;
  };
  try {
    return json::parse(begin, end, callback);
  } catch (const json::exception& e) {
    fail<IoError>("{}: header is no valid JSON: {}", file, e.what());
  }
}

std::uint64_t natural(const json& value, const std::string& file, const std::string& name, const char* what) {
  if (!value.is_number_unsigned()) fail<IoError>("{}: {} of '{}' is no whole number of at least 0", file, what, name);
  return value.get<std::uint64_t>();
}

Entry parse_entry(const std::string& name, const json& value, const std::string& file) {
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") || !value.contains("data_offsets")) {
    fail<IoError>("{}: expected dtype, shape and data_offsets for '{}'", file, name);
  }
  const json &dtype_value = value["dtype"], &shape = value["shape"], &offsets = value["data_offsets"];
  const auto dtype = dtype_value.is_string() ? from_format_name(dtype_value.get<std::string>()) : std::nullopt;
  if (!dtype) fail<IoError>("{}: '{}' has the dtype {}, which is not known here", file, name, dtype_value.dump());
  if (!shape.is_array() || shape.size() > kMaxDims) {
    fail<IoError>("{}: expected a shape of at most {} dimensions for '{}'", file, kMaxDims, name);
  }
  Entry entry{name, *dtype, {}, 0, 0};
  std::uint64_t bytes = item_size(*dtype);
  for (const json& size : shape) {
    const std::uint64_t n = natural(size, file, name, "a size");
    if (n > (std::uint64_t{1} << 48) || __builtin_mul_overflow(bytes, n, &bytes)) {
      fail<IoError>("{}: '{}' is too large: shape {}", file, name, shape.dump());
    }
    entry.sizes.push_back(static_cast<std::int64_t>(n));
  }
  if (!offsets.is_array() || offsets.size() != 2) fail<IoError>("{}: expected two data_offsets for '{}'", file, name);
  entry.begin = natural(offsets[0], file, name, "an offset");
  entry.end = natural(offsets[1], file, name, "an offset");
  if (entry.end < entry.begin || entry.end - entry.begin != bytes) {
    fail<IoError>("{}: '{}' is {} {} and needs {} bytes, but its offsets are {} to {}", file, name, format_name(*dtype),
                  entry.sizes.str(), bytes, entry.begin, entry.end);
  }
  return entry;
}

}  // namespace

Safetensors parse_safetensors(std::span<const unsigned char> bytes, const std::string& file) {
  if (bytes.size() < 8) fail<IoError>("{}: expected a safetensors file, got {} bytes", file, bytes.size());
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | bytes[static_cast<std::size_t>(i)];
  if (length > kMaxHeader) {
    fail<IoError>("{}: no safetensors file: its header would have {} bytes, at most {} are allowed", file, length,
                  kMaxHeader);
  }
  if (length > bytes.size() - 8) {
    fail<IoError>("{}: cut short: expected {} bytes of header, got {}", file, length, bytes.size() - 8);
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + 8;
  if (length == 0 || *text != '{') fail<IoError>("{}: no safetensors file: its header doesn't begin with '{{'", file);
  const json header = parse_header(text, text + length, file);
  const auto data = bytes.subspan(8 + static_cast<std::size_t>(length));
  Safetensors result;
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) fail<IoError>("{}: __metadata__ is no object", file);
      for (const auto& [key, item] : value.items()) {
        if (!item.is_string()) fail<IoError>("{}: '{}' in __metadata__ is no text", file, key);
        result.metadata[key] = item.get<std::string>();
      }
      continue;
    }
    entries.push_back(parse_entry(name, value, file));
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::uint64_t at = 0;
  for (const Entry& e : entries) {
    if (e.begin != at) {
      fail<IoError>("{}: '{}' begins at {}, but the tensor before ends at {}", file, e.name, e.begin, at);
    }
    at = e.end;
    if (at > data.size()) {
      fail<IoError>("{}: cut short: '{}' ends at byte {} of the data, which has {}", file, e.name, at, data.size());
    }
  }
  if (at != data.size()) fail<IoError>("{}: expected {} bytes of data, got {}", file, at, data.size());
  for (const Entry& e : entries) {
    Tensor tensor = empty(e.sizes, {.dtype = e.dtype, .device = Device{}});
    const auto size = static_cast<std::size_t>(e.end - e.begin);
    if (size) std::memcpy(tensor.raw_data(), data.data() + e.begin, size);
    if (e.dtype == DType::boolean) {
      // Any other byte than 0 and 1 in a bool is undefined behaviour.
      const auto* b = data.data() + e.begin;
      if (std::any_of(b, b + size, [](unsigned char v) { return v > 1; })) {
        fail<IoError>("{}: '{}' is BOOL but holds other values than 0 and 1", file, e.name);
      }
    }
    result.tensors.push_back({e.name, std::move(tensor)});
  }
  return result;
}

Safetensors load_safetensors(const std::filesystem::path& path) {
  const std::string bytes = read_file(path, kMaxFile);
  return parse_safetensors({reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()}, path.string());
}

void save_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::vector<const NamedTensor*> order;
  std::set<std::string> names;
  for (const NamedTensor& t : tensors) {
    if (!t.tensor.defined()) fail<Error>("save_safetensors: '{}' is an undefined tensor", t.name);
    if (t.name == "__metadata__") fail<Error>("save_safetensors: __metadata__ is no name for a tensor");
    if (!names.insert(t.name).second) fail<Error>("save_safetensors: there are two tensors called '{}'", t.name);
    order.push_back(&t);
  }
  std::sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    const auto x = a->tensor.item_size(), y = b->tensor.item_size();
    return x != y ? x > y : a->name < b->name;
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t at = 0;
  for (const NamedTensor* t : order) {
    const auto size = static_cast<std::uint64_t>(t->tensor.numel()) * t->tensor.item_size();
    const Shape& s = t->tensor.sizes();
    header[t->name] = {{"dtype", format_name(t->tensor.dtype())},
                       {"shape", std::vector<std::int64_t>(s.begin(), s.end())},
                       {"data_offsets", {at, at + size}}};
    at += size;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception&) {
    fail<Error>("save_safetensors: a name or a metadata text is not valid UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  AtomicFile file(path);
  unsigned char length[8];
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  file.write(length, sizeof(length));
  file.write(text.data(), text.size());
  for (const NamedTensor* t : order) {
    const Tensor dense = t->tensor.detach().to(Device{}).contiguous();
    file.write(dense.raw_data(), static_cast<std::size_t>(dense.numel()) * dense.item_size());
  }
  file.commit();
}

namespace {

// Dumps of whole tensors are such files.
[[maybe_unused]] const bool dumps_written_here = (debug::set_tensor_writer(save_safetensors), true);

}  // namespace

}  // namespace halfstep::io
