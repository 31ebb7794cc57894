// SPDX-License-Identifier: Apache-2.0
#include "halfstep/backends/cpu/conv_weight_sums.h"

#include <algorithm>
#include <atomic>

#include "halfstep/backends/cpu/conv_images.h"
#include "halfstep/backends/cpu/round_up.h"
#include "halfstep/backends/cpu/row_block.h"
#include "halfstep/backends/cpu/split_block.h"
#include "halfstep/runtime/parallel.h"

namespace halfstep::cpu {
namespace {

constexpr std::int64_t kSumsOfAJob = 16384;

std::int64_t columns_of(const ConvGeometry& g) { return g.kh * g.kw * g.c; }
std::int64_t filters_of_a_job(const ConvGeometry& g) { return std::max<std::int64_t>(1, kSumsOfAJob / columns_of(g)); }
// The sums of one filter, whose first ones are at `at`, to [KH KW C].
void add_terms(const WeightSums& from, const float* at, float* to) {
  for (std::int64_t t = 0; t < from.taps; ++t, at += from.tap) {
    const float* run = at;
    for (std::int64_t c = 0; c < from.channels; c += from.run, run += from.next_run) {
      const std::int64_t n = std::min(from.run, from.channels - c);
      std::copy_n(run, n, to);
      for (std::int64_t s = 1; s < from.terms; ++s) {
        const float* const term = run + s * from.all;
        for (std::int64_t i = 0; i < n; ++i) to[i] += term[i];
      }
      to += n;
    }
  }
}

std::int64_t jobs_of(const ConvGeometry& g) { return divide_up(g.o, filters_of_a_job(g)); }

}  // namespace

std::int64_t weight_line_floats(const ConvGeometry& g) { return num_workers(jobs_of(g)) * 2 * columns_of(g); }

bool write_weight(const ConvGeometry& g, const WeightSums& from, float* lines, TensorView& w) {
  const std::int64_t columns = columns_of(g), window = g.kh * g.kw;
  const std::int64_t jobs = jobs_of(g), each = filters_of_a_job(g);
  const bool in_order = channels_last(w), dense = row_major(w),
             as_it_is = from.terms == 1 && from.run >= from.channels && (from.taps == 1 || from.tap == from.channels);
  std::atomic<bool> all_finite{true};
  parallel_jobs(jobs, num_workers(jobs), [&](std::int64_t job, std::int64_t worker) {
    float* const added = lines + worker * 2 * columns;
    float* const turned = added + columns;
    for (std::int64_t o = job * each; o < std::min(g.o, (job + 1) * each); ++o) {
      const float* line = from.sums + o * from.filter;
      if (!as_it_is) {
        add_terms(from, line, added);
        line = added;
      }
      if (!copy_finite<float>({line, kSplitGroup, 1, columns}, nullptr, 0, false))
        all_finite.store(false, std::memory_order_relaxed);
      if (in_order) {
        write_row(w, o * columns, 1, columns, line);
        continue;
      }
      // To [C, KH, KW].
      for (std::int64_t c = 0; c < g.c; ++c) {
        for (std::int64_t t = 0; t < window; ++t) turned[c * window + t] = line[t * g.c + c];
      }
      if (dense) {
        write_row(w, o * columns, 1, columns, turned);
        continue;
      }
      for (std::int64_t c = 0; c < g.c; ++c) {
        for (std::int64_t k = 0; k < g.kh; ++k) {
          write_row(w, o * w.strides[0] + c * w.strides[1] + k * w.strides[2], w.strides[3], g.kw,
                    turned + (c * g.kh + k) * g.kw);
        }
      }
    }
  });
  return all_finite;
}

}  // namespace halfstep::cpu
