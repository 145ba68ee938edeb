"""The figures of value-aware approximation: python benchmarks/value_aware_figures.py papers/value_aware/figures"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

import attnlab as al
from attnlab.provenance import write_atomic

ROOT = Path(__file__).resolve().parents[1]
REAL_LM = "papers/results/value-aware-lm.json"
STYLE = (
    "<style>text{font:12px sans-serif;fill:#555}.key{font-size:11px}path,line{fill:none;stroke-width:2}"
    ".axis{stroke:#999;stroke-width:1}</style>"
)
COLOURS = {"top-r": "#c44e52", "value-aware": "#4c72b0", "exact": "#333"}


def main(folder: Path) -> None:
    write_atomic(folder / "value-aware-geometry.svg", geometry())
    write_atomic(folder / "value-aware-error.svg", error_by_r())
    rows = tables("benchmarks/results/kv_policies.json")["perplexity"]
    write_atomic(folder / "value-aware-cache.svg", cache(rows, "stories15M", "sampled"))
    write_atomic(folder / "value-aware-cache-lm.svg", cache(rows, "kv-lm", "wikitext103-test"))
    results = tables("papers/results/value-aware.json")
    write_atomic(folder / "value-aware-figure-1.svg", figure_1(results["figure_1"]))
    write_atomic(folder / "value-aware-figure-2.svg", figure_2(results["figure_2"]))
    write_atomic(folder / "value-aware-figure-3.svg", figure_3(results["figure_3_curves"]))
    if (ROOT / REAL_LM).exists():
        rows = tables(REAL_LM)["perplexity"]
        for length in sorted({row["length"] for row in rows}):
            write_atomic(folder / f"value-aware-lm-{length}.svg", real_lm(rows, length))


def tables(path: str) -> dict[str, list[dict]]:
    """The tables of a results file, named from the top of the repository."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))["tables"]


def geometry() -> str:
    """Values in a plane, sized by alpha; the output, and what one key makes of it, by weight and by nearness."""
    torch.manual_seed(4)
    v = torch.randn(1, 1, 9, 2)
    v[0, 0, 0] = torch.tensor([2.2, 1.6])
    k = torch.randn(1, 1, 9, 1)
    k[0, 0, 0] = 1.6
    call = al.AttentionCall(torch.ones(1, 1, 1, 1), k, v, scale=1.0)
    alpha, o = al.Softmax().weights(call).flatten(), al.Softmax()(call).flatten()

    def place(point: torch.Tensor) -> tuple[float, float]:
        return 200 + 75 * float(point[0]), 150 - 55 * float(point[1])

    parts = []
    for weight, point in zip(alpha.tolist(), v[0, 0], strict=True):
        x, y = place(point)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 + 30 * weight:.1f}" fill="#999" fill-opacity="0.4"/>')
    ox, oy = place(o)
    for spec, name in (("top-r:r=1", "top-r"), ("value-aware:r=1", "value-aware")):
        (x, y), colour = place(al.mechanism(spec)(call).flatten()), COLOURS[name]
        parts.append(
            f'<line x1="{ox:.1f}" y1="{oy:.1f}" x2="{x:.1f}" y2="{y:.1f}" stroke="{colour}" stroke-dasharray="4"/>'
        )
        parts.append(f'<text x="{x + 8:.1f}" y="{y - 8:.1f}" style="fill:{colour}">{name}, r = 1</text>')
    parts.append(f'<circle cx="{ox:.1f}" cy="{oy:.1f}" r="5" fill="{COLOURS["exact"]}"/>')
    parts.append(f'<text x="{ox + 9:.1f}" y="{oy + 14:.1f}">exact output</text>')
    return _svg(440, 300, parts)


def error_by_r() -> str:
    """Relative output error against r for two kernels, on Gaussian queries, keys and values of width 8."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
    call = al.AttentionCall(q, k, v)
    r = [1, 2, 3, 4, 6, 8, 9, 12, 16]
    series = []
    for kernel, dash in (("exp", ""), ("elu", "5 4")):
        exact = al.Kernelized(kernel)(call)
        for name in ("top-r", "value-aware"):
            errors = [
                float((al.mechanism(f"{name}:r={n},kernel={kernel}")(call) - exact).norm() / exact.norm()) for n in r
            ]
            series.append((f"{name}, {kernel}", COLOURS[name], dash, r, errors))
    return _lines(series, "r, keys per query (d = 8)", "relative error of the output")


def cache(rows: list[dict], model: str, text: str) -> str:
    """Loss above the full cache against the budget."""
    colours = {"value-aware": "#4c72b0", "leave-one-out": "#55a868", "mass": "#c44e52", "mass-norm": "#dd8452"}
    series = []
    for policy, colour in {**colours, "recency": "#8172b2", "random": "#999"}.items():
        mine = [row for row in rows if (row["model"], row["text"], row["policy"]) == (model, text, policy)]
        series.append((policy, colour, "", [row["budget"] for row in mine], [row["loss_over_full"] for row in mine]))
    return _lines(series, "budget, keys per head", "loss above the full cache")


def figure_1(rows: list[dict]) -> str:
    """OVA's Figure 1: MLM error against the keys of a query; LSH's are those of one round."""
    drawn = {"top-r": "#c44e52", "value-aware": "#4c72b0", "window": "#8172b2", "lsh": "#dd8452"}
    series = []
    for family, colour in drawn.items():
        for rounds, dash in {None: "", 4: "6 3", 16: "2 3"}.items():
            mine = sorted((r["r"], r["mlm_error"]) for r in rows if (r["family"], r.get("rounds")) == (family, rounds))
            if mine:
                named = f"{family}, {rounds} rounds" if rounds else family
                series.append((named, colour, dash, *map(list, zip(*mine, strict=True))))
    return _lines(series, "r, keys per query", "MLM error in %", log=True)


def figure_2(rows: list[dict]) -> str:
    """OVA's Figure 2: the loss with the r largest weights, kernel by kernel."""
    series = []
    for kernel, colour in {"exp": "#c44e52", "elu": "#4c72b0", "poly": "#55a868"}.items():
        mine = sorted((row["r"], row["loss"]) for row in rows if row["kernel"] == kernel)
        series.append((kernel, colour, "", *map(list, zip(*mine, strict=True))))
    return _lines(series, "r, keys per query", "loss in nats per token", log=True)


