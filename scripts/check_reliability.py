#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds docs/reference/reliability.md to its word: every test that a promise names exists.

The last column of each table names suites (`Parallel`), tests (`Parallel.NeedsNoWorker`), files (`tests/cli/kills_test.py`) or folders.
A row belongs to a table: the line above it is one of the table's too, or Markdown shows it as text.
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


def check(page: str, text: str, tests: set[str]) -> tuple[list[str], int]:
    """What is wrong with a page, and how many promises it has."""
    wrong, promises, before = [], 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        above, before = before, line
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 4 or cells[1] == "promise" or set(cells[1]) <= {"-"}:
            continue
        promises += 1
        if not above.startswith("|"):
            wrong.append(f"{page}:{number}: expected a row of the table above this one, got '{above}'")
        named = re.findall(r"`([^`]+)`", cells[2])
        if not named:
            wrong.append(f"{page}:{number}: no test is named for: {cells[1]}")
        for name in named:
            if not ((TOP / name).exists() if "/" in name else name in tests or name == "shared"):
                wrong.append(f"{page}:{number}: there is no test `{name}`")
    return wrong, promises


def main() -> int:
    page = "docs/reference/reliability.md"
    wrong, promises = check(page, (TOP / page).read_text(), known_tests())
    print("\n".join(wrong) if wrong else f"check_reliability: {promises} promises, each with a test")
    return 1 if wrong or promises == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
