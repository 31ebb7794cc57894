// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "halfstep/nn/module.h"

namespace halfstep::nn {

/// Options of Embedding.
struct EmbeddingOptions {
  std::int64_t num = kNotGiven;                  ///< rows: indices go from 0 to num - 1
  std::int64_t dim = kNotGiven;                  ///< width of a row
  std::optional<std::int64_t> padding_idx = {};  ///< a row that starts at 0 and gets no gradient
  DType dtype = f32;
};

/// Rows of a table: indices [*] -> [*, dim]. Weight [num, dim] starts standard normal, as PyTorch's nn.Embedding.
class HS_API Embedding : public Module<Embedding> {
 public:
  explicit Embedding(const EmbeddingOptions& options);
  Tensor forward(const Tensor& indices) const;
  std::string kind() const override { return "Embedding"; }
  std::string describe() const override;

  EmbeddingOptions options;  ///< as given
  Parameter weight;          ///< [num, dim]
};

}  // namespace halfstep::nn
