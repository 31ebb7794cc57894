# SPDX-License-Identifier: Apache-2.0
"""Where runs write: one run in a folder, one program that writes it, and nothing touched by a command that is refused."""
import fcntl
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
import unittest

from program import FIGURES, RUN_FILES, ProgramTest, Safetensors, events
from runs_test import ENDLESS, wait_for


class FolderTest(ProgramTest):
    def content(self, folder):
        """All files with what is in them, and all folders."""
        root = self.folder / folder
        return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}

    def unchanged(self, folder, status, text, *arguments, **options):
        before = self.content(folder)
        err = self.refused(status, text, *arguments, **options)
        self.assertEqual(before, self.content(folder), arguments)
        return err


class ExistingRun(FolderTest):
    def setUp(self):
        super().setUp()
        self.data()
        self.train("data", "--out", "run", "-q", "--seed", "1")

    def test_a_run_is_not_written_over(self):
        err = self.unchanged("run", 1, ["run: holds a run already (run/last.safetensors)", "--resume run continues", "--overwrite replaces it"],
                             "train", "mlp", "data", "--out", "run", "-q")
        self.assertNotIn("run.lock", err)
        for link in ("link", "./run/"):
            if link == "link":
                (self.folder / "link").symlink_to("run")
            self.unchanged("run", 1, "holds a run already", "train", "mlp", "data", "--out", link, "-q")

    def test_each_of_a_run_s_files_is_a_run(self):
        for name in ("last.safetensors", "best.safetensors", "config.yaml", "log.jsonl"):
            folder = self.folder / f"only {name}"
            folder.mkdir()
            shutil.copy(self.folder / "run" / name, folder / name)
            text = "--resume" if name.endswith(".safetensors") else "no checkpoint to resume from; --overwrite"
            self.unchanged(folder.name, 1, [f"{folder.name}/{name}", text], "train", "mlp", "data", "--out", folder.name, "-q")

    def test_tables_without_a_run_are_somebody_s_own(self):
        for name in FIGURES:
            folder = self.folder / f"only {name}"
            folder.mkdir()
            (folder / name).write_text("mine")
            for flags in ([], ["--overwrite"], ["--overwrite", "--resume", "run", "--epochs", "2"]):
                self.unchanged(folder.name, 1, [f"{folder.name}/{name}: a run writes a file of that name", "move it away, or give another folder"],
                               "train", "mlp", "data", "--out", folder.name, "-q", *flags)
        # Nor are curves of another program a run's.
        events_file = self.folder / "mine/tensorboard/events.out.tfevents.1.other.1"
        events_file.parent.mkdir(parents=True)
        events_file.write_text("mine")
        self.train("data", "--out", "mine", "--overwrite", "-q")
        self.assertEqual(events_file.read_text(), "mine")

    def test_a_run_that_failed_is_one(self):
        self.refused(1, "finite loss", "train", "mlp", "data", "--out", "failed", "-q", "--lr", "1e30")
        self.unchanged("failed", 1, "failed: holds a run already", "train", "mlp", "data", "--out", "failed", "-q")

    def test_overwrite_replaces_the_run_and_leaves_the_rest(self):
        run = self.folder / "run"
        (run / "notes.txt").write_text("mine")
        (run / "sub").mkdir()
        (run / "sub/last.safetensors").write_text("mine too")
        old = (run / "last.safetensors").read_bytes()
        self.refused(1, "finite loss", "train", "mlp", "data", "--out", "run", "--overwrite", "-q", "--lr", "1e30", "--seed", "2")
        # Nothing of the run before, checkpoints least of all.
        self.assertEqual(sorted(p.name for p in run.iterdir()), ["config.yaml", "curves.svg", "log.jsonl", "notes.txt", "sub"])
        self.assertEqual(events(run / "log.jsonl")[0]["seed"], 2)
        self.assertEqual([e["event"] for e in events(run / "log.jsonl")].count("start"), 1)
        self.assertIn("seed: 2\n", (run / "config.yaml").read_text())
        self.train("data", "--out", "run", "--overwrite", "-q", "--seed", "1")
        self.assertEqual((run / "last.safetensors").read_bytes(), old)
        self.assertEqual(((run / "notes.txt").read_text(), (run / "sub/last.safetensors").read_text()), ("mine", "mine too"))

    def test_overwrite_with_a_log_elsewhere_leaves_no_log_of_before(self):
        self.train("data", "--out", "run", "--overwrite", "-q", "--log-json", "log")
        self.assertFalse((self.folder / "run/log.jsonl").exists())

    def test_overwrite_that_is_refused_changes_nothing(self):
        overwrite = ["train", "mlp", "data", "--out", "run", "--overwrite", "-q"]
        self.unchanged("run", 1, "nowhere", "train", "mlp", "nowhere", "--out", "run", "--overwrite")
        self.unchanged("run", 2, "--lr", *overwrite, "--lr", "-1")
        self.unchanged("run", 1, "nowhere/log", *overwrite, "--log-json", "nowhere/log")
        self.unchanged("run", 1, "no weights of mlp", *overwrite, "--pretrained", self.other_weights())
        self.unchanged("run", 2, "--overwrite: --resume continues the run in run", *overwrite, "--resume", "run")
        self.unchanged("run", 2, "--overwrite: belongs to --out", "train", "mlp", "data", "--overwrite")
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        self.unchanged("run", 1, "config.yaml", *overwrite, preexec_fn=limit)

    def other_weights(self):
        file = Safetensors(self.folder / "run/last.safetensors")
        file.keep(["fc1.weight"])
        file.header["other.weight"] = file.header.pop("fc1.weight")
        return file.write(self.folder / "other.safetensors", sign=False)

    def test_a_resume_that_is_refused_changes_nothing(self):
        resume = ["train", "mlp", "data", "--resume", "run", "--epochs", "2", "-q"]
        for flags, text in ((["--lr", "0.5"], "--lr 0.01, got 0.5"), (["--batch-size", "32"], "--batch-size 64"), (["--optimizer", "adam"], "--optimizer"),
                            (["--seed", "2"], "--seed 1, got 64 and 2"), (["--log-json", "nowhere/log"], "nowhere/log"), (["--limit", "100"], "--limit"),
                            (["--clip-norm", "1"], "--clip-norm 0, got 1"), (["--start-epoch", "1"], "--start-epoch")):
            with self.subTest(flags):
                status = 2 if "--start-epoch" in flags else 1
                self.unchanged("run", status, text, *resume, *flags)
        # Also where the checkpoint is damaged.
        (self.folder / "run/last.safetensors").write_bytes((self.folder / "run/last.safetensors").read_bytes()[:-1])
        self.unchanged("run", 1, "cut short", *resume)

    def test_going_on_in_the_folder_of_another_run(self):
        self.train("data", "--out", "other", "-q", "--seed", "2")
        resume = ["train", "mlp", "data", "--resume", "run", "--epochs", "2", "-q", "--out", "other"]
        self.unchanged("other", 1, "other: holds a run already", *resume)
        self.assertEqual(self.run_program(*resume, "--overwrite")[0], 0)
        self.assertEqual(events(self.folder / "other/log.jsonl")[0]["step"], 2)
        self.assertEqual(Safetensors(self.folder / "other/last.safetensors").state["loader_seed"], 1)
        self.assertEqual(Safetensors(self.folder / "run/last.safetensors").state["step"], 2)


