"""Matrix products of stacked models that are the same, to the last bit, however many models are stacked.

cuBLAS chooses the order of a product's sums by the number of products, and so does torch in the gradient of an
embedding. Therefore a member of twenty and the same model alone differ in the last bit. Adam enlarges that difference,
since its first updates hardly depend on a gradient's size. Here each product is summed in one order. An invariant stack
also looks words up by such a product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.shapes import Float

__all__ = ["invariant_product"]


def invariant_product(a: Float[Tensor, "s m k"], b: Float[Tensor, "s k n"]) -> Float[Tensor, "s m n"]:
    """a @ b, where row s of the result depends on row s alone, and so do its gradients.

    >>> a, b = torch.randn(3, 2, 5), torch.randn(3, 5, 7)
    >>> torch.equal(invariant_product(a, b)[1:2], invariant_product(a[1:2], b[1:2]))
    True
    """
    return _Product.apply(a, b)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _multiply(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        a, b = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return _multiply(grad, b.mT) if wanted[0] else None, _multiply(a.mT, grad) if wanted[1] else None


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_cuda:
        return torch.stack([x @ y for x, y in zip(a, b, strict=True)])
    from papers.ktiw.models.lstm_kernels import multiply

    return multiply(a, b)
