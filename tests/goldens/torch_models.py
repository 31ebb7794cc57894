# SPDX-License-Identifier: Apache-2.0
"""The image networks in plain torch.nn, of any width and depth, with the names of torchvision's state dicts; and numbers
that C++ and Python make alike, so that goldens need not hold weights. make_models.py holds the networks against torchvision."""
import math

import numpy
import torch
from torch import nn
from torch.nn import functional as F


def conv(kernel, in_, out, stride=1, groups=1):
    return nn.Conv2d(in_, out, kernel, stride, kernel // 2, groups=groups, bias=False)


class Basic(nn.Module):
    expansion = 1

    def __init__(self, in_, width, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(3, in_, width, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(3, width, width), nn.BatchNorm2d(width)
        self.downsample = shortcut(in_, width, stride)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + (self.downsample(x) if self.downsample else x))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, in_, width, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(1, in_, width), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(3, width, width, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(1, width, 4 * width), nn.BatchNorm2d(4 * width)
        self.downsample = shortcut(in_, 4 * width, stride)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + (self.downsample(x) if self.downsample else x))


def shortcut(in_, out, stride):
    return None if stride == 1 and in_ == out else nn.Sequential(conv(1, in_, out, stride), nn.BatchNorm2d(out))


class ResNet(nn.Module):
    def __init__(self, block, layers, width=64, classes=1000, cifar_stem=False):
        super().__init__()
        block = {"basic": Basic, "bottleneck": Bottleneck}[block]
        self.pool = not cifar_stem
        self.conv1 = conv(3, 3, width) if cifar_stem else conv(7, 3, width, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.stages = len(layers)
        in_ = width
        for s, blocks in enumerate(layers):
            stage = []
            for b in range(blocks):
                stage.append(block(in_, width << s, 2 if s > 0 and b == 0 else 1))
                in_ = (width << s) * block.expansion
            setattr(self, f"layer{s + 1}", nn.Sequential(*stage))
        self.fc = nn.Linear(in_, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        if self.pool:
            x = F.max_pool2d(x, 3, 2, 1)
        for s in range(self.stages):
            x = getattr(self, f"layer{s + 1}")(x)
        return self.fc(x.mean((2, 3)))


def conv_norm(kernel, in_, out, stride=1, groups=1):
    return nn.Sequential(conv(kernel, in_, out, stride, groups), nn.BatchNorm2d(out), nn.ReLU6())


class Inverted(nn.Module):
    def __init__(self, in_, out, stride, expand):
        super().__init__()
        self.residual = stride == 1 and in_ == out
        between = in_ * expand
        first = [] if expand == 1 else [conv_norm(1, in_, between)]
        self.conv = nn.Sequential(*first, conv_norm(3, between, between, stride, between), conv(1, between, out), nn.BatchNorm2d(out))

    def forward(self, x):
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    # Expansion, channels, blocks, stride of the first.
    STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, width=1.0, classes=1000, dropout=0.2):
        super().__init__()

        def rounded(channels):
            nearest = max(8, int(channels + 4) // 8 * 8)
            return nearest + 8 if nearest < 0.9 * channels else nearest

        in_, last = rounded(32 * width), rounded(1280 * max(1.0, width))
        layers = [conv_norm(3, 3, in_, 2)]
        for expand, channels, blocks, stride in self.STAGES:
            for b in range(blocks):
                layers.append(Inverted(in_, rounded(channels * width), stride if b == 0 else 1, expand))
                in_ = rounded(channels * width)
        self.features = nn.Sequential(*layers, conv_norm(1, in_, last))
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, classes))

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


class MLP(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 512), nn.Linear(512, 512), nn.Linear(512, classes)


class CNN(nn.Module):
    def __init__(self, width=32, classes=10):
        super().__init__()
        self.conv1, self.bn1 = conv(3, 1, width), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(3, width, 2 * width, 2), nn.BatchNorm2d(2 * width)
        self.conv3, self.bn3 = conv(3, 2 * width, 4 * width, 2), nn.BatchNorm2d(4 * width)
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x):
        x = self.bn1(self.conv1(x.reshape(-1, 1, 28, 28))).relu()
        x = self.bn2(self.conv2(x)).relu()
        x = self.bn3(self.conv3(x)).relu()
        return self.fc(x.mean((2, 3)))


# Every network of Halfstep's registry.
REGISTRY = {
    "mlp": MLP,
    "resnet18": lambda: ResNet("basic", (2, 2, 2, 2)),
    "resnet34": lambda: ResNet("basic", (3, 4, 6, 3)),
    "resnet50": lambda: ResNet("bottleneck", (3, 4, 6, 3)),
    "resnet101": lambda: ResNet("bottleneck", (3, 4, 23, 3)),
    "resnet152": lambda: ResNet("bottleneck", (3, 8, 36, 3)),
    "resnet20": lambda: ResNet("basic", (3, 3, 3), 16, 10, True),
    "resnet32": lambda: ResNet("basic", (5, 5, 5), 16, 10, True),
    "resnet44": lambda: ResNet("basic", (7, 7, 7), 16, 10, True),
    "resnet56": lambda: ResNet("basic", (9, 9, 9), 16, 10, True),
    "resnet110": lambda: ResNet("basic", (18, 18, 18), 16, 10, True),
    "resnet18_cifar": lambda: ResNet("basic", (2, 2, 2, 2), 64, 10, True),
    "mobilenet_v2": MobileNetV2,
    "cnn": CNN,
}


def numbers(seed, *shape):
    """Values in [-1, 1) with 24 bits, from a hash of seed and position: tests/models/peer_numbers.h makes the same."""
    mask = numpy.uint64(0xFFFFFFFF)
    h = (numpy.arange(math.prod(shape), dtype=numpy.uint64) * numpy.uint64(0x9E3779B1) + numpy.uint64(seed * 0x632BE5AB)) & mask
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        h = ((h ^ (h >> numpy.uint64(shift))) * numpy.uint64(factor)) & mask
    h ^= h >> numpy.uint64(15)
    return torch.from_numpy((h >> numpy.uint64(8)).astype(numpy.float64) / 2**23 - 1).reshape(shape)


def fill(module):
    """Weights of a size that keeps activations of order 1, and statistics that are not the initial ones; in f32's grid."""
    with torch.no_grad():
        for k, (name, t) in enumerate(module.state_dict().items()):
            if name.endswith("num_batches_tracked"):
                t.fill_(k)
                continue
            v = numbers(k, *t.shape)
            if t.dim() > 1:
                v = v * math.sqrt(6 / math.prod(t.shape[1:]))
            elif name.endswith("running_var"):
                v = 1 + 0.5 * v
            elif name.endswith("weight"):
                v = 1 + 0.2 * v
            else:
                v = 0.1 * v
            t.copy_(v.to(torch.float32))
    return module
