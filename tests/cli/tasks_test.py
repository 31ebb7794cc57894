# SPDX-License-Identifier: Apache-2.0
"""A network, a kind of data and a task that the program doesn't know, from a library beside it (text_task.cpp): its
verbs need nothing but what was registered."""
import os
import pathlib
import subprocess
import unittest

from program import PROGRAM, ProgramTest

HERE = pathlib.Path(__file__).resolve().parent
COMPILER = os.environ.get("HALFSTEP_COMPILER", "c++")
LIBRARIES = pathlib.Path(PROGRAM).parent.parent / "lib"


@unittest.skipIf("ASAN_OPTIONS" in os.environ or "TSAN_OPTIONS" in os.environ, "sanitizers want to be loaded first")
class Tasks(ProgramTest):
    def setUp(self):
        super().setUp()
        library = self.folder / "libtext_task.so"
        subprocess.run([COMPILER, "-std=c++20", "-O0", "-shared", "-fPIC", "-I", HERE.parent.parent, HERE / "text_task.cpp", LIBRARIES / "libhalfstep.so",
                        f"-Wl,-rpath,{LIBRARIES}", "-o", library], check=True, timeout=120)
        self.preload = {"LD_PRELOAD": str(library)}

    def good(self, *arguments):
        status, out, err = self.run_program(*arguments, env=self.preload)
        self.assertEqual((status, err), (0, ""), out)
        return out

    def test_every_verb(self):
        flags = ["--epochs", "20", "--optimizer", "adam", "--lr", "0.1", "--batch-size", "16", "--seed", "1"]
        self.assertIn("training bigram on numbers in order, float32", self.good("train", "bigram", *flags, "--out", "run"))
        self.assertIn("# The data are numbers in order.\n", (self.folder / "run/config.yaml").read_text())
        out = self.good("eval", "--weights", "run")
        self.assertIn("evaluating bigram with run/best.safetensors on numbers in order, as run/config.yaml says\n", out)
        self.assertRegex(out, r"\nbigram: loss 0\.0\d+, perplexity 1\.0\d+ in")
        # Text i ends with (i + 5) mod 8.
        lines = self.good("predict", "--weights", "run").splitlines()
        self.assertEqual(lines[0], "bigram with run/best.safetensors")
        self.assertEqual(lines[1:], [f"{i}: then {(i + 6) % 8}" for i in range(8)])
        self.assertIn("takes [batch, 6]", self.good("export", "--weights", "run", "--onnx", "bigram.onnx"))
        self.assertIn("bigram for [2, 6] on cpu", self.good("summary", "bigram", "--batch-size", "2"))
        self.assertIn('"model":"bigram"', self.good("bench", "bigram", "--steps", "1", "--warmup", "0", "--batch-size", "4"))
        self.assertIn("a training step of bigram on cpu, float32", self.good("devices", "cpu", "--model", "bigram"))
        # A run goes on by its folder.
        self.good("train", "--resume", "run", "--epochs", "21")

    def test_flags_of_other_data_and_tasks(self):
        self.good("train", "bigram", "--epochs", "1", "--out", "run", "-q")
        for verb, flags, said in (("train", ["--image-size", "32"], "--image-size: bigram is no network of images or boxes"),
                                  ("train", ["--mixup", "0.2"], "--mixup: bigram is no network for classification"),
                                  ("eval", ["--image-size", "32"], "--image-size: bigram is no network of images"),
                                  ("eval", ["--no-rect"], "--no-rect: bigram is no network of boxes"),
                                  ("predict", ["--image-size", "32"], "--image-size: bigram is no network of images"),
                                  ("predict", ["--count", "3"], "--count: a flag of classification, and bigram is trained for next-number"),
                                  ("predict", ["--save-txt"], "--save-txt: a flag of detection, and bigram is trained for next-number"),
                                  ("export", ["--onnx", "x.onnx", "--image-size", "32"], "--image-size: bigram is no network of images"),
                                  ("bench", ["--image-size", "32"], "--image-size: bigram is no network of images")):
            weights = [] if verb in ("train", "bench") else ["--weights", "run"]
            self.refused(2, said, verb, "bigram", *weights, *flags, env=self.preload)


if __name__ == "__main__":
    unittest.main()
