"""How many steps of each stage a conversion has: by its tokens, or by the minutes it may take."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from attnlab.adapters.distillation import STAGES, Distillation, TokenRows, teach
from attnlab.training.runs import say

if TYPE_CHECKING:
    from attnlab.pretraining.conversion import ConversionConfig

__all__ = ["planned_steps"]

# Steps that are timed, after as many in which graphs are compiled and kernels chosen; a CPU does neither, and is slow.
PROBE, CPU_PROBE = 4, 1
# The share of the time for evaluations and checkpoints.
REST = 0.05


def planned_steps(
    config: ConversionConfig,
    teacher: nn.Module,
    student: nn.Module,
    tokens: np.ndarray,
    first: tuple[int, ...],
    process: Any,
) -> dict[str, int]:
    """The steps of each stage; with ``minutes`` as many as the speed measured here allows, the same on all ranks."""
    whole = sum(share for _, share in config.stages)
    shares = {stage: sum(share for name, share in config.stages if name == stage) / whole for stage in STAGES}
    per_step = config.settings.batch * config.settings.length
    most = max(1, config.tokens // per_step)
    if config.minutes is not None:
        say("timing a few steps")
        began = time.monotonic()
        seconds = sum(
            share * _seconds(stage, config.settings, teacher, student, tokens, first, process)
            for stage, share in shares.items()
            if share
        )
        # On a GPU the timed steps compile what the others use.
        left = 60 * config.minutes - (time.monotonic() - began if process.device.type == "cpu" else 0.0)
        fitting = max(1, int(left * (1 - REST) / seconds))
        say(
            f"a step takes {seconds:.3f} s ({per_step / seconds:,.0f} tokens/s): {fitting} steps in {config.minutes:g} "
            "minutes"
        )
        most = _agreed(min(most, fitting), process)
    steps = {stage: round(share * most) for stage, share in shares.items()}
    # Rounding leaves no stage out.
    return {stage: max(count, 1 if shares[stage] else 0) for stage, count in steps.items()}


def _seconds(
    stage: str,
    settings: Distillation,
    teacher: nn.Module,
    student: nn.Module,
    tokens: np.ndarray,
    first: tuple[int, ...],
    process: Any,
) -> float:
    """Seconds of a step of a stage, the mean over lengths by their shares, on a copy of the student."""
    lengths, probe = settings.lengths or ((settings.length, 1.0),), PROBE
    if process.device.type == "cpu":
        # Rows of every length have as many tokens in a step, and take about as long there.
        lengths, probe = (max(lengths, key=lambda each: each[1]),), CPU_PROBE
    mean = 0.0
    for length, share in lengths:
        counts: Any = {f"{name}_steps": 2 * probe if name == stage else 0 for name in STAGES}
        rows = max(1, settings.batch * settings.length // (length * process.num_processes))
        own = replace(settings, lengths=(), length=length, batch=rows, every=probe, **counts)
        history = teach(teacher, copy.deepcopy(student), TokenRows(tokens, own, first=first), own)
        if history:
            mean += share * (history[-1].seconds - history[0].seconds) / probe
    return mean / sum(share for _, share in lengths)


def _agreed(steps: int, process: Any) -> int:
    """The first rank's number."""
    if process.num_processes == 1:
        return steps
    from accelerate.utils import broadcast_object_list

    return int(broadcast_object_list([steps])[0])
