// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "halfstep/autograd/parameter.h"
#include "halfstep/io/read_limits.h"

namespace halfstep::io {

/// Tensors by name, in the file's order, and the texts of its `__metadata__`.
struct Safetensors {
  NamedTensors tensors;
  std::map<std::string, std::string> metadata;
};

/// Reads a safetensors file (8-byte length, JSON header, data). Supports every dtype that Halfstep has. The data are
/// read directly into the tensors, which are the only memory allocated for them. Throws IoError, naming file and fault,
/// for a file that is missing, truncated, damaged, over the limits, written while it is read, has trailing bytes, gaps,
/// overlaps, duplicate names, a header over 100 MB, unknown dtypes, or sizes that don't agree.
HS_API Safetensors load_safetensors(const std::filesystem::path& path, const ReadLimits& limits = read_limits());
/// The same from memory; `name` is for messages.
HS_API Safetensors parse_safetensors(std::span<const unsigned char> bytes, const std::string& name,
                                     const ReadLimits& limits = read_limits());
/// Writes a file atomically (AtomicFile): row-major tensors, larger dtypes first and then by name, as the format's own
/// writer orders them. Throws IoError, and Error for duplicate names and for names and texts that are not UTF-8.
HS_API void save_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                             const std::map<std::string, std::string>& metadata = {});
/// Bytes of the file that save_safetensors() would write. Throws what that throws for tensors and texts.
HS_API std::uint64_t safetensors_bytes(const NamedTensors& tensors,
                                       const std::map<std::string, std::string>& metadata = {});

}  // namespace halfstep::io
