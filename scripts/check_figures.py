#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the figures in README.md to the benchmark records that it links, and the table of inference in
docs/reference/performance.md to the newest record of it.

Each row of README.md's table has a dtype, then Halfstep's and PyTorch's images a second and peak memory; "not measured"
where the record has no PyTorch of that dtype. Below it stands how long PyTorch takes with an allocator that keeps its
pages.
"""
from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

TOP = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP / "benchmarks"))

from harness.plan import Machine  # noqa: E402

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


def kept_ratios(record: str) -> dict[str, str]:
    """PyTorch's time over Halfstep's with pages kept, by dtype, of the first network in a record's table."""
    found: dict[str, str] = {}
    dtype = ""
    for line in record.splitlines():
        if head := re.match(r"\S.*?, \d+ +(f32|bf16|f16) +Halfstep", line):
            dtype = head[1]
        if dtype and (peer := re.match(r" +PyTorch, pages kept +.*?([\d.]+x) \(", line)):
            found.setdefault(dtype, peer[1])
    return found


def check(readme: str, top: pathlib.Path) -> list[str]:
    """What differs."""
    link = re.search(r"\((benchmarks/results/[^)]+\.txt)\)", readme)
    rows = re.findall(r"^\| (float32|bf16|f16) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", readme, re.MULTILINE)
    if not link or not rows:
        return ["README.md: expected a table of figures and a link to their record"]
    record = (top / link[1]).read_text(encoding="utf-8")
    known, kept = figures(record), kept_ratios(record)
    said = f"takes {kept.get('f32')} (float32) and {kept.get('bf16')} (bf16) as long"
    wrong = [] if said in " ".join(readme.split()) else [f"README.md: expected 'PyTorch {said}', as {link[1]} has it"]
    for name, *cells in rows:
        expected = []
        for place in (0, 1):
            for framework in ("Halfstep", "PyTorch"):
                pair = known.get((DTYPES[name], framework))
                expected.append("not measured" if pair is None else pair[0] if place == 0 else f"{pair[1]} MB")
        if cells != expected:
            wrong.append(f"README.md: {name}: expected {expected} as {link[1]} has it, got {cells}")
    return wrong


PEERS_OF_INTEGERS = ("f32", "bf16", "torch_f32", "onnx_f32", "onnx_int8")


def inference_rows(record: dict[str, Any]) -> list[str]:
    """The record's rows as lines of the table: time, its share of the limit, and the peers' times over it."""
    lines = []
    for row in record["rows"]:
        ours = row["median_ms"]["halfstep"]
        rate = Machine(isa=record["isa"]).rate("int8")
        share = f"{100 * row['limit_ms'] / rate / ours:.0f}%" if rate else ""
        cells = [row["labels"]["network"].replace(", ", " "), row["labels"]["batch"], f"{ours:.1f}", share]
        cells += [f"{row['ratios'][peer]['median']:.2f}" for peer in PEERS_OF_INTEGERS]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def check_inference(page: str, readme: str, top: pathlib.Path) -> list[str]:
    """What differs in the page's table and in README.md's sentence of it."""
    links = {"performance.md": re.search(r"\(\.\./\.\./(benchmarks/results/[^)]+-inference)\.txt\)", page),
             "README.md": re.search(r"\((benchmarks/results/[^)]+-inference)\.txt\)", readme)}
    missing = [f"{name}: expected a link to a record of inference" for name, link in links.items() if not link]
    if missing:
        return missing
    records = {n: json.loads((top / f"{m[1]}.json").read_text(encoding="utf-8")) for n, m in links.items() if m}
    wrong = [f"performance.md: expected the row {row}" for row in inference_rows(records["performance.md"]) if row not in page]
    ratios = [row["ratios"]["onnx_int8"]["median"] for row in records["README.md"]["rows"]]
    said = f"{min(ratios):.2f} to {max(ratios):.2f} times"
    return wrong + ([] if said in readme else [f"README.md: expected '{said}' the speed of ONNX Runtime's integers"])


def main() -> int:
    """Prints what differs."""
    readme = (TOP / "README.md").read_text(encoding="utf-8")
    page = (TOP / "docs" / "reference" / "performance.md").read_text(encoding="utf-8")
    wrong = check(readme, TOP) + check_inference(page, readme, TOP)
    print("\n".join(wrong) if wrong else "check_figures: the figures are those of the record")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
