"""What has changed between two audits: beyond the interval of each difference, and beyond what another text changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnlab.errors import read_json_object
from attnlab.evaluation.audit_statistics import STATISTICS, findings_of
from attnlab.evaluation.intervals import student_quantile

__all__ = ["FORMAT", "changes_since", "check_baseline", "read_baseline", "refuse_other_subject"]

FORMAT = 1
# The probability that an unchanged model shows any change at all on texts of one kind (Bonferroni).
ERROR = 0.05
# Where both audits read the same text, this part of a floor is left, which allows for other hardware and number types.
SAME_TEXT = 0.1
REMEDY = "make the baseline anew with `attnlab audit MODEL --text FILE --out FOLDER`"
NUMBERS = ("mean", "odds_mean", "odds_sd")
PLACE = ("kind", "layer", "head")


def read_baseline(path: Path) -> dict[str, Any]:
    """The audit in a file."""
    baseline = read_json_object(path, remedy=REMEDY)
    check_baseline(baseline, name=str(path))
    return baseline


def check_baseline(baseline: Mapping[str, Any], *, name: str = "the baseline") -> None:
    """Raise if this is not what an audit of this version gave."""
    if not isinstance(baseline, Mapping) or baseline.get("name") != "audit":
        raise ValueError(f"{name} is no audit; {REMEDY}")
    if baseline.get("format") != FORMAT:
        raise ValueError(f"{name} is in another format than the {FORMAT} of this version; {REMEDY}")
    try:
        complete = isinstance(baseline["shape"], Mapping) and baseline["text"]["windows"] > 1
        complete &= isinstance(baseline["text"]["sha256"], str) and bool(baseline["heads"])
        for head in baseline["heads"]:
            place = [head[key] for key in PLACE]
            complete &= isinstance(place[0], str) and all(type(n) is int for n in place[1:])
            complete &= all(_is_summary(head["statistics"][key]) for key in STATISTICS)
    except (KeyError, TypeError, IndexError):
        complete = False
    if not complete:
        raise ValueError(f"{name} is damaged: it lacks what an audit has; {REMEDY}")


def _is_summary(one: Any) -> bool:
    if one is None:
        return True
    numbers = [one[name] for name in NUMBERS]
    return all(type(n) in (int, float) and math.isfinite(n) for n in numbers) and one["odds_sd"] >= 0


def refuse_other_subject(now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Raise if the baseline is that of another kind of model, another tokenizer or another length of windows."""
    if now == before:
        return
    if now["tokenizer"] != before.get("tokenizer"):
        raise ValueError(f"the baseline was made with another tokenizer, so its texts are other tokens; {REMEDY}")
    if now["length"] != before.get("length"):
        raise ValueError(
            f"the baseline read windows of {before.get('length')} tokens, and this audit reads {now['length']}; use "
            "the same length for both"
        )
    raise ValueError(f"the baseline is of {_described(before)}; this model is {_described(now)}; {REMEDY}")


def _described(shape: Mapping[str, Any]) -> str:
    layers = shape.get("layers")
    try:
        return f"{shape['class']} ({shape['task']}) with {len(layers)} attention layers of {layers[0][2]} heads"  # type: ignore[arg-type, index]
    except (KeyError, TypeError, IndexError):
        return "another shape"


def changes_since(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """``baseline``: what it was, and how it is compared; ``changes``: one row for each head and statistic."""
    before = {tuple(head[name] for name in PLACE): head for head in baseline["heads"]}
    pairs = [
        (head, before[place], name)
        for head in result["heads"]
        for place in (tuple(head[key] for key in PLACE),)
        if place in before
        for name in STATISTICS
        if head["statistics"][name] is not None and before[place]["statistics"][name] is not None
    ]
    same = result["text"]["sha256"] == baseline["text"]["sha256"]
    windows = result["text"]["windows"], baseline["text"]["windows"]
    tail = ERROR / (2 * max(1, len(pairs)))
    rows = []
    for head, old, name in pairs:
        floor = STATISTICS[name].floor * (SAME_TEXT if same else 1)
        change, half = _difference(head["statistics"][name], old["statistics"][name], windows, tail)
        if abs(change) > max(floor, half):
            rows.append(_row(head, old, name, change, half) | {"floor": floor})
    about = {key: baseline.get(key) for key in ("model", "text", "commit")}
    return {"baseline": about | {"same_text": same, "comparisons": len(pairs), "error": ERROR}, "changes": rows}


def _difference(
    now: Mapping[str, float], before: Mapping[str, float], windows: tuple[int, int], tail: float
) -> tuple[float, float]:
    """The difference of mean log-odds, and half of Welch's interval around it."""
    parts = [one["odds_sd"] ** 2 / n for one, n in zip((now, before), windows, strict=True)]
    value, total = now["odds_mean"] - before["odds_mean"], sum(parts)
    if total == 0:
        return value, 0.0
    freedom = total**2 / sum(part**2 / (n - 1) for part, n in zip(parts, windows, strict=True))
    return value, student_quantile(max(1, int(freedom)), tail=tail) * math.sqrt(total)


def _row(head: Mapping[str, Any], old: Mapping[str, Any], name: str, change: float, half: float) -> dict[str, Any]:
    """One change, and the findings of this statistic that come or go with it."""
    means = [one["statistics"][name]["mean"] for one in (old, head)]
    was, now = (findings_of({name: mean}) for mean in means)
    return {key: head[key] for key in (*PLACE, "key_value_head")} | {
        "statistic": name,
        "before": means[0],
        "now": means[1],
        "odds_difference": change,
        "low": change - half,
        "high": change + half,
        "new_findings": [f for f in now if f not in was],
        "gone_findings": [f for f in was if f not in now],
    }
