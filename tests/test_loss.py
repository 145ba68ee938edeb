"""The chunked divergence against the plain one: values, gradients, and how much of it is in memory at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax
from torch.utils._python_dispatch import TorchDispatchMode

from attnlab.loss import CHUNK, IGNORED, Divergence, Head, divergence, largest_chunk

N, M, V = 23, 7, 31


@pytest.fixture
def heads() -> tuple[Head, Head, Tensor]:
    torch.manual_seed(0)
    student = Head(*(torch.randn(*s, requires_grad=True) for s in ((N, M), (V, M), (V,))))
    teacher = Head(torch.randn(N, M), torch.randn(V, M))
    targets = torch.randint(0, V, (N,)).masked_fill(torch.arange(N) % 5 == 0, IGNORED)
    return student, teacher, targets


def plain(student: Head, teacher: Head, targets: Tensor, hard: float) -> Divergence:
    assert student.bias is not None
    s, t = student.states @ student.weight.mT + student.bias, teacher.states @ teacher.weight.mT
    p, q = log_softmax(t, -1), log_softmax(s, -1)
    kl = (p.exp() * (p - q)).sum()
    own, other = (cross_entropy(x, targets, ignore_index=IGNORED, reduction="sum") for x in (s, t))
    return Divergence((1 - hard) * kl + hard * own, kl, own, other)


def gradients(loss: Tensor, head: Head) -> list[Tensor]:
    # Divided as the training loop does it.
    return list(torch.autograd.grad(loss / N, [t for t in head if t is not None and t.requires_grad]))


@pytest.mark.parametrize("hard", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [1, 5, N, 100])
def test_chunks_give_the_plain_divergence_and_its_gradients(heads: Any, hard: float, chunk: int) -> None:
    student, *_ = heads
    expected, actual = plain(*heads, hard), divergence(*heads, hard=hard, chunk=chunk)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert [t.requires_grad for t in actual] == [True, False, False, False]
    for a, b in zip(gradients(actual.loss, student), gradients(expected.loss, student), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_is_frozen_gets_no_gradient(heads: Any) -> None:
    student, teacher, targets = heads
    frozen = Head(student.states, student.weight.detach(), None)
    loss = divergence(frozen, teacher, targets).loss
    assert [t.shape for t in gradients(loss, frozen)] == [(N, M)]
    with torch.no_grad():
        assert not divergence(student, teacher, targets).loss.requires_grad


def test_a_token_that_the_teacher_never_says_is_no_difference(heads: Any) -> None:
    student, teacher, targets = heads
    never = torch.zeros(V)
    never[3] = -torch.inf
    targets = targets.masked_fill(targets == 3, 4)
    result = divergence(student, Head(teacher.states, teacher.weight, never), targets)
    assert torch.isfinite(torch.stack([*result])).all()
    assert all(torch.isfinite(g).all() for g in gradients(result.loss, student))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        made = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor)]
        self.elements = max([self.elements, *(t.numel() for t in made)])
        return out


def test_all_logits_are_never_in_memory(heads: Any) -> None:
    student, teacher, targets = heads
    with Largest() as seen:
        divergence(student, teacher, targets, hard=0.5, chunk=4).loss.backward()
    assert seen.elements == max(4 * V, N * M, V * M) < N * V
    with Largest() as seen:
        plain(student, teacher, targets, 0.5).loss.backward()
    assert seen.elements == N * V


def test_a_chunk_is_as_large_as_the_vocabulary_allows(heads: Any) -> None:
    assert largest_chunk(*heads[:2]) == CHUNK // V
    huge = Head(torch.empty(1, 1, device="meta"), torch.empty(CHUNK + 1, 1, device="meta"))
    assert largest_chunk(huge, huge) == 1


def test_under_autocast_products_are_of_half_precision_and_gradients_are_not(heads: Any) -> None:
    student, teacher, targets = heads
    with torch.autocast("cpu", torch.bfloat16):
        loss = divergence(student, teacher, targets).loss
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain(*heads, 0.0).loss, rtol=0.02, atol=0.1)
    assert loss != plain(*heads, 0.0).loss
    for a, b in zip(gradients(loss, student), gradients(plain(*heads, 0.0).loss, student), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)
