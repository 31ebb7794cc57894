// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::data {

/// Element types of an IDX file; the values are the codes in its header.
enum class IdxType : std::uint8_t {
  kUint8 = 0x08,
  kInt8 = 0x09,
  kInt16 = 0x0B,
  kInt32 = 0x0C,
  kFloat32 = 0x0D,
  kFloat64 = 0x0E,
};

/// Bytes of one element.
HS_API int idx_item_size(IdxType type);

/// The contents of an IDX file.
struct IdxArray {
  IdxType type = IdxType::kUint8;
  std::vector<std::int64_t> shape;
  /// The elements row by row in the byte order of this machine (the file's is big-endian).
  std::vector<std::uint8_t> data;
};

/// Limits that a reader checks before it allocates anything.
struct IdxLimits {
  /// The largest array, in bytes. The default is room for 2.7 million images of 28x28.
  std::uint64_t max_bytes = std::uint64_t{2} << 30;
};

/// Reads an IDX file, plain or compressed with gzip (detected from the contents, not from the name).
///
/// The format is the one of the MNIST database: two zero bytes, a type code, the number of dimensions, the dimensions
/// as big-endian 32-bit integers, then the elements.
///
/// The file is not trusted: the shape in the header is checked against the limit and against the file's size before
/// memory is allocated, and a compressed file is never unpacked beyond the size its header announces.
///
/// Throws IoError that names the file, what was expected and what was found: for a file that is missing, not an IDX
/// file, truncated or damaged, has trailing bytes, or is larger than the limit.
HS_API IdxArray read_idx(const std::filesystem::path& path, const IdxLimits& limits = {});

/// The same for bytes in memory; `name` identifies them in errors.
HS_API IdxArray parse_idx(std::span<const std::uint8_t> bytes, std::string_view name, const IdxLimits& limits = {});

}  // namespace halfstep::data
