// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <unordered_map>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/io/pth_internal.h"

namespace halfstep::io {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 64;
constexpr std::size_t kMaxSteps = 4'000'000;
constexpr std::size_t kMaxText = std::size_t{64} << 20;
constexpr std::size_t kMaxName = 1024;

// PyTorch's dtypes by the names of their storages and their own; those without a DType are only to be named in errors.
struct TorchDType {
  const char* storage;
  const char* name;
  std::uint64_t size;
  std::optional<DType> dtype;
};
constexpr TorchDType kDTypes[] = {
    {"FloatStorage", "float32", 4, DType::f32},
    {"DoubleStorage", "float64", 8, DType::f64},
    {"HalfStorage", "float16", 2, DType::f16},
    {"BFloat16Storage", "bfloat16", 2, DType::bf16},
    {"", "float8_e4m3fn", 1, DType::f8e4m3},
    {"", "float8_e5m2", 1, DType::f8e5m2},
    {"LongStorage", "int64", 8, DType::i64},
    {"IntStorage", "int32", 4, DType::i32},
    {"CharStorage", "int8", 1, DType::i8},
    {"ByteStorage", "uint8", 1, DType::u8},
    {"BoolStorage", "bool", 1, DType::boolean},
    {"UntypedStorage", "", 1, DType::u8},
    {"ShortStorage", "int16", 2, std::nullopt},
    {"ComplexFloatStorage", "complex64", 8, std::nullopt},
    {"ComplexDoubleStorage", "complex128", 16, std::nullopt},
    {"QInt8Storage", "qint8", 1, std::nullopt},
    {"QUInt8Storage", "quint8", 1, std::nullopt},
    {"QInt32Storage", "qint32", 4, std::nullopt},
    {"", "uint16", 2, std::nullopt},
    {"", "uint32", 4, std::nullopt},
    {"", "uint64", 8, std::nullopt},
    {"", "complex32", 4, std::nullopt},
    {"", "float8_e4m3fnuz", 1, std::nullopt},
    {"", "float8_e5m2fnuz", 1, std::nullopt},
    {"", "float8_e8m0fnu", 1, std::nullopt},
    {"", "float4_e2m1fn_x2", 1, std::nullopt},
};

// What may be named beside those.
constexpr std::string_view kAllowed[] = {
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._tensor._rebuild_from_type_v2",
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
    "torch.Size",
    "torch.device",
    "collections.OrderedDict",
    "collections.Counter",
    "argparse.Namespace",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "builtins.set",
    "builtins.frozenset",
    "builtins.bytearray",
    "builtins.complex",
    "_codecs.encode",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.dtype",
};

const TorchDType* storage_type(std::string_view global) {
  for (const std::string_view prefix : {"torch.storage.", "torch.cuda.", "torch."}) {
    if (!global.starts_with(prefix)) continue;
    for (const TorchDType& t : kDTypes) {
      if (*t.storage && global.substr(prefix.size()) == t.storage) return &t;
    }
  }
  return nullptr;
}

const TorchDType* dtype_of(std::string_view global) {
  if (!global.starts_with("torch.")) return nullptr;
  for (const TorchDType& t : kDTypes) {
    if (*t.name && global.substr(6) == t.name) return &t;
  }
  return nullptr;
}

class TreeReader {
 public:
  TreeReader(const Pickle& pickle, const std::string& file, std::uint64_t max_bytes, std::uint64_t max_repeated)
      : pickle_(pickle), file_(file), max_bytes_(max_bytes), max_repeated_(max_repeated) {}

  PthTree read() {
    for (std::size_t i = 0; i < pickle_.values.size(); ++i) {
      if (pickle_.values[i].kind == PickleKind::persistent) add_storage(static_cast<PickleId>(i));
    }
    const PickleValue& top = pickle_.top();
    if (top.kind == PickleKind::dict) {
      read_dict(top);
    } else if (is_tensor(top)) {
      tree_.tensors.push_back(tensor(pickle_.root, "tensor"));
    } else {
      const json value = walk(pickle_.root, "", 0, tree_.tensors);
      if (tree_.tensors.empty()) tree_.metadata["value"] = dump(value);
    }
    std::set<std::string_view> names;
    for (const auto* list : {&tree_.tensors, &tree_.others}) {
      for (const PthTensor& t : *list) {
        if (!names.insert(t.name).second) damaged(fmt::format("there are two tensors called '{}'", t.name));
      }
    }
    return std::move(tree_);
  }

