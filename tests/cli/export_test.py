# SPDX-License-Identifier: Apache-2.0
"""`halfstep export`: what it writes, and what it refuses. Where the package onnx is installed, its checker looks too."""
import os
import re
import resource
import signal
import subprocess
import sys
import unittest

from detection_test import make_boxes
from images_test import make_images
from program import ProgramTest, Safetensors, events

CHECK = """
import sys, numpy, onnx
from onnx.reference import ReferenceEvaluator
model = onnx.load(sys.argv[1])
onnx.checker.check_model(model, full_check=True)
port = model.graph.input[0].type.tensor_type
dims = [d.dim_param or d.dim_value for d in port.shape.dim]
dtype = onnx.helper.tensor_dtype_to_np_dtype(port.elem_type)
x = numpy.zeros([3 if d == "batch" else d for d in dims], dtype)
y = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x})[0]
print(dims, dtype, list(y.shape), bool(numpy.isfinite(y).all()), model.opset_import[0].version)
"""


# Whether two files compute the same up to roundings in float32.
COMPARE = """
import sys, numpy, onnx
from onnx.reference import ReferenceEvaluator
x = numpy.random.default_rng(1).standard_normal((3, 3, 8, 8), dtype=numpy.float32)
a, b = (ReferenceEvaluator(onnx.load(f)).run(None, {"input": x})[0] for f in sys.argv[1:])
print(bool(abs(a - b).max() < 1e-4 * abs(a).max()))
"""


def find_python():
    """As tests/io/onnx_reference.h does."""
    for python in (os.environ.get("HALFSTEP_ONNX_PYTHON"), os.environ.get("HALFSTEP_PEER_PYTHON"), sys.executable):
        if python and subprocess.run([python, "-c", "import onnx.reference"], capture_output=True).returncode == 0:
            return python
    return None


