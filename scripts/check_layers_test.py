#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_layers.py must find each kind of mistake, and nothing in a tree that keeps the rules."""
import pathlib
import tempfile
import unittest

import check_layers

SPDX = "// SPDX-License-Identifier: Apache-2.0\n"
HEADER = SPDX + "#pragma once\n"


def findings(files):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return check_layers.check_tree(root)


class CheckLayers(unittest.TestCase):
    def expect(self, files, *parts):
        found = findings(files)
        self.assertEqual(len(found), len(parts), found)
        for line, part in zip(found, parts):
            self.assertIn(part, line)

    def test_a_tree_that_keeps_the_rules(self):
        self.expect({
            "halfstep/core/tensor.h": HEADER + "#include <vector>\n",
            "halfstep/ops/add.h": HEADER + '#include "halfstep/core/tensor.h"\n',
            "halfstep/amp/autocast.cpp": SPDX + '#include "halfstep/ops/add.h"\n#include <fmt/format.h>\n',
            "halfstep/backends/cpu/add.cpp":
                SPDX + '#include "halfstep/ops/op.h"\n#include "halfstep/backends/cpu/gemm.h"\n#include <hwy/highway.h>\n',
            "halfstep/halfstep.h": HEADER + '#include "halfstep/train/trainer.h"\n',
            "tests/amp/autocast_test.cpp": SPDX + '#include "halfstep/backends/cpu/gemm.h"\n',
        })

    def test_a_layer_to_the_right(self):
        self.expect({"halfstep/core/tensor.h": HEADER + '#include "halfstep/ops/add.h"\n'},
                    "core/tensor.h:3: includes halfstep/ops/add.h: ops stands to the right of core")

    def test_an_unknown_layer(self):
        self.expect({"halfstep/util/x.h": HEADER + '#include "halfstep/core/tensor.h"\n'}, "'util' is not a layer")

    def test_backends(self):
        self.expect({"halfstep/train/x.cpp": SPDX + '#include "halfstep/backends/cpu/gemm.h"\n'},
                    "nothing includes a backend")
        self.expect({"halfstep/backends/cpu/x.cpp": SPDX + '#include "halfstep/ops/add.h"\n'},
                    "a backend includes core, runtime and the op declarations only")
        self.expect({"halfstep/backends/cpu/x.cpp": SPDX + '#include "halfstep/backends/sim/queue.h"\n'},
                    "nothing includes a backend")

    def test_folders_of_the_cuda_plugin(self):
        cuda = "halfstep/backends/cuda/"
        self.expect({cuda + "plugin.cpp": SPDX + '#include "kernels/copy.h"\n',
                     cuda + "kernels/copy.cu": SPDX + '#include "device/view.h"\n#include "kernels/copy.h"\n',
                     cuda + "libraries/blas.cpp": SPDX + '#include "host/device.h"\n'})
        self.expect({cuda + "device/view.h": HEADER + '#include "kernels/copy.h"\n'},
                    "view.h:3: includes kernels/copy.h: kernels stands to the right of device")
        self.expect({cuda + "host/device.cpp": SPDX + '#include "libraries/blas.h"\n'},
                    "libraries stands to the right of host")

    def test_third_party_headers(self):
        self.expect({"halfstep/core/x.h": HEADER + "#include <fmt/format.h>\n"}, "includes <fmt/format.h>")
        self.expect({"halfstep/core/x.h": HEADER + '#include "halfstep/core/fail.h"\n'}, "which is not installed")
        self.expect({"halfstep/backends/cpu/a.cpp": SPDX + "#include <dnnl.hpp>\n",
                     "halfstep/backends/cpu/b.cpp": SPDX + "#include <oneapi/dnnl/dnnl.hpp>\n"},
                    "includes oneDNN", "includes oneDNN")

    def test_addresses_of_tensors(self):
        for text in ("auto* p = t.data<float>();", "auto* p = t->raw_data();", "t.data<T>()[0] = 1;"):
            self.expect({"halfstep/io/x.cpp": SPDX + text + "\n"}, "x.cpp:2: takes a tensor's address for good")
            self.expect({"cli/x.cpp": SPDX + text + "\n"}, "x.cpp:2: takes a tensor's address for good")
            self.expect({"halfstep/core/x.cpp": SPDX + text + "\n", "tests/io/x_test.cpp": SPDX + text + "\n"})
        self.expect({"halfstep/io/x.cpp": SPDX + "t.data<const T>();\nt.const_raw_data();\nto.set_raw_data(t);\n"
                                                 "write_data<T>(t);\n/// t.data<float>()\n"})

    def test_paths_in_messages(self):
        for text in ('fail<IoError>("{}: no (file", path.string());', 'throw IoError(\nfmt::format("{}", a.path().string()));',
                     'complain(o.file.native());', 'print_line(fmt::format("{}", f(x).string()));'):
            self.expect({"cli/x.cpp": SPDX + text + "\n"}, "a message shows a path as it is")
        self.expect({"halfstep/io/x.cpp": SPDX + "\n\nlog(LogLevel::warning,\n    path.string());\n"}, "x.cpp:5: a message")
        self.expect({"cli/x.cpp": SPDX + 'fail<IoError>("{}", shown_path(p));\nconst auto s = p.string();\n'
                                         "// fail<IoError>(p.string())\nfail(')', \"(\");\nopen(p.string());\n",
                     "tests/io/x_test.cpp": SPDX + "fail<IoError>(p.string());\n"})

    def test_the_files_themselves(self):
        self.expect({"halfstep/core/x.h": SPDX}, "#pragma once")
        self.expect({"halfstep/core/x.cpp": "int x;\n"}, "SPDX")
        self.expect({"halfstep/core/x.cpp": SPDX + "\n" * 600}, "601 lines")
        self.expect({"scripts/x.py": "#!/usr/bin/env python3\n"}, "SPDX")
        self.expect({"docs/x.md": "see /ro" "ot/x\n"}, "a path of one machine")
        self.expect({"halfstep/core/x.cpp": SPDX + "// TO" "DO: more\n"}, "unfinished work")

    def test_the_width_of_code_in_markdown(self):
        wide = "x" * 121
        for start, end in (("```cpp", "```"), ("```sh", "```"), ("```console", "```"), ("```", "```"), ("~~~", "~~~"),
                           ("  ```cpp", "  ```")):
            self.expect({"docs/x.md": f"{start}\nshort\n{wide}\n{end}\n"}, "x.md:3: 121 columns of code; break the line")
            self.expect({"docs/x.md": f"{start}\n{wide[1:]}\n{end}\n"})
        # What programs print stays as it is.
        self.expect({"docs/x.md": "```text\n" + wide + "\n```\n"})
        # What would be a heading or a table in prose is none in code.
        self.expect({"docs/x.md": "```sh\n# " + wide + "\n```\n"}, "123 columns of code")
        self.expect({"docs/x.md": "```cpp\n| " + wide + "\n```\n"}, "123 columns of code")
        # Characters, not bytes.
        self.expect({"docs/x.md": "```sh\n" + "\u2026" * 120 + "\n```\n"})
        self.expect({"docs/x.md": "```sh\n" + "\u2026" * 121 + "\n```\n"}, "121 columns of code")

    def test_the_width_of_prose(self):
        words, span, link = "word " * 24 + "x", "`" + "c " * 70 + "`", "[t](https://x.org/" + "p" * 120 + ")"
        self.assertEqual(len(words), 121)
        for line in (words, "- " + words, "> " + words, "1. " + link + " word", "word " + span, "- x\n  " + words):
            self.expect({"docs/x.md": line + "\n"}, "columns of prose")
            self.expect({"README.md": "```cpp\nint x;\n```\n" + line + "\n"}, "columns of prose")
            self.expect({"README.md": "```text\n~~~\n" + line + "\n```\n"})
        for line in (words[1:], "| " + words + " |", "# " + words, "<!-- " + words + " -->", "- " + span, "1. " + link):
            self.expect({"docs/x.md": line + "\n"})


if __name__ == "__main__":
    unittest.main()
