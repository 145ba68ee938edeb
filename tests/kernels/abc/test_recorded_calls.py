"""Calls that are repeated: what kernels get is what they would get the usual way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from attnlab.kernels.abc import abc_attention
from attnlab.kernels.abc import launch as _abc_launch
from attnlab.kernels.abc import launcher as _launcher
from attnlab.kernels.abc import recipes as _recipes

NAMES = ("weigh_logits", "write_states", "read_states", "query_gradients", "sum_back", "key_gradients")


class Kernels:
    """Kernels that only keep what they are given: tensors the usual way, addresses when compiled."""

    def __init__(self) -> None:
        self.ways: list[str] = []
        self.given: list[tuple[str, list[int], tuple[Any, ...]]] = []

    def kernel(self, name: str, arg_names: tuple[str, ...]) -> Any:
        kernels = self

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                def call(*args: Any, **options: Any) -> Any:
                    tensors = sum(a is None or isinstance(a, Tensor) for a in args)
                    addresses = [0 if a is None or a.numel() == 0 else a.data_ptr() for a in args[:tensors]]
                    constants = [options[name] for name in arg_names[len(args) :]]
                    kernels.ways.append("whole")
                    kernels.given.append((name, addresses, (*grid, *args[tensors:], *constants)))

                    def run(*again: Any) -> None:
                        # grid, stream, function, metadata and three hooks come first
                        kernels.ways.append("known")
                        numbers = (*again[:3], *again[9 + tensors :])
                        kernels.given.append((name, list(again[9 : 9 + tensors]), numbers))

                    return SimpleNamespace(run=run, function="f", packed_metadata="m")

                return call

        made: Any = Kernel()
        made.__name__, made.arg_names = name, arg_names
        return made


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    fakes = Kernels()
    for name in NAMES:
        monkeypatch.setattr(_abc_launch, name, fakes.kernel(name, getattr(_abc_launch, name).arg_names))
    monkeypatch.setattr(_launcher, "INTERPRETED", False)
    monkeypatch.setattr(_launcher, "_KNOWN", {})
    monkeypatch.setattr(_recipes, "_RECIPES", {})
    # A CPU has no index.
    active = SimpleNamespace(get_current_device=lambda: None, get_current_stream=lambda _device: 99)
    monkeypatch.setattr(_launcher, "driver", SimpleNamespace(active=active))
    return fakes


def made(length: int = 128) -> list[Tensor]:
    # As a projection leaves them: heads beside one another.
    shapes = ((4, 32), (2, 32), (2, 32), (2, 16))
    return [torch.zeros(1, length, h, w).transpose(1, 2).requires_grad_() for h, w in shapes]


def both(tensors: list[Tensor], **how: Any) -> tuple[Tensor, ...]:
    out, _ = abc_attention(*tensors, **how)
    return out, *torch.autograd.grad(out, tensors, torch.zeros_like(out))


def test_the_second_call_gives_every_kernel_its_tensors_addresses(kernels: Kernels) -> None:
    """All addresses lie where they lay in the usual call, seen from the tensor or buffer that they belong to."""
    first = made()
    both(first)
    usual, kernels.given[:], kernels.ways[:] = list(kernels.given), [], []
    second = made()
    results = both(second)
    assert set(kernels.ways) == {"known"}
    assert [name for name, _, _ in kernels.given] == [name for name, _, _ in usual]
    assert [numbers for _, _, numbers in kernels.given] == [numbers for _, _, numbers in usual]
    at = {name: addresses for name, addresses, _ in kernels.given}
    q, k, v, s = (t.data_ptr() for t in second)
    out, dq, dk, dv, ds = (t.data_ptr() for t in results)
    assert at["read_states"][:4] == [q, k, v, s]
    assert at["read_states"][12] == out
    assert at["query_gradients"][:4] == [q, k, v, s]
    assert at["query_gradients"][12] == dq
    assert at["key_gradients"][14:17] == [dk, dv, ds]
    # What one kernel writes the next ones read: states and their rest, z before and after each chunk.
    assert at["write_states"][6:11] == at["read_states"][5:10] == at["query_gradients"][6:11]
    assert at["key_gradients"][10:12] == at["query_gradients"][14:16]
    # None where there was none, and no two different tensors at one place.
    for (_, again, _), (_, before, _) in zip(kernels.given, usual, strict=True):
        assert [a == 0 for a in again] == [a == 0 for a in before]
        assert len({a for a in again if a}) == len({a for a in before if a})


def test_outputs_lie_in_memory_as_they_did(kernels: Kernels) -> None:
    strides = [[t.stride() for t in both(made())] for _ in range(2)]
    assert strides[0] == strides[1]
    assert strides[0][0] == (4 * 32 * 128, 32, 4 * 32, 1)


@pytest.mark.parametrize("change", ["length", "scale", "stride", "gradients", "hidden"])
def test_another_kind_of_call_takes_the_usual_way(kernels: Kernels, change: str) -> None:
    both(made())
    kernels.ways.clear()
    tensors = made(192 if change == "length" else 128)
    if change == "stride":
        tensors[1] = torch.zeros(1, 2, 128, 32, requires_grad=True)
    if change == "gradients":
        with torch.no_grad():
            abc_attention(*tensors)
    elif change == "hidden":
        abc_attention(*tensors, key_visible=torch.ones(1, 128, dtype=torch.bool))
    else:
        abc_attention(*tensors, scale=0.5 if change == "scale" else None)
    assert "whole" in kernels.ways


def test_one_tensor_in_two_places_is_not_remembered(kernels: Kernels) -> None:
    q, k, _, s = made()
    abc_attention(q, k, k, s)
    abc_attention(q, k, torch.zeros_like(k), s)
    reads = [addresses for name, addresses, _ in kernels.given if name == "read_states"]
    assert reads[0][1] == reads[0][2]
    assert reads[-1][1] != reads[-1][2]


def test_addresses_that_are_no_multiples_of_16_take_the_usual_way(kernels: Kernels) -> None:
    both(made())
    kernels.ways.clear()
    odd = [torch.zeros(t.numel() + 1)[1:].view(t.transpose(1, 2).shape).transpose(1, 2) for t in made()]
    abc_attention(*(t.requires_grad_() for t in odd))
    assert set(kernels.ways) == {"whole"}


def test_only_so_many_are_remembered(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recipes, "MOST", 2)
    for length in (32, 64, 96, 128):
        with torch.no_grad():
            abc_attention(*made(length))
        assert 0 < len(_recipes._RECIPES) <= 2
