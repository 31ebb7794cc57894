#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares event files with what was written into them, as TensorBoard's own reader sees them.

usage: check_tensorboard.py FOLDER

FOLDER/expected.json tells what the event files of FOLDER/events hold:

    {"scalars": {TAG: [[WALL_TIME, STEP, VALUE]...]},
     "histograms": {TAG: [{"wall_time", "step", "min", "max", "num", "sum", "sum_squares",
                           "counts": [[LEFT, RIGHT, COUNT]...] of the buckets that aren't empty}...]}}

Prints what differs; exits with 1 if anything does.
"""
import json
import math
import pathlib
import sys

from tensorboard.backend.event_processing import event_accumulator
from tensorboard.backend.event_processing import event_file_loader


def main():
    folder = pathlib.Path(sys.argv[1])
    expected = json.loads((folder / "expected.json").read_text())
    files = sorted((folder / "events").iterdir())
    # The loader of TensorBoard's data server, which also turns histograms into what the page draws.
    for file in files:
        events = list(event_file_loader.EventFileLoader(str(file)).Load())
        if not events or events[0].file_version != "brain.Event:2":
            print(f"{file.name}: expected the file version first, got {events[:1]}")
            return 1
    everything = {"scalars": 0, "histograms": 0, "tensors": 0}
    reader = event_accumulator.EventAccumulator(str(folder / "events"), size_guidance=everything)
    reader.Reload()
    findings = []

    def compare(what, got, wanted):
        same = math.isclose(got, wanted, rel_tol=1e-12, abs_tol=0) or (math.isnan(got) and math.isnan(wanted))
        if not same:
            findings.append(f"{what}: expected {wanted}, got {got}")

    tags = reader.Tags()
    for kind in ("scalars", "histograms"):
        if sorted(tags[kind]) != sorted(expected[kind]):
            findings.append(f"{kind}: expected {sorted(expected[kind])}, got {sorted(tags[kind])}")
    for tag in sorted(set(tags["scalars"]) & set(expected["scalars"])):
        points = reader.Scalars(tag)
        if len(points) != len(expected["scalars"][tag]):
            findings.append(f"{tag}: expected {len(expected['scalars'][tag])} points, got {len(points)}")
        for point, (wall_time, step, value) in zip(points, expected["scalars"][tag]):
            compare(f"{tag}: wall time", point.wall_time, wall_time)
            compare(f"{tag}: step", point.step, step)
            compare(f"{tag}: value", point.value, math.nan if value is None else value)
    for tag in sorted(set(tags["histograms"]) & set(expected["histograms"])):
        points = reader.Histograms(tag)
        if len(points) != len(expected["histograms"][tag]):
            findings.append(f"{tag}: expected {len(expected['histograms'][tag])} histograms, got {len(points)}")
        for point, wanted in zip(points, expected["histograms"][tag]):
            h = point.histogram_value
            compare(f"{tag}: step", point.step, wanted["step"])
            compare(f"{tag}: wall time", point.wall_time, wanted["wall_time"])
            for name in ("min", "max", "num", "sum", "sum_squares"):
                compare(f"{tag}: {name}", getattr(h, name), wanted[name])
            lefts = [h.min, *h.bucket_limit[:-1]]
            backwards = [(left, right) for left, right in zip(lefts, h.bucket_limit) if left > right]
            if backwards:
                findings.append(f"{tag}: buckets that end before they begin: {backwards}")
            full = [(left, right, count) for left, right, count in zip(lefts, h.bucket_limit, h.bucket) if count]
            if len(full) != len(wanted["counts"]):
                findings.append(f"{tag}: expected {wanted['counts']}, got {full}")
                continue
            for (left, right, count), (least, most, number) in zip(full, wanted["counts"]):
                # Every value lies in its bucket, and the bucket is a tenth wide.
                if not (left <= least and (most < right or most == wanted["max"]) and count == number):
                    findings.append(f"{tag}: expected {number} values from {least} to {most}, got {left, right, count}")
                outermost = least == wanted["min"] or most == wanted["max"]
                if left * right > 0 and not 1 < max(left / right, right / left) < 1.1000001 and not outermost:
                    findings.append(f"{tag}: a bucket from {left} to {right}")
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
