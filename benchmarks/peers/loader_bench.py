#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The JPEG pipeline against PyTorch's DataLoader with Pillow, in turns.

usage: loader_bench.py FOLDER [--program PATH] [--workers 2] [--batch-size 32] [--turns 5] [--seconds 4]

Needs PyTorch, numpy and Pillow. FOLDER has class folders of pictures, or pictures themselves. Both sides read every
file, cut out a random part (area 8% to 100%, ratio 3/4 to 4/3), resize it to 224x224, mirror half of them, normalise, and
hand over batches of float32; neither trains. The transform of this side is what torchvision's would do with Pillow.
"""
import argparse
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import time

import numpy
import PIL
import torch
from PIL import Image

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
ENDINGS = {".jpg", ".jpeg", ".png"}


def random_part(width, height):
    area = width * height
    for _ in range(10):
        target = area * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    return 0, 0, width, height


class Pictures(torch.utils.data.Dataset):
    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            picture = Image.open(file).convert("RGB")
        left, top, width, height = random_part(*picture.size)
        part = picture.crop((left, top, left + width, top + height)).resize((224, 224), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(numpy.array(part)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
        return tensor.sub_(MEAN).div_(STD), 0


def processor_seconds(loader):
    """Processor time of this process and of the loader's workers."""
    pids = [os.getpid()] + [worker.pid for worker in getattr(getattr(loader, "_iterator", None), "_workers", [])]
    ticks = 0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def peer(loader, seconds):
    """Images a second, and milliseconds of processor time an image."""
    images, start, processor = 0, time.perf_counter(), processor_seconds(loader)
    while time.perf_counter() - start < seconds:
        for batch, _ in loader:
            images += batch.shape[0]
    return images / (time.perf_counter() - start), 1000 * (processor_seconds(loader) - processor) / images


def ours(arguments, options):
    line = subprocess.run([arguments.program, arguments.folder, *options], check=True, capture_output=True, text=True).stdout
    return json.loads(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--program", default="build/bin/loader_bench")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    arguments = parser.parse_args()
    paths = sorted(p for p in pathlib.Path(arguments.folder).rglob("*") if p.suffix.lower() in ENDINGS)
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(Pictures(paths), batch_size=arguments.batch_size, shuffle=True, drop_last=True,
                                         num_workers=arguments.workers, persistent_workers=arguments.workers > 0)
    peer(loader, 0.1)  # starts the workers
    options = ["--workers", str(arguments.workers), "--batch-size", str(arguments.batch_size), "--seconds",
               str(arguments.seconds)]
    rows = []
    for turn in range(arguments.turns):
        theirs, their_processor = peer(loader, arguments.seconds)
        mine = ours(arguments, options)
        rows.append((mine["images_per_s"] / theirs, their_processor / mine["processor_ms_per_image"], mine["images_per_s"], theirs))
        print(f"turn {turn + 1}: {mine['images_per_s']:7.1f} img/s and {mine['processor_ms_per_image']:.2f} ms of processor time an "
              f"image; PyTorch with Pillow {theirs:7.1f} and {their_processor:.2f}; ratios {rows[-1][0]:.2f} and {rows[-1][1]:.2f}",
              flush=True)
    ratio, processor_ratio, mine, theirs = (statistics.median(column) for column in zip(*rows))
    print(json.dumps({"ratio": ratio, "processor_ratio": processor_ratio, "images_per_s": mine, "torch_images_per_s": theirs,
                      "workers": arguments.workers, "files": len(paths), "torch": torch.__version__, "pillow": PIL.__version__,
                      "stages": ours(arguments, ["--stages"])}))


if __name__ == "__main__":
    main()
