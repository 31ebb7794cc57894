#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A detector's augmentation against the same in Python with OpenCV and PyTorch's DataLoader, in turns.

usage: detection_loader_bench.py FOLDER [--program PATH] [--workers 0] [--batch-size 16] [--size 640] [--turns 5]
                                 [--seconds 4] [--cache]

Needs PyTorch, numpy and OpenCV (pip install opencv-python-headless). FOLDER has classes.txt, images/train and
labels/train. Both sides read every file; four pictures, their longer sides scaled to the size, make a mosaic of twice the
size around a random point; of it a random part (scale 0.5 to 1.5, shift 10%) becomes the input, half of them mirrored,
with new hue, saturation and value; boxes move along; batches are float32 from 0 to 1. With --cache both keep decoded
pictures in memory. Neither trains. 0 workers: all is done in one thread.
"""
import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import time

import cv2
import numpy
import torch

FILL = 114


class Samples(torch.utils.data.Dataset):
    """What the options' defaults of halfstep::data::DetectionTransform say, as one writes it with OpenCV."""

    def __init__(self, folder, size, cache):
        self.paths = sorted(p for p in (folder / "images/train").rglob("*") if p.suffix.lower() in {".jpg", ".jpeg", ".png"})
        self.labels = [self.read_labels(folder, p) for p in self.paths]
        self.size = size
        self.kept = {} if cache else None

    @staticmethod
    def read_labels(folder, path):
        file = folder / "labels/train" / (path.stem + ".txt")
        rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return numpy.array(rows, dtype=numpy.float32).reshape(-1, 5)

    def __len__(self):
        return len(self.paths)

    def load(self, index):
        if self.kept is not None and index in self.kept:
            return self.kept[index]
        image = cv2.imread(str(self.paths[index]))
        height, width = image.shape[:2]
        ratio = self.size / max(height, width)
        if ratio != 1:
            image = cv2.resize(image, (round(width * ratio), round(height * ratio)), interpolation=cv2.INTER_LINEAR)
        if self.kept is not None:
            self.kept[index] = image
        return image

    def mosaic(self, index):
        size = self.size
        centre_x, centre_y = (int(random.uniform(size / 2, 3 * size / 2)) for _ in range(2))
        canvas = numpy.full((2 * size, 2 * size, 3), FILL, dtype=numpy.uint8)
        chosen = [index] + random.choices(range(len(self)), k=3)
        random.shuffle(chosen)
        boxes = []
        for place, number in enumerate(chosen):
            image = self.load(number)
            height, width = image.shape[:2]
            x = centre_x - width if place % 2 == 0 else centre_x
            y = centre_y - height if place // 2 == 0 else centre_y
            left, top = max(x, 0), max(y, 0)
            right, bottom = min(x + width, 2 * size), min(y + height, 2 * size)
            canvas[top:bottom, left:right] = image[top - y:bottom - y, left - x:right - x]
            own = self.labels[number]
            if len(own):
                half = own[:, 3:5] / 2
                corners = numpy.concatenate([own[:, 1:3] - half, own[:, 1:3] + half], 1)
                corners = corners * [width, height, width, height] + [x, y, x, y]
                boxes.append(numpy.concatenate([own[:, :1], corners], 1))
        boxes = numpy.concatenate(boxes) if boxes else numpy.zeros((0, 5))
        boxes[:, 1:] = boxes[:, 1:].clip(0, 2 * size)
        return canvas, boxes

    def view(self, canvas, boxes):
        size = self.size
        scale = random.uniform(0.5, 1.5)
        shift = [random.uniform(0.4, 0.6) * size for _ in range(2)]
        matrix = numpy.array([[scale, 0, shift[0] - scale * size], [0, scale, shift[1] - scale * size]])
        image = cv2.warpAffine(canvas, matrix, dsize=(size, size), borderValue=(FILL, FILL, FILL))
        moved = boxes.copy()
        moved[:, 1:] = (boxes[:, 1:] * scale + [*matrix[:, 2], *matrix[:, 2]]).clip(0, size)
        width, height = moved[:, 3] - moved[:, 1], moved[:, 4] - moved[:, 2]
        before = (boxes[:, 3] - boxes[:, 1]) * (boxes[:, 4] - boxes[:, 2]) * scale * scale
        ratio = numpy.maximum(width / (height + 1e-16), height / (width + 1e-16))
        kept = (width > 2) & (height > 2) & (width * height / (before + 1e-16) > 0.1) & (ratio < 100)
        return image, moved[kept]

    @staticmethod
    def colours(image):
        hue_factor, saturation_factor, value_factor = numpy.random.uniform(-1, 1, 3) * [0.015, 0.7, 0.4] + 1
        hue, saturation, value = cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV))
        levels = numpy.arange(0, 256)
        hue = cv2.LUT(hue, ((levels * hue_factor) % 180).astype(numpy.uint8))
        saturation = cv2.LUT(saturation, numpy.clip(levels * saturation_factor, 0, 255).astype(numpy.uint8))
        value = cv2.LUT(value, numpy.clip(levels * value_factor, 0, 255).astype(numpy.uint8))
        return cv2.cvtColor(cv2.merge((hue, saturation, value)), cv2.COLOR_HSV2BGR)

    def __getitem__(self, index):
        image, boxes = self.view(*self.mosaic(index))
        image = self.colours(image)
        rows = numpy.zeros((len(boxes), 5), dtype=numpy.float32)
        rows[:, 0] = boxes[:, 0]
        rows[:, 1:3] = (boxes[:, 1:3] + boxes[:, 3:5]) / 2 / self.size
        rows[:, 3:5] = (boxes[:, 3:5] - boxes[:, 1:3]) / self.size
        if random.random() < 0.5:
            image = cv2.flip(image, 1)
            rows[:, 1] = 1 - rows[:, 1]
        image = numpy.ascontiguousarray(image.transpose(2, 0, 1)[::-1])
        return torch.from_numpy(image), torch.from_numpy(rows)


