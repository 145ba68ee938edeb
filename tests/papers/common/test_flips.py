"""No verdict stands by itself: for every claim that is decided there is a number in our results that flips it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from papers.common.cells import Cell
from papers.common.claims import HELD, NOT_HELD, NOT_RUN, Claim, judge
from papers.common.folders import load_results
from papers.common.ledger_page import all_claims
from tests.papers.common.made_up import SPOILED

CLAIMS = {claim.name: claim for claim in all_claims()}
# Computed from the paper's text, not from results.
WITHOUT_RESULTS = {"ova-worked-example"}


@cache
def results() -> dict[str, dict[str, Any]]:
    return load_results()


DECIDED = [
    n for n, claim in CLAIMS.items() if n not in WITHOUT_RESULTS and judge(claim, results()).state in (HELD, NOT_HELD)
]


# A change: (table, column, {row: the number to write there}).
Change = tuple[str, str, dict[int, Any]]
FACTORS = (1e-4, 0.01, 0.1, 0.5, 0.9, 0.98, 1.02, 1.1, 2.0, 10.0, 1e4)


def groups(result: dict[str, Any], wanted: Cell) -> Iterator[list[int]]:
    """The rows that a cell reads, one by one, then the seeds of each setting together; "*" stands for every setting."""
    settings: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(result["tables"].get(wanted.table, [])):
        matches = all(setting == "*" or row.get(key) == setting for key, setting in wanted.where)
        if matches and isinstance(row.get(wanted.column), (int, float)):
            settings.setdefault(tuple(row.get(key) for key, _ in wanted.where), []).append(i)
    for places in settings.values():
        yield from ([place] for place in places)
        yield places


def changes(claim: Claim, result: dict[str, Any]) -> Iterator[Change]:
    """Numbers far below and above those that a claim reads, beside them, and beside those that it compares them with."""
    cells = list(dict.fromkeys(claim.test.cells))
    for wanted in cells:
        rows = result["tables"].get(wanted.table, [])
        for places in groups(result, wanted):
            own = [rows[place][wanted.column] for place in places]
            if isinstance(own[0], bool):
                yield wanted.table, wanted.column, {place: not rows[place][wanted.column] for place in places}
                continue
            # A perplexity is never negative, a difference may be.
            signed = any(isinstance(n := row.get(wanted.column), float) and n < 0 for row in rows)
            for factor in (*FACTORS, -1.0) if signed else FACTORS:
                yield (
                    wanted.table,
                    wanted.column,
                    {p: factor * (abs(v) or 1.0) for p, v in zip(places, own, strict=True)},
                )
            yield from _beside_others(rows, wanted, places, cells)


def _beside_others(rows: list[dict[str, Any]], wanted: Cell, places: list[int], cells: list[Cell]) -> Iterator[Change]:
    """The numbers of the cells that stand in the same row, or in a row of another model."""
    for other in cells:
        if other.table != wanted.table or len(places) > 3 or other == wanted:
            continue
        settings = {key: rows[places[0]].get(key) for key, _ in wanted.where}
        apart = [key for key, value in other.where if value not in ("*", settings.get(key))]
        if len(apart) > 3:
            continue
        there = {**settings, **{key: value for key, value in other.where if value != "*"}}
        by_seed = {
            row.get("seed"): row[other.column]
            for row in rows
            if all(row.get(k) == v for k, v in there.items()) and isinstance(row.get(other.column), float)
        }
        for factor in (0.99, 1.0, 1.01) if by_seed else ():
            mean = sum(by_seed.values()) / len(by_seed)
            numbers = {place: factor * by_seed.get(rows[place].get("seed"), mean) for place in places}
            yield wanted.table, wanted.column, numbers


def changed(result: dict[str, Any], change: Change) -> dict[str, Any]:
    """The results with some numbers changed; all other rows are shared, not copied."""
    table, column, numbers = change
    rows = list(result["tables"][table])
    for place, value in numbers.items():
        rows[place] = {**rows[place], column: value}
    return {**result, "tables": {**result["tables"], table: rows}}


def flipped(claim: Claim, *, most: int = 12) -> bool:
    """Whether numbers turn the verdict round, changed one after the other, each bringing a comparison nearer to it."""
    result = results()[claim.results]
    before = judge(claim, results())
    # Where a part has not been run, a claim that is no longer refuted is open.
    wanted = {NOT_HELD} if before.state == HELD else {HELD, NOT_RUN}
    score = sum(one.state in wanted for one in before.comparisons())
    for _ in range(most):
        for change in changes(claim, result):
            candidate = changed(result, change)
            verdict = judge(claim, {claim.results: candidate})
            if verdict.state in wanted:
                return True
            turned = sum(one.state in wanted for one in verdict.comparisons())
            if turned > score:
                score, result = turned, candidate
                break
        else:
            return False
    return False


@pytest.mark.parametrize("name", DECIDED)
def test_a_number_flips_the_verdict(name: str) -> None:
    before = judge(CLAIMS[name], results()).state
    assert flipped(CLAIMS[name]), f"{name} is {before} whatever the numbers are that it reads"


def test_every_claim_is_decided_by_numbers_or_says_why_not() -> None:
    """Claims that our results leave open are flipped on the paper's numbers (test_claims), so that none escapes."""
    assert set(CLAIMS) - set(DECIDED) - WITHOUT_RESULTS <= set(SPOILED)
    open_claims = [CLAIMS[name] for name in CLAIMS if name not in DECIDED and name not in WITHOUT_RESULTS]
    assert [claim.name for claim in open_claims if not judge(claim, results()).reason] == []


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if claim.results in results()])
def test_a_verdict_rests_on_tables_and_settings_alone(name: str) -> None:
    """What else a results file says, such as a verdict of an earlier run, changes nothing."""
    claim = CLAIMS[name]
    result = copy.copy(results()[claim.results])
    stale = {"not_testable": {name: "once"}, "intervals": {name: [-1, 1]}, "still_rising": ["Multi30k", "SST"]}
    assert judge(claim, {claim.results: {**result, **stale}}) == judge(claim, results())
