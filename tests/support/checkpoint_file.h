// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "halfstep/io/safetensors.h"

namespace halfstep::test {

/// Key of the state in a checkpoint's metadata.
inline constexpr const char* kCheckpointState = "halfstep_checkpoint";

/// Writes a checkpoint with any state whose checksum is right, so that what it says is looked at: as
/// docs/guide/getting-started.md and io/checkpoint_file.cpp have it, over the state, then name, dtype, sizes and data
/// of each tensor by name.
inline void write_signed_checkpoint(const std::filesystem::path& path, const std::string& state, NamedTensors tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  uLong crc = crc32(0, reinterpret_cast<const Bytef*>(state.data()), static_cast<uInt>(state.size()));
  for (const NamedTensor& t : tensors) {
    const Tensor dense = t.tensor.contiguous();
    const std::string head = fmt::format("\n{} {} {}\n", t.name, name(dense.dtype()), dense.sizes().str());
    crc = crc32(crc, reinterpret_cast<const Bytef*>(head.data()), static_cast<uInt>(head.size()));
    const auto bytes = static_cast<uInt>(static_cast<std::size_t>(dense.numel()) * dense.item_size());
    if (bytes != 0) crc = crc32(crc, static_cast<const Bytef*>(dense.raw_data()), bytes);
  }
  io::save_safetensors(path, tensors,
                       {{"format", "pt"}, {kCheckpointState, state}, {"halfstep_crc32", fmt::format("{:08x}", crc)}});
}

}  // namespace halfstep::test
