#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws a mixed-precision training step with the dtype of each value, from a dump of the step.

usage: step_figure.py DUMP OUT.svg

DUMP is the folder written by, for example,

    halfstep train mlp --amp f16 --limit 64 --epochs 1 --no-out --debug-dump DUMP

The network must be a chain of layers. Every op and every dtype in the drawing is one of the dump's.
"""
import json
import pathlib
import sys

COLOURS = {"f16": "#1f4e9c", "bf16": "#1f4e9c", "f32": "#c96a12", "f64": "#777777", "i64": "#777777"}
WIDTH, HEIGHT, STEP = 88, 34, 118  # of a box, and from one box to the next
WEIGHTS, COPIES, FORWARD, BACKWARD, GRADIENTS, CHECK, UPDATE = 40, 110, 190, 310, 390, 470, 540  # rows


def read(folder):
    """The calls of a dump, in their order."""
    calls = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*/call.json")]
    if not calls:
        raise SystemExit(f"{folder}: expected a dump, found no call.json")
    return sorted(calls, key=lambda call: call["number"])


def dtype(call, side, place=0):
    """The dtype of one of the tensors of a call."""
    return call[side][place]["dtype"]


def name_of(call):
    """The op, and the module that it runs in."""
    return call["op"] + (f"|{call['module']}" if call["module"] else "")


class Drawing:
    """Collects boxes and arrows."""

    def __init__(self):
        self.parts = []

    def box(self, x, y, text, width=WIDTH, fill="#ffffff"):
        """A box around (x, y); a | in its text starts a second line."""
        self.parts.append(f'<rect x="{x - width / 2:g}" y="{y - HEIGHT / 2:g}" width="{width}" height="{HEIGHT}" rx="4" '
                          f'fill="{fill}" stroke="#444444"/>')
        lines = text.split("|")
        for i, line in enumerate(lines):
            self.parts.append(f'<text x="{x:g}" y="{y + 4 + 13 * (i - (len(lines) - 1) / 2):g}">{line}</text>')

    def arrow(self, points, label, at=None):
        """A line through the points with an arrowhead, in the colour of its dtype."""
        colour = COLOURS.get(label.split(",")[0].split(" ")[0], "#444444")
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
                          f'marker-end="url(#{colour[1:]})"/>')
        (x0, y0), (x1, y1) = points[:2]
        x, y = at or ((x0 + x1) / 2 + (14 if x0 == x1 else 0), (y0 + y1) / 2 + (4 if x0 == x1 else -6))
        self.parts.append(f'<text x="{x:g}" y="{y:g}" fill="{colour}" class="dtype">{label}</text>')

    def note(self, x, y, text):
        """Words beside a row."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="note">{text}</text>')

    def svg(self, width, height):
        """The whole file."""
        markers = "".join(f'<marker id="{c[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" '
                          f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{c}"/></marker>'
                          for c in sorted({*COLOURS.values(), "#444444"}))
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
                f'font-size="11" text-anchor="middle">\n<style>.dtype{{font-weight:bold}} '
                f'.note{{text-anchor:start;fill:#555555}}</style>\n<defs>{markers}</defs>\n'
                f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(self.parts) + "\n</svg>\n")


def chain(calls):
    """The forward calls that lead from the input to the loss, and the product of the loss with the scale."""
    forward, backward = [], [c for c in calls if c["backward_of"]]
    first = backward[0]["number"] if backward else 0
    for call in calls:
        if call["number"] < first and call["op"] not in ("fill", "copy", "clone"):
            forward.append(call)
    if not forward or not backward:
        raise SystemExit("expected a dump of a whole step, forward and backward")
    return forward, backward


def weights(drawing, calls, forward, columns):
    """Each layer's float32 weight and its 16-bit copy, above the layer."""
    for i, call in enumerate(forward):
        copies = [c for c in calls if c["op"] == "copy" and c["module"] == call["module"] and call["module"]]
        if call["op"] not in ("linear", "conv2d") or not copies:
            continue
        x = columns[i]
        drawing.box(x, WEIGHTS, f"{call['module']}.weight|{dtype(copies[0], 'inputs')}", fill="#fdf1e4")
        drawing.arrow([(x, WEIGHTS + 17), (x, COPIES - 17)], dtype(copies[0], "inputs"))
        drawing.box(x, COPIES, "cast")
        drawing.arrow([(x, COPIES + 17), (x, FORWARD - 17)], dtype(copies[0], "outputs"))


