# SPDX-License-Identifier: Apache-2.0
"""Rows measured in turns: us, the first peer, the second, us again, ..."""
from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping

from harness import machine
from harness.peer import Crowd, Peer, PeerError
from harness.plan import Contestant, Row
from harness.stats import Limits
from harness.table import Result


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is measured."""

    turns: int = 7
    repetitions: int = 3
    min_ms: float = 20.0
    row_seconds: float = 30.0  # no further turn of a row after so long
    timeout: float = 180.0  # for one answer; the first sets the case up
    settle: float = 0.02  # seconds between two programs, in which the threads of the one before fall asleep


# Steps of large networks, each of seconds: one a turn. Compiling one takes minutes.
LONG = Effort(turns=5, repetitions=1, min_ms=1.0, row_seconds=120.0, timeout=900.0, settle=0.3)
QUICK = Effort(turns=3, repetitions=2, min_ms=5.0, row_seconds=3.0, timeout=30.0)


def measure_row(row: Row, peers: Mapping[str, Peer | Crowd], effort: Effort) -> Result:
    """All turns of one row. A contestant that fails drops out and is named in the result's errors.

    Everybody is asked once before the first turn, which sets cases up and warms them up and isn't counted.
    """
    result = Result(row, {}, {})
    everybody = [Contestant("halfstep", row.peer, row.case)] + [c for c in row.others if c.peer in peers]
    contestants = [c for c in everybody if c.timed]
    start = time.monotonic()
    for turn in range(-1, effort.turns):
        if turn >= 2 and time.monotonic() - start > effort.row_seconds:
            break
        for contestant in list(contestants):
            time.sleep(effort.settle)
            repetitions = 1 if turn < 0 else effort.repetitions
            try:
                answer = peers[contestant.peer].ask(contestant.case, repetitions, effort.min_ms, effort.timeout)
            except PeerError as error:
                result.errors[contestant.column] = str(error)
                result.turns.pop(contestant.column, None)
                contestants.remove(contestant)
                if contestant.column == "halfstep":
                    return result
                continue
            if contestant.column == "halfstep":
                result.operations, result.bytes = answer.operations, answer.bytes
            if turn >= 0:
                result.turns.setdefault(contestant.column, []).append(answer.median_ms)
        if turn < 0:
            start = time.monotonic()
    if row.facts:
        for contestant in everybody:
            if contestant.column in result.errors:
                continue
            try:
                result.facts[contestant.column] = peers[contestant.peer].facts(contestant.case, effort.timeout)
            except PeerError as error:
                result.errors[contestant.column] = str(error)
    return result


def measure_limits(peer: Peer, effort: Effort) -> Limits:
    """The machine's peaks: the best of several seconds. Raises PeerError."""
    best: dict[str, float] = {}
    cases = ("machine/multiply_add/f32", "machine/stream/8MB", "machine/stream/512MB")
    for _ in range(3):
        for case in cases:
            answer = peer.ask(case, 5, effort.min_ms, effort.timeout)
            work = answer.operations or answer.bytes
            best[case] = max(best.get(case, 0.0), work / (min(answer.times_ms) * 1e-3))
    return Limits(*(best[case] for case in cases))


class Watch:
    """What other programs took of the processors while it ran: all but this one and those that it started."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._busy, self._stolen = machine.cpu_seconds()
        self._own = machine.tree_seconds(os.getpid())

    def sample(self) -> float:
        """Processors that others, or the hypervisor for its other guests, used on average since the last sample."""
        now = time.monotonic()
        busy, stolen = machine.cpu_seconds()
        own = machine.tree_seconds(os.getpid())
        others = (busy - self._busy) + (stolen - self._stolen) - (own - self._own)
        elapsed = max(now - self._start, 1e-3)
        self._start, self._busy, self._stolen, self._own = now, busy, stolen, own
        return max(others, 0.0) / elapsed
