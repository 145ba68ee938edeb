"""Part (b): the pretrained models of an experiment fine-tuned side by side on GLUE's tasks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from attnlab.data.tokenisers import Tokeniser
from attnlab.models import Transformer
from papers.common.finetuning import Tuning, tune
from papers.common.row_store import Part
from papers.effective.finetune import metrics
from papers.effective.glue import TASKS, encode, read_glue, subset
from papers.guidance.mlm import Key

__all__ = ["TuneConfig", "Words", "fine_tune"]

# What Table 9 calls the development sets of MNLI.
GENRES = {"dev_matched": "MNLI-m", "dev_mismatched": "MNLI-mm"}


@dataclass(frozen=True)
class TuneConfig:
    """How the encoders are fine-tuned; the same for all.

    Table 9's tasks are MNLI, QNLI and QQP; MNLI is trained once and scored on its matched and mismatched examples.
    """

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

    def __post_init__(self) -> None:
        unknown = [task for task in self.tasks if task not in TASKS or TASKS[task].classes == 1]
        if unknown:
            known = ", ".join(name for name, task in TASKS.items() if task.classes > 1)
            raise ValueError(f"no classification task named {unknown[0]}; they are {known}")

    def epochs_of(self, task: str) -> int:
        """As ``epochs`` has it, or fewer where the training set is large."""
        return dict(self.epochs).get(task, 1 if TASKS[task].large else 3)


class Words:
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
    """Rows of ``finetuned_runs``: the development accuracy of each encoder on each task, as long as time lasts.

    Tasks of two classes have F1 of the second one too, which is what Table 9 has for QQP.
    """
    began = time.monotonic()
    for task in config.tasks:
        if seconds is not None and time.monotonic() - began > seconds:
            return
        of_task = TASKS[task]
        rows = {split: read_glue(glue, of_task, split) for split in ("train", *of_task.dev)}
        rows["train"] = subset(rows["train"], config.limit, seed=0)
        examples = {split: encode(some, Words(tokeniser), length=config.length) for split, some in rows.items()}
        tuning = Tuning(
            batch=config.batch, length=config.length, lr=config.lr, weight_decay=config.weight_decay,
            epochs=config.epochs_of(task), streams=config.streams, seed=config.seed, classes=of_task.classes,
        )  # fmt: skip
        named = {f"{key.arm} {key.seed}": key for key in encoders}
        _, predicted = tune({name: encoders[key] for name, key in named.items()}, examples, tuning)
        for name, by_split in predicted.items():
            arm, seed, _ = named[name]
            for split, classes in by_split.items():
                scores = _scores(classes, torch.tensor(examples[split].labels), of_task.classes)
                shown = GENRES.get(split, task)
                part.row("finetuned_runs", **label, task=shown, arm=arm, **scores, seed=seed)


def _scores(predicted: Tensor, labels: Tensor, classes: int) -> dict[str, float]:
    """Accuracy, and of two classes F1 of the second, in %."""
    logits = one_hot(predicted, classes)
    return {name: 100 * score for name, score in metrics(logits, labels.long()).items()}
