#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures Halfstep beside PyTorch on a GPU, in turns, each row with its physical limit (docs/reference/benchmarks.md).

usage: benchmarks/gpu.py --server build/bin/bench_server [--device cuda] [--python PYTHON] [--seconds 240] [--only REGEX] [--out FILE]

PYTHON is one with a PyTorch for CUDA (and torchvision, for ResNet-50); without it Halfstep is measured alone. Rows are measured in
the order of their weight until the seconds are over; those that are left are named. FILE gets one JSON object a row; the table goes to
standard output, as Markdown. Exit status: 0 measured; 1 Halfstep failed in a row or could not be started; 2 bad arguments.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import statistics
import sys
import textwrap
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from harness.peer import Peer, PeerError
from harness.stats import ratio_in_turns

HERE = pathlib.Path(__file__).resolve().parent
COPY = "gpu/copy"

# What the maker's data sheets promise: operations a second of the dense 16-bit matrix units, and in float32 without them (TF32 is off
# here, as it is by default on both sides); bytes a second. By part of the name.
SHEETS = {"H200": (989e12, 67e12, 4.8e12), "H100 PCIe": (756e12, 51e12, 2.0e12), "H100": (989e12, 67e12, 3.35e12),
          "GH200": (989e12, 67e12, 4.0e12), "B200": (2250e12, 80e12, 8.0e12), "A100-SXM4-80GB": (312e12, 19.5e12, 2.039e12),
          "A100": (312e12, 19.5e12, 1.555e12), "L40S": (362e12, 91.6e12, 0.864e12), "L4": (121e12, 30.3e12, 0.3e12),
          "RTX 4090": (165e12, 82.6e12, 1.008e12)}


@dataclasses.dataclass(frozen=True)
class Goal:
    """Others: their time over ours has to be at least so much. Bandwidth: so much of what gpu/copy reaches."""

    others: tuple[tuple[str, float], ...] = ()
    bandwidth: float = 0.0


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    case: str
    others: tuple[tuple[str, str], ...] = ()  # column, PyTorch's case
    goal: Goal = Goal()
    seconds: float = 20.0  # of the first answer: compiling takes long


def rows(images: int, texts: int, small: bool) -> list[Row]:
    """In the order of their weight."""
    table = [Row("copy of 1 GiB on the device", COPY, (("PyTorch", COPY),)),
             Row("unscale and check, 10^8 f32", "gpu/unscale/f32", (("PyTorch", "gpu/unscale/f32"),), Goal(bandwidth=0.9)),
             Row("unscale and check, 10^8 f16 to f32", "gpu/unscale/f16", (("PyTorch", "gpu/unscale/f16"),), Goal(bandwidth=0.9))]
    for low in ("f16", "bf16"):
        table.append(Row(f"AdamW step, 10^8 {low}, master weights", f"gpu/optimizer/adamw/{low}",
                         (("PyTorch", f"gpu/optimizer/adamw/{low}"),), Goal(bandwidth=0.85)))
    table.append(Row("SGD step, 10^8 f16, master weights", "gpu/optimizer/sgd/f16", (("PyTorch", "gpu/optimizer/sgd/f16"),),
                     Goal(bandwidth=0.85)))
    for low in ("f16", "bf16"):
        table.append(Row(f"ResNet-50 step, batch {images}, {low}", f"gpu/resnet50/{low}/b{images}",
                         (("PyTorch", f"gpu/resnet50/{low}/b{images}"),), Goal((("PyTorch", 1.1),)), 60))
    for low in ("f16", "bf16"):
        table.append(Row(f"MLP step, batch 64, {low}", f"gpu/mlp/{low}/b64", (("PyTorch", f"gpu/mlp/{low}/b64"),)))
        table.append(Row(f"MLP step, batch 64, {low}, captured", f"gpu/mlp/{low}_captured/b64",
                         (("PyTorch", f"gpu/mlp/{low}/b64"), ("PyTorch graph", f"gpu/mlp/{low}_graph/b64")),
                         Goal((("PyTorch", 5.0), ("PyTorch graph", 1.2)))))
    table.append(Row(f"GPT 6x384 step, batch {texts}, bf16", f"gpu/gpt/bf16/b{texts}",
                     (("PyTorch", f"gpu/gpt/bf16/b{texts}"), ("PyTorch compiled", f"gpu/gpt/bf16_compiled/b{texts}")),
                     Goal((("PyTorch compiled", 1.0),)), 90))
    for low in ("f16", "bf16", "f32"):
        table.append(Row(f"product {'64' if small else '8192'}^3, {low}", f"gpu/product/{low}", (("PyTorch", f"gpu/product/{low}"),)))
    table.append(Row("AdamW step, 10^8 f32", "gpu/optimizer/adamw/f32", (("PyTorch", "gpu/optimizer/adamw/f32"),)))
    table.append(Row(f"GPT 6x384 step, batch {texts}, f16", f"gpu/gpt/f16/b{texts}", (("PyTorch", f"gpu/gpt/f16/b{texts}"),),
                     seconds=60))
    return table


