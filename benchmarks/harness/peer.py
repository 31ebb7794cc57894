# SPDX-License-Identifier: Apache-2.0
"""A program that answers timing requests (the protocol stands in benchmarks/peers/bench_server.py)."""
from __future__ import annotations

import collections
import dataclasses
import json
import queue
import subprocess
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any


class PeerError(Exception):
    """The program could not answer; the text says why, on one line."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One turn: times of a call in milliseconds, and what the call can't do without (0 where it isn't said)."""

    median_ms: float
    times_ms: tuple[float, ...]
    calls: int
    operations: float = 0.0
    bytes: float = 0.0


def parse_hello(line: str) -> dict[str, Any]:
    """What a program says when it starts. Raises PeerError for anything else."""
    try:
        hello = json.loads(line)
    except ValueError:
        raise PeerError(f"expected a line of JSON at its start, got {line.strip()[:80]!r}") from None
    if not isinstance(hello, dict) or not isinstance(hello.get("cases"), list) or "peer" not in hello:
        raise PeerError("expected `peer` and `cases` in its first line")
    return hello


def parse_answer(line: str, case: str) -> Answer:
    """The answer to a request for `case`. Raises PeerError for an error, another case, and times that make no sense."""
    try:
        reply = json.loads(line)
    except ValueError:
        raise PeerError(f"expected a line of JSON, got {line.strip()[:80]!r}") from None
    if not isinstance(reply, dict) or reply.get("case") != case:
        raise PeerError(f"expected an answer for {case}, got {line.strip()[:80]!r}")
    if "error" in reply:
        raise PeerError(str(reply["error"]))
    times = reply.get("times_ms")
    if not isinstance(times, list) or not times or not all(isinstance(t, (int, float)) and t > 0 for t in times):
        raise PeerError(f"expected times above 0, got {times!r}")
    ordered = sorted(float(t) for t in times)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return Answer(median, tuple(float(t) for t in times), int(reply.get("calls", 0)), float(reply.get("operations", 0)),
                  float(reply.get("bytes", 0)))


def parse_facts(line: str, case: str) -> dict[str, float]:
    """The answer to a request for facts. Raises PeerError as parse_answer does."""
    try:
        reply = json.loads(line)
    except ValueError:
        raise PeerError(f"expected a line of JSON, got {line.strip()[:80]!r}") from None
    if not isinstance(reply, dict) or reply.get("case") != case:
        raise PeerError(f"expected an answer for {case}, got {line.strip()[:80]!r}")
    if "error" in reply:
        raise PeerError(str(reply["error"]))
    facts = reply.get("facts")
    if not isinstance(facts, dict) or not all(isinstance(v, (int, float)) for v in facts.values()):
        raise PeerError(f"expected facts, got {facts!r}")
    return {str(name): float(value) for name, value in facts.items()}


class Peer:
    """The program and the talk with it. It is started when it is first asked, and again after it died or hung.

    A program that can't even start (`hello` raises) is not tried twice.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], start_timeout: float = 120.0) -> None:
        self.name = name
        self._command = list(command)
        self._env = dict(env)
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last_words: collections.deque[str] = collections.deque(maxlen=20)
        self._words_thread: threading.Thread | None = None
        self._hello: dict[str, Any] | None = None
        self._broken: str | None = None
        self._failed_cases: dict[str, str] = {}

    @property
    def hello(self) -> dict[str, Any]:
        """What the program said of itself; starts it the first time. Raises PeerError."""
        if self._hello is None:
            self._start()
        assert self._hello is not None
        return self._hello

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def has(self, case: str) -> bool:
        return case in self.hello["cases"]

    def ask(self, case: str, repetitions: int, min_ms: float, timeout: float) -> Answer:
        """One turn. Raises PeerError; a case that failed once is not asked for again."""
        if case in self._failed_cases:
            raise PeerError(self._failed_cases[case])
        try:
            return parse_answer(self._talk(f"{case} {repetitions} {min_ms:g}", timeout), case)
        except PeerError as error:
            self._failed_cases[case] = str(error)
            raise

    def facts(self, case: str, timeout: float) -> dict[str, float]:
        """What is known of a case besides times. Raises PeerError."""
        return parse_facts(self._talk(f"facts {case}", timeout), case)

    def _talk(self, request: str, timeout: float) -> str:
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone: reading finds out and says so
        return self._read(timeout)

    def close(self) -> None:
        """Ends the program: politely, then not."""
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.write("quit\n")
                self._process.stdin.flush()
            except OSError:
                pass
        self._end(patience=5)

    def _end(self, patience: float) -> int:
        """Waits so long for its end, then ends it; returns its status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.stdin is not None:
            try:
                process.stdin.close()
            except OSError:
                pass
        try:
            return process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _start(self) -> None:
        if self._broken is not None:
            raise PeerError(self._broken)
        self._lines = queue.Queue()
        self._last_words.clear()
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             stderr=subprocess.PIPE, env=self._env, text=True, errors="replace")
        except OSError as error:
            self._broken = f"{self._command[0]} can't be started: {error.strerror}"
            raise PeerError(self._broken) from None
        out, err, lines, words = self._process.stdout, self._process.stderr, self._lines, self._last_words
        assert out is not None and err is not None

        def pass_on() -> None:
            with out:
                for line in out:
                    lines.put(line)
            lines.put(None)

        def keep_words() -> None:
            with err:
                words.extend(err)

        threading.Thread(target=pass_on, daemon=True).start()
        self._words_thread = threading.Thread(target=keep_words, daemon=True)
        self._words_thread.start()
        try:
            self._hello = parse_hello(self._read(self._start_timeout))
        except PeerError as error:
            self.close()
            self._broken = str(error)
            raise

    def _read(self, timeout: float) -> str:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self._end(patience=0)
            raise PeerError(f"no answer within {timeout:g} s") from None
        if line is None:
            status = self._end(patience=5)
            if self._words_thread is not None:
                self._words_thread.join(timeout=5)
            words = [w.strip() for w in self._last_words if w.strip()]
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise PeerError(f"it ended with {how}" + (f": {words[-1]}" if words else ""))
        return line


class Crowd:
    """Asked like a Peer, but every case has a process of its own, whose memory is that case's alone."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._make = lambda: Peer(name, command, env)
        self._peers: dict[str, Peer] = {}
        self._facts: dict[str, dict[str, float]] = {}

    def ask(self, case: str, repetitions: int, min_ms: float, timeout: float) -> Answer:
        return self._peer(case).ask(case, repetitions, min_ms, timeout)

    def facts(self, case: str, timeout: float) -> dict[str, float]:
        """Those of the first time that they were asked for: finding them out uses memory of its own."""
        if case not in self._facts:
            self._facts[case] = self._peer(case).facts(case, timeout)
        return self._facts[case]

    def _peer(self, case: str) -> Peer:
        return self._peers.setdefault(case, self._make())

    def keep(self, cases: Collection[str]) -> None:
        """Ends the processes of all other cases."""
        for case in [c for c in self._peers if c not in cases]:
            self._peers.pop(case).close()

    def close(self) -> None:
        self.keep(())
