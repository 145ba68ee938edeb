"""Memory that is really freed: flat keys against lists, bytes really held, and outputs over the keys that are left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnlab.attention import AttentionCall
from attnlab.caches import KeptKeys, KVPolicy, Place
from attnlab.caches.ragged import RaggedKeys
from attnlab.chunks import small_chunks
from attnlab.mechanisms.softmax import Softmax
from tests.caches.policies import EXAMPLES
from tests.caches.test_laws import PADDED, variants
from tests.tolerance import assert_close

ROWS, GROUPS, HEADS, WIDTH, VALUE = 3, 2, 6, 64, 48
PROMPT, STEPS = 150, 9
MOST = 1.05


class Lists:
    """What ``RaggedKeys`` holds, as a list for each head."""

    def __init__(self, keep: Tensor, t: Tensor) -> None:
        self.heads = [[t[r, g][keep[r, g]] for g in range(keep.shape[1])] for r in range(keep.shape[0])]

    def append(self, new: Tensor) -> None:
        self.heads = [[torch.cat([own, new[r, g]]) for g, own in enumerate(row)] for r, row in enumerate(self.heads)]

    def select(self, rows: Tensor) -> None:
        self.heads = [self.heads[r] for r in rows.tolist()]

    def check(self, held: RaggedKeys, name: str) -> None:
        padded = held.padded(name, 0)
        counts = held.count_by_head().tolist()
        for r, row in enumerate(self.heads):
            for g, own in enumerate(row):
                assert counts[r][g] == len(own)
                assert torch.equal(padded[r, g, padded.shape[2] - len(own) :], own)
                assert not padded[r, g, : padded.shape[2] - len(own)].any()


@pytest.mark.parametrize("even", [False, True])
@torch.no_grad()
def test_flat_keys_are_what_lists_of_keys_are(even: bool) -> None:
    k, v = torch.randn(ROWS, GROUPS, PROMPT, 5), torch.randn(ROWS, GROUPS, PROMPT, 7)
    keep = torch.rand(ROWS, GROUPS, PROMPT) < torch.rand(ROWS, GROUPS, 1) ** 2
    keep = torch.arange(PROMPT).expand(keep.shape) % 3 > 0 if even else keep
    held = RaggedKeys(keep, {"keys": k, "values": v, "other": k[..., 0]})
    lists = {"keys": Lists(keep, k), "values": Lists(keep, v), "other": Lists(keep, k[..., 0])}
    assert held.even == even
    for step in range(5):
        new = {"keys": torch.randn(held.rows, GROUPS, 1, 5), "values": torch.randn(held.rows, GROUPS, 1, 7)}
        if not held.room:
            held.grow()
        held.append(new["keys"], new["values"])
        for name, own in lists.items():
            own.append(new.get(name, torch.zeros(held.rows, GROUPS, 1)))
            own.check(held, name)
        if step == 2:
            rows = torch.tensor([2, 0, 0, 1])
            held.select(rows)
            for name, own in lists.items():
                own.select(rows)
                own.check(held, name)
    other = torch.randn(held.rows, GROUPS, held.longest)
    held.put("other", other)
    padded = held.padded("other", 0)
    assert torch.equal(padded, torch.where(padded == 0, 0, other))
    assert int((padded != 0).sum()) == held.total


@torch.no_grad()
def test_several_keys_are_appended_in_their_order() -> None:
    k, keep = torch.randn(2, 2, 700, 3), torch.rand(2, 2, 700) < 0.9
    columns = torch.arange(700, dtype=torch.int32).expand(2, 2, -1)
    held, lists = RaggedKeys(keep, {"keys": k, "values": k, "columns": columns}), (Lists(keep, k), Lists(keep, columns))
    new, more = torch.randn(2, 2, 3, 3), torch.tensor([700, 701, 702], dtype=torch.int32).expand(2, 2, -1)
    held.append(new, new, more)
    held.append(new[:, :, :1], new[:, :, :1], 703)
    for own, name, parts in zip(
        lists, ("keys", "columns"), ((new, new[:, :, :1]), (more, torch.full((2, 2, 1), 703))), strict=True
    ):
        for part in parts:
            own.append(part)
        own.check(held, name)


@torch.no_grad()
def test_dropped_keys_are_dropped_in_place_where_they_fit() -> None:
    k = torch.randn(2, 2, 400, 8)
    keep = torch.ones(2, 2, 400, dtype=torch.bool)
    keep[0, 0, :100] = False
    held = RaggedKeys(keep, {"keys": k, "values": k})
    address = held.buffers["keys"].data_ptr()
    for _ in range(5):
        held.append(torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 8))
        padded = held.padded("keys")
        keep = torch.arange(held.longest) >= held.longest - held.count_by_head()[..., None] + 1
        held.replace(keep, {"keys": padded, "values": held.padded("values")})
        assert torch.equal(held.padded("keys")[1], padded[1, :, 1:])
    assert held.buffers["keys"].data_ptr() == address
    held.replace(
        keep[..., 1:] & (torch.arange(400) % 4 == 0), {"keys": held.padded("keys"), "values": held.padded("values")}
    )
    assert held.nbytes() <= MOST * held.nominal_bytes()


def random_call(queries: int, keys: Tensor, values: Tensor, **settings: Any) -> AttentionCall:
    q = torch.randn(keys.shape[0], HEADS, queries, WIDTH, dtype=keys.dtype)
    return AttentionCall(q, keys, values, causal=True, offset=keys.shape[2] - queries, **settings)


PLACE = Place(1, 3, torch.randn(7, HEADS * VALUE, generator=torch.Generator().manual_seed(2)))


def new_tokens(count: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(ROWS, GROUPS, count, width, dtype=torch.bfloat16) for width in (WIDTH, VALUE))


def all_variants(spec: str) -> list[KVPolicy]:
    """The policy under every schedule and wrapper that it takes."""
    return [*variants(spec, budget=40), *variants(spec, budget=0.3), *variants(spec, budget=40, layers="pyramid")]


def read_prompt(policy: KVPolicy) -> KeptKeys:
    """A cache after a prompt whose rows have 150, 110 and 149 tokens."""
    kept, shown = KeptKeys(policy, 1), torch.ones(ROWS, PROMPT, dtype=torch.bool)
    shown[1, :40] = shown[2, :1] = False
    padded = "padding" not in policy.score.cannot()
    k, v = kept.extend(*new_tokens(PROMPT))
    kept.cut(random_call(PROMPT, k, v, key_visible=shown if padded else None), PLACE)
    if kept.waits:
        k, v = kept.extend(*new_tokens(PROMPT))
        kept.cut_after_rereading(random_call(PROMPT, k, v), PLACE)
    return kept


@pytest.mark.parametrize("spec", EXAMPLES)
@torch.no_grad()
def test_no_more_bytes_are_held_than_those_of_the_kept_keys(spec: str) -> None:
    """After the prompt, after every step, and when beams are copied; what a policy ranks by is counted apart.

    A key that stands for others has one number more, in float32.
    """
    for policy in all_variants(spec):
        kept = read_prompt(policy)
        for step in range(STEPS):
            assert kept.biased == spec.startswith("compact")
            counted = int(kept.counts().sum()) * ((WIDTH + VALUE) * 2 + 4 * kept.biased)
            assert kept.nominal_bytes() == counted
            assert kept.nbytes() - kept.gathered_bytes() <= MOST * counted, policy
            assert kept.nbytes() == sum(storages(kept).values())
            assert policy.schedule == "step" or kept.gathered_bytes() == 0
            if step == 4:
                kept.select(torch.tensor([2, 0, 0]))
                continue
            k, v = new_tokens(1)
            if kept.steps(k):
                kept.append(k, v)
                kept.attend(torch.randn(ROWS, HEADS, 1, WIDTH, dtype=k.dtype), scale=0.1)
            else:
                k, v = kept.extend(k, v)
                mask = kept.mask(AttentionCall(torch.zeros(ROWS, HEADS, 1, WIDTH, dtype=k.dtype), k, v))
                kept.cut(random_call(1, k, v, mask=mask), PLACE)


def storages(kept: KeptKeys) -> dict[int, int]:
    """The real storage of every tensor that a cache of a layer can reach, each counted once."""
    tensors: list[Tensor] = []

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            tensors.append(value)
        for other in (
            value.values() if isinstance(value, dict) else vars(value).values() if hasattr(value, "__dict__") else ()
        ):
            if not isinstance(other, KVPolicy):
                visit(other)

    visit(kept)
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def masks_of_columns(new: int, length: int) -> tuple[Tensor | None, ...]:
    """None; the same columns for all new tokens; other ones for each."""
    return None, torch.rand(ROWS, 1, length) < 0.7, torch.rand(ROWS, new, length) < 0.7


@pytest.mark.parametrize("spec", EXAMPLES)
@torch.no_grad()
def test_new_tokens_get_softmax_over_the_kept_keys(spec: str) -> None:
    """One token or several, such as a question: none sees a later one, and no head is padded."""
    for policy in all_variants(spec):
        kept = read_prompt(replace(policy, when="prefill"))
        prompts = kept.tokens
        for new, which in ((1, 0), (1, 1), (STEPS, 0), (2, 2), (1, 0)):
            k, v = new_tokens(new)
            assert kept.steps(k)
            kept.append(k, v)
            q = torch.randn(ROWS, HEADS, new, WIDTH, dtype=k.dtype)
            visible = masks_of_columns(new, kept.length)[which]
            with small_chunks(elements=64, tokens=4):
                out = kept.attend(q, scale=0.2, visible=visible)
            assert_close(out, Softmax()(call_over(kept, q, visible)), dtype=torch.bfloat16)
            assert kept.tokens == tuple(tokens + kept.length - PROMPT for tokens in prompts)


def call_over(kept: KeptKeys, q: Tensor, visible: Tensor | None) -> AttentionCall:
    """The call of new tokens over all keys that are kept, padded."""
    n = q.shape[2]
    columns = torch.arange(kept.length).expand(ROWS, GROUPS, -1) if kept.columns is None else kept.columns
    seen = (columns >= 0).unsqueeze(2)
    if visible is not None:
        at = columns.clamp_min(0).long().unsqueeze(2).expand(-1, -1, n, -1)
        seen = seen & visible[:, None].expand(-1, GROUPS, n, -1).gather(3, at)
    keys, values = kept.store.padded("keys", 0), kept.store.padded("values", 0)
    mask = seen.expand(-1, -1, n, -1).repeat_interleave(HEADS // GROUPS, 1)
    bias = kept.store.padded("bias", 0).to(q).repeat_interleave(HEADS // GROUPS, 1) if kept.biased else None
    bias = None if bias is None else bias[:, :, None].expand(-1, -1, n, -1)
    return AttentionCall(q, keys, values, causal=True, offset=keys.shape[2] - n, mask=mask, bias=bias, scale=0.2)


class Largest(TorchDispatchMode):
    """The most elements that a tensor made inside has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // max(1, t.element_size()))
        return out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("spec", EXAMPLES)
