#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the rules of the source tree that a compiler doesn't know.

usage: check_layers.py [--root DIR]

- a layer includes only layers to its left in LAYERS; a backend includes core, runtime and the op declarations;
  nothing includes a backend; what CUDA's folders include of each other goes to the left in CUDA_FOLDERS;
- a public header includes the C++ standard library and public headers of the project only;
- dnnl.hpp is included by one file pair;
- the library takes no address of a tensor for good, which would end what is kept of a user's weights: it reads by
  const_raw_data() and data<const T>(), and writes by write_data() of core/write_internal.h;
- messages show paths by shown_path() of core/text.h, which lets no byte of a name reach a terminal, not by string();
- sources are shorter than MAX_LINES, start with the SPDX line, and headers with #pragma once;
- no line of Markdown is wider than MAX_COLUMNS characters, outside tables, headings, HTML and blocks marked text, which
  show what programs print; a single link or code span that is wider by itself may stand alone;
- no file names a path of one person's machine, and none holds words that mark unfinished work.

Prints one line a finding, as `file:line: what`, and exits with 1 if there is any.
"""
import argparse
import pathlib
import re
import sys

# Left to right: each may include those before it.
LAYERS = ["core", "runtime", "ops", "autograd", "capture", "amp", "debug", "nn", "optim", "quant", "data", "models",
          "dist", "io", "train", "infer", "conformance", "cli"]
# What a backend may include of the project besides its own folder.
BACKEND_LAYERS = {"core", "runtime"}
BACKEND_HEADERS = {"halfstep/ops/op.h", "halfstep/ops/attributes.h", "halfstep/dist/mpi_table_internal.h"}
# Headers that are not installed, and so may use third-party libraries; public headers may not include them.
INTERNAL_HEADER = re.compile(r"^halfstep/(core/fail\.h|backends/.*|.*-inl\.h|.*_internal\.h)$|^(?!halfstep/)")
C_HEADERS_FOR_C_INTERFACES = {"stddef.h", "stdint.h", "stdbool.h"}
# The folders of the CUDA plug-in, from left to right as the layers are; plugin.cpp beside them includes all.
CUDA = "halfstep/backends/cuda"
CUDA_FOLDERS = ["host", "libraries", "device", "kernels"]
MAX_LINES = 600
MAX_COLUMNS = 120
# Blocks of this language show what programs print, whose lines have the width that they have.
OUTPUT = "text"
# What prose is not broken inside of.
CODE_SPAN_OR_LINK = re.compile(r"(`+).+?\1|\[[^\]]*\]\([^)]*\)|<[^>]*>")
# Only Tensor itself gives addresses away.
ADDRESS = re.compile(r"(?:\.|->)(?:raw_data\(\)|data<(?!const\b))")
TAKES_NO_ADDRESS = re.compile(r"^(?:halfstep/(?!core/)|cli/)")

# What is thrown, printed or logged, and literals, whose parentheses don't count.
MESSAGE = re.compile(r"\b(?:fail<\w+>|throw\s+(?:\w+::)*\w+|complain|print_line|say|fmt::print|log|log_once)\s*\(")
LITERAL = re.compile(r'R"\(.*?\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*', re.DOTALL)
SHOWS_RAW_PATH = re.compile(r"\.(?:string|native|generic_string)\(\)")

SPDX = "SPDX-License-Identifier: Apache-2.0"
CODE = {".h", ".c", ".cpp", ".cu", ".cuh"}
WITH_SPDX = CODE | {".py", ".sh", ".cmake", ".in"}
TEXT = WITH_SPDX | {".md", ".txt", ".yaml", ".yml"}
FOLDERS = ["halfstep", "cli", "examples", "tests", "benchmarks", "fuzz", "scripts", "cmake", "docs", ".ci"]
TOP_FILES = ["CMakeLists.txt", "Makefile", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]')
MACHINE_PATH = re.compile(r"(?:^|[^A-Za-z0-9_.])/(?:work|root|home/[a-z]+|Users)/")
UNFINISHED = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")


def layer_of(path):
    """The layer that a file or an included path belongs to: 'ops', 'backends/cpu', 'cli', or '' for none."""
    parts = path.split("/")
    if parts[0] == "cli":
        return "cli"
    if parts[0] != "halfstep" or len(parts) < 3:
        return ""
    if parts[1] == "backends":
        return "/".join(parts[1:3]) if len(parts) > 3 else "backends"
    return parts[1]


def cuda_problem(path, included):
    """The same as include_problem for a header that the CUDA plug-in names from its own folder on."""
    folder, other = path[len(CUDA) + 1:].split("/")[0], included.split("/")[0]
    if folder not in CUDA_FOLDERS or other not in CUDA_FOLDERS:
        return ""
    return f"{other} stands to the right of {folder}" if CUDA_FOLDERS.index(other) > CUDA_FOLDERS.index(folder) else ""


def include_problem(path, included):
    """Why the file at `path` may not include the project's header `included`; empty if it may."""
    if path.startswith(CUDA + "/") and not included.startswith("halfstep/"):
        return cuda_problem(path, included)
    own, other = layer_of(path), layer_of(included)
    if own == other or not other:
        return ""
    if other.startswith("backends"):
        # Tests and benchmarks of a kernel may look inside; the library, the program and its users may not.
        return "nothing includes a backend" if path.startswith(("halfstep/", "cli/", "examples/")) else ""
    if own.startswith("backends"):
        if other in BACKEND_LAYERS or included in BACKEND_HEADERS:
            return ""
        return "a backend includes core, runtime and the op declarations only"
    if not own:
        return ""
    for layer in (own, other):
        if layer not in LAYERS:
            return f"'{layer}' is not a layer"
    if LAYERS.index(other) > LAYERS.index(own):
        return f"{other} stands to the right of {own}"
    return ""


