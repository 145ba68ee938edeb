"""Keys and values in which every head of every row holds a number of its own, without padding: one flat buffer each."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.attention import dot_products, grouped
from attnlab.chunks import chunk_budget
from attnlab.mechanisms._device import kernels_may_run
from attnlab.mechanisms._sdpa import sdpa
from attnlab.mechanisms.softmax import softmax
from attnlab.shapes import Bool, Float, Int, Shaped

__all__ = ["RaggedKeys"]

# Free places are one for so many keys: they let a cache grow for a while before it has to be copied.
KEYS_FOR_A_FREE_PLACE = 128
# The most scores of one segment that are made at once.
ELEMENTS = 1 << 24


class RaggedKeys:
    """Tensors that have a row for each key ("keys", "values" and others), of a number of keys that differs by head.

    Head i of row r is segment s = r * heads + i: its keys lie in their order at the places starts[s], starts[s] + 1,
    ... of every buffer, counts[s] of them. ``room`` free places or more follow each segment.
    """

    def __init__(self, keep: Bool[Tensor, "b g k"], tensors: dict[str, Shaped[Tensor, "b g k ..."]]) -> None:
        self.rows, self.heads = keep.shape[:2]
        self.buffers: dict[str, Tensor] = {}
        self.starts: Int[Tensor, " s"]
        self.counts: Int[Tensor, " s"]
        # What the host knows: all keys, the most of a segment, places of a buffer, and free ones behind each segment.
        self.total, self.longest, self.size, self.room = 0, 0, 0, 0
        # Whether segments begin at equal distances; whether, beyond that, all hold as many keys.
        self.even_starts = self.even = False
        # Whether a view of the buffers was handed out, so that no place that it shows may be written again; whether
        # autograd may have kept one, so that nothing may be written.
        self.lent = self.saved = False
        self.replace(keep, tensors)

    def replace(self, keep: Bool[Tensor, "b g k"], tensors: dict[str, Shaped[Tensor, "b g k ..."]]) -> None:
        """Hold these keys from now on; in the same buffers, where the keys fit and nothing else reads them."""
        counts = keep.flatten(0, 1).sum(-1, dtype=torch.int32)
        at = keep.nonzero(as_tuple=True)
        reused = self._fit(counts, len(at[0]), tensors)
        if not reused:
            self._lay_out(counts, len(at[0]) // (KEYS_FOR_A_FREE_PLACE * max(1, counts.numel())))
        places, old = self._places(), self.buffers
        self.buffers = {
            name: (old[name] if reused else t.new_empty(self.size, *t.shape[3:])).index_copy_(0, places, t[at])
            for name, t in tensors.items()
        }

    def _fit(self, counts: Int[Tensor, " s"], total: int, tensors: dict[str, Tensor]) -> bool:
        """Count these keys in, if the buffers can be written to again, have room, and are not too large for them."""
        alike = self.buffers.keys() == tensors.keys() and all(
            (t.dtype, t.shape[3:]) == (self.buffers[name].dtype, self.buffers[name].shape[1:])
            for name, t in tensors.items()
        )
        if not alike or self.lent or not self._writable() or counts.numel() != self.counts.numel():
            return False
        if self.size > total + 2 * total // KEYS_FOR_A_FREE_PLACE:
            return False
        longest, least, room = torch.stack(
            [counts.amax(), counts.amin(), (self._capacities() - counts).amin()]
        ).tolist()
        if room < 0:
            return False
        self.counts, self.room, self.total, self.longest = counts, room, total, longest
        self.even = longest == least and self.even_starts
        return True

    def _lay_out(self, counts: Int[Tensor, " s"], room: int) -> None:
        """Give each segment its place; ``room`` free places follow each."""
        self.counts, self.room = counts, room
        capacities = counts + room
        self.starts = (capacities.cumsum(0) - capacities).to(torch.int32)
        self.total, self.longest, least = torch.stack([counts.sum(), counts.amax(), counts.amin()]).tolist()
        self.size = self.total + room * counts.numel()
        self.even = self.even_starts = self.longest == least
        self.lent = self.saved = False

    def _capacities(self) -> Int[Tensor, " s"]:
        return torch.cat([self.starts[1:], self.starts.new_tensor([self.size])]) - self.starts

    def _places(self) -> Int[Tensor, " n"]:
        """The places of all keys, segment after segment."""
        segments = self._segments()
        before = self.counts.cumsum(0) - self.counts
        return torch.arange(self.total, device=segments.device) + (self.starts - before)[segments]

    def _segments(self) -> Int[Tensor, " n"]:
        """The segment of each key, in the order of ``_places``."""
        segments = torch.arange(self.counts.numel(), device=self.counts.device)
        return segments.repeat_interleave(self.counts, output_size=self.total)

    def _writable(self) -> bool:
        """Whether the buffers can be written to: autograd has no part in them."""
        if torch.is_grad_enabled() or self.saved:
            return False
        inference = torch.is_inference_mode_enabled()
        return not any(t.requires_grad or (t.is_inference() and not inference) for t in self.buffers.values())

    def takes(self, k: Float[Tensor, "b g n d"]) -> bool:
        """Whether new keys can be added in place, after ``grow`` at least."""
        keys = self.buffers["keys"]
        same = (k.dtype, k.device, k.shape[0], k.shape[1]) == (keys.dtype, keys.device, self.rows, self.heads)
        return same and self._writable()

    def append(
        self,
        k: Float[Tensor, "b g n d"],
        v: Float[Tensor, "b g n e"],
        columns: Int[Tensor, "b g n"] | int | None = None,
    ) -> None:
        """Add keys to every segment, for which there is room; a number is the column of all, others get zeros."""
        new = k.shape[2]
        assert new <= self.room, "grow first"
        at = (self.starts + self.counts).long()
        if new > 1:
            at = (at[:, None] + torch.arange(new, device=at.device)).flatten()
        tensors = {"keys": k, "values": v, "columns": columns}
        for name, buffer in self.buffers.items():
            t = tensors.get(name)
            if isinstance(t, Tensor):
                buffer.index_copy_(0, at, t.flatten(0, 2))
            else:
                buffer.index_fill_(0, at, t or 0)
        self.counts = self.counts + new
        self.total, self.longest, self.room = self.total + at.numel(), self.longest + new, self.room - new

    def grow(self, new: int = 1) -> None:
        """Make room for at least ``new`` more keys in every segment, by copying all of them."""
        places = self._places()
        self._lay_out(self.counts, max(new, self.total // (KEYS_FOR_A_FREE_PLACE * self.counts.numel())))
        self._move(places)

    def _move(self, old: Int[Tensor, " n"]) -> None:
        """Fill new buffers from these places of the old ones."""
        places = self._places()
        self.buffers = {
            name: t.new_empty(self.size, *t.shape[1:]).index_copy_(0, places, t[old])
            for name, t in self.buffers.items()
        }

    def put(self, name: str, t: Shaped[Tensor, "b g k ..."]) -> None:
        """Replace, or add, what belongs to the keys under a name; ``t`` is as ``padded`` gives it."""
        held = (torch.arange(self.longest, device=t.device) >= (self.longest - self.counts)[:, None]).nonzero(
            as_tuple=True
        )
        flat = t.flatten(0, 1)[held]
        self.buffers[name] = t.new_zeros(self.size, *t.shape[3:]).index_copy_(0, self._places(), flat)

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Make row i what row ``rows[i]`` was."""
        rows = rows.to(self.counts.device)
        starts, counts = (t.view(self.rows, self.heads)[rows].flatten() for t in (self.starts, self.counts))
        self.rows = len(rows)
        self._lay_out(counts, self.room)
        before, segments = counts.cumsum(0) - counts, self._segments()
        self._move(torch.arange(self.total, device=segments.device) + (starts - before)[segments])

    def padded(self, name: str, fill: float | None = None) -> Shaped[Tensor, "b g k ..."]:
        """What belongs to the keys as (b, g, the most that a head holds, ...): heads with fewer begin with padding.

        Padding holds ``fill``, or anything where that is None. Where all hold as many it is a view.
        """
        buffer, shape = self.buffers[name], (self.rows, self.heads)
        if self.even:
            self.lent, self.saved = True, self.saved or torch.is_grad_enabled()
            size = self.size // max(1, self.counts.numel())
            return buffer.view(*shape, size, *buffer.shape[1:])[:, :, : self.longest]
        place = torch.arange(self.longest, device=buffer.device) - (self.longest - self.counts)[:, None]
        at = (self.starts[:, None] + place.clamp_min(0)).clamp_max(self.size - 1)
        t = buffer[at.long()].unflatten(0, shape)
        if fill is None:
            return t
        return t.masked_fill((place < 0).view(*shape, -1, *[1] * (t.dim() - 3)), fill)

    def count_by_head(self) -> Int[Tensor, "b g"]:
        """How many keys each head of each row holds."""
        return self.counts.view(self.rows, self.heads).long()

    def nbytes(self) -> int:
        """The bytes of all buffers, free places and what finds a key included."""
        return sum(t.untyped_storage().nbytes() for t in (*self.buffers.values(), self.starts, self.counts))

    def nominal_bytes(self) -> int:
        """The bytes of the keys and values themselves, and of what is added to their scores."""
        buffers = [t for name in ("keys", "values", "bias") if (t := self.buffers.get(name)) is not None]
        return self.total * sum(t[:1].nbytes for t in buffers)

    def attend(
        self, q: Float[Tensor, "b h q d"], *, scale: float, visible: Bool[Tensor, "b m c"] | None = None
    ) -> Float[Tensor, "b h q e"]:
        """softmax(scale q k^T + bias) v of the last tokens, whose keys are here: on a GPU by a kernel, else in PyTorch.

        A token sees no key of a later one. The bias is that of the keys under the name "bias", if there is one.
        ``visible`` says which columns of the text the queries see; None: all. One that sees none gets zeros.
        """
        keys, values, bias = self.buffers["keys"], self.buffers["values"], self.buffers.get("bias")
        columns = self.buffers.get("columns")
        if q.is_cuda and self.served(q):
            from attnlab.kernels.ragged import ragged_attention

            return ragged_attention(
                q, keys, values, self.starts, self.counts, scale=scale, longest=self.longest, total=self.total,
                bias=bias, visible=visible, columns=columns,
            )  # fmt: skip
        if self.even and bias is None and visible is None and self.longest:
            n = q.shape[2]
            later = torch.ones(n, self.longest, dtype=torch.bool, device=q.device).tril(self.longest - n)
            return sdpa(
                q, self.padded("keys"), self.padded("values"), attn_mask=None if n == 1 else later, scale=scale
            )  # fmt: skip
        return attend_by_segment(
            q, keys, values, self.starts, self.counts, scale=scale, bias=bias, visible=visible, columns=columns
        )

    def served(self, q: Tensor) -> bool:
        """Whether a kernel can read these keys."""
        if not kernels_may_run():
            return False
        from attnlab.kernels.ragged import serves

        return serves(q, self.buffers["keys"], self.buffers["values"])


