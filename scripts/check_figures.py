#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the figures in README.md to the benchmark record that the text below its table links.

Each row has a dtype, then Halfstep's and PyTorch's images a second and peak memory; "not measured" where the record has
no PyTorch of that dtype.
"""
from __future__ import annotations

import pathlib
import re
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
DTYPES = {"float32": "f32", "bf16": "bf16", "f16": "f16"}


def figures(record: str) -> dict[tuple[str, str], tuple[str, str]]:
    """(images a second, peak MB) by dtype and framework, of the first network in a record's table."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    dtype = ""
    for line in record.splitlines():
        head = re.match(r"\S.*?, \d+ +(f32|bf16|f16) +(Halfstep)\s+(.*)", line)
        peer = re.match(r" +(PyTorch)  +(.*)", line)
        if head:
            dtype = head[1]
        if not dtype or not (head or peer):
            continue
        name, rest = (head[2], head[3]) if head else (peer[1], peer[2])
        numbers = re.sub(r"[\d.]+x \([\d.-]+\)", "", rest).split()
        # Milliseconds, images a second; Halfstep's line has the limit too; then the peak.
        peak = numbers[3] if name == "Halfstep" else numbers[2]
        found.setdefault((dtype, name), (numbers[1], peak))
    return found


def check(readme: str, top: pathlib.Path) -> list[str]:
    """What differs."""
    link = re.search(r"\((benchmarks/results/[^)]+\.txt)\)", readme)
    rows = re.findall(r"^\| (float32|bf16|f16) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", readme, re.MULTILINE)
    if not link or not rows:
        return ["README.md: expected a table of figures and a link to their record"]
    known = figures((top / link[1]).read_text(encoding="utf-8"))
    wrong = []
    for name, *cells in rows:
        expected = []
        for place in (0, 1):
            for framework in ("Halfstep", "PyTorch"):
                pair = known.get((DTYPES[name], framework))
                expected.append("not measured" if pair is None else pair[0] if place == 0 else f"{pair[1]} MB")
        if cells != expected:
            wrong.append(f"README.md: {name}: expected {expected} as {link[1]} has it, got {cells}")
    return wrong


def main() -> int:
    """Prints what differs."""
    wrong = check((TOP / "README.md").read_text(encoding="utf-8"), TOP)
    print("\n".join(wrong) if wrong else "check_figures: the figures are those of the record")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
