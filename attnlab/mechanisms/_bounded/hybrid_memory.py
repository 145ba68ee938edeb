"""Sinks, a window and slots read by one softmax: chunks of queries, with the slots' memory at every chunk's start.

Places number the visible keys from 0. A query whose newest key has place p sees the keys of places p - w + 1 to p and
the sinks as they are. The other places up to p - w are in the slots. So the keys that a chunk of queries finds in its
slots, beyond those that were there at its start, are the first keys of its own span of w + chunk keys, and

    s_t = (sum_j <q_t, k_j> alpha_j + K q_t) / cum_t,   cum_t = L + sum_j alpha_j,   over the j written since the start,

with (K, L) the sums at the start, in the scale of the chunk. Nothing of size (query, key, slot) is made. Controls are
bounded (``LEAST_SHARE`` in ``abc_hybrid``), so that within a chunk no sum leaves the range of float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attnlab.attention import chunk_budget, chunk_length
from attnlab.mechanisms._bounded.slot_memory import FLOOR
from attnlab.shapes import Float, Int

__all__ = ["CHUNK", "Keys", "Rules", "Slots", "attend", "empty_slots"]

CHUNK = 64
# Numbers of scores and slots that are held at once: on a CPU some times what its cache holds.
ELEMENTS = {"cpu": 1 << 22}
MANY_ELEMENTS = 1 << 27


class Rules(NamedTuple):
    """How a call is read: ``mass`` if a slot's mass counts, ``delta`` if writes are those of the delta rule."""

    window: int
    sinks: int
    mass: bool
    delta: bool
    scale: float


class Slots(NamedTuple):
    """The slots after some writes.

    ``z`` is log sum alpha, ``FLOOR`` while nothing is written; of the delta rule the sum of log(1 - alpha), 0 while
    nothing is written. In float64, because it adds up over the tokens.
    """

    k: Float[Tensor, "b g n d"]
    v: Float[Tensor, "b g n e"]
    z: Float[Tensor, "b g n"]


class Keys(NamedTuple):
    """Keys in order of place, from the place ``first`` of each row on; controls of keys that nothing writes count not.

    ``sink_k`` and ``sink_v`` are those of the first places.
    """

    k: Float[Tensor, "b g a d"]
    v: Float[Tensor, "b g a e"]
    log: Float[Tensor, "b g a n"]
    fade: Float[Tensor, "b g a n"] | None
    sink_k: Float[Tensor, "b g s d"]
    sink_v: Float[Tensor, "b g s e"]
    first: Int[Tensor, " b"]


class _Folded(NamedTuple):
    """The slots before every chunk (b, g, c, n, ...) and after the last, and what was written into them.

    That is keys and values, or of the delta rule how they differ from what the slots would have answered.
    """

    starts: Slots
    last: Slots
    k: Float[Tensor, "b g c s d"]
    v: Float[Tensor, "b g c s e"]


class _Chunks(NamedTuple):
    """What queries of chunks (b, g, c, ...) read of the slots, apart from the queries."""

    # What was written since the chunk's start, into which slots, and which of it each query finds there.
    k: Tensor
    v: Tensor
    alpha: Tensor
    done: Tensor
    # The memory at the chunk's start, in the scale of alpha.
    start_k: Tensor
    start_v: Tensor
    # For each query and slot: what sums are divided by, what is added to the score, and whether the slot is empty.
    cum: Tensor | None
    bonus: Tensor | None
    empty: Tensor


def empty_slots(keys: Keys, slots: int, *, delta: bool) -> Slots:
    """Slots that nothing was written into."""
    b, g, _, d = keys.k.shape
    start = torch.zeros(b, g, slots, d + keys.v.shape[-1], dtype=keys.k.dtype, device=keys.k.device)
    z = torch.full((b, g, slots), 0.0 if delta else FLOOR, dtype=torch.float64, device=keys.k.device)
    return Slots(start[..., :d], start[..., d:], z)


