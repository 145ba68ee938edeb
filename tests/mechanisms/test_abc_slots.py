"""The slots themselves: what is written, what is read, and that every form of the computation is the same one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.conformance.calls import padding, self_call
from attnlab.measure import peak_bytes
from attnlab.mechanisms._bounded import chunked as _chunked
from attnlab.mechanisms._bounded import slot_memory as _slot_memory
from attnlab.mechanisms._bounded.chunked import attend_chunks
from attnlab.mechanisms._bounded.slots import FLOOR, Control, SlotMechanism, SlotState, one_hot, prefill, step
from attnlab.mechanisms.abc_mlp import AbcMlp
from tests.tolerance import assert_close

CAUSAL = (
    "abc-mlp:slots=5",
    "abc-mlp:slots=3,activation=relu",
    "abc-mlp:slots=3,activation=sigmoid",
    "abc-mlp:slots=3,normalise=write",
    "abc-mlp:slots=3,gate=true",
    "abc-random:slots=3",
    "abc-linformer:slots=3,length=128",
    "abc-compressive:slots=3,length=128",
    "abc-global:slots=7,stride=3",
)
QUEUES = ("abc-window:slots=5", "abc-dilated:slots=3")


@dataclass(frozen=True)
class OwnSlot(SlotMechanism):
    """Token t in slot t."""

    slots: int = 7
    normalise: str = "none"

    def control(self, call: al.AttentionCall, places: Tensor) -> Control:
        return Control(one_hot(places, self.slots, call.q.dtype)[:, None])


@dataclass(frozen=True)
class Logits(SlotMechanism):
    """x itself is the control's logarithm."""

    slots: int = 2
    normalise: str = "read"

    def control(self, call: al.AttentionCall, places: Tensor) -> Control:
        assert call.x is not None
        return Control(call.x.unsqueeze(1))


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[None, None, :, None]


