// SPDX-License-Identifier: Apache-2.0
#include "cli/config_file.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cctype>
#include <map>
#include <sstream>

#include "cli/suggest.h"
#include "cli/verbs.h"
#include "halfstep/core/text.h"
#include "halfstep/io/atomic_file.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

// A name for every flag, by each of its names without dashes.
std::map<std::string, CLI::Option*> flags_of(const Verb& verb) {
  std::map<std::string, CLI::Option*> flags;
  for (CLI::Option* option : verb.app().get_options()) {
    for (const std::string& name : option->get_lnames()) flags[name] = option;
    if (option->get_lnames().empty() && option->get_positional()) {
      std::string name = option->get_name(true);
      std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
      flags[name] = option;
    }
  }
  // About the program and about this file: no part of a configuration.
  for (const char* name : {"help", "help-all", "config", "markdown"}) flags.erase(name);
  return flags;
}

std::string place(const fs::path& file, const YAML::Mark& mark) {
  return mark.line < 0 ? shown_path(file) : fmt::format("{}:{}", shown_path(file), mark.line + 1);
}

// Not by YAML::LoadAll: on a text that begins with a comma it finds documents without end.
bool has_second_document(const std::string& text) {
  struct Nobody : YAML::EventHandler {
    void OnDocumentStart(const YAML::Mark&) override {}
    void OnDocumentEnd() override {}
    void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
    void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
    void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
    void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
    void OnSequenceEnd() override {}
    void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
    void OnMapEnd() override {}
  } nobody;
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  return parser.HandleNextDocument(nobody) && parser.HandleNextDocument(nobody);
}

// The one mapping in the file; null for a file without any content.
YAML::Node read_mapping(const fs::path& file) {
  constexpr std::uintmax_t kMostBytes = 1 << 20;
  const std::string text = io::read_file(file, kMostBytes);
  // What YAML's reader does not mind, and nobody means.
  if (const std::size_t zero = text.find('\0'); zero != std::string::npos) {
    throw UsageError(fmt::format("{}: expected text, got a zero byte at offset {}", shown_path(file), zero));
  }
  try {
    if (has_second_document(text)) {
      throw UsageError(fmt::format("{}: expected one document, got more", shown_path(file)));
    }
    YAML::Node document = YAML::Load(text);
    if (document.IsNull()) return {};
    if (!document.IsMap()) {
      throw UsageError(fmt::format("{}: expected lines `flag: value`, got {}", place(file, document.Mark()),
                                   document.IsSequence() ? "a list" : "a text"));
    }
    return document;
  } catch (const YAML::Exception& e) {
    throw UsageError(fmt::format("{}: expected YAML: {}", place(file, e.mark), e.msg));
  }
}

bool is_switch(const CLI::Option& option) { return option.get_expected_max() == 0; }

// What a switch is told; throws for what is neither.
bool switch_value(const std::string& where, const std::string& key, const YAML::Node& value) {
  std::string text = value.IsNull() ? std::string() : value.Scalar();
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* yes : {"true", "yes", "on"}) {
    if (text == yes) return true;
  }
  for (const char* no : {"false", "no", "off"}) {
    if (text == no) return false;
  }
  throw UsageError(fmt::format("{}: {}: expected true or false, got {}", where, key,
                               value.IsNull() ? "no value" : "'" + value.Scalar() + "'"));
}

class Reader {
 public:
  Reader(const Verb& verb, const fs::path& file, const std::vector<Displacement>& displacements)
      : file_(file), flags_(flags_of(verb)) {
    for (const auto& [name, option] : flags_) {
      if (option->count() > 0) given_.push_back(option);
    }
    for (const Displacement& d : displacements) {
      const auto given = [&](const std::string& name) { return flags_.contains(name) && flags_.at(name)->count() > 0; };
      if (std::none_of(d.given.begin(), d.given.end(), given)) continue;
      for (const std::string& name : d.displaced) {
        if (flags_.contains(name)) given_.push_back(flags_.at(name));
      }
    }
  }

  void take(const YAML::Node& key_node, const YAML::Node& value) {
    const std::string where = place(file_, key_node.Mark());
    if (!key_node.IsScalar()) throw UsageError(fmt::format("{}: expected the name of a flag before the colon", where));
    const std::string& key = key_node.Scalar();
    if (key == kSection && value.IsMap()) return take_section(key_node, value);
    take_flag(where, key == kSection && flags_.contains(kTurnsOn) ? kTurnsOn : key, value);
  }

 private:
  // `quant: {weight-bits: 4}` is `qat: true` with `quant-weight-bits: 4`, and `quant: true` that alone.
  static constexpr const char *kSection = "quant", *kTurnsOn = "qat";

