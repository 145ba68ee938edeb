"""How long and how fast a student learns, what of it is trained, and how far it has come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from attnlab.fields import check_fields
from attnlab.training.settings import PRECISIONS

__all__ = ["STAGES", "Distillation", "RowShape", "StageProgress", "near_rate", "row_shape"]

# In the order in which they are run.
STAGES = ("heads", "hidden", "logits")
TRAINED = ("all", "attention")
LARGEST_FLOAT32 = 3e38
# Of the rate of a student far from its teacher, that of one which is at it.
LEAST_SHARE = 0.01
# Tokens in a step from which on a rate needs no lowering.
MANY_TOKENS = 1 << 15


@dataclass(frozen=True)
class Distillation:
    """How long and how fast. ``batch`` rows of ``length`` tokens a step where ``texts`` are strings.

    ``lengths`` are pairs of a length and its share of all tokens, such as ((512, 0.4), (1024, 0.6)), taken one after
    the other; each step still has ``batch * length`` tokens.
    """

    heads_steps: int = 100
    hidden_steps: int = 0
    logits_steps: int = 1000
    heads_lr: float = 1e-2
    hidden_lr: float = 5e-4
    logits_lr: float = 5e-4
    # With held-out text: hidden_lr and logits_lr are for large steps of a student that begins far from its teacher, and
    # lower ones are taken elsewhere (``near_rate``). Not where the text itself is learned (hard).
    scale_lr: bool = False
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    # The weight of the text's own next tokens beside the teacher's predictions of them.
    hard: float = 0.0
    # After the first stage: "all" parameters, or those of "attention" alone (q, k, v, o and the new ones).
    train: str = "all"
    # Instead of the attention's weights a change of this rank beside each, which is added to them at the end; 0: none.
    lora: int = 0
    # Share of tokens hidden from a masked language model and its teacher.
    masked: float = 0.15
    batch: int = 16
    length: int = 128
    lengths: tuple[tuple[int, float], ...] = ()
    # Of rows of a long text: the share of them in which a passage stands a second time.
    repeats: float = 0.0
    seed: int = 0
    # What both models compute products in: bf16 (parameters stay float32), no (float32), or auto: bf16 on a GPU.
    precision: str = "auto"
    # Compile each layer; recompute each layer in the backward pass instead of keeping what it computed.
    compile: bool = False
    checkpointing: bool = False
    # Progress is reported after this many steps, and at the end of a stage.
    every: int = 50
    # In a run folder: how often each stage is evaluated, and a checkpoint after so many steps beside those by time.
    evaluations: int = 10
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        steps = [self.steps_of(stage) for stage in STAGES]
        if min(steps) < 0 or sum(steps) < 1:
            raise ValueError(
                f"steps must be at least 0 and one stage must have some, got {', '.join(map(str, steps))} for "
                f"{', '.join(STAGES)}"
            )
        if not 0 <= self.masked < 1:
            raise ValueError(f"masked must lie in [0, 1), got {self.masked}")
        for name in ("hard", "repeats"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        if self.train not in TRAINED:
            raise ValueError(f"train must be one of {', '.join(TRAINED)}, got {self.train!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if self.lora < 0:
            raise ValueError(f"lora must be a rank, or 0 for none, got {self.lora}")
        for stage in STAGES:
            if not 0 < self.lr_of(stage) < LARGEST_FLOAT32:
                raise ValueError(f"{stage}_lr must be a number above 0 that float32 holds, got {self.lr_of(stage)}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must lie between 0 and 2^32, got {self.seed}")
        if min(self.batch, self.length, self.every, self.evaluations) < 1:
            raise ValueError("batch, length, every and evaluations must be at least 1")
        check_lengths(self.lengths)

    def steps_of(self, stage: str) -> int:
        """The updates of a stage."""
        return int(getattr(self, f"{stage}_steps"))

    def lr_of(self, stage: str) -> float:
        """The highest learning rate of a stage."""
        return float(getattr(self, f"{stage}_lr"))

    @property
    def scales_lr(self) -> bool:
        """Whether the rate follows from the student's distance at a stage's start."""
        return self.scale_lr and self.hard == 0

    def half_on(self, device: torch.device) -> bool:
        """Whether products on this device are of bfloat16."""
        return self.precision == "bf16" or (self.precision == "auto" and device.type == "cuda")

    @property
    def steps(self) -> int:
        """The updates of all stages."""
        return sum(map(self.steps_of, STAGES))


def near_rate(lr: float, kl: float, tokens: int) -> float:
    """The highest rate of a student ``kl`` nats a token from its teacher, ``tokens`` of them in a step.

    ``lr`` is that of a student 1 nat away or further, in steps of 32,768 tokens or more. Near its minimum KL grows with
    the square of the parameters' distance from it; Adam moves every parameter by about the rate, however small the
    gradient, and so leaves a KL that grows with the square of the rate. A rate that grows with the root of the KL at
    the start keeps both in proportion. Fewer tokens make a gradient of more noise: Adam's rate then falls with the root
    of their number (Malladi et al., 2022, arXiv:2205.10287).

    >>> [near_rate(3e-4, kl, 1 << 15) for kl in (4.0, 1.0, 0.16, 0.0)]
    [0.0003, 0.0003, 0.00012, 3e-06]
    >>> near_rate(3e-4, 1.0, 1 << 13)
    0.00015
    """
    # At least a hundredth of the rate, for a distance that is rounding; three digits, which all machines agree on.
    near = max(LEAST_SHARE, math.sqrt(min(1.0, max(kl, 0.0))))
    return float(f"{lr * near * math.sqrt(min(1.0, tokens / MANY_TOKENS)):.3g}")


@dataclass(frozen=True)
class StageProgress:
    """How far a stage, "heads", "hidden" or "logits", has come; the seconds do not include those of ``on_progress``."""

    stage: str
    step: int
    loss: float
    seconds: float


class RowShape(NamedTuple):
    """The rows of one step: their length, how many, which of the lengths that is, and the step's number in it."""

    length: int
    rows: int
    part: int
    step: int


def row_shape(settings: Distillation, step: int) -> RowShape:
    """The rows of a step of all stages' steps, by ``lengths``; steps beyond the last have the last length.

    >>> settings = Distillation(heads_steps=0, logits_steps=10, batch=8, length=64, lengths=((32, 0.5), (128, 0.5)))
    >>> [row_shape(settings, step)[:2] for step in (0, 4, 5, 9)]
    [(32, 16), (32, 16), (128, 4), (128, 4)]
    """
    lengths = settings.lengths or ((settings.length, 1.0),)
    whole = sum(share for _, share in lengths)
    ends = [round(settings.steps * share / whole) for share in accumulate(share for _, share in lengths)]
    part = next((i for i, end in enumerate(ends) if step < end), len(lengths) - 1)
    length = lengths[part][0]
    return RowShape(
        length, max(1, settings.batch * settings.length // length), part, step - (ends[part - 1] if part else 0)
    )


def check_lengths(lengths: tuple[tuple[int, float], ...]) -> None:
    """Raise a ValueError unless these are pairs of a length and a share."""
    for pair in lengths:
        good = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], int) and pair[0] >= 2
        if not good or not 0 < pair[1] < math.inf:
            raise ValueError(f"lengths are pairs of a length of at least 2 and a share above 0, got {pair!r}")
