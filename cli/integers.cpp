// SPDX-License-Identifier: Apache-2.0
#include "cli/integers.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>

#include "halfstep/core/text.h"
#include "halfstep/infer/session.h"
#include "halfstep/quant/quantization.h"
#include "halfstep/quant/weight_only.h"
#include "halfstep/runtime/machine.h"

namespace halfstep::cli {
namespace {

// Sessions by the sizes of a sample: rectangular evaluations of detectors have several.
class Sessions {
 public:
  Sessions(const training::Network& network, DType left) : network_(network), left_(left) {}

  std::vector<Tensor> operator()(const Tensor& input) {
    std::vector<Tensor> results = session_for(input).run(std::span<const Tensor>(&input, 1));
    for (Tensor& t : results) {
      if (is_low_precision(t.dtype())) t = t.to(f32);  // of a last layer that was left out
    }
    return results;
  }

 private:
  static constexpr std::size_t kMost = 64;  // each has the network's weights

  infer::Session session_for(const Tensor& input) {
    std::vector<std::int64_t> key(input.sizes().begin(), input.sizes().end());
    if (!key.empty()) key[0] = 0;
    const std::lock_guard lock(mutex_);
    const auto found = sessions_.find(key);
    if (found != sessions_.end()) return found->second;
    if (sessions_.size() >= kMost) sessions_.clear();
    const nn::TracedForward forward = [this](std::span<const Tensor> in) {
      return network_.outputs ? network_.outputs(in[0]) : std::vector<Tensor>{network_.forward(in[0])};
    };
    const infer::Session session(*network_.module, forward, {input}, {.dtype = left_, .int8 = true});
    return sessions_.emplace(std::move(key), session).first->second;
  }

  const training::Network network_;
  const DType left_;
  std::mutex mutex_;
  std::map<std::vector<std::int64_t>, infer::Session> sessions_;
};

}  // namespace

void add_int8(const Verb& verb, bool& int8) {
  verb.add_switch(kInt8Flag, int8,
                  "Compute in 8-bit integers: weights of `halfstep quantize`, or of a run with --qat; layers that were "
                  "left out of it in --amp: off, bf16 or f16");
}

DType left_dtype(const Loaded& loaded, const std::string& amp) {
  const auto parsed = [](const std::string& text) {
    const std::optional<DType> dtype = halfstep::parse_dtype(text);
    return dtype && is_low_precision(*dtype) ? dtype : std::nullopt;
  };
  if (amp == "off") return f32;
  if (!amp.empty()) {
    if (const auto dtype = parsed(amp)) return *dtype;
    throw UsageError(fmt::format("--amp: expected off, bf16 or f16 with {}, got '{}'", kInt8Flag, amp));
  }
  const auto saved = loaded.recipe.find(kLeftPrecision);
  if (saved == loaded.recipe.end()) return f32;
  const auto dtype = parsed(saved->second);
  if (!dtype) {
    throw IoError(
        fmt::format("{}: {}: expected bf16 or f16, got '{}'", shown_path(loaded.file), kLeftPrecision, saved->second));
  }
  return (dtype == bf16 ? machine().bf16_units : machine().f16_units) ? *dtype : f32;
}

std::string use_integers(Loaded& loaded, const std::string& amp) {
  if (!quant::weight_only_layers(*loaded.network.module).empty()) {
    throw UsageError(fmt::format(
        "{}: the weights of {} alone are integers, activations have no ranges; leave it out, or quantize without {}",
        kInt8Flag, shown_path(loaded.file), kWeightOnlyFlag));
  }
  const DType left = left_dtype(loaded, amp);
  const auto quantization = quant::quantization_of(*loaded.network.module);
  constexpr int kMostBits = 8;
  if (quantization && quantization->options.weight_bits > kMostBits) {
    throw UsageError(fmt::format("{}: expected weights of up to {} bits, got those of {}, of {}", kInt8Flag, kMostBits,
                                 shown_path(loaded.file), quantization->options.weight_bits));
  }
  if (!quantization) {
    throw UsageError(fmt::format(
        "{}: expected weights of a run with --qat or of `halfstep quantize`, got those of {}, which were not quantized",
        kInt8Flag, shown_path(loaded.file)));
  }
  const auto sessions = std::make_shared<Sessions>(loaded.network, left);
  const bool one = !loaded.network.outputs;  // of detectors, forward() is decoded results, which nobody evaluates
  loaded.network.outputs = [sessions](const Tensor& input) { return (*sessions)(input); };
  if (one) {
    loaded.network.forward = [sessions](const Tensor& input) { return (*sessions)(input).at(0); };
    loaded.classifier.forward = loaded.network.forward;
  }
  const char* const how = quantization->options.activation_bits <= kMostBits
                              ? ", in 8-bit integers"
                              : ", in integers with activations of 16 bits";
  if (left == f32 || quantization->left().empty()) return how;
  return fmt::format("{}, what was left out of them in {}", how, name(left));
}

}  // namespace halfstep::cli
