"""The guided kernel against softmax attention and dense targets, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.attention import repeat_groups, visible
from tests.tolerance import assert_close

pytest.importorskip("triton")
guided = pytest.importorskip("attnlab.kernels.guided")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Small tiles, so that short texts have several, and wide heads run in the interpreter.
TILES = {64: (guided.Blocks(64, 64, 4, 1),) * 2 + (guided.Blocks(128, 64, 4, 1),)}


def made(b: int, h: int, n_q: int, n_k: int, d: int, **how: object) -> tuple[al.AttentionCall, guided.PackedLabels]:
    """A call with gradients, and labels of two groups: positions, and a set of keys."""
    q, k, v = (torch.randn(b, n, h, d, device=DEVICE).transpose(1, 2).requires_grad_() for n in (n_q, n_k, n_k))
    rows = torch.stack([torch.randint(-1, n_k, (b, n_q)), torch.ones(b, n_q)], 1)
    keys = torch.stack([torch.arange(n_k).expand(b, -1), torch.randint(0, 2, (b, n_k))], 1)
    value, constant = torch.rand(b, 2, n_q), torch.rand(b, 2, n_q)
    weight = torch.rand(b, 2, n_q) * (torch.rand(b, 2, n_q) > 0.2)
    group = torch.arange(h) % 2
    numbers = {"value": value, "constant": constant, "weight": weight, "group": group}
    packed = guided.pack_labels(
        rows.long().to(DEVICE), keys.to(DEVICE), **{name: t.to(DEVICE) for name, t in numbers.items()}
    )
    return al.AttentionCall(q, k, v, **how), packed


def by_definition(call: al.AttentionCall, labels: guided.PackedLabels) -> tuple[Tensor, Tensor]:
    """The output and the errors from the whole map and dense targets."""
    W = al.Softmax().weights(call)
    of_head = [t[:, labels.group.long()] for t in labels[:5]]
    rows, keys, value, constant, weight = of_head
    t = value[..., None] * (rows[..., None] == keys[:, :, None])
    seen = visible(call)
    t = t if seen is None else t * seen
    error = (W - t).square().sum(-1) - t.square().sum(-1) + constant
    return W @ repeat_groups(call.v, call.groups), weight * error


@pytest.mark.parametrize(
    "how",
    [
        {"n_q": 131, "n_k": 131, "d": 16},
        {"n_q": 128, "n_k": 64, "d": 11},
        {"n_q": 131, "n_k": 131, "d": 48, "causal": True},
        {"n_q": 5, "n_k": 131, "d": 16, "causal": True, "offset": 126},
        {"n_q": 1, "n_k": 1, "d": 16},
        {"n_q": 128, "n_k": 192, "d": 16},
        {"n_q": 67, "n_k": 131, "d": 16, "padded": True},
    ],
    ids=["odd", "cross", "causal", "offset", "one", "whole", "padded"],
)
def test_output_errors_and_gradients(monkeypatch: pytest.MonkeyPatch, how: dict[str, object]) -> None:
    monkeypatch.setattr(guided, "BLOCKS", TILES)
    how = dict(how)
    if how.pop("padded", False):
        seen = torch.rand(2, int(str(how["n_k"])), device=DEVICE) > 0.3
        # The second text is padding only.
        seen[1] = False
        how["key_visible"] = seen
    sizes = {name: int(str(how.pop(name))) for name in ("n_q", "n_k", "d")}
    call, labels = made(2, 3, **sizes, **how)
    out, error = guided.guided_attention(
        call.q,
        call.k,
        call.v,
        labels,
        key_visible=call.key_visible,
        causal=call.causal,
        offset=call.offset,
        scale=call.softmax_scale,
    )
    wanted_out, wanted_error = by_definition(call, labels)
    assert_close(out, wanted_out)
    assert_close(error, wanted_error)
    slopes = torch.randn_like(out), torch.randn_like(error)
    leaves = (call.q, call.k, call.v)
    gradients = torch.autograd.grad((out, error), leaves, slopes)
    wanted = torch.autograd.grad((wanted_out, wanted_error), leaves, slopes)
    for name, a, b in zip("qkv", gradients, wanted, strict=True):
        assert a.isfinite().all(), name
        assert_close(a, b)
        assert sizes["n_k"] == 1 or a.abs().max() > 0


def test_a_layer_through_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guided heads by the kernel and the others by SDPA, checkpointed, are what maps and targets say."""
    # Not above: it imports Triton.
    from torch.utils.checkpoint import checkpoint

    from attnlab.guidance import Guidance, attention, layer_targets
    from attnlab.patterns import SpecialTokens

    monkeypatch.setattr(guided, "BLOCKS", TILES)
    monkeypatch.setattr(attention, "_kernel_serves", lambda call, groups: True)
    ids = torch.randint(3, 9, (2, 37), device=DEVICE)
    seen = torch.ones(2, 37, dtype=torch.bool, device=DEVICE)
    seen[1, 30:] = False
    heads = Guidance(heads={"next": 2, "period": 1, "same": 1}).assign(6)
    leaves = [torch.randn(2, 6, 37, 16, device=DEVICE, requires_grad=True) for _ in range(3)]

    def groups(call: al.AttentionCall) -> attention.Groups:
        tokens = SpecialTokens(period=(5,))
        return attention.Groups(heads, {n: layer_targets(n, call, ids, tokens=tokens) for n in heads})

    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        call = al.AttentionCall(q, k, v, key_visible=seen)
        return attention.attend_guided(call, groups(call))

    call = al.AttentionCall(*leaves, key_visible=seen)
    W = al.Softmax().weights(call)
    wanted = W @ call.v, attention.guided_errors(W[:, :4], groups(call))
    slopes = [torch.randn_like(t) for t in wanted]
    expected = torch.autograd.grad(wanted, leaves, slopes)
    for run in (layer, lambda *t: checkpoint(layer, *t, use_reentrant=False)):
        results = run(*leaves)
        for a, b in zip(results, wanted, strict=True):
            assert_close(a, b)
        for a, b in zip(torch.autograd.grad(results, leaves, slopes), expected, strict=True):
            assert_close(a, b)
