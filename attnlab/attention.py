"""The one idea: an attention call is ``out = W(q, k, v, x) @ v``, and a mechanism is a way to make W."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from attnlab.call_checks import check_bias, check_call
from attnlab.chunks import chunk_budget
from attnlab.errors import PythonRemedyError
from attnlab.shapes import Bool, Float, Int, Shaped
from attnlab.sizes import check_bytes
from attnlab.summaries import short_repr

__all__ = [
    "AttentionCall",
    "LayerCache",
    "Mechanism",
    "dot_products",
    "group_product",
    "group_scores",
    "grouped",
    "hide_unseen",
    "mask_with_bias",
    "normalise",
    "pair_mask",
    "query_chunks",
    "query_rows",
    "repeat_groups",
    "scores",
    "ungrouped",
    "visible",
]

# What a bias hides (``pair_mask``). Masks are written as 0 and -1e4, -1e9, the least number of a dtype or minus
# infinity, and may have been added to a bias of positions. At or below LEAST a number hides its pair whatever else the
# row holds. Above it, the number hides if it is FAR below the largest bias that the query sees: ALiBi's biases reach
# some thousands, and MPT counts them from the last key, so that a query may see no other biases than such.
LEAST = -6e4
FAR = 5e3


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Everything that one attention computes from.

    Query i sees key j when all of these allow it: ``key_visible[b, j]``, ``j <= i + offset`` if ``causal``,
    ``mask[b, h, i, j]``, and ``bias[b, h, i, j]`` where a mask was added to it (``pair_mask``). Keys and values may
    have fewer heads than queries (grouped-query attention).

    >>> q = k = v = torch.zeros(1, 2, 3, 4)
    >>> AttentionCall(q, k, v, causal=True).causal
    True
    """

    q: Float[Tensor, "b h q d"]
    k: Float[Tensor, "b g k d"]
    v: Float[Tensor, "b g k e"]
    # What the keys were made from: the layer's input (the encoder's output in cross-attention). During cached
    # decoding it covers only the last keys, the ones whose inputs this step has seen.
    x: Float[Tensor, "b n m"] | None = None
    key_visible: Bool[Tensor, "b k"] | None = None
    causal: bool = False
    # The position of query 0 among the keys: the number of keys already in the cache.
    offset: int = 0
    mask: Bool[Tensor, "#b #h q k"] | None = None
    # Added to the scaled scores. Minus infinity hides a pair. NaN and plus infinity are refused when a mechanism is
    # called with a bias on a CPU; on other devices reading the numbers would make the call wait, and they become NaN in
    # the outputs of the queries that see them, as NaN in q, k, v and x does on every device: never zeros.
    bias: Float[Tensor, "#b #h q k"] | None = None
    scale: float | None = None
    # The previous layer's memory, for mechanisms that read it (LUNA, shared workspace).
    memory: Float[Tensor, "b ..."] | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_call(self)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(batch, query heads, queries, keys)."""
        b, h, n_q, _ = self.q.shape
        return b, h, n_q, self.k.shape[2]

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def softmax_scale(self) -> float:
        """``scale``, or 1/sqrt(d) where none is given; 1 for keys without width, whose scores are all zero."""
        return max(1, self.q.shape[-1]) ** -0.5 if self.scale is None else self.scale


@runtime_checkable
class LayerCache(Protocol):
    """What one attention layer remembers of the tokens before a call, while a model generates."""

    def attend(
        self, mechanism: Mechanism, call: AttentionCall, *, key_visible: Bool[Tensor, "b k"] | None
    ) -> tuple[AttentionCall, Tensor]:
        """Add the call's keys and values, all of them new, and attend: (the call that was computed, its output).

        ``call.key_visible`` is about the new keys, ``key_visible`` about all keys so far. In cross-attention
        (``call.causal`` is false) the first call has the keys of the whole source, and later calls have no keys.
        """
        ...

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Make row i of the batch what row ``rows[i]`` was; the batch may grow or shrink."""
        ...


