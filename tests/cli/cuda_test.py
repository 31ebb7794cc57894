#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs on the CUDA plug-in, with emulated GPUs and without any: results, faults, lists."""
import os
import unittest

from images_test import SMALL, make_images
from program import ProgramTest, Safetensors, events

EMULATED = os.environ.get("HALFSTEP_CUDA_EMULATED", "")
# On a machine with a GPU: its plug-in, as scripts/gpu_checks.sh runs Training.
PLUGIN = os.environ.get("HALFSTEP_CUDA_PLUGIN", EMULATED)
DEVICE = os.environ.get("HALFSTEP_TEST_DEVICE", "cuda")


class CudaTest(ProgramTest):
    def run_cuda(self, *arguments, **environment):
        return self.run_program(*arguments, env={"HALFSTEP_PLUGINS": PLUGIN, **environment})

    def losses(self, run):
        return [e["loss"] for e in events(self.folder / run / "log.jsonl") if e["event"] == "step"]

    def results(self, run):
        """Of a run: losses, scale and skipped steps, the weights at its end; and what it said of captured steps."""
        log = events(self.folder / run / "log.jsonl")
        steps = [(e["loss"], e.get("scale"), e.get("skipped")) for e in log if e["event"] == "step"]
        return (steps, Safetensors(self.folder / run / "last.safetensors").data), next((e for e in log if e["event"] == "capture"), {})


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

    def test_captured_steps_give_the_same_bits(self):
        """The step is launched as a graph, or replayed kernel by kernel, or not captured; some of its steps are skipped."""
        self.data(train=512)
        make_images(self.folder / "images", train=16, test=4)
        networks = {"mlp": ["data", "--epochs", "2", "--batch-size", "64", "--optimizer", "adam", "--loss-scale", "dynamic:1e9"],
                    "resnet20": ["images", *SMALL, "--epochs", "4", "--loss-scale", "dynamic:1e8"]}
        kinds = {"plain": (["--no-capture"], {}), "graphs": ([], {}), "without": ([], {"HALFSTEP_CUDA_GRAPHS": "0"})}
        for network, flags in networks.items():
            runs = {}
            for name, (more, environment) in kinds.items():
                with self.subTest(network=network, kind=name):
                    out = self.run_cuda("train", network, *flags, *more, "--amp", "f16", "--device", DEVICE, "--out", name, "--overwrite",
                                        **environment)
                    self.assertEqual(out.returncode, 0, out.stderr)
                    runs[name], captured = self.results(name)
                    self.assertEqual(captured.get("replayed", 0) >= 8, name != "plain", captured)
                    self.assertEqual(captured.get("graphs", 0) >= 4, name == "graphs", captured)
                    self.assertTrue(runs[name] == runs["plain"], f"other bits: {runs[name][0]} instead of {runs['plain'][0]}")
            skipped = runs["plain"][0][-1][2]
            self.assertTrue(0 < skipped < len(runs["plain"][0]), f"{skipped} steps were skipped")


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

    def test_steps_without_their_graph_are_replayed_kernel_by_kernel(self):
        """A capture that is broken off, a graph that can't be made, one that can't be launched: the run goes on, with the same bits."""
        self.data(train=512)
        flags = ["train", "mlp", "data", "--device", "cuda", "--epochs", "2", "--batch-size", "64", "--overwrite"]
        whole = None
        # Two steps are recorded: one that finds gradients there, and one that doesn't.
        broken, unmade = "capture:1=900,capture:2=900", "instantiate:1=2,instantiate:2=2"
        for faults, graphs, said in [("", True, ""), (broken, False, "cudaStreamEndCapture: operation failed due to a previous error"),
                                     (unmade, False, "cudaGraphInstantiate: out of memory"), ("graph:2=2", True, "")]:
            with self.subTest(faults=faults):
                out = self.run_cuda(*flags, "--out", "run", HALFSTEP_LOG="debug", HALFSTEP_CUDA_EMULATED_FAULTS=faults)
                self.assertEqual(out.returncode, 0, out.stderr)
                run, captured = self.results("run")
                whole = whole or run
                self.assertTrue(run == whole, f"other bits: {run[0]} instead of {whole[0]}")
                self.assertGreater(captured["replayed"], 8)
                self.assertEqual("graphs" in captured, graphs, captured)
                self.assertIn(said, out.stderr)
        # An error of the launch itself is reported like any other.
        out = self.run_cuda(*flags, "--out", "run", HALFSTEP_CUDA_EMULATED_FAULTS="graph:2=719")
        self.assertEqual(out.returncode, 1, out.stdout)
        self.assertIn("launch failure", out.stderr)

    def test_too_little_memory_is_told(self):
        self.data(train=512)
        out = self.run_cuda("train", "mlp", "data", "--device", "cuda", "--out", "run", HALFSTEP_CUDA_EMULATED_MEMORY="2M")
        self.assertEqual(out.returncode, 1, out.stdout)
        self.assertIn("cuda:0 has no", out.stderr)


if __name__ == "__main__":
    unittest.main()
