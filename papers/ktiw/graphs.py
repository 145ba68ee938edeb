"""An update of a stacked model as a CUDA graph: its thousands of small kernels are launched as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnlab.measure import captured

__all__ = ["captured_update"]


def captured_update(
    model: torch.nn.Module, adam: torch.optim.Optimizer, work: Callable[[], Tensor], *, pool: Any = None
) -> Callable[[], Tensor]:
    """``captured`` work; what its warm-up did to the model and the optimiser is undone."""
    kept = [(p, p.detach().clone()) for p in model.parameters()]
    known = {id(t): t.clone() for t in _states(adam)}
    replay = captured(work, pool=pool)
    with torch.no_grad():
        for p, value in kept:
            p.copy_(value)
        for t in _states(adam):
            # What the warm-up made begins at zero.
            t.copy_(known[id(t)]) if id(t) in known else t.zero_()
    return replay


def _states(adam: torch.optim.Optimizer) -> list[Tensor]:
    return [t for state in adam.state.values() for t in state.values()]
