#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch on a CUDA device, case by case on request: bench_server.py says how to talk to it.

As an expert runs it: channels-last, cudnn.benchmark, fused optimizers where they are faster, gradients set to None; TF32 is as
PyTorch has it. A repetition ends with torch.cuda.synchronize().

Cases, named as in benchmarks/server/device_cases.cpp; HOW is f16 (autocast and GradScaler) or bf16 (autocast):
  gpu/copy                           1 GiB from one tensor into another
  gpu/resnet50/HOW/bN                a training step; gpu/resnet50/HOW_compiled/bN with torch.compile
  gpu/mlp/HOW/b64, f32 too           a training step of 784-512-512-10; HOW_graph: replayed by a CUDA graph, with capturable Adam for
                                     f16 (SGD, whose step a scaler skips on the device, elsewhere)
  gpu/gpt/HOW/bN, HOW_compiled       a training step of 6 layers, 384 wide, 256 tokens
  gpu/unscale/DTYPE                  GradScaler.unscale_ and update over 10^8 gradients in 100 tensors
  gpu/optimizer/KIND/DTYPE           a step on 10^8 parameters in DTYPE with float32 master weights and moments; KIND adamw or sgd
  gpu/linear/MxKxN, gpu/conv/...     one call in f16
With --small the sizes are tiny, to try the cases; with --device cpu they run there.
"""
import argparse
import functools
import os
import sys

from bench_server import Server

parser = argparse.ArgumentParser()
parser.add_argument("--threads", type=int, default=8)
parser.add_argument("--device", default="cuda")
parser.add_argument("--small", action="store_true")
options = parser.parse_args()
os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
try:
    import torch
except ImportError as failure:
    sys.exit(f"torch_cuda_bench: {failure}")
import torch.nn.functional as F

if options.device != "cpu" and not torch.cuda.is_available():
    sys.exit("torch_cuda_bench: this PyTorch finds no CUDA device")
DEVICE = torch.device(options.device)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SMALL = options.small
PARAMETERS = 10**5 if SMALL else 10**8
WORDS, LENGTH, WIDTH, LAYERS = 65, 256, 384, 6


def synchronize():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


class DeviceServer(Server):
    def prepare(self, case, min_ms):
        if case not in self.ready:
            self.ready.clear()  # gigabytes each
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
        return super().prepare(case, min_ms)

    @staticmethod
    def run(call, calls):
        import time

        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        return time.perf_counter() - start


class Step:
    """Calling it makes a training step."""

    def __init__(self, model, optimizer, inputs, targets, how):
        dtype, _, self.extra = how.partition("_")
        self.model, self.optimizer, self.inputs, self.targets = model, optimizer, inputs, targets
        self.low = None if dtype == "f32" else DTYPES[dtype]
        self.scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype == "f16")
        self.forward = torch.compile(self._loss) if self.extra == "compiled" else self._loss
        self.graph = None
        if self.extra == "graph":
            self.capture()

    def _loss(self, inputs, targets):
        return F.cross_entropy(self.model(inputs), targets)

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, dtype=self.low or torch.bfloat16, enabled=self.low is not None):
            loss = self.forward(self.inputs, self.targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def capture(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def __call__(self):
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step()

    def facts(self):
        if DEVICE.type != "cuda":
            return {}
        return {"handed_out_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


def fused():
    return {"fused": True} if DEVICE.type == "cuda" else {}


def resnet50(how, batch):
    import torchvision

    torch.manual_seed(1)
    torch.backends.cudnn.benchmark = True
    size = 32 if SMALL else 224
    model = torchvision.models.resnet50().to(DEVICE, memory_format=torch.channels_last)
    images = torch.randn(batch, 3, size, size, device=DEVICE).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device=DEVICE)
    return Step(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **fused()), images, labels, how)


def mlp(how, batch):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(),
                                torch.nn.Linear(512, 10)).to(DEVICE)
    inputs, targets = torch.randn(batch, 784, device=DEVICE), torch.randint(0, 10, (batch,), device=DEVICE)
    if how == "f16_graph":  # the scaler's step reads nothing back only with an optimizer that takes found_inf itself
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, **fused())
    return Step(model, optimizer, inputs, targets, how)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.place = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.word(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x))).view(-1, WORDS)


def gpt(how, batch):
    torch.manual_seed(1)
    model = Gpt().to(DEVICE)
    tokens = torch.randint(0, WORDS, (batch, LENGTH), device=DEVICE)
    targets = torch.randint(0, WORDS, (batch * LENGTH,), device=DEVICE)
    return Step(model, torch.optim.AdamW(model.parameters(), lr=1e-3, **fused()), tokens, targets, how)


def copy():
    count = (1 << 20 if SMALL else 1 << 30) // 4
    source, target = torch.zeros(count, device=DEVICE), torch.empty(count, device=DEVICE)
    return lambda: target.copy_(source)


def product(dtype):
    side = 64 if SMALL else 8192
    a, b = torch.randn(side, side, device=DEVICE).to(dtype), torch.randn(side, side, device=DEVICE).to(dtype)
    return lambda: F.linear(a, b)


def many(dtype):
    rows = PARAMETERS // 100 // 1000
    parameters = [torch.randn(rows, 1000, device=DEVICE).to(dtype).requires_grad_() for _ in range(100)]
    for p in parameters:
        p.grad = torch.randn(rows, 1000, device=DEVICE).to(dtype)
    return parameters


def unscale(dtype):
    parameters = many(dtype)
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1.0, growth_factor=1.0000001)
    scaler.scale(torch.zeros(1, device=DEVICE))
    if dtype == torch.float16:  # PyTorch refuses to unscale f16 gradients: its users call the op behind it
        grads, found, inverse = [p.grad for p in parameters], torch.zeros(1, device=DEVICE), torch.ones(1, device=DEVICE)
        return lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)

    def call():
        scaler.unscale_(optimizer)
        scaler.update()

    return call


def optimizer_step(kind, dtype):
    """With 16-bit parameters as the usual recipe has it: gradients are copied to float32, masters updated, copied back."""
    parameters = many(dtype)
    if dtype == torch.float32:
        return torch.optim.AdamW(parameters, lr=1e-3, **fused()).step
    masters = [p.detach().float().requires_grad_() for p in parameters]
    for m in masters:
        m.grad = torch.empty_like(m)
    if kind == "sgd":
        optimizer = torch.optim.SGD(masters, lr=1e-3, momentum=0.9, **fused())
    else:
        optimizer = torch.optim.AdamW(masters, lr=1e-3, **fused())
    low_grads, grads = [p.grad for p in parameters], [m.grad for m in masters]
    low, high = [p.detach() for p in parameters], [m.detach() for m in masters]

    def call():
        torch._foreach_copy_(grads, low_grads)
        optimizer.step()
        torch._foreach_copy_(low, high)

    return call


def linear(m, k, n):
    a, b = torch.randn(m, k, device=DEVICE).half(), torch.randn(n, k, device=DEVICE).half()
    return lambda: F.linear(a, b)


def conv(kernel, inputs, outputs, stride, size, batch):
    torch.backends.cudnn.benchmark = True
    x = torch.randn(batch, inputs, size, size, device=DEVICE).half().contiguous(memory_format=torch.channels_last)
    w = torch.randn(outputs, inputs, kernel, kernel, device=DEVICE).half().contiguous(memory_format=torch.channels_last)
    return lambda: F.conv2d(x, w, stride=stride, padding=kernel // 2)


def resnet50_convolutions():
    """(kernel, in, out, stride, size of a side) of each distinct one, in the order of benchmarks/server/layers.cpp."""
    yield 7, 3, 64, 2, 224
    channels, size = 64, 56
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        out = size // stride
        yield 1, channels, width, 1, size
        yield 3, width, width, stride, size
        yield 1, width, 4 * width, 1, out
        yield 1, channels, 4 * width, stride, size
        yield 1, 4 * width, width, 1, out
        if stride == 2:
            yield 3, width, width, 1, out
        channels, size = 4 * width, out


def cases():
    bind = functools.partial
    images, texts, part = (2, 1, 8) if SMALL else (256, 64, 1)
    table = {"gpu/copy": copy}
    for name, dtype in DTYPES.items():
        table[f"gpu/product/{name}"] = bind(product, dtype)
    for how in ("f16", "bf16", "f16_compiled", "bf16_compiled"):
        table[f"gpu/resnet50/{how}/b{images}"] = bind(resnet50, how, images)
        table[f"gpu/gpt/{how}/b{texts}"] = bind(gpt, how, texts)
    for how in ("f32", "f16", "bf16", "f16_graph", "bf16_graph", "f16_compiled", "bf16_compiled"):
        table[f"gpu/mlp/{how}/b64"] = bind(mlp, how, 64)
    for name in ("f32", "f16"):
        table[f"gpu/unscale/{name}"] = bind(unscale, DTYPES[name])
    for name in ("f16", "bf16"):
        table[f"gpu/optimizer/adamw/{name}"] = bind(optimizer_step, "adamw", DTYPES[name])
        table[f"gpu/optimizer/sgd/{name}"] = bind(optimizer_step, "sgd", DTYPES[name])
    table["gpu/optimizer/adamw/f32"] = bind(optimizer_step, "adamw", torch.float32)
    for m, k, n in ((64, 784, 512), (16384, 384, 1152), (16384, 384, 1536), (16384, 1536, 384), (256, 2048, 1000),
                    (4096, 4096, 4096)):
        m, k, n = m // part, k // part, n // part
        table[f"gpu/linear/{m}x{k}x{n}"] = bind(linear, m, k, n)
    for kernel, inputs, outputs, stride, size in resnet50_convolutions():
        side = max(size // 8, 7) if SMALL else size
        table[f"gpu/conv/{kernel}x{kernel}-{inputs}-{outputs}-s{stride}-{size}"] = bind(conv, kernel, inputs, outputs, stride, side, images)
    return table


if __name__ == "__main__":
    torch.set_num_threads(options.threads)
    DeviceServer("torch", torch.__version__, options.threads, cases()).serve()
