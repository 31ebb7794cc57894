// SPDX-License-Identifier: Apache-2.0
// Rows of a table of flags (train/flags.h) as arguments of a verb and as documentation; and flags of a verb of its own.
#pragma once

#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "cli/verb.h"
#include "cli/verbs.h"
#include "halfstep/train/flags.h"

namespace halfstep::cli {

using training::Flag;
using training::FlagField;
using training::FlagKept;
using training::FlagRange;
using training::FlagResume;
using training::kMostCount;

/// Adds a row's argument; its values are checked as they are read, range and choices too. Where a value may be left
/// out, what can't be one and names a network or a file is left to the positional arguments. Throws UsageError naming
/// the flag.
Argument add_flag(const Verb& verb, const Flag& flag);
/// Words with commas between them, as Flag::data has them, as `images or boxes`.
std::string alternatives(std::string list);
/// The rows as a Markdown table: what stands in docs/reference/train-flags.md.
std::string flags_markdown(std::span<const Flag> flags);

/// A whole number from `least` (at least 0) to `most`. Throws UsageError naming the flag.
std::uint64_t parse_whole(const std::string& flag, const std::string& text, std::uint64_t least, std::uint64_t most);
/// A number, with a point for the decimals whatever the locale says. Throws UsageError naming the flag.
double parse_real(const std::string& flag, const std::string& text);

/// `--flag N` for a whole number; the default is shown in the help unless it is under `least`.
template <class T>
Argument add_whole(const Verb& verb, const std::string& names, T& value, std::uint64_t least, std::uint64_t most,
                   const std::string& help) {
  return add_flag(verb, {.names = names,
                         .field = &value,
                         .help = help,
                         .range = FlagRange::from_to(static_cast<double>(least), static_cast<double>(most))});
}
/// `--flag X` for a number.
Argument add_real(const Verb& verb, const std::string& names, double& value, const std::string& help);
/// `--flag TEXT` for one of some words; an empty one is refused.
Argument add_word(const Verb& verb, const std::string& names, std::string& value, const std::string& help);
/// `--flag PATH`, or a positional argument; an empty path is refused, since it mostly comes from an unset variable.
Argument add_path(const Verb& verb, const std::string& flag, std::filesystem::path& value, const std::string& help);

/// A flag that training has too, with a field of the verb's own: its help and range are those of its row in
/// training::flags(), and of its names the first long one and the letter; the others are those of training scripts.
/// `help` replaces the row's where the verb has more to say of the same thing. Where another thing is meant by the
/// name, such as a list of precisions by --amp, the verb has a row of its own.
Argument add_training_flag(const Verb& verb, const std::string& name, const FlagField& field,
                           const std::string& help = {});

/// --max-bytes and --max-unpacked, the limits of files of weights (io::ReadLimits).
std::vector<Flag> read_limit_flags();
/// Adds them to a verb that reads such files.
void add_read_limits(const Verb& verb);

/// Any 64 bits are a seed.
inline constexpr std::uint64_t kMostSeed = std::numeric_limits<std::uint64_t>::max();

}  // namespace halfstep::cli