 private:
  // Names in it are the file's.
  [[noreturn]] void damaged(const std::string& what) const { fail<IoError>("{}: {}", file_, printable(what)); }

  // --- Storages.
  std::uint64_t natural(PickleId id, const char* what) const {
    const PickleValue& value = pickle_[id];
    if (value.kind != PickleKind::integer || value.integer < 0) {
      damaged(fmt::format("damaged: {} is no whole number of at least 0", what));
    }
    return static_cast<std::uint64_t>(value.integer);
  }
  std::uint64_t product(std::uint64_t a, std::uint64_t b, const char* what) const {
    std::uint64_t result;
    if (__builtin_mul_overflow(a, b, &result) || result > max_bytes_) damaged(fmt::format("{} is too large", what));
    return result;
  }

  void add_storage(PickleId id) {
    const PickleValue& name = pickle_[pickle_[id].items[0]];
    if (name.kind != PickleKind::tuple || name.items.size() < 5 || name.items.size() > 6 ||
        pickle_[name.items[0]].text != "storage") {
      damaged("damaged: it refers to something outside that is no storage");
    }
    const TorchDType* type =
        pickle_[name.items[1]].kind == PickleKind::global ? storage_type(pickle_[name.items[1]].text) : nullptr;
    if (type == nullptr) damaged("damaged: a storage of no known type");
    const PickleValue& key = pickle_[name.items[2]];
    if (key.kind != PickleKind::text || key.text.empty() || key.text.size() > 256) {
      damaged("damaged: the name of a storage is no text");
    }
    const std::uint64_t bytes = product(natural(name.items[4], "the size of a storage"), type->size, "a storage");
    const auto [it, fresh] = by_key_.emplace(key.text, tree_.storages.size());
    if (fresh) {
      tree_.storages.push_back({.key = key.text, .bytes = bytes, .item = type->size});
      if ((total_ += bytes) > max_bytes_) damaged("the storages are too large");
    } else if (tree_.storages[it->second].bytes != bytes) {
      damaged(fmt::format("damaged: storage '{}' has two sizes", key.text));
    }
    Place place{it->second, 0, bytes, type};
    // The form before PyTorch 0.4 has views of storages.
    if (name.items.size() == 6 && pickle_[name.items[5]].kind != PickleKind::none) {
      const PickleValue& view = pickle_[name.items[5]];
      if (view.kind != PickleKind::tuple || view.items.size() != 3) damaged("damaged: a view of a storage");
      place.offset = product(natural(view.items[1], "an offset"), type->size, "an offset");
      place.bytes = product(natural(view.items[2], "the size of a view"), type->size, "a view");
      if (place.offset > bytes || place.bytes > bytes - place.offset) {
        damaged("damaged: a view leaves its storage");
      }
    }
    places_[id] = place;
  }

  // --- Tensors.
  bool is_tensor(const PickleValue& value) const {
    if (value.kind != PickleKind::object) return false;
    const std::string& function = pickle_[value.items[0]].text;
    return function.starts_with("torch._utils.") || function.starts_with("torch._tensor.");
  }

  Shape shape(PickleId id, const std::string& name, const char* what) const {
    const PickleValue* value = &pickle_[id];
    if (value->kind == PickleKind::object && pickle_[value->items[0]].text == "torch.Size") {
      const PickleValue& arguments = pickle_[value->items[1]];
      if (arguments.items.size() == 1) value = &pickle_[arguments.items[0]];
    }
    if (value->kind != PickleKind::tuple && value->kind != PickleKind::list) {
      damaged(fmt::format("damaged: the {} of '{}' are no tuple", what, name));
    }
    if (value->items.size() > kMaxDims) {
      damaged(fmt::format("'{}' has {} dimensions, at most {} are known here", name, value->items.size(), kMaxDims));
    }
    Shape result;
    for (const PickleId item : value->items) result.push_back(static_cast<std::int64_t>(natural(item, what)));
    return result;
  }

