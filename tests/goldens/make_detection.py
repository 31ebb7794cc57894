# SPDX-License-Identifier: Apache-2.0
"""detection.json: ops of object detection by torchvision, in float64: results and gradients; and a detector."""
import math

import torch
import torch.nn.functional as F
import torchvision.ops as tv
from golden_format import GoldenFile
from make_ops import Ops
from torch_detector import Head, Nano, decode
from torch_models import fill, numbers

KINDS = {"iou": tv.box_iou, "giou": tv.generalized_box_iou, "diou": tv.distance_box_iou, "ciou": tv.complete_box_iou}
LOSSES = {"giou": tv.generalized_box_iou_loss, "diou": tv.distance_box_iou_loss, "ciou": tv.complete_box_iou_loss}


def corners(o, n, size=40.0, least=1.0):
    """Boxes in a picture of that size, as corners."""
    place = o.values(n, 2, low=0, high=size)
    return torch.cat([place, place + o.values(n, 2, low=least, high=size / 2)], 1)


def overlaps(o):
    for kind, function in KINDS.items():
        o.add("box_iou", function, [corners(o, 5), corners(o, 4)], f"{kind}: torchvision.ops", kind=kind)
        o.add("box_iou", function, [corners(o, 3, 1.0, 0.1), corners(o, 2, 1.0, 0.1)], f"{kind}: torchvision.ops", kind=kind)
        # Far apart, one inside the other, the same box, and edges that touch.
        a = torch.tensor([[0.0, 0, 4, 6], [10, 10, 20, 30], [5, 5, 6, 6]], dtype=torch.float64)
        b = torch.tensor([[100.0, 90, 104, 91], [12, 15, 14, 20], [4, 0, 9, 6], [10, 10, 20, 30]], dtype=torch.float64)
        o.add("box_iou", function, [a, b], f"{kind}: torchvision.ops", kind=kind)
    for kind, function in LOSSES.items():
        for n, size in ((6, 40.0), (4, 1.0)):
            least = size / 40
            o.add("paired_box_iou", lambda a, b, f=function: 1 - f(a, b), [corners(o, n, size, least), corners(o, n, size, least)],
                  f"1 - {kind} loss of torchvision.ops", kind=kind)


def boxes(o):
    for source in ("xyxy", "xywh", "cxcywh"):
        for target in ("xyxy", "xywh", "cxcywh"):
            o.add("box_convert", lambda b, s=source, t=target: tv.box_convert(b, s, t) + 0, [corners(o, 3)], source=source,
                  target=target)
    o.add("box_area", tv.box_area, [corners(o, 4)])
    b = torch.cat([corners(o, 4), torch.tensor([[-3.0, -2, 50, 70]], dtype=torch.float64)])
    o.add("clip_boxes_to_image", lambda t: tv.clip_boxes_to_image(t, (30, 36)), [b], height=30.0, width=36.0)


def suppression(o):
    for n, threshold in ((60, 0.5), (60, 0.1), (200, 0.3), (1, 0.5), (0, 0.5), (40, 0.0), (40, 1.0)):
        scores = o.values(n, low=0, high=1)
        o.add("nms", lambda b, s, t=threshold: tv.nms(b, s, t), [corners(o, n), scores], fixed=(0, 1), iou_threshold=threshold)
    ties = (o.values(80, low=0, high=1) * 8).round() / 8
    o.add("nms", lambda b, s: tv.nms(b, s, 0.4), [corners(o, 80), ties], fixed=(0, 1), iou_threshold=0.4)
    for n, classes in ((80, 3), (300, 20)):
        o.add("batched_nms", lambda b, s, c: tv.batched_nms(b, s, c, 0.3),
              [corners(o, n), o.values(n, low=0, high=1), o.integers(0, classes, n)], fixed=(0, 1), iou_threshold=0.3)


def regions(o):
    inside = torch.tensor([[0.0, 1.2, 0.7, 5.1, 6.3], [1, 0.0, 2.0, 3.3, 4.4], [1, 2.5, 2.5, 2.75, 2.6]], dtype=torch.float64)
    outside = torch.tensor([[0.0, -4.0, -3.0, 2.5, 20.0], [1, 6.0, 6.0, 40.0, 9.0], [0, -9.0, -9.0, -5.0, -6.0],
                            [1, 5.0, 5.0, 3.0, 2.0]], dtype=torch.float64)
    for rois in (inside, outside):
        for size, scale, ratio, aligned in (((3, 2), 1.0, 0, False), ((3, 2), 1.0, 2, True), ((2, 4), 0.5, 3, False),
                                            ((1, 1), 1.5, 0, True)):
            o.add("roi_align", lambda x, r, s=size, f=scale, n=ratio, a=aligned: tv.roi_align(x, r, s, f, n or -1, a),
                  [o.values(2, 3, 8, 7), rois], fixed=(1,), size=list(size), scale=scale, ratio=ratio, aligned=aligned)


def network(file):
    """Boxes in evaluation; in training the levels, and the first weight's gradient of their product with numbers."""
    net = fill(Nano(2).double())
    net.model[-1].anchors.copy_(Head(2, [1, 1, 1]).anchors)
    images = numbers(1000, 2, 3, 32, 64)
    boxes = decode(net.eval()(images))
    levels = net.train()(images)
    sum((y * numbers(1001 + i, *y.shape)).sum() for i, y in enumerate(levels)).backward()
    file.add("yolov5n", "yolov5n", "", {"classes": 2}, outputs=[boxes, *levels], grads=[net.model[0].conv.weight.grad])


