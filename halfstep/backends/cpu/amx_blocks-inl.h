// SPDX-License-Identifier: Apache-2.0
// The kernels of amx_tile.cpp, which includes this header once for each target, in a namespace of its own and with
// HALFSTEP_TILE_UNITS set to the target's attribute. So it has no include guard.

// The products of 16 steps. `from`: the first operand, with `row` bytes from one row of a tile to the next; `to`: the
// second one.
template <class Machine, int Rows, int Columns, TileParts Parts>
HALFSTEP_TILE_UNITS inline void multiply_steps(Machine& m, const TileProduct& p, const std::uint32_t* from,
                                               std::int64_t row, const std::uint32_t* to) {
  const auto first = [&](const std::uint32_t* at) HALFSTEP_TILE_UNITS {
    p.rows_once ? m.template load_once<4>(at, row) : m.template load<4>(at, row);
  };
  const auto second = [&](const std::uint32_t* at) HALFSTEP_TILE_UNITS {
    p.rows_once ? m.template load_once<5>(at + p.a_rows, row) : m.template load<5>(at + p.a_rows, row);
  };
  if constexpr (Parts == TileParts::one) {
    // Each product follows the loads of its operands.
    first(from);
    p.by_rows ? m.template load_once<6>(to, 2 * kLine) : m.template load<6>(to, 2 * kLine);
    m.template multiply<0, 4, 6>();
    if constexpr (Columns == 2) {
      const std::uint32_t* const next = to + kTileLanes;
      p.by_rows ? m.template load_once<7>(next, 2 * kLine) : m.template load<7>(next, 2 * kLine);
      m.template multiply<1, 4, 7>();
    }
    if constexpr (Rows == 2) {
      second(from);
      m.template multiply<2, 5, 6>();
    }
    if constexpr (Rows == 2 && Columns == 2) m.template multiply<3, 5, 7>();
  } else {
    const auto rows = [&](int part) HALFSTEP_TILE_UNITS {
      first(from + part * p.a_part);
      if constexpr (Rows == 2) second(from + part * p.a_part);
    };
    const auto columns = [&](int part) HALFSTEP_TILE_UNITS {
      m.template load<6>(to + part * p.b_part, 2 * kLine);
      if constexpr (Columns == 2) m.template load<7>(to + part * p.b_part + kTileLanes, 2 * kLine);
    };
    const auto multiply = [&]() HALFSTEP_TILE_UNITS {
      m.template multiply<0, 4, 6>();
      if constexpr (Columns == 2) m.template multiply<1, 4, 7>();
      if constexpr (Rows == 2) m.template multiply<2, 5, 6>();
      if constexpr (Rows == 2 && Columns == 2) m.template multiply<3, 5, 7>();
      if (p.beside != nullptr) p.beside(p.beside_state);
    };
    // The largest product comes last, so that small ones are added up first. This order needs the fewest loads.
    if constexpr (Parts == TileParts::three) {
      rows(2), columns(0), multiply();
      rows(1), multiply();
      columns(1), multiply();
      rows(0), multiply();
      columns(2), multiply();
      columns(0), multiply();
    } else if constexpr (Parts == TileParts::two) {
      rows(1), columns(1), multiply();
      columns(0), multiply();
      rows(0), columns(1), multiply();
      columns(0), multiply();
    } else {
      // This order needs two loads less than one with the largest product last. Float32 rounding is small beside the
      // product that is left out.
      rows(1), columns(0), multiply();
      rows(0), multiply();
      columns(1), multiply();
    }
  }
}

// meanwhile() is called after the products of each 16 steps.
template <class Machine, int Rows, int Columns, TileParts Parts, class Meanwhile>
HALFSTEP_TILE_UNITS inline void multiply_block(Machine& m, const TileProduct& p, const std::uint32_t* a,
                                               const std::uint32_t* b, float* c, Meanwhile&& meanwhile) {
  const std::int64_t ldc = p.ldc * 4;
  float* const below = c + kTileLanes * p.ldc;
  if (p.accumulate) {
    m.template load<0>(c, ldc);
    if constexpr (Columns == 2) m.template load<1>(c + kTileLanes, ldc);
    if constexpr (Rows == 2) m.template load<2>(below, ldc);
    if constexpr (Rows == 2 && Columns == 2) m.template load<3>(below + kTileLanes, ldc);
  } else {
    m.template zero<0>();
    if constexpr (Columns == 2) m.template zero<1>();
    if constexpr (Rows == 2) m.template zero<2>();
    if constexpr (Rows == 2 && Columns == 2) m.template zero<3>();
  }
  const std::int64_t row = 4 * p.a_row, run_steps = p.runs == nullptr ? p.steps : p.run_steps;
  const std::int64_t only = 0, *run = p.runs == nullptr ? &only : p.runs;
  const std::int64_t columns = p.b_steps != 0 ? p.b_steps : count_parts(Parts) * 2 * kTileLanes * kTileLanes;
  for (std::int64_t s = 0; s < p.steps; ++run) {
    const std::uint32_t* from = a + *run;
    for (const std::int64_t end = s + run_steps; s < end; s += kTileLanes, from += p.a_steps, b += columns) {
      multiply_steps<Machine, Rows, Columns, Parts>(m, p, from, row, b);
      m.keep_vectors_on();
      meanwhile();
    }
  }
  m.template store<0>(c, ldc);
  if constexpr (Columns == 2) m.template store<1>(c + kTileLanes, ldc);
  if constexpr (Rows == 2) m.template store<2>(below, ldc);
  if constexpr (Rows == 2 && Columns == 2) m.template store<3>(below + kTileLanes, ldc);
}

