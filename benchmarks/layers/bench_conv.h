// SPDX-License-Identifier: Apache-2.0
// What bench_conv measures, and what its parts share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "benchmarks/server/layers.h"
#include "halfstep/core/tensor.h"

namespace halfstep::bench {

/// What is measured.
struct Network {
  const char *flag, *name;
  std::vector<ConvLayer> convolutions;
  std::vector<NormLayer> norms;
  std::int64_t pooled;  ///< channels of the first pooling, of images of 112x112; 0: there is none
  std::int64_t last;    ///< channels of the mean of images of 7x7
};
struct Options {
  const Network* network = nullptr;
  bool implementations = false;  // list what computes each layer instead of timing it
  std::string weight_by;         // time weight gradients by this path of our own beside the one that is chosen
  std::int64_t batch = 16;
  std::vector<DType> dtypes = {f32, bf16, f16};
  int turns = 5;
  int threads = 0;
  std::int64_t memory =
      0;  // about how many megabytes of operands a line goes through, so that the caches don't have them

  /// How many sets of operands, of so many bytes each, a part uses in turn.
  std::size_t sets(double bytes) const {
    return static_cast<std::size_t>(std::max(1.0, std::ceil(static_cast<double>(memory) * 1e6 / bytes)));
  }
};

double seconds_of(const std::function<void()>& run);
double median(std::vector<double> values);
/// Random, channels-last.
Tensor image(std::int64_t batch, std::int64_t channels, std::int64_t size, DType dtype);
std::string title(const ConvLayer& layer);

/// Which kernel computes each part of each convolution here.
void list_implementations(const Options& options, const char* network, const std::vector<ConvLayer>& layers);
/// Weight gradients by the path that is chosen and by another one, in turns.
void compare_weight_gradients(const Options& options);

}  // namespace halfstep::bench
