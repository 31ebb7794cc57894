#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/gpu_checks.sh and benchmarks/gpu.py on a machine without a GPU: programs that answer as the real ones do."""
from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(TOP / "benchmarks"))

import gpu  # noqa: E402

GOOD_TEST = """echo '[ RUN      ] Relu.Values'; echo '[       OK ] Relu.Values (3 ms)'
echo '[  SKIPPED ] 2 tests, listed below:'; echo '[  PASSED  ] 41 tests.'"""
BAD_TEST = """echo '[ RUN      ] Adam.Steps'; echo '[  FAILED  ] Adam.Steps (3 ms)'
echo '[  PASSED  ] 7 tests.'; echo '[  FAILED  ] 1 test, listed below:'; echo '[  FAILED  ] Adam.Steps'; exit 1"""
GOOD_CHECK = """echo 'ok     casts   f16   8 cases   same    0.1 s  native'; echo 'cuda:0: passed: 74 lines, 31 s'"""
BAD_CHECK = """echo 'FAILED softmax   f16   5 cases  3.1    0.1 s  native'; echo '         softmax: 3.1 times the bound'
echo 'cuda:0: FAILED: 1 of 74 lines, 31 s'; exit 1"""


class GpuChecks(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="halfstep-gpu-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.program("build/lib/halfstep/plugins/libhalfstep_cuda.so", "")

    def program(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)

    def run_checks(self, *arguments: str) -> tuple[int, str]:
        out = subprocess.run(self.command(*arguments), env=self.environment(), text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, timeout=60, check=False)
        return out.returncode, out.stdout

    def command(self, *arguments: str) -> list[str]:
        return [str(TOP / "scripts/gpu_checks.sh"), "--build", str(self.folder / "build"), "--out", str(self.folder / "out"), *arguments]

    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.folder}/bin:/usr/bin:/bin", "HOME": str(self.folder)}

    def stages(self) -> dict[str, dict[str, object]]:
        file = next((self.folder / "out").glob("gpu-*.jsonl"))
        return {row["stage"]: row for row in map(json.loads, file.read_text().splitlines()) if row["kind"] == "stage"}

    def test_dry_run_prints_the_plan_and_writes_nothing(self) -> None:
        status, out = self.run_checks("--dry-run")
        self.assertEqual(status, 0, out)
        for stage in ("facts", "self-check", "tests", "memcheck", "racecheck", "benchmarks"):
            self.assertRegex(out, rf"(?m)^{stage} +at most +\d+ s  \S")
        self.assertIn("all of them together: at most 570 s", out)
        self.assertFalse((self.folder / "out").exists())

    def test_stages_that_cannot_run_are_skipped_with_a_reason(self) -> None:
        status, out = self.run_checks("--minutes", "1")
        self.assertEqual(status, 0, out)
        stages = self.stages()
        self.assertEqual({s["status"] for s in stages.values()}, {"skipped"})
        self.assertIn("nvidia-smi", stages["facts"]["summary"])
        self.assertIn("not built: ", stages["self-check"]["summary"])
        report = next((self.folder / "out").glob("gpu-*.md")).read_text()
        self.assertIn("| self-check | skipped |", report)
        self.assertNotIn(str(self.folder), report, "the home of this machine")

    def test_what_passes_and_what_fails_is_told_and_the_rest_goes_on(self) -> None:
        self.program("bin/nvidia-smi", "echo 'name, compute_cap'; echo 'NVIDIA H200, 9.0'")
        self.program("build/bin/halfstep", GOOD_CHECK)
        for test in ("ops", "autograd", "amp", "nn", "optim"):
            self.program(f"build/tests/test_{test}", BAD_TEST if test == "optim" else GOOD_TEST)
        self.program("build/tests/test_nn", "echo '[  PASSED  ] 0 tests.'")
        self.program("bin/compute-sanitizer", "echo '========= ERROR SUMMARY: 0 errors'")
        status, out = self.run_checks("--minutes", "1")
        self.assertEqual(status, 1, out)
        stages = self.stages()
        self.assertEqual({n: s["status"] for n, s in stages.items()},
                         {"facts": "passed", "self-check": "passed", "tests": "FAILED", "memcheck": "passed", "racecheck": "passed",
                          "benchmarks": "skipped"})
        self.assertIn("NVIDIA H200", stages["facts"]["summary"])
        self.assertIn("passed: 74 lines", stages["self-check"]["summary"])
        self.assertIn("test_ops: 41 passed, 2 skipped", stages["tests"]["summary"])
        self.assertIn("test_optim: 7 passed, 1 FAILED, status 1", stages["tests"]["summary"])
        self.assertIn("test_nn: 0 passed, no test was run", stages["tests"]["summary"])
        self.assertIn("  Adam.Steps", stages["tests"]["details"])

    def test_failures_of_the_check_and_the_sanitizer(self) -> None:
        self.program("build/bin/halfstep", BAD_CHECK)
        self.program("bin/compute-sanitizer", "echo '========= Invalid __global__ read'; echo '========= ERROR SUMMARY: 3 errors'; exit 9")
        status, out = self.run_checks("--minutes", "1", "--only", "self-check,memcheck")
        self.assertEqual(status, 1, out)
        stages = self.stages()
        self.assertEqual(list(stages), ["self-check", "memcheck"])
        self.assertIn("FAILED: 1 of 74 lines", stages["self-check"]["summary"])
        self.assertIn("         softmax: 3.1 times the bound", stages["self-check"]["details"])
        self.assertEqual(stages["memcheck"]["status"], "FAILED")
        self.assertIn("========= Invalid __global__ read", stages["memcheck"]["details"])

    def test_a_library_that_is_missing_is_a_failure_though_all_is_right(self) -> None:
        warning = "halfstep: warning: cuda: convolutions run in slow kernels of the plug-in's own: libcudnn.so.9 can't be opened"
        self.program("build/bin/halfstep", f'echo "{warning}"; {GOOD_CHECK}')
        self.assertEqual(self.run_checks("--minutes", "1", "--only", "self-check")[0], 1)
        self.assertIn("HALFSTEP_CUDA_LIBRARIES", self.stages()["self-check"]["summary"])

    def test_a_plugin_that_was_compiled_quickly_is_not_measured(self) -> None:
        self.program("build/bin/halfstep", "echo '  plug-in: NVIDIA, version CUDA 13.0, driver for 13.0, compiled quickly'")
        self.assertEqual(self.run_checks("--minutes", "1", "--only", "self-check")[0], 1)
        self.assertIn("compiled quickly", self.stages()["self-check"]["summary"])

    def test_a_gpu_that_the_sanitizer_refuses_is_skipped(self) -> None:
        self.program("build/bin/halfstep", GOOD_CHECK)
        self.program("bin/compute-sanitizer", "echo '========= Error: Device not supported'; exit 1")
        status, out = self.run_checks("--minutes", "1", "--only", "memcheck")
        self.assertEqual((status, self.stages()["memcheck"]["status"]), (0, "skipped"), out)

    def test_settings_reach_the_programs_and_the_sanitizer_sees_our_kernels_only(self) -> None:
        self.program("build/bin/halfstep", GOOD_CHECK)
        self.program("build/tests/test_ops", f'echo "$HALFSTEP_SYNC $*" >{self.folder}/ops; {GOOD_TEST}')
        self.program("build/tests/test_nn", f'echo "$HALFSTEP_SYNC|" >{self.folder}/nn; {GOOD_TEST}')
        self.program("bin/compute-sanitizer", f"""[ "$1" = --help ] && {{ echo '  --kernel-name arg'; exit 0; }}
echo "$*" >{self.folder}/sanitizer; echo '========= ERROR SUMMARY: 0 errors'""")
        self.run_checks("--minutes", "1", "--only", "tests,memcheck")
        self.assertRegex((self.folder / "ops").read_text(), r"^1 --device cuda .*--gtest_filter=-\*Slow")
        self.assertEqual((self.folder / "nn").read_text(), "|\n")
        self.assertIn("--kernel-name kns=hscuda", (self.folder / "sanitizer").read_text())

    def test_races_are_looked_for_in_our_kernels_alone(self) -> None:
        self.program("build/bin/halfstep", GOOD_CHECK)
        self.program("bin/compute-sanitizer", f"""[ "$1" = --help ] && exit 0
echo "$HALFSTEP_CUDNN $HALFSTEP_CUBLASLT $*" >{self.folder}/$2; echo '========= RACECHECK SUMMARY: 0 hazards displayed'""")
        self.run_checks("--minutes", "1", "--only", "memcheck,racecheck")
        self.assertTrue((self.folder / "racecheck").read_text().startswith("0 0 --tool racecheck"))
        self.assertTrue((self.folder / "memcheck").read_text().startswith("  --tool memcheck --report-api-errors no"))

    def test_what_hangs_is_ended_in_time_with_all_that_it_started(self) -> None:
        self.program("build/bin/halfstep", "sleep 300 & sleep 300")
        start = time.monotonic()
        status, out = self.run_checks("--minutes", "0.2", "--only", "self-check")
        self.assertLess(time.monotonic() - start, 30)
        self.assertEqual(status, 1, out)
        self.assertIn("not done within", self.stages()["self-check"]["summary"])

    def test_a_signal_ends_it_at_once_with_all_that_it_started(self) -> None:
        self.program("build/bin/halfstep", f"echo >{self.folder}/started; sleep 300")
        process = subprocess.Popen(self.command("--minutes", "5", "--only", "self-check"), stdout=subprocess.DEVNULL, env=self.environment())
        start = time.monotonic()
        while not (self.folder / "started").exists() and time.monotonic() - start < 30:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(timeout=30), 128 + signal.SIGTERM)

    def test_refuses_what_it_does_not_know(self) -> None:
        self.assertEqual(self.run_checks("--only", "everything")[0], 2)
        self.assertEqual(self.run_checks("--minutes", "0")[0], 2)


