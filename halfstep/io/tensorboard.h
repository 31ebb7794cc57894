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
  std::string suffix = {};  ///< end of the file's name
};

/// Writes a file of events that TensorBoard shows: `tensorboard --logdir FOLDER`. Each writer makes a file of its own,
/// named `events.out.tfevents.SECONDS.HOST.PROCESS.NUMBER`; TensorBoard shows all files of a folder as one run. The
/// file grows while it is written, so that a running training can be watched. All members throw IoError naming the
/// file.
class HS_API TensorBoardWriter {
 public:
  /// Makes the folder if it isn't there, and the file in it.
  explicit TensorBoardWriter(const std::filesystem::path& folder, const TensorBoardOptions& options = {});
  /// Writes out what is left.
  ~TensorBoardWriter();
  TensorBoardWriter(TensorBoardWriter&&) noexcept;
  TensorBoardWriter& operator=(TensorBoardWriter&&) noexcept;

  /// A point of the curve `tag`, kept as float32: at `step`, and at `wall_time` (seconds since 1970; now unless given).
  void scalar(const std::string& tag, double value, std::int64_t step, std::optional<double> wall_time = {});
  /// How the elements of a tensor (any device, any dtype) are spread, in TensorBoard's buckets, which grow by a tenth
  /// from 1e-12 to 1e20 on both sides of 0. Elements that aren't finite are left out; where there are any, their number
  /// becomes the scalar `TAG/nonfinite`.
  void histogram(const std::string& tag, const Tensor& values, std::int64_t step, std::optional<double> wall_time = {});
  /// Hands everything to the system, so that others see it. It also happens by itself, at the latest with the first
  /// event a second after the last time.
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
