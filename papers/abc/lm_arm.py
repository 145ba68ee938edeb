"""``python -m papers abc-lm-arm``: one row of Table 2 with one seed, trained alone.

The same command goes on after a kill. The arms of all rows and seeds lie in one folder. A row that both tables have is
one training, scored for both. Every command adds its rows to the results file, whose models must have the same sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnlab.devices import best_device
from attnlab.models import CausalLM
from attnlab.training import Callback, Moment, Schedule, Settings, every, load_weights, read_result, train
from papers.abc.arms import held_out_curve
from papers.abc.dense_attention import dense_attention
from papers.abc.lm import Batches, LmRun, LmTraining, held_out_loss, start_from_trained
from papers.abc.lm_config import TABLES, AbcLmConfig, Variant, tables_of
from papers.common.compiling import compiled_on_gpu
from papers.common.row_store import Part
from papers.common.wiki_corpus import WikiCorpus

__all__ = ["LmArm", "run_arm"]


@dataclass(frozen=True)
class LmArm:
    """A row of Table 2 by its key, such as ABC_MLP-64, its seed, and for how many tokens it learns.

    With ``patience`` training ends early, after so many evaluations in a row without a lower held-out loss.
    """

    key: str
    config: AbcLmConfig
    seed: int = 0
    tokens: int = 300_000_000
    patience: int | None = None
    evaluations: int = 40

    @property
    def name(self) -> str:
        """The arm in one word, as its folder is called."""
        return f"{self.key}-seed{self.seed}"

    @property
    def variant(self) -> Variant:
        """The row; where both tables have it, it is the same."""
        return next(iter(tables_of(self.key).values()))

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that have the row."""
        return tuple(tables_of(self.key))

    @property
    def steps(self) -> int:
        """The updates; a model that starts from a trained one has a share of them."""
        updates = self.tokens / (self.config.batch * self.config.length)
        return max(1, round(updates * (self.config.t2r_updates if self.variant.start else 1)))

    def as_dict(self) -> dict[str, Any]:
        """What all arms of a results file share."""
        return {**asdict(self.config), "tokens": self.tokens, "patience": self.patience}

    def settings(self) -> Settings:
        """The training."""
        return Settings(
            steps=self.steps,
            recipe=self.config.recipe,
            schedule=Schedule("cosine", warmup=min(self.config.warmup, self.steps // 10)),
            seed=self.seed,
            evaluate_at=every(max(1, self.steps // self.evaluations), steps=self.steps),
            checkpoint_every=max(1, self.steps // 8),
            watch="valid/loss",
            patience=self.patience,
            tokens=self.config.batch * self.config.length,
        )


def run_arm(arm: LmArm, *, corpus: Path, work: Path, part: Part) -> None:
    """Train the arm, or go on with it, and score it for every table that has its row."""
    stores = WikiCorpus(corpus)
    tables = {table: LmTraining(table, arm.config, part, stores) for table in tables_of(arm.key)}
    first = next(iter(tables.values()))
    run = first.run(arm.variant, arm.seed)
    if arm.variant.start is not None:
        _start(run, first, arm, work)
    with ExitStack() as stack:
        stack.enter_context(dense_attention(run.model))
        stack.enter_context(compiled_on_gpu([run.model], wanted=arm.config.compile))
        valid = first.windows("valid", context=0)[0]
        folder = work / "runs" / arm.name
        outcome = train(
            run.model,
            first.source(arm.seed),
            terms=[CausalLM()],
            settings=arm.settings(),
            run_dir=folder,
            name=f"{arm.key}, abc-lm",
            config={"arm": arm.as_dict() | {"key": arm.key}},
            data={"tokens": stores.store("train").checksum()},
            callbacks=[_HeldOut(valid)],
            resume=True,
        )
        run.model.to(best_device()).eval()
        for table, training in tables.items():
            part.extend(
                "curves", [{"setting": table, **run.labels, **point} for point in held_out_curve(folder, "valid/loss")]
            )
            training.note_size(run, steps=outcome.step, seconds=outcome.timing["seconds"])
            if not part.has(table, **run.labels):
                training.score([run])


class _HeldOut(Callback):
    def __init__(self, windows: Batches) -> None:
        self.windows = windows

    def on_evaluation(self, moment: Moment) -> Mapping[str, float]:
        with torch.no_grad():
            return {"valid/loss": held_out_loss(moment.model, self.windows).loss}  # type: ignore[arg-type]


def _start(run: LmRun, training: LmTraining, arm: LmArm, work: Path) -> None:
    """Give the model the weights of the trained one that it starts from, of its seed; those of its features stay."""
    [base] = [v for v in TABLES[training.table] if v.model == arm.variant.start]
    folder = work / "runs" / replace(arm, key=base.key).name
    if read_result(folder) is None:
        raise ValueError(
            f"{arm.key} starts from the trained {base.key} of seed {arm.seed}, and {folder} holds none: first run this "
            f"command with --model {base.key}"
        )
    trained = training.run(base, arm.seed)
    load_weights(trained.model, folder)
    start_from_trained([run], [trained])
