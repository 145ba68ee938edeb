"""A comparison as aligned text for a terminal: the mechanisms, the sweep over r, and the recommended plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnlab.evaluation.plans import plan_name
from attnlab.evaluation.quality import quality_label, quality_text
from attnlab.pages.numbers import with_interval
from attnlab.pages.pattern_audit import audit_lines

__all__ = ["aligned", "comparison_lines", "recommend_lines", "sweep_lines", "table_lines"]

# Columns, and the fields of a row that they show.
ERRORS = {
    "output error": "output_error",
    "score error": "score_error",
    "after W_O": "after_projection",
    "effective": "effective_error",
}
# Above these the model fails on the text even with exact attention.
TOO_HARD = {"perplexity": 500, "mlm_error": 0.65}


def comparison_lines(result: Mapping[str, Any]) -> list[str]:
    """Everything that a comparison has measured."""
    lines = table_lines(result)
    if "sweeps" in result:
        lines += ["", *sweep_lines(result)]
    if "recommendation" in result:
        lines += ["", *recommend_lines(result["recommendation"])]
    return lines


def table_lines(result: Mapping[str, Any]) -> list[str]:
    """One line per mechanism, then the model's own quality and what its attention is like."""
    measured = _measured(result)
    label = quality_label(measured["name"]) if measured else "quality"
    readings = result.get("config", {}).get("readings", ())
    header = ["mechanism", label, "loss above exact", *ERRORS, *(f"{name} map" for name in readings), "time", "memory"]
    cells = [_cells(row, readings) for row in result["rows"] if not row["refused"]]
    width = max(map(len, ["mechanism", *(row["mechanism"] for row in result["rows"])]))
    rest = iter(aligned([header, *cells], left=1, first=width))
    lines = [next(rest)]
    for row in result["rows"]:
        reason = (row["refused"] or "").partition("\n")[0]
        lines.append(f"{row['mechanism'].ljust(width)}  refused: {reason}" if row["refused"] else next(rest))
    differs = f"the nearest value is not that of largest weight for {result['ranking_differs']:.0%} of the queries"
    warnings = [f"warning: {warning}" for warning in result.get("warnings", [])]
    notes = [*warnings, *_exact_rows(result["rows"]), *_exact_line(measured, label), *_text_line(result), differs]
    return [*lines, *notes, *audit_lines(result.get("patterns", []))]


def sweep_lines(result: Mapping[str, Any]) -> list[str]:
    """One line per r, one pair of columns (quality, output error) per family."""
    sweeps: dict[str, list[dict[str, Any]]] = result["sweeps"]
    measured = _measured(result)
    measure = measured["name"] if measured else "quality"
    rows = {(family, row["r"]): row for family, rows in sweeps.items() for row in rows}
    table = [["r", *(text for family in sweeps for text in (family, "error"))]]
    for r in sorted({r for _, r in rows}):
        pairs = [_sweep_cells(rows.get((family, r)), measure) for family in sweeps]
        table.append([str(r), *(cell for pair in pairs for cell in pair)])
    title = f"{quality_label(measure)} and output error against the number of keys per query, r"
    return [title, *aligned(table, left=0), *result["sweep_notes"]]


def recommend_lines(recommendation: Mapping[str, Any]) -> list[str]:
    """The table of the plans that pay, what each puts in which layer, and the recommendation in one sentence."""
    measure = recommendation["exact"]["name"]
    header = ["plan", recommendation["by"], quality_label(measure), "loss", "held out", "attention bytes", "time"]
    table = [header, *(_plan_cells(row) for row in recommendation["rows"])]
    lines = [line.rstrip() for line in aligned(table, left=2)]
    for row in recommendation["rows"]:
        if row["replaced"]:
            lines.append(f"{plan_name(row)}: {_placed(row, recommendation['by'])}")
    if recommendation["left_out"]:
        lines.append(f"left out: {len(recommendation['left_out'])} plans that softmax or one of these beats or equals")
    # The last line is what to do.
    return [*lines, *filter(None, [recommendation.get("sentence")])]


