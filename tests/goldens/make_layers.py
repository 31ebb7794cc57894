# SPDX-License-Identifier: Apache-2.0
"""layers.json: modules of torch.nn with options that are not the defaults, in float64."""
import torch
from golden_format import GoldenFile, values
from torch import nn
from torch.nn import functional as F

I64 = torch.int64


def layer(file, name, op, module, attributes, *inputs, forms=None):
    """Called in training mode on all inputs but the last, which it gets in evaluation mode. The state before is `start.NAME`, after `end.NAME`."""
    module = module.double()
    generator = torch.Generator().manual_seed(20271)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(values(generator, *p.shape) if p.dim() else values(generator, 1)[0])
    tensors = {f"start.{k}": v.clone() for k, v in module.state_dict().items()}
    outputs = [module.train(i + 1 < len(inputs))(x) for i, x in enumerate(inputs)]
    tensors.update({f"end.{k}": v.clone() for k, v in module.state_dict().items()})
    file.add(f"{op}/{name}", op, f"nn.{type(module).__name__}", attributes, inputs, outputs=outputs, tensors=tensors)


def norms(file):
    generator = torch.Generator().manual_seed(20272)
    x, y, z = (values(generator, 4, 6) for _ in range(3))
    a, b, c = (values(generator, 2, 4, 3, 2) for _ in range(3))
    # A variance as small as eps, so that eps shows.
    layer(file, "eps", "LayerNorm", nn.LayerNorm(6, eps=0.3), {"sizes": [6], "eps": 0.3}, x, y)
    layer(file, "no_bias", "LayerNorm", nn.LayerNorm((3, 2), bias=False), {"sizes": [3, 2], "bias": False}, a, b)
    layer(file, "plain", "LayerNorm", nn.LayerNorm(6, elementwise_affine=False), {"sizes": [6], "affine": False}, 0.01 * x, y)
    layer(file, "eps", "RMSNorm", nn.RMSNorm(6, eps=0.3), {"sizes": [6], "eps": 0.3}, x, y)
    layer(file, "plain", "RMSNorm", nn.RMSNorm(6, elementwise_affine=False), {"sizes": [6], "affine": False}, 1e-8 * x, y)
    layer(file, "eps", "GroupNorm", nn.GroupNorm(2, 4, eps=0.3), {"groups": 2, "channels": 4, "eps": 0.3}, a, b)
    layer(file, "plain", "GroupNorm", nn.GroupNorm(4, 4, affine=False), {"groups": 4, "channels": 4, "affine": False}, 0.01 * a, b)
    one = lambda **o: nn.BatchNorm1d(6, **o)
    layer(file, "options", "BatchNorm1d", one(eps=0.3, momentum=0.2), {"channels": 6, "eps": 0.3, "momentum": 0.2}, x, y, z)
    layer(file, "cumulative", "BatchNorm1d", one(momentum=None), {"channels": 6, "cumulative": True}, x, y, x + y, z)
    layer(file, "plain", "BatchNorm1d", one(affine=False), {"channels": 6, "affine": False}, x, y, z)
    layer(file, "untracked", "BatchNorm1d", one(track_running_stats=False), {"channels": 6, "track": False}, x, y)
    layer(file, "defaults", "BatchNorm2d", nn.BatchNorm2d(4), {"channels": 4}, 0.01 * a, b, c)


def others(file):
    generator = torch.Generator().manual_seed(20273)
    x, a = values(generator, 3, 4), values(generator, 2, 3, 4)
    layer(file, "no_bias", "Linear", nn.Linear(4, 5, bias=False), {"in": 4, "out": 5, "bias": False}, a, x)
    layer(file, "channels", "PReLU", nn.PReLU(3), {"channels": 3}, a)
    layer(file, "slope", "LeakyReLU", nn.LeakyReLU(0.3), {"slope": 0.3}, x)
    layer(file, "tanh", "GELU", nn.GELU(approximate="tanh"), {"form": "tanh"}, x)
    layer(file, "options", "Softplus", nn.Softplus(2.0, 1.0), {"beta": 2.0, "threshold": 1.0}, x)
    for dim in (0, 1, -1):
        layer(file, str(dim), "Softmax", nn.Softmax(dim), {"dim": dim}, a)
        layer(file, str(dim), "LogSoftmax", nn.LogSoftmax(dim), {"dim": dim}, a)
    layer(file, "range", "Flatten", nn.Flatten(0, 1), {"start": 0, "end": 1}, a)
    layer(file, "padding", "Embedding", nn.Embedding(5, 3, padding_idx=1), {"num": 5, "dim": 3, "padding_idx": 1}, torch.tensor([[0, 1], [4, 1]]))


