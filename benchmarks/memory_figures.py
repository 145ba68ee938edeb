"""Score against bytes of the cache, as the judge and the conversion measured it: python benchmarks/memory_figures.py"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import storing  # noqa: F401  the repository on the path

from attnlab.provenance import write_atomic
from papers.common.pictures import COLOURS, Line, Panel, line_panels

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
# The policies that a picture has room for, in the order of its key.
POLICIES = (
    "streaming-llm", "h2o", "snapkv", "keydiff", "expected-attention", "leave-one-out", "criticalkv",
    "kvzip",
)  # fmt: skip
LENGTH = 2048


def cache_curves(rows: Sequence[Row], length: int) -> str:
    """Panels of the needle with and without the question, and of the loss over the full cache's."""
    panels = []
    for task, column, title in (
        ("needle", "unseen", "needle, the question unseen"),
        ("needle", "seen", "needle, the question seen"),
        ("loss", "unseen", "loss over the full cache, nats"),
    ):
        lines = list(_curves([row for row in rows if (row["task"], row["length"]) == (task, length)], task, column))
        low, high = (0.0, 1.0) if task == "needle" else (0.0, None)
        panels.append(Panel(f"{title} ({length:,} tokens)", lines, "% of the cache's bytes", "", low, high))
    return line_panels(panels, across=3)


def _curves(rows: Sequence[Row], task: str, column: str) -> Iterator[Line]:
    for policy, colour in zip(POLICIES, COLOURS, strict=True):
        points = sorted(
            (100 * row["bytes_ratio"], row[column]["over_full"]["value"] if task == "loss" else row[column]["score"])
            for row in rows
            if row["policy"] == policy and "score" in (row.get(column) or {})
        )
        if points:
            xs, ys = zip(*points, strict=True)
            yield Line(xs, ys, colour, policy.split(":")[0])


def conversion_points(rows: Sequence[Row]) -> str:
    """A dot for each model: its loss above the teacher's, and the needles that it finds, against its cache."""
    panels = []
    for column, title, low, high in (
        ("loss_above", "loss over the teacher, nats", 0.0, None),
        ("needle", "needle", 0.0, 1.0),
    ):
        known = [row for row in rows if row.get(column) is not None]
        names = list(dict.fromkeys(row["model"] for row in rows))
        lines = [
            Line([100 * row["cache"]], [row[column]], COLOURS[names.index(row["model"]) % len(COLOURS)], row["model"])
            for row in known
        ]
        panels.append(Panel(title, lines, "% of softmax's cache", "", low, high))
    return line_panels(panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="the folder of judge.json, convert.json")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "images")
    parser.add_argument("--length", type=int, default=LENGTH)
    args = parser.parse_args()
    judged, converted = (args.results / name for name in ("judge.json", "convert.json"))
    if judged.exists():
        rows = json.loads(judged.read_text(encoding="utf-8"))["rows"]
        print(write_atomic(args.out / "cache-curves.svg", cache_curves(rows, args.length)))
    if converted.exists():
        rows = json.loads(converted.read_text(encoding="utf-8"))["tables"]["conversion"]
        print(write_atomic(args.out / "convert-points.svg", conversion_points(rows)))


if __name__ == "__main__":
    main()
