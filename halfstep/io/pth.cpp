// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/pth.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>

#include "halfstep/core/fail.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/tensor_impl.h"
#include "halfstep/core/text.h"
#include "halfstep/io/pth_internal.h"
#include "halfstep/io/read_limits_internal.h"

namespace halfstep::io {
namespace {

constexpr std::uint64_t kMaxPickle = std::uint64_t{256} << 20;
// Beyond what any file has: sums of sizes don't overflow.
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 40;
constexpr std::string_view kZipMagic = "PK\x03\x04", kLegacyMagic = "\x80\x02\x8a\x0a";

Pickle parse(std::span<const unsigned char> bytes, const std::string& file) {
  return parse_pickle(bytes, file, {.allowed = pth_allows});
}

PthTree read_tree(const Pickle& pickle, const std::string& file, const ReadLimits& limits) {
  return read_pth_tree(pickle, file, kMaxBytes, limits.max_unpacked);
}

std::span<const unsigned char> as_bytes(const std::string& text) {
  return {reinterpret_cast<const unsigned char*>(text.data()), text.size()};
}

// Any other byte than 0 and 1 in a bool is undefined behaviour.
void check_booleans(const PthStorage& storage, const Ref<Storage>& memory, const std::string& file) {
  const auto* b = static_cast<const unsigned char*>(memory->data());
  if (storage.booleans && std::any_of(b, b + storage.bytes, [](unsigned char v) { return v > 1; })) {
    fail<IoError>("{}: storage '{}' is of bools but holds other values than 0 and 1", file, printable(storage.key));
  }
}

PthFile assemble(PthTree tree, const std::vector<Ref<Storage>>& memory, const std::string& file) {
  for (std::size_t i = 0; i < tree.storages.size(); ++i) {
    if (tree.storages[i].needed) check_booleans(tree.storages[i], memory[i], file);
  }
  const auto make = [&](const std::vector<PthTensor>& from) {
    NamedTensors tensors;
    for (const PthTensor& t : from) {
      const auto offset = static_cast<std::int64_t>(t.offset / item_size(t.dtype));
      tensors.push_back({t.name, Tensor(TensorImpl::make(memory[t.storage], offset, t.sizes, t.strides, t.dtype))});
    }
    return tensors;
  };
  return {make(tree.tensors), make(tree.others), std::move(tree.metadata), std::move(tree.state_dict_key)};
}

// --- The zip form: ROOT/data.pkl, ROOT/data/KEY, ROOT/byteorder, ROOT/version.

// The part of a name behind the archive's folder, which is called as the file once was.
std::string_view inside(std::string_view name) {
  const std::size_t slash = name.find('/');
  return slash == std::string_view::npos ? std::string_view() : name.substr(slash + 1);
}

struct ZipContents {
  std::string pickle;
  std::map<std::string, std::uint64_t, std::less<>> data;  // sizes by key
  bool has_pickle = false;
};

ZipContents read_directory(const ZipSource& source, std::uint64_t file_bytes, const ReadLimits& limits) {
  constexpr std::size_t kMostFiles = 4'000'000;
  ZipContents contents;
  std::set<std::string> names;
  std::string root;
  visit_zip(source, [&](ZipEntry& entry) {
    const std::string_view name = inside(entry.name());
    const std::string folder = entry.name().substr(0, entry.name().size() - name.size());
    if (names.empty()) root = folder;
    if (names.size() >= kMostFiles) fail<IoError>("{}: too many files in the archive", source.name);
    if (!names.insert(entry.name()).second) {
      fail<IoError>("{}: '{}' is there twice", source.name, printable_start(entry.name()));
    }
    if (folder != root) return true;
    if (name == "constants.pkl" || name.starts_with("code/")) {
      fail<IoError>("{}: a TorchScript program, which is code; save its state_dict() instead", source.name);
    }
    if (name == "data.pkl") {
      detail::check_unpacked(entry.size(), file_bytes, limits, source.name);
      contents.pickle = entry.text(kMaxPickle);
      contents.has_pickle = true;
    } else if (name == "byteorder") {
      const std::string order = entry.text(64);
      if (order != "little")
        fail<IoError>("{}: expected little-endian data, got byte order '{}'", source.name, printable(order));
    } else if (name.starts_with("data/")) {
      contents.data.emplace(name.substr(5), entry.size());
    }
    return true;
  });
  if (!contents.has_pickle) fail<IoError>("{}: a zip archive, but none of PyTorch's: data.pkl is missing", source.name);
  return contents;
}

PthFile read_zip(const ZipSource& source, std::uint64_t file_bytes, const ReadLimits& limits) {
  const ZipContents contents = read_directory(source, file_bytes, limits);
  PthTree tree = read_tree(parse(as_bytes(contents.pickle), source.name), source.name, limits);
  std::uint64_t total = 0;
  std::vector<Ref<Storage>> memory(tree.storages.size());
  std::unordered_map<std::string_view, std::size_t> wanted;
  for (std::size_t i = 0; i < tree.storages.size(); ++i) {
    const PthStorage& s = tree.storages[i];
    if (!s.needed) continue;
    const auto there = contents.data.find(s.key);
    // A storage of no bytes may be left out.
    if (there == contents.data.end() && s.bytes != 0) {
      fail<IoError>("{}: the data of storage '{}' are missing", source.name, printable(s.key));
    }
    if (there != contents.data.end() && there->second != s.bytes) {
      fail<IoError>("{}: storage '{}' should have {} bytes and has {}", source.name, printable(s.key), s.bytes,
                    there->second);
    }
    if (s.bytes == 0) {
      memory[i] = Storage::allocate(0, Device{});
    } else {
      wanted.emplace(s.key, i);
      total += s.bytes;
    }
  }
  detail::check_unpacked(std::max(total, tree.claimed), file_bytes, limits, source.name);
  detail::check_bytes(total, limits, source.name);
  visit_zip(source, [&](ZipEntry& entry) {
    const std::string_view name = inside(entry.name());
    if (!name.starts_with("data/")) return true;
    const auto it = wanted.find(name.substr(5));
    if (it == wanted.end()) return true;
    const PthStorage& s = tree.storages[it->second];
    // The file in the other folder of that name, or one that changes while it is read.
    if (entry.size() != s.bytes)
      fail<IoError>("{}: '{}' changed while it was read", source.name, printable_start(entry.name()));
    Ref<Storage> block = Storage::allocate(static_cast<std::size_t>(s.bytes), Device{});
    entry.read(block->data());
    memory[it->second] = std::move(block);
    wanted.erase(it);
    return !wanted.empty();
  });
  if (!wanted.empty()) fail<IoError>("{}: changed while it was read", source.name);
  return assemble(std::move(tree), memory, source.name);
}

// --- The form before PyTorch 1.6: five pickles, then each storage as its number of elements and its bytes.

struct LegacyHead {
  PthTree tree;
  std::vector<std::size_t> order;  // of the storages in the file
  std::size_t size = 0;            // bytes that it took
};

LegacyHead read_legacy_head(std::span<const unsigned char> bytes, const std::string& file, const ReadLimits& limits) {
  static constexpr std::string_view kMagic = "\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
  LegacyHead head;
  const auto next = [&] {
    Pickle pickle = parse(bytes, file);
    bytes = bytes.subspan(pickle.size);
    head.size += pickle.size;
    return pickle;
  };
  const Pickle magic = next();
  if (magic.top().kind != PickleKind::big_integer || magic.top().text != kMagic) {
    fail<IoError>("{}: a pickle, but none of torch.save's", file);
  }
  const Pickle protocol = next();
  if (protocol.top().kind != PickleKind::integer || protocol.top().integer != 1001) {
    fail<IoError>("{}: an unknown version of torch.save", file);
  }
  const Pickle system = next();
  const auto& about = system.top().items;
  for (std::size_t i = 0; i + 1 < about.size(); i += 2) {
    if (system[about[i]].text == "little_endian" && system[about[i + 1]].integer == 0) {
      fail<IoError>("{}: expected little-endian data, got big-endian", file);
    }
  }
  const Pickle object = next();
  head.tree = read_tree(object, file, limits);
  const Pickle keys = next();
  if (keys.top().kind != PickleKind::list) fail<IoError>("{}: damaged: the list of storages is missing", file);
  const auto& storages = head.tree.storages;
  std::unordered_map<std::string_view, std::size_t> by_key;
  for (std::size_t i = 0; i < storages.size(); ++i) by_key.emplace(storages[i].key, i);
  std::vector<bool> there(storages.size());
  for (const PickleId id : keys.top().items) {
    const auto it = by_key.find(keys[id].text);
    if (it == by_key.end()) {
      fail<IoError>("{}: damaged: storage '{}' is not used", file, printable_start(keys[id].text, 64));
    }
    if (there[it->second]) fail<IoError>("{}: damaged: storage '{}' is there twice", file, printable(it->first));
    there[it->second] = true;
    head.order.push_back(it->second);
  }
  for (std::size_t i = 0; i < storages.size(); ++i) {
    if (storages[i].needed && !there[i]) {
      fail<IoError>("{}: the data of storage '{}' are missing", file, printable(storages[i].key));
    }
  }
  return head;
}

// `read` gives `bytes` bytes from `at` on, which are there.
PthFile read_legacy(LegacyHead head, std::uint64_t file_bytes, const std::string& file, const ReadLimits& limits,
                    const std::function<void(std::uint64_t at, void* to, std::size_t bytes)>& read) {
  std::uint64_t at = head.size;
  detail::check_unpacked(head.tree.claimed, file_bytes, limits, file);
  detail::check_bytes(file_bytes - at, limits, file);
  std::vector<Ref<Storage>> memory(head.tree.storages.size());
  for (const std::size_t index : head.order) {
    const PthStorage& s = head.tree.storages[index];
    if (file_bytes - at < 8 || file_bytes - at - 8 < s.bytes) {
      fail<IoError>("{}: cut short in storage '{}'", file, printable(s.key));
    }
    unsigned char count[8];
    read(at, count, sizeof(count));
    std::uint64_t elements = 0;
    for (std::size_t i = 8; i-- > 0;) elements = elements << 8 | count[i];
    if (elements != s.bytes / s.item) {
      fail<IoError>("{}: storage '{}' should have {} elements and has {}", file, printable(s.key), s.bytes / s.item,
                    elements);
    }
    Ref<Storage> block = Storage::allocate(static_cast<std::size_t>(s.bytes), Device{});
    if (s.bytes != 0) read(at + 8, block->data(), static_cast<std::size_t>(s.bytes));
    memory[index] = std::move(block);
    at += 8 + s.bytes;
  }
  return assemble(std::move(head.tree), memory, file);
}

// How long the pickles are is only known when they are read: from as much of the file as it takes.
LegacyHead load_legacy_head(const InputFile& input, const ReadLimits& limits) {
  constexpr std::uint64_t kFirst = std::uint64_t{1} << 20;
  for (std::uint64_t size = std::min(kFirst, input.size());; size = std::min(16 * size, input.size())) {
    std::string text(static_cast<std::size_t>(size), '\0');
    input.read(0, text.data(), text.size());
    try {
      return read_legacy_head(as_bytes(text), input.name(), limits);
    } catch (const IoError&) {
      if (size == input.size() || size >= kMaxPickle) throw;
    }
  }
}

[[noreturn]] void refuse(std::string_view start, const std::string& file) {
  if (start.size() > 262 && start.substr(257, 5) == "ustar") {
    fail<IoError>("{}: a tar archive, the form of PyTorch before 0.2; load and save it with a newer PyTorch", file);
  }
  fail<IoError>("{}: expected a file of torch.save, got something else", file);
}

}  // namespace

PthFile parse_pth(std::span<const unsigned char> bytes, const std::string& name, const ReadLimits& limits,
                  bool check_sums) {
  const std::string file = printable(name);
  const std::string_view start(reinterpret_cast<const char*>(bytes.data()), std::min<std::size_t>(bytes.size(), 512));
  if (start.starts_with(kZipMagic)) {
    return read_zip({.name = file, .bytes = bytes, .check_sums = check_sums}, bytes.size(), limits);
  }
  if (!start.starts_with(kLegacyMagic)) refuse(start, file);
  return read_legacy(read_legacy_head(bytes, file, limits), bytes.size(), file, limits,
                     [&](std::uint64_t at, void* to, std::size_t n) { std::memcpy(to, bytes.data() + at, n); });
}

PthFile parse_pth(std::span<const unsigned char> bytes, const std::string& name, const ReadLimits& limits) {
  return parse_pth(bytes, name, limits, true);
}

PthFile load_pth(const std::filesystem::path& path, const ReadLimits& limits) {
  const InputFile input(path);
  const std::string& file = input.name();
  std::string start(static_cast<std::size_t>(std::min<std::uint64_t>(input.size(), 512)), '\0');
  input.read(0, start.data(), start.size());
  // Storages go from the file to their place, without the whole file in memory.
  if (start.starts_with(kZipMagic)) return read_zip({.name = file, .path = path}, input.size(), limits);
  if (!start.starts_with(kLegacyMagic)) refuse(start, file);
  PthFile result = read_legacy(load_legacy_head(input, limits), input.size(), file, limits,
                               [&](std::uint64_t at, void* to, std::size_t n) { input.read(at, to, n); });
  input.check_unchanged();
  return result;
}

}  // namespace halfstep::io
