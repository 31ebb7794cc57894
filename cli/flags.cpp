// SPDX-License-Identifier: Apache-2.0
#include "cli/flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <type_traits>
#include <utility>

#include "cli/options.h"
#include "halfstep/io/read_limits.h"

namespace halfstep::cli {
namespace {

using training::FlagSetter;
using training::TurnsOff;

template <class T>
constexpr bool kWhole =
    std::is_same_v<T, int*> || std::is_same_v<T, std::int64_t*> || std::is_same_v<T, std::uint64_t*>;

// What a whole number may be: bounded by sense, unless all 64 bits are one.
struct Bounds {
  std::uint64_t least, most;
};
Bounds bounds_of(const Flag& flag) {
  constexpr double kAll = 0x1p64;
  const bool any = std::holds_alternative<std::uint64_t*>(flag.field);
  const FlagRange& r = flag.range;
  const std::uint64_t usual = any ? kMostSeed : kMostCount;
  return {std::isfinite(r.least) ? static_cast<std::uint64_t>(r.least) : 0, !std::isfinite(r.most) ? usual
                                                                            : r.most >= kAll
                                                                                ? kMostSeed
                                                                                : static_cast<std::uint64_t>(r.most)};
}

// What stands for a value in the help, with the default unless the network has one of its own.
std::string value_name(const Flag& flag) {
  if (flag.value) return *flag.value;
  if (flag.standard) return "[TEXT=" + *flag.standard + "]";
  return std::visit(
      [&](const auto& field) -> std::string {
        using T = std::decay_t<decltype(field)>;
        if constexpr (kWhole<T>) {
          const bool shown = !flag.by_network && std::cmp_greater_equal(*field, bounds_of(flag).least);
          return shown ? fmt::format("N={}", *field) : "N";
        } else if constexpr (std::is_same_v<T, double*>) {
          return flag.by_network ? "X" : fmt::format("X={}", *field);
        } else if constexpr (std::is_same_v<T, std::string*>) {
          return flag.by_network || field->empty() ? "TEXT" : "TEXT=" + *field;
        } else if constexpr (std::is_same_v<T, std::filesystem::path*>) {
          return "PATH";
        } else if constexpr (std::is_same_v<T, FlagSetter>) {
          return "TEXT";
        } else {
          return "";
        }
      },
      flag.field);
}

void refuse_empty(const Flag& flag, const std::string& text, const char* what) {
  if (text.empty() && !flag.standard) {
    throw UsageError(fmt::format("{}: expected a {}, got an empty one", flag.name(), what));
  }
}

void read(const Flag& flag, const std::string& given) {
  const std::string& text = given.empty() && flag.standard ? *flag.standard : given;
  std::visit(
      [&](const auto& field) {
        using T = std::decay_t<decltype(field)>;
        if constexpr (kWhole<T>) {
          const auto [least, most] = bounds_of(flag);
          *field = static_cast<std::remove_pointer_t<T>>(parse_whole(flag.name(), text, least, most));
        } else if constexpr (std::is_same_v<T, double*>) {
          *field = parse_real(flag.name(), text);
        } else if constexpr (std::is_same_v<T, std::string*>) {
          refuse_empty(flag, text, "value");
          *field = text;
        } else if constexpr (std::is_same_v<T, std::filesystem::path*>) {
          refuse_empty(flag, text, "path");
          *field = text;
        } else if constexpr (std::is_same_v<T, FlagSetter>) {
          field(text);
        }
      },
      flag.field);
  as_usage([&] { training::check_value(flag); });
  if (flag.given) flag.given();
}

// Whether what follows a flag whose value may be left out is meant as its value: not what it can't be and a positional
// argument can.
bool is_value(const Flag& flag, const std::string& text) {
  std::error_code error;
  if (!flag.choices.empty()) {
    const bool chosen = std::find(flag.choices.begin(), flag.choices.end(), text) != flag.choices.end();
    return chosen || !(is_network(text) || std::filesystem::exists(text, error));
  }
  if (std::holds_alternative<double*>(flag.field)) {
    return text.empty() || std::string_view("0123456789.+-").find(text[0]) != std::string_view::npos;
  }
  return true;
}

const char* resume_text(FlagResume resume) {
  switch (resume) {
    case FlagResume::free:
      return "";
    case FlagResume::reported:
      return "may change, and is reported";
    case FlagResume::at_epoch_end:
      return "may change at the end of an epoch, and is reported";
    case FlagResume::of_precision:
      return "the same, unless `--amp` changes";
    case FlagResume::same:
    case FlagResume::recipe:
      return "the same";
  }
  return "";
}

const char* kept_text(FlagKept kept) {
  switch (kept) {
    case FlagKept::always:
      return "yes";
    case FlagKept::given:
      return "if given";
    case FlagKept::never:
      return "no";
  }
  return "";
}

// `--batch-size,-b` as both names.
std::vector<std::string> split_names(const std::string& names) {
  std::vector<std::string> result;
  for (std::size_t at = 0; at < names.size();) {
    const std::size_t comma = std::min(names.find(',', at), names.size());
    result.push_back(names.substr(at, comma - at));
    at = comma + 1;
  }
  return result;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) result += c == '|' ? std::string("\\|") : std::string(1, c);
  return result;
}

}  // namespace

