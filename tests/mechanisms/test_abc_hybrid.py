"""Sinks, window and slots in one softmax: cases by hand, laws beside other mechanisms, the cache, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.attention import AttentionCall
from attnlab.chunks import small_chunks
from attnlab.conformance.calls import padding, self_call
from attnlab.mechanisms._bounded.hybrid_cache import HybridCache
from attnlab.mechanisms.abc_hybrid import AbcHybrid
from tests.mechanisms.test_abc_slots import peak_bytes, tokens
from tests.quick_cases import in_turn
from tests.tolerance import assert_close

SPECS = (
    "abc-hybrid:slots=5,window=7,sinks=2,block=1,control=x",
    "abc-hybrid:slots=5,window=7,sinks=9,block=7",
    "abc-hybrid:slots=5,window=12,sinks=2,block=4",
    "abc-hybrid:slots=3,window=1,sinks=0,block=1,mass=false",
    "abc-hybrid:slots=4,window=0,sinks=3,block=1",
    "abc-hybrid:slots=3,window=11,sinks=2,block=11,control=x",
    "abc-hybrid:slots=3,window=6,sinks=1,block=3,mass=false,control=x",
    "abc-hybrid:slots=5,window=32,sinks=1,block=16,mass=false",
    "abc-hybrid:slots=0,window=6,sinks=2,block=3",
)


def even(values: list[float], **settings: object) -> AttentionCall:
    """Queries and keys of zeros, so that all scores are equal, and these values."""
    zeros = torch.zeros(1, 1, len(values), 2, dtype=torch.float64)
    v = torch.tensor(values, dtype=torch.float64)[None, None, :, None]
    return AttentionCall(zeros, zeros, v, x=torch.zeros(1, len(values), 3, dtype=torch.float64), **settings)


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[None, None, :, None]


def test_a_slot_gets_the_attention_of_the_keys_it_holds() -> None:
    """Equal scores: with mass, every token counts once, wherever it stands; without, a slot counts as one key."""
    call = even([3, 9, 0, 12, 6], causal=True)
    assert_close(AbcHybrid(slots=1, window=2, sinks=0, block=1)(call), column(3, 6, 4, 6, 6))
    # At the last token: the slot's mean of 3, 9 and 0, and the keys 12 and 6.
    assert_close(
        AbcHybrid(slots=1, window=2, sinks=0, block=1, mass=False)(call)[..., -1:, :], column((4 + 12 + 6) / 3)
    )
    assert_close(
        AbcHybrid(slots=1, window=2, sinks=1, block=1, mass=False)(call)[..., -1:, :], column((3 + 4.5 + 12 + 6) / 4)
    )


def test_mass_makes_slots_of_equal_keys_exact() -> None:
    """Sum_i exp(q k_i) over m equal keys is m exp(q k~): with a slot for each kind of key, attention is softmax's."""
    torch.manual_seed(0)
    kinds = torch.randn(3, 5, dtype=torch.float64)
    which = torch.randint(3, (40,))
    call = replace(self_call(length=40, batch=1, heads=1, widths=(5, 2, 3)), causal=True)
    call = replace(call, k=kinds[which][None, None], x=torch.eye(3, dtype=torch.float64)[which][None])
    mech = AbcHybrid(slots=3, window=4, sinks=1, block=2, control="x")
    mech(call)
    # A share of exp(-40) of each token goes elsewhere.
    mech.weight.data = 80 * torch.eye(3)[None]
    assert_close(mech(call), al.Softmax()(call))
    mech.mass = False
    assert (mech(call) - al.Softmax()(call)).abs().max() > 0.01


@pytest.mark.parametrize("length", [5, 70, 150])
def test_without_slots_it_is_a_window_with_sinks(length: int) -> None:
    seen = torch.rand(2, length) > 0.2
    for call in (self_call(length=length), replace(self_call(length=length), key_visible=seen)):
        call = replace(call, causal=True)
        for window, sinks in ((1, 0), (3, 2), (67, 1), (2, 9)):
            mech = AbcHybrid(slots=0, window=window, sinks=sinks, block=1)
            assert_close(mech(call), al.mechanism(f"window:r={window},sinks={sinks}")(call))
    assert not list(mech.parameters())


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_as_long_as_the_text_is_softmax(causal: bool) -> None:
    call = replace(self_call(length=70), causal=causal, key_visible=torch.rand(2, 70) > 0.2)
    for window, block in ((70, 1), (80, 16), (10**9, 10**9)):
        mech = AbcHybrid(slots=3, window=window, block=block)
        assert mech.is_exact(call)
        assert_close(mech(call), al.Softmax()(call))


