"""A paper's claim as code: the sentence, its place, the paper's number, and a test over the cells of our results.

Tests take few forms: less, more, close, bounded, and each of these over every data set. A verdict is computed from the
tables of the results and from nothing else, so that new tables have new verdicts. Where a cell has several seeds, the
interval of the margin (Student's t) must lie on one side of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from attnlab.evaluation.intervals import mean_interval, wilson
from attnlab.pages.numbers import number
from papers.common.cells import Cell, Missing, Result, in_words, mean_of, rows_of, select
from papers.common.row_store import read_results

__all__ = [
    "HELD",
    "NOT_HELD",
    "NOT_RUN",
    "NOT_TESTABLE",
    "STATES",
    "Bounds",
    "Claim",
    "Predicate",
    "Verdict",
    "about",
    "about_bounds",
    "all_of",
    "at_least",
    "at_most",
    "between",
    "claims_of",
    "close",
    "compared",
    "decide",
    "everywhere",
    "fails",
    "judge",
    "less",
    "more",
    "seed_bounds",
    "share_bounds",
    "unless",
    "verdicts_on",
]

HELD = "held"
NOT_HELD = "not held"
NOT_TESTABLE = "not testable at this scale"
NOT_RUN = "not run yet"
STATES = (HELD, NOT_HELD, NOT_TESTABLE, NOT_RUN)

Bounds = tuple[float, float]
INCLUDES_ZERO = "its interval includes zero"


@dataclass(frozen=True)
class Verdict:
    """The outcome for a claim: the state, our numbers, the interval of the margin by which it holds, and why.

    ``seeds`` counts the trainings that each number is a mean of: 1 for a single run, None where nothing is drawn by
    chance. A verdict on several comparisons has one for each of them in ``parts``, named by ``label``.
    """

    state: str
    ours: str = ""
    interval: Bounds | None = None
    reason: str = ""
    seeds: int | None = None
    parts: tuple[Verdict, ...] = ()
    label: str = ""

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state must be one of {', '.join(STATES)}, got {self.state!r}")

    def comparisons(self) -> Iterator[Verdict]:
        """The comparisons that the verdict rests on, itself where it is one."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.comparisons()


@dataclass(frozen=True)
class Predicate:
    """A test over one results file; ``cells`` are the numbers that it reads."""

    run: Callable[[Result], Verdict]
    cells: tuple[Cell, ...] = ()

    def __call__(self, result: Result) -> Verdict:
        return self.run(result)


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper that numbers can support or contradict; ``results`` names results/<results>.json.

    A claim without a paper's value is a variant of ours: the paper's sentence in a setting that it did not run.
    ``headline`` is the claim in a few words, for those that stand at the top of the paper's page; ``caveat`` what a
    reader must know to weigh the verdict.
    """

    name: str
    paper: str
    where: str
    statement: str
    paper_value: str
    results: str
    test: Predicate
    headline: str = ""
    caveat: str = ""

    @property
    def is_variant(self) -> bool:
        """Whether the claim is a variant of ours."""
        return not self.paper_value


def claims_of(prefix: str, paper: str) -> Callable[..., Claim]:
    """A function that makes the claims of a paper: ``(name, results, where, statement, paper_value, test)``."""

    def make(
        name: str, results: str, where: str, statement: str, paper_value: str, test: Predicate, **more: str
    ) -> Claim:
        return Claim(f"{prefix}-{name}", paper, where, statement, paper_value, results, test, **more)

    return make


def judge(claim: Claim, results: Mapping[str, Result]) -> Verdict:
    """The verdict on a claim given all results by name."""
    result = results.get(claim.results) if claim.results else {}
    if result is None:
        return Verdict(NOT_RUN, reason=f"there is no papers/results/{claim.results}.json")
    try:
        verdict = claim.test(result)
    except Missing as missing:
        return Verdict(NOT_RUN, reason=str(missing.args[0]))
    except KeyError as missing:
        return Verdict(NOT_RUN, reason=f"a row of the results has no column {missing.args[0]}")
    return replace(verdict, reason=f"{verdict.reason}. {claim.caveat}") if claim.caveat else verdict


def verdicts_on(path: Path, claims: Iterable[Claim]) -> list[str]:
    """A line for each of the claims that is on a results file: the verdict, the claim, ours and the paper's value."""
    result = read_results(path)
    if result is None:
        return []
    name = result.get("name", path.stem)
    judged = [(claim, judge(claim, {name: result})) for claim in claims if claim.results == name]
    judged.sort(key=lambda pair: STATES.index(pair[1].state))
    lines = []
    for claim, verdict in judged:
        ours = verdict.ours or verdict.reason
        paper = f" (paper: {claim.paper_value})" if claim.paper_value else ""
        lines.append(f"{verdict.state}: {claim.statement} {ours}{paper}")
    return lines


