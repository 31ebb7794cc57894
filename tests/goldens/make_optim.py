# SPDX-License-Identifier: Apache-2.0
"""optim.json: trajectories of optimizers, learning-rate schedules, clipping and averages."""
import torch
from golden_format import DTYPES, GoldenFile, values
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

F32, F64 = torch.float32, torch.float64
SHAPES = ((3, 4), (5,), (2, 2, 2))


def trajectory(file, name, op, make, dtype, steps, groups=None, attributes=None, seed=20265):
    """Given gradients, the same for every configuration. `groups` lists, for each group, its parameters and own options."""
    generator = torch.Generator().manual_seed(seed)
    params = [values(generator, *s, dtype=dtype).requires_grad_() for s in SHAPES]
    start = [p.detach().clone() for p in params]
    grads = [[values(generator, *s, dtype=dtype) for s in SHAPES] for _ in range(steps)]
    if groups is None:
        optimizer = make(params)
    else:
        optimizer = make([{"params": [params[i] for i in g["params"]], **g["options"]} for g in groups])
        attributes = dict(attributes or {})
        attributes["groups"] = len(groups)
        for index, g in enumerate(groups):
            attributes[f"group{index}.params"] = g["params"]
            attributes.update({f"group{index}.{k}": v for k, v in g["options"].items()})
    history = [[] for _ in params]
    for step in range(steps):
        for p, g in zip(params, grads[step]):
            p.grad = g.clone()
        optimizer.step()
        for h, p in zip(history, params):
            h.append(p.detach().clone())
    tensors = {f"grad{i}": torch.stack([grads[s][i] for s in range(steps)]) for i in range(len(params))}
    for i, p in enumerate(params):
        for key, state in optimizer.state.get(p, {}).items():
            if isinstance(state, torch.Tensor):
                tensors[f"{key}{i}"] = state.to(F64) if key == "step" else state
    file.add(f"{name}/{DTYPES[dtype]}", op, op, {"steps": steps, **(attributes or {})}, start,
             outputs=[torch.stack(h) for h in history], tensors=tensors)


