"""Which heads of a model follow a pattern of attention guidance: the section that a comparison's page has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnlab.pages.fragments import section
from attnlab.pages.heatmaps import Grid, heat_maps
from attnlab.pages.html import Html, element
from attnlab.pages.tables import Column, table

__all__ = ["audit_lines", "audit_section", "closest_heads"]

Row = Mapping[str, Any]
# A head that is closer to a pattern than this is said to follow it.
FOLLOWS = 0.5
MOST = 24


def closest_heads(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each pattern the head closest to it, closest first; ``rows`` come from ``attnlab.guidance.pattern_audit``."""
    best: dict[str, Row] = {}
    for row in rows:
        if row["closeness"] is not None and row["closeness"] > best.get(row["pattern"], {"closeness": -1})["closeness"]:
            best[row["pattern"]] = row
    return sorted((dict(row) for row in best.values()), key=lambda row: -row["closeness"])


def audit_lines(rows: Sequence[Row]) -> list[str]:
    """One line for a terminal."""
    heads = [
        f"{r['pattern']} {r['closeness']:.2f} (layer {r['layer']}, head {r['head']}{_few(r)})"
        for r in closest_heads(rows)
    ]
    return [f"closest heads to the patterns of attention guidance: {', '.join(heads)}"] if heads else []


def _few(row: Row) -> str:
    """That few tokens can follow the pattern, where that is so."""
    return f"; only {row['rows']} of {row['of']} tokens can" if row.get("few") else ""


def audit_section(rows: Sequence[Row] | None) -> Html | None:
    """A grid of all heads for each pattern, and the heads that follow one."""
    if not rows:
        return None
    followers = [row for row in rows if row["closeness"] is not None and row["closeness"] > FOLLOWS]
    followers.sort(key=lambda row: -row["closeness"])
    return section(
        "Which heads already follow a pattern",
        element("p", _summary(followers), class_="about"),
        _closeness_maps(rows),
        _followers_table(followers[:MOST]),
        about="Next and prev are the neighbours, first is the first token, period and delim the full stops and the "
        "delimiters of the tokenizer, same all tokens with the same id. Attention guidance pulls heads towards these.",
    )


def _summary(followers: Sequence[Row]) -> str:
    if not followers:
        return f"No head has a closeness above {FOLLOWS} to any of the patterns."
    heads = {(row["kind"], row["layer"], row["head"]) for row in followers}
    have = "1 head has" if len(heads) == 1 else f"{len(heads)} heads have"
    return f"{have} a closeness above {FOLLOWS} to a pattern."


def _closeness_maps(rows: Sequence[Row]) -> Html | None:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    patterns = list(dict.fromkeys(row["pattern"] for row in rows if row["closeness"] is not None))
    if not patterns:
        return None
    grids = {
        pattern if len(kinds) == 1 else f"{pattern}, {kind}": _grid(
            [row for row in rows if row["kind"] == kind and row["pattern"] == pattern]
        )
        for kind in kinds
        for pattern in patterns
    }
    return heat_maps(
        grids,
        name="pattern-audit",
        title="Closeness of each head to each pattern",
        high=1.0,
        note="1 is the pattern itself, 0 a head that puts no weight there. Rows are layers, columns heads. A pattern "
        "that no token can follow, as the next token in a causal model, has no map.",
    )


def _grid(rows: Sequence[Row]) -> Grid:
    """(layer, head): the closeness of each head to the one pattern of these rows."""
    by_head = sorted(rows, key=lambda row: row["head"])
    layers = sorted({row["layer"] for row in rows})
    return [[row["closeness"] for row in by_head if row["layer"] == layer] for layer in layers]


def _followers_table(followers: Sequence[Row]) -> Html | None:
    if not followers:
        return None
    columns = [Column(key, key.capitalize()) for key in ("kind", "layer", "head", "pattern")]
    columns += [Column("closeness", "Closeness", bar=True), Column("mass", "Weight on the pattern's tokens")]
    columns += [Column("rows", "Tokens that can", help="tokens that see a key of the pattern; the others do not count")]
    return table(followers, name="pattern-followers", title="Heads that follow a pattern", columns=columns)
