// SPDX-License-Identifier: Apache-2.0
// What `halfstep quantize` says at its end: the same network in several precisions, as a table and as a picture.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/terminal.h"
#include "halfstep/core/tensor.h"
#include "halfstep/infer/parity.h"
#include "halfstep/infer/session.h"
#include "halfstep/io/drawing.h"
#include "halfstep/quant/sensitivity.h"
#include "halfstep/train/trainer.h"

namespace halfstep::cli {

/// A network in one precision.
struct QuantizedRow {
  std::string name = {};  ///< `float32`, `8-bit integers`
  std::optional<double> score = {};
  double loss = 0;
  std::optional<infer::Session> session = {};  ///< none: it is computed to be compared only
  double ms = 0;                               ///< of a session's call, a sample
  std::uint64_t memory = 0;                    ///< bytes of its weights and activations
  std::uint64_t file = 0;                      ///< bytes of the weights in a file
};

/// All of them.
struct QuantizedTable {
  std::string model = {}, score = {};   ///< names of the network and of what tells its accuracy; empty: the loss does
  std::int64_t samples = 0;             ///< that were evaluated
  std::optional<double> max_drop = {};  ///< that was allowed, in points
  std::int64_t batch = 0;               ///< samples of a timed call
  std::vector<QuantizedRow> rows = {};

  /// Times calls of the rows' sessions in turns, and takes their memory.
  void time(const Tensor& input);
  /// For a terminal.
  std::string text(const TerminalStyle& style = style_of(1)) const;
  /// A bar for each row: accuracy, time, memory and bytes of the file.
  io::Drawing figure() const;
};

/// Evaluates the task on `test` and gives its row, after a line about it unless the name is empty; the score is there
/// where larger ones are better. None: a signal came.
std::optional<QuantizedRow> evaluated_row(training::Task& task, const std::shared_ptr<const data::Dataset>& test,
                                          const std::string& name, training::EvalOptions options);

/// The first `count` layers whose integers differ most, as a table with a line above it; empty where there is none.
std::string parity_text(const std::vector<infer::LayerParity>& layers, std::int64_t count);
/// The first `count` layers that cost most alone, likewise.
std::string sensitivity_text(const std::vector<quant::LayerSensitivity>& costs, std::int64_t count);

/// Names in brackets, cut where they are many; of all of `enough` but one only which that is. Empty without names.
std::string set_text(const std::vector<std::string>& names, const std::vector<std::string>& enough);

}  // namespace halfstep::cli