def optimizers(file):
    common = {"foreach": False, "fused": False}
    sgd = [("plain", {"lr": 0.1}), ("momentum", {"lr": 0.1, "momentum": 0.9}),
           ("dampening", {"lr": 0.05, "momentum": 0.8, "dampening": 0.3}),
           ("nesterov", {"lr": 0.05, "momentum": 0.9, "nesterov": True}), ("weight_decay", {"lr": 0.1, "weight_decay": 0.05}),
           ("all", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
           ("maximize", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "maximize": True})]
    adam = [("plain", {"lr": 0.01}), ("betas", {"lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-4}),
            ("amsgrad", {"lr": 0.01, "amsgrad": True}), ("weight_decay", {"lr": 0.01, "weight_decay": 0.1}),
            ("all", {"lr": 0.01, "weight_decay": 0.05, "amsgrad": True, "maximize": True})]
    groups = [{"params": [0, 2], "options": {"lr": 0.02, "weight_decay": 0.1}}, {"params": [1], "options": {}}]
    for dtype in (F32, F64):
        for name, options in sgd:
            trajectory(file, f"sgd/{name}", "SGD", lambda p, o=options: torch.optim.SGD(p, **o, **common), dtype, 12, attributes=options)
        for kind, cls in (("Adam", torch.optim.Adam), ("AdamW", torch.optim.AdamW)):
            for name, options in adam:
                given = {**options, "betas": tuple(options.get("betas", (0.9, 0.999)))}
                # AdamW's default decay is 0.01: said in the file, so that the test needs no default of PyTorch.
                decay = {"weight_decay": options.get("weight_decay", 0.01 if kind == "AdamW" else 0.0)}
                trajectory(file, f"{kind.lower()}/{name}", kind, lambda p, c=cls, o={**given, **decay}: c(p, **o, **common), dtype, 15,
                           attributes={**options, **decay})
        base = {"lr": 0.1, "momentum": 0.9}
        trajectory(file, "sgd/groups", "SGD", lambda p: torch.optim.SGD(p, **base, **common), dtype, 10, groups, base)
        trajectory(file, "adamw/groups", "AdamW", lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.0, **common), dtype, 10, groups,
                   {"lr": 0.05, "weight_decay": 0.0})


def missing_grads(file):
    """A parameter without a gradient is left alone, its state too; zero gradients are not the same as none."""
    for op, cls, options in (("SGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
                             ("Adam", torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.0})):
        generator = torch.Generator().manual_seed(20266)
        params = [values(generator, 3).requires_grad_() for _ in range(3)]
        start = [p.detach().clone() for p in params]
        optimizer = cls(params, **options, foreach=False, fused=False)
        grads = values(generator, 6, 3)
        history = [[], [], []]
        for step in range(6):
            params[0].grad = grads[step].clone()
            params[1].grad = grads[step].clone() if step % 2 else None
            params[2].grad = torch.zeros(3, dtype=F64)
            optimizer.step()
            for h, p in zip(history, params):
                h.append(p.detach().clone())
        file.add(f"missing_grads/{op}", op, op, {**options, "case": "missing_grads"}, start, outputs=[torch.stack(h) for h in history],
                 tensors={"grad": grads})


def quadratic(x):
    """Half x' A x - b' x with A = [[3, 1, 0], [1, 2, 0.5], [0, 0.5, 1]] and b = [1, -2, 0.5]."""
    a = torch.tensor([[3, 1, 0], [1, 2, 0.5], [0, 0.5, 1]], dtype=x.dtype)
    b = torch.tensor([1, -2, 0.5], dtype=x.dtype)
    return 0.5 * x.dot(a.mv(x)) - b.dot(x)


def parabola(x):
    """Half the square of x: with lr L the first trial from 1 is at 1 - L, whose slope against the first one's is L - 1."""
    return 0.5 * x.dot(x)


def rosenbrock(x):
    """Sum of 100 (x[i+1] - x[i]^2)^2 + (1 - x[i])^2."""
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def lbfgs(file):
    for name, function, start, options, steps, dtypes in (
            ("quadratic", quadratic, [2.0, -1.0, 3.0], {"lr": 0.3, "max_iter": 4, "history_size": 5, "line_search": "none"}, 6, (F32, F64)),
            ("quadratic_wolfe", quadratic, [2.0, -1.0, 3.0], {"lr": 1.0, "max_iter": 3, "history_size": 5, "line_search": "strong_wolfe"}, 4, (F32, F64)),
            ("rosenbrock_wolfe", rosenbrock, [-1.2, 1.0], {"lr": 1.0, "max_iter": 5, "history_size": 10, "line_search": "strong_wolfe"}, 8, (F64,)),
            ("rosenbrock", rosenbrock, [-1.2, 1.0], {"lr": 0.001, "max_iter": 5, "history_size": 3, "line_search": "none"}, 6, (F64,)),
            ("rosenbrock4_wolfe", rosenbrock, [-1.2, 1.0, 0.5, -0.3], {"lr": 1.0, "max_iter": 8, "history_size": 3, "line_search": "strong_wolfe"}, 6, (F64,)),
            ("max_eval", rosenbrock, [-1.2, 1.0], {"lr": 1.0, "max_iter": 20, "max_eval": 6, "history_size": 10, "line_search": "strong_wolfe"}, 4, (F64,)),
            ("rosenbrock_long_step", rosenbrock, [-1.4, -0.9], {"lr": 2.0, "max_iter": 9, "max_eval": 18, "history_size": 5, "line_search": "strong_wolfe"}, 2, (F64,)),
            ("quadratic_tolerance", quadratic, [1.7, -0.6, 1.8], {"lr": 0.02, "max_iter": 11, "max_eval": 35, "history_size": 4, "line_search": "strong_wolfe", "tolerance_change": 1e-3}, 2, (F64,)),
            ("parabola_tolerance", parabola, [2.0, -0.2], {"lr": 0.5, "max_iter": 11, "max_eval": 13, "history_size": 1, "line_search": "strong_wolfe", "tolerance_grad": 1.0}, 2, (F64,)),
            # Just within the curvature condition's 0.9, and just outside; both within the decrease that is asked for.
            ("parabola_accepted", parabola, [1.0], {"lr": 1.89, "max_iter": 1, "history_size": 5, "line_search": "strong_wolfe", "max_eval": 9}, 2, (F64,)),
            ("parabola_refused", parabola, [1.0], {"lr": 1.91, "max_iter": 1, "history_size": 5, "line_search": "strong_wolfe", "max_eval": 9}, 2, (F64,))):
        options = {"tolerance_grad": 1e-7, "tolerance_change": 1e-9, **options}
        for dtype in dtypes:
            x = torch.tensor(start, dtype=dtype, requires_grad=True)
            search = None if options["line_search"] == "none" else "strong_wolfe"
            optimizer = torch.optim.LBFGS([x], lr=options["lr"], max_iter=options["max_iter"], max_eval=options.get("max_eval"),
                                          history_size=options["history_size"], line_search_fn=search,
                                          tolerance_grad=options["tolerance_grad"], tolerance_change=options["tolerance_change"])
            points, losses, evaluations = [], [], []

            def closure():
                optimizer.zero_grad()
                loss = function(x)
                loss.backward()
                return loss

            for _ in range(steps):
                losses.append(optimizer.step(closure).item())
                points.append(x.detach().clone())
                evaluations.append(optimizer.state[x]["func_evals"])
            file.add(f"lbfgs/{name}/{DTYPES[dtype]}", "LBFGS", "LBFGS",
                     {"function": name.split("_")[0].rstrip("4"), "steps": steps, **options},
                     [torch.tensor(start, dtype=dtype)], outputs=[torch.stack(points)],
                     tensors={"loss": torch.tensor(losses, dtype=dtype), "evaluations": torch.tensor(evaluations)})


def clipping(file):
    generator = torch.Generator().manual_seed(20267)
    grads = [values(generator, *s) * 3 for s in SHAPES]
    broken = [g.clone() for g in grads]
    broken[1][2] = float("inf")
    for dtype in (F32, F64):
        for index, (max_norm, norm_type, given) in enumerate([(1.0, 2.0, grads), (100.0, 2.0, grads), (2.5, 1.0, grads), (1.5, float("inf"), grads),
                                                              (2.0, 3.0, grads), (0.0, 2.0, grads), (1.0, 2.0, broken)]):
            params = [torch.zeros(s, dtype=dtype, requires_grad=True) for s in SHAPES]
            for p, g in zip(params, given):
                p.grad = g.to(dtype).clone()
            before = [p.grad.clone() for p in params]
            total = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, foreach=False)
            file.add(f"clip_grad_norm_/{index}/{DTYPES[dtype]}", "clip_grad_norm_", "nn.utils.clip_grad_norm_",
                     {"max_norm": max_norm, "norm_type": norm_type}, before, outputs=[p.grad for p in params], tensors={"norm": total})
        params = [torch.zeros(s, dtype=dtype, requires_grad=True) for s in SHAPES]
        for p, g in zip(params, grads):
            p.grad = g.to(dtype).clone()
        before = [p.grad.clone() for p in params]
        torch.nn.utils.clip_grad_value_(params, 0.75)
        file.add(f"clip_grad_value_/{DTYPES[dtype]}", "clip_grad_value_", "nn.utils.clip_grad_value_", {"clip_value": 0.75}, before,
                 outputs=[p.grad for p in params])


