"""The figure of docs/guidance.md: python benchmarks/guidance_figures.py docs"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlab.provenance import write_atomic

STYLE = (
    "<style>text{font:12px sans-serif;fill:#555}path{fill:none;stroke-width:1.5}.axis{stroke:#999;stroke-width:1}"
    "</style>"
)
COLOURS = {"AG": "#4c72b0", "MLM": "#c44e52", "loss": "#55a868"}
LEFT, TOP, WIDTH, HEIGHT = 46, 26, 300, 200


def main(folder: str) -> None:
    result = json.loads((Path(folder).parent / "results" / "guidance.json").read_text(encoding="utf-8"))
    write_atomic(Path(folder) / "guidance-curves.svg", curves(result))


def curves(result: Mapping[str, Any]) -> str:
    """Left: the MLM loss of the best arms, all seeds. Right: L_AG of the guided ones, over the same updates."""
    best = {(row["guided"], row["lr"], row["warmup"]) for row in result["tables"]["convergence"] if row["layers"] == 12}
    runs = [r for r in result["raw"]["runs"] if r["part"] == "a" and (r["guided"], r["lr"], r["warmup"]) in best]
    wanted = {(r["arm"], r["seed"]) for r in runs}
    drawn = [c for c in result["raw"]["curves"] if c["part"] == "a" and (c["arm"], c["seed"]) in wanted]
    last = max(c["at"][-1] for c in drawn)
    parts = panel(0, "masked-LM loss", last, max(c["task"][0] for c in drawn), min(min(c["task"]) for c in drawn))
    guided = [c for c in drawn if c["arm"].startswith("AG")]
    top = max(max(c["guidance"]) for c in guided)
    parts += panel(1, "guidance loss of the guided models", last, top, 0.0)
    for c in drawn:
        low, high = min(min(x["task"]) for x in drawn), max(x["task"][0] for x in drawn)
        parts.append(path(c["at"], c["task"], 0, last, high, low, COLOURS["AG" if c in guided else "MLM"]))
    parts += [path(c["at"], c["guidance"], 1, last, top, 0.0, COLOURS["loss"]) for c in guided]
    for i, (name, told) in enumerate((("AG", "guided"), ("MLM", "unguided"))):
        parts.append(f'<text x="{LEFT + 180}" y="{TOP + 20 + 16 * i}" style="fill:{COLOURS[name]}">{told}</text>')
    size = f'width="{2 * (LEFT + WIDTH) + 30}" height="{TOP + HEIGHT + 40}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{STYLE}{"".join(parts)}</svg>\n'


def panel(place: int, title: str, last: int, high: float, low: float) -> list[str]:
    x, y = LEFT + place * (WIDTH + LEFT + 10), TOP + HEIGHT
    return [
        f'<path class="axis" d="M{x} {TOP}V{y}H{x + WIDTH}"/>',
        f'<text x="{x}" y="{TOP - 10}">{title}</text>',
        f'<text x="{x - 6}" y="{TOP + 8}" text-anchor="end">{high:.2g}</text>',
        f'<text x="{x - 6}" y="{y}" text-anchor="end">{low:.2g}</text>',
        f'<text x="{x}" y="{y + 18}">0</text>',
        f'<text x="{x + WIDTH}" y="{y + 18}" text-anchor="end">{last} updates</text>',
    ]


def path(
    at: Sequence[int], values: Sequence[float], place: int, last: int, high: float, low: float, colour: str
) -> str:
    x0 = LEFT + place * (WIDTH + LEFT + 10)
    points = [
        f"{x0 + WIDTH * a / last:.1f} {TOP + HEIGHT * (high - min(high, v)) / (high - low):.1f}"
        for a, v in zip(at, values, strict=True)
    ]
    return f'<path stroke="{colour}" d="M{"L".join(points)}"/>'


if __name__ == "__main__":
    main(*sys.argv[1:])
