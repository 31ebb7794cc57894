// SPDX-License-Identifier: Apache-2.0
// Halfstep's side of the comparison with other frameworks: answers timing requests line by line, as
// benchmarks/peers/bench_server.py does for the peers, so that a driver can take turns between them.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "halfstep/core/device.h"

namespace halfstep::bench {

/// A case that is set up: `run` makes `calls` calls of what is measured.
struct Prepared {
  std::function<void()> run;
  int calls = 1;
  /// What is known of it besides times, by name; may run it again.
  std::function<std::map<std::string, double>()> facts = {};
  /// Waits for what run() has set going; called once at the end of a repetition. None: run() waits by itself.
  std::function<void()> finish = {};
  /// Called before a repetition is timed; and what its time is for all processes that run it together.
  std::function<void()> begin = {};
  std::function<double(double seconds)> elapsed = {};
};

/// Something to measure. `operations` and `bytes` are what one call can't do without (floating-point operations; bytes
/// read and written once each), from which the driver works out the physical limit; 0 where it has none.
struct Case {
  std::string name;
  std::function<Prepared()> prepare;
  double operations = 0;
  double bytes = 0;
};

/// Training steps of the MLP, and the parts of a step: scaler, optimizers.
void add_step_cases(std::vector<Case>& cases);
/// Single calls: products, small adds and linear layers, entering a region.
void add_op_cases(std::vector<Case>& cases);
/// Ops that pass over their operands, forward and backward.
void add_pass_cases(std::vector<Case>& cases);
/// What the machine can do at most: multiply-adds a second, and bytes a second on sets of two sizes.
void add_machine_cases(std::vector<Case>& cases);

/// Training steps of image networks.
void add_network_cases(std::vector<Case>& cases);
/// Inference by sessions.
void add_inference_cases(std::vector<Case>& cases);
/// Writes their networks for other runtimes: NAME-f32.onnx, and NAME-int8.onnx with QuantizeLinear and
/// DequantizeLinear.
void write_onnx_files(const std::filesystem::path& folder);
/// Reading pictures from the folder that HALFSTEP_BENCH_IMAGES names: decoded, cropped, resized and normalised.
void add_loader_cases(std::vector<Case>& cases);

/// What is measured on an accelerator, in place of all others. `small`: tiny sizes, to try the cases.
void add_device_cases(std::vector<Case>& cases, Device device, bool small);

/// Reads the next request; false at the end.
using ReadLine = std::function<bool(std::string& line)>;
/// Answers requests until there are no more or one says `quit`. Without `speaks` it runs them and prints nothing.
void serve(const std::vector<Case>& cases, const ReadLine& read, bool speaks = true);
/// The same for data parallel training, on all ranks of an MPI job on one machine.
void serve_ranks();

}  // namespace halfstep::bench