def test_without_window_and_mass_it_is_abc_mlp() -> None:
    call = replace(self_call(length=70), causal=True, key_visible=torch.rand(2, 70) > 0.2)
    mlp, mech = al.AbcMlp(slots=5), AbcHybrid(slots=5, window=0, sinks=0, block=1, control="x", mass=False)
    mlp(call), mech(call)
    # Small logits, which their bound does not change.
    mlp.weight.data *= 1e-3
    mech.weight.data = mlp.weight.data
    assert_close(mech(call), mlp(call))


@pytest.mark.parametrize(("spec", "cuts"), in_turn(SPECS, [[150], [1, 149], [0, 60, 1, 1, 30, 58], [130] + [1] * 20]))
def test_any_cut_of_a_text_gives_the_same(spec: str, cuts: list[int]) -> None:
    """Rows with other padding each, tokens in parts through the cache, forward and backward, beyond every chunk."""
    torch.manual_seed(1)
    call = replace(self_call(length=150, heads=4, groups=2, widths=(5, 3, 7)), causal=True)
    call = replace(call, key_visible=torch.rand(2, 150) > 0.3)
    leaves = [t.detach().requires_grad_() for t in (call.q, call.k, call.v, call.x)]
    call = replace(call, **dict(zip(("q", "k", "v", "x"), leaves, strict=True)))
    mech, parts, lo = al.mechanism(spec), [], 0
    whole, cache = mech(call), mech.make_cache(2, 0)
    assert_close(whole, mech.weights(call) @ call.v.repeat_interleave(2, 1))
    for size in cuts:
        parts.append(cache.attend(mech, tokens(call, lo, lo + size), key_visible=None)[1])
        lo += size
    assert_close(torch.cat(parts, 2), whole)
    probe = torch.randn_like(whole)
    of_parts, of_whole = (
        torch.autograd.grad(out, leaves, probe, allow_unused=True, materialize_grads=True)
        for out in (torch.cat(parts, 2), whole)
    )
    for name, a, b in zip("qkvx", of_parts, of_whole, strict=True):
        assert_close(a, b, what=f"gradient of {name}")


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "slots=0" not in spec])
def test_gradients_of_the_parameters(spec: str) -> None:
    call = replace(self_call(length=9, batch=1, heads=2, widths=(3, 2, 5)), causal=True)
    mech = al.mechanism(spec)
    mech(call)
    names = [name for name, _ in mech.named_parameters()]
    values = [p.detach().double().requires_grad_() for p in mech.parameters()]

    def attend(*parameters: Tensor) -> Tensor:
        return torch.func.functional_call(mech, dict(zip(names, parameters, strict=True)), (call,))

    with small_chunks(elements=1, tokens=4):
        torch.autograd.gradcheck(attend, values, fast_mode=True)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", [1, 30])
def test_float32_keeps_its_digits(spec: str, size: float) -> None:
    """Over several chunks and with controls that differ by many orders of magnitude."""
    torch.manual_seed(0)
    call = replace(self_call(length=400, batch=1, heads=2, widths=(8, 8, 8)), causal=True)
    mech = al.mechanism(spec)
    mech(call)
    for parameter in mech.parameters():
        parameter.data *= size
    single = replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float(), x=call.x.float())
    assert_close(mech(single).double(), mech(call), dtype=torch.float32)


def test_rows_are_distributions() -> None:
    call = replace(self_call(length=40), causal=True)
    for spec in SPECS:
        W = al.mechanism(spec).weights(call)
        assert W.min() >= 0
        assert_close(W.sum(-1), torch.ones_like(W[..., 0]))


def test_queries_that_see_all_keys_read_what_is_kept_at_the_end() -> None:
    call = self_call(length=70)
    for spec in SPECS:
        mech = al.mechanism(spec)
        causal = mech(replace(call, causal=True))
        last = mech(replace(call, q=call.q[:, :, -1:]))
        assert_close(last, causal[:, :, -1:])


@pytest.mark.parametrize("control", ["key", "x"])
def test_the_cache_holds_sinks_window_and_slots(control: str) -> None:
    mech, sizes = AbcHybrid(slots=5, window=8, sinks=2, block=4, control=control), []
    cache = mech.make_cache(2, 0)
    assert isinstance(cache, HybridCache)
    for length in (1, 20, 1, 130, 1):
        call = self_call(torch.float32, length=length, heads=4, groups=2, widths=(11, 13, 17))
        cache.attend(mech, replace(call, causal=True), key_visible=None)
        sizes.append(cache.nbytes())
    # Keys and values of 2 rows and 2 heads, masses, what x will write of the window's tokens, and counts.
    written_later = 0 if control == "key" else 8 * 5 * 4
    assert sizes == [2 * 2 * ((5 + 8 + 2) * (11 + 13) * 4 + 5 * 4 + written_later + 8)] * 5
    held = mech.cache_bytes(length=9, d=11, e=13, dtype=torch.float32)
    assert sizes[0] == 2 * 2 * held


