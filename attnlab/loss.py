"""The value of a loss term, shared by the training loop and by the rooms that define terms; a chunked divergence."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax

from attnlab.shapes import Float, Int
from attnlab.summaries import short_repr

__all__ = ["IGNORED", "Divergence", "Head", "Loss", "divergence", "largest_chunk"]

# The label of a position that is not predicted: padding, and in a masked LM every token left as it was.
IGNORED = -100

# Logits in memory at a time: float32 beside some copies in PyTorch, half of that and no copy in the kernel.
CHUNK, KERNEL_CHUNK = 1 << 25, 1 << 28


class Loss(NamedTuple):
    """A sum of losses and the number they are averaged over; the loop divides by the count over all ranks."""

    total: Tensor
    # A field of this name hides tuple.count, which no loss needs.
    count: Tensor | float  # type: ignore[assignment]

    def __repr__(self) -> str:
        return short_repr(self)


class Head(NamedTuple):
    """A layer over the vocabulary and its input: logits = states @ weight^T + bias."""

    states: Float[Tensor, "n m"]
    weight: Float[Tensor, "v m"]
    bias: Float[Tensor, " v"] | None = None

    def __repr__(self) -> str:
        return short_repr(self)


class Divergence(NamedTuple):
    """Sums over tokens: the loss that is minimised, and without gradients its parts and the teacher's own loss."""

    loss: Float[Tensor, ""]
    kl: Float[Tensor, ""]
    student: Float[Tensor, ""]
    teacher: Float[Tensor, ""]

    def __repr__(self) -> str:
        return short_repr(self)


def divergence(
    student: Head, teacher: Head, targets: Int[Tensor, " n"], *, hard: float = 0.0, chunk: int | None = None
) -> Divergence:
    """(1 - hard) KL(teacher || student) + hard * cross entropy of the targets, without all logits at once.

    Tokens are taken ``chunk`` at a time. The gradient of a chunk's logits, p - (1 - hard) p_teacher - hard * 1_target,
    is known as soon as the logits are, so that it goes straight into the gradients of states and weight, and nothing of
    the size of the vocabulary is kept. A target of ``IGNORED`` has no cross entropy.

    >>> same = Head(torch.eye(3), torch.eye(3))
    >>> divergence(same, same, torch.tensor([0, 1, IGNORED])).loss.item()
    0.0
    """
    rows = chunk or largest_chunk(student, teacher)
    inputs = (*student, *(None if t is None else t.detach() for t in teacher))
    return Divergence(*_Chunked.apply(*inputs, targets, hard, rows, torch.is_grad_enabled()))


def largest_chunk(student: Head, teacher: Head) -> int:
    """How many tokens at a time: the logits of a chunk have a fixed size, whatever the vocabulary."""
    most = KERNEL_CHUNK if _by_kernel(student.states, student.weight) else CHUNK
    return max(1, most // max(len(student.weight), len(teacher.weight)))


def _by_kernel(states: Tensor, weight: Tensor) -> bool:
    if not (states.is_cuda and _dtype(states) in (torch.bfloat16, torch.float16, torch.float32)):
        return False
    from attnlab.kernels import AVAILABLE

    return AVAILABLE


def _dtype(states: Tensor) -> torch.dtype:
    """What products are computed in: autocast's dtype where it is on."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _cast(tensors: Any, dtype: torch.dtype) -> list[Any]:
    return [None if t is None else t.to(dtype) for t in tensors]


class _Gradients(NamedTuple):
    """Of a head's states, weight and bias, the last two summed in float32; None where none is wanted."""

    states: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @staticmethod
    def of(head: Head, wanted: list[bool]) -> _Gradients:
        """Zeros, where they are wanted."""
        states, *others = (t if want else None for t, want in zip(head, wanted, strict=True))
        sums = [
            None if t is None else torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
            for t in others
        ]
        return _Gradients(None if states is None else torch.zeros_like(states), *sums)

    def add(self, part: slice, states: Tensor, weight: Tensor, d: Tensor) -> None:
        """Add those of a chunk, from the gradient ``d`` of its logits."""
        if self.states is not None:
            self.states[part] = d @ weight
        if self.weight is not None:
            self.weight.add_(d.mT @ states)
        if self.bias is not None:
            self.bias.add_(d.sum(0, dtype=self.bias.dtype))


class _Chunked(torch.autograd.Function):
    """Both gradients are made in the forward pass, for a loss of weight 1."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_states: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        targets: Tensor,
        hard: float,
        rows: int,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own, other = Head(states, weight, bias), Head(teacher_states, teacher_weight, teacher_bias)
        wanted = [with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        grads = _Gradients.of(own, wanted)
        dtype, sums = _dtype(states), torch.zeros(3, device=states.device, dtype=torch.float32)
        compare = _compare_by_kernel if _by_kernel(states, weight) else _compare
        with torch.autocast(states.device.type, enabled=False):
            own, other = (Head(head.states, *_cast(head[1:], dtype)) for head in (own, other))
            for at in range(0, len(states), rows):
                part = slice(at, at + rows)
                h = states[part].to(dtype)
                expected = linear(other.states[part].to(dtype), other.weight, other.bias)
                parts, d = compare(linear(h, own.weight, own.bias), expected, targets[part], hard, any(wanted))
                sums += parts
                grads.add(part, h, own.weight, d)
        ctx.save_for_backward(*grads)
        ctx.dtypes = [None if t is None else t.dtype for t in (states, weight, bias)]
        kl, student, teacher = sums.unbind()
        ctx.mark_non_differentiable(kl, student, teacher)
        return (1 - hard) * kl + hard * student, kl, student, teacher

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        made = [
            None if t is None else (t * grad).to(dtype) for t, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*made, *[None] * 7)


def _compare(
    logits: Float[Tensor, "c v"],
    expected: Float[Tensor, "c v"],
    targets: Int[Tensor, " c"],
    hard: float,
    gradient: bool,
) -> tuple[Float[Tensor, " 3"], Tensor]:
    """A chunk's sums (KL, cross entropy of student and of teacher), and the gradient of its logits if it is wanted."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    q, p = (log_softmax(t.to(wide), -1) for t in (logits, expected))
    labelled = targets != IGNORED
    at = targets.masked_fill(~labelled, 0).unsqueeze(-1)
    student, teacher = (-(t.gather(-1, at).squeeze(-1) * labelled).sum() for t in (q, p))
    shares = p.exp()
    # A token that the teacher never says is no difference; minus infinity times zero would be NaN.
    kl = (shares * (p - q)).masked_fill_(shares == 0, 0).sum()
    sums = torch.stack([kl, student, teacher]).float()
    if not gradient:
        return sums, logits
    d = q.exp_().mul_(1 - hard + hard * labelled.unsqueeze(-1)).sub_(shares, alpha=1 - hard)
    d.scatter_add_(-1, at, -hard * labelled.to(d.dtype).unsqueeze(-1))
    return sums, d.to(logits.dtype)


def _compare_by_kernel(
    logits: Tensor, expected: Tensor, targets: Tensor, hard: float, gradient: bool
) -> tuple[Tensor, Tensor]:
    """The same in one kernel; the gradient takes the place of the logits."""
    from attnlab.kernels.divergence import compare_rows

    return compare_rows(logits, expected, targets, hard=hard, gradient=gradient).sum(0), logits
