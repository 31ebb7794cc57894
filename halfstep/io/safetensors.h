// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "halfstep/autograd/parameter.h"

namespace halfstep::io {

/// Tensors by name, in the file's order, and the texts of its `__metadata__`.
struct Safetensors {
  NamedTensors tensors;
  std::map<std::string, std::string> metadata;
};

/// Reads a safetensors file (8-byte length, JSON header, data). Every dtype that Halfstep has; throws IoError, naming
/// file and fault, for a file that is missing, cut short, damaged, has trailing bytes, gaps, overlaps, a header over
/// 100 MB, unknown dtypes, or sizes that don't agree.
HS_API Safetensors load_safetensors(const std::filesystem::path& path);
/// The same from memory; `name` is for messages.
HS_API Safetensors parse_safetensors(std::span<const unsigned char> bytes, const std::string& name);
/// Writes a file atomically (AtomicFile): row-major tensors, larger dtypes first and then by name, as the format's own
/// writer orders them. Throws IoError, and Error for a name twice.
HS_API void save_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                             const std::map<std::string, std::string>& metadata = {});

}  // namespace halfstep::io
