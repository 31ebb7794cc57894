# SPDX-License-Identifier: Apache-2.0
"""What is measured beside what, and the goals."""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

OURS = "halfstep"
COLUMN_NAMES = {"torch": "PyTorch", "torch_best": "PyTorch, best", "jax": "JAX", "torch_kept": "PyTorch, pages kept",
                "torch_compiled": "PyTorch, pages kept, compiled", "torch_f32": "PyTorch f32", "pillow": "PyTorch, Pillow",
                "torchvision": "PyTorch, torchvision", "f32": "own f32", "without": "without",
                "plain": "as it is", "quiet": "alone",
                "winograd2": "Winograd 2x2", "winograd4": "Winograd 4x4",
                "torch_without": "PyTorch without", "bf16": "own bf16", "onnx_f32": "ONNX Runtime f32",
                "onnx_int8": "ONNX Runtime int8"}
FACT_NAMES = {"peak_bytes": "peak", "before_bytes": "before", "handed_out_bytes": "tensors", "saved_bytes": "saved",
              "outside_convolutions": "outside convolutions", "images": "images", "bytes_sent": "bytes sent"}


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Who is timed beside us: a column of the table, the program that is asked, and the case it is asked for."""

    column: str
    peer: str
    case: str
    timed: bool = True  # else only its facts are asked for
    rate: float = 0.0  # operations in its dtype for one of float32, at the machine's peak; 0: its limit isn't shown


@dataclasses.dataclass(frozen=True)
class Goal:
    """One of: a column's time over ours is at least `ratio`; our time is at most `at_most_us`; our `fact` is at most
    `share` of a column's. Ours is that of the column `by`."""

    column: str = ""
    ratio: float = 0.0
    at_most_us: float = 0.0
    fact: str = ""
    share: float = 0.0
    by: str = "halfstep"

    def text(self) -> str:
        if self.fact:
            return f"{FACT_NAMES[self.fact]} <= {self.share:g} of {COLUMN_NAMES[self.column]}"
        if self.at_most_us:
            return f"<= {self.at_most_us:g} us"
        by = "" if self.by == "halfstep" else f"{COLUMN_NAMES[self.by]} "
        return f"{by}>= {self.ratio:g}x {COLUMN_NAMES[self.column]}"


@dataclasses.dataclass(frozen=True)
class Row:
    labels: tuple[str, ...]
    case: str
    others: tuple[Contestant, ...] = ()
    goals: tuple[Goal, ...] = ()
    facts: bool = False  # are asked for, after the turns
    peer: str = OURS  # who answers for us
    rate: float = 1.0  # as a contestant's

    def name(self, section: str) -> str:
        return " ".join((section, *self.labels))


