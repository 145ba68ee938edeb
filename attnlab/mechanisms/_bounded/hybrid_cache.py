"""What ``abc-hybrid`` does with a call and keeps of it: sinks, a ring of the last keys, and slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, grouped, hide_unseen, ungrouped
from attnlab.chunks import chunk_length
from attnlab.mechanisms._bounded.continued import (
    check_batch,
    check_memory,
    check_new_tokens,
    first_exact,
    fitted_window,
    numbered_keys,
    visible_first,
)
from attnlab.mechanisms._bounded.hybrid_kernels import attend_by_kernel, step_by_kernel
from attnlab.mechanisms._bounded.hybrid_memory import (
    CHUNK,
    Keys,
    Queries,
    Rules,
    Slots,
    attend,
    empty_slots,
    write,
)
from attnlab.mechanisms._device import no_autocast
from attnlab.shapes import Float, Int

__all__ = ["HybridCache", "HybridMechanism", "HybridState", "attend_call"]


class HybridMechanism(Mechanism):
    """A mechanism with sinks, a window and slots."""

    slots: int
    window: int
    sinks: int
    block: int
    mass: bool

    @property
    def by_key(self) -> bool:
        """Whether the keys alone make the control."""
        raise NotImplementedError

    def log_alpha(self, call: AttentionCall) -> Float[Tensor, "b g k n"]:
        """What the call's keys write, in at least float32."""
        raise NotImplementedError

    def control_of_keys(self, call: AttentionCall) -> tuple[Tensor, Tensor] | None:
        """W_k and b where keys alone make the control and there are slots."""
        raise NotImplementedError

    def rules(self, call: AttentionCall, longest: int) -> Rules:
        """How the call is read; a window longer than ``longest`` places holds no more."""
        window, block = fitted_window(self.window, self.block, longest)
        return Rules(window, block, self.sinks, self.mass, call.softmax_scale)


class Recent(NamedTuple):
    """Keys and values with what they will write; without it where keys alone make the control."""

    k: Float[Tensor, "b g w d"]
    v: Float[Tensor, "b g w e"]
    log: Float[Tensor, "b g w n"] | None

    def each(self, change: Callable[[Tensor], Tensor]) -> Recent:
        """The same change made to every tensor."""
        k, v, log = self
        return Recent(change(k), change(v), None if log is None else change(log))

    def rows(self, index: Int[Tensor, "b n"]) -> Recent:
        """The tokens that ``index`` names, in its order."""
        return self.each(lambda t: _rows(t, index))


@dataclass(frozen=True, eq=False)
class HybridState:
    """What is kept after some tokens: the sinks, the last keys (place i at i modulo the window), slots, and how many.

    ``count`` is the same for all heads of a row: a kernel's programs, one a head, need not wait for each other.
    """

    sink_k: Float[Tensor, "b g s d"]
    sink_v: Float[Tensor, "b g s e"]
    ring: Recent
    slots: Slots
    count: Int[Tensor, "b g"]

    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        kept = (self.sink_k, self.sink_v, *self.ring, *self.slots, self.count)
        return [t for t in kept if t is not None]


