"""Claims of Snell et al., Approximating How Single Head Attention Learns (KTIW), on results/ktiw-*.json.

Agreements and performances are in per cent, as in the paper's tables; ``uf`` is uniform attention, ``px`` the proxy.
"""

from __future__ import annotations

from attnlab.pages.numbers import number
from papers.common.claims import (
    HELD,
    NOT_HELD,
    Bounds,
    Claim,
    Missing,
    Predicate,
    Result,
    Verdict,
    all_of,
    at_least,
    averages,
    cell,
    close,
    compared,
    everywhere,
    less,
    more,
    rows_of,
)
from papers.ktiw import PAPER

__all__ = ["CLAIMS"]


def _above(table: str, column: str, baseline: str = "a_random") -> Predicate:
    """In every data set one column exceeds the random baseline."""
    return everywhere(
        table, "dataset", lambda d: more(cell(table, column, dataset=d), cell(table, baseline, dataset=d))
    )


def _nontrivial(column: str) -> Predicate:
    """The contextualised agreement is at least a quarter of the trained model's performance."""
    return everywhere(
        "table_2",
        "dataset",
        lambda d: compared(
            cell("table_2", column, dataset=d), cell("table_2", "xi_star", dataset=d), lambda xi, star: xi - star / 4
        ),
    )


def _learned(result: Result, table: str, **where: str) -> tuple[int, int]:
    rows = [row for row in rows_of(result, table) if all(row.get(key) == value for key, value in where.items())]
    if not rows:
        raise Missing(f"table {table} has no rows for {', '.join(where.values())}")
    return sum(bool(row["learned"]) for row in rows), len(rows)


def _some_fail(panel: str) -> Predicate:
    """On the hard distribution some seeds fail; on the control every seed learns."""

    def run(result: Result, _: Bounds | None) -> Verdict:
        hard, of_hard = _learned(result, "figure_3", panel=panel, data="hard")
        control, of_control = _learned(result, "figure_3", panel=panel, data="control")
        held = hard < of_hard and control == of_control
        return Verdict(HELD if held else NOT_HELD, f"{hard} of {of_hard} against {control} of {of_control} seeds learn")

    return Predicate(run, (cell("figure_3", "learned", panel=panel),))


def _heads(kind: str, low: float, high: float) -> Predicate:
    """The share of seeds that learn lies between the bounds."""

    def run(result: Result, _: Bounds | None) -> Verdict:
        learned, count = _learned(result, "figure_6", heads=kind, contexts="sum")
        return Verdict(HELD if low <= learned / count <= high else NOT_HELD, f"{learned} of {count} seeds learn")

    return Predicate(run, (cell("figure_6", "learned", heads=kind, contexts="sum"),))


def _copy_not_permute() -> Predicate:
    def run(result: Result, _: Bounds | None) -> Verdict:
        copied, of_copy = _learned(result, "section_6_2", task="copy")
        permuted, of_permute = _learned(result, "section_6_2", task="permute")
        steps = [row["steps"] for row in rows_of(result, "section_6_2") if row["task"] == "copy" and row["learned"]]
        slowest = max(steps, default=0)
        held = copied == of_copy and permuted == 0 and slowest <= 300
        ours = f"copying {copied} of {of_copy} within {number(slowest)} steps, permuting {permuted} of {of_permute}"
        return Verdict(HELD if held else NOT_HELD, ours)

    return Predicate(run, (cell("section_6_2", "learned", task="copy"), cell("section_6_2", "learned", task="permute")))


