#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Jobs of several ranks from outside: how they start, end and fail, and that all MPIs give the same bits.

HALFSTEP_RANK_PROGRAM names the program, HALFSTEP_MPIRUNS the launchers as NAME=PATH, separated by colons.
"""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import tempfile
import time
import unittest

PROGRAM = os.environ.get("HALFSTEP_RANK_PROGRAM", "build/tests/rank_program")
MPIRUNS = dict(entry.split("=", 1) for entry in os.environ.get("HALFSTEP_MPIRUNS", "").split(":") if entry)


def command(mpi, ranks, what):
    # MPICH's launcher would end the others before they have spoken.
    options = ["-disable-auto-cleanup"] if mpi == "mpich" and what.startswith("device_") else []
    return [MPIRUNS[mpi], *options, "-n", str(ranks), PROGRAM, what]


def run(mpi, ranks, what, seconds=60, **variables):
    """(exit status, output, time) of a job."""
    begin = time.monotonic()
    done = subprocess.run(command(mpi, ranks, what), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", timeout=seconds, env={**os.environ, **variables}, check=False)
    return done.returncode, done.stdout, time.monotonic() - begin


def at_once(jobs):
    """Results of run() for the arguments of several jobs that mostly wait, four at a time."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda job: run(*job[:3], **job[3]), jobs))


def hashes(output):
    return sorted(set(re.findall(r"hash .*", output)))


