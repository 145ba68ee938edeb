"""plan_conversion: which key/value heads get which memory, within a budget of bytes."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch.nn.functional import cross_entropy

import attnlab as al
from attnlab.data import IGNORED
from attnlab.evaluation.plan_windows import plain_and_recall_windows
from attnlab.evaluation.plans import Unit, head_specs, within_bytes
from attnlab.evaluation.recorded_costs import record_costs, started_candidates
from attnlab.models import Transformer, TransformerConfig
from attnlab.reading.gradient import output_gradients
from tests.adapters.test_initialise import Words
from tests.adapters.zoo import build
from tests.tolerance import assert_close

WINDOW = "abc-hybrid:slots=0,window=4,sinks=1,block=1"
SLOTS = "abc-hybrid:slots=3,window=4,sinks=1,block=1"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    words = [f"w{i}" for i in range(20)]
    draw = random.Random(0)
    return [" ".join(draw.choice(words) for _ in range(1200))]


@pytest.fixture
def llama() -> Any:
    """Three layers, each with two key/value heads that three query heads read."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
                            num_attention_heads=6, num_key_value_heads=2, initializer_range=0.3)  # fmt: skip
    return tf.LlamaForCausalLM(config).eval()


def planned(model: Any, texts: list[str], **settings: Any) -> al.Plan:
    settings = {"budget": 0.25, "length": 64, "tokens": 256, "candidates": [WINDOW, SLOTS]} | settings
    return al.plan_conversion(model, texts, tokenizer=Words(), **settings)


def test_a_plan_fits_its_budget_and_says_why(llama: Any, texts: list[str], tmp_path: Path) -> None:
    plan = planned(llama, texts)
    report = plan.report
    assert report is not None
    assert plan.planned_for == al.PlannedFor(3, 2, 4, length=64, budget=0.25)
    assert al.Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert json.loads(json.dumps(dict(report), allow_nan=False))["by"] == "loss"
    converted = al.convert(llama, plan, copy=True)
    assert al.cache_bytes(converted, 64) <= report["bytes"] == al.cache_bytes(llama, 64) // 4
    assert [(unit["layer"], unit["group"]) for unit in report["units"]] == list(itertools.product(range(3), range(2)))
    for unit in report["units"]:
        spec = plan.layers.get(("decoder", unit["layer"]), "softmax")
        assert head_specs(spec, 2)[unit["group"]] == unit["mechanism"]
        assert unit["loss_increase"].keys() == unit["output_error"].keys() == {WINDOW, SLOTS}
    assert sum(unit["bytes"] for unit in report["units"]) == al.cache_bytes(converted, 64)
    rows = {row["name"]: row for row in report["measured"]}
    assert list(rows)[:3] == ["softmax", "by loss", "by error"]
    assert len(rows) == 5
    # Without a budget of any interest every head keeps softmax, and one size for all costs no more bytes than allowed.
    assert all(row["bytes"] <= report["bytes"] for name, row in rows.items() if name != "softmax")
    assert planned(llama, texts, budget=1.0).layers == {}


def test_what_stands_in_the_report_is_the_loss_of_the_plan(llama: Any, texts: list[str]) -> None:
    """Windows without slots have no control, so that a swap attends as the plan that was measured."""
    plan = planned(llama, texts, candidates=[WINDOW], budget=0.5)
    assert plan.report is not None
    row = next(row for row in plan.report["measured"] if row["name"] == "by loss")
    plain, recall = plain_and_recall_windows(texts, Words(), length=64, count=2, reach=4, seed=0)
    with torch.no_grad(), al.swap(llama, plan):
        for windows, name in ((plain, "loss"), (recall, "recall_loss")):
            logits = llama(windows.input_ids[1:]).logits[0, :-1]
            loss = cross_entropy(logits, windows.labels[1, 1:], ignore_index=IGNORED)
            assert abs(float(loss) - row[name]) < 1e-4


