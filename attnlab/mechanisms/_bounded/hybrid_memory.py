"""Sinks, slots and a window read by one softmax: the slots at the start of every block of queries, then one read.

Places number the visible keys from 0. With a window of W keys and blocks of B, a query whose newest key has place p
sees the keys of places s(p) to p as they are, s(p) = max(0, floor(p / B) B - (W - B)), and the sinks; all other places
before s(p) are in the slots. So slots change once in B places, and a chunk of at most B queries meets them in at most
two states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attnlab.chunks import chunk_budget
from attnlab.mechanisms._bounded.continued import first_exact
from attnlab.mechanisms._bounded.slot_memory import FLOOR
from attnlab.shapes import Float, Int

__all__ = ["Keys", "Queries", "Rules", "Slots", "attend", "empty_slots", "write"]

# Queries that read alike, at once.
CHUNK = 64
# Numbers of scores and slots that are held at once: on a CPU some times what its cache holds.
ELEMENTS = {"cpu": 1 << 22}
MANY_ELEMENTS = 1 << 27


class Rules(NamedTuple):
    """How a call is read; ``mass`` if a slot's mass counts."""

    window: int
    block: int
    sinks: int
    mass: bool
    scale: float


class Slots(NamedTuple):
    """The slots after some writes: sums of alpha [k, v] and of alpha, zeros while nothing is written."""

    kv: Float[Tensor, "b g n w"]
    z: Float[Tensor, "b g n"]


class Keys(NamedTuple):
    """Keys and values in order of place, from the place ``first`` of each row on, and what they write.

    ``sink_k`` and ``sink_v`` are those of the first places.
    """

    k: Float[Tensor, "b g a d"]
    v: Float[Tensor, "b g a e"]
    log: Float[Tensor, "b g a n"]
    sink_k: Float[Tensor, "b g s d"]
    sink_v: Float[Tensor, "b g s e"]
    first: Int[Tensor, " b"]


class Queries(NamedTuple):
    """Queries in order of place and the places of their newest keys.

    ``chunk`` of them are read at once. ``states`` is 1 if each chunk finds one state of the slots, else 2.
    """

    q: Float[Tensor, "b g r q d"]
    newest: Int[Tensor, "b q"]
    chunk: int
    states: int


def empty_slots(keys: Keys) -> Slots:
    """Slots that nothing was written into."""
    b, g, _, n = keys.log.shape
    kv = keys.k.new_zeros(b, g, n, keys.k.shape[-1] + keys.v.shape[-1])
    return Slots(kv, kv.new_zeros(b, g, n))


def write(
    keys: Keys, slots: Slots, start: Int[Tensor, " b"], stop: Int[Tensor, " b"], rules: Rules, *, most: int
) -> Slots:
    """The slots with the keys of places ``start`` to ``stop`` written, which are at most ``most``."""
    if most <= 0 or not keys.log.shape[-1]:
        return slots
    # Sums are one product.
    places = start[:, None, None] + torch.arange(most, device=start.device)
    states = _states(keys, slots, places, stop[:, None, None], rules)
    return Slots(states.kv[:, :, -1], states.z[:, :, -1])


def attend(queries: Queries, keys: Keys, slots: Slots, rules: Rules) -> tuple[Float[Tensor, "b g r q e"], Slots]:
    """The outputs of queries of which the first finds ``slots``, and the slots as the last query finds them."""
    q, newest, size, _ = queries
    rest = -q.shape[3] % size
    # One more at the end: the slots after a segment are those that the next query finds.
    newest = torch.cat([newest, newest[:, -1:].expand(-1, rest + 1)], 1)
    q_all, parts = pad(q, (0, 0, 0, rest)), []
    at_once = size * _chunks_at_once(queries, keys, rules)
    for lo in range(0, q_all.shape[3], at_once):
        hi = min(lo + at_once, q_all.shape[3])
        part = queries._replace(q=q_all[..., lo:hi, :], newest=newest[:, lo : hi + 1])
        # Scores are made again for the backward pass, so that memory stays linear with a small factor.
        if torch.is_grad_enabled() and q_all.shape[3] > at_once:
            out, slots = checkpoint(_segment, part, keys, slots, rules, use_reentrant=False, preserve_rng_state=False)
        else:
            out, slots = _segment(part, keys, slots, rules)
        parts.append(out)
    return torch.cat(parts, 3)[..., : q.shape[3], :], slots


