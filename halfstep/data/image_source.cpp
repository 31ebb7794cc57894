// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/image_source.h"

#include <system_error>

#include "halfstep/core/fail.h"
#include "halfstep/core/text.h"
#include "halfstep/data/image_archive.h"
#include "halfstep/data/image_folder.h"

namespace halfstep::data {

std::shared_ptr<const ImageSource> open_images(const std::filesystem::path& folder, Split split) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    fail<IoError>("open_images: expected a folder, got {} ({})", shown_path(folder),
                  fs::exists(folder, error) ? "not a folder" : "no such folder");
  }
  const std::vector<std::string> names =
      split == Split::kTrain ? std::vector<std::string>{"train"} : std::vector<std::string>{"val", "test"};
  for (const std::string& name : names) {
    const fs::path list = folder / (name + ".txt");
    if (!fs::is_regular_file(list, error)) continue;
    // Where the part has no class folders of its own (all pictures in val/), the order is that of train/.
    const fs::path own = folder / name;
    return std::make_shared<const ImageFolder>(
        ImageFolder::from_list(list, {folder, own}, class_folders(own).empty() ? folder / "train" : own));
  }
  for (const std::string& name : names) {
    if (fs::is_directory(folder / name, error)) return std::make_shared<const ImageFolder>(folder / name);
  }
  for (const std::string& name : names) {
    for (const char* ending : {".tar.gz", ".tgz", ".tar"}) {
      const fs::path archive = folder / (name + ending);
      if (fs::is_regular_file(archive, error)) return std::make_shared<const ImageArchive>(archive);
    }
  }
  fail<IoError>("open_images: expected {0}/ with a folder for each class, {0}.txt or {0}.tar.gz in {1}, found none{2}",
                names.front(), shown_path(folder), names.size() > 1 ? " (nor with test in place of val)" : "");
}

}  // namespace halfstep::data