def averages(file):
    generator = torch.Generator().manual_seed(20268)
    weights = values(generator, 12, 4)
    for name, decay in (("ema", 0.9), ("ema", 0.999), ("swa", None)):
        model = torch.nn.Linear(4, 1, bias=False).double()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay) if decay else None)
        history = []
        for row in weights:
            with torch.no_grad():
                model.weight.copy_(row.reshape(1, 4))
            average.update_parameters(model)
            history.append(average.module.weight.detach().reshape(4).clone())
        file.add(f"{name}/{decay}", name, "optim.swa_utils.AveragedModel", {"decay": decay, "note": "the first update copies"}, [weights],
                 outputs=[torch.stack(history)])


def schedules(file):
    def run(name, op, make, steps, attributes, lr=0.1, groups=1, metrics=None, momentum=None, betas=None):
        params = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr * (i + 1)} for i in range(groups)]
        if betas:
            optimizer = torch.optim.Adam(params, betas=betas)
        else:
            optimizer = torch.optim.SGD(params, momentum=momentum or 0.0)
        schedule = make(optimizer)
        rates, moments = [[g["lr"] for g in optimizer.param_groups]], []
        moment = lambda: optimizer.param_groups[0]["betas"][0] if betas else optimizer.param_groups[0]["momentum"]
        moments.append(moment())
        for step in range(steps):
            optimizer.step()
            schedule.step(*([metrics[step]] if metrics else []))
            rates.append([g["lr"] for g in optimizer.param_groups])
            moments.append(moment())
        tensors = {"lr": torch.tensor(rates, dtype=F64)}
        if op == "OneCycleLR":
            tensors["momentum"] = torch.tensor(moments, dtype=F64)
        if metrics:
            tensors["metric"] = torch.tensor(metrics, dtype=F64)
        file.add(name, op, op, {"lr": lr, "groups": groups, "steps": steps, **attributes}, tensors=tensors)

    for gamma, size in ((0.1, 3), (0.5, 1)):
        run(f"step/{size}", "StepLR", lambda o, g=gamma, s=size: lr_scheduler.StepLR(o, s, g), 10, {"step_size": size, "gamma": gamma}, groups=2)
    run("multi_step", "MultiStepLR", lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 8], 0.3), 12, {"milestones": [2, 5, 5, 8], "gamma": 0.3})
    run("exponential", "ExponentialLR", lambda o: lr_scheduler.ExponentialLR(o, 0.9), 10, {"gamma": 0.9})
    run("cosine", "CosineAnnealingLR", lambda o: lr_scheduler.CosineAnnealingLR(o, 10, 0.001), 10, {"t_max": 10, "eta_min": 0.001}, groups=2)
    run("cosine/past_the_end", "CosineAnnealingLR", lambda o: lr_scheduler.CosineAnnealingLR(o, 4), 12, {"t_max": 4, "eta_min": 0.0})
    run("linear", "LinearLR", lambda o: lr_scheduler.LinearLR(o, 0.25, 1.0, 5), 8, {"start_factor": 0.25, "end_factor": 1.0, "total_iters": 5})
    run("linear/down", "LinearLR", lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, 6), 8, {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 6})
    run("warm_up_then_cosine", "SequentialLR",
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 8)], [4]), 12,
        {"start_factor": 0.1, "total_iters": 4, "t_max": 8, "milestones": [4]})
    run("lambda", "LambdaLR", lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)), 8, {"function": "1 / (1 + step)"})
    metrics = [1.0, 0.9, 0.91, 0.905, 0.9, 0.95, 0.8, 0.79999, 0.8, 0.8, 0.8, 0.8, 0.8, 0.7, 0.75, 0.72, 0.71, 0.8, 0.9, 0.9, float("nan"), 0.6]
    for index, options in enumerate([{}, {"patience": 1}, {"patience": 2, "cooldown": 2, "factor": 0.5}, {"patience": 1, "mode": "max"},
                                     {"patience": 1, "threshold": 0.05, "threshold_mode": "abs"}, {"patience": 0, "min_lr": 0.02},
                                     {"patience": 0, "factor": 0.5, "eps": 0.02}]):
        full = {"mode": "min", "factor": 0.1, "patience": 10, "threshold": 1e-4, "threshold_mode": "rel", "cooldown": 0, "min_lr": 0.0,
                "eps": 1e-8, **options}
        run(f"plateau/{index}", "ReduceLROnPlateau", lambda o, f=full: lr_scheduler.ReduceLROnPlateau(o, **f), len(metrics), full,
            metrics=metrics)
    for index, (anneal, three, cycle) in enumerate([("cos", False, True), ("linear", False, True), ("cos", True, True), ("linear", True, True),
                                                    ("cos", False, False)]):
        options = {"max_lr": 0.5, "total_steps": 20, "pct_start": 0.3, "anneal_strategy": anneal, "cycle_momentum": cycle, "base_momentum": 0.85,
                   "max_momentum": 0.95, "div_factor": 25.0, "final_div_factor": 1e4, "three_phase": three}
        run(f"one_cycle/{index}", "OneCycleLR", lambda o, p=options: lr_scheduler.OneCycleLR(o, **p), 19, options, momentum=0.9)
    options = {"max_lr": 0.1, "total_steps": 10, "pct_start": 0.25, "anneal_strategy": "cos", "cycle_momentum": True, "base_momentum": 0.8,
               "max_momentum": 0.9, "div_factor": 10.0, "final_div_factor": 100.0, "three_phase": False}
    run("one_cycle/adam", "OneCycleLR", lambda o: lr_scheduler.OneCycleLR(o, **options), 9, {**options, "optimizer": "Adam"}, betas=(0.9, 0.999))


def make():
    file = GoldenFile("optim.json")
    for part in (optimizers, missing_grads, lbfgs, clipping, averages, schedules):
        part(file)
    file.write()
