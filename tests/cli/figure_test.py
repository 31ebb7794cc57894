# SPDX-License-Identifier: Apache-2.0
"""The figure of a mixed-precision step in docs/guide is what scripts/step_figure.py draws of a dump made now."""
import pathlib
import subprocess
import sys
import unittest

from program import ProgramTest

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
FIGURE = TOP / "docs" / "guide" / "mixed-precision-step.svg"


class Figure(ProgramTest):
    def draw(self, dump):
        return subprocess.run([sys.executable, TOP / "scripts" / "step_figure.py", dump, "out.svg"], cwd=self.folder,
                              text=True, capture_output=True, check=False)

    def test_the_figure_of_the_docs_is_of_a_real_step(self):
        self.train("--amp", "f16", "--limit", "64", "--epochs", "1", "--no-out", "-q", "--debug-dump", "dump")
        self.assertEqual(self.draw("dump").returncode, 0)
        self.assertEqual((self.folder / "out.svg").read_text(encoding="utf-8"), FIGURE.read_text(encoding="utf-8"),
                         "make it again: the docstring of scripts/step_figure.py has the commands")

    def test_a_dump_of_something_else_is_refused(self):
        (self.folder / "empty").mkdir()
        drawn = self.draw("empty")
        self.assertEqual(drawn.returncode, 1)
        self.assertIn("expected a dump, found no call.json", drawn.stderr)
        self.train("--amp", "f16", "--limit", "64", "--epochs", "1", "--no-out", "-q", "--debug-dump", "dump")
        for call in (self.folder / "dump").glob("*sgd_step"):
            (call / "call.json").unlink()
        self.assertIn("expected a step with a gradient scaler and an optimizer", self.draw("dump").stderr)


if __name__ == "__main__":
    unittest.main()
