// SPDX-License-Identifier: Apache-2.0
#include "halfstep/debug/call_timer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string_view>
#include <tuple>

#include "halfstep/autograd/engine.h"
#include "halfstep/core/fail.h"
#include "halfstep/debug/attributes_internal.h"
#include "halfstep/debug/replay_internal.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attributes.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/op.h"
#include "halfstep/runtime/kernel.h"
#include "halfstep/runtime/machine_limits.h"

namespace halfstep::debug {
namespace {

using Clock = std::chrono::steady_clock;

// Runs of one measurement: at least so many, and no more once they took so long.
constexpr int kLeastRuns = 5, kMostRuns = 200;
constexpr double kEnough = 0.03, kTooLong = 0.6;
constexpr std::size_t kMostSets = 32;

// Bits that look random, the same in every run.
struct Numbers {
  std::uint64_t state = 0x9e3779b97f4a7c15u;
  std::uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
  }
};

// How the values of an operand are chosen.
struct Values {
  bool positive = false;     // floating: no negative ones, such as a mean of squares
  std::int64_t bound = 2;    // integers: under this
  std::vector<double> list;  // or these, from the first on
};

template <class T>
T value(const Values& values, Numbers& numbers) {
  const std::uint64_t random = numbers.next() >> 11;
  if constexpr (is_floating(dtype_of<T>)) {
    const double magnitude = 0.25 + 0.75 * static_cast<double>(random >> 1) * 0x1p-52;
    return convert<T>(static_cast<float>(random % 2 == 0 || values.positive ? magnitude : -magnitude));
  } else if constexpr (std::is_same_v<T, bool>) {
    return random % 2 == 0;
  } else {
    return static_cast<T>(random % static_cast<std::uint64_t>(values.bound));
  }
}

// All of the tensor's block, gaps included.
void fill(const Tensor& tensor, const Values& values) {
  constexpr std::size_t kPeriod = 4099;  // prime, so that rows differ
  Storage& block = *tensor.storage();
  Numbers numbers;
  visit_all(tensor.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* at = static_cast<T*>(block.data());
    const std::size_t n = block.bytes() / sizeof(T), first = std::min(n, kPeriod);
    for (std::size_t i = 0; i < first; ++i) {
      at[i] = i < values.list.size() ? convert<T>(values.list[i]) : value<T>(values, numbers);
    }
    for (std::size_t i = first; i < n; i += first) std::memcpy(at + i, at, std::min(first, n - i) * sizeof(T));
  });
}

const TracedTensor* largest(const TracedCall& call) {
  const TracedTensor* found = nullptr;
  for (const TracedTensor& t : call.inputs) {
    if (t.defined && is_floating(t.dtype) && (!found || t.sizes.numel() > found->sizes.numel())) found = &t;
  }
  return found;
}

// What integers of a call are under: places in the tensor that they point into.
std::int64_t integer_bound(const TracedCall& call) {
  const std::string_view kernel = call.kernel;
  const auto has = [&](std::string_view part) { return kernel.find(part) != std::string_view::npos; };
  const auto attributes = [&]<class A>(A) {
    A a{};
    std::memcpy(&a, call.attributes.data(), std::min(sizeof a, call.attributes.size()));
    return a;
  };
  const TracedTensor* tensor = largest(call);
  if (has("cross_entropy") || has("nll_loss")) {
    return tensor && tensor->sizes.size() > 1 ? tensor->sizes[1] : tensor ? tensor->sizes[0] : 1;
  }
  if (kernel == "embedding" && tensor) return std::max<std::int64_t>(tensor->sizes[0], 1);
  if (kernel == "embedding_backward") return std::max<std::int64_t>(attributes(EmbeddingAttributes{}).rows, 1);
  if (has("max_pool2d") && !has("adaptive")) {
    const auto a = attributes(PoolAttributes{});
    return std::clamp<std::int64_t>(a.kernel[0] * a.kernel[1], 1, 127);
  }
  if (has("index") || has("gather") || has("scatter") || has("along") || has("adaptive")) {
    std::int64_t least = std::numeric_limits<std::int32_t>::max();
    for (const auto* list : {&call.inputs, &call.results}) {
      for (const TracedTensor& t : *list) {
        if (!t.defined || !is_floating(t.dtype)) continue;
        for (const std::int64_t n : t.sizes) least = std::min(least, n);
      }
    }
    return std::clamp<std::int64_t>(least, 1, 127);
  }
  return 2;
}

