"""Kernels other than the exponential: by hand, in linear time, and where they are not defined."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attnlab as al
from attnlab.mechanisms import kernelized
from attnlab.mechanisms._linear import linear_attention
from attnlab.mechanisms.kernelized import _pairs
from tests.tolerance import assert_close


def call(n_q: int = 5, n_k: int = 7, *, d: int = 3, **options: object) -> al.AttentionCall:
    def draw(n: int, heads: int, width: int) -> torch.Tensor:
        return torch.randn(2, heads, n, width, dtype=torch.float64)

    return al.AttentionCall(draw(n_q, 6, d), draw(n_k, 3, d), draw(n_k, 3, 11), **options)


def one(q: list[float], k: list[list[float]], v: list[list[float]]) -> al.AttentionCall:
    return al.AttentionCall(torch.tensor([[[q]]]), torch.tensor([[k]]), torch.tensor([[v]]))


def test_squared_scores_by_hand() -> None:
    # <q, k> = 1, 2, -3: squares 1, 4, 9 of 14.
    weights = al.Kernelized("poly", degree=2).weights(one([1.0], [[1.0], [2.0], [-3.0]], [[1.0], [0.0], [0.0]]))
    assert_close(weights.flatten(), torch.tensor([1.0, 4.0, 9.0]) / 14)


def test_degree_zero_is_the_mean_and_odd_degrees_keep_their_sign() -> None:
    c = one([1.0], [[1.0], [2.0], [-1.0]], [[3.0], [6.0], [9.0]])
    assert_close(al.Kernelized("poly", degree=0)(c).flatten(), torch.tensor([6.0]))
    assert_close(al.Kernelized("poly", degree=1).weights(c).flatten(), torch.tensor([0.5, 1.0, -0.5]))


def test_elu_by_hand() -> None:
    # phi(1) = 2, phi(0) = 1, phi(-inf) = 0: kappa = 2 * 2, 2 * 1.
    c = one([1.0], [[1.0], [0.0]], [[1.0], [0.0]])
    assert_close(al.Kernelized("elu").weights(c).flatten(), torch.tensor([2.0, 1.0]) / 3)


def test_the_exponential_kernel_is_softmax() -> None:
    c = call(bias=torch.randn(1, 1, 5, 7, dtype=torch.float64))
    assert_close(al.Kernelized("exp")(c), al.Softmax()(c))
    assert_close(al.Kernelized("exp").weights(c), al.Softmax().weights(c))


def test_the_role_of_scale() -> None:
    """kappa(sqrt(s) q, sqrt(s) k): no scale means 1 for elu; in a polynomial it cancels."""
    c = call()
    root = 0.3**0.5
    scaled = replace(c, q=root * c.q, k=root * c.k)
    assert_close(al.Kernelized("elu")(replace(c, scale=0.3)), al.Kernelized("elu")(scaled))
    assert_close(al.Kernelized("elu")(c), al.Kernelized("elu")(replace(c, scale=1.0)))
    assert_close(al.Kernelized("poly")(replace(c, scale=0.3)), al.Kernelized("poly")(c))


def test_a_zero_denominator_gives_zero() -> None:
    c = one([0.0], [[1.0], [2.0]], [[1.0], [2.0]])
    for degree in (1, 2):
        assert al.Kernelized("poly", degree=degree)(c).item() == 0
    opposite = one([1.0], [[1.0], [-1.0]], [[1.0], [2.0]])
    assert al.Kernelized("poly", degree=1)(opposite).item() == 0
    assert linear_attention(c, _pairs).item() == 0


@pytest.mark.parametrize("kernel", ["elu", "poly"])
def test_linear_forms_refuse_a_bias(kernel: str) -> None:
    with pytest.raises(ValueError, match="bias added to scores belongs to the exponential"):
        al.Kernelized(kernel)(call(bias=torch.zeros(1, 1, 5, 7, dtype=torch.float64)))


def test_features_of_the_squared_kernel() -> None:
    x, y = torch.randn(2, 13, 5, dtype=torch.float64)
    assert_close((_pairs(x) * _pairs(y)).sum(-1), (x * y).sum(-1) ** 2)
    assert _pairs(x).shape[-1] == 5 * 6 // 2


@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
@pytest.mark.parametrize("offset", [-2, 0, 2, 4, 9, None])
def test_squared_kernel_in_linear_time(monkeypatch: pytest.MonkeyPatch, chunk: int, offset: int | None) -> None:
    """Forward and backward against the reference; None is bidirectional."""
    options = {} if offset is None else {"causal": True, "offset": offset}
    c = call(key_visible=torch.rand(2, 7) > 0.3, **options)
    mech = al.Kernelized("poly", degree=2)
    leaves = [t.requires_grad_() for t in (c.q, c.k, c.v)]
    expected = super(al.Kernelized, mech).forward(c)
    out = linear_attention(c, _pairs, chunk=chunk)
    assert_close(out, expected)
    seed = torch.randn_like(out)
    for got, wanted in zip(
        torch.autograd.grad(out, leaves, seed), torch.autograd.grad(expected, leaves, seed), strict=True
    ):
        assert_close(got, wanted)


def test_the_squared_kernel_turns_linear_when_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(kernelized, "linear_attention", lambda c, *a, **k: used.append(c.k.shape[2]) or c.v)
    mech = al.Kernelized("poly", degree=2)
    mech(call(n_k=12, d=3))
    assert used == []
    mech(call(n_k=13, d=3))
    assert used == [13]


def test_half_precision_sums_in_float32() -> None:
    """A thousand equal values: their mean is exact, though bfloat16 cannot count past 256."""
    ones = torch.ones(1, 1, 1000, 4, dtype=torch.bfloat16)
    call = al.AttentionCall(ones, ones, ones * 3, causal=True)
    assert (al.Kernelized("elu")(call) == 3).all()
    with torch.autocast("cpu", torch.bfloat16):
        assert (al.Kernelized("elu")(call) == 3).all()
