"""A run that is killed at a write, or whose files are damaged, ends like an undisturbed one or is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.jobs import report_of

# Every so many writes, and every so many damages: a few seconds, or all of them.
SOME = pytest.mark.parametrize("share", [61, pytest.param(1, marks=pytest.mark.slow)])


@SOME
def test_a_run_killed_at_any_write_and_resumed_ends_bit_for_bit_like_the_undisturbed_one(
    tmp_path: Path, share: int
) -> None:
    report = report_of("faults", "kills", tmp_path, share)
    assert report["wrong"] == {}
    assert report["tried"] == len(range(0, len(report["writes"]), share))
    # The kinds of files that a run writes are all among the writes.
    for name in ("run.json", "tokenizer.json", "tokens.npy", "meta.json", "metrics.jsonl", "state.json", "result.json"):
        assert any(write.endswith(f" {name}") for write in report["writes"]), name


@SOME
def test_a_damaged_run_ends_bit_for_bit_or_is_refused_in_one_line(tmp_path: Path, share: int) -> None:
    report = report_of("faults", "damage", tmp_path, share)
    assert report["wrong"] == {}
    assert report["ends"]["the same"] > report["ends"]["refused"]
