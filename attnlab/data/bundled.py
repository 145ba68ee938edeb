"""The public-domain texts that come with the package, for the demo and the tests."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["bundled_text"]

NAMES = ("shakespeare", "moby-dick")


def bundled_text(name: str = "shakespeare") -> str:
    """Two scenes of Shakespeare's, some 8,000 characters; or "moby-dick", its first ten chapters, some 110,000.

    >>> bundled_text().splitlines()[1]
    'Now is the winter of our discontent'
    """
    if name not in NAMES:
        raise ValueError(f"there is no bundled text {name!r}; there are: {', '.join(NAMES)}")
    return files("attnlab").joinpath("shipped", "text", f"{name}.txt").read_text(encoding="utf-8")
