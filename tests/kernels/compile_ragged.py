"""What Triton compiles of ``read_part`` for a Hopper GPU, as JSON; run by test_ragged_compiled without the interpreter."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from attnlab.kernels.ragged import ALL, _read_options, tiles_for
from attnlab.kernels.ragged_triton import read_part
from tests.kernels.hopper import compiled_for_hopper

TOTAL = 10**6
STRIDES = ("sqb", "sqh", "sqt", "sob", "soh", "sot", "svb", "svt")
POINTERS = {"bias": "*fp32", "columns": "*i32", "visible": "*i1", "starts": "*i32", "counts": "*i32", "scale": "fp32"}
POINTERS |= dict.fromkeys(("part_o", "part_top", "part_sum"), "*fp32")


def compiled(heads: int, d: int, queries: int, kind: str, shown: int) -> dict[str, Any]:
    """One call: biased where a mask is shown, and then whole."""
    dtype, marked = getattr(torch, kind), shown != ALL
    rows = heads * queries if queries > 1 else 1
    tiles = tiles_for(d, d, dtype.itemsize, TOTAL, rows)
    options = dict(_read_options(heads, d, d, tiles, queries > 1, marked, shown, marked, marked, dtype))
    absent = ("part_o", "part_top", "part_sum") if marked else ("bias", "columns", "visible")
    options |= dict.fromkeys(absent) | ({"N": 1} if queries == 1 else {})
    half = {"float32": "*fp32", "bfloat16": "*bf16"}[kind]
    kinds = POINTERS | dict.fromkeys(("q", "keys", "values", "o"), half)
    result = compiled_for_hopper(read_part, options, kinds, divisible=STRIDES)
    return {"ptxas": result.ptxas, "spilled": result.spilled, "shared": result.shared, "lanes": result.lanes}


if __name__ == "__main__":
    heads, d, queries, shown = (int(word) for word in (*sys.argv[1:4], sys.argv[5]))
    print(json.dumps(compiled(heads, d, queries, sys.argv[4], shown)))
