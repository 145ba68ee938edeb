"""Attention with bounded-memory control: control vectors write keys and values into n slots, queries read the slots.

K~ = sum_i phi_i (x) k_i, V~ = sum_i phi_i (x) v_i, out = V~^T softmax(K~ q) (ABC, Eqs. 3-5), so W = P Phi^T with
P = softmax(q K~^T) over the slots that something was written into. A member says only what phi is (``control``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, grouped, hide_unseen, ungrouped
from attnlab.mechanisms._bounded.continued import check_batch, check_new_tokens
from attnlab.mechanisms._bounded.pooled import (
    Pooling,
    alpha_by_place,
    attend_pooled,
    held,
    pooling,
    pooling_by_place,
    pooling_of_visible,
)
from attnlab.mechanisms._bounded.slot_kernels import attend_by_kernel, kernel_serves
from attnlab.mechanisms._bounded.slot_memory import (
    FLOOR,
    Control,
    SlotState,
    control_vectors,
    read_causally,
    read_slots,
    written,
)
from attnlab.mechanisms._device import host_may_read, kernels_may_run, no_autocast
from attnlab.shapes import Float, Int

__all__ = [
    "FLOOR",
    "Control",
    "Fused",
    "SlotCache",
    "SlotMechanism",
    "SlotState",
    "check_slots",
    "lengths_unchecked",
    "one_hot",
    "places_of",
    "prefill",
    "step",
    "tokens_so_far",
]

NORMALISE = ("read", "write", "none")

# Lowered by ``lengths_unchecked``.
_lengths_checked = True

# The output of a call and the memory after it, by a kernel; None where there is no kernel for it.
Fused = tuple[Tensor, SlotState] | None


class SlotMechanism(Mechanism):
    """A member of the family: ``slots`` and ``control``; ``normalise`` says when alpha is divided by its sum.

    ``read`` divides K~ and V~ by the sum over the tokens seen (Appendix B.1), ``write`` divides alpha_i by the sum up
    to i, as footnote 5 has it for causal attention, and ``none`` takes Eq. 3 as it is.
    """

    slots: int
    normalise: str

    @property
    def by_place(self) -> bool:
        """Whether the control depends only on the number of a token, and has no parameters."""
        return False

    @property
    def sparse(self) -> bool:
        """Whether one slot may stay empty while another does not."""
        return True

    def control(self, call: AttentionCall, places: Int[Tensor, "b k"]) -> Control:
        """alpha of the call's keys; ``places`` numbers the visible ones from 0, those before the call included."""
        raise NotImplementedError(f"{type(self).__name__} must define control(call, places)")

    def cannot(self) -> dict[str, str]:
        return {
            "mask": "all queries, or all of a prefix, read one memory; a general mask needs a memory for each query",
            "bias": "a bias of one query and one key cannot pass through slots that hold many keys; drop it (convert "
            "has bias='drop'), or convert cross-attention alone (kinds=('cross',)), which has none",
        }

    def least_bytes(self, call: AttentionCall) -> int:
        """The keys and values of every slot, and the control of every key."""
        b, g, n_k, d = call.k.shape
        return 4 * b * self.slots * (g * (d + call.v.shape[3]) + n_k)

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        call, c, _ = _prepared(self, call, None)
        kind = torch.promote_types(call.q.dtype, torch.float32)
        q, k = grouped(call.q, call.groups).to(kind), call.k.to(kind)
        if not call.causal:
            return ungrouped(_dense(q, k, c, _timing(self, call), call.softmax_scale)).to(call.q.dtype)
        index = torch.arange(k.shape[2], device=k.device)
        rows = [q.new_zeros(*q.shape[:3], 0, k.shape[2])]
        for t in range(q.shape[3]):
            ahead = (index > t + call.offset)[:, None]
            past = replace(c, log=c.log.masked_fill(ahead, FLOOR))
            seen = k.masked_fill(ahead, 0)
            rows.append(_dense(q[..., t : t + 1, :], seen, past, self.normalise, call.softmax_scale))
        return ungrouped(torch.cat(rows, 3)).to(call.q.dtype)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """Time and memory linear in the keys, forward and backward."""
        if call.causal or call.k.shape[2] == 0:
            return _attend(self, call, None)[0]
        fused = self.fused(call, None)
        return _attend_all(self, call) if fused is None else fused[0]

    def shared(self, call: AttentionCall) -> Pooling | None:
        """The pooling of a call without padding if it is the same for every row and head, else None."""
        # A compiled graph computes it at every call, since it cannot read the cache of ``pooling_by_place``.
        if not self.by_place or call.q.is_meta or torch.compiler.is_compiling():
            return None
        return Pooling(held(pooling_by_place(self, call.k.shape[2], call.q.dtype, call.q.device).phi))

    def alpha(self, call: AttentionCall) -> Float[Tensor, "p n"] | None:
        """alpha of every place, if it depends on the place alone; else None."""
        if not self.by_place or call.q.is_meta or torch.compiler.is_compiling():
            return None
        return held(alpha_by_place(self, call.k.shape[2], call.q.dtype, call.q.device))

    def fused(self, call: AttentionCall, state: SlotState | None, *, in_place: bool = False) -> Fused:
        """Output and memory by a kernel, None if none takes this call; ``in_place`` allows it to change ``state``."""
        # Queries that all read after the last key have a form as fast. float16 cannot represent FLOOR.
        alone = not call.causal and state is None
        if alone or call.q.dtype == torch.float16 or not kernel_serves(call, self.slots, self.normalise):
            return None
        call = hide_unseen(call)
        places = places_of(call) if state is None else places_of(call) + state.count[:, None]
        with no_autocast(call.q):
            c = self.control(call, places)
        if c.faded is not None:
            return None
        log = c.log.expand(*call.k.shape[:3], self.slots).to(call.q.dtype)
        return attend_by_kernel(call, log, state, in_place=in_place)

    def bytes_read(self, call: AttentionCall) -> float:
        return min(1.0, self.slots / max(1, call.k.shape[2]))

    def make_cache(self, batch: int, capacity: int) -> SlotCache:
        """An empty past of constant size."""
        return SlotCache(batch)

    def cache_bytes(self, *, length: int, d: int, e: int, dtype: torch.dtype) -> int:
        """K~ and V~ in float32 and z in float64; z is in float32 where kernels have made it."""
        return self.slots * ((d + e) * torch.promote_types(dtype, torch.float32).itemsize + 8)


