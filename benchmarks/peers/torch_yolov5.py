# SPDX-License-Identifier: Apache-2.0
"""YOLOv5n and its loss in PyTorch for torch_networks.py: the network that the goldens are made with, and the loss of their
reference (make_detection.py) written for whole batches, as one trains with it."""
import pathlib
import sys

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "goldens"))
from torch_detector import ANCHORS, STRIDES, Nano, decode  # noqa: F401

OBJECTS = 8  # of a picture
ANCHOR_RATIO = 4.0
BOX, OBJECTNESS, CLASSES, BALANCE = 0.05, 1.0, 0.5, (4.0, 1.0, 0.4)
STEPS = ((0, 0), (-1, 0), (0, -1), (1, 0), (0, 1))  # to the cells that may answer beside the centre's


def objects(batch):
    """[objects, 6]: picture, class, centre and sides as fractions of the picture."""
    n = batch * OBJECTS
    picture = torch.arange(batch).repeat_interleave(OBJECTS).float()
    return torch.cat([picture[:, None], torch.randint(0, 80, (n, 1)).float(), torch.rand(n, 2), torch.rand(n, 2) * 0.5 + 0.02], 1)


def complete_iou(a, b, eps=1e-7):
    """Of boxes as centres and sides, by rows (Zheng et al. 2020)."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = a.unbind(1), b.unbind(1)
    left, right = torch.maximum(ax - aw / 2, bx - bw / 2), torch.minimum(ax + aw / 2, bx + bw / 2)
    top, bottom = torch.maximum(ay - ah / 2, by - bh / 2), torch.minimum(ay + ah / 2, by + bh / 2)
    inner = (right - left).clamp(0) * (bottom - top).clamp(0)
    iou = inner / (aw * ah + bw * bh - inner + eps)
    width = torch.maximum(ax + aw / 2, bx + bw / 2) - torch.minimum(ax - aw / 2, bx - bw / 2)
    height = torch.maximum(ay + ah / 2, by + bh / 2) - torch.minimum(ay - ah / 2, by - bh / 2)
    distance = ((ax - bx) ** 2 + (ay - by) ** 2) / (width ** 2 + height ** 2 + eps)
    shape = 4 / torch.pi ** 2 * (torch.atan(bw / bh) - torch.atan(aw / ah)) ** 2
    with torch.no_grad():
        weight = shape / (1 - iou + shape + eps)
    return iou - distance - weight * shape


def matches(found, anchors, height, width):
    """The cells that answer: picture, anchor, row, column and object of each, all at once."""
    size = torch.tensor([width, height, width, height], dtype=found.dtype)
    boxes = found[:, 2:] * size
    ratio = boxes[None, :, 2:] / anchors[:, None]
    anchor, of = (torch.maximum(ratio, 1 / ratio).amax(2) < ANCHOR_RATIO).nonzero(as_tuple=True)
    centre = boxes[of, :2]
    back = size[:2] - centre
    low, high = (centre % 1 < 0.5) & (centre > 1), (back % 1 < 0.5) & (back > 1)
    chosen = torch.stack([torch.ones(len(of), dtype=torch.bool), low[:, 0], low[:, 1], high[:, 0], high[:, 1]])
    step, row = chosen.nonzero(as_tuple=True)
    of, anchor = of[row], anchor[row]
    cell = centre[row].long() + torch.tensor(STEPS)[step]
    column, line = cell[:, 0].clamp(0, width - 1), cell[:, 1].clamp(0, height - 1)
    wanted = torch.cat([boxes[of, :2] - torch.stack([column, line], 1), boxes[of, 2:]], 1)
    return found[of, 0].long(), anchor, line, column, found[of, 1].long(), wanted


def loss_of(levels, found):
    """The sum of the parts: boxes, objectness and classes. Matches are found and boxes compared in float32."""
    with torch.autocast("cpu", enabled=False):
        box = objectness = kinds = torch.zeros(())
        for level, balance, anchors, stride in zip(levels, BALANCE, ANCHORS, STRIDES):
            y = level.float() if level.dtype in (torch.bfloat16, torch.float16) else level
            sides = torch.tensor(anchors, dtype=y.dtype).view(-1, 2) / stride
            picture, anchor, row, column, label, wanted = matches(found.to(y.dtype), sides, y.shape[2], y.shape[3])
            target = torch.zeros(y.shape[:4], dtype=y.dtype)
            if len(picture):
                p = y[picture, anchor, row, column]
                s = p[:, :4].sigmoid() * 2
                iou = complete_iou(torch.cat([s[:, :2] - 0.5, s[:, 2:] ** 2 * sides[anchor]], 1), wanted)
                box = box + (1 - iou).mean()
                place = ((picture * y.shape[1] + anchor) * y.shape[2] + row) * y.shape[3] + column
                target.view(-1).scatter_reduce_(0, place, iou.detach().clamp(0), "amax")
                kinds = kinds + F.binary_cross_entropy_with_logits(p[:, 5:], F.one_hot(label, p.shape[1] - 5).to(y.dtype))
            objectness = objectness + balance * F.binary_cross_entropy_with_logits(y[..., 4], target)
        return BOX * box + OBJECTNESS * objectness + CLASSES * (levels[0].shape[-1] - 5) / 80 * kinds
