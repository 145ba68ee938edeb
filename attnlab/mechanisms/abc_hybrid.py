"""ABC with exact neighbours: the last tokens and the first stand as they are, all others are written into slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, group_scores, grouped, hide_unseen, ungrouped
from attnlab.fields import check_fields, check_int
from attnlab.mechanisms._bounded.continued import check_window, first_exact, numbered_keys
from attnlab.mechanisms._bounded.hybrid_cache import HybridCache, HybridMechanism, attend_call
from attnlab.mechanisms._bounded.slot_memory import FLOOR
from attnlab.mechanisms._device import no_autocast
from attnlab.registry import register
from attnlab.shapes import Float

__all__ = ["AbcHybrid"]

CONTROLS = ("x", "key")
# log alpha stays within these bounds: then sums of alpha stay in the range of float32.
LEAST_SHARE = -40.0
LARGEST_LOGIT = 20.0


@register(
    "abc-hybrid",
    examples=(
        "abc-hybrid:slots=3,window=2,sinks=1,block=2",
        "abc-hybrid:slots=3,window=4,sinks=1,block=2,mass=false,control=x",
        "abc-hybrid:slots=3,window=3,sinks=0,block=3,control=x",
        "abc-hybrid:slots=3,window=2,sinks=1,block=1",
        "abc-hybrid:slots=2,window=1,sinks=2,block=1,mass=false",
        "abc-hybrid:slots=0,window=2,sinks=2,block=1",
    ),
)
@dataclass(eq=False)
class AbcHybrid(HybridMechanism, nn.Module):
    """W = softmax([q k_E, q K~ + log m]) [I_E; Phi^T], E the first and the last tokens (ABC, Eqs. 3-5 beside keys).

    E are the first ``sinks`` tokens and at most the last ``window``. Tokens leave the window ``block`` at a time: while
    the newest has place p, it begins at s(p) = max(0, floor(p / block) block - (window - block)). Every other token
    before s(p) is written into the slots:

        alpha_i = softmax_s(u_i),  u_i = W_k k_i + b,  m = sum_i alpha_i,  K~ = sum_i alpha_i (x) k_i / m,

    and V~ alike. A token is shared out among slots, so m counts the tokens of a slot, and a slot of m equal keys gets
    the attention that m keys would. A slot that nothing was written into is not read. ``mass=false`` is abc-mlp's read:
    alpha_i = exp(u_i), and no log m.

    ``control`` is "key" or "x" (u_i = W_phi x_i + b; the cache then also holds what the window's tokens will write).

    Without causality all queries read what is kept after the last token. ``tied`` layers of a model share W_phi.
    """

    traces = True

    slots: int = 64
    window: int = 64
    sinks: int = 4
    block: int = 16
    control: str = "key"
    mass: bool = True
    tied: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("slots", "window", "sinks"):
            check_int(name, getattr(self, name), least=0)
        check_int("block", self.block, least=1)
        if self.slots + self.window == 0:
            raise ValueError("slots and window are both 0, so a token could not see itself; give one of them")
        check_window(self.window, self.block)
        if self.control not in CONTROLS:
            raise ValueError(f"control must be one of {', '.join(CONTROLS)}, got {self.control!r}")
        nn.Module.__init__(self)
        self.tied_across_layers = self.tied
        self.exempt = {}
        if self.slots:
            why = "each key/value head has its own W_phi, so repeating heads adds to it"
            self.exempt["grouped_queries_equal_repeated_keys"] = why
        self.weight: nn.Parameter | None
        self.key_weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        for name in ("weight", "key_weight", "bias"):
            self.register_parameter(name, None)

    def cannot(self) -> dict[str, str]:
        reasons = {
            "mask": "all queries of a prefix read one memory; a general mask needs a memory for each query",
            "bias": "a bias of one query and one key cannot pass through slots that hold many keys; drop it (convert "
            "has bias='drop'), or convert cross-attention alone (kinds=('cross',)), which has none",
        }
        if not self.by_key:
            reasons["no-x"] = (
                "the control is computed from what the keys were made from; pass x=, or choose control='key'"
            )
        return reasons

    @property
    def by_key(self) -> bool:
        """Whether the keys alone make the control."""
        return self.control == "key" or not self.slots

    def is_exact(self, call: AttentionCall) -> bool:
        return self.window >= call.k.shape[2]

    def bytes_read(self, call: AttentionCall) -> float:
        return min(1.0, (self.slots + self.window + self.sinks) / max(1, call.k.shape[2]))

    def least_bytes(self, call: AttentionCall) -> int:
        """The keys and values of every slot, and the control of every key."""
        b, g, n_k, d = call.k.shape
        return 4 * b * g * self.slots * (d + call.v.shape[3] + n_k)

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        call = hide_unseen(call)
        kind = torch.promote_types(call.q.dtype, torch.float32)
        k, groups = call.k.to(kind), call.groups
        if call.k.shape[2] == 0 or call.q.shape[2] == 0:
            return call.q.new_zeros(call.sizes)
        with no_autocast(call.q):
            places, newest = numbered_keys(call)
            rules = self.rules(call, k.shape[2])
            hidden = torch.zeros_like(places, dtype=torch.bool) if call.key_visible is None else ~call.key_visible
            never = (hidden | (places < self.sinks))[:, None, :, None]
            log = self.log_alpha(call).masked_fill(never, FLOOR)
            s = group_scores(grouped(call.q, groups), k, scale=call.softmax_scale)
            rows = []
            for t in range(call.q.shape[2]):
                p = newest[:, t, None]
                start = first_exact(p, rules)
                exact = ~hidden & (places <= p) & ((places >= start) | (places < self.sinks))
                gone = (~hidden & (places < start) & (places >= self.sinks))[:, None, :, None]
                phi, bonus, empty = self._contents(log.masked_fill(~gone, FLOOR))
                of_keys = s[..., t, :].masked_fill(~exact[:, None, None], FLOOR)
                of_slots = s[..., t, :].masked_fill(~gone[:, :, None, :, 0], 0) @ phi.mT + bonus.unsqueeze(2)
                of_slots = of_slots.masked_fill(empty.unsqueeze(2), FLOOR)
                P = torch.cat([of_keys, of_slots], -1).softmax(-1)
                to_keys = P[..., : k.shape[2]].masked_fill(~exact[:, None, None], 0)
                to_slots = P[..., k.shape[2] :].masked_fill(empty.unsqueeze(2), 0)
                rows.append(to_keys + to_slots @ phi)
        return ungrouped(torch.stack(rows, 3)).to(call.q.dtype)

    def _contents(self, log: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Phi^T (b, g, n, k) of the keys that are gone, what is added to each slot's score, and which are empty."""
        unwritten = log <= FLOOR / 2
        z, empty = log.logsumexp(2), unwritten.all(2)
        phi = log.softmax(2).masked_fill(unwritten, 0).mT
        return phi, z if self.mass else torch.zeros_like(z), empty

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """Time and memory linear in the keys, forward and backward."""
        return attend_call(self, call, None, keep=False)[0]

    def make_cache(self, batch: int, capacity: int) -> HybridCache:
        """An empty past of constant size."""
        return HybridCache(batch)

    def cache_bytes(self, *, length: int, d: int, e: int, dtype: torch.dtype) -> int:
        """Sinks and window, slots and their masses in float32, what the window's tokens will write, and a count."""
        full = torch.promote_types(dtype, torch.float32).itemsize
        keys = (self.sinks + self.window) * (d + e) * dtype.itemsize
        later = 0 if self.by_key else self.window * self.slots * full
        return keys + self.slots * (d + e + 1) * full + later + 8

    def log_alpha(self, call: AttentionCall) -> Float[Tensor, "b g k n"]:
        """What the call's keys write, in at least float32."""
        kind = torch.promote_types(call.k.dtype, torch.float32)
        if not self.slots:
            return call.k.new_zeros(*call.k.shape[:3], 0, dtype=kind)
        self._make_parameters(call)
        # A large key is as good as a larger one; infinities would be NaN.
        u = self._logits(call, kind).clamp(-1e4, 1e4)
        if self.mass:
            return u.log_softmax(-1).clamp(min=LEAST_SHARE)
        # Less a constant, which the read divides out: alpha is at most 1.
        return LARGEST_LOGIT * torch.tanh(u / LARGEST_LOGIT) - LARGEST_LOGIT

    def control_of_keys(self, call: AttentionCall) -> tuple[Tensor, Tensor] | None:
        if not self.slots or not self.by_key:
            return None
        self._make_parameters(call)
        assert self.key_weight is not None
        assert self.bias is not None
        return self.key_weight, self.bias

    def _logits(self, call: AttentionCall, kind: torch.dtype) -> Float[Tensor, "b g k n"]:
        """W_k k + b, or W_phi x + b."""
        weight = self.key_weight if self.by_key else self.weight
        assert weight is not None
        assert self.bias is not None
        # Layers that share this control may be on several devices.
        matrix, bias = (t.to(call.k.device, kind) for t in (weight, self.bias))
        if self.by_key:
            return bias.unsqueeze(1) + call.k.to(kind) @ matrix.mT
        assert call.x is not None, "refused before"
        u = (call.x.to(kind) @ matrix.flatten(0, 1).mT).unflatten(-1, matrix.shape[:2]).transpose(1, 2)
        return bias.unsqueeze(1) + u

    def _make_parameters(self, call: AttentionCall) -> None:
        """Make the parameters at the first call, and check at every call that they are for its shapes."""
        shapes = self._shapes(call)
        if self.bias is None:
            generator = torch.Generator("cpu").manual_seed(self.seed)
            for name, shape in shapes.items():
                start = torch.zeros(shape)
                if name != "bias":
                    # Logits of order 1 for inputs of order 1: slots that start alike would stay alike.
                    start = torch.randn(shape, generator=generator, device="cpu") * max(1, shape[-1]) ** -0.5
                setattr(self, name, nn.Parameter(start.to(call.q.device)))
        for name, shape in shapes.items():
            made = tuple(getattr(self, name).shape)
            if made != shape:
                raise ValueError(
                    f"the {name} of the control was made for (key/value heads, slots, width) = {made}, this call needs "
                    f"{shape}; make a mechanism for each shape"
                )

    def _shapes(self, call: AttentionCall) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name."""
        x, (_, g, n_k, width) = call.x, call.k.shape
        shapes: dict[str, tuple[int, ...]] = {"bias": (g, self.slots)}
        if self.by_key:
            return shapes | {"key_weight": (g, self.slots, width)}
        assert x is not None, "refused before"
        if x.shape[1] != n_k:
            raise ValueError(
                f"abc-hybrid needs the input of every key, got x for {x.shape[1]} of {n_k}; decode with "
                "make_cache(), which keeps the slots and not the keys"
            )
        return shapes | {"weight": (g, self.slots, x.shape[-1])}
