// SPDX-License-Identifier: Apache-2.0
// A decoder-only transformer: Radford et al., Language Models are Unsupervised Multitask Learners (GPT-2), 2019, with
// the names of its published state dict.
#pragma once

#include "halfstep/nn/activation.h"
#include "halfstep/nn/container.h"
#include "halfstep/nn/embedding.h"
#include "halfstep/nn/linear.h"
#include "halfstep/nn/module.h"
#include "halfstep/nn/norm.h"

namespace halfstep::models {

/// Options of GPT. The defaults are those of the small GPT-2, with 124 million parameters.
struct GPTOptions {
  std::int64_t vocabulary = 50257;  ///< tokens: ids go from 0 to vocabulary - 1
  std::int64_t context = 1024;      ///< most tokens of a sequence
  std::int64_t layers = 12;         ///< blocks
  std::int64_t heads = 12;          ///< of attention; divides `width`
  std::int64_t width = 768;         ///< numbers of a token between blocks
  double dropout = 0.1;             ///< after the embeddings, of attention weights, and at the end of each branch
  bool bias = true;                 ///< of the linear layers; norms always have theirs
};

/// Causal self-attention of several heads: [N, T, width] to [N, T, width].
class HS_API GPTAttention : public nn::Module<GPTAttention> {
 public:
  explicit GPTAttention(const GPTOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "GPTAttention"; }
  bool depends_on_mode() const override { return true; }

  GPTOptions options;  ///< as given
  nn::Linear c_attn;   ///< query, key and value in one product: [3 width, width]
  nn::Linear c_proj;
  nn::Dropout resid_dropout;
};

/// Two linear layers with four times the width between them, and GELU in its tanh form: [N, T, width] to the same.
class HS_API GPTFeedForward : public nn::Module<GPTFeedForward> {
 public:
  explicit GPTFeedForward(const GPTOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "GPTFeedForward"; }

  nn::Linear c_fc;  ///< [4 width, width]
  nn::Linear c_proj;
  nn::Dropout dropout;
};

/// Attention and feed-forward layers, each after a layer norm and added to its input.
class HS_API GPTBlock : public nn::Module<GPTBlock> {
 public:
  explicit GPTBlock(const GPTOptions& options);
  Tensor forward(const Tensor& input) const;
  std::string kind() const override { return "GPTBlock"; }

  nn::LayerNorm ln_1;
  GPTAttention attn;
  nn::LayerNorm ln_2;
  GPTFeedForward mlp;
};

/// A language model: token ids [N, T] (i64 or i32, T up to `context`) to logits [N, T, vocabulary] of the next token of
/// each place. The logits' matrix is that of the token embedding. Matrices start normal with standard deviation 0.02,
/// those at the end of a branch with 0.02 / sqrt(2 layers), biases at 0, as GPT-2's. Linear layers have PyTorch's
/// layout, [out, in]; the published files of GPT-2 have theirs transposed. Throws Error for invalid options, ShapeError
/// for ids of another form.
class HS_API GPT : public nn::Module<GPT> {
 public:
  explicit GPT(const GPTOptions& options = {});
  Tensor forward(const Tensor& ids) const;
  std::string kind() const override { return "GPT"; }

  GPTOptions options;          ///< as constructed
  nn::Embedding wte;           ///< of tokens: [vocabulary, width]
  nn::Embedding wpe;           ///< of places: [context, width]
  nn::Dropout drop;            ///< of their sum
  nn::ModuleList<GPTBlock> h;  ///< the blocks
  nn::LayerNorm ln_f;          ///< before the logits
};

}  // namespace halfstep::models
