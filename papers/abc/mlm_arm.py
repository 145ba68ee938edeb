"""``python -m papers abc-mlm-arm``: one row of Table 4: converted, continued alone, and fine-tuned for whole epochs.

The same command goes on after a kill, and adds its rows to the results file, whose models must have the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnlab.adapters import load_model
from attnlab.data import Blocks, MlmSource
from attnlab.devices import best_device
from attnlab.models import Transformer
from attnlab.training import Callback, Moment, Outcome, Schedule, Settings, every, train
from papers.abc.arms import held_out_curve
from papers.abc.encoder import SomeMasked, from_bert
from papers.abc.lm_config import Variant
from papers.abc.mlm import VARIANTS, AbcMlmConfig, converted, dense, fine_tune, masked_loss
from papers.common.compiling import compiled_on_gpu
from papers.common.row_store import Part
from papers.common.wiki_corpus import WikiCorpus

__all__ = ["KEPT", "MlmArm", "run_arm"]

# Tables of the results file that no training makes.
KEPT = ("speed", "speed_longer", "parameters")


@dataclass(frozen=True)
class MlmArm:
    """A row of Table 4 by its key, such as ABC_MLP-128, and for how many tokens it is continued, if it is."""

    key: str
    config: AbcMlmConfig
    tokens: int = 74_000_000
    continued: bool = True
    evaluations: int = 20

    def __post_init__(self) -> None:
        if self.key not in (known := [v.key for v in VARIANTS]):
            raise ValueError(f"Table 4 has no row {self.key!r}; it has {', '.join(known)}")

    @property
    def name(self) -> str:
        """The arm in one word."""
        return self.key if self.continued else f"{self.key}-as-converted"

    @property
    def variant(self) -> Variant:
        """The row."""
        return next(v for v in VARIANTS if v.key == self.key)

    @property
    def steps(self) -> int:
        """The updates of continued pretraining."""
        return max(1, round(self.tokens / (self.config.batch * self.config.length)))

    def as_dict(self) -> dict[str, Any]:
        """What all arms of a results file share."""
        return {**asdict(self.config), "tokens": self.tokens}

    def settings(self) -> Settings:
        """The training."""
        return Settings(
            steps=self.steps,
            recipe=self.config.recipe,
            schedule=Schedule("linear", warmup=min(self.config.warmup, self.steps // 10)),
            seed=self.config.seed,
            evaluate_at=every(max(1, self.steps // self.evaluations), steps=self.steps),
            checkpoint_every=max(1, self.steps // 8),
            watch="valid/loss",
            tokens=self.config.batch * self.config.length,
        )


def run_arm(arm: MlmArm, *, corpus: Path, glue: Path, model: Path, work: Path, part: Part) -> None:
    """Convert, continue and fine-tune the arm; tasks that ``part`` has already are left out."""
    loaded, stores, v = load_model(model), WikiCorpus(corpus), arm.variant
    encoder = converted(from_bert(loaded.model).to(best_device()), v)
    labels: dict[str, Any] = {"model": v.model, "n": v.n, "continued": arm.continued}
    if arm.continued:
        outcome = _continue(arm, encoder, stores, work / "runs" / arm.key)
        points = held_out_curve(work / "runs" / arm.key, "valid/loss")
        part.extend("curves", [{"model": v.model, "n": v.n, "seed": arm.config.seed, **point} for point in points])
        part.row(
            "training", part=f"continued {arm.key}", steps=outcome.step,
            tokens=outcome.step * arm.config.batch * arm.config.length, seconds=outcome.timing["seconds"],
        )  # fmt: skip
    with dense([encoder]):
        part.row("pretraining", **labels, loss=masked_loss(encoder, stores, arm.config))
    for task in arm.config.tasks:
        if not part.has("table_4", **labels, task=task):
            fine_tune(
                task, arm.config, {(v, arm.continued): encoder}, loaded.tokenizer, glue, part, seconds=None,
                label=f"{task} {arm.name}",
            )  # fmt: skip


def _continue(arm: MlmArm, encoder: Transformer, stores: WikiCorpus, folder: Path) -> Outcome:
    config, tokeniser = arm.config, stores.tokeniser()
    blocks = Blocks(stores.store("train"), tokeniser.specials, length=config.length, seed=config.seed)
    with dense([encoder]), compiled_on_gpu([encoder], wanted=config.compile):
        outcome = train(
            encoder,
            MlmSource(blocks, config.batch, vocab_size=tokeniser.vocab_size, seed=config.seed),
            terms=[SomeMasked()],
            settings=arm.settings(),
            run_dir=folder,
            name=f"{arm.key}, abc-mlm",
            config={"arm": arm.as_dict() | {"key": arm.key}},
            data={"tokens": stores.store("train").checksum()},
            callbacks=[_HeldOut(stores, config)],
            resume=True,
        )
    encoder.to(best_device()).eval()
    return outcome


class _HeldOut(Callback):
    def __init__(self, stores: WikiCorpus, config: AbcMlmConfig) -> None:
        self.stores, self.config = stores, config

    def on_evaluation(self, moment: Moment) -> Mapping[str, float]:
        return {"valid/loss": masked_loss(moment.model, self.stores, self.config)}  # type: ignore[arg-type]
