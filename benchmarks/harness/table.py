# SPDX-License-Identifier: Apache-2.0
"""Results as tables of text."""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from harness.plan import COLUMN_NAMES, Goal, Row, Section, columns
from harness.stats import Limits, Ratio, ratio_in_turns


@dataclasses.dataclass
class Result:
    """A row that was measured: each column's median of every turn, in milliseconds; ours is the column `halfstep`."""

    row: Row
    turns: dict[str, list[float]]
    errors: dict[str, str]
    operations: float = 0.0
    bytes: float = 0.0
    facts: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    def median(self, column: str) -> float | None:
        times = self.turns.get(column)
        return statistics.median(times) if times else None

    def ratio(self, column: str, to: str = "halfstep") -> Ratio | None:
        return ratio_in_turns(self.turns.get(column, []), self.turns.get(to, []))

    def met(self, goal: Goal) -> bool | None:
        """Whether the goal is met; None where it wasn't measured."""
        if goal.at_most_us:
            ours = self.median(goal.by)
            return None if ours is None else ours * 1e3 <= goal.at_most_us
        if goal.fact:
            ours, theirs = (self.facts.get(c, {}).get(goal.fact) for c in (goal.by, goal.column))
            return None if ours is None or not theirs else ours <= goal.share * theirs
        ratio = self.ratio(goal.column, to=goal.by)
        return None if ratio is None else ratio.median >= goal.ratio


