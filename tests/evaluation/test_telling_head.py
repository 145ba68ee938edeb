"""The head that the demo shows: the rule that chooses it, and its numbers."""

from __future__ import annotations

import pytest
import torch

import attnlab as al
from attnlab.commands.demo import PASSAGE
from attnlab.evaluation.telling_head import Head, choose_head, telling_head


def test_a_head_whose_pattern_changes_comes_before_one_that_loses_more() -> None:
    heads = [
        Head(0, 0, 0.99, "vertical", "vertical"),
        Head(0, 1, 0.98, "vertical", "heterogeneous"),
        Head(1, 0, 0.30, "vertical+diagonal", "diagonal"),
        Head(1, 1, 0.40, "block", "diagonal"),
    ]
    assert choose_head(heads) == (heads[3], "changes")
    assert choose_head(heads[:2]) == (heads[0], "pattern")
    assert choose_head(heads[1:2]) == (heads[1], "any")
    with pytest.raises(ValueError, match="no head"):
        choose_head([])


def test_the_numbers_are_those_of_the_chosen_head() -> None:
    loaded = al.shipped_model()
    found = telling_head(loaded, PASSAGE)
    inputs = loaded.tokenizer(PASSAGE, return_tensors="pt")
    with torch.no_grad(), al.record(loaded.model) as trace:
        loaded.model(**inputs)
    layer, head = trace[found["layer"]], found["head"]
    effective = al.effective_attention(layer)
    removed = effective.removed[0, head].item()
    assert found["removed"] == pytest.approx(removed)
    assert found["removed_by_head"][found["layer"]][head] == pytest.approx(removed)
    maps = {name: torch.tensor(rows) for name, rows in found["maps"].items()}
    torch.testing.assert_close(maps["standard"], layer.weights()[0, head], atol=1e-4, rtol=0)
    torch.testing.assert_close(maps["effective"], effective.weights[0, head], atol=1e-4, rtol=0)
    changed = found["most_changed"]
    assert changed["token"] == found["tokens"][changed["place"]]
    assert changed["standard"] == pytest.approx(maps["standard"][:, changed["place"]].mean().item(), abs=1e-4)
    # What the page tells about the shipped model: the special token's line goes, the diagonal stays.
    assert found["rule"] == "changes"
    assert changed["effective"] < changed["standard"] / 2


def test_a_causal_model_has_a_head_to_show_too() -> None:
    loaded = al.shipped_model("lm")
    found = telling_head(loaded, PASSAGE * 2)
    n = len(found["tokens"])
    assert torch.tensor(found["maps"]["standard"]).shape == (n, n)
    assert torch.tensor(found["maps"]["effective"]).triu(1).abs().max() == 0
