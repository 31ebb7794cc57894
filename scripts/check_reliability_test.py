#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What check_reliability.py finds."""
import unittest

from check_reliability import check

HEAD = "| promise | test |\n|---|---|\n"


class CheckReliability(unittest.TestCase):
    def wrong(self, rows, promises=1):
        wrong, found = check("page.md", HEAD + rows, {"Suite", "Suite.Test"})
        self.assertEqual(found, promises)
        return wrong

    def test_named_tests_exist(self):
        self.assertEqual(self.wrong("| it holds | `Suite`, `Suite.Test` |\n"), [])
        self.assertEqual(self.wrong("| it holds | `Other` |\n"), ["page.md:3: there is no test `Other`"])
        self.assertEqual(self.wrong("| it holds | by hand |\n"), ["page.md:3: no test is named for: it holds"])

    def test_a_row_is_part_of_a_table(self):
        self.assertEqual(self.wrong("| one | `Suite` |\n| two | `Suite` |\n", 2), [])
        self.assertEqual(self.wrong("| one | `Suite` |\n\n| two | `Suite` |\n", 2),
                         ["page.md:5: expected a row of the table above this one, got ''"])


if __name__ == "__main__":
    unittest.main()
