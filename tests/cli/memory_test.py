# SPDX-License-Identifier: Apache-2.0
"""What recomputes its forward pass, and what a budget of memory asks for: `--recompute` and `--memory-budget`."""
import json
import re
import unittest

from images_test import ImageTest
from program import events

RESNET = ["bench", "resnet20", "-b", "8", "--steps", "1", "--warmup", "4", "--threads", "1"]


class Benchmarks(ImageTest):
    def bench(self, *arguments):
        return json.loads(self.done(*RESNET, *arguments))

    def test_recomputing_takes_less_memory_to_the_same_loss(self):
        plain = self.bench()
        self.assertNotIn("recompute", plain)
        less = self.bench("--recompute", "all")
        self.assertEqual(less["recompute"].split(",")[0], "layer1.0")
        self.assertLess(less["tensor_peak_mb"], 0.8 * plain["tensor_peak_mb"])
        self.assertEqual(less["loss_last"], plain["loss_last"])
        self.assertGreater(less["replayed"], 0)

    def test_budgets_are_met_as_predicted(self):
        for more in ([], ["--amp", "bf16"], ["--no-capture", "--optimizer", "adam"]):
            plain = self.bench(*more)["tensor_peak_mb"]
            least = self.bench("--recompute", "all", *more)["tensor_peak_mb"]
            budget = (plain + least) / 2
            got = self.bench("--memory-budget", f"{budget:.3f}MB", *more)
            self.assertLessEqual(got["predicted_peak_mb"], budget)
            self.assertAlmostEqual(got["tensor_peak_mb"], got["predicted_peak_mb"], delta=0.02 * got["predicted_peak_mb"])
            self.assertNotEqual(got["recompute"], "none")
            # A 64th of the limit may be small blocks that are cached; uncaptured steps have no limit.
            if "--no-capture" not in more:
                self.assertLess(got["reserved_peak_mb"], 1.02 * budget)

    def test_mistakes_are_named(self):
        self.refused(2, "--recompute: expected all, none or paths of modules such as layer1.0, ", *RESNET, "--recompute", "layer7")
        self.refused(2, "--memory-budget: expected a size such as 1GB", *RESNET, "--memory-budget", "lots")
        self.refused(2, "--memory-budget: chooses the modules that --recompute names", *RESNET, "--memory-budget", "1GB", "--recompute", "all")
        self.refused(1, "--memory-budget: expected at least ", *RESNET, "--memory-budget", "1MB")
        self.refused(2, "--recompute: of training steps", *RESNET, "--inference", "--recompute", "all")


class Training(ImageTest):
    def test_a_budget_says_what_it_chose(self):
        self.images()
        small = ["--image-size", "32", "--batch-size", "8", "--threads", "1", "--epochs", "1", "--lr-schedule", "constant"]
        out = self.done("train", "resnet20", "images", *small, "--out", "plain", "--recompute", "none")
        self.assertIn("\nrecomputing nothing\n", out)
        out = self.done("train", "resnet20", "images", *small, "--out", "wide", "--memory-budget", "4GB")
        wide = float(re.search(r"^recomputing nothing; predicted peak of tensors ([0-9.]+) MB of 4000.0 MB$", out, re.M).group(1))
        out = self.done("train", "resnet20", "images", *small, "--out", "run", "--memory-budget", f"{0.9 * wide:.2f}MB")
        line = re.search(r"^recomputing (\d) of 10 modules \((.*)\), \d+% more work; predicted peak of tensors ([0-9.]+) MB of [0-9.]+ MB, ([0-9.]+) MB without$",
                         out, re.M)
        self.assertTrue(line, out)
        self.assertLess(float(line.group(3)), wide)
        start = events(self.folder / "run/log.jsonl")[0]
        self.assertEqual(start["recompute"], line.group(2).replace(" ", ""))
        self.assertAlmostEqual(start["predicted_peak_mb"], float(line.group(3)), delta=0.1)
        for name in ("last.safetensors", "best.safetensors"):
            self.assertEqual((self.folder / "run" / name).read_bytes(), (self.folder / "plain" / name).read_bytes())
        # A run that goes on keeps its budget, or takes another choice.
        self.assertIn(f"memory-budget: {0.9 * wide:.2f}MB\n", (self.folder / "run/config.yaml").read_text())
        self.assertIn("recomputing ", self.done("train", "--resume", "run", "--epochs", "2"))
        self.assertIn("\nrecomputing layer1.0", "\n" + self.done("train", "--resume", "run", "--epochs", "3", "--recompute", "all"))

    def test_mistakes_leave_nothing_behind(self):
        self.data()
        self.refused(1, "--memory-budget: expected at least ", "train", "mlp", "data", "--out", "run", "--memory-budget", "1MB")
        self.assertFalse((self.folder / "run/log.jsonl").exists())
        self.refused(1, "--recompute: expected all, none or paths of modules, got 'fc9'", "train", "mlp", "data", "--out", "run", "--recompute", "fc9")
        self.refused(1, "--recompute all: MLP has no blocks that repeat", "train", "mlp", "data", "--out", "run", "--recompute", "all")
        self.refused(2, "--memory-budget: --qat", "train", "mlp", "data", "--no-out", "--memory-budget", "1GB", "--qat")


if __name__ == "__main__":
    unittest.main()
