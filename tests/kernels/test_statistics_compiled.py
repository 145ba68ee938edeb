"""What Triton compiles of the kernels of statistics for a Hopper GPU, which needs none: faults that no number shows here.

The interpreter is right where a compiled kernel is not, and says nothing of what makes one slow.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.kernels.hopper import said_without_interpreter

pytestmark = pytest.mark.slow


def compiled(name: str, width: int, kind: str, *more: int) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(said_without_interpreter("compile_statistics", name, width, kind, *more))
    return result


@pytest.mark.parametrize("name", ["rows", "columns"])
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_compiled_for_hopper(name: str, kind: str) -> None:
    result = compiled(name, 64, kind)
    # Triton 3.7 sums the wrong lanes where a sum is taken over numbers that several lanes hold.
    assert not any(not any(lane) for lanes in result["lanes"] for lane in lanes)
    if kind == "bfloat16":
        # Products that wait for each other, and tiles that are not loaded ahead, cost half of the speed.
        assert "serialized" not in result["ptxas"]
        # With 128 registers and sums of squares a thread spills up to six numbers, two of them in the loop.
        assert result["spilled"] <= 24
        assert result["stages"] > 0


def test_a_thread_chooses_the_largest_of_a_row() -> None:
    result = compiled("chosen", 64, "bfloat16")
    # Threads exchange nothing.
    assert result["shared"] == 0
    assert result["spilled"] == 0


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("keys", [16, 32, 64])
def test_the_largest_scores_of_a_pair_are_stored_at_once(width: int, keys: int) -> None:
    result = compiled("scored", width, "bfloat16", keys)
    assert set(result["stores"]) == {"st.global.v4.b32"}
    # Small bins have half of the registers.
    assert result["spilled"] <= 4


def test_bins_are_counted_once() -> None:
    # Each of the bins of 64 rows is a number of one thread.
    assert compiled("rows", 64, "bfloat16")["atomics"] == ["64x8"]
