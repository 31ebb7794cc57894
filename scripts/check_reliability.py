#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds docs/reference/reliability.md to its word: every test that a promise names exists.

The last column of each table names suites (`Parallel`), tests (`Parallel.NeedsNoWorker`), files (`tests/cli/kills_test.py`) or folders.
"""
from __future__ import annotations

import pathlib
import re
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
TEST = re.compile(r"^TEST(?:_F|_P)?\((\w+),\s*(\w+)\)", re.MULTILINE)


def known_tests() -> set[str]:
    names = set()
    for source in (TOP / "tests").rglob("*_test.cpp"):
        for suite, test in TEST.findall(source.read_text()):
            names |= {suite, f"{suite}.{test}"}
    return names


def main() -> int:
    tests, wrong, promises = known_tests(), [], 0
    for number, line in enumerate((TOP / "docs" / "reference" / "reliability.md").read_text().splitlines(), 1):
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 4 or cells[1] == "promise" or set(cells[1]) <= {"-"}:
            continue
        promises += 1
        named = re.findall(r"`([^`]+)`", cells[2])
        if not named:
            wrong.append(f"docs/reference/reliability.md:{number}: no test is named for: {cells[1]}")
        for name in named:
            if not ((TOP / name).exists() if "/" in name else name in tests or name == "shared"):
                wrong.append(f"docs/reference/reliability.md:{number}: there is no test `{name}`")
    print("\n".join(wrong) if wrong else f"check_reliability: {promises} promises, each with a test")
    return 1 if wrong or promises == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
