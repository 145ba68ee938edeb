"""ABC whose slots hold keys as they are: of those that have left the window, the ones a learned score holds dear."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, Mechanism, grouped, hide_unseen, scores, ungrouped
from attnlab.fields import check_fields, check_int
from attnlab.mechanisms._bounded.continued import (
    check_batch,
    check_memory,
    check_new_tokens,
    check_window,
    first_exact,
    fitted_window,
    numbered_keys,
    visible_first,
)
from attnlab.mechanisms._bounded.selected import (
    HIDDEN,
    Selection,
    Tokens,
    attend,
    kernel_serves,
    merits,
    selected,
)
from attnlab.mechanisms._device import compiled_part, kernels_take, no_autocast
from attnlab.mechanisms.softmax import softmax
from attnlab.registry import register
from attnlab.shapes import Float, Int

__all__ = ["AbcSelect", "SelectCache"]

# A recency of 1 adds 1 to the score of a token that comes so many tokens later.
TOKENS = 256
CHUNK = 64
# Key/value heads whose scores are sums in one compiled pass over x; more are a matrix product.
FEW_HEADS = 8


@register(
    "abc-select",
    examples=(
        "abc-select:slots=2,window=2,sinks=1,block=2",
        "abc-select:slots=3,window=4,sinks=0,block=2",
        "abc-select:slots=2,window=1,sinks=2,block=1",
        "abc-select:slots=2,window=3,sinks=1,block=3",
    ),
)
@dataclass(eq=False)
class AbcSelect(Mechanism, nn.Module):
    """W = softmax(q k_j), j in the first tokens, the last, and the ``slots`` others whose score u_j is highest.

        u_j = <w, x_j> / sqrt(m) + r j / 256

    for each key/value head, m the width of x; w and r are learned. The first tokens are ``sinks``, and the last at
    most ``window``, which tokens leave ``block`` at a time (as in ``abc-hybrid``). phi_j is one-hot or zero: a new
    token takes the slot of the lowest score, if its own is higher (of equal scores the later token stays). A score
    does not change, so K~ and V~ follow from those before and the new tokens, as in all of ABC, but each slot is a
    key and not a sum of keys.

    Being in a slot is a step of u, so u learns by the derivative of a sigmoid in its place. For that, while gradients
    are on, some more keys, those next in order, are read with weight zero.

    Without causality all queries read what is kept after the last token.
    """

    traces = True

    slots: int = 64
    window: int = 64
    sinks: int = 4
    block: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_int("slots", self.slots, least=1)
        check_int("window", self.window, least=1)
        check_int("sinks", self.sinks, least=0)
        check_int("block", self.block, least=1)
        check_window(self.window, self.block)
        nn.Module.__init__(self)
        self.exempt = {
            "grouped_queries_equal_repeated_keys": "each key/value head has its own w, so repeating heads adds to it"
        }
        self.weight: nn.Parameter | None
        self.recency: nn.Parameter | None
        for name in ("weight", "recency"):
            self.register_parameter(name, None)

    def cannot(self) -> dict[str, str]:
        return {
            "mask": "all queries of a prefix read one memory; a general mask needs a memory for each query",
            "bias": "the memory has forgotten how far away its keys are, so a bias of the pair has no place; drop it "
            "(convert has bias='drop'), or convert cross-attention alone (kinds=('cross',)), which has none",
            "no-x": "scores are computed from what the keys were made from; pass x=",
        }

    def is_exact(self, call: AttentionCall) -> bool:
        return self.window >= call.k.shape[2]

    def bytes_read(self, call: AttentionCall) -> float:
        return min(1.0, self.size / max(1, call.k.shape[2]))

    @property
    def size(self) -> int:
        """The keys of a full memory."""
        return self.slots + self.window + self.sinks

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        if call.k.shape[2] == 0 or call.q.shape[2] == 0:
            return call.q.new_zeros(call.sizes)
        call = hide_unseen(call)
        places, newest = numbered_keys(call)
        tokens = self._tokens(call, places)
        call = replace(call, k=tokens.k)
        rules = self.rules(call, call.k.shape[2])
        place, p = tokens.place.unsqueeze(2), newest[:, None, :, None]
        s = first_exact(p, rules)
        old = (place >= self.sinks) & (place < s)
        # In the order of merit, the first of those that have left the window.
        order = merits(tokens, rules).argsort(dim=-1, descending=True).unsqueeze(2).expand(*old.shape)
        ahead = torch.zeros_like(order).scatter(-1, order, old.gather(-1, order).cumsum(-1))
        kept = (old & (ahead <= self.slots)) | (place < self.sinks) | (place >= s)
        seen = kept & (place <= p)
        seen = ungrouped(seen.unsqueeze(2).expand(-1, -1, call.groups, -1, -1))
        return softmax(scores(call).masked_fill(~seen, -torch.inf)).to(call.q.dtype)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """Time and memory linear in the keys, but for one comparison of every key with every block."""
        if call.k.shape[2] == 0:
            return call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1])
        call = hide_unseen(call)
        if call.causal and call.key_visible is None and call.offset == 0 and call.q.shape[2] == call.k.shape[2]:
            return self._of_whole_texts(call)
        return self._attended(call, *self._new_tokens(call, None))

    def _of_whole_texts(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """The output of a text without padding: a function of tensors alone, which is compiled as one part."""
        x = call.x
        assert x is not None, "refused before"
        w, r = self._scorer(call)
        rules = self.rules(call, call.k.shape[2])
        learn = torch.is_grad_enabled() and any(t.requires_grad for t in (x, w, r))
        tensors = call.q, call.k, call.v, x, w, r
        serves = kernel_serves(call.q, call.k, call.v, rules)
        return (compiled_part(_attend_whole, call.q) if serves else _attend_whole)(*tensors, rules, learn)

    def make_cache(self, batch: int, capacity: int) -> SelectCache:
        """An empty past of constant size."""
        return SelectCache(batch)

    def cache_bytes(self, *, length: int, d: int, e: int, dtype: torch.dtype) -> int:
        """Keys and values, each with a score in float32 and a place."""
        return self.size * ((d + e) * dtype.itemsize + torch.promote_types(dtype, torch.float32).itemsize + 4)

    def rules(self, call: AttentionCall, longest: int) -> Selection:
        """How the call is read; a window longer than ``longest`` places holds no more, nor do sinks."""
        window, block = fitted_window(self.window, self.block, longest)
        return Selection(self.slots, window, block, min(self.sinks, longest), call.softmax_scale)

    def rules_of_memory(self, call: AttentionCall) -> Selection:
        """How a call is read that follows a memory, which has room for all sinks."""
        return self.rules(call, max(self.window, self.sinks))

    def _attended(self, call: AttentionCall, tokens: Tokens, newest: Int[Tensor, "b q"]) -> Tensor:
        n_q, longest = call.q.shape[2], tokens.k.shape[2]
        if n_q == 0:
            return call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1])
        alone = longest == call.k.shape[2]
        rules = self.rules(call, longest) if alone else self.rules_of_memory(call)
        learn = torch.is_grad_enabled() and tokens.score.requires_grad
        # Whether chunks of queries are blocks, and whether keys are those of the same places.
        one, aligned = (
            n_q == 1 or not call.causal,
            alone and call.key_visible is None and call.offset % rules.block == 0,
        )
        whole = aligned and call.causal and call.offset == 0 and n_q == longest
        size = min(CHUNK if not call.causal else rules.block, n_q)
        states = 0 if whole else 1 if one or aligned else 2
        with no_autocast(call.q):
            q = grouped(call.q, call.groups)
            out = attend(q, newest, tokens, rules, learn=learn, size=size, states=states)
        return ungrouped(out).to(call.q.dtype)

    def _new_tokens(self, call: AttentionCall, count: Int[Tensor, " b"] | None) -> tuple[Tokens, Int[Tensor, "b q"]]:
        """The call's tokens after ``count`` others, visible ones first, and the newest place that each query sees."""
        places, newest = numbered_keys(call)
        if count is not None:
            places, newest = places + count[:, None], newest + count[:, None]
        tokens = self._tokens(call, places)
        if call.key_visible is not None:
            tokens = tokens.rows(visible_first(call.key_visible)[:, None].expand(-1, call.k.shape[1], -1))
        return tokens, newest

    def _tokens(self, call: AttentionCall, places: Int[Tensor, "b k"]) -> Tokens:
        """Keys and values with their scores, in at least float32; hidden ones have the place HIDDEN."""
        x = call.x
        assert x is not None, "refused before"
        w, r = self._scorer(call)
        with no_autocast(call.q):
            tokens = _scored(call.k, call.v, x, w, r, places)
        if call.key_visible is not None:
            hidden = ~call.key_visible[:, None]
            tokens = tokens._replace(place=tokens.place.masked_fill(hidden, HIDDEN))
        return tokens

    def _scorer(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """w and r on the device of the keys, where layers that share a device map may be on several."""
        self._make_parameters(call)
        assert self.weight is not None
        assert self.recency is not None
        return self.weight.to(call.k.device), self.recency.to(call.k.device)

    def _make_parameters(self, call: AttentionCall) -> None:
        """Make the parameters at the first call, and check at every call that they are for its shapes."""
        x, (_, g, n_k, _) = call.x, call.k.shape
        assert x is not None
        if x.shape[1] != n_k:
            raise ValueError(
                f"abc-select needs the input of every key, got x for {x.shape[1]} of {n_k}; decode with make_cache(), "
                "which keeps the keys of the highest scores and not the inputs"
            )
        shape = (g, x.shape[-1])
        if self.weight is None:
            generator = torch.Generator("cpu").manual_seed(self.seed)
            start = torch.randn(shape, generator=generator, device="cpu")
            self.weight = nn.Parameter(start.to(call.q.device))
            self.recency = nn.Parameter(torch.zeros(g, device=call.q.device))
        if tuple(self.weight.shape) != shape:
            raise ValueError(
                f"the scores were made for (key/value heads, width) = {tuple(self.weight.shape)}, this call needs "
                f"{shape}; make a mechanism for each shape"
            )


def _scored(k: Tensor, v: Tensor, x: Tensor, w: Tensor, r: Tensor, places: Int[Tensor, "b k"]) -> Tokens:
    """Keys and values at these places with their scores, in at least float32."""
    kind = torch.promote_types(k.dtype, torch.float32)
    wide, w, r = x.to(kind), w.to(kind) * max(1, x.shape[-1]) ** -0.5, r.to(kind)
    if torch.compiler.is_compiling() and len(w) <= FEW_HEADS:
        # One pass over x makes these few sums, and x is never written in float32.
        score = torch.stack([(wide * of_head).sum(-1) for of_head in w.unbind()], 1)
    else:
        score = (wide @ w.mT).transpose(1, 2)
    score = score + r[:, None] * places[:, None].to(kind) / TOKENS
    # NaN in x reaches the output: where scores are no numbers, nobody knows which keys are kept.
    k = k + torch.where(score.isnan(), score, 0).detach().to(k.dtype).unsqueeze(-1)
    return Tokens(k, v, score, places[:, None].expand(-1, k.shape[1], -1).to(torch.int32).contiguous())


def _attend_whole(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g t d"],
    v: Float[Tensor, "b g t e"],
    x: Float[Tensor, "b t m"],
    w: Float[Tensor, "g m"],
    r: Float[Tensor, " g"],
    rules: Selection,
    learn: bool,
) -> Float[Tensor, "b h t e"]:
    """The outputs of texts in which every token is visible and sees those before it."""
    (b, g, n), h = k.shape[:3], q.shape[1]
    places = torch.arange(n, device=q.device).expand(b, -1)
    with no_autocast(q):
        tokens = _scored(k, v, x, w, r, places)
        rows = grouped(q, h // g)
        out = attend(rows, places, tokens, rules, learn=learn, size=min(rules.block, n), states=0)
    return ungrouped(out).to(q.dtype)


class SelectCache:
    """The ``LayerCache`` of ``AbcSelect``: the keys that are kept, which no length makes more."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.tokens: Tokens | None = None
        # The same for all heads of a row: a kernel's programs, one a head, need not wait for each other.
        self.count: Int[Tensor, "b g"] | None = None
        # Whether keys are in the order of their places, which a kernel does not keep.
        self.ordered = True

    def attend(
        self, mechanism: Mechanism, call: AttentionCall, *, key_visible: Tensor | None
    ) -> tuple[AttentionCall, Tensor]:
        """Take in the call's keys, all new, and attend; the past needs no ``key_visible``."""
        assert isinstance(mechanism, AbcSelect), "this past is that of a mechanism that selects keys"
        check_batch(call, self.batch)
        mechanism.refuse(call)
        check_new_tokens(call)
        if self.count is None:
            check_memory(mechanism, call, self.batch)
            self.count = torch.zeros(self.batch, call.k.shape[1], dtype=torch.long, device=call.k.device)
        out = None if self.tokens is None else _step_by_kernel(mechanism, call, (*self.tokens, self.count))
        if out is not None:
            self.ordered = False
            return call, out
        return call, self._attend(mechanism, call, self.count[:, 0])

    def _attend(self, mechanism: AbcSelect, call: AttentionCall, count: Int[Tensor, " b"]) -> Tensor:
        clean = hide_unseen(call)
        tokens, newest = mechanism._new_tokens(clean, count)
        after = count + (call.k.shape[2] if call.key_visible is None else call.key_visible.sum(-1))
        if self.tokens is not None:
            past = self.tokens if self.ordered else self.tokens.rows(self.tokens.place.argsort(dim=-1))
            tokens = Tokens(*(torch.cat([a.to(b.dtype), b], 2) for a, b in zip(past, tokens, strict=True)))
        if not call.causal:
            newest = (after - 1)[:, None].expand(-1, call.q.shape[2])
        out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1])
        if tokens.k.shape[2]:
            out = mechanism._attended(clean, tokens, newest)
            # Scores are kept without the graph of what made them.
            tokens = tokens._replace(score=tokens.score.detach())
            self._keep(selected(tokens, after - 1, mechanism.rules_of_memory(call)), after)
        return out

    def _keep(self, tokens: Tokens, count: Int[Tensor, " b"]) -> None:
        """Hold these from now on; without gradients in the memory that is held, as a captured graph needs it."""
        self.ordered = True
        counts = count[:, None].expand(-1, tokens.k.shape[1])
        if self.tokens is None or torch.is_grad_enabled():
            self.tokens, self.count = Tokens(*(t.contiguous() for t in tokens)), counts.contiguous()
            return
        assert self.count is not None
        for held, new in zip((*self.tokens, self.count), (*tokens, counts), strict=True):
            held.copy_(new)

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Copy rows."""
        self.batch = rows.shape[0]
        if self.count is not None:
            self.count = self.count[rows]
        if self.tokens is not None:
            self.tokens = Tokens(*(t[rows] for t in self.tokens))

    def nbytes(self) -> int:
        """The bytes that are kept."""
        return 0 if self.tokens is None else sum(t.nbytes for t in self.tokens)


def _step_by_kernel(mech: AbcSelect, call: AttentionCall, kept: tuple[Tensor, ...]) -> Float[Tensor, "b h 1 e"] | None:
    """The output for one more token, which ``kept`` takes in, in place; None where no kernel does it."""
    if torch.is_grad_enabled() or call.sizes[2:] != (1, 1) or not call.causal or not kernels_take(call.q):
        return None
    if call.k.dtype != kept[0].dtype or not all(t.is_contiguous() for t in kept):
        return None
    from attnlab.kernels.select import select_step, supports_step

    d, e = call.k.shape[-1], call.v.shape[-1]
    if not supports_step(d, e, call.q.dtype, keys=mech.size, heads=call.groups):
        return None
    assert call.x is not None, "refused before"
    return select_step(
        call.q, call.k, call.v, call.x, mech._scorer(call), kept, slots=mech.slots, window=mech.window,
        block=mech.block, sinks=mech.sinks, tokens=TOKENS, scale=call.softmax_scale, key_visible=call.key_visible,
    )  # fmt: skip
