"""L_AG against its dense definition, with gradients; head assignment; schedule; what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.attention import pair_mask, visible
from attnlab.guidance import Guidance, guidance_loss, squared_error
from attnlab.patterns import SpecialTokens, dense, pattern_targets
from attnlab.trace import LayerTrace
from tests.tolerance import assert_close
from tests.unchecked import unchecked

B, H, N, D = 2, 6, 7, 5
TOKENS = SpecialTokens(period=(9,), delimiters=(1, 2))
IDS = torch.tensor([[0, 0, 1, 5, 9, 5, 2], [1, 9, 0, 4, 4, 9, 2]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1]])
HEADS = {"next": 1, "same": 2, "period": 1, "first": 1}
CAUSAL_HEADS = {"prev": 1, "same": 2, "period": 1, "first": 1}


def layer(number: int, *, groups: int = 1, mechanism: str = "softmax", **call: object) -> LayerTrace:
    """One recorded layer of random queries and keys that ask for gradients."""
    q = torch.randn(B, H, N, D, dtype=torch.float64, requires_grad=True)
    k = torch.randn(B, H // groups, N, D, dtype=torch.float64, requires_grad=True)
    made = al.AttentionCall(q, k, torch.randn(B, H // groups, N, D, dtype=torch.float64), **call)
    return LayerTrace(made, al.mechanism(mechanism), q, None, "decoder" if made.causal else "encoder", number, "layer")


def by_definition(layers: list[LayerTrace], reduction: str) -> Tensor:
    """The sum over layers and groups of the mean squared error, from whole maps and dense targets."""
    total = torch.zeros((), dtype=torch.float64)
    for x in layers:
        W, call = x.weights(), x.call
        start = 0
        for name, count in (CAUSAL_HEADS if call.causal else HEADS).items():
            own = slice(start, start + count)
            masks = {
                key: t if t is None or t.shape[1] == 1 else t[:, own]
                for key, t in (("mask", call.mask), ("bias", call.bias))
            }
            part = replace(call, **masks, q=call.q[:, own], k=call.q[:, own], v=call.q[:, own])
            seen, mask = visible(part), pair_mask(part)
            targets = pattern_targets(name, IDS, attention_mask=MASK, causal=call.causal, mask=mask, tokens=TOKENS)
            t = dense(targets, keys=N, visible=seen).double()
            error = (W[:, start : start + count] - t).square() * targets.rows[..., None]
            n = MASK.sum(-1)
            cells = (n * n).sum() if reduction == "paper" else n.sum()
            total = total + error.sum() / (count * cells)
            start += count
    return total


@pytest.mark.parametrize("reduction", ["paper", "row"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mechanism", ["softmax", "kernel:poly,degree=2"])
def test_the_loss_is_its_dense_definition(reduction: str, causal: bool, groups: int, mechanism: str) -> None:
    # No mask, one for all heads, one for each, and both inside a bias.
    hidden = torch.rand(B, 1, N, N) < 0.3, torch.rand(1, H, N, N) < 0.3
    masks = [{}, *({"mask": ~pairs} for pairs in hidden)]
    masks += [{"bias": torch.randn(pairs.shape).double().masked_fill(pairs, -1e9)} for pairs in hidden]
    if mechanism != "softmax":
        masks = masks[:3]
    layers = [
        layer(i, groups=groups, mechanism=mechanism, causal=causal, key_visible=MASK.bool(), **mask)
        for i, mask in enumerate(masks)
    ]
    guidance = Guidance(heads=CAUSAL_HEADS if causal else HEADS, reduction=reduction)
    loss = guidance_loss(layers, guidance, IDS, attention_mask=MASK, tokens=TOKENS)
    expected = by_definition(layers, reduction)
    mean = loss.total / loss.count
    assert_close(mean.double(), expected, dtype=torch.float32)
    leaves = [t for x in layers for t in (x.call.q, x.call.k)]
    slopes, wanted = torch.autograd.grad(mean, leaves), torch.autograd.grad(expected, leaves)
    for a, b in zip(slopes, wanted, strict=True):
        assert_close(a, b, dtype=torch.float32)
        assert a.abs().max() > 0
    # The sixth head is not guided.
    assert slopes[0][:, 5].abs().max() == 0


UPPER = torch.ones(N, N).triu(1).bool()[None, None]


@pytest.mark.parametrize(
    "hidden", [{"causal": True}, {"mask": ~UPPER}, {"bias": torch.zeros(1, 1, N, N).double().masked_fill(UPPER, -1e9)}]
)
def test_a_pattern_of_tokens_that_the_attention_hides_is_refused(hidden: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="can follow 'next': its attention hides the tokens that the pattern names"):
        guidance_loss([layer(0, **hidden)], Guidance(heads={"prev": 1, "next": 1}), IDS)
    # A text without a full stop is no reason to refuse "period".
    without = SpecialTokens(period=(8,), delimiters=(1, 2))
    assert guidance_loss([layer(0, **hidden)], Guidance(heads={"period": 1}), IDS, tokens=without).total == 0


def test_by_hand() -> None:
    W = torch.tensor([[[[0.5, 0.5], [0.25, 0.75]]]])
    t = pattern_targets("next", torch.tensor([[4, 5]]))
    # Row 0: (0.5 - 0)^2 + (0.5 - 1)^2; row 1, uniform: (0.25 - 0.5)^2 + (0.75 - 0.5)^2.
    assert squared_error(W, t).tolist() == [[[0.5, 0.125]]]


def test_reductions_differ_by_the_length() -> None:
    layers = [layer(0)]
    paper, row = (guidance_loss(layers, Guidance(heads={"prev": 2}, reduction=r), IDS) for r in ("paper", "row"))
    assert_close(row.total / row.count, N * paper.total / paper.count)


def test_parts_of_a_batch_add_up() -> None:
    whole = layer(0, key_visible=MASK.bool())
    guidance = Guidance(heads=HEADS)
    loss = guidance_loss([whole], guidance, IDS, tokens=TOKENS)
    parts = []
    for i in range(B):
        call = whole.call
        some = {name: getattr(call, name)[i : i + 1] for name in ("q", "k", "v", "key_visible")}
        part = replace(whole, call=replace(call, **some), output=call.q[i : i + 1])
        parts.append(guidance_loss([part], guidance, IDS[i : i + 1], tokens=TOKENS))
    assert_close(sum(p.total for p in parts), loss.total)
    assert sum(p.count for p in parts) == loss.count == 5 * 5 + 6 * 6


def test_only_guided_heads_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    own = al.Softmax.reference
    monkeypatch.setattr(al.Softmax, "reference", lambda self, call: (seen.append(call.q.shape[1]), own(self, call))[1])
    guidance_loss([layer(0), layer(1)], Guidance(heads={"next": 1, "first": 2}), IDS)
    assert seen == [1, 2, 1, 2]


def test_layers_are_chosen() -> None:
    layers = [layer(i) for i in range(3)]
    one = guidance_loss(layers, Guidance(heads={"next": 1}, layers=(1,)), IDS)
    assert_close(one.total, guidance_loss(layers[1:2], Guidance(heads={"next": 1}), IDS).total)
    with pytest.raises(ValueError, match=r"no encoder layers \[5\]; those it has: \[0, 1, 2\]"):
        guidance_loss(layers, Guidance(heads={"next": 1}, layers=(1, 5)), IDS)
    both = [layers[0], layer(0, causal=True)]
    with pytest.raises(ValueError, match="one Guidance for each, with kind="):
        guidance_loss(both, Guidance(heads={"next": 1}), IDS)
    assert guidance_loss(both, Guidance(heads={"prev": 1}, kind="decoder"), IDS).total > 0


def test_padding_only_is_nothing_with_a_gradient() -> None:
    hidden = layer(0, key_visible=torch.zeros(B, N, dtype=torch.bool))
    loss = guidance_loss([hidden], Guidance(heads=HEADS), IDS, tokens=TOKENS)
    assert (loss.total.item(), loss.count.item()) == (0.0, 0)
    loss.total.backward()
    assert hidden.call.q.grad.abs().max() == 0


def test_cross_attention_needs_the_queries() -> None:
    q = torch.randn(B, H, 3, D)
    call = al.AttentionCall(q, torch.randn(B, H, N, D), torch.randn(B, H, N, D), key_visible=MASK.bool())
    crossed = [LayerTrace(call, al.Softmax(), q, None, "cross", 0, "cross")]
    guidance = Guidance(heads={"first": 2}, kind="cross", reduction="row")
    with pytest.raises(ValueError, match="pass the queries' ids as queries="):
        guidance_loss(crossed, guidance, IDS)
    loss = guidance_loss(crossed, guidance, IDS, queries=torch.full((B, 3), 4))
    W = crossed[0].weights()[:, :2]
    t = torch.zeros(B, 1, 3, N)
    t[0, ..., 2] = t[1, ..., 0] = 1
    assert_close(loss.total / loss.count, (W - t).square().sum(-1).mean())


def test_wrong_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="must name the 7 keys of this layer, got 5"):
        guidance_loss([layer(0)], Guidance(heads={"next": 1}), IDS[:, :5])


def test_heads_in_index_order() -> None:
    assert Guidance(heads={"next": 1, "prev": 1, "first": 4}).assign(12) == {
        "next": range(1),
        "prev": range(1, 2),
        "first": range(2, 6),
    }
    assert Guidance(fraction=0.5).assign(12) == {
        "next": range(2),
        "prev": range(2, 3),
        "first": range(3, 4),
        "period": range(4, 5),
        "delim": range(5, 6),
    }


def test_layers_take_turns_where_one_has_too_few_heads() -> None:
    guidance = Guidance(fraction=0.5)
    assert [list(guidance.assign(8, layer=i, n_layers=3)) for i in range(3)] == [
        ["next", "prev", "first", "period"],
        ["delim", "next", "prev", "first"],
        ["period", "delim", "next", "prev"],
    ]
    assert guidance.assign(8, layer=1, n_layers=3)["delim"] == range(1)


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_every_named_pattern_is_guided_or_the_assignment_is_refused(count: int) -> None:
    patterns = ("next", "prev", "first", "period", "delim", "same")[:count]
    for fraction, n_heads, n_layers in product((0.1, 0.25, 0.5, 1.0), (1, 2, 4, 8, 12, 16), (1, 2, 3, 12)):
        guidance, guided = Guidance(fraction=fraction, patterns=patterns), round(fraction * n_heads)
        if guided * n_layers < count:
            with pytest.raises(ValueError, match=r"rounds to none|raise the fraction, or name fewer patterns"):
                guidance.assign(n_heads, n_layers=n_layers)
            continue
        layers = [guidance.assign(n_heads, layer=i, n_layers=n_layers) for i in range(n_layers)]
        assert set().union(*layers) == set(guidance.names)
        for assigned in layers:
            assert [head for heads in assigned.values() for head in heads] == list(range(guided))
        if guided < count:
            times = [sum(name in assigned for assigned in layers) for name in guidance.names]
            assert max(times) - min(times) <= 1


def test_layers_of_different_sizes_that_leave_a_pattern_out_are_refused() -> None:
    def of(heads: int, number: int) -> LayerTrace:
        q = torch.randn(B, heads, N, D)
        return LayerTrace(al.AttentionCall(q, q, q), al.Softmax(), q, None, "encoder", number, "layer")

    # One head in layers 0, 1, 3 and 4: next, prev, period, delim; two in layer 2: delim and next.
    layers = [of(heads, i) for i, heads in enumerate((2, 2, 4, 2, 2))]
    with pytest.raises(ValueError, match="no layer has a guided head left for first"):
        guidance_loss(layers, Guidance(fraction=0.5), IDS, tokens=TOKENS)


def test_alpha_holds_then_falls_to_zero_at_the_last_step() -> None:
    guidance = Guidance(heads={"next": 1}, alpha0=100, hold=0.5, steps=41)
    assert [guidance.weight(t) for t in (0, 20, 25, 30, 40, 50)] == [100, 100, 75, 50, 0, 0]
    assert Guidance(heads={"next": 1}, schedule="constant").weight(1000) == 10
    with pytest.raises(ValueError, match=r"give Guidance\(steps=...\), or schedule='constant'"):
        Guidance(heads={"next": 1}).weight(0)


@pytest.mark.parametrize("steps", [2, 3, 10, 1000, 20_000, 1_000_000])
def test_the_default_alpha_reaches_zero_at_the_last_step_of_any_run(steps: int) -> None:
    guidance = Guidance(fraction=0.5, alpha0=10).over(steps)
    assert guidance.weight(0) == 10
    assert guidance.weight(steps - 1) == 0
    points = [guidance.weight(steps * i // 20) for i in range(20)]
    assert points == sorted(points, reverse=True)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match=r"7 guided heads \(next: 3, first: 4\), but a layer has 6"):
        Guidance(heads={"next": 3, "first": 4}).assign(6)
    with pytest.raises(ValueError, match=r"fraction=0.1 of 4 heads rounds to none; the least that guides one is 0.25"):
        Guidance(fraction=0.1).assign(4)
    with pytest.raises(ValueError, match=r"no pattern named 'nxt'; the patterns are next, prev"):
        Guidance(heads={"nxt": 1})
    for given in ({}, {"heads": {"next": 1}, "fraction": 0.5}):
        with pytest.raises(ValueError, match="give either heads"):
            Guidance(**given)
    for fraction in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"fraction must lie in \(0, 1\]"):
            Guidance(fraction=fraction)
    with pytest.raises(ValueError, match="hold is a share of the run, at least 0 and below 1, got 20000"):
        Guidance(heads={"next": 1}, hold=20_000)
    with pytest.raises(ValueError, match="names one twice: next, prev, next"):
        Guidance(fraction=0.5, patterns=("next", "prev", "next"))
    with pytest.raises(ValueError, match="must be a number of heads, got -1"):
        Guidance(heads={"next": -1})
    with pytest.raises(ValueError, match="guides no head"):
        Guidance(heads={"next": 0})
    with pytest.raises(ValueError, match="reduction must be 'paper' or 'row', got 'sum'"):
        unchecked(Guidance, heads={"next": 1}, reduction="sum")
    with pytest.raises(ValueError, match="schedule must be 'linear' or 'constant', got 'cosine'"):
        unchecked(Guidance, heads={"next": 1}, schedule="cosine")
