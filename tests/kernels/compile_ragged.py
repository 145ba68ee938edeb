"""What Triton compiles of ``read_part`` for a Hopper GPU, as JSON; run by test_ragged_compiled without the interpreter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnlab.kernels.ragged import ALL, _read_options, tiles_for
from attnlab.kernels.ragged_triton import read_part

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
    made = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    absent = ("part_o", "part_top", "part_sum") if marked else ("bias", "columns", "visible")
    constants = options | dict.fromkeys(absent) | ({"N": 1} if queries == 1 else {})
    half = {"float32": "*fp32", "bfloat16": "*bf16"}[kind]
    kinds = POINTERS | dict.fromkeys(("q", "keys", "values", "o"), half)
    names = read_part.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    divisible = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in STRIDES]
    source = ASTSource(
        read_part,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in divisible},
    )
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=made)
    lanes = re.findall(r"^#linear\w* = .*lane = (\[\[.*?\]\])", result.asm["ttgir"], re.MULTILINE)
    return {
        "ptxas": _ptxas(result.asm["ptx"]),
        "shared": result.metadata.shared,
        "lanes": [json.loads(one) for one in lanes],
    }


def _ptxas(ptx: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        words = [program, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(words, capture_output=True, text=True, check=True)
    return said.stdout + said.stderr


if __name__ == "__main__":
    heads, d, queries, shown = (int(word) for word in (*sys.argv[1:4], sys.argv[5]))
    print(json.dumps(compiled(heads, d, queries, sys.argv[4], shown)))
