#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes small networks as PyTorch exports them into tests/goldens/onnx, with what PyTorch computes in onnx.json.

usage: make_onnx.py     (a Python with torch, onnx and onnxscript)

Each entry of onnx.json is a file: inputs, outputs in evaluation mode, and for files that keep batch norms (`train`) the
parameters after a step of SGD in training mode, by their names in the file. Files whose names end in `_script` are of
the exporter before PyTorch 2.9's (TorchScript), the others of the one since (torch.export). Those with `quantized` have
fake quantization: PyTorch writes that as QuantizeLinear and DequantizeLinear on float weights.
"""
import copy
import logging
import warnings

import onnx
import onnx.numpy_helper
import torch
import torch.nn.functional as F
from torch import nn

from golden_format import HERE, GoldenFile

FOLDER = HERE / "onnx"


class Residual(nn.Module):
    """Convolutions with norms, a residual, pooling: what ResNets are made of."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.layer = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = F.relu(self.layer(x) + x)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Mobile(nn.Module):
    """Depthwise convolutions, squeeze and excitation, hard activations, a channel shuffle, resizing, silu."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Hardswish(), nn.Conv2d(8, 8, 3, groups=8, padding=1))
        self.fc1 = nn.Conv2d(8, 2, 1)
        self.fc2 = nn.Conv2d(2, 8, 1)
        self.up = nn.ConvTranspose2d(4, 3, 2, 2)
        self.head = nn.Conv2d(11, 3, 1)

    def forward(self, x):
        x = self.features(x)
        scale = F.hardsigmoid(self.fc2(F.relu6(self.fc1(x.mean((2, 3), keepdim=True)) + 0.5)))
        x = x * scale
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        a, b = x.chunk(2, 1)
        up = self.up(F.avg_pool2d(a, 2))
        x = torch.cat([F.interpolate(F.pad(x, (1, 1, 0, 0)), scale_factor=2.0)[:, :, ::2, 1:-1:2][..., :w], up], 1)
        x = F.silu(self.head(x)).flatten(2)
        return x * F.softmax(x, -1) * 64


class Attention(nn.Module):
    """A transformer's block on patches, with a class token and positions."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.class_token = nn.Parameter(torch.randn(1, 1, 8) * 0.5)
        self.pos_embedding = nn.Parameter(torch.randn(1, 5, 8) * 0.5)
        self.ln_1 = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.ln_2 = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.layer_scale = nn.Parameter(torch.rand(8))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embedding
        n, t, c = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        a = torch.softmax(q @ k.transpose(-2, -1) * 0.5, -1) @ v
        x = x + self.out(a.transpose(1, 2).reshape(n, t, c))
        x = x + self.layer_scale * self.mlp(self.ln_2(x))
        return x[:, 0]


class Quantized(nn.Module):
    """Fake quantization as QAT has it: weights by channel, activations by tensor."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.fc = nn.Linear(6, 4)
        for name, layer in (("conv_scale", self.conv), ("fc_scale", self.fc)):
            w = layer.weight.detach()
            self.register_buffer(name, w.abs().amax(tuple(range(1, w.dim()))) / 127)

    def forward(self, x):
        def by_channel(w, scale):
            return torch.fake_quantize_per_channel_affine(w, scale, torch.zeros(w.shape[0], dtype=torch.int32), 0, -128, 127)

        def by_tensor(t, scale, zero):
            return torch.fake_quantize_per_tensor_affine(t, scale, zero, 0, 255)

        x = by_tensor(x, 0.03125, 128)
        x = by_tensor(F.relu(F.conv2d(x, by_channel(self.conv.weight, self.conv_scale), self.conv.bias, padding=1)), 0.0107421875, 0)
        x = by_tensor(F.adaptive_avg_pool2d(x, 1), 0.0048828125, 0)
        return F.linear(torch.flatten(x, 1), by_channel(self.fc.weight, self.fc_scale), self.fc.bias)


def season(module):
    """Statistics and weights of norms as training leaves them."""
    with torch.no_grad():
        for name, t in module.state_dict().items():
            if name.endswith("running_mean"):
                t.normal_(0, 0.2)
            elif name.endswith("running_var") or (t.dim() == 1 and name.endswith("weight")):
                t.uniform_(0.6, 1.4)


def export(name, module, x, **options):
    if options.get("dynamo", True):
        shapes = ({0: torch.export.Dim("batch")},)
        program = torch.onnx.export(module, (x,), dynamo=True, verbose=False, dynamic_shapes=shapes, input_names=["input"],
                                    output_names=["output"], external_data=False)
        model = program.model_proto
        for node in model.graph.node:  # stack traces, which have paths
            del node.metadata_props[:]
            node.doc_string = ""
        for value in list(model.graph.value_info) + list(model.graph.input) + list(model.graph.output):
            del value.metadata_props[:]
        for tensor in model.graph.initializer:
            del tensor.metadata_props[:]
        del model.graph.metadata_props[:]
        del model.metadata_props[:]
        del model.graph.value_info[:]
        (FOLDER / f"{name}.onnx").write_bytes(model.SerializeToString())
    else:
        torch.onnx.export(module, (x,), str(FOLDER / f"{name}.onnx"), input_names=["input"], output_names=["output"],
                          dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}}, **options)


def add(golden, name, make, keeps_norms=False, script_only=False):
    for script in (True,) if script_only or keeps_norms else (False, True):
        torch.manual_seed(7)
        module = make().eval()
        season(module)
        x = torch.randn(2, 3, 8, 8)
        file = name + ("_script" if script and not script_only and not keeps_norms else "")
        options = {"dynamo": False, "opset_version": 17} if script else {}
        if keeps_norms:
            options |= {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
            module.train()  # BatchNormalization in training mode, with momentum
        export(file, copy.deepcopy(module), x, **options)
        if keeps_norms:  # the exporter ran it, which the file's statistics show
            module.load_state_dict(tensors_of(file), strict=False)
        outputs = [module.eval()(x)]
        tensors = step(module.train(), x) if keeps_norms else None
        golden.add(file, "onnx", inputs=[x], outputs=outputs, tensors=tensors)


def tensors_of(file):
    graph = onnx.load(FOLDER / f"{file}.onnx").graph
    return {t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in graph.initializer}


def step(module, x):
    """State after a step of SGD on the mean of squares, with a rate of 0.5."""
    loss = module(x).square().mean()
    loss.backward()
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    state = {k: v for k, v in module.state_dict().items() if not k.endswith("num_batches_tracked")}
    return {"loss": loss.detach(), **state}


def main():
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    FOLDER.mkdir(exist_ok=True)
    golden = GoldenFile("onnx.json")
    add(golden, "residual", Residual)
    add(golden, "mobile", Mobile)
    add(golden, "attention", Attention)
    add(golden, "residual_norms", Residual, keeps_norms=True)
    add(golden, "quantized", Quantized, script_only=True)
    golden.write()


if __name__ == "__main__":
    main()
