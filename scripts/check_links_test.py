#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of check_links.py: each kind of finding, and none where all is well."""
import pathlib
import tempfile
import unittest

import check_links


class Links(unittest.TestCase):
    def findings(self, files):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            return check_links.check(root)

    def test_good_links(self):
        self.assertEqual(self.findings({
            "README.md": "# A\n[page](docs/guide/a.md#the-second-part-x) [site](https://x.org/none.md) [top](#a)\n",
            "docs/guide/a.md": "## The second part: `x`\n[back](../../README.md) [folder](../../docs)\n",
            "halfstep/a.cpp": "// docs/guide/a.md\n"}), [])

    def test_code_is_no_link(self):
        self.assertEqual(self.findings({"README.md": "`f[&](x)`\n```cpp\ng([&](y) { return y; });\n```\n"}), [])

    def test_missing_file(self):
        self.assertEqual(self.findings({"README.md": "\n[x](docs/none.md)\n"}),
                         ["README.md:2: docs/none.md leads nowhere"])

    def test_missing_heading(self):
        self.assertEqual(self.findings({"README.md": "# One\n[x](#two)\n"}),
                         ["README.md:2: #two: README.md has no such heading"])

    def test_unreachable_page(self):
        self.assertEqual(self.findings({"README.md": "# One\n", "docs/guide/a.md": "# A\n"}),
                         ["docs/guide/a.md:1: no link leads here from README.md"])

    def test_page_named_by_a_source(self):
        self.assertEqual(self.findings({"README.md": "", "halfstep/a.cpp": "// see\n// docs/a.md\n"}),
                         ["halfstep/a.cpp:2: there is no page docs/a.md"])


if __name__ == "__main__":
    unittest.main()