def _rises_then_falls() -> Predicate:
    """In every data set the greatest agreement comes after the first checkpoint and before the last.

    Data sets whose runs were stopped while it rose (``still_rising``) say nothing.
    """

    def run(result: Result, _: Bounds | None) -> Verdict:
        curves: dict[str, list[tuple[int, float]]] = {}
        stopped = result.get("still_rising") or []
        for (dataset, step), value in averages(result, "curve", "a_alpha_uf", "dataset", "step").items():
            if dataset not in stopped:
                curves.setdefault(dataset, []).append((step, value))
        if not curves:
            raise Missing("every run was stopped while the agreement rose")
        held = 0
        for points in curves.values():
            values = [value for _, value in sorted(points)]
            held += max(values) > values[0] and max(values) > values[-1]
        ours = f"{held} of {len(curves)} data sets" + (
            f"; stopped while it rose: {', '.join(stopped)}" if stopped else ""
        )
        return Verdict(HELD if held == len(curves) else NOT_HELD, ours)

    return Predicate(run, (cell("curve", "a_alpha_uf"),))


def _log_odds(*, late: bool) -> Predicate:
    """The order of the four log-odds: Eq. 23 at a checkpoint of the first half, Eq. 24 at the last."""
    names = ("keyword", "after", "mean", "last")

    def run(result: Result, _: Bounds | None) -> Verdict:
        # In an encoder of both directions the last position is no end of anything.
        ways = [row for row in rows_of(result, "figure_7") if row.get("encoder", "left to right") == "left to right"]
        columns = {name: averages({"tables": {"figure_7": ways}}, "figure_7", name, "step") for name in names}
        steps = sorted(columns["keyword"])
        rows = [{"step": step[0], **{name: columns[name][step] for name in names}} for step in steps]
        if late:
            last = rows[-1]
            held = last["last"] > last["after"] > max(last["mean"], last["keyword"])
            shown = last
        else:
            first = [row for row in rows[: (len(rows) + 1) // 2] if row["step"] > 0]
            early = [r for r in first if r["keyword"] > r["after"] > max(r["mean"], r["last"])]
            held, shown = bool(early), (early or rows)[0]
        ours = f"step {shown['step']}: " + ", ".join(f"{name} {number(shown[name])}" for name in names)
        return Verdict(HELD if held else NOT_HELD, ours)

    return Predicate(run, tuple(cell("figure_7", name) for name in names))


def _claim(name: str, results: str, where: str, statement: str, paper_value: str, test: Predicate) -> Claim:
    return Claim(f"ktiw-{name}", PAPER, where, statement, paper_value, results, test)


AGREEMENT_CLAIMS = (
    _claim(
        "learned-under-uniform",
        "ktiw-table2",
        "Table 2",
        "The lexical probe of a model with uniform attention agrees with trained attention beyond chance.",
        "31 against 7 (Multi30k), in 7 of 7",
        _above("table_2", "a_alpha_uf"),
    ),
    _claim(
        "proxy-approximates",
        "ktiw-table2",
        "Table 2",
        "The bag-of-words proxy agrees with that probe beyond chance.",
        "34 against 7 (Multi30k), in 7 of 7",
        _above("table_2", "a_uf_px"),
    ),
    _claim(
        "attention-agrees-with-probe",
        "ktiw-table2",
        "Table 2",
        "Attention and the lexical probe of a trained model agree beyond chance.",
        "49 against 7 (Multi30k), in 7 of 7",
        _above("table_2", "a_alpha_beta"),
    ),
    _claim(
        "saliency-explained",
        "ktiw-table2",
        "Table 2, Section 5.1",
        "Word saliency agrees with the probe under uniform attention beyond chance.",
        "27 against 7 (Multi30k), in 7 of 7",
        _above("table_2", "a_delta_uf"),
    ),
    _claim(
        "agreement-nontrivial",
        "ktiw-table2",
        "Table 2",
        "A model whose attention agrees no better performs non-trivially (a quarter of the trained one's).",
        "43 of 66 (Multi30k), in 7 of 7",
        _nontrivial("xi_alpha_uf"),
    ),
    _claim(
        "rise-then-fall",
        "ktiw-table2",
        "Appendix A.7",
        "Under uniform attention the agreement first rises and then falls.",
        "in all data sets",
        _rises_then_falls(),
    ),
    _claim(
        "kendall-tau",
        "ktiw-tau",
        "Table 3",
        "The same holds for Kendall's tau.",
        "7.89 against 0.00 (Multi30k), in 11 of 11",
        all_of(*(_above("table_3", column) for column in ("a_alpha_uf", "a_uf_px", "a_delta_uf"))),
    ),
    _claim(
        "training-set",
        "ktiw-train",
        "Table 7",
        "The same holds over the training set.",
        "32.9 against 7.2 (Multi30k), in 11 of 11",
        all_of(*(_above("table_7", column) for column in ("a_alpha_uf", "a_uf_px", "a_delta_uf", "a_alpha_beta"))),
    ),
    _claim(
        "attention-fails-when-frozen",
        "ktiw-frozen",
        "Table 10",
        "With everything but attention frozen, attention is learned worse than the probe without attention.",
        "9 against 53 (IMDB), in 6 of 6",
        everywhere(
            "table_10",
            "dataset",
            lambda d: less(cell("table_10", "a_alpha_frozen", dataset=d), cell("table_10", "a_alpha_uf", dataset=d)),
        ),
    ),
    _claim(
        "proxy-is-logistic-regression",
        "ktiw-logreg",
        "Table 11",
        "The proxy and logistic regression agree with the probe alike (10 points).",
        "81 against 84 (IMDB), in 6 of 6",
        everywhere(
            "table_11",
            "dataset",
            lambda d: close(
                cell("table_11", "a_uf_px", dataset=d), cell("table_11", "a_uf_log", dataset=d), within=10.0
            ),
        ),
    ),
)

TRAINING_CLAIMS = (
    _claim(
        "permutations-fail",
        "ktiw-permutations",
        "Figure 3, left",
        "Copying permutations of one vocabulary sometimes fails; sampling 40 of 60 words always succeeds.",
        "some of 20 against 20 of 20",
        _some_fail("permutations"),
    ),
    _claim(
        "mixture-fails",
        "ktiw-permutations",
        "Figure 3, right",
        "The same holds for a mixture of permutations.",
        "some of 20 against 20 of 20",
        _some_fail("mixture"),
    ),
    _claim(
        "bad-heads-fail",
        "ktiw-multihead",
        "Figure 6",
        "Eight heads with bad initialisations are likely to fail.",
        "most fail",
        _heads("all bad", 0.0, 0.5),
    ),
    _claim(
        "one-good-head",
        "ktiw-multihead",
        "Figure 6",
        "One good initialisation among eight is enough to learn.",
        "most learn",
        _heads("one good", 0.8, 1.0),
    ),
    _claim(
        "random-heads",
        "ktiw-multihead",
        "Figure 6",
        "Eight random initialisations learn with very high probability.",
        "nearly all learn",
        _heads("random", 0.8, 1.0),
    ),
    _claim(
        "local-early",
        "ktiw-local",
        "Figure 7, Equation 23",
        "Early in training the probe is largest at the keyword, then right after it.",
        "keyword, after, then mean and last",
        _log_odds(late=False),
    ),
    _claim(
        "not-local-late",
        "ktiw-local",
        "Figure 7, Equation 24",
        "Trained for long under uniform attention, the last position has the largest value.",
        "last, after, then mean and keyword",
        _log_odds(late=True),
    ),
    _claim(
        "copy-not-permute",
        "ktiw-permute-function",
        "Section 6.2",
        "Copying is always learned within 300 steps; a fixed permutation never is.",
        "always, never",
        _copy_not_permute(),
    ),
    _claim(
        "optimal-attention",
        "ktiw-optimal",
        "Appendix A.1",
        "The optimal attention of the linear-output model strongly agrees with the probe (40 %).",
        "53 %",
        at_least(cell("appendix_a1", "a_opt_beta", model="linear"), 40.0),
    ),
    _claim(
        "linear-output-comparable",
        "ktiw-optimal",
        "Appendix A.1",
        "The linear-output model translates as well as the main one (1 BLEU).",
        "38.2 against 37.9",
        close(cell("appendix_a1", "bleu", model="linear"), cell("appendix_a1", "bleu", model="main"), within=1.0),
    ),
)

CLAIMS = AGREEMENT_CLAIMS + TRAINING_CLAIMS
