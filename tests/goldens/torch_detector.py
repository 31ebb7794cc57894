# SPDX-License-Identifier: Apache-2.0
"""A YOLOv5n-shaped detector in plain torch.nn, written from the table of its layers (channels, repeats, strides, names of
the state dict), for goldens and for the benchmark's peer."""
import torch
from torch import nn
from torch.nn import functional as F

ANCHORS = [[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119], [116, 90, 156, 198, 373, 326]]
STRIDES = [8, 16, 32]


class Conv(nn.Module):
    def __init__(self, in_, out, kernel=1, stride=1, padding=None):
        super().__init__()
        self.conv = nn.Conv2d(in_, out, kernel, stride, kernel // 2 if padding is None else padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=1e-3, momentum=0.03)

    def forward(self, x):
        return F.silu(self.bn(self.conv(x)))


class Block(nn.Module):
    def __init__(self, width, shortcut):
        super().__init__()
        self.cv1, self.cv2, self.shortcut = Conv(width, width), Conv(width, width, 3), shortcut

    def forward(self, x):
        y = self.cv2(self.cv1(x))
        return x + y if self.shortcut else y


class CSP(nn.Module):
    def __init__(self, in_, out, blocks=1, shortcut=True):
        super().__init__()
        half = out // 2
        self.cv1, self.cv2, self.cv3 = Conv(in_, half), Conv(in_, half), Conv(2 * half, out)
        self.m = nn.Sequential(*(Block(half, shortcut) for _ in range(blocks)))

    def forward(self, x):
        return self.cv3(torch.cat([self.m(self.cv1(x)), self.cv2(x)], 1))


class Pyramid(nn.Module):
    def __init__(self, in_, out):
        super().__init__()
        self.cv1, self.cv2 = Conv(in_, in_ // 2), Conv(in_ // 2 * 4, out)

    def forward(self, x):
        levels = [self.cv1(x)]
        for _ in range(3):
            levels.append(F.max_pool2d(levels[-1], 5, 1, 2))
        return self.cv2(torch.cat(levels, 1))


class Head(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.register_buffer("anchors", torch.tensor(ANCHORS).view(3, 3, 2) / torch.tensor(STRIDES).view(3, 1, 1))
        self.m = nn.ModuleList(nn.Conv2d(c, 3 * (5 + classes), 1) for c in channels)

    def forward(self, levels):
        result = []
        for x, conv in zip(levels, self.m):
            y = conv(x)
            result.append(y.view(len(y), 3, -1, *y.shape[2:]).permute(0, 1, 3, 4, 2))
        return result


class Nano(nn.Module):
    """Layer by layer; those without parameters have numbers too."""
    JOINS = {12: 6, 16: 4, 19: 14, 22: 10}

    def __init__(self, classes=80):
        super().__init__()
        none = nn.Identity
        self.model = nn.ModuleList([
            Conv(3, 16, 6, 2, 2), Conv(16, 32, 3, 2), CSP(32, 32, 1), Conv(32, 64, 3, 2), CSP(64, 64, 2), Conv(64, 128, 3, 2),
            CSP(128, 128, 3), Conv(128, 256, 3, 2), CSP(256, 256, 1), Pyramid(256, 256), Conv(256, 128), none(), none(),
            CSP(256, 128, 1, False), Conv(128, 64), none(), none(), CSP(128, 64, 1, False), Conv(64, 64, 3, 2), none(),
            CSP(128, 128, 1, False), Conv(128, 128, 3, 2), none(), CSP(256, 256, 1, False), Head(classes, [64, 128, 256])])

    def forward(self, x):
        results = []
        for i, layer in enumerate(self.model[:-1]):
            if i in (11, 15):
                x = F.interpolate(x, scale_factor=2)
            elif i in self.JOINS:
                x = torch.cat([x, results[self.JOINS[i]]], 1)
            else:
                x = layer(x)
            results.append(x)
        return self.model[-1]([results[i] for i in (17, 20, 23)])


def decode(levels):
    """[N, predictions, 5 + classes]: boxes in pixels, probabilities."""
    rows = []
    for level, anchors, stride in zip(levels, ANCHORS, STRIDES):
        y = level.sigmoid()
        height, width = y.shape[2:4]
        grid = torch.stack(torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy"), -1)
        centre = (2 * y[..., :2] - 0.5 + grid) * stride
        sides = (2 * y[..., 2:4]) ** 2 * torch.tensor(anchors).view(1, 3, 1, 1, 2)
        rows.append(torch.cat([centre, sides, y[..., 4:]], -1).flatten(1, 3))
    return torch.cat(rows, 1)