def maxima(o):
    """Of several values for a place; with ties, which share the gradient."""
    index = o.integers(0, 3, 4, 3)
    o.add("scatter_amax", lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), [o.values(3, 3), index, o.values(4, 3)], dim=0)
    o.add("scatter_amax", lambda x, i, s: x.scatter_reduce(1, i, s, "amax"),
          [torch.tensor([[1.0, 2, 3], [0, 0, 0]], dtype=torch.float64), torch.tensor([[0, 0, 2], [1, 1, 1]]),
           torch.tensor([[1.0, 1, 2], [5, 4, 5]], dtype=torch.float64)], dim=1)
    o.add("scatter_amax", lambda x, i, s: x.scatter_reduce(0, i, s, "amax"),
          [o.values(5), torch.tensor([4, 4, 1]), o.values(3)], dim=0)


def matches_of(objects, anchors, height, width, ratio):
    """(picture, anchor, row, column, class, box) object by object, by the words of the published recipe."""
    for picture, listed in enumerate(objects):
        for label, x, y, w, h in (tuple(row.tolist()) for row in listed):
            if label < 0:
                continue
            x, y, w, h = x * width, y * height, w * width, h * height
            cells = [(0, 0)]
            if x % 1 < 0.5 and x > 1:
                cells.append((-1, 0))
            if y % 1 < 0.5 and y > 1:
                cells.append((0, -1))
            if (width - x) % 1 < 0.5 and width - x > 1:
                cells.append((1, 0))
            if (height - y) % 1 < 0.5 and height - y > 1:
                cells.append((0, 1))
            for number, (aw, ah) in enumerate(anchors.tolist()):
                if max(w / aw, aw / w, h / ah, ah / h) >= ratio:
                    continue
                for dx, dy in cells:
                    column = min(max(math.floor(x) + dx, 0), width - 1)
                    row = min(max(math.floor(y) + dy, 0), height - 1)
                    yield picture, number, row, column, int(label), (x - column, y - row, w, h)


def loss_of(levels, objects, classes, smoothing=0.0, ratio=4.0, gamma=0.0):
    def entropy(logits, target):
        terms = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        if gamma:
            p = logits.sigmoid()
            right = target * p + (1 - target) * (1 - p)
            terms = terms * (target * 0.25 + (1 - target) * 0.75) * (1 - right) ** gamma
        return terms
    box = objectness = kinds = torch.zeros((), dtype=torch.float64)
    total = 0
    anchors = Head(classes, [1, 1, 1]).anchors.double()
    for level, y in enumerate(levels):
        found = list(matches_of(objects, anchors[level], *y.shape[2:4], ratio))
        total += len(found)
        target = torch.zeros(y.shape[:4], dtype=torch.float64)
        terms, others = [], []
        for picture, number, row, column, label, wanted in found:
            p = y[picture, number, row, column]
            s = p[:4].sigmoid() * 2
            ours = torch.cat([s[:2] - 0.5, s[2:] ** 2 * anchors[level][number]])
            both = [tv.box_convert(b.reshape(1, 4), "cxcywh", "xyxy") for b in (ours, torch.tensor(wanted).double())]
            terms.append(tv.complete_box_iou_loss(*both))
            place = (picture, number, row, column)
            target[place] = max(target[place], 1 - terms[-1].detach()[0])
            one = torch.full((classes,), smoothing / 2, dtype=torch.float64)
            one[label] = 1 - smoothing / 2
            others.append(entropy(p[5:], one))
        if found:
            box = box + torch.cat(terms).mean()
            kinds = kinds + torch.stack(others).mean()
        objectness = objectness + entropy(y[..., 4], target).mean() * [4, 1, 0.4][level]
    box, kinds = box * 0.05, kinds * 0.5 * classes / 80
    return [box + objectness + kinds, box, objectness, kinds, torch.tensor(float(total), dtype=torch.float64)]


def losses(file):
    """Of two pictures of 64 x 96 pixels; objects in corners, twice in one place, with sizes that no anchor has."""
    objects = torch.tensor([[[0, 0.31, 0.42, 0.2, 0.5], [1, 0.33, 0.44, 0.3, 0.4], [2, 0.02, 0.02, 0.1, 0.15],
                             [0, 0.98, 0.97, 0.12, 0.2], [-1, 0, 0, 0, 0]],
                            [[1, 0.5, 0.5, 0.9, 0.9], [1, 0.5, 0.5, 0.8, 0.9], [2, 0.2, 0.7, 0.01, 0.9], [-1, 0, 0, 0, 0],
                             [0, 0.61, 0.13, 0.25, 0.3]]], dtype=torch.float64)
    for name, options in (("plain", {}), ("smooth", {"smoothing": 0.1}), ("focal", {"gamma": 1.5}), ("narrow", {"ratio": 2.0})):
        levels = [(numbers(2000 + s, 2, 3, 64 // s, 96 // s, 8) * 2).requires_grad_() for s in (8, 16, 32)]
        results = loss_of(levels, objects, 3, **options)
        grads = torch.autograd.grad(results[0], levels)
        # Of all places one sum each and a few values: the gradients are large.
        file.add(f"loss/{name}", "detection_loss", "", options, inputs=[objects], outputs=results,
                 tensors={f"gradient{i}": torch.cat([g.flatten()[::97], g.sum().reshape(1), g.abs().sum().reshape(1)])
                          for i, g in enumerate(grads)})


def make():
    file = GoldenFile("detection.json")
    o = Ops(file, 20281)
    for part in (overlaps, boxes, suppression, regions, maxima):
        part(o)
    network(file)
    losses(file)
    file.write()
