"""A memory of slots: what it holds, how tokens are written into it, and how queries read it, causally or not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attnlab.mechanisms._bounded.chunked import Memory, attend_chunks, segment_length
from attnlab.shapes import Float, Int

__all__ = ["FLOOR", "Control", "SlotState", "control_vectors", "read_causally", "read_slots", "written"]

# The logarithm of zero. Finite, because differences of infinities are NaN and so are their gradients.
FLOOR = -1e30
# Tokens whose (query, key, slot) products are held at once where the memory is advanced one token at a time.
CHUNK = 16


@dataclass(frozen=True, eq=False)
class Control:
    """What each token writes: log alpha, ``FLOOR`` where it writes nothing; ``value`` is alpha itself, if signed.

    A gate makes the past fade: ``faded`` is the logarithm of what is left, after the call, of what was there before it.
    Then log alpha is relative to the call's start, grows with the tokens, and comes in float64.
    """

    log: Float[Tensor, "#b #g k n"]
    value: Float[Tensor, "#b #g k n"] | None = None
    faded: Float[Tensor, "b g"] | None = None


@dataclass(frozen=True, eq=False)
class SlotState:
    """The memory after some tokens; its size does not depend on how many there were.

    ``z`` is log sum alpha for each slot, ``FLOOR`` while it is empty; in float64, because it enters through differences
    and its rounding would add up over the steps. ``count`` is the visible tokens so far.
    """

    k: Float[Tensor, "b g n d"]
    v: Float[Tensor, "b g n e"]
    z: Float[Tensor, "b g n"]
    count: Int[Tensor, " b"]


def control_vectors(log: Tensor, value: Tensor | None, now: Tensor, own: Tensor, when: str) -> Tensor:
    """Control vectors as they stand when read: ``now`` is z at that time, ``own`` z when the token was written."""
    if when == "none":
        phi = log.exp() if value is None else value.to(log.dtype).expand_as(log)
    else:
        phi = (log - (now if when == "read" else own)).exp()
    return phi.masked_fill(log <= FLOOR / 2, 0)


def read_slots(s: Tensor, z: Tensor) -> Tensor:
    """P: softmax over the slots written; zeros where none is."""
    empty = z <= FLOOR / 2
    return s.masked_fill(empty, FLOOR).softmax(-1).masked_fill(empty, 0)


def written(k: Tensor, v: Tensor, c: Control, state: SlotState, when: str) -> SlotState:
    """The memory after these keys."""
    if c.log.shape[2] == 0:
        return state
    new = c.log.logsumexp(2).double()
    z = torch.logaddexp(state.z, new)
    if when == "read":
        # Shares of the new tokens among themselves, then of all of them beside the past: both sum to 1.
        share = (new - z).exp().to(k.dtype).masked_fill(new <= FLOOR / 2, 0)
        phi = c.log.softmax(2).to(k.dtype) * share.unsqueeze(2)
        keep: Tensor | int = (state.z - z).exp().to(k.dtype).unsqueeze(-1)
    else:
        own = torch.cat([state.z.unsqueeze(2), c.log], 2).logcumsumexp(2)[:, :, 1:] if when == "write" else c.log
        phi, keep = control_vectors(c.log, c.value, z.unsqueeze(2), own, when).to(k.dtype), 1
    return replace(state, k=keep * state.k + phi.mT @ k, v=keep * state.v + phi.mT @ v, z=z)


def read_causally(
    q: Tensor, k: Tensor, v: Tensor, c: Control, state: SlotState, when: str, scale: float, offset: int
) -> tuple[Tensor, SlotState]:
    """Query t reads ``state`` and the keys up to t + offset: the outputs, and the memory after the last query's key."""
    # Keys before `lead` are seen by every query that sees anything; after them queries and keys advance together.
    n_q, n_k = q.shape[3], k.shape[2]
    lead, blind = max(0, min(offset, n_k)), max(0, min(-offset, n_q))
    tensors = [k, v, c.log] + ([] if c.value is None else [c.value.to(c.log.dtype).expand_as(c.log)])
    if lead:
        first = [t[:, :, :lead] for t in tensors]
        state = written(first[0], first[1], Control(*first[2:]), state, when)
    parts = [q.new_zeros(*q.shape[:3], blind, v.shape[-1])]
    fast = _chunks_pay(q, n_q - blind, when)
    for rows, keys in _together(
        q[..., blind:, :], [t[:, :, lead:] for t in tensors], segment_length(q) if fast else n_q
    ):
        done = _all_chunks(rows, keys[0], keys[1], Control(*keys[2:]), state, when, scale) if fast else None
        out, state = _one_by_one(rows, keys, state, when, scale) if done is None else done
        parts.append(out)
    return torch.cat(parts, 3), state


def _together(q: Tensor, keys: list[Tensor], size: int) -> list[tuple[Tensor, list[Tensor]]]:
    """Queries and the keys beside them, ``size`` at a time; the last queries may have no keys."""
    if q.shape[3] == 0:
        return []
    # Split once: a slice for each part would make a gradient as long as the sequence for each.
    split = [t.split(size, 2) for t in keys]
    parts = []
    for i, rows in enumerate(q.split(size, 3)):
        parts.append((rows, [t[i][:, :, : rows.shape[3]] if i < len(t) else t[0][:, :, :0] for t in split]))
    return parts


