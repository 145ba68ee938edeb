"""Members whose alpha is normalised when it is read, by ABC_MLP's kernels: through Triton's interpreter, or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import attnlab as al
from attnlab.mechanisms._bounded import slots as _slots
from attnlab.mechanisms._bounded.slots import SlotMechanism
from tests.kernels.abc.cases import relative

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = (
    "abc-random:slots=5,normalise=read",
    "abc-global:slots=7,stride=3",
    "abc-mlp:slots=5,activation=relu",
)
pytestmark = [
    # The interpreter's log of an empty slot, whose result is not used.
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slots, "kernel_serves", lambda call, _slots, _when: call.k.shape[2] > 0)


def made(*, padded: bool, dtype: torch.dtype = torch.float32) -> al.AttentionCall:
    """37 tokens of two rows, two query heads on one key head."""
    q, k, v = (torch.randn(2, n, 37, 32).to(DEVICE, dtype) for n in (2, 1, 1))
    seen = torch.ones(2, 37, dtype=torch.bool, device=DEVICE)
    seen[0, :19], seen[1, 30:], seen[1, 5] = False, False, False
    x = torch.randn(2, 37, 17).to(DEVICE, dtype)
    return al.AttentionCall(q, k, v, x=x, causal=True, key_visible=seen if padded else None)


def member(spec: str) -> SlotMechanism:
    mech = al.mechanism(spec)
    assert isinstance(mech, SlotMechanism)
    return mech


@pytest.mark.parametrize(
    ("spec", "padded"),
    [
        *((spec, True) for spec in SPECS),
        (SPECS[0], False),
        *(pytest.param(s, False, marks=pytest.mark.slow) for s in SPECS[1:]),
    ],
)
def test_causal_slots_equal_the_definition(spec: str, padded: bool) -> None:
    """Forward and backward, slots that are empty for a while or for good."""
    call, mech = made(padded=padded), member(spec)
    leaves = [getattr(call, n).requires_grad_() for n in ("q", "k", "v")]
    assert mech.fused(call, None) is not None
    out = mech(call)
    expected = mech.weights(call) @ call.v.repeat_interleave(2, 1)
    assert relative(out, expected) < 1e-5
    probe = torch.randn_like(out)
    learned = [p for p in mech.parameters() if p.requires_grad] if isinstance(mech, torch.nn.Module) else []
    for gradient, wanted in zip(
        torch.autograd.grad(out, leaves + learned, probe),
        torch.autograd.grad(expected, leaves + learned, probe),
        strict=True,
    ):
        assert relative(gradient, wanted) < 1e-5


@pytest.mark.parametrize("spec", SPECS)
def test_decoding_equals_the_whole(spec: str) -> None:
    """A prefill and single tokens, each of which is folded into the memory in one launch."""
    call, mech = made(padded=True), member(spec)
    whole = mech.weights(call) @ call.v.repeat_interleave(2, 1)
    cache, parts = mech.make_cache(2, 0), []
    with torch.no_grad():
        for lo, hi in ((0, 29), *((t, t + 1) for t in range(29, 37))):
            part = {n: getattr(call, n)[:, :, lo:hi] for n in ("q", "k", "v")}
            now = replace(call, **part, x=call.x[:, lo:hi], key_visible=call.key_visible[:, lo:hi])
            parts.append(cache.attend(mech, now, key_visible=None)[1])
    assert relative(torch.cat(parts, 2), whole) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS)
def test_half_precision_is_near(spec: str) -> None:
    call, mech = made(padded=True, dtype=torch.bfloat16), member(spec)
    wide = replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float(), x=call.x.float())
    expected = mech.weights(wide) @ wide.v.repeat_interleave(2, 1)
    assert relative(mech(call).float(), expected) < 2e-2