def draw(calls):
    """The drawing as SVG."""
    forward, backward = chain(calls)
    drawing = Drawing()
    columns = [150 + STEP * i for i in range(len(forward))]
    width = columns[-1] + 110
    weights(drawing, calls, forward, columns)

    drawing.note(40, FORWARD - 28, "forward")
    drawing.arrow([(44, FORWARD), (columns[0] - 44, FORWARD)], f'{dtype(forward[0], "inputs")} images', (68, FORWARD - 6))
    for i, call in enumerate(forward):
        scaled = call["op"] == "mul"
        drawing.box(columns[i], FORWARD, "mul|by the scale" if scaled else name_of(call), fill="#eef3fb")
        if i + 1 < len(forward):
            drawing.arrow([(columns[i] + 44, FORWARD), (columns[i + 1] - 44, FORWARD)], dtype(call, "outputs"))

    # Backward calls stand below the forward call whose gradient they are; a layer's are those of its own module.
    drawing.note(40, BACKWARD - 28, "backward")
    chained, sums = {}, {}
    for call in backward:
        for i, f in enumerate(forward):
            if f["op"] == call["backward_of"] and f["module"] == call["module"] and (f["module"] or i not in chained):
                if f["module"] or f["op"] != "relu":
                    place = i
                else:  # the last of the activations that has none yet
                    place = max(j for j, g in enumerate(forward) if g["op"] == f["op"] and j not in chained)
                weight_gradient = f["op"] in ("linear", "conv2d") and dtype(call, "outputs") == "f32"
                (sums if weight_gradient else chained).setdefault(place, []).append(call)
                break
    order = sorted(chained, reverse=True)
    start = columns[order[0]] if order else 0
    for i in order:
        drawing.box(columns[i], BACKWARD, name_of(chained[i][0]).replace("_backward", "|backward"), fill="#eef3fb")
    drawing.arrow([(start, FORWARD + 17), (start, BACKWARD - 17)], dtype(chained[order[0]][0], "inputs"))
    last = max(sums) if sums else order[0]
    for i, j in zip(order, order[1:]):
        drawing.arrow([(columns[i] - 44, BACKWARD), (columns[j] + 44, BACKWARD)], dtype(chained[i][0], "outputs"))
    for i, calls_of in sums.items():
        x = columns[i]
        drawing.box(x, GRADIENTS, f"{', '.join(c['op'] for c in calls_of)}|{calls_of[0]['module']}", fill="#eef3fb")
        if i in chained:
            # The same gradient goes into both products.
            from_x = min(x + STEP, columns[last] + STEP) if i != last else x + STEP
            drawing.arrow([(from_x - 62, BACKWARD), (from_x - 62, GRADIENTS), (x + 44, GRADIENTS)],
                          dtype(calls_of[0], "inputs"), (from_x - 46, GRADIENTS - 30))
        else:
            drawing.arrow([(columns[min(order)] - 44, BACKWARD), (x, BACKWARD), (x, GRADIENTS - 17)],
                          dtype(calls_of[0], "inputs"))
        drawing.arrow([(x, GRADIENTS + 17), (x, CHECK - 17)], dtype(calls_of[0], "outputs"))
    finish(drawing, calls, columns, sums)
    return drawing.svg(width, UPDATE + 46)


def finish(drawing, calls, columns, sums):
    """The check of the gradients, the optimizer's pass, and the weights that it writes."""
    check = next((c for c in calls if c["op"].startswith("amp_") and c["op"] != "amp_update_scale"), None)
    update = next((c for c in calls if c["op"].endswith("_step")), None)
    if check is None or update is None:
        raise SystemExit("expected a step with a gradient scaler and an optimizer")
    left, right = columns[min(sums)] - 60, columns[max(sums)] + 60
    middle, wide = (left + right) / 2, right - left
    drawing.note(40, CHECK - 28, "gradients")
    drawing.box(middle, CHECK, f"{check['op']}: is every gradient finite?", wide)
    drawing.arrow([(middle, CHECK + 17), (middle, UPDATE - 17)], dtype(check, "inputs", 1))
    drawing.box(middle, UPDATE, f"{update['op']}: unscales, and updates the weights where all are finite", wide)
    kinds = sorted({t["dtype"] for t in update["outputs"] if t and t["dtype"] in COLOURS and t["dtype"] != "i64"},
                   reverse=True)
    label = f"{kinds[0]} weights" + (f", and their {kinds[1]} copies" if len(kinds) > 1 else "")
    drawing.arrow([(left, UPDATE), (24, UPDATE), (24, WEIGHTS), (columns[min(sums)] - 44, WEIGHTS)], label,
                  (130, UPDATE + 34))


def main():
    """Reads the dump and writes the drawing."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    pathlib.Path(sys.argv[2]).write_text(draw(read(pathlib.Path(sys.argv[1]))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
