"""Score against bytes of the cache, as the judge and the conversion measured it: python benchmarks/memory_figures.py"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import storing  # noqa: F401  the repository on the path
from convert_tables import means

from attnlab.provenance import write_atomic
from papers.common.pictures import COLOURS, Line, Panel, line_panels

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
# The policies that a picture has room for, in the order of its key.
POLICIES = (
    "compact:queries=repeat,choose=largest,safeguard=0.2", "streaming-llm", "h2o", "snapkv", "keydiff", "leave-one-out",
    "criticalkv", "kvzip",
)  # fmt: skip
LENGTH = 2048
TEACHER, EVICTION = "softmax", "eviction, best policy"


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


def conversion_curves(rows: Sequence[Row], judged: Sequence[Row], length: int) -> str:
    """Loss above the teacher's and needles found against the cache, a line for each kind of memory that was measured.

    A panel without a point, or of a loss after the cut without two kinds, is left out. Of eviction the best policy at
    each budget is drawn: the needles are those of the judge, whose policies have not seen the question, as a memory has
    not, and of the rows only where it has none.
    """
    names = [*(_kind(row["model"]) for row in rows), EVICTION]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(names))}
    panels = []
    for column, title, low, high in (
        ("loss_above", "loss over the teacher, nats", None, None),
        ("continuation_above", "the same after the cache is cut", None, None),
        ("needle", "needles found", 0.0, 1.0),
    ):
        best = max if column == "needle" else min
        points: dict[str, dict[float, float]] = {}
        for row in rows:
            if row.get(column) is not None:
                own = points.setdefault(_kind(row["model"]), {})
                own[row["cache"]] = best(row[column], own.get(row["cache"], row[column]))
        # After the cut one memory alone says nothing: that loss is there to be compared with eviction's.
        if len(set(points) - {TEACHER}) < (2 if column == "continuation_above" else 1):
            continue
        if column == "needle" and (known := _best_judged(judged, length)):
            points[EVICTION] = known
        lines = [
            Line([100 * x for x in sorted(own)], [own[x] for x in sorted(own)], colours[name], name)
            for name, own in points.items()
            if own
        ]
        panels.append(Panel(title, lines, "% of softmax's cache", "", low, high))
    return line_panels(panels, across=len(panels))


def _kind(model: str) -> str:
    """What a row is drawn as: all policies of eviction are one, and the teacher is softmax."""
    return {"teacher": TEACHER, "eviction": EVICTION}.get(model.partition(",")[0], model)


def _best_judged(rows: Sequence[Row], length: int) -> dict[float, float]:
    """The most needles that keys left by a policy answered at each budget, {share of the bytes: share found}."""
    best: dict[float, float] = {}
    for row in rows:
        known = (row["task"], row["length"]) == ("needle", length) and row["budget"] < 1
        # Compaction writes new keys and values: no eviction.
        known = known and row["policy"].partition(":")[0] != "compact"
        if known and "score" in (row.get("unseen") or {}):
            best[row["budget"]] = max(best.get(row["budget"], 0.0), row["unseen"]["score"])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="the folder of judge.json, convert.json")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "images")
    parser.add_argument("--length", type=int, default=LENGTH)
    args = parser.parse_args()
    judged, converted = (args.results / name for name in ("judge.json", "convert.json"))
    policies = json.loads(judged.read_text(encoding="utf-8"))["rows"] if judged.exists() else []
    if policies:
        print(write_atomic(args.out / "cache-curves.svg", cache_curves(policies, args.length)))
    if converted.exists():
        rows = means(json.loads(converted.read_text(encoding="utf-8"))["tables"]["conversion"])
        print(write_atomic(args.out / "convert-curves.svg", conversion_curves(rows, policies, args.length)))


if __name__ == "__main__":
    main()
