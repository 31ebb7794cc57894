// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_tuning.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/isa.h"
#include "halfstep/core/atomic_file.h"
#include "halfstep/core/error.h"
#include "halfstep/core/input_file_internal.h"
#include "halfstep/core/text.h"
#include "halfstep/runtime/log.h"
#include "halfstep/runtime/machine.h"
#include "halfstep/runtime/machine_file.h"
#include "halfstep/runtime/parallel.h"
#include "halfstep/runtime/tuning.h"

namespace halfstep::cpu {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int kFormat = 1;
constexpr std::uint64_t kMostFileBytes = 16 << 20;
constexpr int kTurns = 5;
constexpr double kMostSeconds = 0.5;  // for all turns but the first two
constexpr double kClearlyFaster = 0.97;

constexpr std::array kConvPathNames = {"reference", "products",  "pairs",  "tiles",   "blocks",   "native",
                                       "winograd2", "winograd4", "matrix", "windows", "depthwise"};
static_assert(kConvPathNames.size() == static_cast<std::size_t>(ConvPath::depthwise) + 1);

std::optional<ConvPath> path_named(const std::string& text) {
  const auto* const at = std::find(kConvPathNames.begin(), kConvPathNames.end(), text);
  if (at == kConvPathNames.end()) return std::nullopt;
  return static_cast<ConvPath>(at - kConvPathNames.begin());
}

Json owner_of_choices() {
  const MachineInfo info = machine();
  return {{"cpu", info.cpu}, {"isa", info.isa}, {"threads", info.threads}, {"library", library_build()}};
}

const char* layout_of(const TensorView& t) { return channels_last(t) ? "last" : row_major(t) ? "first" : "strided"; }

/// A kernel context that allocates its own workspace and frees it when destroyed.
struct OwnContext : KernelContext {
  OwnContext() : KernelContext{} {
    workspace = [](KernelContext* self, std::uint64_t bytes) -> void* {
      try {
        auto& pieces = static_cast<OwnContext*>(self)->pieces;
        pieces.push_back(Storage::allocate(bytes, Device{}));
        return pieces.back()->data();
      } catch (const std::exception&) {
        return nullptr;
      }
    };
    set_error = [](KernelContext*, const char*) {};
  }
  std::vector<Ref<Storage>> pieces;
};

std::optional<double> time_of(ConvPath path, ConvCall call) {
  call.weight_storage = nullptr;  // what the losers would keep with it
  OwnContext context;
  const auto start = std::chrono::steady_clock::now();
  if (convolve_by(path, &context, call) != Status::ok) return std::nullopt;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Those of the machine as it is now.
ConvChoices& machine_choices() {
  static std::mutex mutex;
  static auto& all = *new std::map<std::pair<Isa, int>, std::unique_ptr<ConvChoices>>;
  const std::lock_guard lock(mutex);
  auto& choices = all[{compute_isa(), num_threads()}];
  if (!choices) {
    const fs::path file = machine_file("choices");
    choices = std::make_unique<ConvChoices>(file);
    log(LogLevel::info, file.empty()
                            ? "convolutions are timed; choices are not kept, there is neither XDG_CACHE_HOME nor HOME"
                            : fmt::format("convolutions are timed once; choices are kept in {}", shown_path(file)));
  }
  return *choices;
}

}  // namespace

const char* name(ConvPath path) noexcept { return kConvPathNames[static_cast<std::size_t>(path)]; }

std::string conv_signature(const ConvCall& call, Winograd allowed) {
  const ConvGeometry& g = call.geometry;
  constexpr const char* kParts[] = {"output", "input", "weight"};
  return fmt::format(
      "{} {}x{}x{}x{} {}x{}x{} window {}x{} groups {} stride {}x{} dilation {}x{} padding {},{},{},{} {} {} {} {} {} "
      "{}{} winograd {}{}",
      kParts[static_cast<int>(call.part)], g.n, g.c, g.h, g.w, g.o, g.oh, g.ow, g.kh, g.kw, g.groups, g.stride[0],
      g.stride[1], g.dilation[0], g.dilation[1], g.before[0], g.before[1], g.after[0], g.after[1],
      halfstep::name(call.input.dtype), layout_of(call.input), halfstep::name(call.weight.dtype),
      layout_of(call.weight), halfstep::name(call.output.dtype), layout_of(call.output),
      call.bias != nullptr ? " bias" : "", halfstep::name(allowed),
      call.input.dtype == DType::f32 && call.precision == Float32Precision::high ? " high" : "");
}

ConvChoices::ConvChoices(fs::path file) : file_(std::move(file)), known_(read(true)) {}

std::map<std::string, ConvPath> ConvChoices::read(bool warn) const {
  std::error_code error;
  if (file_.empty() || !fs::exists(file_, error)) return {};
  std::map<std::string, ConvPath> result;
  try {
    const Json json = Json::parse(read_whole_file(file_, kMostFileBytes));
    if (json.at("format").get<int>() != kFormat || json.at("of") != owner_of_choices()) return {};
    for (const auto& [signature, path] : json.at("convolutions").items()) {
      if (const auto known = path_named(path.get<std::string>())) result.emplace(signature, *known);
    }
    return result;
  } catch (const nlohmann::json::exception&) {
    if (warn) log(LogLevel::warning, fmt::format("{} is damaged: convolutions are timed again", shown_path(file_)));
  } catch (const IoError& e) {
    if (warn) log(LogLevel::warning, fmt::format("{}: convolutions are timed again", e.what()));
  }
  return {};
}

void ConvChoices::write() {
  if (file_.empty()) return;
  std::map<std::string, ConvPath> all = read(false);
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [signature, path] : known_) all[signature] = path;
  }
  Json convolutions = Json::object();
  for (const auto& [signature, path] : all) convolutions[signature] = name(path);
  const Json json{{"format", kFormat}, {"of", owner_of_choices()}, {"convolutions", std::move(convolutions)}};
  const std::string text = json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
  try {
    std::error_code error;
    fs::create_directories(file_.parent_path(), error);
    if (error) {
      log_once(
          LogLevel::warning, "conv_choices_folder",
          fmt::format("{}: can't be made: {}; choices are not kept", shown_path(file_.parent_path()), error.message()));
      return;
    }
    AtomicFile out(file_, false);
    out.write(text.data(), text.size());
    out.commit();
  } catch (const IoError& e) {
    log_once(LogLevel::warning, "conv_choices_file", fmt::format("{}; choices are not kept", e.what()));
  }
}

