# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of runs whose state ranks divide (--zero): each rank writes a shard, and any number of ranks reads them. Whatever is missing or wrong is named."""
import json
import os
import shutil
import signal
import subprocess
import unittest

from jobs import MPIS, JobTest
from program import PROGRAM, RUN_FILES, Safetensors, events

FLAGS = ["train", "mlp", "data", "--batch-size", "16", "--lr", "0.01", "--optimizer", "adamw", "--amp", "bf16", "-q"]


@unittest.skipUnless(MPIS, "no MPI was found when this was built, or no mpirun is installed")
class ShardsTest(JobTest):
    def ranks_do(self, count, *arguments, mpi=None, status=0):
        """A job, or a process alone; returns what it said on standard error."""
        if count == 1:
            got, _, err = self.run_program(*arguments, env={"HALFSTEP_THREADS": "1"})
        else:
            got, _, err, _ = self.finish(self.job(mpi or MPIS[0], count, *arguments), 120)
        self.assertEqual(got, status, err)
        return err

    def last(self, run):
        return Safetensors.whole(self.folder / run / "last.safetensors")

    def check_files(self, run):
        """The folder has a run's files and the shards of its checkpoints: each of these is named by one, and there."""
        shards = [name for file in ("last", "best") for name in Safetensors(self.folder / run / f"{file}.safetensors").shards]
        self.assertEqual(sorted(p.name for p in (self.folder / run).iterdir()), sorted(RUN_FILES + shards))
        return shards


class ResumeTest(ShardsTest):
    def resume(self, saved):
        """On 1, 2 and 4 ranks what `saved` ranks wrote, divided or not; beside runs whose state isn't divided, and whose checkpoints are one file."""
        self.data(train=131)
        counts = (1, 2, 4)
        self.ranks_do(saved, *FLAGS, "--out", "whole", "--epochs", "1")
        for resumed in counts:
            shutil.copytree(self.folder / "whole", self.folder / f"whole {resumed}")
            self.ranks_do(resumed, "train", "--resume", f"whole {resumed}", "--epochs", "2")
        for stage in (1, 2, 3):
            mpi = MPIS[stage % len(MPIS)]
            run = f"at {stage}"
            self.ranks_do(saved, *FLAGS, "--out", run, "--epochs", "1", "--zero", stage, mpi=mpi)
            self.assertEqual(self.last(run).data, self.last("whole").data)
            if saved > 1:
                self.assertEqual(len(self.check_files(run)), 2 * saved)
                main = Safetensors(self.folder / run / "last.safetensors")
                self.assertEqual("fc1.weight" in main.header, stage < 3)
                self.assertFalse(any(name.endswith("exp_avg") for name in main.header))
            for resumed in counts:
                next_stages = (1, 2, 3, 0)
                next_stage = stage if resumed == saved else next_stages[(stage + resumed) % 4]
                with self.subTest(saved=saved, resumed=resumed, stages=(stage, next_stage), mpi=mpi):
                    copy = f"{run}, {resumed} at {next_stage}"
                    shutil.copytree(self.folder / run, self.folder / copy)
                    self.ranks_do(resumed, "train", "--resume", copy, "--epochs", "2", "--zero", next_stage, mpi=mpi)
                    self.assertEqual(self.last(copy).data, self.last(f"whole {resumed}").data)
                    shards = self.check_files(copy)
                    self.assertEqual(any(name.startswith("last.") for name in shards), next_stage > 0 and resumed > 1)


class ResumedFromOne(ResumeTest):
    def test_on_any_number_of_ranks(self):
        self.resume(1)


class ResumedFromTwo(ResumeTest):
    def test_on_any_number_of_ranks(self):
        self.resume(2)


class ResumedFromFour(ResumeTest):
    def test_on_any_number_of_ranks(self):
        self.resume(4)


