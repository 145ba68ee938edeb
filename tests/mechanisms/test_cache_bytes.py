"""``cache_bytes``: what a mechanism says one key/value head of its cache holds is what the cache holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attnlab as al
from attnlab.conformance.calls import self_call

SIZES = (11, 13, 17)
# Heads that differ are counted in test_per_group.py.
CACHED = [spec for spec in al.all_mechanisms() if "/" not in spec and al.mechanism(spec).make_cache(1, 0) is not None]


@pytest.mark.parametrize("spec", CACHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 9])
def test_a_head_more_costs_what_cache_bytes_says(spec: str, dtype: torch.dtype, length: int) -> None:
    """By the difference between two and five heads: what a row holds once for all heads is not counted."""
    held = []
    for heads in (2, 5):
        mech = al.mechanism(spec)
        cache = mech.make_cache(3, 0)
        call = self_call(dtype, length=length, batch=3, heads=2 * heads, groups=2, widths=SIZES)
        cache.attend(mech, replace(call, causal="causal" not in mech.cannot()), key_visible=None)
        held.append(cache.nbytes())
    d, e, _ = SIZES
    assert held[1] - held[0] == 3 * 3 * mech.cache_bytes(length=length, d=d, e=e, dtype=dtype)


def test_without_a_cache_every_key_and_value_is_kept() -> None:
    """A window too: its cache keeps all keys; abc-hybrid without slots attends alike and drops them."""
    for spec in ("softmax", "window:r=4", "value-aware:r=3"):
        assert al.mechanism(spec).cache_bytes(length=7, d=5, e=3, dtype=torch.bfloat16) == 7 * (5 + 3) * 2


def test_a_cache_without_its_bytes_is_refused() -> None:
    class Forgetful(al.Mechanism):
        def make_cache(self, batch: int, capacity: int) -> object:
            return object()

    with pytest.raises(NotImplementedError, match="Forgetful has make_cache and must define cache_bytes"):
        Forgetful().cache_bytes(length=1, d=1, e=1, dtype=torch.float32)