std::uint64_t parse_whole(const std::string& flag, const std::string& text, std::uint64_t least, std::uint64_t most) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < least || value > most) {
    throw UsageError(fmt::format("{}: expected a whole number from {} to {}, got '{}'", flag, least, most, text));
  }
  return value;
}

double parse_real(const std::string& flag, const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw UsageError(fmt::format("{}: expected a number, got '{}'{}", flag, text,
                                 text.find(',') == std::string::npos ? "" : "; decimals follow a point"));
  }
  return value;
}

Argument add_flag(const Verb& verb, const Flag& flag) {
  const auto add = [&]() -> Argument {
    if (const auto* on = std::get_if<bool*>(&flag.field)) return verb.add_switch(flag.names, **on, flag.help);
    if (const auto* off = std::get_if<TurnsOff>(&flag.field)) {
      return verb.add_switch(
          flag.names, [on = off->on] { *on = false; }, flag.help);
    }
    Argument argument = verb.add_option(
        flag.names, [flag](const std::string& text) { read(flag, text); }, flag.help);
    argument.value(value_name(flag));
    if (flag.standard)
      argument.optional(*flag.standard, [flag](const std::string& text) { return is_value(flag, text); });
    return argument;
  };
  Argument argument = add();
  if (!flag.group.empty()) argument.group(flag.group);
  return argument;
}

std::string alternatives(std::string list) {
  for (std::size_t at = 0; (at = list.find(',', at)) != std::string::npos; at += 4) list.replace(at, 1, " or ");
  return list;
}

std::string flags_markdown(std::span<const Flag> flags) {
  std::string text, group;
  for (const Flag& flag : flags) {
    if (flag.group != group) {
      group = flag.group;
      text += fmt::format("{}## {}\n\n| flag | | configuration | in a run that resumes |\n| --- | --- | --- | --- |\n",
                          text.empty() ? "" : "\n", group);
    }
    std::string names;
    for (const std::string& name : split_names(flag.names)) {
      names += fmt::format("{}`{}`", names.empty() ? "" : ", ", name);
    }
    if (const std::string value = value_name(flag); !value.empty()) names += fmt::format(" `{}`", value);
    std::string help = escaped(flag.help);
    for (const std::string& of : {flag.data, flag.task}) {
      if (!of.empty()) help += fmt::format(" (of {})", alternatives(of));
    }
    if (flag.by_network) help += " (default: the network's)";
    text +=
        fmt::format("| {} | {} | {} | {} |\n", escaped(names), help, kept_text(flag.kept), resume_text(flag.resume));
  }
  return text;
}

Argument add_real(const Verb& verb, const std::string& names, double& value, const std::string& help) {
  return add_flag(verb, {.names = names, .field = &value, .help = help});
}

Argument add_word(const Verb& verb, const std::string& names, std::string& value, const std::string& help) {
  return add_flag(verb, {.names = names, .field = &value, .help = help});
}

Argument add_path(const Verb& verb, const std::string& names, std::filesystem::path& value, const std::string& help) {
  return add_flag(verb, {.names = names, .field = &value, .help = help});
}

Argument add_training_flag(const Verb& verb, const std::string& name, const FlagField& field, const std::string& help) {
  static training::TrainConfig config;
  static const std::vector<Flag> rows = training::flags(config);
  const auto row = std::find_if(rows.begin(), rows.end(), [&](const Flag& f) { return f.name() == name; });
  if (row == rows.end()) throw InternalError(fmt::format("add_training_flag: training has no flag {}", name));
  std::string names = name;
  for (const std::string& other : split_names(row->names)) {
    if (!other.starts_with("--")) names += "," + other;
  }
  return add_flag(verb, {.names = names,
                         .field = field,
                         .help = help.empty() ? row->help : help,
                         .range = row->range,
                         .choices = row->choices});
}

std::vector<Flag> read_limit_flags() {
  const auto setter = [](const char* flag, std::uint64_t io::ReadLimits::*limit) {
    // 512, 512K, 8G: in powers of 1024.
    return FlagSetter([flag, limit](const std::string& text) {
      constexpr std::string_view kUnits = "KMGT";
      const std::size_t unit = text.empty() ? std::string_view::npos : kUnits.find(text.back());
      const bool has_unit = unit != std::string_view::npos;
      const auto shift = has_unit ? 10 * (unit + 1) : 0;
      io::ReadLimits limits = io::read_limits();
      const std::string number = has_unit ? text.substr(0, text.size() - 1) : text;
      limits.*limit = parse_whole(flag, number, 0, kMostSeed >> shift) << shift;
      io::set_read_limits(limits);
    });
  };
  return {{.names = "--max-bytes",
           .field = setter("--max-bytes", &io::ReadLimits::max_bytes),
           .help = "Limit on the bytes of a file's tensors, such as 512M or 8G (default: the machine's memory)",
           .value = "SIZE",
           .kept = FlagKept::never},
          {.names = "--max-unpacked",
           .field = setter("--max-unpacked", &io::ReadLimits::max_unpacked),
           .help = "Limit on the bytes of a file's tensors beyond eight times the file's size (default: 1G)",
           .value = "SIZE",
           .kept = FlagKept::never}};
}

void add_read_limits(const Verb& verb) {
  for (const Flag& flag : read_limit_flags()) add_flag(verb, flag);
}

}  // namespace halfstep::cli
