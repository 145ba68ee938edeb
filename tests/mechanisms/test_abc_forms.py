"""Every form of a bounded memory, in float32: parallel, in chunks, token by token, and prefill with steps after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.conformance.calls import cross_call, padding, self_call
from attnlab.measure import peak_bytes
from attnlab.mechanisms._bounded.slots import SlotMechanism, prefill, step
from attnlab.mechanisms.abc_mlp import AbcMlp
from tests.mechanisms.test_abc_slots import CAUSAL, tokens

# Two chunks, the second not full.
LENGTH = 70


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    """1e-5 of the largest number: single gradients are sums over many tokens, and some of them cancel."""
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=1e-5, atol=1e-5 * max(1.0, float(expected.detach().abs().max())),
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


def in_steps(mech: SlotMechanism, call: al.AttentionCall, first: int) -> Tensor:
    out, state = prefill(mech, tokens(call, 0, first))
    parts = [out]
    for t in range(first, call.sizes[2]):
        out, state = step(mech, tokens(call, t, t + 1), state)
        parts.append(out)
    return torch.cat(parts, 2)


@pytest.mark.parametrize("spec", CAUSAL)
def test_all_forms_agree_in_single_precision(spec: str) -> None:
    """Rows of other lengths, padded on either side and in between; a prefill of nothing is the recurrent form."""
    seen = torch.ones(2, LENGTH, dtype=torch.bool)
    seen[0, :17], seen[1, 53:], seen[1, 20:23] = False, False, False
    call = replace(self_call(torch.float32, length=LENGTH), causal=True, key_visible=seen)
    mech = al.mechanism(spec.replace("length=128", f"length={LENGTH}"))
    assert isinstance(mech, SlotMechanism)
    forms = {
        "parallel": lambda c: mech.weights(c) @ c.v,
        "chunks": mech,
        **{f"prefill of {n}": lambda c, n=n: in_steps(mech, c, n) for n in (0, 1, 50)},
    }
    # The same numbers in float64, by the definition, are what all of them are to be.
    names = ("q", "k", "v", "x")
    exact = [getattr(call, n).double().requires_grad_() for n in names]
    definition = replace(call, **dict(zip(names, exact, strict=True)))
    expected = mech.weights(definition) @ definition.v
    probe = torch.randn_like(expected)
    slopes = torch.autograd.grad(expected, exact, probe, allow_unused=True, materialize_grads=True)
    for form, run in forms.items():
        leaves = [getattr(call, n).detach().requires_grad_() for n in names]
        out = run(replace(call, **dict(zip(names, leaves, strict=True))))
        close(out, expected, form)
        actual = torch.autograd.grad(out, leaves, probe.float(), allow_unused=True, materialize_grads=True)
        for name, a, b in zip(names, actual, slopes, strict=True):
            close(a, b, f"{form}, gradient of {name}")


@pytest.mark.parametrize(
    "spec", [*CAUSAL, "abc-window:slots=3", "abc-cluster:slots=3", "abc-luna:slots=3", "abc-workspace:slots=3,top=2"]
)
def test_padding_is_exact_in_cross_attention(spec: str) -> None:
    """A padded source is the source alone: forward, and no gradient reaches what is padding."""
    seen = padding([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])
    call = replace(cross_call(torch.float32), key_visible=seen)
    mech = al.mechanism(spec)
    leaves = {n: getattr(call, n).detach().requires_grad_() for n in ("q", "k", "v", "x")}
    out = mech(replace(call, **leaves))
    for row, places in enumerate(([2, 3, 4, 5, 6], [0, 1, 2, 3])):
        alone = al.AttentionCall(
            call.q[row : row + 1],
            call.k[row : row + 1, :, places],
            call.v[row : row + 1, :, places],
            x=call.x[row : row + 1, places],
        )
        close(out[row], mech(alone)[0], f"row {row}")
    names = [n for n in ("k", "v", "x") if n != "x" or spec.startswith(("abc-mlp", "abc-luna", "abc-workspace"))]
    for name, slope in zip(names, torch.autograd.grad(out.sum(), [leaves[n] for n in names]), strict=True):
        hidden = slope.transpose(1, 2)[~seen] if name != "x" else slope[~seen]
        assert (hidden == 0).all(), name


@pytest.mark.slow
def test_it_trains_at_32k_tokens_in_linear_memory() -> None:
    """8 heads of 64, 32 slots: forward and backward in less than 4 GB, where W alone would be 32 GB."""
    mech = AbcMlp(slots=32)
    slopes: list[Tensor] = []

    def train(length: int) -> None:
        q, k, v = (torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3))
        x = torch.randn(1, length, 512, requires_grad=True)
        mech(al.AttentionCall(q, k, v, x=x, causal=True)).square().mean().backward()
        assert mech.weight is not None
        assert mech.weight.grad is not None
        slopes[:] = [q.grad, k.grad, v.grad, x.grad, mech.weight.grad]

    half, whole = (peak_bytes(lambda n=n: train(n)) for n in (16_384, 32_768))
    assert whole < 4e9
    assert whole < 2.2 * half
    for slope in slopes:
        assert torch.isfinite(slope).all()
        assert slope.abs().sum() > 0
