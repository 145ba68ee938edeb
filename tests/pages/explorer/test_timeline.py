"""read_timeline reads every number that record_step writes; mistakes are errors of one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import attnlab as al
from attnlab.pages.explorer import explore_run, read_timeline
from attnlab.reading.timeline import record_step

TOKENS = ["[CLS]", "the", "cat", "sat", "[SEP]"]


def maps(seed: int) -> dict[tuple[str, int], torch.Tensor]:
    torch.manual_seed(seed)
    return {("encoder", layer): torch.randn(2, 3, 5, 5).softmax(-1) for layer in (0, 1)}


def test_steps_come_back_in_order_with_their_scalars(tmp_path: Path) -> None:
    losses = torch.tensor([[0.5, float("nan"), 0.25], [1.0, 2.0, 3.0]])
    record_step(tmp_path, 20, maps(2), tokens=TOKENS, scalars={"loss": 1.5})
    record_step(tmp_path, 3, maps(1), tokens=TOKENS, scalars={"guidance loss": losses, "loss": 2.5}, item=1)
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "kind": "train", "seconds": 0.1, "values": {"loss": 3.5, "broken": None}}) + "\n"
    )
    (tmp_path / "run.json").write_text(json.dumps({"name": "guided"}))
    timeline = read_timeline(tmp_path)
    assert timeline.name == "guided"
    assert [one.step for one in timeline.steps] == [3, 20]
    assert timeline.sequences == {"source": TOKENS}
    assert timeline.metrics == {"train loss": [(1, 3.5)]}
    first = timeline.steps[0]
    np.testing.assert_array_equal(first.maps["encoder", 1], maps(1)["encoder", 1][1].half().numpy())
    assert first.scalars == {
        "guidance loss": {"encoder.0": [0.5, None, 0.25], "encoder.1": [1.0, 2.0, 3.0]},
        "loss": 2.5,
    }


def test_an_interrupted_or_resumed_run_is_read(tmp_path: Path) -> None:
    """A torn last line, a NaN, and steps that a resumed run wrote again."""
    record_step(tmp_path, 0, maps(0), tokens=TOKENS)
    (tmp_path / "run.json").write_text(json.dumps({"name": "broken"}))
    lines = [{"step": step, "kind": "train", "values": {"loss": loss}} for step, loss in ((1, 3.5), (2, 9.0), (2, 2.5))]
    metrics = (
        "\n".join(map(json.dumps, lines)) + '\n{"step": 3, "kind": "train", "values": {"loss": NaN}}\n{"step": 4, "ki'
    )
    (tmp_path / "metrics.jsonl").write_text(metrics)
    assert read_timeline(tmp_path).metrics == {"train loss": [(1, 3.5), (2, 2.5)]}
    assert explore_run(tmp_path).html().startswith(b"<!doctype html>")


def test_a_step_recorded_again_is_replaced(tmp_path: Path) -> None:
    for seed in (1, 2):
        record_step(tmp_path, 7, maps(seed), tokens=TOKENS)
    (only,) = read_timeline(tmp_path).steps
    np.testing.assert_array_equal(only.maps["encoder", 0], maps(2)["encoder", 0][0].half().numpy())


def test_a_trace_with_cross_attention_has_two_texts(tmp_path: Path) -> None:
    trace = al.Trace()
    q, k = torch.randn(1, 2, 3, 7), torch.randn(1, 2, 5, 7)
    for kind, call in (("decoder", al.AttentionCall(q, q, q, causal=True)), ("cross", al.AttentionCall(q, k, k))):
        trace.add(al.LayerTrace(call, al.Softmax(), al.Softmax()(call), None, kind, 0, kind))
    texts = {"source": TOKENS, "target": ["le", "chat", "."]}
    agreement = {("cross", 0): [0.75, None]}
    record_step(tmp_path, 1, trace, tokens=texts, scalars={"agreement": agreement})
    (only,) = read_timeline(tmp_path).steps
    assert only.maps["cross", 0].shape == (2, 3, 5)
    assert only.scalars == {"agreement": {"cross.0": [0.75, None]}}
    with pytest.raises(ValueError, match="attends over 5 source tokens, but tokens has none"):
        record_step(tmp_path, 2, trace, tokens=texts["target"])


def test_mistakes_are_value_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step must be 0 or more"):
        record_step(tmp_path, -1, maps(0), tokens=TOKENS)
    with pytest.raises(ValueError, match="attends over 5 source tokens, but tokens has 4"):
        record_step(tmp_path, 0, maps(0), tokens=TOKENS[:4])
    with pytest.raises(ValueError, match="trace is empty"):
        record_step(tmp_path, 0, {}, tokens=TOKENS)
    with pytest.raises(ValueError, match="2 layers, got"):
        record_step(tmp_path, 0, maps(0), tokens=TOKENS, scalars={"loss": torch.zeros(3, 3)})
    with pytest.raises(ValueError, match=r"has 2 numbers for .*'encoder', 0.* 3 heads"):
        record_step(tmp_path, 0, maps(0), tokens=TOKENS, scalars={"loss": {("encoder", 0): [1.0, 2.0]}})
    with pytest.raises(ValueError, match="no recorded steps"):
        read_timeline(tmp_path)
    record_step(tmp_path, 0, maps(0), tokens=TOKENS)
    with pytest.raises(ValueError, match="other tokens"):
        record_step(tmp_path, 1, maps(0), tokens=list("abcde"))
    with pytest.raises(ValueError, match="kind must be one of encoder, decoder, cross, got 'middle'"):
        record_step(tmp_path, 1, {("middle", 0): torch.zeros(1, 1, 5, 5)}, tokens=TOKENS)
    with pytest.raises(ValueError, match=r"must be .b, h, q, k. with input 2, got .2, 3, 5, 5."):
        record_step(tmp_path, 1, maps(0), tokens=TOKENS, item=2)
    (tmp_path / "steps" / "step-00000000.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="cannot be read"):
        read_timeline(tmp_path)
    index = tmp_path / "steps" / "index.json"
    index.write_text(json.dumps({"format": 1, "sequences": {}, "steps": []}))
    with pytest.raises(ValueError, match="holds no recorded steps"):
        read_timeline(tmp_path)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"is damaged .*; record the run again"):
        read_timeline(tmp_path)
