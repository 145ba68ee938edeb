"""per-group: each key/value head of a layer, with the query heads that read it, attends by its own mechanism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnlab as al
from attnlab.conformance.number_laws import random_calls_keep_their_numbers
from attnlab.mechanisms.per_group import KeysOfGroups, per_group
from tests.kernels.bounds import DEVICE
from tests.tolerance import assert_close
from tests.unchecked import unchecked

SPECS = ["softmax", "abc-hybrid:slots=3,window=4,sinks=1,block=2", "abc-hybrid:slots=3,window=4,sinks=1,block=2",
         "abc-mlp:slots=2,tied=false", "window:r=3"]  # fmt: skip


def call(heads: int, read_by: int, *, length: int = 11, **changes: Any) -> al.AttentionCall:
    torch.manual_seed(heads)
    q, k, v = (torch.randn(2, h, length, w, dtype=torch.float64)
               for h, w in ((heads * read_by, 5), (heads, 5), (heads, 3)))  # fmt: skip
    return al.AttentionCall(q, k, v, x=torch.randn(2, length, 7, dtype=torch.float64), causal=True, **changes)


def of_heads(whole: al.AttentionCall, lo: int, hi: int) -> al.AttentionCall:
    r = whole.groups
    return replace(whole, q=whole.q[:, lo * r : hi * r], k=whole.k[:, lo:hi], v=whole.v[:, lo:hi])


@pytest.mark.parametrize("read_by", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_each_head_attends_as_its_own_mechanism_would(read_by: int, padded: bool) -> None:
    whole = call(5, read_by)
    if padded:
        whole = replace(whole, key_visible=torch.tensor([[0] * 3 + [1] * 8, [1] * 11], dtype=torch.bool))
    mixed = al.mechanism(per_group(SPECS))
    out, weights = mixed(whole), mixed.weights(whole)
    runs = mixed.runs(5)
    assert [(run.lo, run.hi) for run in runs] == [(0, 1), (1, 3), (3, 4), (4, 5)]
    for run in runs:
        own, queries = of_heads(whole, run.lo, run.hi), slice(run.lo * read_by, run.hi * read_by)
        assert_close(out[:, queries], run.part(own))
        assert_close(weights[:, queries], run.part.weights(own))


def test_a_mask_of_each_head_goes_with_its_head() -> None:
    whole = call(2, 2, mask=torch.rand(2, 4, 11, 11) > 0.3)
    mixed = al.mechanism("per-group:groups=softmax/top-r:r=3")
    assert_close(mixed(whole)[:, :2], al.Softmax()(whole)[:, :2])
    assert_close(mixed(whole)[:, 2:], al.TopR(r=3)(whole)[:, 2:])


def test_a_spec_for_several_neighbours() -> None:
    whole = call(4, 2)
    twice = al.mechanism("per-group:groups=softmax/window:r=2")
    each = al.mechanism("per-group:groups=softmax/softmax/window:r=2/window:r=2")
    assert_close(twice(whole), each(whole))


def test_parts_get_views_of_the_layers_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[al.AttentionCall] = []
    for cls in (al.Softmax, al.AbcHybrid):
        own = cls.forward
        monkeypatch.setattr(cls, "forward", lambda self, c, own=own: (seen.append(c), own(self, c))[1])
    whole = call(3, 2)
    al.mechanism(per_group(["softmax", SPECS[1], "softmax"]))(whole)
    assert len(seen) == 3
    for name in ("q", "k", "v"):
        storage = getattr(whole, name).untyped_storage().data_ptr()
        assert all(getattr(c, name).untyped_storage().data_ptr() == storage for c in seen)


def test_learned_parts_train_and_are_part_of_the_state() -> None:
    whole, mixed = call(3, 1), al.mechanism(per_group([*SPECS[:2], SPECS[3]]))
    assert isinstance(mixed, nn.Module)
    mixed(whole).square().sum().backward()
    names = {name for name, p in mixed.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert names == {"learned.1.bias", "learned.1.key_weight", "learned.2.weight"}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mixed(replace(whole, q=q, k=k, v=v))

    inputs = [t.requires_grad_() for t in (whole.q, whole.k, whole.v)]
    torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@pytest.mark.parametrize("read_by", [1, 2])
def test_prefill_and_steps_with_left_padding_equal_the_whole(read_by: int) -> None:
    """A prompt of three tokens, one by one, several at once, and rows that change places on the way."""
    seen = torch.tensor([[0] * 2 + [1] * 9, [1] * 11], dtype=torch.bool)
    whole = replace(call(5, read_by), key_visible=seen)
    mixed = al.mechanism(per_group(SPECS))
    expected, cache = mixed(whole), mixed.make_cache(2, 0)
    rows = torch.tensor([0, 1])
    for lo, hi in ((0, 3), (3, 4), (4, 5), (5, 9), (9, 10), (10, 11)):
        x = whole.x
        assert x is not None
        new = replace(whole, q=whole.q[rows, :, lo:hi], k=whole.k[rows, :, lo:hi], v=whole.v[rows, :, lo:hi],
                      x=x[rows, lo:hi], key_visible=seen[rows, lo:hi])  # fmt: skip
        _, out = cache.attend(mixed, new, key_visible=None)
        real = seen[rows, lo:hi]
        assert_close(out.transpose(1, 2)[real], expected[rows, :, lo:hi].transpose(1, 2)[real])
        cache.select(torch.tensor([1, 0]))
        rows = rows.flip(0)


@pytest.mark.parametrize("heads", [1, 2])
def test_random_calls_keep_their_numbers(heads: int) -> None:
    random_calls_keep_their_numbers(al.mechanism(per_group([SPECS[1], "softmax"][:heads])), count=60)


def test_bytes_are_the_mean_over_heads() -> None:
    mixed = al.mechanism("per-group:groups=softmax/abc-window:slots=4/softmax")
    sizes = {"length": 10, "d": 5, "e": 3, "dtype": torch.float32}
    assert mixed.cache_bytes(**sizes) == round((10 + 4 + 10) * 8 * 4 / 3)
    whole, cache = call(3, 1, length=10), mixed.make_cache(2, 0)
    cache.attend(mixed, whole, key_visible=None)
    # One flag for each token in the queue.
    assert cache.nbytes() == 2 * (24 * 8 * 8 + 4)
    assert al.mechanism("per-group:groups=softmax/window:r=3").make_cache(2, 0) is None


def test_a_part_draws_for_its_layer() -> None:
    mixed = al.mechanism("per-group:groups=softmax/abc-random:slots=3")
    one, other = (mixed.in_layer("decoder", layer) for layer in (0, 1))
    assert al.spec_of(one) != al.spec_of(other)
    assert al.mechanism("per-group:groups=softmax/window:r=3").in_layer("decoder", 1).groups == "softmax/window:r=3"
    assert_close(al.mechanism(al.spec_of(one))(call(2, 1)), one(call(2, 1)))


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="2 specs cannot be shared out among 3 key/value heads"):
        al.mechanism("per-group:groups=softmax/window:r=3")(call(3, 2))
    with pytest.raises(ValueError, match="without heads of its own"):
        al.PerGroup("softmax/per-head")
    with pytest.raises(ValueError, match="no mechanism named 'nothing'"):
        al.PerGroup("softmax/nothing")
    with pytest.raises(ValueError, match="reads the memory of the layer before"):
        al.PerGroup("softmax/abc-luna")
    with pytest.raises(ValueError, match="write tied=false in each"):
        al.PerGroup("abc-mlp:slots=2/abc-hybrid:slots=2")
    with pytest.raises(ValueError, match="spec strings between slashes"):
        unchecked(al.PerGroup, groups=3)
    assert al.PerGroup("abc-mlp:slots=2/softmax").tied_across_layers
    assert per_group(["top-r:r=2"] * 5) == "top-r:r=2"


def tokens_of(whole: al.AttentionCall, lo: int, hi: int) -> al.AttentionCall:
    """Some neighbouring tokens of a call."""
    assert whole.x is not None
    seen = None if whole.key_visible is None else whole.key_visible[:, lo:hi]
    fields = {name: getattr(whole, name)[:, :, lo:hi] for name in ("q", "k", "v")}
    return replace(whole, **fields, x=whole.x[:, lo:hi], key_visible=seen)


@pytest.mark.parametrize("hidden", [0, 5])
@pytest.mark.parametrize("kernels", [False, True])
def test_keys_are_written_into_room_ahead(hidden: int, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients: steps that change nothing but a place, and a thirty-second part of memory more at most."""
    steps: list[int] = []
    if kernels:
        ragged = pytest.importorskip("attnlab.kernels.ragged")
        attention = ragged.ragged_attention
        monkeypatch.setattr(ragged, "ragged_attention", lambda *a, **how: steps.append(1) or attention(*a, **how))
    monkeypatch.setattr("attnlab.mechanisms.per_group.kernels_take", lambda _: kernels)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 80, 8, device=DEVICE) for heads in (2, 1, 1))
    seen = (torch.arange(80, device=DEVICE) >= hidden).expand(2, -1) if hidden else None
    whole = al.AttentionCall(q, k, v, x=torch.zeros(2, 80, 1, device=DEVICE), causal=True, key_visible=seen)
    keys, softmax, buffers = KeysOfGroups(), al.mechanism("softmax"), set()
    with torch.no_grad():
        outs = [keys.attend(softmax, tokens_of(whole, 0, 64), key_visible=None)[1]]
        for t in range(64, 80):
            full, out = keys.attend(softmax, tokens_of(whole, t, t + 1), key_visible=None)
            outs.append(out)
            buffers.add(keys.k.data_ptr())
            assert full.k.shape[2] == t + 1
            assert keys.k.shape[2] <= (t + 1) * 33 / 32
    assert len(steps) == 16 * kernels
    # Room for two or three at a time, so at most every other step copies.
    assert len(buffers) <= 8
    assert_close(torch.cat(outs, 2)[:, :, hidden:], softmax(whole)[:, :, hidden:])


