"""Claims of Snell et al., KTIW, on eight heads (Figure 6), each judged twice: by a cut and by the area under the curve.

The cut asks how many seeds have learned after as many updates as single heads were judged by. Where it is made decides
much: later, seeds learn whatever their heads. The area is the mean accuracy over all of training, which has no cut; two
kinds of heads are compared by it seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from papers.common.cells import Cell, Result, cell
from papers.common.claims import (
    Claim,
    Predicate,
    Verdict,
    all_of,
    claims_of,
    decide,
    more,
    share_bounds,
    unless,
)
from papers.ktiw import PAPER
from papers.ktiw.claims_training import learned_of

__all__ = ["CLAIMS"]

# The paper says "likely" and "with high chance" and gives no numbers: likely is more often than not.
LIKELY = 0.5


def _cut(kind: str, *, learn: bool) -> Predicate:
    """More than half of the seeds have learned when they are judged, or fewer than half."""

    def run(result: Result) -> Verdict:
        learned, count = learned_of(result, "figure_6", heads=kind, contexts="sum")
        low, high = share_bounds(learned, count)
        gap, bounds = learned / count - LIKELY, (low - LIKELY, high - LIKELY)
        if not learn:
            gap, bounds = -gap, (-bounds[1], -bounds[0])
        return decide(gap, f"{learned} of {count} seeds learn", bounds, seeds=count)

    return _named("by the cut", Predicate(run, (cell("figure_6", "learned", heads=kind, contexts="sum"),)))


def _area(kind: str) -> Cell:
    return cell("figure_6_area", "area", heads=kind, contexts="sum")


def _larger(first: str, second: str) -> Predicate:
    """The first heads have the larger area, seed by seed."""
    return _named("by the area", more(_area(first), _area(second)))


def _named(label: str, test: Predicate) -> Predicate:
    def run(result: Result) -> Verdict:
        verdict = test(result)
        return replace(verdict, ours=f"{label} {verdict.ours}", label=label)

    return Predicate(run, test.cells)


def _too_few_heads(*kinds: str) -> Callable[[Result], str | None]:
    """Why a claim on bad or good heads cannot be tested: too few of that kind were found."""

    def why(result: Result) -> str | None:
        heads = (result.get("tables") or {}).get("heads")
        if not heads:
            return None
        count = {kind: sum(row["verdict"] == kind for row in heads) for kind in ("good", "bad")}
        wanted = {"bad": int(result["config"]["heads"]), "good": 1}
        reason = f"of {len(heads)} initialisations {count['good']} learn alone and {count['bad']} fail alone"
        short = [f"{wanted[kind]} must {'fail' if kind == 'bad' else 'learn'}" for kind in kinds
                 if count[kind] < wanted[kind]]  # fmt: skip
        return f"{reason}: {short[0]}" if short else None

    return why


BAD = all_of(_cut("all bad", learn=False), _larger("random", "all bad"))
ONE_GOOD = all_of(_cut("one good", learn=True), _larger("one good", "all bad"))
RANDOM = all_of(_cut("random", learn=True), _larger("random", "all bad"))
# (name, statement, the paper's value, test); where single heads do not fail, eight random ones say nothing.
FIGURE_6: tuple[tuple[str, str, str, Predicate], ...] = (
    (
        "bad-heads-fail",
        "Eight heads with bad initialisations are likely to fail.",
        "most fail",
        unless(_too_few_heads("bad"), BAD, explains_missing=True),
    ),
    (
        "one-good-head",
        "One good initialisation among eight is enough to learn.",
        "most learn",
        unless(_too_few_heads("bad", "good"), ONE_GOOD, explains_missing=True),
    ),
    (
        "random-heads",
        "Eight random initialisations learn with very high probability.",
        "nearly all learn",
        unless(_too_few_heads("bad"), RANDOM, explains_missing=True),
    ),
)


def _claims(prefix: str, results: str, where: str, *, variant: bool = False) -> tuple[Claim, ...]:
    make = claims_of(prefix, PAPER)
    return tuple(
        make(name, results, where, statement, "" if variant else value, test)
        for name, statement, value, test in FIGURE_6
    )


CLAIMS = (
    *_claims("ktiw", "ktiw-multihead", "Figure 6"),
    *_claims("ktiw-projected", "ktiw-multihead-projected", "Figure 6, the projected model", variant=True),
)
