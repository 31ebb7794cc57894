# SPDX-License-Identifier: Apache-2.0
"""scripts/cuda_options.sh: when the plug-in for NVIDIA GPUs is built, for which GPUs, and what is said."""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parent / "cuda_options.sh"
EVERY = "80-real;89-real;90-real;100-real;100-virtual"


class CudaOptions(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="halfstep-cuda-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.answer = self.folder / "build" / "cuda.cmake"

    def program(self, name, text="exit 0"):
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def run_script(self, mode, architectures="", quick="0", **environment):
        environment = {"PATH": f"{self.folder}/bin:/usr/bin:/bin", "CUDA_HOME": str(self.folder / "nowhere"), **environment}
        return subprocess.run([str(SCRIPT), mode, architectures, quick, str(self.answer)], env=environment, text=True,
                              capture_output=True, check=False)

    def settings(self):
        return dict(re.findall(r'set\((\w+) "?([^" ]*)"? CACHE', self.answer.read_text()))

    def test_without_a_driver_it_is_left_out_in_one_line(self):
        self.program("nvcc")
        out = self.run_script("auto", HALFSTEP_CUDA_DRIVER="0")
        self.assertEqual(out.returncode, 0)
        self.assertRegex(out.stderr, r"\ACUDA plug-in: left out: no NVIDIA driver.*CUDA=1.*\n\Z")
        self.assertEqual(self.settings(), {"HALFSTEP_CUDA": "OFF"})
        again = self.run_script("auto", HALFSTEP_CUDA_DRIVER="0")
        self.assertEqual((again.returncode, again.stderr), (0, ""), "said once")

    def test_with_a_driver_but_no_compiler_it_is_left_out_too(self):
        out = self.run_script("auto", HALFSTEP_CUDA_DRIVER="1")
        self.assertEqual(out.returncode, 0)
        self.assertIn("no nvcc", out.stderr)
        self.assertEqual(self.settings(), {"HALFSTEP_CUDA": "OFF"})

    def test_asked_for_without_a_compiler_is_an_error(self):
        out = self.run_script("1", HALFSTEP_CUDA_DRIVER="0")
        self.assertEqual(out.returncode, 1)
        self.assertIn("there is no nvcc", out.stderr)
        self.assertFalse(self.answer.exists())

    def test_asked_for_it_needs_no_driver_and_is_for_all(self):
        nvcc = self.program("nvcc")
        out = self.run_script("1", HALFSTEP_CUDA_DRIVER="0")
        self.assertEqual(out.returncode, 0, out.stderr)
        self.assertEqual(self.settings(), {"HALFSTEP_CUDA": "ON", "HALFSTEP_CUDA_ARCHITECTURES": EVERY,
                                           "HALFSTEP_CUDA_QUICK": "OFF", "CMAKE_CUDA_COMPILER": str(nvcc)})

    def test_an_older_toolkit_is_not_asked_for_what_it_does_not_know(self):
        for release, expected in (("12.4", "80-real;89-real;90-real;90-virtual"), ("12.8", EVERY), ("13.0", EVERY)):
            self.program("nvcc", f'echo "Cuda compilation tools, release {release}, V{release}.1"')
            self.assertEqual(self.run_script("1", "all").returncode, 0)
            self.assertEqual(self.settings()["HALFSTEP_CUDA_ARCHITECTURES"], expected, release)

    def test_compiled_quickly_is_not_for_ever(self):
        self.program("nvcc")
        self.run_script("1", "90", "1")
        self.assertEqual(self.settings()["HALFSTEP_CUDA_QUICK"], "ON")
        self.run_script("1", "90")
        self.assertEqual(self.settings()["HALFSTEP_CUDA_QUICK"], "OFF")

    def test_with_gpus_it_is_for_them(self):
        self.program("nvcc")
        self.program("nvidia-smi", 'case "$*" in *compute_cap*) printf "9.0\\n8.0\\n9.0\\n";; esac')
        self.assertEqual(self.run_script("auto").returncode, 0)
        self.assertEqual(self.settings()["HALFSTEP_CUDA_ARCHITECTURES"], "80-real;90-real")
        self.run_script("auto", "all")
        self.assertEqual(self.settings()["HALFSTEP_CUDA_ARCHITECTURES"], EVERY)
        self.run_script("auto", "89 100-virtual")
        self.assertEqual(self.settings()["HALFSTEP_CUDA_ARCHITECTURES"], "89-real;100-virtual")

    def test_the_answer_is_rewritten_only_when_it_changes(self):
        self.program("nvcc")
        self.run_script("1", "90")
        os.utime(self.answer, (1, 1))
        self.run_script("1", "90")
        self.assertEqual(self.answer.stat().st_mtime, 1)
        self.run_script("0")
        self.assertNotEqual(self.answer.stat().st_mtime, 1)
        self.assertEqual(self.settings(), {"HALFSTEP_CUDA": "OFF"})

    def test_a_compiler_elsewhere(self):
        nvcc = self.program("my-nvcc")
        self.run_script("1", "90", CUDACXX=str(nvcc))
        self.assertEqual(self.settings()["CMAKE_CUDA_COMPILER"], str(nvcc))

    def test_refuses_what_it_does_not_know(self):
        self.program("nvcc")
        for mode, architectures in (("yes", ""), ("1", "hopper"), ("1", "9.0")):
            self.assertEqual(self.run_script(mode, architectures).returncode, 2, (mode, architectures))


if __name__ == "__main__":
    unittest.main()
