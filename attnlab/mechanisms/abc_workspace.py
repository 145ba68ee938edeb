"""ABC with a shared workspace: tokens compete to write into the previous layer's memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.fields import check_fields
from attnlab.mechanisms._bounded.slots import FLOOR, Control
from attnlab.mechanisms.abc_luna import MemoryMechanism
from attnlab.registry import register
from attnlab.shapes import Int

__all__ = ["AbcWorkspace"]


@register("abc-workspace", examples=("abc-workspace:slots=3,top=2",))
@dataclass(eq=False)
class AbcWorkspace(MemoryMechanism):
    """Eq. 16 with competition: only a slot's ``top`` tokens are written (Goyal et al., 2021; ABC, A.5); never causal.

    ``top=None`` lets every token write, which is Eq. 16 as it stands.
    """

    slots: int = 32
    top: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.top is not None and (isinstance(self.top, bool) or not isinstance(self.top, int) or self.top < 1):
            raise ValueError(f"top must be an int of at least 1 or None, got {self.top!r}")
        self._start()

    def control(self, call: AttentionCall, places: Int[Tensor, "b k"]) -> Control:
        """The winners' attention."""
        log = self.logits(call)
        if call.key_visible is not None:
            log = log.masked_fill(~call.key_visible.unsqueeze(-1), FLOOR)
        if self.top is not None and self.top < log.shape[1]:
            last = log.topk(self.top, dim=1).values[:, -1:]
            log = log.masked_fill(log < last, FLOOR)
        return Control(log.unsqueeze(1))
