"""The losses since the last line of metrics, kept on the device: reading them at every update would stall a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["PendingMetrics", "TableTransfer", "first_not_finite"]


class PendingMetrics:
    """One row for each update: the weighted loss, each term's mean, the gradient's norm."""

    def __init__(self, accelerator: Any, columns: int) -> None:
        self.accelerator, self.columns = accelerator, columns
        self.updates: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.restore([])

    def add(self, *, weights: Tensor, totals: Tensor, counts: Tensor, norm: Tensor) -> None:
        """Remember an update; nothing is computed yet."""
        self.updates.append((weights, totals, counts, norm))

    def table(self) -> Tensor:
        """The rows, summed over ranks; the gradient's norm is the same on all."""
        if not self.updates:
            return self.restored
        weights, totals, counts, norms = (torch.stack(column) for column in zip(*self.updates, strict=True))
        means = totals / counts
        losses = torch.cat([(weights * means).sum(1, keepdim=True), means], dim=1)
        if self.accelerator.num_processes > 1:
            losses = self.accelerator.reduce(losses, "sum")
        return torch.cat([self.restored, torch.cat([losses, norms[:, None]], dim=1)])

    def restore(self, rows: list[list[float]]) -> None:
        """Begin with the rows of a checkpoint."""
        self.restored = torch.tensor(rows, device=self.accelerator.device).reshape(-1, self.columns)
        self.updates = []


class TableTransfer:
    """A table that is being copied from the device, with the step and the time at which the copy began."""

    def __init__(self, table: Tensor, *, step: int, seconds: float) -> None:
        self.step, self.seconds = step, seconds
        self._table = table.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if table.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    @property
    def ready(self) -> bool:
        """Whether ``table`` returns without waiting."""
        return self._arrived is None or self._arrived.query()

    def table(self) -> Tensor:
        """The table, after waiting for the copy if necessary."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._table


def first_not_finite(table: Tensor, *, last: int) -> tuple[int, int] | None:
    """The step and the column of the first value that is not finite, in rows that end with step ``last``.

    The weighted sum, column 0, is not finite wherever a term is not; the user can change the term, so it is preferred.
    """
    bad = ~table.isfinite()
    if not bad.any():
        return None
    row = int(bad.any(1).nonzero()[0])
    columns = bad[row].nonzero().flatten().tolist()
    return last - len(table) + 1 + row, next((c for c in columns if c > 0), 0)