@dataclasses.dataclass(frozen=True)
class Section:
    name: str
    title: str
    labels: tuple[str, ...]
    rows: tuple[Row, ...]
    unit: str = "ms"  # or us
    kind: str = "times"  # or rates (operations a second), streams (bytes a second), overhead, images (a second), ranks
    note: str = ""
    alone: bool = False  # every case has a process of its own, and a call takes seconds
    min_ms: float = 0.0  # of a repetition, where calls are shorter


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the plan depends on."""

    bf16_units: bool = False
    f16_units: bool = False
    isa: str = ""

    def rate(self, dtype: str) -> float:
        """What is multiplied in the time of float32 (Intel's VPDPBUSD and VDPBF16PS against float32's instructions of AVX512;
        with AMX float32 is six products of bfloat16, float16 four, and TDPBUSD multiplies twice as many as TDPBF16PS);
        0: not known."""
        if self.isa == "amx":
            return {"f32": 1.0, "f16": 1.5, "bf16": 6.0, "int8": 12.0}[dtype]
        vnni, bf16 = self.isa in ("avx512_vnni", "avx512_bf16"), self.isa == "avx512_bf16"
        return {"f32": 1.0, "f16": 1.0, "bf16": 2.0 if bf16 else 0.0, "int8": 4.0 if vnni else 0.0}[dtype]

    def training_rate(self, dtype: str) -> float:
        """The same of a training step: what no instruction multiplies is computed in float32."""
        return max(1.0, self.rate(dtype))


def _steps(machine: Machine, quick: bool) -> Section:
    rows = []
    for batch in (64, 1):
        for optimizer in ("sgd", "adam"):
            for dtype in ("f32", "bf16", "f16"):
                case = f"mlp/{dtype}/{optimizer}/b{batch}"
                others = [Contestant("torch", "torch", case)]
                if dtype == "f32" and batch == 64 and not quick:  # compiling takes most of a minute
                    others.append(Contestant("torch_best", "torch", f"mlp/f32_compiled/{optimizer}/b{batch}"))
                if dtype != "f16":
                    others.append(Contestant("jax", "jax", case))
                goals: list[Goal] = []
                if dtype == "f32":
                    goals = [Goal("torch", 1.3)] + ([Goal("jax", 1.0)] if batch == 64 else [])
                elif dtype == "bf16" and machine.bf16_units:
                    goals = [Goal("torch", 1.3)]
                rows.append(Row((str(batch), optimizer, dtype), case, tuple(others), tuple(goals)))
    return Section("step", "A training step of the MLP (784-512-512-10, ReLU, cross entropy)", ("batch", "optimizer", "dtype"),
                   tuple(rows), note="16 bits under autocast, f16 with a GradScaler; PyTorch, best: compiled; JAX: jitted, "
                                     "bf16 by casts.")


def _captured() -> Section:
    rows = []
    for batch in (64, 1):
        for optimizer in ("sgd", "adam"):
            for dtype in ("f32", "bf16", "f16"):
                own = f"mlp/{dtype}/{optimizer}/b{batch}"
                others = [Contestant("plain", OURS, own)]
                if dtype != "f16":
                    others.append(Contestant("jax", "jax", own))
                goals = (Goal("jax", 1.5),) if dtype == "f32" and batch == 64 and optimizer == "sgd" else ()
                rows.append(Row((str(batch), optimizer, dtype), f"mlp/{dtype}_captured/{optimizer}/b{batch}", tuple(others), goals))
    return Section("captured", "The same step captured, beside itself as it is and JAX's jitted one", ("batch", "optimizer", "dtype"),
                   tuple(rows), note="A captured step is replayed: the same kernels, without dispatch, records and allocations.")


def _own(machine: Machine) -> Section:
    rows = []
    for batch in (64, 1):
        for optimizer in ("sgd", "adam"):
            for dtype in ("bf16", "f16"):
                units = machine.bf16_units if dtype == "bf16" else machine.f16_units
                rows.append(Row((str(batch), optimizer, dtype), f"mlp/{dtype}/{optimizer}/b{batch}",
                                (Contestant("f32", OURS, f"mlp/f32/{optimizer}/b{batch}"),),
                                (Goal("f32", 1.0 if units else 0.9),)))
    return Section("own", "The same step in 16 bits beside our own float32", ("batch", "optimizer", "dtype"), tuple(rows),
                   note="" if machine.bf16_units else "This processor has no bf16 units: 16 bits can at best come close.")


def _products(machine: Machine, quick: bool) -> Section:
    rows = []
    for m, k, n in ((64, 784, 512), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048)):
        for dtype in ("f32", "bf16", "f16"):
            if quick and m == 2048 and dtype != "f32":
                continue
            case = f"matmul/{m}x{k}x{n}/{dtype}"
            others = []
            # Without units PyTorch's f16 product of 1024 takes seconds.
            if dtype != "f16" or machine.f16_units or m <= (256 if quick else 512):
                others.append(Contestant("torch", "torch", case))
            others.append(Contestant("jax", "jax", case))
            rows.append(Row((f"{m} x {k} x {n}", dtype), case, tuple(others)))
    return Section("matmul", "Matrix products", ("m x k x n", "dtype"), tuple(rows), kind="rates",
                   note="The peak is that of float32 multiply-adds"
                        + (", which 16-bit units exceed." if machine.bf16_units or machine.f16_units else "."))


def _dense_layers() -> Section:
    rows = []
    for m, k, n in ((512, 512, 512), (784, 2048, 512), (2048, 384, 1536), (2048, 1536, 384), (4096, 512, 512),
                    (4096, 4096, 4096), (3136, 256, 1024), (12544, 128, 512), (50176, 64, 256)):
        for how, label in (("plain", "without"), ("bias", "with")):
            case = f"dense/{m}x{k}x{n}/{how}"
            rows.append(Row((f"{m} x {k} x {n}", label), case, (Contestant("torch", "torch", case),)))
    return Section("dense", "Forward passes of dense layers in bf16", ("batch x inputs x outputs", "bias"), tuple(rows),
                   kind="rates", note="The peak is that of float32 multiply-adds, which 16-bit units exceed.")


def _calls() -> Section:
    def row(label: str, case: str, goal: float = 0.0, jax: bool = False) -> Row:
        others = [Contestant("torch", "torch", case)] + ([Contestant("jax", "jax", case)] if jax else [])
        return Row((label,), case, tuple(others), (Goal(at_most_us=goal),) if goal else ())

    return Section("call", "Calls so small that only the way to the kernel counts", ("call",), (
        row("add of 16 floats", "add/16/plain", 1, jax=True),
        row("the same, recorded", "add/16/recorded", 2),
        row("the same, recorded, under autocast", "add/16/autocast"),
        Row(("add on a device whose kernels do nothing",), "add/16/device", (), (Goal(at_most_us=1),)),
        Row(("the same, recorded",), "add/16/device_recorded", (), ()),
        row("linear 16 to 16", "linear/1x16x16/plain", 3, jax=True),
        row("the same, recorded", "linear/1x16x16/recorded"),
        row("the same, recorded, under autocast", "linear/1x16x16/autocast", 5),
        row("entering an autocast region", "region/enter"),
    ), unit="us", note="The peers' calls are made from Python, as their users make them; JAX's are jitted.")


def _scaler() -> Section:
    rows = []
    for optimizer in ("sgd", "adam"):
        for label, scaled, plain, torch in (("f32", "f32_scaled", "f32", True), ("f16", "f16", "f16_unscaled", False)):
            others = [Contestant("without", OURS, f"mlp/{plain}/{optimizer}/b64")]
            if torch:
                others += [Contestant("torch", "torch", f"mlp/{scaled}/{optimizer}/b64"),
                           Contestant("torch_without", "torch", f"mlp/{plain}/{optimizer}/b64")]
            rows.append(Row((optimizer, label), f"mlp/{scaled}/{optimizer}/b64", tuple(others),
                            (Goal("without", 0.98),)))
    return Section("scaler", "What a GradScaler adds to a step of the MLP at batch 64", ("optimizer", "dtype"), tuple(rows),
                   kind="overhead", note="The goal, under 2 %, is that of a step of a large network; this one is the hardest case.")


def _parts() -> Section:
    return Section("unscale", "Unscaling and checking the MLP's 669,706 gradients, and updating the scale", ("part",), (
        Row(("unscale_ and update",), "scaler/mlp_unscale", (Contestant("torch", "torch", "scaler/mlp_unscale"),)),
    ))


def _optimizers() -> Section:
    rows = []
    for kind, label in (("sgd", "SGD, momentum"), ("adam", "Adam"), ("adamw", "AdamW")):
        rows.append(Row((label,), f"optimizer/{kind}/fused",
                        (Contestant("torch", "torch", f"optimizer/{kind}/loop"),
                         Contestant("torch_best", "torch", f"optimizer/{kind}/fused"))))
    return Section("optimizer", "An optimizer's step on 25 million parameters", ("optimizer",), tuple(rows), kind="streams",
                   note="PyTorch: as it comes on the CPU; best: fused=True.")


def pass_names(cases: Sequence[str]) -> list[str]:
    """The ops of the cases `pass/OP/DTYPE`, in their order."""
    return list(dict.fromkeys(case.split("/")[1] for case in cases if case.startswith("pass/")))


def _passes(names: Sequence[str]) -> Section:
    rows = [Row((name, dtype), f"pass/{name}/{dtype}", (Contestant("torch", "torch", f"pass/{name}/{dtype}"),))
            for name in names for dtype in ("f32", "bf16")]
    return Section("pass", "Ops that pass over their operands, forward and backward: 2048 x 1024, or 16 x 64 x 56 x 56 channels last",
                   ("op", "dtype"), tuple(rows), kind="streams", note="_down: along the first dimension; _rows: images row by row.")


NETWORKS = (("ResNet-50, 16", "resnet50", 16), ("ResNet-18 (CIFAR), 128", "resnet18_cifar", 128),
            ("MobileNetV2, 32", "mobilenet_v2", 32))  # with the batch

F32_GOALS = {"resnet50": {"torch": 1.7, "torch_kept": 1.45, "torch_compiled": 1.1},
             "resnet18_cifar": {"torch": 1.4, "torch_kept": 1.4, "torch_compiled": 1.1},
             "mobilenet_v2": {"torch": 1.7, "torch_kept": 1.4, "torch_compiled": 1.1}}


def _networks(machine: Machine) -> Section:
    rows = []
    for label, name, batch in NETWORKS:
        for dtype in ("f32", "bf16", "f16"):
            def case(how: str) -> str:
                return f"network/{name}/{how}/b{batch}"

            plain = Contestant("torch", "torch", case(dtype))
            kept = Contestant("torch_kept", "torch_kept", case(dtype))
            compiled = Contestant("torch_compiled", "torch_kept", case(f"{dtype}_compiled"))
            own = Contestant("f32", OURS, case("f32"))
            memory = Contestant("torch_f32", "torch", case("f32"), timed=False)
            small = (Goal("torch_f32", fact="peak_bytes", share=0.6), Goal("f32", fact="saved_bytes", share=0.52))
            units = {"f32": False, "bf16": machine.bf16_units, "f16": machine.f16_units}[dtype]
            # Without units PyTorch's 16-bit steps take several times its float32's, and it does not compile them well.
            others = {"f32": (plain, kept, compiled), "bf16": (own, plain, kept, compiled) if units else (own, plain),
                      "f16": (own, plain) if units else (own,)}[dtype]
            # MobileNetV2 has no convolutions that go by tiles.
            winograd = [Contestant(f"winograd{m}", f"{OURS}_winograd{m}", case(dtype)) for m in (2, 4) if name != "mobilenet_v2"]
            if dtype == "f32":
                others = (*winograd, *others)
                goals = tuple(Goal(column, ratio) for column, ratio in F32_GOALS[name].items())
                if winograd:
                    goals = (*goals, Goal("torch_kept", F32_GOALS[name]["torch_kept"], by="winograd4"))
            else:
                others = (*winograd[1:], *others)
                goals = (Goal("f32", 1.7 if units else 1.0), *([Goal("torch", 1.6)] if units and dtype == "bf16" else []))
            if dtype != "f32":
                others, goals = (*others, memory), (*goals, *small)
            rate = machine.training_rate(dtype)
            rows.append(Row((label, dtype), case(dtype), others, goals, facts=True, rate=rate))
            if (name, dtype) == ("resnet50", "f32"):
                rows.append(Row((f"{label}, 890 MB", dtype), case("f32_890MB"), (own, plain),
                                (Goal("torch", fact="peak_bytes", share=0.4),), facts=True, rate=rate))
    return Section("network", "A training step of an image network (batch beside its name), channels-last",
                   ("network", "dtype"), tuple(rows), kind="images", alone=True,
                   note="Winograd: ours with HALFSTEP_WINOGRAD=2x2 or 4x4, which is off unless a program asks for it. "
                        "890 MB: with --memory-budget.\nMB are 1e6 bytes. Peak: the most memory of the process; before: what it had "
                        "when the case began; tensors: the most that\nour allocator had handed out; saved: what a forward pass keeps "
                        "for the backward pass. Outside: the share of a step that is\nnot in convolutions. "
                        "docs/reference/performance.md says how each is taken.")


DETECTORS = (("YOLOv5n, 16 x 640", "yolov5n", 16), ("YOLOv5n, 4 x 640", "yolov5n_640", 4), ("YOLOv5n, 4 x 320", "yolov5n_320", 4))


def _detectors(machine: Machine) -> Section:
    """The goals: 1.3 times PyTorch's speed in float32 and, with units, in bf16; in 16 bits 0.6 of its float32's memory."""
    rows = []
    for label, name, batch in DETECTORS:
        for dtype in ("f32", "bf16", "f16"):
            case, full = f"network/{name}/{dtype}/b{batch}", f"network/{name}/f32/b{batch}"
            units = {"f32": False, "bf16": machine.bf16_units, "f16": machine.f16_units}[dtype]
            others = [Contestant("torch", "torch", case)]
            goals = [Goal("torch", 1.3)] if dtype == "f32" or (units and dtype == "bf16") else []
            if dtype == "f32":
                others.append(Contestant("torch_kept", "torch_kept", case))
            else:
                others = [Contestant("f32", OURS, full), *(others if units or dtype == "bf16" else []),
                          Contestant("torch_f32", "torch", full, timed=False)]
                goals.append(Goal("torch_f32", fact="peak_bytes", share=0.6))
            rows.append(Row((label, dtype), case, tuple(others), tuple(goals), facts=True, rate=machine.training_rate(dtype)))
    return Section("detector", "A training step of a detector (batch and pixels of a side beside its name), channels-last",
                   ("network", "dtype"), tuple(rows), kind="images", alone=True,
                   note="Forward, loss, backward, SGD. Columns as in the section of image networks. A published training of YOLOv5n with MindSpore "
                        "on an accelerator\ntook 1.306 times as long in float32 as with mixed precision: beside it stand our 16 bits' "
                        "times over own f32.")


def _language(machine: Machine) -> Section:
    """The goals: 1.2 times PyTorch's speed in float32, and 16 bits without units at nearly our own float32's."""
    rows = []
    for dtype in ("f32", "bf16", "f16"):
        case, full = f"network/gpt/{dtype}/b8", "network/gpt/f32/b8"
        units = {"f32": False, "bf16": machine.bf16_units, "f16": machine.f16_units}[dtype]
        # PyTorch's f16 step without units takes most of a minute.
        others = [Contestant("torch", "torch", case)] if dtype != "f16" or units else []
        goals = [Goal("torch", 1.2)] if dtype == "f32" or (units and dtype == "bf16") else []
        if dtype == "f32":
            others += [Contestant("torch_kept", "torch_kept", case), Contestant("torch_compiled", "torch_kept", f"{case[:-3]}_compiled/b8")]
        else:
            others.insert(0, Contestant("f32", OURS, full))
            goals.insert(0, Goal("f32", 1.0 if units else 0.95))
        rows.append(Row(("GPT, 8 x 256", dtype), case, tuple(others), tuple(goals), facts=True, rate=machine.training_rate(dtype)))
    return Section("language", "A training step of a GPT of characters: 6 blocks of width 384 and 6 heads, 8 sequences of 256",
                   ("network", "dtype"), tuple(rows), kind="images", alone=True, min_ms=200.0,
                   note="Forward, cross entropy, backward, SGD; without dropout. Images: sequences. PyTorch: scaled_dot_product_attention.")


INFERENCE = (("ResNet-50, 224", "resnet50"), ("YOLOv5n, 640", "yolov5n"))  # with the pixels of a side


def _inference(machine: Machine, onnx: bool) -> Section:
    """The goals: the speed of ONNX Runtime's integers, and with VNNI twice that of our own float32 at batch 32."""
    rows = []
    for label, name in INFERENCE:
        for batch in (1, 32):
            def contestant(column: str, peer: str, dtype: str) -> Contestant:
                return Contestant(column, peer, f"inference/{name}/{dtype}/b{batch}", rate=machine.rate(dtype))

            others = [contestant("f32", OURS, "f32"), contestant("bf16", OURS, "bf16"), contestant("torch_f32", "torch", "f32")]
            goals = [Goal("f32", 2.0)] if batch == 32 and machine.rate("int8") else []
            if onnx:
                others += [contestant("onnx_f32", "onnx", "f32"), contestant("onnx_int8", "onnx", "int8")]
                goals.append(Goal("onnx_int8", 1.0))
            rows.append(Row((label, str(batch)), f"inference/{name}/int8/b{batch}", tuple(others), tuple(goals), facts=True,
                            rate=machine.rate("int8")))
    return Section("inference", "Inference in 8-bit integers", ("network", "batch"), tuple(rows), kind="images", alone=True, min_ms=200.0,
                   note="Halfstep: infer::Session. PyTorch: eval(), inference_mode(), channels-last. ONNX Runtime reads the networks that "
                        "Halfstep writes, those of 8 bits\nwith QuantizeLinear and DequantizeLinear. Limits: float32's peak, and as many "
                        "times that as the dtype's instruction multiplies.")


