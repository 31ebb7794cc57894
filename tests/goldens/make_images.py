#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes images.json (what Pillow makes of small pictures) and the seeds of the fuzz targets for pictures.

usage: make_images.py       with Pillow 12 and numpy; see README.md beside this file
"""
import base64
import gzip
import io
import json
import pathlib
import struct
import tarfile
import zlib

import numpy
import PIL
from PIL import Image, ImageEnhance

HERE = pathlib.Path(__file__).resolve().parent
CORPUS = HERE.parent.parent / "fuzz" / "corpus"


def noise(width, height, seed):
    """Pixels that tests/data/image_goldens.h makes likewise: a linear congruential generator's upper bytes."""
    values, state = [], seed
    for _ in range(width * height * 3):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        values.append(state >> 24)
    return numpy.array(values, "u1").reshape(height, width, 3)


def smooth(width, height):
    """A picture that JPEG keeps well: gradients, a disc and an edge."""
    y, x = numpy.mgrid[0:height, 0:width].astype(float)
    disc = ((x - width / 2) ** 2 + (y - height / 2) ** 2 < (min(width, height) / 3) ** 2) * 90
    red = 255 * x / width
    green = 255 * y / height
    blue = 128 + 100 * numpy.sin(x / 3) * numpy.cos(y / 5)
    return numpy.clip(numpy.stack([red, green - disc / 2, blue + disc], -1), 0, 255).astype("u1")


def text(data):
    return base64.b64encode(bytes(data)).decode()


def packed(pixels):
    return text(zlib.compress(bytes(pixels), 9))


def rgb(data):
    return numpy.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def encoded(picture, **options):
    out = io.BytesIO()
    picture.save(out, **options)
    return out.getvalue()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(samples, depth, color_type, interlaced=False, extra=b""):
    """A PNG of samples [height, width, channels] of `depth` bits, row filter 0, Adam7 where asked."""
    height, width, channels = samples.shape
    passes = [(0, 0, 1, 1)]
    if interlaced:
        passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    raw = b""
    for left, top, across, down in passes:
        part = samples[top::down, left::across]
        if part.size == 0:
            continue
        for row in part:
            bits = "".join(format(int(v), f"0{depth}b") for v in row.reshape(-1))
            bits += "0" * (-len(bits) % 8)
            raw += b"\0" + bytes(int(bits[i:i + 8], 2) for i in range(0, len(bits), 8))
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, int(interlaced))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(raw, 9)) +
            chunk(b"IEND", b""))


def jpegs():
    picture = Image.fromarray(smooth(37, 29))
    wide = Image.fromarray(smooth(64, 48))
    files = {
        "rgb_444": encoded(picture, format="JPEG", quality=90, subsampling=0),
        "rgb_422": encoded(picture, format="JPEG", quality=80, subsampling=1),
        "rgb_420": encoded(picture, format="JPEG", quality=75, subsampling=2),
        "wide_420": encoded(wide, format="JPEG", quality=60, subsampling=2, optimize=True),
        "grey": encoded(picture.convert("L"), format="JPEG", quality=85),
        "progressive": encoded(wide, format="JPEG", quality=70, subsampling=2, progressive=True),
        "progressive_grey": encoded(picture.convert("L"), format="JPEG", progressive=True),
        "restarts": encoded(wide, format="JPEG", quality=70, subsampling=2, restart_marker_blocks=2),
        "not_ycc": encoded(picture, format="JPEG", quality=90, keep_rgb=True),
        "cmyk": encoded(picture.convert("CMYK"), format="JPEG", quality=90),
        "pixel": encoded(picture.crop((20, 20, 21, 21)), format="JPEG"),
        "line": encoded(picture.crop((0, 9, 37, 10)), format="JPEG", subsampling=2),
        "column": encoded(picture.crop((9, 0, 10, 29)), format="JPEG", subsampling=1),
    }
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter: Pillow's convert doesn't
    files["turned"] = encoded(picture, format="JPEG", exif=exif)
    # Ink as a colour and its brightness: the same bytes read as YCCK.
    ycck = bytearray(files["cmyk"])
    at = ycck.index(b"Adobe") + 11
    assert ycck[at] == 0
    ycck[at] = 2
    files["ycck"] = bytes(ycck)
    # Four channels with real black.
    ink = numpy.dstack([noise(24, 16, 5), smooth(24, 16)[..., 0]])
    files["cmyk_noise"] = encoded(Image.frombytes("CMYK", (24, 16), ink.tobytes()), format="JPEG", quality=95)
    return files


