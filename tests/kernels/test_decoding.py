"""A decoded token in one launch, against the same in PyTorch: through Triton's interpreter, or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import attnlab as al
from attnlab.kernels.decoding import linear_step, read_slots, serves_reading
from attnlab.measure import captured
from attnlab.mechanisms import _linear
from attnlab.mechanisms._bounded.slots import FLOOR, SlotState, step
from attnlab.mechanisms._linear import LinearCache
from tests.quick_cases import in_turn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAPS = ("kernel:elu", "rfa:features=67", "rfa:features=16,least=1.5", "rfa:features=61,gate=true", "t2r:features=7")
# Query heads, key heads, d, e.
SIZES = [(3, 3, 11, 13), (2, 2, 16, 16), (6, 2, 5, 32)]


def decoded(spec: str, calls: list[al.AttentionCall], monkeypatch: pytest.MonkeyPatch, *, fused: bool) -> list[Tensor]:
    """The outputs, one call after the other, and the state after them."""
    mech = al.mechanism(spec)
    if isinstance(mech, torch.nn.Module):
        mech.to(DEVICE)
    cache: LinearCache = mech.make_cache(calls[0].q.shape[0], 0)
    monkeypatch.setattr(_linear, "_in_one_launch", lambda call, _: fused and call.q.shape[2] == 1)
    with torch.no_grad():
        out = [cache.attend(mech, call, key_visible=None)[1] for call in calls]
    assert cache.state is not None
    return [*out, cache.state]


def tokens(heads: int, groups: int, d: int, e: int, *, padded: bool, dtype: torch.dtype) -> list[al.AttentionCall]:
    """Five tokens and then one by one, of which some are hidden, NaN and all; at last a query without a key."""
    q, k, v = (torch.randn(2, n, 8, w).to(DEVICE, dtype) for n, w in ((heads, d), (groups, d), (groups, e)))
    x = torch.randn(2, 8, 17).to(DEVICE, dtype)
    seen = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1, 1, 0]]).bool().to(DEVICE)
    if padded:
        k, v = (t.masked_fill(~seen[:, None, :, None], torch.nan) for t in (k, v))
    calls = [
        al.AttentionCall(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], x=x[:, a:b], causal=True,
                         key_visible=seen[:, a:b] if padded else None)
        for a, b in ((0, 5), (5, 6), (6, 7), (7, 8))
    ]  # fmt: skip
    return [*calls, replace(calls[-1], k=k[:, :, :0], v=v[:, :, :0], x=x[:, :0], key_visible=None)]


@pytest.mark.parametrize(("spec", "sizes", "padded"), in_turn(MAPS, SIZES, [False, True]))
def test_a_step_of_linear_attention_equals_pytorch(
    spec: str, sizes: tuple[int, ...], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tokens(*sizes, padded=padded, dtype=torch.float32)
    for fused, expected in zip(
        decoded(spec, calls, monkeypatch, fused=True), decoded(spec, calls, monkeypatch, fused=False), strict=True
    ):
        torch.testing.assert_close(fused, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", MAPS[:1] + MAPS[-1:])
def test_a_step_takes_half_precision(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and outputs are rounded; the state is not."""
    calls = tokens(4, 2, 32, 16, padded=True, dtype=torch.bfloat16)
    wide = [
        replace(c, q=c.q.float(), k=c.k.float(), v=c.v.float(), x=None if c.x is None else c.x.float()) for c in calls
    ]
    fused = decoded(spec, calls, monkeypatch, fused=True)
    expected = decoded(spec, wide, monkeypatch, fused=False)
    assert fused[0].dtype == torch.bfloat16
    for a, b in zip(fused[1:-1], expected[1:-1], strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(fused[-1], expected[-1], rtol=1e-5, atol=1e-5)


def test_a_step_refuses_what_it_cannot_update() -> None:
    q, k, v = (torch.randn(1, 2, 1, 16) for _ in range(3))
    with pytest.raises(ValueError, match="updated in place"):
        linear_step(q, k, v, torch.zeros(1, 2, 1, 16, 16), kind="elu")
    with pytest.raises(ValueError, match="one query and at most one key"):
        linear_step(q, k.expand(-1, -1, 3, -1), v.expand(-1, -1, 3, -1), torch.zeros(1, 2, 1, 16, 17), kind="elu")


@pytest.mark.parametrize(("heads", "groups", "d", "e"), SIZES)
@pytest.mark.parametrize("slots", [7, 32])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_slots_read_by_a_kernel_equal_pytorch(
    heads: int, groups: int, d: int, e: int, slots: int, kind: torch.dtype
) -> None:
    """Empty slots take no weight; where all are empty the output is zero."""
    q = torch.randn(2, 3, heads, d, device=DEVICE)[:, 1:2].transpose(1, 2)
    z = torch.randn(2, groups, slots, dtype=kind, device=DEVICE)
    z[0, 0, 1::2], z[1, -1] = FLOOR, FLOOR
    memory = (torch.randn(2, groups, slots, d, device=DEVICE), torch.randn(2, groups, slots, e, device=DEVICE), z)
    assert serves_reading(q, memory)
    by_kernel = read_slots(q, memory, scale=0.7)
    none = torch.zeros(2, groups, 0, d, device=DEVICE), torch.zeros(2, groups, 0, e, device=DEVICE)
    call = al.AttentionCall(q, *none, scale=0.7)
    with torch.enable_grad():
        expected, _ = step(al.AbcGlobal(slots=slots), call, SlotState(*memory, torch.zeros(2, device=DEVICE).long()))
    torch.testing.assert_close(by_kernel, expected, rtol=1e-5, atol=1e-5)
    assert by_kernel[1, -1].abs().sum() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["kernel:elu", "rfa:features=128", "t2r:features=32", "abc-mlp:slots=32"])
def test_a_captured_step_equals_one_that_is_not(spec: str) -> None:
    """Cross- and self-attention at the sizes of Figure 1, in bfloat16."""
    q, k, v = torch.randn(3, 16, 8, 21, 64, device=DEVICE, dtype=torch.bfloat16).unbind()
    x = torch.randn(16, 21, 512, device=DEVICE, dtype=torch.bfloat16)
    mech = al.mechanism(spec)
    whole = al.AttentionCall(q[:, :, :20], k[:, :, :20], v[:, :, :20], x=x[:, :20], causal=True)
    last = al.AttentionCall(q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], x=x[:, 20:], causal=True)
    expected = mech(al.AttentionCall(q, k, v, x=x, causal=True))[:, :, 20:]
    with torch.no_grad():
        cache = mech.make_cache(16, 0)
        cache.attend(mech, whole, key_visible=None)
        _, out = cache.attend(mech, last, key_visible=None)
        torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)
        read = replace(last, k=k[:, :, :0], v=v[:, :, :0], x=x[:, :0], causal=False)
        _, now = cache.attend(mech, read, key_visible=None)
        torch.testing.assert_close(now, expected, rtol=3e-2, atol=3e-2)
        replay = captured(lambda: cache.attend(mech, read, key_visible=None)[1])
        torch.testing.assert_close(replay(), now)