def _chunks_at_once(queries: Queries, keys: Keys, rules: Rules) -> int:
    (b, g, r, _, d), n, e = queries.q.shape, keys.log.shape[-1], keys.v.shape[-1]
    width = rules.window + rules.block + rules.sinks + queries.states * n
    of_chunk = b * g * width * (3 * r * queries.chunk + 2 * (d + e))
    return max(1, chunk_budget(ELEMENTS.get(queries.q.device.type, MANY_ELEMENTS)) // max(1, of_chunk))


def _segment(queries: Queries, keys: Keys, slots: Slots, rules: Rules) -> tuple[Tensor, Slots]:
    """The outputs of some chunks, and the slots that the query after them finds."""
    q, newest, size, count = queries
    after, newest = newest[:, -1:], newest[:, :-1].unflatten(1, (-1, size))
    bound = first_exact(newest, rules)
    begin = bound[:, :, 0]
    span = max(rules.window, rules.block) + (count - 1) * rules.block
    places = begin[..., None] + torch.arange(span, device=q.device)
    # The first block of a chunk's keys is the next to be written, before the chunk that follows or inside this one.
    following = torch.cat([begin[:, 1:], first_exact(after, rules)], 1)
    states = _states(keys, slots, places[..., : rules.block], following[..., None], rules)
    c = begin.shape[1]
    memory = [_contents(Slots(*(t[:, :, i : c + i] for t in states)), keys, rules) for i in range(count)]
    slot_k, slot_v, bonus, empty = (torch.cat(parts, 3) for parts in zip(*memory, strict=True))
    # What each query sees, (b, g, c, t, ...).
    p, s = newest[:, None, ..., None], bound[:, None, ..., None]
    moved = (s > begin[:, None, :, None, None]).long()
    of_state = torch.arange(count, device=q.device).repeat_interleave(keys.log.shape[-1])
    sink = torch.arange(keys.sink_k.shape[2], device=q.device) < s
    near = (places[:, None, :, None] <= p) & (places[:, None, :, None] >= s)
    shown = ((of_state == moved) & ~empty.unsqueeze(3), sink, near)
    seen = torch.cat([t.expand(*slot_k.shape[:3], size, t.shape[-1]) for t in shown], -1).unsqueeze(3)
    sinks = (t.unsqueeze(2).expand(-1, -1, c, -1, -1) for t in (keys.sink_k, keys.sink_v))
    window = (_taken(t, places - keys.first[:, None, None]) for t in (keys.k, keys.v))
    k, v = (torch.cat(parts, 3) for parts in zip((slot_k, slot_v), sinks, window, strict=True))
    rows = q.unflatten(3, (-1, size)).transpose(2, 3)
    scores = (rules.scale * rows.flatten(3, 4) @ k.mT).unflatten(3, rows.shape[3:5])
    scores = scores + pad(bonus, (0, k.shape[3] - bonus.shape[3]))[..., None, None, :]
    P = scores.masked_fill(~seen, FLOOR).softmax(-1).masked_fill(~seen, 0)
    out = (P.flatten(3, 4) @ v).unflatten(3, rows.shape[3:5])
    return out.transpose(2, 3).flatten(3, 4), Slots(*(t[:, :, -1] for t in states))


def _taken(t: Float[Tensor, "b g a w"], index: Int[Tensor, "b c s"]) -> Float[Tensor, "b g c s w"]:
    """The rows of each batch element that ``index`` names, or any where there are none."""
    index = index.clamp(0, max(0, t.shape[2] - 1))
    flat = index.flatten(1)[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3])
    return t.gather(2, flat).unflatten(2, index.shape[1:])


def _contents(slots: Slots, keys: Keys, rules: Rules) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K~, V~, what is added to the scores of slots (b, g, c, n), and which are empty."""
    empty = slots.z <= 0
    m = slots.z.masked_fill(empty, 1)
    kv = slots.kv / m.unsqueeze(-1)
    d = keys.k.shape[-1]
    return kv[..., :d], kv[..., d:], m.log() if rules.mass else torch.zeros_like(m), empty


def _states(
    keys: Keys, slots: Slots, places: Int[Tensor, "b c s"], stop: Int[Tensor, "#b #c 1"], rules: Rules
) -> Slots:
    """The slots before each block of places and after the last, (b, g, c + 1, ...); places from ``stop`` on wait."""
    index = places - keys.first[:, None, None]
    ready = ((places >= rules.sinks) & (places < stop))[:, None, ..., None]
    kv = torch.cat([_taken(keys.k, index), _taken(keys.v, index)], -1).masked_fill(~ready, 0)
    alpha = _taken(keys.log, index).masked_fill(~ready, FLOOR).exp()
    new = alpha.mT @ kv, alpha.sum(3)
    return Slots(*(torch.cat([t.unsqueeze(2), each], 2).cumsum(2) for t, each in zip(slots, new, strict=True)))
