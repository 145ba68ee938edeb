"""Shapes in the models' signatures are checked here too."""

from __future__ import annotations

from tests.shape_checks import checked_signatures

with checked_signatures("attnlab"):
    import attnlab.models  # noqa: F401
