// SPDX-License-Identifier: Apache-2.0
// Any bytes are either unpacked as an archive, into its folder and within the limit, or refused with an IoError.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "halfstep/core/error.h"
#include "halfstep/core/text.h"
#include "halfstep/data/data_sets_internal.h"

namespace fs = std::filesystem;

namespace {

// A folder with a file beside it that no archive may touch.
struct Place {
  fs::path top = fs::temp_directory_path() / ("halfstep-fuzz-unpack-" + std::to_string(::getpid()));
  fs::path folder = top / "a" / "b";
  ~Place() { fs::remove_all(top); }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Place place;
  constexpr std::uint64_t kMost = 1 << 20;
  fs::remove_all(place.top);
  fs::create_directories(place.folder);
  std::ofstream(place.top / "input", std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  try {
    const auto files = halfstep::data::detail::unpack_archive(place.top / "input", place.folder, kMost, nullptr, {});
    std::uint64_t bytes = 0;
    for (const std::string& file : files) {
      if (fs::exists(place.folder / file)) bytes += fs::file_size(place.folder / file);
    }
    if (bytes > kMost) std::abort();
  } catch (const halfstep::IoError& e) {
    if (halfstep::printable(e.what()) != e.what()) std::abort();  // names in it reach a terminal
  } catch (const fs::filesystem_error&) {  // a folder where a file is, a name that is too long; fetch() says it
  }
  // Outside the folder there is what was there before.
  for (const auto& entry : fs::directory_iterator(place.top)) {
    if (entry.path().filename() != "input" && entry.path().filename() != "a") std::abort();
  }
  for (const auto& entry : fs::directory_iterator(place.top / "a")) {
    if (entry.path() != place.folder) std::abort();
  }
  return 0;
}
