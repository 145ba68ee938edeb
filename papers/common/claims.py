"""A paper's claim as code: the sentence, its place, the paper's number, and a test over the cells of our results.

Tests take few forms: less, more, close, bounded, and each of these over every data set. Where a cell has several seeds,
the interval of the margin (Student's t) must lie on one side of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from attnlab.pages.numbers import number
from papers.common.row_store import read_results

__all__ = [
    "HELD",
    "NOT_HELD",
    "NOT_RUN",
    "NOT_TESTABLE",
    "STATES",
    "Bounds",
    "Cell",
    "Claim",
    "Interval",
    "Missing",
    "Predicate",
    "Result",
    "Verdict",
    "all_of",
    "at_least",
    "at_most",
    "averaged",
    "averages",
    "averages_less",
    "averages_more",
    "cell",
    "claims_of",
    "close",
    "compared",
    "decide",
    "everywhere",
    "fails",
    "judge",
    "less",
    "mean_of",
    "more",
    "rows_of",
    "seed_interval",
    "select",
    "student",
    "verdicts_on",
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
    """The outcome for a claim: the state, our number as text, and the interval of the margin by which it holds."""

    state: str
    ours: str = ""
    interval: Bounds | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state must be one of {', '.join(STATES)}, got {self.state!r}")


@dataclass(frozen=True)
class Cell:
    """The numbers of a results file that a claim reads: a column of a table, in the rows where the settings match."""

    table: str
    column: str
    where: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Predicate:
    """A test over one results file; ``cells`` are the numbers that it reads."""

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


def claims_of(prefix: str, paper: str) -> Callable[[str, str, str, str, str, Predicate], Claim]:
    """A function that makes the claims of a paper: ``(name, results, where, statement, paper_value, test)``."""

    def make(name: str, results: str, where: str, statement: str, paper_value: str, test: Predicate) -> Claim:
        return Claim(f"{prefix}-{name}", paper, where, statement, paper_value, results, test)

    return make


def judge(claim: Claim, results: Mapping[str, Result]) -> Verdict:
    """The verdict on a claim given all results by name.

    A results file may have ``not_testable: {claim: reason}``, and ``intervals: {claim: [low, high]}`` where an
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
        reason = verdict.ours or verdict.note
        paper = f" (paper: {claim.paper_value})" if claim.paper_value else ""
        lines.append(f"{verdict.state}: {claim.statement} {reason}{paper}")
    return lines


def cell(table: str, column: str, /, **where: Any) -> Cell:
    """The column of a table in the rows where the named settings match: ``cell("table_1", "mlm_error", r=1)``."""
    return Cell(table, column, tuple(where.items()))


def rows_of(result: Result, table: str) -> list[dict[str, Any]]:
    """The rows of a table; ``Missing`` when the results do not have it."""
    tables = result.get("tables") or {}
    if not tables.get(table):
        raise Missing(f"the results have no table {table}")
    return list(tables[table])


def select(result: Result, wanted: Cell) -> dict[Any, float]:
    """The values of a cell by seed (None where the rows have no seed); ``Missing`` when there is none."""
    by_seed: dict[Any, float] = {}
    where = "for " + ", ".join(f"{key} {setting}" for key, setting in wanted.where) if wanted.where else ""
    for row in rows_of(result, wanted.table):
        value = row.get(wanted.column)
        if value is not None and all(row.get(key) == setting for key, setting in wanted.where):
            if row.get("seed") in by_seed:
                raise Missing(f"table {wanted.table} has several rows {where} with the same seed; one is expected")
            by_seed[row.get("seed")] = float(value)
    if not by_seed:
        raise Missing(f"table {wanted.table} has no {wanted.column} {where}".rstrip())
    return by_seed


def averages(result: Result, table: str, column: str, *keys: str) -> dict[tuple[Any, ...], float]:
    """The mean of a column, over seeds, for each combination of the keys; rows without a value are left out."""
    by_settings: dict[tuple[Any, ...], list[float]] = {}
    for row in rows_of(result, table):
        if row[column] is not None:
            by_settings.setdefault(tuple(row[key] for key in keys), []).append(float(row[column]))
    return {settings: math.fsum(values) / len(values) for settings, values in by_settings.items()}


def mean_of(result: Result, wanted: Cell) -> float:
    """The mean over seeds of a cell."""
    values = select(result, wanted)
    return math.fsum(values.values()) / len(values)


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
    first: Cell, second: Cell, margin: Callable[[float, float], float], *, equal_holds: bool = False
) -> Predicate:
    """``margin(first, second)`` is positive; over shared seeds, its interval must lie on one side of zero."""

    def run(result: Result, bounds: Bounds | None) -> Verdict:
        a, b = select(result, first), select(result, second)
        shared = [seed for seed in a if seed in b]
        x, y = (fmean([v[seed] for seed in shared] or v.values()) for v in (a, b))
        if bounds is None and len(shared) > 1:
            interval = seed_interval([margin(a[seed], b[seed]) for seed in shared])
            bounds = (interval.low, interval.high)
        return decide(margin(x, y), f"{number(x)} against {number(y)}", bounds, equal_holds=equal_holds)

    return Predicate(run, (first, second))


def averaged(first: Cell, second: Cell, holds: Callable[[float], bool]) -> Predicate:
    """``holds`` of the difference of the means over shared seeds, whatever the seeds' spread.

    Results that know of other reasons why a difference cannot be decided list the claim under ``not_testable``.
    """

    def run(result: Result, _: Bounds | None) -> Verdict:
        a, b = select(result, first), select(result, second)
        shared = [seed for seed in a if seed in b]
        x, y = (fmean([values[seed] for seed in shared] or values.values()) for values in (a, b))
        return Verdict(HELD if holds(x - y) else NOT_HELD, f"{number(x)} against {number(y)}")

    return Predicate(run, (first, second))


