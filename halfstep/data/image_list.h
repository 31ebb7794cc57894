// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "halfstep/core/export.h"

namespace halfstep::data {

/// A line of a list of images.
struct ImageListEntry {
  std::string path;
  std::int64_t label = 0;
  friend bool operator==(const ImageListEntry&, const ImageListEntry&) = default;
};

/// Labels in a list are below this.
inline constexpr std::int64_t kMostClasses = 1 << 20;

/// Reads a list with a path and a label per line, as in `val/n03623198/ILSVRC2012_val_00030341.JPEG 997`. The label
/// follows the last space or tab, so a path may contain spaces. Lines may end in CR LF; empty lines and those that
/// begin with # are skipped. Throws IoError that names `name` and the line for one without a path or a label from 0 to
/// 1048575, and for a list without any image.
HS_API std::vector<ImageListEntry> parse_image_list(std::string_view text, std::string_view name);

}  // namespace halfstep::data
