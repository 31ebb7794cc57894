# SPDX-License-Identifier: Apache-2.0
"""What ends a job on several ranks: a rank that is killed, stopped, out of disk or asked to stop, and ranks started with different settings. Under each MPI,
every rank leaves within 15 seconds, with the status of the first failure, and the last checkpoint that was written is whole."""
import os
import signal
import subprocess
import sys
import time
import unittest

from jobs import MPIS, JobTest
from program import PROGRAM, Safetensors, events

LIMIT = 15  # seconds, from what happens to the end of the job
FLAGS = ["data", "--epochs", "100000", "--batch-size", "32", "--save-every", "7", "--out", "run", "-q"]


@unittest.skipUnless(MPIS, "no MPI was found when this was built, or no mpirun is installed")
class FailuresTest(JobTest):
    def begin(self, mpi, count):
        """A job that has written a checkpoint and goes on."""
        subprocess.run(["rm", "-rf", str(self.folder / "run")], check=True)
        process = self.job(mpi, count, "train", "mlp", *FLAGS)
        self.wait_for_steps("run", 20)
        return process, self.ranks(count)

    def ended(self, process, status):
        """Standard error of a job that ends in time, with that status, and leaves nothing behind but a whole checkpoint."""
        got, out, err, seconds = self.finish(process)
        self.assertEqual((got, out), (status, ""), err)
        self.assertLess(seconds, LIMIT)
        self.assertEqual(self.processes(), {})
        self.saved = Safetensors(self.folder / "run/last.safetensors")
        self.assertEqual(self.saved.checksum(), self.saved.header["__metadata__"]["halfstep_crc32"])
        return err

    def named_by(self, err, who, text, others):
        """Every other rank says what happened to that one."""
        for rank in others:
            prefix = "halfstep" if rank == 0 else rf"\[rank {rank}\] halfstep \(rank {rank}\)"
            self.assertRegex(err, rf"(?m)^{prefix}: .*rank {who} \(host [^)]*\) {text}")


