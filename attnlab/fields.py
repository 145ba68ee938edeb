"""Checks at the door: settings that hold what their types say, and arguments of the kind that a function takes."""

from __future__ import annotations

import dataclasses
import math
from numbers import Integral, Real
from typing import Any

__all__ = ["check_fields", "check_int", "expect"]

CHECKS = {
    "int": lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
}
WORDS = {"int": "an int", "float": "a finite number", "bool": "True or False", "str": "a string", "None": "None"}


def check_fields(settings: Any) -> None:
    """Raise a ValueError unless every field of a dataclass declared as int, float, bool or str holds such a value."""
    for field in dataclasses.fields(settings):
        kinds = [kind.strip() for kind in str(field.type).split("|")]
        value = getattr(settings, field.name)
        if set(kinds) <= CHECKS.keys() and not any(CHECKS[kind](value) for kind in kinds):
            expected = " or ".join(WORDS[kind] for kind in kinds)
            raise ValueError(f"{field.name} must be {expected}, got {value!r}")


def check_int(name: str, value: Any, *, least: int) -> None:
    """Raise a ValueError unless this is an int of at least ``least``."""
    if not CHECKS["int"](value) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")


def expect(name: str, value: Any, kind: type | tuple[type, ...], what: str) -> None:
    """Raise a ValueError unless the argument is of this kind; ``what`` names the kind to a user."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {what}, got {type(value).__name__}")