class Starts(FolderTest):
    def test_a_start_that_fails_leaves_nothing(self):
        self.data()
        (self.folder / "broken").mkdir()
        for flags, status, text in ((["broken"], 1, "broken"), (["nowhere"], 1, "nowhere"), (["data", "--lr", "0"], 2, "--lr"),
                                    (["data", "--resume", "nowhere"], 2, "nowhere"), (["data", "--pretrained", "broken/x"], 2, "broken/x"),
                                    (["data", "--log-json", "nowhere/log"], 1, "nowhere/log"), (["data", "--device", "nothing"], 2, "nothing")):
            for out in (["--out", "a/b/run"], []):
                with self.subTest(flags=flags, out=out):
                    self.unchanged(".", status, text, "train", "mlp", *flags, *out)
        before = self.content(".")
        for fault in ("fail:linear:1", "fail:linear:3"):  # in the first step: no run came of it
            for flags in ([], ["--tensorboard", "--debug-nonfinite", "log"]):
                status, out, err = self.run_program("train", "mlp", "data", "--out", "a/b", "--device", "sim", *flags, env={"HALFSTEP_SIM_FAULTS": fault})
                self.assertEqual(status, 1, out)
                self.assertEqual(before, self.content("."))
        self.unchanged(".", 1, "/dev/full", "train", "mlp", "data", "--out", "a/b", "--log-json", "/dev/full")

    def test_a_disk_without_room(self):
        self.data()
        for size, name in ((0, "config.yaml"), (10, "config.yaml")):
            limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            self.unchanged(".", 1, [name, "writing failed"], "train", "mlp", "data", "--out", "a/b", "-q", preexec_fn=limit)

    def test_runs_of_one_second_get_folders_of_their_own(self):
        self.data()
        runs = [self.start("train", "mlp", "data", "-q", "--seed", str(i)) for i in range(6)]
        for run in runs:
            self.assertEqual((run.communicate(timeout=60)[1], run.returncode), ("", 0))
        folders = sorted((self.folder / "runs").iterdir())
        self.assertEqual(len(folders), 6)
        seeds = set()
        for folder in folders:
            self.assertRegex(folder.name, r"\Amlp-\d{8}-\d{6}(-\d)?\Z")
            log = events(folder / "log.jsonl")
            self.assertEqual([e["event"] for e in log if e["event"] in ("start", "end")], ["start", "end"])
            seeds.add(log[0]["seed"])
            self.assertIn(f"seed: {log[0]['seed']}\n", (folder / "config.yaml").read_text())
            self.assertEqual(Safetensors(folder / "last.safetensors").state["loader_seed"], log[0]["seed"])
        self.assertEqual(seeds, set(range(6)))

    def test_places_that_are_none(self):
        self.data()
        (self.folder / "file").write_text("x")
        (self.folder / "dangling").symlink_to("not there")
        train = ["train", "mlp", "data", "-q", "--out"]
        self.unchanged(".", 1, ["file: can't be made", "Not a directory"], *train, "file")
        self.unchanged(".", 1, ["file/run: can't be made", "Not a directory"], *train, "file/run")
        self.unchanged(".", 1, ["dangling: can't be made", "a link to not there, which is not there"], *train, "dangling")
        (self.folder / "loop").symlink_to("loop")
        self.unchanged(".", 1, "loop: can't be made", *train, "loop")
        self.unchanged(".", 1, ["x" * 300, "too long"], *train, "x" * 300)

    @unittest.skipIf(os.geteuid() == 0, "root writes everywhere")
    def test_unwritable_folders(self):
        self.data()
        (self.folder / "closed").mkdir(mode=0o555)
        self.unchanged(".", 1, ["closed", "Permission denied"], "train", "mlp", "data", "-q", "--out", "closed")
        self.unchanged(".", 1, ["closed/run", "Permission denied"], "train", "mlp", "data", "-q", "--out", "closed/run")

    def test_a_folder_that_is_there_and_holds_no_run(self):
        self.data()
        (self.folder / "run").mkdir()
        (self.folder / "run/notes").write_text("mine")
        (self.folder / "run/run.lock").write_text("process 1 on nowhere\n")  # of a process that was killed
        self.train("data", "--out", "run", "-q")
        self.assertEqual(sorted(p.name for p in (self.folder / "run").iterdir()), sorted([*RUN_FILES, "notes"]))


