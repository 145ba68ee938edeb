"""Claims of Snell et al., KTIW, on the training of small models: permutations, local knowledge, A.1."""

from __future__ import annotations

from statistics import fmean

from attnlab.pages.numbers import number
from papers.common.cells import Missing, Result, averages, cell, rows_of, select
from papers.common.claims import (
    HELD,
    NOT_HELD,
    Predicate,
    Verdict,
    claims_of,
    close,
    decide,
    seed_bounds,
    share_bounds,
    unless,
)
from papers.ktiw import PAPER

__all__ = ["CLAIMS", "learned_of"]

ktiw_claim = claims_of("ktiw", PAPER)

# Translators of fewer updates have not converged.
LONG_ENOUGH = 4000
# Per cent of the targets: "strongly" is more often than not.
STRONGLY = 50.0
# BLEU; seeds of a translator of ours deviate by about as much.
WITHIN = 0.5
NAMES = ("keyword", "after", "mean", "last")


def learned_of(result: Result, table: str, **where: str) -> tuple[int, int]:
    """(the seeds that learned, all seeds) of the rows of a table where the settings match."""
    rows = [row for row in rows_of(result, table) if all(row.get(key) == value for key, value in where.items())]
    if not rows:
        raise Missing(f"table {table} has no rows for {', '.join(where.values())}")
    return sum(bool(row["learned"]) for row in rows), len(rows)


def _all_learn(label: str, learned: int, count: int, *, wanted: int) -> Verdict:
    """All seeds learn (or none, where ``wanted`` is 0), with the interval of the share that would with more seeds."""
    low, high = share_bounds(learned, count)
    reason = f"with other seeds {number(low)} to {number(high)} of them would learn"
    held = HELD if learned == wanted else NOT_HELD
    return Verdict(held, f"{learned} of {count}", (low, high), f"{label}: {reason}", count, label=label)


def _some_fail(panel: str) -> Predicate:
    """On the hard distribution some seeds fail; on the control every seed learns."""

    def run(result: Result) -> Verdict:
        hard, of_hard = learned_of(result, "figure_3", panel=panel, data="hard")
        control, of_control = learned_of(result, "figure_3", panel=panel, data="control")
        low, high = share_bounds(of_hard - hard, of_hard)
        failing = Verdict(
            HELD if hard < of_hard else NOT_HELD, f"{hard} of {of_hard}", (low, high),
            f"hard: with other seeds {number(low)} to {number(high)} of them would fail", of_hard, label="hard",
        )  # fmt: skip
        parts = (failing, _all_learn("control", control, of_control, wanted=of_control))
        held = all(part.state == HELD for part in parts)
        ours = f"{hard} of {of_hard} against {control} of {of_control} seeds learn"
        return Verdict(HELD if held else NOT_HELD, ours, reason="; ".join(p.reason for p in parts), parts=parts)

    return Predicate(run, (cell("figure_3", "learned", panel=panel),))


def _copy_not_permute() -> Predicate:
    def run(result: Result) -> Verdict:
        copied, of_copy = learned_of(result, "section_6_2", task="copy")
        permuted, of_permute = learned_of(result, "section_6_2", task="permute")
        steps = [row["steps"] for row in rows_of(result, "section_6_2") if row["task"] == "copy" and row["learned"]]
        slowest = max(steps, default=0)
        parts = (
            _all_learn("copying", copied, of_copy, wanted=of_copy),
            _all_learn("permuting", permuted, of_permute, wanted=0),
        )
        held = all(part.state == HELD for part in parts) and slowest <= 300
        ours = f"copying {copied} of {of_copy} within {number(slowest)} steps, permuting {permuted} of {of_permute}"
        return Verdict(HELD if held else NOT_HELD, ours, reason="; ".join(p.reason for p in parts), parts=parts)

    return Predicate(run, (cell("section_6_2", "learned", task="copy"), cell("section_6_2", "learned", task="permute")))


def _order(row: dict[str, float], *, late: bool) -> float:
    """The least step between the log-odds that must follow each other; positive where the order is the paper's."""
    if late:
        return min(row["last"] - row["after"], row["after"] - max(row["mean"], row["keyword"]))
    return min(row["keyword"] - row["after"], row["after"] - max(row["mean"], row["last"]))