@pytest.mark.parametrize("by", ["loss", "error"])
def test_the_head_that_matters_gets_the_bytes(llama: Any, texts: list[str], by: str) -> None:
    """All columns of W_O are zero but those of one key/value head: no other head costs anything."""
    for layer in llama.model.layers:
        kept = layer.self_attn.o_proj.weight.data[:, 12:].clone()
        layer.self_attn.o_proj.weight.data.zero_()
        if layer is llama.model.layers[1]:
            layer.self_attn.o_proj.weight.data[:, 12:] = kept
    plan = planned(llama, texts, budget=0.3, by=by)
    specs = [head_specs(plan.layers.get(("decoder", i), "softmax"), 2) for i in range(3)]
    assert specs == [[WINDOW, WINDOW], [WINDOW, "softmax"], [WINDOW, WINDOW]]


def test_bytes_in_place_of_a_share(llama: Any, texts: list[str]) -> None:
    whole = al.cache_bytes(llama, 64)
    one, other = planned(llama, texts), planned(llama, texts, budget=None, bytes=whole // 4)
    assert one == other


@pytest.mark.parametrize("budget", [0.02, 0.1, 0.6])
def test_default_candidates_follow_from_the_budget(llama: Any, texts: list[str], budget: float) -> None:
    plan = planned(llama, texts, candidates=None, budget=budget)
    assert plan.report is not None
    assert al.cache_bytes(al.convert(llama, plan, copy=True), 64) <= budget * al.cache_bytes(llama, 64)
    candidates = [al.mechanism(spec) for spec in plan.report["candidates"][1:]]
    # One key's worth leaves no room for slots.
    assert {type(mech) for mech in candidates} == ({al.AbcHybrid} if budget < 0.1 else {al.AbcHybrid, al.AbcSelect})
    assert any(mech.slots == 0 for mech in candidates)


def test_our_own_transformer(texts: list[str]) -> None:
    torch.manual_seed(0)
    config = TransformerConfig(kind="decoder", vocab=61, width=12, heads=3, layers=2, positions="rotary")
    model = Transformer(config).eval()
    plan = planned(model, texts)
    assert plan.planned_for == al.PlannedFor(2, 3, 4, length=64, budget=0.25)
    assert al.cache_bytes(al.convert(model, plan), 64) <= plan.report["bytes"]


def test_costs_are_those_of_the_whole_graph(llama: Any, texts: list[str]) -> None:
    """Recorded a layer at a time they are what one gradient of the whole forward pass gives."""
    plain, _ = plain_and_recall_windows(texts, Words(), length=64, count=1, reach=4, seed=0)
    llama.train()
    costs = record_costs(llama, plain, started_candidates(llama, plain, [WINDOW]))
    assert llama.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in llama.parameters())
    assert all("forward" not in module.__dict__ for module in llama.modules())
    llama.eval()
    with al.record(llama) as trace:
        logits = llama(plain.input_ids).logits[0, :-1]
    loss = cross_entropy(logits, plain.labels[0, 1:], reduction="sum")
    slopes = output_gradients(trace, loss)
    for layer, slope in zip(trace, slopes, strict=True):
        off = (al.mechanism(WINDOW)(layer.call) - layer.output).detach()
        s = (slope * off).sum(-1).double()[0].unflatten(0, (2, 3)).sum(1)
        key = (("decoder", layer.layer), WINDOW)
        assert_close(costs.first[key], s.sum(-1))
        assert_close(costs.second[key], s.square().sum(-1) / 2)
        projection = layer.projection.detach().unflatten(1, (2, 12))
        rows = off[0].transpose(0, 1).unflatten(1, (2, 3)).flatten(2)
        projected = torch.einsum("qgw,mgw->gqm", rows, projection)
        assert_close(costs.error[key].float(), projected.square().sum((1, 2)))
    assert costs.predicted == 63


def test_recall_windows_repeat_what_no_window_reaches() -> None:
    class Numbers(Words):
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [int(word) for word in text.replace("a", "0").split()]}

    text = " ".join(map(str, range(1000)))
    plain, recall = plain_and_recall_windows([text], Numbers(), length=128, count=2, reach=40, seed=0)
    assert torch.equal(plain.input_ids[1], torch.arange(128) + int(plain.input_ids[1, 0]))
    assert torch.equal(plain.labels[:, 1:], plain.input_ids[:, 1:])
    for ids, labels in zip(recall.input_ids.tolist(), recall.labels.tolist(), strict=True):
        asked = [i for i, label in enumerate(labels) if label != IGNORED]
        assert asked
        assert all(labels[i] == ids[i] for i in asked)
        # Every number is asked for where it stands again, far from its first place, and after the one before it.
        assert all(i - ids.index(ids[i]) >= 40 for i in asked)
        assert all(ids[i - 1] == ids[i] - 1 for i in asked)
    assert set(plain.input_ids.flatten().tolist()) & set(recall.input_ids.flatten().tolist()) == set()


