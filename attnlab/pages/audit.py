"""Which heads of a model follow a pattern of attention guidance: the section that a comparison's page has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnlab.pages.charts import heat_maps
from attnlab.pages.fragments import section
from attnlab.pages.html import Html, element
from attnlab.pages.tables import Column, table

__all__ = ["audit_lines", "audit_section", "closest_heads"]

Row = Mapping[str, Any]
# A head that is closer to a pattern than this is said to follow it.
FOLLOWS = 0.5
MOST = 24


def closest_heads(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each pattern the head closest to it, closest first; rows are those of ``attnlab.guidance.pattern_audit``."""
    best: dict[str, Row] = {}
    for row in rows:
        if row["closeness"] is not None and row["closeness"] > best.get(row["pattern"], {"closeness": -1})["closeness"]:
            best[row["pattern"]] = row
    return sorted((dict(row) for row in best.values()), key=lambda row: -row["closeness"])


def audit_lines(rows: Sequence[Row]) -> list[str]:
    """One line for a terminal."""
    told = [f"{r['pattern']} {r['closeness']:.2f} (layer {r['layer']}, head {r['head']})" for r in closest_heads(rows)]
    return [f"closest heads to the patterns of attention guidance: {', '.join(told)}"] if told else []


def audit_section(rows: Sequence[Row] | None) -> Html | None:
    """A grid of all heads for each pattern, and the heads that follow one."""
    if not rows:
        return None
    judged = [row for row in rows if row["closeness"] is not None]
    followers = sorted((r for r in judged if r["closeness"] > FOLLOWS), key=lambda r: -r["closeness"])
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    grids: dict[str, Sequence[Sequence[float | None]]] = {}
    for kind in kinds:
        for pattern in dict.fromkeys(row["pattern"] for row in judged):
            own = [row for row in rows if row["kind"] == kind and row["pattern"] == pattern]
            label = pattern if len(kinds) == 1 else f"{pattern}, {kind}"
            layers = sorted({row["layer"] for row in own})
            grids[label] = [
                [row["closeness"] for row in sorted(own, key=lambda r: r["head"]) if row["layer"] == layer]
                for layer in layers
            ]
    heads = {(row["kind"], row["layer"], row["head"]) for row in followers}
    said = (
        f"{len(heads)} heads have a closeness above {FOLLOWS} to a pattern."
        if followers
        else f"No head has a closeness above {FOLLOWS} to any of the patterns."
    )
    columns = [Column(key, key.capitalize()) for key in ("kind", "layer", "head", "pattern")]
    columns += [Column("closeness", "Closeness", bar=True), Column("mass", "Weight on the pattern's tokens")]
    return section(
        "Which heads already follow a pattern",
        element("p", said, class_="about"),
        heat_maps(
            grids,
            name="pattern-audit",
            title="Closeness of each head to each pattern",
            high=1.0,
            note="1 is the pattern itself, 0 a head that puts no weight there. Rows are layers, columns heads.",
        )
        if grids
        else None,
        table(followers[:MOST], name="pattern-followers", title="Heads that follow a pattern", columns=columns)
        if followers
        else None,
        about="Next and prev are the neighbours, first is the first token, period and delim the full stops and the "
        "delimiters of the tokenizer, same all tokens with the same id. Attention guidance pulls heads towards these.",
    )