  // A tensor, or what wraps one: a Parameter, a Buffer.
  PthTensor tensor(PickleId id, const std::string& name) {
    PickleId function_id = pickle_[id].items[0], arguments_id = pickle_[id].items[1];
    for (int depth = 0;; ++depth) {
      const std::string& function = pickle_[function_id].text;
      const std::vector<PickleId>& arguments = pickle_[arguments_id].items;
      if (depth > 8) damaged(fmt::format("damaged: '{}' wraps itself", name));
      if (function.starts_with("torch._utils._rebuild_parameter") && !arguments.empty()) {
        const PickleValue& inner = pickle_[arguments[0]];
        if (!is_tensor(inner)) damaged(fmt::format("damaged: parameter '{}' is no tensor", name));
        function_id = inner.items[0];
        arguments_id = inner.items[1];
        continue;
      }
      if (function == "torch._tensor._rebuild_from_type_v2" && arguments.size() == 4 &&
          pickle_[arguments[0]].kind == PickleKind::global && pickle_[arguments[2]].kind == PickleKind::tuple) {
        function_id = arguments[0];
        arguments_id = arguments[2];
        continue;
      }
      return dense_tensor(function, arguments, name);
    }
  }

  PthTensor dense_tensor(const std::string& function, const std::vector<PickleId>& arguments, const std::string& name) {
    const std::size_t n = arguments.size();
    const bool v1 = function == "torch._utils._rebuild_tensor" && n == 4;
    const bool v2 = function == "torch._utils._rebuild_tensor_v2" && (n == 6 || n == 7);
    const bool v3 = function == "torch._utils._rebuild_tensor_v3" && (n == 7 || n == 8);
    const auto place_of = v1 || v2 || v3 ? places_.find(arguments[0]) : places_.end();
    if (place_of == places_.end()) damaged(fmt::format("damaged: '{}' is no tensor that is known here", name));
    const Place& place = place_of->second;
    const TorchDType* type = v3 ? dtype_of(pickle_[arguments[6]].text) : place.type;
    if (type == nullptr) damaged(fmt::format("damaged: '{}' has no dtype", name));
    if (!type->dtype) {
      damaged(fmt::format("'{}' is {}, a dtype that Halfstep doesn't have", name, type->name));
    }
    if (v2 || v3) check_flags(arguments, v2 ? 6 : 7, name);
    PthTensor result{.name = name, .storage = place.storage, .dtype = *type->dtype};
    result.sizes = shape(arguments[2], name, "sizes");
    result.strides = shape(arguments[3], name, "strides");
    if (result.sizes.size() != result.strides.size()) {
      damaged(fmt::format("damaged: '{}' has sizes {} and strides {}", name, result.sizes.str(), result.strides.str()));
    }
    const std::uint64_t begin = product(natural(arguments[1], "an offset"), type->size, "an offset");
    std::uint64_t last = 0, dense = type->size;
    bool empty = false;
    for (int i = 0; i < result.sizes.size(); ++i) empty = empty || result.sizes[i] == 0;
    for (int i = 0; i < result.sizes.size(); ++i) {
      const auto size = static_cast<std::uint64_t>(result.sizes[i]),
                 stride = static_cast<std::uint64_t>(result.strides[i]);
      dense = product(dense, std::max<std::uint64_t>(size, 1), "a tensor");
      if (!empty) last += product(size - 1, stride, "a tensor");
    }
    const std::uint64_t end = empty ? 0 : begin + product(last + 1, type->size, "a tensor");
    if (end > place.bytes || (empty && begin > place.bytes)) {
      damaged(fmt::format("damaged: '{}' is {} with strides {} from byte {} on, but its storage has {} bytes", name,
                          result.sizes.str(), result.strides.str(), begin, place.bytes));
    }
    // A tensor that repeats its elements (stride 0) needs no room in the file, however large it is.
    if (!empty && dense > place.bytes && dense > max_repeated_) {
      damaged(fmt::format("'{}' repeats {} bytes to {}; at most {} are allowed (--max-unpacked)", name, place.bytes,
                          dense, max_repeated_));
    }
    if (!empty && __builtin_add_overflow(tree_.claimed, dense, &tree_.claimed)) tree_.claimed = UINT64_MAX;
    result.offset = place.offset + begin;
    if (result.offset % type->size != 0) damaged(fmt::format("damaged: '{}' lies across its elements", name));
    PthStorage& storage = tree_.storages[place.storage];
    storage.needed = true;
    storage.booleans = storage.booleans || *type->dtype == DType::boolean;
    return result;
  }

  // PyTorch marks tensors that are to be read negated or conjugated instead of changing them.
  void check_flags(const std::vector<PickleId>& arguments, std::size_t at, const std::string& name) const {
    if (arguments.size() <= at) return;
    const PickleValue& flags = pickle_[arguments[at]];
    for (std::size_t i = 1; i < flags.items.size(); i += 2) {
      if (pickle_[flags.items[i]].integer != 0) {
        damaged(fmt::format("'{}' is a negated or conjugated view; save a clone() of it", name));
      }
    }
  }

