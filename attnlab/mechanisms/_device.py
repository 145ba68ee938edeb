"""Where a mechanism's parameters are: beside the model that it attends in."""

from __future__ import annotations

from torch import nn

from attnlab.attention import Mechanism

__all__ = ["beside"]


def beside(model: nn.Module, mech: Mechanism) -> Mechanism:
    """The mechanism, with what it learned before its first call (Linformer's matrix) on the model's device."""
    first = next(model.parameters(), None)
    if isinstance(mech, nn.Module) and first is not None:
        mech.to(first.device)
    return mech
