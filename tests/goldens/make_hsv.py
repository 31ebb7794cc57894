# SPDX-License-Identifier: Apache-2.0
"""hsv.json: colours as OpenCV's 8-bit hue, saturation and value, and through three tables and back."""
import json
import pathlib

import cv2
import numpy

FACTORS = [(1, 1, 1), (1.0143, 1.62, 0.71), (0.987, 0.33, 1.4), (1.5, 0.0, 1.0), (0.2, 1.9, 0.05)]


def colours():
    steps = [0, 1, 51, 128, 200, 254, 255]
    grid = [(r, g, b) for r in steps for g in steps for b in steps]
    random = numpy.random.default_rng(18).integers(0, 256, (340, 3))
    return numpy.concatenate([numpy.array(grid), random]).astype(numpy.uint8)


def changed(rgb, hue, saturation, value):
    """As training pipelines do it: a table of 256 values for each channel, in float64, cut to whole numbers."""
    levels = numpy.arange(256, dtype=numpy.float64)
    tables = [(levels * hue) % 180, numpy.minimum(levels * saturation, 255), numpy.minimum(levels * value, 255)]
    channels = cv2.split(cv2.cvtColor(rgb[None], cv2.COLOR_RGB2HSV))
    mapped = [cv2.LUT(channel, table.astype(numpy.uint8)) for channel, table in zip(channels, tables)]
    return cv2.cvtColor(cv2.merge(mapped), cv2.COLOR_HSV2RGB)[0]


def main():
    rgb = colours()
    header = {"format": 1, "made_by": f"tests/goldens/make_hsv.py with OpenCV {cv2.__version__}"}
    entries = [{"factors": factors, "rgb": changed(rgb, *factors).tobytes().hex()} for factors in FACTORS]
    path = pathlib.Path(__file__).resolve().parent / "hsv.json"
    hsv = cv2.cvtColor(rgb[None], cv2.COLOR_RGB2HSV)[0]
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    path.write_text(f'{{"header":{json.dumps(header)},\n"colours":"{rgb.tobytes().hex()}",\n"hsv":"{hsv.tobytes().hex()}",\n'
                    f'"entries":[\n{lines}\n]}}\n',
                    encoding="utf-8")


if __name__ == "__main__":
    main()
