# SPDX-License-Identifier: Apache-2.0
"""Signals at any moment: while the program starts, draws its data, trains, evaluates, saves, and once more while it ends. Whatever came when, what is on the
disk is whole, the status says what happened, and the run that goes on ends with the bits of an uninterrupted one."""
import csv
import json
import random
import signal
import subprocess
import time
import unittest
import xml.etree.ElementTree as ElementTree

from program import RUN_FILES, ProgramTest, Safetensors, events

RUN = ["mlp", "--limit", "192", "--batch-size", "16", "--epochs", "6", "--save-every", "3", "--amp", "bf16", "--seed", "4", "--threads", "1", "--momentum", "0.9", "-q"]
SEED = 15


class Kills(ProgramTest):
    def setUp(self):
        super().setUp()
        start = time.monotonic()
        self.good("train", *RUN, "--out", "whole")
        self.seconds = time.monotonic() - start
        self.whole = Safetensors(self.folder / "whole/last.safetensors")

    def good(self, *arguments):
        status, out, err = self.run_program(*arguments)
        self.assertEqual(status, 0, err)
        return err

    def command(self, run):
        if (self.folder / run / "last.safetensors").exists():
            return ["train", "--resume", run]
        return ["train", *RUN, "--out", run, *(["--overwrite"] if (self.folder / run).exists() else [])]

    def send(self, process, delays, numbers):
        """True when the process was there to get the first one."""
        for i, (delay, number) in enumerate(zip(delays, numbers)):
            try:
                process.wait(timeout=delay)
                return i > 0
            except subprocess.TimeoutExpired:
                process.send_signal(number)
        return True

    def check_files(self, run, killed):
        folder = self.folder / run
        if not folder.exists():
            return
        for path in folder.iterdir():
            name = path.name
            if name in ("last.safetensors", "best.safetensors"):
                file = Safetensors(path)
                self.assertEqual(file.checksum(), file.header["__metadata__"]["halfstep_crc32"])
            elif name.endswith(".svg"):
                ElementTree.parse(path)
            elif name.endswith(".csv"):
                self.assertTrue(path.read_text().endswith("\n"))
            elif name == "predictions.png":
                self.assertTrue(path.read_bytes().endswith(b"IEND\xaeB`\x82"))
            elif name == "config.yaml":
                self.assertTrue(path.read_text().endswith("quiet: true\n"))
            elif name == "log.jsonl":
                text = path.read_text()
                for line in text[:text.rfind("\n") + 1].splitlines():
                    json.loads(line)
                if not killed:
                    self.assertTrue(text == "" or text.endswith("\n"))
            else:
                # What a program that was ended at once was writing; the next one takes it away.
                self.assertTrue(name == "run.lock" or any(part in name for part in RUN_FILES), name)

    def check_end(self, run):
        got = Safetensors(self.folder / run / "last.safetensors")
        self.assertEqual((got.header, got.data), (self.whole.header, self.whole.data))
        log, wanted = (events(self.folder / r / "log.jsonl") for r in (run, "whole"))
        for kind, keys in (("step", ("epoch", "step", "loss", "lr")), ("eval", ("epoch", "step", "loss", "top1"))):
            rows = [[[e[k] for k in keys] for e in events if e["event"] == kind] for events in (log, wanted)]
            self.assertEqual(*rows)
        self.assertEqual(sorted(p.name for p in (self.folder / run).iterdir()), RUN_FILES)
        # Each epoch has its row, once, whatever was killed.
        tables = [[[line[k] for k in ("epoch", "step", "loss", "eval_loss", "eval_top1", "lr")] for line in csv.DictReader((self.folder / r / "results.csv").read_text().splitlines())]
                  for r in (run, "whole")]
        self.assertEqual(*tables)

    def test_random_moments(self):
        numbers = random.Random(SEED)
        met = 0
        for number in range(5):
            run, killed = f"run {number}", False
            for _ in range(4):
                first = numbers.choice([signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
                twice = numbers.random() < 0.3 and first != signal.SIGKILL
                signals = [first] + ([numbers.choice([signal.SIGINT, signal.SIGTERM])] if twice else [])
                # The second one comes while the first is dealt with.
                delays = [numbers.random() * 0.6 * self.seconds, numbers.random() * 0.02]
                with self.subTest(run=run, signals=signals, delays=delays):
                    process = self.start(*self.command(run))
                    there = self.send(process, delays, signals)
                    out, err = process.communicate(timeout=60)
                    met += there
                    allowed = {0} if not there else {0, *(-s for s in signals), *(128 + s for s in signals if s != signal.SIGKILL)}
                    self.assertIn(process.returncode, allowed, err)
                    self.assertEqual(out, "")
                    if process.returncode == 128 + first and not twice:
                        self.assertRegex(err.splitlines()[-1], r"\Ahalfstep: interrupted (after step \d+; resume with: halfstep train |before the first step; nothing was written)")
                    killed = killed or first == signal.SIGKILL or twice
                    self.check_files(run, killed)
            self.good(*self.command(run))
            self.check_end(run)
        self.assertGreater(met, 10, "most signals came before the end")

    def test_the_first_moment_and_the_data(self):
        """A signal while the digits are drawn: nothing is there yet, and nothing is left."""
        for delay in (0, 0.01, 0.02, 0.04, 0.08):
            process = self.start("train", "mlp", "--epochs", "100000", "-q", "--out", "a/new")
            time.sleep(delay)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
            self.assertIn(process.returncode, (-signal.SIGTERM, 128 + signal.SIGTERM), err)
            self.check_files("a/new", killed=False)
            if process.returncode > 0 and "nothing was written" in err:
                self.assertFalse((self.folder / "a").exists())


if __name__ == "__main__":
    unittest.main()
