// SPDX-License-Identifier: Apache-2.0
// What the machine can do at most, by loops that do nothing else: float32 multiply-adds in registers, and a stream that
// reads two arrays and writes one, once in the caches and once in memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "benchmarks/server/machine.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstddef>

HWY_BEFORE_NAMESPACE();
namespace halfstep::bench {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// As many independent sums as hide the latency of a multiply-add on two units.
constexpr int kSums = 12;

/// `rounds` times kSums vectors of multiply-adds; returns their number of operations, and a result that must be used.
double multiply_add(std::size_t rounds, float* result) {
  const hn::ScalableTag<float> d;
  const auto factor = hn::Set(d, 0.999f), term = hn::Set(d, 1e-3f);
  auto s0 = hn::Set(d, 0.0f), s1 = hn::Set(d, 0.1f), s2 = hn::Set(d, 0.2f), s3 = hn::Set(d, 0.3f),
       s4 = hn::Set(d, 0.4f), s5 = hn::Set(d, 0.5f), s6 = hn::Set(d, 0.6f), s7 = hn::Set(d, 0.7f),
       s8 = hn::Set(d, 0.8f), s9 = hn::Set(d, 0.9f), s10 = hn::Set(d, 1.0f), s11 = hn::Set(d, 1.1f);
  for (std::size_t i = 0; i < rounds; ++i) {
    s0 = hn::MulAdd(s0, factor, term), s1 = hn::MulAdd(s1, factor, term), s2 = hn::MulAdd(s2, factor, term);
    s3 = hn::MulAdd(s3, factor, term), s4 = hn::MulAdd(s4, factor, term), s5 = hn::MulAdd(s5, factor, term);
    s6 = hn::MulAdd(s6, factor, term), s7 = hn::MulAdd(s7, factor, term), s8 = hn::MulAdd(s8, factor, term);
    s9 = hn::MulAdd(s9, factor, term), s10 = hn::MulAdd(s10, factor, term), s11 = hn::MulAdd(s11, factor, term);
  }
  const auto sum =
      hn::Add(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)),
              hn::Add(hn::Add(hn::Add(s4, s5), hn::Add(s6, s7)), hn::Add(hn::Add(s8, s9), hn::Add(s10, s11))));
  *result = hn::GetLane(sum);
  return 2.0 * kSums * static_cast<double>(rounds * hn::Lanes(d));
}

/// a[i] += factor * b[i]: what an optimizer does to memory.
void stream(float* HWY_RESTRICT a, const float* HWY_RESTRICT b, std::size_t n, float factor) {
  const hn::ScalableTag<float> d;
  const auto f = hn::Set(d, factor);
  const std::size_t lanes = hn::Lanes(d);
  for (std::size_t i = 0; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, b + i), f, hn::LoadU(d, a + i)), d, a + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halfstep::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "benchmarks/server/server.h"
#include "halfstep/ops/create.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::bench {
namespace {

HWY_EXPORT(multiply_add);
HWY_EXPORT(stream);

constexpr std::size_t kRounds = 200'000;

void multiply_add_everywhere() {
  parallel_for(num_threads(), 1, [](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      float result;
      HWY_DYNAMIC_DISPATCH(multiply_add)(kRounds, &result);
      volatile float used = result;
      (void)used;
    }
  });
}

Prepared prepare_stream(std::int64_t bytes) {
  const std::int64_t n = bytes / 2 / 4;
  const Tensor a = full({n}, 1), b = full({n}, 1);
  return {[a, b, n] {
    float* to = a.data<float>();
    const float* from = b.data<float>();
    parallel_for(n, 1 << 15, [=](std::int64_t begin, std::int64_t end) {
      HWY_DYNAMIC_DISPATCH(stream)(to + begin, from + begin, static_cast<std::size_t>(end - begin), 1e-6f);
    });
  }};
}

}  // namespace

void add_machine_cases(std::vector<Case>& cases) {
  float unused;
  const double operations = HWY_DYNAMIC_DISPATCH(multiply_add)(1, &unused) * kRounds * num_threads();
  cases.push_back({"machine/multiply_add/f32", [] { return Prepared{multiply_add_everywhere}; }, operations});
  for (const std::int64_t megabytes : {8, 512}) {
    // Two arrays of half the size each are read, one of them is written: three halves.
    cases.push_back({fmt::format("machine/stream/{}MB", megabytes),
                     [megabytes] { return prepare_stream(megabytes * 1'000'000); }, 0,
                     1.5 * static_cast<double>(megabytes) * 1e6});
  }
}

}  // namespace halfstep::bench
#endif
