#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs on the CUDA plug-in, with emulated GPUs and without any: results, faults, lists."""
import os
import unittest

from program import ProgramTest, events

EMULATED = os.environ.get("HALFSTEP_CUDA_EMULATED", "")
# On a machine with a GPU: its plug-in, as scripts/gpu_checks.sh runs Training.
PLUGIN = os.environ.get("HALFSTEP_CUDA_PLUGIN", EMULATED)
DEVICE = os.environ.get("HALFSTEP_TEST_DEVICE", "cuda")


class CudaTest(ProgramTest):
    def run_cuda(self, *arguments, **environment):
        return self.run_program(*arguments, env={"HALFSTEP_PLUGINS": PLUGIN, **environment})

    def losses(self, run):
        return [e["loss"] for e in events(self.folder / run / "log.jsonl") if e["event"] == "step"]


@unittest.skipUnless(PLUGIN, "the emulated plug-in was not built (HALFSTEP_CUDA_EMULATED)")
class Training(CudaTest):
    def test_train_as_the_cpu_does(self):
        self.data(train=512)
        for amp, optimizer, rounding in [("off", "sgd", 1e-5), ("f16", "adamw", 5e-3), ("bf16", "adam", 4e-2)]:
            with self.subTest(amp=amp, optimizer=optimizer):
                flags = ["data", "--epochs", "1", "--batch-size", "64", "--amp", amp, "--optimizer", optimizer, "--lr", "1e-3"]
                self.train(*flags, "--out", "cpu", "--overwrite")
                # No op may fall back to the CPU on the way.
                out = self.run_cuda("train", "mlp", *flags, "--out", "cuda", "--overwrite", "--device", DEVICE, HALFSTEP_FALLBACK="0")
                self.assertEqual(out.returncode, 0, out.stderr)
                here, there = self.losses("cpu"), self.losses("cuda")
                self.assertEqual(len(here), 8)
                # A loss of about 2.4 rounds activations a few times a step; a few steps of a small rate add little.
                for a, b in zip(here, there):
                    self.assertAlmostEqual(a, b, delta=4 * rounding)
                self.assertEqual(events(self.folder / "cuda/log.jsonl")[0]["device"].split(":")[0], "cuda")


@unittest.skipUnless(EMULATED, "the emulated plug-in was not built (HALFSTEP_CUDA_EMULATED)")
class Cuda(CudaTest):
    def test_no_gpu_is_no_error(self):
        out = self.run_cuda("devices", HALFSTEP_CUDA_EMULATED_DEVICES="0")
        self.assertEqual(out.returncode, 0, out.stderr)
        # Where the plug-in for real GPUs was built too, it is said that the emulated one is taken.
        said = [line for line in out.stderr.splitlines() if "there is a device of kind 'cuda' already" not in line]
        self.assertEqual(said, [])
        self.assertRegex(out.stdout, r"\ncuda: its plug-in .* finds no device here\n")
        self.data()
        out = self.run_cuda("train", "mlp", "data", "--device", "cuda", "--no-out", HALFSTEP_CUDA_EMULATED_DEVICES="0")
        self.assertEqual(out.returncode, 2)
        self.assertIn("there are no devices of kind cuda", out.stderr)

    def test_failed_launches_and_lost_gpus_are_told(self):
        self.data(train=512)
        flags = ["train", "mlp", "data", "--device", "cuda", "--out", "run", "--overwrite"]
        for faults, part in [("launch:40=700", "illegal memory access"), ("launch:40=719", "launch failure"),
                             ("malloc:3=2", "memory")]:
            with self.subTest(faults=faults):
                out = self.run_cuda(*flags, HALFSTEP_CUDA_EMULATED_FAULTS=faults)
                if faults.startswith("malloc"):
                    # One refusal is met by giving back what is cached and asking again.
                    self.assertEqual(out.returncode, 0, out.stderr)
                    continue
                self.assertEqual(out.returncode, 1, out.stdout)
                self.assertIn("cuda:0", out.stderr)
                self.assertIn(part, out.stderr)

    def test_too_little_memory_is_told(self):
        self.data(train=512)
        out = self.run_cuda("train", "mlp", "data", "--device", "cuda", "--out", "run", HALFSTEP_CUDA_EMULATED_MEMORY="2M")
        self.assertEqual(out.returncode, 1, out.stdout)
        self.assertIn("cuda:0 has no", out.stderr)


if __name__ == "__main__":
    unittest.main()