Values values_of(const TracedCall& call, std::size_t i, bool output) {
  const TracedTensor& t = output ? call.results[i] : call.inputs[i];
  Values values{.positive = output, .bound = integer_bound(call), .list = {}};
  if (!call.site.standalone || output || t.sizes.numel() > 2) return values;
  const std::string_view kernel = call.kernel;
  if (kernel == "sgd_step" || kernel == "adam_step") {
    // The rate and whether rounding is stochastic; random state; whether to leave it out; the loss scale.
    if (i == 0) values.list = {1e-3, 0};
    if (i == 2) values.list = {0};
    if (i == 3) values.list = {1};
  } else if (kernel.starts_with("amp_")) {
    values.list = {i == 0 ? 1.0 : 0.0, 0};
  }
  return values;
}

// Tensors for a call; those that are one in it are one here.
class Operands {
 public:
  explicit Operands(const TracedCall& call) {
    const auto add = [&](const TracedTensor& t, const Values& values) {
      if (!t.defined) {
        tensors_.emplace_back();
        return;
      }
      if (t.address != 0) {
        for (const auto& [other, at] : made_) {
          if (other->address != t.address || other->sizes != t.sizes || other->strides != t.strides ||
              other->dtype != t.dtype)
            continue;
          tensors_.push_back(tensors_[at]);
          return;
        }
      }
      Tensor made = empty_strided(t.sizes, t.strides, {.dtype = t.dtype, .device = Device{}});
      fill(made, values);
      bytes_ += made.storage()->bytes();
      made_.emplace_back(&t, tensors_.size());
      tensors_.push_back(std::move(made));
    };
    for (std::size_t i = 0; i < call.inputs.size(); ++i) add(call.inputs[i], values_of(call, i, false));
    for (std::size_t i = 0; i < call.results.size(); ++i) add(call.results[i], values_of(call, i, true));
    made_.clear();
    for (const Tensor& t : tensors_) pointers_.push_back(&t);
    inputs_ = call.inputs.size();
  }
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;

  std::uint64_t bytes() const { return bytes_; }
  std::span<const Tensor* const> inputs() const { return std::span(pointers_).first(inputs_); }
  std::span<const Tensor* const> results() const { return std::span(pointers_).subspan(inputs_); }
  /// In a step most operands are new: nothing that a kernel derived from them is kept.
  void renew() const {
    for (const Tensor* t : inputs()) {
      if (!t->defined()) continue;
      t->storage()->bump_version();
      t->storage()->forget_derived();
    }
  }

 private:
  std::vector<Tensor> tensors_;
  std::vector<const Tensor*> pointers_;
  std::vector<std::pair<const TracedTensor*, std::size_t>> made_;
  std::size_t inputs_ = 0;
  std::uint64_t bytes_ = 0;
};

// Leaves nothing of other memory in the caches.
class Flush {
 public:
  explicit Flush(std::int64_t bytes) : n_(bytes / static_cast<std::int64_t>(sizeof(float))) {
    to_.resize(static_cast<std::size_t>(n_));
    from_.resize(static_cast<std::size_t>(n_));
  }
  void operator()() { run_stream(to_.data(), from_.data(), n_); }

 private:
  std::int64_t n_;
  std::vector<float> to_, from_;
};

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// FNV-1a.
void hash(std::uint64_t& state, std::string_view text) {
  for (const char c : text) state = (state ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
}

}  // namespace

