"""How records that hold tensors, whose numbers would fill pages, are shown: as one line, or in a notebook."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

__all__ = ["notebook_view", "short_repr", "short_value"]

LONGEST = 120


def short_repr(record: Any) -> str:
    """The record's fields, of tensors and arrays the dtype and the shape, of long values the beginning or the length.

    A dataclass says ``__repr__ = short_repr``; in a named tuple that would be a field, so it defines a method.
    """
    if dataclasses.is_dataclass(record):
        names = [f.name for f in dataclasses.fields(record) if f.repr]
    else:
        names = list(record._fields)
    fields = ", ".join(f"{name}={short_value(getattr(record, name))}" for name in names)
    return f"{type(record).__name__}({fields})"


def notebook_view(title: str, rows: Sequence[Mapping[str, Any]], *, about: str = "", note: str = "") -> str:
    """For ``_repr_html_``: a short table as HTML; the markup is imported when a notebook asks for it."""
    from attnlab.pages import notebook

    return notebook.notebook_view(title, rows, about=about, note=note)


def short_value(value: Any) -> str:
    """One field: of a tensor or an array the dtype and the shape, of a long value the beginning or the length."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and tuple(value.shape):
        return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
    if isinstance(value, Collection) and not isinstance(value, str):
        holds_arrays = any(hasattr(item, "shape") for item in (value.values() if isinstance(value, dict) else value))
        if holds_arrays or len(value) > 8:
            return f"<{type(value).__name__} of {len(value)}>"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
