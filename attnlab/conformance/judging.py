"""What the laws are written with: which calls a mechanism takes, and errors that say where a law does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, hide_unseen, repeat_groups
from attnlab.conformance.calls import refusal

__all__ = ["Law", "NotApplicableError", "product", "require", "taken"]

Law = Callable[[Mechanism], None]


class NotApplicableError(Exception):
    """The mechanism refuses every call of a law; the message is its reason."""


def require(holds: bool, message: str) -> None:
    """``assert`` that ``python -O`` keeps."""
    if not holds:
        raise AssertionError(message)


def taken(mech: Mechanism, calls: Iterable[tuple[str, AttentionCall]]) -> list[tuple[str, AttentionCall]]:
    """The calls that the mechanism does not refuse, of which there is at least one."""
    accepted, reason = [], ""
    for name, call in calls:
        why = refusal(mech, call)
        if why is None:
            accepted.append((name, call))
        reason = reason or why or ""
    if not accepted:
        raise NotApplicableError(reason)
    return accepted


def product(mech: Mechanism, call: AttentionCall) -> Tensor:
    """W @ v from the reference."""
    return mech.weights(call) @ repeat_groups(hide_unseen(call).v, call.groups)
