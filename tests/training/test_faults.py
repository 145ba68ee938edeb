"""A run that is killed at a write, or whose files are damaged, ends like an undisturbed one or is refused in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def faults(kind: str, folder: Path, share: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.faults", kind, str(folder), str(share)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Every so many writes, and every so many damages: a few seconds, or all of them.
SOME = pytest.mark.parametrize("share", [61, pytest.param(1, marks=pytest.mark.slow)])


@SOME
def test_a_run_killed_at_any_write_and_resumed_ends_bit_for_bit_like_the_undisturbed_one(
    tmp_path: Path, share: int
) -> None:
    report = faults("kills", tmp_path, share)
    assert report["wrong"] == {}
    assert report["tried"] == len(range(0, len(report["writes"]), share))
    # The kinds of files that a run writes are all among the writes.
    for name in ("run.json", "tokenizer.json", "tokens.npy", "meta.json", "metrics.jsonl", "state.json", "result.json"):
        assert any(write.endswith(f" {name}") for write in report["writes"]), name


@pytest.mark.parametrize("share", [151, pytest.param(7, marks=pytest.mark.slow)])
def test_a_conversion_killed_at_any_write_and_gone_on_with_ends_bit_for_bit_like_the_undisturbed_one(
    tmp_path: Path, share: int
) -> None:
    report = faults("conversion-kills", tmp_path, share)
    assert report["wrong"] == {}
    assert report["tried"] == len(range(0, len(report["writes"]), share))
    for name in ("run.json", "tokens.npy", "metrics.jsonl", "state.json", "result.json", "model"):
        assert any(write.endswith(f" {name}") for write in report["writes"]), name


@SOME
def test_a_damaged_run_ends_bit_for_bit_or_is_refused_in_one_line(tmp_path: Path, share: int) -> None:
    report = faults("damage", tmp_path, share)
    assert report["wrong"] == {}
    assert report["ends"]["the same"] > report["ends"]["refused"]
