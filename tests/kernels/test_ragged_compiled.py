"""What Triton compiles for a Hopper GPU where keys are read without padding, which needs none: registers and memory."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from attnlab.kernels.ragged import ALIKE, ALL, EACH
from tests.kernels.hopper import said_without_interpreter

pytestmark = pytest.mark.slow
# Bytes of registers that go to memory: a program that spills more is slow.
MOST_SPILLED = 512
SHARED = 200 * 1024


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize(("heads", "d"), [(3, 64), (4, 128), (1, 256)])
@pytest.mark.parametrize(("queries", "shown"), [(1, ALL), (1, ALIKE), (2, ALL), (128, ALL), (128, EACH)])
def test_compiled_for_hopper(heads: int, d: int, queries: int, shown: int, kind: str) -> None:
    result = json.loads(said_without_interpreter("compile_ragged", heads, d, queries, kind, shown))
    assert result["spilled"] <= MOST_SPILLED, result["ptxas"]
    assert result["shared"] <= SHARED
    # Triton 3.7 sums the wrong lanes where a sum is taken over numbers that several lanes hold.
    assert not any(not any(lane) for lanes in result["lanes"] for lane in lanes)