def averages_less(first: Cell, second: Cell) -> Predicate:
    """The first mean is the smaller one."""
    return averaged(first, second, lambda gap: gap < 0)


def averages_more(first: Cell, second: Cell) -> Predicate:
    """The first mean is the larger one."""
    return averaged(first, second, lambda gap: gap > 0)


def at_least(wanted: Cell, bound: float) -> Predicate:
    """The number is at least ``bound``."""
    return _bounded(wanted, lambda value: value - bound)


def at_most(wanted: Cell, bound: float) -> Predicate:
    """The number is at most ``bound``."""
    return _bounded(wanted, lambda value: bound - value)


def fails(wanted: Cell, sound: Cell, *, below: float) -> Predicate:
    """Training fails: the rows say ``converged: false``, or the number is below a share of a sound model's."""

    def run(result: Result, _: Bounds | None) -> Verdict:
        rows = rows_of(result, wanted.table)
        mine = [row for row in rows if all(row.get(key) == setting for key, setting in wanted.where)]
        if mine and all(row.get("converged") is False for row in mine):
            return Verdict(HELD, "did not converge")
        value, other = mean_of(result, wanted), mean_of(result, sound)
        return Verdict(HELD if value < below * other else NOT_HELD, f"{number(value)} against {number(other)}")

    return Predicate(run, (wanted, sound))


def all_of(*tests: Predicate) -> Predicate:
    """Every part holds; one that does not decides."""

    def run(result: Result, _: Bounds | None) -> Verdict:
        verdicts = [test(result) for test in tests]
        note = "; ".join(v.note for v in verdicts if v.note)
        return Verdict(_together([v.state for v in verdicts]), "; ".join(v.ours for v in verdicts), note=note)

    return Predicate(run, tuple(c for test in tests for c in test.cells))


def everywhere(table: str, key: str, test: Callable[[Any], Predicate], *, share: float = 1.0) -> Predicate:
    """The test holds for every value of ``key`` that the table has, or for at least a ``share`` of them."""

    def run(result: Result, _: Bounds | None) -> Verdict:
        settings = list(dict.fromkeys(row[key] for row in rows_of(result, table) if row.get(key) is not None))
        verdicts = {}
        for value in settings:
            try:
                verdicts[value] = test(value)(result)
            except Missing:
                continue
        if not verdicts:
            raise Missing(f"table {table} has no complete {key}")
        states = [v.state for v in verdicts.values()]
        held = states.count(HELD)
        ours = f"{held} of {len(states)}"
        note = "; ".join(f"{value} {v.ours}" for value, v in verdicts.items())
        if held >= share * len(states):
            return Verdict(HELD, ours, note=note)
        undecided = held + states.count(NOT_TESTABLE) >= share * len(states)
        return Verdict(NOT_TESTABLE if undecided else NOT_HELD, ours, note=note)

    return Predicate(run, tuple(c for c in test("*").cells))


def _bounded(wanted: Cell, margin: Callable[[float], float]) -> Predicate:
    def run(result: Result, bounds: Bounds | None) -> Verdict:
        values = select(result, wanted)
        if bounds is None and len(values) > 1:
            interval = seed_interval([margin(value) for value in values.values()])
            bounds = (interval.low, interval.high)
        mean = mean_of(result, wanted)
        return decide(margin(mean), number(mean), bounds, equal_holds=True)

    return Predicate(run, (wanted,))


def decide(gap: float, ours: str, bounds: Bounds | None, *, equal_holds: bool = False) -> Verdict:
    """The verdict on a claim that holds where ``gap`` is positive; an interval of it must lie on one side of zero."""
    holds = gap > 0 or (equal_holds and gap == 0)
    # Where equality is enough, an interval that touches zero from above is on the claim's side.
    if bounds is not None and (bounds[0] < 0 < bounds[1] or (not equal_holds and bounds[0] == 0 < bounds[1])):
        return Verdict(NOT_TESTABLE, ours, bounds, "the interval includes zero")
    return Verdict(HELD if holds else NOT_HELD, ours, bounds)


def _together(states: list[str]) -> str:
    return next((state for state in (NOT_HELD, NOT_TESTABLE) if state in states), HELD)


@dataclass(frozen=True)
class Interval:
    """An estimate and the range that holds the truth with the given confidence."""

    estimate: float
    low: float
    high: float


def seed_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Mean over seeds with Student's t interval: mean -/+ t s / sqrt(n).

    >>> interval = seed_interval([1.0, 2.0, 3.0])
    >>> interval.estimate, round(interval.low, 3), round(interval.high, 3)
    (2.0, -0.484, 4.484)
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"an interval over seeds needs at least 2 of them, got {n}")
    _check_level(level)
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    reach = student(level, n - 1) * deviation / math.sqrt(n)
    return Interval(mean, mean - reach, mean + reach)


def student(level: float, degrees: int) -> float:
    """The t with P(|T| < t) = level, by bisection on the closed form for whole degrees of freedom."""
    low, high = 0.0, 1.0
    while _within(high, degrees) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < level else (low, middle)
    return (low + high) / 2


def _within(t: float, degrees: int) -> float:
    """P(|T| < t) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return (theta + sine * total) * 2 / math.pi if odd else sine * total


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
