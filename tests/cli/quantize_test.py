# SPDX-License-Identifier: Apache-2.0
"""`halfstep quantize` and `--int8`: networks in integers, measured beside floating point."""
import math
import os
import re
import signal
import struct
import time
import unittest
from xml.etree import ElementTree

from program import ProgramTest, Safetensors

FLAGS = ["--epochs", "1", "--seed", "3", "-q"]


class Quantize(ProgramTest):
    def run_of(self, out, *arguments):
        status, said, err = self.run_program("train", "mlp", *FLAGS, *arguments, "--out", out)
        self.assertEqual(status, 0, said + err)

    def done(self, *arguments):
        status, out, err = self.run_program(*arguments)
        self.assertEqual((status, err), (0, ""), out)
        return out

    def top1(self, *arguments):
        return float(re.search(r"top1 ([0-9.]+)%", self.done("eval", *arguments, "--seed", "3"))[1])

    def rows(self, out):
        """The last table's: top1, and bytes of memory and file, by the name of the row."""
        found = re.findall(r"^([a-z0-9 -]+?) {2,}([0-9.]+)% +[0-9.]+(?: +[0-9.]+ +([0-9.]+ \w+) +([0-9.]+ \w+))?$", out, re.M)
        return {name: (float(top1), memory, file) for name, top1, memory, file in found}

    def test_weights_after_training(self):
        """On the built-in digits."""
        self.run_of("run")
        out = self.done("quantize", "--weights", "run/last.safetensors", "--out", "q.safetensors", "--batches", "8", "--sensitivity", "2")
        self.assertRegex(out, r"layers that cost most where they alone are quantized, of 3; [^\n]*\n.*\n.*\nfc\d  +[0-9.]+  +[-+][0-9.]+\nfc\d")
        self.assertIn("ranges of 3 activations from 256 samples", out)
        rows = self.rows(out)
        self.assertEqual(set(rows) - {"bf16"}, {"float32", "rounded to integers", "8-bit integers"})
        self.assertGreater(rows["float32"][0], 90)
        for name, (top1, memory, file) in rows.items():
            self.assertAlmostEqual(top1, rows["float32"][0], delta=1, msg=name)
            self.assertEqual(name == "rounded to integers", memory == "" and file == "", name)
        # 669,706 floats; as integers 668,672 bytes with scales and biases in float32. Between layers there are 32 samples
        # of some hundred elements.
        self.assertEqual(rows["float32"][1:], ("2.8 MB", "2.7 MB"))
        self.assertRegex(rows["8-bit integers"][1], r"0\.7\d\d MB")
        self.assertEqual(rows["8-bit integers"][2], f"{os.path.getsize(self.folder / 'q.safetensors') / 1e6:.3f} MB")
        figure = (self.folder / "q.svg").read_text()
        texts = ["".join(t.itertext()) for t in ElementTree.fromstring(figure).iter("{http://www.w3.org/2000/svg}text")]
        for text in ("float32", "8-bit integers", "memory", "2.8 MB", f"{rows['8-bit integers'][0]:.2f}%"):
            self.assertIn(text, " ".join(texts))
        integers = self.top1("--weights", "q.safetensors", "--int8")
        self.assertEqual(integers, rows["8-bit integers"][0])
        self.assertEqual(self.top1("--weights", "q.safetensors"), rows["rounded to integers"][0])
        # What is written: integers whose real numbers are the weights to half a step.
        before, after = Safetensors(self.folder / "run/last.safetensors"), Safetensors(self.folder / "q.safetensors")
        for name in ("fc1.weight", "fc2.weight", "fc3.weight"):
            self.assertEqual(after.header[name]["dtype"], "I8")
            rows_, columns = after.header[name]["shape"]
            scales = struct.unpack(f"<{rows_}f", after.tensor(f"quantization.{name}.scale"))
            integers_ = struct.unpack(f"<{rows_ * columns}b", after.tensor(name))
            weights = struct.unpack(f"<{rows_ * columns}f", before.tensor(name))
            for i in range(0, rows_ * columns, 97):
                scale = scales[i // columns]
                self.assertLessEqual(abs(integers_[i] * scale - weights[i]), scale * 0.5001)
        self.assertLess(os.path.getsize(self.folder / "q.safetensors"), 0.35 * 4 * 669706)
        right = re.search(r"(\d+) of 40 right", self.done("predict", "mlp", "--weights", "q.safetensors", "--int8", "--count", "40"))
        self.assertGreater(int(right[1]), 32)

    def test_weights_of_quantization_aware_training(self):
        self.run_of("run", "--qat", "--amp", "bf16")
        trained = self.top1("--weights", "run")
        self.assertAlmostEqual(self.top1("--weights", "run", "--int8"), trained, delta=0.3)
        out = self.done("quantize", "--weights", "run", "--out", "q.safetensors")
        self.assertNotIn("ranges of", out)
        self.assertIn("rounded as in training", self.rows(out))
        self.assertEqual(self.top1("--weights", "q.safetensors"), trained)
        self.refused(2, "--quant-weight-bits: run/best.safetensors was trained with --qat, which has said so", "quantize", "--weights", "run", "--out", "p.safetensors",
                     "--quant-weight-bits", "4")
        # And trained further with its ranges.
        self.done("train", "mlp", *FLAGS, "--qat", "--pretrained", "q.safetensors", "--lr", "1e-9", "--out", "further")
        self.assertAlmostEqual(self.top1("--weights", "further"), trained, delta=0.5)
        self.done("train", "mlp", *FLAGS, "--pretrained", "q.safetensors", "--lr", "1e-9", "--out", "floating")

    def test_what_is_refused(self):
        self.data(train=64, test=32)
        self.run_of("run", "data")
        self.refused(2, "--int8: expected weights of a run with --qat or of `halfstep quantize`", "eval", "--weights", "run", "--data", "data", "--int8")
        quantize = ["quantize", "--weights", "run", "--calibrate", "data", "--batches", "2"]
        self.done(*quantize, "--out", "q.safetensors", "--no-eval")
        self.refused(1, "q.safetensors is there; --overwrite replaces it", *quantize, "--out", "q.safetensors")
        self.done(*quantize, "--out", "q.safetensors", "--overwrite", "--no-eval")
        self.refused(1, "--out: expected a file, got the folder run", *quantize, "--out", "run")
        self.refused(2, "--out: run/best.safetensors holds the weights that are read", "quantize", "--weights", "run/best.safetensors", "--calibrate", "data", "--out",
                     "run/best.safetensors", "--overwrite")
        self.refused(1, "expected the paths of modules with weights in `skip`", *quantize, "--out", "p.safetensors", "--quant-skip", "conv7")
        self.refused(2, "--amp: expected off, bf16 or f16 with --int8, got 'O2'", "eval", "--weights", "q.safetensors", "--data", "data", "--int8", "--amp", "O2")
        self.refused(2, "--amp: expected off, bf16 or f16 with --int8, got 'f32'", *quantize, "--out", "p.safetensors", "--amp", "f32")
        self.assertFalse((self.folder / "p.safetensors").exists())
        self.refused(1, "--out: expected a file in a folder, there is no folder nowhere", *quantize, "--out", "nowhere/p.safetensors")
        self.refused(2, "--out: expected a name that ends in .safetensors, got p.pth", *quantize, "--out", "p.pth")
        self.refused(1, "q.safetensors: it has weights and no state of a training", "train", "mlp", "data", "--qat", "--resume", "q.safetensors", "--no-out")
        self.refused(2, "--qat: --evaluate quantizes weights as they say", "train", "mlp", "data", "--evaluate", "--pretrained", "q.safetensors", "--qat",
                     "--quant-weight-bits", "4")
        out = self.done("train", "mlp", "data", "--epochs", "1", "--no-out", "--pretrained", "q.safetensors")
        self.assertIn("6 tensors loaded, without their quantization: there is no --qat", out)
        self.done(*quantize, "--out", "wide.safetensors", "--no-eval", "--quant-weight-bits", "16")
        self.refused(2, "--int8: expected weights of up to 8 bits, got those of wide.safetensors, of 16", "eval", "--weights", "wide.safetensors", "--data", "data", "--int8")
        # Numbers that no training gives.
        for name, format_, value, said in (("quantization.input.scale", "<f", -0.5, "expected numbers above 0, got -0.5"),
                                           ("quantization.input.scale", "<f", math.nan, "expected numbers above 0, got nan"),
                                           ("quantization.input.zero_point", "<i", 256, "expected 0 to 255, got 256"),
                                           ("quantization.fc1.weight.zero_point", "<i", 1, "expected 0 for a weight, got 1")):
            saved = Safetensors(self.folder / "q.safetensors")
            begin = saved.header[name]["data_offsets"][0]
            saved.data = saved.data[:begin] + struct.pack(format_, value) + saved.data[begin + 4:]
            saved.write(self.folder / "bad.safetensors")
            self.refused(1, f"'{name}': {said}", "eval", "--weights", "bad.safetensors", "--data", "data")
        # Integers of another dtype, or that the recipe's bits don't have.
        saved = Safetensors(self.folder / "q.safetensors")
        saved.header["fc1.weight"]["dtype"] = "U8"
        saved.write(self.folder / "bad.safetensors")
        self.refused(1, "bad.safetensors: 'fc1.weight': expected i8, or a floating dtype, for a quantized weight, got u8", "eval", "--weights", "bad.safetensors", "--data",
                     "data")
        for bits, said in (("2", r"expected integers from -1 to 1, of the 2 bits that its recipe says, got "), ("7", "expected integers from -63 to 63, of the 7 bits"),
                           ("16", "expected floating weights, whose recipe says 16 bits, got i8")):
            saved = Safetensors(self.folder / "q.safetensors")
            saved.set_state(recipe={**saved.state["recipe"], "quant-weight-bits": bits})
            saved.write(self.folder / "bad.safetensors")
            for flags in ([], ["--int8"]):
                self.refused(1, ["bad.safetensors: 'fc1.weight': ", said], "eval", "--weights", "bad.safetensors", "--data", "data", *flags)
        # Scales that don't fit their integers.
        saved = Safetensors(self.folder / "q.safetensors")
        saved.header["fc1.weight"]["shape"].reverse()
        saved.write(self.folder / "bad.safetensors")
        self.refused(1, "'quantization.fc1.weight.scale': expected scales in f32, one for each output channel of 'fc1.weight' [784, 512]", "eval", "--weights",
                     "bad.safetensors", "--data", "data")

    def test_activations_of_sixteen_bits(self):
        """Their integers are computed with, too, and stand for more digits."""
        self.run_of("run")
        out = self.done("quantize", "--weights", "run", "--out", "q.safetensors", "--batches", "8", "--quant-activation-bits", "16")
        rows = self.rows(out)
        self.assertEqual(rows["integers w8a16"][0], rows["rounded to integers"][0])
        self.assertRegex(out, r"conv2d_int16|linear_int16")
        self.assertEqual(self.top1("--weights", "q.safetensors", "--int8"), rows["integers w8a16"][0])
        self.assertIn("in integers with activations of 16 bits", self.done("eval", "--weights", "q.safetensors", "--int8"))
        self.refused(2, "--amp", "eval", "--weights", "q.safetensors", "--int8", "--amp", "O2")
        self.refused(1, "activations of 16 bits are float32 between products", "eval", "--weights", "q.safetensors", "--int8", "--amp", "bf16")

    def test_processors_without_vnni_give_the_same_integers(self):
        """oneDNN's own kernels for them add pairs of products in 16 bits, where large ones saturate."""
        self.run_of("run")
        self.done("quantize", "--weights", "run", "--out", "q.safetensors", "--batches", "8", "--no-eval")
        found = set()
        for limits in ({}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, {"HALFSTEP_ISA": "avx2"}):
            status, out, err = self.run_program("eval", "--weights", "q.safetensors", "--int8", "--seed", "3", env=limits)
            self.assertEqual(status, 0, err)
            found.add(re.search(r"mlp: (loss [0-9.]+, top1 [0-9.]+%, top5 [0-9.]+%)", out)[1])
        self.assertEqual(len(found), 1, found)

    def test_stopped_it_writes_nothing(self):
        self.run_of("run", "--limit", "1000")
        process = self.start("quantize", "--weights", "run", "--out", "q.safetensors", "--batches", "1000000", "--batch-size", "1")
        self.assertIn("quantizing", process.stdout.readline())
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130)
        self.assertFalse((self.folder / "q.safetensors").exists())


if __name__ == "__main__":
    unittest.main()
