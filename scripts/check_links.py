#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the links of the documentation.

usage: check_links.py [--root DIR]

- a relative link of a Markdown page leads to a file or folder, and its anchor to a heading of that page;
- every page below docs/ can be reached from README.md;
- a page that a source file or a message names as docs/FOLDER/PAGE.md exists.

Prints one line a finding, as `file:line: what`, and exits with 1 if there is any.
"""
import argparse
import pathlib
import re
import sys

# Code spans may hold brackets and parentheses side by side, which are no links.
CODE = re.compile(r"^```.*?^```[^\n]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
MENTION = re.compile(r"(?<![\w./-])docs/[\w./-]+\.md\b")
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
SOURCES = ["halfstep", "cli", "examples", "tests", "benchmarks", "fuzz", "scripts", "cmake"]
SOURCE_SUFFIXES = {".h", ".c", ".cpp", ".cu", ".cuh", ".py", ".sh", ".cmake", ".txt"}


def blank(match):
    """The same number of characters and lines without what they say."""
    return re.sub(r"[^\n]", " ", match[0])


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    fences = re.compile(r"^```.*?^```[^\n]*$", re.MULTILINE | re.DOTALL)
    for heading in HEADING.findall(fences.sub(blank, text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (numbered := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.add(numbered)
    return found


def links(text):
    """(line, target) of each link that is relative."""
    for match in LINK.finditer(CODE.sub(blank, text)):
        if not re.match(r"[a-z][a-z0-9+.-]*:", match[1]):
            yield text.count("\n", 0, match.start()) + 1, match[1]


def check(root):
    findings, reached = [], {}
    folder = root / "docs"
    pages = [root / name for name in PAGES if (root / name).exists()] + sorted(folder.rglob("*.md"))
    texts = {page.resolve(): page.read_text(encoding="utf-8") for page in pages}
    for page, text in texts.items():
        name = page.relative_to(root.resolve())
        reached[page] = set()
        for line, target in links(text):
            path, _, anchor = target.partition("#")
            to = (page.parent / path).resolve() if path else page
            if not to.exists():
                findings.append(f"{name}:{line}: {target} leads nowhere")
            elif anchor and to in texts and anchor not in anchors(texts[to]):
                findings.append(f"{name}:{line}: {target}: {to.name} has no such heading")
            reached[page].add(to)
    seen, ahead = set(), [(root / "README.md").resolve()]
    while ahead:
        page = ahead.pop()
        if page in reached and page not in seen:
            seen.add(page)
            ahead += reached[page]
    findings += [f"{page.relative_to(root.resolve())}:1: no link leads here from README.md"
                 for page in texts if page not in seen and folder.resolve() in page.parents]
    for source in sorted(file for top in SOURCES for file in (root / top).rglob("*")):
        if source.suffix not in SOURCE_SUFFIXES or not source.is_file() or "results" in source.parts:
            continue
        if source.name.startswith(("check_links", "check_layers_test")):
            continue  # their examples
        text = source.read_text(encoding="utf-8", errors="replace")
        for match in MENTION.finditer(text):
            if not (root / match[0]).exists():
                line = text.count("\n", 0, match.start()) + 1
                findings.append(f"{source.relative_to(root)}:{line}: there is no page {match[0]}")
    return findings


def main():
    parser = argparse.ArgumentParser(description="Check the links of the documentation.")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    findings = check(parser.parse_args().root)
    print("\n".join(findings) if findings else "check_links: every link leads somewhere")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
