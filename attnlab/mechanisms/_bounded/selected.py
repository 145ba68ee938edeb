"""Sinks, a window and the keys of the highest scores, read by one softmax: which keys those are, and the read.

Places number the visible keys from 0. As in ``hybrid_memory``, a query whose newest key has place p sees the keys of
places s(p) to p and the sinks. Of all other keys before s(p) it sees the n of the highest scores. A key's score never
changes, so one that is not among them never comes back: the keys are a memory of constant size.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attnlab.attention import grouped, ungrouped
from attnlab.chunks import chunk_budget
from attnlab.mechanisms._bounded.continued import first_exact
from attnlab.mechanisms._bounded.slot_memory import FLOOR
from attnlab.mechanisms._device import compiled_part, kernels_take
from attnlab.shapes import Bool, Float, Int

__all__ = ["HIDDEN", "NOWHERE", "Selection", "Tokens", "attend", "kernel_serves", "merits", "selected"]

# Numbers of scores and gathered keys that are held at once: on a CPU some times what its cache holds.
ELEMENTS = {"cpu": 1 << 22}
MANY_ELEMENTS = 1 << 31
# The places of tokens that are not there: before all others, and after.
NOWHERE, HIDDEN = -1, 1 << 30
# A key that is not kept has a gradient as if it had at most exp of this times the largest weight.
LARGEST = 3.0


class Selection(NamedTuple):
    """How a call is read; ``slots`` is the number of keys that are kept beside sinks and window."""

    slots: int
    window: int
    block: int
    sinks: int
    scale: float


class Tokens(NamedTuple):
    """Keys and values in order of place, with their scores: first those not there (NOWHERE), last hidden ones."""

    k: Float[Tensor, "b g a d"]
    v: Float[Tensor, "b g a e"]
    score: Float[Tensor, "b g a"]
    place: Int[Tensor, "b g a"]

    def rows(self, index: Int[Tensor, "b g n"]) -> Tokens:
        """The tokens that ``index`` names, in its order."""
        k, v = (_taken(t, index) for t in (self.k, self.v))
        return Tokens(k, v, self.score.gather(2, index), self.place.gather(2, index))


def merits(tokens: Tokens, rules: Selection) -> Int[Tensor, "b g a"]:
    """Different numbers in the order of the scores, the later of equal ones higher; -1 of sinks and hidden keys.

    A score that is no number is higher than all; CUDA sorts it below all if its sign bit is set (pytorch issue 190781).
    """
    score = tokens.score.detach()
    order = score.masked_fill(score.isnan(), torch.nan).argsort(dim=-1, stable=True)
    numbers = torch.arange(order.shape[-1], dtype=torch.int32, device=order.device).expand_as(order)
    merit = torch.zeros_like(order, dtype=torch.int32).scatter(-1, order, numbers)
    return merit.masked_fill((tokens.place < rules.sinks) | (tokens.place >= HIDDEN), -1)


def selected(tokens: Tokens, newest: Int[Tensor, " b"], rules: Selection) -> Tokens:
    """The tokens that are kept after those of place ``newest``: sinks, window and slots, in a fixed number."""
    size = rules.sinks + rules.slots + rules.window
    place, bound = tokens.place, first_exact(newest, rules)[:, None, None]
    merit = merits(tokens, rules).masked_fill(place >= bound, -1)
    least = _least(merit, rules.slots)
    alive = (place >= 0) & (place < HIDDEN) & ((place < rules.sinks) | (place >= bound) | (merit >= least))
    # Those that stay come last, in order.
    order = alive.to(torch.int8).argsort(dim=-1, stable=True)[..., -size:]
    order = pad(order, (size - order.shape[-1], 0)) if place.shape[-1] else order
    alive = pad(alive.gather(2, order[..., -place.shape[-1] :]), (max(0, size - place.shape[-1]), 0))
    kept = tokens.rows(order)
    return kept._replace(place=kept.place.masked_fill(~alive, NOWHERE))


def attend(
    q: Float[Tensor, "b g r q d"], newest: Int[Tensor, "b q"], tokens: Tokens, rules: Selection, *, learn: bool,
    size: int, states: int,
) -> Float[Tensor, "b g r q e"]:  # fmt: skip
    """The outputs of queries by the places of their newest keys, in chunks of ``size``.

    A chunk has queries of one block (``states`` is 1), of two neighbours (2), or is a block of queries and keys of the
    same places from 0 on (0). To ``learn`` scores, keys that are just not selected are read with a weight of zero that
    has a gradient: that of a weight which its score raises. Scores and sums are in at least float32.
    """
    out = _attend_by_kernel(q, tokens, rules, learn=learn) if states == 0 else None
    if out is not None:
        return out
    merit = merits(tokens, rules)
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    rest = -q.shape[3] % size
    q_all, newest = pad(q, (0, 0, 0, rest)), torch.cat([newest, newest[:, -1:].expand(-1, rest)], 1)
    (b, g, r, n, d), e = q_all.shape, tokens.v.shape[-1]
    width = read_at_most(rules, learn=learn) + rules.sinks + rules.window + rules.block
    of_chunk = b * g * (width * (3 * r * size + 2 * (d + e)) + 2 * merit.shape[-1])
    at_once = size * max(1, chunk_budget(ELEMENTS.get(q.device.type, MANY_ELEMENTS)) // max(1, of_chunk))
    read = partial(compiled_part(_segment, q), learn=learn, size=size, states=states)
    parts = []
    for lo in range(0, n, at_once):
        part = q_all[..., lo : lo + at_once, :], newest[:, lo : lo + at_once], tokens, merit, rules
        # Scores are made again for the backward pass, so that memory stays linear with a small factor.
        if torch.is_grad_enabled() and n > at_once:
            out = checkpoint(read, *part, lo // size, use_reentrant=False, preserve_rng_state=False)
        else:
            out = read(*part, lo // size)
        parts.append(out)
    return torch.cat(parts, 3)[..., : q.shape[3], :]


def _attend_by_kernel(q: Tensor, tokens: Tokens, rules: Selection, *, learn: bool) -> Float[Tensor, "b g r q e"] | None:
    """The outputs where places are numbers of keys, by ``attnlab.kernels.select``; None if it does not serve them."""
    r = q.shape[2]
    if not kernel_serves(ungrouped(q), tokens.k, tokens.v, rules):
        return None
    from attnlab.kernels.select import select_attention

    out = select_attention(
        ungrouped(q), tokens.k, tokens.v, tokens.score, slots=rules.slots, window=rules.window,
        block=rules.block, sinks=rules.sinks, scale=rules.scale, clamp=LARGEST,
        spare=read_at_most(rules, learn=learn) - rules.slots,
    )  # fmt: skip
    return grouped(out, r)


def kernel_serves(
    q: Float[Tensor, "b h q d"], k: Float[Tensor, "b g a d"], v: Float[Tensor, "b g a e"], rules: Selection
) -> bool:
    """Whether ``attnlab.kernels.select`` attends for these tensors."""
    if not kernels_take(q) or not q.dtype == k.dtype == v.dtype:
        return False
    from attnlab.kernels.select import supports

    heads = q.shape[1] // max(1, k.shape[1])
    return supports(q.shape[3], v.shape[3], q.dtype, slots=rules.slots, sinks=rules.sinks, heads=heads)


def read_at_most(rules: Selection, *, learn: bool) -> int:
    """The keys before the window that a query reads; to learn, a quarter more than are selected."""
    return rules.slots + (-(-rules.slots // 4) if learn else 0)


class Gathered(NamedTuple):
    """What a chunk of queries may read: the best of the old keys, then sinks, then those near; their places, merits."""

    k: Float[Tensor, "b g c w d"]
    v: Float[Tensor, "b g c w e"]
    where: Int[Tensor, "#b #g c w"]
    worth: Int[Tensor, "b g c w"]


def _segment(
    q: Tensor, newest: Tensor, tokens: Tokens, merit: Tensor, rules: Selection, chunk: int, *, learn: bool, size: int,
    states: int,
) -> Float[Tensor, "b g r q e"]:  # fmt: skip
    """The outputs of some chunks, of which the first has the number ``chunk``."""
    place = tokens.place
    p = newest.unflatten(1, (-1, size))
    bound = first_exact(p, rules)
    begin = bound[:, None, :, 0].expand(-1, place.shape[1], -1)  # (b, g, c)
    # Keys before the window, best first.
    before = merit.unsqueeze(2).masked_fill((place.unsqueeze(2) >= begin.unsqueeze(3)), -1)
    best, old = before.topk(min(read_at_most(rules, learn=learn), place.shape[-1]), dim=-1)
    if states == 0:
        gathered = _of_blocks(tokens, old, best, rules, chunk)
    else:
        gathered = _by_places(tokens, merit, old, best, begin, rules, states)
    # What each query sees, (b, g, c, t, w).
    p, s = p[:, None, ..., None], bound[:, None, ..., None]
    shown, counted = _seen(gathered.where, gathered.worth, p, s, old.shape[-1], rules, states)
    rows = q.unflatten(3, (-1, size)).transpose(2, 3)  # (b, g, c, r, t, d)
    k, v = (t.to(q.dtype) for t in (gathered.k, gathered.v))
    scores = (rules.scale * rows.flatten(3, 4) @ k.mT).unflatten(3, rows.shape[3:5])
    if learn:
        score = tokens.score.gather(2, old.flatten(2)).view_as(old)
        P = _learning_weights(scores, shown, counted, score, best, rules)
    else:
        P = scores.masked_fill(~shown.unsqueeze(3), FLOOR).softmax(-1).masked_fill(~shown.unsqueeze(3), 0)
    out = (P.flatten(3, 4) @ v).unflatten(3, rows.shape[3:5])
    return out.transpose(2, 3).flatten(3, 4)


def _of_blocks(tokens: Tokens, old: Tensor, best: Tensor, rules: Selection, chunk: int) -> Gathered:
    """Where places are numbers of keys: blocks beside each other are the window, and only old keys are gathered."""
    chunks, near_blocks = old.shape[2], rules.window // rules.block
    after = -tokens.k.shape[2] % rules.block
    first = torch.arange(rules.sinks, device=old.device)
    at = torch.arange(rules.window, device=old.device) - (rules.window - rules.block)
    near_where = (torch.arange(chunk, chunk + chunks, device=old.device) * rules.block)[:, None] + at
    # The first window begins before the first key.
    near_where = near_where.masked_fill((near_where < 0) | (near_where >= tokens.k.shape[2]), NOWHERE)
    exact = torch.cat([first.expand(chunks, -1), near_where], 1).to(tokens.place.dtype)
    read = []
    gathered = _Rows.apply(torch.cat([tokens.k, tokens.v], -1), old.flatten(2)).unflatten(2, old.shape[2:])
    for t, far in zip((tokens.k, tokens.v), gathered.split([tokens.k.shape[-1], tokens.v.shape[-1]], -1), strict=True):
        blocks = pad(t, (0, 0, rules.window - rules.block, after)).unflatten(2, (-1, rules.block))
        near = [blocks[:, :, chunk + i : chunk + i + chunks] for i in range(near_blocks)]
        sinks = pad(t, (0, 0, 0, max(0, rules.sinks - t.shape[2])))[:, :, : rules.sinks]
        read.append(torch.cat([far, sinks.unsqueeze(2).expand(-1, -1, chunks, -1, -1), *near], 3))
    where = tokens.place.gather(2, old.flatten(2)).view_as(old)
    where = torch.cat([where, exact.expand(*where.shape[:2], -1, -1)], 3)
    return Gathered(read[0], read[1], where, pad(best, (0, exact.shape[1]), value=-1))


def _by_places(
    tokens: Tokens, merit: Tensor, old: Tensor, best: Tensor, begin: Tensor, rules: Selection, states: int
) -> Gathered:
    """Where keys are found by their places: padded rows, and those that follow a memory."""
    place = tokens.place
    at = torch.arange(max(rules.window, rules.block) + (states - 1) * rules.block, device=old.device)
    near = torch.searchsorted(place, begin.to(place.dtype).contiguous()).unsqueeze(3) + at
    beyond, near = near >= place.shape[-1], near.clamp(max=place.shape[-1] - 1)
    first = torch.arange(rules.sinks, dtype=place.dtype, device=old.device).expand(*place.shape[:2], -1)
    sink = torch.searchsorted(place, first.contiguous()).clamp(max=place.shape[-1] - 1)
    sink = sink.unsqueeze(2).expand(-1, -1, begin.shape[2], -1)
    index = torch.cat([old, sink, near], 3)  # (b, g, c, w)
    where = place.gather(2, index.flatten(2)).view_as(index)
    where = where.masked_fill(pad(beyond, (index.shape[3] - beyond.shape[3], 0)), NOWHERE)
    near_worth = merit.gather(2, near.flatten(2)).view_as(near).masked_fill(beyond, -1)
    worth = torch.cat([best, pad(near_worth, (rules.sinks, 0), value=-1)], 3)
    k, v = (_Rows.apply(t, index.flatten(2)).unflatten(2, index.shape[2:]) for t in (tokens.k, tokens.v))
    return Gathered(k, v, where, worth)


class _Rows(torch.autograd.Function):
    """Rows by their numbers. The gradient of a row that many read is summed in at least float32."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.dtype = t.shape[2], t.dtype
        return _taken(t, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,), (grad,) = ctx.saved_tensors, grads
        b, g, _, width = grad.shape
        kind = torch.promote_types(ctx.dtype, torch.float32)
        start = torch.arange(b * g, device=index.device).view(b, g, 1) * ctx.rows
        total = torch.zeros(b * g * ctx.rows, width, dtype=kind, device=grad.device)
        total.index_add_(0, (index + start).flatten(), grad.flatten(0, 2).to(kind))
        return total.view(b, g, ctx.rows, width).to(ctx.dtype), None


