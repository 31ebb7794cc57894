// SPDX-License-Identifier: Apache-2.0
#include "halfstep/data/mixup.h"

#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "halfstep/core/fail.h"
#include "halfstep/core/float16.h"
#include "halfstep/core/write_internal.h"

namespace halfstep::data {
namespace {

void check_alpha(double alpha) {
  if (!(alpha > 0) || !std::isfinite(alpha)) fail<Error>("mixup: expected an alpha over 0, got {}", alpha);
}

void check_classes(std::int64_t classes) {
  if (classes < 1) fail<Error>("mixup: expected a number of classes, got {}", classes);
}

/// Gamma(a, 1): Marsaglia and Tsang, "A simple method for generating gamma variables", 2000; below 1 by a power of a
/// uniform number.
double gamma(double a, RandomStream& random) {
  if (a < 1) {
    const double boosted = gamma(a + 1, random);
    return boosted * std::pow(1 - random.uniform64(), 1 / a);
  }
  const double d = a - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  while (true) {
    const double x = random.normal();
    const double root = 1 + c * x;
    if (root <= 0) continue;
    const double v = root * root * root;
    const double u = 1 - random.uniform64();
    if (std::log(u) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v;
  }
}

template <class T>
void mix(const Tensor& input, const std::vector<std::int64_t>& partners, double lambda, Tensor& out) {
  const auto rows = static_cast<std::int64_t>(partners.size());
  const std::int64_t length = rows == 0 ? 0 : input.numel() / rows;
  const T* in = input.data<const T>();
  T* to = write_data<T>(out);
  const auto own = static_cast<float>(lambda), other = static_cast<float>(1 - lambda);
  for (const std::int64_t partner : partners) {
    const T* from = input.data<const T>() + partner * length;
    for (std::int64_t i = 0; i < length; ++i) {
      to[i] = static_cast<T>(own * static_cast<float>(in[i]) + other * static_cast<float>(from[i]));
    }
    in += length;
    to += length;
  }
}

}  // namespace

double beta(double a, RandomStream& random) {
  check_alpha(a);
  const double x = gamma(a, random), y = gamma(a, random);
  // Both may vanish when a is tiny; then one of the two has everything.
  return x + y > 0 ? x / (x + y) : (random.bernoulli(0.5) ? 1.0 : 0.0);
}

Mixed mixup(const Batch& batch, const MixupOptions& options, RandomStream& random) {
  check_alpha(options.alpha);
  const Tensor &input = batch.input, &target = batch.target;
  if (input.dim() < 1 || target.dim() != 1 || input.size(0) != target.size(0)) {
    fail<ShapeError>("mixup: expected input [N, ...] and labels [N], got {} and {}", input.sizes().str(),
                     target.sizes().str());
  }
  if (!input.device().is_cpu() || !target.device().is_cpu()) {
    fail<DeviceError>("mixup: expected a batch on the CPU, got {} and {}", input.device().str(), target.device().str());
  }
  if (target.dtype() != i64) fail<DTypeError>("mixup: expected labels of i64, got {}", name(target.dtype()));
  Mixed mixed;
  mixed.lambda = beta(options.alpha, random);
  const std::int64_t n = input.size(0);
  std::vector<std::int64_t> partners(static_cast<std::size_t>(n));
  std::iota(partners.begin(), partners.end(), std::int64_t{0});
  for (std::size_t i = 0; i + 1 < partners.size(); ++i) {
    std::swap(partners[i], partners[i + static_cast<std::size_t>(random.below(partners.size() - i))]);
  }
  // Rows lie one behind the other in either layout.
  const bool last = input.dim() == 4 && input.is_contiguous(MemoryFormat::channels_last);
  const Tensor rows = input.detach().contiguous(last ? MemoryFormat::channels_last : MemoryFormat::contiguous);
  mixed.input = empty_like(rows);
  if (input.dtype() == f32) {
    mix<float>(rows, partners, mixed.lambda, mixed.input);
  } else if (input.dtype() == f16) {
    mix<Half>(rows, partners, mixed.lambda, mixed.input);
  } else if (input.dtype() == bf16) {
    mix<BFloat16>(rows, partners, mixed.lambda, mixed.input);
  } else {
    fail<DTypeError>("mixup: expected an input of f32, f16 or bf16, got {}", name(input.dtype()));
  }
  mixed.target_a = target.detach().contiguous();
  mixed.target_b = empty({n}, {.dtype = i64, .device = Device{}});
  const std::int64_t* own = mixed.target_a.data<const std::int64_t>();
  std::int64_t* other = write_data<std::int64_t>(mixed.target_b);
  for (const std::int64_t partner : partners) *other++ = own[partner];
  return mixed;
}

Tensor soft_targets(const Tensor& target_a, const Tensor& target_b, double lambda, std::int64_t classes) {
  check_classes(classes);
  if (target_a.dim() != 1 || target_a.sizes() != target_b.sizes()) {
    fail<ShapeError>("soft_targets: expected two tensors [N], got {} and {}", target_a.sizes().str(),
                     target_b.sizes().str());
  }
  const std::int64_t n = target_a.size(0);
  Tensor soft = empty({n, classes}, {.dtype = f32, .device = Device{}});
  float* row = write_data<float>(soft);
  const Tensor both[2] = {target_a.contiguous(), target_b.contiguous()};
  const float shares[2] = {static_cast<float>(lambda), static_cast<float>(1 - lambda)};
  for (std::int64_t i = 0; i < n; ++i, row += classes) {
    std::fill(row, row + classes, 0.0F);
    for (int side = 0; side < 2; ++side) {
      const std::int64_t label = both[side].data<const std::int64_t>()[i];
      if (label < 0 || label >= classes) {
        fail<Error>("soft_targets: expected labels from 0 to {}, got {} at position {}", classes - 1, label, i);
      }
      row[label] += shares[side];
    }
  }
  return soft;
}

MixupDataset::MixupDataset(std::shared_ptr<const Dataset> dataset, const MixupOptions& options)
    : dataset_(std::move(dataset)), options_(options) {
  if (dataset_ == nullptr) fail<Error>("MixupDataset: expected a data set, got none");
  check_alpha(options.alpha);
  check_classes(options.classes);
}

Batch MixupDataset::batch(const BatchRequest& request) const {
  const Batch plain = dataset_->batch(request);
  if (!plain.more.empty()) {
    fail<Error>("MixupDataset: expected batches of an input and a target, got {} more tensors, which can't be mixed",
                plain.more.size());
  }
  constexpr std::uint64_t kPurpose = 0x6D6978757000;  // keeps these numbers apart from other uses of seed and epoch
  const std::uint64_t epoch = derive_seed(request.seed, static_cast<std::uint64_t>(request.epoch), kPurpose);
  const std::int64_t first = request.indices.empty() ? 0 : request.indices.front();
  RandomStream random(derive_seed(epoch, static_cast<std::uint64_t>(first)));
  const Mixed mixed = mixup(plain, options_, random);
  return {mixed.input, soft_targets(mixed.target_a, mixed.target_b, mixed.lambda, options_.classes)};
}

}  // namespace halfstep::data
