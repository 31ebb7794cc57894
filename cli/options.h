// SPDX-License-Identifier: Apache-2.0
// Flags that several verbs share.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <string>

#include "halfstep/data/dataset.h"
#include "halfstep/data/mnist.h"

namespace halfstep::cli {

/// Device, threads and model: what every verb that computes takes.
struct CommonOptions {
  std::string model;
  std::string device = "cpu";
  int gpu = -1;
  int threads = 0;
};
/// Adds MODEL, --device, --gpu and --threads.
void add_common(CLI::App& verb, CommonOptions& options);
/// Checks the model and the device and sets the threads. Throws UsageError.
void apply_common(const CommonOptions& options);

/// The pictures of a folder in MNIST's format, or the built-in digits when there is no folder; `limit` at most (0:
/// all).
data::MnistData load_pictures(const std::filesystem::path& folder, data::Split split, std::uint64_t seed,
                              std::int64_t limit = 0);
/// As a data set, flattened and normalised as MNIST customarily is.
std::shared_ptr<const data::Dataset> make_dataset(data::MnistData pictures);

/// Runs `function`; an Error of it becomes a UsageError, since it speaks of arguments.
template <class F>
auto as_usage(F&& function);

}  // namespace halfstep::cli

#include "cli/verbs.h"
#include "halfstep/core/error.h"

namespace halfstep::cli {

template <class F>
auto as_usage(F&& function) {
  try {
    return function();
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
}

}  // namespace halfstep::cli
