# SPDX-License-Identifier: Apache-2.0
"""What else the machine is doing, and which processors the run may use."""
from __future__ import annotations

import os
import pathlib


def cpu_seconds() -> tuple[float, float]:
    """Seconds that all processors worked since the machine started, and that a hypervisor gave to others (0, 0 where
    the system doesn't say)."""
    try:
        words = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0, 0.0
    return parse_stat(words, os.sysconf("SC_CLK_TCK"))


def parse_stat(words: list[str], ticks: int) -> tuple[float, float]:
    """The same from the first line of /proc/stat: cpu user nice system idle iowait irq softirq steal ..."""
    values = [int(w) / ticks for w in words[1:9]] + [0.0] * 8
    user, nice, system, _, _, irq, softirq, steal = values[:8]
    return user + nice + system + irq + softirq, steal


def process_seconds(pid: int | None) -> float:
    """Seconds that a process worked, all of its threads; 0 when it is gone."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    words = text.rsplit(")", 1)[1].split()  # the name before it may hold anything
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def tree_seconds(pid: int) -> float:
    """Seconds that a process and all that it started worked, those included that have ended and were waited for."""
    try:
        words = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        tasks = list(pathlib.Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return 0.0
    seconds = sum(int(w) for w in words[11:15]) / os.sysconf("SC_CLK_TCK")
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        seconds += sum(tree_seconds(int(child)) for child in children)
    return seconds


def load_average() -> float:
    """Programs that wanted a processor, on average over the last minute."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def use_processors(threads: int) -> None:
    """Keeps this process and those it starts to `threads` processors: the same for every framework."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, allowed[:threads])
