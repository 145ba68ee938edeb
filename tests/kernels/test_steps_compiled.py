"""Decoding steps as Triton compiles them for a Hopper GPU, which needs none: the interpreter takes any size."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from tests.kernels.hopper import said_without_interpreter

pytestmark = pytest.mark.slow


def test_steps_of_small_and_large_memories_fit() -> None:
    """Twice into the shared memory of a multiprocessor; few numbers of a thread go to memory, where slots are written."""
    made = json.loads(said_without_interpreter("compile_steps"))
    assert len(made) == 20
    assert [
        one for one in made if one["shared"] > 110_000 or one["spilled"] > (128 if "bfloat16" in one["what"] else 1024)
    ] == []