def less(first: Cell, second: Cell, *, margin: float = 0.0) -> Predicate:
    """The first number is smaller than the second by more than ``margin``."""
    return compared(first, second, lambda a, b: b - a - margin)


def more(first: Cell, second: Cell, *, margin: float = 0.0) -> Predicate:
    """The first number is larger than the second by more than ``margin``."""
    return compared(first, second, lambda a, b: a - b - margin)


def close(first: Cell, second: Cell, *, within: float = 0.0, relative: float = 0.0) -> Predicate:
    """The two numbers differ by at most ``within``, or by at most ``relative`` times the second."""
    return compared(first, second, lambda a, b: max(within, relative * abs(b)) - abs(a - b), equal_holds=True)


def compared(
    first: Cell,
    second: Cell,
    margin: Callable[[float, float], float],
    *,
    equal_holds: bool = False,
    bounds: Callable[[Result], Bounds | None] | None = None,
) -> Predicate:
    """``margin(first, second)`` is positive, and so is its interval.

    The interval is over the seeds that both have, or what ``bounds`` makes of the results, for one over other items.
    """

    def run(result: Result) -> Verdict:
        a, b = select(result, first), select(result, second)
        shared = [seed for seed in a if seed in b]
        x, y = (fmean([v[seed] for seed in shared] or v.values()) for v in (a, b))
        interval = bounds(result) if bounds is not None else None
        # An interval that does not hold the mean was made from other numbers.
        if interval is None or not interval[0] <= margin(x, y) <= interval[1]:
            interval = seed_bounds([margin(a[seed], b[seed]) for seed in shared])
        seeds = len(shared) or min(len(a), len(b))
        ours = f"{number(x)} against {number(y)}"
        return decide(margin(x, y), ours, interval, seeds=seeds, equal_holds=equal_holds)

    return Predicate(run, (first, second))


def at_least(wanted: Cell, bound: float) -> Predicate:
    """The number is at least ``bound``."""
    return _bounded(wanted, lambda value: value - bound)


def about(wanted: Cell, times: float) -> Predicate:
    """The ratio is about ``times``, within ``about_bounds``."""
    return between(wanted, *about_bounds(times))


def between(wanted: Cell, low: float, high: float) -> Predicate:
    """The number lies between the bounds."""
    return _bounded(wanted, lambda value: min(value - low, high - value))


def about_bounds(times: float) -> Bounds:
    """What counts as about so many times: nearer to it than to no difference, and no farther above it.

    >>> about_bounds(2.0), about_bounds(1.25)
    ((1.5, 2.5), (1.125, 1.375))
    """
    reach = abs(times - 1) / 2
    return times - reach, times + reach


def at_most(wanted: Cell, bound: float) -> Predicate:
    """The number is at most ``bound``."""
    return _bounded(wanted, lambda value: bound - value)


def _bounded(wanted: Cell, margin: Callable[[float], float]) -> Predicate:
    def run(result: Result) -> Verdict:
        values = list(select(result, wanted).values())
        interval = seed_bounds([margin(value) for value in values])
        mean = fmean(values)
        return decide(margin(mean), number(mean), interval, seeds=len(values), equal_holds=True)

    return Predicate(run, (wanted,))


def fails(wanted: Cell, sound: Cell, *, below: float) -> Predicate:
    """Training fails: the rows say ``converged: false``, or the number is below a share of a sound model's."""
    worse = compared(wanted, sound, lambda value, other: below * other - value)

    def run(result: Result) -> Verdict:
        rows = rows_of(result, wanted.table)
        mine = [row for row in rows if all(row.get(key) == setting for key, setting in wanted.where)]
        if mine and all(row.get("converged") is False for row in mine):
            values = [row[wanted.column] for row in mine if row.get(wanted.column) is not None]
            interval = seed_bounds([below * mean_of(result, sound) - value for value in values])
            return Verdict(HELD, "did not converge", interval, "every run of it is marked so", seeds=len(mine))
        return worse(result)

    return Predicate(run, (wanted, sound))


def unless(reason: Callable[[Result], str | None], test: Predicate, *, explains_missing: bool = False) -> Predicate:
    """The test, where ``reason`` finds nothing in the results for which they cannot decide it.

    With ``explains_missing`` the reason is also why rows are missing that the test needs.
    """

    def run(result: Result) -> Verdict:
        try:
            verdict = test(result)
        except Missing:
            why = reason(result) if explains_missing else None
            if why is None:
                raise
            return Verdict(NOT_TESTABLE, reason=why)
        why = reason(result)
        return verdict if why is None else replace(verdict, state=NOT_TESTABLE, reason=why)

    return Predicate(run, test.cells)


