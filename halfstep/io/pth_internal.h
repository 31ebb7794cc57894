// SPDX-License-Identifier: Apache-2.0
// Internal: what a pickle of PyTorch's says of tensors, before any of their bytes are read.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/dtype.h"
#include "halfstep/core/shape.h"
#include "halfstep/io/pickle_internal.h"
#include "halfstep/io/pth.h"
#include "halfstep/io/zip_internal.h"

namespace halfstep::io {

/// A block of memory that tensors are in.
struct PthStorage {
  std::string key;
  std::uint64_t bytes = 0;
  std::uint64_t item = 1;  ///< bytes of one element, as the file counts
  bool needed = false;     ///< a tensor is in it
  bool booleans = false;   ///< a tensor of bools is in it
};

/// A tensor, or another value that a file keeps as one, and where in the file it lies.
struct PthTensor {
  std::string name;          ///< keys on the way to it, joined by dots
  std::size_t storage = 0;   ///< number in PthTree::storages
  std::uint64_t offset = 0;  ///< of the first element, in bytes
  DType dtype = f32;
  Shape sizes = {};
  Shape strides = {};
};

/// What a pickle of PyTorch names.
struct PthTree {
  std::vector<PthStorage> storages;
  std::vector<PthTensor> tensors;               ///< of the state dict
  std::vector<PthTensor> others;                ///< outside of it
  std::map<std::string, std::string> metadata;  ///< plain values, as text
  std::string state_dict_key;                   ///< where the state dict was found; empty: the file is one
  std::uint64_t claimed = 0;                    ///< bytes of all tensors, each in full
};

/// Whether a .pth file may name this: tensors, their storages and dtypes, and plain values of Python.
HS_API bool pth_allows(std::string_view global);
/// Finds tensors and other values. Every tensor lies within its storage. Throws IoError; also for storages of more than
/// `max_bytes` together, and tensors that repeat what they have to more than `max_repeated`.
HS_API PthTree read_pth_tree(const Pickle& pickle, const std::string& file,
                             std::uint64_t max_bytes = std::uint64_t{1} << 40,
                             std::uint64_t max_repeated = std::uint64_t{1} << 30);

/// parse_pth() that may leave checksums uncompared, for fuzzers.
HS_API PthFile parse_pth(std::span<const unsigned char> bytes, const std::string& name, const ReadLimits& limits,
                         bool check_sums);

/// PyTorch's storage class for a dtype; null where it has only untyped ones.
const char* pth_storage_class(DType dtype);
/// PyTorch's name of a dtype, such as `float32`.
const char* pth_dtype_name(DType dtype);

}  // namespace halfstep::io