class Lost(FailuresTest):
    def test_a_killed_rank(self):
        self.data(train=4096)
        for mpi in MPIS:
            for who in (1, 0):
                with self.subTest(mpi=mpi, rank=who):
                    process, pids = self.begin(mpi, 3)
                    os.kill(pids[who], signal.SIGKILL)
                    err = self.ended(process, 128 + signal.SIGKILL)
                    self.named_by(err, who, "ended without a goodbye", {0, 1, 2} - {who})
                    self.assertRegex(err, rf"launch: rank {who} \(host [^,]+, pid {pids[who]}\) was ended by signal 9")
                    self.assertRegex(err, ": [a-z_]+ #[0-9]+", "with the collective")
                    self.assertEqual(self.saved.state["step"] % 7, 0)

    def test_a_stopped_rank(self):
        self.data(train=4096)
        for mpi in MPIS:
            for who in (1, 0):
                with self.subTest(mpi=mpi, rank=who):
                    process, pids = self.begin(mpi, 2)
                    os.kill(pids[who], signal.SIGSTOP)
                    err = self.ended(process, 1)
                    self.named_by(err, who, "hasn't answered for 1[0-9.]* s: stopped, or cut off", {0, 1} - {who})
                    self.assertEqual(self.saved.state["step"] % 7, 0)

    def test_a_full_disk(self):
        """On a file system that has room for one checkpoint, and not for the next one beside it."""
        self.data(train=4096)
        (self.folder / "small").mkdir()
        unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
        self.train("data", "--out", "one", "--epochs", "1", "-q")
        self.train("data", "--out", "two", "--epochs", "1", "-q", "--optimizer", "adam")
        size, more = [(self.folder / run / "last.safetensors").stat().st_size for run in ("one", "two")]
        # Adam's moments are two thirds of its state: shards of 2 ranks, which have no room beside those that are there.
        for flags, room in (([], 3 * size // 2), (["--optimizer", "adam", "--zero", "1"], 5 * more // 4)):
            self.fill_the_disk(unshare, flags, room)

    def fill_the_disk(self, unshare, more, room):
        mount = f"mount -t tmpfs -o size={room} none {self.folder}/small"
        made = subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            self.skipTest(f"no file system can be made here: {made.stderr.strip()}")
        for mpi in MPIS:
            with self.subTest(mpi=mpi, flags=more):
                flags = [*(("small" if f == "run" else f) for f in FLAGS), *more]
                command = [PROGRAM, "launch", "--mpi", mpi, "--nproc-per-node", "2", "train", "mlp", *flags]
                # What is left there goes away with the file system.
                script = f'{mount} && "$@"; status=$?; mkdir -p run && cp small/* run/; exit $status'
                began = time.monotonic()
                process = subprocess.Popen([*unshare, "sh", "-c", script, "x", *command], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                           stderr=subprocess.PIPE, text=True, env=self.environment(HALFSTEP_THREADS="1"))
                self.addCleanup(self.clear, process)
                err = self.ended(process, 1)
                self.assertLess(time.monotonic() - began, LIMIT)
                if more:
                    self.assertRegex(err, r"(?m)^halfstep: (rank 1: /.*/)?small/last\.14\.rank[01]-of-2\.safetensors: writing failed: No space left on device")
                    self.saved = Safetensors.whole(self.folder / "run/last.safetensors")
                else:
                    self.assertRegex(err, r"(?m)^halfstep: small/last\.safetensors: writing failed: No space left on device; what stood there before is unchanged$")
                    self.named_by(err, 0, r"failed: small/last\.safetensors: writing failed: No space left on device", [1])
                self.assertEqual(self.saved.state["step"], 7)
                subprocess.run(["rm", "-r", str(self.folder / "run")], check=True)

    def test_ranks_that_do_different_runs(self):
        self.data(train=256)
        self.data("other", train=512)
        rank = self.folder / "rank.py"
        rank.write_text(f"#!{sys.executable}\nimport os, sys\nrank = os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK'))\n"
                        "at = sys.argv.index('--')\nos.execv(sys.argv[1], [sys.argv[1], *(sys.argv[2:at] if rank == '0' else sys.argv[at + 1:])])\n")
        rank.chmod(0o755)
        mlp = ["train", "mlp", "data", "--no-out"]
        for mpi in MPIS:
            for other, said in ((["train", "cnn", "data", "--no-out"], r"has --batch-size 128, rank 0 has 64"),
                                ([*mlp, "--lr", "0.3"], r"has --lr 0\.3, rank 0 has 0\.\d+"),
                                ([*mlp, "--batch-size", "8"], r"has --batch-size 8, rank 0 has \d+"),
                                ([*mlp, "--seed", "5"], r"has --seed 5, rank 0 has 0"),
                                ([*mlp, "--amp", "f16"], r"has --amp f16, rank 0 has off"),
                                (["train", "mlp", "other", "--no-out"], r"has (test|train) data of checksum \w+, rank 0 has of checksum \w+")):
                with self.subTest(mpi=mpi, other=other):
                    status, _, err, seconds = self.finish(self.job(mpi, 2, rank, PROGRAM, *mlp, "--", *other))
                    self.assertEqual(status, 1, err)
                    self.assertLess(seconds, LIMIT)
                    self.assertRegex(err, rf"(?m)^halfstep: train: rank 1 \([^)]*\) {said}; all ranks do the same run$")
                    self.assertEqual(self.processes(), {})


class Stops(FailuresTest):
    def test_of_one_rank_is_one_of_all(self):
        self.data(train=4096)
        for mpi in MPIS:
            for who in (1, 0):
                with self.subTest(mpi=mpi, rank=who):
                    process, pids = self.begin(mpi, 2)
                    os.kill(pids[who], signal.SIGTERM)
                    err = self.ended(process, 128 + signal.SIGTERM)
                    self.one_checkpoint(err)

    def one_checkpoint(self, err):
        """It is of the last step, and nobody wrote another one after it."""
        step = self.saved.state["step"]
        self.assertRegex(err, rf"(?m)^halfstep: interrupted after step {step}; resume with: halfstep train ")
        log = events(self.folder / "run/log.jsonl")
        self.assertEqual([e["step"] for e in log if e["event"] == "step"][-1], step)
        of_last = [e for e in log if e["event"] == "checkpoint" and e["step"] == step]
        self.assertEqual(len(of_last), 1 if step % 7 else 2)  # one of --save-every's may have come right before it
        self.assertEqual((log[-1]["event"], log[-1]["interrupted"]), ("end", True))

    def test_of_the_launcher(self):
        self.data(train=4096)
        for mpi in MPIS:
            for number in (signal.SIGTERM, signal.SIGINT):
                with self.subTest(mpi=mpi, signal=number):
                    process, _ = self.begin(mpi, 2)
                    process.send_signal(number)
                    err = self.ended(process, 128 + number)
                    self.one_checkpoint(err)

    def test_while_another_rank_is_stopped(self):
        """The signal says that time is short: nobody waits for the one that doesn't answer. The last periodic checkpoint stays."""
        self.data(train=4096)
        for mpi in MPIS:
            for asked, stopped in ((1, 0), (0, 1), (None, 1)):
                with self.subTest(mpi=mpi, asked=asked, stopped=stopped):
                    process, pids = self.begin(mpi, 2)
                    os.kill(pids[stopped], signal.SIGSTOP)
                    time.sleep(0.3)
                    os.kill(process.pid if asked is None else pids[asked], signal.SIGTERM)
                    err = self.ended(process, 1)
                    self.named_by(err, stopped, r"hasn't answered for 2\S* s since the job was asked to stop", [1 - stopped])
                    self.assertEqual(self.saved.state["step"] % 7, 0)
                    self.assertFalse(any(e["event"] == "end" for e in events(self.folder / "run/log.jsonl")))

    def test_before_the_first_step(self):
        """Rank 0 waits for somebody to read its log, a named pipe; the others wait for rank 0, for longer than a rank may be out of step."""
        self.data(train=256)
        os.mkfifo(self.folder / "log")
        for mpi in MPIS:
            with self.subTest(mpi=mpi):
                process = self.job(mpi, 2, "train", "mlp", "data", "--no-out", "--log-json", "log", "-q")
                self.ranks(2)
                time.sleep(11.5)
                self.assertIsNone(process.poll())
                os.kill(self.ranks(2)[0], signal.SIGTERM)
                status, _, err, seconds = self.finish(process)
                self.assertEqual(status, 128 + signal.SIGTERM, err)
                self.assertIn("halfstep: interrupted before the first step; nothing was written\n", err)
                self.assertLess(seconds, LIMIT)


if __name__ == "__main__":
    unittest.main()
