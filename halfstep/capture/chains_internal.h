// SPDX-License-Identifier: Apache-2.0
// Internal: elementwise calls of a recorded step that run block by block, all of them on one block before the next, so
// that what one writes is in the cache when the next reads it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace halfstep::detail {

/// What a call of a chain reads or writes.
struct ChainOperand {
  enum class Kind : std::uint8_t {
    elements,  ///< as many as the chain has, dense
    number,    ///< one, for all of them
    state,     ///< of a stream of random numbers
  };
  std::size_t view;
  Kind kind = Kind::elements;
  std::int64_t size = 0;  ///< of an element, in bytes
  /// Where its block lies in the memory of a thread, since nobody else reads it; -1: each in the view's memory.
  std::ptrdiff_t kept = -1;
};

struct ChainCall {
  std::size_t step;
  std::vector<ChainOperand> operands;  ///< the inputs, then the output
};

/// Steps from `first` to `last`, excluded: kernels of the CPU on dense tensors with the same number of elements.
struct Chain {
  std::size_t first, last;
  std::int64_t elements;
  std::int64_t block;  ///< elements that all calls work on before the next ones
  std::vector<ChainCall> calls;
  std::size_t kept_bytes = 0;    ///< of a thread, for what stays in the chain
  bool moves = false;            ///< it reads inputs of the step, which lie elsewhere in every replay
  std::size_t bytes_spared = 0;  ///< that don't go to memory and back
};

}  // namespace halfstep::detail
