// SPDX-License-Identifier: Apache-2.0
// Internal: which loss of two tensors a kernel computes (PairLossAttributes::kind).
#pragma once

#include <cstdint>

namespace halfstep {

/// Losses of two tensors of one shape.
enum class PairLoss : std::int32_t { mse, l1, smooth_l1, huber, kl_div, bce_with_logits, bce };

}  // namespace halfstep