def pngs():
    colors = noise(13, 9, 1)
    grey = colors[..., :1]
    wide = (colors.astype("u2") << 8) + noise(13, 9, 2)
    alpha = noise(13, 9, 3)[..., :1]
    palette = bytes(noise(16, 1, 4).reshape(-1))
    table = chunk(b"PLTE", palette)
    files = {}
    for interlaced in (False, True):
        end = "_interlaced" if interlaced else ""
        for depth in (1, 2, 4, 8):
            files[f"grey_{depth}{end}"] = png(grey >> (8 - depth), depth, 0, interlaced)
        files[f"grey_16{end}"] = png(wide[..., :1], 16, 0, interlaced)
        files[f"rgb_8{end}"] = png(colors, 8, 2, interlaced)
        files[f"rgb_16{end}"] = png(wide, 16, 2, interlaced)
        for depth in (1, 2, 4):
            files[f"palette_{depth}{end}"] = png(grey >> (8 - depth), depth, 3, interlaced, chunk(b"PLTE", palette[:3 << depth]))
        files[f"palette_8{end}"] = png(grey >> 4, 8, 3, interlaced, table)
        files[f"grey_alpha_8{end}"] = png(numpy.dstack([grey, alpha]), 8, 4, interlaced)
        files[f"grey_alpha_16{end}"] = png(numpy.dstack([wide[..., :1], wide[..., 1:2]]), 16, 4, interlaced)
        files[f"rgb_alpha_8{end}"] = png(numpy.dstack([colors, alpha]), 8, 6, interlaced)
        files[f"rgb_alpha_16{end}"] = png(numpy.dstack([wide, wide[..., :1]]), 16, 6, interlaced)
    files["palette_clear"] = png(grey >> 4, 8, 3, False, table + chunk(b"tRNS", bytes([0, 128, 255])))
    files["grey_clear"] = png(grey, 8, 0, False, chunk(b"tRNS", struct.pack(">H", int(grey[0, 0, 0]))))
    files["rgb_clear"] = png(colors, 8, 2, False, chunk(b"tRNS", struct.pack(">HHH", *map(int, colors[0, 0]))))
    files["gamma"] = png(colors, 8, 2, False, chunk(b"gAMA", struct.pack(">I", 100000)))
    files["filtered"] = encoded(Image.fromarray(smooth(37, 29)), format="PNG")
    return files, wide


def decode_entries():
    entries = []
    for name, data in jpegs().items():
        entries.append({"name": f"jpeg_{name}", "file": text(data), "pixels": packed(rgb(data).tobytes()),
                        "shape": list(rgb(data).shape)})
    files, wide = pngs()
    for name, data in files.items():
        pixels = rgb(data)
        if name.startswith("grey_16"):
            pixels = numpy.repeat((wide[..., :1] >> 8).astype("u1"), 3, 2)  # Pillow clips these at 255
        entries.append({"name": f"png_{name}", "file": text(data), "pixels": packed(pixels.tobytes()),
                        "shape": list(pixels.shape)})
    return entries


