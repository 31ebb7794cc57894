# SPDX-License-Identifier: Apache-2.0
"""The pictures that the loader's row reads."""
from __future__ import annotations

import os
import pathlib

WIDTH, HEIGHT = 500, 375


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height that a JPEG file's frame header has; None for anything else."""
    at = 2
    if data[:2] != b"\xff\xd8":
        return None
    while at + 9 <= len(data) and data[at] == 0xFF:
        kind = data[at + 1]
        if kind == 0xFF:  # fill
            at += 1
            continue
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 7:at + 9], "big"), int.from_bytes(data[at + 5:at + 7], "big")
        at += 2 + int.from_bytes(data[at + 2:at + 4], "big")
    return None


def find_pictures(top: pathlib.Path, scratch: pathlib.Path) -> tuple[pathlib.Path | None, str]:
    """The folder of pictures, and, where there is none, why.

    It is the one that HALFSTEP_BENCH_IMAGES names; else `scratch`, with links to the 500x375 photographs of
    images/imagenet-sample in the folder HALFSTEP_DATA, or in ../shared/data beside the checkout.
    """
    named = os.environ.get("HALFSTEP_BENCH_IMAGES")
    if named:
        return (pathlib.Path(named).resolve(), "") if pathlib.Path(named).is_dir() else (None, f"HALFSTEP_BENCH_IMAGES: no folder {named}")
    data = pathlib.Path(os.environ.get("HALFSTEP_DATA") or top.parent / "shared" / "data")
    for path in sorted((data / "images" / "imagenet-sample").glob("*.JPEG")):
        if jpeg_size(path.read_bytes()) == (WIDTH, HEIGHT):
            (scratch / path.name).symlink_to(path.resolve())
    if any(scratch.iterdir()):
        return scratch, ""
    return None, ("The picture loader is not measured: HALFSTEP_BENCH_IMAGES names no folder of JPEG files (500x375 for figures that "
                  "compare), and there are none under HALFSTEP_DATA.")
