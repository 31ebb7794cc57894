// SPDX-License-Identifier: Apache-2.0
// How long a traced call takes on this machine, by running its kernel on other operands of the same kind.
#pragma once

#include <string>

#include "halfstep/debug/call_trace.h"

namespace halfstep::debug {

/// Where the operands of a call lie when it begins.
enum class OperandPlace : std::uint8_t {
  inner,   ///< in the processors' own caches, as far as they fit
  cache,   ///< in the last cache, and in none before it
  memory,  ///< in no cache
};

/// Names a kernel call of the CPU by what its time depends on: kernel, dtypes, sizes and strides of all operands, which
/// of them are one tensor, and the attributes of an op. Two calls of one name take the same time. A short text: the
/// kernel, its dtype and a hash.
HS_API std::string signature(const TracedCall& call);

/// Seconds of the call's kernel on the CPU: the median of a few runs on operands of the same sizes, strides and dtypes
/// with random values (places of indices within their range, flags that say a step is to be made). In the last cache or
/// in memory means that runs take turns with more operands than the caches before it hold. Changes no tensor but its
/// own. Throws Error for a call that can't be repeated (TracedCall::repeatable), and what the kernel throws.
HS_API double time_call(const TracedCall& call, OperandPlace place);

/// Seconds that a call costs beside its kernel in a step that isn't replayed: shape rule, result, record and gradient
/// rule. The mean over a chain of tiny ops and its backward pass.
HS_API double time_of_calling();

}  // namespace halfstep::debug
