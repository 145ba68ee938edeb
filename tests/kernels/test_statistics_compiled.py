"""What Triton compiles of the kernels of statistics for a Hopper GPU, which needs none: faults that no number shows here.

The interpreter is right where a compiled kernel is not, and says nothing of what makes one slow.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

COMPILE = """
import json, os, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.kernels import statistics_largest, statistics_largest_triton, statistics_tiles, statistics_triton
from attnlab.kernels import statistics_weights_triton

name, width, exact = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "float32"
modules = {"rows": statistics_triton, "columns": statistics_weights_triton}
kernel = getattr(modules.get(name, statistics_largest_triton), name)
tiles = statistics_tiles.COLUMN_TILE if name == "columns" else statistics_tiles.ROW_TILE
tile = statistics_tiles.EXACT_TILE if exact else tiles[width]
bins = statistics_tiles.bins_of(tile)
if name == "scored":
    bins = statistics_tiles.Bins(4, int(sys.argv[4])) if len(sys.argv) > 4 else bins
    way = statistics_largest.pair_tile(bins.keys, width)
    tile = tile._replace(rows=way.pairs, warps=way.warps, stages=way.stages, registers=way.registers)
if name == "chosen":
    tile = tile._replace(rows=statistics_largest.CHOSEN_ROWS, warps=statistics_largest.CHOSEN_ROWS // 32, registers=0)
flags = dict.fromkeys(statistics_tiles.FLAGS, False) | {"CAUSAL": True, "WHOLE": True, "EXACT": exact}
asked = {"NEAR": True, "NORM": name == "scored", "SQUARES": True, "RECEIVED": True, "BLOCKS": True}
sizes = {"D": width, "E": width, "BD": width, "BE": width, "BM": tile.rows, "BN": tile.keys, "FOLD": tile.fold}
sizes |= {"KN": 3 * width, "VN": width, "KEYS": bins.keys, "PARTS": bins.parts, "SPAN": tile.span}
constants = {n: v for n, v in (flags | asked | sizes | {"N": 8, "MS": 16}).items() if n in kernel.arg_names}
half = "*fp32" if exact else "*bf16"
kinds = {n: half for n in ("Q", "K", "Visible", "Mask", "Bias")}
kinds |= {n: "*i32" for n in ("KeyPlaces", "QueryPlaces", "Places", "NormPlaces", "Reach", "Counts")}
kinds |= {n: "*fp32" if exact else "*fp16" for n in ("V", "Side")} | {"scale": "fp32", "Order": "*i64"}
signature, divisible = {}, {}
for at, n in enumerate(kernel.arg_names):
    pointer = n[0].isupper() and n not in ("H", "G")
    signature[n] = "constexpr" if n in constants else kinds.get(n, "*fp32" if pointer else "i32")
    if signature[n].startswith("*") or n in ("qb", "qh", "qn", "kb", "kh", "kn", "vb", "vh", "vn", "n_q", "n_k"):
        divisible[(at,)] = [["tt.divisibility", 16]]
source = ASTSource(kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constants.items()}, divisible)
options = {"num_warps": tile.warps, "num_stages": tile.stages}
if tile.registers:
    options["maxnreg"] = tile.registers
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
    file.write(compiled.asm["ptx"])
    file.flush()
    ptxas = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
    said = subprocess.run([ptxas, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"], capture_output=True, text=True)
layouts = re.findall(r"^#linear\\\\w* = .*lane = (\\\\[\\\\[.*?\\\\]\\\\])", compiled.asm["ttgir"], re.MULTILINE)
print(json.dumps({
    "lanes": [json.loads(lanes) for lanes in layouts], "ptxas": said.stdout + said.stderr,
    "stages": compiled.asm["ttgir"].count("async_copy_global_to_local"), "shared": compiled.metadata.shared,
    "atomics": re.findall(r"atomic_rmw.*tensor<(\\w+)x!", compiled.asm["ttgir"]),
    "stores": re.findall(r"st.global.b32|st.global.v\\d.b32", compiled.asm["ptx"]),
}))
""".replace("\\\\", "\\")


def compiled(name: str, width: int, kind: str, *more: int) -> dict[str, Any]:
    root = Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(root)}
    process = subprocess.run(
        [sys.executable, "-c", COMPILE, name, str(width), kind, *map(str, more)],
        capture_output=True,
        text=True,
        env=environment,
    )
    if process.returncode:
        pytest.fail(process.stderr[-2000:])
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
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
        assert int(re.findall(r"(\d+) bytes spill stores", result["ptxas"])[0]) <= 24
        assert result["stages"] > 0


def test_a_thread_chooses_the_largest_of_a_row() -> None:
    result = compiled("chosen", 64, "bfloat16")
    # Threads exchange nothing.
    assert result["shared"] == 0
    assert "0 bytes spill stores" in result["ptxas"]


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("keys", [16, 32, 64])
def test_the_largest_scores_of_a_pair_are_stored_at_once(width: int, keys: int) -> None:
    result = compiled("scored", width, "bfloat16", keys)
    assert set(result["stores"]) == {"st.global.v4.b32"}
    # One number of small bins, before the loop.
    assert int(re.findall(r"(\d+) bytes spill stores", result["ptxas"])[0]) <= 4


def test_tiles_are_counted_once() -> None:
    # Each of the tiles of 64 rows is a number of one thread.
    assert compiled("rows", 64, "bfloat16")["atomics"] == ["64x8"]
