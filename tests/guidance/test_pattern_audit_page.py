"""The audit as ``attnlab compare`` shows it."""

from __future__ import annotations

from typing import Any

from attnlab.pages.pattern_audit import audit_lines, audit_section, closest_heads


def row(layer: int, head: int, pattern: str, closeness: float | None, kind: str = "encoder") -> dict[str, Any]:
    place = {"kind": kind, "layer": layer, "head": head, "pattern": pattern}
    return {**place, "closeness": closeness, "mass": closeness, "rows": 5 if closeness is not None else 0}


ROWS = [
    row(0, 0, "next", 0.1), row(0, 1, "next", 0.2), row(1, 0, "next", 0.9), row(1, 1, "next", 0.3),
    row(0, 0, "first", 0.6), row(0, 1, "first", 0.4), row(1, 0, "first", 0.5), row(1, 1, "first", 0.55),
    row(0, 0, "period", None), row(0, 1, "period", None), row(1, 0, "period", None), row(1, 1, "period", None),
]  # fmt: skip


def test_the_closest_head_of_each_pattern() -> None:
    assert [(r["pattern"], r["layer"], r["head"]) for r in closest_heads(ROWS)] == [("next", 1, 0), ("first", 0, 0)]
    assert audit_lines(ROWS) == [
        "closest heads to the patterns of attention guidance: next 0.90 (layer 1, head 0), first 0.60 (layer 0, head 0)"
    ]
    assert audit_lines([]) == []


def test_a_pattern_that_few_tokens_can_follow_says_so() -> None:
    few = row(0, 1, "first", 0.7) | {"rows": 5, "of": 90, "few": True}
    assert audit_lines([few])[0].endswith("first 0.70 (layer 0, head 1; only 5 of 90 tokens can)")


def test_the_section() -> None:
    page = str(audit_section(ROWS))
    # Closer than a half: layer 1 head 0 to next, layer 0 head 0 and layer 1 head 1 to first.
    assert "3 heads have a closeness above 0.5 to a pattern" in page
    assert "period" in page
    assert audit_section([]) is None
    assert audit_section(None) is None
    assert "1 head has a closeness above 0.5" in str(audit_section([row(0, 0, "next", 0.7)]))
    assert "No head has a closeness" in str(audit_section([row(0, 0, "next", 0.1)]))
    both = str(audit_section([*ROWS[:4], row(0, 0, "prev", 0.7, kind="decoder")]))
    assert "prev, decoder" in both
