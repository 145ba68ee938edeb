"""The kernels of abc-hybrid against its PyTorch path in float64: through Triton's interpreter, or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import attnlab as al
from attnlab.attention import AttentionCall
from attnlab.kernels.hybrid import hybrid_attention, supports
from attnlab.mechanisms._bounded import hybrid_kernels
from attnlab.mechanisms.abc_hybrid import AbcHybrid
from tests.kernels.abc.cases import poisoned, relative
from tests.kernels.bounds import BOUND, DEVICE, assert_compiled_gradients_equal


@dataclass(frozen=True)
class Case:
    """One call: sizes, the scale of the control's logits, and how many tokens of each row are padding."""

    heads: int = 1
    groups: int = 1
    length: int = 103
    d: int = 16
    slots: int = 5
    window: int = 16
    block: int = 16
    sinks: int = 3
    mass: bool = True
    scale: float = 1.0
    starts: tuple[int, ...] | None = None
    views: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def how(self) -> dict[str, int | bool]:
        return {"window": self.window, "block": self.block, "sinks": self.sinks, "mass": self.mass}


# More blocks than a segment has, rows that end inside a block, sinks in several blocks, and rows of fewer tokens than W.
CASES = (
    Case(),
    Case(heads=3, groups=1, mass=False, window=48, length=77),
    Case(heads=4, groups=2, starts=(38,), views=True, d=24, length=90),
    Case(starts=(0, 97, 60), sinks=19, slots=17),
    Case(block=32, window=64, sinks=0, slots=1, length=110),
    Case(scale=30.0, dtype=torch.float16),
    Case(slots=0, window=32, length=70),
    Case(length=5, window=32),
)
LARGE = (
    Case(heads=8, groups=8, length=2048, d=128, slots=64, window=64, block=32, sinks=4),
    Case(heads=9, groups=3, length=1500, d=64, slots=64, window=64, sinks=4, starts=(0, 700)),
    Case(
        heads=4, groups=2, length=700, d=80, slots=128, window=128, block=64, sinks=4, scale=8.0, mass=False, views=True
    ),
)


class FixedControl(AbcHybrid):
    """A hybrid with the log alpha that the kernels get."""

    log: Tensor

    def log_alpha(self, _call: AttentionCall) -> Tensor:
        return self.log


def inputs(case: Case) -> list[Tensor]:
    """q, k, v and log alpha; with ``views`` some heads of larger tensors, laid out as a model has them."""
    torch.manual_seed(0)
    b = 1 if case.starts is None else len(case.starts)

    def heads(count: int) -> Tensor:
        if case.views:
            return torch.randn(b, case.length, count + 3, case.d)[:, :, 2 : 2 + count].transpose(1, 2)
        return torch.randn(b, count, case.length, case.d)

    log = (case.scale * torch.randn(b, case.groups, case.length, case.slots)).log_softmax(-1).clamp(min=-40)
    made = [heads(count).to(DEVICE, case.dtype) for count in (case.heads, case.groups, case.groups)]
    return [t.requires_grad_() for t in (*made, log.to(DEVICE))]


