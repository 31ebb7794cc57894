#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of benchmarks/run.py and its parts. HALFSTEP_BENCH_SERVER names the built timing program, where there is one."""
from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
FAKE = pathlib.Path(__file__).resolve().parent / "fake_peer.py"
sys.path.insert(0, str(TOP / "benchmarks"))

import run  # noqa: E402
from harness import machine, table  # noqa: E402
from harness.measure import Effort, measure_limits, measure_row  # noqa: E402
from harness.peer import Answer, Crowd, Peer, PeerError, parse_answer, parse_facts, parse_hello  # noqa: E402
from harness.pictures import find_pictures, jpeg_size  # noqa: E402
from harness.plan import OURS, Contestant, Goal, Machine, Row, Section, pass_names, plan  # noqa: E402
from harness.ranks import rank_launcher  # noqa: E402
from harness.shared import Quota, Together  # noqa: E402
from harness.stats import Limits, Ratio, ratio_in_turns  # noqa: E402

LIMITS = Limits(operations=1e9, cache_bytes=1e9, memory_bytes=1e8)
EFFORT = Effort(turns=2, repetitions=1, min_ms=1, row_seconds=30, timeout=20, settle=0)


class RatiosTest(unittest.TestCase):
    def test_is_taken_turn_by_turn(self) -> None:
        # The machine got three times slower between the turns: the ratio of the medians of unequal turns would be off.
        ratio = ratio_in_turns([2.0, 6.0, 7.5], [1.0, 3.0, 3.0])
        self.assertEqual(ratio, Ratio(2.0, 2.0, 2.5))

    def test_needs_a_turn_that_both_have(self) -> None:
        self.assertEqual(ratio_in_turns([4.0], [2.0, 1.0]), Ratio(2.0, 2.0, 2.0))
        self.assertIsNone(ratio_in_turns([], [1.0]))

    def test_inverse_swaps_the_ends(self) -> None:
        self.assertEqual(Ratio(2.0, 1.0, 4.0).inverse(), Ratio(0.5, 0.25, 1.0))


class LimitsTest(unittest.TestCase):
    def test_the_slower_of_both_counts(self) -> None:
        self.assertAlmostEqual(LIMITS.milliseconds(5e6, 1e6), 5.0)
        self.assertAlmostEqual(LIMITS.milliseconds(1e6, 3e6), 3.0)

    def test_large_sets_come_from_memory(self) -> None:
        self.assertAlmostEqual(LIMITS.milliseconds(0, 32e6), 32.0)
        self.assertAlmostEqual(LIMITS.milliseconds(0, 40e6), 400.0)

    def test_nothing_needed_is_no_limit(self) -> None:
        self.assertIsNone(LIMITS.milliseconds(0, 0))


class ProtocolTest(unittest.TestCase):
    def test_reads_an_answer(self) -> None:
        line = '{"case": "a", "calls": 7, "times_ms": [3, 1, 2, 10], "operations": 5, "bytes": 6}'
        self.assertEqual(parse_answer(line, "a"), Answer(2.5, (3.0, 1.0, 2.0, 10.0), 7, 5.0, 6.0))

    def test_refuses_what_is_no_answer(self) -> None:
        for line, why in (("oops", "a line of JSON"), ('{"case": "b", "times_ms": [1]}', "an answer for a"), ("[1]", "an answer for a"),
                          ('{"case": "a", "error": "E: no"}', "E: no"), ('{"case": "a", "times_ms": []}', "times above 0"),
                          ('{"case": "a", "times_ms": [1, 0]}', "times above 0"), ('{"case": "a"}', "times above 0")):
            with self.subTest(line), self.assertRaisesRegex(PeerError, why):
                parse_answer(line, "a")

    def test_refuses_what_is_no_first_line(self) -> None:
        for line in ("Traceback", "{}", '{"peer": "x", "cases": 3}', "3"):
            with self.subTest(line), self.assertRaises(PeerError):
                parse_hello(line)


