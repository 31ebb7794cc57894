// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <string>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/join.h"
#include "halfstep/ops/view.h"
#include "halfstep/runtime/queue.h"
#include "halfstep/train/merge_ranks_internal.h"
#include "halfstep/train/rank_lines_internal.h"

namespace halfstep::training {
namespace {

void merge_tensors(StepValues& values, const std::vector<std::int64_t>& own, const dist::DataParallelBase& parallel) {
  const NoGrad no_grad;
  const DType dtype = accumulate_dtype(values.losses[0].dtype());
  Tensor loss;
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (own[i] == 0) continue;  // whose loss may be anything
    const Tensor part = values.losses[i].to(dtype) * values.weights[i];
    loss = loss.defined() ? loss + part : part;
  }
  if (!loss.defined()) loss = zeros({}, {.dtype = dtype, .device = values.losses[0].device()});
  std::vector<Tensor> numbers{loss.reshape({1})};
  // The reduction is a mean: sums are those of the ranks, times their number.
  for (const NamedTensor& p : values.parts) {
    numbers.push_back(p.tensor.to(dtype).reshape({1}) * static_cast<double>(parallel.group().size()));
  }
  const Tensor all = cat(numbers, 0);
  parallel.mean_(all, "losses");
  values.losses = {all.select(0, 0)};
  values.weights = {1};
  for (std::size_t i = 0; i < values.parts.size(); ++i) {
    values.parts[i].tensor = all.select(0, static_cast<std::int64_t>(i) + 1);
  }
}

void merge_counts(StepValues& values, dist::ProcessGroup group, Device device) {
  if (values.count_later.empty()) return;  // on all ranks alike
  Queue::current(device).synchronize();    // copies to the host have arrived
  std::map<std::string, double> own, all;
  for (const auto& count : values.count_later) count(own);
  std::string text;
  for (const auto& [name, sum] : own) text += line_of(name, sum);
  for (const std::string& lines : group.all_gather_text(text)) add_lines(lines, all);
  values.count_later = {[all](std::map<std::string, double>& parts) {
    for (const auto& [name, sum] : all) parts[name] += sum;
  }};
}

}  // namespace

void merge_ranks(StepValues& values, const std::vector<std::int64_t>& own, const dist::DataParallelBase& parallel,
                 Device device) {
  merge_tensors(values, own, parallel);
  merge_counts(values, parallel.group(), device);
}

}  // namespace halfstep::training