class ExportTest(ProgramTest):
    @classmethod
    def setUpClass(cls):
        cls.python = find_python()

    def exported(self, *arguments, model="mlp", file="net.onnx"):
        status, out, err = self.run_program("export", model, "--onnx", file, *arguments)
        self.assertEqual((status, err), (0, ""), out)
        return out

    def checked(self, file="net.onnx"):
        if not self.python:
            self.skipTest("needs a Python with the package onnx; HALFSTEP_ONNX_PYTHON names one")
        done = subprocess.run([self.python, "-c", CHECK, self.folder / file], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()


class Export(ExportTest):
    def setUp(self):
        super().setUp()
        self.data()
        self.train("data", "--epochs", "1", "--out", "run")

    def test_links_and_pipes_stay_what_they_are(self):
        self.exported("--weights", "run")
        (self.folder / "target").write_bytes(b"old")
        (self.folder / "link").symlink_to("target")
        self.exported("--weights", "run", file="link")
        self.assertTrue((self.folder / "link").is_symlink())
        expected = (self.folder / "net.onnx").read_bytes()
        self.assertEqual((self.folder / "target").read_bytes(), expected)
        os.mkfifo(self.folder / "pipe")
        reader = subprocess.Popen(["sh", "-c", "cat <pipe >copy"], cwd=self.folder)
        self.addCleanup(reader.wait)
        self.exported("--weights", "run", file="pipe")
        self.assertEqual(reader.wait(), 0)
        self.assertEqual((self.folder / "copy").read_bytes(), expected)
        self.assertTrue((self.folder / "pipe").is_fifo())

    def test_what_it_says_and_that_it_comes_out_the_same(self):
        out = self.exported("--weights", "run")
        self.assertRegex(out, r"\Amlp with run/best.safetensors\nnet\.onnx: 5 operators, 669706 parameters and constants in 6 tensors, 2\.7 MB; takes \[batch, 784\]\n\Z")
        first = (self.folder / "net.onnx").read_bytes()
        self.exported("--weights", "run/best.safetensors", "--threads", "1")
        self.assertEqual((self.folder / "net.onnx").read_bytes(), first)
        # From a device the same comes.
        self.exported("--weights", "run", "--device", "sim", file="sim.onnx")
        self.assertEqual((self.folder / "sim.onnx").read_bytes(), first)

    def test_onnx_accepts_it(self):
        self.exported("--weights", "run")
        self.assertEqual(self.checked(), "['batch', 784] float32 [3, 10] True 17")
        self.exported("--weights", "run", "--dtype", "f16", "--batch-size", "2", "--opset", "21")
        self.assertEqual(self.checked(), "[2, 784] float16 [2, 10] True 21")

    def test_weights_of_16_bits(self):
        for dtype in ("f16", "bf16"):
            status, _, err = self.run_program("convert", "run/best.safetensors", f"{dtype}.pth", "--dtype", dtype)
            self.assertEqual((status, err), (0, ""))
            self.assertIn("2.7 MB", self.exported("--weights", f"{dtype}.pth", file=f"{dtype}.onnx"))
        self.exported("--weights", "f16.pth", "--dtype", "f16", file="a.onnx")
        self.exported("--weights", "run", "--dtype", "f16", file="b.onnx")
        self.assertEqual((self.folder / "a.onnx").read_bytes(), (self.folder / "b.onnx").read_bytes())

    def test_arguments(self):
        weights = ["--weights", "run", "--onnx", "net.onnx"]
        self.refused(2, "--onnx is required", "export", "mlp", "--weights", "run")
        self.refused(2, "--weights is required", "export", "mlp", "--onnx", "net.onnx")
        self.refused(2, ["--dtype: expected f32 or f16", "'bf16'", "doesn't take it"], "export", "mlp", *weights, "--dtype", "bf16")
        self.refused(2, ["--opset", "from 17 to 21", "'16'"], "export", "mlp", *weights, "--opset", "16")
        for size in ("0", "many", "-1", "65537"):
            self.refused(2, ["--batch-size", "from 1 to 65536", f"'{size}'"], "export", "mlp", *weights, f"--batch-size={size}")
        self.refused(2, "--image-size: mlp is no network of images", "export", "mlp", *weights, "--image-size", "28")
        self.refused(2, "is the file of weights", "export", "mlp", "--weights", "run/best.safetensors", "--onnx", "run/best.safetensors")
        self.refused(2, ["an ONNX file", "halfstep convert"], "export", "mlp", "--weights", "run", "--onnx", "run/last.safetensors")
        self.refused(2, "the folder run", "export", "mlp", "--weights", "run", "--onnx", "run")
        self.assertFalse((self.folder / "net.onnx").exists())

    def test_files(self):
        self.refused(1, "nowhere", "export", "mlp", "--weights", "nowhere", "--onnx", "net.onnx")
        self.refused(1, "nowhere/net.onnx", "export", "mlp", "--weights", "run", "--onnx", "nowhere/net.onnx")
        self.refused(1, ["run", "mlp"], "export", "resnet20", "--weights", "run", "--onnx", "net.onnx")
        self.assertFalse((self.folder / "net.onnx").exists())

    def test_a_full_disk(self):
        (self.folder / "out").mkdir()
        self.exported("--weights", "run", file="out/net.onnx")
        before = (self.folder / "out/net.onnx").read_bytes()

        def little_room():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

        self.refused(1, "out/net.onnx: writing failed", "export", "mlp", "--weights", "run", "--onnx", "out/net.onnx", "--opset", "18",
                     preexec_fn=little_room, restore_signals=False)
        self.assertEqual((self.folder / "out/net.onnx").read_bytes(), before)
        self.assertEqual(os.listdir(self.folder / "out"), ["net.onnx"])


class ExportImages(ExportTest):
    def test_networks_of_images(self):
        make_images(self.folder / "images")
        status, out, err = self.run_program("train", "resnet20", "images", "--image-size", "8", "--batch-size", "8", "--threads", "1", "--epochs", "1",
                                            "--out", "run", timeout=120)
        self.assertEqual((status, err), (0, ""), out)
        # The size that it was trained with, and the classes of the data.
        self.assertIn("takes [batch, 3, 8, 8]\n", self.exported("--weights", "run", model="resnet20"))
        self.assertEqual(self.checked(), "['batch', 3, 8, 8] float32 [3, 2] True 17")
        self.assertIn("takes [2, 3, 40, 40]\n", self.exported("--weights", "run", "--image-size", "40", "--batch-size", "2", "--dtype", "f16", model="resnet20"))
        self.assertEqual(self.checked(), "[2, 3, 40, 40] float16 [2, 2] True 17")
        self.refused(2, "resnet20", "export", "resnet2", "--weights", "run", "--onnx", "net.onnx")
        saved = Safetensors(self.folder / "run/best.safetensors")
        saved.set_state(recipe={**saved.state["recipe"], "image-size": "100000"})
        saved.write(self.folder / "large.safetensors")
        self.refused(1, "large.safetensors: expected weights for an image size of 1 to 8192, got 100000", "export", "resnet20", "--weights", "large.safetensors",
                     "--onnx", "large.onnx")
        self.folds_batch_norms()

    def folds_batch_norms(self):
        fold = ["--weights", "run", "--fold-batch-norm"]
        self.assertIn("resnet20 with run/best.safetensors\n", self.exported("--weights", "run", model="resnet20", file="whole.onnx"))
        self.assertIn("resnet20 with run/best.safetensors, 21 batch norms folded\n", self.exported(*fold, model="resnet20"))
        whole, folded = ((self.folder / f).read_bytes() for f in ("whole.onnx", "net.onnx"))
        self.assertIn(b"BatchNormalization", whole)
        self.assertNotIn(b"BatchNormalization", folded)
        if self.python:
            done = subprocess.run([self.python, "-c", COMPARE, self.folder / "whole.onnx", self.folder / "net.onnx"], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stdout.strip()), (0, "True"), done.stderr)
        # Evaluated, the same pictures are right; the loss is off by roundings.
        results = []
        for flags in ([], ["--fold-batch-norm"], ["--fold-batch-norm", "--amp", "O2"], ["--fold-batch-norm", "--amp", "bf16"]):
            status, out, err = self.run_program("eval", "resnet20", "images", "--weights", "run", "--log-json", f"{len(results)}.json", *flags)
            self.assertEqual((status, err), (0, ""), out)
            self.assertEqual("21 batch norms folded\n" in out, bool(flags), out)
            results.append(events(self.folder / f"{len(results)}.json")[0])
        # Of 22 layers, each of which rounds to 2^-24 and passes on some hundred times that at most; to 2^-8 in 16 bits.
        for result, bound in zip(results[1:], (1e-4, 0.3, 0.3)):
            self.assertAlmostEqual(result["loss"], results[0]["loss"], delta=bound * results[0]["loss"])
        self.assertEqual(results[1]["top1"], results[0]["top1"])
        status, out, err = self.run_program("train", "mlp", "--limit", "100", "--epochs", "1", "--out", "plain")
        self.assertEqual((status, err), (0, ""), out)
        self.refused(2, ["--nms: expected a detector", "mlp gives [1, 10]"], "export", "mlp", "--weights", "plain", "--onnx", "a.onnx", "--nms")
        self.refused(2, ["--fold-batch-norm", "mlp has no batch norms"], "export", "mlp", "--weights", "plain", "--onnx", "a.onnx", "--fold-batch-norm")


