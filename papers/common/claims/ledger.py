"""A paper's claim as code: what it says, where, the paper's number, and a test over our results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "HELD",
    "NOT_HELD",
    "NOT_RUN",
    "NOT_TESTABLE",
    "STATES",
    "Cell",
    "Claim",
    "Missing",
    "Predicate",
    "Verdict",
    "judge",
]

HELD = "held"
NOT_HELD = "not held"
NOT_TESTABLE = "not testable at this scale"
NOT_RUN = "not run yet"
STATES = (HELD, NOT_HELD, NOT_TESTABLE, NOT_RUN)

Result = Mapping[str, Any]
Bounds = tuple[float, float]


class Missing(LookupError):  # noqa: N818
    """A table or row that a claim needs and the results do not have yet."""


@dataclass(frozen=True)
class Verdict:
    """What our results say: the state, our number as text, and the interval of the margin by which the claim holds."""

    state: str
    ours: str = ""
    interval: Bounds | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state must be one of {', '.join(STATES)}, got {self.state!r}")


@dataclass(frozen=True)
class Cell:
    """Which numbers of a results file a claim looks at: a column of a table, in the rows where the settings match."""

    table: str
    column: str
    where: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Predicate:
    """A test over one results file; ``cells`` says what it reads, so that experiments know what to write."""

    run: Callable[[Result, Bounds | None], Verdict]
    cells: tuple[Cell, ...] = ()

    def __call__(self, result: Result, interval: Bounds | None = None) -> Verdict:
        return self.run(result, interval)


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper that numbers can support or contradict; ``results`` names results/<results>.json."""

    name: str
    paper: str
    where: str
    statement: str
    paper_value: str
    results: str
    test: Predicate


def judge(claim: Claim, results: Mapping[str, Result]) -> Verdict:
    """The verdict on a claim given all results by name.

    A results file may say ``not_testable: {claim: reason}``, and ``intervals: {claim: [low, high]}`` where an
    experiment has resampled its items (``paired_bootstrap``).
    """
    result = results.get(claim.results) if claim.results else {}
    if result is None:
        return Verdict(NOT_RUN, note=f"there is no papers/results/{claim.results}.json")
    reason = (result.get("not_testable") or {}).get(claim.name)
    if reason:
        return Verdict(NOT_TESTABLE, note=str(reason))
    bounds = (result.get("intervals") or {}).get(claim.name)
    try:
        return claim.test(result, (float(bounds[0]), float(bounds[1])) if bounds else None)
    except Missing as missing:
        return Verdict(NOT_RUN, note=str(missing.args[0]))
    except KeyError as missing:
        return Verdict(NOT_RUN, note=f"a row of the results has no column {missing.args[0]}")