def convolutions(file):
    generator = torch.Generator().manual_seed(20275)
    images, image = values(generator, 2, 4, 6, 5), values(generator, 4, 7, 6)
    lines, line = values(generator, 2, 4, 9), values(generator, 4, 8)

    def conv(name, op, inputs, kernel, **options):
        module = getattr(nn, op)(4, options.pop("out", 6), kernel, **options)
        attributes = {key: value if isinstance(value, (str, bool)) else list(value) if isinstance(value, tuple) else value
                      for key, value in dict(options, kernel=kernel).items()}
        layer(file, name, op, module, dict(attributes, out=module.out_channels), *inputs)

    conv("plain", "Conv1d", (lines, line), 3)
    conv("options", "Conv1d", (lines, line), 3, stride=2, padding=2, dilation=2, groups=2, bias=False)
    conv("same", "Conv1d", (lines, line), 4, padding="same", dilation=3)
    conv("circular", "Conv1d", (lines, line), 3, padding=2, padding_mode="circular")
    conv("plain", "Conv2d", (images, image), 3)
    conv("options", "Conv2d", (images, image), (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2)
    conv("depthwise", "Conv2d", (images, image), 3, padding=1, groups=4, out=4, bias=False)
    conv("same", "Conv2d", (images, image), (2, 3), padding="same")
    conv("valid", "Conv2d", (images, image), 2, padding="valid")
    conv("reflect", "Conv2d", (images, image), 3, padding=(2, 1), padding_mode="reflect")
    conv("replicate", "Conv2d", (images, image), (2, 4), padding="same", padding_mode="replicate")
    conv("plain", "ConvTranspose1d", (lines, line), 3)
    conv("options", "ConvTranspose1d", (lines, line), 3, stride=2, padding=1, output_padding=1, groups=2, bias=False)
    conv("plain", "ConvTranspose2d", (images, image), 2)
    conv("options", "ConvTranspose2d", (images, image), (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(1, 2), groups=2, dilation=(2, 1))


def losses(file):
    generator = torch.Generator().manual_seed(20274)
    logits, positive = values(generator, 4, 3), values(generator, 3, low=0.2, high=2.0)
    classes = torch.tensor([2, 0, 1, 2])
    x, y = values(generator, 4, 3), values(generator, 4, 3)
    p, q = torch.sigmoid(x), torch.sigmoid(y)
    weight = values(generator, 4, 3, low=0.2, high=2.0)

    def loss(name, op, module, attributes, a, b):
        tensors = {f"start.{k}": v for k, v in module.double().state_dict().items()}
        file.add(f"{op}/{name}", op, f"nn.{type(module).__name__}", attributes, (a, b), outputs=[module(a, b)], tensors=tensors)

    loss("options", "CrossEntropyLoss", nn.CrossEntropyLoss(positive, label_smoothing=0.2, ignore_index=0),
         {"label_smoothing": 0.2, "ignore_index": 0}, logits, classes)
    loss("sum", "CrossEntropyLoss", nn.CrossEntropyLoss(reduction="sum"), {"reduction": "sum"}, logits, classes)
    loss("options", "NLLLoss", nn.NLLLoss(positive, ignore_index=1), {"ignore_index": 1}, F.log_softmax(logits, 1), classes)
    loss("none", "NLLLoss", nn.NLLLoss(reduction="none"), {"reduction": "none"}, F.log_softmax(logits, 1), classes)
    for reduction in ("none", "sum", "mean"):
        loss(reduction, "MSELoss", nn.MSELoss(reduction=reduction), {"reduction": reduction}, x, y)
        loss(reduction, "L1Loss", nn.L1Loss(reduction=reduction), {"reduction": reduction}, x, y)
        loss(reduction, "SmoothL1Loss", nn.SmoothL1Loss(reduction=reduction, beta=0.4), {"reduction": reduction, "beta": 0.4}, x, y)
        loss(reduction, "HuberLoss", nn.HuberLoss(reduction=reduction, delta=0.4), {"reduction": reduction, "delta": 0.4}, x, y)
    loss("options", "KLDivLoss", nn.KLDivLoss(reduction="batchmean", log_target=True), {"reduction": "batchmean", "log_target": True}, p.log(), q.log())
    loss("sum", "KLDivLoss", nn.KLDivLoss(reduction="sum"), {"reduction": "sum"}, p.log(), q)
    loss("options", "BCEWithLogitsLoss", nn.BCEWithLogitsLoss(weight, reduction="sum", pos_weight=positive), {"reduction": "sum"}, x, q)
    loss("options", "BCELoss", nn.BCELoss(weight, reduction="none"), {"reduction": "none"}, p, q)


def make():
    file = GoldenFile("layers.json")
    for part in (norms, others, losses, convolutions):
        part(file)
    file.write()
