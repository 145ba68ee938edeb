"""The recurrence of stacked LSTMs: one matrix product and one pointwise kernel a step, for all members at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnlab.shapes import Float

__all__ = ["Product", "recurrence"]

Product = Callable[[Tensor, Tensor], Tensor]


def recurrence(
    gates: Float[Tensor, "s n b g"],
    weight: Float[Tensor, "s m g"],
    h: Float[Tensor, "s b m"],
    c: Float[Tensor, "s b m"],
    *,
    product: Product = torch.bmm,
) -> tuple[Float[Tensor, "s n b m"], Float[Tensor, "s n b m"]]:
    """Every hidden state and cell from what the inputs add to the gates, in torch's order: input, forget, cell, output.

    >>> start = torch.ones(2, 1, 2)
    >>> hidden, cells = recurrence(torch.zeros(2, 3, 1, 8), torch.zeros(2, 2, 8), start, start)
    >>> cells[0, :, 0, 0]
    tensor([0.5000, 0.2500, 0.1250])
    """
    return _Recurrence.apply(gates, weight, h, c, product)


class _Recurrence(torch.autograd.Function):
    """Its backward pass makes the weight's gradient in one product over all steps."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, product: Product
    ) -> tuple[Tensor, Tensor]:
        (s, n, b, _), m = gates.shape, weight.shape[1]
        step, _ = _steps(gates)
        gates = gates.contiguous()
        # The first entries are the states before the first step.
        hidden, cells = (start.new_empty(s, n + 1, b, m) for start in (h, c))
        hidden[:, 0], cells[:, 0] = h, c
        active = torch.empty_like(gates)
        for t in range(n):
            recurrent = product(hidden[:, t], weight)
            step(gates[:, t], recurrent, cells[:, t], active[:, t], cells[:, t + 1], hidden[:, t + 1])
        ctx.product = product
        ctx.save_for_backward(weight, hidden, cells, active)
        return hidden[:, 1:], cells[:, 1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        weight, hidden, cells, active = ctx.saved_tensors
        _, step_back = _steps(active)
        grad_hidden, grad_cells = (grad.contiguous() for grad in grads)
        back, dgates = weight.mT, torch.empty_like(active)
        # The steps overwrite them, so they must not be views of other tensors.
        dh, dc = torch.zeros_like(grad_hidden[:, 0]), torch.zeros_like(grad_cells[:, 0])
        for t in reversed(range(active.shape[1])):
            step_back(
                grad_hidden[:, t], dh, grad_cells[:, t], dc, active[:, t], cells[:, t], cells[:, t + 1], dgates[:, t]
            )
            dh = ctx.product(dgates[:, t], back)
        # (s, m, n b) @ (s, n b, 4 m)
        dweight = ctx.product(hidden[:, :-1].flatten(1, 2).mT, dgates.flatten(1, 2))
        return dgates, dweight, dh, dc, None


def _cell(inputs: Tensor, recurrent: Tensor, before: Tensor, active: Tensor, after: Tensor, hidden: Tensor) -> None:
    """One step: the gates after their nonlinearities, the cells and the states into ``active, after, hidden``."""
    i, f, g, o = (inputs + recurrent).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    torch.cat([i, f, g, o], -1, out=active)
    after.copy_(f * before + i * g)
    hidden.copy_(o * after.tanh())


def _cell_back(
    grad_h: Tensor,
    dh: Tensor,
    grad_c: Tensor,
    dc: Tensor,
    active: Tensor,
    before: Tensor,
    after: Tensor,
    dgates: Tensor,
) -> None:
    """Gradients of the gates into ``dgates``, and of the earlier cell into ``dc``.

    The gradients of a step's outputs and those of the next step are added.
    """
    i, f, g, o = active.chunk(4, -1)
    h, squashed = grad_h + dh, after.tanh()
    c = grad_c + dc + h * o * (1 - squashed * squashed)
    di, df = c * g * i * (1 - i), c * before * f * (1 - f)
    dg, do = c * i * (1 - g * g), h * squashed * o * (1 - o)
    torch.cat([di, df, dg, do], -1, out=dgates)
    dc.copy_(c * f)


def _steps(like: Tensor) -> tuple[Callable[..., None], Callable[..., None]]:
    """The step and its gradient; on a GPU, in single precision, one kernel each."""
    if like.is_cuda and like.dtype == torch.float32:
        from papers.ktiw.models.lstm_kernels import cell_back_step, cell_step

        return cell_step, cell_back_step
    return _cell, _cell_back