class PeerTest(unittest.TestCase):
    def peer(self, *options: str) -> Peer:
        peer = Peer("fake", [sys.executable, str(FAKE), *options], os.environ, start_timeout=20)
        self.addCleanup(peer.close)
        return peer

    def test_answers(self) -> None:
        peer = self.peer()
        self.assertEqual(peer.hello["version"], "1.5")
        self.assertTrue(peer.has("time/1"))
        self.assertFalse(peer.has("time/3"))
        answer = peer.ask("time/2", 3, 1, 20)
        self.assertEqual((answer.median_ms, answer.times_ms), (2.0, (2.0, 2.0, 2.0)))

    def test_stays_closed_until_it_is_asked(self) -> None:
        peer = self.peer()
        self.assertEqual(peer.hello["version"], "1.5")
        peer.close()
        self.assertEqual(peer.hello["version"], "1.5")
        self.assertIsNone(peer.pid)

    def test_an_error_leaves_it_running(self) -> None:
        peer = self.peer()
        pid = peer.hello and peer.pid
        for case, why in (("error", "RuntimeError: not today"), ("garbage", "Segmentation fault"), ("wrong", "an answer for wrong")):
            with self.subTest(case), self.assertRaisesRegex(PeerError, why):
                peer.ask(case, 1, 1, 20)
        self.assertEqual(peer.ask("time/1", 1, 1, 20).median_ms, 1.0)
        self.assertEqual(peer.pid, pid)

    def test_is_started_again_when_it_died(self) -> None:
        peer = self.peer()
        with self.assertRaisesRegex(PeerError, "ended with status 3: fake_peer: out of memory"):
            peer.ask("die", 1, 1, 20)
        self.assertEqual(peer.ask("time/1", 1, 1, 20).median_ms, 1.0)

    def test_is_ended_when_it_hangs(self) -> None:
        peer = self.peer()
        with self.assertRaisesRegex(PeerError, "no answer within 0.2 s"):
            peer.ask("hang", 1, 1, 0.2)
        self.assertIsNone(peer.pid)
        self.assertEqual(peer.ask("time/1", 1, 1, 20).median_ms, 1.0)

    def test_does_not_ask_again_for_what_failed(self) -> None:
        peer = self.peer()
        for timeout in (0.2, 60.0):  # the second would take a minute
            with self.assertRaisesRegex(PeerError, "no answer within 0.2 s"):
                peer.ask("hang", 1, 1, timeout)

    def test_says_why_it_does_not_start(self) -> None:
        peer = self.peer("--broken")
        for _ in range(2):
            with self.assertRaisesRegex(PeerError, "ended with status 1: fake_peer: no module named nothing"):
                peer.hello
        with self.assertRaisesRegex(PeerError, "/nowhere/python can't be started: No such file"):
            Peer("x", ["/nowhere/python"], os.environ).hello


class FactsTest(unittest.TestCase):
    def test_reads_facts(self) -> None:
        self.assertEqual(parse_facts('{"case": "a", "facts": {"x": 1, "y": 2.5}}', "a"), {"x": 1.0, "y": 2.5})
        for line, why in (("oops", "a line of JSON"), ('{"case": "b", "facts": {}}', "an answer for a"), ('{"case": "a"}', "expected facts"),
                          ('{"case": "a", "error": "E: no"}', "E: no"), ('{"case": "a", "facts": {"x": "1"}}', "expected facts")):
            with self.subTest(line), self.assertRaisesRegex(PeerError, why):
                parse_facts(line, "a")

    def test_every_case_has_its_own_process(self) -> None:
        crowd = Crowd("fake", [sys.executable, str(FAKE)], os.environ)
        self.addCleanup(crowd.close)
        self.assertEqual(crowd.ask("time/2", 1, 1, 20).median_ms, 2.0)
        one, two = crowd.facts("time/1", 20)["pid"], crowd.facts("time/2", 20)["pid"]
        self.assertNotEqual(one, two)
        crowd.keep({"time/2"})
        self.assertEqual(crowd.facts("time/1", 20)["pid"], one)  # known, although the process has gone
        self.assertFalse(os.path.exists(f"/proc/{int(one)}"))
        self.assertTrue(os.path.exists(f"/proc/{int(two)}"))
        crowd.close()
        self.assertFalse(os.path.exists(f"/proc/{int(two)}"))

    def test_programs_together_are_timed_as_the_machine(self) -> None:
        together = Together("fake_x2", [sys.executable, str(FAKE)], os.environ, 2)
        self.addCleanup(together.close)
        answer = together.ask("time/4", 3, 1, 20)
        self.assertEqual((answer.median_ms, answer.calls), (2.0, 20))  # a call every 4 ms of each of two
        with self.assertRaisesRegex(PeerError, "not today"):
            together.ask("error", 1, 1, 20)

    def test_a_quota_is_set_or_said_to_be_impossible(self) -> None:
        quota = Quota("fake_quota", [sys.executable, str(FAKE)], os.environ, 1.5)
        self.addCleanup(quota.close)
        try:
            self.assertEqual(quota.ask("time/2", 1, 1, 20).median_ms, 2.0)
        except PeerError as error:
            self.assertRegex(str(error), "no control group")
            return
        group = next(line for line in pathlib.Path(f"/proc/{quota.pid}/cgroup").read_text().splitlines() if "halfstep-bench" in line)
        quota.close()
        self.assertNotIn(group.split(":")[2].strip("/"), [p.name for p in pathlib.Path("/sys/fs/cgroup/cpu").glob("*")])

    def test_ends_what_no_later_row_asks_for(self) -> None:
        kept: dict[str, set[str]] = {}
        crowds = {}
        for name in (OURS, "torch"):
            crowds[name] = Crowd(name, [], {})
            crowds[name].keep = lambda cases, name=name: kept.update({name: set(cases)})  # type: ignore[method-assign]
        rows = [Row(("a",), "x", (Contestant("torch", "torch", "t"), Contestant("f32", OURS, "y"))), Row(("b",), "z")]
        run.close_finished(crowds, rows)
        self.assertEqual(kept, {OURS: {"x", "y", "z"}, "torch": {"t"}})
        run.close_finished(crowds, rows[1:])
        self.assertEqual(kept, {OURS: {"z"}, "torch": set()})