def compiled(images: int) -> list[Row]:
    """What PyTorch compiles for a minute."""
    return [Row(f"ResNet-50 step, batch {images}, {low}, beside compiled", f"gpu/resnet50/{low}/b{images}",
                (("PyTorch compiled", f"gpu/resnet50/{low}_compiled/b{images}"),), Goal((("PyTorch compiled", 1.0),)), 150)
            for low in ("f16", "bf16")]


def single_calls(cases: list[str]) -> list[Row]:
    """Products and convolutions alone, which show the algorithm that was chosen; beside PyTorch's choice."""
    names = [c for c in cases if c.startswith(("gpu/linear/", "gpu/conv/"))]
    return [Row(" ".join(c.split("/")[1:]) + ", f16", c, (("PyTorch", c),)) for c in names]


@dataclasses.dataclass
class Limits:
    """Of the device: operations a second in 16 bits and in float32, bytes a second, and where they come from."""

    operations: float = 0.0
    float32: float = 0.0
    bytes: float = 0.0
    source: str = "not known"
    copy: float = 0.0  # bytes a second that gpu/copy reached

    def milliseconds(self, operations: float, moved: float, dtype: str) -> float | None:
        peak = self.float32 if dtype == "f32" else self.operations
        times = [1e3 * operations / peak if peak else 0.0, 1e3 * moved / self.bytes if self.bytes else 0.0]
        return max(times) or None


def sheet(hardware: str) -> Limits:
    for name in sorted(SHEETS, key=len, reverse=True):
        if name in hardware:
            return Limits(*SHEETS[name], source=f"data sheet of {name}")
    return Limits(source="no data sheet of this device: only what was measured")


def measure(row: Row, ours: Peer, torch: Peer | None, turns: int, deadline: float) -> dict[str, Any]:
    """Everybody once to set up, then in turns. Who fails is named and drops out."""
    contestants = [("halfstep", ours, row.case)] + ([(c, torch, case) for c, case in row.others] if torch else [])
    times: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    work = (0.0, 0.0)
    for turn in range(-1, turns):
        for column, peer, case in list(contestants):
            left = deadline - time.monotonic()
            if left <= 1 and turn >= 0:
                break
            allowed = row.seconds if turn < 0 else 30.0
            try:
                answer = peer.ask(case, 1 if turn < 0 else 3, 30.0, max(5.0, min(left, allowed)))
            except PeerError as error:
                # Who was cut short by the end of all has not failed.
                cut = left < allowed and time.monotonic() >= deadline - 1
                errors[column] = OVER if cut else str(error)
                times.pop(column, None)
                contestants = [c for c in contestants if c[0] != column]
                continue
            if column == "halfstep":
                work = (answer.operations, answer.bytes)
            if turn >= 0:
                times.setdefault(column, []).append(answer.median_ms)
    return {"row": row.name, "case": row.case, "turns_ms": times, "errors": errors, "operations": work[0], "bytes": work[1]}


def judge(row: Row, found: dict[str, Any], limits: Limits) -> None:
    """Adds medians, ratios, the limit and the goals to what was measured."""
    times = found["turns_ms"]
    found["median_ms"] = {c: statistics.median(t) for c, t in times.items()}
    found["ratios"] = {}
    own = times.get("halfstep")
    for column, other in times.items():
        ratio = ratio_in_turns(other, own) if own and column != "halfstep" else None
        if ratio is not None:
            found["ratios"][column] = {"median": ratio.median, "low": ratio.low, "high": ratio.high}
    found["limit_ms"] = limits.milliseconds(found["operations"], found["bytes"], "f32" if row.case.endswith("/f32") else "low")
    goals = []
    for column, wanted in row.goal.others:
        got = found["ratios"].get(column)
        goals.append({"goal": f"{wanted:g}x {column}", "met": got["median"] >= wanted if got else None})
    if row.goal.bandwidth:
        met = None
        if own and limits.copy and found["bytes"]:
            found["of_copy"] = found["bytes"] / (found["median_ms"]["halfstep"] * 1e-3) / limits.copy
            met = found["of_copy"] >= row.goal.bandwidth
        goals.append({"goal": f"{row.goal.bandwidth:.0%} of the copy's bandwidth", "met": met})
    found["goals"] = goals


def shown(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.3f}" if ms < 100 else f"{ms:.1f}"


def line(found: dict[str, Any]) -> str:
    """A line of the table."""
    median = found["median_ms"]
    others = []
    for column, ms in median.items():
        if column != "halfstep":
            ratio = found["ratios"].get(column)
            others.append(f"{column} {shown(ms)}" + (f" ({ratio['median']:.2f}x)" if ratio else ""))
    own, limit = median.get("halfstep"), found["limit_ms"]
    goals = "; ".join(f"{g['goal']}: {'not known' if g['met'] is None else 'met' if g['met'] else 'MISSED'}" for g in found["goals"])
    if "of_copy" in found:
        goals += f" ({found['of_copy']:.0%})"
    notes = "; ".join(f"{c}: {e}" for c, e in found["errors"].items())
    cells = [found["row"], shown(own), "; ".join(others), shown(limit), f"{limit / own:.0%}" if limit and own else "", goals, notes]
    return "| " + " | ".join(c.replace("|", "/") for c in cells) + " |"


