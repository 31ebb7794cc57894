// SPDX-License-Identifier: Apache-2.0
// Flags as data: a flag is one row, which its help, its check, configuration files, what a checkpoint requires of a run
// that resumes, and the table in the documentation are made from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "halfstep/train/config.h"

namespace halfstep::training {

/// The field of a switch such as `--no-capture`, which is on unless the flag is given.
struct TurnsOff {
  bool* on;  ///< off where the flag is given
};
/// Takes the text of a value; for flags without a field of their own.
using FlagSetter = std::function<void(const std::string& text)>;
/// Where the value of a flag is kept; the type says how it is read.
using FlagField = std::variant<bool*, TurnsOff, int*, std::int64_t*, std::uint64_t*, double*, std::string*,
                               std::filesystem::path*, FlagSetter>;

/// The numbers that a flag takes.
struct HS_API FlagRange {
  double least = -std::numeric_limits<double>::infinity();  ///< the smallest, if there is one
  double most = std::numeric_limits<double>::infinity();    ///< the largest
  bool open_least = false;                                  ///< `least` itself is outside
  bool open_most = false;                                   ///< so is `most`

  /// Whether there is a bound.
  bool bounded() const;
  /// Whether the number is inside; of a range with a bound, infinities and NaN are not.
  bool contains(double value) const;
  /// For messages: `at least 1`, `a number above 0`, `0 to under 1`.
  std::string text(bool whole) const;

  /// Ranges with these bounds: `above` and `under` leave the bound itself out.
  static FlagRange at_least(double least) { return {.least = least}; }
  static FlagRange above(double least) { return {.least = least, .open_least = true}; }
  static FlagRange from_to(double least, double most) { return {.least = least, .most = most}; }
  static FlagRange from_under(double least, double most) { return {.least = least, .most = most, .open_most = true}; }
  static FlagRange above_to(double least, double most) { return {.least = least, .most = most, .open_least = true}; }
};

/// Whether the configuration that is saved beside checkpoints has the flag.
enum class FlagKept : std::uint8_t {
  always,  ///< also with its default
  given,   ///< unless it is empty or 0, or what it belongs to is not there
  never,   ///< it says where this run writes or begins, or is another word for a flag that is kept
};

/// What becomes of the flag in a run that resumes.
enum class FlagResume : std::uint8_t {
  free,          ///< may change: it doesn't affect results
  reported,      ///< may change, and the program says so
  at_epoch_end,  ///< may change at the end of an epoch, and the program says so
  of_precision,  ///< has to be the same unless the precision changes
  same,          ///< has to be the same: compared with the state in the checkpoint
  recipe,        ///< has to be the same: compared with recipe() in the checkpoint
};

/// Another flag that this one is of no use without.
struct FlagNeeds {
  std::string flag;        ///< for messages
  bool there = false;      ///< when the table was made
  std::string value = {};  ///< that it has to have, for messages: `above 0`; empty: any
};

/// One flag of a command.
struct HS_API Flag {
  std::string names;                      ///< all of them: `--batch-size,-b`; `MODEL` is positional, `DIR,--data` both
  FlagField field;                        ///< where the value is kept
  std::string help;                       ///< one sentence, without a full stop
  FlagRange range = {};                   ///< of a number
  std::vector<std::string> choices = {};  ///< of a word; empty: any
  /// What stands for the value in the help; by default its kind (N, X, TEXT, PATH) with the field's value.
  std::optional<std::string> value = {};
  std::optional<std::string> standard = {};  ///< the value may be left out, and then is this
  bool by_network = false;                   ///< unless given, the network's usual value
  FlagKept kept = FlagKept::always;
  FlagResume resume = FlagResume::free;
  bool begins = false;                     ///< it says where a run begins, which one that resumes has behind it
  bool evaluation = false;                 ///< evaluations of trained networks take it too
  std::optional<FlagNeeds> needs = {};     ///< refused without it
  std::function<void()> check = {};        ///< of this flag with others; throws Error
  std::function<std::string()> text = {};  ///< the value as it is saved, where it isn't that of the field
  std::function<bool()> in_recipe = {};    ///< whether recipe() has it, where that depends on others
  std::function<void()> given = {};        ///< called when the flag is read
  std::string data = {};   ///< kinds of data that take it (DataKind::flags), such as `images`, by commas; empty: any
  std::string task = {};   ///< tasks that take it, such as `classification`, by commas; empty: any
  std::string group = {};  ///< heading in help and documentation

  /// What messages call it: its first long name, or its only name.
  std::string name() const;
  /// What configuration files call it: its first long name without dashes, or its only name in lower case.
  std::string key() const;
  /// Its value as configuration files have it.
  std::string saved() const;
  /// Whether its value may be left out.
  bool is_switch() const;
  /// Whether data of that kind, a task of that name, take it.
  bool of_data(const std::string& kind) const;
  bool of_task(const std::string& name) const;
};

/// Most samples of a batch, steps, or the like: what makes sense by far, and whose products don't overflow. The bound
/// of whole numbers without one.
inline constexpr std::uint64_t kMostCount = 1'000'000'000;

/// The flags of training, with the fields of this configuration. Add a flag here: one row.
HS_API std::vector<Flag> flags(TrainConfig& config);
/// Those of images, of detection and of debugging among them.
HS_API std::vector<Flag> flags(ImageDataOptions& options);
HS_API std::vector<Flag> flags(DetectionConfig& options);
HS_API std::vector<Flag> flags(QuantizationConfig& options);
HS_API std::vector<Flag> flags(DebugConfig& config);

/// Whether the flag is one of the data and of the task of the network of that name.
HS_API bool takes(const std::string& network, const Flag& flag);

/// Throws Error, naming the flag, for a number out of its range, a word that is none of the choices, and what the rows'
/// own checks throw.
HS_API void check(std::span<const Flag> flags);
/// Of one flag, and without its own check.
HS_API void check_value(const Flag& flag);
/// Those values that a checkpoint keeps to be compared, by key.
HS_API std::map<std::string, std::string> recipe(std::span<const Flag> flags);
/// Copies the value of one row to the field of the same row of another table.
HS_API void copy_value(const Flag& from, const Flag& to);

}  // namespace halfstep::training