def damage_entries():
    """Damaged files: `pixels` where Pillow takes them."""
    entries = []
    files = jpegs()
    for name in ("wide_420", "progressive", "restarts", "grey"):
        data = files[name]
        scan = data.index(b"\xff\xda")
        damaged = {f"{name}_cut_{percent}": data[:scan + (len(data) - scan) * percent // 100] for percent in (20, 60, 90)}
        for offset in (30, 57, 90):
            flipped = bytearray(data)
            flipped[scan + offset] ^= 0x10
            damaged[f"{name}_flipped_{offset}"] = bytes(flipped)
        ended = bytearray(data)
        ended[scan + 60:scan + 62] = b"\xff\xd9"
        damaged[f"{name}_ended_early"] = bytes(ended)
        damaged[f"{name}_header_only"] = data[:scan]
        damaged[f"{name}_more_behind"] = data + bytes(100)
        for key, value in damaged.items():
            entry = {"name": key, "file": text(value)}
            try:
                entry["pixels"] = packed(rgb(value).tobytes())
                entry["shape"] = list(rgb(value).shape)
            except Exception as error:  # Pillow's errors have no common class
                entry["error"] = str(error)[:60]
            entries.append(entry)
    return entries


def resize_entries():
    entries = []
    cases = [  # width, height, to width, to height, box
        (37, 29, 16, 16, None), (37, 29, 64, 50, None), (37, 29, 37, 10, None), (37, 29, 10, 29, None),
        (37, 29, 37, 29, None), (37, 29, 12, 9, (3.25, 2.5, 30.75, 27.0)), (37, 29, 20, 20, (5, 4, 25, 24)),
        (37, 29, 20, 10, (5, 4, 25, 24)), (37, 29, 30, 40, (1.5, 0.25, 9.0, 8.5)), (200, 3, 7, 3, None),
        (500, 2, 3, 2, None), (2, 300, 2, 5, None), (1, 1, 5, 4, None), (5, 1, 3, 3, None), (3, 7, 1, 1, None),
        (90, 70, 33, 41, None), (17, 23, 18, 24, None), (64, 64, 31, 63, (0.0, 0.0, 64.0, 63.5)),
    ]
    for filter_name, filter_code in (("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)):
        for width, height, to_width, to_height, box in cases:
            picture = Image.fromarray(noise(width, height, 7))
            result = numpy.asarray(picture.resize((to_width, to_height), filter_code, box=box))
            entries.append({"name": f"{filter_name}_{width}x{height}_{to_width}x{to_height}_{len(entries)}",
                            "filter": filter_name, "from": [width, height], "to": [to_width, to_height],
                            "box": list(box) if box else [], "pixels": packed(result.tobytes())})
    return entries


def hue(picture, factor):
    """torchvision's adjust_hue on Pillow's pictures: the shift wraps round in 8 bits."""
    parts = picture.convert("HSV").split()
    turned = (numpy.asarray(parts[0]).astype(int) + int(factor * 255)) % 256
    return Image.merge("HSV", (Image.fromarray(turned.astype("u1")), parts[1], parts[2])).convert("RGB")


def color_entries():
    picture = Image.fromarray(numpy.concatenate([noise(24, 10, 11), smooth(24, 8),
                                                 numpy.repeat(noise(24, 2, 12)[..., :1], 3, 2)]))
    entries = []
    for op, function in (("brightness", ImageEnhance.Brightness), ("contrast", ImageEnhance.Contrast),
                         ("saturation", ImageEnhance.Color)):
        for factor in (0.0, 0.3, 0.75, 1.0, 1.4, 2.5):
            result = numpy.asarray(function(picture).enhance(factor))
            entries.append({"name": f"{op}_{factor}", "op": op, "factor": factor, "pixels": packed(result.tobytes())})
    for factor in (-0.5, -0.31, -0.1, 0.0, 0.05, 0.25, 0.5):
        entries.append({"name": f"hue_{factor}", "op": "hue", "factor": factor,
                        "pixels": packed(numpy.asarray(hue(picture, factor)).tobytes())})
    return {"width": 24, "height": 20, "pixels": packed(numpy.asarray(picture).tobytes()), "cases": entries}


def eval_entries():
    """Resize of the shorter side, then the middle, as torchvision composes them."""
    entries = []
    for width, height, resize, size in ((60, 45, 32, 28), (45, 60, 32, 28), (41, 41, 32, 27), (33, 90, 20, 20),
                                        (20, 30, 31, 25)):
        data = encoded(Image.fromarray(smooth(width, height)), format="JPEG", quality=85, subsampling=2)
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        short, long = min(width, height), max(width, height)
        longer = int(resize * long / short)
        to = (resize, longer) if width <= height else (longer, resize)
        resized = picture.resize(to, Image.Resampling.BILINEAR)
        left, top = int(round((to[0] - size) / 2.0)), int(round((to[1] - size) / 2.0))
        result = numpy.asarray(resized.crop((left, top, left + size, top + size)))
        entries.append({"name": f"{width}x{height}_{resize}_{size}", "file": text(data), "resize": resize, "size": size,
                        "pixels": packed(result.tobytes())})
    return entries


def normalized():
    """What each pixel value becomes in float32, in torch's order of operations, as bits."""
    levels = numpy.arange(256, dtype="f4") / numpy.float32(255)
    columns = []
    for mean, std in zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)):
        columns.append(((levels - numpy.float32(mean)) / numpy.float32(std)).view("u4").tolist())
    return columns


def write_seeds(folder, seeds):
    folder = CORPUS / folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in seeds.items():
        (folder / name).write_bytes(data)


def tar(files, **options):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def write_corpora():
    files = jpegs()
    cut = files["rgb_420"]
    huge = bytearray(cut)
    at = huge.index(b"\xff\xc0") + 5
    huge[at:at + 4] = b"\xff\xff\xff\xff"
    write_seeds("jpeg", files | {"cut": cut[:len(cut) * 3 // 4], "huge": bytes(huge), "header": cut[:100],
                                 "progressive_cut": files["progressive"][:-300]})
    files, _ = pngs()
    small = {name: files[name] for name in ("grey_1", "grey_16_interlaced", "rgb_8", "rgb_16", "palette_4", "palette_8_interlaced",
                                            "grey_alpha_8", "rgb_alpha_16_interlaced", "palette_clear", "rgb_clear")}
    huge = bytearray(files["rgb_8"])
    huge[16:24] = b"\x7f\xff\xff\xff" * 2
    huge[29:33] = struct.pack(">I", zlib.crc32(bytes(huge[12:29])))
    bomb = (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 900, 900, 8, 2, 0, 0, 0)) +
            chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 20), 9)) +
            chunk(b"IDAT", zlib.compress(bytes(901 * 900 * 3), 9)) + chunk(b"IEND", b""))
    write_seeds("png", small | {"cut": files["filtered"][:200], "huge": bytes(huge), "bomb": bomb})
    write_seeds("image_list", {
        "plain": b"val/n03623198/ILSVRC2012_val_00030341.JPEG 997\nval/n01440764/a.JPEG 0\n",
        "spaces": b"\xef\xbb\xbf# a comment\r\n\r\n my picture.jpg\t 3 \r\n", "no_label": b"a.jpg\n",
        "large": b"a.jpg 99999999999999999999\n", "negative": b"a.jpg -1\n", "zero_byte": b"a\0b.jpg 1\n", "empty": b"\n",
        "no_end": b"a.jpg 7",
    })
    pictures = {f"train/{name}/{i:04}.png": files["grey_1"] for name in ("cat", "dog") for i in range(2)}
    plain = tar(pictures, format=tarfile.USTAR_FORMAT)
    zipped = gzip.compress(plain, mtime=0)
    holes = bytearray(plain)
    holes[156] = ord("S")
    write_seeds("archive", {
        "plain.tar": plain, "packed.tar.gz": zipped, "pax.tar": tar(pictures | {"train/Füchse/x.png": b"x"}, format=tarfile.PAX_FORMAT),
        "gnu.tar": tar({"train/" + "long" * 40 + "/a.png": b"abc"}, format=tarfile.GNU_FORMAT), "cut.tar.gz": zipped[:-30],
        "cut.tar": plain[:1300], "two_folders.tar": tar({"a/c/1.png": b"x", "b/c/1.png": b"y"}), "sparse.tar": bytes(holes),
        "no_pictures.tar": tar({"readme": b"text"}), "bomb.tar.gz": gzip.compress(tar({"a/b.png": bytes(3 << 20)}), mtime=0),
    })


def main():
    lists = {"decode": decode_entries(), "damage": damage_entries(), "resize": resize_entries(), "eval": eval_entries()}
    parts = [f'"header":{json.dumps({"pillow": PIL.__version__, "made_by": "tests/goldens/make_images.py"})}']
    for key, entries in lists.items():
        parts.append(f'"{key}":[\n' + ",\n".join(json.dumps(e, separators=(",", ":")) for e in entries) + "]")
    parts.append('"color":' + json.dumps(color_entries(), separators=(",", ":")))
    parts.append('"normalized":' + json.dumps(normalized(), separators=(",", ":")))
    path = HERE / "images.json"
    path.write_text("{" + ",\n".join(parts) + "}\n")
    json.loads(path.read_text())
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB, " + ", ".join(f"{k} {len(v)}" for k, v in lists.items()))
    for entry in lists["damage"]:
        print(" ", entry["name"], entry.get("error", "taken"))
    write_corpora()


if __name__ == "__main__":
    main()
