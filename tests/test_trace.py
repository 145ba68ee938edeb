"""A trace on its own: numbering, and the round trip through safetensors."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import attnlab as al
from attnlab import registry
from attnlab.adapters import record, swap
from attnlab.conformance.calls import accepts, situations
from attnlab.trace import CALL_TENSORS, LayerTrace, Trace
from tests.adapters.zoo import build, inputs, padding
from tests.tolerance import assert_close


def layer(kind: str, number: int) -> LayerTrace:
    """Two keys, equal scores: W is one half everywhere and the output is the mean of the values (1, 3) -> 2."""
    q = k = torch.zeros(1, 1, 1, 3), torch.zeros(1, 1, 2, 3)
    v = torch.tensor([[[[1.0], [3.0]]]])
    call = al.AttentionCall(q[0], k[1], v)
    return LayerTrace(call, al.Softmax(), torch.tensor([[[[2.0]]]]), torch.ones(5, 1), kind, number, f"{kind}.{number}")


def filled(*keys: tuple[str, int], keep: str = "last") -> Trace:
    trace = Trace(keep=keep, metadata={"model": "by hand"})
    for key in keys:
        trace.add(layer(*key))
    return trace


def test_weights_by_hand() -> None:
    one = layer("encoder", 0)
    assert one.weights().tolist() == [[[[0.5, 0.5]]]]
    assert torch.equal(one.weights() @ one.values, one.output)
    assert one.x is None


def test_numbers_mean_self_attention() -> None:
    trace = filled(("decoder", 0), ("cross", 0), ("decoder", 1), ("cross", 1))
    assert trace[1] is trace["decoder", 1] is trace[-1]
    assert trace["cross", -2].layer == 0
    assert [(one.kind, one.layer) for one in trace] == [("decoder", 0), ("cross", 0), ("decoder", 1), ("cross", 1)]
    assert len(trace) == 4
    assert repr(trace) == "Trace(2 decoder, 2 cross)"


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(ValueError, match="the trace is empty; run the model inside"):
        Trace()[0]
    with pytest.raises(
        ValueError, match=r"layer 1 is ambiguous in this trace; write trace\['decoder', 1\] or 'encoder'"
    ):
        filled(("encoder", 1), ("decoder", 1))[1]
    with pytest.raises(ValueError, match=r"no layer \('encoder', 7\) in this trace; it has \{'encoder': \[0, 2\]\}"):
        filled(("encoder", 0), ("encoder", 2))[7]


def test_history() -> None:
    twice = filled(("encoder", 0), ("encoder", 0), keep="all")
    assert len(twice) == 1
    assert len(twice.history(0)) == 2
    assert len(filled(("encoder", 0), ("encoder", 0)).history(0)) == 1


@pytest.mark.parametrize(
    ("name", "spec"), [("t5", "softmax"), ("llama", "kernel:poly,degree=2"), ("modernbert", "kernel:exp")]
)
def test_save_and_load(name: str, spec: str, tmp_path: Path) -> None:
    model = build(name)
    with torch.no_grad(), swap(model, spec), record(model) as trace:
        model(**inputs(model, padding("mixed")))
    loaded = Trace.load(trace.save(tmp_path / "new" / "trace"))
    assert loaded.metadata == trace.metadata == {"model": type(model).__name__}
    assert len(loaded) == len(trace)
    for ours, theirs in zip(loaded, trace, strict=True):
        assert (ours.kind, ours.layer, ours.name) == (theirs.kind, theirs.layer, theirs.name)
        assert ours.mechanism == theirs.mechanism
        for field in ("causal", "offset", "scale"):
            assert getattr(ours.call, field) == getattr(theirs.call, field)
        for field in CALL_TENSORS:
            one, other = getattr(ours.call, field), getattr(theirs.call, field)
            assert (one is None and other is None) or torch.equal(one, other)
        assert torch.equal(ours.output, theirs.output)
        assert torch.equal(ours.projection, theirs.projection)
        torch.testing.assert_close(ours.weights(), theirs.weights())


def test_what_layers_share_is_stored_once(tmp_path: Path) -> None:
    model = build("bart")
    with torch.no_grad(), record(model) as trace:
        model(**inputs(model, padding("right")))
    folder = trace.save(tmp_path)
    stored = json.loads((folder / "trace.json").read_text())["layers"]
    cross = [one["call"] for one in stored if one["kind"] == "cross"]
    assert len({call["x"] for call in cross}) == len({call["key_visible"] for call in cross}) == 1
    assert len({call["q"] for call in cross}) == 3


def test_history_survives(tmp_path: Path) -> None:
    trace = filled(("encoder", 0), ("encoder", 0), ("encoder", 1), keep="all")
    loaded = Trace.load(trace.save(tmp_path))
    assert [len(loaded.history(n)) for n in (0, 1)] == [2, 1]


def test_parameters_of_a_mechanism_are_saved_with_it(tmp_path: Path) -> None:
    @dataclass(eq=False, repr=False)
    class Tempered(al.Mechanism, torch.nn.Module):
        start: float = 1.0

        def __post_init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.temperature = torch.nn.Parameter(torch.tensor(self.start))

        def reference(self, call: al.AttentionCall) -> torch.Tensor:
            return al.Softmax().reference(replace(call, q=call.q / self.temperature))

    al.register("tempered-for-a-test")(Tempered)
    try:
        model, mech = build("bert"), Tempered(start=2.0)
        mech.temperature.data.fill_(3.0)
        with torch.no_grad(), swap(model, mech), record(model) as trace:
            model(**inputs(model))
        loaded = Trace.load(trace.save(tmp_path))
        assert loaded[1].mechanism.temperature.item() == 3.0
        torch.testing.assert_close(loaded[1].weights(), trace[1].weights())
    finally:
        del registry._entries["tempered-for-a-test"]


def test_an_unregistered_mechanism_cannot_be_saved_and_leaves_nothing(tmp_path: Path) -> None:
    class Mine(al.Mechanism):
        pass

    trace = Trace()
    one = layer("encoder", 0)
    trace.add(LayerTrace(one.call, Mine(), one.output, None, "encoder", 0, "a"))
    with pytest.raises(ValueError, match="Mine is not registered"):
        trace.save(tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no saved trace: trace.json is missing"):
        Trace.load(tmp_path)
    folder = filled(("encoder", 0)).save(tmp_path)
    tensors = folder / "trace.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-8])
    with pytest.raises(ValueError, match="holds a damaged trace"):
        Trace.load(folder)
    filled(("encoder", 0)).save(tmp_path)
    (folder / "trace.json").write_text('{"keep": "last"}')
    with pytest.raises(ValueError, match="holds a damaged trace: 'metadata'"):
        Trace.load(folder)


@pytest.mark.parametrize("spec", al.all_mechanisms())
def test_every_mechanism_is_loaded_as_it_was_saved(spec: str, tmp_path: Path) -> None:
    mech = al.mechanism(spec)
    call = next(call for call in situations(torch.float32).values() if accepts(mech, call))
    output = mech(call)
    trace = Trace()
    trace.add(LayerTrace(call, mech, output, None, "encoder", 0, "attention"))
    loaded = Trace.load(trace.save(tmp_path))[0]
    assert_close(loaded.weights(), mech.weights(call))
    assert_close(loaded.mechanism(loaded.call), output)


def test_parameters_of_another_shape_are_refused(tmp_path: Path) -> None:
    one, mech = layer("encoder", 0), al.AbcLinformer(slots=2, length=50)
    trace = Trace()
    trace.add(LayerTrace(one.call, mech, mech(one.call), None, "encoder", 0, "a"))
    index = trace.save(tmp_path) / "trace.json"
    index.write_text(index.read_text().replace("length=50", "length=51"))
    with pytest.raises(ValueError, match="do not fit AbcLinformer"):
        Trace.load(tmp_path)
