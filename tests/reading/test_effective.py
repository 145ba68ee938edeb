"""Effective attention against its definition: a pseudo-inverse per row, over the keys that the row sees."""

from __future__ import annotations

import pytest
import torch

from attnlab.attention import repeat_groups
from attnlab.mechanisms.softmax import softmax
from attnlab.reading.effective import effective_attention, effective_from_output
from tests.reading.effective_cases import CASES, VALUES, definition, seen_by


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_pseudo_inverse_of_what_each_query_sees(case: str, values: str) -> None:
    torch.manual_seed(0)
    (b, h, q, k, e), masks = CASES[case]
    v = VALUES[values](torch.randn(b, h // 2, k, e))
    seen = seen_by((b, h, q, k), **masks)
    w = softmax((2 * torch.randn(b, h, q, k)).masked_fill(~seen, -torch.inf))
    expected, rank = definition(w, v, seen)

    effective = effective_attention(w, v, **masks)

    torch.testing.assert_close(effective.weights.double(), expected, atol=2e-6, rtol=0)
    assert not effective.weights[~seen].any()
    assert torch.equal(effective.rank, rank)
    assert torch.equal(effective.trivial, seen.sum(-1) <= rank)
    assert effective.residual.max() < 1e-5
    share = 1 - expected.square().sum((-1, -2)) / w.double().square().sum((-1, -2))
    torch.testing.assert_close(effective.removed.double(), share, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_values_are_enough(case: str) -> None:
    torch.manual_seed(0)
    (b, h, q, k, e), masks = CASES[case]
    v = torch.randn(b, h // 2, k, e)
    seen = seen_by((b, h, q, k), **masks)
    w = softmax(torch.randn(b, h, q, k).masked_fill(~seen, -torch.inf))
    whole = effective_attention(w, v, **masks)

    rows = effective_from_output(w @ repeat_groups(v, 2), v, **masks)

    # Rounding in the output is amplified by the condition number of the values.
    torch.testing.assert_close(rows.weights(), whole.weights, atol=3e-5, rtol=0)
    torch.testing.assert_close(torch.cat([part for _, part in rows.chunks(3)], 2), rows.weights())
    assert rows.residual(size=4).max() < 1e-5
    assert torch.equal(rows.rank, whole.rank)
    assert torch.equal(rows.trivial, whole.trivial)
    assert not rows.weights()[~seen].any()


def test_a_value_that_two_keys_share_is_shared_evenly() -> None:
    # Keys 0 and 1 have the same value: only the sum of their weights reaches the output.
    v = torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]])
    effective = effective_attention(torch.tensor([[[[0.6, 0.2, 0.2]]]]), v)
    torch.testing.assert_close(effective.weights, torch.tensor([[[[0.4, 0.4, 0.2]]]]))
    assert effective.rank.tolist() == [[[2]]]
    assert not effective.trivial.any()
    # |(0.2, -0.2, 0)|^2 / |(0.6, 0.2, 0.2)|^2
    torch.testing.assert_close(effective.removed, torch.tensor([[0.08 / 0.44]]))


@pytest.mark.parametrize("case", ["encoder", "cross padded", "some items short", "window"])
def test_gradients_match_finite_differences(case: str) -> None:
    torch.manual_seed(0)
    (_, _, q, k, e), masks = CASES[case]
    q, k, e = min(q, 3), min(k, 7), min(e, 2)
    cut = {name: t[..., :q, :k] if name == "mask" else t[:, -k:] for name, t in masks.items()}
    _gradcheck((2, 2, q, k, e), cut)


@pytest.mark.parametrize("masks", [{"causal": True}, {"causal": True, "offset": 3}])
def test_causal_gradients_match_finite_differences(masks: dict) -> None:
    torch.manual_seed(0)
    _gradcheck((1, 2, 5, 5 + masks.get("offset", 0), 2), masks)


def _gradcheck(shape, masks) -> None:
    b, h, q, k, e = shape
    seen = seen_by((b, h, q, k), **masks)
    w = (torch.rand(b, h, q, k, dtype=torch.float64) * seen).requires_grad_()
    v = torch.randn(b, 1, k, e, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w, v: effective_attention(w, v, **masks).weights, (w, v), atol=1e-6)


@pytest.mark.parametrize("equal", [[(2, 1)], [(1, 0), (4, 0)], [(70, 3)]])
def test_a_repeated_value_within_the_first_rank_keys_of_a_causal_map(equal: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    v = torch.randn(1, 2, 83, 7)
    for to, source in equal:
        v[:, :, to] = v[:, :, source]
    w = torch.rand(1, 2, 83, 83).tril()
    seen = torch.ones(1, 1, 83, 83, dtype=torch.bool).tril()
    effective = effective_attention(w, v, causal=True)
    expected, rank = definition(w, v, seen.expand_as(w))
    assert torch.equal(effective.rank.expand_as(rank), rank)
    torch.testing.assert_close(effective.weights.double(), expected, atol=1e-5, rtol=0)
    without = effective_from_output(w @ v, v, causal=True).weights()
    torch.testing.assert_close(without.double(), expected, atol=1e-5, rtol=0)


def test_float64_keeps_its_digits_where_the_gram_matrix_would_lose_them() -> None:
    torch.manual_seed(0)
    v = torch.randn(1, 1, 29, 5, dtype=torch.float64) * 10.0 ** -torch.linspace(0, 9, 5, dtype=torch.float64)
    w = torch.rand(1, 1, 3, 29, dtype=torch.float64)
    effective = effective_attention(w, v)
    expected, rank = definition(w, v, torch.ones_like(w, dtype=torch.bool))
    assert torch.equal(effective.rank, rank)
    # A direction of relative size 1e-9 is known to seven digits.
    torch.testing.assert_close(effective.weights, expected, atol=1e-6, rtol=0)


def test_half_precision_comes_back_as_it_came() -> None:
    torch.manual_seed(0)
    w, v = torch.rand(1, 2, 3, 17), torch.randn(1, 2, 17, 5)
    effective = effective_attention(w.bfloat16(), v.bfloat16())
    assert effective.weights.dtype == torch.bfloat16
    expected = effective_attention(w.bfloat16().float(), v.bfloat16().float())
    torch.testing.assert_close(effective.weights.float(), expected.weights, atol=1e-2, rtol=0)


def test_memory_from_outputs_grows_with_the_length_not_its_square() -> None:
    from attnlab.measure import peak_bytes

    def peak(n: int) -> int:
        o, v = torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)
        return peak_bytes(lambda: effective_from_output(o, v, causal=True))

    assert peak(2048) < 2.3 * peak(1024)
    assert peak(2048) < 0.2 * 4 * 2 * 2048**2