def attend(
    q: Float[Tensor, "b g r q d"], newest: Int[Tensor, "b q"], keys: Keys, slots: Slots, rules: Rules, *, lead: int
) -> tuple[Float[Tensor, "b g r q e"], Slots]:
    """The outputs of queries whose newest keys have the places ``newest``, and the slots as the last query finds them.

    Queries come in order of place. At most the first ``lead`` keys may have to be written before the first query.
    """
    rules = rules._replace(window=min(rules.window, keys.k.shape[2]))
    begin = newest[:, :1] - rules.window + 1
    if lead > 0:
        slots = _written_before(keys, begin, slots, rules, lead)
    size = min(chunk_length(CHUNK), q.shape[3])
    rest = -q.shape[3] % size
    q_all, newest_all = pad(q, (0, 0, 0, rest)), torch.cat([newest, newest[:, -1:].expand(-1, rest)], 1)
    parts = []
    at_once = size * _chunks_at_once(q, size, keys, rules)
    for lo in range(0, q_all.shape[3], at_once):
        hi = min(lo + at_once, q_all.shape[3])
        after = newest_all[:, hi : hi + 1] if hi < newest_all.shape[1] else newest_all[:, -1:]
        arguments = (q_all[..., lo:hi, :], newest_all[:, lo:hi], after, keys, slots, rules, size)
        # Scores are made again for the backward pass, so that memory stays linear with a small factor.
        if torch.is_grad_enabled() and q_all.shape[3] > at_once:
            out, slots = checkpoint(_segment, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            out, slots = _segment(*arguments)
        parts.append(out)
    return torch.cat(parts, 3)[..., : q.shape[3], :], slots


def _chunks_at_once(q: Tensor, size: int, keys: Keys, rules: Rules) -> int:
    n = keys.log.shape[-1]
    of_chunk = q.shape[:3].numel() * size * (2 * (rules.window + size) + rules.sinks + 6 * n)
    return max(1, chunk_budget(ELEMENTS.get(q.device.type, MANY_ELEMENTS)) // max(1, of_chunk))


def _written_before(keys: Keys, begin: Int[Tensor, "b 1"], slots: Slots, rules: Rules, lead: int) -> Slots:
    """The slots with those of the first ``lead`` keys written whose places are before ``begin``."""
    lead = min(lead, keys.k.shape[2])
    places = keys.first[:, None] + torch.arange(lead, device=begin.device)
    ready = (places >= rules.sinks) & (places < begin)
    size = min(chunk_length(CHUNK), lead)
    rest = -lead % size

    def blocks(t: Tensor) -> Tensor:
        return pad(t[:, :, :lead], (0, 0, 0, rest)).unflatten(2, (-1, size))

    ready = pad(ready, (0, rest)).unflatten(1, (-1, size))[:, None, :, :, None]
    fade = None if keys.fade is None else blocks(keys.fade)
    return _fold(blocks(keys.k), blocks(keys.v), blocks(keys.log), fade, ready, slots, rules).last


def _segment(
    q: Tensor, newest: Tensor, after: Tensor, keys: Keys, slots: Slots, rules: Rules, size: int
) -> tuple[Tensor, Slots]:
    """The outputs of some chunks of ``size`` queries, and the slots as the query at ``after`` finds them."""
    n_a, width = keys.k.shape[2], rules.window + size
    newest = newest.unflatten(1, (-1, size))
    # The place where each chunk's span begins: everything before it is in the slots at the chunk's start.
    begin = newest[:, :, 0] - rules.window + 1
    following = torch.cat([begin[:, 1:], after - rules.window + 1], 1)
    places = begin[..., None] + torch.arange(width, device=q.device)
    index = (places - keys.first[:, None, None]).clamp(0, n_a - 1)
    k, v = _taken(keys.k, index), _taken(keys.v, index)
    log = _taken(keys.log, index[..., :size])
    fade = None if keys.fade is None else _taken(keys.fade, index[..., :size])
    first = places[..., :size]
    ready = ((first >= rules.sinks) & (first < following[..., None]))[:, None, ..., None]
    # How many keys of its span each query finds in the slots; sinks among them weigh nothing.
    gone = (newest - rules.window - begin[..., None] + 1)[:, None]
    chunks, last = _chunked(k[..., :size, :], v[..., :size, :], log, fade, ready, gone, slots, rules)
    near = (places[..., None, :] <= newest[..., None]) & (places[..., None, :] > newest[..., None] - rules.window)
    near = (near & (places >= 0)[..., None, :])[:, None, :, None]
    sink = torch.arange(keys.sink_k.shape[2], device=q.device) <= newest[..., None] - rules.window
    out = _read(q.unflatten(3, (-1, size)).transpose(2, 3), k, v, near, keys, sink[:, None, :, None], chunks, rules)
    return out.transpose(2, 3).flatten(3, 4), last


def _taken(t: Float[Tensor, "b g a w"], index: Int[Tensor, "b c s"]) -> Float[Tensor, "b g c s w"]:
    """The rows of each batch element that ``index`` names."""
    flat = index.flatten(1)[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3])
    return t.gather(2, flat).unflatten(2, index.shape[1:])


def _chunked(
    k: Tensor, v: Tensor, log: Tensor, fade: Tensor | None, ready: Tensor, gone: Tensor, slots: Slots, rules: Rules
) -> tuple[_Chunks, Slots]:
    """What queries of each chunk read of the slots, and the slots after the last chunk."""
    starts, last, u_k, u_v = _fold(k, v, log, fade, ready, slots, rules)
    size = log.shape[3]
    done = (torch.arange(size, device=log.device) < gone[..., None])[:, :, :, None]
    log = log.masked_fill(~ready, FLOOR)
    if rules.delta:
        alpha = log.exp()
        y = starts.z.unsqueeze(3) + _at(_log_kept(alpha), gone)
        # The share of a slot that was ever written over.
        full = -torch.expm1(y)
        empty = full <= 0
        bonus = full.masked_fill(empty, 1).log().to(k.dtype) if rules.mass else None
        return _Chunks(u_k, u_v, alpha, done, starts.k, starts.v, None, bonus, empty), last
    faded = None if fade is None else fade.masked_fill(~ready, 0)
    relative = log if faded is None else log - faded.cumsum(3)
    top = torch.maximum(starts.z, relative.amax(3).double()).detach()
    top = top.masked_fill(top <= FLOOR / 2, 0)
    alpha = (relative - top.unsqueeze(3)).exp().to(k.dtype)
    before = (starts.z - top).exp().to(k.dtype)
    cum = before.unsqueeze(3) + _at(alpha, gone)
    empty = cum <= 0
    cum = cum.masked_fill(empty, 1)
    bonus = None
    if rules.mass:
        bonus = cum.log() + top.unsqueeze(3).to(k.dtype)
        bonus = bonus if faded is None else bonus + _at(faded, gone)
    before = before.unsqueeze(-1)
    return _Chunks(k, v, alpha, done, before * starts.k, before * starts.v, cum, bonus, empty), last


def _at(t: Float[Tensor, "b g c s n"], gone: Int[Tensor, "b 1 c t"]) -> Float[Tensor, "b g c t n"]:
    """The sums over the first ``gone`` keys of each chunk."""
    sums = pad(t.cumsum(3), (0, 0, 1, 0))
    index = gone.clamp(0, t.shape[3])[..., None].expand(-1, t.shape[1], -1, -1, t.shape[4])
    return sums.gather(3, index)


def _log_kept(alpha: Tensor) -> Tensor:
    """log(1 - alpha), bounded."""
    return torch.log1p(-alpha.double().clamp(max=1 - 1e-12))


def _fold(k: Tensor, v: Tensor, log: Tensor, fade: Tensor | None, ready: Tensor, slots: Slots, rules: Rules) -> _Folded:
    """Write the ``ready`` keys of chunks (b, g, c, s, ...) one chunk after another."""
    k, v = (t.masked_fill(~ready, 0) for t in (k, v))
    log = log.masked_fill(~ready, FLOOR)
    if rules.delta:
        return _fold_differences(k, v, log.exp(), slots)
    faded = None if fade is None else fade.masked_fill(~ready, 0)
    relative = log if faded is None else log - faded.cumsum(3)
    z_new = relative.logsumexp(3).double()
    share = relative.softmax(3).masked_fill(log <= FLOOR / 2, 0).mT
    k_new, v_new = share @ k, share @ v
    left = None if faded is None else faded.sum(3).double()
    starts = []
    for c in range(log.shape[2]):
        starts.append(slots)
        z = torch.logaddexp(slots.z, z_new[:, :, c])
        keep, add = ((t - z).exp().to(k.dtype).unsqueeze(-1) for t in (slots.z, z_new[:, :, c]))
        z = z if left is None else torch.where(z > FLOOR / 2, z + left[:, :, c], z)
        slots = Slots(keep * slots.k + add * k_new[:, :, c], keep * slots.v + add * v_new[:, :, c], z)
    return _Folded(_stacked(starts), slots, k, v)


def _fold_differences(k: Tensor, v: Tensor, alpha: Tensor, slots: Slots) -> _Folded:
    """u_i = kv_i - S_{i-1}^T alpha_i and S_i = S_{i-1} + alpha_i (x) u_i: a triangular system in each chunk."""
    size, d = k.shape[3], k.shape[-1]
    system = (alpha @ alpha.mT).tril(-1) + torch.eye(size, dtype=k.dtype, device=k.device)
    wanted = torch.cat([k, v, alpha], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    new, answers = solved.split([d + v.shape[-1], alpha.shape[-1]], -1)
    y_new = _log_kept(alpha).sum(3)
    state, y = torch.cat([slots.k, slots.v], -1), slots.z
    starts, written = [], []
    for c in range(k.shape[2]):
        starts.append(Slots(state[..., :d], state[..., d:], y))
        written.append(new[:, :, c] - answers[:, :, c] @ state)
        state, y = state + alpha[:, :, c].mT @ written[-1], y + y_new[:, :, c]
    u_k, u_v = torch.stack(written, 2).split([d, v.shape[-1]], -1)
    return _Folded(_stacked(starts), Slots(state[..., :d], state[..., d:], y), u_k, u_v)


def _stacked(slots: list[Slots]) -> Slots:
    return Slots(*(torch.stack(parts, 2) for parts in zip(*slots, strict=True)))


def _read(
    q: Float[Tensor, "b g c r t d"],
    k: Float[Tensor, "b g c s d"],
    v: Float[Tensor, "b g c s e"],
    near: Tensor,
    keys: Keys,
    sink: Tensor,
    chunks: _Chunks,
    rules: Rules,
) -> Float[Tensor, "b g c r t e"]:
    """One softmax over sinks, the window's keys and slots."""
    r, size = q.shape[3:5]
    rows = q.flatten(3, 4)

    def by_query(t: Tensor) -> Tensor:
        return t.unflatten(3, (r, size))

    products = by_query(rows @ k.mT)
    in_slots = products[..., : chunks.alpha.shape[3]] if not rules.delta else by_query(rows @ chunks.k.mT)
    in_slots = in_slots.masked_fill(~chunks.done, 0).flatten(3, 4)
    s = by_query(in_slots @ chunks.alpha + rows @ chunks.start_k.mT)
    cum = None if chunks.cum is None else chunks.cum.unsqueeze(3)
    s = rules.scale * (s if cum is None else s / cum)
    if chunks.bonus is not None:
        s = s + chunks.bonus.unsqueeze(3)
    of_sinks = by_query(rows @ keys.sink_k.unsqueeze(2).mT)
    hidden = [~sink.expand_as(of_sinks), ~near.expand_as(products), chunks.empty.unsqueeze(3).expand_as(s)]
    scores = torch.cat([rules.scale * of_sinks, rules.scale * products, s], -1)
    unseen = torch.cat(hidden, -1)
    P = scores.masked_fill(unseen, FLOOR).softmax(-1).masked_fill(unseen, 0)
    to_sinks, to_near, to_slots = P.split([t.shape[-1] for t in hidden], -1)
    to_slots = (to_slots if cum is None else to_slots / cum).flatten(3, 4)
    through = by_query(to_slots @ chunks.alpha.mT).masked_fill(~chunks.done, 0).flatten(3, 4)
    out = to_near.flatten(3, 4) @ v + to_sinks.flatten(3, 4) @ keys.sink_v.unsqueeze(2)
    return by_query(out + through @ chunks.v + to_slots @ chunks.start_v)