@pytest.mark.parametrize("normalise", ["read", "write", "none"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_slot_for_each_token_is_softmax(causal: bool, normalise: str) -> None:
    call = replace(self_call(length=7), causal=causal, key_visible=padding([[0, 0, 1, 1, 1, 1, 1], [1] * 6 + [0]]))
    mech, softmax = OwnSlot(normalise=normalise), al.mechanism("softmax")
    assert_close(mech(call), softmax(call))
    assert_close(mech.weights(call), softmax.weights(call))


def test_one_shared_slot_is_a_running_mean() -> None:
    call = al.AttentionCall(
        column(1, 1, 1), column(2, 4, 9), column(3, 6, 12), x=torch.zeros(1, 3, 1, dtype=torch.float64), causal=True
    )
    assert_close(Logits(slots=1)(call), column(3, 4.5, 7))
    # Divided when written: v_1 + v_2 / 2 + v_3 / 3, never scaled down again.
    assert_close(Logits(slots=1, normalise="write")(call), column(3, 6, 10))
    assert_close(Logits(slots=1, normalise="none")(call), column(3, 9, 21))


def test_two_slots_by_hand() -> None:
    """Slot 1 gets (1/4, 3/4), slot 2 gets (1, 0): K~ = (0, log 3), V~ = (7, 1), P = (1/4, 3/4)."""
    x = torch.tensor([[[0.0, 0.0], [math.log(3), FLOOR]]], dtype=torch.float64)
    k = column(math.log(3), -math.log(3) / 3)
    call = al.AttentionCall(column(1.0), k, column(1, 9), x=x, scale=1.0)
    assert_close(Logits()(call), column(0.25 * 7 + 0.75 * 1))
    assert_close(Logits().weights(call)[0, 0, 0], torch.tensor([0.25 / 4 + 0.75, 0.75 / 4], dtype=torch.float64))


def test_an_empty_slot_takes_no_weight() -> None:
    x = torch.full((1, 3, 2), FLOOR, dtype=torch.float64)
    call = al.AttentionCall(column(5, 5, 5), column(-9, -9, -9), column(1, 2, 4), x=x)
    assert (Logits()(call) == 0).all()
    assert (Logits()(replace(call, causal=True)) == 0).all()
    x = x.clone()
    x[0, 1, 0] = 0
    assert_close(Logits()(replace(call, x=x)), column(2, 2, 2))
    assert_close(Logits()(replace(call, x=x, causal=True)), column(0, 2, 2))


def test_each_slot_is_attention_with_a_pseudo_query() -> None:
    """[K~]_l = attn([W_phi]_l, {x_i}, {k_i}) (B.2)."""
    call, mech = self_call(length=7), AbcMlp(slots=5)
    _, state = prefill(mech, call)
    assert call.x is not None
    assert mech.weight is not None
    for head in range(3):
        pseudo = mech.weight[head].double()
        over_tokens = (pseudo @ call.x.mT).softmax(-1)
        assert_close(state.k[:, head], over_tokens @ call.k[:, head])
        assert_close(state.v[:, head], over_tokens @ call.v[:, head])


@pytest.mark.parametrize("spec", CAUSAL + QUEUES)
@pytest.mark.parametrize("length", [1, 32, 33, 100])
def test_chunks_equal_the_definition_forward_and_backward(spec: str, length: int) -> None:
    call = replace(self_call(length=length), causal=True, key_visible=torch.rand(2, length) > 0.2)
    mech = al.mechanism(spec)
    for part in (call, replace(call, q=call.q[:, :, length // 2 :], offset=length // 2)):
        leaves = [t.detach().requires_grad_() for t in (part.q, part.k, part.v, part.x)]
        q, k, v, x = leaves
        again = replace(part, q=q, k=k, v=v, x=x)
        dense, fast = mech.weights(again) @ v, mech(again)
        assert_close(fast, dense, what="forward")
        probe = torch.randn_like(dense)
        for name, a, b in zip(
            "qkvx",
            torch.autograd.grad(fast, leaves, probe, allow_unused=True, materialize_grads=True),
            torch.autograd.grad(dense, leaves, probe, allow_unused=True, materialize_grads=True),
            strict=True,
        ):
            assert_close(a, b, what=f"gradient of {name}")


@pytest.mark.parametrize("spec", CAUSAL)
@pytest.mark.parametrize("first", [0, 1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_prefill_then_steps_equal_the_whole(spec: str, first: int, dtype: torch.dtype) -> None:
    seen = padding([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 1]])
    call = replace(self_call(dtype, length=7), causal=True, key_visible=seen)
    mech = al.mechanism(spec)
    assert isinstance(mech, SlotMechanism)
    whole = mech(call)
    out, state = prefill(mech, tokens(call, 0, first))
    parts = [out]
    for t in range(first, 7):
        out, state = step(mech, tokens(call, t, t + 1), state)
        parts.append(out)
    assert_close(torch.cat(parts, 2), whole)
    _, at_once = prefill(mech, call)
    assert_close(state.z, at_once.z, dtype=dtype)
    assert state.count.tolist() == [5, 6]


@pytest.mark.parametrize("spec", CAUSAL)
@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("length", [7, 40])
def test_gradients_flow_through_the_memory(spec: str, first: int, length: int) -> None:
    """Backward through a prefill and single steps: what the whole gives, for rows with other padding each."""
    seen = torch.rand(2, length) > 0.2
    call = replace(self_call(length=length), causal=True, key_visible=seen)
    leaves = [t.detach().requires_grad_() for t in (call.q, call.k, call.v, call.x)]
    call = replace(call, **dict(zip(("q", "k", "v", "x"), leaves, strict=True)))
    mech = al.mechanism(spec)
    assert isinstance(mech, SlotMechanism)
    whole = mech(call)
    probe = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, leaves, probe, allow_unused=True, materialize_grads=True)
    first = first * length // 7
    out, state = prefill(mech, tokens(call, 0, first))
    parts = [out]
    for t in range(first, length):
        out, state = step(mech, tokens(call, t, t + 1), state)
        parts.append(out)
    gradients = torch.autograd.grad(torch.cat(parts, 2), leaves, probe, allow_unused=True, materialize_grads=True)
    for name, a, b in zip("qkvx", gradients, expected, strict=True):
        assert_close(a, b, what=f"gradient of {name}")


def test_training_memory_is_linear_in_the_length() -> None:
    def both(length: int) -> None:
        t = torch.randn(1, 2, length, 16, requires_grad=True)
        x = torch.randn(1, length, 32, requires_grad=True)
        AbcMlp(slots=8)(al.AttentionCall(t, t, t, x=x, causal=True)).sum().backward()

    short, long = (peak_bytes(lambda n=n: both(n)) for n in (4096, 16384))
    assert long < 4.4 * short


@pytest.mark.parametrize("spec", CAUSAL + QUEUES)
@pytest.mark.parametrize("first", [1, 4])
def test_the_cache_of_a_layer(spec: str, first: int) -> None:
    """As a model decodes: keys of new tokens only, rows reordered in between."""
    seen, swap = padding([[0, 0, 1, 1, 1, 1, 1], [1] * 7]), torch.tensor([1, 0, 1])
    call = replace(self_call(length=7), causal=True, key_visible=seen)
    mech = al.mechanism(spec)
    whole = mech(call)
    cache = mech.make_cache(2, 7)
    _, out = cache.attend(mech, tokens(call, 0, first), key_visible=seen[:, :first])
    assert_close(out, whole[:, :, :first])
    cache.select(swap)
    for t in range(first, 7):
        one = tokens(call, t, t + 1)
        picked = {n: getattr(one, n)[swap] for n in ("q", "k", "v", "x", "key_visible")}
        _, out = cache.attend(mech, replace(one, **picked), key_visible=seen[swap, : t + 1])
        assert_close(out, whole[swap, :, t : t + 1], what=f"token {t}")
    with pytest.raises(ValueError, match="batch of 3"):
        cache.attend(mech, tokens(call, 0, 1), key_visible=None)


@pytest.mark.parametrize("spec", ["abc-mlp:slots=5", "abc-mlp:slots=3,activation=relu", "abc-mlp:slots=3,gate=true"])
@pytest.mark.parametrize("first", [0, 1, 4])
def test_steps_without_gradients_overwrite_their_own_memory_only(spec: str, first: int) -> None:
    seen = padding([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 1]])
    call = replace(self_call(length=7, heads=6, groups=2), causal=True, key_visible=seen)
    mech = al.mechanism(spec)
    whole, cache = mech(call), mech.make_cache(2, 7)
    with torch.inference_mode():
        cache.attend(mech, tokens(call, 0, first), key_visible=None)
    begun = cache.state
    kept = begun.k.clone()
    for t, context in zip(range(first, 7), [torch.no_grad, torch.inference_mode] * 4, strict=False):
        with context():
            _, out = cache.attend(mech, tokens(call, t, t + 1), key_visible=None)
        assert_close(out, whole[:, :, t : t + 1], what=f"token {t}")
    # An inference tensor cannot be written outside of its mode, so the first step left it alone.
    assert torch.equal(begun.k, kept)
    assert_close(cache.state.z, prefill(mech, call)[1].z)


@pytest.mark.parametrize("spec", ["abc-mlp:slots=5", "abc-window:slots=3", "abc-compressive:slots=3"])
def test_cross_attention_keeps_the_memory_of_the_source(spec: str) -> None:
    call = replace(self_call(length=7), key_visible=padding([[1] * 7, [1] * 4 + [0] * 3]))
    mech = al.mechanism(spec)
    whole, cache = mech(call), mech.make_cache(2, 7)
    _, out = cache.attend(mech, replace(call, q=call.q[:, :, :1]), key_visible=call.key_visible)
    assert_close(out, whole[:, :, :1])
    nothing = replace(tokens(call, 0, 0), q=call.q[:, :, 1:2])
    _, out = cache.attend(mech, nothing, key_visible=nothing.key_visible)
    assert_close(out, whole[:, :, 1:2])


@pytest.mark.parametrize("activation", ["exp", "relu", "sigmoid"])
def test_huge_logits_stay_finite_and_exact(activation: str) -> None:
    """Control logits of +-1e4, in either order: nothing overflows, early tokens keep their weight."""
    call = replace(self_call(torch.float32, length=70), causal=True)
    mech = AbcMlp(slots=5, activation=activation)
    mech(call)
    assert call.x is not None
    assert mech.weight is not None
    size = (call.x @ mech.weight[0].mT).abs().max()
    huge = replace(call, x=(call.x * (1e4 / size)).requires_grad_())
    out = mech(huge)
    exact = replace(huge, **{n: getattr(huge, n).double() for n in ("q", "k", "v", "x")})
    # x was rounded to float32 before; logits of 1e4 then carry errors of 1e-3.
    torch.testing.assert_close(out.double(), mech(exact), rtol=2e-2, atol=2e-2)
    for grad in torch.autograd.grad(out.sum(), (huge.x, mech.weight)):
        assert torch.isfinite(grad).all()


def test_a_falling_control_keeps_the_first_tokens() -> None:
    """alpha_t = exp(-1e4 t): whatever comes later, the slot stays what the first token made it."""
    x = (-1e4 * torch.arange(100.0))[None, :, None]
    ones = torch.ones(1, 1, 100, 1)
    v = torch.arange(100.0)[None, None, :, None]
    call = al.AttentionCall(ones, ones, v + 7, x=x, causal=True)
    assert_close(Logits(slots=1)(call), torch.full_like(v, 7))
    # And rising: always the newest.
    assert_close(Logits(slots=1)(replace(call, x=-x)), v + 7)


@pytest.mark.parametrize(("jump", "at_once"), [(30.0, True), (60.0, False), (1e4, False)])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_jump_in_the_control_is_exact_in_either_form(
    jump: float, at_once: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 40 outweighs all before it; chunks that would lose those are worked off one by one."""
    tried = []

    def noted(*arguments: Any, **settings: Any) -> Any:
        tried.append(attend_chunks(*arguments, **settings))
        return tried[-1]

    monkeypatch.setattr(_slot_memory, "attend_chunks", noted)
    call = replace(self_call(torch.float32, length=150, heads=4, groups=groups), causal=True)
    x = torch.randn(2, 150, 2)
    x[:, 40:, 1] += jump
    leaves = [t.detach().requires_grad_() for t in (call.q, call.k, call.v, x)]
    fast = replace(call, **dict(zip(("q", "k", "v", "x"), leaves, strict=True)))
    out = Logits()(fast)
    assert [t is not None for t in tried] == [at_once]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    dense = replace(call, **dict(zip(("q", "k", "v", "x"), exact, strict=True)))
    expected = Logits().weights(dense) @ exact[2].repeat_interleave(groups, 1)
    assert_close(out, expected, dtype=torch.float32)
    probe = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, probe)
    for name, a, b in zip("qkvx", gradients, torch.autograd.grad(expected, exact, probe.double()), strict=True):
        # Gradients are sums over up to 150 tokens.
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-4, msg=lambda text, n=name: f"{n}: {text}")


def test_segments_carry_the_memory_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with a long text: 3 segments of one chunk each, the last one not full."""
    call = replace(self_call(length=150), causal=True, key_visible=torch.rand(2, 150) > 0.2)
    mech = AbcMlp(slots=5)
    leaves = [t.detach().requires_grad_() for t in (call.q, call.k, call.v, call.x)]
    call = replace(call, **dict(zip(("q", "k", "v", "x"), leaves, strict=True)))
    whole = mech(call)
    probe = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, leaves, probe)
    monkeypatch.setitem(_chunked.ROWS, "cpu", 1)
    assert_close(mech(call), whole)
    for a, b in zip(torch.autograd.grad(mech(call), leaves, probe), expected, strict=True):
        assert_close(a, b)


def test_early_tokens_keep_their_weight_over_100_000() -> None:
    """One slot, equal control: the last output is the mean of all, and the first token's share of it is 1e-5."""
    length = 100_000
    v = torch.zeros(1, 1, length, 1)
    v[0, 0, 0] = length
    call = al.AttentionCall(v * 0, v * 0, v, x=torch.zeros(1, length, 1), causal=True)
    out = Logits(slots=1)(call)[0, 0, :, 0]
    assert_close(out, length / torch.arange(1.0, length + 1))
    _, state = prefill(Logits(slots=1), call)
    assert_close(state.v.flatten(), torch.ones(1))


def test_huge_logits_over_100_000_tokens() -> None:
    """Logits between -1e4 and 1e4: the last token reads what the definition, in float64, says it reads."""
    length = 100_000
    t = torch.randn(1, 1, length, 3)
    x = (2 * torch.rand(1, length, 2) - 1) * 1e4
    # The second slot is the first token's: all others together weigh exp(-90) beside it.
    x[0, 0, 1] = 1.01e4
    call = al.AttentionCall(t, t, t, x=x, causal=True)
    with torch.no_grad():
        out = Logits()(call)
        exact = {n: getattr(call, n).double() for n in ("k", "v", "x")}
        last = replace(call, q=call.q[:, :, -1:].double(), offset=length - 1, **exact)
        assert_close(out[:, :, -1:], Logits().weights(last) @ last.v, dtype=torch.float32)
    assert torch.isfinite(out).all()
    _, state = prefill(Logits(), call)
    assert_close(state.v[0, 0, 1], t[0, 0, 0], dtype=torch.float16)


def test_the_state_does_not_grow() -> None:
    def numbers(state: SlotState) -> int:
        return sum(t.numel() for t in (state.k, state.v, state.z, state.count))

    mech, sizes = AbcMlp(slots=3), []
    with torch.no_grad():
        for length in (1024, 65536):
            t = torch.randn(1, 1, length, 2)
            _, state = prefill(mech, al.AttentionCall(t[:, :, :1], t, t, x=t[:, 0]))
            sizes.append(numbers(state))
            assert int(state.count) == length
    assert sizes == [3 * (2 + 2 + 1) + 1] * 2


@pytest.mark.parametrize(
    "spec", ["abc-mlp:slots=0", "abc-window:slots=-1", "abc-random:slots=0", "abc-mlp:normalise=x"]
)
def test_bad_settings(spec: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        al.mechanism(spec)


def test_a_step_brings_only_new_tokens() -> None:
    mech, call = AbcMlp(slots=3), replace(self_call(length=5), causal=True)
    _, state = prefill(mech, call)
    with pytest.raises(ValueError, match="new tokens only"):
        step(mech, replace(call, q=call.q[:, :, -1:], offset=4), state)
    with pytest.raises(ValueError, match="batch of 2"):
        step(mech, replace(tokens(call, 0, 1), **{n: getattr(call, n)[:1, ..., :1, :] for n in "qkvx"}), state)


def tokens(call: al.AttentionCall, lo: int, hi: int) -> al.AttentionCall:
    """The call's tokens lo to hi alone."""
    assert call.x is not None
    seen = None if call.key_visible is None else call.key_visible[:, lo:hi]
    q, k, v = (t[:, :, lo:hi] for t in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, x=call.x[:, lo:hi], key_visible=seen)
