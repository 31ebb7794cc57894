// SPDX-License-Identifier: Apache-2.0
// MindSpore's ways to select what runs in 16 bits: by level, by lists, or module by module.
#pragma once

#include <concepts>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "halfstep/amp/autocast.h"
#include "halfstep/amp/module_precision.h"

namespace halfstep::amp {

/// How much of a network runs in 16 bits. Parameters stay float32 at every level: ops read their 16-bit copies, and the
/// optimizer updates the float32 values, which thus are the master weights.
enum class Level : std::uint8_t {
  O0,         ///< nothing
  O1,         ///< what is on the white list; all else in float32
  O2,         ///< all but what is on the black list: norms stay float32
  O3,         ///< everything
  automatic,  ///< op by op according to the policy table, like Autocast
};

/// `O0`, `O1`, `O2`, `O3`, `auto`.
HS_API const char* name(Level level);
/// The level of that name. Throws AmpError naming the choices.
HS_API Level parse_level(std::string_view text);

/// What runs in 16 bits at O1: kinds of modules (`Linear`) and ops (`matmul`), as in MindSpore. Returns a copy.
HS_API std::vector<std::string> white_list();
/// What stays float32 at O2: kinds of modules (`BatchNorm2d`) and their ops. MindSpore's list, and the other norms.
/// Returns a copy.
HS_API std::vector<std::string> black_list();

/// Options of custom_mixed_precision: entries are kinds of modules (`Linear`), paths of modules (`encoder.fc1`; `*`
/// matches one name of the path) or ops (`softmax`).
struct PrecisionLists {
  std::vector<std::string> white = {};  ///< runs in 16 bits; all else in float32
  std::vector<std::string> black = {};  ///< stays float32; without a white list all else runs in 16 bits
  DType dtype = f16;                    ///< f16 or bf16
};

namespace detail {
HS_API void apply_lists(const Castable& root, const PrecisionLists& lists);
[[noreturn]] HS_API void refuse_function(Level level);
}  // namespace detail

/// Type-erased auto_mixed_precision().
HS_API void set_level(const Castable& network, Level level, DType dtype);

/// Sets a network to a level, whatever region it is called in, and returns it (a handle on the same network). The
/// network's results are float32. Casts happen where a value is read in another dtype, so adjacent modules in 16 bits
/// need none, and norms on the black list read and write 16 bits directly: they compute in float32 internally, with the
/// same result as a pair of casts around them. Submodules whose dtype was set by to_float keep it; a dtype set on
/// `model` itself is removed. A second call replaces the first, which is logged, unless the level is O0, which removes
/// levels.
///
/// MindSpore's amp.auto_mixed_precision. Throws AmpError for a dtype other than f16 and bf16.
template <std::derived_from<Castable> M>
M auto_mixed_precision(const M& model, Level level, DType dtype = f16) {
  set_level(model, level, dtype);
  return model;
}

/// The same by name: `O0`, `O1`, `O2`, `O3` or `auto`. Throws AmpError for another.
template <std::derived_from<Castable> M>
M auto_mixed_precision(const M& model, std::string_view level, DType dtype = f16) {
  return auto_mixed_precision(model, parse_level(level), dtype);
}

/// For a function, which then runs in its own region. Throws AmpError for another level than `automatic`, since lists
/// apply to modules.
template <class F>
requires(!std::derived_from<std::remove_cvref_t<F>, Castable>) auto auto_mixed_precision(F function, Level level,
                                                                                         DType dtype = f16) {
  if (level != Level::automatic) detail::refuse_function(level);
  { const Autocast checked({.dtype = dtype}); }
  return [function = std::move(function), dtype](auto&&... args) -> decltype(auto) {
    const Autocast region({.dtype = dtype});
    return function(std::forward<decltype(args)>(args)...);
  };
}

/// Runs a network with custom lists: with a white list, its entries run in 16 bits and everything else in float32; with
/// a black list, everything except its entries runs in 16 bits; with both, the black list removes entries from the
/// white one. A path takes precedence over a kind. Returns the network, which returns float32.
///
/// MindSpore's amp.custom_mixed_precision, which takes kinds only. Throws AmpError if both lists are empty or
/// contradict each other about a module or op, for an entry that is neither a kind in the network, nor a path, nor an
/// op, and for a dtype other than f16 and bf16.
template <std::derived_from<Castable> M>
M custom_mixed_precision(const M& model, const PrecisionLists& lists) {
  detail::apply_lists(model, lists);
  return model;
}

}  // namespace halfstep::amp
