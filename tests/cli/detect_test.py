# SPDX-License-Identifier: Apache-2.0
"""`halfstep predict` with detectors: files, flags and faults, with weights whose boxes are known."""
import json
import math
import os
import re
import struct
import unittest
import zlib

from detection_test import make_boxes
from program import ProgramTest

CLASSES, ANCHORS = 3, [[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119], [116, 90, 156, 198, 373, 326]]
NAMES = "platelet\nred cell\nwhite, cell\n"


def layers():
    """Names and sizes of the tensors of YOLOv5n: depth 0.33, width 0.25 (docs of the published networks)."""
    def conv(name, inputs, outputs, kernel):
        yield f"{name}.conv.weight", [outputs, inputs, kernel, kernel]
        for part in ("weight", "bias", "running_mean", "running_var"):
            yield f"{name}.bn.{part}", [outputs]
        yield f"{name}.bn.num_batches_tracked", []

    def csp(name, inputs, outputs, blocks):
        half = outputs // 2
        yield from conv(f"{name}.cv1", inputs, half, 1)
        yield from conv(f"{name}.cv2", inputs, half, 1)
        yield from conv(f"{name}.cv3", outputs, outputs, 1)
        for i in range(blocks):
            yield from conv(f"{name}.m.{i}.cv1", half, half, 1)
            yield from conv(f"{name}.m.{i}.cv2", half, half, 3)

    yield from conv("model.0", 3, 16, 6)
    yield from conv("model.1", 16, 32, 3)
    yield from csp("model.2", 32, 32, 1)
    yield from conv("model.3", 32, 64, 3)
    yield from csp("model.4", 64, 64, 2)
    yield from conv("model.5", 64, 128, 3)
    yield from csp("model.6", 128, 128, 3)
    yield from conv("model.7", 128, 256, 3)
    yield from csp("model.8", 256, 256, 1)
    yield from conv("model.9.cv1", 256, 128, 1)
    yield from conv("model.9.cv2", 512, 256, 1)
    yield from conv("model.10", 256, 128, 1)
    yield from csp("model.13", 256, 128, 1)
    yield from conv("model.14", 128, 64, 1)
    yield from csp("model.17", 128, 64, 1)
    yield from conv("model.18", 64, 64, 3)
    yield from csp("model.20", 128, 128, 1)
    yield from conv("model.21", 128, 128, 3)
    yield from csp("model.23", 256, 256, 1)
    for level, inputs in enumerate((64, 128, 256)):
        yield f"model.24.m.{level}.weight", [3 * (5 + CLASSES), inputs, 1, 1]
        yield f"model.24.m.{level}.bias", [3 * (5 + CLASSES)]


def logit(p):
    return math.log(p / (1 - p))


def weights(answers):
    """A file of weights that are 0: what a cell says is in the last layer's biases. Each anchor of the coarsest level, whose cells are of 32 pixels,
    answers with (width, height, class, score): a box in the middle of each cell, in pixels of the input."""
    header, data = {}, b""
    for name, sizes in [*layers(), ("model.24.anchors", [3, 3, 2])]:
        values = [0.0] * math.prod(sizes)
        if name.endswith("running_var"):
            values = [1.0] * len(values)
        if name.endswith("anchors"):
            values = [v / (8 << level) for level, row in enumerate(ANCHORS) for v in row]
        if re.fullmatch(r"model\.24\.m\.\d\.bias", name):
            values = [-30.0] * len(values)
            if name == "model.24.m.2.bias":
                for i, (width, height, label, score) in enumerate(answers):
                    at = i * (5 + CLASSES)
                    sides = [logit(math.sqrt(side / ANCHORS[2][2 * i + k]) / 2) for k, side in enumerate((width, height))]
                    values[at:at + 5] = [0.0, 0.0, *sides, logit(score)]
                    values[at + 5 + label] = 30.0
        whole = name.endswith("tracked")
        content = struct.pack("<q", 0) if whole else struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "I64" if whole else "F32", "shape": sizes, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def png(width, height, color=(0, 0, 0)):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    rows = (b"\0" + bytes(color) * width) * height
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(rows))
            + chunk(b"IEND", b""))


