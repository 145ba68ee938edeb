"""A run that is killed at a write, or whose files are damaged, ends like an undisturbed one or is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.jobs import report_of


# Every so many writes, and every so many damages: a few seconds, or all of them.
@pytest.fixture(scope="module", params=[97, pytest.param(1, marks=pytest.mark.slow)])
def faults(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"share": request.param, **report_of("faults", "runs", tmp_path_factory.mktemp("faults"), request.param)}


def test_a_run_killed_at_any_write_and_resumed_ends_bit_for_bit_like_the_undisturbed_one(
    faults: dict[str, Any],
) -> None:
    report = faults["kills"]
    assert report["wrong"] == {}
    assert report["tried"] == len(range(0, len(report["writes"]), faults["share"]))
    # The kinds of files that a run writes are all among the writes.
    for name in ("run.json", "tokenizer.json", "tokens.npy", "meta.json", "metrics.jsonl", "state.json", "result.json"):
        assert any(write.endswith(f" {name}") for write in report["writes"]), name


@pytest.mark.parametrize("share", [301, pytest.param(7, marks=pytest.mark.slow)])
def test_a_conversion_killed_at_any_write_and_gone_on_with_ends_bit_for_bit_like_the_undisturbed_one(
    tmp_path: Path, share: int
) -> None:
    report = report_of("faults", "conversions", tmp_path, share)
    assert report["wrong"] == {}
    assert report["tried"] == len(range(0, len(report["writes"]), share))
    for name in ("run.json", "tokens.npy", "metrics.jsonl", "state.json", "result.json", "model"):
        assert any(write.endswith(f" {name}") for write in report["writes"]), name


def test_a_damaged_run_ends_bit_for_bit_or_is_refused_in_one_line(faults: dict[str, Any]) -> None:
    report = faults["damage"]
    assert report["wrong"] == {}
    assert report["ends"]["the same"] > report["ends"]["refused"]