class PicturesTest(unittest.TestCase):
    # Start, a comment of one byte, a table, and the frame's header: 8 bits, height, width, 3 components.
    JPEG = b"\xff\xd8" + b"\xff\xfe\0\3!" + b"\xff\xc4\0\2" + b"\xff\xff\xc2\0\x11\x08" + b"\1\x77\1\xf4\3" + bytes(12)

    def test_reads_the_size(self) -> None:
        self.assertEqual(jpeg_size(self.JPEG), (500, 375))
        for data in (b"", b"\x89PNG", self.JPEG[:12], b"\xff\xd8\xff\xfe\xff\xff" + bytes(20)):
            self.assertIsNone(jpeg_size(data))

    def test_finds_photographs_of_one_size(self) -> None:
        before = dict(os.environ)
        self.addCleanup(lambda: (os.environ.clear(), os.environ.update(before)))
        os.environ.pop("HALFSTEP_BENCH_IMAGES", None)
        with tempfile.TemporaryDirectory() as folder:
            data, scratch = pathlib.Path(folder) / "data", pathlib.Path(folder) / "scratch"
            samples = data / "images" / "imagenet-sample"
            samples.mkdir(parents=True)
            scratch.mkdir()
            os.environ["HALFSTEP_DATA"] = str(data)
            (samples / "other.JPEG").write_bytes(self.JPEG.replace(b"\1\x77", b"\1\x78"))
            found, why = find_pictures(pathlib.Path(folder), scratch)
            self.assertIsNone(found)
            self.assertIn("HALFSTEP_BENCH_IMAGES", why)
            (samples / "a.JPEG").write_bytes(self.JPEG)
            found, why = find_pictures(pathlib.Path(folder), scratch)
            self.assertEqual((found, why, [p.name for p in scratch.iterdir()]), (scratch, "", ["a.JPEG"]))
            os.environ["HALFSTEP_BENCH_IMAGES"] = str(samples)
            self.assertEqual(find_pictures(pathlib.Path(folder), scratch), (samples.resolve(), ""))
            os.environ["HALFSTEP_BENCH_IMAGES"] = "/nowhere"
            self.assertIsNone(find_pictures(pathlib.Path(folder), scratch)[0])


class Scripted:
    """Stands for a Peer: answers from a list, or fails; notes who was asked in which order."""

    def __init__(self, name: str, log: list[str], times: list[float]) -> None:
        self.name, self.log, self.times = name, log, times

    def ask(self, case: str, repetitions: int, min_ms: float, timeout: float) -> Answer:
        self.log.append(self.name)
        if not self.times:
            raise PeerError("no more")
        return Answer(self.times.pop(0), (), 1, 10.0, 20.0)

    def facts(self, case: str, timeout: float) -> dict[str, float]:
        self.log.append(f"{self.name} facts {case}")
        if case == "silent":
            raise PeerError("nothing is known")
        return {"peak_bytes": 5.0}


