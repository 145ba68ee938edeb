"""What a converted attention module carries: its mechanism, and what a mechanism hands from layer to layer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from attnlab.attention import AttentionCall, Mechanism
from attnlab.trace import Kind

__all__ = ["INSTALLED", "Given", "Installed", "installed_in", "refuse_window", "with_memory"]

# The attribute of the module.
INSTALLED = "_attnlab"

# By thread, what the module under way was given: its hidden states do not reach the attention function.
Given = dict[int, dict[str, Any]]


@dataclass(eq=False)
class Installed:
    """What a converted module carries, for good: it is copied with the module, and so is the mechanism in it."""

    mechanism: Mechanism
    kind: Kind
    layer: int
    name: str
    drop_bias: bool = False
    # By thread, what the layer before has handed on; the object is shared with it. None where nothing comes.
    handed: dict[int, Tensor] | None = None
    # The same towards the next layer.
    hands_on: dict[int, Tensor] | None = None
    given: Given = field(default_factory=dict)
    hook: Any = None

    @property
    def has_own_cache(self) -> bool:
        """Whether the mechanism keeps a memory of its own in place of every key."""
        return self.mechanism.make_cache(1, 0) is not None


def installed_in(module: nn.Module) -> Installed | None:
    """What ``install`` put into the module."""
    return getattr(module, INSTALLED, None)


def with_memory(installed: Installed, call: AttentionCall) -> AttentionCall:
    """The call with the previous layer's memory, if the mechanism reads it (LUNA), and this layer's handed on."""
    thread = threading.get_ident()
    if call.k.shape[2] == 0:
        return call
    if installed.handed is not None:
        if thread not in installed.handed:
            raise ValueError(
                f"{installed.mechanism!r} reads the previous layer's memory, but that layer has not just run; turn off "
                "gradient checkpointing, which runs layers alone"
            )
        call = replace(call, memory=installed.handed.pop(thread).to(call.q.dtype))
    if installed.hands_on is not None:
        memory = installed.mechanism.memory_after(call)
        assert memory is not None, "a mechanism that reads a memory makes one"
        installed.hands_on[thread] = memory
    return call


def refuse_window(installed: Installed, window: Any) -> None:
    """Raise a ValueError if the module sees a window only and its mechanism cannot."""
    if window is not None and "mask" in installed.mechanism.cannot():
        raise ValueError(
            f"{installed.name} sees only the last {window} tokens (sliding_window), which {installed.mechanism!r} "
            "cannot honour; make the model from a config with sliding_window=None, or convert other layers"
        )
