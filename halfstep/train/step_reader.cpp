// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "halfstep/autograd/grad_mode.h"
#include "halfstep/ops/copy.h"
#include "halfstep/ops/create.h"
#include "halfstep/train/step_reader_internal.h"

namespace halfstep::training {
namespace {

// The values of a step in the order of Pending::numbers.
std::vector<Tensor> in_order(const StepValues& values) {
  std::vector<Tensor> list = values.losses;
  list.push_back(values.overflow);
  list.push_back(values.scale);
  for (const NamedTensor& part : values.parts) list.push_back(part.tensor);
  return list;
}

}  // namespace

void StepReader::fill(StepRecord& record, const Pending& kept, const double* numbers) {
  record.losses.assign(numbers, numbers + kept.losses);
  record.loss = 0;
  for (std::size_t i = 0; i < kept.losses; ++i) record.loss += kept.weights[i] * record.losses[i];
  const double* next = numbers + kept.losses;
  record.skipped = *next++ != 0;
  record.scale = *next++;
  for (const std::string& part : kept.parts) record.parts[part] = *next++;
  for (const auto& count : kept.count_later) count(record.parts);
  if (!record.skipped || !kept.flags.defined()) return;
  // Overflows are rare: one more read is no loss then.
  const auto flags = kept.flags.to_vector<float>();
  const auto first = std::find_if(flags.begin(), flags.end(), [](float flag) { return flag != 0; });
  if (first != flags.end() && kept.names) {
    record.overflow = (*kept.names)[static_cast<std::size_t>(first - flags.begin())];
  }
}

void StepReader::add(const StepValues& values, StepRecord record) {
  const NoGrad no_grad;
  Pending kept{.place = records_.size(),
               .losses = values.losses.size(),
               .weights = values.weights,
               .parts = {},
               .flags = values.overflow_flags,
               .names = values.gradient_names,
               .count_later = values.count_later};
  for (const NamedTensor& part : values.parts) kept.parts.push_back(part.name);
  const std::vector<Tensor> list = in_order(values);
  const Device device = values.losses[0].device();
  records_.push_back(std::move(record));
  if (device.is_cpu()) {
    std::vector<double> numbers;
    for (const Tensor& t : list) numbers.push_back(t.item<double>());
    fill(records_.back(), kept, numbers.data());
    return;
  }
  // f32 holds all of them but the losses of a float64 network: scales are f32 already, and counts stay below 2^24.
  const DType dtype = accumulate_dtype(values.losses[0].dtype());
  const auto width = static_cast<std::int64_t>(list.size());
  constexpr std::int64_t kRows = 128;
  const bool fits = ring_.defined() && ring_.device() == device && ring_.dtype() == dtype && ring_.size(1) == width;
  if (!fits || static_cast<std::int64_t>(pending_.size()) == kRows) read();
  if (!fits) ring_ = empty({kRows, width}, {.dtype = dtype, .device = device});
  const auto row = static_cast<std::int64_t>(pending_.size());
  for (std::int64_t i = 0; i < width; ++i) {
    Tensor place = ring_.narrow(0, row, 1).narrow(1, i, 1);
    place.copy_(list[static_cast<std::size_t>(i)].reshape({1, 1}));
  }
  pending_.push_back(std::move(kept));
}

void StepReader::read() {
  if (pending_.empty()) return;
  const NoGrad no_grad;
  const auto rows = static_cast<std::int64_t>(pending_.size()), width = ring_.size(1);
  const std::vector<double> numbers = ring_.narrow(0, 0, rows).to_vector<double>();
  for (std::int64_t i = 0; i < rows; ++i) {
    const Pending& kept = pending_[static_cast<std::size_t>(i)];
    fill(records_[kept.place], kept, numbers.data() + i * width);
  }
  pending_.clear();
}

std::vector<StepRecord> StepReader::take() {
  read();
  return std::exchange(records_, {});
}

}  // namespace halfstep::training
