#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures Halfstep beside PyTorch and JAX on the CPU, in turns, and prints a table (docs/reference/benchmarks.md says how to read it).

usage: benchmarks/run.py --server build/bin/bench_server [options]

Exit status: 0 measured (a peer that is missing or fails is said and left out); 1 Halfstep itself could not be measured;
2 bad arguments.
"""
from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from harness import machine
from harness.measure import LONG, QUICK, Effort, Watch, measure_limits, measure_row
from harness.peer import Crowd, Peer, PeerError
from harness.pictures import find_pictures
from harness.plan import OURS, Machine, Row, Section, pass_names, plan
from harness.ranks import rank_launcher
from harness.shared import Quota, Together
from harness.stats import Limits
from harness.table import Result, render

HERE = pathlib.Path(__file__).resolve().parent
QUIET_LOAD = 0.5
BUSY_PROCESSORS = 0.1
# glibc's allocator gives large blocks back at once, and the system clears their pages anew when they are taken again. These
# settings keep them (docs/reference/performance.md).
PAGES_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 26)}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    allowed = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description="Measure Halfstep beside PyTorch and JAX on the CPU, in turns.")
    parser.add_argument("--server", type=pathlib.Path, default=HERE.parent / "build" / "bin" / "bench_server",
                        help="Halfstep's timing program (default build/bin/bench_server)")
    parser.add_argument("--threads", type=int, default=allowed, help="for everybody (default: all processors)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns, under three minutes, without the networks")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows such as 'step 64 sgd f32' or cases such as mlp/f32")
    parser.add_argument("--turns", type=int, help="turns of every row")
    parser.add_argument("--no-peers", action="store_true", help="measure Halfstep alone")
    parser.add_argument("--peers-venv", type=pathlib.Path, metavar="DIR",
                        help="a virtual environment that has torch (and jax); default: one is made beside the server's folder")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all results, turn by turn")
    parser.add_argument("--record", action="store_true",
                        help="write table and results to benchmarks/results; refused while the machine is busy")
    options = parser.parse_args(argv)
    if not 1 <= options.threads <= allowed:
        parser.error(f"--threads: expected 1 to {allowed}, got {options.threads}")
    if options.turns is not None and options.turns < 1:
        parser.error(f"--turns: expected at least 1, got {options.turns}")
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only: {error}")
    return options


def say(text: str = "") -> None:
    print(text, flush=True)


def peer_python(options: argparse.Namespace) -> str | None:
    """A Python that has the peers, installed now where needed; None, said, where it can't be had."""
    if options.no_peers:
        say("The peers are left out (--no-peers).")
        return None
    if options.peers_venv is not None:
        python = options.peers_venv / "bin" / "python"
        if not python.exists():
            say(f"The peers are left out: {python} does not exist.")
            return None
        return str(python)
    # peer_env.sh says by itself, on standard error, what it installs and why it gives up.
    folder = options.server.resolve().parent.parent / "peer-venv"
    found = subprocess.run([str(HERE.parent / "scripts" / "peer_env.sh"), str(folder)], stdout=subprocess.PIPE, text=True)
    if found.returncode != 0 or not found.stdout.strip():
        say("Halfstep is measured alone.")
        return None
    return found.stdout.split("\n")[0].strip()


def start_peers(options: argparse.Namespace, pictures: pathlib.Path | None,
                onnx_files: pathlib.Path | None) -> tuple[dict[str, Peer | Together], dict[str, Crowd]]:
    """Those that answer, and the same for cases that want a process of their own. Raises PeerError when Halfstep's own
    server doesn't answer."""
    threads = str(options.threads)
    env = {**os.environ, "OMP_NUM_THREADS": threads, "HALFSTEP_THREADS": threads}
    if pictures is not None:
        env["HALFSTEP_BENCH_IMAGES"] = str(pictures)
    command = [str(options.server), "--threads", threads]
    ours = Peer(OURS, command, env)
    ours.hello
    peers, crowds = {OURS: ours, **sharing(OURS, command, env)}, {OURS: Crowd(OURS, command, env)}
    for m in (2, 4):
        crowds[f"{OURS}_winograd{m}"] = Crowd(f"{OURS}_winograd{m}", command, {**env, "HALFSTEP_WINOGRAD": f"{m}x{m}"})
    python = peer_python(options)
    if python is None:
        return peers, crowds
    # What torch.compile makes is kept beside the build: compiling a large network takes minutes.
    env = {**env, "PYTHONDONTWRITEBYTECODE": "1"}
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(options.server.resolve().parent.parent / "peer-compiled"))
    for name in ("torch", "jax", "onnx") if onnx_files is not None else ("torch", "jax"):
        command = [python, str(HERE / "peers" / f"{name}_bench.py"), "--threads", threads]
        if name == "onnx":
            command += ["--files", str(onnx_files)]
        peer = Peer(name, command, env)
        try:
            peer.hello
            peers[name] = peer
            crowds[name] = Crowd(name, command, env)
            if name == "torch":
                peers |= sharing(name, command, env)
                alone = [python, str(HERE / "peers" / "torch_ddp_bench.py"), "--threads", "1"]
                peers["torch_ranks"] = Peer("torch_ranks", alone, env)
                crowds["torch_kept"] = Crowd(name, command, {**env, **PAGES_KEPT})
        except PeerError as error:
            say(f"{name} is left out: {error}")
    return peers, crowds


