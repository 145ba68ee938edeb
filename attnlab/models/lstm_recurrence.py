"""The recurrence of stacked LSTMs: one matrix product and one pointwise kernel a step, for all members at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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
        cell, _ = _pointwise(gates.device.type)
        hidden, cells, active = [h], [c], []
        for inputs in gates.unbind(1):
            acted, c, h = cell(inputs, product(h, weight), c)
            active.append(acted)
            cells.append(c)
            hidden.append(h)
        all_hidden, all_cells, all_active = (torch.stack(t, 1) for t in (hidden, cells, active))
        ctx.product = product
        ctx.save_for_backward(weight, all_hidden, all_cells, all_active)
        return all_hidden[:, 1:], all_cells[:, 1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        grad_hidden, grad_cells = grads
        weight, hidden, cells, active = ctx.saved_tensors
        _, cell_back = _pointwise(weight.device.type)
        back = weight.mT
        dh, dc = torch.zeros_like(hidden[:, 0]), torch.zeros_like(cells[:, 0])
        found = []
        for t in reversed(range(active.shape[1])):
            dgates, dc = cell_back(
                grad_hidden[:, t], dh, grad_cells[:, t], dc, active[:, t], cells[:, t], cells[:, t + 1]
            )
            dh = ctx.product(dgates, back)
            found.append(dgates)
        dgates = torch.stack(found[::-1], 1)
        # (s, m, n b) @ (s, n b, 4 m)
        dweight = ctx.product(hidden[:, :-1].flatten(1, 2).mT, dgates.flatten(1, 2))
        return dgates, dweight, dh, dc, None


def _cell(inputs: Tensor, recurrent: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the four gates after their nonlinearities, c', h')."""
    i, f, g, o = (inputs + recurrent).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + i * g
    return torch.cat([i, f, g, o], -1), c, o * c.tanh()


def _cell_back(
    grad_h: Tensor, dh: Tensor, grad_c: Tensor, dc: Tensor, active: Tensor, before: Tensor, after: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the gates and of the earlier cell; what comes from the outputs and from the next step adds up."""
    i, f, g, o = active.chunk(4, -1)
    dh, squashed = grad_h + dh, after.tanh()
    dc = grad_c + dc + dh * o * (1 - squashed * squashed)
    di, df = dc * g * i * (1 - i), dc * before * f * (1 - f)
    dg, do = dc * i * (1 - g * g), dh * squashed * o * (1 - o)
    return torch.cat([di, df, dg, do], -1), dc * f


@cache
def _pointwise(device: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The cell and its gradient; on a GPU each compiled into one kernel."""
    if device != "cuda":
        return _cell, _cell_back
    return torch.compile(_cell, dynamic=False), torch.compile(_cell_back, dynamic=False)
