"""Random feature attention: linear attention with random Fourier features of the softmax kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from attnlab.attention import AttentionCall, Mechanism, grouped, hide_unseen, normalise, ungrouped, visible
from attnlab.mechanisms._linear import LinearCache, linear_attention
from attnlab.registry import register
from attnlab.shapes import Float

__all__ = ["Rfa"]


@register("rfa", examples=("rfa:features=257",))
@dataclass(frozen=True)
class Rfa(Mechanism):
    """phi(x) = F^-1/2 [sin(R x), cos(R x)] with R normal, so that <phi(q), phi(k)> estimates exp(-|q - k|^2 / 2).

    Queries and keys are first brought to length 1 (Peng et al., 2021), which makes this exp(<q, k>) up to a factor
    that cancels, and leaves no part to the softmax's scale. Estimates may be negative where F is small, so W is a
    distribution only in expectation. The same R serves every head, batch and call. The paper's gate is not here.
    """

    features: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.features, bool) or not isinstance(self.features, int) or self.features < 1:
            raise ValueError(f"features must be an int of at least 1, got {self.features!r}")

    def cannot(self) -> dict[str, str]:
        return {
            "bias": "features of q and of k alone have no place for a bias of the pair",
            "mask": "the sums over keys are shared by all queries, or by prefixes; a general mask needs one for each",
        }

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        call = hide_unseen(call)
        q, k = self._phi(grouped(call.q, call.groups)), self._phi(call.k).unsqueeze(2)
        kappa, seen = ungrouped(q @ k.mT), visible(call)
        return normalise(kappa if seen is None else kappa.masked_fill(~seen, 0)).to(call.q.dtype)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """Linear in the keys."""
        return linear_attention(call, self._phi)

    def make_cache(self, batch: int, _capacity: int) -> LinearCache:
        """An empty past of constant size."""
        return LinearCache(batch, lambda call: (self._phi, self._phi))

    def _phi(self, t: Float[Tensor, "... d"]) -> Float[Tensor, "... f"]:
        kind = torch.promote_types(t.dtype, torch.float32)
        R = _directions(self.features, t.shape[-1], self.seed, t.device, kind)
        angle = normalize(t.to(kind), dim=-1) @ R.mT
        return torch.cat([angle.sin(), angle.cos()], -1) * self.features**-0.5


@functools.lru_cache(maxsize=64)
def _directions(features: int, width: int, seed: int, device: torch.device, kind: torch.dtype) -> Tensor:
    """R, drawn once and then kept on the device: a copy from the host at each call would make a GPU wait."""
    generator = torch.Generator("cpu").manual_seed(seed)
    # Not an inference tensor even if the first call was made in inference mode.
    with torch.inference_mode(False):
        return torch.randn(features, width, generator=generator, dtype=torch.float64, device="cpu").to(device, kind)
