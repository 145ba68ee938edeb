"""Readings of a training curve: when a loss has converged, left its plateau, or reached another's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Row", "converged_at", "drops_at", "plateau", "reaches_at"]

Row = Mapping[str, Any]
# A loss has left its plateau when it is this far (nats) below the loss of guessing words by their frequency.
LEFT = 0.5
CONVERGED = 0.95


def mean_until(at: Sequence[int], values: Sequence[float], share: float = 0.02) -> list[float]:
    """At each point of a thinned curve, the mean over the last ``share`` of the whole training."""
    width, means = max(1.0, share * at[-1]), []
    for i, end in enumerate(at):
        total = weight = 0.0
        for j in range(i, -1, -1):
            begin = at[j - 1] if j else 0
            if at[j] <= end - width and j < i:
                break
            total += values[j] * (at[j] - begin)
            weight += at[j] - begin
        means.append(total / weight)
    return means


def converged_at(curve: Row) -> int | None:
    """The first update at which 95 % of the fall of L_AG is done."""
    values = curve["guidance"]
    if not values or max(values) <= 0:
        return None
    smooth = mean_until(curve["at"], values, 0.005)
    bound = smooth[0] - CONVERGED * (smooth[0] - min(smooth))
    return next(at for at, value in zip(curve["at"], smooth, strict=True) if value <= bound)


def drops_at(curve: Row, level: float | None) -> int | None:
    """The first update at which the task's loss, smoothed, is half a nat below ``level``; None if it never is."""
    if level is None:
        return None
    smooth = mean_until(curve["at"], curve["task"], 0.01)
    return next((at for at, value in zip(curve["at"], smooth, strict=True) if value < level - LEFT), None)


def reaches_at(curve: Row, loss: float) -> int | None:
    """The first update at which the smoothed training loss is at most ``loss``."""
    smooth = mean_until(curve["at"], curve["task"])
    return next((at for at, value in zip(curve["at"], smooth, strict=True) if value <= loss), None)


def plateau(curve: Row) -> float | None:
    """The loss where a curve's first steep fall is over: then 2 % of the training change it by less than 0.05."""
    smooth = mean_until(curve["at"], curve["task"], 0.01)
    for i, at in enumerate(curve["at"]):
        later = next((j for j, a in enumerate(curve["at"]) if a >= at + 0.02 * curve["at"][-1]), None)
        if later is not None and smooth[i] - smooth[later] < 0.05 and smooth[i] < smooth[0] - 0.5:
            return smooth[i]
    return None
