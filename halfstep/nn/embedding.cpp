// SPDX-License-Identifier: Apache-2.0
#include "halfstep/nn/embedding.h"

#include "halfstep/core/fail.h"
#include "halfstep/nn/given_internal.h"
#include "halfstep/nn/init.h"
#include "halfstep/ops/index.h"

namespace halfstep::nn {
namespace {

Tensor initial_weight(const EmbeddingOptions& o) {
  check_given(o.num, "Embedding", "num", ".num = 1000, .dim = 64");
  check_given(o.dim, "Embedding", "dim", ".num = 1000, .dim = 64");
  if (o.num < 0 || o.dim < 0) {
    fail<Error>("Embedding: expected at least 0 rows and columns, got {} and {}", o.num, o.dim);
  }
  Tensor weight = init::normal_(empty({o.num, o.dim}, {.dtype = o.dtype}));
  if (o.padding_idx) {
    if (*o.padding_idx < -o.num || *o.padding_idx >= o.num) {
      fail<Error>("Embedding: expected padding_idx to be one of {} rows, got {}", o.num, *o.padding_idx);
    }
    weight.select(0, *o.padding_idx).zero_();
  }
  return weight;
}

}  // namespace

Embedding::Embedding(const EmbeddingOptions& o) : options(o), weight(parameter("weight", initial_weight(o))) {}

Tensor Embedding::forward(const Tensor& indices) const {
  return embedding(indices, weight, {.padding_idx = options.padding_idx});
}

std::string Embedding::describe() const {
  std::string text = fmt::format("{}, {}", options.num, options.dim);
  return options.padding_idx ? text + fmt::format(", padding_idx={}", *options.padding_idx) : text;
}

}  // namespace halfstep::nn
