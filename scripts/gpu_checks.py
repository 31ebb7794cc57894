# SPDX-License-Identifier: Apache-2.0
"""What scripts/gpu_checks.sh runs: the checks of the plug-in for NVIDIA GPUs, most of them side by side, and then its benchmarks.

A stage that can't run is skipped with the reason, and the rest goes on. Each has a limit, and all of them together --minutes. With no
--build what is needed is built first, for the GPUs of this machine; that time is told apart and doesn't count.

Exit status: 0 nothing failed; 1 a stage failed; 2 bad arguments.
"""
from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

TOP = pathlib.Path(__file__).resolve().parent.parent
TESTS = ("ops", "autograd", "amp", "nn", "optim")
TRAINING = "tests/cli/cuda_test.py"  # the program's runs on the GPU beside those on the CPU
# Of the caller's settings these: the Python with the peer, and where cuBLASLt, cuDNN and NCCL lie.
KEPT = ("HALFSTEP_PEER_PYTHON", "HALFSTEP_CUDA_LIBRARIES")
TARGETS = ("halfstep_cli", "halfstep_cuda", "halfstep_sim", "bench_server", *(f"test_{t}" for t in TESTS))
PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"


@dataclasses.dataclass
class Outcome:
    """Of a stage: what became of it in a word and in a line, and more lines for the report."""

    status: str
    summary: str
    details: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Stage:
    name: str
    what: str
    limit: float  # seconds
    run: Callable[["Checks", float], Outcome]
    alone: bool = False  # with the GPU to itself: it is timed, or keeps the GPU from others


def pip_libraries(python: str) -> str:
    """The folders of NVIDIA's libraries among a Python's packages, as PyTorch brings them."""
    code = "import glob, sys; print(':'.join(sorted(g for p in sys.path for g in glob.glob(p + '/nvidia/*/lib'))))"
    try:
        return subprocess.run([python or sys.executable, "-c", code], text=True, capture_output=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


class Checks:
    """The machine and the build, and how programs are run on them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.build: pathlib.Path = options.build or TOP / "build-gpu"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("HALFSTEP_") or k in KEPT}
        self.environment.setdefault("HALFSTEP_CUDA_LIBRARIES", pip_libraries(options.python))
        # The state of this run is its own: a record of the check would say of a build that is gone that it was checked.
        self.plugin: pathlib.Path = options.plugin or self.build / "lib/halfstep/plugins/libhalfstep_cuda.so"
        # Tests of regions for one kind of device have another kind beside it.
        simulated = self.build / "lib/halfstep/plugins/libhalfstep_sim.so"
        plugins = [self.plugin] + ([simulated] if simulated.is_file() else [])
        self.environment.update(HALFSTEP_PLUGINS=":".join(str(p) for p in plugins))
        self.running: list[subprocess.Popen[str]] = []
        self.ended = False
        self.lock = threading.Lock()  # of both: stages have threads of their own

    def program(self, name: str) -> pathlib.Path:
        return self.build / ("tests" if name.startswith("test_") else "bin") / name

    def missing(self, *names: str) -> str:
        """Why these programs can't be run; empty when they can."""
        if not self.plugin.is_file():
            return f"there is no plug-in {self.plugin}"
        lacking = [str(self.program(n)) for n in names if not self.program(n).is_file()]
        return f"not built: {', '.join(lacking)}" if lacking else ""

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        with self.lock:
            if self.ended:
                raise RuntimeError("the checks were ended")
            process = subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       text=True, errors="replace", cwd=TOP, env={**self.environment, **environment},
                                       start_new_session=True)
            self.running.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], limit: float) -> tuple[int | None, str]:
        """Its status (None: it ran past the limit and was ended) and what it printed."""
        try:
            out, _ = process.communicate(timeout=max(limit, 0.1))
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            status = None
        with self.lock:
            self.running.remove(process)
        return status, out

    def call(self, command: Sequence[str], limit: float, **environment: str) -> tuple[int | None, str]:
        return self.finish(self.start(command, **environment), limit)

    def end_all(self) -> None:
        """Ends what runs; from here on nothing is started."""
        with self.lock:
            self.ended = True
            running = list(self.running)
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def how(status: int | None, limit: float) -> str:
    if status is None:
        return f"not done within {limit:.0f} s"
    return f"signal {-status}" if status < 0 else f"status {status}"


