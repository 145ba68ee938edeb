"""Multi-query associative recall: what the batches hold, and which attention answers beyond its window."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from attnlab.data.recall import RecallTask
from attnlab.models import Transformer, TransformerConfig

TASK = RecallTask(pairs=8, length=64, apart=32, keys=16, values=16, rows=16)


def test_every_key_is_asked_for_once_beyond_the_distance() -> None:
    batch = TASK.batch(3)
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        value_of = dict(ids[:16].view(8, 2).tolist())
        asked = (labels != -100).nonzero().flatten()
        assert asked.min() >= 16 + TASK.apart
        assert sorted(ids[asked].tolist()) == sorted(value_of)
        assert [value_of[int(key)] for key in ids[asked]] == labels[asked].tolist()
        assert int((ids != 0).sum()) == 24
    assert torch.equal(TASK.batch(3)["input_ids"], batch["input_ids"])
    assert not torch.equal(TASK.batch(4)["input_ids"], batch["input_ids"])


def test_an_easier_task_asks_at_every_place_and_draws_fewer_keys() -> None:
    task = RecallTask(pairs=3, length=20, apart=4, keys=16, values=16, rows=5, drawn=4, dense=True)
    batch = task.batch(0)
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        value_of = dict(ids[:6].view(3, 2).tolist())
        assert max(value_of) <= 4
        assert (labels[:10] == -100).all()
        assert [value_of[int(key)] for key in ids[10:]] == labels[10:].tolist()


@pytest.mark.parametrize(
    ("settings", "why"), [({"pairs": 200}, "at most the 128 keys"), ({"length": 200}, "need a length of 256")]
)
def test_tasks_that_do_not_fit(settings: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RecallTask(**settings)


def answered(spec: str, steps: int) -> float:
    """The share of questions that a model of two layers answers after so many updates."""
    torch.manual_seed(0)
    model = Transformer(
        TransformerConfig(
            kind="decoder", vocab=TASK.vocab, width=64, heads=2, layers=2, hidden=64, positions="rotary",
            causal_attention=spec, bias=False, tied=False, init="xavier", embed_scale=True,
        )
    )  # fmt: skip
    model(TASK.batch(0)["input_ids"][:1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    right = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(1, (step + 1) / 20)
        batch = TASK.batch(step)
        asked = batch["labels"] != -100
        logits = model(batch["input_ids"]).logits[asked]
        optimizer.zero_grad()
        cross_entropy(logits, batch["labels"][asked]).backward()
        optimizer.step()
        right.append(float((logits.argmax(-1) == batch["labels"][asked]).float().mean()))
    return sum(right[-5:]) / 5


@pytest.mark.slow
def test_slots_know_more_than_a_window_of_what_has_left_it() -> None:
    """At equal memory a window answers by chance, 1 in 16, and the hybrid more often.

    So few updates teach it little more than which 8 values occur, not which belongs to which key.
    """
    hybrid, window = (
        answered(spec, 80) for spec in ("abc-hybrid:slots=8,window=8,sinks=0,block=1,control=x", "abc-window:slots=16")
    )
    assert window < 0.1
    assert hybrid > 1.5 * window