class Mechanism:
    """A way to make W. A subclass writes ``reference``, the definition; every other member has a default."""

    # The conformance laws that do not hold for this mechanism: {law: reason}.
    exempt: dict[str, str] = {}
    # Whether a row of W depends on the other queries or on the row's number: then ``reference`` needs all queries.
    whole_queries: bool = False
    # Whether the layers of a model share one object, and with it the parameters.
    tied_across_layers: bool = False
    # Whether torch.compile can trace it on a GPU: then a layer around it is one graph.
    traces: bool = False
    # Whether it reads ``call.memory``, which ``memory_after`` of the layer before has made.
    reads_memory: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def cannot(self) -> dict[str, str]:
        """What it refuses: {what: why}, where what is causal, mask, bias, cross, offset, padding or no-x."""
        return {}

    def least_bytes(self, call: AttentionCall) -> int:
        """A lower bound of the memory that its settings cost in this call; more than the device has is refused."""
        return 0

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        """W in the paper's symbols, dense: the definition that every faster path must match."""
        raise NotImplementedError(f"{type(self).__name__} must define reference(call)")

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """W @ v; by default from ``reference``, one chunk of queries after another (``whole_queries``: all at once)."""
        v = repeat_groups(hide_unseen(call).v, call.groups)
        parts = [call] if self.whole_queries else query_chunks(call)
        return torch.cat([self.reference(part).to(v.dtype) @ v for part in parts], dim=2)

    def row_weights(self, call: AttentionCall, lo: int, hi: int) -> Float[Tensor, "b h c k"]:
        """Rows ``lo`` to ``hi`` of W, without the others; a ValueError where a row cannot be made alone."""
        if self.whole_queries:
            raise ValueError(
                f"{self!r} makes the rows of W together, since one depends on the others, and not a block of rows at a "
                "time"
            )
        return self.reference(query_rows(call, lo, hi))

    def make_cache(self, batch: int, capacity: int) -> LayerCache | None:
        """An empty memory of constant size for ``batch`` sequences of at most ``capacity`` tokens (0: any length).

        None, the default, means that the model keeps every key and value.
        """
        return None

    def cache_bytes(self, *, length: int, d: int, e: int, dtype: torch.dtype) -> int:
        """The bytes that a cache holds for one key/value head of a sequence of ``length`` tokens; a model in ``dtype``.

        Keys have the width ``d`` and values ``e``. What a row holds once for all of its heads is left out. The default
        is for mechanisms without ``make_cache``: every key and value is kept.
        """
        if self.make_cache(1, 0) is not None:
            raise NotImplementedError(f"{type(self).__name__} has make_cache and must define cache_bytes")
        return length * (d + e) * dtype.itemsize

    def in_layer(self, kind: str, layer: int) -> Mechanism:
        """The mechanism as one layer of a model uses it; itself, unless layers must differ (random draws)."""
        return self

    def memory_after(self, call: AttentionCall) -> Float[Tensor, "b ..."] | None:
        """What the next layer gets as ``call.memory``; None unless ``reads_memory``."""
        return None

    def is_exact(self, call: AttentionCall) -> bool:
        """Whether the output is that of softmax attention, by construction, in every call of these sizes."""
        return False

    def bytes_read(self, call: AttentionCall) -> float:
        """The bytes of keys, values or memory that the last query reads, as a share of all keys and values."""
        return 1.0

    def search_steps(self, call: AttentionCall) -> int:
        """About how many steps the search for one query's keys takes; 0 where ``weights`` searches for none."""
        return 0

    def __call__(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        self.refuse(call)
        return self.forward(call)

    def weights(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        """The dense W of this call: ``weights(call) @ v`` is the output, always."""
        self.refuse(call)
        return self.reference(call).to(call.q.dtype)

    def refuse(self, call: AttentionCall) -> None:
        """Raise a ValueError if the call asks for something in ``cannot``, or its bias is no bias."""
        if not isinstance(call, AttentionCall):
            raise TypeError(f"a mechanism is called with an AttentionCall, got {type(call).__name__}")
        _, _, n_q, n_k = call.sizes
        asked = {
            "causal": call.causal,
            "mask": call.mask is not None,
            "bias": call.bias is not None,
            "cross": n_q != n_k and not call.causal,
            "offset": call.causal and call.offset != 0,
            "padding": call.key_visible is not None,
            "no-x": call.x is None,
        }
        for what, why in self.cannot().items():
            if asked[what]:
                # What to do about these two, in Python, stands behind the semicolon.
                reason, _, remedy = why.partition("; ") if what in ("bias", "no-x") else (why, "", "")
                problem = f"{self!r} cannot take this call ({what}): {reason}"
                raise PythonRemedyError(problem, remedy=remedy) if remedy else ValueError(problem)
        check_bytes(self, self.least_bytes(call), instead="make it smaller", device=call.q.device)
        check_bias(call)


def visible(call: AttentionCall) -> Bool[Tensor, "#b #h #q k"] | None:
    """Which keys each query may see, broadcastable to (b, h, q, k); None when every query sees every key."""
    return _all_of(pair_mask(call), _seen_by_flags(call))


def pair_mask(call: AttentionCall) -> Bool[Tensor, "#b #h q k"] | None:
    """``mask``, less the pairs that ``bias`` hides; None when the call has neither.

    A bias hides a pair at or below -6e4, or 5e3 or more below the largest bias of the keys that the query sees by the
    call's flags. So a row of -1e4 everywhere hides nothing, since softmax does not see a constant.

    >>> q = k = v = torch.zeros(1, 1, 2, 4)
    >>> bias = torch.tensor([[[[0.5, -1e4], [-torch.inf, -30.0]]]])
    >>> pair_mask(AttentionCall(q, k, v, bias=bias)).tolist()
    [[[[True, False], [False, True]]]]
    """
    if call.bias is None or call.k.shape[2] == 0:
        return call.mask
    bias, seen = call.bias.detach(), _all_of(call.mask, _seen_by_flags(call))
    counted = bias if seen is None else bias.masked_fill(~seen, -math.inf)
    # NaN compares as false: it hides nothing, so that it reaches the output.
    shown = ~((bias <= LEAST) | (bias <= counted.amax(-1, keepdim=True) - FAR))
    # Plus infinity less a finite number is still infinite.
    return _all_of(call.mask, shown | (bias == math.inf))


def mask_with_bias(call: AttentionCall) -> Bool[Tensor, "#b #h q k"] | None:
    """``pair_mask``, or ``mask`` where the bias hides no pair: for code that is slower with a mask; waits for a GPU."""
    mask = pair_mask(call)
    if mask is None or mask is call.mask or mask.is_meta:
        return mask
    return call.mask if bool((mask if call.mask is None else mask == call.mask).all()) else mask


def _seen_by_flags(call: AttentionCall) -> Bool[Tensor, "#b 1 #q k"] | None:
    """Which keys padding and causality show to each query."""
    _, _, n_q, n_k = call.sizes
    unpadded = None if call.key_visible is None else call.key_visible[:, None, None, :]
    if not call.causal:
        return unpadded
    i = torch.arange(n_q, device=call.q.device)
    j = torch.arange(n_k, device=call.q.device)
    return _all_of(unpadded, (j <= i[:, None] + call.offset)[None, None])


def _all_of(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Where both are true; None is true everywhere."""
    if one is None or other is None:
        return one if other is None else other
    return one & other


def hide_unseen(call: AttentionCall) -> AttentionCall:
    """The same call with keys, values and x that no query may see set to zero, so NaN or inf there cannot spread."""
    seen = _seen_by_some_query(call)
    if seen is None:
        return call
    b, h, _, n_k = call.sizes
    # A key/value head's row is needed if any of the query heads that read it sees it.
    by_group = grouped(seen.expand(-1, h, -1), call.groups).any(2)
    hidden = ~by_group.unsqueeze(-1)
    x = call.x
    if x is not None:
        by_row = by_group.any(1).expand(b, n_k)[:, n_k - x.shape[1] :]
        x = x.masked_fill(~by_row.unsqueeze(-1), 0)
    return replace(call, k=call.k.masked_fill(hidden, 0), v=call.v.masked_fill(hidden, 0), x=x)


def _seen_by_some_query(call: AttentionCall) -> Bool[Tensor, "#b #h k"] | None:
    """Which keys at least one query sees; None when that is all of them."""
    _, _, n_q, n_k = call.sizes
    if call.mask is not None or call.bias is not None:
        seen = visible(call)
        return None if seen is None else seen.any(2)
    seen = None if call.key_visible is None else call.key_visible[:, None]
    if call.causal and n_q + call.offset < n_k:
        reached = (torch.arange(n_k, device=call.q.device) < n_q + call.offset)[None, None]
        seen = reached if seen is None else seen & reached
    return seen


def scores(call: AttentionCall) -> Float[Tensor, "b h q k"]:
    """scale <q_i, k_j> + bias, with hidden pairs at minus infinity; float32 where the call is in half precision."""
    call = hide_unseen(call)
    s = ungrouped(group_scores(grouped(call.q, call.groups), call.k, scale=call.softmax_scale))
    if call.bias is not None:
        s = s + call.bias
    seen = visible(call)
    return s if seen is None else s.masked_fill(~seen, -math.inf)


def dot_products(
    q: Float[Tensor, "*batch q d"], k: Float[Tensor, "*batch2 k d"], *, scale: float
) -> Float[Tensor, "*batch3 q k"]:
    """scale <q_i, k_j> in at least float32: half precision has three digits, too few for scores of some hundred."""
    kind = torch.promote_types(q.dtype, torch.float32)
    return scale * q.to(kind) @ k.to(kind).mT


def normalise(kappa: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
    """Rows divided by their sums; a row that sums to zero becomes zero."""
    total = kappa.sum(-1, keepdim=True)
    return (kappa / total.masked_fill(total == 0, 1)).masked_fill(total == 0, 0)


def repeat_groups(t: Shaped[Tensor, "b g *rest"], groups: int) -> Shaped[Tensor, "b h *rest"]:
    """One copy of each key/value head per query head that reads it."""
    return t if groups == 1 else t.repeat_interleave(groups, dim=1)


def grouped(t: Shaped[Tensor, "b h *rest"], groups: int) -> Shaped[Tensor, "b g r *rest"]:
    """(b, h, ...) seen as (b, h / groups, groups, ...): the query heads beside the key/value head they read."""
    return t.unflatten(1, (t.shape[1] // groups, groups))


def group_scores(
    rows: Float[Tensor, "b g r n d"], k: Float[Tensor, "b g k d"], *, scale: float
) -> Float[Tensor, "b g r n k"]:
    """``dot_products`` of every query head of a group with its keys, of which none is copied for each head."""
    return dot_products(rows.flatten(2, 3), k, scale=scale).reshape(*rows.shape[:-1], k.shape[2])


def group_product(rows: Float[Tensor, "b g r n x"], shared: Float[Tensor, "b g x y"]) -> Float[Tensor, "b g r n y"]:
    """``rows @ shared`` for every query head of a group, without a copy of ``shared`` for each of them."""
    return (rows.flatten(2, 3) @ shared).reshape(*rows.shape[:-1], shared.shape[-1])


def ungrouped(t: Shaped[Tensor, "b g r *rest"]) -> Shaped[Tensor, "b h *rest"]:
    """The inverse of ``grouped``."""
    return t.flatten(1, 2)


def query_chunks(call: AttentionCall, budget: int | None = None) -> list[AttentionCall]:
    """The call split over its queries, so that b * h * chunk * k stays below ``budget`` elements.

    By default what a CPU's caches like, and on a GPU enough to keep it busy.
    """
    b, h, n_q, n_k = call.sizes
    if budget is None:
        budget = 1 << (24 if call.q.device.type == "cpu" else 27)
    size = max(1, chunk_budget(budget) // max(1, b * h * n_k))
    if size >= n_q:
        return [call]
    return [query_rows(call, lo, lo + size) for lo in range(0, n_q, size)]


def query_rows(call: AttentionCall, lo: int, hi: int) -> AttentionCall:
    """The call of queries ``lo`` to ``hi`` alone, over all keys."""
    return replace(
        call,
        q=call.q[:, :, lo:hi],
        mask=_rows(call.mask, lo, hi),
        bias=_rows(call.bias, lo, hi),
        offset=call.offset + lo if call.causal else call.offset,
    )


def _rows(t: Tensor | None, lo: int, hi: int) -> Tensor | None:
    return t if t is None or t.shape[-2] == 1 else t[..., lo:hi, :]