def _placed(row: Mapping[str, Any], by: str) -> str:
    """What a plan puts where: layer by layer, or how many heads take what (the file has which)."""
    if by != "heads":
        return ", ".join(f"{layer}: {spec}" for layer, spec in row["plan"]["layers"].items())
    return ", ".join(f"{spec} in {count} heads" for spec, count in row["placed"].items())


def aligned(table: Sequence[Sequence[str]], *, left: int, first: int = 0) -> list[str]:
    """Rows as lines: the first ``left`` columns to the left, the others to the right, column 0 at least ``first``."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    widths[0] = max(widths[0], first)
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]


def _measured(result: Mapping[str, Any]) -> dict[str, Any] | None:
    return next((row["quality"] for row in result["rows"] if row.get("quality")), None)


def _cells(row: Mapping[str, Any], readings: Sequence[str]) -> list[str]:
    errors = [row[field] for field in ERRORS.values()]
    errors += [row["reading_errors"][name] for name in readings]
    return [
        row["mechanism"],
        quality_text(row["quality"]),
        loss_above_text(row["quality"]),
        *("-" if error is None else f"{error:.4f}" for error in errors),
        *("exact" if row[ratio] is None else f"{row[ratio]:.2f} x" for ratio in ("time_ratio", "memory_ratio")),
    ]


def loss_above_text(quality: Mapping[str, Any] | None) -> str:
    """How much the loss is above exact attention's on the same tokens, with its interval."""
    if quality is None or quality.get("loss_above") is None:
        return "-"
    above, low, high = (quality[f"loss_above{part}"] for part in ("", "_low", "_high"))
    return with_interval(above, low, high, sign=True)


def _sweep_cells(row: Mapping[str, Any] | None, measure: str) -> tuple[str, str]:
    if row is None:
        return "-", "-"
    return quality_text({"name": measure, "value": row["quality"]}), f"{row['output_error']:.4f}"


def _plan_cells(row: Mapping[str, Any]) -> list[str]:
    held_out = row["held_out_increase"]
    return [
        plan_name(row),
        f"{row['replaced']}/{row['units']}",
        quality_text(row["quality"]),
        f"{100 * row['loss_increase']:+.2f} %",
        "-" if held_out is None else f"{100 * held_out:+.2f} %",
        f"{row['attention_bytes']:.2f}",
        "-" if row["time_ratio"] is None else f"{row['time_ratio']:.2f} x",
    ]


def _exact_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which mechanisms are softmax attention in other words, so that no time is compared."""
    exact = [row["mechanism"] for row in rows if row.get("exact") and row["mechanism"] != "softmax"]
    return [f"exact: {', '.join(exact)} gives softmax attention's own output here, by construction"] if exact else []


def _text_line(result: Mapping[str, Any]) -> list[str]:
    """How much text this is about, and why not more."""
    text = result.get("text")
    if not text or "why" not in text:
        return []
    line = f"text: {text['tokens']:,} tokens in {text['windows']} windows ({text['why']}); brackets are 95 % intervals"
    rows, asked = len(result["rows"]), len(result["config"]["mechanisms"])
    return [line, *([f"stopped early: {rows} of {asked} mechanisms"] if rows < asked else [])]


def _exact_line(measured: dict[str, Any] | None, label: str) -> list[str]:
    """The model's own quality, with a warning where it fails on this text even so."""
    if measured is None:
        return []
    exact = measured["exact"]
    shown = {key: measured.get(f"exact_{key}") for key in ("low", "high")} | {"name": measured["name"], "value": exact}
    line = f"with exact attention the {label} on this text is {quality_text(shown)}"
    if exact <= TOO_HARD[measured["name"]]:
        return [line]
    return [
        f"{line}: the model was made for other text, and differences say little here; name one it knows with --text"
    ]
