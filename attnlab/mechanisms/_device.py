"""Where a mechanism's parameters are, beside the model that it attends in; and in what precision it computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.attention import Mechanism

__all__ = ["beside", "unrounded"]


def beside(model: nn.Module, mech: Mechanism) -> Mechanism:
    """The mechanism, with what it learned before its first call (Linformer's matrix) on the model's device."""
    first = next(model.parameters(), None)
    if isinstance(mech, nn.Module) and first is not None:
        mech.to(first.device)
    return mech


def unrounded(t: Tensor) -> AbstractContextManager[Any]:
    """Inside, autocast does not round to half precision what is computed where ``t`` is."""
    kind = t.device.type
    # The meta device knows no autocast.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
