"""The Python blocks of docs/value-aware.md run, in order, in one namespace, and what it says of its tables is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "value-aware.md"


def test_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)


def test_leave_one_out_is_the_best_policy_at_every_budget_and_eq_3_the_worst_on_the_models_own_text() -> None:
    rows = json.loads((ROOT / "results" / "kv_policies.json").read_text(encoding="utf-8"))["tables"]["perplexity"]
    for text, budget in {(row["text"], row["budget"]) for row in rows if row["budget"]}:
        order = sorted((row["loss"], row["policy"]) for row in rows if (row["text"], row["budget"]) == (text, budget))
        assert order[0][1] == "leave-one-out"
        assert text != "sampled" or order[-1][1] == "value-aware"


def test_the_solver_meets_its_bounds() -> None:
    rows = json.loads((ROOT / "results" / "value_aware_solver.json").read_text(encoding="utf-8"))["tables"]["solver"]
    (everything,) = (row for row in rows if row["cases"] == "all")
    assert everything["n"] >= 1000
    assert everything["median"] < 1e-9
    assert everything["p95"] <= 0.05
