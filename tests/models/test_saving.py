from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attnlab as al
from attnlab import registry
from attnlab.attention import scores
from attnlab.mechanisms.softmax import softmax
from attnlab.models import Transformer, attentions, load_transformer, save_transformer
from tests.models.small import BASE, make, some_tokens
from tests.tolerance import assert_close


@pytest.mark.parametrize("kind", ["encoder", "decoder", "encoder-decoder"])
def test_round_trip(kind: str, tmp_path: Path) -> None:
    model = make(kind, cross_attention="kernel:elu", cutoffs=(5,) if kind == "decoder" else ())
    tokens = some_tokens(2, 5)
    inputs = {"decoder_input_ids": tokens} if kind == "encoder-decoder" else {}
    save_transformer(model, tmp_path / "model")
    assert sorted(os.listdir(tmp_path / "model")) == ["config.json", "model.safetensors"]
    state = torch.get_rng_state()
    again = load_transformer(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), state)
    assert again.config == model.config
    assert not again.training
    assert torch.equal(again(tokens, **inputs).logits, model(tokens, **inputs).logits)
    half = load_transformer(tmp_path / "model", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_saving_again_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    save_transformer(make("encoder"), tmp_path)
    save_transformer(make("decoder"), tmp_path)
    assert load_transformer(tmp_path).config.kind == "decoder"
    assert (tmp_path / "tokenizer.json").exists()


def test_a_kill_between_the_two_files_is_seen(tmp_path: Path) -> None:
    save_transformer(make("encoder"), tmp_path / "a")
    save_transformer(make("encoder", layers=3), tmp_path / "b")
    os.replace(tmp_path / "b" / "model.safetensors", tmp_path / "a" / "model.safetensors")
    with pytest.raises(ValueError, match="written for another config"):
        load_transformer(tmp_path / "a")


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_transformer(tmp_path)
    save_transformer(make("encoder"), tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged model"):
        load_transformer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "hiden": 5}))
    with pytest.raises(ValueError, match="no field 'hiden'; did you mean 'hidden'"):
        load_transformer(tmp_path)


@dataclass(eq=False)
class LearnedScale(al.Mechanism, nn.Module):
    """Softmax whose temperature is learned, one for each head, made at the first call."""

    start: float = 1.0
    tied_across_layers: bool = field(default=False)

    def __post_init__(self) -> None:
        nn.Module.__init__(self)
        self.log_scale: nn.Parameter | None = None

    def reference(self, call: al.AttentionCall) -> Tensor:
        if self.log_scale is None:
            self.log_scale = nn.Parameter(torch.full((call.q.shape[1], 1, 1), self.start))
        return softmax(scores(replace(call, q=call.q * self.log_scale.exp())))


@pytest.fixture
def learned() -> Iterator[None]:
    registry._load()
    al.register("learned-scale")(LearnedScale)
    yield
    del registry._entries["learned-scale"]


@pytest.mark.usefixtures("learned")
@pytest.mark.parametrize("tied", [False, True])
def test_a_mechanism_with_parameters_trains_saves_and_loads(tied: bool, tmp_path: Path) -> None:
    model = Transformer(replace(BASE, self_attention=f"learned-scale:start=0.5,tied_across_layers={str(tied).lower()}"))
    scales = [p for n, p in model.named_parameters() if n.endswith("log_scale")]
    assert len(scales) == (1 if tied else BASE.layers)
    assert all((p == 0.5).all() for p in scales)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokens = some_tokens(2, 7)
    model(tokens).logits.square().sum().backward()
    optimizer.step()
    assert all((p != 0.5).all() for p in scales)
    again = load_transformer(save_transformer(model, tmp_path))
    assert_close(again(tokens).logits, model.eval()(tokens).logits)
    first, second = (a.mechanism for a in attentions(again))
    assert (first is second) == tied


def test_recorded_layers_are_those_of_the_model() -> None:
    model = make("encoder-decoder", decoder_layers=3, cross_attention="kernel:elu")
    source, target = some_tokens(2, 5), some_tokens(2, 7)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    with al.record(model) as trace:
        output = model(source, attention_mask=mask, decoder_input_ids=target)
    assert len(trace) == 2 + 3 + 3
    for layer in trace:
        assert_close(layer.weights() @ layer.values, layer.output)
    cross = trace["cross", 1]
    assert cross.name == "decoder.blocks.1.cross"
    assert cross.weights().shape == (2, 3, 7, 5)
    assert (cross.weights()[1, :, :, 3:] == 0).all()
    assert torch.equal(cross.x, model.encode(source, attention_mask=mask).hidden)
    # What a reader computes from W_O is what the layer did.
    encoder = trace["encoder", 0]
    block = model.encoder.blocks[0]
    joined = encoder.output.transpose(1, 2).flatten(2) @ encoder.projection.T + block.attention.out.bias
    h = model.tokens(source) + model.encoder.positions(torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 2, 2]]))
    assert_close(block.attention_norm(h), encoder.x)
    assert_close(block.attention(encoder.x, positions=torch.arange(5)[None], key_visible=mask), joined)
    with torch.enable_grad():
        output.logits.sum().backward()
    assert all(not a.observers for a in attentions(model))


def test_recording_gives_gradients_and_every_step() -> None:
    model = make("decoder")
    tokens = some_tokens(1, 5)
    with al.record(model, keep="all") as trace:
        model(tokens)
        model(tokens[:, :3])
    assert [t.call.q.shape[2] for t in trace.history(0)] == [5, 3]
    (gradient,) = torch.autograd.grad(trace[1].weights().square().sum(), model.tokens.weight)
    assert gradient.abs().sum() > 0
    with pytest.raises(ValueError, match="cannot be swapped or recorded"), al.record(nn.Linear(2, 2)):
        pass
