"""A short repr for records that hold tensors, whose numbers would fill pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

__all__ = ["short_repr"]

LONGEST = 120


def short_repr(record: Any) -> str:
    """The record's fields, of tensors and arrays the dtype and the shape, of long values the beginning or the length.

    A dataclass says ``__repr__ = short_repr``; in a named tuple that would be a field, so it defines a method.
    """
    if dataclasses.is_dataclass(record):
        names = [f.name for f in dataclasses.fields(record) if f.repr]
    else:
        names = list(record._fields)
    shown = ", ".join(f"{name}={_shown(getattr(record, name))}" for name in names)
    return f"{type(record).__name__}({shown})"


def _shown(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype") and tuple(value.shape):
        return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
    if isinstance(value, Collection) and not isinstance(value, str):
        holds_arrays = any(hasattr(item, "shape") for item in (value.values() if isinstance(value, dict) else value))
        if holds_arrays or len(value) > 8:
            return f"<{type(value).__name__} of {len(value)}>"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
