// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "halfstep/autograd/parameter.h"
#include "halfstep/io/read_limits.h"

namespace halfstep::io {

/// The contents of a file written by torch.save.
struct PthFile {
  /// The state dict: the file's dictionary itself, or the one stored in it under `state_dict`, `model_state_dict`,
  /// `model` or `net`. Tensors of nested dictionaries and lists have names joined by dots, such as `layers.0.weight`.
  /// Tensors that shared memory when they were saved share it here.
  NamedTensors tensors;
  NamedTensors others;                          ///< tensors outside the state dict, such as `optimizer.state.0.exp_avg`
  std::map<std::string, std::string> metadata;  ///< all other values of the dictionary, as JSON: `epoch` is `3`
  std::string state_dict_key;                   ///< key of the state dict; empty: the file itself is one
};

/// Reads a file of torch.save: the zip format and the one before PyTorch 1.6. Only tensors and plain values are read: a
/// file that names anything else (a class, a function) is rejected with that name, and nothing is ever executed.
/// Strides, offsets, shared memory and parameters are kept; requires_grad and devices are not: all tensors are on the
/// CPU. In `metadata`, tensors appear as `{"tensor": NAME}`.
///
/// Throws IoError, naming file and fault, for a file that is missing, truncated, damaged (checksums are verified),
/// malicious, over the limits, big-endian, or has a dtype that Halfstep doesn't support.
HS_API PthFile load_pth(const std::filesystem::path& path, const ReadLimits& limits = read_limits());
/// The same from memory; `name` is for messages.
HS_API PthFile parse_pth(std::span<const unsigned char> bytes, const std::string& name,
                         const ReadLimits& limits = read_limits());

/// Options of save_pth.
struct PthOptions {
  /// Further values, as JSON; the file is then a dictionary with these and the state dict under `state_dict`. Empty:
  /// the file is the state dict.
  std::map<std::string, std::string> metadata = {};
};

/// Writes a state dict that torch.load reads (`weights_only=True` too), atomically. Tensors that share memory share it
/// in the file; the layout of dense tensors is kept, others become row-major; all are on the CPU. Throws IoError, and
/// Error for a duplicate name or metadata that is not JSON.
HS_API void save_pth(const std::filesystem::path& path, const NamedTensors& tensors, const PthOptions& options = {});

}  // namespace halfstep::io
