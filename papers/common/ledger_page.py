"""The page of ``python -m papers claims``, and docs/claims.md: every claim of the five papers with our verdict."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlab.pages.fragments import explained, section
from attnlab.pages.html import Html, element, page
from attnlab.pages.numbers import MISSING, number
from attnlab.pages.tables import Column, table
from attnlab.progress import note
from attnlab.provenance import write_atomic
from papers.common.claims import HELD, NOT_HELD, NOT_RUN, NOT_TESTABLE, STATES, Claim, Verdict, judge
from papers.common.folders import RESULTS, described_columns, folders, load_results, modules
from papers.common.scale import scale_of
from papers.common.sources import source_rows

__all__ = [
    "all_claims",
    "claims_in",
    "claims_json",
    "claims_page",
    "headline",
    "papers_of",
    "report_claims",
    "tables_wanted",
]

# The papers in the order of the ledger; others follow.
ORDER = ("AG", "KTIW", "Effective", "ABC", "OVA")
BADGES = {HELD: "held", NOT_HELD: "failed", NOT_TESTABLE: "open", NOT_RUN: "open"}
MEANINGS = (
    ("Held", "Our numbers show what the paper says, and where there are several seeds, their interval does too."),
    ("Not held", "Our numbers contradict it."),
    ("Not testable at this scale", "We ran it and cannot tell: the interval includes zero, or no run of this length "
     "or data could decide it; the reason says which."),
    ("Not run yet", "There are no results for it, or not all that it needs."),
    ("Interval", "By how much the claim holds, in the unit of the numbers compared: 95 % interval over seeds, or over "
     "sentences or examples. Above zero supports the claim. Of counts of seeds: the share that learns, or fails."),
    ("Runs", "How many trainings, of different seeds, each number is the mean of."),
    ("Variant", "The paper's sentence in a setting of ours that the paper did not run: no claim of the paper."),
)  # fmt: skip

VARIANTS = "The paper's sentences in settings of ours that the paper did not run. They are no claims of the paper."

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
    own, variants = _apart(judged)
    title = "What five papers claim, and what we found"
    sources = source_rows(results)
    body = [
        element("h1", title),
        element("p", _summary(judged), class_="lead"),
        section("All papers", _overview(own)),
        [_paper(name, full, _of(own, name), results) for name, full in _papers(own).items()],
        [_paper(name, VARIANTS, _of(variants, name), results, variants=True) for name in _papers(variants)],
        section("How to read the verdicts", explained(MEANINGS)),
        section("Where the numbers come from", table(sources, name="sources", title=f"{len(sources)} results files"))
        if sources
        else None,
    ]
    return page(title, body, subtitle="claims"), _markdown(judged, results)


def headline(folder: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The headline claims of a paper's folder as they stand: each with its verdict, its seeds and their scale."""
    verdicts = []
    for claim in claims_in(folder):
        if claim.headline:
            verdict = judge(claim, results)
            # What was not run has a reason instead of a scale.
            scale = verdict.reason if verdict.state == NOT_RUN else scale_of(claim, results.get(claim.results))
            about = [scale] if verdict.state == NOT_RUN else [_runs(verdict), scale]
            shown = ", ".join(part for part in about if part != MISSING)
            verdicts.append(f"- {claim.headline}: **{verdict.state}** ({shown})")
    return "\n".join(["Headline claims as they stand:", "", *verdicts])


