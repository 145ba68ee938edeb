"""KTIW's figures from results/ktiw-*.json: pictures for the documents, and the same on a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.dynamics import bitext, count_table
from attnlab.pages import Html, element, page, table
from attnlab.provenance import write_atomic
from papers.common.pictures import COLOURS, Drawing, Line, Matrix, Panel, Tables, draw_results, line_panels, matrices

__all__ = ["PICTURES", "write_page", "write_pictures"]

RED, BLUE, GREEN, VIOLET = COLOURS[:4]


def figure_3(tables: Tables) -> str:
    """Accuracy of each seed on the hard and the control distribution of either panel."""
    panels = []
    for panel in ("permutations", "mixture"):
        rows = [row for row in tables["figure_3_curves"] if row["panel"] == panel]
        lines = _seeds(rows, "data", {"control": BLUE, "hard": RED})
        panels.append(Panel(f"Figure 3: {panel}", lines, y_label="accuracy", low=0, high=1))
    return line_panels(panels)


def figure_6(tables: Tables) -> str:
    """Accuracy of each seed by the initialisations of its heads."""
    colours = {"random": GREEN, "one good": BLUE, "all bad": RED}
    panels = []
    for contexts in dict.fromkeys(row["contexts"] for row in tables["figure_6_curves"]):
        rows = [row for row in tables["figure_6_curves"] if row["contexts"] == contexts]
        title = f"Figure 6: {contexts} of eight heads"
        panels.append(Panel(title, _seeds(rows, "heads", colours), y_label="accuracy", low=0, high=1))
    return line_panels(panels)


def section_6_2(tables: Tables) -> str:
    """Accuracy of each seed at copying and at a fixed permutation."""
    lines = _seeds(tables["section_6_2_curves"], "task", {"copy": BLUE, "permute": RED})
    return line_panels([Panel("Section 6.2", lines, y_label="accuracy", low=0, high=1)])


def figure_7(tables: Tables) -> str:
    """The four log-odds over training, mean over seeds."""
    rows = tables["figure_7"]
    last = max(row["step"] for row in rows)
    panels = []
    for encoder in dict.fromkeys(row["encoder"] for row in rows):
        # The order reverses early, so the first steps have a panel of their own.
        for until in (min(50, last), last):
            lines = []
            for name, colour in (("keyword", RED), ("after", BLUE), ("mean", GREEN), ("last", VIOLET)):
                x, y = _mean([r for r in rows if r["encoder"] == encoder and r["step"] <= until], name)
                lines.append(Line(x, y, colour, name))
            panels.append(Panel(f"Figure 7: {encoder}, {until} steps", lines, y_label="log-odds"))
    return line_panels(panels)


def agreement_curves(tables: Tables) -> str:
    """A(alpha, beta_uf) and A(alpha, alpha_hat) over the checkpoints of each data set."""
    panels = []
    for dataset in dict.fromkeys(row["dataset"] for row in tables["curve"]):
        lines = []
        for name, rows, value, colour in (
            ("A(alpha, beta of uniform attention)", tables["curve"], "a_alpha_uf", RED),
            ("A(alpha, alpha of another seed)", tables.get("second", []), "a_alpha_hat", BLUE),
        ):
            of_dataset = [row for row in rows if row["dataset"] == dataset]
            lines.append(Line([r["step"] for r in of_dataset], [r[value] for r in of_dataset], colour, name))
        panels.append(Panel(dataset, [line for line in lines if line.x], y_label="%", low=0))
    return line_panels(panels, across=3)


def alignment(tables: Tables) -> str:
    """alpha, beta and IBM Model 1's alpha for one sentence."""
    rows = tables["alignment"]
    source = [word.replace("▁", " ").strip() for word in rows[0]["source"]]
    target = [row["target"].replace("▁", " ").strip() for row in rows]
    names = (("alpha", "attention, alpha"), ("beta", "probe, beta"), ("ibm", "IBM Model 1"))
    return matrices([Matrix(title, [row[name] for row in rows], target, source) for name, title in names], cell=20)


