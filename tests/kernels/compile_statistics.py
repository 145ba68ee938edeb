"""What Triton compiles of the kernels of statistics for a Hopper GPU, as JSON; run by test_statistics_compiled.

python -m tests.kernels.compile_statistics KERNEL WIDTH DTYPE [KEYS OF A BIN]
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from attnlab.kernels import statistics_largest, statistics_largest_triton, statistics_tiles, statistics_triton
from attnlab.kernels import statistics_weights_triton as weights
from tests.kernels.hopper import compiled_for_hopper

MODULES = {"rows": statistics_triton, "columns": weights}
ASKED = {"NEAR": True, "SQUARES": True, "RECEIVED": True, "BLOCKS": True}
WHOLE_NUMBERS = ("KeyPlaces", "QueryPlaces", "Places", "NormPlaces", "Reach", "Counts")
STRIDES = ("qb", "qh", "qn", "kb", "kh", "kn", "vb", "vh", "vn", "n_q", "n_k")


def compiled(name: str, width: int, exact: bool, keys: int | None) -> dict[str, Any]:
    """One kernel for a causal call of whole tiles; bins of the first pass's size unless ``keys`` says another."""
    kernel = getattr(MODULES.get(name, statistics_largest_triton), name)
    tiles = statistics_tiles.COLUMN_TILE if name == "columns" else statistics_tiles.ROW_TILE
    tile = statistics_tiles.EXACT_TILE if exact else tiles[width]
    bins = statistics_tiles.bins_of(tile) if keys is None else statistics_tiles.Bins(4, keys)
    if name == "scored":
        way = statistics_largest.pair_tile(bins.keys, width)
        tile = tile._replace(rows=way.pairs, warps=way.warps, stages=way.stages, registers=way.registers)
    if name == "chosen":
        rows = statistics_largest.CHOSEN_ROWS
        tile = tile._replace(rows=rows, warps=rows // 32, registers=0)
    constants: dict[str, Any] = dict.fromkeys(statistics_tiles.FLAGS, False) | {
        "CAUSAL": True,
        "WHOLE": True,
        "EXACT": exact,
    }
    constants |= ASKED | {"NORM": name == "scored", "N": 8, "MS": 16}
    constants |= {"D": width, "E": width, "BD": width, "BE": width, "BM": tile.rows, "BN": tile.keys, "FOLD": tile.fold}
    constants |= {"KN": 3 * width, "VN": width, "KEYS": bins.keys, "PARTS": bins.parts, "SPAN": tile.span}
    options = {key: value for key, value in constants.items() if key in kernel.arg_names}
    options |= {"num_warps": tile.warps, "num_stages": tile.stages}
    options |= {"maxnreg": tile.registers} if tile.registers else {}
    result = compiled_for_hopper(kernel, options, kinds_of(kernel, exact), divisible=STRIDES)
    return {
        "lanes": result.lanes,
        "ptxas": result.ptxas,
        "spilled": result.spilled,
        "stages": result.ttgir.count("async_copy_global_to_local"),
        "shared": result.shared,
        "atomics": re.findall(r"atomic_rmw.*tensor<(\w+)x!", result.ttgir),
        "stores": re.findall(r"st.global.b32|st.global.v\d.b32", result.ptx),
    }


def kinds_of(kernel: Any, exact: bool) -> dict[str, str]:
    """The types of a kernel's parameters that are no whole numbers."""
    kinds = {name: "*fp32" for name in kernel.arg_names if name[0].isupper() and name not in ("H", "G")}
    kinds |= dict.fromkeys(("Q", "K", "Visible", "Mask", "Bias"), "*fp32" if exact else "*bf16")
    kinds |= dict.fromkeys(WHOLE_NUMBERS, "*i32") | dict.fromkeys(("V", "Side"), "*fp32" if exact else "*fp16")
    return kinds | {"scale": "fp32", "Order": "*i64"}


if __name__ == "__main__":
    name, width, kind, *keys = sys.argv[1:]
    print(json.dumps(compiled(name, int(width), kind == "float32", int(keys[0]) if keys else None)))
