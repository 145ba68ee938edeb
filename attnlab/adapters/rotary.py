"""How a Hugging Face model turns queries and keys by their positions, found by the model's own functions."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.caches.contract import Rotate

__all__ = ["rotation_of"]

# Those whose angles depend on a position alone; others change with the length of the text.
FIXED = ("default", "linear", "llama3", "yarn", "proportional")
APPLY = "apply_rotary_pos_emb"


def rotation_of(model: nn.Module, attention: nn.Module, forward: Any) -> tuple[Rotate | None, str | None]:
    """(The rotation of an attention module's queries, None), (None, None) without one, or (None, why it is unknown)."""
    tables = {m for name, m in model.named_modules() if "rotary" in (name + type(m).__name__).lower()}
    if not tables and not any("rot" in name for name in forward.__code__.co_names):
        return None, None
    apply = forward.__globals__.get(APPLY)
    name = type(attention).__name__
    if len(tables) != 1 or apply is None or APPLY not in forward.__code__.co_names:
        return None, f"{name} turns them in a way of its own"
    (table,) = tables
    if list(inspect.signature(table.forward).parameters)[2:]:
        return None, f"{type(table).__name__} has more than one kind of rotation"
    if getattr(table, "rope_type", "default") not in FIXED:
        return None, f"the angles of {type(table).__name__} change with the length of the text ({table.rope_type})"

    def rotate(t: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (part.to(t.dtype) for part in table(t, positions))
        if cos.shape[-1] != t.shape[-1]:
            raise ValueError(f"{name} turns {cos.shape[-1]} of {t.shape[-1]} numbers of a query, in an unknown place")
        with torch.no_grad():
            return apply(t, t, cos, sin)[0]

    return rotate, None