class MeasureTest(unittest.TestCase):
    ROW = Row(("a",), "x", (Contestant("torch", "torch", "x"), Contestant("jax", "jax", "x"), Contestant("f32", OURS, "y")))

    def test_takes_turns_after_a_round_that_does_not_count(self) -> None:
        log: list[str] = []
        peers = {OURS: Scripted("us", log, [9, 9, 1, 2, 3, 4]), "torch": Scripted("torch", log, [9, 5, 6])}
        result = measure_row(self.ROW, peers, EFFORT)  # type: ignore[arg-type]
        self.assertEqual(log, ["us", "torch", "us"] * 3)
        self.assertEqual(result.turns, {"halfstep": [1, 3], "torch": [5, 6], "f32": [2, 4]})
        self.assertEqual((result.operations, result.bytes), (10.0, 20.0))

    def test_who_fails_drops_out(self) -> None:
        log: list[str] = []
        peers = {OURS: Scripted("us", log, [1] * 6), "torch": Scripted("torch", log, [1, 1])}
        result = measure_row(self.ROW, peers, EFFORT)  # type: ignore[arg-type]
        self.assertEqual(result.errors, {"torch": "no more"})
        self.assertEqual(set(result.turns), {"halfstep", "f32"})

    def test_nothing_is_left_without_us(self) -> None:
        log: list[str] = []
        peers = {OURS: Scripted("us", log, []), "torch": Scripted("torch", log, [1, 1])}
        result = measure_row(self.ROW, peers, EFFORT)  # type: ignore[arg-type]
        self.assertEqual((log, result.turns, result.errors), (["us"], {}, {"halfstep": "no more"}))

    def test_asks_for_facts_after_the_turns(self) -> None:
        log: list[str] = []
        peers = {OURS: Scripted("us", log, [1] * 3), "torch": Scripted("torch", log, [1] * 3)}
        row = Row(("a",), "x", (Contestant("torch", "torch", "silent"), Contestant("torch_f32", "torch", "z", timed=False)), facts=True)
        result = measure_row(row, peers, EFFORT)  # type: ignore[arg-type]
        self.assertEqual(log, ["us", "torch"] * 3 + ["us facts x", "torch facts silent", "torch facts z"])
        self.assertEqual(result.facts, {"halfstep": {"peak_bytes": 5.0}, "torch_f32": {"peak_bytes": 5.0}})
        self.assertEqual(set(result.turns), {"halfstep", "torch"})
        self.assertEqual(result.errors, {"torch": "nothing is known"})

    def test_counts_the_work_of_what_was_started(self) -> None:
        before, busy = machine.tree_seconds(os.getpid()), "x = 0\nfor i in range(10**7): x += i"
        subprocess.run([sys.executable, "-c", busy], check=True)  # has ended
        middle = machine.tree_seconds(os.getpid())
        self.assertGreater(middle - before, 0.1)
        with subprocess.Popen([sys.executable, "-c", busy + "\nprint(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdin is not None
            child.stdout.readline()
            self.assertGreater(machine.tree_seconds(os.getpid()) - middle, 0.1)  # is there
            child.stdin.write(b"\n")
        self.assertEqual(machine.tree_seconds(2**30), 0)

    def test_peaks_are_the_best_seen(self) -> None:
        log: list[str] = []
        server = Scripted("us", log, [])
        times = iter([4, 2, 8] + [2, 4, 4] + [8, 8, 2])
        server.ask = lambda *_: Answer(9, (next(times), 10.0), 1, 0, 6e6)  # type: ignore[method-assign]
        self.assertEqual(measure_limits(server, EFFORT), Limits(3e9, 3e9, 3e9))  # type: ignore[arg-type]

    def test_reads_the_kernel_s_clock(self) -> None:
        self.assertEqual(machine.parse_stat("cpu 100 200 300 9999 9999 10 20 50 0 0".split(), 100), (6.3, 0.5))
        self.assertEqual(machine.parse_stat("cpu 100 200 300".split(), 100), (6.0, 0.0))
        self.assertGreater(machine.process_seconds(os.getpid()), 0)
        self.assertEqual(machine.process_seconds(None), 0)


class TableTest(unittest.TestCase):
    def test_numbers_have_three_digits(self) -> None:
        self.assertEqual([table.number(v) for v in (1234.6, 99.96, 9.876, 0.12345, None)], ["1235", "100.0", "9.88", "0.123", "-"])

    def test_spreads(self) -> None:
        self.assertEqual(table.spread(Ratio(2.084, 1.95, 2.333)), "2.08x (1.95-2.33)")
        self.assertEqual(table.percent(Ratio(1.015, 0.999, 1.03)), "+1.5 % (-0.1 to 3.0)")
        self.assertEqual((table.spread(None), table.percent(None)), ("-", "-"))

    def test_goals(self) -> None:
        result = table.Result(Row(("a",), "x"), {"halfstep": [0.002, 0.001], "torch": [0.004, 0.003]}, {})
        self.assertIs(result.met(Goal("torch", 2.5)), True)
        self.assertIs(result.met(Goal("torch", 2.6)), False)
        self.assertIs(result.met(Goal("jax", 1.0)), None)
        self.assertIs(result.met(Goal(at_most_us=1.5)), True)
        self.assertIs(result.met(Goal(at_most_us=1.4)), False)
        self.assertIs(result.met(Goal("torch", 1.0, by="torch")), True)
        self.assertIs(result.met(Goal("torch", 1.1, by="torch")), False)
        self.assertIs(result.met(Goal("torch", 1.0, by="winograd4")), None)
        self.assertEqual([g.text() for g in (Goal("torch_kept", 1.4), Goal("torch_kept", 1.4, by="winograd4"))],
                         [">= 1.4x PyTorch, pages kept", "Winograd 4x4 >= 1.4x PyTorch, pages kept"])

    def test_a_section(self) -> None:
        row = Row(("64", "f32"), "x", (Contestant("torch", "torch", "x"), Contestant("jax", "jax", "x")),
                  (Goal("torch", 1.3), Goal("jax", 1.0)))
        section = Section("step", "A step", ("batch", "dtype"), (row,), note="A note.")
        result = table.Result(row, {"halfstep": [2.0], "torch": [3.0]}, {"jax": "it ended"}, 1e6, 0)
        self.assertEqual(table.render(section, [result], LIMITS), "\n".join([
            "A step",
            "batch  dtype  Halfstep ms  limit  PyTorch              ratio  goal",
            "64     f32           2.00   1.00     3.00  1.50x (1.50-1.50)  >= 1.3x PyTorch: yes, >= 1x JAX: not measured",
            "A note.",
            "step 64 f32: JAX: it ended"]))

    def test_rates_and_streams(self) -> None:
        result = table.Result(Row(("a",), "x"), {"halfstep": [2.0]}, {}, 1e6, 5e5)
        for kind, cells in (("rates", "a   2.00    0.500      50%"), ("streams", "a   2.00  0.250      50%")):
            section = Section("s", "S", ("n",), (result.row,), kind=kind)
            text = table.render(section, [result], LIMITS).split("\n")[2]
            self.assertEqual(text.split(), cells.split())

    def test_images(self) -> None:
        row = Row(("net", "f32"), "x", (Contestant("torch", "torch", "x"), Contestant("torch_f32", "torch", "y", timed=False)),
                  (Goal("torch", 1.3), Goal("torch_f32", fact="peak_bytes", share=0.6), Goal("torch_f32", fact="saved_bytes", share=0.5)))
        section = Section("network", "Steps", ("network", "dtype"), (row,), kind="images", note="A note.")
        facts = {"halfstep": {"images": 16.0, "peak_bytes": 1.2e9, "saved_bytes": 5e8, "outside_convolutions": 0.25},
                 "torch": {"images": 16.0, "peak_bytes": 3e9}, "torch_f32": {"peak_bytes": 2e9, "saved_bytes": 9e8}}
        result = table.Result(row, {"halfstep": [2000.0], "torch": [3000.0]}, {}, 1e12, 0, facts)
        self.assertEqual(table.render(section, [result], LIMITS), "\n".join([
            "Steps",
            "network  dtype              ms  images/s    limit        time / ours  peak MB  saved  outside",
            "net      f32    Halfstep  2000      8.00  1000000                        1200    500      25%",
            "                PyTorch   3000      5.33           1.50x (1.50-1.50)     3000",
            "goals of net f32: >= 1.3x PyTorch: yes, peak <= 0.6 of PyTorch f32: yes, saved <= 0.5 of PyTorch f32: NO",
            "A note."]))
        self.assertIs(table.Result(row, {}, {}).met(row.goals[1]), None)

    def test_limits_of_other_dtypes(self) -> None:
        row = Row(("net", "1"), "x", (Contestant("f32", OURS, "y", rate=1.0), Contestant("bf16", OURS, "z")), rate=4.0)
        section = Section("inference", "Calls", ("network", "batch"), (row,), kind="images")
        result = table.Result(row, {"halfstep": [2.0], "f32": [6.0], "bf16": [4.0]}, {}, 4e6, 0)
        self.assertEqual(table.render(section, [result], LIMITS), "\n".join([
            "Calls",
            "network  batch              ms  images/s  limit        time / ours",
            "net      1      Halfstep  2.00       500   1.00",
            "                own f32   6.00       167   4.00  3.00x (3.00-3.00)",
            "                own bf16  4.00       250         2.00x (2.00-2.00)"]))

    def test_ranks(self) -> None:
        row = Row(("net", "f16"), "x", (Contestant("torch", "torch_ranks", "x"), Contestant("torch_f32", "torch_ranks", "y", timed=False)),
                  (Goal("torch_f32", fact="bytes_sent", share=0.6),), facts=True)
        section = Section("parallel", "Steps", ("network", "gradients"), (row,), kind="ranks", note="A note.")
        facts = {"halfstep": {"bytes_sent": 1.34e6, "hidden": 0.75}, "torch": {"bytes_sent": 1.34e6}, "torch_f32": {"bytes_sent": 2.68e6}}
        result = table.Result(row, {"halfstep": [2.0, 3.0], "torch": [3.0, 3.0]}, {}, 0, 0, facts)
        self.assertEqual(table.render(section, [result], LIMITS), "\n".join([
            "Steps",
            "network  gradients              ms        time / ours  MB sent  hidden",
            "net      f16        Halfstep  2.50                        1.34     75%",
            "                    PyTorch   3.00  1.25x (1.00-1.50)     1.34",
            "goals of net f16: bytes sent <= 0.6 of PyTorch f32: yes",
            "A note."]))
        facts["halfstep"]["bytes_sent"] = 1.7e6
        self.assertIs(result.met(row.goals[0]), False)

    def test_an_overhead(self) -> None:
        row = Row(("sgd",), "x", (Contestant("without", OURS, "y"),), (Goal("without", 0.98),))
        section = Section("scaler", "S", ("optimizer",), (row,), kind="overhead")
        for with_scaler, words in ((1.01, "1.01 1.00 +1.0 % (1.0 to 1.0) - < 2 %: yes"), (1.5, "1.50 1.00 +50.0 % (50.0 to 50.0) - < 2 %: NO")):
            text = table.render(section, [table.Result(row, {"halfstep": [with_scaler], "without": [1.0]}, {})], LIMITS)
            self.assertEqual(text.split("\n")[2].split(), ["sgd", *words.split()])

    def test_nothing_measured(self) -> None:
        row = plan(Machine(), only="step 64 sgd f32")[0].rows[0]
        for section in plan(Machine()):
            result = table.Result(section.rows[0], {}, {"halfstep": "it ended"})
            self.assertIn("Halfstep: it ended", table.render(section, [result], LIMITS))
        self.assertEqual(row.case, "mlp/f32/sgd/b64")


class PlanTest(unittest.TestCase):
    def test_chooses_rows(self) -> None:
        sections = plan(Machine(), only="^step 64 .*16$|optimizer/adamw")
        self.assertEqual([[r.case for r in s.rows] for s in sections],
                         [["mlp/bf16/sgd/b64", "mlp/f16/sgd/b64", "mlp/bf16/adam/b64", "mlp/f16/adam/b64"], ["optimizer/adamw/fused"]])

    def test_ops_are_those_of_the_timing_program(self) -> None:
        names = pass_names(["step/x", "pass/sin/f32", "pass/sin/bf16", "pass/gelu/f32", "network/pass/f32"])
        self.assertEqual(names, ["sin", "gelu"])
        section = plan(Machine(), only="^pass ", passes=names)[0]
        self.assertEqual([r.case for r in section.rows], ["pass/sin/f32", "pass/sin/bf16", "pass/gelu/f32", "pass/gelu/bf16"])
        self.assertNotIn("pass", {s.name for s in plan(Machine())})

    def test_goals_follow_the_hardware(self) -> None:
        for units, goal in ((False, 0.9), (True, 1.0)):
            row = plan(Machine(bf16_units=units), only="^own 64 sgd bf16")[0].rows[0]
            self.assertEqual(row.goals, (Goal("f32", goal),))

    def test_networks_and_pictures(self) -> None:
        sections = {s.name: s for s in plan(Machine())}
        self.assertTrue(sections["network"].alone and sections["loader"].alone)
        rows = {r.case: r for r in sections["network"].rows}
        for network, torch, kept in (("resnet50/f32/b16", 1.7, 1.45), ("resnet18_cifar/f32/b128", 1.4, 1.4)):
            row = rows[f"network/{network}"]
            self.assertEqual(row.goals, (Goal("torch", torch), Goal("torch_kept", kept), Goal("torch_compiled", 1.1),
                                         Goal("torch_kept", kept, by="winograd4")))
            # The same case, run by a server with HALFSTEP_WINOGRAD set.
            self.assertEqual([(c.peer, c.case) for c in row.others if c.column.startswith("winograd")],
                             [(f"{OURS}_winograd2", row.case), (f"{OURS}_winograd4", row.case)])
        self.assertEqual(rows["network/resnet50/f32_890MB/b16"].goals, (Goal("torch", fact="peak_bytes", share=0.4),))
        for units, speed in ((False, (Goal("f32", 1.0),)), (True, (Goal("f32", 1.7), Goal("torch", 1.6)))):
            both = plan(Machine(bf16_units=units), only="^network ResNet-.* bf16$")[0].rows
            self.assertEqual(len(both), 2)
            for row in both:
                self.assertEqual(row.goals, (*speed, Goal("torch_f32", fact="peak_bytes", share=0.6), Goal("f32", fact="saved_bytes", share=0.52)))
        for isa, rate, half in (("avx512_vnni", 1.0, 1.0), ("avx512_bf16", 2.0, 1.0), ("amx", 6.0, 1.5)):  # of float32's
            for rows_of in ("^network ResNet-50", "^detector YOLOv5n, 4 x 640", "^language"):
                both = plan(Machine(bf16_units=rate > 1, isa=isa), only=f"{rows_of}.* (bf16|f16)$")[0].rows
                self.assertEqual([(row.labels[1], row.rate) for row in both], [("bf16", rate), ("f16", half)], rows_of)
        self.assertNotIn("network", {s.name for s in plan(Machine(), quick=True)})

    def test_detectors(self) -> None:
        memory = Goal("torch_f32", fact="peak_bytes", share=0.6)
        for units, of_bf16 in ((False, (memory,)), (True, (Goal("torch", 1.3), memory))):
            section = plan(Machine(bf16_units=units), only="^detector YOLOv5n, 16 x 640")[0]
            self.assertTrue(section.alone)
            self.assertEqual([(r.case, r.goals) for r in section.rows],
                             [("network/yolov5n/f32/b16", (Goal("torch", 1.3),)), ("network/yolov5n/bf16/b16", of_bf16),
                              ("network/yolov5n/f16/b16", (memory,))])
        self.assertNotIn("detector", {s.name for s in plan(Machine(), quick=True)})

    def test_language(self) -> None:
        for units, of_bf16 in ((False, (Goal("f32", 0.95),)), (True, (Goal("f32", 1.0), Goal("torch", 1.2)))):
            section = plan(Machine(bf16_units=units), only="^language")[0]
            self.assertTrue(section.alone)
            self.assertEqual([(r.case, r.goals) for r in section.rows],
                             [("network/gpt/f32/b8", (Goal("torch", 1.2),)), ("network/gpt/bf16/b8", of_bf16),
                              ("network/gpt/f16/b8", (Goal("f32", 0.95),))])

    def test_what_may_be_missing(self) -> None:
        self.assertNotIn("loader", {s.name for s in plan(Machine(), pictures=False)})

    def test_data_parallel_training(self) -> None:
        section = next(s for s in plan(Machine()) if s.name == "parallel")
        for row in section.rows:
            in_full = row.labels[1] == "f32"
            self.assertEqual(row.goals, (Goal("torch", 1.0),) if in_full else (Goal("torch_f32", fact="bytes_sent", share=0.6),))
            # All of them on as many processes as we have: nobody is compared with a program of one.
            self.assertEqual({row.peer, *(c.peer for c in row.others)}, {f"{OURS}_ranks", "torch_ranks"})
        self.assertNotIn("parallel", {s.name for s in plan(Machine(), ranks=False)})

    def test_inference_asks_for_the_speed_of_onnx_runtime(self) -> None:
        section = next(s for s in plan(Machine(isa="avx512_vnni")) if s.name == "inference")
        self.assertEqual([r.labels for r in section.rows],
                         [(n, b) for n in ("ResNet-50, 224", "YOLOv5n, 640") for b in ("1", "32")])
        for row in section.rows:
            self.assertIn(Goal("onnx_int8", 1.0), row.goals)
            self.assertEqual(Goal("f32", 2.0) in row.goals, row.labels[1] == "32")
            self.assertEqual({c.column: c.rate for c in row.others},
                             {"f32": 1, "bf16": 0, "torch_f32": 1, "onnx_f32": 1, "onnx_int8": 4})
            self.assertEqual(row.rate, 4)
        without = next(s for s in plan(Machine(), onnx=False) if s.name == "inference").rows[1]
        self.assertEqual((without.goals, [c.column for c in without.others], without.rate), ((), ["f32", "bf16", "torch_f32"], 0))

    def test_ranks_need_processors_and_a_launcher(self) -> None:
        self.assertIn("2 processors", rank_launcher(1)[1])
        before = os.environ.get("PATH", "")
        self.addCleanup(os.environ.update, {"PATH": before})
        with tempfile.TemporaryDirectory() as folder:
            os.environ["PATH"] = folder
            self.assertEqual(rank_launcher(2), ([], "there is no mpirun (Debian: apt-get install openmpi-bin)"))
            for name in ("mpirun.mpich", "mpirun.openmpi"):
                (pathlib.Path(folder) / name).write_text("")
                (pathlib.Path(folder) / name).chmod(0o755)
                words, why = rank_launcher(2)
                self.assertEqual((words[0], words[-2:], why), (f"{folder}/{name}", ["-n", "2"], ""))
                self.assertEqual("--oversubscribe" in words, name == "mpirun.openmpi")

    def cases_of(self, *command: str, path: str = "") -> set[str]:
        env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        out = subprocess.run(command, input="quit\n", capture_output=True, text=True, check=True, env=env).stdout
        return set(json.loads(out.split("\n")[0])["cases"])

    def asked(self, peer: str) -> set[str]:
        # On a machine with units more cases are asked for.
        rows = [r for s in plan(Machine(True, True)) for r in s.rows]
        return {r.case for r in rows if (peer == OURS and r.peer != f"{OURS}_ranks") or peer == r.peer} | {c.case for r in rows for c in r.others if c.peer == peer}

    def write_stubs(self, folder: str) -> None:
        """Modules that PyTorch's and JAX's programs can list their cases with."""
        torch, jax = pathlib.Path(folder) / "torch", pathlib.Path(folder) / "jax"
        hooks = torch / "distributed" / "algorithms" / "ddp_comm_hooks"
        (torch / "nn" / "parallel").mkdir(parents=True)
        hooks.mkdir(parents=True)
        (torch / "nn" / "parallel" / "__init__.py").write_text("DistributedDataParallel = None\n")
        (torch / "distributed" / "__init__.py").write_text("class FileStore:\n  def __init__(self, *_): pass\n"
                                                           "def init_process_group(*_, **__): pass\n"
                                                           "def destroy_process_group(): pass\n")
        (hooks / "__init__.py").write_text("class default_hooks:\n  fp16_compress_hook = bf16_compress_hook = None\n")
        jax.mkdir()
        (torch / "__init__.py").write_text("float32 = bfloat16 = float16 = None\n__version__ = '0'\n"
                                           "def set_num_threads(n): pass\n")
        (torch / "nn" / "__init__.py").write_text("class Module: pass\n")
        (torch / "nn" / "functional.py").write_text("")
        (jax / "__init__.py").write_text("__version__ = '0'\n")
        (jax / "numpy.py").write_text("float32 = bfloat16 = float16 = None\n")

    def cases_of_peer(self, peer: str, folder: str) -> set[str]:
        return self.cases_of(sys.executable, str(TOP / "benchmarks" / "peers" / f"{peer}_bench.py"), "--threads", "1", path=folder)

    def test_the_peers_have_all_cases(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.write_stubs(folder)
            for peer in ("torch", "jax"):
                has = self.cases_of_peer(peer, folder)
                asked = set().union(*(self.asked(name) for name in (peer, f"{peer}_kept", f"{peer}_x2", f"{peer}_quota")))
                self.assertEqual(asked - has, set(), peer)
            has = self.cases_of_peer("torch_ddp", folder)
            self.assertEqual(self.asked("torch_ranks") - has, set())

    def test_the_server_has_all_cases(self) -> None:
        server = os.environ.get("HALFSTEP_BENCH_SERVER", "")
        if not os.path.exists(server):
            self.skipTest("HALFSTEP_BENCH_SERVER does not name the built bench_server")
        has = self.cases_of(server)
        self.assertEqual(self.asked(OURS) - has, set())
        with tempfile.TemporaryDirectory() as folder:
            self.write_stubs(folder)
            passes = {case for case in has if case.startswith("pass/")}
            self.assertTrue(passes)
            self.assertEqual(passes - self.cases_of_peer("torch", folder), set())
        self.assertEqual(self.asked(f"{OURS}_ranks") - self.cases_of(server, "--ranks"), set())


class ServerTest(unittest.TestCase):
    """The real one, on cases that take next to no time."""

    def setUp(self) -> None:
        server = os.environ.get("HALFSTEP_BENCH_SERVER", "")
        if not os.path.exists(server):
            self.skipTest("HALFSTEP_BENCH_SERVER does not name the built bench_server")
        self.peer = Peer(OURS, [server, "--threads", "1"], os.environ)
        self.addCleanup(self.peer.close)

    def test_times_calls(self) -> None:
        self.assertEqual(self.peer.hello["threads"], 1)
        small = self.peer.ask("matmul/256x256x256/f32", 3, 1, 60)
        large = self.peer.ask("matmul/512x512x512/f32", 3, 1, 60)
        self.assertEqual((small.operations, small.bytes, len(small.times_ms)), (2 * 256**3, 3 * 4 * 256**2, 3))
        # Eight times the work: certainly more time, even on a busy machine.
        self.assertGreater(min(large.times_ms), min(small.times_ms))

    def test_steps_run(self) -> None:
        for case in ("mlp/f32/adam/b1", "mlp/bf16/sgd/b1", "mlp/f16/sgd/b1", "scaler/mlp_unscale", "linear/1x16x16/autocast"):
            self.assertGreater(self.peer.ask(case, 1, 0.1, 60).median_ms, 0, case)

    def test_ranks_answer_together(self) -> None:
        words, why = rank_launcher(2)
        if not words:
            self.skipTest(why)
        server = os.environ["HALFSTEP_BENCH_SERVER"]
        peer = Peer(f"{OURS}_ranks", [*words, server, "--ranks", "--threads", "1"], os.environ)
        self.addCleanup(peer.close)
        try:
            peer.hello
        except PeerError as error:
            self.skipTest(f"no job of MPI: {error}")
        self.assertGreater(peer.ask("parallel/mlp/f32/b64", 2, 1, 60).median_ms, 0)
        with self.assertRaisesRegex(PeerError, "no such case"):
            peer.ask("parallel/mlp/f8/b64", 1, 1, 60)
        sent = {how: peer.facts(f"parallel/mlp/{how}/b64", 60) for how in ("f32", "f16", "bf16", "none")}
        # Half of the 669,706 gradients of the MLP, and then half of the sums, which are padded to lines of 64 bytes.
        self.assertAlmostEqual(sent["f32"]["bytes_sent"], 4 * 669_706, delta=1000)
        for how in ("f16", "bf16"):
            self.assertAlmostEqual(sent[how]["bytes_sent"], 2 * 669_706, delta=1000)
        self.assertEqual(sent["none"]["bytes_sent"], 0)
        self.assertTrue(0 <= sent["f32"]["hidden"] <= 1, sent)

    def test_says_what_is_wrong(self) -> None:
        with self.assertRaisesRegex(PeerError, "no such case"):
            self.peer.ask("mlp/f8", 1, 1, 60)
        with self.assertRaisesRegex(PeerError, "repetitions"):
            self.peer.ask("add/16/plain", 0, 1, 60)
        self.assertGreater(self.peer.ask("add/16/recorded", 1, 0.1, 60).median_ms, 0)


class MainTest(unittest.TestCase):
    def main(self, *argv: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = run.main(["--server", str(FAKE), *argv])
            except SystemExit as end:
                status = int(end.code or 0)
        return status, out.getvalue(), err.getvalue()

    def test_measures_alone(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "results.json"
            status, out, _ = self.main("--no-peers", "--quick", "--turns", "2", "--only", "^call add of|^own 64 sgd", "--json", str(file))
            self.assertEqual(status, 0, out)
            document = json.loads(file.read_text())
        self.assertEqual([r["case"] for r in document["rows"]], ["mlp/bf16/sgd/b64", "mlp/f16/sgd/b64", "add/16/plain"])
        own, _, add = document["rows"]
        self.assertEqual(own["turns_ms"], {"halfstep": [1.0, 1.0], "f32": [1.0, 1.0]})
        self.assertEqual(own["ratios"], {"f32": {"median": 1.0, "low": 1.0, "high": 1.0}})
        self.assertEqual(add["goals"], [{"goal": "<= 1 us", "met": False}])
        self.assertIn("Halfstep 1.5\nA Processor, none", out)
        self.assertIn("The peers are left out (--no-peers).", out)

    def test_measures_networks_in_processes_of_their_own(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "results.json"
            status, out, _ = self.main("--no-peers", "--turns", "1", "--only", "^network ResNet-50.* bf16", "--json", str(file))
            self.assertEqual(status, 0, out)
            row = json.loads(file.read_text())["rows"][0]
        self.assertEqual(row["turns_ms"], {"halfstep": [1.0], "winograd4": [1.0], "f32": [1.0]})
        self.assertNotEqual(row["facts"]["halfstep"]["pid"], row["facts"]["f32"]["pid"])
        self.assertIn("peak <= 0.6 of PyTorch f32: not measured", out)
        self.assertRegex(out, r"(?m)^ResNet-50, 16 +bf16 +Halfstep +1.00 +4000")

    def test_goes_on_without_peers_that_do_not_start(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            python = pathlib.Path(folder) / "bin" / "python"
            python.parent.mkdir()
            python.write_text('#!/bin/sh\necho "No module named torch" >&2\nexit 1\n')
            python.chmod(0o755)
            status, out, _ = self.main("--peers-venv", folder, "--turns", "1", "--only", "^call add")
        self.assertEqual(status, 0)
        for name in ("torch", "jax"):
            self.assertIn(f"{name} is left out: it ended with status 1: No module named torch", out)
        status, out, _ = self.main("--peers-venv", "/nowhere", "--turns", "1", "--only", "^call add")
        self.assertEqual(status, 0)
        self.assertIn("The peers are left out: /nowhere/bin/python does not exist.", out)

    def test_bad_arguments(self) -> None:
        for argv, why in ((("--threads", "0"), "--threads: expected 1 to"), (("--only", "("), "--only:"), (("--turns", "0"), "--turns"),
                          (("--json", "/nowhere/x"), "there is no folder /nowhere"), (("--server", "/nowhere/x"), "there is no /nowhere/x"),
                          (("--nonsense",), "unrecognized")):
            with self.subTest(argv):
                status, _, err = self.main(*argv)
                self.assertEqual(status, 2)
                self.assertIn(why, err)
        status, out, _ = self.main("--no-peers", "--only", "nothing like it")
        self.assertEqual(status, 2)
        self.assertIn("matches no row", out)

    def test_without_the_server_there_is_nothing(self) -> None:
        status, _, err = self.main("--server", "/bin/false", "--no-peers")
        self.assertEqual(status, 1)
        self.assertIn("Halfstep could not be measured: it ended with status 1", err)


if __name__ == "__main__":
    unittest.main()