std::string signature(const TracedCall& call) {
  std::string text = fmt::format("{} {}", call.kernel, name(call.dtype));
  std::map<std::tuple<std::uint64_t, DType>, int> places;
  for (const auto* list : {&call.inputs, &call.results}) {
    text += " |";
    for (const TracedTensor& t : *list) {
      if (!t.defined) {
        text += " none";
        continue;
      }
      text += fmt::format(" {}{}{}", name(t.dtype), t.sizes.str(), t.strides.str());
      if (t.address == 0) continue;
      const auto [at, fresh] = places.emplace(std::tuple(t.address, t.dtype), static_cast<int>(places.size()));
      if (!fresh) text += fmt::format("={}", at->second);
    }
  }
  // By field, since bytes between them may be anything. A standalone kernel's are rates and limits.
  if (const Op* op = call.site.standalone ? nullptr : find_op(call.site.op); op && !call.attributes.empty()) {
    const ObservedCall seen{.name = op->name,
                            .op = op,
                            .inputs = {},
                            .outputs = {},
                            .attributes = call.attributes.data(),
                            .device = Device{}};
    text += detail::attributes_of(seen).dump();
  }
  std::uint64_t state = 0xcbf29ce484222325u;
  hash(state, text);
  return fmt::format("{} {} {:016x}", call.kernel, name(call.dtype), state);
}

double time_call(const TracedCall& call, OperandPlace place) {
  const KernelTable* table = find_kernel_table(call.kernel);
  if (!call.repeatable || !table) fail<Error>("time_call: {} can't be run again by itself", call.site.op);
  const detail::Unrecorded unrecorded;
  // Aligned as structs are.
  std::vector<std::max_align_t> attributes((call.attributes.size() + sizeof(std::max_align_t) - 1) /
                                           sizeof(std::max_align_t));
  if (!call.attributes.empty()) std::memcpy(attributes.data(), call.attributes.data(), call.attributes.size());
  const auto run = [&](const Operands& operands) {
    operands.renew();
    const auto start = Clock::now();
    run_kernel(*table, call.site.op.c_str(), Device{}, call.dtype, operands.inputs(), operands.results(),
               attributes.empty() ? nullptr : attributes.data(), call.attributes.size());
    return std::chrono::duration<double>(Clock::now() - start).count();
  };

  std::vector<std::unique_ptr<Operands>> sets;
  sets.push_back(std::make_unique<Operands>(call));
  std::optional<Flush> flush;
  if (place != OperandPlace::inner) {
    const std::int64_t cache = place == OperandPlace::memory ? last_cache_bytes() : inner_cache_bytes();
    const auto needed = 2 * static_cast<std::uint64_t>(cache);
    const std::uint64_t each = std::max<std::uint64_t>(sets[0]->bytes(), 1), count = (needed + each - 1) / each;
    if (count > kMostSets) {
      flush.emplace(cache);
    } else {
      while (sets.size() < count) sets.push_back(std::make_unique<Operands>(call));
    }
  }
  double first = 0;
  for (const auto& set : sets) first = run(*set);  // weights are reordered, blocks chosen, memory taken
  if (sets.size() == 1 && first < kEnough) run(*sets[0]);
  std::vector<double> seconds;
  double all = 0;
  for (std::size_t i = 0; seconds.size() < kMostRuns; ++i) {
    if (seconds.size() >= kLeastRuns && all > kEnough) break;
    if (seconds.size() >= 3 && all > kTooLong) break;
    if (flush) (*flush)();
    if (flush && seconds.size() >= 11) break;  // most of the time goes into the flushes
    seconds.push_back(run(*sets[i % sets.size()]));
    all += seconds.back();
  }
  return median(seconds);
}

double time_of_calling() {
  constexpr int kCalls = 64, kTimes = 21;
  Tensor x = full({16}, 1);
  x.requires_grad_();
  const auto chain = [&] {
    Tensor y = x;
    for (int i = 0; i < kCalls; ++i) y = y * 1.0;
    return grad({y}, {x}, {.grad_outputs = {x.detach()}});
  };
  chain();
  CallTrace trace;
  chain();
  double kernels = 0, calls = 0;
  std::map<std::string, double> known;
  for (const TracedCall& call : trace.calls()) {
    ++calls;
    if (!call.repeatable) continue;
    const auto [at, fresh] = known.emplace(signature(call), 0);
    if (fresh) at->second = time_call(call, OperandPlace::inner);
    kernels += at->second;
  }
  std::vector<double> seconds;
  for (int i = 0; i < kTimes; ++i) {
    const auto start = Clock::now();
    chain();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return std::max(0.0, median(seconds) - kernels) / std::max(calls, 1.0);
}

}  // namespace halfstep::debug
