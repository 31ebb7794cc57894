// SPDX-License-Identifier: Apache-2.0
// Flags from a YAML file: `--config FILE.yaml`.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cli/verb.h"

namespace halfstep::cli {

/// One of the flags `given` on the command line takes the place of all of `displaced` in the file, as --gpu does of
/// --device. A flag always takes the place of itself. Names are without dashes.
struct Displacement {
  std::vector<std::string> given, displaced;
};

/// Gives every flag of the file that the command line doesn't give to the verb, as if it had been given. Keys are the
/// long names without dashes, and names of positional arguments in lower case; each has one value. true gives a flag
/// without a value, false leaves it out; a flag whose value may be left out is given without one by an empty value.
///
/// Throws UsageError, naming file and line, for what is no YAML or more than one document of it, no mapping, an unknown
/// key (with the one that may be meant), a key given twice or by two of its names, a value that is a list or a mapping,
/// a missing value, and whatever the flag itself refuses; IoError for a file that can't be read.
void apply_config_file(const Verb& verb, const std::filesystem::path& file,
                       const std::vector<Displacement>& displacements);

/// The values of such a file as text, by key. Throws as apply_config_file for what is no mapping of single values.
std::map<std::string, std::string> config_values(const std::filesystem::path& file);

/// `KEY: VALUE` and a line end; the value is quoted where YAML wants it.
std::string config_line(const std::string& key, const std::string& value);

}  // namespace halfstep::cli