class Locks(FolderTest):
    def running(self, *arguments):
        self.data()
        process = self.start(*ENDLESS, "--out", "run", "--save-every", "1", *arguments)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        wait_for(lambda: (self.folder / "run/last.safetensors").exists())
        return process

    def test_who_writes_is_named(self):
        process = self.running()
        holder = f"run: another program writes a run there: process {process.pid} on {socket.gethostname()} since 20"
        # Who only gives --out learns it too: a run that is being written is none to go on with or to replace.
        for flags in (["--resume", "run"], ["--out", "run", "--overwrite"], ["--resume", "run/last.safetensors", "--epochs", "9"], ["--out", "run"]):
            self.refused(1, holder, "train", "mlp", "data", "-q", *flags)
        # Reading is free.
        self.assertEqual(self.run_program("eval", "--weights", "run")[0], 0)
        process.terminate()
        self.assertEqual(process.wait(timeout=30), 128 + signal.SIGTERM)
        self.assertFalse((self.folder / "run/run.lock").exists())

    def test_a_kill_leaves_no_lock(self):
        process = self.running()
        process.kill()
        process.wait(timeout=30)
        self.assertTrue((self.folder / "run/run.lock").exists())
        epochs = str(Safetensors(self.folder / "run/last.safetensors").state["epoch"] + 1)
        self.assertEqual(self.run_program("train", "--resume", "run", "--epochs", epochs)[0], 0)
        self.assertFalse((self.folder / "run/run.lock").exists())

    def test_two_at_once(self):
        """Of several programs with one --out, one trains and the others say why they don't."""
        self.data()
        for _ in range(3):
            runs = [self.start("train", "mlp", "data", "-q", "--out", "same", "--epochs", "3", "--seed", str(i)) for i in range(4)]
            ends = [(run.communicate(timeout=60)[1], run.returncode) for run in runs]
            done = [i for i, end in enumerate(ends) if end == ("", 0)]
            self.assertEqual(len(done), 1, ends)
            for i, (err, status) in enumerate(ends):
                if i != done[0]:
                    self.assertEqual(status, 1)
                    self.assertRegex(err, r"\Ahalfstep: same: (holds a run already|another program writes a run there)")
            log = events(self.folder / "same/log.jsonl")
            self.assertEqual([e["event"] for e in log if e["event"] in ("start", "end")], ["start", "end"])
            self.assertEqual(log[0]["seed"], done[0])
            self.assertIn(f"seed: {done[0]}\n", (self.folder / "same/config.yaml").read_text())
            shutil.rmtree(self.folder / "same")


    def test_several_starts_with_one_folder(self):
        """One of them trains without end; all others say who does."""
        self.data()
        for number in range(3):
            out = f"new {number}"
            runs = [self.start(*ENDLESS, "--out", out) for _ in range(4)]
            for run in runs:
                self.addCleanup(run.communicate)
                self.addCleanup(run.kill)
            wait_for(lambda: sum(run.poll() is None for run in runs) <= 1)
            winners = [run for run in runs if run.poll() is None]
            self.assertEqual(len(winners), 1)
            for run in runs:
                if run is winners[0]:
                    continue
                self.assertEqual(run.wait(), 1)
                self.assertTrue(run.stderr.read().startswith(f"halfstep: {out}: another program writes a run there: process {winners[0].pid} on "))
            winners[0].terminate()
            self.assertEqual(winners[0].wait(timeout=30), 128 + signal.SIGTERM)