std::optional<ConvPath> ConvChoices::find(const std::string& signature) const {
  const std::lock_guard lock(mutex_);
  const auto at = known_.find(signature);
  return at == known_.end() ? std::nullopt : std::optional(at->second);
}

ConvPath ConvChoices::choose(const std::string& signature, std::span<const ConvPath> paths, const Time& time) {
  const std::lock_guard measuring(measuring_);
  if (const auto known = find(signature)) return *known;  // another thread's, meanwhile
  std::vector<std::optional<double>> least(paths.size());
  std::vector<bool> serves(paths.size(), true);
  double spent = 0;
  for (int turn = -1; turn < kTurns && (turn < 2 || spent < kMostSeconds); ++turn) {
    for (std::size_t i = 0; i < paths.size(); ++i) {
      const auto seconds = serves[i] ? time(paths[i]) : std::nullopt;
      if (!seconds) {
        serves[i] = false;
        least[i] = std::nullopt;
      } else if (turn >= 0) {
        spent += *seconds;
        least[i] = std::min(*seconds, least[i].value_or(*seconds));
      }
    }
  }
  std::size_t best = 0;
  for (std::size_t i = 1; i < paths.size(); ++i) {
    if (!least[i]) continue;
    if (!least[best] || *least[i] < *least[best] * (best == 0 ? kClearlyFaster : 1)) best = i;
  }
  // Nothing is known of a call that fails by every path: it is to fail for the caller, who hears why.
  if (!least[best]) return paths[0];
  std::string times;
  for (std::size_t i = 0; i < paths.size(); ++i) {
    if (least[i]) times += fmt::format("{}{} {:.3f} ms", times.empty() ? "" : ", ", name(paths[i]), *least[i] * 1e3);
  }
  log(LogLevel::debug, fmt::format("{}: {}", signature, times));
  {
    const std::lock_guard lock(mutex_);
    known_[signature] = paths[best];
  }
  write();
  return paths[best];
}

ConvPath tuned_conv_path(ConvCall& call, ConvPath model, bool measure) noexcept {
  if (!tuning()) return model;
  try {
    const Winograd allowed = winograd();
    const std::vector<ConvPath> paths = conv_paths(call, compute_isa(), allowed, model);
    if (paths.size() < 2) return model;
    const std::string signature = conv_signature(call, allowed);
    ConvChoices& choices = machine_choices();
    // A choice of a path that doesn't serve can only come from a file that was written by hand.
    if (const auto known = choices.find(signature)) {
      return std::find(paths.begin(), paths.end(), *known) != paths.end() ? *known : model;
    }
    if (!measure || in_parallel_region()) return model;
    return choices.choose(signature, paths, [&](ConvPath path) { return time_of(path, call); });
  } catch (const std::exception& error) {
    log_once(LogLevel::warning, "conv_choices", fmt::format("convolutions can't be timed: {}", error.what()));
    return model;
  }
}

}  // namespace halfstep::cpu
