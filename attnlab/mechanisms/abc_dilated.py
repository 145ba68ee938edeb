"""ABC with two queues, one for odd and one for even tokens: the dilated window."""

from __future__ import annotations

from dataclasses import dataclass

from attnlab.mechanisms._bounded.slots import check_slots
from attnlab.mechanisms.abc_window import QueueMechanism
from attnlab.registry import register

__all__ = ["AbcDilated"]


@register("abc-dilated", examples=("abc-dilated:slots=2",))
@dataclass(frozen=True)
class AbcDilated(QueueMechanism):
    """K~_t = [k_{t-2n+2}, ..., k_{t-2}, k_t]: every ``stride``-th of the last tokens (ABC, Eq. 15, stride 2)."""

    slots: int = 64
    stride: int = 2

    def __post_init__(self) -> None:
        check_slots(self.slots)
        if isinstance(self.stride, bool) or not isinstance(self.stride, int) or self.stride < 1:
            raise ValueError(f"stride must be an int of at least 1, got {self.stride!r}")
