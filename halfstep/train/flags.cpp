// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/flags.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <type_traits>

#include "halfstep/core/fail.h"
#include "halfstep/core/overloaded_internal.h"
#include "halfstep/train/registry.h"

namespace halfstep::training {
namespace {

using halfstep::detail::Overloaded;
// An empty word says nothing.
void is_choice(const Flag& flag, const std::string& value) {
  const auto& all = flag.choices;
  if (all.empty() || value.empty() || std::find(all.begin(), all.end(), value) != all.end()) return;
  fail<Error>("{}: expected {} or {}, got '{}'", flag.name(), fmt::join(all.begin(), all.end() - 1, ", "), all.back(),
              value);
}

}  // namespace

bool FlagRange::bounded() const { return std::isfinite(least) || std::isfinite(most); }

bool FlagRange::contains(double value) const {
  if (!bounded()) return true;
  if (!std::isfinite(value)) return false;
  return (open_least ? value > least : value >= least) && (open_most ? value < most : value <= most);
}

std::string FlagRange::text(bool whole) const {
  if (std::isfinite(most)) {
    return fmt::format("{}{} to {}{}", open_least ? "above " : "", least, open_most ? "under " : "", most);
  }
  if (open_least) return fmt::format("a number above {}", least);
  return fmt::format("{}at least {}", whole ? "" : "a number of ", least);
}

std::string Flag::name() const {
  const std::size_t dashes = names.find("--");
  if (dashes == std::string::npos) return names;
  return names.substr(dashes, names.find(',', dashes) - dashes);
}

std::string Flag::key() const {
  std::string result = name();
  if (result.starts_with("--")) return result.substr(2);
  std::transform(result.begin(), result.end(), result.begin(), [](unsigned char c) { return std::tolower(c); });
  return result;
}

std::string Flag::saved() const {
  if (text) return text();
  return std::visit(Overloaded{[](const bool* value) { return fmt::format("{}", *value); },
                               [](const TurnsOff& value) { return fmt::format("{}", !*value.on); },
                               [](const std::filesystem::path* value) { return value->string(); },
                               [](const FlagSetter&) { return std::string(); },
                               [](const auto* value) { return fmt::format("{}", *value); }},
                    field);
}

bool Flag::is_switch() const { return std::holds_alternative<bool*>(field) || std::holds_alternative<TurnsOff>(field); }

namespace {

// Whether `name` is among words with commas between them.
bool has_word(const std::string& words, const std::string& name) {
  return ("," + words + ",").find("," + name + ",") != std::string::npos;
}

}  // namespace

bool Flag::of_data(const std::string& kind) const { return data.empty() || has_word(data, kind); }
bool Flag::of_task(const std::string& task_name) const { return task.empty() || has_word(task, task_name); }

bool takes(const std::string& network, const Flag& flag) {
  return flag.of_data(data_of(network).flags) && flag.of_task(network_kind(network).task);
}

void check_value(const Flag& flag) {
  const auto inside = [&](auto value, bool whole) {
    if (flag.range.contains(static_cast<double>(value))) return;
    fail<Error>("{}: expected {}, got {}", flag.name(), flag.range.text(whole), value);
  };
  std::visit(Overloaded{[&](double* value) { inside(*value, false); }, [&](int* value) { inside(*value, true); },
                        [&](std::int64_t* value) { inside(*value, true); },
                        [&](std::string* value) { is_choice(flag, *value); }, [](const auto&) {}},
             flag.field);
}

void check(std::span<const Flag> flags) {
  for (const Flag& flag : flags) check_value(flag);
  for (const Flag& flag : flags) {
    if (flag.check) flag.check();
  }
}

std::map<std::string, std::string> recipe(std::span<const Flag> flags) {
  std::map<std::string, std::string> result;
  for (const Flag& flag : flags) {
    if (flag.in_recipe ? !flag.in_recipe() : flag.resume != FlagResume::recipe) continue;
    const std::string value = flag.saved();
    result[flag.key()] = !flag.is_switch() ? value : value == "true" ? "yes" : "no";
  }
  return result;
}

void copy_value(const Flag& from, const Flag& to) {
  std::visit(
      [&](const auto& source) {
        using Field = std::decay_t<decltype(source)>;
        if constexpr (std::is_pointer_v<Field>) {
          *std::get<Field>(to.field) = *source;
        } else if constexpr (std::is_same_v<Field, TurnsOff>) {
          *std::get<Field>(to.field).on = *source.on;
        }
      },
      from.field);
}

}  // namespace halfstep::training
