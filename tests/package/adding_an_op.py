#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Follows adding-an-op.md in docs: adds its op to copies of the files that it names, compiles those, and runs the tests
that hold for every op with what came of it. The source tree and the build folder stay as they are.

usage: adding_an_op.py SOURCE BUILD NINJA COMPILER
"""
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

MOST_FILES = 6
# Behind what each file's blocks go, in the order of the page.
PLACES = {
    "halfstep/ops/activation.h": [r"^HS_API Tensor mish\(.*\n"],
    "halfstep/ops/activation.cpp": [r"^const Op& mish_op = (?:.*\n)*?    in\(0\)\);\n", r"^Tensor mish\(.*\n"],
    "halfstep/backends/cpu/activation.cpp": [r"^struct MishBackward (?:.*\n)*?^};\n", r"^ *op_of<MishBackward, .*\n"],
    "halfstep/amp/policy.cpp": [r'^ *\{"mish", .*\n'],
    "tests/support/op_cases.cpp": [r'^ *unary\("mish", .*\n'],
    "kernels.md": [r"^\| `prelu` \|.*\n"],  # wherever that is in docs
}
# What the tests below need besides: where they look for kernels.md is compiled in.
ALSO = ["tests/support/test_data.cpp"]
CHECKS = ["OpCases.EveryOpIsThereAndDifferentiable", "GradientsUnary.MatchDifferences", "SixteenBitsUnary.RoundOnce",
          "KernelDocs.HaveEveryKernel", "KernelDocs.NameTheAttributesAndTheKeyInput"]
PROGRAM = r"""
#include <cmath>
#include <cstdio>

#include "halfstep/amp/policy.h"
#include "halfstep/autograd/engine.h"
#include "halfstep/ops/activation.h"
#include "halfstep/ops/create.h"
#include "halfstep/ops/reduce.h"

using namespace halfstep;

int main() {
  const double values[] = {-3, -0.25, 0, 1, 4};
  const Tensor x = tensor({-3, -0.25, 0, 1, 4}, {.dtype = f64, .requires_grad = true});
  const Tensor y = softsign(x);
  sum(y).backward();
  const auto got = y.detach().to_vector<double>(), slope = x.grad().to_vector<double>();
  for (int i = 0; i < 5; ++i) {
    // A quotient, and two in the gradient: a unit in the last place each.
    const double d = 1 + std::fabs(values[i]);
    if (std::fabs(got[i] - values[i] / d) > 0x1p-52 || std::fabs(slope[i] - 1 / (d * d)) > 0x1p-51) {
      std::printf("softsign(%g) is %.17g with slope %.17g\n", values[i], got[i], slope[i]);
      return 1;
    }
  }
  const auto rows = amp::policy_table();
  for (const Op* op : all_ops()) {
    bool found = false;
    for (const auto& row : rows) found = found || row.op == op->name;
    if (!found) std::printf("%s has no policy\n", op->name);
    if (!found) return 1;
  }
  std::puts("softsign is as the page says");
  return 0;
}
"""


def in_docs(source, name):
    return next((source / "docs").rglob(name)).relative_to(source)


def page(source):
    """The blocks of the page by the file under whose heading they are, in order."""
    blocks = {}
    text = (source / in_docs(source, "adding-an-op.md")).read_text()
    for name, section in re.findall(r"^## \d+\. `([^`]+)`\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL):
        blocks[name] = re.findall(r"^```(?:c\+\+|text)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return blocks


def patched(source, scratch):
    blocks = page(source)
    assert len(blocks) <= MOST_FILES, f"the page names {len(blocks)} files, {MOST_FILES} at most are promised"
    all_places = {str(in_docs(source, n)) if n.endswith(".md") else n: p for n, p in PLACES.items()}
    assert list(blocks) == list(all_places), f"the page's files are {list(blocks)}, this test's {list(all_places)}"
    for name, places in all_places.items():
        text = (source / name).read_text()
        assert len(places) == len(blocks[name]), f"{name}: {len(blocks[name])} blocks, expected {len(places)}"
        for place, block in zip(places, blocks[name]):
            found = list(re.finditer(place, text, re.MULTILINE))
            assert len(found) == 1, f"{name}: {len(found)} places match {place}, expected one"
            text = text[: found[0].end()] + block + text[found[0].end() :]
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).write_text(text)
    for name in ALSO:
        (scratch / name).write_text((source / name).read_text())
    (scratch / "tests/goldens").mkdir()


def run(command, **options):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                            **options)
    if result.returncode != 0:
        sys.exit(f"{shlex.join(command)}\n{result.stdout[-6000:]}")
    return result.stdout


class Build:
    def __init__(self, source, build, scratch, ninja):
        self.source, self.build, self.scratch, self.ninja = source, build, scratch, ninja
        entries = json.loads((build / "compile_commands.json").read_text())
        self.entries = {}
        for entry in entries:
            file = pathlib.Path(entry["file"]).resolve()
            if self.is_group(file):
                names = re.findall(r'(?m)^#include "(.+)"', file.read_text())
            else:
                names = [str(file)]
            for name in map(pathlib.Path, names):
                if name.is_relative_to(source):
                    self.entries[str(name.relative_to(source))] = entry

    def is_group(self, file):
        """Whether several source files are compiled as this one."""
        return file.name.startswith("unity_") or file.is_relative_to(self.build / "groups")

    def compile(self, name):
        """Compiles a file of the scratch folder as the build does, with those that the build compiles it with; returns
        the build's object and the new one."""
        entry = self.entries[name]
        file = self.scratch / name
        given = pathlib.Path(entry["file"]).resolve()
        if self.is_group(given):
            file = self.scratch / given.name
            # A group of vector kernels names itself, too.
            text = given.read_text().replace(f'"{entry["file"]}"', f'"{file}"')
            for place in [*PLACES, *ALSO]:
                text = text.replace(f'"{self.source / place}"', f'"{self.scratch / place}"')
            file.write_text(text)
        command = shlex.split(entry["command"])
        folder = pathlib.Path(entry["directory"])
        at = command.index("-o") + 1
        theirs, ours = command[at], str(self.scratch / (name.replace("/", "_") + ".o"))
        command[at] = ours
        command[command.index("-c") + 1] = str(file)
        define = 'HALFSTEP_SOURCE_DIR="{}"'
        command = [c.replace(define.format(self.source), define.format(self.scratch)) for c in command]
        # Copies come before what they are copies of.
        command.insert(1, f"-I{self.scratch}")
        run(command, cwd=folder)
        return theirs, ours

    def link(self, target, others, output, first=()):
        """Links a target of the build to `output`: with others in the place of what it is made of, and `first`."""
        text = run([self.ninja, "-C", str(self.build), "-t", "commands", "-s", target]).strip().splitlines()[-1]
        text = next(part for part in text.split(" && ") if re.search(r" -o \S", part))
        command = shlex.split(text)
        command = [others.get(c, c) for c in command]
        at = command.index("-o") + 1
        command[at] = str(output)
        command[at + 1 : at + 1] = [str(f) for f in first]
        run(command, cwd=self.build)