def tail(text: str, lines: int = 12) -> list[str]:
    return [line for line in text.splitlines() if line.strip()][-lines:]


def facts(checks: Checks, limit: float) -> Outcome:
    """GPU, driver, clocks and versions, as nvidia-smi has them."""
    fields = "name,compute_cap,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current"
    details = []
    commit = shutil.which("git") and checks.call(["git", "rev-parse", "--short", "HEAD"], 10)
    if commit and commit[0] == 0:
        changes = checks.call(["git", "status", "--porcelain", "--untracked-files=no"], 10)
        details.append(f"commit {commit[1].strip()}{' and uncommitted changes' if changes[1].strip() else ''}")
    if shutil.which("nvcc"):
        details += [line for line in checks.call(["nvcc", "--version"], 20)[1].splitlines() if "release" in line]
    if not shutil.which("nvidia-smi"):
        return Outcome(SKIPPED, "there is no nvidia-smi here", details)
    status, out = checks.call(["nvidia-smi", f"--query-gpu={fields}", "--format=csv"], limit)
    if status != 0:
        return Outcome(SKIPPED, f"nvidia-smi: {how(status, limit)}: {' '.join(tail(out, 1))}", details)
    gpus = [line for line in out.splitlines()[1:] if line.strip()]
    return Outcome(PASSED, "; ".join(gpus), details + out.splitlines())


def self_check(checks: Checks, limit: float) -> Outcome:
    """halfstep devices --check"""
    if why := checks.missing("halfstep"):
        return Outcome(SKIPPED, why)
    quick = ["--quick"] if checks.options.quick else []
    listed = checks.call([checks.program("halfstep"), "devices", checks.options.device], limit)[1]
    if "compiled quickly" in listed:
        return Outcome(FAILED, "the plug-in was compiled quickly, for kernels that are slow", listed.splitlines())
    status, out = checks.call([checks.program("halfstep"), "devices", "--check", checks.options.device, *quick], limit)
    if status == 2:
        return Outcome(SKIPPED, " ".join(tail(out, 1)))
    bad = [line for line in out.splitlines() if line.startswith("FAILED") or line.startswith("         ")]
    told = [line for line in out.splitlines() if ": " in line] or [out]
    last = " ".join(tail(told[-1] if status in (0, 1) else out, 1))
    if missing := [line for line in out.splitlines() if "slow kernels" in line or "can't be opened" in line]:
        # All would be right, and every figure of a convolution worth nothing.
        return Outcome(FAILED, f"a library is missing, name its folder with HALFSTEP_CUDA_LIBRARIES: {missing[0].strip()}", missing + bad)
    native = sum(line.rstrip().endswith("native") for line in out.splitlines())
    summary = f"{last} ({native} lines all native)" if status in (0, 1) else f"{how(status, limit)}: {last}"
    return Outcome(PASSED if status == 0 else FAILED, summary, listed.splitlines() + (out.splitlines() if status == 0 else bad + tail(out)))


