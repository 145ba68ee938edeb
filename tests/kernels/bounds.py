"""Where kernels are tested, how far they may be from float64, ||a - b|| / ||b||, and what compiling must not change."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def assert_compiled_gradients_equal(loss: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Gradients of a loss, compiled to one graph, are those without the compiler."""
    eager = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*inputs), inputs)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b)
