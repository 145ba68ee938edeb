"""Claims of Snell et al., Approximating How Single Head Attention Learns (KTIW), on the agreement with lexical probes.

Agreements and performances are in per cent, as in the paper's tables; ``uf`` is uniform attention, ``px`` the proxy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attnlab.pages.numbers import number
from papers.common.cells import Cell, Missing, Result, averages, cell, mean_of, select
from papers.common.claims import (
    HELD,
    NOT_HELD,
    Bounds,
    Predicate,
    Verdict,
    all_of,
    claims_of,
    compared,
    decide,
    everywhere,
)
from papers.common.folders import paper_table
from papers.ktiw import PAPER

__all__ = ["CLAIMS"]

ktiw_claim = claims_of("ktiw", PAPER)

# In the paper's own table the least share of a data set is 0.28 (News En-Pt), and is called non-trivial.
NON_TRIVIAL = 0.25
# Words; no data set's typical text is shorter (Table 9), and tau of a random order varies most over short texts.
SHORTEST = 10
# What the paper's two columns of Table 11 differ by at most, and one more, since it has whole numbers.
ALIKE = 1 + max(abs(row["a_uf_px"] - row["a_uf_log"]) for row in paper_table("ktiw-logreg", "table_11"))
# The accuracy of guessing in the classifications, which have two classes; of guessing words it is nearly none.
GUESSING = dict.fromkeys(("IMDB", "Yelp", "AG News", "20 NG", "SST", "Amazon"), 50.0)


def _over_items(data_set: str, first: Cell, second: Cell, margin: Callable[[float, float], float]) -> Predicate:
    """A margin between two agreements in per cent, with its interval over the examples that they are measured on."""

    def bounds(result: Result) -> Bounds | None:
        count = (result.get("config") or {}).get(data_set, {}).get("count")
        # Several seeds have an interval of their own.
        if count is None or len(select(result, first)) > 1:
            return None
        a, b = mean_of(result, first), mean_of(result, second)
        half = 1.96 * math.sqrt(sum(max(0.0, share * (100 - share)) for share in (a, b)) / count)
        return margin(a, b) - half, margin(a, b) + half

    return compared(first, second, margin, bounds=bounds)


def _above(table: str, column: str) -> Predicate:
    """In every data set one column exceeds the random baseline, and so does its interval."""
    return everywhere(
        table,
        "dataset",
        lambda d: _over_items(
            d,
            cell(table, column, dataset=d),
            cell(table, "a_random", dataset=d),
            lambda agreement, chance: agreement - chance,
        ),
    )


def _above_tau(column: str) -> Predicate:
    """In every data set Kendall's tau, times 100, exceeds that of a random order, and so does its interval.

    The interval is that of two random orders of n = ``SHORTEST`` words: tau has the variance 2 (2n + 5) / (9n (n - 1)).
    """
    variance = 2 * (2 * SHORTEST + 5) / (9 * SHORTEST * (SHORTEST - 1))

    def one(data_set: str) -> Predicate:
        tau, chance = (cell("table_3", name, dataset=data_set) for name in (column, "a_random"))

        def bounds(result: Result) -> Bounds | None:
            rows = (result.get("config") or {}).get(data_set, {}).get("tau_rows")
            if rows is None or len(select(result, tau)) > 1:
                return None
            half = 100 * 1.96 * math.sqrt(2 * variance / rows)
            gap = mean_of(result, tau) - mean_of(result, chance)
            return gap - half, gap + half

        return compared(tau, chance, lambda a, b: a - b, bounds=bounds)

    return everywhere("table_3", "dataset", one)


def _nontrivial(column: str) -> Predicate:
    """Of what the trained model gains over guessing, a model of such attention keeps at least ``NON_TRIVIAL``."""

    def one(data_set: str) -> Predicate:
        guessing = GUESSING.get(data_set, 0.0)
        return compared(
            cell("table_2", column, dataset=data_set),
            cell("table_2", "xi_star", dataset=data_set),
            lambda xi, star: xi - guessing - NON_TRIVIAL * (star - guessing),
        )

    return everywhere("table_2", "dataset", one)


def _still_rising(result: Result, data_set: str, points: list[tuple[int, float]]) -> bool:
    """Whether the agreement was greatest at one of the last two evaluations, of a run that was stopped early."""
    updates = {row["dataset"]: row["updates"] for row in (result.get("tables") or {}).get("runs", [])}
    planned = (result.get("config") or {}).get(data_set, {}).get("steps", 0)
    values = [value for _, value in sorted(points)]
    return updates.get(data_set, planned) < planned and max(values) in values[-2:]


def _rises_then_falls() -> Predicate:
    """In every data set the greatest agreement comes after the first checkpoint and before the last.

    Data sets whose runs were stopped while it rose say nothing.
    """

    def run(result: Result) -> Verdict:
        curves: dict[str, list[tuple[int, float]]] = {}
        for (dataset, step), value in averages(result, "curve", "a_alpha_uf", "dataset", "step").items():
            curves.setdefault(dataset, []).append((step, value))
        stopped = [name for name, points in curves.items() if _still_rising(result, name, points)]
        parts = []
        for name, points in curves.items():
            values = [value for _, value in sorted(points)]
            if name not in stopped:
                ours = f"{name} {number(values[0])}, {number(max(values))}, {number(values[-1])}"
                parts.append(decide(max(values) - max(values[0], values[-1]), ours, None))
        if not parts:
            raise Missing("every run was stopped while the agreement rose")
        held = sum(part.state == HELD for part in parts)
        ours = f"{held} of {len(parts)} data sets"
        first_most_last = "; ".join(part.ours for part in parts)
        reason = f"first, greatest, last: {first_most_last}"
        if stopped:
            reason += f". Stopped while it rose, so that they say nothing: {', '.join(stopped)}"
        return Verdict(HELD if held == len(parts) else NOT_HELD, ours, reason=reason, parts=tuple(parts))

    return Predicate(run, (cell("curve", "a_alpha_uf"),))


CLAIMS = (
    ktiw_claim(
        "learned-under-uniform",
        "ktiw-table2",
        "Table 2",
        "The lexical probe of a model with uniform attention agrees with trained attention beyond chance.",
        "31 against 7 (Multi30k), in 7 of 7",
        _above("table_2", "a_alpha_uf"),
        headline="attention agrees with a probe that is learned without it",
    ),
    ktiw_claim(
        "proxy-approximates",
        "ktiw-table2",
        "Table 2",
        "The bag-of-words proxy agrees with that probe beyond chance.",
        "34 against 7 (Multi30k), in 7 of 7",
        _above("table_2", "a_uf_px"),
    ),
    ktiw_claim(
        "attention-agrees-with-probe",
        "ktiw-table2",
        "Table 2",
        "Attention and the lexical probe of a trained model agree beyond chance.",
        "49 against 7 (Multi30k), in 7 of 7",
        _above("table_2", "a_alpha_beta"),
    ),
    ktiw_claim(
        "saliency-explained",
        "ktiw-table2",
        "Table 2, Section 5.1",
        "Word saliency agrees with the probe under uniform attention beyond chance.",
        "27 against 7 (Multi30k), in 7 of 7",
        _above("table_2", "a_delta_uf"),
    ),
    ktiw_claim(
        "agreement-nontrivial",
        "ktiw-table2",
        "Table 2",
        "A model whose attention agrees no better performs non-trivially (a quarter of the gain over guessing).",
        "43 of 66 (Multi30k), in 7 of 7",
        _nontrivial("xi_alpha_uf"),
    ),
    ktiw_claim(
        "rise-then-fall",
        "ktiw-table2",
        "Appendix A.7",
        "Under uniform attention the agreement first rises and then falls.",
        "in all data sets",
        _rises_then_falls(),
    ),
    ktiw_claim(
        "kendall-tau",
        "ktiw-tau",
        "Table 3",
        "The same holds for Kendall's tau.",
        "7.89 against 0.00 (Multi30k), in 11 of 11",
        all_of(*(_above_tau(column) for column in ("a_alpha_uf", "a_uf_px", "a_delta_uf"))),
    ),
    ktiw_claim(
        "training-set",
        "ktiw-train",
        "Table 7",
        "The same holds over the training set.",
        "32.9 against 7.2 (Multi30k), in 11 of 11",
        all_of(*(_above("table_7", column) for column in ("a_alpha_uf", "a_uf_px", "a_delta_uf", "a_alpha_beta"))),
    ),
    ktiw_claim(
        "attention-fails-when-frozen",
        "ktiw-frozen",
        "Table 10",
        "With everything but attention frozen, attention is learned worse than the probe without attention.",
        "9 against 53 (IMDB), in 6 of 6",
        everywhere(
            "table_10",
            "dataset",
            lambda d: _over_items(
                d,
                cell("table_10", "a_alpha_frozen", dataset=d),
                cell("table_10", "a_alpha_uf", dataset=d),
                lambda frozen, uniform: uniform - frozen,
            ),
        ),
    ),
    ktiw_claim(
        "proxy-is-logistic-regression",
        "ktiw-logreg",
        "Table 11",
        f"The proxy and logistic regression agree with the probe alike ({number(ALIKE)} points).",
        "81 against 84 (IMDB), in 6 of 6",
        everywhere(
            "table_11",
            "dataset",
            lambda d: _over_items(
                d,
                cell("table_11", "a_uf_px", dataset=d),
                cell("table_11", "a_uf_log", dataset=d),
                lambda proxy, regression: ALIKE - abs(proxy - regression),
            ),
        ),
    ),
)