def tests(checks: Checks, limit: float) -> Outcome:
    """The test programs with --device, and the program's training runs, side by side"""
    runnable = [t for t in TESTS if not checks.missing(f"test_{t}")]
    if not runnable:
        return Outcome(SKIPPED, checks.missing(f"test_{TESTS[0]}"))
    # Nothing here is timed: the programs share the GPU.
    filters = [f"--gtest_filter={checks.options.filter or '-*Slow.*:*Slow/*'}"]
    start = time.monotonic()
    # What a kernel finds wrong is told by the next wait; tests of ops expect it from the call.
    began = {t: checks.start([checks.program(f"test_{t}"), "--device", checks.options.device, "--gtest_brief=0", *filters],
                             **({"HALFSTEP_SYNC": "1"} if t == "ops" else {})) for t in runnable}
    training = None
    if not checks.options.filter and not checks.missing("halfstep"):
        training = checks.start([sys.executable, TOP / TRAINING, "Training"], HALFSTEP_CUDA_PLUGIN=str(checks.plugin),
                                HALFSTEP_PROGRAM=str(checks.program("halfstep")), HALFSTEP_TEST_DEVICE=checks.options.device)
    # Those that end early wait with full pipes otherwise.
    with concurrent.futures.ThreadPoolExecutor(len(began) + 1) as pool:
        ended = {t: pool.submit(checks.finish, p, limit - (time.monotonic() - start)) for t, p in began.items()}
        trained = training and pool.submit(checks.finish, training, limit - (time.monotonic() - start))
    lines, details, bad = [], [], 0
    if trained:
        status, out = trained.result()
        ran = re.search(r"^Ran (\d+) test", out, re.M)
        lines.append(f"training: {ran.group(1) if ran else 'no'} tests, {'passed' if status == 0 else 'FAILED, ' + how(status, limit)}")
        if status != 0:
            bad += 1
            details += ["training:"] + tail(out, 30)
    for t, future in ended.items():
        status, out = future.result()
        passed = re.search(r"\[  PASSED  \] (\d+) test", out)
        failures = re.findall(r"\[  FAILED  \] ([\w/.]+)(?:, where|$)", out, re.M)
        skipped = re.search(r"\[  SKIPPED \] (\d+) test", out)
        number = int(passed.group(1)) if passed else 0
        text = f"test_{t}: {number} passed"
        if skipped:
            text += f", {skipped.group(1)} skipped"
        if status == 0 and number == 0 and not checks.options.filter:
            bad += 1
            text += ", no test was run"
        if status != 0:
            bad += 1
            distinct = list(dict.fromkeys(failures))
            text += f", {len(distinct)} FAILED, {how(status, limit)}"
            running = re.findall(r"\[ RUN      \] ([\w/.]+)", out)
            if status is None or status < 0:
                text += f", in {running[-1] if running else 'its start'}"
            details += [f"test_{t}:"] + [f"  {f}" for f in distinct[:40]] + ([] if distinct else tail(out))
        lines.append(text)
    lines += [f"test_{t}: {checks.missing(f'test_{t}')}" for t in TESTS if t not in runnable]
    return Outcome(FAILED if bad else PASSED, "; ".join(lines), details)


# Flags and environment of each tool. NCCL probes for kernels that its build may not contain: memcheck would count each failed call as
# an error. Racecheck crashes on Hopper kernels of cuBLASLt and cuDNN (an illegal access that memcheck doesn't see), so it runs without.
SANITIZERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "memcheck": (["--report-api-errors", "no"], {}),
    "racecheck": ([], {"HALFSTEP_CUDNN": "0", "HALFSTEP_CUBLASLT": "0"})}


def sanitizer(tool: str) -> Callable[[Checks, float], Outcome]:
    def run(checks: Checks, limit: float) -> Outcome:
        if why := checks.missing("halfstep"):
            return Outcome(SKIPPED, why)
        program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if program is None:
            return Outcome(SKIPPED, "there is no compute-sanitizer here")
        # Our own kernels only: NVIDIA's are large, and synchronise in ways that the tool may take for races.
        options = checks.call([program, "--help"], 20)[1]
        own = next(([o, "kns=hscuda"] for o in ("--kernel-name", "--filter") if o in options), [])
        # All families of kernels on small tensors. Memory is given back at once, so that what lies beyond a tensor is nobody's.
        flags, settings = SANITIZERS[tool]
        status, out = checks.call([program, "--tool", tool, *flags, *own, "--error-exitcode", "9", "--print-limit", "20",
                                   checks.program("halfstep"), "devices", "--check", checks.options.device, "--quick"], limit,
                                  HALFSTEP_NO_CACHE="1", **settings)
        said = [line.strip() for line in out.splitlines() if "SUMMARY" in line] or tail(out, 1)
        found = [line for line in out.splitlines() if line.startswith("=========")]
        if status == 0:
            return Outcome(PASSED, " ".join(said).replace("=", "").strip())
        if re.search(r"device (is )?not supported|no attachable process", out, re.I):
            return Outcome(SKIPPED, " ".join(said))
        return Outcome(FAILED, f"{how(status, limit)}: {' '.join(said)}", found[:60] or tail(out, 30))

    run.__doc__ = f"compute-sanitizer --tool {tool} over all families of kernels, on small tensors"
    return run


