"""The page of ``python -m papers claims``, and docs/claims.md: every claim of the five papers with our verdict."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlab.pages.fragments import explained, provenance_facts, section
from attnlab.pages.html import Html, element, page
from attnlab.pages.numbers import MISSING, number
from attnlab.pages.tables import Column, table
from attnlab.progress import note
from attnlab.provenance import write_atomic
from papers.common.claims import HELD, NOT_HELD, NOT_RUN, NOT_TESTABLE, STATES, Claim, Verdict, judge
from papers.common.folders import RESULTS, described_columns, folders, load_results, modules

__all__ = ["all_claims", "claims_in", "claims_json", "claims_page", "papers_of", "report_claims", "tables_wanted"]

# The papers in the order of the ledger; others follow.
ORDER = ("AG", "KTIW", "Effective", "ABC", "OVA")
BADGES = {HELD: "held", NOT_HELD: "failed", NOT_TESTABLE: "open", NOT_RUN: "open"}
MEANINGS = (
    ("Held", "Our numbers show what the paper says, and where there are several seeds, their interval does too."),
    ("Not held", "Our numbers contradict it."),
    ("Not testable at this scale", "We ran it and cannot tell: the interval includes zero, or the note says why."),
    ("Not run yet", "There are no results for it."),
    ("Margin", "By how much the claim holds, in the unit of the numbers compared: 95 % interval over seeds or items. "
     "Above zero supports the claim."),
)  # fmt: skip

Judged = Sequence[tuple[Claim, Verdict]]


def all_claims() -> tuple[Claim, ...]:
    """Every claim, paper by paper: what ``CLAIMS`` holds in the modules claims*.py of the papers' folders."""
    claims = [claim for folder in folders() for claim in claims_in(folder)]
    return tuple(sorted(claims, key=lambda claim: _place(claim.paper)))


def claims_in(folder: str) -> Iterator[Claim]:
    """The claims that a paper's folder declares."""
    # papers/common/claims.py declares no claims.
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


def _place(paper: str) -> int:
    return ORDER.index(paper) if paper in ORDER else len(ORDER)


def claims_page(results: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """The ledger as an HTML page and as Markdown, from results by name (``load_results``)."""
    judged = [(claim, judge(claim, results)) for claim in all_claims()]
    title = "What five papers claim, and what we found"
    body = [
        element("h1", title),
        element("p", _summary(judged), class_="lead"),
        _overview(judged),
        [
            _paper(name, full, [pair for pair in judged if pair[0].paper == name])
            for name, full in _papers(judged).items()
        ],
        section("How to read the verdicts", explained(MEANINGS)),
        _sources(results),
    ]
    return page(title, body, subtitle="claims"), _markdown(judged)


def claims_json(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every claim with its verdict, as ``python -m papers claims --json`` prints it."""
    return [
        {**_row(claim, verdict), "name": claim.name, "paper": claim.paper, "results": claim.results}
        for claim, verdict in ((claim, judge(claim, results)) for claim in all_claims())
    ]


def report_claims(
    *,
    results: Path | str = RESULTS,
    out: Path | str = "claims.html",
    markdown: Path | str | None = None,
) -> dict[str, Any]:
    """Write the ledger as a page, and as Markdown on request; returns where they are and every verdict."""
    if not Path(results).is_dir():
        raise ValueError(f"{results} is no folder; give the folder with the results' JSON files")
    loaded = load_results(results)
    note(f"{len(loaded)} results files")
    page_text, markdown_text = claims_page(loaded)
    written = {"page": str(write_atomic(out, page_text))}
    if markdown is not None:
        written["markdown"] = str(write_atomic(markdown, markdown_text))
    return {**written, "claims": claims_json(loaded)}


def _papers(judged: Judged) -> dict[str, str]:
    return papers_of(tuple(claim for claim, _ in judged))


def _summary(judged: Judged) -> str:
    counts = Counter(verdict.state for _, verdict in judged)
    by_state = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    return f"Of {len(judged)} claims, {', '.join(by_state)}."


def _overview(judged: Judged) -> Html:
    rows = []
    for name in _papers(judged):
        counts = Counter(verdict.state for claim, verdict in judged if claim.paper == name)
        rows.append({"paper": name, **{state: counts[state] for state in STATES}})
    columns = [Column("paper", "Paper"), *(Column(s, s.capitalize()) for s in STATES)]
    return table(rows, name="verdicts", title="Verdicts by paper", columns=columns)


def _paper(name: str, full: str, judged: Judged) -> Html:
    columns = [
        Column("statement", "Claim"),
        Column("verdict", "Verdict", show=_badge),
        Column("paper_value", "Paper"),
        Column("ours", "Ours"),
        Column("margin", "Margin"),
        Column("where", "Where"),
        Column("note", "Note", show=_note),
    ]
    rows = [_row(claim, verdict) for claim, verdict in judged]
    drawn = table(rows, name=f"claims-{name.lower()}", title=f"{len(rows)} claims", columns=columns, stacked=True)
    return section(name, drawn, about=full)


def _row(claim: Claim, verdict: Verdict) -> dict[str, Any]:
    low_high = f"{number(verdict.interval[0])} to {number(verdict.interval[1])}" if verdict.interval else MISSING
    return {
        "statement": claim.statement,
        "where": claim.where,
        "paper_value": claim.paper_value,
        "ours": verdict.ours or MISSING,
        "margin": low_high,
        "verdict": verdict.state,
        "note": verdict.note,
    }


def _badge(state: str) -> Html:
    return element("span", state, class_=f"badge {BADGES[state]}")


def _note(note: str) -> Html:
    text = element("span", note, class_="note")
    return element("details", element("summary", "each"), text, class_="inline") if len(note) > 90 else text


def _sources(results: Mapping[str, Mapping[str, Any]]) -> Html | None:
    if not results:
        return None
    rows = [
        {"file": f"papers/results/{name}.json", **{k: v for k, v in provenance_facts(result) if v not in (None, "")}}
        for name, result in results.items()
    ]
    return section("Where the numbers come from", table(rows, name="sources", title=f"{len(rows)} results files"))


def _markdown(judged: Judged) -> str:
    lines = [
        "# Claims",
        "",
        "Generated by `python -m papers docs` from papers/results/*.json; do not edit.",
        "",
        _summary(judged),
        "",
    ]
    for name, full in _papers(judged).items():
        lines += [
            f"## {name}",
            "",
            full,
            "",
            "| claim | where | paper | ours | margin | verdict |",
            "| " + "--- | " * 6,
        ]
        for claim, verdict in judged:
            if claim.paper == name:
                row = _row(claim, verdict)
                keys = ("statement", "where", "paper_value", "ours", "margin", "verdict")
                lines.append("| " + " | ".join(str(row[key]).replace("|", "\\|") for key in keys) + " |")
        lines.append("")
    lines += [
        "## What the claims read",
        "",
        "A row may have a `seed`: paired seeds give the margin's interval.",
        "",
        "| results file | table | columns |",
        "| --- | --- | --- |",
    ]
    for name, tables in tables_wanted().items():
        lines += [f"| papers/results/{name}.json | {label} | {columns} |" for label, columns in tables.items()]
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"
