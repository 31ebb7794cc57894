#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch on the CPU, case by case on request: bench_server.py says how to talk to it.

Cases (all times include Python's share, as a PyTorch user has it):
  mlp/DTYPE/OPTIMIZER/bBATCH     one training step of 784-512-512-10: zero_grad, forward, cross entropy, backward, step.
                                 DTYPE f32; bf16 and f16 under autocast, f16 with a GradScaler; f32_compiled with torch.compile
                                 (needs g++); f32_scaled is f32 with a GradScaler. OPTIMIZER sgd (lr 0.01, no momentum) or adam (lr 1e-3), PyTorch's defaults else.
  matmul/MxKxN/DTYPE             torch.mm
  dense/MxKxN/plain, .../bias    F.linear of batch M, K to N, in bf16, without and with a bias
  add/16/plain, .../recorded, .../autocast     torch.add of 16 floats, without and with requires_grad; the latter under bf16 autocast
  linear/1x16x16/plain, .../recorded, .../autocast     F.linear of batch 1, 16 to 16: under no_grad; with recorded weights; the latter under bf16 autocast
  region/enter                   entering and leaving an autocast region
  scaler/mlp_unscale             unscale_ and update over the MLP's 669,706 gradients
  network/NAME/DTYPE/bBATCH      one training step of a network (torch_networks.py); DTYPE also f32_compiled and bf16_compiled
  inference/NAME/f32/bBATCH      a call of such a network in eval() and inference_mode(); a detector's with decoded predictions
  loader/HOW/w2                  a picture of the folder HALFSTEP_BENCH_IMAGES, by a DataLoader of two workers; HOW pillow or torchvision
  pass/NAME/DTYPE                an op forward and backward (torch_passes.py)
  optimizer/KIND/HOW             step on 25 million parameters (50 tensors). KIND sgd (momentum 0.9), adam or adamw, HOW loop, foreach or fused
"""
import functools
import os
import sys

from bench_server import Server, arguments

options = arguments()
os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
try:
    import torch
except ImportError as failure:
    sys.exit(f"torch_bench: {failure}")
import torch.nn.functional as F

import torch_passes

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def mlp(dtype, kind, batch):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(),
                                torch.nn.Linear(512, 10))
    x, y = torch.randn(batch, 784), torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if kind == "sgd" else torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype in ("f16", "f32_scaled"))
    low = dtype in ("bf16", "f16")

    def loss_of(a, b):
        return F.cross_entropy(model(a), b)

    forward = torch.compile(loss_of) if dtype == "f32_compiled" else loss_of

    def step():
        optimizer.zero_grad()
        if low:
            with torch.autocast("cpu", dtype=DTYPES[dtype]):
                loss = forward(x, y)
        else:
            loss = forward(x, y)
        if scaler.is_enabled():
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()

    return step


def matmul(m, k, n, dtype):
    a, b = torch.randn(m, k).to(DTYPES[dtype]), torch.randn(k, n).to(DTYPES[dtype])
    return lambda: torch.mm(a, b)


def dense(batch, inputs, outputs, biased):
    x, w = torch.randn(batch, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    bias = torch.randn(outputs).bfloat16() if biased else None
    return lambda: F.linear(x, w, bias)


# A region is entered once for 64 calls, as one does in training, where it holds a whole forward pass.
def in_region(call):
    def many():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(64):
                call()

    many.calls = 64
    return many


def add(how):
    a, b = torch.randn(16, requires_grad=how != "plain"), torch.randn(16)
    call = functools.partial(torch.add, a, b)
    return in_region(call) if how == "autocast" else call


def region():
    def call():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pass

    return call


def linear(how):
    x, w, b = torch.randn(1, 16), torch.randn(16, 16, requires_grad=how != "plain"), torch.randn(16, requires_grad=how != "plain")

    def call():
        return F.linear(x, w, b)

    return in_region(call) if how == "autocast" else call


def unscale():
    shapes = [(512, 784), (512,), (512, 512), (512,), (10, 512), (10,)]
    params = [torch.zeros(s, requires_grad=True) for s in shapes]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD(params, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_factor=1.0000001)
    scaler.scale(torch.zeros(1))

    def call():
        scaler.unscale_(optimizer)
        scaler.update()

    return call


def optimizer_step(kind, how):
    params = [torch.randn(500, 1000, requires_grad=True) for _ in range(50)]
    for p in params:
        p.grad = torch.randn_like(p)
    flags = {"foreach": how == "foreach", "fused": how == "fused"}
    if kind == "sgd":
        optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9, **flags)
    else:
        optimizer = (torch.optim.AdamW if kind == "adamw" else torch.optim.Adam)(params, lr=1e-3, **flags)
    return optimizer.step


# torchvision may be missing: then only the cases that need it fail.
def training(name, how):
    import torch_networks

    return torch_networks.Training(name, how)


def inference(name, batch):
    import torch_networks

    return torch_networks.inference(name, batch)


def loader(decoder):
    import torch_networks

    return torch_networks.loader(decoder, 2)


def cases():
    bind = functools.partial
    table = {}
    for name, batch in (("resnet50", 16), ("resnet18_cifar", 128), ("mobilenet_v2", 32), ("yolov5n", 16), ("yolov5n_640", 4),
                        ("yolov5n_320", 4), ("gpt", 8)):
        for how in ("f32", "bf16", "f16", "f32_compiled", "bf16_compiled"):
            table[f"network/{name}/{how}/b{batch}"] = bind(training, name, how)
    for name in ("resnet50", "yolov5n"):
        for batch in (1, 32):
            table[f"inference/{name}/f32/b{batch}"] = bind(inference, name, batch)
    for decoder in ("pillow", "torchvision"):
        table[f"loader/{decoder}/w2"] = bind(loader, decoder)
    for dtype in ("f32", "bf16", "f16", "f32_compiled", "f32_scaled"):
        for kind in ("sgd", "adam"):
            for batch in (64, 1):
                table[f"mlp/{dtype}/{kind}/b{batch}"] = bind(mlp, dtype, kind, batch)
    for m, k, n in ((64, 784, 512), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048)):
        for dtype in DTYPES:
            table[f"matmul/{m}x{k}x{n}/{dtype}"] = bind(matmul, m, k, n, dtype)
    for m, k, n in ((512, 512, 512), (784, 2048, 512), (2048, 384, 1536), (2048, 1536, 384), (4096, 512, 512), (4096, 4096, 4096),
                    (3136, 256, 1024), (12544, 128, 512), (50176, 64, 256)):
        for how in ("plain", "bias"):
            table[f"dense/{m}x{k}x{n}/{how}"] = bind(dense, m, k, n, how == "bias")
    for how in ("plain", "recorded", "autocast"):
        table[f"add/16/{how}"] = bind(add, how)
        table[f"linear/1x16x16/{how}"] = bind(linear, how)
    table["region/enter"] = region
    table["scaler/mlp_unscale"] = unscale
    for kind in ("sgd", "adam", "adamw"):
        for how in ("loop", "foreach", "fused"):
            table[f"optimizer/{kind}/{how}"] = bind(optimizer_step, kind, how)
    table.update(torch_passes.cases(DTYPES))
    return table


if __name__ == "__main__":
    torch.set_num_threads(options.threads)
    Server("torch", torch.__version__, options.threads, cases()).serve()
