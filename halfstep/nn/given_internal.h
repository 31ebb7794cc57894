// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "halfstep/core/fail.h"
#include "halfstep/nn/module.h"

namespace halfstep::nn {

/// Throws Error unless the field of a module's options was given. `example` shows how.
inline void check_given(bool given, const char* kind, const char* field, const char* example) {
  if (!given) fail<Error>("{}: expected .{} to be given, as in {}{{{{{}}}}}", kind, field, kind, example);
}
inline void check_given(std::int64_t number, const char* kind, const char* field, const char* example) {
  check_given(number != kNotGiven, kind, field, example);
}
inline void check_given(const Shape& sizes, const char* kind, const char* field, const char* example) {
  check_given(!sizes.empty(), kind, field, example);
}
/// The options, of which `in` and `out` must be given.
template <class Options>
Options given_channels(const Options& o, const char* kind) {
  check_given(o.in, kind, "in", ".in = 32, .out = 64");
  check_given(o.out, kind, "out", ".in = 32, .out = 64");
  return o;
}

}  // namespace halfstep::nn
