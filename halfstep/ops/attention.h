// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "halfstep/core/tensor.h"

namespace halfstep {

/// Options of scaled_dot_product_attention.
struct AttentionOptions {
  /// Broadcasts to [..., L, S]. Bool: true takes part. Floating: added to the scores. Undefined: none.
  Tensor mask = {};
  double dropout_p = 0;              ///< probability that a weight is dropped; applied whenever it isn't 0
  bool is_causal = false;            ///< query i attends to keys 0 to i; excludes a mask
  std::optional<double> scale = {};  ///< of the scores; 1 / sqrt(E) by default
  bool enable_gqa = false;           ///< each head of key and value serves several neighbouring heads of the query
};

/// softmax(query key^T * scale + mask) value: [..., L, E], [..., S, E] and [..., S, Ev] give [..., L, Ev]. Leading
/// dimensions broadcast; with `enable_gqa` the third from the end may be smaller in key and value, where it divides the
/// query's. A query that attends to no key gives zeros. Scores, softmax and sums are float32 (float64 for f64) and
/// rounded once. Neither the scores nor the weights are kept: the backward pass recomputes them, a block of queries at
/// a time, from query, key, value and one number per query. Dropout uses the default generator, as in dropout().
///
/// Under autocast a floating-point mask is cast to 16 bits too, where -1e9 is an infinity; a bool mask expresses the
/// same and is smaller. Throws ShapeError and DTypeError for tensors that don't fit, Error for a mask together with
/// `is_causal` and for a probability outside [0, 1]. Semantics: torch.nn.functional.scaled_dot_product_attention.
HS_API Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const AttentionOptions& options = {});

}  // namespace halfstep
