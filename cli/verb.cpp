// SPDX-License-Identifier: Apache-2.0
#include "cli/verb.h"

#include <CLI/CLI.hpp>
#include <map>
#include <utility>

namespace halfstep::cli {
namespace {

struct OptionalValue {
  std::string standard;
  std::function<bool(const std::string&)> is_value;
};
std::map<const CLI::Option*, OptionalValue>& optional_values() {
  static std::map<const CLI::Option*, OptionalValue> all;
  return all;
}

}  // namespace

Argument& Argument::required(bool required) {
  option_->required(required);
  return *this;
}
Argument& Argument::value(const std::string& name) {
  option_->type_name(name);
  return *this;
}
Argument& Argument::values(int least, int most) {
  option_->expected(least, most);
  return *this;
}
Argument& Argument::optional(const std::string& standard, std::function<bool(const std::string&)> is_value) {
  option_->expected(0, 1);
  optional_values()[option_] = {standard, std::move(is_value)};
  return *this;
}
Argument& Argument::split(char separator) {
  option_->delimiter(separator);
  return *this;
}
Argument& Argument::group(const std::string& heading) {
  option_->group(heading);
  return *this;
}

Argument Verb::add_switch(const std::string& names, bool& value, const std::string& help) const {
  return Argument(app_->add_flag(names, value, help));
}
Argument Verb::add_switch(const std::string& names, std::function<void()> given, const std::string& help) const {
  return Argument(app_->add_flag_function(
      names,
      [given = std::move(given)](std::int64_t count) {
        if (count > 0) given();
      },
      help));
}
Argument Verb::add_action(const std::string& names, std::function<void()> print, const std::string& help) const {
  return Argument(app_->add_flag_callback(
      names,
      [print = std::move(print)] {
        print();
        throw CLI::Success();
      },
      help));
}
Argument Verb::add_option(const std::string& names, std::function<void(const std::string&)> given,
                          const std::string& help) const {
  return Argument(app_->add_option_function<std::string>(names, given, help));
}
Argument Verb::add_option(const std::string& names, std::string& value, const std::string& help) const {
  return Argument(app_->add_option(names, value, help));
}
Argument Verb::add_list(const std::string& names, std::function<void(const std::vector<std::string>&)> given,
                        const std::string& help) const {
  return Argument(app_->add_option_function<std::vector<std::string>>(names, given, help));
}
Argument Verb::add_list(const std::string& names, std::vector<std::string>& values, const std::string& help) const {
  return Argument(app_->add_option(names, values, help));
}
void Verb::leave_rest() const { app_->prefix_command(); }
std::vector<std::string> Verb::rest() const { return app_->remaining(); }
void Verb::run(std::function<void()> function) const { app_->callback(std::move(function)); }

bool Verb::has(const std::string& name) const { return app_->get_option_no_throw(name) != nullptr; }
std::size_t Verb::count(const std::string& name) const { return app_->count(name); }
void Verb::give(const std::string& name, const std::string& value) const {
  CLI::Option* option = app_->get_option(name);
  option->add_result(value);
  option->run_callback();
}
void Verb::take_back(const std::string& name) const { app_->get_option(name)->clear(); }

std::vector<std::string> with_standard_values(const CLI::App& program, std::vector<std::string> arguments) {
  const auto verbs = program.get_subcommands(
      [&](const CLI::App* verb) { return !arguments.empty() && verb->get_name() == arguments[0]; });
  if (verbs.empty()) return arguments;
  for (std::size_t i = 1; i + 1 < arguments.size() && arguments[i] != "--"; ++i) {
    const std::string& next = arguments[i + 1];
    if (!arguments[i].starts_with('-') || next.starts_with('-')) continue;
    const CLI::Option* option = verbs[0]->get_option_no_throw(arguments[i]);
    const auto optional = optional_values().find(option);
    if (optional == optional_values().end()) continue;
    // `--flag=` with nothing behind it would take what follows.
    const auto& [standard, is_value] = optional->second;
    if (!standard.empty() && !is_value(next)) arguments[i] += "=" + standard;
  }
  return arguments;
}

std::vector<std::string> Verb::all_verbs() const {
  std::vector<std::string> names;
  for (const CLI::App* verb : app_->get_parent()->get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(verb->get_name());
  }
  return names;
}
std::vector<std::string> Verb::flag_names() const {
  std::vector<std::string> names;
  for (const CLI::Option* option : app_->get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

Verb add_verb(CLI::App& program, const std::string& name, const std::string& help) {
  return Verb(program.add_subcommand(name, help));
}

}  // namespace halfstep::cli
