"""A compiled model that is swapped or converted gives what it gives without the compiler, forward and backward."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KINDS = (
    "swapped", "converted", "before-and-after", "distilled", "decoded", "full-caches", "whole", "whole-by-kernels",
    "planned",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", KINDS)
def test_a_compiled_model_is_the_same(what: str) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-W", "ignore", "-m", "tests.adapters.compiled", what]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1:] == ["the same"], done.stderr[-3000:]