def check_messages(lines, report):
    # Literals become as long a nothing, so that lines keep their numbers.
    code = LITERAL.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), "\n".join(lines))
    for call in MESSAGE.finditer(code):
        end, depth = call.end(), 1
        while depth > 0 and end < len(code):
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        for raw in SHOWS_RAW_PATH.finditer(code, call.end(), end):
            report(code.count("\n", 0, raw.start()) + 1, "a message shows a path as it is; use shown_path()")


def check_code(path, lines, report, dnnl_users):
    header = path.endswith((".h", ".cuh"))
    public = path.startswith("halfstep/") and header and not INTERNAL_HEADER.match(path)
    if len(lines) > MAX_LINES:
        report(1, f"{len(lines)} lines; split it by what it is about (limit {MAX_LINES})")
    if header and not path.endswith("-inl.h") and "#pragma once" not in lines:
        report(1, "header without #pragma once")
    if path.startswith(("halfstep/", "cli/")):
        check_messages(lines, report)
    for number, line in enumerate(lines, 1):
        if TAKES_NO_ADDRESS.match(path) and ADDRESS.search(line) and not line.lstrip().startswith("//"):
            report(number, "takes a tensor's address for good; read by const_raw_data() or data<const T>(), write by "
                           "write_data() of core/write_internal.h")
        match = INCLUDE.match(line)
        if not match:
            continue
        bracket, included = match.groups()
        if re.match(r"(oneapi/dnnl/)?dnnl[a-z_]*\.hp*$", included):
            dnnl_users.setdefault(re.sub(r"\.[a-z]+$", "", path), (path, number))
        if bracket == '"' or included.startswith("halfstep/"):
            problem = include_problem(path, included)
            if problem:
                report(number, f"includes {included}: {problem}")
            if public and INTERNAL_HEADER.match(included):
                report(number, f"public header includes {included}, which is not installed")
        elif public and re.search(r"[./]", included) and included not in C_HEADERS_FOR_C_INTERFACES:
            report(number, f"public header includes <{included}>; third-party headers belong in .cpp files")


def check_markdown(lines, report):
    fence = language = ""
    for number, line in enumerate(lines, 1):
        text = line.lstrip(" ")
        if text.startswith(fence or ("```", "~~~")):
            fence, language = ("", "") if fence else (text[:3], text[3:].strip())
        elif fence and language != OUTPUT and len(line) > MAX_COLUMNS:
            report(number, f"{len(line)} columns of code; break the line (limit {MAX_COLUMNS}), or mark output as {OUTPUT}")
        if fence or len(line) <= MAX_COLUMNS or text.startswith(("|", "#", "<", "```", "~~~")):
            continue
        words = CODE_SPAN_OR_LINK.sub("x", text.lstrip("-*>0123456789. ")).split()
        if len(words) > 1:
            report(number, f"{len(line)} columns of prose; break the line (limit {MAX_COLUMNS})")


def check_file(root, file, findings, dnnl_users):
    path = file.relative_to(root).as_posix()

    def report(number, what):
        findings.append(f"{path}:{number}: {what}")

    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        report(1, "is not UTF-8")
        return
    suffix = file.suffix
    if suffix in WITH_SPDX or file.name in ("CMakeLists.txt", "Makefile"):
        start = 1 if lines and lines[0].startswith("#!") else 0
        if len(lines) <= start or SPDX not in lines[start]:
            report(start + 1, f"the first line should hold '{SPDX}'")
    for number, line in enumerate(lines, 1):
        if MACHINE_PATH.search(line):
            report(number, "names a path of one machine")
        if UNFINISHED.search(line):
            report(number, "holds a word that marks unfinished work")
    if suffix == ".md":
        check_markdown(lines, report)
    if suffix in CODE:
        check_code(path, lines, report, dnnl_users)


def check_tree(root):
    findings, dnnl_users = [], {}
    files = [root / name for name in TOP_FILES if (root / name).is_file()]
    for folder in FOLDERS:
        files += sorted(f for f in (root / folder).rglob("*")
                        if f.is_file() and (f.suffix in TEXT or f.name == "run") and "corpus" not in f.parts
                        and "__pycache__" not in f.parts)
    for file in files:
        check_file(root, file, findings, dnnl_users)
    if len(dnnl_users) > 1:
        for path, number in dnnl_users.values():
            findings.append(f"{path}:{number}: includes oneDNN; one file pair does so, here are {len(dnnl_users)}")
    return findings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    findings = check_tree(parser.parse_args().root.resolve())
    for finding in findings:
        print(finding)
    if findings:
        print(f"check_layers: {len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