  // --- Values.
  std::string key(PickleId id) {
    const PickleValue& value = pickle_[id];
    if (value.kind == PickleKind::text) return value.text;
    if (value.kind == PickleKind::integer) return fmt::format("{}", value.integer);
    std::vector<PthTensor> none;
    std::string text = dump(walk(id, "key", 1, none));
    if (!none.empty()) damaged("damaged: a tensor is a key");
    return text;
  }

  static std::string dump(const json& value) { return value.dump(); }

  void read_dict(const PickleValue& top) {
    // What a training loop saves: {epoch, state_dict, optimizer, ...}.
    for (const std::string_view wrapper : {"state_dict", "model_state_dict", "model", "net"}) {
      for (std::size_t i = 0; i < top.items.size(); i += 2) {
        const PickleValue &name = pickle_[top.items[i]], &value = pickle_[top.items[i + 1]];
        if (name.kind != PickleKind::text || name.text != wrapper || value.kind != PickleKind::dict) continue;
        read_state(value, std::string(wrapper));
        if (tree_.tensors.empty()) {
          tree_.metadata.clear();
          continue;
        }
        tree_.state_dict_key = wrapper;
        for (std::size_t k = 0; k < top.items.size(); k += 2) {
          if (k != i) read_value(top.items[k], top.items[k + 1], "", tree_.others);
        }
        return;
      }
    }
    read_state(top, "");
  }

  void read_state(const PickleValue& dict, const std::string& key) {
    for (std::size_t i = 0; i < dict.items.size(); i += 2) {
      read_value(dict.items[i], dict.items[i + 1], key, tree_.tensors);
    }
  }

  void read_value(PickleId key_id, PickleId id, const std::string& in, std::vector<PthTensor>& tensors) {
    const std::string name = key(key_id);
    const std::size_t before = tensors.size();
    plain_ = 0;
    const json value = walk(id, name, 1, tensors);
    // What consists of tensors only is told by their names.
    if (plain_ == 0 && tensors.size() > before) return;
    tree_.metadata[in.empty() ? name : in + "." + name] = dump(value);
  }

  void count(std::size_t text) {
    if (++steps_ > kMaxSteps || (text_ += text) > kMaxText) damaged("too many values, or values that hold themselves");
  }

  json walk(PickleId id, const std::string& path, int depth, std::vector<PthTensor>& tensors) {
    if (depth > kMaxDepth) damaged("values are nested too deeply, or hold themselves");
    if (path.size() > kMaxName) damaged(fmt::format("a name has over {} bytes", kMaxName));
    const PickleValue& value = pickle_[id];
    count(value.text.size());
    if (is_tensor(value)) {
      count(path.size());
      tensors.push_back(tensor(id, path));
      return {{"tensor", path}};
    }
    const auto inside = [&](const std::string& name) { return path.empty() ? name : path + "." + name; };
    switch (value.kind) {
      case PickleKind::dict: {
        json result = json::object();
        for (std::size_t i = 0; i < value.items.size(); i += 2) {
          const std::string name = key(value.items[i]);
          count(name.size());
          result[name] = walk(value.items[i + 1], inside(name), depth + 1, tensors);
        }
        return result;
      }
      case PickleKind::list:
      case PickleKind::tuple:
      case PickleKind::set: {
        json result = json::array();
        for (std::size_t i = 0; i < value.items.size(); ++i) {
          result.push_back(walk(value.items[i], inside(fmt::format("{}", i)), depth + 1, tensors));
        }
        return result;
      }
      case PickleKind::object:
        ++plain_;
        return object(value, path, depth, tensors);
      default:
        ++plain_;
        return plain(value);
    }
  }

  static json real(double value) {
    // JSON has no such numbers.
    if (std::isnan(value)) return "nan";
    if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
    return value;
  }

  static std::string hex(std::string_view bytes) {
    std::string text;
    for (const char c : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(c));
    return text;
  }

  json plain(const PickleValue& value) const {
    switch (value.kind) {
      case PickleKind::boolean:
        return value.integer != 0;
      case PickleKind::integer:
        return value.integer;
      case PickleKind::real:
        return real(value.real);
      case PickleKind::text:
      case PickleKind::global:
        return value.text;
      case PickleKind::bytes:
        return {{"bytes", hex(value.text)}};
      case PickleKind::big_integer: {
        std::string digits(value.text.rbegin(), value.text.rend());
        return {{"integer", hex(digits)}};
      }
      case PickleKind::persistent:
        return "storage";
      default:
        return nullptr;
    }
  }

