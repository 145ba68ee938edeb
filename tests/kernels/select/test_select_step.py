"""The decoding step of abc-select in one launch, against its PyTorch path: by Triton's interpreter, or on a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import attnlab as al
from attnlab.kernels.select.step import MOST_KEYS, select_step, supports
from attnlab.mechanisms import abc_select
from attnlab.mechanisms._bounded.selected import NOWHERE, selected
from attnlab.mechanisms._device import without_kernels
from tests.kernels.abc.cases import relative
from tests.kernels.bounds import BOUND, DEVICE


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Kernels may be chosen for tensors on a CPU, where Triton interprets them."""
    monkeypatch.setattr(abc_select, "kernels_take", lambda _: True)
    return monkeypatch


def call_of(
    n: int, *, d: int = 16, e: int = 16, holes: bool = False, dtype: torch.dtype = torch.float32
) -> al.AttentionCall:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, width, device=DEVICE, dtype=dtype) for heads, width in ((6, d), (2, d), (2, e)))
    x = torch.randn(2, n, 150, device=DEVICE, dtype=dtype)
    # Tokens of the same input have the same score: the later one stays.
    x[:, 1::3] = x[:, :1]
    seen = torch.rand(2, n, device=DEVICE) > 0.3 if holes else None
    return al.AttentionCall(q, k, v, x=x, causal=True, key_visible=seen)


def with_exact_scores(call: al.AttentionCall, mech: al.AbcSelect) -> al.AttentionCall:
    """The call with small whole numbers for x, and such scores: sums that are exact in whatever order they are made.

    Of numbers that are rounded, equal inputs would have scores that differ by the kernel that sums them, so that a key
    of the prompt and an equal one of a later step are kept in another order.
    """
    # The root of the width is a power of two.
    x = torch.randint(-1, 2, (*call.x.shape[:2], 256), device=DEVICE).to(call.x.dtype)
    call = replace(call, x=x)
    with torch.no_grad():
        mech(part_of(call, 0, 1))
        mech.weight.copy_(mech.weight.round())
    return call


def assert_the_same_keys(cache: abc_select.SelectCache, mech: al.AbcSelect, call: al.AttentionCall) -> None:
    """Raise unless the cache holds the keys that PyTorch selects of the whole call, which has no hidden ones."""
    tokens, newest = mech._new_tokens(call, None)
    wanted = selected(tokens, newest[:, -1], mech.rules_of_memory(call))
    scores, differences = tokens.score, []
    for b, g in itertools.product(*map(range, tokens.k.shape[:2])):
        held, right = (set(t.place[b, g].tolist()) - {NOWHERE} for t in (cache.tokens, wanted))
        for what, places in (("too many", held - right), ("missing", right - held)):
            if places:
                named = ", ".join(f"{place} (score {scores[b, g, place]:.9g})" for place in sorted(places))
                differences.append(f"row {b}, head {g}, {what}: places {named}")
    assert not differences, "\n".join(differences)


def assert_close(got: Tensor, want: Tensor) -> None:
    """Raise unless the outputs of tokens are near those wanted, with those that are farthest off."""
    off = relative(got, want)
    each = (got.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1).clamp(min=1e-12)
    worst = each.flatten().topk(min(5, each.numel()))
    where = [tuple(int(i) for i in torch.unravel_index(index, each.shape)) for index in worst.indices]
    farthest = ", ".join(f"{at}: {value:.2g}" for at, value in zip(where, worst.values.tolist(), strict=True))
    assert off < BOUND[got.dtype], f"{off:.3g} in all; by row, head and token {farthest}"


def one_by_one(lo: int, hi: int) -> list[tuple[int, int]]:
    return [(t, t + 1) for t in range(lo, hi)]


def part_of(call: al.AttentionCall, lo: int, hi: int) -> al.AttentionCall:
    fields = {name: getattr(call, name)[:, :, lo:hi] for name in ("q", "k", "v")}
    seen = None if call.key_visible is None else call.key_visible[:, lo:hi]
    return replace(call, **fields, x=call.x[:, lo:hi], key_visible=seen)


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ("abc-select:slots=5,window=8,sinks=2,block=4", {}),
        ("abc-select:slots=3,window=6,sinks=0,block=3", {"holes": True}),
        ("abc-select:slots=70,window=16,sinks=4,block=16", {"d": 24, "e": 48}),
        ("abc-select:slots=2,window=1,sinks=1,block=1", {"dtype": torch.float16}),
    ],
)
def test_steps_equal_the_whole(spec: str, settings: dict[str, object], on_gpu: pytest.MonkeyPatch) -> None:
    """A prefill, token after token, some tokens at once (keys are put in order again), and steps once more."""
    call, mech = call_of(98, **settings), al.mechanism(spec)
    with torch.no_grad():
        whole = mech(call)
        mech.recency.data.fill_(0.7)
        on_gpu.setattr(abc_select, "kernels_take", lambda _: False)
        whole = mech(call)
        on_gpu.setattr(abc_select, "kernels_take", lambda _: True)
        cache, parts = mech.make_cache(2, 0), []
        for lo, hi in ((0, 78), *one_by_one(78, 84), (84, 90), *one_by_one(90, 98)):
            parts.append(cache.attend(mech, part_of(call, lo, hi), key_visible=None)[1])
            assert cache.ordered == (hi - lo > 1), "a step is the kernel's"
    assert_close(torch.cat(parts, 2), whole)


