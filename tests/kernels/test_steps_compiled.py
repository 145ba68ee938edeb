"""Decoding steps as Triton compiles them for a Hopper GPU, which needs none: the interpreter takes any size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.slow


def test_steps_of_small_and_large_memories_fit() -> None:
    """Twice into the shared memory of a multiprocessor; few numbers of a thread go to memory, where slots are written."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_steps"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads(done.stdout.splitlines()[-1])
    assert len(made) == 20
    assert [
        one for one in made if one["shared"] > 110_000 or one["spilled"] > (128 if "bfloat16" in one["what"] else 1024)
    ] == []
