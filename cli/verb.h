// SPDX-License-Identifier: Apache-2.0
// A verb and its arguments, for the files that add them. What parses them is seen by verb.cpp and main.cpp only: its
// header takes longer to compile than all of a verb.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace halfstep::cli {

/// An argument that was added to a verb. The functions return it.
class Argument {
 public:
  explicit Argument(CLI::Option* option) : option_(option) {}
  Argument& required(bool required = true);
  /// What the help calls its value; empty: nothing.
  Argument& value(const std::string& name);
  /// How many values it takes.
  Argument& values(int least, int most);
  /// Its value may be left out and is `standard` then; what follows is its value only if `is_value` says so, which is
  /// asked where `standard` isn't empty.
  Argument& optional(const std::string& standard, std::function<bool(const std::string& text)> is_value);
  /// A value is a list with this between its items.
  Argument& split(char separator);
  /// The heading that it stands under in the help; empty: it isn't shown.
  Argument& group(const std::string& heading);

 private:
  CLI::Option* option_;
};

/// A verb of the program. A handle: copies are the same verb.
class Verb {
 public:
  explicit Verb(CLI::App* app) : app_(app) {}
  /// `--flag`, which sets `value`.
  Argument add_switch(const std::string& names, bool& value, const std::string& help) const;
  /// `--flag`, which calls `given`.
  Argument add_switch(const std::string& names, std::function<void()> given, const std::string& help) const;
  /// `--flag`, which prints and ends the program.
  Argument add_action(const std::string& names, std::function<void()> print, const std::string& help) const;
  /// `--flag TEXT` or a positional argument, which calls `given` with the text.
  Argument add_option(const std::string& names, std::function<void(const std::string&)> given,
                      const std::string& help) const;
  Argument add_option(const std::string& names, std::string& value, const std::string& help) const;
  /// One that may be given several values.
  Argument add_list(const std::string& names, std::function<void(const std::vector<std::string>&)> given,
                    const std::string& help) const;
  Argument add_list(const std::string& names, std::vector<std::string>& values, const std::string& help) const;
  /// Everything from the first argument on that is none of its own is left to rest().
  void leave_rest() const;
  /// That, after its arguments were read.
  std::vector<std::string> rest() const;
  /// What it does when it was named, after its arguments were read.
  void run(std::function<void()> function) const;

  /// Whether it has an argument of that name, with dashes.
  bool has(const std::string& name) const;
  /// How often an argument was given.
  std::size_t count(const std::string& name) const;
  /// Gives an argument after the others were read, as if it had been given then.
  void give(const std::string& name, const std::string& value) const;
  /// Makes it as if an argument had not been given.
  void take_back(const std::string& name) const;
  /// Names of all verbs of the program.
  std::vector<std::string> all_verbs() const;
  /// Long names of its arguments, with dashes.
  std::vector<std::string> flag_names() const;
  CLI::App& app() const { return *app_; }

 private:
  CLI::App* app_;
};

/// The arguments of the program, the verb first, with the values of Argument::optional where they are left out.
std::vector<std::string> with_standard_values(const CLI::App& program, std::vector<std::string> arguments);

/// Adds a verb to the program.
Verb add_verb(CLI::App& program, const std::string& name, const std::string& help);

}  // namespace halfstep::cli