def _log_odds(*, late: bool) -> Predicate:
    """The order of the four log-odds: Eq. 23 at a checkpoint of the first half, Eq. 24 at the last."""

    def run(result: Result) -> Verdict:
        # In an encoder of both directions the last position is no end of anything.
        ways = [row for row in rows_of(result, "figure_7") if row.get("encoder", "left to right") == "left to right"]
        columns = {name: averages({"tables": {"figure_7": ways}}, "figure_7", name, "step") for name in NAMES}
        rows = [{"step": s[0], **{name: columns[name][s] for name in NAMES}} for s in sorted(columns["keyword"])]
        first = [row for row in rows[: (len(rows) + 1) // 2] if row["step"] > 0]
        # Of the early checkpoints the first with the order, or else the nearest to it.
        ordered = [row for row in first if _order(row, late=False) > 0]
        shown = rows[-1] if late else (ordered or [max(first, key=lambda row: _order(row, late=False))])[0]
        margins = [_order(row, late=late) for row in ways if row["step"] == shown["step"]]
        ours = f"step {shown['step']}: " + ", ".join(f"{name} {number(shown[name])}" for name in NAMES)
        return decide(_order(shown, late=late), ours, seed_bounds(margins), seeds=len(margins))

    return Predicate(run, tuple(cell("figure_7", name) for name in NAMES))


def _strongly_agrees() -> Predicate:
    """Optimal attention agrees with the probe on most targets; the interval is over the targets."""
    wanted = cell("appendix_a1", "a_opt_beta", model="linear")

    def run(result: Result) -> Verdict:
        by_seed = select(result, wanted)
        agreement = fmean(by_seed.values())
        bounds = seed_bounds([value - STRONGLY for value in by_seed.values()])
        targets = next((row.get("targets") for row in rows_of(result, "appendix_a1") if row["model"] == "linear"), None)
        if bounds is None and targets:
            low, high = share_bounds(round(agreement / 100 * targets), targets)
            bounds = 100 * low - STRONGLY, 100 * high - STRONGLY
        return decide(agreement - STRONGLY, number(agreement), bounds, seeds=len(by_seed))

    return Predicate(run, (wanted,))


def _short_runs(result: Result) -> str | None:
    steps = [row["step"] for row in rows_of(result, "appendix_a1") if row.get("step") is not None]
    if not steps or min(steps) >= LONG_ENOUGH:
        return None
    return f"runs of fewer than {number(LONG_ENOUGH)} updates end before either model has converged"


CLAIMS = (
    ktiw_claim(
        "permutations-fail",
        "ktiw-permutations",
        "Figure 3, left",
        "Copying permutations of one vocabulary sometimes fails; sampling 40 of 60 words always succeeds.",
        "some of 20 against 20 of 20",
        _some_fail("permutations"),
        headline="permutations of one vocabulary are sometimes not learned",
    ),
    ktiw_claim(
        "mixture-fails",
        "ktiw-permutations",
        "Figure 3, right",
        "The same holds for a mixture of permutations.",
        "some of 20 against 20 of 20",
        _some_fail("mixture"),
    ),
    ktiw_claim(
        "local-early",
        "ktiw-local",
        "Figure 7, Equation 23",
        "Early in training the probe is largest at the keyword, then right after it.",
        "keyword, after, then mean and last",
        _log_odds(late=False),
    ),
    ktiw_claim(
        "not-local-late",
        "ktiw-local",
        "Figure 7, Equation 24",
        "Trained for long under uniform attention, the last position has the largest value.",
        "last, after, then mean and keyword",
        _log_odds(late=True),
    ),
    ktiw_claim(
        "copy-not-permute",
        "ktiw-permute-function",
        "Section 6.2",
        "Copying is always learned within 300 steps; a fixed permutation never is.",
        "always, never",
        _copy_not_permute(),
    ),
    ktiw_claim(
        "optimal-attention",
        "ktiw-optimal",
        "Appendix A.1",
        "The optimal attention of the linear-output model strongly agrees with the probe (most targets).",
        "53 %",
        _strongly_agrees(),
    ),
    ktiw_claim(
        "linear-output-comparable",
        "ktiw-optimal",
        "Appendix A.1",
        "The linear-output model translates as well as the main one (within 0.5 BLEU).",
        "38.2 against 37.9",
        unless(
            _short_runs,
            close(
                cell("appendix_a1", "bleu", model="linear"), cell("appendix_a1", "bleu", model="main"), within=WITHIN
            ),
        ),
    ),
)
