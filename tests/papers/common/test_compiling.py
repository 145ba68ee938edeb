"""Compiled blocks and losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_compiled_parts_give_the_same_loss_and_gradients() -> None:
    """In a process of its own, since the checks of shapes in tests cannot be compiled."""
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-m", "tests.papers.common.compiled_parts"], cwd=root, check=True, timeout=600)
