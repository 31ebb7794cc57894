# SPDX-License-Identifier: Apache-2.0
"""Medians, ratios taken in turns, and physical limits."""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The median of the ratios of all turns, with the smallest and the largest."""

    median: float
    low: float
    high: float

    def inverse(self) -> Ratio:
        return Ratio(1 / self.median, 1 / self.high, 1 / self.low)


def ratio_in_turns(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio | None:
    """Each turn's numerator over the same turn's denominator; None where no turn has both.

    Machines drift by tens of percent within minutes, so only times taken right after each other are compared: the ratio
    of two medians would mix the machine of one minute with that of another.
    """
    ratios = [a / b for a, b in zip(numerator, denominator) if a > 0 and b > 0]
    if not ratios:
        return None
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the machine can do at most, with the threads of the run: a second, and bytes a second on two sets of data."""

    operations: float
    cache_bytes: float
    memory_bytes: float
    cache_set: float = 32e6  # sets that move more than this are taken to come from memory

    def milliseconds(self, operations: float, moved: float) -> float | None:
        """The least time for so many operations and so many bytes moved; None for neither."""
        bandwidth = self.cache_bytes if moved <= self.cache_set else self.memory_bytes
        compute = operations / self.operations if self.operations > 0 else 0.0
        memory = moved / bandwidth if bandwidth > 0 else 0.0
        limit = max(compute, memory) * 1e3
        return limit if limit > 0 else None
