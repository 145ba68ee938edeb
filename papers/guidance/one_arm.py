"""``python -m papers guidance-arm``: one masked LM, guided or not, trained alone until its curve is flat.

A run folder for each arm: the same command goes on after a kill. A finished model is fine-tuned with several seeds. The
arms of one question lie in one folder, and every command writes the results of all that are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from attnlab.data import TokenStore
from attnlab.data.tokenisers import Tokeniser
from attnlab.devices import best_device
from attnlab.guidance import Guidance
from attnlab.models import Transformer, TransformerConfig
from attnlab.pretraining import PretrainConfig, pretrain
from attnlab.training import Outcome, read_metrics
from papers.common.compiling import compiled_on_gpu
from papers.common.finetuning import Tuning, tune_seeds
from papers.common.row_store import Part
from papers.effective.glue import TASKS, encode, read_glue
from papers.guidance.config import PAPER_LENGTH
from papers.guidance.finetune import Words

__all__ = ["ARM", "ARM_KEYS", "ARM_NAME", "LITTLE_TEXT", "OneArm", "guided_heads", "train_arm", "tune_arm"]

ARM_NAME = "guidance-arm"
# The columns that identify an arm.
ARM = ("language", "norm", "guided", "lr", "seed")
ARM_KEYS = {
    "arms": [*ARM],
    "curves": [*ARM, "step"],
    "finetuned_runs": [*ARM, "task", "tune_seed"],
}
# What an arm of little text has instead of the defaults, as in the study's part (f).
LITTLE_TEXT: dict[str, Any] = {"dropout": 0.1, "evaluations": 60}
PATTERNS = ("next", "prev", "first", "period", "delim")


@dataclass(frozen=True)
class OneArm:
    """A masked LM: its sizes, whether it is guided, and how long it learns."""

    guided: bool
    lr: float
    norm: Literal["post", "pre"] = "post"
    seed: int = 0
    language: str = "english"
    dropout: float = 0.0
    layers: int = 12
    width: int = 256
    heads: int = 4
    length: int = 128
    # Of a batch.
    tokens: int = 32_768
    steps: int = 16_000
    # Shares of the steps.
    warmup: float = 0.1
    hold: float = 0.3
    # Of texts of 512 tokens; scaled to the length, for the same pull on each row.
    alpha0: float = 10.0
    # lambda
    fraction: float = 0.5
    evaluations: int = 40
    # On a GPU: the blocks as compiled graphs.
    compile: bool = True
    # Fine-tuning; a small training set is read more often.
    tasks: tuple[str, ...] = ("SST-2", "MRPC", "RTE")
    tune_seeds: tuple[int, ...] = (0, 1, 2)
    tune_lr: float = 1e-4
    tune_epochs: tuple[tuple[str, float], ...] = (("SST-2", 3.0), ("MRPC", 8.0), ("RTE", 8.0))

    @property
    def name(self) -> str:
        """The arm in one word, as its folder is called."""
        where = "" if self.language == "english" else f"{self.language}-"
        return f"{where}{self.norm}-{'ag' if self.guided else 'mlm'}-lr{self.lr:g}-seed{self.seed}"

    @property
    def labels(self) -> dict[str, Any]:
        """The columns that name it."""
        return {column: getattr(self, column) for column in ARM}

    def guidance(self) -> Guidance | None:
        """The settings of guidance; None for an arm without."""
        if not self.guided:
            return None
        alpha0 = self.alpha0 * self.length / PAPER_LENGTH
        return Guidance(
            fraction=self.fraction, patterns=PATTERNS, alpha0=alpha0, hold=self.hold, steps=self.steps
        )  # fmt: skip

    def pretraining(self) -> PretrainConfig:
        """The training."""
        return PretrainConfig(
            model="attnlab-mlm",
            lengths=(self.length,),
            tokens=self.tokens,
            steps=self.steps,
            lr=self.lr,
            warmup=round(self.warmup * self.steps),
            evaluations=self.evaluations,
            seed=self.seed,
            guidance=self.guidance(),
            checkpoint_every=max(1, self.steps // 8),
        )

    def model(self, *, vocab: int) -> Transformer:
        """The untrained model; arms of a seed and norm start from the same weights."""
        torch.manual_seed(self.seed)
        return Transformer(
            TransformerConfig(
                kind="encoder",
                vocab=-(-vocab // 64) * 64,
                width=self.width,
                heads=self.heads,
                layers=self.layers,
                max_length=self.length,
                norm=self.norm,
                dropout=self.dropout,
                embed_norm=self.norm == "post",
                head="mlm",
            )
        )


def guided_heads(arm: OneArm) -> dict[str, int]:
    """How many heads of all layers follow each pattern: every pattern has some.

    >>> guided_heads(OneArm(guided=True, lr=1e-3))
    {'next': 5, 'prev': 5, 'first': 5, 'period': 5, 'delim': 4}
    """
    counts = dict.fromkeys(PATTERNS, 0)
    guidance = arm.guidance()
    for layer in range(arm.layers) if guidance is not None else ():
        assert guidance is not None
        # What the guidance term asks, too.
        for name, heads in guidance.assign(arm.heads, layer=layer, n_layers=arm.layers).items():
            counts[name] += len(heads)
    return counts


def train_arm(
    arm: OneArm, *, tokeniser: Tokeniser, stores: Mapping[str, TokenStore], run_dir: Path, part: Part
) -> Transformer:
    """Train the arm, or go on with it, and note its row and its curve."""
    model = arm.model(vocab=tokeniser.vocab_size)
    with compiled_on_gpu([model], wanted=arm.compile, losses=False):
        _, outcome = pretrain(
            arm.pretraining(),
            tokeniser=tokeniser,
            stores={name: stores[name] for name in ("train", "valid")},
            run_dir=run_dir,
            model=model,
            resume=True,
            config_extra={"arm": asdict(arm)},
        )
    part.extend("curves", [{**arm.labels, **point} for point in _curve(run_dir)])
    part.row("arms", **arm.labels, **_trained(arm, outcome))
    return model.to(best_device()).eval()


def _trained(arm: OneArm, outcome: Outcome) -> dict[str, Any]:
    sizes = {"layers": arm.layers, "width": arm.width, "heads": arm.heads, "length": arm.length}
    heads = ", ".join(f"{name} {count}" for name, count in guided_heads(arm).items()) if arm.guided else None
    return {
        **sizes,
        "steps": outcome.step,
        "tokens": outcome.step * arm.tokens,
        "seconds": outcome.timing.get("seconds"),
        "loss": outcome.metrics["valid/masked-lm"],
        "error": outcome.metrics["valid/error"],
        "guided_heads": heads,
    }


def _curve(run_dir: Path) -> list[dict[str, Any]]:
    """The held-out losses of a run folder, the last of each step."""
    evaluations = [line for line in read_metrics(run_dir) if line["kind"] == "eval"]
    losses = {line["step"]: line["values"]["valid/masked-lm"] for line in evaluations}
    return [{"step": step, "loss": loss} for step, loss in sorted(losses.items())]


def tune_arm(arm: OneArm, model: Transformer, *, tokeniser: Tokeniser, glue: Path, part: Part) -> None:
    """Fine-tune the trained model on every task with every seed; tasks that are there already are left out."""
    for task in arm.tasks:
        if part.has("finetuned_runs", **arm.labels, task=task):
            continue
        rows = {split: read_glue(glue, TASKS[task], split) for split in ("train", "dev")}
        examples = {split: encode(some, Words(tokeniser), length=arm.length) for split, some in rows.items()}
        tuning = Tuning(length=arm.length, lr=arm.tune_lr, epochs=dict(arm.tune_epochs)[task])
        _, accuracies = tune_seeds({arm.name: model}, examples, tuning, seeds=arm.tune_seeds)
        part.extend("finetuned_runs", [
            {**arm.labels, "task": task, "tune_seed": seed, "accuracy": 100 * accuracy}
            for (_, seed), accuracy in accuracies.items()
        ])  # fmt: skip
