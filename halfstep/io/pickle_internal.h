// SPDX-License-Identifier: Apache-2.0
// Internal: Python's pickle format as a tree of values. Nothing is ever called or imported: what a pickle would call is
// kept as a name and its arguments.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/core/text.h"

namespace halfstep::io {

/// Number of a value in Pickle::values.
using PickleId = std::uint32_t;
inline constexpr PickleId kNoPickle = 0xffffffff;

/// What a value of a pickle is, and which fields of PickleValue hold it.
enum class PickleKind : std::uint8_t {
  none,
  boolean,      ///< integer: 0 or 1
  integer,      ///< integer
  big_integer,  ///< text: little-endian two's complement of more than 8 bytes
  real,         ///< real
  text,         ///< text, UTF-8
  bytes,        ///< text
  list,         ///< items
  tuple,        ///< items
  dict,         ///< items: key, value, key, value, ...; OrderedDict too
  set,          ///< items
  global,       ///< text: module.name
  object,       ///< items: the global that would be called, and its arguments (a tuple)
  persistent,   ///< items: the value by which the writer names something outside of the pickle
};

/// One value of a pickle.
struct PickleValue {
  PickleKind kind = PickleKind::none;  ///< says which of the other fields are used
  PickleId state = kNoPickle;          ///< what BUILD gave an object or a dict
  std::int64_t integer = 0;
  double real = 0;
  std::string text = {};
  std::vector<PickleId> items = {};
};

/// A pickle that was read. Values may be referred to from several places, and from within themselves: whoever walks
/// through them must limit depth and number of steps.
struct Pickle {
  std::vector<PickleValue> values;
  PickleId root = kNoPickle;
  std::size_t size = 0;  ///< bytes that it took

  const PickleValue& operator[](PickleId id) const { return values[id]; }
  /// The value that the whole pickle stands for.
  const PickleValue& top() const { return values[root]; }
};

/// Limits of parse_pickle.
struct PickleOptions {
  /// Whether a pickle may name this (`module.name`, Python 2's `__builtin__` as `builtins`); none: nothing.
  std::function<bool(std::string_view name)> allowed = {};
  std::size_t max_values = 4'000'000;
};

/// Reads one pickle of protocol 2 to 5 from the start of `bytes`. Throws IoError, naming `file` and the place, for
/// anything damaged, cut short or over the limits, for opcodes of other protocols and for names that aren't allowed.
HS_API Pickle parse_pickle(std::span<const unsigned char> bytes, const std::string& file,
                           const PickleOptions& options = {});

/// Writes a pickle of protocol 2 from left to right. Containers are opened and closed by whoever calls.
class HS_API PickleWriter {
 public:
  PickleWriter() { text_ = "\x80\x02"; }
  void none() { text_ += 'N'; }
  void boolean(bool value) { text_ += value ? '\x88' : '\x89'; }
  void integer(std::int64_t value);
  void real(double value);
  void text(std::string_view value);
  /// A text, or module and name, that comes often: written once and then referred to.
  void repeated_text(const std::string& value);
  void global(const std::string& module, const std::string& name);
  void mark() { text_ += '('; }
  void tuple() { text_ += 't'; }  ///< of all since the mark
  void empty_tuple() { text_ += ')'; }
  void empty_dict() { text_ += '}'; }
  void empty_list() { text_ += ']'; }
  void set_items() { text_ += 'u'; }  ///< keys and values since the mark into the dict before it
  void append_items() { text_ += 'e'; }
  void call() { text_ += 'R'; }  ///< of the global before the tuple
  void persistent() { text_ += 'Q'; }
  std::string finish() { return text_ + '.'; }

 private:
  bool recall(const std::string& key);
  void remember(const std::string& key);
  std::string text_;
  std::map<std::string, std::uint32_t> memo_;
};

}  // namespace halfstep::io