class Leftovers(FolderTest):
    OURS = [f"{name}.tmp0123456789abcdef" for name in ("last.safetensors", "best.safetensors", "config.yaml", "log.jsonl", "results.csv", "predictions.png")]
    OTHERS = ["last.safetensors.tmp0123456789abcde", "last.safetensors.tmp0123456789ABCDEF", "last.safetensors.tmp", "last.safetensors.tmp0123456789abcdef0",
              "notes.tmp0123456789abcdef", "xlast.safetensors.tmp0123456789abcdef"]

    def setUp(self):
        super().setUp()
        self.data()
        self.train("data", "--out", "run", "-q")
        for name in self.OURS + self.OTHERS:
            (self.folder / "run" / name).write_text("x")

    def left(self):
        return sorted(p.name for p in (self.folder / "run").iterdir() if ".tmp" in p.name)

    def test_who_goes_on_or_replaces_removes_them(self):
        for arguments in (["--resume", "run", "--epochs", "2"], ["data", "--out", "run", "--overwrite"]):
            for name in self.OURS:
                (self.folder / "run" / name).write_text("x")
            self.train(*arguments, "-q")
            self.assertEqual(self.left(), sorted(self.OTHERS))

    def test_who_is_refused_leaves_them(self):
        self.unchanged("run", 1, "holds a run already", "train", "mlp", "data", "--out", "run", "-q")
        self.unchanged("run", 1, "--lr 0.01, got 0.5", "train", "--resume", "run", "--lr", "0.5", "--epochs", "2", "-q")
        self.assertEqual(self.run_program("eval", "--weights", "run")[0], 0)
        self.assertEqual(self.left(), sorted(self.OURS + self.OTHERS))

    def test_what_another_program_is_writing_stays(self):
        with open(self.folder / "run" / self.OURS[3]) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.train("--resume", "run", "--epochs", "2", "-q")
        self.assertEqual(self.left(), sorted([self.OURS[3], *self.OTHERS]))


class Processes(FolderTest):
    NAMES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")

    def test_one_of_several_is_refused(self):
        self.data()
        self.train("data", "--out", "run", "-q")
        for name in self.NAMES:
            for verb in (["train", "mlp", "data", "--out", "new"], ["train", "--resume", "run", "--epochs", "2"],
                         ["export", "--weights", "run", "--onnx", "x.onnx"], ["convert", "run/last.safetensors", "x.pth"],
                         ["eval", "--weights", "run", "--log-json", "x"], ["data", "fetch", "mnist", "--out", "x"]):
                self.unchanged(".", 2, [f"{name}=4", "one of 4 processes", f"unset {name}"], *verb, env={name: "4"})
            self.refused(2, f"{name}=0016", "train", "mlp", env={name: "0016"})
            self.refused(2, name, "train", "mlp", env={name: "99999999999999999999999"})
            for blanks in ("2 ", " 2", "\t2\n"):
                self.refused(2, [f"{name}=2 says", "one of 2 processes"], "train", "mlp", env={name: blanks})

    def test_what_is_no_number_of_processes(self):
        for name in self.NAMES:
            for value in ("0", "00", "many", "-4", "+2", "2.5", "4x", "0x2", "2 2", "2,2", " ", "1e1", "\u0662"):
                self.unchanged(".", 2, [f"train: {name}: expected the number of processes", f"got '{value}'", f"unset {name}"], "train", "mlp",
                               env={name: value})

    def test_one_alone(self):
        self.data()
        for value in ("1", "01", "", " 1", "1\n"):
            self.train("data", "--no-out", "-q", "--limit", "64", env={name: value for name in self.NAMES})
        for verb in (["devices"], ["data", "fetch", "list"], ["--help"]):
            self.assertEqual(self.run_program(*verb, env={"WORLD_SIZE": "4"})[0], 0)


if __name__ == "__main__":
    unittest.main()
