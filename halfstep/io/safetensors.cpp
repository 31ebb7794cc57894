// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string_view>
#include <utility>

#include "halfstep/core/fail.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/core/text.h"
#include "halfstep/debug/dump.h"
#include "halfstep/io/atomic_file.h"
#include "halfstep/io/read_limits_internal.h"
#include "halfstep/io/safetensors_internal.h"

namespace halfstep::io {
namespace {

using detail::SafetensorsEntry;
using detail::SafetensorsHeader;

constexpr std::uint64_t kMaxHeader = 100'000'000;

// Bytes of a file from front to back: small pieces out of a block that is read at once, large ones to their place.
class FileBytes {
 public:
  explicit FileBytes(const InputFile& file) : file_(file) {}
  void read(std::uint64_t at, void* to, std::size_t bytes) {
    if (bytes >= kBlock) return file_.read(at, to, bytes);
    if (at < begin_ || at - begin_ > block_.size() || bytes > block_.size() - (at - begin_)) {
      begin_ = at;
      block_.resize(
          static_cast<std::size_t>(std::min<std::uint64_t>(kBlock, file_.size() - std::min(at, file_.size()))));
      file_.read(at, block_.data(), block_.size());
      if (bytes > block_.size()) return file_.read(at, to, bytes);  // which says that it is cut short
    }
    if (bytes != 0) std::memcpy(to, block_.data() + (at - begin_), bytes);
  }

 private:
  static constexpr std::size_t kBlock = std::size_t{1} << 20;
  const InputFile& file_;
  std::uint64_t begin_ = 0;
  std::string block_;
};

std::uint64_t header_length(const unsigned char* bytes, std::uint64_t size, const std::string& file) {
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | bytes[i];
  if (length > kMaxHeader) {
    fail<IoError>("{}: no safetensors file: its header would have {} bytes, at most {} are allowed", file, length,
                  kMaxHeader);
  }
  if (length > size - 8) fail<IoError>("{}: cut short: expected {} bytes of header, got {}", file, length, size - 8);
  return length;
}

// `read` gives `bytes` bytes of the data from `at` on.
template <class Read>
Safetensors assemble(SafetensorsHeader header, const ReadLimits& limits, const std::string& file, Read&& read) {
  std::uint64_t bytes = 0;
  for (const SafetensorsEntry& e : header.entries) bytes += e.end - e.begin;
  detail::check_bytes(bytes, limits, file);
  Safetensors result;
  result.metadata = std::move(header.metadata);
  result.tensors.reserve(header.entries.size());
  for (SafetensorsEntry& e : header.entries) {
    const auto size = static_cast<std::size_t>(e.end - e.begin);
    Ref<Storage> memory = Storage::allocate(size, Device{});
    if (size != 0) read(e.begin, memory->data(), size);
    if (e.dtype == DType::boolean) {
      // Any other byte than 0 and 1 in a bool is undefined behaviour.
      const auto* b = static_cast<const unsigned char*>(memory->data());
      if (std::any_of(b, b + size, [](unsigned char v) { return v > 1; })) {
        fail<IoError>("{}: '{}' is BOOL but holds other values than 0 and 1", file, printable_start(e.name));
      }
    }
    const Shape strides = contiguous_strides(e.sizes);
    result.tensors.push_back(
        {std::move(e.name), Tensor(TensorImpl::make(std::move(memory), 0, e.sizes, strides, e.dtype))});
  }
  return result;
}

SafetensorsHeader parse_header(std::string_view text, std::uint64_t data_bytes, const std::string& file) {
  if (text.empty() || text[0] != '{') {
    fail<IoError>("{}: no safetensors file: its header doesn't begin with '{{'", file);
  }
  return detail::read_safetensors_header(text, data_bytes, file);
}

}  // namespace

Safetensors parse_safetensors(std::span<const unsigned char> bytes, const std::string& name, const ReadLimits& limits) {
  const std::string file = printable(name);
  if (bytes.size() < 8) fail<IoError>("{}: expected a safetensors file, got {} bytes", file, bytes.size());
  const auto length = static_cast<std::size_t>(header_length(bytes.data(), bytes.size(), file));
  const auto data = bytes.subspan(8 + length);
  SafetensorsHeader header = parse_header({reinterpret_cast<const char*>(bytes.data()) + 8, length}, data.size(), file);
  return assemble(std::move(header), limits, file,
                  [&](std::uint64_t at, void* to, std::size_t n) { std::memcpy(to, data.data() + at, n); });
}

namespace {

struct FileHeader {
  SafetensorsHeader header;
  std::uint64_t data = 0;  // where they begin
};
FileHeader header_of(const InputFile& input) {
  const std::string& file = input.name();
  if (input.size() < 8) fail<IoError>("{}: expected a safetensors file, got {} bytes", file, input.size());
  unsigned char start[8];
  input.read(0, start, sizeof(start));
  const std::uint64_t length = header_length(start, input.size(), file);
  std::string text(static_cast<std::size_t>(length), '\0');
  input.read(8, text.data(), text.size());
  return {parse_header(text, input.size() - 8 - length, file), 8 + length};
}

}  // namespace

Safetensors detail::load_some_safetensors(const std::filesystem::path& path, const ReadLimits& limits,
                                          const Wanted& wanted) {
  const InputFile input(path);
  auto [header, data] = header_of(input);
  if (wanted) std::erase_if(header.entries, [&](const SafetensorsEntry& e) { return !wanted(e.name); });
  FileBytes bytes(input);
  Safetensors result =
      assemble(std::move(header), limits, input.name(),
               [&, begin = data](std::uint64_t at, void* to, std::size_t n) { bytes.read(begin + at, to, n); });
  input.check_unchanged();
  return result;
}

void detail::each_safetensor(const std::filesystem::path& path, const ReadLimits& limits,
                             const std::function<void(NamedTensor)>& take) {
  const InputFile input(path);
  auto [header, data] = header_of(input);
  std::sort(header.entries.begin(), header.entries.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) { return a.name < b.name; });
  for (SafetensorsEntry& entry : header.entries) {
    SafetensorsHeader one;
    one.entries.push_back(std::move(entry));
    Safetensors read =
        assemble(std::move(one), limits, input.name(),
                 [&, begin = data](std::uint64_t at, void* to, std::size_t n) { input.read(begin + at, to, n); });
    take(std::move(read.tensors[0]));
  }
  input.check_unchanged();
}