@torch.no_grad()
def test_no_policy_makes_all_of_w(spec: str, padded: bool) -> None:
    """Sums over queries are made chunk by chunk, and rows of the last queries alone where those suffice."""
    if padded and spec not in PADDED:
        pytest.skip("refuses padding")
    n = 600
    q, k, v = torch.randn(1, 1, n, 8), torch.randn(1, 1, n, 8), torch.randn(1, 1, n, 8)
    shown = torch.arange(n)[None] >= 7 if padded else None
    kept = KeptKeys(KVPolicy(64, by=spec, when="prefill"), 1)
    kept.extend(k, v)
    with small_chunks(elements=16 * n, tokens=n), Largest() as largest:
        kept.cut(AttentionCall(q, k, v, causal=True, key_visible=shown), Place(1, 3, torch.randn(7, 8)))
    assert largest.elements <= n * n // 8


@torch.no_grad()
def test_a_bias_of_keys_is_added_to_their_scores() -> None:
    k, q, bias = torch.randn(2, 2, 9, 8), torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9)
    keep = torch.rand(2, 2, 9) < 0.5
    visible = torch.rand(2, 9) < 0.8
    columns = torch.arange(9, dtype=torch.int32).expand(2, 2, -1)
    held = RaggedKeys(keep, {"keys": k, "values": k, "bias": bias, "columns": columns})
    for seen, rows in ((keep, None), (keep & visible[:, None], visible[:, None])):
        mask, added = (t.repeat_interleave(2, 1).unsqueeze(2) for t in (seen, bias))
        expected = Softmax()(AttentionCall(q, k, k, mask=mask, bias=added, scale=0.3))
        assert_close(held.attend(q, scale=0.3, visible=rows), expected)
