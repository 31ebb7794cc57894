// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "halfstep/core/tensor.h"

namespace halfstep::io {

/// Options of TensorBoardWriter.
struct TensorBoardOptions {
  std::string suffix = {};  ///< suffix of the file's name
  /// Of a run that resumes, its first step: TensorBoard drops what earlier files of the folder have from there on.
  std::optional<std::int64_t> purge_step = {};
};

/// Writes an event file for TensorBoard: `tensorboard --logdir FOLDER`. Each writer creates its own file, named
/// `events.out.tfevents.SECONDS.HOST.PROCESS.NUMBER`; TensorBoard shows all files of a folder as one run. The file
/// grows as it is written, so that a training run can be followed. All members throw IoError naming the file.
class HS_API TensorBoardWriter {
 public:
  /// Creates the folder if it doesn't exist, and the file in it.
  explicit TensorBoardWriter(const std::filesystem::path& folder, const TensorBoardOptions& options = {});
  /// Flushes the file.
  ~TensorBoardWriter();
  TensorBoardWriter(TensorBoardWriter&&) noexcept;
  TensorBoardWriter& operator=(TensorBoardWriter&&) noexcept;

  /// A point of the curve `tag`, kept as float32: at `step`, and at `wall_time` (seconds since 1970; now unless given).
  void scalar(const std::string& tag, double value, std::int64_t step, std::optional<double> wall_time = {});
  /// The distribution of a tensor's elements (any device, any dtype), in TensorBoard's buckets, which grow by a tenth
  /// from 1e-12 to 1e20 on both sides of 0. Non-finite elements are left out; if there are any, their number becomes
  /// the scalar `TAG/nonfinite`.
  void histogram(const std::string& tag, const Tensor& values, std::int64_t step, std::optional<double> wall_time = {});
  /// Hands everything to the system, so that other programs see it. This also happens automatically, at the latest with
  /// the first event a second after the previous flush.
  void flush();
  /// The file.
  const std::filesystem::path& path() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

namespace detail {
/// CRC-32C (Castagnoli) of bytes, as the file's records have it before masking.
HS_API std::uint32_t crc32c(const void* data, std::size_t bytes);
}  // namespace detail

}  // namespace halfstep::io