def _loader() -> Section:
    return Section("loader", "Pictures from JPEG files to batches of 224x224 in float32, two workers (a picture's time)",
                   ("files",), (Row(("JPEG",), "loader/jpeg224/w2", (Contestant("pillow", "torch", "loader/pillow/w2"),
                                                                      Contestant("torchvision", "torch", "loader/torchvision/w2")),
                                    (Goal("pillow", 2.0),)),), kind="images", alone=True)


def _shared() -> Section:
    """The machine shared with others. The goal: two programs make at least 80% of what one makes."""
    rows = []
    for dtype in ("f32", "bf16"):
        case = f"mlp/{dtype}/sgd/b64"
        for name in ("x2", "x4", "quota"):
            label = {"x2": "2 programs", "x4": "4 programs", "quota": "quota of 1.5"}[name]
            goals = (Goal("quiet", 0.8),) if name == "x2" else ()
            rows.append(Row((label, dtype), case, (Contestant("quiet", OURS, case), Contestant("torch", f"torch_{name}", case)), goals,
                            peer=f"{OURS}_{name}"))
    return Section("shared", "The MLP's step, batch 64, SGD, on a machine that is shared", ("who", "dtype"), tuple(rows),
                   note="A step's time is the machine's: two programs that take 4 ms each make a step every 2 ms. Alone: one program, quiet.")


