# SPDX-License-Identifier: Apache-2.0
"""`halfstep train --qat`: quantization-aware training from flags, in every precision, on several ranks, resumed and evaluated."""
import unittest

from detect_test import png
from jobs import MPIS, JobTest
from program import Safetensors, events

FLAGS = ["--batch-size", "16", "--lr", "0.05", "--momentum", "0.9", "--seed", "3", "-q"]
TWO = ["--epochs", "2"]


class Quantization(JobTest):
    def run_of(self, out, *arguments, model="mlp"):
        status, said, err = self.run_program("train", model, *arguments, "--out", out)
        self.assertEqual(status, 0, said + err)
        return said

    def job_of(self, ranks, out, *arguments, model="mlp"):
        process = self.job(MPIS[0], ranks, "train", model, *arguments, "--out", out)
        said, _ = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0, said + process.errors.read_text())

    def losses(self, run):
        return [e["loss"] for e in events(self.folder / run / "log.jsonl") if e["event"] == "step"]

    def last_eval(self, run):
        return [e for e in events(self.folder / run / "log.jsonl") if e["event"] == "eval"][-1]

    def recipe(self, run):
        return Safetensors(self.folder / run / "last.safetensors").state["recipe"]

    def test_every_precision_with_and_without_it_on_one_and_two_ranks(self):
        reached = {}
        for precision in ("off", "f16", "bf16"):
            for quantized in ([], ["--qat"]):
                flags = ["--amp", precision, *quantized, "--epochs", "1", "-q"]
                name = precision + "".join(quantized)
                self.run_of(name + "-1", *flags)
                reached[name, 1] = self.last_eval(name + "-1")["top1"]
                if MPIS:
                    self.job_of(2, name + "-2", *flags)
                    reached[name, 2] = self.last_eval(name + "-2")["top1"]
                self.assertEqual(any(t.startswith("quantization.") for t in Safetensors(self.folder / (name + "-1") / "last.safetensors").header), bool(quantized))
        best = max(reached.values())
        self.assertGreater(best, 0.9)
        # One standard deviation of the share of n right answers is sqrt(p (1 - p) / n): below 0.01 here.
        for case, top1 in reached.items():
            self.assertGreater(top1, best - 0.03, f"{case} of {reached}")

    def test_the_rounding_is_there_and_an_evaluation_has_it(self):
        self.data(train=256, test=64)
        self.run_of("plain", "data", *FLAGS, *TWO)
        self.run_of("fine", "data", *FLAGS, *TWO, "--qat", "--quant-weight-bits", "16", "--quant-activation-bits", "16")
        self.run_of("coarse", "data", *FLAGS, *TWO, "--qat", "--quant-weight-bits", "2", "--quant-activation-bits", "3")
        plain, fine, coarse = (self.losses(run) for run in ("plain", "fine", "coarse"))
        # A step of 16 bits is 1 / 256 of one of 8 bits. The data is noise, on which the first steps differ the least: what
        # 2 bits make of the same network is a hundred times as far away.
        far = [max(abs(x - y) for x, y in zip(plain[:4], other[:4])) for other in (fine, coarse)]
        self.assertLess(far[0], 5e-4)
        self.assertGreater(far[1], 100 * far[0])
        for run in ("fine", "coarse"):
            status, out, err = self.run_program("eval", "--weights", run + "/last.safetensors", "--data", "data")
            self.assertEqual(status, 0, err)
            self.assertIn(f"loss {self.last_eval(run)['loss']:.4f}", out)

    def test_a_run_resumes_with_the_same_bits(self):
        self.data(train=256, test=64)
        flags = ["data", *FLAGS, "--qat", "--quant-freeze-ranges", "1", "--amp", "f16", "--ema", "0.9", "--lr-schedule", "constant"]
        self.run_of("whole", *flags, *TWO)
        self.run_of("run", *flags, "--epochs", "1")
        status, out, err = self.run_program("train", "--resume", "run", "--epochs", "2")
        self.assertEqual(status, 0, err)
        self.assertEqual(self.losses("run"), self.losses("whole"))
        a, b = (Safetensors(self.folder / run / "last.safetensors") for run in ("run", "whole"))
        self.assertEqual(a.data, b.data)
        # In the second epoch ranges were frozen: no moving average follows a last step that is as large as this one's.
        self.assertEqual(self.recipe("run")["quant-freeze-ranges"], "1")
        self.refused(1, "the run had --quant-weight-bits 8, got 4", "train", "--resume", "run", "--quant-weight-bits", "4", "--epochs", "3")
        self.refused(1, "the run had --qat yes, got no", "train", "--resume", "run", "--no-quant", "--epochs", "3")

    def test_frozen_ranges_stay(self):
        self.data(train=64, test=32)
        flags = ["data", *FLAGS, "--qat", "--lr-schedule", "constant"]
        ends = {}
        for frozen in ("0", "1"):
            self.run_of(f"first-{frozen}", *flags, "--epochs", "1", "--quant-freeze-ranges", frozen)
            self.run_of(f"both-{frozen}", *flags, *TWO, "--quant-freeze-ranges", frozen)
            ends[frozen] = [self.ranges(f"{run}-{frozen}") for run in ("first", "both")]
        self.assertGreater(len(ends["0"][0]), 1)
        self.assertEqual(ends["1"][0], ends["1"][1])
        self.assertNotEqual(ends["0"][0], ends["0"][1])
        # Weights move, and their ranges with them.
        weights = [Safetensors(self.folder / run / "last.safetensors").tensor("quantization.fc1.weight.scale") for run in ("first-1", "both-1")]
        self.assertNotEqual(*weights)

    def ranges(self, run):
        """The largest values of activations so far."""
        saved = Safetensors(self.folder / run / "last.safetensors")
        return {name: saved.tensor(name) for name in saved.header
                if name.startswith("quantization.") and name.endswith(".activation_post_process.max_val") and ".weight." not in name}

    def test_scales_are_trained_at_every_level(self):
        self.data(train=64, test=32)
        name = "quantization.relu.scale"
        for precision in ("off", "f16", "O1", "O2", "O3", "auto"):
            out = "learned-" + precision
            self.run_of(out, "data", *FLAGS, "--epochs", "1", "--qat", "--quant-learned", "--amp", precision)
            first = Safetensors(self.folder / out / "last.safetensors").tensor(name)
            self.run_of(out + "-2", "data", *FLAGS, *TWO, "--qat", "--quant-learned", "--amp", precision, "--lr-schedule", "constant")
            self.assertNotEqual(first, Safetensors(self.folder / (out + "-2") / "last.safetensors").tensor(name), precision)

    def test_norms_are_frozen(self):
        flags = ["--data", "pictures", "--image-size", "32", "--batch-size", "8", "--qat", "--lr-schedule", "constant", "--lr", "0.01", "-q"]
        self.pictures()
        for run, epochs in (("first", "1"), ("both", "2")):
            self.run_of(run, *flags, "--epochs", epochs, "--quant-freeze-norms", "1", model="resnet20")
        first, both = (Safetensors(self.folder / run / "last.safetensors") for run in ("first", "both"))
        self.assertEqual(first.tensor("bn1.running_mean"), both.tensor("bn1.running_mean"))
        self.assertNotEqual(first.tensor("conv1.weight"), both.tensor("conv1.weight"))

    def pictures(self):
        for part in ("train", "val"):
            for label in ("a", "b"):
                folder = self.folder / "pictures" / part / label
                folder.mkdir(parents=True)
                for i in range(8):
                    (folder / f"{i}.png").write_bytes(png(40, 40, (i * 30, 200 if label == "a" else 20, 255 - i * 20)))

    def test_shards_have_the_same_bits_on_any_number_of_ranks(self):
        if not MPIS:
            self.skipTest("no MPI was found when this was built, or no mpirun is installed")
        self.data(train=131, test=64)
        flags = ["data", *FLAGS, *TWO, "--qat", "--reproducible", "2"]
        self.run_of("one", *flags)
        self.job_of(2, "two", *flags)
        self.assertEqual(self.losses("two"), self.losses("one"))
        a, b = (Safetensors(self.folder / run / "last.safetensors") for run in ("one", "two"))
        self.assertEqual(a.data, b.data)

    def test_ranges_agree_on_all_ranks(self):
        """An evaluation on two ranks, half of the samples each, is that of one process."""
        if not MPIS:
            self.skipTest("no MPI was found when this was built, or no mpirun is installed")
        self.data(train=131, test=64)
        self.job_of(2, "run", "data", *FLAGS, *TWO, "--qat")
        self.run_program("train", "mlp", "data", "--evaluate", "--resume", "run/last.safetensors", "--log-json", "one.jsonl")
        one = [e for e in events(self.folder / "one.jsonl") if e["event"] == "eval"][-1]
        self.assertAlmostEqual(one["loss"], self.last_eval("run")["loss"], delta=1e-5)
        self.assertEqual(one["top1"], self.last_eval("run")["top1"])

    def test_a_configuration_says_it(self):
        self.data(train=64, test=32)
        (self.folder / "c.yaml").write_text("model: mlp\ndata: data\nepochs: 1\nquant: {weight-bits: 4, skip: fc3}\n")
        status, out, err = self.run_program("train", "--config", "c.yaml", "--out", "a", "-q")
        self.assertEqual(status, 0, err)
        self.assertEqual((self.recipe("a")["qat"], self.recipe("a")["quant-weight-bits"]), ("yes", "4"))
        self.assertFalse(any(t.startswith("quantization.fc3.weight") for t in Safetensors(self.folder / "a" / "last.safetensors").header))
        status, out, err = self.run_program("train", "--config", "c.yaml", "--no-quant", "--out", "b", "-q")
        self.assertEqual(status, 0, err)
        self.assertEqual(self.recipe("b")["qat"], "no")
        status, out, err = self.run_program("train", "--config", "c.yaml", "--quant-weight-bits", "8", "--out", "c", "-q")
        self.assertEqual(self.recipe("c")["quant-weight-bits"], "8", err)
        for word, saved in (("true", "yes"), ("false", "no")):
            (self.folder / "c.yaml").write_text(f"model: mlp\ndata: data\nepochs: 1\nquant: {word}\n")
            status, out, err = self.run_program("train", "--config", "c.yaml", "--out", word, "-q")
            self.assertEqual((status, self.recipe(word)["qat"]), (0, saved), err)
        for text, said in (("quant: {weight_bits: 4}", "c.yaml:1: there is no flag 'quant-weight_bits'"),
                           ("quant: {[a]: 4}", "c.yaml:1: expected the name of a flag before the colon"),
                           ("quant: {skip: [a]}", "c.yaml:1: quant-skip: expected a single value, got a list"),
                           ("quant: 3", "c.yaml:1: qat: expected true or false, got '3'"),
                           ("quant: [8]", "c.yaml:1: qat: expected a single value, got a list"),
                           ("quant: true\nquant: {skip: fc3}", "c.yaml:2: qat is given more than once"),
                           ("quant: {weight-bits: 4}\nqat: true", "c.yaml:2: qat is given more than once")):
            (self.folder / "c.yaml").write_text(text + "\n")
            self.refused(2, said, "train", "mlp", "data", "--config", "c.yaml", "--no-out")

    def test_a_run_begins_with_weights_of_either_kind(self):
        self.data(train=64, test=32)
        self.run_of("plain", "data", *FLAGS, *TWO)
        self.run_of("quantized", "data", *FLAGS, *TWO, "--qat")
        flags = ["data", "--batch-size", "16", "--lr", "1e-9", "--epochs", "1", "-q"]
        for source in ("plain", "quantized"):
            for name, flag in (("off", []), ("on", ["--qat"])):
                run = f"{source}-{name}"
                self.run_of(run, *flags, *flag, "--pretrained", source + "/last.safetensors")
                self.assertEqual(any(t.startswith("quantization.") for t in Safetensors(self.folder / run / "last.safetensors").header), bool(flag))
        # With its ranges the one that was trained begins where the other ended.
        self.assertAlmostEqual(self.last_eval("quantized-on")["loss"], self.last_eval("quantized")["loss"], delta=2e-3)

    def test_what_does_not_go_together(self):
        self.data(train=64, test=32)
        self.refused(2, "--quant-weight-bits: belongs to --qat, which is not given", "train", "mlp", "data", "--quant-weight-bits", "4", "--no-out")
        self.refused(2, "--quant-weight-bits: expected 2 to 8, or 16, got 9", "train", "mlp", "data", "--qat", "--quant-weight-bits", "9", "--no-out")
        self.refused(2, "--quant-observer: expected min_max, ", "train", "mlp", "data", "--qat", "--quant-observer", "best", "--no-out")
        self.refused(1, "prepare: expected the paths of modules with weights in `skip`, got 'conv9'", "train", "mlp", "data", "--qat", "--quant-skip", "conv9", "--no-out")
        self.run_of("run", "data", *FLAGS, *TWO, "--qat")
        self.refused(2, "was trained with --qat", "eval", "--weights", "run", "--data", "data", "--fold-batch-norm")


if __name__ == "__main__":
    unittest.main()
