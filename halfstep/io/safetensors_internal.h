// SPDX-License-Identifier: Apache-2.0
// Internal: what the header of a safetensors file says, and how it is written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/dtype.h"
#include "halfstep/core/shape.h"
#include "halfstep/io/safetensors.h"

namespace halfstep::io::detail {

/// What the header says of one tensor.
struct SafetensorsEntry {
  std::string name;
  DType dtype = f32;
  Shape sizes = {};
  std::uint64_t begin = 0, end = 0;  ///< of its bytes in the data
};

/// A whole header.
struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< in the order of the data, which they cover without gaps
  std::map<std::string, std::string> metadata;
};

/// The format's name of a dtype.
const char* safetensors_dtype(DType dtype);
/// Reads a header in time that grows with its length. `data_bytes` is what follows it. Throws IoError.
SafetensorsHeader read_safetensors_header(std::string_view text, std::uint64_t data_bytes, const std::string& file);

/// Which tensors of a file are read.
using Wanted = std::function<bool(const std::string& name)>;
/// load_safetensors() of the tensors that are wanted: the bytes of the others aren't read.
Safetensors load_some_safetensors(const std::filesystem::path& path, const ReadLimits& limits, const Wanted& wanted);
/// All of them one after the other, in the order of their names: no more memory is taken than what `take` keeps.
void each_safetensor(const std::filesystem::path& path, const ReadLimits& limits,
                     const std::function<void(NamedTensor)>& take);

}  // namespace halfstep::io::detail