def _chunks_pay(q: Tensor, rows: int, when: str) -> bool:
    """Whether to work by chunks: not if tokens are divided when written, nor if the host cannot read numbers."""
    if when == "write" or rows <= CHUNK or q.is_meta:
        return False
    return not (q.is_cuda and torch.cuda.is_current_stream_capturing())


def _all_chunks(
    q: Tensor, k: Tensor, v: Tensor, c: Control, state: SlotState, when: str, scale: float
) -> tuple[Tensor, SlotState] | None:
    """All chunks in parallel; None where that would lose early tokens."""
    b, g, rows = q.shape[0], q.shape[1], q.shape[3]
    absent = (0, 0, 0, rows - k.shape[2])
    own = None if c.value is None or when != "none" else pad(c.value, absent).flatten(0, 1)
    log = pad(c.log, absent, value=FLOOR).flatten(0, 1)
    z = state.z.flatten(0, 1)
    # 1 as a number, with the gradient of exp(z).
    one = ((z - z.detach()).exp() if when == "read" else torch.ones_like(z)).to(k.dtype)
    start = Memory(
        one.unsqueeze(-1) * state.k.flatten(0, 1),
        one.unsqueeze(-1) * state.v.flatten(0, 1),
        one.masked_fill(z <= FLOOR / 2, 0),
        z.detach(),
    )
    q, k, v = q.flatten(0, 1), pad(k, absent).flatten(0, 1), pad(v, absent).flatten(0, 1)
    done = attend_chunks(q, k, v, log, own, start, normalise=when == "read", scale=scale, floor=FLOOR / 2)
    if done is None:
        return None
    out, memory = done
    K, V = memory.k, memory.v
    if when == "none":
        new_z = torch.logaddexp(z, log.logsumexp(1).double())
    else:
        total = memory.total.masked_fill(memory.total == 0, 1)
        new_z = (memory.reference + total.log()).masked_fill(memory.total == 0, FLOOR)
        K, V = K / total.unsqueeze(-1), V / total.unsqueeze(-1)
    shaped = [t.unflatten(0, (b, g)) for t in (K, V, new_z)]
    return out.unflatten(0, (b, g)), replace(state, k=shaped[0], v=shaped[1], z=shaped[2])


def _one_by_one(q: Tensor, keys: list[Tensor], state: SlotState, when: str, scale: float) -> tuple[Tensor, SlotState]:
    """The form that is exact for all logits: each query has its own normaliser."""
    parts = []
    for rows, some in _together(q, keys, CHUNK):
        arguments = (rows, some[0], some[1], Control(*some[2:]), state, when, scale)
        # A chunk's (q, k, n) products are made again for the backward pass, so that memory stays linear.
        if torch.is_grad_enabled() and q.shape[3] > CHUNK:
            out, state = checkpoint(_advance, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            out, state = _advance(*arguments)
        parts.append(out)
    return torch.cat(parts, 3), state


def _advance(
    q: Tensor, k: Tensor, v: Tensor, c: Control, state: SlotState, when: str, scale: float
) -> tuple[Tensor, SlotState]:
    """Queries and keys that come one by one: query t reads the state and the first t + 1 of these keys."""
    n_q, n_k = q.shape[3], k.shape[2]
    past = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device).tril()
    # Each query has its own normaliser: factoring exp(log_i - z_t) into parts of i and of t would overflow.
    log = c.log.unsqueeze(2).expand(-1, -1, n_q, -1, -1).masked_fill(~past[:, :, None], FLOOR)
    start = state.z[:, :, None]
    z = torch.cat([start.unsqueeze(3).expand(-1, -1, n_q, -1, -1), log], 3).logsumexp(3)
    value = None if c.value is None else c.value.unsqueeze(2)
    phi = control_vectors(log, value, z.unsqueeze(3), z[:, :, None, :n_k], when).to(k.dtype)
    keep = ((start - z).exp() if when == "read" else torch.ones_like(z)).to(k.dtype)
    # (b, g, r, q, n) throughout; a key that lies ahead may be of any size.
    products = (q @ k.unsqueeze(2).mT).masked_fill(~past, 0)
    s = keep.unsqueeze(2) * (q @ state.k.unsqueeze(2).mT) + torch.einsum("bgrtk,bgtkn->bgrtn", products, phi)
    P = read_slots(scale * s, z.unsqueeze(2))
    out = (P * keep.unsqueeze(2)) @ state.v.unsqueeze(2)
    out = out + torch.einsum("bgrtn,bgtkn->bgrtk", P, phi) @ v.unsqueeze(2)
    kept, last = keep[:, :, -1, :, None], phi[:, :, -1]
    return out, replace(state, k=kept * state.k + last.mT @ k, v=kept * state.v + last.mT @ v, z=z[:, :, -1])