class Written(ShardsTest):
    def test_interrupted_in_an_epoch(self):
        """Two checkpoints of one step: what --save-every wrote, and at once what the end of the job does."""
        self.data(train=2048)
        flags = [*FLAGS, "--epochs", "2", "--zero", "3", "--save-every", "1"]
        for mpi in MPIS:
            with self.subTest(mpi=mpi):
                self.ranks_do(2, *flags, "--out", f"whole {mpi}", mpi=mpi)
                process = self.job(mpi, 2, *flags, "--out", f"run {mpi}")
                self.wait_for_steps(f"run {mpi}", 20)
                os.kill(self.ranks(2)[1], signal.SIGTERM)
                status, _, err, _ = self.finish(process)
                self.assertEqual(status, 128 + signal.SIGTERM, err)
                step = self.last(f"run {mpi}").state["step"]
                self.assertEqual([e["step"] for e in events(self.folder / f"run {mpi}/log.jsonl") if e["event"] == "step"][-1], step)
                self.ranks_do(2, "train", "--resume", f"run {mpi}", mpi=mpi)
                self.assertEqual(self.last(f"run {mpi}").data, self.last(f"whole {mpi}").data)
                self.check_files(f"run {mpi}")

    def test_waiting_for_them_gives_the_same_files(self):
        self.data(train=131)
        flags = [*FLAGS, "--epochs", "2", "--zero", "2", "--save-every", "4"]
        self.ranks_do(2, *flags, "--out", "beside")
        self.ranks_do(2, *flags, "--out", "waiting", "--sync-checkpoints")
        for name in [*self.check_files("beside"), "last.safetensors", "best.safetensors"]:
            self.assertEqual((self.folder / "beside" / name).read_bytes(), (self.folder / "waiting" / name).read_bytes(), name)
        lines = [[(e["event"], e["step"]) for e in events(self.folder / run / "log.jsonl") if e["event"] == "checkpoint"] for run in ("beside", "waiting")]
        self.assertEqual(*lines)


class Read(ShardsTest):
    def test_by_every_command(self):
        """Those that need weights read the shards that have some: at stage 3."""
        self.data()
        for stage in (0, 2, 3):
            self.ranks_do(2, *FLAGS, "--out", f"{stage}", "--epochs", "1", "--zero", stage)
        for stage in (2, 3):
            said = []
            for run in ("0", f"{stage}"):
                self.ranks_do(1, "convert", f"{run}/best.safetensors", f"{run}.safetensors", "--force")
                evaluated = self.run_program("eval", "--weights", run, "--log-json", f"{run}.jsonl")
                self.assertEqual(evaluated.returncode, 0, evaluated.stderr)
                inspected = self.run_program("inspect", f"{run}/last.safetensors", "--json")
                self.assertEqual(inspected.returncode, 0, inspected.stderr)
                self.ranks_do(1, "predict", "--weights", run)
                self.ranks_do(1, "export", "--weights", run, "--onnx", f"{run}.onnx")
                self.ranks_do(1, *FLAGS, "--pretrained", run, "--epochs", "1", "--out", f"{run} more", "--overwrite")
                result = next(e for e in events(self.folder / f"{run}.jsonl") if e["event"] == "eval")
                said.append([(self.folder / f"{run}.safetensors").read_bytes(), result["loss"], result["top1"],
                             json.loads(inspected.stdout)["tensors"], (self.folder / f"{run}.onnx").read_bytes(), self.last(f"{run} more").data])
            self.assertEqual(*said)
        # At stage 2 the checkpoint itself has the weights: it can go elsewhere alone, as weights.
        shutil.copy(self.folder / "2/best.safetensors", self.folder / "alone.safetensors")
        self.ranks_do(1, "eval", "mlp", "data", "--weights", "alone.safetensors")
        shutil.copy(self.folder / "3/best.safetensors", self.folder / "alone.safetensors")
        self.refused(1, "is missing", "eval", "mlp", "data", "--weights", "alone.safetensors")

    def test_while_it_is_replaced(self):
        """A checkpoint whose shards a run removes since it has written the next one is read again."""
        self.data(train=2048)
        process = self.job(MPIS[0], 2, *FLAGS, "--out", "run", "--epochs", "100000", "--zero", "3", "--save-every", "1")
        self.wait_for("a checkpoint", (self.folder / "run/last.safetensors").exists)
        for _ in range(25):
            self.ranks_do(1, "inspect", "run/last.safetensors")
        process.send_signal(signal.SIGTERM)
        self.finish(process)
        self.ranks_do(1, "inspect", "run/last.safetensors")
        self.assertGreater(self.last("run").state["step"], 10)

    def test_overwriting_removes_all(self):
        self.data()
        self.ranks_do(2, *FLAGS, "--out", "run", "--epochs", "1", "--zero", "3")
        self.assertEqual(len(self.check_files("run")), 4)
        self.ranks_do(1, *FLAGS, "--out", "run", "--epochs", "1", "--overwrite")
        self.assertEqual(self.check_files("run"), [])


