"""The curves of attention guidance: python benchmarks/guidance_figures.py papers/guidance/figures"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.provenance import write_atomic

RESULTS = Path(__file__).resolve().parents[1] / "papers" / "results" / "guidance.json"
STYLE = (
    "<style>text{font:12px sans-serif;fill:#555}path{fill:none;stroke-width:1.2}.axis{stroke:#999;stroke-width:1}"
    "</style>"
)
COLOURS = {"guided": "#4c72b0", "unguided": "#c44e52", "Gaussian heads": "#55a868"}
LEFT, TOP, WIDTH, HEIGHT, GAP = 46, 26, 300, 170, 50

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """A curve of a panel, and whose it is."""

    name: str
    at: Sequence[int]
    values: Sequence[float]


def main(folder: Path) -> None:
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    write_atomic(folder / "guidance-curves.svg", curves(result))


def curves(result: Mapping[str, Any]) -> str:
    """A panel for each figure of the paper that has been trained, two in a row; all seeds of the best arms."""
    panels = {name: lines for name, lines in _panels(result).items() if lines}
    parts = [drawn for place, (title, lines) in enumerate(panels.items()) for drawn in panel(place, title, lines)]
    rows = -(-len(panels) // 2)
    size = f'width="{2 * (LEFT + WIDTH + 10) + 20}" height="{rows * (HEIGHT + GAP) + 20}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{STYLE}{"".join(parts)}</svg>\n'


def _panels(result: Mapping[str, Any]) -> dict[str, list[Line]]:
    names = {"AG": "guided", "BASE": "unguided", "Gaussian": "Gaussian heads"}
    translation = result["raw"].get("translation_curves", [])
    return {
        **_masked_lm_panels(result),
        **_electra_panels(result),
        "translation's loss": [_line(curve, names[curve["arm"]]) for curve in translation],
    }


def _masked_lm_panels(result: Mapping[str, Any]) -> dict[str, list[Line]]:
    """The losses of the best guided and the best unguided arm, and the guidance loss of the first."""
    raw = result["raw"]
    best = {_settings(row) for row in result["tables"]["convergence"] if row["layers"] == 12}
    runs = {(run["arm"], run["seed"]) for run in raw["runs"] if run["part"] == "a" and _settings(run) in best}
    curves = [curve for curve in raw["curves"] if curve["part"] == "a" and (curve["arm"], curve["seed"]) in runs]
    guided = [curve for curve in curves if curve["arm"].startswith("AG")]
    return {
        "masked-LM loss, 12 layers": [_line(c, "guided" if c in guided else "unguided") for c in curves],
        "guidance loss of the guided ones": [_line(c, "guided", "guidance") for c in guided],
    }


def _electra_panels(result: Mapping[str, Any]) -> dict[str, list[Line]]:
    """A panel for each training of the table, by its number of steps, its width and its alpha0."""
    table = {(row["of_steps"], row["width"], *_settings(row)) for row in result["tables"].get("electra", [])}
    curves = [
        curve
        for curve in result["raw"].get("electra_curves", [])
        if (curve["steps"], curve["width"], *_settings(curve)) in table
    ]
    trainings = dict.fromkeys((c["steps"], c["width"], c["alpha0"]) for c in curves if c["guided"])
    return {
        f"ELECTRA's loss, width {width}, alpha0 {alpha0:g}, after its first fall": [
            _line(c, "guided" if c["guided"] else "unguided", since=0.1) for c in curves if c["steps"] == steps
        ]
        for steps, width, alpha0 in trainings
    }


def _settings(row: Row) -> tuple[Any, ...]:
    return row["guided"], row["lr"], row["warmup"]


def _line(curve: Row, name: str, column: str = "task", since: float = 0.0) -> Line:
    """The curve in steps of a hundredth of it, its beginning as it is; or only from a share of the training on."""
    begin = next(i for i, at in enumerate(curve["at"]) if at >= since * curve["at"][-1])
    at, values = curve["at"][begin:], curve[column][begin:]
    kept_at, kept, new = [], [], list[float]()
    for step, value in zip(at, values, strict=True):
        new.append(value)
        if step < at[-1] / 50 or step - (kept_at[-1] if kept_at else 0) >= at[-1] / 100 or step == at[-1]:
            kept_at.append(step)
            kept.append(sum(new) / len(new))
            new = []
    return Line(name, kept_at, kept)


def panel(place: int, title: str, lines: Sequence[Line]) -> list[str]:
    """Axes, a line for each curve, and the names of those there are."""
    x, y = LEFT + place % 2 * (WIDTH + LEFT + 10), TOP + place // 2 * (HEIGHT + GAP)
    last = max(line.at[-1] for line in lines)
    # The first value, unless a curve that begins later rises.
    high, low = max(max(line.values[:5]) for line in lines), min(min(line.values) for line in lines)
    parts = [
        f'<path class="axis" d="M{x} {y}V{y + HEIGHT}H{x + WIDTH}"/>',
        f'<text x="{x}" y="{y - 10}">{title}</text>',
        f'<text x="{x - 6}" y="{y + 8}" text-anchor="end">{high:.2g}</text>',
        f'<text x="{x - 6}" y="{y + HEIGHT}" text-anchor="end">{low:.2g}</text>',
        f'<text x="{x}" y="{y + HEIGHT + 16}">0</text>',
        f'<text x="{x + WIDTH}" y="{y + HEIGHT + 16}" text-anchor="end">{last} updates</text>',
    ]
    for line in lines:
        points = [
            f"{x + WIDTH * a / last:.1f} {y + HEIGHT * (high - min(high, v)) / (high - low):.1f}"
            for a, v in zip(line.at, line.values, strict=True)
        ]
        parts.append(f'<path stroke="{COLOURS[line.name]}" d="M{"L".join(points)}"/>')
    for i, name in enumerate(dict.fromkeys(line.name for line in lines)):
        parts.append(f'<text x="{x + 190}" y="{y + 16 + 16 * i}" style="fill:{COLOURS[name]}">{name}</text>')
    return parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the figures go")
    main(parser.parse_args().folder)
