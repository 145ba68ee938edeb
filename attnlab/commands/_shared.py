"""What several commands share: how a result is printed as JSON."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["print_json"]


def print_json(result: Any) -> None:
    """A result as ``--json`` prints it."""
    print(json.dumps(result, indent=1, ensure_ascii=False))
