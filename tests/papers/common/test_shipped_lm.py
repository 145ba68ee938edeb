"""What is written of the shipped language model's training."""

from __future__ import annotations

import json

from papers.common.folders import RESULTS
from papers.common.shipped_lm import ShippedLM


def test_both_are_evaluated_at_lengths_that_double() -> None:
    assert ShippedLM().lengths == [512, 1024, 2048, 4096, 8192]
    assert ShippedLM(length=64, longest=128).lengths == [64, 128]


def test_the_curve_has_every_evaluation_of_both_trainings() -> None:
    result = json.loads((RESULTS / "shipped_lm.json").read_text(encoding="utf-8"))
    config, curve = result["config"], result["tables"]["curve"]
    for name, steps in (("short", config["steps"]), ("long", config["long_steps"])):
        found = [row["step"] for row in curve if row["rows"] == name]
        assert (found[0], found[-1]) == (0, steps)
        assert found == sorted(found)
    assert curve[-1]["valid_loss"] < curve[0]["valid_loss"]
