// SPDX-License-Identifier: Apache-2.0
#include "halfstep/train/step_time.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <unordered_map>

namespace halfstep::training {
namespace {

using debug::OperandPlace;
using debug::TracedCall;
using debug::TracedTensor;

constexpr const char *kForward = "convolutions, forward", *kInput = "convolutions, input gradients",
                     *kWeight = "convolutions, weight gradients", *kProducts = "products", *kNorms = "norms",
                     *kPooling = "pooling", *kElementwise = "elementwise and others", *kCopies = "casts and copies",
                     *kLossKind = "loss", *kOptimizerKind = "optimizer";
constexpr const char* kKinds[] = {kForward, kInput,       kWeight, kProducts, kNorms,
                                  kPooling, kElementwise, kCopies, kLossKind, kOptimizerKind};

// A share of operands in a place that is as good as none: the time with all of them there isn't measured for it.
constexpr double kNearlyNone = 0.02;

bool runs_kernel(const TracedCall& call) {
  return !call.kernel.empty() && call.site.path != ExecutionPath::view && call.site.path != ExecutionPath::transfer;
}

// Its operands, those that are one tensor once.
std::vector<const TracedTensor*> operands(const TracedCall& call) {
  std::vector<const TracedTensor*> all;
  for (const auto* list : {&call.inputs, &call.results}) {
    for (const TracedTensor& t : *list) {
      if (!t.defined || t.bytes() == 0) continue;
      const bool seen = std::any_of(all.begin(), all.end(), [&](const TracedTensor* other) {
        return t.address != 0 && other->address == t.address && other->bytes() == t.bytes();
      });
      if (!seen) all.push_back(&t);
    }
  }
  return all;
}

// What was touched last, block by block of the address space.
class Cache {
 public:
  explicit Cache(std::int64_t bytes) : bytes_(static_cast<std::uint64_t>(std::max<std::int64_t>(bytes, 0))) {}

  /// Touches these bytes from the first to the last and returns how many of them were in the cache.
  std::uint64_t touch(std::uint64_t address, std::uint64_t bytes) {
    std::uint64_t found = 0;
    for (std::uint64_t at = address; at < address + bytes;) {
      const std::uint64_t block = at / kBlock, end = std::min((block + 1) * kBlock, address + bytes);
      const auto [place, fresh] = touched_.try_emplace(block, 0);
      if (!fresh && total_ - place->second <= bytes_) found += end - at;
      total_ += end - at;
      place->second = total_;
      at = end;
    }
    return found;
  }

 private:
  // A page: where the system puts memory in the address space makes no difference.
  static constexpr std::uint64_t kBlock = 4096;
  std::uint64_t bytes_, total_ = 0;
  std::unordered_map<std::uint64_t, std::uint64_t> touched_;  // total_ when the block was touched last
};

}  // namespace

std::span<const char* const> step_time_kinds() { return kKinds; }

const char* step_time_kind(const TracedCall& call) {
  const std::string_view op = call.site.op;
  const auto has = [&](std::string_view part) { return op.find(part) != std::string_view::npos; };
  if (call.site.standalone && (has("sgd") || has("adam") || op.starts_with("amp_") || op.starts_with("multi_") ||
                               op == "all_finite" || op == "ema_update")) {
    return kOptimizerKind;
  }
  if (op.starts_with("conv")) return has("backward_weight") ? kWeight : has("backward_input") ? kInput : kForward;
  if (op == "linear" || op == "mm" || op == "bmm" || has("addmm") || has("attention")) return kProducts;
  if (has("batch_norm") || has("layer_norm") || has("group_norm") || has("rms_norm")) return kNorms;
  if (has("pool")) return kPooling;
  if (has("cross_entropy") || has("_loss")) return kLossKind;
  if (op == "to" || op == "copy" || op == "clone" || op == "cat" || op == "fill") return kCopies;
  return kElementwise;
}

std::vector<double> shares_in_cache(std::span<const TracedCall> calls, std::int64_t cache_bytes) {
  Cache cache(cache_bytes);
  std::vector<double> shares(calls.size());
  // The second time it is as after the step before.
  for (int time = 0; time < 2; ++time) {
    for (std::size_t i = 0; i < calls.size(); ++i) {
      if (!runs_kernel(calls[i])) continue;
      std::uint64_t found = 0, all = 0;
      for (const TracedTensor* t : operands(calls[i])) {
        all += t->bytes();
        if (t->address != 0) found += cache.touch(t->address, t->bytes());
      }
      shares[i] = all > 0 ? static_cast<double>(found) / static_cast<double>(all) : 1;
    }
  }
  return shares;
}

StepTime predict_time(std::span<const TracedCall> calls, CallTimes& times, const StepTimeOptions& options) {
  const MachineLimits limits = times.limits();
  const std::vector<double> in_any = shares_in_cache(calls, limits.cache_bytes),
                            in_inner = shares_in_cache(calls, std::min(limits.inner_bytes, limits.cache_bytes));
  std::map<std::string_view, StepTimePart> parts;
  StepTime step;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const TracedCall& call = calls[i];
    if (options.progress) options.progress(i, calls.size());
    if (!options.captured) step.calling += times.calling();
    if (!runs_kernel(call)) continue;
    if (!call.repeatable) {
      ++step.unknown;
      continue;
    }
    const char* kind = step_time_kind(call);
    StepTimePart& part = parts[kind];
    part.kind = kind;
    ++part.calls;
    double bytes = 0;
    for (const TracedTensor* t : operands(call)) bytes += static_cast<double>(t->bytes());
    const std::pair<OperandPlace, double> places[] = {{OperandPlace::inner, in_inner[i]},
                                                      {OperandPlace::cache, in_any[i] - in_inner[i]},
                                                      {OperandPlace::memory, 1 - in_any[i]}};
    double taken = 0, seconds = 0;
    for (const auto& [place, share] : places) {
      if (share <= kNearlyNone) continue;
      taken += share;
      seconds += share * times.seconds(call, place);
    }
    part.seconds += seconds / taken;
    const double multiply_adds = static_cast<double>(call.multiply_adds);
    const double moving =
        bytes * (places[0].second / limits.inner_bandwidth + places[1].second / limits.cache_bandwidth +
                 places[2].second / limits.memory_bandwidth);
    part.limit += std::max(2 * multiply_adds / limits.operations_of(call.dtype), moving);
    part.multiply_adds += multiply_adds;
    part.bytes += bytes;
  }
  for (const char* kind : kKinds) {
    if (const auto found = parts.find(kind); found != parts.end()) step.parts.push_back(found->second);
  }
  return step;
}

double StepTime::seconds() const {
  double all = calling;
  for (const StepTimePart& p : parts) all += p.seconds;
  return all;
}

double StepTime::limit() const {
  double all = 0;
  for (const StepTimePart& p : parts) all += p.limit;
  return all;
}

}  // namespace halfstep::training