def heads(tables: Tables) -> str:
    """Agreement of each head's attention with the probe over training, reference run."""
    panels = []
    for family in dict.fromkeys(row["family"] for row in tables["curves"]):
        rows = [r for r in tables["curves"] if r["family"] == family and r["run"] == "reference" and "own_beta" in r]
        lines = []
        for i, head in enumerate(dict.fromkeys(row["head"] for row in rows)):
            of_head = [row for row in rows if row["head"] == head]
            lines.append(Line([r["step"] for r in of_head], [r["own_beta"] for r in of_head], COLOURS[i % 8], head))
        panels.append(Panel(f"{family}: A(alpha, beta) of each head", lines, y_label="%", low=0))
    return line_panels(panels)


def count_tables() -> str:
    """The count tables of Figures 1, 4, 5 and 8: co-occurrences of words in each of the paper's tasks."""
    films = [("film gut", "movie good"), ("essen gut", "food good"), ("film lang", "movie long")]
    letters = ["A B C", "B C A", "C A B", "B A C"]
    mixed = ["A B", "B A", "C D", "D C"]
    texts = [("great film", "+"), ("dull film", "-"), ("great cast", "+"), ("dull plot", "-")]
    shown: dict[str, list[tuple[str, str]]] = {
        "Figure 1: translation": films,
        "Figure 4: permutations": [(text, text.lower()) for text in letters],
        "Figure 5: polarity": texts,
        "Figure 8: mixture": [(text, text.lower()) for text in mixed],
    }
    return matrices([_counts(title, pairs) for title, pairs in shown.items()])


def _counts(title: str, pairs: Sequence[tuple[str, str]]) -> Matrix:
    sides = [[text.split() for text in side] for side in zip(*pairs, strict=True)]
    words = [list(dict.fromkeys(word for row in side for word in row)) for side in sides]
    ids = [[[known.index(word) for word in row] for row in side] for side, known in zip(sides, words, strict=True)]
    return Matrix(title, count_table(bitext(*ids)).dense(len(words[0]), len(words[1])).tolist(), *words)


PICTURES: dict[str, Drawing] = {
    "dynamics-permutations.svg": ("ktiw-permutations", "figure_3_curves", figure_3),
    "dynamics-heads.svg": ("ktiw-multihead", "figure_6_curves", figure_6),
    "dynamics-permute-function.svg": ("ktiw-permute-function", "section_6_2_curves", section_6_2),
    "dynamics-local.svg": ("ktiw-local", "figure_7", figure_7),
    "dynamics-agreement.svg": ("ktiw-table2", "curve", agreement_curves),
    "dynamics-alignment.svg": ("ktiw-alignment", "alignment", alignment),
    "dynamics-transformers.svg": ("ktiw-transformers", "curves", heads),
}


def write_pictures(results: Path | str, out: Path | str) -> list[Path]:
    """Draw the results files of the folder ``results`` into the folder ``out``."""
    out = Path(out)
    drawn = draw_results(PICTURES, Path(results), out)
    return [write_atomic(out / "dynamics-counts.svg", count_tables()), *drawn]


def write_page(result: Mapping[str, Any], out: Path | str) -> Path:
    """One result's pictures and tables as a page."""
    tables = result["tables"]
    body: list[Html] = [element("h1", result["name"])]
    for name, needed, draw in PICTURES.values():
        if name == result["name"] and tables.get(needed):
            body.append(element("figure", Html(draw(tables))))
    # Curves are drawn; as tables they would be long.
    for name, rows in tables.items():
        if rows and len(rows) <= 200 and not any(isinstance(value, list) for value in rows[0].values()):
            body.append(table(rows, name=name, title=name.replace("_", " ")))
    return write_atomic(out, page(result["name"], body, subtitle="reproduction"))


def _seeds(rows: Sequence[Mapping[str, Any]], key: str, colours: Mapping[str, str]) -> list[Line]:
    """A thin line for each seed of each setting; the first of a setting names it."""
    lines = []
    for name, colour in colours.items():
        of_setting = [row for row in rows if row[key] == name]
        if not of_setting:
            continue
        steps, curves = [row["step"] for row in of_setting], np.array([row["accuracy"] for row in of_setting]).T
        lines += [Line(steps, curve.tolist(), colour, name if i == 0 else "", True) for i, curve in enumerate(curves)]
    return lines


def _mean(rows: Sequence[Mapping[str, Any]], value: str) -> tuple[list[float], list[float]]:
    by_step: dict[float, list[float]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row[value])
    return list(by_step), [float(np.mean(values)) for values in by_step.values()]