class HybridCache:
    """The ``LayerCache`` of ``AbcHybrid``: sinks, window and slots, which no length changes."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.state: HybridState | None = None

    def attend(
        self, mechanism: Mechanism, call: AttentionCall, *, key_visible: Tensor | None
    ) -> tuple[AttentionCall, Tensor]:
        """Take in the call's keys, all new, and attend; the past needs no ``key_visible``."""
        assert isinstance(mechanism, HybridMechanism), "this past is that of a mechanism with sinks, window and slots"
        check_batch(call, self.batch)
        mechanism.refuse(call)
        check_new_tokens(call)
        if self.state is None:
            check_memory(mechanism, call, self.batch)
        # The state is this cache's own.
        out = None if self.state is None else step_by_kernel(mechanism, call, self.state)
        if out is None:
            out, self.state = attend_call(mechanism, call, self.state, keep=True)
        return call, out

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Copy rows."""
        self.batch, s = rows.shape[0], self.state
        if s is not None:
            ring, slots = s.ring.each(lambda t: t[rows]), Slots(*(t[rows] for t in s.slots))
            self.state = HybridState(s.sink_k[rows], s.sink_v[rows], ring, slots, s.count[rows])

    def nbytes(self) -> int:
        """The bytes that are kept."""
        return 0 if self.state is None else sum(t.nbytes for t in self.state.tensors())


def attend_call(
    mech: HybridMechanism, call: AttentionCall, state: HybridState | None, *, keep: bool
) -> tuple[Float[Tensor, "b h q e"], HybridState | None]:
    """The output for keys that follow those of ``state``, and, if it is to ``keep`` it, what is kept after them."""
    if state is None and call.k.shape[2] == 0:
        return call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1]), None
    fused = attend_by_kernel(mech, call) if state is None else None
    if fused is not None and not keep:
        return fused, None
    # Autocast would round the memory to half precision at every step.
    with no_autocast(call.q):
        call = hide_unseen(call)
        tokens, new = _in_order(mech, call)
        before = torch.zeros_like(new) if state is None else state.count[:, 0]
        first, after = before, before + new
        if state is not None:
            tokens, first = _after_ring(mech, tokens, state.ring, before), before - mech.window
        # Where nothing is kept, sinks that are not there need no room.
        sinks = _sinks(mech.sinks if keep else min(mech.sinks, tokens.k.shape[2]), tokens, first, state)
        keys = _keys(mech, tokens, first, *sinks)
        slots = empty_slots(keys) if state is None else state.slots
        if fused is not None:
            rules, end = mech.rules(call, call.k.shape[2]), after - 1
            out, slots = fused, write(keys, slots, before, first_exact(end, rules), rules, most=call.k.shape[2])
        else:
            out, slots = _attended(mech, call, keys, slots, before, after)
        if not keep:
            return out, None
        # Not a view of the slots after every block.
        slots = Slots(*(t.clone() for t in slots))
        # The newest place that each of the ring's positions has.
        position = torch.arange(mech.window, device=first.device)
        newest = after[:, None] - 1 - (after[:, None] - 1 - position) % max(1, mech.window)
        ring = tokens.rows(newest - first[:, None])
        count = after[:, None].expand(-1, call.k.shape[1]).contiguous()
    return out, HybridState(*sinks, ring, slots, count)


def _attended(
    mech: HybridMechanism, call: AttentionCall, keys: Keys, slots: Slots, before: Tensor, after: Tensor
) -> tuple[Float[Tensor, "b h q e"], Slots]:
    """The output of a call between these numbers of tokens, and the slots that its last query finds."""
    n_q, longest = call.q.shape[2], keys.k.shape[2]
    # Whether no key comes from a cache.
    alone = longest == call.k.shape[2]
    rules = mech.rules(call, longest if alone else mech.window)
    newest = numbered_keys(call)[1] + before[:, None] if call.causal else (after - 1)[:, None].expand(-1, n_q)
    if not call.causal:
        stop, most, chunk, states = after - 1, longest, min(chunk_length(CHUNK), n_q), 1
    else:
        stop, most, chunk, states = newest[:, 0], call.offset + rules.block - rules.window, min(rules.block, n_q), 2
        if not alone:
            # The first query may have begun a block.
            most = rules.block
        if n_q == 1 or (alone and call.key_visible is None and call.offset % rules.block == 0):
            states = 1
    slots = write(keys, slots, first_exact(before - 1, rules), first_exact(stop, rules), rules, most=most)
    if n_q == 0:
        return call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1]), slots
    q = grouped(call.q, call.groups).to(keys.k.dtype)
    out, slots = attend(Queries(q, newest, chunk, states), keys, slots, rules)
    return ungrouped(out).to(call.q.dtype), slots


def _in_order(mech: HybridMechanism, call: AttentionCall) -> tuple[Recent, Int[Tensor, " b"]]:
    """The call's tokens, visible ones first and in order, and how many are visible."""
    k, tokens = call.k, Recent(call.k, call.v, None if mech.by_key else mech.log_alpha(call))
    if call.key_visible is None:
        return tokens, torch.full((k.shape[0],), k.shape[2], device=k.device)
    return tokens.rows(visible_first(call.key_visible)), call.key_visible.sum(-1)


def _after_ring(mech: HybridMechanism, tokens: Recent, ring: Recent, count: Int[Tensor, " b"]) -> Recent:
    """The tokens after those of the ring, from the oldest on; in rows with fewer tokens than the ring holds, any."""
    places = count[:, None] - mech.window + torch.arange(mech.window, device=count.device)
    past = iter([t for t in ring.rows(places % max(1, mech.window)) if t is not None])
    return tokens.each(lambda t: torch.cat([next(past).to(t.dtype), t], 2))


def _keys(mech: HybridMechanism, tokens: Recent, first: Int[Tensor, " b"], sink_k: Tensor, sink_v: Tensor) -> Keys:
    """The tokens as the memory reads them, with their controls."""
    kind = torch.promote_types(tokens.k.dtype, torch.float32)
    log = tokens.log
    if log is None:
        log = mech.log_alpha(AttentionCall(tokens.k[:, :, :0], tokens.k, tokens.v))
    k, v, sink_k, sink_v = (t.to(kind) for t in (tokens.k, tokens.v, sink_k, sink_v))
    return Keys(k, v, log, sink_k, sink_v, first)


def _sinks(count: int, tokens: Recent, first: Int[Tensor, " b"], state: HybridState | None) -> tuple[Tensor, Tensor]:
    """The keys and values of the first ``count`` places, those of places still to come being any."""
    places = torch.arange(count, device=first.device)
    k, v = (_rows(t, places - first[:, None]) for t in (tokens.k, tokens.v))
    if state is None:
        return k, v
    known = (places < state.count[:, :1])[:, None, :, None]
    return torch.where(known, state.sink_k, k), torch.where(known, state.sink_v, v)


def _rows(t: Float[Tensor, "b g k w"], index: Int[Tensor, "b n"]) -> Float[Tensor, "b g n w"]:
    index = index.clamp(0, max(0, t.shape[2] - 1))
    return t.gather(2, index[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3]))
