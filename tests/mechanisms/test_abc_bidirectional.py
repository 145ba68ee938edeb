"""Queries that all read one memory: pooled keys and values give what the definition gives, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.conformance.calls import situations
from attnlab.measure import captured
from attnlab.mechanisms._bounded.pooled import pooling_by_place
from attnlab.mechanisms._bounded.slots import SlotMechanism
from attnlab.mechanisms.abc_random import random_slot
from tests.kernels.abc.cases import relative
from tests.mechanisms.test_abc_forms import close

SPECS = (
    "abc-linformer:slots=3,length=7",
    "abc-random:slots=3",
    "abc-random:slots=29",
    "abc-random:slots=29,normalise=read,one_draw=true",
    "abc-random:slots=3,normalise=none,one_draw=true",
    "abc-random:slots=3,normalise=write",
    "abc-compressive:slots=3",
    "abc-compressive:slots=5,length=7,normalise=read",
    "abc-global:slots=3,stride=2",
    "abc-global:slots=11",
    "abc-cluster:slots=3",
    "abc-mlp:slots=5",
    "abc-mlp:slots=3,activation=relu",
    "abc-mlp:slots=3,activation=sigmoid",
    "abc-mlp:slots=3,normalise=write",
    "abc-mlp:slots=3,gate=true",
    "abc-luna:slots=3",
    "abc-workspace:slots=3,top=2",
)
PLACES = (
    "encoder",
    "padded encoder",
    "all hidden",
    "cross",
    "padded cross",
    "grouped",
    "scaled",
    "one token",
    "one key",
)
NAMES = ("q", "k", "v", "x")


def side_by_side(t: Tensor) -> Tensor:
    """The same numbers as a projection leaves them: (batch, length, heads, width) in memory."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("place", PLACES)
def test_pooling_equals_the_definition(spec: str, place: str) -> None:
    """In float32 to 1e-5, whichever way the heads lie; gradients of what comes in and of what is learned."""
    call = situations(torch.float32)[place]
    mech = al.mechanism(spec)
    exact = {n: getattr(call, n).double().requires_grad_() for n in NAMES}
    definition = replace(call, **exact)
    expected = mech.weights(definition) @ definition.v.repeat_interleave(call.groups, 1)
    learned = list(mech.parameters()) if isinstance(mech, torch.nn.Module) else []
    probe = torch.randn_like(expected)
    slopes = torch.autograd.grad(
        expected, [*exact.values(), *learned], probe, allow_unused=True, materialize_grads=True
    )  # fmt: skip
    for lie in (Tensor.contiguous, side_by_side):
        leaves = {n: getattr(call, n).detach().requires_grad_() for n in NAMES}
        out = mech(replace(call, **{n: lie(t) if n != "x" else t for n, t in leaves.items()}))
        close(out, expected, lie.__name__)
        gradients = torch.autograd.grad(
            out, [*leaves.values(), *learned], probe.float(), allow_unused=True, materialize_grads=True
        )
        for a, b in zip(gradients, slopes, strict=True):
            close(a, b, f"{lie.__name__}, a gradient")


def test_slots_that_stay_empty_are_left_out() -> None:
    """Known on the host: nothing need be hidden from the queries."""
    mech = al.AbcRandom(slots=29, normalise="read", one_draw=True)
    phi, empty, _ = pooling_by_place(mech, 7, torch.float32, torch.device("cpu"))
    used = random_slot(torch.arange(7)[None], 29, seed=0).unique()
    assert phi.shape == (1, 1, len(used), 7)
    assert empty is None
    assert torch.equal(phi.sum(-1), torch.ones(1, 1, len(used)))


def test_a_first_call_in_inference_mode_does_not_spoil_a_training() -> None:
    mech = al.AbcRandom(slots=4, seed=97, one_draw=True)
    q, k, v = torch.randn(3, 1, 2, 6, 5).unbind()
    with torch.inference_mode():
        mech(al.AttentionCall(q, k, v))
    q.requires_grad_()
    mech(al.AttentionCall(q, k, v)).sum().backward()
    assert q.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [s for s in SPECS if "luna" not in s])
@pytest.mark.parametrize("padded", [False, True])
def test_it_asks_the_device_nothing(spec: str, padded: bool) -> None:
    """The whole call is captured in a CUDA graph, which a question to the device would forbid; in bfloat16."""
    q, k, v = torch.randn(3, 2, 4, 61, 64, device="cuda", dtype=torch.bfloat16).unbind()
    seen = (torch.arange(61, device="cuda") < torch.tensor([[61], [37]], device="cuda")) if padded else None
    mech = al.mechanism(spec.replace("length=7", "length=61"))
    assert isinstance(mech, SlotMechanism)
    if isinstance(mech, torch.nn.Module):
        mech.to("cuda")
    call = al.AttentionCall(q, k, v, x=torch.randn(2, 61, 32, device="cuda", dtype=torch.bfloat16), key_visible=seen)
    with torch.no_grad():
        expected = mech.weights(replace(call, q=q.float(), k=k.float(), v=v.float(), x=call.x.float())) @ v.float()
        # Sums that are not divided by their weights make sharp softmaxes: single numbers may differ by more.
        assert relative(captured(lambda: mech(call))(), expected) < 2e-2
