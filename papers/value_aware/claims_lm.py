"""Claims of OVA on a pretrained language model, which the paper did not run: papers/results/value-aware-lm.json."""

from __future__ import annotations

from attnlab.pages.numbers import number
from papers.common.cells import Cell, Missing, Result, cell, rows_of
from papers.common.claims import HELD, NOT_HELD, NOT_TESTABLE, Predicate, Verdict, claims_of, decide
from papers.value_aware import PAPER
from papers.value_aware.config import LM_NAME

__all__ = ["CLAIMS"]

_claim = claims_of("ova-lm", PAPER)


def _everywhere(family: str, *, sign: float) -> Predicate:
    """At every r the family saves loss against top-r (``sign`` 1), or costs it (-1).

    Each r is judged by the 95 % interval of its difference over windows.
    """
    reads: Cell = cell("against_top_r", "saved", family=family)

    def run(result: Result) -> Verdict:
        parts = []
        for row in rows_of(result, reads.table):
            if row["family"] != family:
                continue
            saved = sign * row["saved"]
            ends = sorted((sign * row["low"], sign * row["high"])) if row["low"] is not None else None
            # A number that lies outside its interval was not made with it.
            bounds = (ends[0], ends[1]) if ends and ends[0] <= saved <= ends[1] else None
            label = f"r = {row['r']} at {row['length']:,} tokens"
            one = decide(
                saved, f"{label} {number(row['loss'])} against {number(row['loss_top_r'])}", bounds, seeds=None
            )
            parts.append(one)
        if not parts:
            raise Missing(f"table {reads.table} has no row of {family}")
        states = [part.state for part in parts]
        state = next((s for s in (NOT_HELD, NOT_TESTABLE) if s in states), HELD)
        ours = f"{states.count(HELD)} of {len(parts)}"
        return Verdict(state, ours, reason="; ".join(part.ours for part in parts), parts=tuple(parts))

    return Predicate(run, (reads,))


CLAIMS = (
    _claim(
        "aware",
        LM_NAME,
        "Section 3",
        "On a pretrained LM, r value-aware keys lose less than the r largest weights, at every r that was run.",
        "",
        _everywhere("value-aware", sign=1.0),
        headline="the largest weights are worse than as many value-aware keys on a pretrained LM",
    ),
    _claim(
        "window",
        LM_NAME,
        "Figure 1",
        "On a pretrained LM, a sliding window of r keys trails the r largest weights, at every r.",
        "",
        _everywhere("window", sign=-1.0),
    ),
    _claim(
        "window-sinks",
        LM_NAME,
        "Figure 1",
        "So does a window that keeps the first four keys of its r.",
        "",
        _everywhere("window+sinks", sign=-1.0),
    ),
)