def test_tokens_leave_the_window_a_block_at_a_time() -> None:
    """Equal scores, one slot without mass: it counts as one key, whose value is the mean of the tokens that left."""
    call = even([3, 9, 0, 12, 6, 1], causal=True)
    out = AbcHybrid(slots=1, window=4, sinks=0, block=2, mass=False)(call)
    assert_close(out, column(3, 6, 4, 6, (6 + 0 + 12 + 6) / 4, (6 + 0 + 12 + 6 + 1) / 5))


def test_padding_shifts_no_blocks() -> None:
    """A row with padding on either side and in between is read as the row alone is."""
    torch.manual_seed(2)
    call = replace(self_call(length=50, batch=1), causal=True)
    seen = torch.rand(1, 50) > 0.4
    alone = {name: getattr(call, name)[:, :, seen[0]] for name in ("q", "k", "v")}
    for spec in SPECS:
        mech = al.mechanism(spec)
        part = mech(replace(call, **alone, x=call.x[:, seen[0]]))
        assert_close(mech(replace(call, key_visible=seen))[:, :, seen[0]], part)


@pytest.mark.parametrize("block", [8, 16])
def test_training_memory_is_linear_in_the_length(block: int) -> None:
    def both(length: int) -> None:
        t = torch.randn(1, 2, length, 16, requires_grad=True)
        x = torch.randn(1, length, 32, requires_grad=True)
        AbcHybrid(slots=8, window=16, block=block)(AttentionCall(t, t, t, x=x, causal=True)).sum().backward()

    short, long = (peak_bytes(lambda n=n: both(n)) for n in (1024, 4096))
    assert long < 4.4 * short


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ("slots=0,window=0", "could not see itself"),
        ("window=-1", "window must be an int of at least 0"),
        ("block=0", "block must be an int of at least 1"),
        ("window=60", "a multiple of that, got window=60"),
        ("window=0", "a multiple of that, got window=0"),
        ("slots=2.5", "slots='2.5' must be int"),
        ("control=query", "control must be one of x, key, got 'query'"),
        # Settings that were dropped are refused, not passed over.
        ("decay=true", "decay"),
        ("write=delta", "write"),
        ("control=both", "control must be one of x, key, got 'both'"),
    ],
)
def test_settings_that_mean_nothing(settings: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        al.mechanism(f"abc-hybrid:{settings}")


def test_calls_that_it_refuses() -> None:
    call = replace(self_call(length=7), causal=True)
    with pytest.raises(ValueError, match="control='key'"):
        AbcHybrid(slots=3, control="x")(replace(call, x=None))
    assert AbcHybrid(slots=3, window=2, block=2)(replace(call, x=None)).shape == call.v.shape
    with pytest.raises(ValueError, match="x for 5 of 7"):
        AbcHybrid(slots=3, control="x")(replace(call, x=call.x[:, :5]))
    mech = AbcHybrid(slots=3, control="x")
    mech(call)
    with pytest.raises(ValueError, match="make a mechanism for each shape"):
        mech(replace(call, x=call.x[..., :3]))
    cache = mech.make_cache(2, 0)
    with pytest.raises(ValueError, match="for a batch of 2"):
        cache.attend(mech, self_call(batch=3), key_visible=None)
    with pytest.raises(ValueError, match="new tokens only"):
        cache.attend(mech, replace(call, offset=1), key_visible=None)


def test_rows_of_a_cache_are_reordered() -> None:
    call = replace(self_call(length=9), causal=True, key_visible=padding([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9]))
    swapped = torch.tensor([1, 0, 1])
    for spec in SPECS:
        mech = al.mechanism(spec)
        whole, cache = mech(call), mech.make_cache(2, 0)
        cache.attend(mech, tokens(call, 0, 6), key_visible=None)
        cache.select(swapped)
        rest = tokens(call, 6, 9)
        fields = {name: getattr(rest, name)[swapped] for name in ("q", "k", "v", "x", "key_visible")}
        _, out = cache.attend(mech, replace(rest, **fields), key_visible=None)
        assert_close(out, whole[swapped][:, :, 6:])
