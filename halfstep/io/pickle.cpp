// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <unordered_map>

#include "halfstep/core/fail.h"
#include "halfstep/io/little_endian_internal.h"
#include "halfstep/io/pickle_internal.h"

namespace halfstep::io {
namespace {

// Protocol 2 is what PyTorch writes; the later opcodes are those of Python's own protocols 3 to 5.
enum Op : unsigned char {
  kMark = '(',
  kStop = '.',
  kPop = '0',
  kPopMark = '1',
  kDup = '2',
  kBinFloat = 'G',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinPersId = 'Q',
  kReduce = 'R',
  kBinString = 'T',
  kShortBinString = 'U',
  kBinUnicode = 'X',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kAppends = 'e',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kSetItems = 'u',
  kEmptyDict = '}',
  kEmptyList = ']',
  kEmptyTuple = ')',
  kProto = 0x80,
  kNewObj = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes8 = 0x8e,
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kNewObjEx = 0x92,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
  kByteArray8 = 0x96,
};

class Reader {
 public:
  Reader(std::span<const unsigned char> bytes, const std::string& file, const PickleOptions& options)
      : bytes_(bytes), file_(file), options_(options) {}

  Pickle read() {
    if (byte() != kProto) damaged("no pickle of protocol 2 to 5");
    if (const unsigned version = byte(); version < 2 || version > 5) {
      damaged(fmt::format("expected a pickle of protocol 2 to 5, got {}", version));
    }
    for (;;) {
      op_at_ = at_;
      const unsigned char op = byte();
      if (op == kStop) break;
      step(op);
    }
    result_.root = pop();
    if (!stack_.empty() || !marks_.empty()) damaged("values are left over at the end");
    result_.size = at_;
    return std::move(result_);
  }

 private:
  [[noreturn]] void damaged(const std::string& what) const {
    fail<IoError>("{}: damaged pickle at byte {}: {}", file_, op_at_, what);
  }

  std::span<const unsigned char> take(std::uint64_t n) {
    if (n > bytes_.size() - at_) damaged(fmt::format("cut short: expected {} bytes, got {}", n, bytes_.size() - at_));
    const auto part = bytes_.subspan(at_, static_cast<std::size_t>(n));
    at_ += static_cast<std::size_t>(n);
    return part;
  }
  unsigned char byte() { return take(1)[0]; }
  std::uint64_t number(std::size_t bytes) {
    std::uint64_t value = 0;
    const auto part = take(bytes);
    for (std::size_t i = bytes; i-- > 0;) value = value << 8 | part[i];
    return value;
  }
  std::string string(std::uint64_t n) {
    const auto part = take(n);
    return {reinterpret_cast<const char*>(part.data()), part.size()};
  }
  std::string unicode(std::uint64_t n) {
    std::string text = string(n);
    if (!is_utf8(text)) damaged("a text is not valid UTF-8");
    return text;
  }
  std::string line() {
    for (std::size_t end = at_; end < bytes_.size(); ++end) {
      if (bytes_[end] != '\n') continue;
      std::string text = string(end - at_);
      ++at_;
      return text;
    }
    damaged("cut short in a name");
  }

  void push(PickleValue value) {
    if (result_.values.size() >= options_.max_values) {
      damaged(fmt::format("more than {} values", options_.max_values));
    }
    stack_.push_back(static_cast<PickleId>(result_.values.size()));
    result_.values.push_back(std::move(value));
  }
  void push_text(PickleKind kind, std::string text) { push({.kind = kind, .text = std::move(text)}); }
  void push_items(PickleKind kind, std::vector<PickleId> items) { push({.kind = kind, .items = std::move(items)}); }
  // Values below the last mark are out of reach until all above are taken.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  PickleId pop() {
    if (stack_.size() <= floor()) damaged("a value is missing");
    const PickleId id = stack_.back();
    stack_.pop_back();
    return id;
  }
  std::vector<PickleId> pop_mark() {
    if (marks_.empty()) damaged("a mark is missing");
    const std::size_t from = marks_.back();
    marks_.pop_back();
    std::vector<PickleId> items(stack_.begin() + static_cast<std::ptrdiff_t>(from), stack_.end());
    stack_.resize(from);
    return items;
  }
  PickleId peek() {
    if (stack_.size() <= floor()) damaged("a value is missing");
    return stack_.back();
  }
  PickleValue& at(PickleId id) { return result_.values[id]; }

