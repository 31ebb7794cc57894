# SPDX-License-Identifier: Apache-2.0
"""--log-json: which files it takes and which it leaves alone, and pipes that are not read."""
import os
import select
import signal
import time
import unittest

from folders_test import FolderTest
from program import Safetensors, events
from runs_test import ENDLESS, wait_for


class Refused(FolderTest):
    def setUp(self):
        super().setUp()
        self.data()
        self.train("data", "--out", "run", "-q")

    def test_what_the_run_writes(self):
        train = ["train", "mlp", "data", "-q", "--out"]
        for name in ("last.safetensors", "best.safetensors", "config.yaml", "run.lock"):
            # Also where neither is there yet, and however it is written.
            for out, log in (("new", f"new/{name}"), ("./new", f"run/../new/{name}"), ("new", self.folder / "new" / name)):
                self.unchanged(".", 1, ["--log-json", "the run writes that file itself"], *train, out, "--log-json", log)
            if (self.folder / "run" / name).exists():
                self.unchanged(".", 1, "the run writes that file itself", *train, "run", "--overwrite", "--log-json", f"run/{name}")
        (self.folder / "link").symlink_to("new/last.safetensors")
        self.unchanged(".", 1, "the run writes that file itself", *train, "new", "--log-json", "link")

    def test_what_the_command_reads(self):
        (self.folder / "empty.yaml").write_text("")
        (self.folder / "weights.safetensors").write_bytes((self.folder / "run/last.safetensors").read_bytes())
        os.link(self.folder / "run/best.safetensors", self.folder / "hard link")
        (self.folder / "log").symlink_to("run/last.safetensors")
        reads = "the same command reads "
        for arguments, log, text in (
                (["train", "--resume", "run", "--epochs", "2", "--out", "new"], "run/last.safetensors", reads + "run/last.safetensors"),
                (["train", "--resume", "run", "--epochs", "2", "--out", "new"], "hard link", reads + "run/best.safetensors"),
                (["train", "--resume", "run/last.safetensors", "--epochs", "2", "--no-out"], "run/config.yaml", reads + "run/config.yaml"),
                (["train", "--resume", "run", "--epochs", "2"], "log", "the run writes that file itself"),
                (["train", "mlp", "data", "--no-out", "--config", "empty.yaml"], "empty.yaml", reads + "empty.yaml"),
                (["train", "mlp", "data", "--no-out", "--pretrained", "weights.safetensors"], "weights.safetensors", reads),
                (["train", "mlp", "data", "--no-out"], "data/train-images-idx3-ubyte", "holds something else"),
                (["train", "mlp", "data", "--evaluate", "--resume", "run"], "run/best.safetensors", reads),
                (["eval", "--weights", "run"], "run/last.safetensors", reads), (["eval", "--weights", "run"], "log", reads),
                (["eval", "--weights", "run/best.safetensors"], "run/config.yaml", reads),
                (["eval", "mlp", "data", "--weights", "weights.safetensors"], "./weights.safetensors", reads),
                (["eval", "mlp", "data", "--weights", "weights.safetensors"], "data/t10k-labels-idx1-ubyte", "holds something else")):
            with self.subTest(arguments=arguments, log=log):
                self.unchanged(".", 1, ["--log-json", text], *arguments, "--log-json", log)

    def test_the_log_of_a_run_is_for_who_writes_the_run(self):
        for arguments in (["eval", "--weights", "run"], ["train", "mlp", "data", "--evaluate", "--resume", "run"],
                          ["train", "--resume", "run", "--epochs", "2", "--out", "new"], ["train", "--resume", "run", "--epochs", "2", "--no-out"],
                          ["train", "mlp", "data", "--out", "new"]):
            self.unchanged(".", 1, "is the log of the run in ", *arguments, "--log-json", "run/log.jsonl")
        self.train("--resume", "run", "--epochs", "2", "-q", "--log-json", "run/log.jsonl")
        self.assertEqual([e["event"] for e in events(self.folder / "run/log.jsonl")].count("start"), 2)

    def test_what_is_no_log(self):
        weights = Safetensors(self.folder / "run/last.safetensors")
        while True:  # a header as long as makes the file begin with a brace
            weights.header["__metadata__"]["note"] = weights.header["__metadata__"].get("note", "") + "x"
            weights.write(self.folder / "brace.safetensors")
            if (self.folder / "brace.safetensors").read_bytes()[:1] == b"{":
                break
        for name, content in (("package.json", '{"name": "x"}\n'), ("pretty.json", "{\n}\n"), ("clicks.jsonl", '{"event":"click"}\n'), ("text", "notes\n"),
                              ("list.json", '[{"event":"start"}]\n'), ("number.jsonl", '{"event":1}\n')):
            (self.folder / name).write_text(content)
        for name in ("package.json", "pretty.json", "clicks.jsonl", "text", "list.json", "number.jsonl", "brace.safetensors"):
            for arguments in (["train", "mlp", "data", "--no-out"], ["eval", "--weights", "run"]):
                self.unchanged(".", 1, f"--log-json {name}: expected a log or a new file", *arguments, "--log-json", name)

    def test_what_is_a_log(self):
        start = '{"event":"start","model":"mlp"}\n'
        for content in ("", start, '{"event": "eval", "loss": 1}\n', '{"eve', '{"event":"start","mod', '{"event":"st' + start):
            (self.folder / "log").write_text(content)
            self.train("data", "--no-out", "-q", "--log-json", "log")
            self.assertEqual(events(self.folder / "log")[0]["event"], "start")
            (self.folder / "log").write_text(content)
            self.assertEqual(self.run_program("eval", "--weights", "run", "--log-json", "log")[0], 0)
            self.assertEqual([e["event"] for e in events(self.folder / "log")], ["eval"])

    def test_before_anything_is_read(self):
        """The pictures aren't there: nobody has looked for them yet."""
        for arguments in (["train", "mlp", "nowhere", "--no-out"], ["eval", "--weights", "run", "--data", "nowhere"]):
            self.unchanged(".", 1, "--log-json run/config.yaml", *arguments, "--log-json", "run/config.yaml")