def claims_json(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every claim with its verdict, as ``python -m papers claims --json`` prints it."""
    return [
        {
            **_row(claim, verdict, results),
            "name": claim.name,
            "paper": claim.paper,
            "results": claim.results,
            "variant": claim.is_variant,
        }
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


def _apart(judged: Judged) -> tuple[Judged, Judged]:
    """(the papers' claims, our variants)."""
    return [pair for pair in judged if not pair[0].is_variant], [pair for pair in judged if pair[0].is_variant]


def _of(judged: Judged, paper: str) -> Judged:
    return [pair for pair in judged if pair[0].paper == paper]


def _summary(judged: Judged) -> str:
    sentences = []
    for which, some in zip(("the papers' {} claims", "our {} variants"), _apart(judged), strict=True):
        counts = Counter(verdict.state for _, verdict in some)
        by_state = [f"{counts[state]} {state}" for state in STATES if counts[state]]
        if some:
            sentences.append(f"Of {which.format(len(some))}, {', '.join(by_state)}.")
    return " ".join(sentences)


def _overview(judged: Judged) -> Html:
    rows = []
    for name in _papers(judged):
        counts = Counter(verdict.state for claim, verdict in judged if claim.paper == name)
        rows.append({"paper": name, **{state: counts[state] for state in STATES}})
    columns = [Column("paper", "Paper"), *(Column(s, s.capitalize()) for s in STATES)]
    return table(rows, name="verdicts", title="Verdicts by paper", columns=columns)


def _paper(
    name: str, about: str, judged: Judged, results: Mapping[str, Mapping[str, Any]], *, variants: bool = False
) -> Html:
    columns = [
        Column("statement", "Claim"),
        Column("verdict", "Verdict", show=_badge),
        Column("paper_value", "Paper"),
        Column("ours", "Ours"),
        Column("interval", "Interval"),
        Column("runs", "Runs"),
        Column("reason", "Reason", show=_note),
        Column("scale", "Scale"),
        Column("where", "Where"),
    ]
    rows = [_row(claim, verdict, results) for claim, verdict in judged]
    kind = "variants" if variants else "claims"
    counted = f"{name}: {len(rows)} {kind if len(rows) != 1 else kind.removesuffix('s')}"
    drawn = table(rows, name=f"{kind}-{name.lower()}", title=counted, columns=columns, stacked=True)
    return section(f"{name}: our variants" if variants else name, drawn, about=about)


def _row(claim: Claim, verdict: Verdict, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "statement": claim.statement,
        "where": claim.where,
        "paper_value": claim.paper_value,
        "ours": verdict.ours or MISSING,
        "interval": _intervals(verdict),
        "runs": _runs(verdict) if verdict.ours else MISSING,
        "verdict": verdict.state,
        "reason": verdict.reason,
        "scale": scale_of(claim, results.get(claim.results)),
    }


def _intervals(verdict: Verdict) -> str:
    """The interval of the margin, or those of the comparisons that the verdict rests on."""
    shown = []
    for one in verdict.comparisons():
        if one.interval is not None:
            low_high = f"{number(one.interval[0])} to {number(one.interval[1])}"
            shown.append(f"{one.label} {low_high}" if one.label else low_high)
    return "; ".join(shown) or MISSING


def _runs(verdict: Verdict) -> str:
    """How many trainings the verdict's numbers are means of: "single run", "3 seeds", "1 to 3 seeds"."""
    counts = sorted({one.seeds for one in verdict.comparisons() if one.seeds is not None})
    if not counts:
        return "computed"
    if counts == [1]:
        return "single run"
    return f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds"


def _badge(state: str) -> Html:
    return element("span", state, class_=f"badge {BADGES[state]}")


def _note(note: str) -> Html:
    text = element("span", note, class_="note")
    return element("details", element("summary", "each"), text, class_="inline") if len(note) > 90 else text


def _markdown(judged: Judged, results: Mapping[str, Mapping[str, Any]]) -> str:
    own, variants = _apart(judged)
    lines = [
        "# Claims",
        "",
        "Generated by `python -m papers docs` from papers/results/*.json; do not edit.",
        "",
        _summary(judged),
        "",
    ]
    lines += [f"- {term}: {meaning}" for term, meaning in MEANINGS]
    for name, full in _papers(own).items():
        lines += ["", f"## {name}", "", full, "", *_claims_in_markdown(_of(own, name), results)]
    if variants:
        lines += ["", "## Our variants", "", VARIANTS]
    for name in _papers(variants):
        lines += ["", f"### {name}", "", *_claims_in_markdown(_of(variants, name), results)]
    lines += ["", *_sources_in_markdown(results), "", *_columns_in_markdown()]
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


COLUMNS = {
    "statement": "claim",
    "where": "where",
    "paper_value": "paper",
    "ours": "ours",
    "interval": "interval",
    "runs": "runs",
    "verdict": "verdict",
    "reason": "reason",
    "scale": "scale",
}


def _claims_in_markdown(judged: Judged, results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [_row(claim, verdict, results) for claim, verdict in judged]
    # A variant has no paper's value.
    columns = {key: title for key, title in COLUMNS.items() if key != "paper_value" or any(row[key] for row in rows)}
    return _lines([list(columns.values()), *([row[key] for key in columns] for row in rows)])


def _sources_in_markdown(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = source_rows(results)
    if not rows:
        return []
    about = "`took` adds up the recorded times of trainings; a rerun takes about as long on the same device."
    return [
        "## Where the numbers come from",
        "",
        about,
        "",
        *_lines([list(rows[0]), *(list(r.values()) for r in rows)]),
    ]


def _columns_in_markdown() -> list[str]:
    rows = [
        [f"papers/results/{name}.json", label, columns]
        for name, tables in tables_wanted().items()
        for label, columns in tables.items()
    ]
    about = "A row may have a `seed`: paired seeds give the margin's interval."
    return ["## What the claims read", "", about, "", *_lines([["results file", "table", "columns"], *rows])]


def _lines(rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table; the first row is its head."""
    written = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [written[0], "| " + "--- | " * len(rows[0]), *written[1:]]
