// SPDX-License-Identifier: Apache-2.0
// Text from outside (names of files, folders and tensors, which may be any bytes) made safe to display and store.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "halfstep/core/export.h"

namespace halfstep {

/// Whether all of a text is valid UTF-8: no longer forms than needed, no halves of surrogate pairs, nothing beyond
/// Unicode.
HS_API bool is_utf8(std::string_view text);

/// The text as one line of valid UTF-8 that does nothing to a terminal: bytes that are no UTF-8, control characters
/// (also those of two bytes, U+0080 to U+009F), characters that turn the direction of text, and line ends become `\n`,
/// `\r`, `\t`, `\e` or `\xNN`, a byte each. All else stays, backslashes too: what is printable already is not changed,
/// so that it may be asked for more than once.
HS_API std::string printable(std::string_view text);
/// The same for a path in a message; one of over 400 bytes loses its middle.
HS_API std::string shown_path(const std::filesystem::path& path);
/// The same for a text of several lines: line ends and tabs stay.
HS_API std::string printable_lines(std::string_view text);
/// The same of the first `most` bytes of a text from a file, with `...` where there are more.
HS_API std::string printable_start(std::string_view text, std::size_t most = 120);

/// A name as it is kept in files: what printable() makes of it, with backslashes doubled. Two names never give the
/// same: raw_name() turns it back.
HS_API std::string kept_name(std::string_view name);
/// The bytes of a name that kept_name() made; of any other text what it stands for as far as it goes.
HS_API std::string raw_name(std::string_view kept);

}  // namespace halfstep