  // What is copied at a few bytes' word: all else takes as much room in the file as in memory.
  void charge(std::size_t bytes) {
    constexpr std::size_t kMost = std::size_t{1} << 26;
    copied_ += bytes;
    if (copied_ > kMost) damaged("the same values are copied too often");
  }

  void push_tuple(int n) {
    std::vector<PickleId> items(static_cast<std::size_t>(n));
    for (int i = n; i-- > 0;) items[static_cast<std::size_t>(i)] = pop();
    push_items(PickleKind::tuple, std::move(items));
  }

  void push_long(std::uint64_t n) {
    const auto part = take(n);
    if (n > 1024) damaged(fmt::format("a number of {} bytes", n));
    if (n > 8) return push_text(PickleKind::big_integer, {reinterpret_cast<const char*>(part.data()), part.size()});
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < part.size(); ++i) value |= std::uint64_t{part[i]} << (8 * i);
    if (n > 0 && n < 8 && (part[part.size() - 1] & 0x80)) value |= ~std::uint64_t{0} << (8 * n);
    push({.kind = PickleKind::integer, .integer = static_cast<std::int64_t>(value)});
  }

  void push_global(const std::string& module, const std::string& name) {
    const std::string full = (module == "__builtin__" ? "builtins" : module) + "." + name;
    if (!options_.allowed || !options_.allowed(full)) {
      fail<IoError>(
          "{}: refers to {} (byte {}); only tensors and plain values are read and nothing is ever run. Is it a whole "
          "model? Save its state_dict() instead",
          file_, printable_start(full), op_at_);
    }
    push_text(PickleKind::global, full);
  }

  void append(PickleId to, std::span<const PickleId> items) {
    if (at(to).kind != PickleKind::list) damaged("values are appended to something that is no list");
    at(to).items.insert(at(to).items.end(), items.begin(), items.end());
  }
  void set_items(PickleId to, std::span<const PickleId> items) {
    if (at(to).kind != PickleKind::dict) damaged("keys are set in something that is no dictionary");
    if (items.size() % 2 != 0) damaged("a key without a value");
    for (std::size_t i = 0; i < items.size(); i += 2) {
      const PickleKind kind = at(items[i]).kind;
      if (kind == PickleKind::list || kind == PickleKind::dict || kind == PickleKind::set) {
        damaged("a list, dictionary or set is a key");
      }
    }
    at(to).items.insert(at(to).items.end(), items.begin(), items.end());
  }

  // The calls that make Python's own containers are done here; all others are kept.
  void reduce() {
    const PickleId arguments_id = pop(), function_id = pop();
    if (at(function_id).kind != PickleKind::global) damaged("something that is no name is called");
    if (at(arguments_id).kind != PickleKind::tuple) damaged("a call without a tuple of arguments");
    const std::string& function = at(function_id).text;
    charge(sizeof(PickleId) * at(arguments_id).items.size());
    const std::vector<PickleId> arguments = at(arguments_id).items;
    if (function == "collections.OrderedDict" && arguments.size() <= 1) {
      std::vector<PickleId> items;
      if (!arguments.empty()) {
        if (at(arguments[0]).kind != PickleKind::list) damaged("an OrderedDict that is not made of a list");
        charge(2 * sizeof(PickleId) * at(arguments[0]).items.size());
        for (const PickleId pair : at(arguments[0]).items) {
          const PickleValue& value = at(pair);
          if ((value.kind != PickleKind::list && value.kind != PickleKind::tuple) || value.items.size() != 2) {
            damaged("an OrderedDict that is not made of pairs");
          }
          items.insert(items.end(), value.items.begin(), value.items.end());
        }
      }
      push_items(PickleKind::dict, {});
      set_items(peek(), items);
      return;
    }
    if ((function == "builtins.set" || function == "builtins.frozenset") && arguments.size() <= 1) {
      if (!arguments.empty() && at(arguments[0]).kind != PickleKind::list) damaged("a set that is not made of a list");
      if (!arguments.empty()) charge(sizeof(PickleId) * at(arguments[0]).items.size());
      return push_items(PickleKind::set, arguments.empty() ? std::vector<PickleId>{} : at(arguments[0]).items);
    }
    if (function == "_codecs.encode" && arguments.size() == 2 && at(arguments[0]).kind == PickleKind::text &&
        at(arguments[1]).text == "latin1") {
      charge(at(arguments[0]).text.size());
      return push_text(PickleKind::bytes, latin1(at(arguments[0]).text));
    }
    if (function == "builtins.bytearray" && arguments.size() == 1 && at(arguments[0]).kind == PickleKind::bytes) {
      charge(at(arguments[0]).text.size());
      return push_text(PickleKind::bytes, std::string(at(arguments[0]).text));
    }
    push_items(PickleKind::object, {function_id, arguments_id});
  }

