"""The call and the helpers around it: what is accepted, what is refused and in which words."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import attnlab as al
from attnlab.attention import hide_unseen, mask_with_bias, pair_mask, query_chunks, scores, visible
from attnlab.trace import LayerTrace
from tests.tolerance import assert_close
from tests.unchecked import unchecked

B, H, Q, K, D, E = 2, 6, 5, 7, 11, 13


def tensors(groups: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(B, H, Q, D), torch.randn(B, H // groups, K, D), torch.randn(B, H // groups, K, E)


BAD = {
    "q is no tensor": (lambda q, k, v: {"q": [1.0], "k": k, "v": v}, "q must be a tensor"),
    "q has three axes": (lambda q, k, v: {"q": q[0], "k": k, "v": v}, r"q must be a tensor .* got \(6, 5, 11\)"),
    "widths differ": (lambda q, k, v: {"q": q[..., :3], "k": k, "v": v}, "same width, got 3 and 11"),
    "k and v differ": (lambda q, k, v: {"q": q, "k": k, "v": v[:, :, :4]}, r"k and v must agree .* \(2, 6, 7\) and \(2, 6, 4\)"),
    "batches differ": (lambda q, k, v: {"q": q[:1], "k": k, "v": v}, "same batch size, got 1 and 2"),
    "heads do not divide": (
        lambda q, k, v: {"q": q, "k": k[:, :4], "v": v[:, :4]},
        r"multiple of key/value heads, got 6 and 4; did you pass \(batch, length, heads, width\)",
    ),
    "integer q": (lambda q, k, v: {"q": q.long(), "k": k.long(), "v": v.long()}, "q must be floating point"),
    "dtypes differ": (lambda q, k, v: {"q": q, "k": k.double(), "v": v}, "k is torch.float64 but q is torch.float32; cast"),
    "devices differ": (lambda q, k, v: {"q": q, "k": k, "v": v.to("meta")}, "v is on meta but q is on cpu; move"),
    "x of another batch": (lambda q, k, v: {"q": q, "k": k, "v": v, "x": torch.zeros(1, K, 3)}, r"x must be .* \(2, <= 7, m\)"),
    "x longer than the keys": (lambda q, k, v: {"q": q, "k": k, "v": v, "x": torch.zeros(B, K + 1, 3)}, "what the keys were made from"),
    "additive mask": (
        lambda q, k, v: {"q": q, "k": k, "v": v, "mask": torch.zeros(1, 1, Q, K)},
        r"mask must be bool .* an additive mask goes into bias=",
    ),
    "0/1 padding": (lambda q, k, v: {"q": q, "k": k, "v": v, "key_visible": torch.ones(B, K).long()}, r"\.bool\(\)"),
    "padding of the queries": (
        lambda q, k, v: {"q": q, "k": k, "v": v, "key_visible": torch.ones(B, Q, dtype=torch.bool)},
        r"key_visible must be \(batch, keys\) = \(2, 7\), got \(2, 5\)",
    ),
    "mask turned round": (
        lambda q, k, v: {"q": q, "k": k, "v": v, "mask": torch.ones(1, 1, K, Q, dtype=torch.bool)},
        r"= \(2, 6, 5, 7\), got \(1, 1, 7, 5\); did you pass \(k, q\)\?",
    ),
    "bias without heads": (lambda q, k, v: {"q": q, "k": k, "v": v, "bias": torch.zeros(Q, K)}, "bias must be"),
    "NaN scale": (lambda q, k, v: {"q": q, "k": k, "v": v, "scale": math.nan}, r"positive finite number, got nan; None means 1/sqrt\(d\)"),
    "negative scale": (lambda q, k, v: {"q": q, "k": k, "v": v, "scale": -1.0}, "positive finite number"),
    "fractional offset": (lambda q, k, v: {"q": q, "k": k, "v": v, "causal": True, "offset": 1.5}, "offset must be an int"),
    "offset without causal": (lambda q, k, v: {"q": q, "k": k, "v": v, "offset": 2}, "no meaning without causal=True"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_call_says_what_came_and_what_to_do(case: str) -> None:
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        unchecked(al.AttentionCall, **make(*tensors()))


def test_what_each_query_sees() -> None:
    q, k, v = tensors()
    call = al.AttentionCall(
        q, k, v, causal=True, offset=1, key_visible=torch.tensor([[1] * K, [0] + [1] * (K - 1)]).bool()
    )
    seen = visible(call)
    assert seen[0, 0].sum(-1).tolist() == [2, 3, 4, 5, 6]
    assert seen[1, 0].sum(-1).tolist() == [1, 2, 3, 4, 5]
    assert visible(al.AttentionCall(q, k, v)) is None


def test_scores_by_hand() -> None:
    q = torch.tensor([[[[1.0, 2.0]]]])
    k = torch.tensor([[[[3.0, 4.0], [5.0, 6.0]]]])
    plain = al.AttentionCall(q, k, k, scale=0.5, bias=torch.tensor([[[[0.0, 1.0]]]]))
    assert scores(plain).flatten().tolist() == [5.5, 9.5]
    assert_close(scores(al.AttentionCall(q, k, k)), torch.tensor([[[[11.0, 17.0]]]]) / 2**0.5)


def test_hidden_keys_are_cleared_per_key_head() -> None:
    q, k, v = tensors(groups=2)
    mask = torch.ones(1, H, Q, K, dtype=torch.bool)
    # Key 3 is hidden from both query heads of key head 0; key 4 from only one of them.
    mask[:, 0:2, :, 3] = False
    mask[:, 0, :, 4] = False
    cleared = hide_unseen(al.AttentionCall(q, k, v, mask=mask))
    assert (cleared.k[:, 0, 3] == 0).all()
    assert (cleared.v[:, 0, 3] == 0).all()
    assert_close(cleared.k[:, 0, 4], k[:, 0, 4])
    assert_close(cleared.k[:, 1:], k[:, 1:])


def test_keys_past_the_last_query_are_cleared() -> None:
    q, k, v = tensors()
    cleared = hide_unseen(al.AttentionCall(q, k, v, causal=True, offset=1, x=torch.ones(B, 3, 2)))
    assert (cleared.k[:, :, 6] == 0).all()
    assert_close(cleared.k[:, :, :6], k[:, :, :6])
    # x covers the last three keys: 4, 5 and the hidden 6.
    assert cleared.x[0, :, 0].tolist() == [1, 1, 0]


def test_chunks_of_queries_are_the_same_call() -> None:
    q, k, v = tensors()
    call = al.AttentionCall(q, k, v, causal=True, offset=2, bias=torch.randn(1, H, Q, K))
    chunks = query_chunks(call, budget=2 * B * H * K)
    assert [part.q.shape[2] for part in chunks] == [2, 2, 1]
    assert [part.offset for part in chunks] == [2, 4, 6]
    whole = al.Softmax().weights(call)
    assert_close(torch.cat([al.Softmax().weights(part) for part in chunks], 2), whole)


def test_a_mechanism_must_define_its_reference() -> None:
    class Nothing(al.Mechanism):
        pass

    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="Nothing must define reference"):
        Nothing().weights(al.AttentionCall(q, k, v))


HIDING = [-torch.inf, torch.finfo(torch.float32).min, -1e9, -65504.0, -1e4]


@pytest.mark.parametrize("number", HIDING)
def test_a_number_that_masks_are_written_with_hides_its_pair(number: float) -> None:
    q, k, v = torch.randn(3, 1, 1, 3, 4)
    bias = torch.tensor([[[[3.0, number, -2.0], [number, number + 40.0, 7.0], [-300.0, 0.0, -900.0]]]])
    seen = visible(al.AttentionCall(q, k, v, bias=bias))
    assert seen is not None
    assert seen.tolist() == [[[[True, False, True], [False, False, True], [True, True, True]]]]


def test_a_bias_is_no_mask() -> None:
    q, k, v = torch.randn(3, 1, 1, 4, 4)
    # MPT counts ALiBi from the last key, so that the first query sees only biases that are far below zero.
    far = -0.5 * (20_000.0 + torch.arange(4.0).flip(0))
    call = al.AttentionCall(q, k, v, bias=far.expand(1, 1, 4, 4), causal=True)
    assert torch.equal(pair_mask(call), torch.ones(1, 1, 4, 4, dtype=torch.bool))
    assert mask_with_bias(call) is None
    assert_close(al.Softmax()(call)[0, 0, 0], v[0, 0, 0], what="the first query sees its own key")


def test_biases_of_keys_that_a_query_does_not_see_count_for_nothing() -> None:
    q, k, v = torch.randn(3, 1, 1, 2, 4)
    bias = torch.tensor([[[[0.0, 9e9], [0.0, 1.0]]]])
    seen = visible(al.AttentionCall(q, k, v, bias=bias, causal=True))
    assert seen is not None
    assert seen.tolist() == [[[[True, False], [True, True]]]]


def test_plus_infinity_in_a_bias_does_not_hide_itself() -> None:
    q, k, v = torch.randn(3, 1, 1, 2, 4)
    seen = visible(al.AttentionCall(q, k, v, bias=torch.tensor([[[[torch.inf, 0.0], [0.0, 0.0]]]])))
    assert seen is not None
    assert seen[0, 0, :, 0].tolist() == [True, True]


@pytest.mark.parametrize("number", HIDING[:3])
def test_effective_attention_gives_nothing_to_keys_that_the_bias_hides(number: float) -> None:
    q, k = torch.randn(2, 1, 2, 9, 4)
    v = torch.randn(1, 2, 9, 3)
    ahead = torch.ones(9, 9, dtype=torch.bool).triu(1)
    bias = torch.randn(1, 2, 9, 9).masked_fill(ahead, number)
    call = al.AttentionCall(q, k, v, bias=bias)
    layer = LayerTrace(call, al.Softmax(), al.Softmax()(call), None, "decoder", 0, "attention")
    effective = al.effective_attention(layer)
    assert (effective.weights[..., ahead] == 0).all()
    expected = al.effective_attention(replace(layer, call=replace(call, causal=True)))
    assert_close(effective.weights, expected.weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "spec", ["softmax", "effective-softmax", "window:r=6", "abc-window:slots=3", "lsh:r=4,rounds=2"]
)
@pytest.mark.parametrize("size", [5.0, 300.0])
def test_half_precision_keeps_scores_that_it_cannot_hold(dtype: torch.dtype, spec: str, size: float) -> None:
    """Scores of some hundred have no digit after the point in half precision, and 7e5 is beyond float16."""
    q, k = ((torch.randn(1, 2, 40, 64) * size).to(dtype) for _ in range(2))
    v = torch.randn(1, 2, 40, 8).to(dtype)
    mech = al.mechanism(spec)
    exact = mech(al.AttentionCall(q.double(), k.double(), v.double(), causal=True))
    call = al.AttentionCall(q, k, v, causal=True)
    assert_close(mech(call), exact, what="the output")
    assert_close(mech.weights(call) @ v, exact, what="W @ v")
    assert mech.weights(call).dtype == dtype