class Pipes(FolderTest):
    WAITING = "pipe: waiting for a reader of this pipe\n"

    def setUp(self):
        super().setUp()
        self.data()
        os.mkfifo(self.folder / "pipe")

    def waiting(self, *arguments):
        process = self.start(*arguments, "--log-json", "pipe")
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        self.assertTrue(select.select([process.stderr], [], [], 30)[0], "it says nothing")
        self.assertIn(self.WAITING, process.stderr.readline())
        return process

    def test_one_interrupt_ends_the_waiting(self):
        before = self.content(".").keys()
        for number in (signal.SIGINT, signal.SIGTERM):
            for arguments in (["--out", "new"], ["--no-out"]):
                process = self.waiting(*ENDLESS, *arguments)
                process.send_signal(number)
                _, err = process.communicate(timeout=30)
                self.assertEqual((process.returncode, err), (128 + number, "halfstep: interrupted before the first step; nothing was written\n"))
                self.assertEqual(self.content(".").keys(), before)
        self.train("data", "--out", "run", "-q")
        process = self.waiting("train", "mlp", "data", "--resume", "run", "--epochs", "2", "-q")
        process.send_signal(signal.SIGINT)
        self.assertEqual((process.communicate(timeout=30)[1], process.returncode),
                         ("halfstep: interrupted before the first step; nothing was written\n", 130))
        process = self.waiting("train", "mlp", "data", "--evaluate", "--resume", "run")
        process.send_signal(signal.SIGINT)
        self.assertEqual((process.communicate(timeout=30)[1], process.returncode), ("halfstep: interrupted in the evaluation\n", 130))
        process = self.waiting("eval", "--weights", "run")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        self.assertEqual(process.returncode, -signal.SIGINT)

    def test_a_reader_that_comes_gets_all(self):
        process = self.waiting("train", "mlp", "data", "--no-out", "-q")
        with open(self.folder / "pipe") as pipe:
            lines = pipe.read().splitlines()
        self.assertEqual((process.communicate(timeout=30)[1], process.returncode), ("", 0))
        self.assertIn('"event":"start"', lines[0])
        self.assertIn('"event":"end"', lines[-1])

    def test_a_reader_that_was_there_before(self):
        reader = os.open(self.folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        self.train("data", "--no-out", "-q", "--log-json", "pipe")
        self.assertTrue(os.read(reader, 65536).startswith(b'{"event":"start"'))

    def test_one_interrupt_where_the_reader_reads_no_more(self):
        reader = os.open(self.folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        process = self.start(*ENDLESS, "--out", "new", "--save-every", "1", "--log-json", "pipe")
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        saved = self.folder / "new/last.safetensors"
        wait_for(saved.exists)
        # The pipe is full once no more steps are made.
        wait_for(lambda: saved.stat().st_mtime < time.time() - 1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 130, err)
        self.assertIn("pipe: its reader takes nothing more; the log ends before the line of ", err)
        self.assertRegex(err, r"interrupted after step \d+; resume with: ")

    def test_a_reader_that_goes(self):
        process = self.start(*ENDLESS, "--no-out", "--log-json", "pipe")
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        with open(self.folder / "pipe") as pipe:
            self.assertIn('"event":"start"', pipe.readline())
        _, err = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 1, err)
        self.assertIn("halfstep: pipe: writing failed: the reader of this pipe has gone\n", err)


if __name__ == "__main__":
    unittest.main()
