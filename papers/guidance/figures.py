"""The figures of attention guidance from papers/results/guidance.json, on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnlab.pages import Html, Series, element, line_chart, page, table

__all__ = ["figures_page"]

Row = Mapping[str, Any]
TABLES = (
    ("summary", "With and without guidance"),
    ("tuning", "Part (a): every learning rate and warm-up"),
    ("convergence", "Parts (a) and (e): the best arms"),
    ("ag_loss", "Figure 5 in numbers"),
    ("finetuned", "Part (b): fine-tuned accuracy"),
    ("electra", "Part (c): ELECTRA"),
    ("translation", "Part (d): translation"),
    ("low_resource", "Part (f): little text"),
    ("ablations", "Part (g): ablations"),
)


def figures_page(result: Mapping[str, Any]) -> str:
    """Figures 5 to 7 and the tables, for what the result holds."""
    tables, raw, notes = result["tables"], result.get("raw", {}), result.get("notes", {})
    body: list[Html] = [element("h1", "Attention guidance")]
    body += _figure_5(raw, tables)
    if raw.get("electra_curves"):
        body.append(_curves(raw["electra_curves"], "task", "figure_6", "Figure 6: ELECTRA's loss", "loss"))
    if raw.get("translation_curves"):
        title = "Figure 7: training loss of translation"
        body.append(_curves(raw["translation_curves"], "task", "figure_7", title, "loss"))
    body += [table(tables[name], name=name, title=title, note=notes.get(name, "")) for name, title in TABLES
             if tables.get(name)]  # fmt: skip
    return page("Attention guidance", body, subtitle="reproduction")


def _figure_5(raw: Mapping[str, Sequence[Row]], tables: Mapping[str, Sequence[Row]]) -> list[Html]:
    curves = [c for c in raw.get("curves", []) if c["part"] == "a"]
    if not curves:
        return []
    charts = [_curves(curves, "task", "figure_5_mlm", "Masked LM: training loss", "MLM loss")]
    guided = [c for c in curves if c["arm"].startswith("AG")]
    if guided:
        arm = tables["ag_loss"][0]["arm"] if tables.get("ag_loss") else guided[0]["arm"]
        one = next(c for c in guided if c["arm"] == arm)
        top = max(one["guidance"])
        both = [
            Series("MLM loss", one["at"], one["task"], colour=0),
            Series("AG loss, scaled", one["at"], [v / top * max(one["task"]) for v in one["guidance"]], colour=1),
        ]
        title = f"Figure 5: MLM loss and AG loss ({arm})"
        charts.append(line_chart(both, name="figure_5", title=title, x_label="updates", y_label="loss"))
    return charts


def _curves(rows: Sequence[Row], column: str, name: str, title: str, y_label: str) -> Html:
    lines = [
        Series(f"{row['arm']}, seed {row['seed']}", row["at"], row[column], colour=i) for i, row in enumerate(rows)
    ]
    return line_chart(lines, name=name, title=title, x_label="updates", y_label=y_label)
