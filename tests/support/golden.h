// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace halfstep::test {

/// One tensor of a golden file. `data` holds the values in row-major order, each exactly as its dtype stores it
/// (integers up to 2^53, booleans as 0 and 1).
struct GoldenTensor {
  std::vector<int64_t> shape;
  std::string dtype;  ///< a name of ours: "f32", "bf16", "i64"...
  std::vector<double> data;
};

using GoldenAttribute = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>,
                                     std::vector<std::string>>;

/// One entry of a golden file; tests/goldens/README.md says what each file puts where.
struct GoldenEntry {
  std::string name;   ///< unique in its file, for messages
  std::string op;     ///< our name of the op or optimizer
  std::string torch;  ///< PyTorch's name, where it has another
  std::map<std::string, GoldenAttribute> attributes;
  std::vector<GoldenTensor> inputs;
  std::vector<std::optional<GoldenTensor>> cotangents;  ///< one for each output; empty where an output has no gradient
  std::vector<GoldenTensor> outputs;
  std::vector<std::optional<GoldenTensor>> grads;  ///< one for each input; empty where an input has no gradient
  std::vector<GoldenTensor> exact;                 ///< outputs in float64 from the same (rounded) inputs
  std::map<std::string, GoldenTensor> tensors;     ///< further named tensors: trajectories, states

  bool has(const std::string& attribute) const { return attributes.count(attribute) != 0; }

  /// The attribute, or `otherwise` when the entry has none; without `otherwise` a missing one throws std::out_of_range.
  /// Numbers convert: an integer reads as real, one integer as a list of one. Another type throws
  /// std::invalid_argument.
  double real(const std::string& attribute, std::optional<double> otherwise = {}) const;
  int64_t integer(const std::string& attribute, std::optional<int64_t> otherwise = {}) const;
  bool flag(const std::string& attribute, std::optional<bool> otherwise = {}) const;
  std::string text(const std::string& attribute, std::optional<std::string> otherwise = {}) const;
  std::vector<int64_t> integers(const std::string& attribute) const;
  std::vector<double> reals(const std::string& attribute) const;
  std::vector<std::string> texts(const std::string& attribute) const;

  /// The named tensor; throws std::out_of_range with the entry's and the tensor's name when it isn't there.
  const GoldenTensor& tensor(const std::string& name) const;
};

/// Reads tests/goldens/FILE. Throws std::runtime_error with the file's name when it is missing or malformed.
std::vector<GoldenEntry> read_goldens(const std::string& file);

}  // namespace halfstep::test