class GpuTable(unittest.TestCase):
    def test_rows_have_names_of_their_own(self) -> None:
        names = [row.name for row in gpu.rows(256, 64, False) + gpu.compiled(256)]
        self.assertEqual(len(names), len(set(names)))

    def test_rows_are_chosen_by_name_and_the_copy_is_always_one(self) -> None:
        table = gpu.rows(256, 64, False) + gpu.compiled(256)
        self.assertEqual(gpu.chosen(table, None), table)
        names = [row.name for row in gpu.chosen(table, re.compile("^ResNet-50.*, b?f16$"))]
        self.assertEqual(names, ["copy of 1 GiB on the device", "ResNet-50 step, batch 256, f16", "ResNet-50 step, batch 256, bf16"])
        listed = subprocess.run([sys.executable, TOP / "benchmarks/gpu.py", "--list", "--only", "^ResNet-50.*, b?f16$"], text=True,
                                stdout=subprocess.PIPE, timeout=60, check=True)
        self.assertEqual(listed.stdout.splitlines(), names)

    def test_goals_of_ratios_and_of_bandwidth(self) -> None:
        limits = gpu.sheet("NVIDIA H200")
        self.assertEqual((limits.operations, limits.bytes), (989e12, 4.8e12))
        self.assertAlmostEqual(limits.milliseconds(67e9, 0, "f32") or 0, 1.0)
        self.assertAlmostEqual(limits.milliseconds(989e9, 4.8e9 * 2, "low") or 0, 2.0)
        limits.copy = 4e12
        found = {"row": "unscale", "turns_ms": {"halfstep": [0.25, 0.2, 0.3], "PyTorch": [0.5, 0.4, 0.6]}, "errors": {},
                 "operations": 0.0, "bytes": 8e8}
        row = gpu.Row("unscale", "gpu/unscale/f32", goal=gpu.Goal((("PyTorch", 2.5),), 0.75))
        gpu.judge(row, found, limits)
        self.assertAlmostEqual(found["ratios"]["PyTorch"]["median"], 2.0)
        self.assertAlmostEqual(found["limit_ms"], 1e3 * 8e8 / 4.8e12)
        self.assertAlmostEqual(found["of_copy"], 8e8 / 0.25e-3 / 4e12)
        self.assertEqual([g["met"] for g in found["goals"]], [False, True])
        self.assertIn("2.5x PyTorch: MISSED; 75% of the copy's bandwidth: met (80%)", gpu.line(found))

    def test_a_missing_peer_is_no_missed_goal(self) -> None:
        found = {"row": "step", "turns_ms": {"halfstep": [1.0]}, "errors": {"PyTorch": "no|ne"}, "operations": 1e9, "bytes": 0.0}
        gpu.judge(gpu.Row("step", "gpu/mlp/f16/b64", goal=gpu.Goal((("PyTorch", 5.0),))), found, gpu.sheet("Unknown"))
        self.assertIsNone(found["goals"][0]["met"])
        self.assertIsNone(found["limit_ms"])
        self.assertIn("not known", gpu.line(found))
        self.assertEqual(gpu.line(found).count("|"), 8, "a cell has no bars of its own")

    def test_the_longest_name_of_a_sheet_counts(self) -> None:
        self.assertEqual(gpu.sheet("NVIDIA H100 PCIe").operations, 756e12)
        self.assertEqual(gpu.sheet("NVIDIA H100 80GB HBM3").bytes, 3.35e12)


