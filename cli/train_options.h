// SPDX-License-Identifier: Apache-2.0
// The flags of `halfstep train`, those of the usual ImageNet scripts among them, and what they mean together.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cli/options.h"
#include "cli/run_config.h"
#include "halfstep/train/config.h"

namespace halfstep::cli {

/// What `halfstep train` was told.
struct TrainOptions : CommonOptions {
  training::TrainConfig config;
  std::filesystem::path config_file;
  std::string arch;  ///< --arch, which stands for MODEL
  std::filesystem::path pretrained;
  std::int64_t print_freq = -1;  ///< under 0: by the network
  bool pyamp = false;
  bool evaluate = false;
  bool pretrained_given = false;
  std::string weights;  ///< --weights, another word for --pretrained
  bool quiet = false;
  bool no_out = false;
  std::string reduce = "rank-order";                   ///< or library, fast: see dist::Reduction
  RunConfig run;                                       ///< of the run that is gone on with
  std::map<std::string, std::filesystem::path> files;  ///< that flags come from, of those that weren't given
  /// How often a flag was given.
  std::function<std::size_t(const std::string& flag)> count;
};

/// The rows of all its flags, with the fields of `options`: those of training (train/flag_table.cpp) and the program's
/// own.
std::vector<Flag> train_flags(TrainOptions& options);
/// The row of an argument such as `--epochs` or `--epochs=3`; null if it is none of them.
const Flag* row_of(const std::vector<Flag>& rows, const std::string& argument);
/// The arguments that go on with the run in `out`, which those given began: without what says where it begins, and with
/// --resume.
std::vector<std::string> arguments_to_resume(const std::vector<std::string>& arguments,
                                             const std::filesystem::path& out);
/// Adds them to the verb.
void add_train_options(const Verb& verb, TrainOptions& options);

/// After parsing: takes the flags of --config that were not given, then those of the run of --resume. Throws UsageError
/// and IoError.
void read_config(const Verb& verb, TrainOptions& options);

/// After that: which argument is the network and which the data, the network's usual numbers where no flag says
/// others, and flags that contradict each other. Sets threads and device. Throws UsageError.
void resolve(TrainOptions& options);

/// The effective configuration as text, beside the checkpoints: every flag that makes the run what it is, for --config.
/// Where this run wrote, and what it went on from, stand as comments.
std::string describe(const TrainOptions& options);

/// A line for each flag that may change in a run that goes on, and did: `--epochs 20 in place of 10`.
std::vector<std::string> changes(const TrainOptions& options);

}  // namespace halfstep::cli
