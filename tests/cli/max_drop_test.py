# SPDX-License-Identifier: Apache-2.0
"""`halfstep quantize --max-drop`: layers that stay in 16 bits for accuracy, and `--qat-weights` beside them."""
import re
import unittest

from program import ProgramTest, Safetensors

LAYERS = ["fc1", "fc2", "fc3"]


class MaxDrop(ProgramTest):
    def done(self, *arguments):
        status, out, err = self.run_program(*arguments)
        self.assertEqual((status, err), (0, ""), out)
        return out

    def run_of(self, out, *arguments):
        self.done("train", "mlp", "--epochs", "1", "--seed", "3", "-q", *arguments, "--out", out)

    def top1(self, *arguments):
        return float(re.search(r"top1 ([0-9.]+)%", self.done("eval", *arguments, "--seed", "3"))[1])

    def rounds(self, out):
        """What was tried: how many layers, the text in brackets, and the points that were lost."""
        found = re.findall(r"^--max-drop [0-9.]+: (\d) of 3 layers in bf16(?: \((.*)\))?: top1 [0-9.]+%, ([-+][0-9.]+) points$", out, re.M)
        return [(int(count), text, -float(points)) for count, text, points in found]

    def row(self, out, name):
        return float(re.search(rf"^{name}  +([0-9.]+)%", out, re.M)[1])

    def test_as_few_layers_stay_as_the_accuracy_needs(self):
        """On the built-in digits, whose weights of 2 bits lose several points."""
        self.run_of("run")
        drop = 1.5
        out = self.done("quantize", "--weights", "run", "--out", "q.safetensors", "--quant-weight-bits", "2", "--max-drop", drop, "--amp", "bf16")
        rounds = self.rounds(out)
        self.assertEqual(rounds[0][:2], (0, ""))
        self.assertGreater(rounds[0][2], drop, "else there is nothing to be found")
        left = re.search(r"^(\d) of 3 layers stay in bf16: (.*)$", out, re.M)
        names = left[2].split(", ")
        self.assertEqual(len(names), int(left[1]))
        self.assertLess(len(names), 3)
        self.assertIn((len(names), True), {(count, lost <= drop + 0.005) for count, _, lost in rounds})
        # What is written is what was found.
        reached = self.row(out, rf"integers w2a8, {len(names)} layers? bf16")
        self.assertGreaterEqual(reached, self.row(out, "float32") - drop - 0.01)
        self.assertLess(self.row(out, "integers w2a8"), self.row(out, "float32") - drop)
        self.assertEqual(self.top1("--weights", "q.safetensors", "--int8", "--amp", "bf16"), reached)
        saved = Safetensors(self.folder / "q.safetensors")
        self.assertEqual(sorted(saved.state["recipe"]["quant-skip"].split(",")), sorted(names))
        self.assertEqual(saved.state["recipe"]["quant-amp"], "bf16")
        for layer in LAYERS:
            self.assertEqual(saved.header[layer + ".weight"]["dtype"], "BF16" if layer in names else "I8")
            self.assertEqual(f"quantization.{layer}.weight.scale" in saved.header, layer not in names)
        # Elsewhere such layers may compute in float32, and the file goes wherever weights go.
        for flags in (["--int8", "--amp", "off"], ["--int8", "--amp", "f16"], []):
            self.assertAlmostEqual(self.top1("--weights", "q.safetensors", *flags), reached, delta=0.3)
        said = self.done("eval", "--weights", "q.safetensors", "--seed", "3", "--int8", "--amp", "f16")
        self.assertIn("in 8-bit integers, what was left out of them in f16", said)
        self.done("predict", "mlp", "--weights", "q.safetensors", "--int8", "--count", "4")
        self.done("train", "mlp", "--epochs", "1", "--limit", "64", "-q", "--pretrained", "q.safetensors", "--no-out")
        # The same by hand.
        self.done("quantize", "--weights", "run", "--out", "p.safetensors", "--quant-weight-bits", "2", "--amp", "bf16", "--quant-skip", ",".join(names))
        self.assertAlmostEqual(self.top1("--weights", "p.safetensors", "--int8", "--amp", "bf16"), reached, delta=0.3)

    def test_where_nothing_is_lost_nothing_is_left(self):
        self.run_of("run")
        out = self.done("quantize", "--weights", "run", "--out", "q.safetensors", "--max-drop", "2", "--batches", "8")
        self.assertEqual(len(re.findall("^--max-drop 2: ", out, re.M)), 1)
        self.assertEqual(Safetensors(self.folder / "q.safetensors").state["recipe"]["quant-skip"], "")
        self.assertNotIn("stay in", out)

    def test_a_drop_that_is_not_met_writes_nothing(self):
        self.run_of("run")
        few = ["quantize", "--weights", "run", "--out", "q.safetensors", "--batches", "8", "--quant-weight-bits", "2", "--quant-activation-bits", "2", "--max-drop", "0"]
        said = self.refused(1, ["--max-drop 0: expected top1 of at least ", " with 0 of 1 layers in ", "; nothing is written, without --max-drop that is written"], *few,
                            "--quant-skip", "fc2,fc3")
        self.assertRegex(said, r"at least [0-9.]+%, the best that was found is [0-9.]+% with")
        self.refused(1, ["with 1 of 2 layers in bf16; nothing is written, --amp bf16 --quant-skip fc3,fc"], *few, "--quant-skip", "fc3", "--amp", "bf16")
        self.assertEqual([p.name for p in self.folder.glob("q.*")], [])

    def test_a_row_for_weights_of_quantization_aware_training(self):
        self.run_of("run")
        self.run_of("trained", "--qat", "--quant-weight-bits", "3")
        out = self.done("quantize", "--weights", "run", "--out", "q.safetensors", "--batches", "8", "--qat-weights", "trained")
        self.assertEqual(self.row(out, "integers w3a8 after --qat"), self.top1("--weights", "trained", "--int8"))
        self.assertEqual(self.row(out, "8-bit integers"), self.top1("--weights", "q.safetensors", "--int8"))
        self.assertIn("integers w3a8 after --qat", (self.folder / "q.svg").read_text())
        others = ["quantize", "--weights", "run", "--out", "p.safetensors"]
        self.refused(2, "--qat-weights: expected weights of a run with --qat, got those of run/best.safetensors", *others, "--qat-weights", "run")
        self.refused(2, "--qat-weights: only without --no-eval", *others, "--qat-weights", "trained", "--no-eval")
        self.refused(1, "nowhere", *others, "--qat-weights", "nowhere")
        self.refused(2, "--max-drop: trained/best.safetensors was trained with --qat", "quantize", "--weights", "trained", "--out", "p.safetensors", "--max-drop", "1")
        self.assertFalse((self.folder / "p.safetensors").exists())

    def test_what_is_refused(self):
        self.data(train=64, test=32)
        self.run_of("run", "data")
        quantize = ["quantize", "--weights", "run", "--calibrate", "data", "--batches", "2", "--out", "q.safetensors"]
        for value in ("-1", "100.5", "nan", "inf"):
            self.refused(2, "--max-drop: expected 0 to 100, got " + value, *quantize, "--max-drop=" + value)
        self.refused(2, "--max-drop: expected a number, got 'some'", *quantize, "--max-drop", "some")
        self.refused(2, "--max-drop: only without --no-eval", *quantize, "--max-drop", "1", "--no-eval")
        self.refused(2, "--amp: expected off, bf16 or f16 with --int8, got 'fast'", *quantize, "--max-drop", "1", "--amp", "fast")
        (self.folder / "q.svg").write_text("somebody's")
        self.refused(1, "q.svg is there; --overwrite replaces it", *quantize)
        self.assertEqual((self.folder / "q.svg").read_text(), "somebody's")
        self.done(*quantize, "--no-eval")
        self.assertEqual((self.folder / "q.svg").read_text(), "somebody's", "without an evaluation there is no picture")
        # A list of layers may be a long one.
        self.done(*quantize[:-1], "long.safetensors", "--no-eval", "--quant-skip", ",".join(["fc3"] * 100))
        self.done("eval", "--weights", "long.safetensors", "--data", "data", "--int8")
        # A file that says what nobody writes.
        saved = Safetensors(self.folder / "q.safetensors")
        saved.set_state(recipe={**saved.state["recipe"], "quant-amp": "f64"})
        saved.write(self.folder / "bad.safetensors")
        self.refused(1, "bad.safetensors: quant-amp: expected bf16 or f16, got 'f64'", "eval", "--weights", "bad.safetensors", "--data", "data", "--int8")


if __name__ == "__main__":
    unittest.main()
