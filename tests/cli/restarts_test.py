# SPDX-License-Identifier: Apache-2.0
"""`launch --max-restarts`: ranks that are killed at random moments, while they start, connect, train, save and end. The weights at the end are
bit-identical to those of an uninterrupted run."""
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import unittest

from jobs import MPIS, JobTest
from program import RUN_FILES, Safetensors, events

SEED = 17
RANKS = 2


@unittest.skipUnless(MPIS, "no MPI was found when this was built, or no mpirun is installed")
class RestartsTest(JobTest):
    def killed_at_random(self, mpi, kills, epochs, most_steps, save_every=9, flags=()):
        """Each life of the job ends after a random number of steps, at most `most_steps`, or a random time, whichever comes first: so that some end before the
        first step, and the run isn't done before all kills are."""
        numbers = random.Random(SEED)
        log = self.folder / "run/log.jsonl"
        arguments = ["train", "mlp", "data", "--epochs", epochs, "--batch-size", "32", "--save-every", save_every, "--amp", "f16", "--seed", "3", "-q", *flags]
        whole = self.job(mpi, RANKS, *arguments, "--out", "whole")
        status, _, err, _ = self.finish(whole, 600)
        self.assertEqual(status, 0, err)
        process = self.job(mpi, RANKS, "--max-restarts", kills, *arguments, "--out", "run")
        lives = []
        for number in range(kills):
            before, size = set(lives), log.stat().st_size if log.exists() else 0
            bytes_more, seconds = numbers.random() * most_steps * 220, numbers.random() * 2
            # Of this life: a rank of the last one may have started after the other was killed.
            self.wait_for(f"life {number + 1}", lambda number=number, before=before: process.poll() is not None or
                          (process.errors.read_text().count("launch: restart ") == number and set(self.processes()) - before))
            end = time.monotonic() + seconds
            while time.monotonic() < end and not (log.exists() and log.stat().st_size > size + bytes_more):
                time.sleep(0.002)
            alive = [pid for pid in self.processes() if pid not in before]
            self.assertTrue(alive and process.poll() is None, f"after {number} kills the job had ended by itself: {process.poll()}")
            lives += alive
            os.kill(numbers.choice(sorted(alive)), signal.SIGKILL)
            if number % 10 == 9:
                print(f"{number + 1} kills", flush=True)
        status, _, err, _ = self.finish(process, 600)
        self.assertEqual(status, 0, err)
        # MPICH may end the whole job, with the processes beside the ranks, where a rank dies while another one is in MPI_Init: then nobody can say who died.
        named = err.count(" was ended by signal 9 (Killed)")
        self.assertTrue(named == kills or (mpi == "mpich" and 0 < named < kills), err)
        self.assertIn(f"launch: restart {kills} of {kills}, from run/last.safetensors", err)
        runs = [Safetensors(self.folder / run / "last.safetensors") for run in ("run", "whole")]
        self.assertEqual((runs[0].header, runs[0].data), (runs[1].header, runs[1].data))
        shards = [name for file in ("last", "best") for name in Safetensors(self.folder / f"run/{file}.safetensors").shards]
        for name in runs[1].shards:
            self.assertEqual((self.folder / "run" / name).read_bytes(), (self.folder / "whole" / name).read_bytes())
        logs = [[[e["step"], e["loss"], e["scale"]] for e in events(self.folder / run / "log.jsonl") if e["event"] == "step"] for run in ("run", "whole")]
        self.assertEqual(*logs)
        self.assertEqual(sorted(p.name for p in (self.folder / "run").iterdir()), sorted(RUN_FILES + shards))

    def killed_at_random_with_each_mpi(self, kills, **options):
        self.data(train=2048)
        for mpi in MPIS:
            with self.subTest(mpi=mpi):
                self.killed_at_random(mpi, kills, **options)
                os.rename(self.folder / "run", self.folder / f"run-{mpi}")
                os.rename(self.folder / "whole", self.folder / f"whole-{mpi}")


