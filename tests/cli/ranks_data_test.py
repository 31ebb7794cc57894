# SPDX-License-Identifier: Apache-2.0
"""`mpirun -n N halfstep train` on real data: what one process reaches, several reach."""
import array
import math
import os
import pathlib
import unittest

from program import Safetensors
from ranks_test import RanksTest

DATA = pathlib.Path(os.environ.get("HALFSTEP_DATA") or pathlib.Path(__file__).resolve().parents[3] / "shared/data")


class RealDataTest(RanksTest):
    def real(self, name, file):
        if not (DATA / name / file).exists():
            self.skipTest(f"no {name} in the data folder: set HALFSTEP_DATA")
        return DATA / name

    def alone(self, *arguments, timeout=120):
        status, out, err = self.run_program("train", *arguments, timeout=timeout)
        self.assertEqual((status, err), (0, ""), out)

    def accuracy(self, run):
        return self.evaluations(run)[-1]["top1"]


class Mnist(RealDataTest):
    def weights(self, run):
        file = Safetensors(self.folder / run / "last.safetensors")
        return [x for name in sorted(file.header) if name.startswith("fc") for x in array.array("f", file.tensor(name))]

    def test_fifty_steps_are_those_of_one_process(self):
        flags = ["mlp", self.real("mnist", "train-images-idx3-ubyte.gz"), "--limit", "4800", "-b", "96", "--epochs", "1", "--lr", "0.05",
                 "--momentum", "0.9"]
        self.alone(*flags, "--out", "one")
        weights, accuracy = self.weights("one"), self.accuracy("one")
        self.assertEqual(len(self.losses("one")), 50)
        self.assertGreater(accuracy, 0.85)
        size = math.sqrt(sum(w * w for w in weights))
        for ranks in (2, 4):
            for more in ([], ["--compress-gradients", "f16"]):
                run = "-".join([str(ranks), *more[1:]])
                status, out, err = self.finish(self.launch(ranks, "train", *flags, *more, "--out", run))
                self.assertEqual(status, 0, out + err)
                if more:
                    # The deviation of what a sample of 10,000 says of a network's accuracy.
                    self.assertLess(abs(self.accuracy(run) - accuracy), math.sqrt(accuracy * (1 - accuracy) / 10000))
                    self.assertNotEqual(self.losses(run), self.losses("one"))
                    continue
                self.near(self.losses(run), self.losses("one"), 5e-6)
                apart = math.sqrt(sum((a - b) ** 2 for a, b in zip(self.weights(run), weights, strict=True)))
                self.assertLess(apart / size, 5e-6)
                self.assertAlmostEqual(self.accuracy(run), accuracy, delta=2e-4)


class CifarSlow(RealDataTest):
    # Where the 8,000 test images are a sample of all images, the difference of two networks of the same accuracy p has a
    # deviation of sqrt(2 p (1 - p) / 8000), 0.8 %. Three of them: two ranks may not be worse than that.
    def test_resnet20_in_16_bits_reaches_what_one_process_reaches(self):
        flags = ["resnet20", self.real("images/cifar10-jpeg", "train.tar.gz"), "--limit", "3000", "-b", "64", "--epochs", "6", "--lr", "0.1",
                 "--momentum", "0.9", "--lr-schedule", "onecycle", "--weight-decay", "5e-4"]
        self.alone(*flags, "--threads", "2", "--out", "one", timeout=800)
        reached = self.accuracy("one")
        self.assertGreater(reached, 0.35, "it learns")
        for more in (["--amp", "f16"], ["--compress-gradients", "bf16"]):
            run = more[-1]
            status, out, err = self.finish(self.launch(2, "train", *flags, *more, "--out", run), 800)
            self.assertEqual(status, 0, out + err)
            self.assertGreater(self.accuracy(run), reached - 3 * math.sqrt(2 * reached * (1 - reached) / 8000), more)


if __name__ == "__main__":
    unittest.main()