  void take_section(const YAML::Node& key_node, const YAML::Node& section) {
    take_flag(place(file_, key_node.Mark()), kTurnsOn, YAML::Node(true));
    for (const auto& entry : section) {
      const std::string where = place(file_, entry.first.Mark());
      if (!entry.first.IsScalar()) {
        throw UsageError(fmt::format("{}: expected the name of a flag before the colon", where));
      }
      take_flag(where, fmt::format("{}-{}", kSection, entry.first.Scalar()), entry.second);
    }
  }

  void take_flag(const std::string& where, const std::string& key, const YAML::Node& value) {
    const auto flag = flags_.find(key);
    if (flag == flags_.end()) {
      std::vector<std::string> names;
      for (const auto& [name, option] : flags_) names.push_back(name);
      throw UsageError(fmt::format("{}: there is no flag '{}'{}", where, key,
                                   key == "config" ? "; a configuration names no other" : did_you_mean(key, names)));
    }
    CLI::Option* option = flag->second;
    if (const auto [first, fresh] = seen_.emplace(option, std::make_pair(key, where)); !fresh) {
      throw UsageError(fmt::format("{}: {} is given more than once{}", where, key,
                                   first->second.first == key ? std::string() : ", also as " + first->second.first));
    }
    if (value.IsSequence() || value.IsMap()) {
      throw UsageError(
          fmt::format("{}: {}: expected a single value, got a {}", where, key, value.IsMap() ? "mapping" : "list"));
    }
    const bool displaced = std::find(given_.begin(), given_.end(), option) != given_.end();
    // What the command line displaces must still make sense as far as can be said without taking it.
    if (is_switch(*option)) {
      if (switch_value(where, key, value) && !displaced) give(where, *option, "true");
      return;
    }
    if (value.IsNull() && option->get_expected_min() > 0) {
      throw UsageError(fmt::format("{}: {}: expected a value, got none", where, key));
    }
    if (!displaced) give(where, *option, value.IsNull() ? std::string() : value.Scalar());
  }

  static void give(const std::string& where, CLI::Option& option, const std::string& value) {
    try {
      option.add_result(value);
      option.run_callback();
    } catch (const UsageError& e) {
      throw UsageError(fmt::format("{}: {}", where, e.what()));
    } catch (const CLI::Error& e) {
      throw UsageError(fmt::format("{}: {}", where, e.what()));
    }
  }

  fs::path file_;
  std::map<std::string, CLI::Option*> flags_;
  std::vector<const CLI::Option*> given_;  // by the command line, and what that displaces
  std::map<const CLI::Option*, std::pair<std::string, std::string>> seen_;
};

}  // namespace

void apply_config_file(const Verb& verb, const fs::path& file, const std::vector<Displacement>& displacements) {
  const YAML::Node mapping = read_mapping(file);
  Reader reader(verb, file, displacements);
  try {
    for (const auto& entry : mapping) reader.take(entry.first, entry.second);
  } catch (const YAML::Exception& e) {
    throw UsageError(fmt::format("{}: {}", place(file, e.mark), e.msg));
  }
}

std::map<std::string, std::string> config_values(const fs::path& file) {
  const YAML::Node mapping = read_mapping(file);
  std::map<std::string, std::string> values;
  for (const auto& entry : mapping) {
    const std::string where = place(file, entry.first.Mark());
    if (!entry.first.IsScalar() || entry.second.IsSequence() || entry.second.IsMap()) {
      throw UsageError(fmt::format("{}: expected a flag with a single value", where));
    }
    values[entry.first.Scalar()] = entry.second.IsNull() ? std::string() : entry.second.Scalar();
  }
  return values;
}

std::string config_line(const std::string& key, const std::string& value) {
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) || c >= 0x80 ||
           std::string_view("_./+=-,:").find(static_cast<char>(c)) != std::string_view::npos;
  };
  const bool begins =
      !value.empty() && (std::isalnum(static_cast<unsigned char>(value[0])) || value[0] == '/' || value[0] == '.');
  std::string lower = value;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  if (begins && value.back() != ':' && lower != "null" && value != "..." &&
      std::all_of(value.begin(), value.end(), plain)) {
    return fmt::format("{}: {}\n", key, value);
  }
  std::string quoted;
  for (const char c : value) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += fmt::format("\\{}", c);
    } else if (byte < 0x20 || byte == 0x7F) {
      quoted += fmt::format("\\x{:02X}", byte);
    } else {
      quoted += c;
    }
  }
  return fmt::format("{}: \"{}\"\n", key, quoted);
}

}  // namespace halfstep::cli
