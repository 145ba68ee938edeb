"""initialise_control: slots that begin as clusters of the model's keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlab as al
from tests.adapters.test_distill import sharpened

TEXTS = ["the cat sat on the mat " * 20, "and then it rained again " * 20]


class Words:
    """A tokenizer that gives each word a number."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + sum(map(ord, word)) * 7 % 50 for word in text.split()]}


def started(control: str, **settings: Any) -> tuple[Any, Any]:
    model = sharpened("llama").eval()
    student = al.convert(model, f"abc-hybrid:slots=6,window=2,sinks=1,block=2,control={control}", copy=True)
    return model, al.initialise_control(student, TEXTS, tokenizer=Words(), tokens=120, length=40, **settings)


def error(model: Any, student: Any) -> float:
    """Of the student's attention on the model's own calls."""
    ids = torch.tensor([Words()(TEXTS[0])["input_ids"][:60]])
    with torch.no_grad(), al.record(model) as trace, al.record(student) as own:
        model(ids), student(ids)
        errors = [(own[i].mechanism(trace[i].call) - trace[i].output).square().mean() for i in range(len(trace))]
    return float(torch.stack(errors).mean())


@pytest.mark.parametrize("control", ["key", "x"])
def test_clusters_are_nearer_to_softmax_than_random_slots(control: str) -> None:
    model, student = started(control)
    random = al.convert(model, f"abc-hybrid:slots=6,window=2,sinks=1,block=2,control={control}", copy=True)
    assert error(model, student) < 0.9 * error(model, random)


def test_scores_begin_with_what_keys_receive() -> None:
    """Nearer to softmax than random scores, and of one size whatever the model's states are."""
    model = sharpened("llama").eval()
    random = al.convert(model, "abc-select:slots=4,window=2,sinks=0,block=2", copy=True)
    student = al.convert(model, "abc-select:slots=4,window=2,sinks=0,block=2", copy=True)
    al.initialise_control(student, TEXTS, tokenizer=Words(), tokens=120, length=40)
    assert error(model, student) < 0.9 * error(model, random)
    with torch.no_grad(), al.record(student) as trace:
        student(torch.tensor([Words()(TEXTS[0])["input_ids"][:60]]))
    for layer in trace:
        scores = layer.call.x @ layer.mechanism.weight.mT / layer.call.x.shape[-1] ** 0.5
        assert 0.3 < scores.std(1).mean() < 3


def test_a_key_goes_to_the_nearest_centre() -> None:
    """Keys of six kinds and six slots: every key is its own slot's centre, whatever else stands in the window."""
    model, student = started("key", rounds=20)
    with torch.no_grad(), al.record(model) as trace, al.record(student) as own:
        ids = torch.tensor([Words()(TEXTS[0])["input_ids"][:30]])
        model(ids), student(ids)
    mech, call = own[0].mechanism, trace[0].call
    centres = mech.key_weight / mech.key_weight.norm(dim=-1, keepdim=True)
    share = mech.log_alpha(call).exp()
    assert torch.allclose(share.sum(-1), torch.ones(()), atol=1e-5)
    assert share.amax(-1).mean() > 0.5
    assert centres.shape == (2, 6, 6)


def test_it_begins_the_same_way_each_time() -> None:
    one, other = (started("key")[1].attnlab.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(next(iter(started("key", seed=1)[1].attnlab.parameters())), next(iter(one.values())))


def test_what_cannot_be_initialised() -> None:
    model = sharpened("llama")
    for mech, why in (
        ("abc-mlp:slots=3", "convert it first"),
        ("abc-hybrid:slots=0,window=16", "convert it first"),
        ("abc-hybrid:slots=3,tied=true", "convert with tied=false"),
    ):
        with pytest.raises(ValueError, match=why):
            al.initialise_control(al.convert(model, mech, copy=True), TEXTS, tokenizer=Words())
    student = al.convert(model, "abc-hybrid:slots=30,control=key")
    with pytest.raises(ValueError, match="7 tokens cannot make 30 clusters"):
        al.initialise_control(student, [" ".join("abcdefg")], tokenizer=Words())
    with pytest.raises(ValueError, match="pass"):
        al.initialise_control(student, "a text", tokenizer=Words())
    with pytest.raises(ValueError, match="too few"):
        al.initialise_control(student, ["", ""], tokenizer=Words())