def test_bytes_go_where_they_save_most() -> None:
    units = [Unit("decoder", 0, 3, i) for i in range(3)]
    options = {
        units[0]: {"small": (1, 9.0), "middle": (3, 1.0), "softmax": (10, 0.0)},
        units[1]: {"small": (1, 2.0), "middle": (3, 1.5), "softmax": (10, 0.0)},
        # A larger memory that is worse, as may be measured.
        units[2]: {"small": (1, 0.1), "middle": (3, 0.2), "softmax": (10, 0.0)},
    }

    def chosen(limit: int) -> list[str]:
        return list(within_bytes(options, limit).values())

    assert chosen(3) == ["small", "small", "small"]
    assert chosen(5) == ["middle", "small", "small"]
    assert chosen(7) == ["middle", "middle", "small"]
    assert chosen(14) == ["middle", "softmax", "small"]
    assert chosen(30) == ["softmax"] * 3
    with pytest.raises(ValueError, match="the smallest candidates take 3 bytes for a sequence, and the budget is 2"):
        chosen(2)


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_near_the_best_there_is(seed: int) -> None:
    draw = random.Random(seed)
    units = [Unit("decoder", 0, 6, i) for i in range(6)]
    options = {
        unit: {f"{size}": (size, draw.random() / size) for size in (1, 2, 4)} | {"8": (8, 0.0)} for unit in units
    }
    chosen = within_bytes(options, 22)
    every = itertools.product(*(own.values() for own in options.values()))
    best = min(sum(c for _, c in pick) for pick in every if sum(b for b, _ in pick) <= 22)
    assert sum(options[unit][spec][0] for unit, spec in chosen.items()) <= 22
    worst = sum(own["1"][1] for own in options.values())
    assert sum(options[unit][spec][1] for unit, spec in chosen.items()) - best <= 0.1 * (worst - best)


def test_what_is_refused(llama: Any, texts: list[str]) -> None:
    for settings, message in (
        ({"budget": 0.001}, r"the budget is 12 bytes for a sequence, and one key for each of 6 heads takes 192; give"),
        ({"budget": None, "bytes": 191}, "at least 192 bytes, a share of 0.016"),
        ({"budget": 0.02, "candidates": [WINDOW]}, "the smallest candidates take"),
        ({"budget": 1.5}, "between 0 and 1"),
        ({"budget": float("nan")}, "between 0 and 1"),
        ({"budget": None}, "either budget"),
        ({"bytes": 10000}, "either budget"),
        ({"by": "kl"}, "by must be one of loss, error"),
        ({"tokens": 100_000}, "the texts hold 1200 tokens"),
        ({"length": 1024, "tokens": 1}, "the texts hold 1200 tokens"),
        ({"candidates": ["abc-hybrid:slots=2,window=64"], "budget": 1.0}, "nothing is beyond it"),
        ({"candidates": ["nope"]}, "no mechanism named 'nope'"),
        ({"length": 7}, "length must be an int of at least 64"),
    ):
        with pytest.raises(ValueError, match=message):
            planned(llama, texts, **settings)
    with pytest.raises(ValueError, match="pass"):
        al.plan_conversion(llama, "a text", tokenizer=Words(), budget=0.25, length=64)
    with pytest.raises(ValueError, match="no decoder-only language model"):
        planned(build("bert"), texts)
    with pytest.raises(ValueError, match="no decoder-only language model"):
        planned(build("t5"), texts)
    with pytest.raises(ValueError, match="converted already"):
        planned(al.convert(llama, WINDOW), texts)


@pytest.mark.parametrize("name", ["diffllama", "hrm_text"])
def test_layers_that_attend_several_times_in_a_pass_are_refused(name: str, texts: list[str]) -> None:
    with pytest.raises(ValueError, match="attends more than once in a forward pass"):
        planned(build(name), texts)
