"""The third act of the demo's page: a causal model beside its twin with a memory of constant size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnlab.pages.charts import Axes, Series, line_chart
from attnlab.pages.fragments import section
from attnlab.pages.html import Html, element
from attnlab.pages.numbers import MISSING, number, percent, times, with_interval
from attnlab.pages.tables import Column, table

__all__ = ["megabytes", "memory_act", "memory_sentence"]

Row = Mapping[str, Any]
NAMES = {"full": "all keys", "bounded": "bounded memory"}
TITLE = "3. A memory that does not grow"
LEARNED = {
    "trained": "Both models have the same weights. Only the numbers that choose which keys stay were learned.",
    "started": "Both models have the same weights, and nothing was trained: the numbers that choose which keys stay "
    "were set from the model's own attention over another part of the text. attnlab convert trains them.",
}
# The words of a passage that are shown, the last ones.
SHOWN = 40
# A difference of losses below this is that of rounding: at a length that fits into the memory both models are the same.
ROUNDING = 1e-6


def memory_sentence(memory: Row) -> str:
    """What the bounded memory loses and saves at the longest length."""
    if memory.get("why_not"):
        return f"There is no third act: {memory['why_not']}."
    if not memory["rows"]:
        return "No length is measured yet."
    last = memory["rows"][-1]
    faster = last["bounded_tokens_per_second"] / last["full_tokens_per_second"]
    return (
        f"With {memory['keys']['size']:,} keys a head instead of all, the cache of {last['length']:,} tokens takes "
        f"{percent(last['bounded_bytes'] / last['full_bytes'])} of the bytes, decoding runs at {times(faster)} the "
        f"speed, and the loss changes by {_loss_above(last)} nats a token."
    )


def memory_act(memory: Row | None, *, waiting: str) -> Html:
    """The section: what the twin keeps, charts over the length, the numbers, and a passage that both continue."""
    if not memory:
        return section(TITLE, about=waiting)
    if memory.get("why_not"):
        return section(TITLE, about=f"There is no third act for this model: {memory['why_not']}.")
    rows = memory["rows"]
    if not rows:
        return section(TITLE, about=waiting)
    return section(
        TITLE,
        element("p", _kept(memory["keys"]), " ", LEARNED[memory["learned"]], class_="about"),
        element("div", _charts(rows, memory["config"]["batch"]), _longest(rows[-1]), class_="grid2"),
        _table(memory),
        _continued(memory.get("continuation"), memory["config"]),
    )


def megabytes(size: float) -> str:
    """Bytes in megabytes.

    >>> megabytes(50_331_648), megabytes(402_432)
    ('50.3 MB', '0.402 MB')
    """
    return f"{number(size / 1e6)} MB"


def _kept(keys: Row) -> str:
    about = (
        "A causal model keeps the keys and values of every token that it has read, so its cache grows with the text."
    )
    if None in keys.values():
        return f"{about} Its twin keeps a constant number of them."
    return (
        f"{about} Its twin keeps {keys['size']:,} in each head: the first {keys['sinks']}, the last {keys['window']}, "
        f"and of those between the {keys['slots']} that score highest."
    )


def _loss_above(row: Row) -> str:
    ends = [row[f"loss_above{end}"] or 0.0 for end in ("", "_low", "_high")]
    if max(map(abs, ends)) < ROUNDING:
        return "0"
    return with_interval(*(row[f"loss_above{end}"] for end in ("", "_low", "_high")), sign=True)


def _series(rows: Sequence[Row], key: str, *, scale: float = 1.0) -> list[Series]:
    lengths = [row["length"] for row in rows]
    return [
        Series(NAMES[model], lengths, [row[f"{model}_{key}"] * scale for row in rows], colour=i, marked=True)
        for i, model in enumerate(NAMES)
    ]


def _losses(rows: Sequence[Row]) -> list[Series]:
    """Both models' losses; the interval is that of the difference, around the bounded memory's."""
    full, bounded = _series(rows, "loss")
    ends = {
        end: [
            row["bounded_loss"] if row[f"loss_above_{end}"] is None else row["full_loss"] + row[f"loss_above_{end}"]
            for row in rows
        ]
        for end in ("low", "high")
    }
    return [full, replace(bounded, low=ends["low"], high=ends["high"], whiskers=True)]


def _longest(row: Row) -> Html:
    """The longest length in numbers."""
    speeds = [row[f"{model}_tokens_per_second"] for model in NAMES]
    pairs = [
        ("Loss", f"{number(row['full_loss'])} → {number(row['bounded_loss'])} nats a token ({_loss_above(row)})"),
        ("Cache of one sequence", f"{megabytes(row['full_bytes'])} → {megabytes(row['bounded_bytes'])}"),
        ("Decoding", f"{' → '.join(map(number, speeds))} tokens a second, {times(speeds[1] / speeds[0])}"),
    ]
    described = [element("div", element("dt", name), element("dd", shown)) for name, shown in pairs]
    title = element("h3", f"At {row['length']:,} tokens: all keys → bounded memory")
    return element("div", title, element("dl", described, class_="explained"), class_="card")


def _charts(rows: Sequence[Row], batch: int) -> list[Html]:
    shared = {"x_label": "tokens read"}
    return [
        line_chart(
            _losses(rows), name="loss", title="Loss", y_label="nats a token", axes=Axes(log_x=True), **shared,
            note="The same text in windows of each length. Upright lines: 95 % of the difference on the same tokens.",
        ),
        line_chart(
            _series(rows, "bytes", scale=1e-6), name="cache", title="Cache of one sequence", y_label="megabytes",
            axes=Axes(log_x=True, log_y=True), **shared, note="Both axes are logarithmic.",
        ),
        line_chart(
            _series(rows, "tokens_per_second"), name="speed", title="Decoding speed", y_label="tokens a second",
            axes=Axes(log_x=True, log_y=True), **shared,
            note=f"{batch} sequences at once; the median of several runs, in which the two models take turns. All keys "
            "are in buffers made once (transformers' StaticCache), which is faster here than its default cache.",
        ),
    ]  # fmt: skip


def _table(memory: Row) -> Html:
    rows = [
        {
            "length": row["length"],
            "full_loss": row["full_loss"],
            "above": _loss_above(row),
            "full_bytes": row["full_bytes"],
            "bounded_bytes": row["bounded_bytes"],
            "full_speed": row["full_tokens_per_second"],
            "bounded_speed": row["bounded_tokens_per_second"],
        }
        for row in memory["rows"]
    ]
    columns = [
        Column("length", "Tokens"),
        Column("full_loss", "Loss, all keys", help="nats a token"),
        Column("above", "Bounded memory's above it", show=str, help="on the same tokens, with its 95 % interval"),
        Column("full_bytes", "Cache, all keys", show=megabytes),
        Column("bounded_bytes", "Cache, bounded", show=megabytes),
        Column("full_speed", "Tokens/s, all keys"),
        Column("bounded_speed", "Tokens/s, bounded"),
    ]
    notes = [f"{memory['tokens']:,} tokens of {memory.get('text', 'the text')} at every length."]
    notes += [f"{note[0].upper()}{note[1:]}." for note in memory.get("notes", [])]
    title = f"{memory.get('model', 'The model')} with all keys, and with {memory['mechanism']}"
    return table(rows, name="lengths", title=title, columns=columns, note=" ".join(notes))


def _continued(continuation: Row | None, config: Row) -> list[Html] | None:
    if not continuation:
        return None
    words = str(continuation["passage"]).split()
    end = ("… " if len(words) > SHOWN else "") + " ".join(words[-SHOWN:])
    same = _same_words(continuation["full"], continuation["bounded"])
    chosen = f"sampled at temperature {config['temperature']:g}, seed {config['seed']}"
    if not config["temperature"]:
        chosen = "the most probable token each time"
    cards = [
        element(
            "div",
            element("h3", NAMES[model]),
            element("p", continuation[model].strip() or MISSING, class_="said"),
            class_="card",
        )
        for model in NAMES
    ]
    alike = f" Their first {same} words are the same." if same > 1 else ""
    about = f" of {continuation['passage_tokens']:,} tokens ({chosen}), which ends: “{end}”{alike}"
    return [
        element("p", element("strong", "Both continue one passage"), about),
        element("div", cards, class_="grid2"),
    ]


def _same_words(first: str, second: str) -> int:
    """How many words two texts share at their beginnings."""
    pairs = list(zip(first.split(), second.split(), strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
