"""ABC with a queue for a memory: the newest token pushes the oldest out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnlab.attention import AttentionCall, Mechanism, dot_products, grouped, hide_unseen, scores, ungrouped
from attnlab.mechanisms._bounded.continued import bytes_of, check_batch, numbered_keys, visible_first
from attnlab.mechanisms._bounded.slots import check_slots
from attnlab.mechanisms.softmax import softmax
from attnlab.registry import register
from attnlab.shapes import Float, Int

__all__ = ["AbcWindow", "QueueCache", "QueueMechanism"]

CHUNK = 64


class QueueMechanism(Mechanism):
    """Slots hold the newest token seen and those every ``stride`` tokens before it, so W is a masked softmax.

    Tokens are counted where visible. Queries that see the whole sequence read the queue after its last token.
    """

    slots: int
    stride: int = 1

    def cannot(self) -> dict[str, str]:
        return {
            "mask": "all queries, or all of a prefix, read one queue; a general mask needs a queue for each query",
            "bias": "the queue has forgotten which key is in which slot, so a bias of the pair has no place; drop it",
        }

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        places, newest = numbered_keys(call)
        age = newest[:, :, None] - places[:, None, :]
        queued = (age >= 0) & (age < self.slots * self.stride) & (age % self.stride == 0)
        return softmax(scores(call).masked_fill(~queued[:, None], -torch.inf)).to(call.q.dtype)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """Each chunk of queries gathers its queues: memory linear in the keys, forward and backward."""
        n_q, n_k = call.sizes[2:]
        if n_k == 0 or n_q == 0:
            return call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1])
        call = hide_unseen(call)
        places, newest = numbered_keys(call)
        # Visible keys first and in order: then a key's index is its place.
        order = torch.arange(n_k, device=call.q.device).expand_as(places)
        if call.key_visible is not None:
            order = visible_first(call.key_visible)
        # Slots for more tokens than there are stay empty.
        age = self.stride * torch.arange(min(self.slots, -(-n_k // self.stride)), device=call.q.device)
        if not call.causal:
            return self._read(call.q, call, order, newest[:, :1, None] - age)
        parts = []
        for lo in range(0, n_q, CHUNK):
            arguments = (call.q[:, :, lo : lo + CHUNK], call, order, newest[:, lo : lo + CHUNK, None] - age)
            # The gathered keys are n times the chunk: made again for the backward pass.
            again = torch.is_grad_enabled() and n_q > CHUNK
            parts.append(checkpoint(self._read, *arguments, use_reentrant=False) if again else self._read(*arguments))
        return torch.cat(parts, 2)

    def make_cache(self, batch: int, capacity: int) -> QueueCache:
        """An empty past of constant size."""
        return QueueCache(batch)

    def cache_bytes(self, *, length: int, d: int, e: int, dtype: torch.dtype) -> int:
        return min(length, (self.slots - 1) * self.stride + 1) * (d + e) * dtype.itemsize

    def _read(self, q: Tensor, call: AttentionCall, order: Tensor, wanted: Int[Tensor, "b t n"]) -> Tensor:
        empty = (wanted < 0)[:, None, None, :, None, :]
        index = order.gather(1, wanted.clamp(min=0).flatten(1)).view_as(wanted)
        k, v = (_gathered(t, index) for t in (call.k, call.v))
        s = dot_products(grouped(q, call.groups).unsqueeze(-2), k, scale=call.softmax_scale)
        s = s.masked_fill(empty, torch.finfo(s.dtype).min)
        return ungrouped((s.softmax(-1).masked_fill(empty, 0).to(v.dtype) @ v).squeeze(-2))


@register("abc-window", examples=("abc-window:slots=3",))
@dataclass(frozen=True)
class AbcWindow(QueueMechanism):
    """K~_{t+1} = U K~_t + e_n (x) k_{t+1}, U the upper shift matrix: the last n tokens (ABC, Eqs. 9-11)."""

    slots: int = 64

    def __post_init__(self) -> None:
        check_slots(self.slots)


class QueueCache:
    """The ``LayerCache`` of a queue: the keys and values still in it."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.visible: Tensor | None = None

    def attend(
        self, mechanism: Mechanism, call: AttentionCall, *, key_visible: Tensor | None
    ) -> tuple[AttentionCall, Tensor]:
        """Push the call's keys, all new, and attend; the past needs no ``key_visible``."""
        assert isinstance(mechanism, QueueMechanism), "a queue holds the past of a mechanism with a queue"
        check_batch(call, self.batch)
        k, v, seen = call.k, call.v, call.key_visible
        if seen is None:
            seen = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
        old = 0
        if self.k is not None and self.v is not None and self.visible is not None:
            old = self.k.shape[2]
            k, v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
            seen = torch.cat([self.visible, seen], 1)
        # The queue keeps keys and values, not the x that they were made from.
        x = None if old else call.x
        full = replace(call, k=k, v=v, x=x, key_visible=seen, offset=old if call.causal else 0)
        out = mechanism(full)
        # Visible keys last, in order; keys beyond the length of the queue are dropped.
        length = (mechanism.slots - 1) * mechanism.stride + 1
        kept = seen.to(torch.int8).argsort(dim=-1, stable=True)[:, -length:]
        self.k, self.v = (_gathered(t, kept[:, None])[:, :, 0, 0] for t in (k, v))
        self.visible = seen.gather(1, kept)
        return full, out

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Copy rows."""
        self.batch = rows.shape[0]
        if self.k is not None and self.v is not None and self.visible is not None:
            self.k, self.v, self.visible = self.k[rows], self.v[rows], self.visible[rows]

    def nbytes(self) -> int:
        """The bytes that are kept."""
        return bytes_of(self.k, self.v, self.visible)


def _gathered(t: Float[Tensor, "b g k d"], index: Int[Tensor, "b t n"]) -> Float[Tensor, "b g 1 t n d"]:
    flat = index.flatten(1)[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3])
    return t.gather(2, flat).unflatten(2, (1, *index.shape[1:]))
