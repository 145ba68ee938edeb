"""Every claim of the papers as code, found in the claims*.py of their folders, and what their tests read."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from papers.common.claims.ledger import (
    HELD,
    NOT_HELD,
    NOT_RUN,
    NOT_TESTABLE,
    STATES,
    Cell,
    Claim,
    Missing,
    Predicate,
    Verdict,
    judge,
)
from papers.common.claims.statistics import Interval, paired_bootstrap, pooled_deviation, seed_interval, student
from papers.common.discovery import folders, modules
from papers.common.results import described_columns
from papers.common.row_store import read_results

__all__ = [
    "HELD",
    "NOT_HELD",
    "NOT_RUN",
    "NOT_TESTABLE",
    "Cell",
    "Claim",
    "Interval",
    "Missing",
    "Predicate",
    "Verdict",
    "all_claims",
    "judge",
    "paired_bootstrap",
    "papers_of",
    "pooled_deviation",
    "seed_interval",
    "student",
    "tables_wanted",
    "verdicts_on",
]

# The papers in the order of the ledger; others follow.
ORDER = ("AG", "KTIW", "Effective", "ABC", "OVA")


def all_claims() -> tuple[Claim, ...]:
    """Every claim, paper by paper: what ``CLAIMS`` holds in the modules claims*.py of the papers' folders."""
    claims = [claim for folder in folders() for claim in claims_in(folder)]
    return tuple(sorted(claims, key=lambda claim: _place(claim.paper)))


def claims_in(folder: str) -> Iterator[Claim]:
    """The claims that a paper's folder declares."""
    # The package of this module is called claims, too.
    if folder != "common":
        for module in modules(folder, "claims"):
            yield from module.CLAIMS


def papers_of(claims: tuple[Claim, ...]) -> dict[str, str]:
    """The papers that claims are of, each with its citation where its folder has one."""
    packages = [importlib.import_module(f"papers.{folder}") for folder in folders()]
    citations = {package.PAPER: package.CITATION for package in packages if hasattr(package, "PAPER")}
    return {paper: citations.get(paper, "") for paper in dict.fromkeys(claim.paper for claim in claims)}


def tables_wanted() -> dict[str, dict[str, str]]:
    """What the claims read: results file, table, and its columns, as paper_tables.json describes them or by name."""
    read: dict[str, dict[str, dict[str, None]]] = {}
    for claim in all_claims():
        for cell in claim.test.cells:
            columns = read.setdefault(claim.results, {}).setdefault(cell.table, {})
            columns |= dict.fromkeys([*(key for key, _ in cell.where), cell.column])
    described = described_columns()
    wanted: dict[str, dict[str, str]] = {}
    for results, tables in read.items():
        texts = described.get(results, {})
        # In the order in which they are described.
        names = [*(table for table in texts if table in tables), *(table for table in tables if table not in texts)]
        wanted[results] = {table: texts.get(table) or ", ".join(tables[table]) for table in names}
    return wanted


def verdicts_on(path: Path) -> list[str]:
    """A line for each claim on a results file: the verdict, the claim, the paper's value and ours."""
    result = read_results(path)
    if result is None:
        return []
    name = result.get("name", path.stem)
    judged = [(claim, judge(claim, {name: result})) for claim in all_claims() if claim.results == name]
    judged.sort(key=lambda pair: STATES.index(pair[1].state))
    lines = []
    for claim, verdict in judged:
        reason = verdict.ours or verdict.note
        paper = f" (paper: {claim.paper_value})" if claim.paper_value else ""
        lines.append(f"{verdict.state}: {claim.statement} {reason}{paper}")
    return lines


def _place(paper: str) -> int:
    return ORDER.index(paper) if paper in ORDER else len(ORDER)
