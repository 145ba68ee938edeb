from __future__ import annotations

import pytest
import torch

import attnlab as al
from attnlab.mechanisms.orf import Orf, random_features
from tests.tolerance import assert_close


def estimate(features: int, variant: str, seed: int, q: torch.Tensor, k: torch.Tensor) -> float:
    """<Phi(q), Phi(k)>, the estimate of exp(<q, k>)."""
    R = random_features(features, len(q), variant, seed)
    phi = [torch.exp(R @ x - x.square().sum() / 2) / features**0.5 for x in (q, k)]
    return float(phi[0] @ phi[1])


def test_the_corrected_estimate_converges_as_one_over_the_root_of_the_features() -> None:
    q, k = torch.randn(2, 8, dtype=torch.float64) * 0.25
    true = float((q @ k).exp())
    spread = {}
    for features in (16, 256, 4096):
        errors = torch.tensor([estimate(features, "corrected", seed, q, k) - true for seed in range(60)])
        assert abs(float(errors.mean())) < 4 * float(errors.std()) / 60**0.5
        spread[features] = float(errors.square().mean().sqrt())
    for fewer, more in ((16, 256), (256, 4096)):
        # Sixteen times the features: a quarter of the error, within the scatter of 60 draws.
        assert 2.5 < spread[fewer] / spread[more] < 6.5


def test_the_estimate_as_written_is_biased() -> None:
    d = 8
    q = k = torch.full((d,), (1.0986122886681098 / d) ** 0.5, dtype=torch.float64)
    written = [estimate(4096, "as-written", seed, q, k) for seed in range(5)]
    corrected = [estimate(4096, "corrected", seed, q, k) for seed in range(5)]
    assert max(written) < 0.6
    assert_close(torch.tensor(corrected).mean(), torch.tensor(3.0), dtype=torch.bfloat16)


def test_rows_of_a_block_are_orthogonal() -> None:
    R = random_features(16, 8, "corrected", 0)
    gram = R[:8] @ R[:8].T
    assert_close(gram, torch.diag(gram.diagonal()))
    assert_close(
        random_features(5, 8, "as-written", 0) @ random_features(5, 8, "as-written", 0).T, torch.eye(5).double()
    )


def test_large_keys_do_not_overflow_and_the_future_does_not_move_the_past() -> None:
    q, k, v = (torch.randn(1, 2, 150, 8) for _ in range(3))
    call = al.AttentionCall(q, 30 * k, v, causal=True)
    out = Orf(features=64)(call)
    assert torch.isfinite(out).all()
    k = call.k.clone()
    k[:, :, 100:] *= 100
    assert torch.equal(Orf(features=64)(al.AttentionCall(q, k, v, causal=True))[:, :, :100], out[:, :, :100])


def test_many_features_come_close_to_softmax() -> None:
    q, k, v = (torch.randn(1, 2, 63, 8, dtype=torch.float64) * scale for scale in (0.7, 0.7, 1.0))
    for causal in (False, True):
        call = al.AttentionCall(q, k, v, causal=causal)
        exact = al.Softmax()(call)
        few, many = ((Orf(features=n)(call) - exact).norm() / exact.norm() for n in (64, 8192))
        assert many < 0.1 < few


@pytest.mark.parametrize(("bad", "why"), [("features=0", "at least 1"), ("variant=fixed", "variant must be one of")])
def test_bad_settings_are_refused(bad: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        al.mechanism(f"orf:{bad}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [25, 250, 2500])
def test_float32_keeps_rows_whose_features_have_no_product_that_it_can_hold(size: float, causal: bool) -> None:
    """Scores that differ by 100, 1,000 and 10,000; products of features as small as exp(-200) used to be lost."""
    q, k = (torch.randn(1, 2, 40, 16) * size**0.5 for _ in range(2))
    v = torch.randn(1, 2, 40, 8).requires_grad_()
    call = al.AttentionCall(q, k.requires_grad_(), v, causal=causal)
    wide = al.AttentionCall(q.double(), k.double(), v.double(), causal=causal)
    mech = al.mechanism("orf:features=64")
    out = mech(call)
    # log Phi is as large as the scores, so that its rounding grows with them.
    torch.testing.assert_close(out.double(), mech(wide), rtol=5e-4, atol=5e-4)
    torch.testing.assert_close(out, mech.weights(call) @ v, rtol=5e-4, atol=5e-4)
    for gradient in torch.autograd.grad(out.sum(), (k, v)):
        assert torch.isfinite(gradient).all()
