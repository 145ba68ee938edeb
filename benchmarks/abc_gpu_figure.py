"""Time against length, as abc_gpu.py measured it: python benchmarks/abc_gpu_figure.py RESULTS.json FIGURE.svg."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from attnlab.provenance import write_atomic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="what abc_gpu.py --write wrote")
    parser.add_argument("figure", type=Path, help="the svg file to write")
    args = parser.parse_args()
    write_atomic(args.figure, figure(json.loads(args.results.read_text(encoding="utf-8"))["tables"]["lengths"]))


def figure(rows: list[dict[str, Any]]) -> str:
    """Time against length, both axes logarithmic: ours, SDPA, and fla where it was measured; forward and both."""
    colours = {
        "SDPA both ms": "#c44e52", "SDPA forward ms": "#e5989b", "fla both ms": "#55a868", "fla forward ms": "#a8d3b2",
        "both ms": "#4c72b0", "forward ms": "#9db4d6",
    }  # fmt: skip
    points = {name: [(r["T"], r[name]) for r in rows if r.get(name)] for name in colours}
    lines = {name: colour for name, colour in colours.items() if points[name]}
    xs = [math.log2(r["T"]) for r in rows]
    ys = [math.log10(y) for p in points.values() for _, y in p]
    low, high = math.floor(min(ys)), math.ceil(max(ys))

    def place(t: float, ms: float) -> tuple[float, float]:
        x = 60 + 400 * (math.log2(t) - min(xs)) / max(1e-9, max(xs) - min(xs))
        return x, 270 - 240 * (math.log10(ms) - low) / (high - low)

    parts = []
    for power in range(low, high + 1):
        _, y = place(2 ** min(xs), 10.0**power)
        parts.append(f'<line class="grid" x1="60" x2="460" y1="{y:.0f}" y2="{y:.0f}"/>')
        parts.append(f'<text x="52" y="{y + 4:.0f}" text-anchor="end">{10.0**power:g}</text>')
    for row in rows:
        x, _ = place(row["T"], 10.0**low)
        parts.append(f'<text x="{x:.0f}" y="288" text-anchor="middle">{row["T"]}</text>')
    for name, colour in lines.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in points[name]))
        parts.append(f'<polyline points="{path}" style="stroke:{colour}"/>')
    # At the right, in the order in which the lines end, a line of text apart.
    above = 0.0
    for name in sorted(lines, key=lambda name: place(*points[name][-1])[1]):
        above = max(place(*points[name][-1])[1] + 4, above + 14)
        label = name.replace(" ms", "").replace("fla", "chunk_abc")
        label = f"ABC_MLP {label}" if label in ("forward", "both") else label
        parts.append(f'<text x="466" y="{above:.0f}" style="fill:{lines[name]}">{label}</text>')
    style = (
        "<style>text{font:12px sans-serif;fill:#555}polyline{fill:none;stroke-width:2}.grid{stroke:#ddd}</style>"
        '<text x="60" y="16">ms for 32,768 tokens (one sequence from there on), 8 heads of 128, 64 slots</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="600" height="320" viewBox="0 0 600 320">{style}'
        f'{"".join(parts)}<text x="260" y="310" text-anchor="middle">tokens in a sequence</text></svg>\n'
    )


if __name__ == "__main__":
    main()
