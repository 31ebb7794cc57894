// SPDX-License-Identifier: Apache-2.0
// The results of a run for people: a table with a row for each epoch, and its curves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "halfstep/core/export.h"
#include "halfstep/io/drawing.h"

namespace halfstep::training {

/// A finished epoch: a row of results.csv.
struct EpochResult {
  int epoch = 0;          ///< from 1
  std::int64_t step = 0;  ///< of the run, at the epoch's end
  double loss = 0;        ///< mean over the training samples
  /// Of the evaluation after it, `loss` among them; empty without one.
  std::vector<std::pair<std::string, double>> metrics = {};
  double lr = 0;              ///< of the last step
  double scale = 1;           ///< loss scale of the last step
  std::int64_t skipped = 0;   ///< steps of the run so far
  double seconds = 0;         ///< of training, without the evaluation; after a resume from where the run went on
  double samples_per_s = 0;   ///< in that time
  double peak_tensor_mb = 0;  ///< most memory of tensors on the run's device so far, in 10^6 bytes
  double peak_rss_mb = 0;     ///< the same of the process
};

/// A field of a CSV file (RFC 4180), in quotes where it needs them. Any bytes: see printable().
HS_API std::string csv_field(std::string_view text);
/// The table as CSV. Metrics are columns named `eval_NAME`, in the order in which they first appear, empty where an
/// epoch has none.
HS_API std::string results_csv(std::span<const EpochResult> epochs);
/// Reads such a table. Throws IoError naming file and line.
HS_API std::vector<EpochResult> read_results(const std::filesystem::path& path);

/// Some neighbouring steps of a run.
struct StepPoint {
  std::int64_t step = 0;  ///< the last one, from 1
  double loss = 0;        ///< mean of the finite ones; NaN where there is none
  double lr = 0;          ///< of the last one, as what follows
  double scale = 1;
  std::int64_t skipped = 0;
};

/// The steps of a run, however many, as at most `most` points, each of equally many steps.
class HS_API StepCurve {
 public:
  explicit StepCurve(std::size_t most = 400) : most_(most) {}
  /// The next step, whose number is larger than those before.
  void add(const StepPoint& step);
  std::vector<StepPoint> points() const;
  bool empty() const { return groups_.empty(); }

 private:
  struct Group {
    StepPoint last;
    double sum = 0;
    std::int64_t finite = 0;
    std::int64_t steps = 0;
  };
  std::size_t most_;
  std::int64_t width_ = 1;
  std::vector<Group> groups_;
};

/// What draw_curves() shows.
struct RunCurves {
  std::string title = {};
  int epochs = 1;                      ///< of the whole run
  std::int64_t steps_in_epoch = 1;     ///< places the steps on the axis of epochs
  std::vector<EpochResult> rows = {};  ///< finished ones
  std::vector<StepPoint> steps = {};
};
/// Loss, metrics, learning rate, loss scale, skipped steps and speed of a run over its epochs.
HS_API io::Drawing draw_curves(const RunCurves& run);

}  // namespace halfstep::training
