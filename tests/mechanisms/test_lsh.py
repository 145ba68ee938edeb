from __future__ import annotations

import pytest
import torch

import attnlab as al
from attnlab.mechanisms.lsh import Lsh
from tests.tolerance import assert_close


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_one_chunk_is_exact(rounds: int, causal: bool) -> None:
    q, k, v = (torch.randn(2, 3, 7, 11, dtype=torch.float64) for _ in range(3))
    call = al.AttentionCall(q, k, v, causal=causal)
    for r in (14, 1000):
        assert_close(Lsh(r=r, rounds=rounds)(call), al.Softmax()(call))


def test_a_query_meets_r_keys_a_round_and_the_first_chunk_half_as_many() -> None:
    q, k, v = (torch.randn(1, 1, 24, 5) for _ in range(3))
    met = (Lsh(r=8, rounds=1).weights(al.AttentionCall(q, k, v)) > 0).sum(-1).flatten()
    assert sorted(met.tolist()) == [4] * 4 + [8] * 20


def test_hits_of_several_rounds_add_up() -> None:
    q, k, v = (torch.randn(1, 1, 12, 5, dtype=torch.float64) for _ in range(3))
    call = al.AttentionCall(q, k, v)
    kappa = (q @ k.mT / 5**0.5).exp()
    # Round t alone, from its own weights: which pairs met.
    one = (Lsh(r=4, rounds=1).weights(call) > 0).double()
    two = Lsh(r=4, rounds=2).weights(call)
    other = torch.where(one > 0, two / kappa, torch.inf).amin(-1, keepdim=True)
    hits = (two / kappa / other).round()
    assert set(hits.unique().tolist()) <= {0.0, 1.0, 2.0}
    assert (hits >= one).all()
    assert_close(two, hits * kappa / (hits * kappa).sum(-1, keepdim=True))


def test_more_rounds_come_closer() -> None:
    q, k, v = (torch.randn(1, 4, 128, 16) for _ in range(3))
    call = al.AttentionCall(q, k, v)
    exact = al.Softmax()(call)
    errors = [float((Lsh(r=16, rounds=n)(call) - exact).norm()) for n in (1, 4, 16)]
    assert errors[0] > errors[1] > errors[2]


def test_the_seed_decides_and_nothing_else_does() -> None:
    q, k, v = (torch.randn(2, 3, 40, 11) for _ in range(3))
    call = al.AttentionCall(q, k, v)
    torch.manual_seed(1)
    first = Lsh(r=8)(call)
    torch.manual_seed(2)
    assert torch.equal(first, Lsh(r=8)(call))
    assert not torch.equal(first, Lsh(r=8, seed=1)(call))


@pytest.mark.parametrize(("bad", "why"), [("r=0", "even int"), ("r=7", "even int"), ("rounds=0", "rounds must be")])
def test_bad_settings_are_refused(bad: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        al.mechanism(f"lsh:{bad}")
