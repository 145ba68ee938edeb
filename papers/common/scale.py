"""At which scale results were made, and what making them again costs, in words.

A paper's folder says it in its scale.py: ``SCALES`` has for a results file a function of its content and of a cell that
a claim reads, ``SECONDS`` one that adds up the recorded times of its trainings, and ``EXACT_LMS`` one that finds the
rows of a table which are language models with exact attention: they say whether the models were trained enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from attnlab.pages.numbers import MISSING, number
from papers.common.cells import Result
from papers.common.claims import Claim
from papers.common.folders import folders, modules

__all__ = ["cost_of", "millions", "scale_of", "span", "undertrained"]

# Perplexity per piece of the 8k vocabulary on WikiText-103's test set above which a model with exact attention is
# undertrained. It was set before models of more than four layers were trained.
TRAINED = 60.0


def scale_of(claim: Claim, result: Result | None) -> str:
    """The scale of the tables that a claim reads; a dash where there are no results, or none are needed."""
    describe = _declared("SCALES").get(claim.results)
    if result is None or describe is None or not result.get("config"):
        return MISSING
    known = result.get("tables") or {}
    cells = [cell for cell in claim.test.cells if cell.table in known]
    scales = dict.fromkeys(describe(result, cell) for cell in cells)
    short = any(undertrained(claim.results, cell.table, result) for cell in cells)
    return ("; ".join(scales) or MISSING) + (", undertrained" if short else "")


def undertrained(name: str, table: str, result: Result) -> str | None:
    """Why the language models of a table are undertrained, by those with exact attention; None where they are not."""
    find = _declared("EXACT_LMS").get(name)
    rows = find(result, table) if find is not None else []
    per_piece = [row["perplexity_per_token"] for row in rows if row.get("perplexity_per_token") is not None]
    if not per_piece or max(per_piece) <= TRAINED:
        return None
    per_word = f", {span(row['perplexity'] for row in rows)} per word" if rows[0].get("perplexity") else ""
    return (
        f"Undertrained: with exact attention the models reach perplexity {span(per_piece)} per piece of the 8k "
        f"vocabulary on WikiText-103's test set{per_word}; trained enough is at most {number(TRAINED)} per piece."
    )


def cost_of(name: str, result: Result) -> str:
    """How long making the results again takes, on the device that made them."""
    add_up = _declared("SECONDS").get(name)
    seconds = add_up(result) if add_up is not None else None
    whole = result.get("seconds")
    if seconds is None and isinstance(whole, (int, float)):
        seconds = float(whole)
    if seconds is None:
        return "not recorded"
    return f"{number(seconds / 60)} min" if seconds >= 60 else f"{number(seconds)} s"


@cache
def _declared(name: str) -> dict[str, Callable[..., Any]]:
    declared: dict[str, Callable[..., Any]] = {}
    for folder in folders():
        # papers/common/scale.py declares none.
        for module in modules(folder, "scale") if folder != "common" else ():
            declared |= getattr(module, name, {})
    return declared


def span(values: Iterable[float]) -> str:
    """The least and the greatest of some numbers, or the one there is.

    >>> span([300, 1200]), span([5, 5]), span([])
    ('300 to 1,200', '5', '\u2013')
    """
    ends = sorted(set(values))
    # Numbers that differ too little to be shown are one.
    shown = list(dict.fromkeys(number(end) for end in ends[:: max(1, len(ends) - 1)]))
    return " to ".join(shown) or MISSING


def millions(values: Iterable[float]) -> str:
    """As ``span``, in millions.

    >>> millions([2_907_840, 2_940_608])
    '2.91 to 2.94 M'
    """
    return f"{span(value / 1e6 for value in values)} M"
