"""The settings of a run: the optimiser's recipe, the learning rate over steps, and when to evaluate, log and save."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.fields import check_fields

__all__ = ["Recipe", "Schedule", "Settings", "every", "log_spaced", "make_optimizer", "parameter_groups"]

OPTIMIZERS = ("adamw", "adam", "nesterov")
SCHEDULES = ("linear", "inverse_sqrt", "cosine", "constant")
PRECISIONS = ("auto", "bf16", "no")


@dataclass(frozen=True)
class Recipe:
    """AdamW, Adam, or SGD with Nesterov's momentum, which is then the first of ``betas``.

    Biases, norms and other vectors get no weight decay, nor do names containing ``no_decay``. AdamW decays the weights
    themselves; the other two add the decay to the gradient.

    >>> Recipe(kind="nesterov", lr=1.0, betas=(0.99, 0.0), weight_decay=0.0, clip=0.1).kind
    'nesterov'
    """

    lr: float = 1e-3
    kind: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    no_decay: tuple[str, ...] = ()
    # Gradients longer than this are scaled down to it; None leaves them as they are.
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        _one_of("kind", self.kind, OPTIMIZERS)
        _positive("lr", self.lr)
        for name in ("eps", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.kind == "nesterov" and not 0 < self.betas[0] < 1:
            raise ValueError(f"Nesterov's momentum, betas[0], must lie between 0 and 1, got {self.betas[0]}")
        if self.clip is not None:
            _positive("clip", self.clip)


@dataclass(frozen=True)
class Schedule:
    """The learning rate's factor at update t = 1, 2, ...: t / warmup up to the warm-up's end, then the decay.

    With p = (t - 1 - warmup) / (steps - warmup): ``linear`` is 1 - p, ``cosine`` is (1 + cos(pi p)) / 2, both ending
    at ``final``; ``inverse_sqrt`` is sqrt(warmup / t); ``constant`` is 1.

    >>> [round(Schedule("linear", warmup=2).factor(t, steps=6), 2) for t in range(1, 7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    kind: str = "linear"
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        _one_of("kind", self.kind, SCHEDULES)
        if self.warmup < 0:
            raise ValueError(f"warmup must be at least 0 steps, got {self.warmup}")

    def factor(self, t: int, *, steps: int) -> float:
        """What the recipe's learning rate is multiplied by at update ``t`` of ``steps``, counted from 1."""
        if t <= self.warmup:
            return t / self.warmup
        if self.kind == "constant":
            return 1.0
        if self.kind == "inverse_sqrt":
            return math.sqrt(max(self.warmup, 1) / t)
        p = min(1.0, (t - 1 - self.warmup) / max(1, steps - self.warmup))
        shape = 1 - p if self.kind == "linear" else (1 + math.cos(math.pi * p)) / 2
        return self.final + (1 - self.final) * shape


@dataclass(frozen=True)
class Settings:
    """One run's training settings; everything but the model, the data and the loss terms.

    Step s is the state after s updates, so an evaluation at 0 sees the untrained model.
    """

    steps: int
    recipe: Recipe = field(default_factory=Recipe)
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    # Each rank's share of a batch is taken in this many parts; gradients are summed over them.
    accumulate: int = 1
    # auto: bf16 on a GPU that has it, else full precision.
    precision: str = "auto"
    device: str = "auto"
    compile: bool = False
    # With compile: one graph for all shapes instead of one graph for each shape seen; and torch.compile's mode.
    dynamic: bool = False
    compile_mode: str = "default"
    evaluate_at: tuple[int, ...] = ()
    log_every: int = 50
    # Checkpoints are saved at improvements, interruptions and the end; beside these every so many steps (None: not by
    # steps), and when the last one is so many seconds old (None: not by time).
    checkpoint_every: int | None = None
    checkpoint_seconds: float | None = 180.0
    keep: int = 2
    # The evaluation value that chooses the best checkpoint, such as "valid/loss".
    watch: str | None = None
    maximise: bool = False
    # Stop after this many evaluations in a row without improvement of ``watch``.
    patience: int | None = None
    prefetch: int = 8
    # Seconds that a process waits for the others before the run ends with an error.
    timeout: float = 600.0
    # Tokens in a global batch, for the rate that is shown; None: unknown.
    tokens: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("steps", "accumulate", "log_every", "keep", "prefetch", "timeout"):
            _positive(name, getattr(self, name))
        for name in ("checkpoint_every", "checkpoint_seconds", "patience"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("device", self.device, ("auto", "cpu"))
        if self.patience is not None and self.watch is None:
            raise ValueError("patience needs watch: the name of the evaluation value to wait for, such as 'valid/loss'")
        object.__setattr__(self, "evaluate_at", tuple(sorted(set(self.evaluate_at))))
        if self.evaluate_at and (self.evaluate_at[0] < 0 or self.evaluate_at[-1] > self.steps):
            raise ValueError(f"evaluate_at must lie in 0..{self.steps} (steps), got {self.evaluate_at}")

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON writes them."""
        return dataclasses.asdict(self)


def every(n: int, *, steps: int) -> tuple[int, ...]:
    """Steps 0, n, 2n, ... and the last one.

    >>> every(4, steps=10)
    (0, 4, 8, 10)
    """
    _positive("n", n)
    return tuple(sorted({*range(0, steps + 1, n), steps}))


def log_spaced(points: int, *, steps: int) -> tuple[int, ...]:
    """Step 0 and about ``points`` steps from 1 to the last, evenly spaced in their logarithm.

    >>> log_spaced(4, steps=1000)
    (0, 1, 10, 100, 1000)
    """
    _positive("points", points)
    _positive("steps", steps)
    gaps = max(1, points - 1)
    return tuple(sorted({0, steps, *(round(steps ** (i / gaps)) for i in range(points))}))


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """The trained parameters in two groups: matrices, which decay, and the rest, which do not."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError(f"{type(model).__name__} has no parameter with requires_grad=True; nothing can be trained")

    def decays(name: str, p: nn.Parameter) -> bool:
        return p.dim() >= 2 and not any(part in name for part in recipe.no_decay)

    groups = [
        {"params": [p for n, p in trained if decays(n, p)], "weight_decay": recipe.weight_decay},
        {"params": [p for n, p in trained if not decays(n, p)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    groups: Sequence[dict[str, Any]],
    recipe: Recipe,
    *,
    lr: Tensor | None = None,
    fused: bool = False,
    capturable: bool = False,
) -> torch.optim.Optimizer:
    """The recipe's optimiser over ``groups`` (of ``parameter_groups``); ``fused`` is one kernel for all on a GPU.

    An update in a CUDA graph must be ``capturable`` and read its learning rate from a tensor, ``lr``.
    """
    rate = recipe.lr if lr is None else lr
    if recipe.kind == "nesterov":
        # SGD keeps no count of steps, so that it can be captured as it is.
        return torch.optim.SGD(list(groups), lr=rate, momentum=recipe.betas[0], nesterov=True, fused=fused or None)
    adam = torch.optim.AdamW if recipe.kind == "adamw" else torch.optim.Adam
    return adam(list(groups), lr=rate, betas=recipe.betas, eps=recipe.eps, fused=fused or None, capturable=capturable)


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