def write_onnx_files(options: argparse.Namespace, folder: pathlib.Path) -> None:
    """The networks of the inference rows. Raises PeerError."""
    done = subprocess.run([str(options.server), "--write-onnx", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        raise PeerError(f"its networks can't be written: {done.stderr.strip() or f'status {done.returncode}'}")


def start_ranks(options: argparse.Namespace) -> tuple[Peer | None, str]:
    """Our program as the ranks of a job; None, and why, where it can't be."""
    words, why = rank_launcher(options.threads)
    if not words:
        return None, f"Data parallel training is left out: {why}."
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HALFSTEP_THREADS": "1"}
    peer = Peer(f"{OURS}_ranks", [*words, str(options.server), "--ranks", "--threads", "1"], env)
    try:
        peer.hello
    except PeerError as error:
        return None, f"Data parallel training is left out: {error}."
    return peer, ""


def sharing(name: str, command: Sequence[str], env: Mapping[str, str]) -> dict[str, Peer | Together]:
    """The same program on a machine that is shared. It counts processors by itself, as users' programs do under a quota."""
    counting = {k: v for k, v in env.items() if k not in ("OMP_NUM_THREADS", "HALFSTEP_THREADS")}
    return {f"{name}_x2": Together(name, command, env, 2), f"{name}_x4": Together(name, command, env, 4),
            f"{name}_quota": Quota(f"{name}_quota", command, counting, 1.5)}


def close_finished(crowds: Mapping[str, Crowd], rows: Sequence[Row]) -> None:
    """Ends the processes that none of the rows to come asks for: those of networks hold gigabytes."""
    for name, crowd in crowds.items():
        crowd.keep({c.case for row in rows for c in row.others if c.peer == name} | {row.case for row in rows if name == OURS})


def headline(peers: dict[str, Peer], threads: int, limits: Limits, load: float) -> str:
    ours = peers[OURS].hello
    names = {"torch": "PyTorch", "jax": "JAX", "onnx": "ONNX Runtime"}
    beside = " and ".join(f"{names[n]} {peers[n].hello['version']}" for n in names if n in peers)
    lines = [f"Halfstep {ours['version']}" + (f" beside {beside}" if beside else ""),
             f"{ours['cpu']}, {ours['isa']}, {threads} thread{'s' if threads > 1 else ''} each, load average {load:.2f}",
             f"peaks measured: {limits.operations * 1e-9:.0f} GFLOP/s in float32, {limits.cache_bytes * 1e-9:.1f} GB/s on 8 MB, "
             f"{limits.memory_bytes * 1e-9:.1f} GB/s on 512 MB",
             "A ratio is the other's time over Halfstep's: the median of all turns (smallest-largest)."]
    return "\n".join(lines)


def as_json(section: Section, result: Result, limits: Limits) -> dict[str, Any]:
    row: dict[str, Any] = {"section": section.name, "labels": dict(zip(section.labels, result.row.labels)),
                           "case": result.row.case, "turns_ms": result.turns, "errors": result.errors,
                           "median_ms": {c: result.median(c) for c in result.turns}, "ratios": {},
                           "operations": result.operations, "bytes": result.bytes,
                           "limit_ms": limits.milliseconds(result.operations, result.bytes),
                           "facts": result.facts,
                           "goals": [{"goal": g.text(), "met": result.met(g)} for g in result.row.goals]}
    for column in result.turns:
        ratio = result.ratio(column)
        if column != "halfstep" and ratio is not None:
            row["ratios"][column] = {"median": ratio.median, "low": ratio.low, "high": ratio.high}
    return row


def progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def run(options: argparse.Namespace) -> int:
    load = machine.load_average()
    if load >= QUIET_LOAD:
        if options.record:
            say(f"run.py: --record wants a quiet machine (load average under {QUIET_LOAD}), it is {load:.2f}")
            return 1
        say(f"Warning: the load average is {load:.2f}. Other programs are running: neither times nor ratios will say much.")
    machine.use_processors(options.threads)
    effort = QUICK if options.quick else Effort()
    if options.turns is not None:
        effort = Effort(**{**vars(effort), "turns": options.turns})
    long = LONG if options.turns is None else Effort(**{**vars(LONG), "turns": options.turns})
    peers: dict[str, Peer] = {}
    crowds: dict[str, Crowd] = {}
    scratch = tempfile.TemporaryDirectory(prefix="halfstep-bench-")
    started = datetime.datetime.now(datetime.timezone.utc)
    start = time.monotonic()
    try:
        pictures, why = find_pictures(HERE.parent, pathlib.Path(scratch.name))
        infers = any(s.name == "inference" for s in plan(Machine(), options.quick, options.only))
        peers, crowds = start_peers(options, pictures, pathlib.Path(scratch.name) if infers else None)
        if "onnx" in peers:
            write_onnx_files(options, pathlib.Path(scratch.name))
        ours = peers[OURS].hello
        ranks, why_no_ranks = None, ""
        if any(s.name == "parallel" for s in plan(Machine(), options.quick, options.only)):
            ranks, why_no_ranks = start_ranks(options)
            if ranks is not None:
                peers[f"{OURS}_ranks"] = ranks
        sections = plan(Machine(bool(ours["bf16_units"]), bool(ours["f16_units"]), ours["isa"]), options.quick, options.only,
                        pictures is not None, ranks is not None, "onnx" in peers, pass_names(ours["cases"]))
        if not sections:
            say(f"run.py: --only {options.only!r} matches no row")
            return 2
        watch = Watch()
        limits = measure_limits(peers[OURS], effort)
        texts = [headline(peers, options.threads, limits, load)]
        if why and any(s.name == "loader" for s in plan(Machine(), options.quick, options.only)):
            texts.append(why)
        if why_no_ranks:
            texts.append(why_no_ranks)
        say("\n\n".join(texts))
        rows: list[dict[str, Any]] = []
        failed = disturbed = 0
        others = 0.0
        for section in sections:
            results = []
            for index, row in enumerate(section.rows):
                progress(row.name(section.name))
                if section.alone:
                    for peer in peers.values():
                        peer.close()  # it starts again when it is asked
                    results.append(measure_row(row, crowds, dataclasses.replace(long, min_ms=max(long.min_ms, section.min_ms))))
                    close_finished(crowds, section.rows[index + 1:])
                else:
                    results.append(measure_row(row, peers, effort))
                failed += "halfstep" not in results[-1].turns
                others = watch.sample()
                disturbed += others > BUSY_PROCESSORS
                rows.append({**as_json(section, results[-1], limits), "processors_of_others": round(others, 3)})
            progress("")
            texts.append(render(section, results, limits))
            say("\n" + texts[-1])
    finally:
        for program in (*peers.values(), *crowds.values()):
            program.close()
        scratch.cleanup()
    if disturbed:
        texts.append(f"Warning: during {disturbed} of {len(rows)} rows other programs used more than {BUSY_PROCESSORS:g} of a "
                     "processor: their figures are not to be trusted.")
        say("\n" + texts[-1])
    texts.append(f"{len(rows)} rows in {time.monotonic() - start:.0f} s")
    say("\n" + texts[-1])
    document = {"date": started.isoformat(timespec="seconds"), "processor": ours["cpu"], "isa": ours["isa"],
                "bf16_units": ours["bf16_units"], "f16_units": ours["f16_units"], "threads": options.threads,
                "versions": {name: peers[name].hello["version"] for name in (OURS, "torch", "jax", "onnx") if name in peers},
                "load_average": load, "effort": vars(effort), "long_effort": vars(long),
                "limits": {"operations_per_s": limits.operations, "cache_bytes_per_s": limits.cache_bytes,
                           "memory_bytes_per_s": limits.memory_bytes},
                "rows": rows}
    write(options, document, texts)
    return 1 if failed else 0


def write(options: argparse.Namespace, document: dict[str, Any], texts: list[str]) -> None:
    text = json.dumps(document, indent=1) + "\n"
    if options.json is not None:
        options.json.write_text(text)
    if options.record:
        folder = HERE / "results"
        folder.mkdir(exist_ok=True)
        processor = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(r\)|processor|cpu", "", document["processor"].lower())).strip("-")
        name = f"{document['date'][:10]}-{processor}-{document['isa']}-{document['threads']}-threads"
        if options.only:  # never over a whole run of the same day
            name += "-" + re.sub(r"[^a-z0-9]+", "-", options.only.lower()).strip("-")
        (folder / f"{name}.json").write_text(text)
        (folder / f"{name}.txt").write_text(f"{document['date']}\n" + "\n\n".join(texts) + "\n")
        say(f"Written to {folder / name}.txt and .json")


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        print(f"run.py: --json: there is no folder {options.json.parent}", file=sys.stderr)
        return 2
    if not options.server.exists():
        print(f"run.py: there is no {options.server}; build it: cmake --build build --target bench_server", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return run(options)
    except PeerError as error:
        print(f"run.py: Halfstep could not be measured: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("run.py: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
