# SPDX-License-Identifier: Apache-2.0
"""scaler.json: trajectories, unscaling bit patterns and state dicts of PyTorch's GradScaler on the CPU."""
import random

import torch
from golden_format import GoldenFile

INJECTED = (0.0, float("inf"), float("nan"), float("-inf"))
F32 = torch.float32


def scaler_of(config):
    return torch.amp.GradScaler("cpu", init_scale=config["init_scale"], growth_factor=config["growth_factor"],
                                backoff_factor=config["backoff_factor"], growth_interval=config["growth_interval"])


def integers(values):
    return torch.tensor(values, dtype=torch.int64)


def reals(values):
    return torch.tensor(values, dtype=F32)


def trajectory(file, name, config, patterns, lr=1.0, unscale_first=()):
    """patterns[k][i] is what optimizer k's gradient holds at step i; unscale_first: optimizers that unscale_ is called on."""
    scaler = scaler_of(config)
    params = [torch.ones(1, dtype=F32, requires_grad=True) for _ in patterns]
    optimizers = [torch.optim.SGD([p], lr=lr, foreach=False, fused=False) for p in params]
    record = {key: [] for key in ("scale", "tracker")}
    for k in range(len(patterns)):
        record[f"ran{k}"], record[f"param{k}"] = [], []
    for step in range(len(patterns[0])):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # Each loss is its parameter, so that every gradient is 1 before scaling.
        for p, pattern in zip(params, patterns):
            scaler.scale(p.sum()).backward()
            if pattern[step]:
                p.grad.fill_(INJECTED[pattern[step]])
        for k in unscale_first:
            scaler.unscale_(optimizers[k])
        for k, (p, optimizer) in enumerate(zip(params, optimizers)):
            before = p.item()
            scaler.step(optimizer)
            record[f"ran{k}"].append(int(p.item() != before))
            record[f"param{k}"].append(p.item())
        scaler.update()
        record["scale"].append(scaler.get_scale())
        record["tracker"].append(scaler.state_dict()["_growth_tracker"])
    tensors = {"scale": reals(record["scale"]), "tracker": integers(record["tracker"])}
    for k, pattern in enumerate(patterns):
        tensors[f"found{k}"] = integers(pattern)
        tensors[f"ran{k}"] = integers(record[f"ran{k}"])
        tensors[f"param{k}"] = reals(record[f"param{k}"])
    state = scaler.state_dict()
    # 1e38 and the like: the state dict holds the float32 scale as a double.
    attributes = {**config, "lr": lr, "optimizers": len(patterns), "unscale_first": list(unscale_first),
                  "state.scale": float(state["scale"]), "state.growth_factor": state["growth_factor"],
                  "state.backoff_factor": state["backoff_factor"], "state.growth_interval": state["growth_interval"],
                  "state.growth_tracker": state["_growth_tracker"]}
    file.add(name, "grad_scaler", "amp.GradScaler", attributes, tensors=tensors)


def config(init_scale, growth_factor, backoff_factor, growth_interval):
    return {"init_scale": float(init_scale), "growth_factor": float(growth_factor), "backoff_factor": float(backoff_factor),
            "growth_interval": growth_interval}


def trajectories(file):
    trajectory(file, "reference", config(4, 2, 0.25, 2), [[0, 0, 1, 0, 2, 0, 0]])
    trajectory(file, "comparison", config(16, 2, 0.5, 3), [[0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0]])
    trajectory(file, "growth_stops_before_infinity", config(1e38, 16, 0.5, 1), [[0, 0, 0, 1, 0, 0]], lr=0.0625)
    trajectory(file, "near_the_top", config(1e38, 2, 0.5, 1), [[0, 0, 0, 0, 3, 0, 0]], lr=0.0625)
    trajectory(file, "down_to_zero", config(2, 2, 0.5, 2000), [[1] * 160])
    trajectory(file, "odd_factors", config(1000, 1.7, 0.3, 2), [[0, 0, 0, 0, 1, 0, 0, 0, 2, 3, 0, 0, 0, 0]])
    trajectory(file, "static", config(128, 2, 0.5, 2**31 - 1), [[0] * 8])
    trajectory(file, "two_optimizers", config(128, 2, 0.5, 2), [[0, 0, 1, 0, 0, 0, 0, 2], [0, 1, 0, 0, 0, 0, 3, 0]])
    trajectory(file, "two_optimizers_one_unscaled", config(128, 2, 0.5, 2), [[0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 3]], unscale_first=[0])
    trajectory(file, "three_optimizers", config(65536, 2, 0.5, 1), [[0, 0, 0, 1], [0, 1, 0, 0], [0, 1, 0, 0]], unscale_first=[0, 1, 2])
    chance = random.Random(20263)
    for index in range(12):
        c = config(2.0 ** chance.randint(0, 20), chance.choice([1.25, 1.5, 2, 3, 4]), chance.choice([0.1, 0.25, 0.5, 0.9]),
                   chance.randint(1, 6))
        bad = chance.choice([0.1, 0.3, 0.6])
        patterns = [[chance.randint(1, 3) if chance.random() < bad else 0 for _ in range(40)] for _ in range(chance.randint(1, 2))]
        trajectory(file, f"random_{index}", c, patterns, lr=0.5)


def unscaling(file):
    """What unscale_ writes, by bits: values are multiplied by the float32 of 1 / scale."""
    generator = torch.Generator().manual_seed(20264)
    plain = torch.tensor([1.0, 2.0, 3.0, 5.0, 7.0, 10.0])
    awkward = torch.cat([torch.randn(12, generator=generator) * 1000,
                         torch.tensor([0.0, -0.0, 1.17549435e-38, 3e-39, -1e-45, 3.4028235e38, -3.4028235e38, 65504.0])])
    broken = torch.tensor([8.0, float("inf"), 4.0, float("nan"), float("-inf"), 1.0])
    for index, (scale, grads) in enumerate([(3.0, plain), (3.0, awkward), (65536.0, awkward), (7.0, awkward), (1.0, awkward),
                                            (1000.0, awkward), (2.0**24, awkward), (4.0, broken), (1e-3, plain), (1e38, awkward)]):
        for dtype in (F32, torch.bfloat16):
            p = torch.zeros_like(grads, dtype=dtype, requires_grad=True)
            p.grad = grads.to(dtype)
            given = p.grad.clone()
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            scaler.scale(torch.zeros(1))
            optimizer = torch.optim.SGD([p], lr=1.0)
            scaler.unscale_(optimizer)
            found = sum(t.item() for t in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
            file.add(f"unscale_/{index}/{'f32' if dtype == F32 else 'bf16'}", "unscale_", "amp.GradScaler.unscale_",
                     {"scale": scale, "found_inf": bool(found)}, [given], outputs=[p.grad])


def make():
    file = GoldenFile("scaler.json")
    trajectories(file)
    unscaling(file)
    file.write()
