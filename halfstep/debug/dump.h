// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "halfstep/autograd/parameter.h"
#include "halfstep/debug/call_site.h"

namespace halfstep::debug {

/// How much of a tensor Dump writes; each level includes the previous one.
enum class DumpLevel : std::uint8_t {
  statistics,  ///< sizes, dtype, extremes, mean, sum of magnitudes, counts of NaN, infinity, zero and subnormals
  first,       ///< also the first values
  whole,       ///< also all values, in tensors.safetensors
};

/// Options of Dump.
struct DumpOptions {
  std::filesystem::path folder = "dump";  ///< created; if it exists, `dump.1`, `dump.2`, ...
  DumpLevel level = DumpLevel::statistics;
  std::int64_t first = 10;             ///< values per tensor from level `first` on
  std::string module = {};             ///< only calls of this module and those inside it; empty: all
  std::vector<std::string> ops = {};   ///< only calls of these ops; empty: all
  bool views = false;                  ///< views too
  std::uint64_t most_calls = 100'000;  ///< later calls are not written
  bool all_threads = false;            ///< else only the calls of the thread that made it
};

/// For its lifetime, writes the inputs and results of each op, forward and backward: one folder per call,
/// `<number>_<op>/`, with
/// - `call.json`: op, version, attributes, module, the op whose gradient it is, device, path, and of each input and
///   result dtype, shape, statistics and first values;
/// - `call.txt`: the same, human-readable;
/// - `tensors.safetensors` at level `whole`: `input0`, `input1`, ..., `output0`, ... in row-major order.
///
/// Calls are numbered from 1 in the order in which they finished. Inputs are written as they were before the call, so
/// that in-place ops show both states. A folder gets its name once it is completely written; until then it is called
/// `<number>_<op>.part`. Reading waits for devices.
///
///     { debug::Dump dump{{.folder = "dump", .level = debug::DumpLevel::first}}; net(x); }
///
/// Throws IoError, from the op, if a file can't be written.
class HS_API Dump {
 public:
  explicit Dump(const DumpOptions& options = {});
  ~Dump();
  Dump(const Dump&) = delete;
  Dump& operator=(const Dump&) = delete;

  /// The output folder: the option, with a suffix if that existed.
  const std::filesystem::path& folder() const;
  /// Calls written so far.
  std::uint64_t calls() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// For the library: the function that writes whole tensors. The io layer, which is above this one, provides it.
using TensorWriter = void (*)(const std::filesystem::path& path, const NamedTensors& tensors,
                              const std::map<std::string, std::string>& metadata);
HS_API void set_tensor_writer(TensorWriter writer);

}  // namespace halfstep::debug
