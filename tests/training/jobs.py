"""A small training job that tests run in their own process, in others, and under accelerate launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnlab.training import (
    Callback,
    CrossEntropy,
    Evaluation,
    Loss,
    Moment,
    Outcome,
    Recipe,
    Schedule,
    Settings,
    every,
    read_metrics,
    train,
)

VOCAB = 13


class Model(nn.Module):
    """Tied embeddings and dropout, which checkpoints and random generators most easily get wrong."""

    def __init__(self, *, seed: int = 0, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, 11)
        self.mix = nn.Sequential(nn.Linear(11, 17), nn.GELU(), nn.Dropout(dropout), nn.Linear(17, 11), nn.LayerNorm(11))
        self.head = nn.Linear(11, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.mix(self.embed(input_ids)))}


class Tokens:
    """Random tokens whose successor is the token plus one; every row hides a different number of labels."""

    def __init__(self, *, rows: int = 12, seed: int = 0) -> None:
        self.rows, self.seed = rows, seed

    def batch(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        ids = torch.randint(0, VOCAB, (self.rows, 7), generator=generator)
        hidden = torch.arange(7) < (torch.arange(self.rows) % 5)[:, None]
        return {"input_ids": ids, "labels": ((ids + 1) % VOCAB).masked_fill(hidden, -100)}


class Size:
    """A second term with a count of its own, whose weight changes over steps."""

    name = "size"

    def weight(self, step: int) -> float:
        return 0.01 * (step + 1)

    def __call__(self, model: nn.Module, output: Any, batch: Any, step: int) -> Loss:
        first = output["logits"][:, 0]
        return Loss(first.square().sum(), len(first))


class PowerCut(Callback):
    """Ends the process's training after a step, as a crash would."""

    def __init__(self, *, at: int | None) -> None:
        self.at = at

    def on_step(self, moment: Moment) -> None:
        if moment.step == self.at:
            raise RuntimeError("power cut")


def settings(**changes: Any) -> Settings:
    base: dict[str, Any] = {
        "steps": 20,
        "recipe": Recipe(lr=0.03, clip=0.5),
        "schedule": Schedule("linear", warmup=3),
        "seed": 5,
        "device": "cpu",
        "evaluate_at": every(6, steps=20),
        "log_every": 3,
        "checkpoint_every": 4,
        "watch": "valid/loss",
    }
    return Settings(**{**base, **changes})


def job(
    run_dir: Path | str,
    *,
    resume: bool = False,
    model: nn.Module | None = None,
    source: Any = None,
    terms: Any = None,
    callbacks: Any = (),
    rows: int = 12,
    dropout: float = 0.1,
    track: str | None = None,
    data: Any = None,
    **changes: Any,
) -> tuple[nn.Module, Outcome]:
    model = model or Model(dropout=dropout)
    outcome = train(
        model,
        source or Tokens(rows=rows),
        terms=terms or [CrossEntropy(), Size()],
        settings=settings(**changes),
        run_dir=run_dir,
        evaluations={"valid": Evaluation(Tokens(rows=rows, seed=1), batches=2)},
        callbacks=callbacks,
        data=data,
        resume=resume,
        track=track,
    )
    return model, outcome


def without_seconds(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def assert_same_parameters(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def report_of(module: str, *arguments: object) -> dict[str, Any]:
    """What a program of this folder prints as JSON; it runs in a process of its own, on one core."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.training.{module}", *map(str, arguments)],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_ends_like(whole: tuple[nn.Module, list[dict[str, Any]]], model: nn.Module, run: Path) -> None:
    """The model and the metrics of a run are those of one that nothing has stopped."""
    assert_same_parameters(model.state_dict(), whole[0].state_dict())
    assert without_seconds(read_metrics(run)) == whole[1]


def stopped(path: Path) -> None:
    """A run that a power cut ends after step 11."""
    with pytest.raises(RuntimeError, match="power cut"):
        job(path, callbacks=[PowerCut(at=11)])


def resumed(path: Path) -> tuple[Model, Outcome]:
    """The rest of a run that was stopped."""
    return job(path, resume=True, callbacks=[PowerCut(at=None)])
