"""The small public-domain text that comes with the package, for the demo and the tests."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["bundled_text"]


def bundled_text() -> str:
    """Two scenes of Shakespeare's, some 8,000 characters.

    >>> bundled_text().splitlines()[1]
    'Now is the winter of our discontent'
    """
    return files("attnlab").joinpath("shipped", "text", "shakespeare.txt").read_text(encoding="utf-8")
