"""benchmarks/conversion_texts.py: a dry run fills its table, and goes on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_dry_run_measures_every_arm_on_every_text(tmp_path: Path) -> None:
    def run(*words: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        command = [sys.executable, "benchmarks/conversion_texts.py", str(tmp_path / "runs"), "--tiny", *words]
        done = subprocess.run(
            [*command, "--out", str(tmp_path / "out.json")], cwd=ROOT, capture_output=True, text=True
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        tables = json.loads((tmp_path / "out.json").read_text())["tables"]
        assert {row["learned_from"]: row["book"] for row in tables["left"]}["none"].startswith("1.00")
        return tables["texts"], tables["means"]

    rows, _ = run("--arms", "one")
    assert [row["text"] for row in rows] == ["none", "one"]
    assert rows[0]["tokens"] == 0 < rows[1]["tokens"]
    # What has learned nothing stands before its first step, from where every arm begins.
    assert all(row["kl"] > 0 and row["windows"] == 2 for row in rows)
    again, means = run("--arms", "one", "one+two", "--seeds", "1")
    assert [(row["text"], row["seed"]) for row in again] == [
        ("none", 0), ("one", 0), ("none", 1), ("one", 1), ("one+two", 1),
    ]  # fmt: skip
    assert again[:2] == rows
    assert [(row["text"], row["seeds"]) for row in means] == [("none", 2), ("one", 2), ("one+two", 1)]
    assert means[0]["kl_left"] == 1
    assert means[1]["kl_left"] == pytest.approx((rows[1]["kl"] / rows[0]["kl"] + again[3]["kl"] / again[2]["kl"]) / 2)
