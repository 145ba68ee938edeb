"""What every registered reading obeys: shape, padding, batches, hidden keys, and what it says that it needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.attention import visible
from attnlab.reading import named_reading, reading_names

B, H, N, D, LAYERS = 2, 3, 7, 3, 2
# Item 0 has padding behind, item 1 before and within the text.
KEY_VISIBLE = torch.tensor([[True] * 5 + [False] * 2, [False, True, True, False, True, True, True]])
WINDOW = (torch.ones(N, N).tril() * torch.ones(N, N).triu(-3)).bool()[None, None]
MASKS = {
    "everything": {},
    "padded": {"key_visible": KEY_VISIBLE},
    "causal": {"causal": True},
    "causal padded": {"causal": True, "key_visible": KEY_VISIBLE},
    "window": {"mask": WINDOW},
}
EXEMPT = {
    ("hidden keys get zero", "rollout"): "a padded position keeps its own residual stream",
    ("alone as in a batch", "random"): "numbers are drawn in the order of the batch",
    ("padding changes nothing", "random"): "numbers are drawn in the order of the keys",
}


def recorded(masks: dict, *, seed: int = 0) -> list[al.LayerTrace]:
    """Layers with grouped values, whose outputs have gradients."""
    torch.manual_seed(seed)
    layers = []
    for number in range(LAYERS):
        q, k, v = torch.randn(B, H, N, D), torch.randn(B, 1, N, D), torch.randn(B, 1, N, D)
        layers.append(layer_of(al.AttentionCall(q, k, v, **masks), number))
    return layers


def layer_of(call: al.AttentionCall, number: int) -> al.LayerTrace:
    call = replace(call, v=call.v.detach().requires_grad_())
    projection = torch.randn(11, H * D, generator=torch.Generator().manual_seed(number))
    return al.LayerTrace(call, al.Softmax(), al.Softmax()(call), projection, "encoder", number, f"layer {number}")


def read(name: str, layers: list[al.LayerTrace], item: int | None = None) -> list[Tensor]:
    """The reading of each layer; what it explains is a sum over the outputs of one item, or of all."""
    rows = slice(None) if item is None else slice(item, item + 1)
    target = sum(x.output[rows].tanh().sum() for x in layers)
    maps = [t.detach() for t in named_reading(name).of_layers(layers, target=target) if t is not None]
    assert len(maps) == LAYERS
    return maps


def one_item(layer: al.LayerTrace, item: int) -> al.LayerTrace:
    call, rows = layer.call, slice(item, item + 1)
    flags = None if call.key_visible is None else call.key_visible[rows]
    return layer_of(replace(call, q=call.q[rows], k=call.k[rows], v=call.v[rows], key_visible=flags), layer.layer)


def exempt(law: str, name: str) -> None:
    if (law, name) in EXEMPT:
        pytest.skip(EXEMPT[law, name])


every_reading = pytest.mark.parametrize("name", reading_names())
every_mask = pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())


@every_reading
@every_mask
def test_one_number_per_head_and_query_or_per_key_too(name: str, masks: dict) -> None:
    for t in read(name, recorded(masks)):
        assert t.shape[0] == B
        assert t.shape[1] in (1, H)
        assert t.shape[2:] == ((N,) if named_reading(name).per_query else (N, N))
        assert t.isfinite().all()


@every_reading
@every_mask
def test_hidden_keys_get_zero(name: str, masks: dict) -> None:
    exempt("hidden keys get zero", name)
    if named_reading(name).per_query:
        pytest.skip("it has no number per key")
    layers = recorded(masks)
    for layer, t in zip(layers, read(name, layers), strict=True):
        seen = visible(layer.call)
        if seen is not None:
            assert not t.masked_select(~seen.expand_as(t)).any()


@every_reading
@every_mask
def test_an_item_alone_is_read_as_in_a_batch(name: str, masks: dict) -> None:
    exempt("alone as in a batch", name)
    layers = recorded(masks)
    for item in range(B):
        alone = read(name, [one_item(layer, item) for layer in layers])
        for whole, single in zip(read(name, layers, item), alone, strict=True):
            torch.testing.assert_close(whole[item], single[0], atol=1e-5, rtol=1e-4)


@every_reading
@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_nothing(name: str, causal: bool) -> None:
    exempt("padding changes nothing", name)
    layers = recorded({"causal": causal})
    padded = []
    for layer in layers:
        call = layer.call
        # Three more keys and queries that hold large numbers, hidden.
        q, k, v = (torch.cat([t, torch.full((B, t.shape[1], 3, D), 1e3)], 2) for t in (call.q, call.k, call.v))
        flags = torch.cat([torch.ones(B, N), torch.zeros(B, 3)], 1).bool()
        padded.append(layer_of(al.AttentionCall(q, k, v, key_visible=flags, causal=causal), layer.layer))
    # Only the outputs of real queries are explained.
    target = sum(x.output[:, :, :N].tanh().sum() for x in padded)
    longer = named_reading(name).of_layers(padded, target=target)
    for short, long in zip(read(name, layers), longer, strict=True):
        assert long is not None
        real = long[:, :, :N] if named_reading(name).per_query else long[:, :, :N, :N]
        torch.testing.assert_close(real.detach(), short, atol=1e-5, rtol=1e-4)


@every_reading
def test_a_reading_that_does_not_need_values_does_not_look_at_them(name: str) -> None:
    layers = recorded({"key_visible": KEY_VISIBLE})
    others = [layer_of(replace(x.call, v=torch.randn(B, 1, N, D) * 3), x.layer) for x in layers]
    same = all(torch.equal(a, b) for a, b in zip(read(name, layers), read(name, others), strict=True))
    assert same == ("values" not in named_reading(name).needs)


@every_reading
def test_only_a_reading_that_follows_layers_depends_on_those_below(name: str) -> None:
    layers = recorded({})
    changed = [recorded({}, seed=1)[0], layers[1]]
    needs = named_reading(name).needs
    if "noise" in needs:
        pytest.skip("numbers are drawn for each layer")
    same = torch.equal(read(name, layers)[1], read(name, changed)[1])
    assert same == ("all layers" not in needs)


@every_reading
def test_it_is_described_in_one_sentence(name: str) -> None:
    summary = named_reading(name).summary
    assert summary[0].isupper()
    assert summary.endswith(".")
    assert "\n" not in summary
