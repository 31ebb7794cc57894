// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <string>

#include "halfstep/core/fail.h"
#include "halfstep/dist/bucket_tuner_internal.h"
#include "halfstep/ops/create.h"
#include "halfstep/runtime/log.h"

namespace halfstep::dist::detail {

BucketTuner::BucketTuner(std::int64_t bytes) {
  for (const double size : {1.0, 4.0, 16.0, 64.0, 256.0}) {
    sizes_.push_back(size);
    if (size * 0x1p20 >= static_cast<double>(bytes)) break;
  }
  seconds_.assign(sizes_.size(), std::numeric_limits<double>::infinity());
  at_ = sizes_.size();
}

std::optional<double> BucketTuner::passed(Clock::time_point now, ProcessGroup& group) {
  if (done_) return std::nullopt;
  const std::optional<Clock::time_point> before = std::exchange(last_, now);
  if (at_ == sizes_.size()) {
    at_ = 0;
    return sizes_[0];
  }
  // The first pass with new buckets has costs of its own.
  if (++passes_ > 1 && before) {
    seconds_[at_] = std::min(seconds_[at_], std::chrono::duration<double>(now - *before).count());
  }
  if (passes_ <= kPasses) return std::nullopt;
  passes_ = 0;
  if (++at_ < sizes_.size()) return sizes_[at_];
  done_ = true;
  const Tensor slowest = tensor(seconds_, {.dtype = f64, .device = Device{}});
  group.all_reduce(slowest, ReduceOp::max, "times of bucket sizes").wait();
  const auto all = slowest.to_vector<double>();
  const auto best = static_cast<std::size_t>(std::min_element(all.begin(), all.end()) - all.begin());
  if (group.rank() == 0) {
    std::string times;
    for (std::size_t i = 0; i < all.size(); ++i) {
      times += fmt::format("{}{:.3g} ms with {} MiB", i ? ", " : "", all[i] * 1e3, sizes_[i]);
    }
    log(LogLevel::info, fmt::format("data_parallel: buckets of {} MiB; steps took {}", sizes_[best], times));
  }
  return sizes_[best];
}

}  // namespace halfstep::dist::detail
