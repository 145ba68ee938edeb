"""The page of ``attnlab audit``: what changed since the baseline, the findings, and maps of all heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnlab.pages.fragments import download_json, explained, facts, provenance_facts, section
from attnlab.pages.heatmaps import heat_maps
from attnlab.pages.html import Html, element, page
from attnlab.pages.numbers import number, with_interval
from attnlab.pages.tables import Column, table

__all__ = ["audit_page", "change_text", "finding_rows", "head_name"]

Row = Mapping[str, Any]
# The statistics that have a map, and their titles.
MAPS = {
    "share": "Share of the layer's output",
    "entropy": "Entropy, as a share of the largest",
    "sinks": "Weight on the first tokens",
    "nearest": "Distance to the nearest head",
}


def audit_page(result: Mapping[str, Any]) -> str:
    """The page for what ``attnlab audit --json`` prints."""
    title = f"The heads of {result['model']['name'] or 'a model'}"
    rows = finding_rows(result["heads"])
    # Only the first letter: W and W_O keep theirs.
    meanings = [(name, f"{text[:1].upper()}{text[1:]}.") for name, text in result["statistics"].items()]
    body = [
        element("h1", title),
        element("p", _lead(result, rows), class_="lead"),
        _changes(result),
        section("Findings", _findings(rows), about="With 95 % intervals over windows of the text."),
        section("All heads", _maps(result["heads"]), explained(meanings)),
        section("What was run", facts(_facts(result))),
        download_json(dict(result), name="audit"),
    ]
    return page(title, body, subtitle="audit")


def head_name(row: Row) -> str:
    """A head as lines and tables name it.

    >>> head_name({"kind": "decoder", "layer": 3, "head": 5, "key_value_head": 1})
    'decoder 3.5 (kv 1)'
    """
    return f"{row['kind']} {row['layer']}.{row['head']} (kv {row['key_value_head']})"


def change_text(row: Row) -> tuple[str, str]:
    """(the difference of log-odds with its interval, the findings that came and went) of a change."""
    came = [*row["new_findings"], *(f"no longer {name}" for name in row["gone_findings"])]
    return with_interval(row["odds_difference"], row["low"], row["high"], sign=True), ", ".join(came)


def finding_rows(heads: Sequence[Row]) -> list[dict[str, Any]]:
    """One row for each head and finding, with the statistic it is about."""
    rows = []
    for head in heads:
        for finding in head["findings"]:
            one = head["statistics"][finding["statistic"]]
            value = with_interval(one["mean"], one["low"], one["high"])
            place = {key: head[key] for key in ("kind", "layer", "head", "key_value_head")}
            like = f", like head {head['nearest_head']}" if finding["name"] == "duplicate" else ""
            rows.append({**place, "finding": finding["name"], "statistic": finding["statistic"], "value": value + like})
    return rows


def _lead(result: Mapping[str, Any], rows: Sequence[Row]) -> str:
    total = len(result["heads"])
    findings = f"Heads with a finding: {len({head_name(row) for row in rows})} of {total}."
    if result["baseline"] is None:
        return findings
    changed = len({head_name(row) for row in result["changes"]})
    return f"Heads that changed since the baseline: {changed or 'none'} of {total}. {findings}"


def _changes(result: Mapping[str, Any]) -> Html | None:
    if not result["changes"]:
        return None
    rows = [
        {"where": head_name(row), **row, **dict(zip(("difference", "findings"), change_text(row), strict=True))}
        for row in result["changes"]
    ]
    columns = [
        Column("where", "Head"),
        Column("statistic", "Statistic"),
        Column("before", "Before"),
        Column("now", "Now"),
    ]
    columns += [
        Column(
            "difference", "Difference of log-odds", help="with its interval, wide enough for all comparisons together"
        ),
        Column("floor", "Floor", help="differences up to this are put down to the text"),
        Column("findings", "Findings"),
    ]
    return section("Changes since the baseline", table(rows, name="changes", title="Changes", columns=columns))


def _findings(rows: Sequence[Row]) -> Html:
    if not rows:
        return element("p", "No head is dead, a duplicate, collapsed, or follows a pattern.")
    named = [{"where": head_name(row), **row} for row in rows]
    columns = [Column("where", "Head"), Column("finding", "Finding"), Column("statistic", "By")]
    return table(named, name="findings", title="Findings", columns=[*columns, Column("value", "Value", show=str)])


def _maps(heads: Sequence[Row]) -> list[Html]:
    """One figure for each kind of attention: its layers and heads by statistic."""
    figures = []
    for kind in dict.fromkeys(head["kind"] for head in heads):
        of = [head for head in heads if head["kind"] == kind]
        layers = sorted({head["layer"] for head in of})
        grids = {
            title: [[(head["statistics"][name] or {}).get("mean") for head in of if head["layer"] == layer]
                    for layer in layers]
            for name, title in MAPS.items()
        }  # fmt: skip
        figures.append(
            heat_maps(grids, name=f"audit-{kind}", title=f"Heads, {kind}", row_names=[str(n) for n in layers], high=1.0)
        )
    return figures


def _facts(result: Mapping[str, Any]) -> list[tuple[str, object]]:
    text, before = result["text"], result["baseline"] or {}
    return [
        ("Model", result["model"]["name"]),
        ("Parameters", number(result["model"]["parameters"])),
        ("Text", f"{text['name']}, {text['windows']} windows of {result['shape']['length']} tokens"),
        ("Text of the baseline", (before.get("text") or {}).get("name")),
        ("Comparisons", before.get("comparisons")),
        *provenance_facts(result),
    ]
