"""Time against length, as abc_gpu.py measured it: python benchmarks/abc_gpu_figure.py RESULTS.json FIGURE.svg."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.provenance import write_atomic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="what abc_gpu.py --write wrote")
    parser.add_argument("figure", type=Path, help="the svg file to write")
    args = parser.parse_args()
    write_atomic(args.figure, figure(json.loads(args.results.read_text(encoding="utf-8"))["tables"]["lengths"]))


COLOURS = {
    "SDPA both ms": "#c44e52", "SDPA forward ms": "#e5989b", "fla both ms": "#55a868", "fla forward ms": "#a8d3b2",
    "both ms": "#4c72b0", "forward ms": "#9db4d6",
}  # fmt: skip
STYLE = (
    "<style>text{font:12px sans-serif;fill:#555}polyline{fill:none;stroke-width:2}.grid{stroke:#ddd}</style>"
    '<text x="60" y="16">ms for 32,768 tokens (one sequence from there on), 8 heads of 128, 64 slots</text>'
)
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Axes:
    """Logarithmic axes: the range of log2 of the length, and of log10 of the milliseconds."""

    first: float
    last: float
    low: int
    high: int

    def at(self, length: float, milliseconds: float) -> tuple[float, float]:
        """Where a point is drawn."""
        x = 60 + 400 * (math.log2(length) - self.first) / max(1e-9, self.last - self.first)
        return x, 270 - 240 * (math.log10(milliseconds) - self.low) / (self.high - self.low)


def figure(rows: list[dict[str, Any]]) -> str:
    """Time against length, both axes logarithmic: ours, SDPA, and fla where it was measured; forward and both."""
    measured = {name: [(row["T"], row[name]) for row in rows if row.get(name)] for name in COLOURS}
    lines = {name: points for name, points in measured.items() if points}
    lengths = [row["T"] for row in rows]
    logs = [math.log10(y) for points in lines.values() for _, y in points]
    axes = Axes(math.log2(min(lengths)), math.log2(max(lengths)), math.floor(min(logs)), math.ceil(max(logs)))
    parts = [*_grid(axes, lengths), *(_polyline(axes, name, points) for name, points in lines.items())]
    parts += _names(axes, lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="600" height="320" viewBox="0 0 600 320">{STYLE}'
        f'{"".join(parts)}<text x="260" y="310" text-anchor="middle">tokens in a sequence</text></svg>\n'
    )


def _grid(axes: Axes, lengths: list[int]) -> Iterator[str]:
    for power in range(axes.low, axes.high + 1):
        _, y = axes.at(2**axes.first, 10.0**power)
        yield f'<line class="grid" x1="60" x2="460" y1="{y:.0f}" y2="{y:.0f}"/>'
        yield f'<text x="52" y="{y + 4:.0f}" text-anchor="end">{10.0**power:g}</text>'
    for length in lengths:
        x, _ = axes.at(length, 10.0**axes.low)
        yield f'<text x="{x:.0f}" y="288" text-anchor="middle">{length}</text>'


def _polyline(axes: Axes, name: str, points: Points) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (axes.at(*point) for point in points))
    return f'<polyline points="{path}" style="stroke:{COLOURS[name]}"/>'


def _names(axes: Axes, lines: dict[str, Points]) -> Iterator[str]:
    """At the right, in the order in which the lines end, at least the height of a text apart."""
    y = 0.0
    for name in sorted(lines, key=lambda name: axes.at(*lines[name][-1])[1]):
        y = max(axes.at(*lines[name][-1])[1] + 4, y + 14)
        label = name.replace(" ms", "").replace("fla", "chunk_abc")
        label = f"ABC_MLP {label}" if label in ("forward", "both") else label
        yield f'<text x="466" y="{y:.0f}" style="fill:{COLOURS[name]}">{label}</text>'


if __name__ == "__main__":
    main()