class Folder(ShardsTest):
    def test_that_a_rank_does_not_see(self):
        """As on a machine that has a folder of its own under that name."""
        self.data()
        (self.folder / "mine").mkdir()
        unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
        mount = f"mount -t tmpfs none {self.folder}/mine"
        made = subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            self.skipTest(f"no file system can be made here: {made.stderr.strip()}")
        rank = self.folder / "rank.sh"
        rank.write_text(f'#!/bin/sh\n[ "$OMPI_COMM_WORLD_RANK$PMI_RANK" = 0 ] && exec "$@"\nexec {" ".join(unshare)} sh -c \'{mount} && exec "$@"\' x "$@"\n')
        rank.chmod(0o755)
        for mpi in MPIS:
            with self.subTest(mpi=mpi):
                err = self.ranks_do(2, rank, PROGRAM, *FLAGS, "--out", "mine/run", "--zero", "2", mpi=mpi, status=1)
                self.assertRegex(err, r"(?m)^halfstep: .*/mine/run: with --zero 2 each rank writes its shard of a checkpoint there, and rank 1 \(host .*\) doesn't see it; use a folder")
                self.assertEqual(list((self.folder / "mine").iterdir()), [])


class Wrong(ShardsTest):
    def setUp(self):
        super().setUp()
        self.data()
        self.ranks_do(2, *FLAGS, "--out", "run", "--epochs", "1", "--zero", "2")
        self.shard = self.folder / "run" / self.last_file().shards[1]
        self.content = self.shard.read_bytes()

    def last_file(self):
        return Safetensors(self.folder / "run/last.safetensors")

    def refused_by_all(self, *said):
        for arguments in (["train", "--resume", "run", "--epochs", "2"], ["inspect", "run/last.safetensors"]):
            self.refused(1, said, *arguments)
        err = self.ranks_do(2, "train", "--resume", "run", "--epochs", "2", status=1)
        for part in said:
            self.assertIn(part, err)
        self.shard.write_bytes(self.content)

    def test_is_named(self):
        name = f"run/{self.shard.name}"
        self.assertRegex(name, r"\Arun/last\.\d+\.rank1-of-2\.safetensors\Z")
        self.shard.unlink()
        self.refused_by_all(f"run/last.safetensors: its shard {name} is missing")
        self.shard.write_bytes(self.content[:-5])
        self.refused_by_all(f"{name}: expected {len(self.content)} bytes", f"got {len(self.content) - 5}: it is cut short")
        self.shard.write_bytes(self.content[:-5] + bytes([self.content[-5] ^ 1]) + self.content[-4:])
        self.refused_by_all(f"{name}: damaged shard: expected the checksum ")
        # Of another step, of the same size; and of another rank.
        self.ranks_do(2, *FLAGS, "--out", "other", "--epochs", "1", "--zero", "2", "--seed", "5")
        shutil.copy(self.folder / "other" / self.shard.name, self.shard)
        self.refused_by_all(f"{name}: expected the shard of run/last.safetensors with the checksum ", "it is of another checkpoint")
        shutil.copy(self.folder / "run" / self.last_file().shards[0], self.shard)
        self.refused_by_all(f"{name}: expected ", "of another checkpoint")
        self.ranks_do(1, "train", "--resume", "run", "--epochs", "2")

    def test_a_shard_alone_is_no_checkpoint(self):
        for arguments in (["train", "--resume", f"run/{self.shard.name}"], ["eval", "mlp", "data", "--weights", f"run/{self.shard.name}"]):
            self.refused(1, f"run/{self.shard.name}: it is one shard of a checkpoint", *arguments)

    def test_a_list_that_leads_elsewhere(self):
        file = self.last_file()
        for bad in ("../data", "", ".", "a/b"):
            shards = file.state["shards"]
            shards[0]["file"] = bad
            changed = self.last_file()
            changed.set_state(shards=shards)
            changed.write(self.folder / "run/last.safetensors")
            self.refused(1, "damaged checkpoint: expected the name of a file for 'file'", "train", "--resume", "run", "--epochs", "2")

    def test_through_a_link(self):
        """Its shards lie beside the file that it leads to."""
        (self.folder / "latest.safetensors").symlink_to("run/last.safetensors")
        self.ranks_do(1, "inspect", "latest.safetensors")
        self.shard.unlink()
        self.refused(1, f"latest.safetensors: its shard {self.shard.name} is missing", "inspect", "latest.safetensors")

    def test_those_of_a_checkpoint_that_can_not_be_read_stay(self):
        """The best one, which the run doesn't replace: nothing is better than all."""
        changed = self.last_file()
        changed.set_state(best=1.0)
        changed.write(self.folder / "run/last.safetensors")
        best = self.folder / "run/best.safetensors"
        shards = Safetensors(best).shards
        self.assertEqual(len(shards), 2)
        best.write_bytes(b"not to be read")
        self.ranks_do(1, "train", "--resume", "run", "--epochs", "2")
        self.assertEqual(best.read_bytes(), b"not to be read")
        for name in shards:
            self.assertTrue((self.folder / "run" / name).exists(), name)

    def test_what_was_left_is_removed(self):
        """By writers that were killed: shards of no checkpoint, and parts of files."""
        for name in ("last.7.rank0-of-2.safetensors", "best.9-2.rank3-of-4.safetensors", f"{self.shard.name}.tmp0123456789abcdef",
                     "last.8.rank1-of-2.safetensors.tmp0123456789abcdef"):
            (self.folder / "run" / name).write_bytes(b"x")
        (self.folder / "run/last.mine.safetensors").write_bytes(b"mine")
        self.ranks_do(2, "train", "--resume", "run", "--epochs", "2")
        (self.folder / "run/last.mine.safetensors").unlink()
        self.check_files("run")

    def test_a_rank_that_can_not_write_ends_all(self):
        """With its own error; the checkpoint before stays."""
        for mpi in MPIS:
            with self.subTest(mpi=mpi):
                shutil.rmtree(self.folder / "run")
                process = self.job(mpi, 2, *FLAGS, "--out", "run", "--epochs", "100000", "--zero", "2", "--save-every", "3")
                last = self.folder / "run/last.safetensors"
                self.wait_for("a checkpoint", last.exists)
                step = Safetensors(last).state["step"]
                # Where a shard of each of the next checkpoints would be, a folder lies that isn't empty.
                for number in range(step + 400, step, -1):
                    try:
                        (self.folder / f"run/last.{number}.rank1-of-2.safetensors/x").mkdir(parents=True)
                    except OSError:  # already written: the run is past it
                        break
                status, _, err, _ = self.finish(process)
                self.assertEqual(status, 1, err)
                self.assertRegex(err, r"last\.\d+\.rank1-of-2\.safetensors: (can't be written: it is a folder|renaming over it failed: Is a directory)")
                for path in self.folder.glob("run/last.*.rank1-of-2.safetensors"):
                    if path.is_dir():
                        shutil.rmtree(path)
                saved = Safetensors.whole(last)
                # Of every third step, or of an epoch's end: 128 samples, 16 a step.
                self.assertIn(0, (saved.state["step"] % 3, saved.state["step"] % 8), saved.state["step"])
                self.ranks_do(1, "inspect", "run/last.safetensors")


if __name__ == "__main__":
    unittest.main()
