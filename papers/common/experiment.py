"""One experiment of a paper as ``python -m papers`` offers it; a paper's folder lists its own in ``commands.py``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Experiment"]


@dataclass(frozen=True)
class Experiment:
    """One experiment: what it makes, its arguments, and the function that runs it."""

    summary: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