PARALLEL = (("MLP, 64", "mlp", 64), ("ResNet-20, 64", "resnet20", 64), ("wide MLP, 16", "wide", 16))  # with a rank's batch


def _parallel(quick: bool) -> Section:
    """Data parallel training. The goals: at least as fast as PyTorch in float32, and at most 0.6 of its bytes in 16 bits."""
    ours = f"{OURS}_ranks"
    rows = []
    for label, name, batch in PARALLEL:
        for dtype in ("f32", "f16") if quick else ("f32", "f16", "bf16"):
            case, full = f"parallel/{name}/{dtype}/b{batch}", f"parallel/{name}/f32/b{batch}"
            others = [Contestant("torch", "torch_ranks", case)]
            if dtype == "f32":
                goals: tuple[Goal, ...] = (Goal("torch", 1.0),)
                others.append(Contestant("without", ours, f"parallel/{name}/none/b{batch}"))
            else:
                goals = (Goal("torch_f32", fact="bytes_sent", share=0.6),)
                others += [Contestant("f32", ours, full), Contestant("torch_f32", "torch_ranks", full, timed=False)]
            rows.append(Row((label, dtype), case, tuple(others), goals, facts=True, peer=ours))
    return Section("parallel", "A data parallel training step on two ranks of one thread (a rank's batch beside the network's name)",
                   ("network", "gradients"), tuple(rows), kind="ranks",
                   note="PyTorch: DistributedDataParallel with gloo. Sent: MB (1e6 bytes) a step that a rank sends to the other. Hidden: the share "
                        "of the communication's\ntime in which the backward pass was still running. Without: the same step, nothing sent.")