def test_beams_change_rows(on_gpu: pytest.MonkeyPatch) -> None:
    call, mech = call_of(34), al.mechanism("abc-select:slots=5,window=8,sinks=2,block=4")
    rows = torch.tensor([1, 1], device=DEVICE)
    with torch.no_grad():
        cache = mech.make_cache(2, 0)
        for lo, hi in ((0, 25), *one_by_one(25, 30)):
            cache.attend(mech, part_of(call, lo, hi), key_visible=None)
        cache.select(rows)
        chosen = replace(call, q=call.q[rows], k=call.k[rows], v=call.v[rows], x=call.x[rows])
        outs = [cache.attend(mech, part_of(chosen, t, t + 1), key_visible=None)[1] for t in range(30, 34)]
        whole = mech(chosen)[:, :, 30:]
    assert_close(torch.cat(outs, 2), whole)


def test_nan_in_x_reaches_the_output(on_gpu: pytest.MonkeyPatch) -> None:
    call, mech = call_of(9), al.mechanism("abc-select:slots=2,window=2,sinks=1,block=1")
    call.x[0, 5] = torch.nan
    with torch.no_grad():
        cache = mech.make_cache(2, 0)
        cache.attend(mech, part_of(call, 0, 3), key_visible=None)
        outs = torch.cat([cache.attend(mech, part_of(call, t, t + 1), key_visible=None)[1] for t in range(3, 9)], 2)
    assert outs[0, :, 2:].isnan().all()
    assert outs[0, :, :2].isfinite().all()
    assert outs[1].isfinite().all()


def test_nan_in_a_value_goes_with_its_key(on_gpu: pytest.MonkeyPatch) -> None:
    """A place whose key was dropped may hold any number, also one that is none."""
    call, mech = call_of(20), al.mechanism("abc-select:slots=2,window=8,sinks=1,block=4")
    call.v[0, :, 5:8] = torch.nan
    with torch.no_grad():
        cache = mech.make_cache(2, 0)
        cache.attend(mech, part_of(call, 0, 3), key_visible=None)
        # The newest keys are kept: with token 16 the last of them are dropped, more than one token can take the place of.
        mech.recency.data.fill_(1e6)
        outs = torch.cat([cache.attend(mech, part_of(call, t, t + 1), key_visible=None)[1] for t in range(3, 20)], 2)
    assert outs[0, :, 2].isnan().any()
    assert outs[0, :, 15 - 3].isnan().all()
    assert outs[0, :, 16 - 3 :].isfinite().all()
    assert outs[1].isfinite().all()


@pytest.mark.parametrize("block", [1, 4])
def test_of_equal_scores_the_later_token_stays(block: int, on_gpu: pytest.MonkeyPatch) -> None:
    mech = al.mechanism(f"abc-select:slots=5,window=8,sinks=2,block={block}")
    check_steps(with_exact_scores(call_of(50), mech), mech, prompt=31)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(BOUND))
def test_large_memories(dtype: torch.dtype) -> None:
    mech = al.mechanism("abc-select:slots=240,window=256,sinks=4")
    check_steps(with_exact_scores(call_of(700, d=128, e=128, dtype=dtype), mech), mech, prompt=300)


def check_steps(call: al.AttentionCall, mech: al.AbcSelect, *, prompt: int) -> None:
    """Raise unless a prompt and steps after it keep the same keys and give the same outputs as the whole by PyTorch."""
    n = call.q.shape[2]
    with torch.no_grad():
        cache, parts = mech.make_cache(2, 0), []
        for lo, hi in ((0, prompt), *one_by_one(prompt, n)):
            parts.append(cache.attend(mech, part_of(call, lo, hi), key_visible=None)[1])
        assert not cache.ordered, "a step is the kernel's"
        assert_the_same_keys(cache, mech, call)
        with without_kernels():
            whole = mech(call)
    assert_close(torch.cat(parts, 2), whole)


def test_compiled_equals_eager() -> None:
    """What is kept is updated in place by compiled code, too."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 1, 16, device=DEVICE) for heads in (6, 2, 2))
    x, weight, recency = torch.randn(2, 1, 150, device=DEVICE), torch.randn(2, 150, device=DEVICE), torch.ones(2)
    kept = [torch.zeros(2, 2, 7, 16, device=DEVICE), torch.zeros(2, 2, 7, 16, device=DEVICE)]
    kept += [torch.zeros(2, 2, 7, device=DEVICE), torch.full((2, 2, 7), NOWHERE, dtype=torch.int32, device=DEVICE)]
    kept += [torch.zeros(2, 2, dtype=torch.long, device=DEVICE)]
    rules = {"slots": 2, "window": 4, "block": 2, "sinks": 1, "tokens": 256, "scale": 0.25}

    def step(kept: list[Tensor], t: int) -> Tensor:
        return select_step(q + t, k - t, v + t, x, (weight, recency.to(DEVICE)), kept, **rules)

    held = [t.clone() for t in kept]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for t in range(9):
        torch.testing.assert_close(compiled(held, t), step(kept, t))
    for a, b in zip(held, kept, strict=True):
        torch.testing.assert_close(a, b)
    assert kept[4].tolist() == [[9, 9], [9, 9]]


def test_sizes_that_it_is_not_made_for() -> None:
    assert supports(64, 48, torch.bfloat16, keys=124, heads=3)
    assert not supports(64, 64, torch.float64, keys=124, heads=3)
    assert not supports(64, 64, torch.float32, keys=MOST_KEYS + 1, heads=3)
