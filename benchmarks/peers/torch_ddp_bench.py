#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's DistributedDataParallel with gloo on the CPU, case by case on request: bench_server.py says how to talk to it.

The script starts the other ranks by itself and passes each line on to them. `--threads N`: those of one rank.

Cases: parallel/NETWORK/GRADIENTS/bBATCH, one training step with BATCH samples a rank: zero_grad, forward, cross entropy,
backward, SGD with momentum 0.9. NETWORK mlp (784-512-512-10), resnet20 (CIFAR-10's shapes, channels-last) or wide (four hidden
layers of 2048); GRADIENTS f32, f16 and bf16 (PyTorch's compression hooks), or none (no_sync: nothing is sent). Gradients are
views of their buckets, which saves PyTorch a copy.
Facts: `bytes_sent` by a rank in a step, 2(n-1)/n of the gradients' bytes as a ring sends them, and the buffers that rank 0
broadcasts; `loopback_bytes`, the same as counted by the system, of all programs; `hidden`, the share of the communication during
which the backward pass was still running, by DistributedDataParallel's own timers.
"""
import functools
import os
import pathlib
import subprocess
import sys
import tempfile

from bench_server import Server, arguments

options = arguments()
os.environ["OMP_NUM_THREADS"] = str(options.threads)
RANKS = 2
RANK = int(os.environ.get("HALFSTEP_BENCH_RANK", "0"))
try:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel
except ImportError as failure:
    sys.exit(f"torch_ddp_bench: {failure}")

HOOKS = {"f16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
FACT_STEPS = 10


class Block(nn.Module):
    """CIFAR-10's: a shortcut without parameters where the shape stays, else a convolution of 1x1."""

    def __init__(self, before, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        same = stride == 1 and before == width
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x), inplace=True)


def resnet20():
    layers, before = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)], 16
    for width in (16, 32, 64):
        for i in range(3):
            layers.append(Block(before, width, 2 if i == 0 and width > 16 else 1))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def layers_of(*sizes):
    layers = []
    for before, after in zip(sizes, sizes[1:]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


NETWORKS = {"mlp": (lambda: layers_of(784, 512, 512, 10), 64, (784,)), "resnet20": (resnet20, 64, (3, 32, 32)),
            "wide": (lambda: layers_of(2048, 2048, 2048, 2048, 2048, 10), 16, (2048,))}


class Training:
    """Calling it makes one step."""

    def __init__(self, name, gradients):
        make, batch, sample = NETWORKS[name]
        torch.manual_seed(1)
        model = make()
        self.images, self.labels = torch.randn(batch, *sample), torch.randint(0, 10, (batch,))
        if len(sample) == 3:
            model = model.to(memory_format=torch.channels_last)
            self.images = self.images.contiguous(memory_format=torch.channels_last)
        self.net = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.gradients = gradients
        if gradients in HOOKS:
            self.net.register_comm_hook(None, HOOKS[gradients])
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)

    def __call__(self):
        self.optimizer.zero_grad()
        if self.gradients == "none":
            with self.net.no_sync():
                F.cross_entropy(self.net(self.images), self.labels).backward()
        else:
            F.cross_entropy(self.net(self.images), self.labels).backward()
        self.optimizer.step()

    def facts(self):
        if self.gradients == "none":
            return {}
        item = 2 if self.gradients in HOOKS else 4
        gradients = item * sum(p.numel() for p in self.net.parameters())
        buffers = sum(b.numel() * b.element_size() for b in self.net.buffers())
        found = {"bytes_sent": 2 * (RANKS - 1) / RANKS * gradients + (RANKS - 1) / RANKS * buffers}
        before = loopback_bytes()
        for _ in range(FACT_STEPS):
            self()
        if before is not None:
            found["loopback_bytes"] = (loopback_bytes() - before) / FACT_STEPS / RANKS
        hidden = self.hidden()
        return found if hidden is None else {**found, "hidden": hidden}

    def hidden(self):
        """What DistributedDataParallel noted of the last steps; None where this version of PyTorch notes nothing."""
        try:
            self.net._set_ddp_runtime_logging_sample_rate(1)
            for _ in range(FACT_STEPS):
                self()
            noted = self.net._get_ddp_logging_data()
            all_of_it, overlapped = noted["avg_backward_comm_time"], noted["avg_backward_compute_comm_overlap_time"]
        except (AttributeError, KeyError, RuntimeError):
            return None
        return min(1.0, overlapped / all_of_it) if all_of_it > 0 else None


def loopback_bytes():
    try:
        for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == "lo":
                return int(numbers.split()[0])
    except OSError:
        pass
    return None


class RankServer(Server):
    """All ranks run what rank 0 is asked for: they begin a repetition together, and it takes as long as that of the slowest."""

    def __init__(self, others, *rest):
        self.others = others
        super().__init__(*rest)

    def say(self, answer):
        if RANK == 0:
            super().say(answer)

    def lines(self):
        for line in sys.stdin:
            for other in self.others:
                other.stdin.write(line)
                other.stdin.flush()
            yield line

    @staticmethod
    def run(call, calls):
        dist.barrier()
        seconds = torch.tensor([Server.run(call, calls)], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()


def cases():
    return {f"parallel/{name}/{how}/b{batch}": functools.partial(Training, name, how)
            for name, (_, batch, _) in NETWORKS.items() for how in ("f32", "f16", "bf16", "none")}


def main():
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder:
        store = os.environ.setdefault("HALFSTEP_BENCH_STORE", str(pathlib.Path(folder) / "store"))
        others = []
        if RANK == 0:
            for rank in range(1, RANKS):
                others.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:]], stdin=subprocess.PIPE,
                                               stdout=subprocess.DEVNULL, text=True,
                                               env={**os.environ, "HALFSTEP_BENCH_RANK": str(rank)}))
        dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=RANK, world_size=RANKS)
        try:
            RankServer(others, "torch", torch.__version__, options.threads, cases()).serve()
        finally:
            for other in others:
                other.stdin.close()
        for other in others:
            try:
                other.wait(timeout=5)
            except subprocess.TimeoutExpired:
                other.kill()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