  json object(const PickleValue& value, const std::string& path, int depth, std::vector<PthTensor>& tensors) {
    const std::string& type = pickle_[value.items[0]].text;
    const std::vector<PickleId>& arguments = pickle_[value.items[1]].items;
    if (type == "argparse.Namespace" && value.state != kNoPickle) return walk(value.state, path, depth + 1, tensors);
    if ((type == "torch.Size" || type == "torch.device" || type == "collections.Counter") && arguments.size() == 1) {
      return walk(arguments[0], path, depth + 1, tensors);
    }
    if (type.ends_with(".PosixPath")) {
      std::string text;
      for (const PickleId part : arguments) {
        count(pickle_[part].text.size());
        if (pickle_[part].kind != PickleKind::text) damaged("damaged: a path that is no text");
        text += (text.empty() || text.ends_with('/') ? "" : "/") + pickle_[part].text;
      }
      return text;
    }
    if (type.ends_with(".multiarray.scalar") && arguments.size() == 2) return numpy_scalar(arguments);
    json result = {{"type", type}, {"arguments", json::array()}};
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      result["arguments"].push_back(walk(arguments[i], fmt::format("{}.{}", path, i), depth + 1, tensors));
    }
    return result;
  }

  // A NumPy number, which is what best_acc1 often is: dtype('f8'), and the bytes.
  json numpy_scalar(const std::vector<PickleId>& arguments) const {
    const PickleValue &dtype = pickle_[arguments[0]], &data = pickle_[arguments[1]];
    if (dtype.kind != PickleKind::object || data.kind != PickleKind::bytes) return nullptr;
    const std::vector<PickleId>& names = pickle_[dtype.items[1]].items;
    const std::string code = names.empty() ? "" : pickle_[names[0]].text;
    // The byte order is the second item of its state.
    if (dtype.state != kNoPickle && pickle_[dtype.state].items.size() > 1 &&
        pickle_[pickle_[dtype.state].items[1]].text == ">") {
      return nullptr;
    }
    const auto as = [&]<class T>(T number) -> json {
      if (data.text.size() != sizeof(T)) return nullptr;
      std::memcpy(&number, data.text.data(), sizeof(T));
      if constexpr (std::is_floating_point_v<T>) return real(number);
      return number;
    };
    if (code == "f8") return as(double{});
    if (code == "f4") return as(float{});
    if (code == "i8") return as(std::int64_t{});
    if (code == "i4") return as(std::int32_t{});
    if (code == "b1" && data.text.size() == 1) return data.text[0] != 0;
    return nullptr;
  }

  struct Place {
    std::size_t storage = 0;
    std::uint64_t offset = 0;  // of what tensors see of it, in bytes
    std::uint64_t bytes = 0;
    const TorchDType* type = nullptr;
  };

  const Pickle& pickle_;
  const std::string& file_;
  const std::uint64_t max_bytes_;
  const std::uint64_t max_repeated_;
  PthTree tree_;
  std::unordered_map<std::string, std::size_t> by_key_;
  std::unordered_map<PickleId, Place> places_;
  std::uint64_t total_ = 0;
  std::size_t steps_ = 0;
  std::size_t text_ = 0;
  std::size_t plain_ = 0;  // values that are no tensors, since it was last set to 0
};

}  // namespace

bool pth_allows(std::string_view global) {
  return std::find(std::begin(kAllowed), std::end(kAllowed), global) != std::end(kAllowed) || storage_type(global) ||
         dtype_of(global);
}

PthTree read_pth_tree(const Pickle& pickle, const std::string& file, std::uint64_t max_bytes,
                      std::uint64_t max_repeated) {
  return TreeReader(pickle, file, max_bytes, max_repeated).read();
}

const char* pth_storage_class(DType dtype) {
  for (const TorchDType& t : kDTypes) {
    if (t.dtype == dtype) return *t.storage ? t.storage : nullptr;
  }
  return nullptr;
}

const char* pth_dtype_name(DType dtype) {
  for (const TorchDType& t : kDTypes) {
    if (t.dtype == dtype) return t.name;
  }
  return "";
}

}  // namespace halfstep::io