def main():
    source, build = (pathlib.Path(a).resolve() for a in sys.argv[1:3])
    ninja, compiler = sys.argv[3:]
    with tempfile.TemporaryDirectory(prefix="halfstep-adding-an-op-") as folder:
        scratch = pathlib.Path(folder)
        patched(source, scratch)
        made = Build(source, build, scratch, ninja)
        objects = dict(made.compile(n) for n in PLACES if n.endswith(".cpp") and n.startswith("halfstep/"))
        (scratch / "lib").mkdir()
        library = next((build / "lib").glob("libhalfstep.so.*.*.*")).name
        made.link(f"lib/{library}", objects, scratch / "lib" / library)
        (scratch / "lib" / library.rsplit(".", 1)[0]).symlink_to(library)
        environment = {**os.environ, "LD_LIBRARY_PATH": str(scratch / "lib")}
        # The tests that hold for every op.
        cases = [made.compile(n)[1] for n in ["tests/support/op_cases.cpp", *ALSO]]
        made.link("tests/test_ops", {f"lib/{library}": str(scratch / "lib" / library)}, scratch / "test_ops", cases)
        printed = run([str(scratch / "test_ops"), f"--gtest_filter={':'.join(CHECKS)}"], env=environment)
        print(printed[-1500:])
        # A name that no test has is no failure for the program.
        assert f"[  PASSED  ] {len(CHECKS)} tests." in printed, f"expected {len(CHECKS)} tests to pass: {', '.join(CHECKS)}"
        # What no test of the library can know: the op's values.
        (scratch / "program.cpp").write_text(PROGRAM)
        run([compiler, "-std=c++20", f"-I{scratch}", f"-I{source}", str(scratch / "program.cpp"), "-o",
             str(scratch / "program"), f"-L{scratch / 'lib'}", f"-l:{library}"])
        print(run([str(scratch / "program")], env=environment), end="")


if __name__ == "__main__":
    main()
