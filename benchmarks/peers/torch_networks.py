# SPDX-License-Identifier: Apache-2.0
"""Networks and picture loaders for torch_bench.py, as PyTorch's users write them. Needs torchvision and Pillow.

Networks are torchvision's, and the detector of torch_yolov5.py, channels-last, and the language model of torch_gpt.py; a step is zero_grad, forward, cross entropy (or the
detector's loss), backward and SGD with momentum 0.9.
bf16 and f16 run under autocast, f16 with a GradScaler; f32_compiled and bf16_compiled go through torch.compile.
"""
import io
import itertools
import os
import pathlib
import time

import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
NETWORKS = {"resnet50": (16, 224, 1000), "resnet18_cifar": (128, 32, 10), "mobilenet_v2": (32, 224, 1000), "yolov5n": (16, 640, 80),
            "yolov5n_640": (4, 640, 80), "yolov5n_320": (4, 320, 80), "gpt": (8, 256, 65)}  # batch, size or tokens, classes
BATCH, EPOCH = 32, 640  # of the loaders, as in benchmarks/server/loader.cpp
ENDINGS = {".jpg", ".jpeg", ".png"}


def make(name, classes):
    """The network, its labels for a batch, and its loss."""
    if name.startswith("yolov5n"):
        import torch_yolov5

        return torch_yolov5.Nano(classes), torch_yolov5.objects, torch_yolov5.loss_of
    if name == "gpt":
        import torch_gpt

        model = torch_gpt.GPT(classes)
        return model, lambda batch: torch.randint(0, classes, (batch, model.context)), torch_gpt.loss_of
    return make_classifier(name, classes), lambda batch: torch.randint(0, classes, (batch,)), F.cross_entropy


def make_classifier(name, classes):
    import torchvision

    if name in ("resnet50", "mobilenet_v2"):
        return getattr(torchvision.models, name)(num_classes=classes)
    model = torchvision.models.resnet18(num_classes=classes)
    model.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = torch.nn.Identity()
    return model


def inference(name, batch):
    """A call of the network on random pictures."""
    _, size, classes = NETWORKS[name]
    torch.manual_seed(1)
    model = make(name, classes)[0].eval().to(memory_format=torch.channels_last)
    images = torch.rand(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    finish = lambda result: result  # noqa: E731
    if name == "yolov5n":
        import torch_yolov5

        finish = torch_yolov5.decode

    def call():
        with torch.inference_mode():
            return finish(model(images))

    return call


class Training:
    """Calling it makes one step."""

    def __init__(self, name, how):
        batch, size, classes = NETWORKS[name]
        dtype, _, compiled = how.partition("_")
        torch.manual_seed(1)
        model, labels, self.criterion = make(name, classes)
        if name == "gpt":
            self.model, self.images = model, labels(batch)
        else:
            self.model = model.to(memory_format=torch.channels_last)
            self.images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
        self.labels = labels(batch)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype == "f16")
        self.low = None if dtype == "f32" else DTYPES[dtype]
        self.compiled = bool(compiled)
        self.forward = torch.compile(self._forward) if compiled else self._forward

    def _forward(self, images, labels):
        return self.criterion(self.model(images), labels)

    def loss(self):
        with torch.autocast("cpu", dtype=self.low or torch.bfloat16, enabled=self.low is not None):
            return self.forward(self.images, self.labels)

    def __call__(self):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def saved_bytes(self):
        """What the graph keeps for the backward pass beyond parameters, buffers and the batch: each storage once."""
        self.optimizer.zero_grad()
        known = {t.untyped_storage().data_ptr()
                 for t in itertools.chain(self.model.parameters(), self.model.buffers(), (self.images, self.labels))}
        kept = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.loss()  # keeps the graph, so that no two storages had the same address
        del loss
        return sum(kept.values())

    def facts(self):
        found = {"images": self.images.shape[0]}
        if not self.compiled:  # hooks would have it compiled again
            found["saved_bytes"] = self.saved_bytes()
        whole = convolutions = 0.0
        begin = time.perf_counter()
        for _ in range(3):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                start = time.perf_counter()
                self()
                whole += time.perf_counter() - start
            convolutions += 1e-6 * sum(e.self_cpu_time_total for e in profile.key_averages() if "conv" in e.key.lower())
            if time.perf_counter() - begin > 6:
                break
        found["outside_convolutions"] = max(0.0, 1 - convolutions / whole)
        return found


class Pictures(torch.utils.data.Dataset):
    """EPOCH pictures or a few more: those of a folder over and over, cut, resized, mirrored and normalised."""

    def __init__(self, decoder):
        from torchvision.transforms import v2

        folder = os.environ.get("HALFSTEP_BENCH_IMAGES", "")
        if not folder:
            raise ValueError("HALFSTEP_BENCH_IMAGES names no folder of pictures")
        paths = sorted(str(p) for p in pathlib.Path(folder).rglob("*") if p.suffix.lower() in ENDINGS)
        self.paths = paths * -(-EPOCH // len(paths))
        self.decode = {"pillow": self.with_pillow, "torchvision": self.with_torchvision}[decoder]
        self.transform = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage(),
                                     v2.ToDtype(torch.float32, scale=True),
                                     v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])

    @staticmethod
    def with_pillow(data):
        from PIL import Image

        return Image.open(io.BytesIO(data)).convert("RGB")

    @staticmethod
    def with_torchvision(data):
        from torchvision.io import ImageReadMode, decode_jpeg

        return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            return self.transform(self.decode(file.read())), 0


def loader(decoder, workers):
    batches = torch.utils.data.DataLoader(Pictures(decoder), batch_size=BATCH, shuffle=True, drop_last=True,
                                          num_workers=workers, persistent_workers=True)

    def epoch():
        total = 0.0
        for images, _ in batches:
            total += images[0, 0, 0, 0].item()
        return total

    epoch.calls = len(batches) * BATCH
    return epoch
