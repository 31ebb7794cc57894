// SPDX-License-Identifier: Apache-2.0
// Any bytes are either read as a tar archive of pictures in folders, or refused with an IoError.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/data/image_archive.h"
#include "halfstep/runtime/log.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace halfstep::data;
  // Links that lead nowhere are named.
  [[maybe_unused]] static const bool quiet =
      (halfstep::set_log_sink([](halfstep::LogLevel, std::string_view) {}), true);
  // A low limit keeps each run short.
  const ArchiveLimits limits{.max_bytes = 1 << 20, .max_files = 100};
  try {
    const ImageArchive archive(std::span(data, size), "input", limits);
    if (archive.size() < 1 || archive.size() > limits.max_files) std::abort();
    std::vector<std::uint8_t> buffer;
    for (std::int64_t i = 0; i < archive.size(); ++i) {
      if (archive.label(i) < 0 || archive.label(i) >= static_cast<std::int64_t>(archive.classes().size())) std::abort();
      // Links share what they lead to.
      if (archive.read(i, buffer).size() > limits.max_bytes) std::abort();
      if (archive.name(i).empty() || halfstep::printable(archive.name(i)) != archive.name(i)) std::abort();
    }
  } catch (const halfstep::IoError& e) {
    if (halfstep::printable(e.what()) != e.what()) std::abort();  // names in it reach a terminal
  }
  return 0;
}
