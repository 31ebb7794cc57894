# SPDX-License-Identifier: Apache-2.0
"""training.json: small trainings in f32, and in bf16 and f16 under autocast with gradient scaling."""
import torch
import torch.nn.functional as F
from golden_format import GoldenFile, values

F32 = torch.float32
LOW = {"bf16": torch.bfloat16, "f16": torch.float16}


def data(generator, samples, features, classes, noise):
    x = values(generator, samples, features, dtype=F32)
    teacher = values(generator, features, classes, dtype=F32)
    return x, (x @ teacher + noise * values(generator, samples, classes, dtype=F32)).argmax(1)


def weights(generator, *sizes):
    result = []
    for fan_in, fan_out in zip(sizes, sizes[1:]):
        bound = fan_in**-0.5
        result += [values(generator, fan_out, fan_in, dtype=F32, low=-bound, high=bound),
                   values(generator, fan_out, dtype=F32, low=-bound, high=bound)]
    return result


class WideGradLinear(torch.autograd.Function):
    """A linear layer in 16 bits, accumulated in f32, whose weight gradients stay in f32."""

    @staticmethod
    def forward(ctx, x, w, b, low):
        xl, wl, bl = x.to(low), w.to(low), b.to(low)
        ctx.save_for_backward(xl, wl)
        ctx.x_dtype = x.dtype
        return (xl.float() @ wl.float().T + bl.float()).to(low)

    @staticmethod
    def backward(ctx, g):
        xl, wl = ctx.saved_tensors
        return ((g.float() @ wl.float()).to(g.dtype).to(ctx.x_dtype), g.float().T @ xl.float(), g.float().sum(0), None)


def train(start, x, y, mode, steps, wide_grads=False, order=None, dtype=F32, rate=0.1):
    """mode: f32, bf16 or f16. Returns the curves of loss, scale and steps that ran, and the parameters at the end."""
    params = [p.clone().to(dtype).requires_grad_() for p in start]
    if order is not None:
        x, y = x[order], y[order]
    x = x.to(dtype)
    optimizer = torch.optim.SGD(params, lr=rate, momentum=0.9, foreach=False, fused=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=5, enabled=mode == "f16")
    losses, scales, ran = [], [], []
    for _ in range(steps):
        optimizer.zero_grad()
        w1, b1, w2, b2 = params
        if mode in LOW and wide_grads:
            h = F.relu(WideGradLinear.apply(x, w1, b1, LOW[mode]))
            loss = F.cross_entropy(WideGradLinear.apply(h, w2, b2, LOW[mode]).float(), y)
        else:
            with torch.autocast("cpu", dtype=LOW.get(mode, torch.bfloat16), enabled=mode in LOW):
                loss = F.cross_entropy(F.linear(F.relu(F.linear(x, w1, b1)), w2, b2), y)
        scaler.scale(loss).backward()
        before = params[0].detach().clone()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        ran.append(int(not torch.equal(before, params[0].detach())))
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(scales), torch.tensor(ran), [p.detach() for p in params]


def tiny(file):
    generator = torch.Generator().manual_seed(20269)
    x, y = data(generator, 64, 8, 4, 6.0)
    start = weights(generator, 8, 16, 4)
    exact = train(start, x, y, "f32", 60, dtype=torch.float64)[0]
    curves = {}
    for mode, wide in (("f32", False), ("bf16", False), ("bf16", True), ("f16", False), ("f16", True)):
        losses, scales, ran, _ = train(start, x, y, mode, 60, wide)
        spread = torch.zeros(60, dtype=torch.float64)
        for seed in range(12):
            order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
            other = train(start, x, y, mode, 60, wide, order)
            assert torch.equal(other[1], scales), "the scale depends on the order of the sums: choose other data"
            spread = torch.maximum(spread, (other[0] - losses).abs())
        curves[mode, wide] = losses
        tensors = {"loss": losses, "spread": torch.cummax(spread, 0).values}
        attributes = {"mode": mode, "lr": 0.1, "momentum": 0.9, "steps": 60, "weight_grads": "f32" if wide or mode == "f32" else mode,
                      "first": float(losses[0]), "last": float(losses[-1])}
        if mode == "f32":
            tensors["loss_f64"] = exact
        if mode == "f16":
            tensors["scale"], tensors["ran"] = scales, ran
            attributes.update({"init_scale": 65536.0, "growth_interval": 5})
        file.add(f"mlp_8_16_4/{mode}{'_wide_grads' if wide else ''}", "training", "training", attributes, [x, y, *start], tensors=tensors)
    for key, losses in curves.items():
        gap = (losses - curves["f32", False]).abs().max().item()
        print(f"  {key}: loss {losses[0]:.6f} {losses[10]:.6f} {losses[30]:.6f} {losses[59]:.6f}, largest gap to f32 {gap:.4f}")


def steps_with_weights(file):
    generator = torch.Generator().manual_seed(20270)
    x, y = data(generator, 16, 64, 10, 0.5)
    start = weights(generator, 64, 32, 10)
    for name, make, attributes in (
            ("sgd", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False, fused=False), {"lr": 0.1, "momentum": 0.9}),
            ("adam", lambda p: torch.optim.Adam(p, lr=0.01, foreach=False, fused=False), {"lr": 0.01})):
        params = [p.clone().requires_grad_() for p in start]
        optimizer = make(params)
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            w1, b1, w2, b2 = params
            loss = F.cross_entropy(F.linear(F.relu(F.linear(x, w1, b1)), w2, b2), y)
            loss.backward()
            if step == 0:
                first = [p.grad.clone() for p in params]
            optimizer.step()
            losses.append(loss.item())
        file.add(f"mlp_64_32_10/{name}", "training", "training", {"mode": "f32", "optimizer": name, "steps": 5, **attributes},
                 [x, y, *start], outputs=[p.detach() for p in params], grads=[None, None, *first],
                 tensors={"loss": torch.tensor(losses, dtype=F32)})


def make():
    file = GoldenFile("training.json")
    tiny(file)
    steps_with_weights(file)
    file.write()
