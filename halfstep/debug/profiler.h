// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/tensor.h"
#include "halfstep/runtime/trace.h"

namespace halfstep::debug {

/// A user-defined range in the profile: `debug::Range range{"augmentation"};`
using Range = TraceRange;

/// Options of Profiler.
struct ProfilerOptions {
  std::uint64_t most_events =
      1'000'000;  ///< maximum number of calls and ranges recorded; tables and trace omit later ones
};

/// One line of a table. Times in nanoseconds.
struct ProfileRow {
  std::string name = {};          ///< of the op, path of the module (empty: outside of modules), or of the range
  std::string dtype = {};         ///< of op rows: the first result's
  std::uint64_t calls = 0;        ///< of ops
  std::uint64_t count = 0;        ///< of range rows: how often it was entered
  std::uint64_t self_ns = 0;      ///< host time without nested calls
  std::uint64_t total_ns = 0;     ///< including them; for a module: including its submodules; for a range: all of it
  std::uint64_t device_ns = 0;    ///< on the device, if it records it; for a module: including its submodules
  std::uint64_t bytes = 0;        ///< read and written
  std::uint64_t casts = 0;        ///< calls that only converted a dtype
  std::uint64_t backward_ns = 0;  ///< of module rows: the part of total_ns that computed gradients
};

/// Until it is stopped or destroyed, records the cost of every op, on all threads: calls, host time, device time if the
/// device's plug-in records it, bytes read and written, dtypes and casts, for each op and each module; and the ranges
/// of the program and of the data loader.
///
/// On the CPU an op's host time is its kernel's; on a device it is the time to enqueue it. Bytes are those of the
/// tensors that a call reads and writes, each once; repeated (expanded) elements count once.
///
///     debug::Profiler profiler;
///     train_some_steps();
///     profiler.stop();
///     std::cout << profiler.table();
///     profiler.write_trace("trace.json");   // chrome://tracing or ui.perfetto.dev
class HS_API Profiler {
 public:
  explicit Profiler(const ProfilerOptions& options = {});
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// Ends recording and waits for devices; the second call does nothing. Functions that read results stop it first.
  void stop();

  /// A row for each op and result dtype, sorted by self time (device time if available), largest first.
  std::vector<ProfileRow> ops();
  /// A row for each module whose ops ran, by path. A module's total includes its submodules. Ops outside of modules are
  /// under the name of the range around them in brackets, such as `(step)` for an optimizer's and the loss scaler's.
  std::vector<ProfileRow> modules();
  /// A row for each range of the program, such as the `data`, `forward`, `loss`, `backward` and `step` of a training
  /// step, with the ops that ran in it on its thread; in the order in which they were first entered.
  std::vector<ProfileRow> ranges();
  /// From the start to stop(), in nanoseconds.
  std::uint64_t duration_ns();
  /// The tables as text, at most `rows` rows of ops.
  std::string table(std::size_t rows = 30);
  /// The trace in Chrome's JSON format: a track for each host thread (ops, ranges), data loader thread and device
  /// queue.
  std::string trace_json();
  /// Writes it. Throws IoError.
  void write_trace(const std::filesystem::path& path);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace halfstep::debug