def benchmarks(checks: Checks, limit: float) -> Outcome:
    """benchmarks/gpu.py: steps, scaler and optimizers in turns with PyTorch, each with its physical limit"""
    if why := checks.missing("bench_server"):
        return Outcome(SKIPPED, why)
    command = [sys.executable, TOP / "benchmarks/gpu.py", "--server", checks.program("bench_server"), "--device", checks.options.device,
               "--seconds", f"{limit - 20:.0f}", "--out", checks.options.jsonl]
    if checks.options.python:
        command += ["--python", checks.options.python]
    if checks.options.quick:
        command += ["--small", "--turns", "1"]
    status, out = checks.call(command, limit)
    lines = out.splitlines()
    measured = sum(line.startswith("| ") for line in lines) - 2
    missed = sum("MISSED" in line for line in lines)
    alone = "" if "beside PyTorch" in out else ", alone: no PyTorch"
    if status is None or (status != 0 and measured <= 0):
        return Outcome(FAILED, f"{how(status, limit)}: {' '.join(tail(out, 1))}", lines)
    # Missing a goal is a finding, no failure of a check.
    return Outcome(PASSED if status == 0 else FAILED, f"{max(measured, 0)} rows, {missed} with a goal missed{alone}", lines)


STAGES = (Stage("facts", facts.__doc__ or "", 20, facts),
          Stage("self-check", self_check.__doc__ or "", 120, self_check),
          Stage("tests", tests.__doc__ or "", 150, tests),
          Stage("memcheck", "compute-sanitizer --tool memcheck over all families of kernels", 100, sanitizer("memcheck")),
          Stage("racecheck", "compute-sanitizer --tool racecheck over all families of kernels", 200, sanitizer("racecheck"), alone=True),
          Stage("benchmarks", benchmarks.__doc__ or "", 330, benchmarks, alone=True))
RESERVED = 5.0  # seconds for what stands between the stages