OVER = "the time was over"
HEAD = ("| row | Halfstep, ms | others, ms (their time over ours) | limit, ms | of the limit | goal | notes |\n"
        "| --- | --- | --- | --- | --- | --- | --- |")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Halfstep beside PyTorch on a GPU, in turns.")
    parser.add_argument("--server", type=pathlib.Path, default=HERE.parent / "build" / "bin" / "bench_server")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--python", default=os.environ.get("HALFSTEP_PEER_PYTHON", ""), help="a Python with PyTorch for CUDA")
    parser.add_argument("--threads", type=int, default=min(8, len(os.sched_getaffinity(0))))
    parser.add_argument("--seconds", type=float, default=240.0, help="no row begins after so long")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", type=re.compile, metavar="REGEX",
                        help="rows whose name matches; the copy, which bandwidths are shares of, is always one")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the cases: figures say nothing")
    parser.add_argument("--out", type=pathlib.Path, help="file for one JSON object a row, which are added at its end")
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    return parser.parse_args(argv)


def chosen(table: list[Row], only: re.Pattern[str] | None) -> list[Row]:
    return [row for row in table if only is None or row.case == COPY or only.search(row.name)]


def run(options: argparse.Namespace) -> int:
    images, texts = (2, 1) if options.small else (256, 64)
    table = rows(images, texts, options.small)
    if options.list:
        for row in chosen(table, options.only):
            print(row.name)
        if options.only is None:
            print("linear and conv of these networks, one by one")
        for row in chosen(compiled(images), options.only):
            print(row.name)
        return 0
    start = time.monotonic()
    deadline = start + options.seconds
    small = ["--small"] if options.small else []
    threads = ["--threads", str(options.threads), "--device", options.device]
    ours = Peer("halfstep", [str(options.server), *threads, *small], os.environ)
    torch: Peer | None = None
    failed = 0
    out = options.out.open("a") if options.out else None
    try:
        hello = ours.hello
        wanted = chosen(table + single_calls(hello["cases"]) + compiled(images), options.only)
        if options.only is not None and not any(options.only.search(row.name) for row in wanted):
            print(f"gpu.py: --only: no row's name matches '{options.only.pattern}'; --list names the rows", file=sys.stderr)
            return 2
        why = "no --python was given"
        if options.python:
            torch = Peer("torch", [options.python, str(HERE / "peers" / "torch_cuda_bench.py"), *threads, *small],
                         {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
            try:
                torch.hello
            except PeerError as error:
                torch, why = None, str(error)
        limits = sheet(hello.get("hardware", ""))
        print(f"{hello.get('hardware')}, {hello.get('driver')}; Halfstep {hello['version']}"
              + (f" beside PyTorch {torch.hello['version']}" if torch else f", alone: PyTorch is left out ({why})"))
        print(f"Limits: {limits.operations * 1e-12:.0f} TFLOP/s in 16 bits, {limits.bytes * 1e-12:.2f} TB/s ({limits.source}). Times are "
              "medians of turns; of ratios, too.\n")
        if options.small:
            print("Tiny sizes, to try the cases; the rows keep the names of the real ones, and no figure says anything.\n")
        print(HEAD, flush=True)
        left = []
        for row in wanted:
            if time.monotonic() >= deadline:
                left.append(row.name)
                continue
            found = measure(row, ours, torch, options.turns, deadline)
            if row.case == COPY and found["turns_ms"].get("halfstep"):
                best = max(found["bytes"] / (min(t) * 1e-3) for t in found["turns_ms"].values())
                limits.copy = best
                if not limits.bytes:
                    limits.bytes, limits.source = best, "measured by the copy"
            judge(row, found, limits)
            # Graphs may not be there yet: that is said in the row, and fails nothing.
            failed += found["errors"].get("halfstep", OVER) != OVER and "captured" not in row.case
            print(line(found), flush=True)
            if out:
                out.write(json.dumps({"kind": "benchmark", "device": hello.get("hardware"), **found}) + "\n")
                out.flush()
        print(f"\nMeasured copy: {limits.copy * 1e-12:.2f} TB/s." if limits.copy else "")
        if left:
            print(textwrap.fill(f"Not measured, the time was over: {'; '.join(left)}.", 120))
        print(f"{time.monotonic() - start:.0f} s")
    except PeerError as error:
        print(f"gpu.py: Halfstep could not be measured: {error}", file=sys.stderr)
        return 1
    finally:
        for peer in (ours, torch):
            if peer is not None:
                peer.close()
        if out:
            out.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run(parse_arguments(None)))
