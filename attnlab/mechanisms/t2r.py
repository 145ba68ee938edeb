"""T2R: linear attention with learned ReLU features, the baseline that turns a transformer into an RNN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, grouped, hide_unseen, normalise, ungrouped, visible
from attnlab.fields import check_fields
from attnlab.mechanisms._linear import (
    FeatureMap,
    FeatureMechanism,
    LinearCache,
    StepMap,
    check_features,
    linear_attention,
    sums_bytes,
)
from attnlab.registry import register
from attnlab.shapes import Float

__all__ = ["T2R"]


@register("t2r", examples=("t2r:features=19",))
@dataclass(eq=False)
class T2R(FeatureMechanism, nn.Module):
    """kappa(q, k) = <phi(q), phi(k)> with phi(x) = relu(W x + b), learned for each KV head (Kasai et al., 2021b).

    The parameters are made at the first call, from ``seed``. Where all of a row's kappa are zero the output is zero.
    The scale of the softmax has no part: W learns its own.
    """

    features: int = 32
    seed: int = 0

    exempt = {
        "grouped_queries_equal_repeated_keys": "each key/value head has its own features, so repeating heads adds some"
    }

    def __post_init__(self) -> None:
        check_fields(self)
        check_features(self.features)
        nn.Module.__init__(self)
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        call = hide_unseen(call)
        of_queries = self._phi(grouped(call.q, call.groups), call, extra=1)
        kappa, seen = ungrouped(of_queries @ self._phi(call.k, call).unsqueeze(2).mT), visible(call)
        return normalise(kappa if seen is None else kappa.masked_fill(~seen, 0)).to(call.q.dtype)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """Linear in the keys."""
        return linear_attention(call, *self._maps(call))

    def make_cache(self, batch: int, capacity: int) -> LinearCache:
        """An empty past of constant size."""
        return LinearCache(batch, self._maps, step_map=lambda c: StepMap("relu", 1.0, *self._parameters_for(c)))

    def cache_bytes(self, *, length: int, d: int, e: int, dtype: torch.dtype) -> int:
        return sums_bytes(self.features, e, dtype)

    def _maps(self, call: AttentionCall) -> tuple[FeatureMap, FeatureMap]:
        return lambda t: self._phi(t, call, extra=1), lambda t: self._phi(t, call)

    def _phi(self, t: Tensor, call: AttentionCall, *, extra: int = 0) -> Tensor:
        """relu(W t + b); t is (b, g, k, d), or (b, g, r, q, d) with ``extra`` = 1."""
        weight, bias = self._parameters_for(call)
        kind = torch.promote_types(t.dtype, torch.float32)
        for _ in range(extra):
            weight, bias = weight.unsqueeze(1), bias.unsqueeze(1)
        return (t.to(kind) @ weight.to(kind).mT + bias.to(kind).unsqueeze(-2)).relu()

    def _parameters_for(self, call: AttentionCall) -> tuple[Float[Tensor, "g f d"], Float[Tensor, "g f"]]:
        shape = (call.k.shape[1], self.features, call.k.shape[3])
        if self.weight is None or self.bias is None:
            generator = torch.Generator("cpu").manual_seed(self.seed)
            start = torch.randn(shape, generator=generator, device="cpu") * max(1, shape[-1]) ** -0.5
            self.weight = nn.Parameter(start.to(call.q.device))
            self.bias = nn.Parameter(torch.zeros(shape[:2], device=call.q.device))
        if self.weight.shape != shape:
            raise ValueError(
                f"the features were made for (key/value heads, features, width) = {tuple(self.weight.shape)}, "
                f"this call needs {shape}; make a mechanism for each shape"
            )
        return self.weight, self.bias
