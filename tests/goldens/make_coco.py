#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""coco_metric.json: average precision and recall by pycocotools (pip install pycocotools) of boxes that are made here."""
import contextlib
import io
import json
import pathlib

import numpy
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval


def boxes(random, pictures, classes, objects, found, extra, crowds=0.0, ties=False):
    """Objects of all sizes, what was found of them and where, and boxes where nothing is."""
    truth, detected = [], []
    for _ in range(pictures):
        here, seen = [], []
        for _ in range(random.integers(0, objects + 1)):
            side = float(random.choice([12, 50, 160])) * random.uniform(0.7, 1.3)
            box = [random.uniform(0, 400), random.uniform(0, 300), side, side * random.uniform(0.6, 1.6)]
            label = int(random.integers(0, classes))
            crowd = random.uniform() < crowds
            here.append({"label": label, "box": box, "area": box[2] * box[3] * random.uniform(0.5, 1), "crowd": crowd})
            for _ in range(5 if crowd else 1):
                if random.uniform() < found:
                    shift = random.normal(0, 0.12, 4)
                    near = [box[0] + shift[0] * box[2], box[1] + shift[1] * box[3], box[2] * numpy.exp(shift[2]),
                            box[3] * numpy.exp(shift[3])]
                    if crowd:
                        near[2:] = [near[2] / 3, near[3] / 3]
                    wrong = random.uniform() < 0.1
                    seen.append({"label": int(random.integers(0, classes)) if wrong else label, "box": near,
                                 "score": random.uniform(0.2, 1)})
        for _ in range(random.integers(0, extra + 1)):
            seen.append({"label": int(random.integers(0, classes)), "score": random.uniform(0, 0.7),
                         "box": [random.uniform(0, 400), random.uniform(0, 300), random.uniform(5, 99), random.uniform(5, 99)]})
        for item in here + seen:
            item["box"] = [round(float(v), 2) for v in item["box"]]
        for item in seen:
            item["score"] = round(float(item["score"]), 1 if ties else 4)
        for item in here:
            item["area"] = round(float(item["area"]), 2)
        truth.append(here)
        detected.append(seen)
    return truth, detected


def evaluate(truth, detected, classes):
    annotations, results = [], []
    for picture, (here, seen) in enumerate(zip(truth, detected)):
        for t in here:
            annotations.append({"id": len(annotations) + 1, "image_id": picture, "category_id": t["label"], "bbox": t["box"],
                                "area": t["area"], "iscrowd": int(t["crowd"])})
        for d in seen:
            results.append({"image_id": picture, "category_id": d["label"], "bbox": d["box"], "score": d["score"]})
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {"info": {}, "images": [{"id": i} for i in range(len(truth))], "annotations": annotations,
                        "categories": [{"id": c} for c in range(classes)]}
        coco.createIndex()
        run = COCOeval(coco, coco.loadRes(results), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    precision = run.eval["precision"][:, :, :, 0, 2]  # overlaps, recalls, classes

    def mean(p):
        p = p[p > -1]
        return float(p.mean()) if p.size else -1.0
    return {"stats": [float(v) for v in run.stats], "ap": [mean(precision[:, :, c]) for c in range(classes)],
            "ap50": [mean(precision[0, :, c]) for c in range(classes)]}


def iou(a, b):
    w = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    h = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    return w * h / (a[2] * a[3] + b[2] * b[3] - w * h) if w > 0 and h > 0 else 0.0


def trainers(truth, detected, classes):
    """The figures that trainers print, with numpy: the best box that claims an object has it, np.interp, the trapezoidal rule."""
    grid, recalls, per_class, f1 = numpy.linspace(0, 1, 1000), numpy.linspace(0, 1, 101), [], 0
    for label in range(classes):
        objects = sum(t["label"] == label and not t["crowd"] for here in truth for t in here)
        if not objects:
            continue
        aps, at = [], None
        for least in numpy.linspace(0.5, 0.95, 10):
            rows = []
            for here, seen in zip(truth, detected):
                ours = [d for d in seen if d["label"] == label]
                theirs = [t for t in here if t["label"] == label and not t["crowd"]]
                ours.sort(key=lambda d: -d["score"])
                claims = []  # of each box, the object that it overlaps most
                for d in ours:
                    overlaps = [iou(d["box"], t["box"]) for t in theirs]
                    best = int(numpy.argmax(overlaps)) if overlaps else -1
                    claims.append(best if best >= 0 and overlaps[best] >= least else -1)
                rows += [(d["score"], k >= 0 and k not in claims[:i]) for i, (d, k) in enumerate(zip(ours, claims))]
            order = numpy.argsort([-score for score, _ in rows], kind="stable")
            if not rows:
                aps.append(0.0)
                continue
            scores = numpy.array([rows[i][0] for i in order])
            right = numpy.array([rows[i][1] for i in order], dtype=float)
            recall = right.cumsum() / objects
            precision = right.cumsum() / numpy.arange(1, len(right) + 1)
            x = numpy.concatenate([[0], recall, [1]])
            y = numpy.maximum.accumulate(numpy.concatenate([[1], precision, [0]])[::-1])[::-1]
            aps.append(float(numpy.trapezoid(numpy.interp(recalls, x, y), recalls)))
            if at is None:
                at = (numpy.interp(-grid, -scores, precision, left=1), numpy.interp(-grid, -scores, recall, left=0))
        if at is None:
            at = numpy.zeros(1000), numpy.zeros(1000)
        f1 = f1 + 2 * at[0] * at[1] / (at[0] + at[1] + 1e-16)
        per_class.append((label, objects, at, aps))
    padded = numpy.concatenate([numpy.full(50, f1[0]), f1, numpy.full(50, f1[-1])])
    best = int(numpy.convolve(padded, numpy.ones(101) / 101, "valid").argmax())
    rows = [[label, objects, float(p[best]), float(r[best]), aps[0], float(numpy.mean(aps))]
            for label, objects, (p, r), aps in per_class]
    return {"trainers": rows, "score": best / 999}


def main():
    random = numpy.random.default_rng(20283)
    entries = []
    for name, classes, options in (("few", 2, dict(pictures=6, objects=4, found=0.8, extra=3)),
                                   ("crowds", 3, dict(pictures=20, objects=6, found=0.8, extra=4, crowds=0.15)),
                                   ("ties", 3, dict(pictures=15, objects=5, found=0.9, extra=3, ties=True)),
                                   ("many", 1, dict(pictures=3, objects=60, found=0.95, extra=90)),
                                   ("rare", 12, dict(pictures=8, objects=3, found=0.7, extra=2, crowds=0.1))):
        truth, detected = boxes(random, classes=classes, **options)
        entries.append({"name": name, "classes": classes, **evaluate(truth, detected, classes),
                        **trainers(truth, detected, classes),
                        "pictures": [{"truth": [[t["label"], *t["box"], t["area"], int(t["crowd"])] for t in here],
                                      "detected": [[d["label"], *d["box"], d["score"]] for d in seen]}
                                     for here, seen in zip(truth, detected)]})
    path = pathlib.Path(__file__).resolve().parent / "coco_metric.json"
    lines = ",\n".join(json.dumps(e, separators=(",", ":")) for e in entries)
    path.write_text('{"header":{"format":1,"made_by":"tests/goldens/make_coco.py with pycocotools 2.0.11"},\n"entries":[\n'
                    + lines + "\n]}\n")
    print(path.name, [e["stats"][:3] for e in entries])


if __name__ == "__main__":
    main()
