"""``python -m papers guidance-electra-arm``: one ELECTRA, guided or not, trained alone until it has left its plateau.

On the plateau the detector answers every token with the share of replaced ones, so that its loss is the entropy of that
share. Both are measured on held-out texts. The same command goes on after a kill.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.data import Blocks, MlmSource, TokenStore
from attnlab.data.tokenisers import Tokeniser
from attnlab.devices import best_device
from attnlab.guidance import Guidance, GuidanceTerm, guide
from attnlab.models import TransformerConfig
from attnlab.pretraining import pattern_tokens
from attnlab.training import Callback, Moment, Recipe, Schedule, Settings, every, read_metrics, train
from papers.common.compiling import compiled_on_gpu
from papers.common.row_store import Part
from papers.guidance.config import PAPER_LENGTH
from papers.guidance.electra_model import Electra, ElectraOutput, GeneratedTokens, ReplacedTokens
from papers.guidance.one_arm import PATTERNS

__all__ = ["ELECTRA_KEYS", "ELECTRA_NAME", "ELECTRA_NOTES", "LEFT", "ElectraArm", "train_electra"]

ELECTRA_NAME = "guidance-electra"
# The share of the plateau's loss below which a detector has left it: what is above may be noise of held-out batches.
LEFT = 0.95
ARM = ("guided", "lr", "seed")
ELECTRA_KEYS = {"arms": [*ARM], "curves": [*ARM, "step"]}
ELECTRA_NOTES = {
    "arms": "loss: the detector's, of a held-out token. plateau: the entropy of the share of replaced tokens, which a "
    "detector has that tells no tokens apart. left_at: updates until the loss is below 0.95 of it; empty: never.",
}
# Held-out batches of an evaluation.
HELD_OUT = 16


@dataclass(frozen=True)
class ElectraArm:
    """An ELECTRA: its sizes, whether it is guided, and how long it learns."""

    guided: bool
    lr: float
    seed: int = 0
    layers: int = 12
    width: int = 256
    heads: int = 4
    generator_width: int = 96
    length: int = 128
    tokens: int = 32_768
    steps: int = 16_000
    warmup: float = 0.1
    hold: float = 0.3
    # Of texts of 512 tokens, times fifty, since the detector's loss is.
    alpha0: float = 500.0
    fraction: float = 0.5
    evaluations: int = 40
    # On a GPU: the blocks as compiled graphs.
    compile: bool = True

    @property
    def name(self) -> str:
        """The arm in one word, as its folder is called."""
        return f"electra-{'ag' if self.guided else 'plain'}-lr{self.lr:g}-seed{self.seed}"

    @property
    def labels(self) -> dict[str, Any]:
        """The columns that name it."""
        return {column: getattr(self, column) for column in ARM}

    def guidance(self) -> Guidance:
        """The settings of guidance."""
        alpha0 = self.alpha0 * self.length / PAPER_LENGTH
        return Guidance(fraction=self.fraction, patterns=PATTERNS, alpha0=alpha0, hold=self.hold, steps=self.steps)

    def model(self, *, vocab: int) -> Electra:
        """The untrained model; arms of a seed start from the same weights."""
        torch.manual_seed(self.seed)
        config = TransformerConfig(
            kind="encoder", vocab=-(-vocab // 64) * 64, width=self.width, heads=self.heads, layers=self.layers,
            max_length=self.length, norm="post", embed_norm=True, head="none",
        )  # fmt: skip
        return Electra(config, generator_width=self.generator_width, generator_heads=self.heads)

    def settings(self) -> Settings:
        """The training."""
        return Settings(
            steps=self.steps,
            recipe=Recipe(lr=self.lr, betas=(0.9, 0.98)),
            schedule=Schedule("linear", warmup=round(self.warmup * self.steps)),
            seed=self.seed,
            evaluate_at=every(max(1, self.steps // self.evaluations), steps=self.steps),
            checkpoint_every=max(1, self.steps // 8),
            tokens=self.tokens,
        )


def train_electra(
    arm: ElectraArm, *, tokeniser: Tokeniser, stores: Mapping[str, TokenStore], run_dir: Path, part: Part
) -> None:
    """Train the arm, or go on with it, and note its row and its curve."""
    model = arm.model(vocab=tokeniser.vocab_size).to(best_device())
    with ExitStack() as stack:
        pulls: list[GuidanceTerm] = []
        for name, half in (("generator", model.generator), ("detector", model.discriminator)) if arm.guided else ():
            pull = stack.enter_context(guide(half, arm.guidance(), tokens=pattern_tokens(tokeniser)))
            pull.name = f"guidance-{name}"
            pulls.append(pull)
        stack.enter_context(compiled_on_gpu([model], wanted=arm.compile, losses=False))
        outcome = train(
            model,
            _source(arm, tokeniser, stores["train"], shuffle=True),
            terms=[GeneratedTokens(), ReplacedTokens(), *pulls],
            settings=arm.settings(),
            run_dir=run_dir,
            config={"arm": asdict(arm)},
            data={"tokens": {name: store.checksum() for name, store in stores.items()}},
            callbacks=[_Detector(_source(arm, tokeniser, stores["valid"], shuffle=False))],
            forward=lambda model, batch: model(batch["input_ids"], batch["labels"]),
            resume=True,
        )
    lines = [line for line in read_metrics(run_dir) if line["kind"] == "eval"]
    points = {line["step"]: line["values"] for line in lines}
    curve = [
        {"step": step, "loss": values["valid/detector"], "plateau": values["valid/plateau"]}
        for step, values in sorted(points.items())
    ]
    left = next((point["step"] for point in curve if point["loss"] < LEFT * point["plateau"]), None)
    part.extend("curves", [{**arm.labels, **point} for point in curve])
    part.row(
        "arms", **arm.labels, layers=arm.layers, width=arm.width, steps=outcome.step, tokens=outcome.step * arm.tokens,
        seconds=outcome.timing["seconds"], loss=curve[-1]["loss"], plateau=curve[-1]["plateau"], left_at=left,
    )  # fmt: skip


def _source(arm: ElectraArm, tokeniser: Tokeniser, store: TokenStore, *, shuffle: bool) -> MlmSource:
    blocks = Blocks(store, tokeniser.specials, length=arm.length, seed=arm.seed if shuffle else None)
    rows = arm.tokens // arm.length if shuffle else min(arm.tokens // arm.length, len(blocks))
    return MlmSource(blocks, rows, vocab_size=tokeniser.vocab_size, seed=arm.seed, shuffle=shuffle)


class _Detector(Callback):
    """The detector's loss of a held-out token, and what it is on the plateau."""

    def __init__(self, source: MlmSource) -> None:
        self.source = source

    @torch.no_grad()
    def on_evaluation(self, moment: Moment) -> Mapping[str, float]:
        device = next(moment.model.parameters()).device
        total = replaced = count = 0.0
        for step in range(min(HELD_OUT, self.source.steps_per_epoch)):
            batch = {name: t.to(device) for name, t in self.source.batch(step).items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                output: ElectraOutput = moment.model(batch["input_ids"], batch["labels"])
            loss = ReplacedTokens(weight_of=1.0)(moment.model, output, {}, 0)
            total, count = total + float(loss.total), count + float(loss.count)
            replaced += float(output.replaced.sum())
        share = min(max(replaced / count, 1e-6), 1 - 1e-6)
        plateau = -share * math.log(share) - (1 - share) * math.log(1 - share)
        return {"valid/detector": total / count, "valid/plateau": plateau}
