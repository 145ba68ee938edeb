"""Shapes in the models' signatures are checked here too."""

from __future__ import annotations

from jaxtyping import install_import_hook

with install_import_hook("attnlab", "beartype.beartype"):
    import attnlab.models  # noqa: F401
