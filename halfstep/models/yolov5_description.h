// SPDX-License-Identifier: Apache-2.0
// Detectors from the YAML files that describe them, as their users exchange them (`--cfg yolov5n.yaml`).
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "halfstep/models/yolov5.h"

namespace halfstep::models {

/// What Yolov5 is built from, from a file with the keys
///
///     nc: 80                  # classes
///     depth_multiple: 0.33    # factor on repeats
///     width_multiple: 0.25    # factor on channels
///     anchors: [[10,13, 16,30, 33,23], [30,61, 62,45, 59,119], [116,90, 156,198, 373,326]]
///     backbone: [[-1, 1, Conv, [64, 6, 2, 2]], ...]
///     head: [..., [[17, 20, 23], 1, Detect, [nc, anchors]]]
///
/// backbone and head hold rows [from, number, module, arguments], numbered through from 0. Modules and their arguments:
/// Conv [channels, kernel = 1, stride = 1, padding = None], C3 [channels, shortcut = True], SPPF [channels, kernel =
/// 5], nn.Upsample [None, factor, 'nearest'], Concat [1] and, last, Detect [nc, anchors]. Throws IoError, naming file,
/// line, row and what was expected, for anything else, keys included; what rows have to do with each other is for
/// Yolov5 to check.
HS_API Yolov5Options read_yolov5_description(const std::filesystem::path& file);

/// The same from the text of such a file, which messages call `name`.
HS_API Yolov5Options parse_yolov5_description(std::string_view text, std::string_view name);

/// Options of a Yolov5 that could be built, with its layers and anchors, as such a text: one line of YAML, with what
/// was left out. Read again it is the same network.
HS_API std::string yolov5_description(const Yolov5Options& options);

/// Where two descriptions first differ, such as `depth_multiple is 0.33 and 0.67`; empty where they are of the same
/// network. Arguments that are left out have their defaults; classes may differ.
HS_API std::string yolov5_difference(const Yolov5Options& a, const Yolov5Options& b);

}  // namespace halfstep::models
