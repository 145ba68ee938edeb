"""Shared by several commands: an early check of mechanisms, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

__all__ = ["check_mechanisms", "print_json"]


def check_mechanisms(specs: Sequence[str]) -> None:
    """Raise the error of a misspelt mechanism now, before a large model is loaded."""
    from attnlab.registry import mechanism

    for spec in specs:
        mechanism(spec)


def print_json(result: Any) -> None:
    """A result as ``--json`` prints it."""
    print(json.dumps(result, indent=1, ensure_ascii=False))
