"""Do policies that look at values, or fit them, beat the others? From what `attnlab judge` wrote, by pairs of cases.

    python benchmarks/judge_pairs.py benchmarks/results/judge.json --join longer.json compaction.json

Of each kind the policy with the best mean over the even cases is taken, and both are compared on the odd ones: so the
choice does not flatter itself. A difference above 0 speaks against the policies without values, on every task; its 95 %
interval is a paired bootstrap over cases. The tables ``pairs``, ``pairs_at`` (those of ``--budget``) and
``policies_at`` (what each policy scores at that budget and the first length) are added to the file.

``--join`` adds the rows of other runs on the same model, text, seed and number of cases: lengths or policies that were
judged later. Cases are drawn from those alone, so rows of several runs are still paired; where two runs share a task
and length, the full cache must have scored the same in both. ``joined`` names their commands and commits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from storing import write_results

from attnlab.pages.judge import judge_table
from attnlab.reading.correlation import bootstrap_interval

# Policies whose choice of keys depends on values, and those that fit keys and values.
KINDS = {
    "by values": ("leave-one-out", "vatp", "criticalkv", "expected-attention", "value-aware", "value-norm"),
    "fitted": ("compact",),
}
WITHOUT = "without"
LOSS = "loss"
Row = dict[str, Any]
# What two runs must have in common for their cases to be the same.
DRAWN_FROM = ("text", "lambada", "cases", "seed")
# Those of every case, by policy.
Scores = dict[str, list[float]]


def join(result: Row, other: Row) -> None:
    """Add the rows of ``other`` to ``result``; its full cache's only where ``result`` has none."""
    differs = [name for name in DRAWN_FROM if result["config"].get(name) != other["config"].get(name)]
    if differs or result["model"] != other["model"]:
        raise ValueError(f"runs of other cases cannot be joined: {', '.join(differs) or 'the model'} differs")
    known = {_place(row): row for row in result["rows"]}
    for row in other["rows"]:
        twin = known.get(_place(row))
        if twin is None:
            result["rows"].append(row)
        elif row["budget"] < 1:
            raise ValueError(f"{' '.join(map(str, _place(row)))} is in both runs")
        elif any(row[column]["scores"] != twin[column]["scores"] for column in _columns(twin)):
            raise ValueError(f"the full cache scores differently in {row['task']} at {row['length']}")
    for name in ("policies", "budgets", "tasks", "lengths"):
        result["config"][name] = list(dict.fromkeys([*result["config"][name], *other["config"][name]]))
    result.setdefault("joined", []).append({name: other[name] for name in ("command", "commit")})


def _place(row: Row) -> tuple[str, int, str, float]:
    return row["task"], row["length"], row["policy"], row["budget"]


def pairs(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each task, length, column, budget and kind that answered beside policies without values."""
    cells: dict[tuple[str, int, str, float], dict[str, list[float]]] = {}
    for row in rows:
        for column in _columns(row):
            cell = row["task"], row["length"], column, row["budget"]
            cells.setdefault(cell, {})[row["policy"]] = row[column]["scores"]
    for (task, length, column, budget), scores in cells.items():
        by_kind: dict[str, Scores] = {}
        for name, each in scores.items():
            kind = next((kind for kind, names in KINDS.items() if name.split(":")[0] in names), WITHOUT)
            by_kind.setdefault(kind, {})[name] = each
        if budget < 1 and WITHOUT in by_kind:
            named = {"task": task, "length": length, "question": column, "budget": budget}
            sign = -1 if task == LOSS else 1
            for kind in (kind for kind in KINDS if kind in by_kind):
                compared = _compared(by_kind[kind], by_kind[WITHOUT], sign=sign)
                decided = kind if compared["low"] > 0 else WITHOUT if compared["high"] < 0 else "undecided"
                yield named | {"kind": kind} | compared | {"better": decided}


def _compared(own: Scores, others: Scores, *, sign: int) -> Row:
    """The best of each kind by the even cases, and their difference on the odd ones."""
    best, other = (max(kind, key=lambda name: sign * sum(kind[name][::2])) for kind in (own, others))
    differences = [sign * (a - b) for a, b in zip(own[best][1::2], others[other][1::2], strict=True)]
    value, low, high = bootstrap_interval(differences)
    return {"best": best, WITHOUT: other, "difference": value, "low": low, "high": high, "cases": len(differences)}


def policies_at(rows: Sequence[Row], budget: float) -> Iterator[Row]:
    """What the full cache and each policy score at the first length: needles, and the loss over the full cache's."""
    here = [row for row in rows if row["length"] == rows[0]["length"] and row["budget"] in (1, budget)]
    for policy in dict.fromkeys(row["policy"] for row in here):
        own = [row for row in here if row["policy"] == policy]
        line: Row = {"policy": policy}
        for row in own:
            if row["task"] == LOSS:
                loss = row["unseen"]["over_full"]
                line |= {"loss over full": loss["value"], "loss low": loss["low"], "loss high": loss["high"]}
            else:
                line |= {f"{row['task']}, {column}": row[column]["score"] for column in _columns(row)}
        yield line | {"bytes": own[0]["bytes_ratio"]}


def _columns(row: Row) -> list[str]:
    """The columns in which a policy answered, and the full cache can."""
    columns = {name: row.get(name) or {} for name in ("unseen", "seen")}
    return [name for name, scores in columns.items() if "scores" in scores and not scores["full_cannot"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what attnlab judge -o results.json wrote")
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--join", type=Path, nargs="*", default=[], metavar="FILE", help="results of further runs")
    args = parser.parse_args()
    result = json.loads(args.results.read_text(encoding="utf-8"))
    for path in args.join:
        join(result, json.loads(path.read_text(encoding="utf-8")))
    compared = list(pairs(result["rows"]))
    result["tables"] = {
        "scores": judge_table(result),
        "pairs": compared,
        "pairs_at": [row for row in compared if row["budget"] == args.budget],
        "policies_at": list(policies_at(result["rows"], args.budget)),
    }
    for row in (*compared, *result["tables"]["policies_at"]):
        print(row)
    write_results(args.results, result)


if __name__ == "__main__":
    main()