  std::string latin1(std::string_view text) {
    std::string bytes;
    for (std::size_t i = 0; i < text.size(); ++i) {
      const auto c = static_cast<unsigned char>(text[i]);
      if (c < 0x80) {
        bytes += text[i];
      } else if (c <= 0xc3) {  // U+0080 to U+00FF: two bytes of UTF-8, which the text is known to be
        bytes += static_cast<char>((c & 3) << 6 | (static_cast<unsigned char>(text[++i]) & 0x3f));
      } else {
        damaged("bytes that are none");
      }
    }
    return bytes;
  }

  void new_object(bool with_keywords) {
    if (with_keywords) {
      const PickleId keywords = pop();
      if (at(keywords).kind != PickleKind::dict || !at(keywords).items.empty()) damaged("an object made by keywords");
    }
    const PickleId arguments = pop(), type = pop();
    if (at(type).kind != PickleKind::global || at(arguments).kind != PickleKind::tuple)
      damaged("an object of no class");
    push_items(PickleKind::object, {type, arguments});
  }

  void build() {
    const PickleId state = pop(), to = peek();
    if (at(to).kind != PickleKind::object && at(to).kind != PickleKind::dict) damaged("a state of a plain value");
    at(to).state = state;
  }

  void get(std::uint64_t index) {
    const auto it = memo_.find(index);
    if (it == memo_.end()) damaged(fmt::format("it refers back to value {}, which is not there", index));
    stack_.push_back(it->second);
  }

  void step(unsigned char op) {
    // Referring back makes no value, but takes room too.
    if (stack_.size() > options_.max_values || marks_.size() > options_.max_values) damaged("too many values");
    switch (op) {
      case kProto:
        if (byte() > 5) damaged("an unknown protocol");
        return;
      case kFrame:
        if (number(8) > bytes_.size() - at_) damaged("cut short in a frame");
        return;
      case kMark:
        marks_.push_back(stack_.size());
        return;
      case kPop:
        if (stack_.size() == floor() && !marks_.empty()) {
          marks_.pop_back();
        } else {
          pop();
        }
        return;
      case kPopMark:
        pop_mark();
        return;
      case kDup:
        stack_.push_back(peek());
        return;
      case kNone:
        return push({});
      case kNewTrue:
      case kNewFalse:
        return push({.kind = PickleKind::boolean, .integer = op == kNewTrue});
      case kBinInt:
        return push({.kind = PickleKind::integer, .integer = static_cast<std::int32_t>(number(4))});
      case kBinInt1:
      case kBinInt2:
        return push(
            {.kind = PickleKind::integer, .integer = static_cast<std::int64_t>(number(op == kBinInt1 ? 1 : 2))});
      case kLong1:
        return push_long(byte());
      case kLong4:
        return push_long(number(4));
      case kBinFloat: {
        std::uint64_t bits = 0;
        for (const unsigned char b : take(8)) bits = bits << 8 | b;
        return push({.kind = PickleKind::real, .real = std::bit_cast<double>(bits)});
      }
      case kBinString:
      case kShortBinString: {  // a str of Python 2: text or bytes
        std::string text = string(number(op == kBinString ? 4 : 1));
        const bool valid = is_utf8(text);
        return push_text(valid ? PickleKind::text : PickleKind::bytes, std::move(text));
      }
      case kShortBinUnicode:
        return push_text(PickleKind::text, unicode(byte()));
      case kBinUnicode:
        return push_text(PickleKind::text, unicode(number(4)));
      case kBinUnicode8:
        return push_text(PickleKind::text, unicode(number(8)));
      case kShortBinBytes:
        return push_text(PickleKind::bytes, string(byte()));
      case kBinBytes:
        return push_text(PickleKind::bytes, string(number(4)));
      case kBinBytes8:
      case kByteArray8:
        return push_text(PickleKind::bytes, string(number(8)));
      case kEmptyList:
        return push_items(PickleKind::list, {});
      case kEmptyTuple:
        return push_items(PickleKind::tuple, {});
      case kEmptyDict:
        return push_items(PickleKind::dict, {});
      case kEmptySet:
        return push_items(PickleKind::set, {});
      case kTuple:
        return push_items(PickleKind::tuple, pop_mark());
      case kFrozenSet:
        return push_items(PickleKind::set, pop_mark());
      case kTuple1:
      case kTuple2:
      case kTuple3:
        return push_tuple(op - kTuple1 + 1);
      case kAppend: {
        const PickleId item = pop();
        return append(peek(), {&item, 1});
      }
      case kAppends: {
        const auto items = pop_mark();
        return append(peek(), items);
      }
      case kAddItems: {
        const auto items = pop_mark();
        PickleValue& to = at(peek());
        if (to.kind != PickleKind::set) damaged("values are added to something that is no set");
        to.items.insert(to.items.end(), items.begin(), items.end());
        return;
      }
      case kSetItem: {
        const PickleId value = pop(), key = pop(), pair[] = {key, value};
        return set_items(peek(), pair);
      }
      case kSetItems: {
        const auto items = pop_mark();
        return set_items(peek(), items);
      }
      case kGlobal: {
        const std::string module = line();
        return push_global(module, line());
      }
      case kStackGlobal: {
        const PickleId name = pop(), module = pop();
        if (at(name).kind != PickleKind::text || at(module).kind != PickleKind::text) damaged("a name that is no text");
        return push_global(at(module).text, at(name).text);
      }
      case kReduce:
        return reduce();
      case kNewObj:
      case kNewObjEx:
        return new_object(op == kNewObjEx);
      case kBuild:
        return build();
      case kBinPersId:
        return push_items(PickleKind::persistent, {pop()});
      case kBinPut:
      case kLongBinPut: {
        const std::uint64_t index = number(op == kBinPut ? 1 : 4);
        memo_[index] = peek();
        return;
      }
      case kMemoize:
        memo_[memo_.size()] = peek();
        return;
      case kBinGet:
      case kLongBinGet:
        return get(number(op == kBinGet ? 1 : 4));
      default:
        damaged(fmt::format("opcode {:#04x}, which is not read here", op));
    }
  }

