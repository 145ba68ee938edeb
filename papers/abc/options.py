"""What the commands of ABC's experiments share: settings from the command line, and switches of a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

__all__ = ["prepare_device", "with_changes"]


def with_changes(config: Any, changes: list[str]) -> Any:
    """The config with KEY=JSON changes; ``recipe.lr=1`` changes a setting of a setting."""
    for change in changes:
        key, _, text = change.partition("=")
        outer, dot, inner = key.partition(".")
        known = [f.name for f in dataclasses.fields(config)]
        if outer not in known:
            raise ValueError(f"{type(config).__name__} has no setting {outer!r}; it has {', '.join(known)}")
        if dot:
            config = dataclasses.replace(config, **{outer: with_changes(getattr(config, outer), [f"{inner}={text}"])})
            continue
        value = json.loads(text)
        config = dataclasses.replace(config, **{outer: tuple(value) if isinstance(value, list) else value})
    return config


def prepare_device() -> None:
    """Switches of a GPU, the same for all models that are compared."""
    # Under NVIDIA's MPS a process has few queues by default, and the streams of its models would wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    import torch

    # Products of float32 use the tensor cores.
    torch.backends.cuda.matmul.allow_tf32 = True