@unittest.skipUnless(MPIRUNS, "no MPI")
class Jobs(unittest.TestCase):
    def test_all_implementations_give_the_same_bits(self):
        for ranks in (2, 3, 4):
            seen = {}
            for mpi in MPIRUNS:
                status, output, _ = run(mpi, ranks, "hash")
                self.assertEqual(status, 0, output)
                # All ranks print the same: a line more means that some rank has other bits.
                self.assertEqual(len(hashes(output)), 36, output)
                self.assertEqual(output.count("hash "), 36 * ranks, output)
                seen[mpi] = hashes(output)
            self.assertEqual(len({tuple(lines) for lines in seen.values()}), 1, seen)

    def test_reductions_of_the_library(self):
        for mpi in MPIRUNS:
            status, output, _ = run(mpi, 3, "library")
            self.assertEqual(status, 0, output)
            self.assertEqual(len(hashes(output)), 18, output)

    def test_two_jobs_at_once(self):
        for mpi in MPIRUNS:
            jobs = [subprocess.Popen(command(mpi, 2, "hash"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                    for _ in range(2)]
            outputs = [job.communicate(timeout=60)[0] for job in jobs]
            self.assertEqual([job.returncode for job in jobs], [0, 0], outputs)
            self.assertEqual(hashes(outputs[0]), hashes(outputs[1]))

    def test_a_program_without_a_launcher_is_one_process(self):
        output = subprocess.run([PROGRAM, "hash"], stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
        self.assertIn("rank 0 of 1 by one process", output)

    def test_one_rank_is_one_process(self):
        for mpi in MPIRUNS:
            status, output, _ = run(mpi, 1, "hash")
            self.assertEqual(status, 0, output)
            self.assertIn("rank 0 of 1 by one process", output)

    # 64 MiB each of parameters and gradients, and 128 MiB of Adam's moments: 256 MiB, which are more than the limit by
    # themselves. Of two ranks that divide all of it each has 128 MiB. Beside them come two buckets and two layers of
    # 4 MiB, and the memory of MPI and of kernels, which was 92 MiB where nothing limited it.
    def test_a_state_that_does_not_fit_one_rank_is_divided(self):
        for mpi in MPIRUNS:
            status, output, _ = run(mpi, 2, "zero0:240")
            self.assertNotEqual(status, 0, output)
            self.assertNotIn("trained", output)
            status, output, _ = run(mpi, 2, "zero3:240")
            self.assertEqual((status, output.count("trained: better")), (0, 2), output)

    # The same state, over the ends of epochs and in a run that resumes. MPI, kernels and threads have some 30 MiB of the
    # limit: there is no room for the 256 MiB of all, nor for a copy of a rank's 96 MiB for a checkpoint beside its
    # 128 MiB and what a step takes. Limits of 190 to 270 MiB gave the same.
    def test_epochs_end_where_the_state_does_not_fit_one_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            status, output, _ = run(next(iter(MPIRUNS)), 2, f"run1:0:{folder}/whole")
            self.assertEqual(status, 0, output)
            expected = re.findall(r"evaluated: .*", output)
            self.assertEqual(len(expected), 2, output)
            status, output, _ = run(next(iter(MPIRUNS)), 2, f"run1:0:{folder}/whole")
            self.assertEqual(status, 0, output)
            third = re.findall(r"evaluated: .*", output)
            self.assertEqual(len(third), 1, output)
            for mpi in MPIRUNS:
                status, output, _ = run(mpi, 2, f"run3:240:{folder}/{mpi}")
                self.assertEqual((status, output.count("trained: 6 steps"), output.count("saved")), (0, 2, 2), output)
                self.assertEqual(re.findall(r"evaluated: .*", output), expected)
                sizes = {p.name: p.stat().st_size >> 20 for p in pathlib.Path(folder, mpi).glob("*.safetensors")}
                for name in ("last", "best"):
                    self.assertEqual([sizes[f"{name}.6.rank{r}-of-2.safetensors"] for r in range(2)], [96, 96], sizes)
                    self.assertEqual(sizes[f"{name}.safetensors"], 0, sizes)
                # Resumed, each rank reads what it has.
                status, output, _ = run(mpi, 2, f"run3:240:{folder}/{mpi}")
                self.assertEqual((status, output.count("trained: 9 steps"), output.count("saved")), (0, 2, 1), output)
                self.assertEqual(re.findall(r"evaluated: .*", output), third)
            # Whole on each rank it is too much.
            status, output, _ = run(next(iter(MPIRUNS)), 2, f"run0:240:{folder}/none")
            self.assertNotEqual(status, 0, output)
            self.assertNotIn("trained", output)

    def test_memory_of_each_stage(self):
        parameters = 16 * 1024 * 1024 * 4
        for stage, divided in ((1, (1, 1, 2)), (2, (1, 2, 2)), (3, (2, 2, 2))):
            status, output, _ = run(next(iter(MPIRUNS)), 2, f"zero{stage}")
            self.assertEqual(status, 0, output)
            expected = [parameters // divided[0], parameters // divided[1], 2 * parameters // divided[2]]
            for rank in range(2):
                self.assertIn(f"memory {rank}: {' '.join(map(str, expected))}", output)

    def test_work_that_nobody_waits_for_is_finished(self):
        for mpi in MPIRUNS:
            status, output, seconds = run(mpi, 3, "unfinished")
            self.assertEqual((status, output.count("is done")), (0, 3), output)
            self.assertLess(seconds, 20)

    def test_work_that_cannot_be_finished_does_not_hold_the_process(self):
        for mpi in MPIRUNS:
            _, output, seconds = run(mpi, 2, "unanswered")
            self.assertEqual(output.count("is done"), 2, output)
            self.assertLess(seconds, 20)

    def test_messages_under_way_at_the_end(self):
        for mpi in MPIRUNS:
            _, output, seconds = run(mpi, 2, "unread")
            self.assertEqual(output.count("is done"), 2, output)
            self.assertIn("the process ends, and receive from rank 1 (tag 2) was not answered", output)
            self.assertNotIn("tag 1", output)
            self.assertLess(seconds, 20)  # not the timeout of a minute

    def test_who_leaves_early_is_named(self):
        for mpi in MPIRUNS:
            _, output, seconds = run(mpi, 3, "leave")
            self.assertRegex(output, r"error: all_reduce #\d+ \(gradients\): expected all ranks to do the same, got "
                                     r"ranks 0 and 1: all_reduce f32 \[4\] sum \(gradients\); "
                                     r"rank 2: end of the process")
            self.assertLess(seconds, 20)

    def test_a_rank_that_fails_ends_the_job(self):
        for mpi in MPIRUNS:
            status, output, seconds = run(mpi, 2, "fail")
            self.assertNotEqual(status, 0, output)
            self.assertLess(seconds, 20)

    def test_a_rank_that_vanishes_does_not_hold_the_others(self):
        for mpi in MPIRUNS:
            # Both launchers end the others. MPICH's then exits with the status of the rank that is gone, 0 here.
            status, output, seconds = run(mpi, 2, "vanish")
            self.assertNotIn("is done", output)
            self.assertLess(seconds, 20)
            if mpi == "openmpi":
                self.assertNotEqual(status, 0, output)

    def test_a_rank_that_stalls_does_not_hold_the_others(self):
        for mpi in MPIRUNS:
            status, output, seconds = run(mpi, 3, "stall")
            self.assertNotEqual(status, 0, output)
            self.assertRegex(output, r"error: all_reduce #\d+ \(gradients\): waited 3 s for the other ranks; one of them "
                                     r"has ended or hangs, or does not call it")
            self.assertLess(seconds, 20)

    def test_a_rank_that_never_starts_does_not_hold_the_others(self):
        for mpi in MPIRUNS:
            status, output, seconds = run(mpi, 2, "absent")
            self.assertNotEqual(status, 0, output)
            self.assertIn("error: ProcessGroup::init: MPI did not start within 3 s; one of the processes has ended or "
                          "hangs, or does not call it", output)
            self.assertLess(seconds, 20)

    def test_children_of_fork_do_not_communicate(self):
        for mpi in MPIRUNS:
            status, output, _ = run(mpi, 2, "fork")
            self.assertEqual(status, 0, output)
            self.assertIn("child: all_reduce: this process was made by fork() from a rank", output)

    def test_children_of_fork_end_at_once_and_say_nothing(self):
        for mpi in MPIRUNS:
            status, output, _ = run(mpi, 2, "watched-fork")
            self.assertEqual((status, output.count("is done")), (0, 2), output)
            times = [float(t) for t in re.findall(r"child: status 3 after ([0-9.]+) s", output)]
            self.assertEqual(len(times), 2, output)
            self.assertLess(max(times), 3)  # not the five seconds of a report that nobody answers

    # 13 s in which the others wait: longer than the silence after which a rank is lost.
    def test_a_rank_that_is_slow_is_not_lost(self):
        status, output, _ = run(next(iter(MPIRUNS)), 2, "slow")
        self.assertEqual((status, output.count("is done")), (0, 2), output)

    def test_more_messages_than_mpi_takes_at_once_stay_in_order(self):
        for mpi in MPIRUNS:
            status, output, _ = run(mpi, 2, "burst")
            self.assertEqual((status, output.count("is done")), (0, 2), output)
            self.assertNotIn("message", output)

    def test_waiting_collectives_can_be_ended(self):
        for mpi in MPIRUNS:
            _, output, seconds = run(mpi, 2, "abort")
            self.assertRegex(output, r"error: all_reduce #\d+ \(gradients\): rank 9 has ended")
            self.assertLess(seconds, 20)

    def test_an_abort_inside_of_mpi_is_answered_by_what_the_watch_knows(self):
        # Open MPI has a handler of its own, and no library below it that aborts.
        for mpi in [mpi for mpi in MPIRUNS if mpi == "mpich"]:
            status, output, seconds = run(mpi, 2, "mpi-aborts")
            self.assertNotEqual(status, 0, output)
            self.assertRegex(output, r"error: all_reduce #\d+ \(gradients\): rank 9 has ended")
            self.assertLess(seconds, 20)

    @unittest.skipUnless("sim" in os.environ.get("HALFSTEP_PLUGINS", ""), "no simulated device")
    def test_collectives_of_a_device_end_with_a_rank_that_fails(self):
        for what, reason in (("killed", "rank 2 is gone"), ("refuses", "rank 2 has given up"),
                             ("lost", "rank 2 has given up"),
                             ("stalls", "waited 3 s for the other ranks; one of them has ended or hangs, or does not "
                                        "call it")):
            for mpi in MPIRUNS:
                if (what, mpi) == ("killed", "mpich"):
                    continue  # its launcher ends the others then, often before they have spoken; under `launch` they do
                with self.subTest(what=what, mpi=mpi):
                    status, output, seconds = run(mpi, 3, "device_" + what)
                    self.assertNotEqual(status, 0, output)
                    self.assertEqual(output.count("by devices: 1"), 3, output)
                    failed = "" if what == "stalls" else "failed on sim:0: "
                    self.assertRegex(output, r"error: all_reduce #\d+ \(gradients\): " + failed + reason)
                    self.assertLess(seconds, 20)
                    if what == "refuses":
                        self.assertIn("failed on sim:0: refused, as ordered", output)

    @unittest.skipUnless("sim" in os.environ.get("HALFSTEP_PLUGINS", ""), "no simulated device")
    def test_a_rank_without_a_device_s_collectives_sends_all_through_the_host(self):
        for mpi in MPIRUNS:
            status, output, seconds = run(mpi, 3, "device_absent")
            self.assertEqual(status, 0, output)
            self.assertEqual(output.count("by devices: 0"), 3, output)
            self.assertEqual(output.count("the collectives of sim:0 can't be used: rank 2: refused, as ordered; tensors "
                                          "on it go through the host"), 1, output)
            self.assertLess(seconds, 20)  # the others don't wait for the group until the time is up

    def test_what_a_rank_waits_for_can_be_asked(self):
        for mpi in MPIRUNS:
            status, output, _ = run(mpi, 2, "current")
            self.assertEqual(status, 0, output)
            self.assertRegex(output, r"current: all_reduce #\d+ \(gradients\): all_reduce f32 \[4\] sum")

    @unittest.skipUnless(len(MPIRUNS) == 2, "two implementations of MPI are needed")
    def test_the_launcher_of_another_implementation_is_refused(self):
        status, output, _ = run("openmpi", 2, "hash", HALFSTEP_MPI="mpich")
        self.assertNotEqual(status, 0, output)
        self.assertRegex(output, r"error: ProcessGroup::init: .*OMPI_COMM_WORLD_SIZE=2.* MPICH .* knows of 1")
        self.assertNotIn("hash ", output)
        status, output, _ = run("mpich", 2, "hash", HALFSTEP_MPI="openmpi")
        self.assertNotEqual(status, 0, output)
        self.assertNotIn("hash ", output)

    def test_a_missing_module_is_named(self):
        for mpi in MPIRUNS:
            status, output, _ = run(mpi, 2, "hash", HALFSTEP_MPI_DIR="/nowhere")
            self.assertNotEqual(status, 0, output)
            self.assertIn(f"this Halfstep was built without {mpi}: there is no /nowhere/libhalfstep_mpi_{mpi}.so", output)


@unittest.skipUnless(MPIRUNS, "no MPI")
class Hangs(unittest.TestCase):
    """A rank that answers and stays behind: it hangs, or it is slow."""

    def hangs(self, result, limit):
        """What the last of three ranks hangs in: both others name it, and what they wait for, within `limit` seconds."""
        status, output, _ = result
        self.assertNotEqual(status, 0, output)
        said = re.findall(r"rank (\d) learnt after ([0-9.]+) s: all_reduce #\d+ \(bucket 0, layer1\.weight\): rank 2 "
                          r"\(host [^,]+, pid \d+\) hangs: it is in no collective, after all_reduce #\d+ "
                          r"\(loss, 16\.0 KiB\) for \S+ s, and none of its threads has run for \S+ s \((.*)\), while "
                          r"ranks 0, 1 have waited for \S+ s in all_reduce #\d+ \(bucket 0, layer1\.weight, "
                          r"16\.0 KiB\)", output)
        self.assertEqual({rank for rank, _, _ in said}, {"0", "1"}, output)
        self.assertLess(max(float(seconds) for _, seconds, _ in said), limit, output)
        self.assertEqual(len({where for _, _, where in said}), 1, output)
        return said[0][2]

    # The threads of each MPI are idle in their own ways.
    def test_a_rank_that_hangs_is_named_within_15_seconds(self):
        lock = "its main thread waits for a lock or another thread"
        pipe = "waits for somebody to write to /tmp/halfstep-rank-program-"
        ways = {"lock": lock, "condition": lock, "pipe": "its main thread " + pipe,
                "open": "its main thread waits for somebody to open the other end of a pipe",
                "sleep": "its main thread sleeps", "thread": f"{lock}, and a thread of it {pipe}"}
        jobs = [(mpi, 3, "hang:" + how, {}) for how in ways for mpi in MPIRUNS]
        for (mpi, _, what, _), result in zip(jobs, at_once(jobs)):
            with self.subTest(mpi=mpi, what=what):
                where = self.hangs(result, 15)
                self.assertTrue(where.startswith(ways[what[5:]]), where)
                self.assertRegex(result[1], r"halfstep: warning: rank 2 \(host .* hangs: .*; when it is 10 s, the job ends "
                                            r"\(HALFSTEP_HANG_TIMEOUT\)")

    # For three times as long as one that hangs.
    def test_a_rank_that_is_slow_does_not_hang(self):
        jobs = [(mpi, 3, what, {"HALFSTEP_HANG_TIMEOUT": "3"}) for mpi in MPIRUNS for what in
                ("slow:compute", "slow:poll", "slow:sleep", "slow:thread", "slow:program", "slow:socket", "busy:pipe",
                 "message:")]
        for (mpi, _, what, _), (status, output, seconds) in zip(jobs, at_once(jobs)):
            with self.subTest(mpi=mpi, what=what):
                self.assertEqual((status, output.count("is done")), (0, 3), output)
                self.assertNotIn("warning", output)
                self.assertGreater(seconds, 9)

    def test_when_a_rank_hangs_can_be_set(self):
        jobs = [(mpi, 3, what, {"HALFSTEP_HANG_TIMEOUT": seconds}) for mpi in MPIRUNS
                for what, seconds in (("hang:pipe", "3"), ("late:pipe", "0"), ("late:pipe", "soon"),
                                      ("late:pipe", "0.0001"))]
        for (mpi, _, what, variables), result in zip(jobs, at_once(jobs)):
            seconds = variables["HALFSTEP_HANG_TIMEOUT"]
            with self.subTest(mpi=mpi, what=what, seconds=seconds):
                status, output, _ = result
                if seconds == "3":
                    self.hangs(result, 9)
                elif seconds == "0":
                    self.assertEqual((status, output.count("is done")), (0, 3), output)
                else:
                    self.assertNotEqual(status, 0, output)
                    self.assertIn("error: HALFSTEP_HANG_TIMEOUT: expected " +
                                  ("a number of seconds, or 0 for never, got soon" if seconds == "soon" else
                                   "at least 3 s until a rank hangs, or 0 for never, got 0.0001"), output)


if __name__ == "__main__":
    unittest.main()