def plan(machine: Machine, quick: bool = False, only: str = "", pictures: bool = True, ranks: bool = True,
         onnx: bool = True, passes: Sequence[str] = ()) -> list[Section]:
    """All sections, or the rows whose name (`step 64 sgd f32`) or case the regular expression `only` finds.

    Quick runs leave out the networks, whose steps take seconds; without pictures there is nothing to load, and without ranks
    no data parallel training. Inference has no columns of ONNX Runtime without `onnx`. `passes`: the ops of section pass.
    """
    sections = [_steps(machine, quick), _captured(), _own(machine), _products(machine, quick), _calls(), _scaler(), _parts(), _optimizers(), _shared()]
    if not quick:
        sections += [_dense_layers(), _passes(passes), _networks(machine), _detectors(machine), _language(machine), _inference(machine, onnx)]
    if pictures:
        sections.append(_loader())
    if ranks:
        sections.append(_parallel(quick))
    if not only:
        return [section for section in sections if section.rows]
    wanted = re.compile(only)
    kept = []
    for section in sections:
        rows = tuple(r for r in section.rows if wanted.search(r.name(section.name)) or wanted.search(r.case))
        if rows:
            kept.append(dataclasses.replace(section, rows=rows))
    return kept


def columns(rows: Sequence[Row]) -> list[str]:
    """The columns that the rows have, in the order of COLUMN_NAMES."""
    present = {c.column for row in rows for c in row.others}
    return [c for c in COLUMN_NAMES if c in present]