def collate(samples):
    images, rows = zip(*samples)
    return torch.stack(images), torch.cat([torch.nn.functional.pad(r, (1, 0), value=i) for i, r in enumerate(rows)])


def start_worker(_):
    cv2.setNumThreads(0)
    torch.set_num_threads(1)


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
            images += (batch.to(torch.float32) / 255).shape[0]
    return images / (time.perf_counter() - start), 1000 * (processor_seconds(loader) - processor) / images


def ours(arguments, options):
    line = subprocess.run([arguments.program, arguments.folder, *options], check=True, capture_output=True, text=True).stdout
    return json.loads(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--program", default="build/bin/detection_bench")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--size", type=int, default=640)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--cache", action="store_true")
    arguments = parser.parse_args()
    start_worker(0)
    samples = Samples(pathlib.Path(arguments.folder), arguments.size, arguments.cache)
    # A small set many times over makes an epoch that is not all beginning and end, as on the other side.
    order = torch.utils.data.ConcatDataset([samples] * 8)
    loader = torch.utils.data.DataLoader(order, batch_size=arguments.batch_size, shuffle=True, drop_last=True,
                                         num_workers=arguments.workers, persistent_workers=arguments.workers > 0,
                                         collate_fn=collate, worker_init_fn=start_worker)
    peer(loader, 0.1)  # starts the workers
    options = ["--workers", str(arguments.workers), "--batch-size", str(arguments.batch_size), "--size", str(arguments.size),
               "--seconds", str(arguments.seconds)] + (["--cache"] if arguments.cache else [])
    rows = []
    for turn in range(arguments.turns):
        theirs, their_processor = peer(loader, arguments.seconds)
        mine = ours(arguments, options)
        rows.append((mine["images_per_s"] / theirs, their_processor / mine["processor_ms_per_image"], mine["images_per_s"], theirs))
        print(f"turn {turn + 1}: {mine['images_per_s']:7.1f} img/s and {mine['processor_ms_per_image']:.2f} ms of processor time an "
              f"image; Python with OpenCV {theirs:7.1f} and {their_processor:.2f}; ratios {rows[-1][0]:.2f} and "
              f"{rows[-1][1]:.2f}", flush=True)
    ratio, processor_ratio, mine, theirs = (statistics.median(column) for column in zip(*rows))
    print(json.dumps({"ratio": round(ratio, 3), "processor_ratio": round(processor_ratio, 3), "images_per_s": mine,
                      "python_images_per_s": round(theirs, 1), "workers": arguments.workers, "size": arguments.size,
                      "cache": arguments.cache, "files": len(samples), "spread": round(max(r[0] for r in rows) -
                                                                                      min(r[0] for r in rows), 3),
                      "opencv": cv2.__version__, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