@unittest.skipUnless(os.path.exists(os.environ.get("HALFSTEP_BENCH_SERVER", "")), "the timing program is not built")
class OnTheSimulatedDevice(unittest.TestCase):
    def test_cases_run_and_every_row_asks_for_one(self) -> None:
        server = subprocess.run([os.environ["HALFSTEP_BENCH_SERVER"], "--device", "sim", "--small", "--threads", "1"],
                                input="gpu/copy 1 1\ngpu/unscale/f16 1 1\ngpu/optimizer/adamw/bf16 1 1\ngpu/mlp/f16/b64 1 1\n",
                                text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120, check=True)
        hello, *answers = map(json.loads, server.stdout.splitlines())
        self.assertEqual(hello["device"], "sim:0")
        for answer in answers:
            self.assertGreater(answer.get("median_ms", 0), 0, answer)
        for row in gpu.rows(2, 1, True) + gpu.compiled(2):
            self.assertIn(row.case, hello["cases"])
        self.assertGreater(len(gpu.single_calls(hello["cases"])), 20)

    def test_a_name_of_no_row_is_refused(self) -> None:
        run = subprocess.run([sys.executable, TOP / "benchmarks/gpu.py", "--server", os.environ["HALFSTEP_BENCH_SERVER"], "--device", "sim",
                              "--small", "--only", "no such row"], text=True, capture_output=True, timeout=120, check=False)
        self.assertEqual((run.returncode, run.stdout), (2, ""))
        self.assertIn("--only: no row's name matches 'no such row'", run.stderr)


if __name__ == "__main__":
    unittest.main()
