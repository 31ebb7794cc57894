// SPDX-License-Identifier: Apache-2.0
#include "cli/launch_train.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <map>

#include "cli/config_file.h"
#include "cli/train_options.h"
#include "halfstep/train/run_folder.h"

namespace halfstep::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfig = "config.yaml";

// What the arguments say, by the key of the flag; of the same flag the last. `train` itself checks them.
std::map<std::string, std::string> values_of(const std::vector<std::string>& arguments) {
  TrainOptions plain;
  const std::vector<Flag> rows = train_flags(plain);
  std::map<std::string, std::string> values;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& a = arguments[i];
    if (!a.starts_with('-')) {
      values.emplace("model", a);
      continue;
    }
    const Flag* row = row_of(rows, a);
    if (!row) continue;
    const std::size_t equals = a.find('=');
    if (equals != std::string::npos) {
      values[row->key()] = a.substr(equals + 1);
    } else {
      values[row->key()] = row->is_switch() || i + 1 == arguments.size() ? "true" : arguments[++i];
    }
  }
  if (const auto file = values.find("config"); file != values.end()) {
    try {
      for (const auto& [key, value] : config_values(file->second)) values.emplace(key, value);
    } catch (const std::exception&) {
      // It is train's to say what is wrong with it.
    }
  }
  return values;
}

}  // namespace

TrainCommand::TrainCommand(std::vector<std::string> arguments, bool needs_folder) : arguments_(std::move(arguments)) {
  auto values = values_of(arguments_);
  const auto value = [&](const char* key) {
    const auto it = values.find(key);
    return it == values.end() ? std::string() : it->second;
  };
  if (const fs::path resume = value("resume"); !resume.empty() && !values.contains("reproducible")) {
    try {
      const auto run = config_values((fs::is_directory(resume) ? resume : resume.parent_path()) / "config.yaml");
      if (const auto it = run.find("reproducible"); it != run.end()) values.insert(*it);
    } catch (const std::exception&) {
      // Nor is what a run was begun with.
    }
  }
  shards_ = std::strtoull(value("reproducible").c_str(), nullptr, 10);
  if (!needs_folder) return;
  const auto is_on = [&](const char* key) { return !value(key).empty() && value(key) != "false"; };
  if (is_on("no-out") || is_on("evaluate") || is_on("markdown") || is_on("help")) return;
  folder_ = value("out");
  if (const fs::path resume = value("resume"); folder_.empty() && !resume.empty()) {
    folder_ = fs::is_directory(resume) ? resume : resume.parent_path();
  }
  if (!folder_.empty()) {
    if (training::is_run_in(value("resume"), folder_)) return;
    had_files_ = !training::run_files(folder_).empty();
    refused_ = training::holds_run(folder_) && !is_on("overwrite");
    checkpoint_before_ = mark(training::kLastCheckpoint);
    config_before_ = mark(kConfig);
    return;
  }
  const std::string network = !value("arch").empty() ? value("arch") : value("model");
  // The network's name, not a folder that stands in its place.
  const std::string name = network.empty() ? "run" : fs::path(network).filename().string();
  const std::string time = fmt::format("{:%Y%m%d-%H%M%S}", fmt::localtime(std::time(nullptr)));
  folder_ = fs::path("runs") / fmt::format("{}-{}", name, time);
  for (int i = 2; fs::exists(folder_); ++i) folder_ = fs::path("runs") / fmt::format("{}-{}-{}", name, time, i);
  arguments_.insert(arguments_.end(), {"--out", folder_.string()});
}

TrainCommand::FileMark TrainCommand::mark(const char* name) const {
  struct stat info {};
  if (::stat((folder_ / name).c_str(), &info) != 0) return {};
  return {
      .device = info.st_dev, .inode = info.st_ino, .seconds = info.st_mtim.tv_sec, .nanoseconds = info.st_mtim.tv_nsec};
}

fs::path TrainCommand::checkpoint() const {
  if (folder_.empty()) return {};
  // A run begins with its configuration: a checkpoint without a new one is of another program that writes there.
  const FileMark now = mark(training::kLastCheckpoint);
  const bool own = now != checkpoint_before_ && (config_before_ == FileMark() || mark(kConfig) != config_before_);
  return own && now != FileMark() ? folder_ / training::kLastCheckpoint : fs::path();
}

std::vector<std::string> TrainCommand::again() const {
  if (!checkpoint().empty()) return arguments_to_resume(arguments_, folder_);
  std::vector<std::string> result = arguments_;
  // What the run left before its first checkpoint is of no use to anybody. What was there before it may be.
  if (!folder_.empty() && !had_files_ && !training::run_files(folder_).empty() &&
      std::find(result.begin(), result.end(), "--overwrite") == result.end()) {
    result.emplace_back("--overwrite");
  }
  return result;
}

}  // namespace halfstep::cli
