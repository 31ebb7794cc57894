// SPDX-License-Identifier: Apache-2.0
#include "halfstep/models/gpt.h"

#include <cmath>

#include "halfstep/core/fail.h"
#include "halfstep/nn/init.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/arithmetic.h"
#include "halfstep/ops/attention.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/matmul.h"
#include "halfstep/ops/view.h"

namespace halfstep::models {
namespace {

GPTOptions checked(const GPTOptions& o) {
  if (o.vocabulary < 1 || o.context < 1 || o.layers < 1 || o.heads < 1 || o.width < 1 || o.width % o.heads != 0) {
    fail<Error>(
        "GPT: expected at least 1 token, place, block, head and number of a token, and a width that the heads divide, "
        "got .vocabulary {}, .context {}, .layers {}, .heads {} and .width {}",
        o.vocabulary, o.context, o.layers, o.heads, o.width);
  }
  return o;
}

nn::ModuleList<GPTBlock> blocks(const GPTOptions& o) {
  nn::ModuleList<GPTBlock> result;
  for (std::int64_t i = 0; i < o.layers; ++i) result.push_back(GPTBlock{o});
  return result;
}

}  // namespace

GPTAttention::GPTAttention(const GPTOptions& o)
    : options(checked(o)),
      c_attn(child("c_attn", nn::Linear{{.in = o.width, .out = 3 * o.width, .bias = o.bias}})),
      c_proj(child("c_proj", nn::Linear{{.in = o.width, .out = o.width, .bias = o.bias}})),
      resid_dropout(child("resid_dropout", nn::Dropout{{.p = o.dropout}})) {}

Tensor GPTAttention::forward(const Tensor& input) const {
  // [N, T, 3, heads, E], of which query, key and value are views [N, heads, T, E].
  const Tensor all = unflatten(c_attn(input), 2, {3, options.heads, options.width / options.heads});
  const auto part = [&](std::int64_t i) { return transpose(select(all, 2, i), 1, 2); };
  const double p = is_training() ? options.dropout : 0;
  const Tensor heads = scaled_dot_product_attention(part(0), part(1), part(2), {.dropout_p = p, .is_causal = true});
  return resid_dropout(c_proj(flatten(transpose(heads, 1, 2), 2)));
}

GPTFeedForward::GPTFeedForward(const GPTOptions& o)
    : c_fc(child("c_fc", nn::Linear{{.in = o.width, .out = 4 * o.width, .bias = o.bias}})),
      c_proj(child("c_proj", nn::Linear{{.in = 4 * o.width, .out = o.width, .bias = o.bias}})),
      dropout(child("dropout", nn::Dropout{{.p = o.dropout}})) {}

Tensor GPTFeedForward::forward(const Tensor& input) const { return dropout(c_proj(gelu(c_fc(input), GeluForm::tanh))); }

GPTBlock::GPTBlock(const GPTOptions& o)
    : ln_1(child("ln_1", nn::LayerNorm{{.normalized_shape = {o.width}}})),
      attn(child("attn", GPTAttention{o})),
      ln_2(child("ln_2", nn::LayerNorm{{.normalized_shape = {o.width}}})),
      mlp(child("mlp", GPTFeedForward{o})) {}

Tensor GPTBlock::forward(const Tensor& input) const {
  const Tensor x = input + attn(ln_1(input));
  return x + mlp(ln_2(x));
}

GPT::GPT(const GPTOptions& o)
    : options(checked(o)),
      wte(child("wte", nn::Embedding{{.num = o.vocabulary, .dim = o.width}})),
      wpe(child("wpe", nn::Embedding{{.num = o.context, .dim = o.width}})),
      drop(child("drop", nn::Dropout{{.p = o.dropout}})),
      h(child("h", blocks(o))),
      ln_f(child("ln_f", nn::LayerNorm{{.normalized_shape = {o.width}}})) {
  for (const NamedTensor& p : parameters()) {
    if (p.tensor.dim() == 2) {
      const bool ends_branch = p.name.ends_with("c_proj.weight");
      nn::init::normal_(p.tensor, 0, ends_branch ? 0.02 / std::sqrt(2.0 * static_cast<double>(o.layers)) : 0.02);
    } else if (p.name.ends_with("bias")) {
      nn::init::zeros_(p.tensor);
    }
  }
}

Tensor GPT::forward(const Tensor& ids) const {
  if (ids.dim() != 2 || ids.size(1) > options.context) {
    fail<ShapeError>("GPT: expected ids [N, T] of at most {} tokens, got {}", options.context, ids.sizes().str());
  }
  const Tensor places = arange(0, ids.size(1), 1, {.dtype = i64, .device = ids.device()});
  Tensor x = drop(wte(ids) + wpe(places));
  for (const GPTBlock& block : h) x = block(x);
  return linear(ln_f(x), wte.weight);
}

}  // namespace halfstep::models