def build(checks: Checks) -> Outcome:
    """The plug-in for this machine's GPUs, the program, the tests and the timing program."""
    folder = checks.build
    start = time.monotonic()
    commands: list[list[str | pathlib.Path]] = [
        [TOP / "scripts/cuda_options.sh", "1", "", "0", folder / "cuda.cmake"],
        ["cmake", "-S", TOP, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-C", folder / "cuda.cmake"],
        ["cmake", "--build", folder, "-j", str(os.cpu_count() or 2), "--target", *TARGETS]]
    for command in commands:
        # Downloads and compilers get all the time that they want.
        status, out = checks.call([str(c) for c in command], 3600)
        if status != 0:
            return Outcome(FAILED, f"{pathlib.Path(str(command[0])).name}: {how(status, 3600)}", tail(out, 30), time.monotonic() - start)
    return Outcome(PASSED, f"into {folder.name}", [], time.monotonic() - start)


class Report:
    """What was found, on the terminal at once and in two files."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.jsonl: pathlib.Path = options.jsonl
        self.markdown = options.jsonl.with_suffix(".md")
        self.rows: list[tuple[str, Outcome]] = []
        self.start = datetime.datetime.now(datetime.timezone.utc)
        self.jsonl.parent.mkdir(parents=True, exist_ok=True)
        self.jsonl.write_text("")

    def add(self, name: str, outcome: Outcome) -> None:
        self.rows.append((name, outcome))
        print(f"{outcome.status:<8} {name:<11} {outcome.seconds:6.1f} s  {outcome.summary}", flush=True)
        with self.jsonl.open("a") as file:
            file.write(json.dumps({"kind": "stage", "stage": name, "status": outcome.status, "seconds": round(outcome.seconds, 1),
                                   "summary": outcome.summary, "details": outcome.details}) + "\n")
        self.write()

    def write(self) -> None:
        """Anew after each stage, so that what was found stays when the machine goes."""
        text = [f"# GPU checks of {self.start:%Y-%m-%d %H:%M} UTC", "", "| stage | result | seconds | |", "| --- | --- | --- | --- |"]
        text += [f"| {n} | {o.status} | {o.seconds:.0f} | {o.summary.replace('|', '/')} |" for n, o in self.rows]
        for name, outcome in self.rows:
            if outcome.details:
                table = name == "benchmarks"
                text += ["", f"## {name}", "", *([] if table else ["```text"]), *outcome.details, *([] if table else ["```"])]
        # No path of the machine: the file is kept with the project.
        whole = "\n".join(text) + "\n"
        for path, short in ((str(TOP) + "/", ""), (str(pathlib.Path.home()) + "/", "~/")):
            whole = whole.replace(path, short)
        self.markdown.write_text(whole)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [s.name for s in STAGES]
    parser = argparse.ArgumentParser(prog="scripts/gpu_checks.sh", description="All checks and benchmarks on a GPU, in under ten minutes.")
    parser.add_argument("--build", type=pathlib.Path, metavar="DIR", help="a build with the plug-in (default: one is made in build-gpu)")
    parser.add_argument("--plugin", type=pathlib.Path, metavar="FILE", help="the plug-in (default: that of the build)")
    parser.add_argument("--device", default="cuda", help="the device (default cuda)")
    parser.add_argument("--python", default=os.environ.get("HALFSTEP_PEER_PYTHON", ""),
                        help="a Python with PyTorch for CUDA and torchvision (default: $HALFSTEP_PEER_PYTHON, else none)")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all stages together, without the build (default 9.5)")
    parser.add_argument("--only", default="", metavar="STAGES", help=f"some of {','.join(names)}")
    parser.add_argument("--filter", default="", metavar="PATTERN", help="only these tests, as --gtest_filter")
    parser.add_argument("--quick", action="store_true", help="small tensors and one turn: to try the script itself")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", default=TOP / "benchmarks/results", help="for the results")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and what is there for it, and end")
    options = parser.parse_args(argv)
    options.stages = options.only.split(",") if options.only else names
    for name in options.stages:
        if name not in names:
            parser.error(f"--only: expected some of {','.join(names)}, got '{name}'")
    if options.minutes <= 0:
        parser.error(f"--minutes: expected more than 0, got {options.minutes:g}")
    for folder in ("build", "plugin", "out"):
        if getattr(options, folder) is not None:
            setattr(options, folder, getattr(options, folder).absolute())
    options.jsonl = options.out / f"gpu-{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}.jsonl"
    return options


def plan(checks: Checks) -> int:
    options = checks.options
    print(f"device {options.device}, plug-in {checks.plugin}")
    if options.build is None:
        print(f"build      into {checks.build}: {', '.join(TARGETS)} (not counted)")
    for stage in STAGES:
        if stage.name in options.stages:
            print(f"{stage.name:<11} at most {min(stage.limit, 60 * options.minutes):3.0f} s  {stage.what}{'' if stage.alone else ' (side by side)'}")
    print(f"all of them together: at most {60 * options.minutes:.0f} s")
    for tool in ("nvidia-smi", "nvcc", "compute-sanitizer", "cmake", "ninja"):
        print(f"{tool:<18} {shutil.which(tool) or 'missing'}")
    print(f"{'libraries in':<18} {checks.environment['HALFSTEP_CUDA_LIBRARIES'] or 'the usual places'}")
    print(f"{'PyTorch':<18} {options.python or 'missing: --python names none'}")
    print(f"results: {options.jsonl.with_suffix('.md')} and .jsonl")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    checks = Checks(options)
    if options.dry_run:
        return plan(checks)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = Report(options)
    try:
        if options.build is None:
            report.add("build", build(checks))
        start = time.monotonic()

        def run(stage: Stage) -> Outcome:
            began = time.monotonic()
            left = 60 * options.minutes - (began - start) - RESERVED
            if left < 5:
                return Outcome(SKIPPED, "the time was over")
            try:
                outcome = stage.run(checks, min(stage.limit, left))
            except Exception as error:  # one stage that breaks is no reason to lose the others
                outcome = Outcome(FAILED, f"{type(error).__name__}: {error}", traceback.format_exc().splitlines())
            outcome.seconds = time.monotonic() - began
            return outcome

        wanted = [s for s in STAGES if s.name in options.stages]
        with concurrent.futures.ThreadPoolExecutor(len(STAGES)) as pool:
            begun = [(s, pool.submit(run, s)) for s in wanted if not s.alone]
            try:
                for stage, outcome in begun:
                    report.add(stage.name, outcome.result())
            except BaseException:  # Ctrl-C, before the pool waits for what is still running
                checks.end_all()
                raise
        for stage in wanted:
            if stage.alone:
                report.add(stage.name, run(stage))
        print(f"{time.monotonic() - start:.0f} s in all, without a build; {report.markdown}")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        checks.end_all()
    return 1 if any(o.status == FAILED for _, o in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