class Kills(RestartsTest):
    def test_at_random_moments(self):
        self.killed_at_random_with_each_mpi(3, epochs=8, most_steps=150)


class ShardKills(RestartsTest):
    def test_at_random_moments(self):
        """Each rank writes a shard of each checkpoint, all the time: one is whole whenever a rank is killed."""
        self.data(train=2048)
        for mpi, stage in zip(MPIS, (2, 3)):
            with self.subTest(mpi=mpi, stage=stage):
                self.killed_at_random(mpi, 3, epochs=6, most_steps=150, save_every=2, flags=["--zero", stage, "--optimizer", "adam"])
                os.rename(self.folder / "run", self.folder / f"run-{mpi}")
                os.rename(self.folder / "whole", self.folder / f"whole-{mpi}")


@unittest.skipUnless(MPIS, "no MPI was found when this was built, or no mpirun is installed")
class OtherRuns(JobTest):
    """A job that starts again leaves alone what others have in its folder."""

    def setUp(self):
        super().setUp()
        self.data()
        self.train("data", "--out", "run", "--seed", "1", "-q")
        self.command = ["train", "mlp", "data", "--out", "run", "--epochs", "2", "-q", "--seed"]

    def content(self):
        return {p.name: p.read_bytes() for p in (self.folder / "run").iterdir()}

    def test_a_run_that_is_there_is_not_resumed(self):
        before = self.content()
        status, _, err, _ = self.finish(self.job(MPIS[0], 2, "--max-restarts", "3", *self.command, "1"))
        self.assertEqual(status, 1, err)
        self.assertIn("run: holds a run already", err)
        self.assertNotIn("launch: restart", err)
        self.assertEqual(self.content(), before)

    def test_nor_is_one_that_is_to_be_replaced(self):
        """The first life ends before it has replaced anything."""
        os.mkfifo(self.folder / "log")
        process = self.job(MPIS[0], 1, "--max-restarts", "1", *self.command, "2", "--overwrite", "--log-json", "log")
        # It waits for who reads its log.
        self.wait_for("the folder is taken", (self.folder / "run" / "run.lock").exists)
        os.kill(self.ranks(1)[0], signal.SIGKILL)
        reader = subprocess.Popen(["cat", "log"], cwd=self.folder, stdout=subprocess.DEVNULL)
        self.addCleanup(reader.wait)
        self.addCleanup(reader.kill)
        status, _, err, _ = self.finish(process)
        self.assertEqual(status, 0, err)
        self.assertIn("launch: restart 1 of 1, from the beginning\n", err)
        self.train("data", "--out", "whole", "--seed", "2", "--epochs", "2", "-q", env={"HALFSTEP_THREADS": "1"})
        runs = [Safetensors(self.folder / run / "last.safetensors") for run in ("run", "whole")]
        self.assertEqual((runs[0].header, runs[0].data), (runs[1].header, runs[1].data))

    def test_nor_is_one_that_another_program_writes(self):
        run = self.folder / "run"
        with open(run / "run.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            process = self.job(MPIS[0], 1, "--max-restarts", "2", *self.command, "2", "--overwrite")
            while process.poll() is None:
                shutil.copy(run / "last.safetensors", run / "new")
                os.replace(run / "new", run / "last.safetensors")
                time.sleep(0.02)
        status, _, err, _ = self.finish(process)
        self.assertEqual(status, 1, err)
        self.assertEqual(err.count("another program writes a run there"), 3, err)
        self.assertIn("launch: restart 2 of 2, from the beginning\n", err)


class Elastic(RestartsTest):
    def test_one_rank_fewer_after_each_failure(self):
        """With --reproducible the bits are those of any number of ranks, so of a run that nobody disturbed, too."""
        self.data(train=2048)
        arguments = ["train", "mlp", "data", "--epochs", "6", "--batch-size", "32", "--save-every", "9", "--reproducible", "4", "--seed", "3"]
        self.train(*arguments[2:], "--out", "whole", env={"HALFSTEP_THREADS": "1"})
        for mpi in MPIS:
            with self.subTest(mpi=mpi):
                run = f"run-{mpi}"
                process = self.job(mpi, "1:4", "--max-restarts", "5", *arguments, "--out", run, "-q")
                for count in (4, 2):  # 3 doesn't divide the shards
                    self.wait_for_steps(run, 30)
                    self.wait_for(f"{count} ranks", lambda count=count: sorted(self.processes().values()) == list(range(count)))
                    (self.folder / run / "log.jsonl").unlink()  # so that the next steps are those of the ranks that are left
                    os.kill(self.ranks(count)[-1], signal.SIGKILL)
                status, _, err, _ = self.finish(process, 120)
                self.assertEqual(status, 0, err)
                self.assertIn(f"launch: restart 1 of 5 on 2 ranks, from {run}/last.safetensors", err)
                self.assertIn(f"launch: restart 2 of 5 on 1 rank, from {run}/last.safetensors", err)
                runs = [Safetensors(self.folder / r / "last.safetensors") for r in (run, "whole")]
                self.assertEqual(runs[0].data, runs[1].data)

    def test_machines_that_can_not_be_reached_are_left_out(self):
        """An agent in place of ssh, whose machines are this one, and one of which is gone after the first failure."""
        agent = self.folder / "agent"
        agent.write_text(f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\nhost=$1\nshift\n[ "$host" = 127.0.0.3 ] && [ -e {self.folder}/gone ] && exit 255\n'
                         # Open MPI's daemons make the same folder of a job under it, which fails where two do so at once.
                         f'export TMPDIR={self.folder}/$host\nmkdir -p "$TMPDIR"\nexec sh -c "$*"\n')
        agent.chmod(0o755)
        (self.folder / "hosts").write_text("127.0.0.2 slots=1\n127.0.0.3 slots=2\n127.0.0.4 slots=1\n")
        program = self.folder / "rank.py"
        # Rank 0 writes into a file: a launcher that ends a job may drop what is on its way through its pipes. Rank 1 fails after that.
        sizes = self.folder / "sizes"
        program.write_text(f"""#!{sys.executable}
import os, sys, time
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
size = os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE"))
first = not os.path.exists("{self.folder}/gone")
if rank == "0":
    with open("{sizes}", "a") as f:
        f.write(size + "\\n")
elif rank == "1" and first:
    while not os.path.exists("{sizes}"):
        time.sleep(0.01)
    open("{self.folder}/gone", "w").close()
    sys.exit(3)
""")
        program.chmod(0o755)
        env = {"OMPI_MCA_plm_rsh_agent": str(agent), "HYDRA_LAUNCHER_EXEC": str(agent)}
        for mpi in MPIS:
            for nodes, status, said in (("2:3", 0, ["4", "2"]), ("3:3", 1, ["4"])):
                with self.subTest(mpi=mpi, nodes=nodes):
                    for file in (self.folder / "gone", sizes):
                        file.unlink(missing_ok=True)
                    got, out, err = self.run_program("launch", "--mpi", mpi, "--hosts", "hosts", "--nnodes", nodes, "--max-restarts", "2", program, env=env)
                    self.assertEqual((got, sizes.read_text().split()), (status, said), out + err)
                    self.assertIn("launch: 127.0.0.3 can't be reached and is left out\n", err)
                    self.assertIn("launch: restart 1 of 2 on 2 ranks, from the beginning\n" if status == 0 else
                                  "launch: 2 of 3 machines can be reached, and --nnodes asks for at least 3\n", err)

    def test_the_number_of_ranks_divides_the_shards(self):
        self.data()
        arguments = ["train", "mlp", "data", "--no-out", "--epochs", "1", "--reproducible"]
        status, out, err = self.run_program("launch", "--nproc-per-node", "1:3", *arguments, "4")
        self.assertEqual(status, 0, err)
        self.assertIn("by 2 ranks", out)
        status, out, err = self.run_program("launch", "--nproc-per-node", "3:4", "--max-restarts", "1", *arguments, "8", env={"PATH": self.failing_launchers()})
        self.assertEqual((status, err.count("--as-rank")), (1, 1), err)
        self.assertIn("launch: 3 ranks that --nproc-per-node asks for don't divide the 8 shards of --reproducible", err)

    def failing_launchers(self):
        """A PATH whose mpirun prints what it is given and fails."""
        (self.folder / "bin").mkdir(exist_ok=True)
        for name in ("mpirun.openmpi", "mpirun.mpich"):
            path = self.folder / "bin" / name
            path.write_text("#!/bin/sh\necho \"$@\"\nexit 6\n")
            path.chmod(0o755)
        return f"{self.folder / 'bin'}:{os.environ['PATH']}"

    def test_no_fewer_machines_than_asked_for(self):
        agent = self.folder / "agent"
        agent.write_text("#!/bin/sh\nexit 0\n")
        agent.chmod(0o755)
        env = {"PATH": self.failing_launchers(), "OMPI_MCA_plm_rsh_agent": str(agent), "HYDRA_LAUNCHER_EXEC": str(agent)}
        arguments = ["train", "mlp", "data", "--no-out", "--reproducible", "4"]
        for slots, nodes, used in (((1, 3, 1), "3:3", "127.0.0.2:1,127.0.0.3:2,127.0.0.4:1"), ((1, 1, 1), "2:3", "127.0.0.2:1,127.0.0.3:1"),
                                   ((2, 2, 2), "3:3", "127.0.0.2:2,127.0.0.3:1,127.0.0.4:1"), ((2, 2, 2), "1:3", "127.0.0.2:2,127.0.0.3:2"),
                                   ((1, 1, 1), "3:3", None)):
            (self.folder / "hosts").write_text("".join(f"127.0.0.{i + 2} slots={n}\n" for i, n in enumerate(slots)))
            status, out, err = self.run_program("launch", "--hosts", "hosts", "--nnodes", nodes, *arguments, env=env)
            if used:
                self.assertIn(f" {used} ", out, err)
            else:
                self.assertEqual((status, out), (1, ""))
                self.assertIn("launch: 3 ranks, one on each machine that --nnodes asks for, don't divide the 4 shards of --reproducible", err)

    def test_usage(self):
        (self.folder / "hosts").write_text("a\nb\n")
        (self.folder / "three").write_text("a\nb\nc\n")
        for text, arguments in (("--nnodes: got 2, and three names 3 machines; expected 3, or MIN:MAX", ["--hosts", "three", "--nnodes", "2", "true"]),
                                ("--nnodes: got 1, and hosts names 2 machines", ["--hosts", "hosts", "--nnodes=1", "true"]),
                                ("--nproc-per-node: expected MIN:MAX, got 4:2 with the larger number first", ["--nproc-per-node", "4:2", "true"]),
                                ("--nnodes: expected MIN:MAX, got 3:2", ["--hosts", "hosts", "--nnodes", "3:2", "true"]),
                                ("--nproc-per-node: MIN:MAX is for one machine", ["--hosts", "hosts", "--nproc-per-node", "1:2", "true"])):
            self.refused(2, text, "launch", *arguments)


class KillsSlow(RestartsTest):
    def test_a_hundred_at_random_moments(self):
        """The MPIs end a job whose rank has died in ways of their own: each gets its share."""
        kills = 100 // len(MPIS)
        self.killed_at_random_with_each_mpi(kills, epochs=2 * kills, most_steps=120)  # of 64 steps: more than all lives have


if __name__ == "__main__":
    unittest.main()