class ExportDetectors(ExportTest):
    def test_predictions_and_objects(self):
        make_boxes(self.folder / "boxes", train=4, val=2)
        status, out, err = self.run_program("train", "yolov5n", "boxes.yaml", "--img", "64", "--batch-size", "4", "--epochs", "1", "-q", "--out", "run",
                                            env={"HALFSTEP_THREADS": "1"}, timeout=300)
        self.assertEqual((status, err), (0, ""), out)
        # Three anchors in each cell of 8, 16 and 32 pixels: a box, objectness and two classes.
        self.assertIn("takes [batch, 3, 64, 64]\n", self.exported("--weights", "run", model="yolov5n"))
        if self.python:
            self.assertEqual(self.checked(), f"['batch', 3, 64, 64] float32 [3, {3 * (64 + 16 + 4)}, 7] True 17")
        fold = ["--weights", "run", "--fold-batch-norm"]
        self.assertIn(", 57 batch norms folded\n", self.exported(*fold, "--nms", "--score", "0", "--overlap", "0.5", model="yolov5n"))
        if self.python:
            dims, dtype, sizes = re.match(r"(\[.*?\]) (\w+) \[(.*?)\] True 17", self.checked()).groups()
            self.assertEqual((dims, dtype), ("['batch', 3, 64, 64]", "float32"))
            found, numbers = map(int, sizes.split(","))
            self.assertEqual(numbers, 7)
            self.assertGreater(found, 0)
        status, out, err = self.run_program("eval", *fold, env={"HALFSTEP_THREADS": "1"}, timeout=120)
        self.assertEqual((status, err), (0, ""), out)
        self.assertIn(", 57 batch norms folded\n", out)
        weights = ["export", "yolov5n", "--weights", "run", "--onnx", "net.onnx"]
        self.refused(2, ["--score", "from 0 to 1", "1.5"], *weights, "--nms", "--score", "1.5")
        self.refused(2, "--overlap: only with --nms", *weights, "--overlap", "0.5")
        self.refused(1, "32", *weights, "--image-size", "100")


if __name__ == "__main__":
    unittest.main()
