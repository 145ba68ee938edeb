"""What Triton compiles of decoding steps for a Hopper GPU, as JSON: python -m tests.kernels.compile_steps."""

from __future__ import annotations

import json
from typing import Any

import torch

from attnlab.kernels.hybrid import step as hybrid
from attnlab.kernels.select import step as select
from tests.kernels.hopper import Compiled, compiled_for_hopper

KINDS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
OWN = ("q", "k", "v", "out", "kept_k", "kept_v", "sink_k", "sink_v", "ring_k", "ring_v", "weight", "bias")
POINTERS = dict.fromkeys(("ring_x", "slots_kv", "slots_z", "recency", "kept_score"), "*fp32")
POINTERS |= {"kept_place": "*i32", "count": "*i64", "visible": "*i1"}
POINTERS |= dict.fromkeys(("scale", "root", "tokens"), "fp32")
# Width of heads, slots, window.
SELECTED = ((64, 56, 64), (64, 80, 96), (64, 240, 256), (128, 240, 256), (256, 500, 520))
HELD = ((64, 0, 496), (64, 0, 48), (64, 64, 64), (128, 64, 512), (128, 128, 176))


def select_step(d: int, slots: int, window: int, dtype: torch.dtype) -> Compiled:
    options = select._options(d, d, 3, 576, slots + window + 4, slots, window, 16, 4, False, dtype)
    kinds = POINTERS | dict.fromkeys((*OWN, "x"), KINDS[dtype])
    return compiled_for_hopper(select.take_and_read, dict(options), kinds)


def hybrid_step(d: int, slots: int, window: int, dtype: torch.dtype) -> Compiled:
    options = hybrid._options(d, 3, slots, 4, window, 16, True, slots == 0, False, dtype)
    kinds = POINTERS | dict.fromkeys(OWN, KINDS[dtype]) | {"x": "*fp32"}
    return compiled_for_hopper(hybrid.take_and_read, dict(options), kinds)


def main() -> None:
    made: list[dict[str, Any]] = []
    for step, shapes in ((select_step, SELECTED), (hybrid_step, HELD)):
        for shape in shapes:
            for dtype in KINDS:
                result = step(*shape, dtype)
                what = f"{step.__name__} {shape} {dtype}"
                made.append({"what": what, "shared": result.shared, "spilled": result.spilled})
    print(json.dumps(made))


if __name__ == "__main__":
    main()
