"""Effective's Figures 1 and 3 to 6 by layer and head, and where both kinds of attention are one, as pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from papers.common.pictures import COLOURS, Drawing, Line, Matrix, Panel, Tables, line_panels, matrices
from papers.effective.config import NAME, PRETRAINED

__all__ = ["PICTURES", "figure_1", "figure_3", "figure_4", "figure_to_token", "lengths"]

# The task whose figures are drawn: the paper shows RTE first, and it has the longest inputs.
TASK = "RTE"
TITLES = {"standard": "standard", "effective": "effective, exact", "authors": "effective, with padding"}
TYPES = ("cls", "sep", "punctuation", "noun", "pronoun", "verb")
PATTERNS = ("vertical", "diagonal", "vertical_diagonal", "block", "heterogeneous")
Rows = Sequence[Mapping[str, Any]]


def lengths(tables: Tables) -> str:
    """The share of dev inputs with no more tokens than a head is wide: there V has no left nullspace.

    The results of an encoder with narrower heads have the share for heads of 64 too.
    """
    lines = []
    for i, row in enumerate(tables["lengths"]):
        widths = [row["width"], 64] if row["width"] != 64 else [64]
        shares = [100 * row["trivial_share"], 100 * row["trivial_share_base"]][: len(widths)]
        lines.append(Line([float(w) for w in widths], shares, COLOURS[i], row["task"]))
    return line_panels(
        [Panel("no nullspace: heads of 32 and of 64", lines, "width of a head", "% of inputs", low=0, high=100)]
    )


def figure_1(tables: Tables) -> str:
    """What [CLS] attends to in each head of the last layer, by type of token."""
    rows = tables["token_types_heads_pretrained"]
    return matrices(
        [_matrix(f"Figure 1, {TASK}: {TITLES[kind]}", rows, kind, "token", TYPES, "head") for kind in TITLES]
    )


def figure_3(tables: Tables) -> str:
    """How similar the maps of each layer and head are before and after fine-tuning."""
    rows = tables["finetuning_heads"]
    kinds = ("standard", "effective")
    return matrices([_by_layer(f"Figure 3, {TASK}: {TITLES[k]}", rows, k, "similarity") for k in kinds])


def figure_4(tables: Tables) -> str:
    """Patterns by layer."""
    panels = []
    for kind, title in TITLES.items():
        rows = _of(tables["figure_4_pretrained"], attention=kind)
        layers = [float(row["layer"]) for row in rows]
        lines = [
            Line(layers, [row[name] for row in rows], COLOURS[i], name.replace("_", " + "))
            for i, name in enumerate(PATTERNS)
        ]
        panels.append(Panel(f"Figure 4, {TASK}: {title}", lines, "layer", "% of maps", low=0, high=100))
    return line_panels(panels, across=3)


def figure_to_token(token: str, number: int) -> Callable[[Tables], str]:
    """Figure 5 or 6: the weight that other tokens give to [CLS] or [SEP] in each layer and head."""

    def draw(tables: Tables) -> str:
        rows = [row for row in tables["to_token_heads_pretrained"] if row["token"] == token]
        named = f"Figure {number}, {TASK}, to [{token.upper()}]"
        return matrices([_by_layer(f"{named}: {TITLES[kind]}", rows, kind, "weight") for kind in TITLES])

    return draw


def _of(rows: Rows, **labels: Any) -> list[Mapping[str, Any]]:
    wanted = {"task": TASK, **labels}
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _by_layer(title: str, rows: Rows, kind: str, value: str) -> Matrix:
    layers = sorted({row["layer"] for row in rows})
    return _matrix(title, rows, kind, "layer", layers, "head", value=value)


def _matrix(
    title: str, rows: Rows, kind: str, down: str, places: Sequence[Any], across: str, *, value: str = "weight"
) -> Matrix:
    by_place = {(row[down], row[across]): row[value] for row in _of(rows, attention=kind)}
    columns = sorted({column for _, column in by_place})
    shown = [place for place in places if (place, columns[0]) in by_place]
    return Matrix(title, [[by_place[p, c] for c in columns] for p in shown], [*map(str, shown)], [*map(str, columns)])


PICTURES: dict[str, Drawing] = {
    "effective-lengths.svg": (NAME, "lengths", lengths),
    "effective-figure-1.svg": (PRETRAINED, "token_types_heads_pretrained", figure_1),
    "effective-figure-3.svg": (NAME, "finetuning_heads", figure_3),
    "effective-figure-4.svg": (PRETRAINED, "figure_4_pretrained", figure_4),
    "effective-figure-5.svg": (PRETRAINED, "to_token_heads_pretrained", figure_to_token("cls", 5)),
    "effective-figure-6.svg": (PRETRAINED, "to_token_heads_pretrained", figure_to_token("sep", 6)),
}
