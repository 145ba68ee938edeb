"""What OVA compares, on a GPU: the same as on a CPU, and within its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attnlab as al
from attnlab.linalg.caratheodory import caratheodory
from attnlab.measure import peak_bytes
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
SPECS = (
    "top-r:r=5",
    "top-r:r=5,by=alpha-norm",
    "top-r:r=5,kernel=elu",
    "value-aware:r=1",
    "value-aware:r=3",
    "value-aware:r=d+1",
    "value-aware:r=d+1,kernel=poly",
    "window:r=8",
    "orf:features=64",
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_outputs_are_those_of_a_cpu(spec: str, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 101, 16, dtype=torch.float64) for _ in range(3))
    call = al.AttentionCall(q, k, v, causal=causal, key_visible=torch.rand(2, 101) > 0.1)
    there = replace(call, **{n: getattr(call, n).cuda() for n in ("q", "k", "v", "key_visible")})
    assert_close(al.mechanism(spec)(there).cpu(), al.mechanism(spec)(call))


@pytest.mark.parametrize("repeated", [False, True])
def test_the_support_is_exact_there(repeated: bool) -> None:
    torch.manual_seed(0)
    v = torch.randn(2, 301, 32, dtype=torch.float64, device="cuda")
    if repeated:
        v = v[:, torch.arange(301) % 41]
    w = torch.randn(2, 53, 301, dtype=torch.float64, device="cuda").softmax(-1)
    reduced = caratheodory(w, v)
    assert (reduced >= 0).all()
    assert ((reduced > 0).sum(-1) <= 33).all()
    assert (reduced @ v - w @ v).abs().max() < 1e-12


@pytest.mark.parametrize("spec", ["value-aware:r=1", "value-aware:r=4", "top-r:r=65"])
def test_a_pass_at_4096_tokens_stays_within_20_gb(spec: str) -> None:
    call = al.AttentionCall(*torch.randn(3, 1, 12, 4096, 64, device="cuda"))
    with torch.no_grad():
        assert peak_bytes(lambda: al.mechanism(spec)(call), device="cuda") < 20e9
