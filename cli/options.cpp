// SPDX-License-Identifier: Apache-2.0
#include "cli/options.h"

#include <fmt/format.h>

#include <algorithm>

#include "halfstep/core/device.h"
#include "halfstep/data/digits.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cli {

void add_common(CLI::App& verb, CommonOptions& o) {
  verb.add_option("MODEL", o.model, "Network: mlp (784-512-512-10 with ReLU)")->required();
  verb.add_option("--device", o.device, "Device, as NAME or NAME:INDEX (see `halfstep devices`)")
      ->capture_default_str();
  verb.add_option("--gpu", o.gpu, "The same as --device cuda:N");
  verb.add_option("--threads", o.threads, "Threads that compute (default: all processors)")->check(CLI::Range(1, 4096));
}

void apply_common(const CommonOptions& o) {
  if (o.model != "mlp") throw UsageError(fmt::format("MODEL: expected mlp, got '{}'", o.model));
  const std::string device = o.gpu >= 0 ? fmt::format("cuda:{}", o.gpu) : o.device;
  as_usage([&] { return Device(device); });
  if (o.threads > 0) set_num_threads(o.threads);
}

data::MnistData load_pictures(const std::filesystem::path& folder, data::Split split, std::uint64_t seed,
                              std::int64_t limit) {
  if (folder.empty()) return data::make_digits(split, {.seed = seed, .count = limit});
  data::MnistData pictures = data::load_mnist(folder, split);
  if (limit > 0 && limit < pictures.count) {
    pictures.count = limit;
    pictures.images.resize(static_cast<std::size_t>(limit * pictures.rows * pictures.columns));
    pictures.labels.resize(static_cast<std::size_t>(limit));
  }
  return pictures;
}

std::shared_ptr<const data::Dataset> make_dataset(data::MnistData pictures) {
  return std::make_shared<data::MnistDataset>(std::move(pictures),
                                              data::ImageOptions{.flatten = true, .mean = 0.1307, .std = 0.3081});
}

}  // namespace halfstep::cli
