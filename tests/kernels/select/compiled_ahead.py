"""Compile the kernels of abc-select for an H100 or H200 without one: python -m tests.kernels.select.compiled_ahead."""

from __future__ import annotations

from typing import Any

import torch

from attnlab.kernels.select.attention import KERNELS, _options
from attnlab.kernels.select.choose import best_of_chunks, best_of_tokens
from tests.kernels.hopper import compiled_for_hopper

WHOLE_NUMBERS = ("lives", "keys", "counts", "ends")
BEST = ("best", "before")
FLOATS = ("score", "lse", "top", "middle", "delta", "part", "part_score", "d_score")
# d, e, query heads of a key head, slots, window, block, sinks, keys that are only counted.
SHAPES = (
    (64, 64, 3, 56, 64, 16, 4, 14),
    (64, 64, 3, 56, 64, 16, 4, 0),
    (128, 128, 1, 56, 64, 16, 4, 14),
    (32, 24, 1, 9, 32, 32, 0, 3),
    (80, 128, 2, 240, 70, 70, 4, 60),
)


def kind(name: str, constants: dict[str, Any], dtype: str) -> str:
    """The type of a kernel's parameter, by the names that all kernels share."""
    if name in constants:
        return "constexpr"
    if name == "scale":
        return "fp32"
    if name in BEST:
        return "*i64"
    if name in WHOLE_NUMBERS or name in FLOATS:
        return "*i32" if name in WHOLE_NUMBERS else "*fp32"
    return f"*{dtype}" if name in ("q", "k", "v", "out", "do", "dq", "dk", "dv") else "i32"


def compile_ahead(kernel: Any, shape: tuple[int, ...], dtype: str, left: int = 1984, of_chunks: bool = False) -> int:
    """The bytes of shared memory that the compiled kernel takes."""
    options = dict(_options(kernel.__name__, *shape, 3.0, left, torch.bfloat16, of_chunks))
    kinds = {name: kind(name, options, dtype) for name in kernel.arg_names}
    return compiled_for_hopper(kernel, options, kinds).shared


def main() -> None:
    for shape in SHAPES:
        for kernel in KERNELS:
            for dtype in ("bf16", "fp16") if shape == SHAPES[0] else ("bf16",):
                print(shape, kernel.__name__, dtype, compile_ahead(kernel, shape, dtype))
    for left in (900, 32_704, 1 << 20):
        for kernel, of_chunks in ((best_of_tokens, False), (best_of_tokens, True), (best_of_chunks, False)):
            print(left, kernel.__name__, of_chunks, compile_ahead(kernel, SHAPES[2], "bf16", left, of_chunks))


if __name__ == "__main__":
    main()
