"""Causal slots and kernels by products of (length, length) matrices: at a few hundred tokens fastest on a GPU.

Slots: with E = exp(log alpha - its largest), Z = the sums of E over each prefix and A = tril(scale q k^T):
P = softmax((A E) / Z), W = tril((P / Z) E^T). Kernels: W = tril(phi(q) phi(k)^T), its rows divided by their sums.
The linear forms need less memory, but more launches.

``short_attention`` goes further, for translators of sentences: softmax attention without checks for empty rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attnlab.adapters.module_state import installed_in
from attnlab.attention import AttentionCall, Mechanism, grouped, hide_unseen, ungrouped
from attnlab.mechanisms._bounded.pooled import attend_pooled, pooling
from attnlab.mechanisms._bounded.slots import FLOOR, Control, SlotMechanism, one_hot
from attnlab.mechanisms._device import no_autocast
from attnlab.mechanisms._linear import LinearCache, divided
from attnlab.mechanisms.abc_random import AbcRandom
from attnlab.mechanisms.kernelized import Kernelized
from attnlab.mechanisms.rfa import Rfa
from attnlab.mechanisms.softmax import Softmax
from attnlab.mechanisms.t2r import T2R
from attnlab.models import Transformer
from attnlab.models.attention import attentions, put_mechanism
from attnlab.shapes import Float, Int

__all__ = ["DenseKernel", "DenseSlots", "ShortSoftmax", "dense_attention", "short_attention"]


# Sums of alpha below this have no reciprocal in float32.
LEAST = torch.finfo(torch.float32).tiny


class _Dense(Mechanism, nn.Module):
    """Another form of a mechanism, with the same reference and the same refusals."""

    def __init__(self, inner: Any) -> None:
        nn.Module.__init__(self)
        self.inner = inner

    def cannot(self) -> dict[str, str]:
        return self.inner.cannot()

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        return self.inner.reference(call)


class DenseSlots(_Dense):
    """A member of the family in the dense form; where that has none (a gate, a continued sequence) the member itself.

    A slot whose tokens so far weigh less than exp(-87) of its heaviest token anywhere counts as empty, in float32. That
    does not happen to controls as they are learned; the linear forms keep such tokens.
    """

    inner: SlotMechanism

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """The output; half precision stays half in the products."""
        continued = call.causal and (call.offset != 0 or call.sizes[2] != call.sizes[3])
        if continued or self.inner.normalise == "write" or getattr(self.inner, "gate", False):
            return self.inner(call)
        self.refuse(call)
        call = hide_unseen(call)
        with no_autocast(call.q):
            c = _control(self.inner, call)
            if not call.causal:
                return attend_pooled(call, pooling(c, self.inner.normalise, sparse=self.inner.sparse))
            E, Z = _written(c, call.q.dtype)
        return self._causal(call, E, Z)

    def _share(self, Z: Tensor, empty: Tensor) -> Tensor:
        """What a slot is multiplied by when it is read: 1 / Z, or 1 where alpha is taken as it is; empty ones 0."""
        if self.inner.normalise == "none":
            return (~empty).to(Z.dtype)
        # Not 1 / Z, whose gradient holds 1 / Z^2: that overflows where a slot has little in it yet.
        return (-Z.masked_fill(empty, 1).log()).exp().masked_fill(empty, 0)

    def _causal(self, call: AttentionCall, E: Tensor, Z: Tensor) -> Tensor:
        past = torch.ones(call.sizes[2:], dtype=torch.bool, device=call.q.device).tril()
        q, k, v = grouped(call.q, call.groups), call.k.unsqueeze(2), call.v.unsqueeze(2)
        E, Z = E.unsqueeze(2), Z.unsqueeze(2)
        A = (call.softmax_scale * q @ k.mT).masked_fill(~past, 0)
        empty = Z < LEAST
        share = self._share(Z, empty)
        s = ((A @ E) * share).masked_fill(empty, FLOOR)
        P = s.float().softmax(-1).masked_fill(empty, 0) * share
        W = (P.to(E.dtype) @ E.mT).masked_fill(~past, 0)
        return ungrouped(W.to(v.dtype) @ v).to(call.q.dtype)


class DenseKernel(_Dense):
    """A kernel with a feature map (RFA, T2R, elu) in the dense form where it is causal."""

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """The output; features are made in float32 and multiplied in the precision of the call."""
        plain = call.causal and not call.offset and call.key_visible is None and call.sizes[2] == call.sizes[3]
        if not plain or getattr(self.inner, "gate", False):
            return self.inner(call)
        cache: LinearCache = self.inner.make_cache(call.sizes[0], 0)
        phi, phi_k = cache.maps(call)
        past = torch.ones(call.sizes[2:], dtype=torch.bool, device=call.q.device).tril()
        with no_autocast(call.q):
            q, k = phi(grouped(call.q, call.groups)).to(call.q.dtype), phi_k(call.k).unsqueeze(2).to(call.q.dtype)
        kappa = (q @ k.mT).masked_fill(~past, 0)
        total = kappa.sum(-1, keepdim=True, dtype=torch.float32)
        return ungrouped(divided(kappa @ call.v.unsqueeze(2), total, least=cache.least)).to(call.q.dtype)


class ShortSoftmax(Softmax):
    """Softmax attention for finite keys, and for queries that see at least one: hidden keys only lose their scores."""

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """SDPA; a causal call has no padding, or has it at the end, after every token that attends."""
        seen = None if call.causal or call.key_visible is None else call.key_visible[:, None, None, :]
        return scaled_dot_product_attention(
            call.q, call.k, call.v, attn_mask=seen, is_causal=call.causal, scale=call.softmax_scale
        )


def _control(mech: SlotMechanism, call: AttentionCall) -> Control:
    """The control in float32; padding writes nothing."""
    b, n_k = call.k.shape[0], call.k.shape[2]
    seen = torch.ones(b, n_k, dtype=torch.bool, device=call.q.device) if call.key_visible is None else call.key_visible
    if isinstance(mech, AbcRandom) and call.key_visible is None:
        c = _drawn(mech, call)
    else:
        c = mech.control(call, seen.cumsum(-1) - 1)
    log = c.log.float()
    if call.key_visible is not None:
        log = log.masked_fill(~seen[:, None, :, None], FLOOR)
    return replace(c, log=log)


def _written(c: Control, dtype: torch.dtype) -> tuple[Float[Tensor, "b g k n"], Float[Tensor, "b g k n"]]:
    """(alpha up to a factor for each slot, its sums over prefixes; counts of what was written if alpha is signed)."""
    if c.value is None:
        log = c.log - c.log.detach().amax(2, keepdim=True)
        alpha = log.exp().masked_fill(c.log <= FLOOR / 2, 0).to(dtype)
        return alpha, _prefix_sums(alpha)
    written = c.log > FLOOR / 2
    return (c.value * written).to(dtype), _prefix_sums(written)


def _drawn(mech: AbcRandom, call: AttentionCall) -> Control:
    draw = (mech.slots, mech.seed, mech.stream, mech.one_draw)
    slot = _slots_of(draw, call.k.shape[1], call.k.shape[2], call.k.device)
    return Control(one_hot(slot.expand(call.k.shape[0], -1, -1), mech.slots, call.q.dtype))


@torch.compiler.assume_constant_result
def _slots_of(
    draw: tuple[int, int, int | None, bool], heads: int, length: int, device: torch.device
) -> Int[Tensor, "1 h k"]:
    # Not compiled: a graph would hash places in int32, which their products do not fit into.
    slots, seed, stream, one_draw = draw
    mech = AbcRandom(slots=slots, seed=seed, stream=stream, one_draw=one_draw)
    return mech.slots_of(torch.arange(length, device=device)[None], heads)


def _prefix_sums(t: Tensor) -> Float[Tensor, "b g k n"]:
    # A product is faster than a scan here, and its gradient is one more product.
    n = t.shape[2]
    return torch.ones(n, n, device=t.device).tril() @ t.float()


@contextmanager
def dense_attention(model: nn.Module) -> Iterator[None]:
    """Inside, the model's slots and kernels run in the dense form; parameters stay where they are.

    The model is one of ours, or a Hugging Face model that was converted.
    """
    places: list[Any] = [*attentions(model), *(i for m in model.modules() if (i := installed_in(m)) is not None)]
    own = [place.mechanism for place in places]
    try:
        for place, mech in zip(places, own, strict=True):
            if isinstance(mech, SlotMechanism):
                put_mechanism(place, DenseSlots(mech))
            elif isinstance(mech, (Rfa, T2R)) or (isinstance(mech, Kernelized) and mech.kernel == "elu"):
                put_mechanism(place, DenseKernel(mech))
        yield
    finally:
        for place, mech in zip(places, own, strict=True):
            put_mechanism(place, mech)


@contextmanager
def short_attention(model: Transformer) -> Iterator[None]:
    """Inside, causal slots run in the dense form and softmax attention in the short one; the model stays as it is."""
    with dense_attention(model):
        for layer in attentions(model):
            if isinstance(layer.mechanism, DenseSlots) and layer.kind != "decoder":
                put_mechanism(layer, layer.mechanism.inner)
            elif isinstance(layer.mechanism, Softmax):
                put_mechanism(layer, ShortSoftmax())
        yield