Safetensors load_safetensors(const std::filesystem::path& path, const ReadLimits& limits) {
  return detail::load_some_safetensors(path, limits, {});
}

namespace {

// JSON's form of a text.
void append_text(std::string& to, const std::string& text) {
  if (!is_utf8(text)) {
    fail<Error>("save_safetensors: expected names and metadata in UTF-8, got '{}'", printable_start(text));
  }
  to += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      to += '\\';
      to += c;
    } else if (byte < 0x20) {
      to += fmt::format("\\u{:04x}", byte);
    } else {
      to += c;
    }
  }
  to += '"';
}

// As a tree of JSON values it would take time by the square of the names.
std::string header_text(const std::vector<const NamedTensor*>& order,
                        const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  const auto next = [&text](bool& first) {
    if (!std::exchange(first, false)) text += ',';
  };
  bool first = true;
  if (!metadata.empty()) {
    first = false;
    text += "\"__metadata__\":{";
    bool first_text = true;
    for (const auto& [key, value] : metadata) {
      next(first_text);
      append_text(text, key);
      text += ':';
      append_text(text, value);
    }
    text += '}';
  }
  std::uint64_t at = 0;
  const auto to = std::back_inserter(text);
  for (const NamedTensor* t : order) {
    next(first);
    append_text(text, t->name);
    const auto size = static_cast<std::uint64_t>(t->tensor.numel()) * t->tensor.item_size();
    const Shape& s = t->tensor.sizes();
    fmt::format_to(to, ":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                   detail::safetensors_dtype(t->tensor.dtype()), fmt::join(s.begin(), s.end(), ","), at, at + size);
    at += size;
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

// What stands in a file, in its order.
struct Contents {
  std::vector<const NamedTensor*> order;
  std::string header;
};
Contents contents_of(const NamedTensors& tensors, const std::map<std::string, std::string>& metadata) {
  std::vector<const NamedTensor*> order;
  std::vector<std::string_view> names;
  order.reserve(tensors.size());
  names.reserve(tensors.size());
  for (const NamedTensor& t : tensors) {
    if (!t.tensor.defined()) {
      fail<Error>("save_safetensors: '{}' is an undefined tensor", printable_start(t.name));
    }
    if (t.name == "__metadata__") fail<Error>("save_safetensors: __metadata__ is no name for a tensor");
    order.push_back(&t);
    names.push_back(t.name);
  }
  if (!std::is_sorted(names.begin(), names.end())) std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end()) {
    fail<Error>("save_safetensors: there are two tensors called '{}'", printable_start(*twice));
  }
  std::sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    const auto x = a->tensor.item_size(), y = b->tensor.item_size();
    return x != y ? x > y : a->name < b->name;
  });
  std::string text = header_text(order, metadata);
  if (text.size() > kMaxHeader) {
    fail<Error>("save_safetensors: names and metadata take {} bytes, the format has at most {}", text.size(),
                kMaxHeader);
  }
  return {std::move(order), std::move(text)};
}

}  // namespace

std::uint64_t safetensors_bytes(const NamedTensors& tensors, const std::map<std::string, std::string>& metadata) {
  const Contents contents = contents_of(tensors, metadata);
  std::uint64_t sum = 8 + contents.header.size();
  for (const NamedTensor* t : contents.order) {
    sum += static_cast<std::uint64_t>(t->tensor.numel()) * t->tensor.item_size();
  }
  return sum;
}

void save_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata) {
  const auto [order, text] = contents_of(tensors, metadata);
  AtomicFile file(path);
  unsigned char length[8];
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  file.write(length, sizeof(length));
  file.write(text.data(), text.size());
  for (const NamedTensor* t : order) {
    const Tensor dense = t->tensor.detach().to(Device{}).contiguous();
    file.write(dense.const_raw_data(), static_cast<std::size_t>(dense.numel()) * dense.item_size());
  }
  file.commit();
}

namespace {

// Dumps of whole tensors are such files.
[[maybe_unused]] const bool dumps_written_here = (debug::set_tensor_writer(save_safetensors), true);

}  // namespace

}  // namespace halfstep::io
