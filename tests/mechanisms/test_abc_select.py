"""abc-select: the keys of the highest scores stay, in every form of the computation, and scores are learned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.chunks import small_chunks
from tests.tolerance import assert_close

SPECS = ["abc-select:slots=5,window=8,sinks=2,block=4", "abc-select:slots=3,window=6,sinks=0,block=6"]


def call_of(n: int = 41, *, seed: int = 0, **settings: object) -> al.AttentionCall:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, heads, n, 4, dtype=torch.float64) for heads in (4, 2, 2))
    return al.AttentionCall(q, k, v, x=torch.randn(2, n, 6, dtype=torch.float64), causal=True, **settings)


def scored(mech: al.AbcSelect, scores: Tensor) -> al.AttentionCall:
    """A call of one head whose scores are these, and whose values tell which keys a query sees."""
    n = len(scores)
    q = torch.zeros(1, 1, n, 4)
    call = al.AttentionCall(q, q, torch.eye(n)[None, None], x=scores[None, :, None].float(), causal=True)
    mech(call)
    mech.weight.data.fill_(1.0)
    return call


def test_the_highest_scores_stay_and_of_equal_ones_the_later() -> None:
    mech = al.AbcSelect(slots=2, window=2, sinks=1, block=1)
    call = scored(mech, torch.tensor([9, 5, 7, 7, 1, 7, 0, 3]))
    seen = [set(row.nonzero().flatten().tolist()) for row in mech(call)[0, 0]]
    # The sink 0, the last two, and of the others the two of the highest scores: 7 before 5, and the later 7 first.
    assert seen[3] == {0, 2, 3} | {1}
    assert seen[5] == {0, 4, 5} | {2, 3}
    assert seen[7] == {0, 6, 7} | {3, 5}


def test_recency_makes_later_keys_dearer() -> None:
    mech = al.AbcSelect(slots=1, window=1, sinks=0, block=1)
    call = scored(mech, torch.tensor([3.0, 2.0, 1.0, 0.0]))
    assert mech(call)[0, 0, 3].nonzero().flatten().tolist() == [0, 3]
    mech.recency.data.fill_(2 * 256.0)
    assert mech(call)[0, 0, 3].nonzero().flatten().tolist() == [2, 3]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("learn", [False, True])
def test_gradients_are_those_of_the_definition(spec: str, learn: bool) -> None:
    """Of queries, keys and values; that a score learns besides does not change them."""
    mech, call = al.mechanism(spec), call_of()
    mech(call)
    mech.requires_grad_(learn)
    slopes = torch.randn_like(call.q)
    results = []
    for attend in (lambda c: mech(c), lambda c: mech.weights(c) @ c.v.repeat_interleave(2, 1)):
        leaves = [t.clone().requires_grad_() for t in (call.q, call.k, call.v)]
        out = attend(replace(call, q=leaves[0], k=leaves[1], v=leaves[2]))
        results.append((out, *torch.autograd.grad(out, leaves, slopes)))
    for one, other in zip(*results, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("spec", SPECS)
def test_segments_change_nothing(spec: str) -> None:
    """Long calls are computed in pieces, which are made again for the backward pass."""
    mech, call = al.mechanism(spec), call_of(67)
    call = replace(call, q=call.q.requires_grad_())
    whole = mech(call)
    slope = torch.autograd.grad(whole.square().sum(), [call.q, mech.weight])
    with small_chunks(elements=1, tokens=1):
        parts = mech(call)
    assert_close(parts, whole)
    for one, other in zip(torch.autograd.grad(parts.square().sum(), [call.q, mech.weight]), slope, strict=True):
        assert_close(one, other)


def test_the_gradient_of_a_score_is_that_of_being_read() -> None:
    """Where a key just outside of the slots would help, its score is told to rise."""
    mech = al.AbcSelect(slots=1, window=1, sinks=0, block=1)
    q = torch.zeros(1, 1, 4, 4)
    # Each key has a weight of its own.
    call = al.AttentionCall(q, q, torch.eye(4)[None, None], x=torch.eye(4)[None], causal=True)
    mech(call)
    mech.weight.data.copy_(torch.tensor([[1.0, 0.9, 0.0, 0.0]]))
    last = mech(call)[0, 0, 3]
    assert last.nonzero().flatten().tolist() == [0, 3]
    loss = (last - torch.eye(4)[1]).square().sum()
    slopes = torch.autograd.grad(loss, mech.weight)[0][0]
    assert slopes[1] < 0
    assert slopes[2:].tolist() == [0.0, 0.0]


def test_scores_learn_to_keep_what_is_asked_for() -> None:
    """Every fourth token is marked and asked for long after; the memory has room for those alone."""
    torch.manual_seed(0)
    mech, n, marked = al.AbcSelect(slots=8, window=4, sinks=0, block=4), 32, torch.arange(32) % 4 == 1
    optimizer = None
    for step in range(150):
        k = torch.randn(8, 1, n, 16)
        k = k / k.norm(dim=-1, keepdim=True)
        v, x = torch.randn(8, 1, n, 4), torch.cat([torch.randn(8, n, 3), marked.float().expand(8, n)[..., None]], -1)
        asked = torch.randint(0, 7, (8, n)) * 4 + 1
        q = 12 * k.gather(2, asked[:, None, :, None].expand(-1, -1, -1, 16))
        out = mech(al.AttentionCall(q, k, v, x=x, causal=True, scale=1.0))
        optimizer = optimizer or torch.optim.Adam(mech.parameters(), lr=0.05)
        wanted = v.gather(2, asked[:, None, :, None].expand(-1, -1, -1, 4))
        loss = (out - wanted)[:, :, -4:].square().mean()
        if step == 0:
            first = loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2 * first


def test_a_step_changes_the_memory_in_place() -> None:
    """A captured graph writes to the same memory at every replay; with gradients nothing that was used is changed."""
    mech, call = al.AbcSelect(slots=2, window=2, sinks=1, block=1), call_of(9)
    steps = [
        replace(call, **{name: t.narrow(1 if name == "x" else 2, i, 1) for name, t in parts.items()})
        for parts in ({"q": call.q, "k": call.k, "v": call.v, "x": call.x},)
        for i in range(9)
    ]
    cache = mech.make_cache(2, 0)
    with torch.no_grad():
        outs = [cache.attend(mech, step, key_visible=None)[1] for step in steps[:1]]
        held = [t.data_ptr() for t in (*cache.tokens, cache.count)]
        outs += [cache.attend(mech, step, key_visible=None)[1] for step in steps[1:]]
    assert [t.data_ptr() for t in (*cache.tokens, cache.count)] == held
    assert_close(torch.cat(outs, 2), mech(call).detach())


@pytest.mark.parametrize("wrong", ["slots=0", "window=0", "window=8,block=3", "sinks=-1"])
def test_what_it_cannot_be(wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong.partition("=")[0]):
        al.mechanism(f"abc-select:{wrong}")