def number(value: float | None) -> str:
    """Three digits, never in exponents."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def spread(ratio: Ratio | None) -> str:
    """`2.08x (1.95-2.33)`"""
    return "-" if ratio is None else f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def percent(ratio: Ratio | None) -> str:
    """What is added: `+1.5 % (0.9 to 2.2)` for a ratio of 1.015."""
    if ratio is None:
        return "-"
    return f"{(ratio.median - 1) * 100:+.1f} % ({(ratio.low - 1) * 100:.1f} to {(ratio.high - 1) * 100:.1f})"


def align(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of text columns two spaces apart: the first `left` ones and the last flush left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    return ["  ".join(cell.ljust(w) if i < left or i == last else cell.rjust(w)
                      for i, (cell, w) in enumerate(zip(row, widths))).rstrip() for row in rows]


def goals(result: Result) -> str:
    """`>= 1.3x PyTorch: yes`"""
    words = {True: "yes", False: "NO", None: "not measured"}
    return ", ".join(f"{g.text()}: {words[result.met(g)]}" for g in result.row.goals)


def _header(section: Section, shown: Sequence[str]) -> list[str]:
    header = [*section.labels, f"Halfstep {section.unit}"]
    if section.kind == "overhead":
        return [*header, "without", "overhead", "PyTorch's", "goal"]
    if section.kind == "rates":
        header += ["GFLOP/s", "of peak"]
    elif section.kind == "streams":
        header += ["GB/s", "of peak"]
    elif section.unit == "ms":
        header += ["limit"]
    for column in shown:
        header += [COLUMN_NAMES[column], "ratio"]
    return [*header, "goal"]


def _cells(section: Section, result: Result, shown: Sequence[str], limits: Limits) -> list[str]:
    scale = 1e3 if section.unit == "us" else 1.0
    ours = result.median("halfstep")
    cells = [*result.row.labels, number(ours * scale if ours else None)]
    if section.kind == "overhead":
        without = result.median("without")
        torch = result.ratio("torch", to="torch_without")
        verdict = {True: "< 2 %: yes", False: "< 2 %: NO", None: "not measured"}[result.met(result.row.goals[0])]
        added = result.ratio("without")
        return [*cells, number(without), percent(added.inverse() if added else None), percent(torch), verdict]
    limit = limits.milliseconds(result.operations, result.bytes)
    if section.kind in ("rates", "streams"):
        work = result.operations if section.kind == "rates" else result.bytes
        cells += [number(work / ours * 1e-6), f"{limit / ours:.0%}"] if ours and work and limit else ["-", "-"]
    elif section.unit == "ms":
        cells.append(number(limit))
    for column in shown:
        time = result.median(column)
        cells += [number(time * scale if time else None), spread(result.ratio(column)) if time else ""]
    return [*cells, goals(result)]


def _images(section: Section, results: Sequence[Result], limits: Limits) -> list[str]:
    """A line for each contestant, ours first, with what is known of it besides its time; goals stand below."""
    rows = [[*section.labels, "", "ms", "images/s", "limit", "time / ours", "peak MB", "before", "tensors", "saved", "outside", ""]]
    below = []
    for result in results:
        columns_here = ["halfstep"] + [c.column for c in result.row.others if c.timed and c.column in result.turns]
        images = result.facts.get("halfstep", {}).get("images", 1.0)
        limit = limits.milliseconds(result.operations, result.bytes)
        for column in columns_here:
            time, facts, ours = result.median(column), result.facts.get(column, {}), column == "halfstep"

            def megabytes(name: str) -> str:
                return f"{facts[name] * 1e-6:.0f}" if name in facts else ""

            rate = result.row.rate if ours else next(c.rate for c in result.row.others if c.column == column)
            outside = facts.get("outside_convolutions")
            rows.append([*(result.row.labels if ours else [""] * len(section.labels)), "Halfstep" if ours else COLUMN_NAMES[column],
                         number(time), number(images / time * 1e3) if time else "-", number(limit / rate) if limit and rate else "",
                         "" if ours else spread(result.ratio(column)), megabytes("peak_bytes"), megabytes("before_bytes"),
                         megabytes("handed_out_bytes"), megabytes("saved_bytes"), "" if outside is None else f"{outside:.0%}", ""])
        if result.row.goals:
            below.append(f"goals of {' '.join(result.row.labels)}: {goals(result)}")
    kept = [i for i in range(len(rows[0]) - 1) if i <= len(section.labels) or any(row[i] for row in rows[1:])]
    return align([[row[i] for i in kept] + [""] for row in rows], len(section.labels) + 1) + below


def _ranks(section: Section, results: Sequence[Result]) -> list[str]:
    """A line for each contestant, ours first: time, and what it sends while it computes."""
    rows = [[*section.labels, "", "ms", "time / ours", "MB sent", "hidden", ""]]
    below = []
    for result in results:
        for column in ["halfstep"] + [c.column for c in result.row.others if c.timed and c.column in result.turns]:
            facts, ours = result.facts.get(column, {}), column == "halfstep"
            sent, hidden = facts.get("bytes_sent"), facts.get("hidden")
            rows.append([*(result.row.labels if ours else [""] * len(section.labels)), "Halfstep" if ours else COLUMN_NAMES[column],
                         number(result.median(column)), "" if ours else spread(result.ratio(column)),
                         f"{sent * 1e-6:.2f}" if sent else "", "" if hidden is None else f"{hidden:.0%}", ""])
        if result.row.goals:
            below.append(f"goals of {' '.join(result.row.labels)}: {goals(result)}")
    return align(rows, len(section.labels) + 1) + below


def render(section: Section, results: Sequence[Result], limits: Limits) -> str:
    """A section's table with its title, its notes and what went wrong in it."""
    shown = [c for c in columns([r.row for r in results]) if any(r.turns.get(c) for r in results)]
    rows = [_header(section, shown)] + [_cells(section, r, shown, limits) for r in results]
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] + [""] for row in rows]
    lines = [section.title, *align(rows, len(section.labels))]
    if section.kind == "images":
        lines = [section.title, *_images(section, results, limits)]
    if section.kind == "ranks":
        lines = [section.title, *_ranks(section, results)]
    if section.note:
        lines.append(section.note)
    said: set[str] = set()
    for result in results:
        for column, error in result.errors.items():
            text = f"{result.row.name(section.name)}: {COLUMN_NAMES.get(column, 'Halfstep')}: {error}"
            if text not in said:
                said.add(text)
                lines.append(text)
    return "\n".join(lines)
