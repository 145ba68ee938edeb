"""Part (c): replaced-token detection with and without guidance of generator and discriminator (Figure 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from attnlab.data import Blocks, MlmSource, TokenStore
from attnlab.data.tokenisers import Tokeniser
from attnlab.devices import best_device
from attnlab.guidance import GuidanceTerm, guide
from attnlab.patterns import SpecialTokens
from attnlab.pretraining import pattern_tokens
from attnlab.provenance import provenance
from attnlab.training.side_by_side import lanes
from papers.common.row_store import Part
from papers.guidance.config import Arm, MlmConfig
from papers.guidance.electra_model import Electra, ElectraOutput, GeneratedTokens, ReplacedTokens
from papers.guidance.learner import GuidedLearner, train_guided
from papers.guidance.mlm import encoder, ended, learner, thinned

__all__ = ["ElectraConfig", "run_electra"]


@dataclass(frozen=True)
class ElectraConfig:
    """Our ELECTRA: the masked LM's discriminator, and a generator a third as wide."""

    base: MlmConfig = field(default_factory=MlmConfig)
    generator_width: int = 96
    generator_heads: int = 4
    # alpha0 is scaled, since the detector's loss is multiplied by fifty.
    alpha_scale: float = 50.0


class _Fed(Electra):
    """Electra as the learner calls a model: its labels are among the inputs, under another name."""

    def forward(self, input_ids: torch.Tensor, masked_tokens: torch.Tensor) -> ElectraOutput:  # type: ignore[override]
        return super().forward(input_ids, masked_tokens)


@dataclass(frozen=True)
class _Renamed:
    source: MlmSource

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        batch = self.source.batch(step)
        return {"input_ids": batch["input_ids"], "masked_tokens": batch["labels"]}


def run_electra(
    config: ElectraConfig,
    arms: Sequence[Arm],
    *,
    tokeniser: Tokeniser,
    stores: Mapping[str, TokenStore],
    part: Part,
    seconds: float | None = None,
) -> None:
    """Train every arm on the same batches; rows of ``electra_runs`` and ``electra_curves``."""
    base, device, tokens = config.base, best_device(), pattern_tokens(tokeniser)
    part.fact("provenance", provenance())
    part.fact("config", asdict(config))
    blocks = Blocks(stores["train"], tokeniser.specials, length=base.length, seed=base.seed)
    source = _Renamed(MlmSource(blocks, base.batch, vocab_size=tokeniser.vocab_size, seed=base.seed))
    with ExitStack() as stack:
        learners = {
            arm.name: _learner(config, arm, tokeniser.vocab_size, tokens, lane, stack, device)
            for arm, lane in zip(arms, lanes(len(arms)), strict=True)
        }
        steps, spent = train_guided([(source, learners.values())], steps=base.steps, seconds=seconds)
        for arm in arms:
            curve = learners[arm.name].curves()
            labels = {"layers": base.layers, "width": base.width, "arm": arm.name, "seed": base.seed, "steps": steps}
            labels |= {name: getattr(arm, name) for name in ("guided", "lr", "warmup", "alpha0")}
            labels |= {"patterns": arm.guided_patterns}
            part.row("electra_runs", **labels, seconds=round(spent, 1), **ended(curve))
            part.row("electra_curves", **labels, **thinned(curve))


def _learner(
    config: ElectraConfig,
    arm: Arm,
    vocab: int,
    tokens: SpecialTokens,
    lane: tuple[Any, Any],
    stack: ExitStack,
    device: torch.device,
) -> GuidedLearner:
    base = config.base
    torch.manual_seed(base.seed)
    model = _Fed(
        encoder(base, vocab=vocab, head="none"),
        generator_width=config.generator_width,
        generator_heads=config.generator_heads,
    ).to(device)
    terms: list[GuidanceTerm] = []
    if arm.guided:
        guidance = base.guidance(arm)
        terms = [
            stack.enter_context(guide(half, guidance, tokens=tokens)) for half in (model.generator, model.discriminator)
        ]
    return learner(base, arm, model, [GeneratedTokens(), ReplacedTokens()], terms, lane)
