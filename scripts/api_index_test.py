#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which comment api_index.py gives to which declaration."""
import pathlib
import tempfile
import unittest

from api_index import entries, undescribed


class ApiIndex(unittest.TestCase):
    def entries(self, text):
        with tempfile.TemporaryDirectory() as folder:
            header = pathlib.Path(folder) / "wave.h"
            header.write_text(text)
            return entries(header, False)

    def test_a_declaration_has_the_first_sentence_above_it(self):
        found = self.entries("/// The sine. In radians.\nHS_API Tensor sin(const Tensor& x);\n"
                             "/// The cosine.\nHS_API Tensor cos(const Tensor& x);\n")
        self.assertEqual(found, [(["sin"], "The sine"), (["cos"], "The cosine")])
        self.assertEqual(undescribed("ops/wave.h", found), [])

    def test_one_without_a_comment_is_found(self):
        found = self.entries("/// The sine.\nHS_API Tensor sin(const Tensor& x);\nHS_API Tensor cos(const Tensor& x);\n"
                             "/// The tangent.\nHS_API Tensor tan(const Tensor& x);\n")
        self.assertEqual(undescribed("ops/wave.h", found), ["ops/wave.h: expected a /// comment above cos, found none"])


if __name__ == "__main__":
    unittest.main()
