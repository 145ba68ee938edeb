"""A whole text by abc-select as one compiled part, as distillation runs it, against its operators one by one."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from torch import Tensor

from attnlab.mechanisms import abc_select
from attnlab.mechanisms._bounded import selected
from attnlab.mechanisms._bounded.selected import Selection

RULES = Selection(slots=9, window=32, block=16, sinks=2, scale=0.25)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(groups: int) -> list[Tensor]:
    """q, k, v, x, w and r of a text of several segments."""
    draw = torch.Generator().manual_seed(1)
    kinds = ((2, 2 * groups, 70, 16), (2, groups, 70, 16), (2, groups, 70, 16), (2, 70, 24), (groups, 24), (groups,))
    kind = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    return [
        torch.randn(sizes, generator=draw).to(DEVICE, kind if len(sizes) > 2 else torch.float32).requires_grad_()
        for sizes in kinds
    ]


def check(groups: int, *, learn: bool) -> None:
    """Raise unless the output and all gradients are the same, of one graph."""
    compiled = torch.compile(abc_select._attend_whole, backend="aot_eager", fullgraph=True, dynamic=False)
    made = []
    for attend in (abc_select._attend_whole, compiled):
        tensors = inputs(groups)
        out = attend(*tensors, RULES, learn)
        made.append((out, *torch.autograd.grad(out.square().sum(), tensors if learn else tensors[:3])))
    for own, expected in zip(*made, strict=True):
        torch.testing.assert_close(own, expected)


if __name__ == "__main__":
    # On a CPU the kernels are interpreted.
    selected.kernels_take = lambda _: True
    check(2, learn=True)
    check(2, learn=False)
    # More heads than those whose scores are sums in one pass.
    abc_select.FEW_HEADS = 1
    check(2, learn=True)