def _seen(
    where: Tensor, worth: Tensor, p: Tensor, s: Tensor, n_old: int, rules: Selection, states: int
) -> tuple[Bool[Tensor, "b g c t w"], Bool[Tensor, "b g c t n"]]:
    """Which gathered keys each query sees, and which of the old ones could be seen if more were selected."""
    least = _least(worth[..., :n_old], rules.slots).unsqueeze(3)
    if states > 1:
        # Queries of the second block choose among its older neighbours too.
        later = s[..., -1:, :].amax(3, keepdim=True)
        second = _least(worth.unsqueeze(3).masked_fill(where.unsqueeze(3) >= later, -1), rules.slots)
        least = torch.where(s > s[..., :1, :], second, least)
    where, worth = where.unsqueeze(3), worth.unsqueeze(3)
    chosen = worth >= least
    number = torch.arange(where.shape[-1], device=where.device)
    is_sink = (number >= n_old) & (number < n_old + rules.sinks)
    sinks = (where == number - n_old) & (where < s) & (where <= p)
    near = (where <= p) & (where >= 0) & ((where >= s) | chosen)
    old = chosen & (where < s)
    shown = torch.where(is_sink, sinks, torch.where(number < n_old, old, near))
    return shown, ((worth >= 0) & (where < s))[..., :n_old]


