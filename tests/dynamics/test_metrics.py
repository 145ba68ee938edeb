"""Agreement, its baseline, tau and xi against loops that read like the definitions."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from attnlab.dynamics.metrics import Xi, agreement, contextualised, kendall_tau, pad_rows, random_agreement
from tests.tolerance import assert_close


def by_definition(u: np.ndarray, v: np.ndarray) -> float:
    above = sum(x > v[np.argmax(u)] for x in v)
    return float(above < -(-len(u) * 5 // 100))


def scipy_tau(u: np.ndarray, v: np.ndarray) -> float:
    with warnings.catch_warnings():
        # scipy warns about rows too short to rank, and answers NaN.
        warnings.simplefilter("ignore")
        return float(kendalltau(u, v).statistic)


def ragged(seed: int = 0, *, levels: int | None = None) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    sizes = [1, 2, 3, 19, 20, 21, 40, 41, 63, 100, 140, 141]
    draw = rng.standard_normal if levels is None else lambda n: rng.integers(0, levels, n).astype(float)
    return [draw(n) for n in sizes], [draw(n) for n in sizes]


@pytest.mark.parametrize("levels", [None, 2, 5])
def test_agreement_is_equation_10(levels: int | None) -> None:
    for seed in range(20):
        us, vs = ragged(seed, levels=levels)
        (u, lengths), (v, _) = pad_rows(us), pad_rows(vs)
        expected = [by_definition(*pair) for pair in zip(us, vs, strict=True)]
        assert agreement(u, v, lengths=lengths).tolist() == expected


def test_by_hand() -> None:
    """The largest u is at 2, where v is second largest: not in the top one of 3, but in the top two of 21."""
    u, v = torch.tensor([[0.0, 1, 9]]), torch.tensor([[7.0, 1, 6]])
    assert agreement(u, v).tolist() == [0.0]
    assert agreement(v, u).tolist() == [0.0]
    longer = torch.zeros(1, 18)
    assert agreement(torch.cat([u, longer], 1), torch.cat([v, longer], 1)).tolist() == [1.0]


def test_asymmetric() -> None:
    u, v = torch.tensor([[2.0, 1, 0]]), torch.tensor([[1.0, 1, 0]])
    w = torch.tensor([[1.0, 2, 2]])
    assert agreement(u, v).item() == agreement(v, u).item() == 1
    assert (agreement(v, w).item(), agreement(w, v).item()) == (0, 1)


def test_140_positions_allow_seven() -> None:
    """ceil(0.05 * 140) is 7, though 0.05 * 140 is above 7 in floating point."""
    v = torch.arange(140.0)[None]
    for rank, expected in ((6, 1.0), (7, 0.0)):
        u = torch.zeros(1, 140)
        u[0, 139 - rank] = 1
        assert agreement(u, v).item() == expected


def test_uniform_v_and_length_one_agree_with_everything() -> None:
    assert agreement(torch.randn(3, 7), torch.full((3, 7), 1 / 7)).tolist() == [1, 1, 1]
    assert agreement(torch.randn(3, 1), torch.randn(3, 1)).tolist() == [1, 1, 1]


def test_padding_is_never_read() -> None:
    us, vs = ragged()
    (u, lengths), (v, _) = pad_rows(us), pad_rows(vs)
    hidden = torch.arange(u.shape[1]) >= lengths[:, None]
    clean = agreement(u, v, lengths=lengths), kendall_tau(u, v, lengths=lengths)
    for poison in (torch.nan, torch.inf, -torch.inf):
        a, b = u.masked_fill(hidden, poison), v.masked_fill(hidden, poison)
        assert agreement(a, b, lengths=lengths).equal(clean[0])
        torch.testing.assert_close(kendall_tau(a, b, lengths=lengths), clean[1], equal_nan=True)
        assert random_agreement(a, b, lengths=lengths).equal(random_agreement(u, v, lengths=lengths))


def test_all_minus_infinity_takes_the_first_position() -> None:
    u, v = torch.full((1, 3), -torch.inf), torch.tensor([[3.0, 2, 9]])
    assert agreement(u, v, lengths=torch.tensor([2])).item() == 1


def test_empty_rows_have_no_agreement() -> None:
    u, lengths = pad_rows([[], [1.0, 2.0]])
    assert math.isnan(agreement(u, u, lengths=lengths)[0])
    assert math.isnan(kendall_tau(u, u, lengths=lengths)[0])
    assert agreement(u, u, lengths=lengths).nanmean() == 1
    assert math.isnan(random_agreement(u, u, lengths=lengths)[0])
    nothing, none = pad_rows([])
    assert agreement(nothing, nothing, lengths=none).shape == kendall_tau(nothing, nothing).shape == (0,)
    blank, zero = pad_rows([[]])
    assert math.isnan(agreement(blank, blank, lengths=zero).item())


def test_bad_input_is_named() -> None:
    u = torch.zeros(2, 3)
    bad = u.clone()
    bad[1, 2] = torch.nan
    for call in (agreement, kendall_tau, random_agreement):
        with pytest.raises(ValueError, match="v has a NaN in row 1"):
            call(u, bad)
        with pytest.raises(ValueError, match="between 0 and the batch's width 3, got 1 to 4"):
            call(u, u, lengths=torch.tensor([1, 4]))
    assert agreement(u, bad, lengths=torch.tensor([3, 2])).tolist() == [1, 1]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        random_agreement(u, u, shuffles=0)


def test_the_baseline_is_near_its_expectation_and_seeded() -> None:
    u, v = torch.randn(2, 4001, 41)
    first = random_agreement(u, v, seed=3)
    assert first.equal(random_agreement(u, v, seed=3))
    assert not first.equal(random_agreement(u, v, seed=4))
    # ceil(0.05 * 41) / 41, with a standard error of 0.002 at three shuffles.
    assert abs(random_agreement(u, v, shuffles=3).mean().item() - 3 / 41) < 0.008


@pytest.mark.parametrize("levels", [None, 2, 3, 11])
def test_tau_is_scipys(levels: int | None) -> None:
    for seed in range(5):
        us, vs = ragged(seed, levels=levels)
        (u, lengths), (v, _) = pad_rows(us), pad_rows(vs)
        expected = [scipy_tau(*pair) for pair in zip(us, vs, strict=True)]
        torch.testing.assert_close(
            kendall_tau(u, v, lengths=lengths), torch.tensor(expected, dtype=torch.float64), equal_nan=True
        )


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([-math.inf, 0.0, 1.0, math.inf])), min_size=1, max_size=9)
)
@settings(max_examples=60, deadline=None)
def test_tau_is_scipys_with_ties_and_infinities(pairs: list[tuple[int, float]]) -> None:
    u, v = torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])
    expected = torch.tensor([scipy_tau(u.numpy(), v.numpy())], dtype=torch.float64)
    torch.testing.assert_close(kendall_tau(u[None], v[None]), expected, equal_nan=True)


def test_tau_in_chunks_is_tau(monkeypatch: pytest.MonkeyPatch) -> None:
    u, v = torch.randn(2, 23, 13)
    lengths = torch.randint(0, 14, (23,))
    whole = kendall_tau(u, v, lengths=lengths)
    monkeypatch.setattr("attnlab.dynamics.metrics.PAIRS", 200)
    torch.testing.assert_close(kendall_tau(u, v, lengths=lengths), whole, equal_nan=True, rtol=0, atol=0)


def test_tau_by_hand() -> None:
    """Five concordant pairs and one discordant, without ties: 4/6."""
    assert_close(
        kendall_tau(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 4, 3]])),
        torch.tensor([4 / 6], dtype=torch.float64),
    )


def test_xi_takes_the_first_strictly_greater_checkpoint() -> None:
    curve, performance = [0.1, 0.3, 0.2, 0.6, 0.5], [10, 20, 30, 40, 50]
    assert contextualised(0.05, curve=curve, performance=performance) == Xi(10, 0)
    assert contextualised(0.1, curve=curve, performance=performance) == Xi(20, 1)
    assert contextualised(0.3, curve=curve, performance=performance) == Xi(40, 3)
    never = contextualised(0.6, curve=curve, performance=performance)
    assert never == Xi(50, None)
    assert never.starred
    assert str(never) == "50.00*"


def test_xi_refuses_what_has_no_meaning() -> None:
    with pytest.raises(ValueError, match="got 2 and 1 values"):
        contextualised(0.5, curve=[0.1, 0.2], performance=[1])
    with pytest.raises(ValueError, match="got 0 and 0"):
        contextualised(0.5, curve=[], performance=[])
    with pytest.raises(ValueError, match="NaN"):
        contextualised(math.nan, curve=[0.1], performance=[1])


def test_tau_of_half_precision() -> None:
    u, v = torch.randn(2, 3, 11).bfloat16()
    expected = kendall_tau(u.float(), v.float())
    assert torch.equal(kendall_tau(u, v), expected)
    assert torch.equal(kendall_tau(u.float().half(), v.float().half()), expected)
