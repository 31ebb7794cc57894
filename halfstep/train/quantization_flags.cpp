// SPDX-License-Identifier: Apache-2.0
// The flags of quantization-aware training: one row each, see flag_table.cpp.
#include "halfstep/core/fail.h"
#include "halfstep/quant/observer.h"
#include "halfstep/train/flags.h"

namespace halfstep::training {
namespace {

std::vector<std::string> observer_names() {
  using quant::ObserverKind;
  std::vector<std::string> result;
  for (const ObserverKind kind : {ObserverKind::min_max, ObserverKind::moving_average, ObserverKind::histogram,
                                  ObserverKind::percentile, ObserverKind::entropy}) {
    result.emplace_back(quant::name(kind));
  }
  return result;
}

}  // namespace

std::vector<Flag> flags(QuantizationConfig& q) {
  const FlagRange bits = FlagRange::from_to(2, 16), epochs = FlagRange::at_least(0);
  const auto check_bits = [](const char* flag, const int& value) {
    return [flag, &value] {
      if (value > 8 && value < 16) fail<Error>("{}: expected 2 to 8, or 16, got {}", flag, value);
    };
  };
  std::vector<Flag> all = {{.names = "--qat",
                            .field = &q.on,
                            .help = "Train with the rounding of 8-bit integers: quantization-aware training",
                            .resume = FlagResume::recipe,
                            .text = [&q] { return std::string(q.is_on() ? "true" : "false"); }},
                           {.names = "--no-quant",
                            .field = &q.off,
                            .help = "Train without it, whatever --config says",
                            .kept = FlagKept::never}};
  std::vector<Flag> further = {
      {.names = "--quant-weight-bits",
       .field = &q.weight_bits,
       .help = "Bits of weights: 2 to 8, or 16",
       .range = bits,
       .check = check_bits("--quant-weight-bits", q.weight_bits)},
      {.names = "--quant-activation-bits",
       .field = &q.activation_bits,
       .help = "Bits of activations: 2 to 8, or 16",
       .range = bits,
       .check = check_bits("--quant-activation-bits", q.activation_bits)},
      {.names = "--quant-observer",
       .field = &q.observer,
       .help = "How ranges of activations are found",
       .choices = observer_names()},
      {.names = "--quant-symmetric", .field = &q.symmetric, .help = "Activations too have no zero point"},
      {.names = "--quant-reduce-range",
       .field = &q.reduce_range,
       .help = "Activations have a bit less, for processors without VNNI"},
      {.names = "--quant-learned", .field = &q.learned, .help = "Train the scales too (LSQ)"},
      {.names = "--quant-skip",
       .field = &q.skip,
       .help = "Modules that stay in floating point, by commas; * stands for any text",
       .value = "PATHS"},
      {.names = "--quant-no-first",
       .field = TurnsOff{&q.first},
       .help = "Leave the first convolution or linear layer in floating point"},
      {.names = "--quant-no-last", .field = TurnsOff{&q.last}, .help = "Leave the last one in floating point"},
      {.names = "--quant-freeze-ranges",
       .field = &q.freeze_ranges,
       .help = "Epochs after which the ranges of activations stay as they are; 0: never",
       .range = epochs},
      {.names = "--quant-freeze-norms",
       .field = &q.freeze_norms,
       .help = "Epochs after which batch norms use and keep their running statistics; 0: never",
       .range = epochs}};
  for (Flag& flag : further) {
    flag.resume = FlagResume::recipe;
    flag.kept = FlagKept::given;
    flag.needs = FlagNeeds{.flag = "--qat", .there = q.is_on()};
    flag.in_recipe = [&q] { return q.is_on(); };
    all.push_back(std::move(flag));
  }
  for (Flag& flag : all) flag.group = "Quantization";
  return all;
}

}  // namespace halfstep::training
