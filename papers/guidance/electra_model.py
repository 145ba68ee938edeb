"""ELECTRA (Clark et al., 2020): a generator fills masked places, a discriminator detects the replaced tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu

from attnlab.loss import Loss
from attnlab.models.config import TransformerConfig
from attnlab.models.transformer import Transformer
from attnlab.models.vocabulary import IGNORED, at_least_float32
from attnlab.shapes import Float, Int

__all__ = ["Electra", "ElectraOutput", "GeneratedTokens", "ReplacedTokens"]


class ElectraOutput(NamedTuple):
    """The outputs of the generator and of the discriminator for a batch."""

    # -log p of each masked token by the generator, and which of the places held one.
    nll: Float[Tensor, "b t"]
    masked: Float[Tensor, "b t"]
    # The text with the generator's tokens in it, which of its tokens are not the original ones, and the discriminator's
    # logits of that.
    tokens: Int[Tensor, "b q"]
    replaced: Float[Tensor, "b q"]
    logits: Float[Tensor, "b q"]


class Electra(nn.Module):
    """Replaced-token detection: sample x^ from the generator at masked places, and detect where x^_t != x_t.

    Generator and discriminator have token vectors of their own, and no gradient passes through the sampling. ``labels``
    are the masked tokens, -100 elsewhere.

    >>> config = TransformerConfig(kind="encoder", vocab=11, width=8, heads=2, layers=1)
    >>> model = Electra(config, generator_width=4, generator_heads=1)
    >>> out = model(torch.tensor([[1, 2, 3]]), torch.tensor([[-100, 5, -100]]))
    >>> out.tokens.shape, out.replaced[0, 0].item()
    (torch.Size([1, 3]), 0.0)
    """

    def __init__(self, config: TransformerConfig, *, generator_width: int, generator_heads: int) -> None:
        super().__init__()
        if config.kind != "encoder":
            raise ValueError(
                f"generator and discriminator of ELECTRA are encoders, got a config of kind {config.kind!r}"
            )
        self.config = config
        self.discriminator = Transformer(replace(config, head="none"))
        small = replace(config, width=generator_width, heads=generator_heads, hidden=4 * generator_width, head="mlm")
        self.generator = Transformer(small)
        self.dense, self.decide = nn.Linear(config.width, config.width), nn.Linear(config.width, 1)
        for layer in (self.dense, self.decide):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(
        self, input_ids: Int[Tensor, "b q"], labels: Int[Tensor, "b q"], attention_mask: Tensor | None = None
    ) -> ElectraOutput:
        """Fill, sample, detect; masked tokens have a fixed number of places in a row, a quarter of it and 16 more."""
        n = labels.shape[1]
        at = (labels != IGNORED).int().topk(min(n, n // 4 + 16), dim=1).indices
        wanted = labels.gather(1, at)
        masked = wanted != IGNORED
        seen = self.generator(input_ids, attention_mask=attention_mask)
        hidden = seen.hidden.gather(1, at[..., None].expand(-1, -1, seen.hidden.shape[-1]))
        head: Any = self.generator.head
        scores = at_least_float32(head(hidden))
        nll = nn.functional.cross_entropy(
            scores.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none"
        ).view_as(wanted)
        with torch.no_grad():
            # The greatest of scores with Gumbel noise is a sample of their softmax.
            noise = -torch.empty_like(scores).exponential_().log()
            drawn = (scores + noise).argmax(-1)
            real = torch.where(labels == IGNORED, input_ids, labels)
            tokens = real.scatter(1, at, torch.where(masked, drawn, real.gather(1, at)))
            replaced = (tokens != real).float()
        states = self.discriminator(tokens, attention_mask=attention_mask).hidden
        logits = self.decide(gelu(self.dense(states))).squeeze(-1)
        return ElectraOutput(nll, masked.float(), tokens, replaced, at_least_float32(logits))


@dataclass(frozen=True)
class GeneratedTokens:
    """-log p(the masked token) by the generator."""

    name: str = "generated-tokens"

    def __call__(self, model: nn.Module, output: ElectraOutput, batch: Mapping[str, Any], step: int) -> Loss:
        return Loss((output.nll * output.masked).sum(), output.masked.sum())


@dataclass(frozen=True)
class ReplacedTokens:
    """The discriminator's binary cross-entropy over all visible tokens, times ``weight_of`` (50 in the paper)."""

    name: str = "replaced-tokens"
    weight_of: float = 50.0

    def __call__(self, model: nn.Module, output: ElectraOutput, batch: Mapping[str, Any], step: int) -> Loss:
        losses = binary_cross_entropy_with_logits(output.logits, output.replaced, reduction="none")
        mask = batch.get("attention_mask")
        visible = torch.ones_like(losses) if mask is None else mask.to(losses)
        return Loss(self.weight_of * (losses * visible).sum(), visible.sum())
