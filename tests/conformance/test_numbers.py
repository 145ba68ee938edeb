"""Numbers over all mechanisms: thousands of random calls, and what the laws about them find in wrong mechanisms."""

from __future__ import annotations

import itertools

import pytest
import torch

import attnlab as al
from attnlab.attention import pair_mask, scores
from attnlab.conformance.number_laws import random_calls_keep_their_numbers
from attnlab.conformance.random_calls import random_call, random_calls
from attnlab.linalg.caratheodory import caratheodory
from attnlab.mechanisms.softmax import softmax
from tests.tolerance import assert_close

# A search takes some hundred times as long as other mechanisms.
SEARCHES = {"value-aware:r=2"}


@pytest.mark.slow
# Random calls have one or two key/value heads; test_per_group.py has mechanisms for these.
@pytest.mark.parametrize("spec", [spec for spec in al.all_mechanisms() if "per-group" not in spec or "/" not in spec])
def test_thousands_of_random_calls(spec: str) -> None:
    random_calls_keep_their_numbers(al.mechanism(spec), count=100 if spec in SEARCHES else 800, seed=1)


def test_a_random_call_is_the_same_each_time_and_calls_differ() -> None:
    first, again = random_call(5), random_call(5)
    assert first.description == again.description
    assert torch.equal(first.call.q, again.call.q)
    assert len({each.description for each in random_calls(0, 50)}) == 50


def test_random_calls_are_of_every_kind() -> None:
    calls = [each.call for each in random_calls(0, 600)]
    kinds = {
        (call.q.dtype, call.causal, call.groups > 1, call.key_visible is None, call.bias is None) for call in calls
    }
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    assert kinds >= set(itertools.product(dtypes, (False, True), (False, True), (False, True), (True,)))
    assert {0, 1} <= {call.q.shape[-1] for call in calls}
    assert any(call.offset < 0 for call in calls)
    assert any(call.mask is not None and call.bias is not None for call in calls)


class Overflowing(al.Mechanism):
    """Softmax without the stabiliser: the exponential of scores from 89 on is infinite in float32."""

    def reference(self, call: al.AttentionCall) -> torch.Tensor:
        kappa = scores(call).exp()
        return kappa / kappa.sum(-1, keepdim=True).clamp_min(1e-30)


class ForgetsNan(al.Mechanism):
    """Softmax in which NaN becomes zero."""

    def reference(self, call: al.AttentionCall) -> torch.Tensor:
        return softmax(scores(call)).nan_to_num(0)


def test_the_sweep_finds_an_overflow_and_names_the_call() -> None:
    (result,) = al.check(Overflowing(), laws=["random_calls_keep_their_numbers"], random_calls=100).results
    assert result.outcome == "failed"
    assert "not finite [random call" in result.reason


def test_a_lost_nan_is_found() -> None:
    (result,) = al.check(ForgetsNan(), laws=["nan_reaches_the_output"]).results
    assert result.outcome == "failed"
    assert "NaN in q: an output that depends on it is a number" in result.reason


@pytest.mark.parametrize("spec", ["softmax", "abc-mlp:slots=5", "abc-random:slots=3", "value-aware:r=1", "top-r:r=2"])
def test_keys_that_are_all_nan_give_nan(spec: str) -> None:
    """torch's CPU kernel for keys and values of one width gives zeros where all scores of a query are NaN."""
    q, k, v, x = (torch.randn(1, 2, 7, 8) for _ in range(4))
    call = al.AttentionCall(q, torch.full_like(k, torch.nan), v, x=x[:, 0])
    assert al.mechanism(spec)(call).isnan().all()
    assert al.mechanism(spec).weights(call).isnan().any(-1).all()


@pytest.mark.parametrize("spec", ["orf", "orf:features=64", "orf:features=16,variant=as-written"])
def test_orf_in_float32_at_scores_of_some_thousand(spec: str) -> None:
    torch.manual_seed(0)
    q, k, v = 30 * torch.randn(1, 1, 16, 16), 30 * torch.randn(1, 1, 16, 16), torch.randn(1, 1, 16, 16)
    call, mech = al.AttentionCall(q, k, v, causal=True), al.mechanism(spec)
    assert_close(mech(call), mech.weights(call) @ v)


def test_orf_with_hidden_first_keys_is_finite_with_its_gradients() -> None:
    """A hidden key used to count as one with log Phi = 0, above every real key where those are large."""
    q, k, v = (torch.randn(1, 2, 6, 16).requires_grad_() for _ in range(3))
    seen = torch.tensor([[False, False, True, True, True, True]])
    out = al.mechanism("orf:features=64")(al.AttentionCall(q, 30 * k, v, key_visible=seen, causal=True))
    for t in (out, *torch.autograd.grad(out.sum(), (q, k, v))):
        assert torch.isfinite(t).all()


def test_caratheodory_gives_no_weight_to_a_point_that_had_none() -> None:
    for call in (random_call(each).call for each in (7000875, 7001258, 7002298)):
        weights, v = al.Softmax().weights(call).double(), call.v.double()
        w = weights.unflatten(1, (call.k.shape[1], -1)).flatten(2, 3).flatten(0, 1)
        assert (caratheodory(w, v.flatten(0, 1))[w == 0] == 0).all()


def test_nan_in_a_bias_hides_nothing() -> None:
    q = k = v = torch.zeros(1, 1, 2, 3)
    bias = torch.tensor([[[[torch.nan, 0.0], [-torch.inf, 0.0]]]])
    mask = pair_mask(al.AttentionCall(q, k, v, bias=bias))
    assert mask is not None
    assert mask.tolist() == [[[[True, True], [False, True]]]]


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_bias_that_is_no_bias_is_refused_on_a_cpu(number: float) -> None:
    q, k, v = torch.randn(3, 1, 1, 2, 4)
    call = al.AttentionCall(q, k, v, bias=torch.tensor([[[[0.0, number], [0.0, 0.0]]]]))
    for attend in (al.Softmax(), al.Softmax().weights, al.PerHead("softmax"), al.ValueAware(r=1)):
        with pytest.raises(ValueError, match="bias must hold finite numbers, or minus infinity"):
            attend(call)


def test_zero_vectors_have_a_gradient_of_order_one_in_rfa() -> None:
    q, k = torch.zeros(1, 1, 3, 4, dtype=torch.float16), torch.randn(1, 1, 3, 4, dtype=torch.float16)
    q, v = q.requires_grad_(), torch.randn(1, 1, 3, 2, dtype=torch.float16)
    (grad,) = torch.autograd.grad(al.mechanism("rfa:features=64")(al.AttentionCall(q, k, v)).sum(), q)
    assert torch.isfinite(grad).all()
    assert grad.abs().max() < 100