class SlotCache:
    """The ``LayerCache`` of a bounded memory: each call's keys and values are folded into the slots."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.state: SlotState | None = None

    def attend(
        self, mechanism: Mechanism, call: AttentionCall, *, key_visible: Tensor | None
    ) -> tuple[AttentionCall, Tensor]:
        """Write the call's keys, all new, into the slots and attend; the past needs no ``key_visible``."""
        assert isinstance(mechanism, SlotMechanism), "slots hold the past of a mechanism with slots"
        check_batch(call, self.batch)
        # The state is this cache's own.
        fused = None if self.state is None else mechanism.fused(call, self.state, in_place=True)
        if fused is not None:
            out, self.state = fused
        elif self.state is None:
            out, self.state = prefill(mechanism, call)
        elif _may_overwrite(mechanism, call, self.state):
            out, self.state = _overwrite(mechanism, call, self.state)
        else:
            out, self.state = step(mechanism, call, self.state)
        return call, out

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Copy rows."""
        self.batch, s = rows.shape[0], self.state
        if s is not None:
            self.state = SlotState(s.k[rows], s.v[rows], s.z[rows], s.count[rows])

    def nbytes(self) -> int:
        """The bytes that are kept."""
        s = self.state
        return 0 if s is None else sum(t.nbytes for t in (s.k, s.v, s.z, s.count))


def prefill(mech: SlotMechanism, call: AttentionCall) -> tuple[Float[Tensor, "b h q e"], SlotState]:
    """The output of a call over the first tokens, of which there may be none, and the memory after them."""
    return _continued(mech, call, None)


def step(mech: SlotMechanism, call: AttentionCall, state: SlotState) -> tuple[Float[Tensor, "b h q e"], SlotState]:
    """The output for the next tokens, usually one: the call holds only them; and the memory after them."""
    if state.k.shape[0] != call.k.shape[0]:
        raise ValueError(f"the state is for a batch of {state.k.shape[0]}, the call has {call.k.shape[0]}")
    return _continued(mech, call, state)


def check_slots(slots: int, normalise: str = "read") -> None:
    """Raise unless these are a number of slots and a time to normalise."""
    if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
        raise ValueError(f"slots must be an int of at least 1, got {slots!r}")
    if normalise not in NORMALISE:
        raise ValueError(f"normalise must be one of {', '.join(NORMALISE)}, got {normalise!r}")


def places_of(call: AttentionCall) -> Int[Tensor, "b k"]:
    """The number of each visible key, from 0; that of a hidden key has no meaning."""
    if call.key_visible is not None:
        return call.key_visible.cumsum(-1) - 1
    return torch.arange(call.k.shape[2], device=call.q.device).expand(call.k.shape[0], -1)


def tokens_so_far(places: Int[Tensor, "b k"]) -> int:
    """The number of visible tokens, which lengths are checked by; 0 where the host cannot read it."""
    # The call that warmed a captured graph up was checked.
    if not _lengths_checked or places.numel() == 0 or not host_may_read(places):
        return 0
    return int(places.max()) + 1


@contextmanager
def lengths_unchecked() -> Iterator[None]:
    """Inside, members with a greatest length do not check it: reading a number is impossible under ``vmap``."""
    global _lengths_checked
    before = _lengths_checked
    try:
        _lengths_checked = False
        yield
    finally:
        _lengths_checked = before


def one_hot(slot: Int[Tensor, "*b k"], slots: int, dtype: torch.dtype) -> Float[Tensor, "*b k n"]:
    """log alpha of tokens that write only into their ``slot``, in ``dtype`` or float32 if that cannot hold ``FLOOR``.

    A slot outside 0 to n - 1 means none.
    """
    own = slot[..., None] == torch.arange(slots, device=slot.device)
    dtype = torch.float32 if dtype == torch.float16 else dtype
    return torch.zeros(own.shape, dtype=dtype, device=slot.device).masked_fill(~own, FLOOR)


def _continued(mech: SlotMechanism, call: AttentionCall, state: SlotState | None) -> tuple[Tensor, SlotState]:
    mech.refuse(call)
    check_new_tokens(call)
    return _attend(mech, call, state)


def _may_overwrite(mech: SlotMechanism, call: AttentionCall, state: SlotState) -> bool:
    """Whether one token is decoded without gradients, into a memory that only this cache holds."""
    if torch.is_grad_enabled() or mech.normalise != "read" or call.sizes[2:] != (1, 1) or call.k.shape[0] == 0:
        return False
    return torch.is_inference_mode_enabled() or not state.k.is_inference()


def _overwrite(mech: SlotMechanism, call: AttentionCall, state: SlotState) -> tuple[Tensor, SlotState]:
    """``step`` for one token, in place: K~ + phi (k - K~) with phi = alpha / (alpha + exp z), one pass over K~."""
    mech.refuse(call)
    with no_autocast(call.q):
        call, c, state = _prepared(mech, call, state)
        kind, log = state.k.dtype, c.log[:, :, 0]
        phi = (log - state.z).sigmoid().to(kind).masked_fill(log <= FLOOR / 2, 0).unsqueeze(-1)
        z = torch.logaddexp(state.z, log.double())
        state.k.lerp_(call.k.to(kind), phi)
        state.v.lerp_(call.v.to(kind), phi)
        s = call.softmax_scale * grouped(call.q, call.groups).to(kind).squeeze(3) @ state.k.mT
        out = read_slots(s, z.unsqueeze(2)) @ state.v
        if c.faded is not None:
            z = z + c.faded.unsqueeze(-1)
    return ungrouped(out).unsqueeze(2).to(call.q.dtype), replace(state, z=z)


def _prepared(
    mech: SlotMechanism, call: AttentionCall, state: SlotState | None
) -> tuple[AttentionCall, Control, SlotState]:
    """The call with unseen keys set to zero, its control in at least float32 without padding, and the first state."""
    call = hide_unseen(call)
    kind = torch.promote_types(call.q.dtype, torch.float32)
    (b, g, n_k, d), e = call.k.shape, call.v.shape[-1]
    if state is None:
        empty = torch.zeros(b, g, mech.slots, d + e, dtype=kind, device=call.q.device)
        none_yet = torch.zeros(b, dtype=torch.long, device=call.q.device)
        z = torch.full((b, g, mech.slots), FLOOR, dtype=torch.float64, device=call.q.device)
        state = SlotState(empty[..., :d], empty[..., d:], z, none_yet)
    c = _control(mech, call, places_of(call) + state.count[:, None])
    new = torch.full_like(state.count, n_k) if call.key_visible is None else call.key_visible.sum(-1)
    return call, replace(c, log=c.log.expand(b, g, n_k, mech.slots)), replace(state, count=state.count + new)


def _control(mech: SlotMechanism, call: AttentionCall, places: Tensor) -> Control:
    """The control in at least float32; padding writes nothing."""
    c = mech.control(call, places)
    log = c.log.to(torch.promote_types(torch.promote_types(c.log.dtype, call.q.dtype), torch.float32))
    if call.key_visible is not None:
        log = log.masked_fill(~call.key_visible[:, None, :, None], FLOOR)
    return replace(c, log=log)


def _timing(mech: SlotMechanism, call: AttentionCall) -> str:
    """Where all queries read after the last write, normalising at either time is Eq. 12."""
    return "read" if mech.normalise == "write" and not call.causal else mech.normalise


def _dense(q: Tensor, k: Tensor, c: Control, when: str, scale: float) -> Tensor:
    """P Phi^T for queries that all read the memory after these keys."""
    if k.shape[2] == 0:
        return q.new_zeros(*q.shape[:-1], 0)
    z = c.log.logsumexp(2, keepdim=True)
    phi = control_vectors(c.log, c.value, z, c.log.logcumsumexp(2), when).to(k.dtype).unsqueeze(2)
    memory = phi.mT @ k.unsqueeze(2)
    return read_slots(scale * q @ memory.mT, z.unsqueeze(2)) @ phi.mT


def _attend_all(mech: SlotMechanism, call: AttentionCall) -> Tensor:
    """The output where all queries read the memory after the last key, without the memory itself."""
    # Autocast would make the control in half precision.
    with no_autocast(call.q):
        call = hide_unseen(call)
        if call.key_visible is None:
            pool = mech.shared(call)
        else:
            alpha = mech.alpha(call)
            pool = None
            if alpha is not None:
                pool = pooling_of_visible(alpha, call.key_visible, mech.normalise, sparse=mech.sparse)
        if pool is None:
            pool = pooling(_control(mech, call, places_of(call)), mech.normalise, sparse=mech.sparse)
        return attend_pooled(call, pool)


def _read(call: AttentionCall, state: SlotState) -> Tensor:
    """The output of queries that come without keys, as those of a cross-attention do after the first step."""
    memory = (state.k, state.v, state.z)
    one_token = call.q.is_cuda and call.q.shape[2] == 1 and not torch.is_grad_enabled()
    if one_token and kernels_may_run() and not torch.compiler.is_compiling():
        from attnlab.kernels.decoding import read_slots as read_by_kernel
        from attnlab.kernels.decoding import serves_reading

        if serves_reading(call.q, memory):
            return read_by_kernel(call.q, memory, scale=call.softmax_scale)
    with no_autocast(call.q):
        q = grouped(call.q, call.groups).to(state.k.dtype)
        P = read_slots(call.softmax_scale * q @ state.k.unsqueeze(2).mT, state.z[:, :, None, None])
        return ungrouped(P @ state.v.unsqueeze(2)).to(call.q.dtype)


def _attend(mech: SlotMechanism, call: AttentionCall, state: SlotState | None) -> tuple[Tensor, SlotState]:
    if state is not None and call.k.shape[2] == 0:
        return _read(call, state), state
    fused = mech.fused(call, state)
    if fused is not None:
        return fused
    # Autocast would round the memory to half precision at every step.
    with no_autocast(call.q):
        call, c, state = _prepared(mech, call, state)
        kind = torch.promote_types(call.q.dtype, torch.float32)
        when, scale = _timing(mech, call), call.softmax_scale
        q, k, v = grouped(call.q, call.groups).to(kind), call.k.to(kind), call.v.to(kind)
        # A single token reads after it is written, causal or not.
        if call.causal and not (call.offset == 0 and call.sizes[2:] == (1, 1)):
            out, state = read_causally(q, k, v, c, state, when, scale, call.offset)
        else:
            state = written(k, v, c, state, when)
            P = read_slots(scale * q @ state.k.unsqueeze(2).mT, state.z[:, :, None, None])
            out = P @ state.v.unsqueeze(2)
        if c.faded is not None:
            state = replace(state, z=state.z + c.faded.unsqueeze(-1))
    return ungrouped(out).to(call.q.dtype), state
