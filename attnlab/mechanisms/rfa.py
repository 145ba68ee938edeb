"""Random feature attention: linear attention with random Fourier features of the softmax kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from attnlab.attention import (
    AttentionCall,
    grouped,
    hide_unseen,
    repeat_groups,
    ungrouped,
    visible,
)
from attnlab.fields import check_fields
from attnlab.mechanisms._linear import (
    FeatureMechanism,
    Gate,
    LinearCache,
    StepMap,
    check_features,
    divided,
    linear_attention,
    sums_bytes,
)
from attnlab.registry import register
from attnlab.shapes import Float

__all__ = ["Rfa"]

# Where a gate's logit starts: a token's weight is halved after about a hundred others.
GATE = 5.0


@register("rfa", examples=("rfa:features=257", "rfa:features=257,gate=true", "rfa:features=31,least=1.0"))
@dataclass(eq=False)
class Rfa(FeatureMechanism, nn.Module):
    """phi(x) = F^-1/2 [sin(R x), cos(R x)] with R normal, so that <phi(q), phi(k)> estimates exp(-|q - k|^2 / 2).

    Queries and keys are first brought to length 1 (Peng et al., 2021), which makes this exp(<q, k>) up to a factor
    that cancels, and leaves no part to the softmax's scale. Estimates may be negative where F is small, so W is a
    distribution only in expectation. The same R serves every head, batch and call.

    ``gate`` favours recent tokens: with gamma_t = sigmoid(w x_t + b), learned for each KV head, the sums over keys are
    S_t = gamma_t S_{t-1} + (1 - gamma_t) phi(k_t) (x) v_t.

    ``least``: a row is divided by its sum or by this, whichever is more, as the authors' code does. Where few keys are
    seen, estimates of either sign nearly cancel, and training does not survive a division by that. A key that equals
    the query weighs 1.
    """

    features: int = 64
    gate: bool = False
    seed: int = 0
    least: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_features(self.features)
        if not self.least >= 0:
            raise ValueError(f"least must be a number of at least 0, got {self.least!r}")
        if self.least and self.gate:
            raise ValueError("least is in keys and a gate makes means of them; give one of the two")
        nn.Module.__init__(self)
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if self.gate:
            why = "each key/value head has its own gate, so repeating heads adds some"
            self.exempt = {"grouped_queries_equal_repeated_keys": why}

    def cannot(self) -> dict[str, str]:
        refused = super().cannot()
        if self.gate:
            refused["no-x"] = "the gate is computed from what the keys were made from; pass x="
        return refused

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        call = hide_unseen(call)
        q, k = self._phi(grouped(call.q, call.groups)), self._phi(call.k).unsqueeze(2)
        kappa, seen = ungrouped(q @ k.mT), visible(call)
        gate = self._gate(call)
        if gate is not None and call.k.shape[2]:
            # The product of gamma from a key to the reader, up to a factor of the reader's that cancels.
            stays = gate.stays if call.key_visible is None else gate.stays.masked_fill(~call.key_visible[:, None], 0)
            before = stays.double().cumsum(-1)
            at = before[:, :, -1:, None]
            if call.causal:
                last = torch.arange(q.shape[3], device=q.device) + call.offset
                at = before[:, :, last.clamp(0, before.shape[-1] - 1), None]
            since = (at - before.unsqueeze(2)).clamp(max=0).exp().to(kappa) * gate.enters.unsqueeze(2).to(kappa)
            kappa = kappa * repeat_groups(since, call.groups)
        kappa = kappa if seen is None else kappa.masked_fill(~seen, 0)
        return divided(kappa, kappa.sum(-1, keepdim=True), least=self.least).to(call.q.dtype)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """Linear in the keys."""
        return linear_attention(call, self._phi, gate=self._gate(call), least=self.least)

    def make_cache(self, batch: int, capacity: int) -> LinearCache:
        """An empty past of constant size."""
        return LinearCache(
            batch, lambda _: (self._phi, self._phi), self._gate, least=self.least, step_map=self._step_map
        )

    def cache_bytes(self, *, length: int, d: int, e: int, dtype: torch.dtype) -> int:
        return sums_bytes(2 * self.features, e, dtype)

    def _step_map(self, call: AttentionCall) -> StepMap:
        R = _directions(self.features, call.q.shape[-1], self.seed, call.q.device, torch.float32)
        return StepMap("waves", self.features**-0.5, R)

    def _gate(self, call: AttentionCall) -> Gate | None:
        if not self.gate:
            return None
        x, groups = hide_unseen(call).x, call.k.shape[1]
        assert x is not None, "refused before"
        if x.shape[1] != call.k.shape[2]:
            raise ValueError(
                f"the gate needs the input of every key, got x for {x.shape[1]} of {call.k.shape[2]}; "
                "decode with make_cache(), which keeps the sums and not the keys"
            )
        if self.weight is None or self.bias is None:
            self.weight = nn.Parameter(torch.zeros(groups, x.shape[-1], device=x.device))
            self.bias = nn.Parameter(torch.full((groups,), GATE, device=x.device))
        if self.weight.shape != (groups, x.shape[-1]):
            raise ValueError(
                f"the gate was made for (key/value heads, width of x) = {tuple(self.weight.shape)}, this call needs "
                f"{(groups, x.shape[-1])}; make a mechanism for each shape"
            )
        kind = torch.promote_types(x.dtype, torch.float32)
        u = (x.to(kind) @ self.weight.to(kind).mT + self.bias.to(kind)).mT
        return Gate(logsigmoid(u), (-u).sigmoid())

    def _phi(self, t: Float[Tensor, "... d"]) -> Float[Tensor, "... f"]:
        kind = torch.promote_types(t.dtype, torch.float32)
        R = _directions(self.features, t.shape[-1], self.seed, t.device, kind)
        t = t.to(kind)
        length = torch.linalg.vector_norm(t, dim=-1, keepdim=True)
        # A vector of zeros stays one, and has a gradient of order 1 instead of one over some epsilon.
        angle = (t / length.masked_fill(length == 0, 1)) @ R.mT
        return torch.cat([angle.sin(), angle.cos()], -1) * self.features**-0.5


def _directions(features: int, width: int, seed: int, device: torch.device, kind: torch.dtype) -> Tensor:
    """R; a compiled graph holds it as a constant."""
    return _drawn(features, width, seed, device, kind)


# What torch.compiler.assume_constant_result does, which imports the compiler for it.
vars(_directions)["_dynamo_marked_constant"] = True


@functools.lru_cache(maxsize=64)
def _drawn(features: int, width: int, seed: int, device: torch.device, kind: torch.dtype) -> Tensor:
    """R, drawn once and then kept on the device: a copy from the host at each call would make a GPU wait."""
    generator = torch.Generator("cpu").manual_seed(seed)
    # Not an inference tensor even if the first call was made in inference mode.
    with torch.inference_mode(False):
        return torch.randn(features, width, generator=generator, dtype=torch.float64, device="cpu").to(device, kind)
