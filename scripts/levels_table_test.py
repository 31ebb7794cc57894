#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of levels_table.py that need no training."""

import pathlib
import tempfile
import unittest
from unittest import mock

import levels_table
from levels_table import BASE, Run

O2 = ("O2", "f16")


class Table(unittest.TestCase):
    def test_means_of_accuracy_medians_of_time_and_the_most_memory(self):
        runs = {BASE: {"mnist": [Run(4, 100, 98.0), Run(6, 130, 98.5)]}, O2: {"mnist": [Run(10, 90, 97.0), Run(20, 95, 98)]}}
        lines = levels_table.table(runs, ["MNIST"]).splitlines()
        self.assertEqual(lines[0], "| level | 16 bits | epoch, s | of float32's | peak memory, MB | MNIST, % |")
        self.assertEqual(lines[2], "| `O0` | none (float32) | 5.00 | 1.00 | 130 | 98.25 |")
        self.assertEqual(lines[3], "| `O2` | f16 | 15.00 | 3.00 | 95 | 97.50 |")

    def test_a_level_may_be_three_tenths_of_a_point_below_float32(self):
        def runs(accuracy: float):
            return {BASE: {"mnist": [Run(1, 1, 98.0)]}, O2: {"mnist": [Run(1, 1, accuracy)]}}

        self.assertEqual(levels_table.too_low(runs(97.71)), [])
        self.assertEqual(levels_table.too_low(runs(97.69)), ["mnist: O2 f16 reaches 97.69 %, float32 98.00 %"])

    def test_the_document_keeps_what_stands_around_the_table(self):
        with tempfile.TemporaryDirectory() as folder:
            document = pathlib.Path(folder) / "x.md"
            document.write_text(f"before\n{levels_table.BEGIN}old\n{levels_table.END}\nafter\n", encoding="utf-8")
            with mock.patch.object(levels_table, "DOCUMENT", document):
                levels_table.write("new \\1\n")
                self.assertEqual(document.read_text(encoding="utf-8"),
                                 f"before\n{levels_table.BEGIN}new \\1\n{levels_table.END}\nafter\n")
                document.write_text("no marks\n", encoding="utf-8")
                with self.assertRaisesRegex(SystemExit, "expected a line"):
                    levels_table.write("new\n")

    def test_the_real_document_has_the_marks(self):
        text = levels_table.DOCUMENT.read_text(encoding="utf-8")
        self.assertIn(levels_table.BEGIN, text)
        self.assertIn(levels_table.END, text)


if __name__ == "__main__":
    unittest.main()
