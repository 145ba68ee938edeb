"""What mechanisms declare about a call: that their output is softmax's, how many bytes a query reads, how long a search takes."""

from __future__ import annotations

import pytest
import torch

import attnlab as al
from tests.tolerance import assert_close

N, WIDTH = 7, 5
SPECS = [
    "softmax",
    "effective-softmax",
    "kernel:exp",
    "kernel:elu",
    "kernel:poly",
    *(f"{name}:r={r}" for name in ("top-r", "value-aware", "window", "lsh") for r in (2, 4, 6, 8, 14)),
    "top-r:r=7",
    "window:r=7",
    "top-r:r=7,kernel=elu",
    "value-aware:r=7,kernel=elu",
    "value-aware:r=d+1",
    "per-head:heads=softmax/top-r:r=7",
    "per-head:heads=softmax/top-r:r=2",
]
# What must be recognised, beside softmax; {spec: (in a bidirectional call, in a causal one)}.
EXACT = {
    "softmax": (True, True),
    "effective-softmax": (True, True),
    "kernel:exp": (True, True),
    "top-r:r=7": (True, True),
    "top-r:r=6": (False, False),
    "value-aware:r=6": (True, True),
    "value-aware:r=4": (False, False),
    "value-aware:r=d+1": (True, True),
    "window:r=7": (False, True),
    "window:r=14": (True, True),
    "window:r=6": (False, False),
    "per-head:heads=softmax/top-r:r=7": (True, True),
    "per-head:heads=softmax/top-r:r=2": (False, False),
}


def call(causal: bool) -> al.AttentionCall:
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, h, N, WIDTH, dtype=torch.float64) for h in (4, 2, 2))
    flags = torch.ones(2, N, dtype=torch.bool)
    flags[1, -2:] = False
    return al.AttentionCall(q, k, v, causal=causal, key_visible=flags)


def test_only_a_search_for_keys_takes_steps() -> None:
    steps = {spec: al.mechanism(spec).search_steps(call(causal=True)) for spec in SPECS}
    searching = {"value-aware:r=d+1", "value-aware:r=7,kernel=elu", *(f"value-aware:r={r}" for r in (2, 4, 6, 8, 14))}
    assert {spec for spec, count in steps.items() if count} == searching
    assert {steps[spec] for spec in searching} == {(WIDTH + 1) ** 3}
    assert al.mechanism("value-aware:r=1").search_steps(call(causal=True)) == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_what_is_called_exact_is_softmax(spec: str, causal: bool) -> None:
    one, mech = call(causal), al.mechanism(spec)
    if mech.is_exact(one):
        assert_close(mech(one), al.Softmax()(one))
    if spec in EXACT:
        assert mech.is_exact(one) == EXACT[spec][causal]
    assert 0 < mech.bytes_read(one) <= 1


def test_bytes_by_hand() -> None:
    q = torch.zeros(1, 1, 64, 4)
    causal = al.AttentionCall(q, q, q, causal=True)
    shares = {spec: al.mechanism(spec).bytes_read(causal) for spec in ("softmax", "window:r=16", "top-r:r=16")}
    # Of top-r all keys are read, and a quarter of the values.
    assert shares == {"softmax": 1.0, "window:r=16": 0.25, "top-r:r=16": (4 + 1) / 8}
    # A matrix of 4 x 4 and a vector of 4, instead of 64 keys and values of 4.
    assert al.mechanism("kernel:elu").bytes_read(causal) == (16 + 4) / (64 * 8)
    assert al.mechanism("per-head:heads=softmax/window:r=16").bytes_read(causal) == 0.625
    assert al.mechanism("abc-mlp:slots=8").bytes_read(causal) == 8 / 64
