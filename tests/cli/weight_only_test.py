# SPDX-License-Identifier: Apache-2.0
"""`halfstep quantize --weight-only`: weights of linear layers in integers, measured, written, and run by other verbs."""
import json
import os
import re
import struct
import unittest

from program import ProgramTest, Safetensors

FLAGS = ["--epochs", "1", "--seed", "3", "-q"]
LAYERS = ("fc1.weight", "fc2.weight", "fc3.weight")


class WeightOnly(ProgramTest):
    def done(self, *arguments):
        status, out, err = self.run_program(*arguments)
        self.assertEqual((status, err), (0, ""), out)
        return out

    def trained(self, out, *arguments):
        self.done("train", "mlp", *FLAGS, *arguments, "--out", out)

    def top1(self, *arguments):
        return float(re.search(r"top1 ([0-9.]+)%", self.done("eval", *arguments, "--seed", "3"))[1])

    def rows(self, out):
        found = re.findall(r"^([a-z0-9 ,-]+?) {2,}([0-9.]+)% +[0-9.]+ +[0-9.]+ +[0-9.]+ \w+ +([0-9.]+ \w+)$", out, re.M)
        return {name: float(top1) for name, top1, _ in found}

    def expect_nearest(self, before, after, bits, group):
        """Integers are the nearest of a scale that is a group's largest weight over 127 or 7."""
        most = 127 if bits == 8 else 7
        for name in LAYERS:
            outputs, columns = before.header[name]["shape"]
            self.assertEqual(after.header[name]["dtype"], "I8" if bits == 8 else "U8")
            self.assertEqual(after.header[name]["shape"], [outputs, columns * bits // 8])
            weights = struct.unpack(f"<{outputs * columns}f", before.tensor(name))
            data = after.tensor(name)
            scale = f"{name}_quantizer.scale"
            self.assertEqual(after.header[scale]["shape"], [outputs, columns // group] if group else [outputs])
            scales = struct.unpack(f"<{len(after.tensor(scale)) // 4}f", after.tensor(scale))
            each = group or columns
            for g in range(0, len(scales), 29):
                own = weights[g * each:(g + 1) * each]
                self.assertAlmostEqual(scales[g] * most, max(map(abs, own)), delta=1e-6)
                for i in range(each):
                    n = g * each + i
                    q = struct.unpack("b", data[n:n + 1])[0] if bits == 8 else (data[n // 2] >> (n % 2 * 4) & 15 ^ 8) - 8
                    self.assertLessEqual(abs(q * scales[g] - own[i]), scales[g] * 0.5001)

    def test_of_eight_bits(self):
        self.trained("run")
        out = self.done("quantize", "--weights", "run/last.safetensors", "--weight-only", "--out", "q.safetensors")
        self.assertIn("3 linear layers: 8-bit weights, a scale a row", out)
        rows = self.rows(out)
        self.assertEqual(set(rows) - {"bf16", "8-bit weights, bf16"}, {"float32", "8-bit weights"})
        self.assertGreater(rows["float32"], 90)
        for name, top1 in rows.items():
            self.assertAlmostEqual(top1, rows["float32"], delta=0.5, msg=name)
        self.assertEqual(self.top1("--weights", "q.safetensors"), rows["8-bit weights"])
        self.expect_nearest(Safetensors(self.folder / "run/last.safetensors"), Safetensors(self.folder / "q.safetensors"), 8, 0)
        self.assertLess(os.path.getsize(self.folder / "q.safetensors"), 0.27 * 4 * 669706)
        out = self.done("predict", "mlp", "--weights", "q.safetensors", "--count", "40")
        self.assertIn("q.safetensors (3 linear layers with 8-bit weights)", out)
        self.assertGreater(int(re.search(r"(\d+) of 40 right", out)[1]), 32)
        # Without data, nothing is measured: it needs none.
        out = self.done("quantize", "--weights", "run/last.safetensors", "--weight-only", "--out", "p.safetensors", "--no-eval")
        self.assertNotIn("top1", out)
        self.assertTrue((self.folder / "q.svg").read_text().startswith("<?xml"))
        self.assertFalse((self.folder / "p.svg").exists())
        for name in LAYERS:
            self.assertEqual(Safetensors(self.folder / "p.safetensors").tensor(name), Safetensors(self.folder / "q.safetensors").tensor(name))

    def test_of_four_bits(self):
        self.trained("run")
        out = self.done("quantize", "--weights", "run/last.safetensors", "--weight-only", "--quant-weight-bits", "4", "--group-size", "16", "--out", "q.safetensors")
        self.assertIn("3 linear layers: 4-bit weights in groups of 16", out)
        rows = self.rows(out)
        self.assertAlmostEqual(rows["4-bit weights"], rows["float32"], delta=2)
        self.assertEqual(self.top1("--weights", "q.safetensors"), rows["4-bit weights"])
        self.assertAlmostEqual(self.top1("--weights", "q.safetensors", "--amp", "bf16"), rows["4-bit weights"], delta=1)
        self.assertAlmostEqual(self.top1("--weights", "q.safetensors", "--amp", "f16"), rows["4-bit weights"], delta=1)
        self.assertAlmostEqual(self.top1("--weights", "q.safetensors", "--amp", "O2"), rows["4-bit weights"], delta=1)
        self.expect_nearest(Safetensors(self.folder / "run/last.safetensors"), Safetensors(self.folder / "q.safetensors"), 4, 16)
        self.assertLess(os.path.getsize(self.folder / "q.safetensors"), 0.2 * 4 * 669706)
        # Trained on, they are floating again.
        self.done("train", "mlp", *FLAGS, "--pretrained", "q.safetensors", "--lr", "1e-9", "--out", "further")
        self.assertAlmostEqual(self.top1("--weights", "further"), rows["4-bit weights"], delta=0.5)
        # A layer that stays as it is.
        self.done("quantize", "--weights", "run/last.safetensors", "--weight-only", "--quant-skip", "fc1,fc3", "--out", "one.safetensors", "--no-eval")
        one = Safetensors(self.folder / "one.safetensors")
        self.assertEqual([one.header[name]["dtype"] for name in LAYERS], ["F32", "I8", "F32"])
        self.assertAlmostEqual(self.top1("--weights", "one.safetensors"), rows["float32"], delta=0.5)

    def test_is_timed(self):
        out = self.done("bench", "mlp", "--inference", "--weight-only", "--quant-weight-bits", "4", "--group-size", "16", "--amp", "off,bf16", "-b", "1", "--steps", "3",
                        "--warmup", "1")
        lines = [json.loads(line) for line in out.splitlines()]
        self.assertEqual([(line["dtype"], line.get("weight_bits"), line.get("group_size")) for line in lines],
                         [("f32", None, None), ("bf16", None, None), ("f32", 4, 16), ("bf16", 4, 16)])
        for line in lines:
            self.assertGreater(line["ms_median"], 0)

    def test_what_is_refused(self):
        self.data(train=64, test=32)
        self.trained("run", "data")
        quantize = ["quantize", "--weights", "run", "--data", "data", "--no-eval", "--out", "p.safetensors"]
        self.refused(2, "--group-size: only with --weight-only", *quantize, "--group-size", "16")
        self.refused(2, "--quant-weight-bits: expected 8 or 4 with --weight-only, got 3", *quantize, "--weight-only", "--quant-weight-bits", "3")
        self.refused(2, "--quant-observer: expected it without --weight-only, which leaves activations as they are", *quantize, "--weight-only", "--quant-observer", "entropy")
        self.refused(2, "--max-drop: expected it without --weight-only", *quantize, "--weight-only", "--max-drop", "1")
        self.refused(2, "--batches: expected it without --weight-only, which leaves activations as they are", *quantize, "--weight-only", "--batches", "4")
        self.refused(2, "'fc1': expected an even group_size that divides its 784 inputs, got 32; 28 and 56 would do", *quantize, "--weight-only", "--quant-weight-bits", "4",
                     "--group-size", "32")
        self.refused(2, "expected the paths of linear layers in `skip`, got 'conv1'", *quantize, "--weight-only", "--quant-skip", "conv1")
        self.refused(2, "--weight-only: only with --inference", "bench", "mlp", "--weight-only")
        self.refused(2, "--group-size: only with --weight-only", "bench", "mlp", "--inference", "--group-size", "16")
        self.assertFalse((self.folder / "p.safetensors").exists())
        self.done(*quantize[:-1], "q.safetensors", "--weight-only", "--group-size", "16")
        self.refused(2, "--weight-only: the weights of q.safetensors are integers already", "quantize", "--weights", "q.safetensors", "--data", "data", "--weight-only", "--out",
                     "p.safetensors")
        self.refused(2, "--weights: expected floating weights, those of q.safetensors are integers of --weight-only", "quantize", "--weights", "q.safetensors", "--data", "data",
                     "--out", "p.safetensors")
        self.refused(2, "--int8: the weights of q.safetensors alone are integers", "eval", "--weights", "q.safetensors", "--data", "data", "--int8")
        self.done(*quantize[:-1], "int8.safetensors", "--batches", "2")
        self.refused(2, "--weight-only: int8.safetensors was trained with --qat or quantized", "quantize", "--weights", "int8.safetensors", "--data", "data", "--weight-only",
                     "--out", "p.safetensors")

    def test_damaged_files(self):
        self.data(train=64, test=32)
        self.trained("run", "data")
        self.done("quantize", "--weights", "run", "--data", "data", "--no-eval", "--weight-only", "--group-size", "16", "--out", "q.safetensors")

        def refuse(said, change):
            saved = Safetensors(self.folder / "q.safetensors")
            change(saved)
            saved.write(self.folder / "bad.safetensors")
            self.refused(1, ["bad.safetensors: ", said], "eval", "--weights", "bad.safetensors", "--data", "data")

        def retyped(saved):
            saved.header["fc1.weight"]["dtype"] = "U8"

        def recipe(key, value):
            def change(saved):
                saved.set_state(recipe={**saved.state["recipe"], key: value})
            return change

        def scale(value):
            def change(saved):
                begin = saved.header["fc2.weight_quantizer.scale"]["data_offsets"][0]
                saved.data = saved.data[:begin] + struct.pack("<f", value) + saved.data[begin + 4:]
            return change

        refuse("'fc1.weight': expected a matrix of i8 for weights of 8 bits, got u8 [512, 784]", retyped)
        refuse("'fc1.weight': expected a matrix of u8 for weights of 4 bits, got i8 [512, 784]", recipe("quant-weight-bits", "4"))
        refuse("--quant-weight-bits: expected 8 or 4 with --weight-only, got 2", recipe("quant-weight-bits", "2"))
        refuse("'fc1.weight_quantizer.scale': expected f32 [512, 98] for 'fc1.weight' of 784 weights a row in groups of 8, got f32 [512, 49]", recipe("group-size", "8"))
        refuse("--group-size: expected a number that was saved, got 'many'", recipe("group-size", "many"))
        refuse("'fc2.weight_quantizer.scale': expected numbers above 0, got 0", scale(0))
        refuse("'fc2.weight_quantizer.scale': expected numbers above 0, got inf", scale(float("inf")))


if __name__ == "__main__":
    unittest.main()