def _learning_weights(
    scores: Tensor, shown: Tensor, counted: Tensor, score: Tensor, best: Tensor, rules: Selection
) -> Float[Tensor, "b g c r t w"]:
    """softmax over what is shown; its derivative by a key's being shown goes to the key's score.

    Being shown is a step of the score, whose derivative is taken to be that of a sigmoid around the last key selected.
    """
    n = rules.slots
    if best.shape[-1] > n:
        middle = (score[..., n - 1 : n] + score[..., n : n + 1]).detach() / 2
        middle = middle.masked_fill(best[..., n : n + 1] < 0, -torch.inf)
        soft = (score - middle).sigmoid()
    else:
        soft = torch.ones_like(score)
    slope = (soft - soft.detach()).unsqueeze(3).masked_fill(~counted, 0)
    gate = shown.to(scores.dtype) + pad(slope, (0, shown.shape[-1] - slope.shape[-1]))
    largest = scores.detach().masked_fill(~shown.unsqueeze(3), FLOOR).amax(-1, keepdim=True)
    mass = (scores - largest).clamp(max=LARGEST).exp() * gate.unsqueeze(3)
    # NaN in a key that is not read, times zero, would be NaN.
    mass = mass.masked_fill(~(shown | pad(counted, (0, shown.shape[-1] - counted.shape[-1]))).unsqueeze(3), 0)
    total = mass.sum(-1, keepdim=True)
    return mass / total.masked_fill(total == 0, 1)


def _least(merit: Int[Tensor, "*b a"], slots: int) -> Int[Tensor, "*b 1"]:
    """The lowest merit among the ``slots`` highest, at least 0."""
    if merit.shape[-1] <= slots:
        return torch.zeros_like(merit[..., :1])
    return merit.topk(slots, dim=-1).values[..., -1:].clamp(min=0)


def _taken(t: Float[Tensor, "b g a w"], index: Int[Tensor, "b g n"]) -> Float[Tensor, "b g n w"]:
    return t.gather(2, index.unsqueeze(-1).expand(*index.shape, t.shape[-1]))
