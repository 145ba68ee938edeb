"""How far a run has come, as a checkpoint's state.json holds it, and whether a checkpoint fits the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlab.training.checkpoints import Checkpoint, CorruptCheckpointError
from attnlab.training.runs import RunError
from attnlab.training.state import random_state, set_random_state

__all__ = ["RunState", "check_model", "check_saved"]

# What each kind of optimiser keeps for a parameter.
SLOTS = {
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "adam": {"step", "exp_avg", "exp_avg_sq"},
    "nesterov": {"momentum_buffer"},
}


@dataclass
class RunState:
    """What a checkpoint holds beside parameters and random generators."""

    step: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_value: float | None = None
    stale: int = 0
    stopped: bool = False
    evaluated: dict[str, float] = field(default_factory=dict)
    # The rows since the last train line: loss, terms, gradient norm.
    pending: list[list[float]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The ``progress`` of a checkpoint's state.json, which calls the pending rows ``window``; NaN is null."""
        fields = dataclasses.asdict(self)
        fields["window"] = fields.pop("pending")
        fields["evaluated"] = {name: v if math.isfinite(v) else None for name, v in self.evaluated.items()}
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RunState:
        """The inverse of ``as_json``; a ValueError or TypeError where a field is missing or of another type."""
        named = dict(fields)
        evaluated, pending = named.pop("evaluated"), named.pop("window")
        if set(named) != {f.name for f in dataclasses.fields(cls)} - {"evaluated", "pending"}:
            raise ValueError(f"progress has the fields {', '.join(sorted(fields))}")
        state = cls(
            **named,
            evaluated={name: math.nan if v is None else float(v) for name, v in evaluated.items()},
            pending=[[float(v) for v in row] for row in pending],
        )
        state._check_types()
        return state

    def _check_types(self) -> None:
        for name in ("step", "stale"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} is {value!r}")
        if not isinstance(self.stopped, bool) or not isinstance(self.best_step, int | None):
            raise ValueError("stopped must be a truth value and best_step a step")
        for number in (self.seconds, 0.0 if self.best_value is None else self.best_value):
            if not isinstance(number, int | float) or not math.isfinite(number):
                raise ValueError(f"{number!r} is no finite number")


def check_saved(
    saved: Checkpoint,
    *,
    identity: str,
    tensors: Mapping[str, torch.Tensor],
    optimizer: str,
    callbacks: int,
    columns: int,
) -> None:
    """Raise before anything is loaded if a checkpoint cannot be: nothing is half-loaded then.

    A state that no run has written is damage, and the checkpoint before it may be used. A checkpoint of another model
    or of other settings is whole, so that the run is refused and the checkpoint kept.
    """
    state = saved.state
    try:
        progress = RunState.from_json(state["progress"])
        if progress.step != saved.step or any(len(row) != columns for row in progress.pending):
            raise ValueError("progress does not belong to this step and these loss terms")
        if type(state["metrics_bytes"]) is not int or state["metrics_bytes"] < 0:
            raise ValueError(f"metrics_bytes is {state['metrics_bytes']!r}")
        if not isinstance(state["callbacks"], list) or not isinstance(state["random"], list):
            raise TypeError("callbacks and random must be lists")
        for generators in state["random"]:
            _try_random_state(generators)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError, IndexError) as error:
        raise CorruptCheckpointError(
            f"{saved.path / 'state.json'} holds no state of a run ({type(error).__name__}: {error})"
        ) from error
    if state.get("run", identity) != identity:
        raise RunError(f"{saved.path} was trained with other settings than run.json holds; put the old run.json back")
    if len(state["callbacks"]) != callbacks:
        raise RunError(
            f"{saved.path} was saved with {len(state['callbacks'])} callbacks and is resumed with {callbacks}; resume "
            "it with those it was begun with"
        )
    check_model(saved, tensors)
    _check_optimizer(saved, tensors, SLOTS[optimizer])


def _try_random_state(generators: dict[str, Any]) -> None:
    before = random_state()
    try:
        set_random_state(generators)
    finally:
        set_random_state(before)


def check_model(saved: Checkpoint, expected: Mapping[str, torch.Tensor]) -> None:
    """Raise if the checkpoint's tensors are not those of a model with the state dict ``expected``."""
    for name in sorted({*expected, *saved.model}):
        ours, theirs = expected.get(name), saved.model.get(name)
        if ours is None or theirs is None:
            raise RunError(
                f"{saved.path} holds another model: {name} is only in {'it' if ours is None else 'this one'}"
            )
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise RunError(
                f"{saved.path} holds another model: {name} is {tuple(theirs.shape)} of {theirs.dtype} there, "
                f"{tuple(ours.shape)} of {ours.dtype} here"
            )


def _check_optimizer(saved: Checkpoint, expected: Mapping[str, torch.Tensor], slots: set[str]) -> None:
    of_parameter: dict[str, set[str]] = {}
    for key, tensor in saved.optimizer.items():
        name, _, slot = key.rpartition(".")
        of_parameter.setdefault(name, set()).add(slot)
        if name not in expected or (tensor.dim() and tensor.shape != expected[name].shape):
            raise RunError(f"{saved.path} holds the optimiser of another model: {key} does not fit")
    for name, present in of_parameter.items():
        if present != slots:
            raise RunError(f"{saved.path} holds another optimiser: {', '.join(sorted(present))} of {name}")