def figure_3(rows: list[dict]) -> str:
    """OVA's Figure 3: MLM error over training at both lengths, without the start."""
    series = []
    for model, colour in {"long": "#4c72b0", "short": "#c44e52"}.items():
        mine = [row for row in rows if row["model"] == model and row["step"]]
        named = f"{mine[0]['length']:,} tokens"
        millions = [round(row["tokens"] / 1e6) for row in mine]
        series.append((named, colour, "", millions, [row["mlm_error"] for row in mine]))
    return _lines(series, "millions of tokens", "MLM error in %", from_zero=False)


def real_lm(rows: list[dict], length: int) -> str:
    """Loss above exact attention against the keys of a query, on windows of one length."""
    drawn = {"top-r": "#c44e52", "value-aware": "#4c72b0", "alpha-norm": "#dd8452", "window": "#8172b2",
             "window+sinks": "#55a868"}  # fmt: skip
    series = []
    for family, colour in drawn.items():
        mine = sorted((r["r"], r["above"]) for r in rows if (r["family"], r["length"]) == (family, length))
        if mine:
            series.append((family, colour, "", *map(list, zip(*mine, strict=True))))
    return _lines(series, f"r, keys per query ({length:,} tokens)", "loss above exact attention", log=True)


def _lines(
    series: list[tuple[str, str, str, list, list]],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    from_zero: bool = True,
) -> str:
    """Lines with their keys; the y axis begins at zero unless x is logarithmic or ``from_zero`` is false."""
    left, top, width, height = 60, 20, 340, 220
    every = sorted({x for s in series for x in s[3]})
    ceiling = max(y for s in series for y in s[4])
    floor = 0 if from_zero and not log else min(y for s in series for y in s[4])

    def across(x: float) -> float:
        if log:
            return left + width * math.log(x / every[0]) / math.log(every[-1] / every[0])
        return left + width * x / every[-1]

    parts = [
        f'<line class="axis" x1="{left}" y1="{top + height}" x2="{left + width}" y2="{top + height}"/>',
        f'<line class="axis" x1="{left}" y1="{top}" x2="{left}" y2="{top + height}"/>',
        f'<text x="{left + width / 2}" y="{top + height + 34}" text-anchor="middle">{x_label}</text>',
        f'<text transform="translate(16 {top + height / 2}) rotate(-90)" text-anchor="middle">{y_label}</text>',
        f'<text x="{left - 6}" y="{top + 5}" text-anchor="end">{ceiling:.3g}</text>',
        f'<text x="{left - 6}" y="{top + height}" text-anchor="end">{floor:.3g}</text>',
    ]
    last = -math.inf
    for x in every:
        # Labels that would touch are left out.
        if across(x) - last >= 30:
            last = across(x)
            parts.append(f'<text x="{last:.1f}" y="{top + height + 16}" text-anchor="middle">{x}</text>')
    for i, (name, colour, dash, xs, ys) in enumerate(series):
        points = [
            f"{across(x):.1f},{top + height - height * (y - floor) / (ceiling - floor):.1f}"
            for x, y in zip(xs, ys, strict=True)
        ]
        parts.append(f'<path d="M{" L".join(points)}" stroke="{colour}" stroke-dasharray="{dash}"/>')
        parts.append(f'<path d="M{left + width + 15},{top + 18 * i} h22" stroke="{colour}" stroke-dasharray="{dash}"/>')
        parts.append(f'<text class="key" x="{left + width + 43}" y="{top + 18 * i + 4}">{name}</text>')
    return _svg(540, 290, parts)


def _svg(width: int, height: int, parts: list[str]) -> str:
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">{STYLE}'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n{inside}\n</svg>\n'
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the figures go")
    main(parser.parse_args().folder)
