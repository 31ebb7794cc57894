#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails when something public has no documentation, from Doxygen's XML.

usage: check_docs.py XML_DIR
       check_docs.py --build OUT   (from the project's root: runs Doxygen into OUT first)

Every class, function, field, type and enumeration of the public headers needs a comment. One comment may head a run of
declarations down to the next blank line. None is needed for what it would only repeat: constructors, destructors and
operators of a documented class, overloads of a documented function, overriding functions, specialisations, values of a
documented enumeration, fields of an op's attributes, and the members that make a container one.
"""
import collections
import functools
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree


CONTAINER = {"begin", "end", "size", "empty", "data", "front", "back", "push_back", "pop_back", "get", "retain", "release",
             "use_count"}


@functools.cache
def lines_of(file):
    return pathlib.Path(file).read_text(encoding="utf-8").splitlines()


def headed_by_comment(element):
    """Whether a /// comment stands above it with no blank line between."""
    location = element.find("location")
    if location is None:
        return False
    lines = lines_of(location.get("file"))
    for line in reversed(lines[:int(location.get("line"))]):
        if not line.strip():
            return False
        if line.lstrip().startswith(("///", "/*", "*")) or "///<" in line or "/* " in line:
            return True
    return False


def documented(element):
    return any("".join(part.itertext()).strip()
               for tag in ("briefdescription", "detaileddescription", "inbodydescription") for part in element.findall(tag))


def place(element):
    location = element.find("location")
    return f"{location.get('file')}:{location.get('line')}" if location is not None else "?"


def needs_no_comment(member, class_name, documented_names):
    name = member.findtext("name")
    if name in documented_names or name.startswith("operator") or name.lstrip("~") == class_name:
        return True
    if name in CONTAINER or "<" in name or headed_by_comment(member):
        return True
    if member.find("reimplements") is not None or "override" in (member.findtext("argsstring") or ""):
        return True
    return member.get("kind") == "variable" and class_name.endswith(("Attributes", "_attributes"))


def check(xml):
    findings = set()
    index = ElementTree.parse(xml / "index.xml").getroot()
    for entry in index.findall("compound"):
        if entry.get("kind") not in ("class", "struct", "union", "namespace"):
            continue
        compound = ElementTree.parse(xml / (entry.get("refid") + ".xml")).getroot().find("compounddef")
        if compound.get("prot") == "private":
            continue
        scope = compound.findtext("compoundname")
        class_name = scope.split("::")[-1].split("<")[0].strip() if compound.get("kind") != "namespace" else ""
        if class_name and "<" not in scope and not documented(compound) and not headed_by_comment(compound):
            findings.add(f"{place(compound)}: {compound.get('kind')} {scope} has no comment")
        members = collections.OrderedDict((m.get("id"), m) for m in compound.iter("memberdef"))
        documented_names = {m.findtext("name") for m in members.values() if documented(m)}
        for member in members.values():
            if member.get("prot") != "public" or member.get("kind") not in ("function", "variable", "typedef", "enum"):
                continue
            if not documented(member) and not needs_no_comment(member, class_name, documented_names):
                name = member.findtext("name") or "(unnamed)"
                findings.add(f"{place(member)}: {member.get('kind')} {scope}::{name} has no comment")
    return sorted(findings)


def main():
    build = len(sys.argv) == 3 and sys.argv[1] == "--build"
    if not build and len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = pathlib.Path(sys.argv[-1])
    if build:
        folder.mkdir(parents=True, exist_ok=True)
        if subprocess.run(["doxygen", "docs/Doxyfile"], env=dict(os.environ, HALFSTEP_DOCS=str(folder))).returncode:
            return 1
        folder /= "xml"
    findings = check(folder)
    for finding in findings:
        print(finding)
    if findings:
        print(f"check_docs: {len(findings)} public names without a comment", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