def attend_by_segment(
    q: Float[Tensor, "b h q d"],
    keys: Float[Tensor, "p d"],
    values: Float[Tensor, "p e"],
    starts: Int[Tensor, " s"],
    counts: Int[Tensor, " s"],
    *,
    scale: float,
    bias: Float[Tensor, " p"] | None = None,
    visible: Bool[Tensor, "b m c"] | None = None,
    columns: Int[Tensor, " p"] | None = None,
) -> Float[Tensor, "b h q e"]:
    """The definition: softmax(scale q k^T + bias) v of the last tokens, one segment of keys after the other.

    The last keys of a segment are those of the queries, which see none of a later one. ``visible`` says which columns
    of the text they see; ``columns`` are those of the keys, without which key i of a segment is column i. A bias of
    minus infinity hides a key from all. A query that sees nothing gets zeros.
    """
    groups, heads = q.shape[1] * q.shape[0] // len(starts), len(starts) // q.shape[0]
    out = []
    places = zip(starts.tolist(), counts.tolist(), strict=True)
    for segment, (query, (start, count)) in enumerate(zip(grouped(q, groups).flatten(0, 1), places, strict=True)):
        own = slice(start, start + count)
        shown = None if visible is None else visible[segment // heads]
        if shown is not None:
            shown = shown[:, :count] if columns is None else shown[:, columns[own].long()]
        out.append(_attend_to(query, keys[own], values[own], scale, None if bias is None else bias[own], shown))
    return torch.stack(out).view(*q.shape[:3], -1)


def _attend_to(
    q: Float[Tensor, "r q d"],
    k: Float[Tensor, "k d"],
    v: Float[Tensor, "k e"],
    scale: float,
    bias: Float[Tensor, " k"] | None,
    shown: Bool[Tensor, "#q k"] | None,
) -> Float[Tensor, "r q e"]:
    """The outputs of the query heads of one segment, in chunks of queries."""
    n_q, n_k = q.shape[1], k.shape[0]
    if bias is not None:
        shown = bias > -torch.inf if shown is None else shown & (bias > -torch.inf)
    if shown is not None:
        shown = shown.expand(n_q, -1)
        # What no query sees may be anything.
        k, v = (t.masked_fill(~shown.any(0).unsqueeze(-1), 0) for t in (k, v))
    size = max(1, chunk_budget(ELEMENTS) // max(1, q.shape[0] * n_k))
    out = []
    for lo in range(0, n_q, size):
        part = q[:, lo : lo + size]
        s = dot_products(part, k, scale=scale)
        s = s if bias is None else s + bias
        number = torch.arange(lo, lo + part.shape[1], device=q.device)[:, None]
        seen = torch.arange(n_k, device=q.device) <= number + n_k - n_q
        seen = seen if shown is None else seen & shown[lo : lo + size]
        weights = softmax(s.masked_fill(~seen, -torch.inf)[None])[0]
        out.append((weights @ v.to(s.dtype)).to(q.dtype))
    return torch.cat(out, 1)