@pytest.mark.gpu
def test_a_captured_step_goes_on_at_every_replay() -> None:
    from attnlab.measure import captured

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 700, 64, device="cuda", dtype=torch.bfloat16) for heads in (6, 2, 2))
    whole = al.AttentionCall(q, k, v, x=torch.zeros(2, 700, 1, device="cuda"), causal=True)
    softmax, keys = al.mechanism("softmax"), KeysOfGroups(capacity=700)
    place = torch.full((1,), 690, device="cuda")

    def step() -> Tensor:
        at = [t.index_select(2, place) for t in (q, k, v)]
        place.add_(1)
        return keys.attend(softmax, al.AttentionCall(*at, causal=True), key_visible=None)[1]

    with torch.no_grad():
        keys.attend(softmax, tokens_of(whole, 0, 690), key_visible=None)
        replay, expected = captured(step), softmax(whole)
        # Three steps before the capture, which computes nothing.
        for t in range(693, 699):
            torch.testing.assert_close(replay(), expected[:, :, t : t + 1], rtol=2e-2, atol=2e-2)
        full, out = keys.attend(softmax, tokens_of(whole, 699, 700), key_visible=None)
    assert full.k.shape[2] == 700
    torch.testing.assert_close(out, expected[:, :, 699:], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_parts_of_a_captured_step_run_beside_each_other_and_give_the_same() -> None:
    """Heads of three kinds, decoded by a graph and step by step."""
    from attnlab.measure import captured

    torch.manual_seed(0)
    spec = (
        "per-group:groups=softmax/abc-select:slots=16;window=16;sinks=2;block=8/abc-hybrid:slots=0;window=32;block=16"
    )
    q, k, v = (torch.randn(2, heads, 300, 64, device="cuda", dtype=torch.bfloat16) for heads in (6, 3, 3))
    x = torch.randn(2, 300, 48, device="cuda", dtype=torch.bfloat16)
    whole, mech, place = al.AttentionCall(q, k, v, x=x, causal=True), al.mechanism(spec), torch.full((1,), 250).cuda()
    with torch.no_grad():
        expected = mech(whole)
        past = mech.make_cache(2, 300)
        assert past is not None
        past.attend(mech, tokens_of(whole, 0, 250), key_visible=None)

        def step() -> Tensor:
            at = [t.index_select(2, place) for t in (q, k, v)]
            one = al.AttentionCall(*at, x=x.index_select(1, place), causal=True)
            place.add_(1)
            return past.attend(mech, one, key_visible=None)[1]

        replay = captured(step)
        # Three steps before the capture, which computes nothing.
        for t in range(253, 293):
            torch.testing.assert_close(replay(), expected[:, :, t : t + 1], rtol=2e-2, atol=2e-2)
