"""Do policies that look at values beat those that do not? From what `attnlab judge` wrote, by pairs of cases.

    python benchmarks/judge_pairs.py benchmarks/results/judge.json

Of each kind the policy with the best mean over the even cases is taken, and both are compared on the odd ones: so the
choice does not flatter itself. A difference above 0 speaks for values, on every task; its 95 % interval is a paired
bootstrap over cases. The tables ``pairs``, ``pairs_at`` (those of ``--budget``) and ``policies_at`` (what each policy
scores at that budget and the first length) are added to the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from storing import write_results

from attnlab.reading.correlation import bootstrap_interval

# Policies whose choice depends on values, or whose values are fitted.
BY_VALUES = ("leave-one-out", "vatp", "criticalkv", "expected-attention", "value-aware", "value-norm", "compact")
LOSS = "loss"
Row = dict[str, Any]
# Those of every case, by policy.
Scores = dict[str, list[float]]


def pairs(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each task, length, column and budget where both kinds answered."""
    cells: dict[tuple[str, int, str, float], dict[str, list[float]]] = {}
    for row in rows:
        for column in _columns(row):
            cell = row["task"], row["length"], column, row["budget"]
            cells.setdefault(cell, {})[row["policy"]] = row[column]["scores"]
    for (task, length, column, budget), scores in cells.items():
        aware = {name: each for name, each in scores.items() if name.split(":")[0] in BY_VALUES}
        others = {name: each for name, each in scores.items() if name not in aware}
        if budget < 1 and aware and others:
            named = {"task": task, "length": length, "question": column, "budget": budget}
            yield named | _compared(aware, others, sign=-1 if task == LOSS else 1)


def _compared(aware: Scores, others: Scores, *, sign: int) -> Row:
    """The best of each kind by the even cases, and their difference on the odd ones."""
    best, other = (max(kind, key=lambda name: sign * sum(kind[name][::2])) for kind in (aware, others))
    differences = [sign * (a - b) for a, b in zip(aware[best][1::2], others[other][1::2], strict=True)]
    value, low, high = bootstrap_interval(differences)
    better = "values" if low > 0 else "without" if high < 0 else "undecided"
    names = {"by_values": best, "without": other}
    return names | {"difference": value, "low": low, "high": high, "cases": len(differences), "better": better}


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
    args = parser.parse_args()
    result = json.loads(args.results.read_text(encoding="utf-8"))
    compared = list(pairs(result["rows"]))
    result["tables"] |= {
        "pairs": compared,
        "pairs_at": [row for row in compared if row["budget"] == args.budget],
        "policies_at": list(policies_at(result["rows"], args.budget)),
    }
    for row in (*compared, *result["tables"]["policies_at"]):
        print(row)
    write_results(args.results, result)


if __name__ == "__main__":
    main()
