"""The page of ``attnlab demo``: what a model's heads use, what approximations keep, and a memory of constant size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnlab.pages.charts import interval_chart
from attnlab.pages.demo_memory import memory_act, memory_sentence
from attnlab.pages.fragments import download_json, explained, facts, provenance_facts, section
from attnlab.pages.heatmaps import heat_maps
from attnlab.pages.html import Html, breakable, element, page
from attnlab.pages.maps import map_pair
from attnlab.pages.numbers import number, percent, times, with_interval
from attnlab.pages.quality import quality_title, quality_with_interval
from attnlab.pages.tables import Column, table

__all__ = ["demo_page", "demo_sentences", "verdict"]

Row = Mapping[str, Any]
TITLE = "A model's attention in three acts"
WAITING = "This act is not there yet: the demo was stopped, or is still running."
EFFECTIVE = (
    "A head's output is W v: each token's weights times the values. Some of W has no effect, because the values cancel "
    "it: without it the output is the same. What is left is effective attention (Sun and Marasović, 2021). A map of W "
    "shows where a head looks, a map of effective attention what it uses."
)
RULES = {
    "changes": "Of the heads whose pattern changes (by the classifier that comes with attnlab), this is the one of "
    "whose weight the values cancel most.",
    "pattern": "In no head does the pattern change. Of those in which both maps show one, this is the head of whose "
    "weight the values cancel most.",
    "any": "No head shows a pattern in both maps. Of all heads, this is the one of whose weight the values cancel "
    "most.",
}
COMPARED = (
    "Each mechanism takes the place of the model's attention, without training, on the same text. The loss that it "
    "adds is measured token by token against exact attention, with a 95 % interval. A mechanism keeps the quality if "
    "that interval holds zero."
)
MEANINGS = (
    ("Loss added", "Nats a token above exact attention's on the same tokens, with a paired 95 % interval."),
    ("Time", "Of the model's whole forward pass, relative to exact attention in the same run; below 1 is faster."),
    ("Memory", "The peak of one layer's attention, relative to exact attention; below 1 is less."),
)  # fmt: skip
VERDICTS = {"exact": "exact, by construction", "kept": "kept", "lost": "lower", "unknown": "too little text"}


def demo_page(result: Mapping[str, Any]) -> str:
    """The page for what ``attnlab demo --json`` prints; docs/reports.md lists the fields of ``result``.

    Acts that are not in the result yet say so, so that a demo that was stopped has a page, too.
    """
    sentences = demo_sentences(result)
    body = [
        element("h1", TITLE),
        element("ol", [element("li", sentence) for sentence in sentences], class_="lead acts"),
        _head_act(result.get("head"), result.get("explorer")),
        _comparison_act(result.get("comparison")),
        memory_act(result.get("memory"), waiting=WAITING),
        section("What was run", facts(_facts(result))),
        download_json(dict(result), name="demo"),
    ]
    return page(TITLE, body, subtitle="demo", scripts=("report.js", "maps.js"))


def demo_sentences(result: Mapping[str, Any]) -> list[str]:
    """What each act found, in a sentence or two."""
    found = [("head", _head_sentence), ("comparison", _comparison_sentence), ("memory", memory_sentence)]
    return [sentence(result[act]) if result.get(act) else WAITING for act, sentence in found]


# Act one


def _head_sentence(head: Row) -> str:
    changed, patterns = head["most_changed"], head["patterns"]
    before, after = (percent(changed[name], places=0) for name in ("standard", "effective"))
    (token,) = _shown([changed["token"]])
    seen = f"“{token}” gets {before} of the weight of head {head['head']} in layer {head['layer']}, on average"
    left = f"after what the values cancel, {after} is left"
    if changed["effective"] > changed["standard"]:
        left = f"of effective attention, {after}"
    remains = (
        f", and {_pattern(patterns['effective'])} remains" if patterns["standard"] != patterns["effective"] else ""
    )
    return f"What a map shows is not what a head uses. {seen}; {left}{remains}."


def _pattern(name: str) -> str:
    words = {
        "vertical": "a vertical line",
        "diagonal": "a diagonal",
        "vertical+diagonal": "a diagonal with a vertical line",
    }
    return words.get(name, f"a {name} map")


def _head_act(head: Row | None, explorer: str | None) -> Html:
    title = "1. What the heads use"
    if not head:
        return section(title, about=WAITING)
    note = (
        f"Layer {head['layer']}, head {head['head']}. Each row is a token that looks, each column one that is looked "
        f"at. Blue is below zero, orange above. {RULES[head['rule']]}"
    )
    maps = {"Attention, W": head["maps"]["standard"], "Effective attention": head["maps"]["effective"]}
    cancelled = heat_maps(
        {"all heads": head["removed_by_head"]},
        name="cancelled",
        title="Share of the weight that the values cancel",
        low=0.0,
        high=1.0,
        note=f"By layer and head, of the squared weights; {percent(head['removed_mean'], places=0)} on average, and "
        f"{percent(head['removed'], places=0)} in the head above.",
    )
    link = None
    if explorer:
        address = element("a", "every head in the explorer", href=explorer)
        link = element("p", "Look closer: ", address, ".")
    return section(title, map_pair(_shown(head["tokens"]), maps, note=note), cancelled, link, about=EFFECTIVE)


def _shown(tokens: Sequence[str]) -> list[str]:
    """Tokens without the marks of a byte-level tokenizer."""
    return [token.replace("Ġ", " ").replace("Ċ", "⏎").replace("▁", " ").strip() or "␣" for token in tokens]


# Act two


def verdict(row: Row) -> str:
    """Whether a mechanism is "exact", or "kept" or "lost" quality by its interval; "unknown" without one."""
    if row.get("exact") or row["mechanism"] == "softmax":
        return "exact"
    quality = row.get("quality") or {}
    low, high = quality.get("loss_above_low"), quality.get("loss_above_high")
    if low is None or high is None:
        return "unknown"
    return "kept" if low <= 0 else "lost"


def _measured(comparison: Row) -> list[Row]:
    return [row for row in comparison["rows"] if not row.get("refused")]


def _approximations(comparison: Row) -> list[Row]:
    """The mechanisms that are not exact attention, those that add the least loss first."""
    rows = [row for row in _measured(comparison) if verdict(row) != "exact"]
    return sorted(rows, key=lambda row: (row.get("quality") or {}).get("loss_above") or 0.0)


def _comparison_sentence(comparison: Row) -> str:
    rows = _approximations(comparison)
    if not rows:
        return "Only exact attention was measured." if comparison.get("complete") else WAITING
    if any(verdict(row) == "unknown" for row in rows):
        return "The text is too short for intervals, so it cannot tell which approximations keep the model's quality."
    kept = [row for row in rows if verdict(row) == "kept"]
    count = f"{len(rows)} approximation{'s' * (len(rows) != 1)}"
    if not kept:
        return f"Of {count} of attention none keeps the model's quality without training. {_closest_and_fastest(rows)}"
    cheapest = min(kept, key=lambda row: row["memory_ratio"])
    return (
        f"Of {count} of attention, {' and '.join(row['mechanism'] for row in kept)} "
        f"{'keep' if len(kept) > 1 else 'keeps'} the model's quality without training, as far as this text can tell. "
        f"{cheapest['mechanism']} takes {times(cheapest['time_ratio'])} the time and "
        f"{times(cheapest['memory_ratio'])} the memory of exact attention."
    )


def _closest_and_fastest(rows: Sequence[Row]) -> str:
    """What the closest approximation loses and costs, and the fastest, where these are two."""
    closest, fastest = rows[0], min(rows, key=lambda row: row["time_ratio"])
    words = f"{closest['mechanism']} comes closest: {_loss(closest)} nats a token, "
    words += f"in {times(closest['time_ratio'])} the time"
    if fastest is closest:
        return f"{words}."
    return (
        f"{words}; {fastest['mechanism']} is the fastest: {_loss(fastest)}, in {times(fastest['time_ratio'])} the time."
    )


def _loss(row: Row) -> str:
    quality = row["quality"]
    return with_interval(*(quality[f"loss_above{end}"] for end in ("", "_low", "_high")), sign=True)


def _comparison_act(comparison: Row | None) -> Html:
    title = "2. What an approximation keeps, and what it costs"
    if not comparison or not _measured(comparison):
        return section(title, about=WAITING)
    rows = [row for row in _approximations(comparison) if row.get("quality")]
    intervals = [
        (row["mechanism"], *(row["quality"][f"loss_above{end}"] for end in ("", "_low", "_high"))) for row in rows
    ]
    chart = None
    if intervals:
        chart = interval_chart(
            intervals,
            name="loss-added",
            title="Loss added to exact attention's",
            x_label="nats a token, with 95 % intervals",
            note="A line that reaches the dashed mark holds zero: this text cannot tell the mechanism from exact "
            "attention.",
        )
    return section(
        title,
        _comparison_table(comparison),
        element("div", chart, explained(MEANINGS), class_="grid2"),
        about=COMPARED,
    )


def _comparison_table(comparison: Row) -> Html:
    exact = [row for row in _measured(comparison) if verdict(row) == "exact"]
    rows = [
        {
            "mechanism": row["mechanism"],
            "verdict": VERDICTS[verdict(row)],
            "loss": _loss(row) if verdict(row) != "exact" and row.get("quality") else "0",
            "time": row["time_ratio"],
            "memory": row["memory_ratio"],
        }
        for row in [*exact, *_approximations(comparison)]
    ]
    columns = [
        Column("mechanism", "Mechanism", show=breakable),
        Column("verdict", "Quality", show=str),
        Column("loss", "Loss added", show=str, help="nats a token, with its 95 % interval"),
        Column("time", "Time", show=times, help="of the model's forward pass, relative to exact attention"),
        Column("memory", "Memory", show=times, help="peak of one layer's attention, relative to exact attention"),
    ]
    return table(
        rows, name="mechanisms", title=_compared_on(comparison), columns=columns, note=_comparison_note(comparison)
    )


def _compared_on(comparison: Row) -> str:
    text, length = comparison["text"], comparison["config"]["length"]
    return f"{comparison['model']['name']} on {text['tokens']:,} tokens of {text['name']}, in windows of {length}"


def _comparison_note(comparison: Row) -> str:
    quality = next((row["quality"] for row in _measured(comparison) if row.get("quality")), None)
    parts = []
    if quality:
        exact = {"name": quality["name"], "value": quality["exact"]}
        exact |= {end: quality.get(f"exact_{end}") for end in ("low", "high")}
        parts.append(f"{quality_title(quality['name'])} with exact attention: {quality_with_interval(exact)}.")
    others = [
        row["mechanism"] for row in _measured(comparison) if verdict(row) == "exact" and row["mechanism"] != "softmax"
    ]
    if others:
        parts.append(
            f"{' and '.join(others)} computes exact attention's output in another way, so its costs are not compared."
        )
    parts += [
        f"{row['mechanism']} could not be used: {row['refused']}." for row in comparison["rows"] if row.get("refused")
    ]
    parts += [f"Warning: {warning}." for warning in comparison.get("warnings", [])]
    return " ".join(parts)


def _facts(result: Mapping[str, Any]) -> list[tuple[str, object]]:
    models = [(f"Act {acts}", model) for acts, model in (result.get("models") or {}).items()]
    return [
        *models,
        ("Text", result.get("text")),
        ("Seconds", number(result.get("seconds"))),
        *provenance_facts(result),
    ]