def pixels(path):
    """Width, height and rows of red, green and blue of a PNG of 8 bits."""
    content = path.read_bytes()
    at, idat = 8, b""
    while at < len(content):
        length, kind = struct.unpack(">I4s", content[at:at + 8])
        body = content[at + 8:at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, form = struct.unpack(">IIBB", body[:10])
            assert (depth, form) == (8, 2), (depth, form)
        if kind == b"IDAT":
            idat += body
        at += 12 + length
    raw, stride = zlib.decompress(idat), 3 * width
    rows, before = [], bytes(stride)
    for y in range(height):
        kind, line = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1:(y + 1) * (stride + 1)])
        for i in range(stride):
            left = line[i - 3] if i >= 3 else 0
            up, corner = before[i], before[i - 3] if i >= 3 else 0
            paeth = min((left, up, corner), key=lambda v: abs(left + up - corner - v))
            line[i] = (line[i] + (0, left, up, (left + up) // 2, paeth)[kind]) & 255
        rows.append([tuple(line[3 * x:3 * x + 3]) for x in range(width)])
        before = bytes(line)
    return width, height, rows


class Detect(ProgramTest):
    # A picture of 128 x 64 becomes one of 64 x 32, two cells beside each other.
    ANSWERS = [(20, 16, 1, 0.9), (20, 12, 2, 0.8), (4, 4, 0, 0.3)]

    def setUp(self):
        super().setUp()
        (self.folder / "w.safetensors").write_bytes(weights(self.ANSWERS))
        (self.folder / "names").write_text(NAMES)
        (self.folder / "a").mkdir()
        (self.folder / "a/x.png").write_bytes(png(128, 64))
        (self.folder / "a/000000000139.png").write_bytes(png(64, 128))

    def predict(self, *arguments, status=0, err="", **options):
        got, out, error = self.run_program("predict", "yolov5n", "--weights", "w.safetensors", "--image-size", "64", "--threads", "1", *arguments, **options)
        self.assertEqual((got, error), (status, err), out)
        return out

    def test_pictures_lines_and_the_summary(self):
        out = self.predict("a", "--classes", "names", "--line-width", "4", "--hide-labels").splitlines()
        self.assertEqual(out[0], "yolov5n with w.safetensors")
        times = r"\d+\.\d ms pre-processing, \d+\.\d ms inference, \d+\.\d ms NMS"
        self.assertRegex(out[1], rf"\A1/2 a/000000000139\.png: 64x32, 2 platelet, 2 red cell, 2 white, cell; {times}\Z")
        self.assertRegex(out[2], rf"\A2/2 a/x\.png: 32x64, 2 platelet, 2 red cell, 2 white, cell; {times}\Z")
        self.assertRegex(out[3], rf"\A2 of 2 pictures, 12 objects; median {times}\Z")
        self.assertEqual(out[4:], ["written into runs/predict"])
        self.assertEqual(sorted(os.listdir(self.folder / "runs/predict")), ["000000000139.png", "x.png"])
        width, height, rows = pixels(self.folder / "runs/predict/x.png")
        self.assertEqual((width, height), (128, 64))
        # Boxes are around (32, 32) and (96, 32), twice as large as in the input: the red cell's from 12 to 52 and 16 to 48.
        for x in (32, 96):
            color = rows[32][x - 20]
            self.assertNotEqual(color, (0, 0, 0))
            self.assertEqual(rows[32][x + 19], color)
            self.assertEqual(rows[47][x - 10], color)
        self.assertEqual(rows[32][64], (0, 0, 0))
        # Another run has another folder.
        self.assertEqual(self.predict("a").splitlines()[-1], "written into runs/predict-2")
        self.assertIn("2 of class 0, 2 of class 1", self.predict("a/x.png", "--out", "found/here"))
        self.assertEqual(os.listdir(self.folder / "found/here"), ["x.png"])

    def test_text_and_json(self):
        self.predict("a", "--classes", "names", "--save-txt", "--save-conf", "--save-json", "--no-pictures", "--out", "o", "--only", "red cell")
        self.assertEqual(sorted(os.listdir(self.folder / "o")), ["labels", "predictions.json"])
        lines = [line.split() for line in (self.folder / "o/labels/x.txt").read_text().splitlines()]
        self.assertEqual(len(lines), 2)
        for line, x in zip(sorted(lines, key=lambda l: l[1]), (0.25, 0.75)):
            self.assertEqual(line[0], "1")
            for got, wanted in zip(map(float, line[1:]), (x, 0.5, 40 / 128, 32 / 64, 0.9)):
                self.assertAlmostEqual(got, wanted, places=4)
        found = json.loads((self.folder / "o/predictions.json").read_text())
        self.assertEqual([(r["image_id"], r["category"]) for r in found], [(139, "red cell")] * 2 + [("x", "red cell")] * 2)
        for left, row in zip((12, 76), sorted(found[2:], key=lambda r: r["bbox"])):
            for got, wanted in zip(row["bbox"], (left, 16, 40, 32)):
                self.assertAlmostEqual(got, wanted, delta=0.002)
            self.assertAlmostEqual(row["score"], 0.9, delta=2e-5)
        # Without scores; numbers of classes; nothing found leaves an empty file.
        self.predict("a/x.png", "--save-txt", "--only", "0,2", "--out", "p")
        self.assertEqual(sorted(line.split()[0] for line in (self.folder / "p/labels/x.txt").read_text().splitlines()), ["0", "0", "2", "2"])
        self.assertTrue(all(len(line.split()) == 5 for line in (self.folder / "p/labels/x.txt").read_text().splitlines()))
        self.predict("a/x.png", "--save-txt", "--save-json", "--conf-thres", "0.95", "--out", "q")
        self.assertEqual((self.folder / "q/labels/x.txt").read_text(), "")
        self.assertEqual(json.loads((self.folder / "q/predictions.json").read_text()), [])

    def test_which_boxes_are_kept(self):
        counts = lambda *more: re.search(r"\d+x\d+, (.*?);", self.predict("a/x.png", "--no-pictures", *more))[1]
        self.assertEqual(counts("--conf-thres", "0.5"), "2 of class 1, 2 of class 2")
        self.assertEqual(counts("--score", "0.95"), "nothing")
        # The boxes of a cell overlap by 12 / 16.
        self.assertEqual(counts("--agnostic"), "2 of class 0, 2 of class 1")
        self.assertEqual(counts("--agnostic-nms", "--iou-thres", "0.8"), "2 of class 0, 2 of class 1, 2 of class 2")
        self.assertEqual(counts("--max-detections", "3"), "2 of class 1, 1 of class 2")
        self.assertEqual(counts("--max-det", "1", "--only", "2"), "1 of class 2")
        self.assertEqual(counts("--amp", "bf16"), "2 of class 0, 2 of class 1, 2 of class 2")
        out = self.predict("a/x.png", "--no-pictures", "--fold-batch-norm")
        self.assertIn("yolov5n with w.safetensors, 57 batch norms folded\n", out)
        self.assertIn("2 of class 0, 2 of class 1, 2 of class 2", out)
        self.assertNotIn("written", self.predict("a/x.png", "--no-pictures"))
        self.assertFalse((self.folder / "runs").exists(), "nothing was written")

    def test_pictures_of_one_name_are_told_apart(self):
        (self.folder / "b").mkdir()
        (self.folder / "b/x.png").write_bytes(png(32, 32))
        self.predict("a/x.png", "b", "--out", "o", "--save-txt")
        self.assertEqual(sorted(os.listdir(self.folder / "o")), ["labels", "x-2.png", "x.png"])
        self.assertEqual(pixels(self.folder / "o/x-2.png")[:2], (32, 32))
        self.assertEqual(sorted(os.listdir(self.folder / "o/labels")), ["x-2.txt", "x.txt"])

    def test_pictures_that_can_not_be_read_are_named(self):
        (self.folder / "a/cut.png").write_bytes(png(64, 64)[:60])
        (self.folder / "a/text.jpg").write_text("hello")
        (self.folder / "a/ignored.txt").write_text("hello")
        status, out, err = self.run_program("predict", "yolov5n", "--weights", "w.safetensors", "--image-size", "64", "a", "nowhere.png", "--out", "o")
        self.assertEqual(status, 1)
        self.assertEqual(sorted(os.listdir(self.folder / "o")), ["000000000139.png", "x.png"])
        self.assertIn("2 of 5 pictures, 12 objects;", out)
        for name, line in zip(("a/cut.png", "a/text.jpg", "nowhere.png"), err.splitlines()):
            self.assertTrue(line.startswith("halfstep: ") and name in line, err)
        self.assertEqual(err.count("\n"), 3)
        # A network that gives no numbers.
        content = weights([(20, 16, 1, 0.9)])
        (self.folder / "w.safetensors").write_bytes(content.replace(struct.pack("<f", 30.0), struct.pack("<f", math.nan)))
        self.predict("a/x.png", status=1, err="halfstep: a/x.png: the network gives numbers that are none\n", timeout=60)

    def test_what_is_refused(self):
        predict = ["predict", "yolov5n", "--weights", "w.safetensors"]
        self.refused(2, "INPUT: expected at least one image", *predict)
        self.refused(2, "--save-conf: expected --save-txt", *predict, "a", "--save-conf")
        self.refused(2, "--only: expected names of classes or numbers from 0 to 2, got 'dog'", *predict, "a", "--only", "1,dog")
        self.refused(2, "got '3'", *predict, "a", "--only", "3")
        self.refused(2, ["--conf-thres", "0 to 1"], *predict, "a", "--conf-thres", "1.5")
        self.refused(2, "--max-detections: expected a whole number", *predict, "a", "--max-detections", "0")
        self.refused(2, "--resize: yolov5n takes whole pictures", *predict, "a", "--resize", "32")
        self.refused(2, "--top: a flag of classification, and yolov5n is trained for detection", *predict, "a", "--top", "3")
        self.refused(2, "--save-txt: a flag of detection, and mlp is trained for classification", "predict", "mlp", "--weights", "w.safetensors", "--save-txt")
        (self.folder / "empty").mkdir()
        self.refused(1, "empty: expected a folder with pictures", *predict, "empty")
        (self.folder / "two").write_text("one\ntwo\n")
        self.refused(1, "two: expected 3 class names", *predict, "a", "--classes", "two")
        self.refused(1, "no weights of yolov5s", "predict", "yolov5s", "--weights", "w.safetensors", "a")
        self.assertFalse((self.folder / "runs").exists(), "nothing is left of what was refused")

    def test_what_is_read_is_never_written_over(self):
        before = (self.folder / "a/x.png").read_bytes()
        self.refused(1, ["--out a", "a/000000000139.png would be written over the picture that is read"],
                     "predict", "yolov5n", "--weights", "w.safetensors", "a", "--out", "a")
        os.symlink("../a/x.png", self.folder / "a/y.png")
        (self.folder / "o").mkdir()
        os.symlink("../a/x.png", self.folder / "o/x.png")
        self.refused(1, "would be written over", "predict", "yolov5n", "--weights", "w.safetensors", "a/x.png", "--out", "o")
        self.assertEqual((self.folder / "a/x.png").read_bytes(), before)
        # Without pictures nothing is.
        self.predict("a", "--out", "a", "--no-pictures", "--save-txt")

    def test_labels_and_results_that_are_there_are_never_written_over(self):
        kept = {"flat/labels/x.txt": "0 0.5 0.5 0.1 0.1\n", "flat/predictions.json": "[]\n"}
        (self.folder / "flat/labels").mkdir(parents=True)
        for name, content in kept.items():
            (self.folder / name).write_text(content)
        predict = ["predict", "yolov5n", "--weights", "w.safetensors", "a", "--out", "flat"]
        for name, flags in (("flat/labels/x.txt", ["--save-txt", "--save-json"]), ("flat/labels/x.txt", ["--save-txt", "--nosave"]),
                            ("flat/predictions.json", ["--save-json"])):
            self.refused(1, ["--out flat", f"{name} is there and would be written over"], *predict, *flags)
            # Not even what comes before it was written.
            self.assertEqual(sorted(os.listdir(self.folder / "flat")), ["labels", "predictions.json"])
            self.assertEqual(os.listdir(self.folder / "flat/labels"), ["x.txt"])
        for name, content in kept.items():
            self.assertEqual((self.folder / name).read_text(), content)
        # Labels of other pictures are in nobody's way.
        self.predict("a/000000000139.png", "--out", "flat", "--save-txt")
        self.assertEqual(sorted(os.listdir(self.folder / "flat/labels")), ["000000000139.txt", "x.txt"])

    def test_folders_that_can_not_be_written(self):
        (self.folder / "file").write_text("mine")
        self.refused(1, "file", "predict", "yolov5n", "--weights", "w.safetensors", "a", "--out", "file")
        self.refused(1, "file/o", "predict", "yolov5n", "--weights", "w.safetensors", "a", "--out", "file/o")
        (self.folder / "o").mkdir()
        (self.folder / "o/x.png").mkdir()
        self.refused(1, "o/x.png", "predict", "yolov5n", "--weights", "w.safetensors", "a/x.png", "--out", "o", "--image-size", "64")
        if os.path.exists("/dev/full"):
            (self.folder / "p").mkdir()
            os.symlink("/dev/full", self.folder / "p/predictions.json")
            self.refused(1, "p/predictions.json: writing failed", "predict", "yolov5n", "--weights", "w.safetensors", "a/x.png", "--out", "p", "--save-json",
                         "--image-size", "64")

    def test_a_run_says_its_classes_and_its_size(self):
        make_boxes(self.folder / "boxes", train=4, val=2)
        status, out, err = self.run_program("train", "yolov5n", "boxes.yaml", "--img", "64", "--batch-size", "4", "--epochs", "1", "--threads", "1", "--out", "run", timeout=300)
        self.assertEqual((status, err), (0, ""), out)
        status, out, err = self.run_program("predict", "boxes/images/val", "--weights", "run", "--conf-thres", "0", "--max-det", "50", "--save-json", "--out", "o")
        self.assertEqual((status, err), (0, ""), out)
        self.assertTrue(out.startswith("yolov5n with run/best.safetensors\n1/2 boxes/images/val/000.png: 64x64, "), out)
        found = json.loads((self.folder / "o/predictions.json").read_text())
        self.assertEqual(len(found), 100, "untrained, it finds something everywhere")
        self.assertEqual({r["image_id"] for r in found}, {0, 1})
        self.assertLessEqual({r["category"] for r in found}, {"red", "blue"})
        self.assertEqual(sorted(os.listdir(self.folder / "o")), ["000.png", "001.png", "predictions.json"])


if __name__ == "__main__":
    unittest.main()
