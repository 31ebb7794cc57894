# SPDX-License-Identifier: Apache-2.0
"""A field that an options struct does not have: the first three lines of the compiler's error name the module or op
whose options they are, or the field itself."""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
COMPILER = os.environ.get("HALFSTEP_COMPILER", "c++")


class WrongField(unittest.TestCase):
    def first_lines(self, headers, code):
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "program.cpp"
            includes = "".join(f'#include "halfstep/{header}"\n' for header in headers)
            source.write_text(f"{includes}using namespace halfstep;\n{code}", encoding="utf-8")
            done = subprocess.run([COMPILER, "-std=c++20", "-fsyntax-only", "-I", TOP, source], text=True,
                                  capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"})
        self.assertNotEqual(done.returncode, 0, "it compiled")
        return "\n".join(done.stderr.splitlines()[:3])

    def test_of_a_member(self):
        lines = self.first_lines(["nn/linear.h"], """
            struct Net : nn::Module<Net> {
              nn::Linear fc1 = child("fc1", nn::Linear{{.in = 784, .width = 512}});
              Tensor forward(const Tensor& x) const { return fc1(x); }
            };""")
        self.assertRegex(lines, r"nn::Linear\b")
        self.assertIn(".width", lines)

    def test_over_several_lines_and_inside_a_container(self):
        lines = self.first_lines(["nn/conv.h", "nn/container.h"], """
            void f() {
              const nn::Sequential net{nn::Conv2d{{.in = 3,
                                                   .out = 8,
                                                   .kernel_size = {3},
                                                   .stride = {2}}}};
            }""")
        self.assertRegex(lines, r"nn::Conv2d\b")

    def test_of_an_op(self):
        lines = self.first_lines(["ops/conv.h"],
                                 "Tensor f(const Tensor& x) { return conv2d(x, x, {}, {.strides = {2}}); }")
        self.assertTrue(re.search(r"Conv(Func)?Options|conv2d", lines) and ".strides" in lines, lines)

    def test_the_right_fields_compile(self):
        with self.assertRaisesRegex(AssertionError, "it compiled"):
            self.first_lines(["nn/linear.h"], "const nn::Linear fc{{.in = 784, .out = 512}};")


if __name__ == "__main__":
    unittest.main()
