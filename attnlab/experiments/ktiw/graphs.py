"""An update of a stacked model as a CUDA graph: its thousands of small kernels are launched as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["captured"]


def captured(
    model: torch.nn.Module, adam: torch.optim.Optimizer, work: Callable[[], Tensor], *, pool: Any = None
) -> Callable[[], Tensor]:
    """The work as a CUDA graph; what its warm-up did to the model and the optimiser is undone.

    Graphs of one ``pool`` share their memory: clone what one returns before another runs.
    """
    kept = [(p, p.detach().clone()) for p in model.parameters()]
    known = {id(t): t.clone() for t in _states(adam)}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = work()
    with torch.no_grad():
        for p, value in kept:
            p.copy_(value)
        for t in _states(adam):
            # What the warm-up made begins at zero.
            t.copy_(known[id(t)]) if id(t) in known else t.zero_()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def _states(adam: torch.optim.Optimizer) -> list[Tensor]:
    return [t for state in adam.state.values() for t in state.values()]