  std::span<const unsigned char> bytes_;
  const std::string& file_;
  const PickleOptions& options_;
  std::size_t at_ = 0;
  std::size_t op_at_ = 0;
  std::size_t copied_ = 0;
  Pickle result_;
  std::vector<PickleId> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, PickleId> memo_;
};

}  // namespace

Pickle parse_pickle(std::span<const unsigned char> bytes, const std::string& file, const PickleOptions& options) {
  return Reader(bytes, file, options).read();
}

void PickleWriter::integer(std::int64_t value) {
  if (value >= 0 && value < 256) {
    text_ += static_cast<char>(kBinInt1);
    little_endian(text_, static_cast<std::uint64_t>(value), 1);
  } else if (value == static_cast<std::int32_t>(value)) {
    text_ += static_cast<char>(kBinInt);
    little_endian(text_, static_cast<std::uint64_t>(value), 4);
  } else {
    text_ += static_cast<char>(kLong1);
    text_ += '\x08';
    little_endian(text_, static_cast<std::uint64_t>(value), 8);
  }
}

void PickleWriter::real(double value) {
  text_ += static_cast<char>(kBinFloat);
  const auto bits = std::bit_cast<std::uint64_t>(value);
  for (int i = 7; i >= 0; --i) text_ += static_cast<char>(bits >> (8 * i));
}

void PickleWriter::text(std::string_view value) {
  if (value.size() > 0xffffffff || !is_utf8(value)) fail<Error>("pickle: a text is not valid UTF-8");
  text_ += static_cast<char>(kBinUnicode);
  little_endian(text_, value.size(), 4);
  text_ += value;
}

bool PickleWriter::recall(const std::string& key) {
  const auto it = memo_.find(key);
  if (it == memo_.end()) return false;
  text_ += static_cast<char>(kLongBinGet);
  little_endian(text_, it->second, 4);
  return true;
}

void PickleWriter::remember(const std::string& key) {
  const auto index = static_cast<std::uint32_t>(memo_.size());
  memo_[key] = index;
  text_ += static_cast<char>(kLongBinPut);
  little_endian(text_, index, 4);
}

void PickleWriter::repeated_text(const std::string& value) {
  if (recall("t" + value)) return;
  text(value);
  remember("t" + value);
}

void PickleWriter::global(const std::string& module, const std::string& name) {
  const std::string key = "g" + module + "\n" + name + "\n";
  if (recall(key)) return;
  text_ += static_cast<char>(kGlobal);
  text_ += key.substr(1);
  remember(key);
}

}  // namespace halfstep::io
