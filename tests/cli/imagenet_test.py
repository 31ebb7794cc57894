# SPDX-License-Identifier: Apache-2.0
"""examples/imagenet.cpp: PyTorch's ImageNet script with its flags, on a tiny set of images and the simulated device."""
import os
import pathlib
import re
import subprocess
import unittest

from images_test import make_images
from program import PROGRAM, ProgramTest, Safetensors

EXAMPLE = pathlib.Path(PROGRAM).parent.parent / "examples" / "imagenet"
TINY = ["--arch", "resnet18", "-b", "4", "-j", "1", "-p", "1", "--image-size", "32", "--lr", "0.01"]


@unittest.skipUnless(EXAMPLE.exists(), "the examples are not built")
class Imagenet(ProgramTest):
    def setUp(self):
        super().setUp()
        make_images(self.folder / "images")

    def script(self, *arguments, status=0):
        done = subprocess.run([EXAMPLE, *map(str, arguments)], cwd=self.folder, text=True, capture_output=True,
                              timeout=200, check=False, env=self.environment(HALFSTEP_THREADS="1"))
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout if status == 0 else done.stderr

    def weights(self, folder):
        file = Safetensors(self.folder / folder / "checkpoint.safetensors")
        return {name: file.tensor(name) for name in file.header if name != "__metadata__"}

    def test_lines_and_files_on_the_simulated_device(self):
        out = self.script(*TINY, "--epoch", 1, "--device", "sim", "--amp", "f16", "--out", "run", "images")
        number = r" *[\d.]+(?:e[+-]\d+)?"
        line = rf"\[ *1/ *\d+\]\tTime{number} \({number}\)\tData{number} \({number}\)\tLoss{number} \({number}\)" \
               rf"\tAcc@1{number} \({number}\)\tAcc@5{number} \({number}\)\n"
        self.assertRegex(out, rf"Epoch: \[0\]{line}")
        self.assertRegex(out, rf"Test: {line}")
        self.assertRegex(out, r" \* Acc@1 [\d.]+ Acc@5 100\.000\n$")  # of two classes the label is among the first five
        self.assertIn("checkpoint.safetensors", os.listdir(self.folder / "run"))
        # The program reads the weights.
        status, out, err = self.run_program("inspect", "run/checkpoint.safetensors")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("layer4.1.conv2.weight", out)

    def test_resuming_continues_with_the_same_bits(self):
        flags = [*TINY, "--amp", "f16", "--seed", 3]
        self.script(*flags, "--epochs", 2, "--out", "whole", "images")
        self.script(*flags, "--epochs", 1, "--out", "half", "images")
        out = self.script(*flags, "--epochs", 2, "--out", "half", "--resume", "half/checkpoint.safetensors", "images")
        self.assertIn("=> loaded checkpoint 'half/checkpoint.safetensors' (epoch 1)", out)
        self.assertNotIn("Epoch: [0]", out)
        self.assertEqual(self.weights("whole"), self.weights("half"))
        # Evaluation prints what the last epoch printed.
        score = re.findall(r" \* Acc@1 .*", out)[-1]
        self.assertIn(score, self.script(*flags, "-e", "--resume", "half/checkpoint.safetensors", "images"))

    def test_no_lines_of_batches(self):
        out = self.script(*TINY, "-p", 0, "--epochs", 1, "images")
        self.assertRegex(out, r"\A \* Acc@1 [\d.]+ Acc@5 100\.000\n\Z")  # only what sums up the evaluation

    def test_flags(self):
        self.assertIn("one process trains on one device so far", self.script("--world-size", 2, "images", status=2))
        self.assertIn("ambiguous flag --w", self.script("--w", 2, "images", status=2))
        self.assertIn("unknown flag --layers", self.script("--layers", 2, "images", status=2))
        self.assertIn("expected a number after --epochs, got many", self.script("--epochs", "many", status=2))
        self.assertIn("expected the folder of the images", self.script("--epochs", 1, status=2))
        self.assertIn("did you mean resnet18?", self.script(*TINY, "-a", "resnet81", "images", status=1))


if __name__ == "__main__":
    unittest.main()
