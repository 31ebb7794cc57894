# SPDX-License-Identifier: Apache-2.0
"""What people look at: table, curves, figures and pictures of a run, the table of classes, summaries, where ops run."""
import collections
import csv
import os
import re
import unittest
import xml.etree.ElementTree as ElementTree

from images_test import ImageTest, SMALL
from program import FIGURES, events

# Of two runs that do the same: all but what is measured.
SAME = ("epoch", "step", "loss", "eval_loss", "eval_top1", "eval_top5", "lr", "scale", "skipped")


class ResultsTest(ImageTest):
    def rows(self, path):
        with open(self.folder / path, newline="") as file:
            return list(csv.DictReader(file))

    def texts(self, path):
        """All texts of an SVG file, which must be well-formed."""
        root = ElementTree.parse(self.folder / path).getroot()
        self.assertTrue(root.tag.endswith("svg"))
        return [e.text for e in root.iter() if e.tag.endswith("text")]

    def same(self, a, b):
        self.assertEqual(*([[r[k] for k in SAME] for r in self.rows(f"{run}/results.csv")] for run in (a, b)))


class Files(ResultsTest):
    def test_say_what_the_log_says(self):
        self.data()
        self.train("data", "--epochs", "2", "--out", "run", "-q", "--amp", "f16", "--loss-scale", "dynamic:1e9", "--momentum", "0.9")
        log, rows = events(self.folder / "run/log.jsonl"), self.rows("run/results.csv")
        evals, steps = ([e for e in log if e["event"] == kind] for kind in ("eval", "step"))
        self.assertEqual(len(rows), 2)
        for number, (row, e) in enumerate(zip(rows, evals), 1):
            of_epoch = [s for s in steps if s["epoch"] == number]
            self.assertEqual((int(row["epoch"]), int(row["step"])), (number, of_epoch[-1]["step"]))
            # Epochs of equal batches: the mean of the steps, but for the order of the sum.
            self.assertAlmostEqual(float(row["loss"]), sum(s["loss"] for s in of_epoch) / len(of_epoch), places=9)
            for name in ("loss", "top1", "top5"):
                self.assertEqual(float(row["eval_" + name]), e[name])
            self.assertEqual((float(row["lr"]), float(row["scale"]), int(row["skipped"])), tuple(of_epoch[-1][k] for k in ("lr", "scale", "skipped")))
            for name in ("seconds", "samples_per_s", "peak_tensor_mb", "peak_rss_mb"):
                self.assertGreater(float(row[name]), 0)
        self.assertGreater(int(rows[-1]["skipped"]), 0)
        texts = self.texts("run/curves.svg")
        for text in ("mlp in f16, batch 64", "Loss", "Metrics on the validation data", "Learning rate", "Loss scale", "Skipped steps, in all", "epoch", "%"):
            self.assertIn(text, texts)
        self.assertIn("mlp in f16, batch 64: epoch 2 of 2", self.texts("run/confusion.svg"))
        self.assertEqual((self.folder / "run/predictions.png").read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
        self.assertEqual(sum(int(r["count"]) for r in self.rows("run/classes.csv")), 64)

    def test_go_on_with_the_run(self):
        self.data()
        flags = ["data", "-q", "--seed", "3"]
        self.train(*flags, "--epochs", "3", "--out", "whole")
        self.train(*flags, "--epochs", "1", "--out", "part")
        # A row from behind the checkpoint is of a process that was killed before it wrote that.
        table = self.folder / "part/results.csv"
        line = table.read_text().splitlines()[1]
        table.write_text(table.read_text() + re.sub(r"\A1,\d+,", "2,4,", line) + "\n")
        self.train("--resume", "part", "--epochs", "2", "-q")
        self.assertEqual([r["epoch"] for r in self.rows("part/results.csv")], ["1", "2"])
        self.train("--resume", "part", "--epochs", "3", "-q")
        self.same("part", "whole")
        # Into another folder the rows go along.
        self.train("--resume", "part", "--epochs", "4", "-q", "--out", "next")
        self.assertEqual([r["epoch"] for r in self.rows("next/results.csv")], ["1", "2", "3", "4"])
        self.assertEqual(len(self.rows("part/results.csv")), 3)

    def test_a_file_of_that_name_that_is_no_table_stays(self):
        self.data()
        self.train("data", "-q", "--out", "run")
        for content in ("name,marks\nme,1\n", "", "epoch,step,loss\n1,2\n"):
            (self.folder / "run/results.csv").write_text(content)
            status, out, err = self.run_program("train", "--resume", "run", "--epochs", "2", "-q")
            self.assertEqual((status, out), (0, ""), err)
            self.assertRegex(err, r"\Ahalfstep: warning: run/results.csv:[^\n]+; the run continues without it\n\Z")
            self.assertEqual((self.folder / "run/results.csv").read_text(), content)
            (self.folder / "run/results.csv").unlink()
            self.train("data", "-q", "--out", "run", "--overwrite")

    def test_a_figure_that_cannot_be_written_ends_no_run(self):
        self.data()
        (self.folder / "run").mkdir()
        for name in FIGURES:
            # A folder of that name is no run, and in the way.
            (self.folder / "run" / name / "x").mkdir(parents=True)
        status, out, err = self.run_program("train", "mlp", "data", "-q", "--out", "run", "--epochs", "3", "--overwrite")
        self.assertEqual(status, 1, err)  # it can't be replaced
        for name in FIGURES:
            (self.folder / "run" / name / "x").rmdir()
            (self.folder / "run" / name).rmdir()
        self.train("data", "-q", "--out", "run")
        for name in FIGURES:
            (self.folder / "run" / name).unlink()
            (self.folder / "run" / name / "x").mkdir(parents=True)
        status, out, err = self.run_program("train", "--resume", "run", "--epochs", "3", "-q")
        self.assertEqual((status, out), (0, ""), err)
        self.assertEqual(len(re.findall("the run continues without it", err)), 3, err)
        self.assertEqual([p.name for p in (self.folder / "run").glob("*.tmp*")], [])

    def test_overwrite_takes_them_along(self):
        self.data()
        self.train("data", "-q", "--out", "run", "--epochs", "2")
        self.refused(1, "finite loss", "train", "mlp", "data", "--out", "run", "--overwrite", "-q", "--lr", "1e30")
        # The curves show what happened; nothing else is left.
        self.assertEqual([n for n in FIGURES if (self.folder / "run" / n).exists()], ["curves.svg"])
        self.assertIn("not finite", self.texts("run/curves.svg"))

    def test_one_epoch_of_one_step(self):
        self.data(train=8)
        self.train("data", "-q", "--out", "run")
        self.assertEqual(len(self.rows("run/results.csv")), 1)
        self.assertNotIn("not finite", self.texts("run/curves.svg"))

    def test_names_of_any_bytes(self):
        classes = ('a<b>&"c"', "x,y", os.fsdecode(b"\xff\x01"), "=1+1\nnext")
        self.images(classes=classes, train=4, test=3)
        self.done("train", "resnet20", "images", *SMALL, "--epochs", "1", "-q", "--out", "run<&")
        names = [r["class"] for r in self.rows("run<&/classes.csv")]
        self.assertEqual(sorted(names), sorted(['a<b>&"c"', "x,y", "\\xff\\x01", "=1+1\\nnext"]))
        self.assertTrue(set(names) <= set(self.texts("run<&/confusion.svg")))
        self.texts("run<&/curves.svg")
        out = self.done("eval", "--weights", "run<&")
        for name in names:
            self.assertRegex(out, rf"(?m)^{re.escape(name)} +\d+\.\d\d% +\d+\.\d\d% +\d+\.\d\d% +3$")

    def test_tensorboard(self):
        self.data()
        self.train("data", "-q", "--out", "run", "--epochs", "2", "--batch-size", "16", "--tensorboard")
        files = list((self.folder / "run/tensorboard").iterdir())
        self.assertEqual(len(files), 1)
        self.assertRegex(files[0].name, r"\Aevents\.out\.tfevents\.\d+\.")
        content = files[0].read_bytes()
        for tag in (b"train/loss", b"train/lr", b"eval/top1", b"weights/fc1.weight"):
            self.assertTrue(tag in content, tag)
        self.assertIn("tensorboard: true\n", (self.folder / "run/config.yaml").read_text())
        self.refused(2, "--tensorboard", "train", "mlp", "data", "--no-out", "--tensorboard")
        # Of the run that is replaced no curve stays.
        (self.folder / "run/tensorboard/notes").write_text("mine")
        self.train("data", "-q", "--out", "run", "--overwrite")
        self.assertEqual([p.name for p in (self.folder / "run/tensorboard").iterdir()], ["notes"])


class Tables(ResultsTest):
    def test_eval_prints_the_classes(self):
        self.data()
        self.train("data", "-q", "--out", "run")
        out = self.run_program("eval", "--weights", "run/last.safetensors").stdout
        found = re.findall(r"(?m)^(\d) +(\d+\.\d\d)% +(\d+\.\d\d)% +(\d+\.\d\d)% +(\d+)$", out)
        self.assertEqual([f[0] for f in found], list("0123456789"))
        self.assertEqual(sum(int(f[4]) for f in found), 64)
        self.assertRegex(out, r"(?m)^class +precision +recall +F1 +count$")
        # Recall weighted by the counts is the accuracy that the last line has; each is rounded to 0.005%.
        top1 = float(re.search(r"top1 (\d+\.\d+)%", out.splitlines()[-1])[1])
        self.assertAlmostEqual(sum(float(f[2]) * int(f[4]) for f in found) / 64, top1, delta=0.02)
        for row, f in zip(self.rows("run/classes.csv"), found):
            self.assertEqual((row["class"], f"{100 * float(row['precision']):.2f}", row["count"]), (f[0], f[1], f[4]))

    def test_two_runs_in_a_few_lines(self):
        self.data()
        flags = ["data", "-q", "--epochs", "2", "--batch-size", "8"]
        self.train(*flags, "--out", "half", "--amp", "f16", "--loss-scale", "dynamic:1e9")
        self.train(*flags, "--out", "whole")
        out = self.done("compare", "half", "whole", "--brief", "--figure", "both.svg")
        lines = out.splitlines()
        self.assertRegex(lines[0], r"\A +f16 +float32 +difference\Z")
        rows = {line.split("  ")[0]: line for line in lines}
        top1 = [float(self.rows(f"{run}/results.csv")[-1]["eval_top1"]) for run in ("half", "whole")]
        self.assertRegex(rows["accuracy on the test part"], rf" {100 * top1[0]:.2f}% +{100 * top1[1]:.2f}% +{re.escape(f'{100 * (top1[0] - top1[1]):+.2f}')}%\Z")
        memory = [float(self.rows(f"{run}/results.csv")[-1]["peak_tensor_mb"]) for run in ("half", "whole")]
        self.assertRegex(rows["memory of tensors, at most"], rf" {memory[0]:.1f} MB +{memory[1]:.1f} MB +{memory[0] / memory[1]:.2f}x\Z")
        self.assertRegex(rows["time of a step, at best"], r" \d+\.\d ms +\d+\.\d ms +\d\.\d\dx\Z")
        skipped = self.rows("half/results.csv")[-1]["skipped"]
        self.assertRegex(rows["skipped steps"], rf" {skipped} +0 +\+{skipped}\Z")
        self.assertRegex(out, rf"(?m)^Skipped steps: {skipped} whose gradients overflowed f16 were dropped; the loss scale went from 1000000000 to \d+\.$")
        texts = self.texts("both.svg")
        for text in ("mlp: f16 beside float32", "Training loss", "Accuracy on the test part", "Loss scale", "Memory of tensors, at most"):
            self.assertIn(text, texts)
        self.done("compare", "half", "whole", "--figure", "both.png")
        self.assertEqual((self.folder / "both.png").read_bytes()[:4], b"\x89PNG")
        # Logs alone have less to say.
        for run in ("half", "whole"):
            (self.folder / f"{run}.jsonl").write_bytes((self.folder / run / "log.jsonl").read_bytes())
        alone = self.done("compare", "half.jsonl", "whole.jsonl", "--brief")
        self.assertNotIn("memory", alone)
        self.assertIn("accuracy", alone)
        self.refused(2, "--figure: expected a name that ends in .svg or .png, got both.gif", "compare", "half", "whole", "--figure", "both.gif")
        self.refused(1, "nowhere/both.svg", "compare", "half", "whole", "--figure", "nowhere/both.svg")

    def test_summary(self):
        out = self.done("summary", "mlp", "--batch-size", "4", "--amp", "bf16")
        self.assertIn("mlp for [4, 784] on cpu", out)
        self.assertRegex(out, r"(?m)^fc1 +Linear\(784, 512\) +\[4, 512\] +bf16 +401,920 +1\.61 M ")
        self.assertIn("parameters: 669,706 (669,706 trainable)", out)
        self.assertRegex(out, r"(?m)^linear +bf16 +cpu +3$")
        out = self.done("summary", "resnet20", "--depth", "1", "--device", "sim", "--amp", "f16")
        self.assertNotIn("layer1.0", out)
        self.assertRegex(out, r"(?m)^relu +f16 +sim:0, native +19$")
        self.assertRegex(out, r"(?m)^conv2d +f16 +sim:0, CPU: no convolution unit +21$")
        out = self.done("summary", "mlp", "--qat", "--quant-weight-bits", "4", "--quant-skip", "fc3")
        self.assertRegex(out, r"fc1 +Linear\(784, 512\).* weight 4 bits")
        self.assertNotRegex(out, r"fc3 .*bits")
        self.refused(2, "--quant-weight-bits", "summary", "mlp", "--quant-weight-bits", "4")
        self.refused(2, "--image-size: mlp is no network of images", "summary", "mlp", "--image-size", "32")
        self.refused(2, "--amp", "summary", "mlp", "--amp", "f8")
        self.refused(2, "did you mean resnet50", "summary", "resnt50")

    def test_where_the_ops_of_a_step_run(self):
        out = self.done("devices", "sim", "--model", "cnn", "--amp", "f16", timeout=120)
        self.assertIn("a training step of cnn on sim:0, f16, by sgd", out)
        table = {tuple(line.split()[:2]): line for line in out.splitlines() if re.match(r"\w+ +[fbiu]\w+ ", line)}
        self.assertRegex(table["relu", "f16"], r"\Arelu +f16 +3 +native\Z")
        self.assertRegex(table["conv2d", "f16"], r"\Aconv2d +f16 +3 +CPU: no convolution unit\Z")
        self.assertRegex(table["conv2d_backward_weight", "f16"], r" f16 +3 +CPU: ")
        self.assertRegex(table["linear", "f16"], r"\Alinear +f16 +1 +native\Z")
        self.assertRegex(out.splitlines()[-1], r"\A\d+ of \d+ calls run on the CPU, .*: .*conv2d, ")
        # What the table says is what a run does: the same ops on the CPU.
        self.data(train=64)
        run = self.run_program("train", "cnn", "data", "--epochs", "1", "--device", "sim", "--amp", "f16", "--no-out", "--no-capture")
        self.assertEqual(run.returncode, 0, run.stderr)
        listed = {op for (op, _), line in table.items() if " CPU: " in line and "tensors are there" not in line}
        fell = set(re.findall(r"(?m)^  (\w+) +\d+ calls", run.stdout))
        self.assertIn("conv2d", listed)
        self.assertLessEqual(listed, fell)
        self.refused(2, "--amp: belongs to --model", "devices", "sim", "--amp", "f16")
        self.refused(2, "expected the device", "devices", "--model", "mlp")
        self.refused(2, "--amp", "devices", "sim", "--model", "mlp", "--amp", "f8")
        self.refused(2, "resnet", "devices", "sim", "--model", "nothing")


if __name__ == "__main__":
    unittest.main()
