"""ABC's Figures 1 and 2, and curves of distillation and of translators, as pictures for the documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from papers.common.pictures import COLOURS, Drawing, Line, Panel, Tables, line_panels

__all__ = ["PICTURES", "decoding", "distillation", "translation"]


# Data and rows of Tables 3a and 7, with the paper's slots and with a quarter of them.
TRANSLATORS = {
    "Multi30k, the paper's slots": ("multi30k-en-de", (
        "BASE", "ABC_MLP-32-32", "ABC_MLP-32-8", "Linformer-64-64", "Linformer-32-32", "ABC_RD-means-64-64",
        "ABC_RD-means-32-32",
    )),
    "Multi30k, a quarter of them": ("multi30k-en-de", (
        "BASE", "ABC_MLP-8-8", "ABC_MLP-8-2", "Linformer-16-16", "Linformer-8-8", "ABC_RD-means-16-16",
        "ABC_RD-means-8-8", "Cluster-8-8",
    )),
    "Tatoeba, a quarter of them": ("tatoeba-es-en", (
        "BASE", "ABC_MLP-8-8", "ABC_MLP-8-2", "Linformer-8-8", "ABC_RD-means-8-8",
    )),
}  # fmt: skip
Points = list[tuple[float, float]]


def decoding(tables: Tables) -> str:
    """Tokens a second and megabytes of the caches against the length; lengths and megabytes in powers of two.

    The speed of a sequence is summed from timed single steps (see decoding.py), and the panel's title says so.
    """
    speed = _lines(tables["figure_1"], "model", "length", "tokens_per_second")
    memory = _lines(tables["figure_2"], "model", "length", "memory")
    across = "log2 of the length"
    return line_panels(
        [
            Panel(
                "Figure 1: decoding speed, from timed steps",
                _drawn(speed, x=math.log2),
                across,
                "tokens a second",
                low=0,
            ),
            Panel("Figure 2: memory", _drawn(memory, x=math.log2, y=math.log2), across, "log2 of megabytes"),
        ]
    )


def distillation(tables: Tables) -> str:
    """The share of the gap that each method has closed after so many seconds, in its first seed."""
    curve, panels = [row for row in tables["curve"] if row.get("seed", 0) == 0], []
    methods = list(dict.fromkeys(row["method"] for row in curve))
    for subject in dict.fromkeys(row["subject"] for row in curve):
        rows = [row for row in curve if row["subject"] == subject]
        alone = all("h200_seconds" in row for row in rows)
        lines = _lines(rows, "method", "h200_seconds" if alone else "seconds", "gap_closed")
        drawn = _drawn({name: [(0.0, 0.0), *points] for name, points in lines.items()}, order=methods)
        across = "seconds of an H200 alone" if alone else "seconds"
        panels.append(Panel(subject, drawn, across, "gap closed", low=0, high=1))
    return line_panels(panels)


def translation(tables: Tables) -> str:
    """Translators' losses on the validation set over their updates, of the seed that was trained longest."""
    panels = []
    for title, (data, keys) in TRANSLATORS.items():
        losses = [row for row in tables["validation"] if row["data"] == data and row["nll"] is not None]
        lines = _lines(_longest_seed([row for row in losses if row["variant"] in keys], keys), "variant", "step", "nll")
        drawn = _drawn({key: lines[key] for key in keys if key in lines})
        panels.append(Panel(title, drawn, "updates", "-log p of a token", low=0.5, high=3))
    return line_panels(panels)


def _longest_seed(rows: Sequence[Mapping[str, Any]], variants: Sequence[str]) -> list[Mapping[str, Any]]:
    """The rows of the seed that was trained longest, of those that all variants were trained with."""
    by_seed: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], []).append(row)
    # Seeds of another set may share a model.
    whole = [mine for mine in by_seed.values() if {row["variant"] for row in mine} == set(variants)]
    return max(whole, key=lambda mine: max(row["step"] for row in mine), default=[])


def _lines(rows: Sequence[Mapping[str, Any]], key: str, x: str, y: str) -> dict[str, Points]:
    lines: dict[str, Points] = {}
    for row in rows:
        lines.setdefault(row[key], []).append((row[x], row[y]))
    return lines


def _drawn(
    lines: Mapping[str, Points],
    *,
    order: Sequence[str] = (),
    x: Callable[[float], float] = float,
    y: Callable[[float], float] = float,
) -> list[Line]:
    """Each line in the colour of its place in ``order``, or among the lines."""
    places = list(order) or list(lines)
    return [
        Line([x(a) for a, _ in points], [y(b) for _, b in points], COLOURS[places.index(name) % len(COLOURS)], name)
        for name, points in lines.items()
    ]


PICTURES: dict[str, Drawing] = {
    "abc-decoding.svg": ("abc-decoding", "figure_1", decoding),
    "abc-distill.svg": ("abc-distill", "curve", distillation),
    "abc-mt.svg": ("abc-mt", "validation", translation),
}