def errors(case: Case) -> dict[str, float]:
    """Relative errors of the output and of all gradients; padding is NaN."""
    ours = inputs(case)
    theirs = [t.detach().double().requires_grad_() for t in ours]
    seen = starts = None
    if case.starts is not None:
        starts = torch.tensor(case.starts, device=DEVICE)
        seen = torch.arange(case.length, device=DEVICE) >= starts[:, None]
        with torch.no_grad():
            for t in ours:
                t[(~seen)[:, None].expand(t.shape[:3])] = torch.nan
    mech = FixedControl(slots=case.slots, control="x", **case.how)
    mech.log = theirs[3]
    x = torch.zeros(theirs[0].shape[0], case.length, 1, dtype=torch.float64, device=DEVICE)
    want = mech.forward(AttentionCall(*theirs[:3], x=x, causal=True, key_visible=seen))
    with poisoned():
        out = hybrid_attention(*ours, starts=starts, **case.how)
        pull = torch.randn_like(out)
        got = torch.autograd.grad(out, ours, pull)
    expected = torch.autograd.grad(want, theirs, pull.double(), allow_unused=True, materialize_grads=True)
    result = {"out": relative(out, want)}
    return result | {name: relative(a, b) for name, a, b in zip(("dq", "dk", "dv", "dx"), got, expected, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients(case: Case) -> None:
    worst = errors(case)
    assert max(worst.values()) < BOUND[case.dtype], worst


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_output_and_gradients_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    worst = errors(replace(case, dtype=dtype))
    assert max(worst.values()) < BOUND[dtype], worst


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Mechanisms take kernels for tensors of this device."""
    monkeypatch.setattr(hybrid_kernels, "kernels_take", lambda _: True)
    return monkeypatch


def call_of(length: int, *, starts: tuple[int, ...] | None = None, holes: bool = False) -> AttentionCall:
    torch.manual_seed(1)
    b = 2 if starts is None else len(starts)
    q, k, v = (torch.randn(b, count, length, 16, device=DEVICE) for count in (2, 1, 1))
    seen = None
    if starts is not None:
        seen = torch.arange(length, device=DEVICE) >= torch.tensor(starts, device=DEVICE)[:, None]
    if holes:
        seen = torch.rand(b, length, device=DEVICE) > 0.2
    return AttentionCall(q, k, v, x=torch.randn(b, length, 7, device=DEVICE), causal=True, key_visible=seen)


@pytest.mark.parametrize("padded", ["not", "left", "holes"])
def test_the_mechanism_takes_them_where_they_serve(padded: str, on_gpu: pytest.MonkeyPatch) -> None:
    """The same output and gradients of parameters; padding that is not on the left stays in PyTorch."""
    call = call_of(70, starts=(0, 31) if padded == "left" else None, holes=padded == "holes")
    mech = AbcHybrid(slots=3, window=16, sinks=2)
    launched = []
    on_gpu.setattr(
        "attnlab.kernels.hybrid.hybrid_attention",
        lambda *args, **how: launched.append(how) or hybrid_attention(*args, **how),
    )
    by_kernel = mech(call)
    assert bool(launched) == (padded != "holes")
    on_gpu.setattr(hybrid_kernels, "kernels_take", lambda _: False)
    expected, pull = mech(call), torch.randn_like(by_kernel)
    parameters = list(mech.parameters())
    got, want = (torch.autograd.grad(out, parameters, pull) for out in (by_kernel, expected))
    assert relative(by_kernel, expected) < BOUND[torch.float32]
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize(
    ("spec", "holes", "prompt"),
    [
        ("abc-hybrid:slots=5,window=32,sinks=3", True, 29),
        ("abc-hybrid:slots=5,window=16,sinks=20,mass=false", False, 29),
        ("abc-hybrid:slots=3,window=16,sinks=1,control=x", True, 29),
        ("abc-hybrid:slots=0,window=16,sinks=3", False, 29),
        # A window of more keys than are read at once, and of no multiple of these.
        ("abc-hybrid:slots=2,window=176,sinks=3", True, 170),
    ],
)
def test_steps_equal_the_whole(spec: str, holes: bool, prompt: int, on_gpu: pytest.MonkeyPatch) -> None:
    """A prefill by the kernels or, with holes, without, then token after token; hidden ones may be NaN."""
    call, mech = call_of(prompt + 22, holes=holes), al.mechanism(spec)
    with torch.no_grad():
        on_gpu.setattr(hybrid_kernels, "kernels_take", lambda _: False)
        whole = mech(call)
        on_gpu.setattr(hybrid_kernels, "kernels_take", lambda _: True)
        if call.key_visible is not None:
            hidden = ~call.key_visible[:, None, :, None]
            call = replace(call, k=call.k.masked_fill(hidden, torch.nan), v=call.v.masked_fill(hidden, torch.nan))
        cache, parts = mech.make_cache(2, 0), []
        for lo, hi in [(0, prompt)] + [(t, t + 1) for t in range(prompt, prompt + 22)]:
            fields = {name: getattr(call, name)[:, :, lo:hi] for name in ("q", "k", "v")}
            seen = None if call.key_visible is None else call.key_visible[:, lo:hi]
            part = replace(call, **fields, x=call.x[:, lo:hi], key_visible=seen)
            kept = cache.state
            parts.append(cache.attend(mech, part, key_visible=None)[1])
            assert kept in (None, cache.state), "a step updates in place"
    assert relative(torch.cat(parts, 2), whole) < BOUND[torch.float32]


def test_compiled_equals_eager() -> None:
    made = inputs(Case(length=40))

    def loss(*tensors: Tensor) -> Tensor:
        return hybrid_attention(*tensors, window=16, block=16, sinks=1).square().sum()

    assert_compiled_gradients_equal(loss, made)


def test_sizes_that_they_are_not_made_for() -> None:
    fits = {"slots": 64, "window": 64, "block": 16, "sinks": 4}
    assert supports(64, 64, torch.bfloat16, **fits)
    assert not supports(64, 32, torch.bfloat16, **fits)
    assert not supports(64, 64, torch.float64, **fits)
    for name, value in (("slots", 200), ("window", 0), ("block", 8), ("sinks", 100)):
        assert not supports(64, 64, torch.bfloat16, **{**fits, name: value})
    q, k, v, log = inputs(Case(length=20))
    with pytest.raises(ValueError, match="blocks of 10, window 20"):
        hybrid_attention(q, k, v, log, window=20, block=10, sinks=0)
    with pytest.raises(ValueError, match="do not agree"):
        hybrid_attention(q, k, v[:, :, 1:], log, window=16, block=16, sinks=0)
