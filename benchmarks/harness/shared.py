# SPDX-License-Identifier: Apache-2.0
"""Programs that share one machine: several at once, or one under a quota of processors."""
from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Mapping, Sequence

from harness.peer import Answer, Peer, PeerError

LONGER = 15  # a turn than that of one program
CGROUPS = pathlib.Path("/sys/fs/cgroup")


class Together:
    """`copies` of a program that are asked at the same time. A call's time is the machine's: the inverse of the calls that
    all of them made a second, so that 1.0 ms for two is what 2.0 ms for each of them gives."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], copies: int) -> None:
        self.name = name
        self._peers = [Peer(name, command, env) for _ in range(copies)]

    def ask(self, case: str, repetitions: int, min_ms: float, timeout: float) -> Answer:
        answers: list[Answer | PeerError] = [PeerError("no answer")] * len(self._peers)

        def one(index: int) -> None:
            try:
                # One long repetition: they overlap but for its ends.
                answers[index] = self._peers[index].ask(case, 1, LONGER * min_ms * repetitions, timeout)
            except PeerError as error:
                answers[index] = error

        for peer in self._peers:
            peer.hello  # all have started before any is timed
        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(self._peers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate, operations, calls = 0.0, 0.0, 0
        for answer in answers:
            if isinstance(answer, PeerError):
                raise answer
            rate += 1 / answer.median_ms
            operations, calls = answer.operations, calls + answer.calls
        return Answer(1 / rate, (1 / rate,), calls, operations)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


class Quota(Peer):
    """A program in a control group with so many processors' time. Raises PeerError where no group can be made."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], processors: float) -> None:
        group = f"halfstep-bench-{os.getpid()}-{name.replace('_', '-')}"
        v1 = CGROUPS / "cpu"
        self._group = (v1 if (v1 / "cpu.cfs_quota_us").exists() or (v1 / "cpu.shares").exists() else CGROUPS) / group
        self._processors = processors
        # A shell joins the group and becomes the program, so that it counts its processors in it.
        join = self._group / ("tasks" if self._group.parent == v1 else "cgroup.procs")
        super().__init__(name, ["/bin/sh", "-c", f'echo $$ > "{join}" && exec "$@"', "sh", *command], env)

    def _start(self) -> None:
        try:
            self._group.mkdir(exist_ok=True)
            if self._group.parent.name == "cpu":
                (self._group / "cpu.cfs_period_us").write_text("100000")
                (self._group / "cpu.cfs_quota_us").write_text(str(int(self._processors * 100000)))
            else:
                (self._group / "cpu.max").write_text(f"{int(self._processors * 100000)} 100000")
        except OSError as error:
            raise PeerError(f"no control group with a quota can be made here: {error.strerror}") from None
        super()._start()

    def close(self) -> None:
        super().close()
        try:
            self._group.rmdir()
        except OSError:
            pass