// f(row, column, shape) for all blocks with tiles of this shape, in the order that the product asks for.
template <class Machine, class F>
HALFSTEP_TILE_UNITS inline void for_blocks(Machine& m, const TileProduct& p, F&& f) {
  const BlockShape before = m.configured();  // not for each block: to find a thread's variable takes a call
  BlockShape configured = before;
  const auto block = [&](std::int64_t r, std::int64_t c) HALFSTEP_TILE_UNITS {
    const BlockShape shape = {std::min(kBlockSide, p.rows - r), std::min(kBlockSide, p.columns - c)};
    if (shape != configured) {
      configured = shape;
      m.configure(block_config(shape));
    }
    f(r, c, shape);
  };
  // Narrow blocks come last, so that tiles change their shape few times.
  const std::int64_t by_rows = p.by_rows ? p.columns / kBlockSide * kBlockSide : 0;
  for (std::int64_t r = 0; r < p.rows && by_rows > 0; r += kBlockSide) {
    for (std::int64_t c = 0; c < by_rows; c += kBlockSide) block(r, c);
  }
  for (std::int64_t c = by_rows; c < p.columns; c += kBlockSide) {
    for (std::int64_t r = 0; r < p.rows; r += kBlockSide) block(r, c);
  }
  if (configured != before) m.configured() = configured;
}
template <class Machine, TileParts Parts, class Meanwhile>
HALFSTEP_TILE_UNITS inline void multiply_shape(Machine& m, const TileProduct& p, std::int64_t r, std::int64_t c,
                                               const BlockShape& shape, float* to, const Meanwhile& meanwhile) {
  const std::uint32_t* const a = p.a + r / kTileLanes * p.a_rows;
  const std::uint32_t* const b = p.b + c * p.steps * count_parts(Parts);
  if (shape.rows > kTileLanes) {
    if (shape.columns > kTileLanes) {
      multiply_block<Machine, 2, 2, Parts>(m, p, a, b, to, meanwhile);
    } else {
      multiply_block<Machine, 2, 1, Parts>(m, p, a, b, to, meanwhile);
    }
  } else if (shape.columns > kTileLanes) {
    multiply_block<Machine, 1, 2, Parts>(m, p, a, b, to, meanwhile);
  } else {
    multiply_block<Machine, 1, 1, Parts>(m, p, a, b, to, meanwhile);
  }
}

template <class Machine, TileParts Parts>
HALFSTEP_TILE_UNITS void multiply_tiles_of(const TileProduct& p) {
  Machine m;
  for_blocks(m, p, [&](std::int64_t r, std::int64_t c, const BlockShape& shape) HALFSTEP_TILE_UNITS {
    multiply_shape<Machine, Parts>(m, p, r, c, shape, p.c + r * p.ldc + c, [] {});
  });
}

template <class Machine>
HALFSTEP_TILE_UNITS void multiply_tiles(const TileProduct& p) {
  switch (p.parts) {
    case TileParts::one:
      return multiply_tiles_of<Machine, TileParts::one>(p);
    case TileParts::two:
      return multiply_tiles_of<Machine, TileParts::two>(p);
    case TileParts::leading_two:
      return multiply_tiles_of<Machine, TileParts::leading_two>(p);
    case TileParts::three:
      return multiply_tiles_of<Machine, TileParts::three>(p);
  }
}

template <class Machine>
HALFSTEP_TILE_UNITS void multiply_tiles_rounded(const TileProduct& product, const TileResults& results) {
  Machine m;
  alignas(64) float sums[2][kBlockSide * kBlockSide];
  TileProduct p = product;
  p.ldc = kBlockSide;
  p.accumulate = false;
  const bool plain = results.bias == nullptr && !results.relu;
  const bool whole_lines =
      reinterpret_cast<std::uintptr_t>(results.to) % kLine == 0 && results.stride % kBlockSide == 0;
  // The block before, of `rows` rows, of which those from `end` on are still to be rounded.
  RoundedRows left;
  left.results = &results;
  left.stream = results.stream && whole_lines;
  std::int64_t rows = 0;
  const auto round_rows = [&](std::int64_t count) HALFSTEP_TILE_UNITS {
    if (left.end == rows) return;
    left.first = left.end;
    left.end = std::min(left.end + count, rows);
    Machine::round(left);
  };
  const std::int64_t times = p.steps / kTileLanes, each = divide_up(kBlockSide, times);
  const char* next = static_cast<const char*>(p.next);
  const char* const next_end = next + p.next_bytes;
  const std::int64_t lines = divide_up(divide_up(p.next_bytes, kLine),
                                       times * divide_up(p.rows, kBlockSide) * divide_up(p.columns, kBlockSide));
  const auto meanwhile = [&]() HALFSTEP_TILE_UNITS {
    round_rows(each);
    for (const char* const end = std::min(next_end, next + lines * kLine); next < end; next += kLine) {
      __builtin_prefetch(next, 0, 2);
    }
  };
  int current = 0;
  for_blocks(m, p, [&](std::int64_t r, std::int64_t c, const BlockShape& shape) HALFSTEP_TILE_UNITS {
    multiply_shape<Machine, TileParts::one>(m, p, r, c, shape, sums[current], meanwhile);
    left.sums = sums[current];
    left.bias = results.bias != nullptr ? results.bias + c : nullptr;
    left.first = left.end = 0;
    left.row = r, left.column = c, left.columns = shape.columns;
    left.plain = plain && shape.columns == kBlockSide;
    rows = shape.rows;
    current = 1 - current;
  });
  round_rows(rows);
}
