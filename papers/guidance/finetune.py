"""Part (b): the pretrained models of an experiment fine-tuned side by side on GLUE's small tasks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.data.tokenisers import Tokeniser
from attnlab.models import Transformer
from papers.common.finetuning import Tuning, tune
from papers.common.row_store import Part
from papers.effective.glue import TASKS, encode, read_glue, subset
from papers.guidance.mlm import Key

__all__ = ["TuneConfig", "fine_tune"]


@dataclass(frozen=True)
class TuneConfig:
    """How the encoders are fine-tuned; the same for all."""

    tasks: tuple[str, ...] = ("SST-2", "MRPC", "RTE")
    length: int = 128
    batch: int = 32
    lr: float = 2e-4
    weight_decay: float = 0.1
    # Training examples at most, drawn once.
    limit: int = 9600
    epochs: tuple[tuple[str, int], ...] = (("MRPC", 3), ("RTE", 3), ("SST-2", 1))
    streams: int = 4
    seed: int = 0


class _Words:
    """One of our tokenisers as ``encode`` calls Hugging Face's."""

    def __init__(self, tokeniser: Tokeniser) -> None:
        self.tokeniser = tokeniser
        self.cls_token_id, self.sep_token_id = tokeniser.specials.bos, tokeniser.specials.eos

    def __call__(self, texts: list[str], *, add_special_tokens: bool = False) -> dict[str, Any]:
        assert not add_special_tokens
        return {"input_ids": self.tokeniser.encode_batch(texts)}


def fine_tune(
    encoders: Mapping[Key, Transformer],
    config: TuneConfig,
    *,
    tokeniser: Tokeniser,
    glue: Path,
    part: Part,
    label: Mapping[str, Any],
    seconds: float | None = None,
) -> None:
    """Rows of ``finetuned_runs``: the development accuracy of each encoder on each task, as long as time lasts."""
    began = time.monotonic()
    for task in config.tasks:
        if seconds is not None and time.monotonic() - began > seconds:
            return
        rows = {split: read_glue(glue, TASKS[task], split) for split in ("train", "dev")}
        rows["train"] = subset(rows["train"], config.limit, seed=0)
        examples = {split: encode(some, _Words(tokeniser), length=config.length) for split, some in rows.items()}
        tuning = Tuning(
            batch=config.batch, length=config.length, lr=config.lr, weight_decay=config.weight_decay,
            epochs=dict(config.epochs)[task], streams=config.streams, seed=config.seed,
        )  # fmt: skip
        named = {f"{key.arm} {key.seed}": key for key in encoders}
        for name, right in tune({name: encoders[key] for name, key in named.items()}, examples, tuning)[1].items():
            arm, seed, _ = named[name]
            part.row("finetuned_runs", **label, task=task, arm=arm, accuracy=100 * right, seed=seed)