def all_of(*tests: Predicate) -> Predicate:
    """Every part holds; one that does not decides, even where others have not been run."""
    if len(tests) == 1:
        return tests[0]

    def run(result: Result) -> Verdict:
        parts, missing = [], []
        for test in tests:
            try:
                parts.append(test(result))
            except Missing as error:
                missing.append(error)
        states = [part.state for part in parts]
        if missing and NOT_HELD not in states:
            raise missing[0]
        state = next((s for s in (NOT_HELD, NOT_TESTABLE) if s in states), HELD)
        deciding = [part for part in parts if part.state == state]
        reasons = "; ".join(dict.fromkeys(f"{part.ours}: {part.reason}" for part in deciding))
        reason = f"all {len(parts)} parts hold" if state == HELD else reasons
        return Verdict(state, "; ".join(part.ours for part in parts), reason=reason, parts=tuple(parts))

    return Predicate(run, tuple(c for test in tests for c in test.cells))


def everywhere(table: str, key: str, test: Callable[[Any], Predicate], *, share: float = 1.0) -> Predicate:
    """The test holds for every value of ``key`` that the table has, or for at least a ``share`` of them."""

    def run(result: Result) -> Verdict:
        parts = []
        for value in dict.fromkeys(row[key] for row in rows_of(result, table) if row.get(key) is not None):
            try:
                parts.append(replace(test(value)(result), label=str(value)))
            except Missing:
                continue
        if not parts:
            raise Missing(f"missing: a complete {key}, in {in_words(table)}")
        states = [part.state for part in parts]
        held = states.count(HELD)
        state = HELD if held >= share * len(parts) else NOT_HELD
        if state == NOT_HELD and held + states.count(NOT_TESTABLE) >= share * len(parts):
            state = NOT_TESTABLE
        needed = "all" if share == 1 else f"{100 * share:.0f} %"
        # Where no part holds, there is nothing to tell apart.
        mixed = set(states) != {NOT_HELD}
        each = "; ".join(f"{part.label} {part.ours}{_unless_held(part) if mixed else ''}" for part in parts)
        return Verdict(
            state, f"{held} of {len(parts)}", reason=f"{needed} must hold: {each}", parts=tuple(parts)
        )  # fmt: skip

    return Predicate(run, test("*").cells)


def _unless_held(part: Verdict) -> str:
    """What a part's numbers are followed by where it does not hold."""
    if part.state == NOT_TESTABLE:
        return f" ({INCLUDES_ZERO if part.reason.endswith(INCLUDES_ZERO) else 'not testable'})"
    return "" if part.state == HELD else f" ({part.state})"


def decide(
    gap: float, ours: str, bounds: Bounds | None, *, seeds: int | None = 1, equal_holds: bool = False
) -> Verdict:
    """The verdict on a claim that holds where ``gap`` is positive; an interval of it must lie on one side of zero."""
    holds = gap > 0 or (equal_holds and gap == 0)
    # Where equality is enough, an interval that touches zero from above is on the claim's side.
    if bounds is not None and (bounds[0] < 0 < bounds[1] or (not equal_holds and bounds[0] == 0 < bounds[1])):
        reason = f"the margin is {number(gap)}, and {INCLUDES_ZERO}"
        return Verdict(NOT_TESTABLE, ours, bounds, reason, seeds)
    side = "on the claim's side" if holds else "against the claim" if gap else "the claim needs more than equality"
    reason = f"the margin is {number(gap)}, {side}" + (", and so is its interval" if bounds is not None else "")
    return Verdict(HELD if holds else NOT_HELD, ours, bounds, reason, seeds)


def seed_bounds(values: Sequence[float]) -> Bounds | None:
    """The 95 % interval of a mean over seeds, mean -/+ t s / sqrt(n); None for a single run.

    >>> [round(end, 3) for end in seed_bounds([1.0, 2.0, 3.0])]
    [-0.484, 4.484]
    """
    _, low, high, _ = mean_interval(values) if len(values) > 1 else (None, None, None, None)
    return None if low is None or high is None else (low, high)


def share_bounds(count: int, of: int) -> Bounds:
    """The 95 % interval of a share of seeds (Wilson's).

    >>> [round(end, 2) for end in share_bounds(19, 20)]
    [0.76, 0.99]
    """
    _, low, high, _ = wilson(count, of)
    assert low is not None
    assert high is not None
    return low, high
