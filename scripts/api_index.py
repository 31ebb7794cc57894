#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lists all modules and ops by area, from the public headers: docs/reference/modules-and-ops.md.

usage: api_index.py            says what is missing or out of date, and exits with 1
       api_index.py --write    rewrites the page

An area is a header. An entry is a class that users make, or a function, with the first sentence of the comment above it;
functions that share a comment share a line. An entry without a comment is an error.
"""
from __future__ import annotations

import pathlib
import re
import sys
import textwrap

TOP = pathlib.Path(__file__).resolve().parent.parent
PAGE = TOP / "docs" / "reference" / "modules-and-ops.md"
INTRODUCTION = """\
# Modules and ops by area

All modules, ops, losses, optimizers and schedules, from the headers (`scripts/api_index.py --write` makes this page).
Parameters, shapes and errors are in the headers and in the API reference (`make docs`). The
[ops' precision policies](ops.md) are a page of their own. Everything is in namespace `halfstep` or the one in the
heading.
"""
# (folder, heading, namespace, headers in their order; others follow by name)
SECTIONS = [
    ("nn", "Modules", "nn", ["linear", "conv", "norm", "activation", "pooling", "embedding", "container", "loss"]),
    ("ops", "Ops", "", ["create", "random", "copy", "view", "join", "index", "sort", "arithmetic", "pointwise", "compare",
                        "reduce", "matmul", "einsum", "triangle", "activation", "softmax", "dropout", "norm", "norm_act",
                        "conv", "pool", "pad", "resample", "attention", "loss", "int8", "print"]),
    ("optim", "Optimizers, schedules, clipping and averages", "optim", ["sgd", "adam", "lbfgs", "schedule", "clip", "ema"]),
    ("quant", "Quantization-aware training", "quant", ["fake_quantize", "observer"]),
    ("dist", "Several processes", "dist", ["functional"]),
]
TITLES = {"linear": "Linear", "conv": "Convolution", "norm": "Normalisation", "activation": "Activation",
          "pooling": "Pooling and padding", "embedding": "Embedding", "container": "Containers", "loss": "Loss",
          "init": "Initialisation (`nn::init`)", "create": "Creation", "random": "Random numbers", "copy": "Copies",
          "view": "Views and shapes", "join": "Joining and splitting", "index": "Indexing",
          "sort": "Sorting and searching", "arithmetic": "Arithmetic", "pointwise": "Pointwise functions",
          "compare": "Comparison and logic", "reduce": "Reduction", "matmul": "Matrix products", "einsum": "Einsum",
          "triangle": "Triangles and diagonals", "softmax": "Softmax", "dropout": "Dropout",
          "norm_act": "Normalisation with activation", "pool": "Pooling", "pad": "Padding", "resample": "Resampling",
          "attention": "Attention", "int8": "Integers for inference", "print": "Printing", "sgd": "SGD", "adam": "Adam",
          "lbfgs": "L-BFGS",
          "schedule": "Learning-rate schedules", "clip": "Clipping", "ema": "Weight averages",
          "functional": "Collectives with gradients", "fake_quantize": "Fake quantization", "observer": "Observers"}
# What serves the library itself.
SKIPPED_HEADERS = {"module", "members", "op", "ops/observer", "recorder", "attributes", "attention_attributes", "ratio",
                   "index_detail", "reduce_inl", "optimizer", "create_detail"}
SKIPPED_NAMES = re.compile(r"_backward$|_unrecorded$|^(?:name|cast_op|cast|tensor_from_integers|arange_floating|sum_to|"
                           r"matrix_transpose|.*print_options)$")
SKIPPED_CLASSES = re.compile(r"(?:Options|Base|Result|State|Attributes|Report)$|^NamedModule$")
FUNCTION = re.compile(r"^HS_API\s+[\w:<>,&*\s]+?\b(\w+)\(")
CLASS = re.compile(r"^(?:class|struct)\s+(?:HS_API\s+)?(\w+)(?:\s+final)?\s*(?::|\{)")


def first_sentence(lines: list[str]) -> str:
    """Up to the full stop that ends the first sentence, or to an example; the rest of the comment may be long."""
    prose: list[str] = []
    for line in lines:
        if line.startswith("    "):
            break
        prose.append(line.strip())
    text = re.sub(r"\s+", " ", " ".join(prose)).strip().replace("halfstep::", "")
    match = re.search(r"\.(?= [A-Z`]|$)", text)
    text = text[:match.start()] if match else text
    return re.sub(r"(: see \w+|:)$", "", text)


def declared(line: str, modules: bool, folder: str) -> str:
    """The name that a line at file scope declares for users; empty for any other line."""
    function = None if modules else FUNCTION.match(line)
    if function and not SKIPPED_NAMES.search(function[1]):
        return function[1]
    kind = CLASS.match(line)
    if not kind or line.rstrip().endswith(";") and "{" not in line or SKIPPED_CLASSES.search(kind[1]):
        return ""
    made = re.search(r":\s*public\s+(?:(?:nn::)?Module<|ModuleBase|Optimizer|Schedule|Adam)", line)
    made = made or kind[1] in ("EMA", "Schedule", "ReduceLROnPlateau")
    return kind[1] if made and folder in ("nn", "optim", "quant") else ""


def paragraphs(header: pathlib.Path):
    """Runs of lines at file scope between blank lines; what stands in braces is left out."""
    run: list[str] = []
    depth = 0
    for line in header.read_text(encoding="utf-8").splitlines():
        if depth == 0 and line.strip():
            run.append(line)
        elif depth == 0 and run:
            yield run
            run = []
        if not re.match(r"namespace|}\s*// namespace", line):
            depth += re.sub(r"//.*", "", line).count("{") - re.sub(r"//.*", "", line).count("}")
    yield run


def entries(header: pathlib.Path, modules: bool) -> list[tuple[list[str], str]]:
    """(names, sentence) of what a header declares, in its order. A comment that stands alone in its paragraph is about
    all that follows; where a paragraph has several, each is about the next declaration, and in-place forms of it."""
    found: list[tuple[list[str], str]] = []
    for run in paragraphs(header):
        begins = [i for i, line in enumerate(run) if line.startswith("///") and (i == 0 or run[i - 1][:3] != "///")]
        comment: list[str] = []
        sentence, fresh = "", False
        for line in run:
            if line.startswith("///"):
                comment = comment + [line[4:]] if not fresh else [line[4:]]
                fresh = False
                sentence = first_sentence(comment)
                continue
            name = declared(line, modules, header.parent.name)
            if name and not any(name in names for names, _ in found):
                follows = bool(found) and fresh and (len(begins) == 1 or name.rstrip("_") in found[-1][0])
                if follows:
                    found[-1][0].append(name)
                elif fresh and found and not found[-1][1]:
                    found[-1][0].append(name)
                else:
                    found.append(([name], "" if fresh else sentence))
            fresh = fresh or not line.startswith("template")
        # The next paragraph begins with a comment of its own.
    return found


def undescribed(header: str, found: list[tuple[list[str], str]]) -> list[str]:
    """A line for each entry without a comment."""
    return [f"{header}: expected a /// comment above {', '.join(names)}, found none" for names, text in found if not text]


def page() -> tuple[str, list[str]]:
    """The whole page, and what has no description."""
    lines, missing = [INTRODUCTION], []
    for folder, heading, namespace, order in SECTIONS:
        lines.append(f"## {heading}" + (f" (`{namespace}::`)" if namespace else "") + "\n")
        stems = [h.stem for h in sorted((TOP / "halfstep" / folder).glob("*.h"))
                 if not h.stem.endswith("_internal") and not {h.stem, f"{folder}/{h.stem}"} & SKIPPED_HEADERS]
        for stem in [s for s in order if s in stems] + [s for s in stems if s not in order]:
            found = entries(TOP / "halfstep" / folder / f"{stem}.h", folder == "nn" and stem != "init")
            if not found:
                continue
            missing += undescribed(f"halfstep/{folder}/{stem}.h", found)
            lines.append(f"### {TITLES.get(stem, stem.replace('_', ' ').capitalize())}\n")
            for names, sentence in found:
                text = "- " + ", ".join(f"`{n}`" for n in names) + (": " + sentence if sentence else "")
                lines += textwrap.wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n", missing


def main() -> int:
    """Checks or writes."""
    text, missing = page()
    if missing:
        print("\n".join(missing))
        return 1
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        print("api_index: the page is what the headers say")
        return 0
    print(f"{PAGE.relative_to(TOP)} is out of date: scripts/api_index.py --write makes it again")
    return 1


if __name__ == "__main__":
    sys.exit(main())
