#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the levels of mixed precision cost and reach: the table in docs/guide/mindspore.md.

usage: scripts/levels_table.py PROGRAM --data DIR [--epochs N] [--seeds N] [--threads N] [--write]

DIR holds mnist/ and fashion-mnist/. `PROGRAM train mlp --amp LEVEL` trains on each, level after level and then the next
seed, so that what else the machine does meets all levels alike. Prints the table so far after each seed; with --write
it takes the place of the one in docs/guide/mindspore.md. Exit status 1 when a level's accuracy is more than 0.3 points
below float32's.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile

DOCUMENT = pathlib.Path(__file__).resolve().parent.parent / "docs" / "guide" / "mindspore.md"
BEGIN, END = "<!-- levels: made by scripts/levels_table.py -->\n", "<!-- levels: end -->"
BASE = ("O0", "")
LEVELS = [BASE] + [(level, dtype) for dtype in ("f16", "bf16") for level in ("O1", "O2", "O3", "auto")]
DATA = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
RECIPE = "--lr 0.05 --momentum 0.9 --lr-schedule cosine"
ALLOWED = 0.3  # points of accuracy under float32's


@dataclasses.dataclass
class Run:
    """What one training came to."""

    epoch_s: float  # processor time, which what else runs on the machine changes little
    peak_mb: float
    accuracy: float  # per cent


def train(options: argparse.Namespace, data: str, level: tuple[str, str], seed: int) -> Run:
    """Trains once, in a process of its own: its time and its peak of memory are its own too."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log.jsonl"
        command = [options.program, "train", "mlp", options.data / data, "--epochs", options.epochs, "--seed", seed,
                   "--threads", options.threads, "--amp", level[0], *RECIPE.split(), "--log-json", log, "--no-out",
                   "--quiet"]
        if level[1]:
            command += ["--amp-dtype", level[1]]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = os.environ | {"OMP_NUM_THREADS": options.threads}
        subprocess.run([str(part) for part in command], check=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        end = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(seconds / end["epochs"], end["peak_rss_mb"], 100 * end["top1"])


def table(runs: dict[tuple[str, str], dict[str, list[Run]]], names: list[str]) -> str:
    """The table in Markdown. Accuracies are means over seeds, times medians, memory the most of all runs."""
    def epoch(level: tuple[str, str]) -> float:
        return statistics.median(r.epoch_s for data in runs[level].values() for r in data)

    heads = ["level", "16 bits", "epoch, s", "of float32's", "peak memory, MB", *(f"{name}, %" for name in names)]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for level, data in runs.items():
        peak = max(r.peak_mb for found in data.values() for r in found)
        accuracies = [f"{statistics.mean(r.accuracy for r in found):.2f}" for found in data.values()]
        ratio = epoch(level) / epoch(BASE)
        cells = [f"`{level[0]}`", level[1] or "none (float32)", f"{epoch(level):.2f}", f"{ratio:.2f}", f"{peak:.0f}",
                 *accuracies]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def too_low(runs: dict[tuple[str, str], dict[str, list[Run]]]) -> list[str]:
    """The levels that don't reach float32's accuracy, said in words."""
    found = []
    for level, data in runs.items():
        for name, these in data.items():
            base = statistics.mean(r.accuracy for r in runs[BASE][name])
            mean = statistics.mean(r.accuracy for r in these)
            if mean < base - ALLOWED:
                found.append(f"{name}: {' '.join(level)} reaches {mean:.2f} %, float32 {base:.2f} %")
    return found


def write(text: str) -> None:
    """Puts the table between its marks in the document."""
    document = DOCUMENT.read_text(encoding="utf-8")
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(document):
        raise SystemExit(f"{DOCUMENT}: expected a line {BEGIN.strip()} and a line {END}")
    DOCUMENT.write_text(pattern.sub(lambda _: BEGIN + text + END, document), encoding="utf-8")


def processor() -> str:
    """The processor's name, where the system says it."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.machine()


def main() -> int:
    """Trains, prints, and writes if asked to."""
    parser = argparse.ArgumentParser(description="Time, memory and accuracy of each level of mixed precision.")
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of mnist/ and fashion-mnist/")
    parser.add_argument("--epochs", default="5")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", default="1")
    parser.add_argument("--write", action="store_true", help="put the table into docs/guide/mindspore.md")
    options = parser.parse_args()

    runs: dict[tuple[str, str], dict[str, list[Run]]] = {level: {name: [] for name in DATA} for level in LEVELS}
    for seed in range(1, options.seeds + 1):
        for name in DATA:
            for level in LEVELS:
                run = train(options, name, level, seed)
                runs[level][name].append(run)
                print(f"{name} seed {seed} {' '.join(level)}: {run.epoch_s:.2f} s an epoch, {run.peak_mb:.0f} MB, "
                      f"{run.accuracy:.2f} %", file=sys.stderr, flush=True)
        text = table(runs, list(DATA.values()))
        text += (f"\n`halfstep train mlp --amp LEVEL --amp-dtype DTYPE {RECIPE} --epochs {options.epochs} "
                 f"--threads {options.threads}`, batches of 64, {seed} seed{'s' if seed > 1 else ''}, {processor()}. "
                 "Times are processor times, evaluation included; peak memory is that of the process, data set "
                 "included.\n")
        print(text, flush=True)
        if options.write:
            write(text)
    failed = too_low(runs)
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
